"""Graphs of a step's operations, and how long it takes with other times of them.

One step is a graph: an operation starts when the operations before it have ended; the
members of a matched call end together, each its own time after the last member has
started. Gaps before launches are dropped. The rules of a pipelined training step are
those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI
2025, arXiv 2505.05713); where operations tell `call` and `stream`, the order that was
seen takes their place.
"""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
import pandas as pd

from madmax_lib.traces.waits.longest_path import longest_paths

# what follows the passes of a step, in order
_TAIL = (
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "optimizer",
)
_SLACK_S = 1e-6  # clocks of traces count microseconds


@dataclass(frozen=True)
class StepGraph:
    """Operations of a step, in units that end together.

    Events 0..n-1 are the ends of the operations, further ones the starts of the units.
    Edges are sorted: all into an event come before any out of it.
    """

    source: list[int]  # (edges,)
    target: list[int]  # (edges,)
    row: np.ndarray  # (edges,) operation that takes its time on the way, -1 for none
    events: int

    def ends_s(self, own_s: np.ndarray) -> np.ndarray:
        """End (n, replays) of every operation if they take own_s (n, replays).

        end(i) = max over what its unit waits for of end(j), + own(i)
        """
        weight_s = np.where(self.row[:, None] >= 0, own_s[self.row], 0.0)
        ends = [
            longest_paths(self.source, self.target, weight, [0.0] * self.events)[
                : len(own_s)
            ]
            for weight in weight_s.T.tolist()
        ]
        return np.array(ends).T


def pipeline_graph(step: pd.DataFrame) -> StepGraph:
    """The graph of one step of a pipeline: rows with dp_rank, stage, optype, seq_id,
    start_ts, index 0..n-1.

    The order of computation is read from the times of the lowest dp rank whose stage
    has the same operations.
    """
    keys = step[["dp_rank", "stage", "optype", "seq_id"]].itertuples(index=False)
    row = {tuple(key): number for number, key in enumerate(keys)}
    before = defaultdict(set)
    orders = {}
    for (dp_rank, stage), worker in step.groupby(["dp_rank", "stage"]):
        count = worker.groupby("optype", observed=True).size().to_dict()
        same_work = (stage, tuple(count.items()))
        if same_work not in orders:
            passes = worker["optype"].isin(("forward-compute", "backward-compute"))
            compute = worker[passes].sort_values("start_ts")
            names = zip(compute["optype"], compute["seq_id"], strict=True)
            orders[same_work] = list(names)
        for source, target in _worker_edges(orders[same_work], count):
            before[row[dp_rank, stage, *target]].add(row[dp_rank, stage, *source])
    return _graph(step, before)


def _worker_edges(order, count):
    """(operation before, operation) of one worker, an operation being (kind, its
    number). order: of the passes; count: operations of each kind.
    """

    def all_of(kind):
        return [(kind, number) for number in range(count.get(kind, 0))]

    yield from pairwise(order)
    for way in ("forward", "backward"):
        compute = f"{way}-compute"
        receives = all_of(f"{way}-recv")
        sends = all_of(f"{way}-send")
        yield from pairwise(sends)
        yield from pairwise(receives)
        for receive in receives:
            number = receive[1]
            yield receive, (compute, number)
            # A receive is posted when the pass before has ended.
            if number:
                yield (compute, number - 1), receive
        for send in sends:
            yield (compute, send[1]), send
    # The first gradient is awaited one pass before it is used, as in 1F1B.
    kinds = [kind for kind, _ in order]
    first = kinds.index("backward-compute") if "backward-compute" in kinds else 0
    if count.get("backward-recv") and first >= 2:
        yield order[first - 2], ("backward-recv", 0)
    gathers = all_of("params-all-gather")
    tail = [operation for kind in _TAIL for operation in all_of(kind)]
    # Gathers and reductions share the data-parallel stream.
    yield from pairwise([*gathers, *all_of("grads-reduce-scatter")])
    if ("forward-compute", 0) in order:
        yield from ((gather, ("forward-compute", 0)) for gather in gathers)
    yield from pairwise([*order[-1:], *tail])


def seen_graph(step: pd.DataFrame) -> StepGraph:
    """The graph of one step as its times show it: rows with rank, stream, start_ts,
    duration, met, index 0..n-1.

    An operation waits for the one before it on its stream and, of every other stream of
    its rank, for the last that ended before it started.
    """
    start = step["start_ts"].to_numpy()
    end = start + step["duration"].to_numpy()
    before = defaultdict(set)
    for _, rank in step.groupby("rank"):
        streams = [lane.index.to_numpy() for _, lane in rank.groupby("stream")]
        by_start = [_by_time(lane, start) for lane in streams]
        by_end = [_by_time(lane, end) for lane in streams]
        for number, lane in enumerate(by_start):
            for earlier, later in pairwise(lane):
                before[later].add(earlier)
            for ended in by_end[:number] + by_end[number + 1 :]:
                starts = start[lane] + _SLACK_S
                at = np.searchsorted(end[ended], starts, side="right") - 1
                some = at >= 0
                for later, earlier in zip(lane[some], ended[at[some]], strict=True):
                    before[later].add(earlier)
    return _graph(step, before)


def _by_time(number, time):
    """Numbers (m,) of operations in order of a time (all operations,)."""
    return number[np.argsort(time[number], kind="stable")]


def _graph(step, before):
    """Units in an order in which each comes after what it waits for; where clocks
    contradict, in order of time.
    """
    members = defaultdict(list)
    for number, met in enumerate(step["met"]):
        members[met if met >= 0 else -1 - number].append(number)
    units = list(members.values())
    unit_of = {number: unit for unit, rows in enumerate(units) for number in rows}
    waits = [sorted(set().union(*(before.get(i, ()) for i in rows))) for rows in units]
    start = step["start_ts"].to_numpy()
    begin = [start[rows].max() for rows in units]
    awaited = [
        {unit_of[number] for number in rows} - {unit} for unit, rows in enumerate(waits)
    ]
    try:
        order = list(TopologicalSorter(dict(enumerate(awaited))).static_order())
    except CycleError:
        order = np.argsort(begin, kind="stable").tolist()
    turn = {unit: number for number, unit in enumerate(order)}
    edges = []
    for number, unit in enumerate(order, len(step)):
        earlier = [i for i in waits[unit] if turn[unit_of[i]] < turn[unit]]
        edges += [(i, number, -1) for i in earlier]
        edges += [(number, i, i) for i in units[unit]]
    source, target, row = zip(*edges, strict=True) if edges else ((), (), ())
    events = len(step) + len(order)
    return StepGraph(list(source), list(target), np.array(row, dtype="int64"), events)
