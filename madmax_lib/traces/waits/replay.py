"""How long would steps take with other times of their operations?

One step is a graph: an operation starts when the operations before it have ended; the
members of a matched call end together, each its own time after the last member has
started. Gaps before launches are dropped. The rules of a pipelined training step are
those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI
2025, arXiv 2505.05713); where operations tell `call` and `stream`, the order that was
seen takes their place.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

__all__ = ["StepGraph", "pipeline_graph", "seen_graph"]

_TAIL = (
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
)
_TAIL += ("optimizer-clip-main-grad", "optimizer")
_SLACK_S = 1e-6  # clocks of traces count microseconds
_BLOCK = 32  # scenarios that are replayed at once


@dataclass(frozen=True)
class StepGraph:
    """Operations of a step, in units that end together.

    units: in an order in which they can be replayed: members (rows of operations) and
    before (rows they wait for).
    """

    units: list[tuple[np.ndarray, np.ndarray]]

    def ends_s(self, own_s: np.ndarray) -> np.ndarray:
        """End (n, ...) of every operation if they take own_s (n, ...), which may hold
        any number of replays.
        """
        end = np.zeros(own_s.shape)
        for members, before in self.units:
            end[members] = (end[before].max(axis=0) if len(before) else 0.0) + own_s[
                members
            ]
        return end

    def last_s(
        self, own_s: np.ndarray, ideal_s: np.ndarray, actual: np.ndarray
    ) -> np.ndarray:
        """End (steps, scenarios) of a step whose operations take own_s (n, steps) where
        actual (n, scenarios), else
        ideal_s (n,)."""
        blocks = []
        for first in range(0, actual.shape[1], _BLOCK):
            chosen = actual[:, None, first : first + _BLOCK]
            blocks.append(
                self.ends_s(
                    np.where(chosen, own_s[:, :, None], ideal_s[:, None, None])
                ).max(axis=0)
            )
        return np.concatenate(blocks, axis=1)


def pipeline_graph(step: pd.DataFrame) -> StepGraph:
    """The graph of one step of a pipeline: rows with dp_rank, stage, optype, seq_id,
    start_ts, index 0..n-1.

    The order of computation is read from the times of the lowest dp rank whose stage
    has the same operations.
    """
    keys = zip(
        step["dp_rank"], step["stage"], step["optype"], step["seq_id"], strict=True
    )
    row = {key: i for i, key in enumerate(keys)}
    before = defaultdict(set)
    orders = {}
    for (dp_rank, stage), worker in step.groupby(["dp_rank", "stage"]):
        count = worker.groupby("optype", observed=True).size()
        alike = (stage, tuple(count.items()))
        if alike not in orders:
            compute = worker[
                worker["optype"].isin(("forward-compute", "backward-compute"))
            ]
            compute = compute.sort_values("start_ts")
            orders[alike] = list(zip(compute["optype"], compute["seq_id"], strict=True))
        for source, target in _worker_edges(orders[alike], count.to_dict()):
            before[row[dp_rank, stage, *target]].add(row[dp_rank, stage, *source])
    return _graph(step, before)


def _worker_edges(order: list[tuple], count: dict[str, int]):
    """(operation before, operation) of one worker, an operation being (kind, its
    number).
    """
    yield from pairwise(order)
    place = {operation: i for i, operation in enumerate(order)}
    for way in ("forward", "backward"):
        for side in ("send", "recv"):
            yield from pairwise(
                (f"{way}-{side}", k) for k in range(count.get(f"{way}-{side}", 0))
            )
        for k in range(count.get(f"{way}-recv", 0)):
            yield (f"{way}-recv", k), (f"{way}-compute", k)
            if k:
                yield (f"{way}-compute", k - 1), (f"{way}-recv", k)
        for k in range(count.get(f"{way}-send", 0)):
            yield (f"{way}-compute", k), (f"{way}-send", k)
    first = min(
        (i for i, (kind, _) in enumerate(order) if kind == "backward-compute"),
        default=0,
    )
    if count.get("backward-recv") and first >= 2:
        yield order[first - 2], ("backward-recv", 0)
    gathers = [
        ("params-all-gather", k) for k in range(count.get("params-all-gather", 0))
    ]
    tail = [(kind, k) for kind in _TAIL for k in range(count.get(kind, 0))]
    yield from pairwise(
        [
            *gathers,
            *(
                operation
                for operation in tail
                if operation[0] == "grads-reduce-scatter"
            ),
        ]
    )
    yield from (
        (gather, ("forward-compute", 0))
        for gather in gathers
        if ("forward-compute", 0) in place
    )
    yield from pairwise([*order[-1:], *tail])


def seen_graph(step: pd.DataFrame) -> StepGraph:
    """The graph of one step as its times show it: rows with rank, stream, start_ts,
    duration, met, index 0..n-1.

    An operation waits for the one before it on its stream and, of every other stream of
    its rank, for the last that ended before it started.
    """
    start = step["start_ts"].to_numpy()
    before = defaultdict(set)
    end = start + step["duration"].to_numpy()
    for _, rank in step.groupby("rank"):
        streams = [
            part.index.to_numpy()[np.argsort(start[part.index], kind="stable")]
            for _, part in rank.groupby("stream")
        ]
        for own in streams:
            for i, j in pairwise(own):
                before[j].add(i)
            for other in (other for other in streams if other is not own):
                ended = other[np.argsort(end[other], kind="stable")]
                place = (
                    np.searchsorted(end[ended], start[own] + _SLACK_S, side="right") - 1
                )
                for j, i in zip(own[place >= 0], ended[place[place >= 0]], strict=True):
                    before[j].add(i)
    return _graph(step, before)


def _graph(step: pd.DataFrame, before: dict[int, set]) -> StepGraph:
    """Units in an order in which each comes after what it waits for; where clocks
    contradict, in order of time.
    """
    members = defaultdict(list)
    start = step["start_ts"].to_numpy()
    for i, met in enumerate(step["met"]):
        members[met if met >= 0 else -1 - i].append(i)
    units = [np.array(rows) for rows in members.values()]
    unit_of = np.empty(len(step), dtype=np.int64)
    for number, rows in enumerate(units):
        unit_of[rows] = number
    waits = [sorted(set().union(*(before.get(i, ()) for i in rows))) for rows in units]
    follow = defaultdict(list)
    open_waits = np.zeros(len(units), dtype=np.int64)
    for number, rows in enumerate(waits):
        for earlier in {unit_of[i] for i in rows} - {number}:
            follow[earlier].append(number)
            open_waits[number] += 1
    begin = [start[rows].max() for rows in units]
    ready = [(begin[number], number) for number in np.flatnonzero(open_waits == 0)]
    rest = sorted(range(len(units)), key=begin.__getitem__, reverse=True)
    heapq.heapify(ready)
    order = []
    place = np.full(len(units), -1)
    while len(order) < len(units):
        while not ready:  # a circle
            if place[number := rest.pop()] < 0:
                ready.append((begin[number], number))
        number = heapq.heappop(ready)[1]
        if place[number] >= 0:
            continue
        place[number] = len(order)
        order.append(number)
        for later in follow[number]:
            open_waits[later] -= 1
            if not open_waits[later] and place[later] < 0:
                heapq.heappush(ready, (begin[later], later))
    earlier = [
        [i for i in waits[number] if place[unit_of[i]] < place[number]]
        for number in order
    ]
    return StepGraph(
        [
            (units[n], np.array(rows, dtype=np.int64))
            for n, rows in zip(order, earlier, strict=True)
        ]
    )
