"""Launches, queues, idle causes and launch-bound time: closed forms, conservation laws,
and HTA's numbers.
"""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from support import dataset_or_skip, local_or_skip, make_timeline, with_tables

import madmax_lib as mm
from madmax_lib import Timeline, breakdown, read_trace
from madmax_lib.timeline.accounting import rank_breakdown
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import concat
from madmax_lib.traces import (
    hta,
    idle,
    launch_bound,
    launch_floor,
    launches,
    queue_length,
    queue_series,
    short_kernels,
)
from madmax_lib.traces.read.kineto import TraceWarning
from madmax_lib.traces.waits.idle import _CAUSES

US = 1000
ANALYSES = [launches, short_kernels, queue_series, queue_length, launch_bound, idle]


def timeline_of(rows: list[tuple], graphs: dict[int, int] | None = None) -> Timeline:
    """Timeline of (stream, kind, name, start_us, dur_us, correlation, step) rows of
    rank 0; graphs: {row: graph}.
    """
    rows = [(0, *row[:3], row[3] * US, row[4] * US, *row[5:]) for row in rows]
    return with_tables(make_timeline(rows), graphs=list((graphs or {}).items()))


def call(
    start: int,
    dur: int,
    correlation: int,
    step: int = 0,
    name: str = "cudaLaunchKernel",
) -> tuple:
    return (-1, "cpu", name, start, dur, correlation, step)


def kernel(
    start: int,
    dur: int,
    correlation: int,
    step: int = 0,
    stream: int = 7,
    name: str = "gemm",
) -> tuple:
    return (stream, "compute", name, start, dur, correlation, step)


# launched at 0, 8, 40 and 100 us; the device runs 5-25, 25-35, 50-60 and 90-95
# (unlaunched), 104-120
FOUR = [call(0, 4, 1), call(8, 4, 2), call(40, 6, 3), call(100, 3, 4, 1), (-1, "cpu", "cudaEventQuery", 1, 1, 99, 0),
        kernel(5, 20, 1), kernel(25, 10, 2), kernel(50, 10, 3), kernel(90, 5, -1), kernel(104, 16, 4, 1)]  # fmt: skip


def us(values) -> list[float]:
    return [round(value * 1e6, 6) for value in values]


def test_a_launch_finds_its_kernel_by_correlation():
    table = launches(timeline_of(FOUR))
    assert table["correlation"].tolist() == [1, 2, 3, 4] and table["step"].tolist() == [
        0,
        0,
        0,
        1,
    ]
    assert us(table["cpu_s"]) == [4, 4, 6, 3] and us(table["gpu_s"]) == [20, 10, 10, 16]
    assert us(table["delay_s"]) == [1, 13, 4, 1] and us(table["since_launch_s"]) == [
        5,
        17,
        10,
        4,
    ]
    assert set(table["launch"]) == {"cudaLaunchKernel"} and table["row"].tolist() == [
        5,
        6,
        7,
        9,
    ]
    assert (
        table["launch_row"].tolist() == [0, 1, 2, 3]
        and set(table["graph"]) == {-1}
        and set(table["kernels"]) == {1}
    )
    # its kernel starts during the launch
    early = launches(timeline_of([call(0, 10, 1), kernel(4, 2, 1)]))
    assert us(early["delay_s"]) == [0] and us(early["since_launch_s"]) == [4]


def test_ranks_do_not_share_correlations():
    one = timeline_of(FOUR)
    later = Timeline(one.spans.assign(rank=3, start_ns=one.spans["start_ns"] + 7))
    table = launches(concat([one, later]))
    assert len(table) == 8
    columns = ["correlation", "cpu_s", "gpu_s", "delay_s"]
    first, second = (part[columns].to_numpy() for _, part in table.groupby("rank"))
    np.testing.assert_allclose(first, second)


GRAPH = [
    call(0, 10, 1, name="cudaGraphLaunch"),
    call(20, 2, 2, name="cudaGraphLaunch"),
    call(24, 2, 3),
]
GRAPH += [
    kernel(12, 3, 1),
    kernel(15, 4, 1),
    kernel(15, 5, 1, stream=8),
    kernel(40, 1, 2),
    kernel(41, 1, 3),
]


def test_a_graph_is_launched_once():
    table = launches(timeline_of(GRAPH, graphs={3: 11, 4: 11, 5: 11, 6: 12}))
    assert table["kernels"].tolist() == [3, 1, 1] and table["graph"].tolist() == [
        11,
        12,
        -1,
    ]
    assert us(table["delay_s"]) == [2, 18, 15] and us(table["gpu_s"]) == [12, 1, 1]
    queue = queue_length(timeline_of(GRAPH))
    assert (
        queue["stream"].tolist() == [7]
        and queue["count"].tolist() == [6]
        and queue["max"].tolist() == [2]
    )
    assert queue["min"].tolist() == [0]


def test_graph_ids_are_read_only_for_graphs():
    def fail():
        raise AssertionError("side tables were read")

    timeline = timeline_of(FOUR)
    assert (
        len(
            launches(
                Timeline(timeline.spans, timeline.meta, side_tables=SideTables(fail))
            )
        )
        == 4
    )
    with pytest.raises(AssertionError, match="were read"):
        launches(Timeline(timeline_of(GRAPH).spans, side_tables=SideTables(fail)))


def test_a_correlation_used_twice_on_the_host_belongs_to_the_first_call():
    table = launches(
        timeline_of([call(6, 1, 1, name="later"), call(0, 2, 1), kernel(8, 2, 1)])
    )
    assert table["launch"].tolist() == ["cudaLaunchKernel"] and us(
        table["delay_s"]
    ) == [6]


def test_short_kernels_by_name():
    rows = [call(0, 5, 1), call(10, 5, 2), call(20, 5, 3)]
    rows += [kernel(6, 2, 1), kernel(16, 9, 2), kernel(30, 5, 3, name="equal")]
    table = short_kernels(timeline_of(rows)).set_index("name")
    assert table.loc["gemm", ["count", "short", "share"]].tolist() == [2, 1, 0.5]
    assert us(table.loc["gemm", ["cpu_s", "gpu_s"]]) == [5, 2]
    assert table.loc["equal", "short"] == 0


def test_queue_counts_launches_until_their_kernel_starts():
    """Lengths 1 2 1 0 1 0 1 0 at 0 8 ... : the second launch comes while the first
    kernel runs.
    """
    timeline = timeline_of(FOUR)
    series = queue_series(timeline)
    assert (
        us(series["time_s"]) == [0, 5, 8, 25, 40, 50, 100, 104]
        and series["length"].tolist() == [1, 0] * 4
    )
    ahead = [call(i, 1, i) for i in range(4)] + [
        kernel(10 + 10 * i, 10, i) for i in range(4)
    ]
    table = queue_length(timeline_of(ahead), capacity=3)
    values = [1, 2, 3, 4, 3, 2, 1, 0]
    expected = [
        8,
        np.mean(values),
        np.std(values, ddof=1),
        0,
        *np.quantile(values, [0.25, 0.5, 0.75]),
        4,
    ]
    assert table.iloc[0, 2:10].tolist() == pytest.approx(expected)
    assert us(table["full_s"]) == [18] and table[
        "full_share"
    ].tolist() == pytest.approx([18 / 40])  # 2 to 20 us


def test_ties_never_make_a_queue_negative():
    series = queue_series(
        timeline_of([kernel(3, 1, 1), call(3, 0, 1), kernel(2, 1, 2), call(5, 0, 2)])
    )
    assert series["length"].min() == 0 and series["length"].iloc[-1] == 0


@pytest.mark.parametrize(("capacity", "blocked_us"), [(5, [29]), (6, [0])])
def test_blocked_is_what_launches_into_a_full_queue_take_longer(capacity, blocked_us):
    rows = [call(2 * i, 1, i) for i in range(4)] + [call(8, 30, 4), call(40, 1, 5)]
    timeline = timeline_of(rows + [kernel(50 + i, 1, i) for i in range(6)])
    assert us(queue_length(timeline, capacity=capacity)["blocked_s"]) == blocked_us
    with pytest.raises(ValueError, match="capacity=0"):
        queue_length(timeline, capacity=0)


def test_idle_by_cause():
    """Gaps of stream 7: 15 us (launched 5 after the end), 30 us (no launch), 9 us
    (launched 5 after the end).
    """
    table = idle(timeline_of(FOUR)).set_index("cause")
    assert us(table["idle_s"]) == [24, 0, 30] and table["count"].tolist() == [2, 0, 1]
    assert table["share"].tolist() == pytest.approx([24 / 54, 0, 30 / 54])
    longer = idle(timeline_of(FOUR), consecutive_kernel_delay_s=31e-6).set_index(
        "cause"
    )
    assert us(longer["idle_s"]) == [24, 30, 0]
    with pytest.raises(ValueError, match="negative"):
        idle(timeline_of(FOUR), -1.0)


IDLE = {
    "launched as the work before ends": (
        [call(0, 1, 1), kernel(5, 5, 1), call(10, 1, 2), kernel(12, 5, 2)],
        2,
    ),
    "overlap on a stream": (
        [kernel(0, 50, -1), kernel(10, 5, -1), kernel(60, 5, -1), kernel(60, 0, -1)],
        10,
    ),
    "one kernel": ([kernel(0, 5, -1)], 0),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_between_kernels_is_no_host_wait(case):
    rows, between_us = IDLE[case]
    table = idle(timeline_of(rows))
    assert us(table["idle_s"]) == [0, between_us, 0] and table[
        "share"
    ].isna().all() == (between_us == 0)


BOUND = {  # rows, steps, total, idle, launch-bound and launching us of each
    # gaps 35-50 (launched at 40), 60-90 (no launch), 95-104 (launched at 100): of them
    # 40-50 and 100-104 are launching;
    # step 1 begins on the device at 95, where the work before it ended
    "two steps": (FOUR, [0, 1], [90, 25], [45, 9], [15, 9], [10, 4]),
    "another stream is busy": (
        [*FOUR, kernel(30, 30, -1, stream=9)],
        [0, 1],
        [90, 25],
        [30, 9],
        [0, 9],
        [0, 4],
    ),
    # the gap 10-50 ends with the launch at 40; a call 15-25 in it launches another
    # kernel, that runs later
    "calls inside of the gap": (
        [
            call(0, 2, 3),
            kernel(2, 8, 3),
            call(15, 10, 2),
            call(40, 5, 1),
            kernel(50, 5, 1),
            kernel(55, 5, 2),
        ],
        *([0], [58], [40], [40], [20]),
    ),
    "work before the first step": (
        [kernel(0, 10, -1, -1), call(12, 2, 1, 4), kernel(20, 10, 1, 4)],
        *([-1, 4], [10, 20], [0, 10], [0, 10], [0, 8]),
    ),
}


@pytest.mark.parametrize("case", BOUND)
def test_launch_bound_closed_form(case):
    rows, steps, *expected = BOUND[case]
    table = launch_bound(timeline_of(rows))
    times = [
        us(table[name])
        for name in ("total_s", "idle_s", "launch_bound_s", "launching_s")
    ]
    assert table["step"].tolist() == steps and times == expected
    assert table["share"].to_numpy() == pytest.approx(np.divide(times[2], times[0]))


def random_timeline(seed: int) -> Timeline:
    random = np.random.default_rng(seed)
    count = 60
    starts = np.sort(random.integers(0, 3000, count))
    rows = []
    for i, start in enumerate(starts):
        delay, stream = int(random.integers(0, 40)), int(random.choice([0, 7]))
        rows.append(call(int(start), int(random.integers(1, 20)), i, i // 20))
        rows.append(
            kernel(int(start) + delay, int(random.integers(0, 60)), i, i // 20, stream)
        )
    return timeline_of(rows)


@pytest.mark.parametrize("seed", range(5))
def test_parts_sum_to_the_whole(seed):
    timeline = random_timeline(seed)
    table, whole = launch_bound(timeline), breakdown(timeline)
    assert table[["total_s", "idle_s"]].sum().tolist() == pytest.approx(
        whole.loc[0, ["total_s", "idle_s"]].tolist()
    )
    assert (table["launching_s"] <= table["launch_bound_s"] + 1e-12).all()
    assert (table["launch_bound_s"] <= table["idle_s"] + 1e-12).all() and table[
        "launch_bound_s"
    ].sum() > 0
    for stream, part in idle(timeline).groupby("stream"):
        alone = breakdown(
            timeline.where((timeline.spans["stream"] == stream).to_numpy())
        )
        assert part["idle_s"].sum() == pytest.approx(alone.loc[0, "idle_s"])
        assert part["share"].sum() == pytest.approx(1)
    assert len(launches(timeline)) == 60
    ends = queue_series(timeline).groupby("stream")["length"].agg(["min", "last"])
    assert (ends == 0).all(axis=None)


def test_launch_floor_closed_form():
    timeline = timeline_of(
        [kernel(0, 10, -1), kernel(20, 40, -1), kernel(100, 50, -1, 1)]
    )
    table = launch_floor(timeline, 5e-6, [1, 4, 1000])
    assert us(table["free_s"]) == [50, 12.5, 0.05] and us(table["step_s"]) == [
        50,
        13.75,
        7.5,
    ]
    assert table["share"].tolist() == pytest.approx(
        [0, 1 - 12.5 / 13.75, 1 - 0.05 / 7.5]
    )
    assert launch_floor(timeline, 0.0, [2.0])["share"].tolist() == [0]
    for bad in ((-1, [1.0]), (5e-6, [0.0]), (5e-6, [float("nan")])):
        with pytest.raises(ValueError, match="speedups"):
            launch_floor(timeline, *bad)


@pytest.mark.parametrize("rows", [[], [call(0, 5, 1), call(9, 5, -1)], "vit-ddp"])
@pytest.mark.parametrize("analysis", ANALYSES)
def test_without_device_work_tables_are_empty_with_their_columns(analysis, rows):
    table = analysis(
        read_trace(dataset_or_skip(rows))
        if isinstance(rows, str)
        else timeline_of(rows)
    )
    assert not len(table) and set(table) == set(analysis(timeline_of(FOUR)))
    assert table.attrs["source"] == "measured"


def test_a_simulated_step_has_idle_time_but_no_launches():
    plan = mm.Plan(dp=4, tp=1, pp=2, micro_batch=1)
    step = mm.simulate(
        mm.model("gpt2-large"), mm.cluster("dgx-a100", nodes=1), plan, global_batch=8
    )
    assert not len(launches(step)) and not len(queue_length(step))
    causes = idle(step)
    assert (
        causes.attrs["source"] == "simulated"
        and causes.loc[causes["cause"] == "host_wait", "idle_s"].sum() == 0
    )
    bound = launch_bound(step).groupby("rank")[["idle_s", "launch_bound_s"]].sum()
    assert bound["launch_bound_s"].sum() == 0
    np.testing.assert_allclose(
        bound["idle_s"], rank_breakdown(step).set_index("rank")["idle_s"], atol=1e-9
    )


# --- beside HTA 0.5.0

SAMPLES = "traces/hta-samples/"
NAMES = {
    "a100": SAMPLES + "nccl_data.json.gz",
    "v100": SAMPLES + "df_index_resolver.json.gz",
    "v100_ns": SAMPLES + "rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "graphs": SAMPLES + "rank0.json.gz",
    "syncs": SAMPLES + "cuda_event_sync_multi_stream.json.gz",
    "mi250": SAMPLES + "mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "mi300x": "traces/tracelens-samples/resnet_act_checkpoint.json.gz",
    "deepseek": "traces/deepseek-v3-train/train.json.gz",
}
RIGHT = ["a100", "v100", "v100_ns", "syncs", "deepseek"]  # HTA knows their launch calls


@cache
def both(name: str):
    """HTA's analysis and our compatible timeline."""
    path = local_or_skip(NAMES[name])
    return hta.analysis(path), read_trace(path, hta_compatible=True)


def launches_of_hta(analysis) -> pd.DataFrame:
    per_rank = analysis.get_cuda_kernel_launch_stats(
        ranks=sorted(analysis.t.traces), visualize=False
    )
    return pd.concat(
        [table.assign(rank=rank) for rank, table in per_rank.items()], ignore_index=True
    )


def queue_of_hta(analysis) -> pd.DataFrame:
    return (
        analysis.get_queue_length_summary(ranks=sorted(analysis.t.traces))
        .droplevel(0, axis="columns")
        .reset_index()
    )


@pytest.mark.parametrize("name", RIGHT)
def test_launches_equal_htas(name):
    analysis, timeline = both(name)
    theirs, ours = launches_of_hta(analysis), launches(timeline)
    known = [
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
    ]
    ours = ours[ours["launch"].isin(known)]
    assert len(ours) == len(theirs) > 5
    table = ours.merge(theirs, on=["rank", "correlation"])
    assert len(table) == len(theirs)
    for column, name in {
        "cpu_s": "cpu_duration",
        "gpu_s": "gpu_duration",
        "delay_s": "launch_delay",
    }.items():
        np.testing.assert_allclose(table[column], table[name] * 1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*taken as rank 0:UserWarning")
@pytest.mark.parametrize("name", [*RIGHT, "mi250", "mi300x"])
def test_idle_equals_htas(name):
    analysis, timeline = both(name)
    theirs = hta.idle(analysis)
    table = idle(timeline).merge(
        theirs, on=["rank", "stream", "cause"], how="left", suffixes=("", "_hta")
    )
    assert table["idle_s_hta"].notna().sum() == len(theirs) > 1
    np.testing.assert_allclose(
        table["idle_s"], table["idle_s_hta"].fillna(0), atol=1e-12
    )
    # HTA rounds to 0.01
    np.testing.assert_allclose(
        table["share"], table["share_hta"].fillna(0), atol=0.0051
    )
    assert set(table["cause"]) == set(_CAUSES)


@pytest.mark.parametrize("name", RIGHT)
def test_queue_equals_htas(name):
    """The same lengths wherever the time is not that of another change; there HTA's
    order is left to the sorting.
    """
    analysis, timeline = both(name)
    theirs = queue_of_hta(analysis)
    ours = queue_length(timeline, capacity=1024)
    columns = ["stream", "count", "max"]
    assert ours[columns].to_numpy().tolist() == theirs[columns].to_numpy().tolist()
    np.testing.assert_allclose(ours["mean"], theirs["mean"], rtol=0.02)
    series = analysis.get_queue_length_time_series(ranks=timeline.ranks)[
        timeline.ranks[0]
    ]
    last = series.groupby(["stream", "ts"])["queue_length"].last()
    mine = queue_series(timeline).groupby(["stream", "time_s"])["length"].last()
    assert last.to_numpy().tolist() == mine.to_numpy().tolist()


@pytest.mark.filterwarnings("ignore:.*taken as rank 0:UserWarning")
def test_amd_launches_on_stream_0_are_found():
    """HTA 0.5.0 knows no hip name here, so its table is empty; every kernel of stream 0
    was launched by a hip call.
    """
    analysis, _ = both("mi250")
    assert not len(launches_of_hta(analysis))
    table = launches(read_trace(local_or_skip(NAMES["mi250"])))
    assert len(table) == 16 and set(table["stream"]) == {0}
    assert set(table["launch"]) == {
        "hipLaunchKernel",
        "hipMemcpyWithStream",
        "hipExtModuleLaunchKernel",
    }
    assert (table["since_launch_s"] > 0).all() and set(table["step"]) == {1}


def test_amd_queue_holds_every_launch_call():
    """HTA's list lacks hipExtLaunchKernel, which starts all of RCCL's kernels: it loses
    stream 4.
    """
    analysis, timeline = both("mi300x")
    assert queue_of_hta(analysis)["stream"].tolist() == [0]
    queue = queue_length(timeline).set_index("stream")
    assert (
        queue.loc[4, "count"] == 24
        and queue.loc[0, "count"] == queue_of_hta(analysis)["count"].iloc[0]
    )
    assert (
        queue.loc[0, "max"] > 1022
        and queue.loc[0, "blocked_s"] < 0.03 * queue.loc[0, "full_s"]
    )


@pytest.mark.parametrize(
    ("name", "launched", "call", "count", "kernels"),
    [
        (
            "traces/tracelens-samples/profile_trace_rank_0.json.gz",
            8066,
            "hipModuleLaunchKernel",
            2317,
            2317,
        ),
        (NAMES["graphs"], 6600, "cudaGraphLaunch", 70, 345),
    ],
)
def test_launches_by_calls_that_hta_does_not_know(name, launched, call, count, kernels):
    """A CPU operator that names a stream is not launched work; the kernels of a graph
    are one launch.
    """
    timeline = read_trace(local_or_skip(name))
    table = launches(timeline)
    of_call = table[table["launch"] == call]
    assert (len(table), len(of_call), of_call["kernels"].sum()) == (
        launched,
        count,
        kernels,
    )
    if (
        name not in NAMES.values()
    ):  # HTA's idle time: its rounding widens every gap by up to 2 us
        hosts = idle(timeline).set_index("cause").loc["host_wait"]
        assert 0 < 0.459639 - hosts["idle_s"] < 2e-6 * hosts["count"]


def test_times_rounded_as_hta_does_break_nothing():
    path = local_or_skip("traces/tracelens-samples/owlv2_h100.json.gz")
    with pytest.warns(TraceWarning, match="taken as rank 0"):
        table = launch_bound(read_trace(path, hta_compatible=True))
    assert (table["launch_bound_s"] <= table["idle_s"] + 1e-12).all() and (
        table["idle_s"] > 0
    ).all()
