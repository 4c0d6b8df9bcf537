"""Clocks of ranks are compared by the ends of their collectives."""

import numpy as np
import pandas as pd
from support import (
    EPOCH_NS,
    dataset_or_skip,
    make_timeline,
    meetings,
    with_columns,
    with_tables,
)

from madmax_lib import Timeline, read_trace
from madmax_lib.traces import align, clock_offsets, skew, stragglers

AR = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
HOUR_NS = 3_600_000_000_000


def offsets(timeline: Timeline) -> dict[int, float]:
    return clock_offsets(timeline).set_index("rank")["offset_s"].to_dict()


def test_known_offsets_are_recovered_exactly():
    """Three clocks, one hours ahead, one behind by an odd number of ns."""
    ahead = {1: 5 * HOUR_NS + 123, 2: -7}
    timeline = make_timeline(
        meetings([{0: 0, 1: 50, 2: 9}, {0: 200, 1: 130, 2: 180}], ahead)
    )
    table = clock_offsets(timeline)
    assert (table["offset_s"] * 1e9).round().tolist() == [0, 5 * HOUR_NS + 123, -7]
    assert table["spread_s"].tolist() == [0, 0, 0] and table["calls"].tolist() == [
        2,
        2,
        2,
    ]
    one_clock = align(timeline)
    true = make_timeline(meetings([{0: 0, 1: 50, 2: 9}, {0: 200, 1: 130, 2: 180}], {}))
    pd.testing.assert_frame_equal(one_clock.spans, true.spans)
    assert one_clock.meta.provenance["clock_offsets_s"]["2"] == -7e-9


def test_one_late_notice_does_not_move_the_clock():
    rows = meetings([{0: 100 * i, 1: 100 * i} for i in range(5)], {1: 40})
    # rank 1 in the second call ends 1 ms late
    rank, stream, kind, name, start, dur = rows[3]
    table = clock_offsets(
        make_timeline(
            [*rows[:3], (rank, stream, kind, name, start, dur + 10**6), *rows[4:]]
        )
    )
    assert (table["offset_s"] * 1e9).tolist() == [0, 40] and table[
        "spread_s"
    ].tolist() == [0, 0]


def test_groups_are_joined_through_others_and_a_lonely_rank_keeps_its_clock():
    rows = [
        *meetings([{0: 0, 1: 5}], {1: 100}),
        *meetings([{1: 40, 2: 50}], {1: 100, 2: 1000}),
        *meetings([{4: 0, 5: 1}], {4: 7, 5: 9}),
        (3, 7, "compute", "a", EPOCH_NS, 5),
    ]
    timeline = make_timeline(rows)
    groups = ["[0, 1]"] * 2 + ["[1, 2]"] * 2 + ["[4, 5]"] * 2 + [None]
    timeline = with_columns(timeline, group=groups)
    table = clock_offsets(timeline).set_index("rank")
    assert (table["offset_s"] * 1e9).round().tolist() == [0, 100, 1000, 0, 0, 2]
    assert table["reference"].tolist() == [0, 0, 0, 3, 4, 4]
    assert np.isnan(table.loc[3, "spread_s"]) and table.loc[3, "calls"] == 0


def test_disagreeing_groups_share_the_error():
    """0-1 says 10, 1-2 says 10, 0-2 says 26: least squares adds a third of the 6 ns to
    each.
    """
    rows = [
        *meetings([{0: 0, 1: 0}], {1: 10}),
        *meetings([{1: 40, 2: 40}], {1: 10, 2: 20}),
        *meetings([{0: 80, 2: 80}], {2: 26}),
    ]
    timeline = with_columns(
        make_timeline(rows), group=["a"] * 2 + ["b"] * 2 + ["c"] * 2
    )
    assert (clock_offsets(timeline)["offset_s"] * 1e9).round(6).tolist() == [0, 12, 24]


def test_a_broadcast_only_joins_ranks_that_nothing_else_joins():
    """Its root ends early by 3 ns; where an all-reduce is shared, that does not count."""
    early = [(0, 20, "comm", "ncclDevKernel_Broadcast", 500 + i, 7) for i in range(5)]
    late = [(1, 20, "comm", "ncclDevKernel_Broadcast", 500 + i, 10) for i in range(5)]
    assert offsets(make_timeline([*early, *late])) == {0: 0, 1: 3e-9}
    both = [(rank, 20, "comm", AR, 900, 10) for rank in (0, 1)]
    assert offsets(make_timeline([*early, *late, *both])) == {0: 0, 1: 0}


def test_aligning_again_changes_nothing_and_memory_events_move_along():
    timeline = make_timeline(meetings([{0: 0, 1: 50}, {0: 100, 1: 90}], {1: 1000}))
    memory = [{"rank": 0, "time_ns": 5}, {"rank": 1, "time_ns": 1005}]
    once = align(with_tables(timeline, memory=memory))
    assert once.side_tables["memory"]["time_ns"].tolist() == [5, 5]
    twice = align(once)
    pd.testing.assert_frame_equal(once.spans, twice.spans)
    assert twice.meta.provenance["clock_offsets_s"] == {"0": 0.0, "1": 1e-6}


def test_nothing_to_align():
    for rows in ([], [(0, 7, "compute", "a", 0, 5)], [(0, 20, "comm", AR, 0, 5)]):
        timeline = make_timeline(rows)
        assert len(clock_offsets(timeline)) == len(timeline.ranks) and len(
            align(timeline)
        ) == len(rows)
        assert not len(stragglers(align(timeline))) and not len(skew(timeline))


def test_dlrm_clocks_agree_to_microseconds():
    """Eight ranks of one machine, recorded in whole microseconds."""
    timeline = read_trace(dataset_or_skip("dlrm-8xv100"))
    table = clock_offsets(timeline)
    assert (
        table["offset_s"].abs().max() < 2e-6
        and table["spread_s"].max() < 2e-6
        and set(table["calls"]) == {8}
    )
    moved = timeline.spans.assign(
        start_ns=timeline.spans["start_ns"]
        + timeline.spans["rank"].astype("int64") * 10**9
    )
    shifted = clock_offsets(
        Timeline(moved, timeline.meta, side_tables=timeline.side_tables)
    )
    np.testing.assert_allclose(
        shifted["offset_s"] - shifted["rank"], table["offset_s"], atol=1e-8
    )
