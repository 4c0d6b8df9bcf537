"""Each cause of lost time is found with its exact gain on a timeline that has only this
cause.
"""

from dataclasses import replace

import pytest
from support import dataset_or_skip, lanes, local_or_skip, make_timeline, with_columns

import madmax_lib as mm
from madmax_lib import Timeline, breakdown
from madmax_lib.timeline.timeline import Meta
from madmax_lib.traces import advise, align, by_group
from madmax_lib.traces.advise import COLUMNS

NS = 1e-9
ALL_REDUCE, KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm"


def gains(timeline: Timeline) -> dict[str, float]:
    """{cause: ns} of the causes found."""
    table = advise(timeline)
    assert list(table) == COLUMNS and table["gain_s"].is_monotonic_decreasing
    assert (table["evidence"] != "").all() and (table["remedy"] != "").all()
    return {row.cause: round(row.gain_s / NS, 6) for row in table.itertuples()}


def launched(*kernels: tuple[int, int, int, int]) -> list[tuple]:
    """Rows of (launch start, launch duration, kernel start, kernel duration)."""
    rows = []
    for number, (call, call_dur, start, dur) in enumerate(kernels):
        rows.append((0, -1, "cpu", "cudaLaunchKernel", call, call_dur, number))
        rows.append((0, 7, "compute", KERNEL, start, dur, number))
    return rows


BUSY = (0, 7, "compute", KERNEL, 0, 1000)
CAUSES = {
    "nothing at all": ([], {}),
    "pure compute": ([BUSY], {}),
    "what no compute hides, overlapping calls once":
        ([BUSY, (0, 20, "comm", ALL_REDUCE, 600, 1000), (0, 21, "comm", ALL_REDUCE, 800, 800)],
         {"exposed communication": 600}),
    "copies alone": ([BUSY, (0, 9, "memcpy", "Memcpy HtoD (Pageable -> Device)", 900, 400)], {"exposed copies": 300}),
    # idle 1020 to 1700, 200 of it in the launch
    "a late host and a slow launch":
        (launched((0, 10, 20, 1000), (1500, 100, 1700, 1000)), {"host wait": 480, "launch-bound": 200}),
    "a start far beyond the usual 10 after its launch":
        (launched((0, 10, 10, 20), (35, 10, 1_000_000, 100)), {"late start": 1_000_000 - 45}),
    "kernels launched in time": (launched((0, 10, 20, 1000), (10, 10, 1030, 1000)), {"short gaps": 10}),
    "no matter of the host": (launched((0, 10, 20, 1000), (10, 10, 200_000, 1000)), {"other idle": 200_000 - 1020}),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_gain_of_each_cause(case):
    rows, expected = CAUSES[case]
    assert gains(make_timeline(rows)) == expected


def test_small_messages_gain_up_to_the_rate_of_the_best():
    rows = [
        (0, 20, "comm", "ncclDevKernel_Broadcast", *times)
        for times in ((0, 1000), (1000, 500), (1500, 500))
    ]
    timeline = with_columns(
        make_timeline(rows), size_bytes=[1000.0, 100.0, 100.0], group="g"
    )
    # 500 ns each would take 100
    assert gains(timeline) == {"exposed communication": 2000, "small messages": 800}


def test_the_waiting_of_a_single_rank_is_bounded_by_size_and_link():
    """A gather of 128 bytes takes 400 us beside 100 us of compute: 30 us a transfer at
    most, 270 waiting.
    """
    rows = lanes(
        "20 comm: ncclDevKernel_AllGather_RING_LL 0+400000\n7 compute: gemm "
        "0+100000, gemm 400000+600000"
    )
    told = {"size_bytes": [128.0, None, None], "group": ["0 [0, 1]", None, None]}
    timeline = with_columns(
        make_timeline(rows, device="NVIDIA B200", world_size=2), **told
    )
    found = gains(timeline)
    assert found["waiting for peers"] == pytest.approx(270_000, abs=1)
    assert found["exposed communication"] == pytest.approx(30_000, abs=1)
    (group,) = by_group(timeline).itertuples()
    assert group.transfer_s == pytest.approx(
        30e-6, rel=1e-4
    ) and group.total_s == pytest.approx(400e-6)
    assert (group.wait_s, group.exposed_wait_s) == pytest.approx(
        (370e-6, 270e-6), rel=1e-4
    )
    for other in (
        with_columns(timeline, size_bytes=[1e9, None, None]),
        replace(timeline, meta=Meta(world_size=2)),
    ):
        # large enough, and on a device that nobody knows
        assert gains(other)["exposed communication"] == 300_000


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
def test_a_real_wait_of_microseconds_is_no_transfer():
    """Ten gathers of 128 bytes take 212 to 486 us in it."""
    table = advise(
        mm.read_trace(local_or_skip("traces/more/ao/syncless_ep_moe_fwd.json.gz"))
    ).set_index("cause")
    assert table.loc["waiting for peers", ["where", "gain_s"]].tolist() == [
        "all-gather · 0",
        pytest.approx(3.6e-3, rel=0.01),
    ]


@pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo")
def test_one_late_kernel_of_a_real_trace_is_named():
    timeline = mm.read_trace(
        local_or_skip("traces/more/tracelens/sglang_prefilldecode.json.gz")
    )
    table = advise(timeline).set_index("cause")
    assert table.index[0] == "late start" and table.loc[
        "late start", "gain_s"
    ] == pytest.approx(0.493, abs=0.002)
    assert table["share"].get("launch-bound", 0) < 0.01


@pytest.mark.parametrize("calls", [1, 8])
def test_waiting_is_the_late_ranks_and_not_the_collectives(calls):
    """Rank 1 is 500 ns late, of one of two ranks; in one call it may be by chance."""
    rows = ""
    for at in range(0, 2000 * calls, 2000):
        rows += f"7 compute: {KERNEL} {at}+1000\n1/7 compute: {KERNEL} {at}+1500\n"
        rows += f"20 comm: {ALL_REDUCE} {at + 1000}+900\n"
        rows += f"1/20 comm: {ALL_REDUCE} {at + 1500}+400\n"
    table = advise(make_timeline(lanes(rows))).set_index("cause")
    assert ("straggler rank" in table.index) == (calls > 1)
    assert table.loc["exposed communication", "gain_s"] == pytest.approx(
        400 * NS * calls
    )
    assert "38% waiting" in table.loc["exposed communication", "evidence"]
    if calls > 1:
        late = table.loc["straggler rank"]
        assert late["gain_s"] == pytest.approx(250 * NS * calls)
        assert late["where"] == "rank 1"


def test_gains_are_per_step_and_mean_over_the_ranks():
    timeline = make_timeline(
        [
            BUSY,
            (0, 9, "memcpy", "Memcpy HtoD", 1000, 400),
            (1, 7, "compute", KERNEL, 0, 1400),
        ]
    )
    assert gains(timeline) == {"exposed copies": 200}
    assert gains(with_columns(timeline, step=[0, 1, 1])) == {"exposed copies": 100}


def test_warm_up_does_not_count():
    """A first step with 5000 ns of late host is left out; then gains are those of the
    three others alone.
    """
    rows, steps = [], []
    for step, (start, late) in enumerate(
        ((0, 6000), (10_000, 1300), (12_000, 1300), (14_000, 1300))
    ):
        for launch in (start, start + late):
            rows += launched((launch, 10, launch + 20, 900))
        steps += [step] * 4
    timeline = with_columns(
        make_timeline(rows), step=steps, correlation=[n // 2 for n in range(len(rows))]
    )
    table = advise(timeline)
    assert table.attrs["steps"] == [1, 2, 3] and table.equals(
        advise(timeline.select(steps=[1, 2, 3]))
    )
    assert gains(timeline)["host wait"] == 380  # of the device, from 920 to 1300
    assert advise(timeline.select(steps=[0])).attrs["steps"] == [0]


def test_work_between_steps_is_not_idle():
    """Of the last step before, of none, and of the next: 400 ns without a gap; what
    lies before all is left out.
    """
    rows = [(0, 7, "compute", KERNEL, start, 100) for start in (-500, 0, 100, 200, 300)]
    assert gains(with_columns(make_timeline(rows), step=[-1, 1, -1, -1, 2])) == {}


def test_a_simulated_pipeline_has_a_bubble():
    plan = mm.Plan(pp=4, dp=2, tp=1, micro_batch=1)
    step = mm.simulate(
        mm.model("gpt2-large"), mm.cluster("dgx-a100", nodes=1), plan, global_batch=8
    )
    table = advise(step).set_index("cause")
    assert table.loc["pipeline bubble", "gain_s"] == pytest.approx(
        breakdown(step)["idle_s"].mean()
    )
    assert table.attrs["source"] == "simulated"


def test_the_straggler_of_a_real_step_is_found():
    timeline = mm.read_trace(dataset_or_skip("dlrm-8xv100"))
    for measured in (timeline, align(timeline)):
        table = advise(measured)
        late = table[table["cause"] == "straggler rank"]
        assert late["where"].iloc[0] == "rank 7" and late["share"].iloc[
            0
        ] == pytest.approx(0.275, abs=0.02)
        assert (table["share"] <= 1).all() and table["cause"].iloc[0] == "host wait"
