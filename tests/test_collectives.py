from conftest import dataset_or_skip, make_timeline

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
    assert not len(table) and table.attrs["unmatched"] == [AR]


def test_one_rank_or_no_communication_waits_for_nobody():
    assert not len(waiting(make_timeline([(0, 20, "comm", AR, 0, 5)])))
    assert not len(waiting(make_timeline([(0, 7, "compute", "a", 0, 5)])))


def test_dlrm_waits_for_rank_7():
    table = waiting(read_trace(dataset_or_skip("dlrm-8xv100")))
    assert table.groupby("waits_for")["wait_s"].sum().idxmax() == 7
    assert table.attrs["unmatched"] == []
