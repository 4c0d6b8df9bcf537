from conftest import dataset_or_skip, make_timeline

from madmax_lib.timeline import Timeline
from madmax_lib.traces.collectives import waiting
from madmax_lib.traces.kineto import read_trace

AR = "ncclDevKernel_AllReduce"


def test_the_shortest_arrived_last():
    """Two calls: rank 1 is last in the first (others wait 6 and 3 ns), rank 0 in the second (5 and 1 ns)."""
    durations = {0: (10, 2), 1: (4, 7), 2: (7, 3)}
    rows = [(rank, 20, "comm", AR, 100 * rank + 50 * call, dur)
            for rank, calls in durations.items() for call, dur in enumerate(calls)]  # fmt: skip
    table = waiting(make_timeline(rows)).set_index(["rank", "waits_for"])["wait_s"]
    assert {key: round(value * 1e9) for key, value in table.items()} == {(0, 1): 6, (2, 1): 3, (1, 0): 5, (2, 0): 1}


def test_what_cannot_be_matched_is_left_out_and_named():
    rows = [(0, 20, "comm", AR, 0, 5), (0, 20, "comm", AR, 9, 5), (1, 20, "comm", AR, 0, 5)]
    table = waiting(make_timeline(rows))
    assert not len(table) and table.attrs["unmatched"] == {AR: 3}


def test_one_lost_call_costs_one_step():
    rows = [(rank, 20, "comm", AR, 100 * step, 5 + rank) for step in range(4) for rank in (0, 1)]
    timeline = make_timeline(rows[:-1])
    spans = timeline.spans.assign(step=timeline.spans["start_ns"] // 100)
    table = waiting(Timeline(spans, timeline.meta))
    assert table["count"].tolist() == [3] and table.attrs["unmatched"] == {AR: 1}


def test_named_groups_are_kept_apart():
    """Groups {0, 1} and {2, 3} run the same collective; without names they look like one group, and it is said."""
    rows = [(rank, 20, "comm", AR, 0, dur) for rank, dur in enumerate((10, 20, 50, 60))]
    timeline = make_timeline(rows)
    assert waiting(timeline).attrs["one_group_assumed"]
    spans = timeline.spans.assign(group=["a [0, 1]", "a [0, 1]", "a [2, 3]", "a [2, 3]"])
    table = waiting(Timeline(spans.astype({"group": "category"}), timeline.meta))
    assert table[["rank", "waits_for"]].to_numpy().tolist() == [[1, 0], [3, 2]]
    assert not table.attrs["one_group_assumed"]


def test_one_rank_or_no_communication_waits_for_nobody():
    assert not len(waiting(make_timeline([(0, 20, "comm", AR, 0, 5)])))
    assert not len(waiting(make_timeline([(0, 7, "compute", "a", 0, 5)])))


def test_dlrm_waits_for_rank_7():
    table = waiting(read_trace(dataset_or_skip("dlrm-8xv100")))
    assert table.groupby("waits_for")["wait_s"].sum().idxmax() == 7
    assert table.attrs["unmatched"] == {} and table.attrs["one_group_assumed"]
