"""Graphs of a step's operations, and how long it takes with other times of them.

One step is a graph: an operation starts when the operations before it have ended; the
members of a matched call end together, each its own time after the last member has
started. Gaps before launches are dropped. What waits for what is read from the times: an
operation waited for the last that ended before it on each stream of its rank.
"""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
import pandas as pd

__all__ = ["StepGraph", "seen_graph"]

_SLACK_S = 1e-6  # clocks of traces count microseconds
_BLOCK = 32  # scenarios that are replayed at once


@dataclass(frozen=True)
class StepGraph:
    """Operations of a step, in units that end together.

    units: in an order in which they can be replayed: members (rows of operations) and
    before (rows they wait for).
    """

    units: list[tuple[np.ndarray, np.ndarray]]

    def last_s(
        self, own_s: np.ndarray, ideal_s: np.ndarray, actual: np.ndarray
    ) -> np.ndarray:
        """End (scenarios,) of the step whose operations take own_s (n,) where actual
        (n, scenarios), else ideal_s (n,).

        end(i) = max over what its unit waits for of end(j), + own(i)
        """
        blocks = []
        for first in range(0, actual.shape[1], _BLOCK):
            chosen = actual[:, first : first + _BLOCK]
            # (n, scenarios): each operation under each scenario
            times_s = np.where(chosen, own_s[:, None], ideal_s[:, None])
            end = np.zeros(times_s.shape)
            for members, before in self.units:
                start = end[before].max(axis=0) if len(before) else 0.0
                end[members] = start + times_s[members]
            blocks.append(end.max(axis=0))
        return np.concatenate(blocks)


def seen_graph(step: pd.DataFrame) -> StepGraph:
    """The graph of one step as its times show it: rows with rank, stream, start_ts,
    duration, call, index 0..n-1.

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


def _by_time(number: np.ndarray, time: np.ndarray):
    """Numbers (m,) of operations in order of a time (all operations,)."""
    return number[np.argsort(time[number], kind="stable")]


def _graph(step: pd.DataFrame, before: dict[int, set]):
    """Units in an order in which each comes after what it waits for; where clocks
    contradict, in order of time.
    """
    members = defaultdict(list)
    for number, call in enumerate(step["call"]):
        members[call if call >= 0 else -1 - number].append(number)
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
    ordered = []
    for unit in order:
        earlier = [i for i in waits[unit] if turn[unit_of[i]] < turn[unit]]
        ordered.append((np.array(units[unit]), np.array(earlier, dtype=np.int64)))
    return StepGraph(ordered)
