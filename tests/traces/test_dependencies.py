from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from support import lanes, make_timeline, with_tables

from madmax_lib.timeline.timeline import Meta, Timeline
from madmax_lib.traces.waits.dependencies import dependency_graph


def trace(rows, **tables) -> Timeline:
    return with_tables(make_timeline(rows), **tables)


def edges(timeline, *why) -> set:
    """Rows of the spans at both ends of each edge between two of them, and why; all
    edges, or those of some reasons.
    """
    found = dependency_graph(timeline)
    row = np.repeat(found.slices["row"].to_numpy(dtype=np.int64), 2)
    # where ranks meet: the event that arrived last
    last = np.arange(len(found.time_ns))
    arrives = found.binding & (found.target >= len(row))
    last[found.target[arrives]] = found.source[arrives]
    every = zip(
        row[last[found.source].clip(max=len(row) - 1)],
        found.target,
        found.why,
        strict=True,
    )
    between = [
        (source, row[target], reason)
        for source, target, reason in every
        if target < len(row)
    ]
    return {
        edge for edge in between if edge[0] != edge[1] and (not why or edge[2] in why)
    }


def slices(rows) -> list:
    table = dependency_graph(trace(rows)).slices
    return list(
        table[["name", "start_ns", "end_ns"]].itertuples(index=False, name=None)
    )


def call(name, start, dur, *correlation) -> tuple:
    return (0, -1, "cpu", name, start, dur, *correlation)


def work(name, start, dur, *correlation, stream=7, kind="compute") -> tuple:
    return (0, stream, kind, name, start, dur, *correlation)


LAUNCH = "cudaLaunchKernel"
EDGES = {
    "launches, kernels and orders":
        ([call(LAUNCH, 0, 5, 1), call(LAUNCH, 5, 5, 2), work("a", 3, 6, 1), work("b", 12, 8, 2)],
         {(0, 1, "order"), (0, 2, "launch"), (1, 3, "launch"), (2, 3, "stream")}),
    "a copy that blocks and one that does not":
        ([call("cudaMemcpyAsync", 0, 50, 1), call("cudaMemcpyAsync", 50, 5, 2),
          work("Memcpy DtoH", 10, 30, 1, kind="memcpy"), work("Memcpy HtoD", 53, 30, 2, kind="memcpy")],
         {(0, 1, "order"), (0, 2, "launch"), (2, 0, "sync"), (1, 3, "launch"), (2, 3, "stream")}),
    "stream 0 of AMD":
        ([call("hipLaunchKernel", 0, 5, 1), work("a", 3, 6, 1, stream=0), call("hipDeviceSynchronize", 6, 9, 2)],
         {(0, 1, "launch"), (0, 2, "order"), (1, 2, "sync")}),
    "a launch that the times contradict": ([call(LAUNCH, 50, 5, 1), work("a", 3, 6, 1)], set()),
    "a transfer more belongs to the operator before it":
        ([call("c10d::allreduce_", 0, 5), call("c10d::allreduce_", 10, 5),
          work("gloo:all_reduce", 12, 30, stream=-2, kind="comm"), work("aten::mm", 20, 5, stream=-1)],
         {(0, 1, "order"), (1, 2, "launch"), (1, 3, "order")}),
    "collectives wait for the last rank":
        ([(rank, 20, "comm", "AllReduce", start, 100 - start) for rank, start in enumerate((10, 60, 30))],
         {(1, 0, "collective"), (1, 2, "collective")}),
}  # fmt: skip


@pytest.mark.parametrize("case", EDGES)
def test_edges(case):
    rows, expected = EDGES[case]
    assert edges(trace(rows)) == expected


def test_what_has_the_time_of_a_thread():
    """Annotations fill what is between operators, a span has what those inside of it
    leave; waiting threads go.
    """
    label, cut = (
        (0, -1, "annotation", "ProfilerStep#1", 0, 90),
        [("op", 10, 20), ("ProfilerStep#1", 20, 40)],
    )
    rows = [label, call("op", 10, 10), work("k", 30, 10)]
    assert slices(rows) == [("ProfilerStep#1", 0, 10), *cut, ("k", 30, 40)]
    assert slices([label]) == []
    rows = [
        call("op", 0, 100),
        call("call", 20, 10),
        call("empty", 50, 0),
        call("next", 100, 5),
    ]
    cut = [
        ("op", 0, 20),
        ("call", 20, 30),
        ("op", 30, 50),
        ("empty", 50, 50),
        ("op", 50, 100),
        ("next", 100, 105),
    ]
    assert slices(rows) == cut
    assert slices(
        [call(LAUNCH, 0, 5, 1), (0, -2, "cpu", "threading.py: wait", 0, 900)]
    ) == [(LAUNCH, 0, 5)]


@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        # three levels that start and end together: the innermost has the time
        (
            [("a", 0, 10), ("b", 0, 10), ("c", 0, 10)],
            [("a", 0, 0), ("b", 0, 0), ("c", 0, 10)],
        ),
        (
            [("a", 0, 10), ("b", 2, 4), ("c", 3, 1)],
            [("a", 0, 2), ("b", 2, 3), ("c", 3, 4), ("b", 4, 6), ("a", 6, 10)],
        ),
        (
            [("a", 0, 4), ("b", 4, 4), ("c", 9, 1)],
            [("a", 0, 4), ("b", 4, 8), ("c", 9, 10)],
        ),
        # a child that outlives its parent: what no span covers alone is left out,
        # nothing is counted twice
        ([("a", 0, 10), ("b", 5, 10)], [("a", 0, 5), ("b", 5, 10)]),
        (
            [("a", 0, 10), ("b", 5, 195), ("c", 100, 10)],
            [("a", 0, 5), ("b", 5, 10), ("c", 100, 110)],
        ),
        (
            [("a", 3, 0), ("b", 3, 0), ("c", 3, 2)],
            [("c", 3, 3), ("a", 3, 3), ("c", 3, 3), ("b", 3, 3), ("c", 3, 5)],
        ),
    ],
)
def test_pieces_cover_a_thread_once(rows, cut):
    found = slices([(0, -1, "cpu", *row) for row in rows])
    assert [p for p in found if p[1] < p[2]] == [p for p in cut if p[1] < p[2]]
    assert {name for name, *_ in found} == {name for name, *_ in rows}
    assert all(a[2] <= b[1] for a, b in pairwise(found))


SYNCED = lanes("""
    -1 cpu: cudaLaunchKernel 0+2 #1, cudaEventRecord 3+1 #2, cudaLaunchKernel 5+2 #3, cudaStreamWaitEvent 8+1 #4
    -1 cpu: cudaLaunchKernel 10+2 #5, cudaStreamSynchronize 13+100 #6
    7 compute: before the event 2+30 #1, after the event 32+90 #3
    20 comm: waits 33+60 #5
    20 idle: Stream Wait Event 9+20 #4, Stream Sync 20+75 #6
""")
SYNC_ROWS = [(9, "Stream Wait Event", 7, 2), (10, "Stream Sync", -1, -1)]


def test_sync_rows_tell_which_stream_waits_for_what():
    found = edges(trace(SYNCED, syncs=SYNC_ROWS), "event", "sync")
    assert found == {(6, 8, "event"), (8, 5, "sync")}
    # ends later, but nobody waits for that stream
    third = (0, 24, "compute", "on a third stream", 4, 100, -1)
    assert edges(trace([*SYNCED, third], syncs=SYNC_ROWS), "event", "sync") == found


def test_without_sync_rows_calls_tell_it():
    """The stream that a call is about is unknown: the last launched on any, unless the
    times contradict.
    """
    found = edges(trace(SYNCED[:9]), "event", "sync")
    # `after the event` was launched by then, but 8 did not wait for it
    assert found == {(8, 5, "sync")}
    late = [
        (0, 20, "comm", "waits", 123, 60, 5) if row[3] == "waits" else row
        for row in SYNCED[:9]
    ]
    assert edges(trace(late), "event", "sync") == {(7, 8, "event")}


def test_a_graph_launch_starts_many_kernels_and_branches_run_side_by_side():
    rows = [call("cudaGraphLaunch", 0, 9, 5), work("first", 10, 10, 5)]
    rows += [work("left", 21, 30, 5), work("right", 22, 10, 5), work("last", 52, 5, 5)]
    assert edges(trace(rows), "launch") == {(0, row, "launch") for row in (1, 2, 3, 4)}
    assert edges(trace(rows), "stream") == {
        (1, 2, "stream"),
        (1, 3, "stream"),
        (2, 4, "stream"),
        (3, 4, "stream"),
    }


@pytest.mark.parametrize(("start_ns", "waited"), [(103_000, True), (160_000, False)])
def test_a_late_kernel_that_starts_right_after_one_of_another_stream_waited_for_it(
    start_ns, waited
):
    rows = [call(LAUNCH, 0, 5, 1), call(LAUNCH, 5, 5, 2), work("a", 8, 99_992, 1)]
    rows.append(work("b", start_ns, 10, 2, stream=20, kind="comm"))
    assert edges(trace(rows), "event") == ({(2, 3, "event")} if waited else set())


@pytest.mark.parametrize(
    "rows",
    [
        "20 comm: AllReduce 0+10\n1/20 comm: AllReduce 20+10",  # never at the same time
        "20 comm: AllReduce 0+10\n1/20 comm: AllReduce 5+5, AllReduce 10+9",
        "20 comm: AllReduce 0+10, AllReduce 10+10",
        "20 comm: SendRecv 0+10\n1/20 comm: SendRecv 20+10\n2/20 comm: SendRecv 25+9",
    ],
)
def test_what_does_not_match_is_no_collective(rows):
    assert edges(trace(lanes(rows)), "collective") == set()


def test_backward_is_handed_over_and_back():
    """Thread 1 goes forward, rests, and steps; thread 2 goes backward while it rests;
    labels are a rest too.
    """
    rows = lanes(
        "-1 cpu: aten::mm 0+10 #1\n-2 cpu: MmBackward0 20+10 #2, AddBackward0 30+10 "
        "#3\n-1 cpu: step 50+10 #4"
    )
    operators = [(0, "", "", "", 5, 0), (1, "", "", "", 5, 1), (2, "", "", "", 4, 1)]
    assert edges(trace(rows, operators=operators), "backward") == {
        (0, 1, "backward"),
        (2, 3, "backward"),
    }
    labelled = [*rows, (0, -1, "annotation", "ProfilerStep#1", 0, 70)]
    found = edges(trace(labelled, operators=operators), "backward")
    assert found == {(4, 1, "backward"), (2, 4, "backward")}
    assert edges(trace(rows, operators=operators[:1]), "backward") == set()


def test_gloo_transfers_start_with_their_operator_and_end_a_rest():
    rows = [call("c10d::allreduce_", 0, 10), work("aten::mm", 20, 30, stream=-1)]
    rows += [
        work("aten::add_", 80, 10, stream=-1),
        work("gloo:all_reduce", 5, 70, stream=-2, kind="comm"),
    ]
    assert edges(trace(rows), "launch", "sync") == {(0, 3, "launch"), (3, 2, "sync")}
    # ends under mm: nobody waits for it there
    hidden = [*rows[:3], (0, -2, "comm", "gloo:all_reduce", 5, 30)]
    assert edges(trace(hidden), "launch", "sync") == {(0, 3, "launch")}


def test_no_circle_at_one_instant():
    """Everything at once, in microseconds: a launch, its kernel and the wait for it,
    two times.
    """
    rows = [
        call(LAUNCH, 5, 0, 1),
        work("a", 5, 0, 1),
        call("cudaDeviceSynchronize", 5, 0, 2),
    ]
    rows += [call(LAUNCH, 5, 0, 3), work("b", 5, 0, 3)]
    found, nothing = dependency_graph(trace(rows)), dependency_graph(trace([]))
    assert not len(nothing.slices) and not len(nothing.time_ns) and not len(nothing.why)
    seen = set()
    for source, target in zip(
        found.source.tolist(), found.target.tolist(), strict=True
    ):
        assert target not in seen, "an edge out of an event comes before one into it"
        seen.add(source)


def test_a_simulated_timeline_has_its_own():
    rows = [(0, 0, "compute", "a", 0, 5), (0, 0, "compute", "b", 5, 5)]
    timeline = trace(rows)
    given = pd.DataFrame({"source": [0], "target": [1], "why": ["data"]})
    timeline = Timeline(timeline.spans, Meta(source="simulated"), given)
    assert edges(timeline) == {(0, 1, "data"), (0, 1, "stream")}


def test_many_launches_of_one_damaged_id_do_not_multiply():
    rows = [call(LAUNCH, i, 1, 1) for i in range(300)] + [
        work("a", 400 + i, 1, 1) for i in range(300)
    ]
    assert len(edges(trace(rows), "launch")) == 300
