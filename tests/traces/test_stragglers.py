"""Who arrives last, how often and at what cost; beside HTA, which loses some."""

import numpy as np
import pandas as pd
import pytest
from support import EPOCH_NS, dataset_or_skip, lanes, make_timeline, meetings

import madmax_lib as mm
from madmax_lib import export_trace, read_trace
from madmax_lib.traces import (
    advise,
    align,
    calls,
    clock_offsets,
    hta,
    skew,
    stragglers,
    waiting,
)
from madmax_lib.traces.stragglers import _often_last
from madmax_lib.view import report


def test_who_is_late_how_often_and_at_what_cost():
    """Rank 1 is last twice (50 + 41 ns, then 30 + 20), rank 2 once (25 + 15); their
    clocks lie apart.
    """
    starts = [{0: 0, 1: 50, 2: 9}, {0: 200, 1: 230, 2: 210}, {0: 400, 1: 410, 2: 425}]
    timeline = make_timeline(meetings(starts, {0: 17, 2: -1000}))
    for given, by in ((timeline, "duration"), (align(timeline), "start")):
        table = stragglers(given).set_index("rank")
        assert table.attrs["by"] == by and table.index.tolist() == [1, 2, 0]
        assert table["last"].tolist() == [2, 1, 0] and table["calls"].tolist() == [
            3,
            3,
            3,
        ]
        assert table["share"].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
        assert (table["cost_s"] * 1e9).round(6).tolist() == [141, 40, 0]
        assert (table["waited_s"] * 1e9).round(6).tolist() == [15, 61, 105]
        of_call = skew(given)
        assert (of_call["skew_s"] * 1e9).round(6).tolist() == [50, 30, 25]
        assert (
            of_call["last_rank"].tolist() == [1, 1, 2]
            and (of_call["transfer_s"] * 1e9).round(6).eq(10).all()
        )


@pytest.mark.parametrize(
    ("last", "ranks", "often"),
    [
        ([0, 1] * 4, 2, []),
        ([1] * 8, 2, [1]),
        ([1] * 4, 2, []),  # 1/16, twice for two ranks
        ([0, 1, 2, 3] * 2, 4, []),
        ([2] * 6 + [0, 1], 4, [2]),
        ([2] * 5, 8, [2]),
    ],
)
def test_a_rank_is_named_if_it_is_last_more_often_than_by_chance(last, ranks, often):
    starts = [
        {rank: 1000 * at + 50 * (rank == late) for rank in range(ranks)}
        for at, late in enumerate(last)
    ]
    timeline = make_timeline(meetings(starts, {}))
    assert stragglers(timeline).attrs["often_last"] == often
    advised = advise(timeline).query("cause == 'straggler rank'")
    assert [f"rank {rank}" for rank in often] == list(advised["where"])
    page = report(timeline).html
    assert ("No rank arrives last more often than by chance" in page) == (not often)
    assert all(
        f"Rank {rank} arrives last in {last.count(rank)} of {len(last)} calls" in page
        for rank in often
    )


def test_equal_ranks_are_seldom_taken_for_stragglers():
    draw, ranks = np.random.default_rng(0), range(4)
    table = pd.DataFrame(
        {"rank": [*ranks] * 12, "call": np.repeat(np.arange(12), 4), "skew_s": 1.0}
    )
    lasts = (np.bincount(draw.integers(4, size=12), minlength=4) for _ in range(300))
    wrong = sum(
        any(_often_last(table, pd.DataFrame({"rank": ranks, "last": last})))
        for last in lasts
    )
    assert wrong <= 15  # 5 % of 300


def test_waiting_under_compute_costs_nothing():
    """Rank 0 waits 50 ns for rank 1 and computes in the first 20 of them."""
    rows = [*meetings([{0: 0, 1: 50}], {}), (0, 7, "compute", "a", EPOCH_NS - 5, 25)]
    row = stragglers(make_timeline(rows)).set_index("rank").loc[1]
    assert (row[["cost_s", "exposed_cost_s"]] * 1e9).round(6).tolist() == [50, 30]


def test_nobody_is_last_where_all_are_equal():
    table = stragglers(make_timeline(meetings([{0: 0, 1: 0}], {})))
    assert table["last"].tolist() == [0, 0] and table["cost_s"].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["gpt-ddp", "gpt-fsdp"])
@pytest.mark.parametrize("clock", [align, lambda timeline: timeline])
def test_what_one_costs_another_waits(name, clock):
    timeline = clock(read_trace(mm.dataset(name)))
    table, of_call = stragglers(timeline), skew(timeline)
    costs = [
        table["cost_s"].sum(),
        table["waited_s"].sum(),
        of_call["wait_s"].sum(),
        waiting(timeline)["wait_s"].sum(),
    ]
    assert costs == pytest.approx([costs[0]] * 4, rel=1e-12) and costs[0] > 0
    assert (table["exposed_cost_s"] <= table["cost_s"]).all() and table[
        "last"
    ].sum() == len(of_call)
    assert (
        of_call["skew_s"].to_numpy() == pytest.approx(of_call["wait_s"].to_numpy())
        or clock is align
    )
    assert (of_call["wait_s"] <= calls(timeline)["duration_s"].max()).all()


def test_a_simulated_step_has_one_clock_and_no_stragglers():
    plan = mm.Plan.parse("dp2.tp2.pp2")
    timeline = mm.simulate(
        mm.model("gpt2-large"), mm.cluster("dgx-a100", nodes=1), plan, global_batch=4
    )
    table = stragglers(timeline)
    assert (
        table.attrs["by"] == "start"
        and (table["cost_s"] == 0).all()
        and len(table) == 8
    )
    assert (clock_offsets(timeline)["offset_s"] == 0).all()
    pd.testing.assert_frame_equal(align(timeline).spans, timeline.spans)
    pd.testing.assert_frame_equal(align(timeline).edges, timeline.edges)


# beside HTA


def write_ranks(directory, kernel: str) -> list:
    """Three ranks, one step: rank 2 starts the only all-reduce last, then rank 0, then
    rank 1.
    """
    rows = []
    for rank, start in enumerate((300_000, 100_000, 500_000)):
        host = (
            "aten::mm 2000+20000, cudaLaunchKernel 5000+2000 #5, cudaLaunchKernel "
            "50000+2000 #9"
        )
        rows += lanes(
            f"{rank}/-1 annotation: ProfilerStep#7 0+900000\n{rank}/-1 cpu: {host}"
        )
        rows += lanes(
            f"{rank}/7 compute: sgemm 10000+80000 #5\n{rank}/20 comm: {kernel} "
            f"{start}+{600_000 - start} #9"
        )
    return export_trace(
        make_timeline([(*row, 7) for row in rows], world_size=3), directory
    )


def test_stragglers_equal_hta_where_it_knows_the_kernel_and_go_on_where_it_does_not(
    tmp_path,
):
    """HTA 0.5.0 looks for names that start with ncclKernel; NCCL since 2.19 says
    ncclDevKernel.
    """
    pytest.importorskip("hta")
    old = write_ranks(tmp_path, "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)")
    ours = stragglers(read_trace(old))
    assert (
        ours["rank"].tolist()[:1]
        == hta.analysis(old).get_potential_stragglers(num_candidates=1)
        == [2]
    )
    new = write_ranks(
        tmp_path,
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    )
    with pytest.raises(ValueError, match="argmax of an empty sequence"):
        hta.analysis(new).get_potential_stragglers(num_candidates=1)
    assert stragglers(read_trace(new))["rank"].tolist() == ours["rank"].tolist()
    for one_clock in (align(read_trace(old)), align(read_trace(new))):
        late = one_clock.spans[one_clock.spans["kind"] == "comm"].sort_values(
            "start_ns"
        )["rank"]
        assert late.tolist() == [1, 0, 2]


def test_dlrm_stragglers_beside_hta():
    """HTA's first candidate is right. Its second is not: kernels below 1 % of the step
    are dropped, and those are the
    ones of ranks 4 and 5, which arrive last and so have the shortest calls.
    """
    pytest.importorskip("hta")
    source = dataset_or_skip("dlrm-8xv100")
    table = stragglers(align(read_trace(source)))
    theirs = hta.analysis(source)
    assert (
        theirs.get_potential_stragglers(num_candidates=1)
        == [7]
        == table["rank"].tolist()[:1]
    )
    assert sorted(theirs.get_potential_stragglers(num_candidates=2)) == [2, 7]
    assert table["rank"].tolist()[:3] == [7, 5, 4] and table["last"].tolist() == [
        5,
        2,
        1,
        0,
        0,
        0,
        0,
        0,
    ]
    assert table["cost_s"].iloc[0] == pytest.approx(0.0355, abs=0.0001)
