"""Steps: parts, pace, warm-up and steps that a recording cuts."""

import numpy as np
import pandas as pd
import pytest
from support import (
    EPOCH_NS,
    dataset_or_skip,
    local_or_skip,
    make_timeline,
    with_columns,
)

import madmax_lib as mm
from madmax_lib import Timeline, breakdown, read_trace
from madmax_lib.timeline.accounting import rank_breakdown
from madmax_lib.traces import step_summary, steps

MS = 10**6
QUANTITIES = ["step_s", "wall_s", "period_s", *breakdown(make_timeline([])).columns[1:]]


def timeline_of(
    walls_ms: list[float], ranks: int = 1, ops: dict[int, int] | None = None
) -> Timeline:
    """Steps one after the other; in each a kernel of 60 % of its time, then 20 %
    communication that overlaps by half.

    ops: {step: host operators}, 4 in the others. The device starts 1 ms after the host.
    """
    rows = []
    for rank in range(ranks):
        start = 0.0
        for step, wall in enumerate(walls_ms):
            rows.append(
                (rank, -1, "annotation", f"ProfilerStep#{step}", start, wall, step)
            )
            count = (ops or {}).get(step, 4)
            rows += [
                (rank, -1, "cpu", "aten::mm", start + i * wall / 99, wall / 99, step)
                for i in range(count)
            ]
            rows.append((rank, 7, "compute", "gemm", start + 1, 0.6 * wall, step))
            rows.append(
                (
                    rank,
                    20,
                    "comm",
                    "ncclDevKernel_AllReduce",
                    start + 1 + 0.5 * wall,
                    0.2 * wall,
                    step,
                )
            )
            start += wall
    return make_timeline(
        [(*row[:4], round(row[4] * MS), round(row[5] * MS), -1, row[6]) for row in rows]
    )


def ms(values) -> list[float]:
    return [round(value * 1e3, 6) for value in values]


def test_parts_of_a_step_closed_form():
    table = steps(timeline_of([100, 50]))
    assert table["step"].tolist() == [0, 1] and ms(table["wall_s"]) == [100, 50]
    assert ms(table["period_s"])[0] == 100 and np.isnan(table["period_s"][1])
    assert ms(table["total_s"]) == [70, 35] and ms(table["compute_s"]) == [60, 30]
    assert ms(table["comm_s"]) == [20, 10] and ms(table["exposed_comm_s"]) == [10, 5]
    assert table["overlap"].tolist() == [0.5, 0.5] and ms(table["idle_s"]) == [0, 0]
    assert (
        table["annotated"].all()
        and not table["warmup"].any()
        and not table["cut"].any()
    )


def test_periods_are_exact_to_the_nanosecond_on_unix_clocks():
    """Times since 1970 do not fit into float64."""
    rows = [
        (0, 7, "compute", "k", EPOCH_NS + start, 5, -1, step)
        for step, start in enumerate((1, 1004, 2010))
    ]
    assert steps(make_timeline(rows))["period_s"].tolist()[:2] == [1003e-9, 1006e-9]


WARMUPS = {
    "slow leading steps": ([300, 200, 100, 100, 101, 99, 100], [0, 1]),
    "none": ([100, 101, 99, 100, 100], []),
    "within 10 percent": ([109, 100, 100, 100, 100], []),
    "beyond 10 percent": ([111, 100, 100, 100, 100], [0]),
    "within the spread of the others": ([150, 100, 140, 90, 120, 80], []),
    "a slow step later is none": ([100, 300, 100, 100, 100], []),
    "equally slow ones": ([300, 300, 300, 100, 100, 100, 100], [0, 1, 2]),
    "two steps tell nothing": ([300, 100], []),
    "three do": ([300, 100, 100], [0]),
    "faster leading steps are none": ([30, 70, 100, 100, 100], []),
}


@pytest.mark.parametrize(("walls", "expected"), WARMUPS.values(), ids=WARMUPS)
def test_warmup(walls, expected):
    table = steps(timeline_of(walls))
    assert table.loc[table["warmup"], "step"].tolist() == expected


def test_ranks_agree_on_warmup():
    """The median over three ranks decides: one rank that is slow in step 0 warms
    nothing up, two do.
    """
    for slow, expected in ((1, False), (2, True)):
        timeline = timeline_of([100] * 5, ranks=3)
        stretched = (timeline.spans["name"] == "ProfilerStep#0") & (
            timeline.spans["rank"] < slow
        )
        table = steps(
            with_columns(
                timeline, dur_ns=timeline.spans["dur_ns"].where(~stretched, 200 * MS)
            )
        )
        assert (table.loc[table["step"] == 0, "warmup"] == expected).all() and len(
            table
        ) == 15


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ({4: 0}, [4]),  # few spans in the last
        ({0: 0}, [0]),  # in the first
        ({2: 0}, []),  # in the middle: it is as it is
        ({4: 1}, []),  # half as many are enough
        ({0: 90}, []),
    ],
)
def test_cut_steps(ops, expected):
    """A step has its annotation, 4 operators, a kernel and a collective: 7 spans; 3
    without operators, 4 with one.
    """
    table = steps(timeline_of([100] * 5, ops=ops))
    assert table.loc[table["cut"], "step"].tolist() == expected


def test_a_step_without_annotation_or_work_is_cut():
    timeline = timeline_of([100] * 3)
    spans = timeline.spans
    table = steps(timeline.where((spans["name"] != "ProfilerStep#2").to_numpy()))
    assert table["annotated"].tolist() == [True, True, False] and table[
        "cut"
    ].tolist() == [False, False, True]
    # from its first span on the host to its last on the device
    assert ms(table["wall_s"])[2] == 71
    no_work = timeline.where(((spans["step"] < 2) | (spans["stream"] < 0)).to_numpy())
    table = steps(no_work)
    assert table["cut"].tolist() == [False, False, True] and table["total_s"][2] == 0


def test_cut_and_warmup_do_not_count():
    table = steps(timeline_of([300, 100, 110, 90, 100], ops={4: 0}))
    summary = step_summary(table).set_index("quantity")
    assert (
        table["warmup"].tolist() == [True, False, False, False, False]
        and table["cut"].tolist()[-1]
    )
    assert summary.index.tolist() == QUANTITIES
    wall = summary.loc["wall_s"]
    assert wall["steps"] == 3 and ms(wall[["mean", "median", "std"]]) == [100, 100, 10]
    assert ms(wall[["p10", "p90"]]) == [92, 108]
    assert (
        summary.loc["overlap", "mean"] == pytest.approx(0.5)
        and summary.loc["overlap", "std"] < 1e-6
    )


def test_one_step_has_no_spread_and_none_no_table():
    summary = step_summary(timeline_of([100]))
    pd.testing.assert_frame_equal(summary, step_summary(steps(timeline_of([100]))))
    assert summary.loc[0, "mean"] == pytest.approx(0.1) and summary["std"].isna().all()
    assert (
        summary.set_index("quantity").loc["period_s", ["mean", "median"]].isna().all()
    )
    table = steps(make_timeline([]))
    assert (
        not len(table)
        and set(table) == set(steps(timeline_of([100])))
        and not len(step_summary(table))
    )


def test_a_simulated_step():
    plan = mm.Plan(dp=4, tp=1, pp=2, micro_batch=1)
    step = mm.simulate(
        mm.model("gpt2-large"), mm.cluster("dgx-a100", nodes=1), plan, global_batch=8
    )
    table = steps(step)
    assert (
        table.attrs["source"] == "simulated"
        and not table["annotated"].any()
        and not table["cut"].any()
    )
    expected = rank_breakdown(step)
    np.testing.assert_allclose(table["compute_s"], expected["compute_s"])
    # hosts of the later stage begin before its device has anything to do, those of
    # the first only lead by the switch to their first pass
    first = table["rank"] < 4
    np.testing.assert_allclose(
        table.loc[first, "wall_s"], table.loc[first, "total_s"], rtol=1e-3
    )
    assert (table["wall_s"] >= table["total_s"]).all()


@pytest.mark.parametrize("name", ["vit-ddp", "gpt-fsdp"])
def test_shipped_traces(name):
    timeline = read_trace(dataset_or_skip(name))
    table = steps(timeline)
    assert (
        len(table) == 4
        and table["annotated"].all()
        and not table[["warmup", "cut"]].any(axis=None)
    )
    np.testing.assert_allclose(
        table["compute_s"] + table["non_compute_s"] + table["idle_s"], table["total_s"]
    )
    for step, part in table.groupby("step"):
        whole = breakdown(timeline.select(steps=[step]))
        np.testing.assert_allclose(part[QUANTITIES[3:]], whole[QUANTITIES[3:]])


def test_a_host_that_runs_ahead_hides_the_pace():
    """V100, five steps of 96 ms: the host needs 35 ms for the first, until its queue is
    full.
    """
    table = steps(
        read_trace(
            local_or_skip(
                "traces/hta-samples/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
            )
        )
    )
    assert (
        table["wall_s"][0] < 0.036 and table["period_s"][:4].between(0.095, 0.098).all()
    )


@pytest.mark.filterwarnings("ignore:.*taken as rank 0:UserWarning")
def test_a_step_that_only_has_its_annotation_is_cut():
    table = steps(
        read_trace(
            local_or_skip(
                "traces/hta-samples/mi250_minitoy_train_ROCm6_2_kineto.json.gz"
            )
        )
    )
    assert table["step"].tolist() == [1, 2] and table["cut"].tolist() == [False, True]
    # of kernels on stream 0, which HTA gives no iteration
    assert table["compute_s"][0] > 0
