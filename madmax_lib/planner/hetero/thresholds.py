"""Which plan is best of all? Best-first search over thresholds, exact to a stated gap.

The cost has three maxima over stages: (batches - 1) x stage time, gradient all-reduce and optimizer. Below a corner of
thresholds for them a sweep gives the least rest, and a plan whose actual maxima bound its cost from above; the lower
corner of a box of thresholds bounds it from below. Boxes of all type orders and numbers of micro-batches wait in one
queue, the most promising first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from madmax_lib.planner.hetero.sweep import Chain, Sweeper

__all__ = ["Search"]

_NEAR = 1.02  # of the least bottleneck: a corner at which the second trial plan of a space is looked for
_CUT = 0.9  # of the way to the actual maximum, where a box is cut: what lies above is soon dearer than the best
_KEPT_BYTES = 256e6  # of tables; the others are built again when needed


@dataclass(order=True)
class _Box:
    """Thresholds of one space that are still to be searched, by the least cost below them."""

    bound_s: float
    number: int
    space: int = field(compare=False)
    low: np.ndarray = field(compare=False)  # (3,) of stage time, gradient all-reduce and optimizer
    high: np.ndarray = field(compare=False)
    chain: Chain = field(compare=False)  # the best below high, or further up


class Search:
    """The best chain over all spaces; `run` searches until it is proven, or a KeyboardInterrupt.

    spaces: makers of a Sweeper each, with the weights (3,) of their maxima. goal_gap: share of the cost within which
    the answer is proven. tick: called after every sweep.
    chain: the best so far; cost_s: what its plan costs; bound_s: the least any plan can cost.
    sweeps: those it took. stopped: whether it was interrupted.
    """

    def __init__(
        self, spaces: list[tuple[Callable[[], Sweeper], np.ndarray]], goal_gap: float, tick: Callable[[Search], None]
    ):
        self.makers, self.weights = zip(*spaces, strict=True)
        self.goal_gap, self.tick = goal_gap, tick
        self.chain: Chain | None = None
        self.cost_s, self.bound_s, self.sweeps, self.stopped = np.inf, 0.0, 0, False
        self._number = count()
        self._kept: dict[int, Sweeper] = {}
        self._queue: list[_Box] = []

    @property
    def gap(self) -> float:
        """Share of the cost that a better plan could save at most."""
        return max(self.cost_s - self.bound_s, 0.0) / self.cost_s if np.isfinite(self.cost_s) else np.inf

    def run(self) -> Search:
        """Search, and the search itself."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.stopped = True
        return self

    def _run(self) -> None:
        chains = {
            space: chain for space in range(len(self.makers)) if (chain := self._chain(space, self._corner(space)))
        }
        for space in sorted(chains, key=lambda space: chains[space].total):
            self._open(space, chains[space])
        while self._queue:
            box = heapq.heappop(self._queue)
            self.bound_s = min(box.bound_s, self.cost_s)
            if box.bound_s >= self._goal():
                return
            for part in self._parts(box):
                self._push(part)
        self.bound_s = self.cost_s

    def _goal(self) -> float:
        return self.cost_s * (1 - self.goal_gap)

    def _corner(self, space: int) -> tuple[float, float, float]:
        """Thresholds that every better plan of a space keeps: its longest period counts once more than its weight."""
        return tuple(self._goal() / (self.weights[space] + [1.0, 0.0, 0.0]))

    def _sweeper(self, space: int) -> Sweeper:
        sweeper = self._kept.pop(space, None) or self.makers[space]()
        self._kept[space] = sweeper
        while len(self._kept) > 1 and sum(kept.size_bytes for kept in self._kept.values()) > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return sweeper

    def _chain(self, space: int, corner) -> Chain | None:
        chain = self._sweeper(space).chain(tuple(corner))
        self.sweeps += 1
        if chain is not None:
            cost_s = chain.total + float(self.weights[space] @ chain.largest)
            if cost_s < self.cost_s:
                self.chain, self.cost_s = chain, cost_s
        self.tick(self)
        return chain

    def _open(self, space: int, chain: Chain) -> None:
        """The first box of a space: from the least longest period to no limit."""
        least = self._sweeper(space).chain(self._corner(space), bottleneck=True)
        self.sweeps += 1
        if least is None:  # by now another space has a better plan than any of this one
            return
        low = np.array([least.total, 0.0, 0.0])
        if self.weights[space] @ low + chain.total < self._goal():
            self._chain(space, (_NEAR * least.total, *self._corner(space)[1:]))
            self._push(self._box(space, low, np.full(3, np.inf), chain))

    def _push(self, box: _Box) -> None:
        if box.bound_s < self._goal():
            heapq.heappush(self._queue, box)

    def _parts(self, box: _Box) -> Iterator[_Box]:
        """Smaller boxes that hold every better plan of a box."""
        weights = self.weights[box.space]
        with np.errstate(divide="ignore"):
            cut = np.where(weights > 0, box.low + (self.cost_s - box.bound_s) / weights, np.inf)
        high = np.minimum(box.high, cut)
        if (high < box.chain.largest).any():
            if (chain := self._chain(box.space, high)) is not None:
                yield self._box(box.space, box.low, high, chain)
            return
        axis = int((weights * (box.chain.largest - box.low)).argmax())
        upper_low, lower_high = box.low.copy(), high.copy()
        upper_low[axis] = lower_high[axis] = (1 - _CUT) * box.low[axis] + _CUT * box.chain.largest[axis]
        yield self._box(box.space, upper_low, high, box.chain)
        if (chain := self._chain(box.space, lower_high)) is not None:
            yield self._box(box.space, box.low, lower_high, chain)

    def _box(self, space: int, low: np.ndarray, high: np.ndarray, chain: Chain) -> _Box:
        return _Box(float(self.weights[space] @ low + chain.total), next(self._number), space, low, high, chain)
