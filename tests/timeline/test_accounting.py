import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support import lanes, make_timeline

import madmax_lib as mm
from madmax_lib.timeline.accounting import breakdown, breakdown_between
from madmax_lib.traces import exposed_by_collective

MS = 1_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def test_closed_form():
    """compute 0-10, comm 8-14, copy 13-15, idle 15-20, compute 20-24 (ns)."""
    rows = [
        (0, 7, "compute", "a", 0, 10),
        (0, 20, "comm", NCCL, 8, 6),
        (0, 21, "memcpy", "Memcpy DtoD", 13, 2),
    ]
    rows += [
        (0, 7, "compute", "b", 20, 4),
        (0, 7, "idle", "Stream Wait Event", 15, 5),
        (0, -1, "cpu", "mm", 0, 100),
    ]
    row = breakdown(make_timeline(rows)).iloc[0]
    expected_ns = {
        "total_s": 24,
        "compute_s": 14,
        "comm_s": 6,
        "memory_s": 2,
        "non_compute_s": 5,
        "exposed_comm_s": 4,
    }
    expected = {
        "rank": 0,
        **{name: 1e-9 * ns for name, ns in expected_ns.items()},
        "idle_s": 5e-9,
        "overlap": 1 / 3,
    }
    assert list(row.index) == list(expected)
    np.testing.assert_allclose(
        row.to_numpy(dtype=float), list(expected.values()), rtol=1e-12
    )


def test_what_is_not_there_has_zeros_and_no_overlap():
    """No communication, a rank without device work, no ranks at all."""
    timeline = make_timeline(
        [(0, 7, "compute", "a", 0, 10)], represents={0: [0], 1: [1]}
    )
    table, collectives = breakdown(timeline), exposed_by_collective(timeline)
    assert table["rank"].tolist() == [0, 1] and table["total_s"].tolist() == [1e-8, 0.0]
    assert table["overlap"].isna().all() and (
        table[["exposed_comm_s", "idle_s"]] == 0
    ).all(axis=None)
    nothing = breakdown(make_timeline([]))
    assert (
        not len(collectives)
        and "exposed_s" in collectives
        and not len(nothing)
        and "non_compute_s" in nothing
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("batches", [1, 3, 8])
def test_the_bubble_is_idle_time_on_every_stage_of_a_simulated_pipeline(
    stages, batches
):
    """(pp - 1) / (m + pp - 1) of the step for equal stages; a measured rank has its own
    window, as in HTA.
    """
    rows = [
        (rank, 7, "compute", "gemm", rank + batch, 1)
        for rank in range(stages)
        for batch in range(batches)
    ]
    table = breakdown(make_timeline(rows, source="simulated"))
    share = (stages - 1) / (batches + stages - 1)
    assert (table["idle_s"] / table["total_s"]).tolist() == pytest.approx(
        [share] * stages
    )
    assert (breakdown(make_timeline(rows))["idle_s"] == 0).all()
    assert (
        breakdown(make_timeline(rows, source="simulated", provenance={"rules": "hta"}))[
            "idle_s"
        ]
        == 0
    ).all()


KIND = st.sampled_from(["compute", "comm", "memcpy", "other"])
SPANS = st.lists(
    st.tuples(KIND, st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=15
)


@given(SPANS)
def test_conservation(spans):
    """Times add up whatever overlaps: total = compute + non-compute + idle; comm =
    hidden + exposed.
    """
    row = breakdown(
        make_timeline([(0, 0, kind, "k", start, dur) for kind, start, dur in spans])
    ).iloc[0]
    assert row["total_s"] == pytest.approx(
        row["compute_s"] + row["non_compute_s"] + row["idle_s"], abs=1e-15
    )
    assert row["exposed_comm_s"] <= min(row["comm_s"], row["non_compute_s"]) + 1e-15
    if row["comm_s"]:
        assert row["overlap"] == pytest.approx(
            1 - row["exposed_comm_s"] / row["comm_s"], abs=1e-12
        )


def test_exposed_by_collective():
    rows = [
        (0, 7, "compute", "a", 0, 10),
        (0, 20, "comm", NCCL, 5, 10),
        (0, 20, "comm", NCCL, 15, 1),
    ]
    rows.append((0, 21, "comm", "ncclDevKernel_AllGather_RING_LL", 0, 4))
    table = exposed_by_collective(make_timeline(rows)).set_index("collective")
    assert table.loc[
        "all_reduce", ["count", "comm_s", "exposed_s"]
    ].tolist() == pytest.approx([2, 11e-9, 6e-9])
    assert table.loc["all_gather", "exposed_s"] == 0
    assert table["size_bytes"].isna().all()


def test_collectives_of_a_user_table_are_known():
    rows = [(0, 20, "comm", "Memcpy PtoP", 0, 5), (0, 20, "comm", "mystery", 5, 5)]
    timeline = make_timeline(
        rows, provenance={"collectives": {"Memcpy PtoP": "send_recv"}}
    )
    assert exposed_by_collective(timeline)["collective"].tolist() == [
        "generic",
        "send_recv",
    ]


@pytest.fixture
def window_step():
    """Compute 0-10 and 15-20 ms, communication 8-12 ms on rank 0; rank 1 computes 5-10
    ms.
    """
    first = "0 compute: gemm 100+10, adam 115+5\n2 comm: all_reduce 108+4"
    rows = lanes(first + "\n1/0 compute: gemm 105+5")
    return make_timeline([(*row[:4], row[4] * MS, row[5] * MS) for row in rows])


@pytest.mark.parametrize(
    ("start_s", "end_s", "compute_ms", "exposed_ms", "idle_ms"),
    [
        (0, math.inf, [15, 5], [2, 0], [3, 15]),
        (0.008, 0.012, [2, 2], [2, 0], [0, 2]),
        (0.012, 0.015, [0, 0], [0, 0], [3, 3]),
        (0.009, 0.5, [6, 1], [2, 0], [3, 10]),
    ],
)
def test_a_window_is_accounted_for_in_full(
    window_step, start_s, end_s, compute_ms, exposed_ms, idle_ms
):
    table = breakdown_between(window_step, start_s, end_s)
    assert (table["compute_s"] * 1e3).tolist() == pytest.approx(compute_ms)
    assert (table["exposed_comm_s"] * 1e3).tolist() == pytest.approx(exposed_ms)
    assert (table["idle_s"] * 1e3).tolist() == pytest.approx(idle_ms, abs=1e-9)
    busy_s = table["compute_s"] + table["non_compute_s"]
    assert (busy_s + table["idle_s"]).tolist() == pytest.approx(
        table["total_s"].tolist()
    )


def test_windows_side_by_side_add_up_and_none_ends_before_it_begins(window_step):
    names, cuts = (
        ["compute_s", "comm_s", "exposed_comm_s"],
        [0, 0.004, 0.0091, 0.013, 0.02],
    )
    parts = sum(breakdown_between(window_step, *pair)[names] for pair in pairwise(cuts))
    np.testing.assert_allclose(parts, breakdown(window_step)[names], rtol=1e-9)
    with pytest.raises(ValueError, match=r"start_s=0.2 is not before end_s=0.1"):
        breakdown_between(window_step, 0.2, 0.1)


def test_a_simulated_step_ends_with_the_host_that_updates_offloaded_states():
    """Else an offload whose update follows the last device work looks free."""
    run = {"global_batch": 8, "software": "megatron-core"}
    step = mm.simulate("llama3-8b", "dgx-h100", "dp8.z3.offload-all", **run)
    spans = step.spans
    step_s = (spans["start_ns"] + spans["dur_ns"]).max() * 1e-9
    parts = mm.breakdown(step)
    assert parts["total_s"].tolist() == pytest.approx([step_s] * 8, rel=1e-3)
    assert (parts["idle_s"] > 0.3 * step_s).all()
