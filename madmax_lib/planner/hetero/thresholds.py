"""The best plan of all: best-first search over thresholds, exact to a stated gap.

The cost has three maxima over stages: (batches - 1) x period, gradient all-reduce and
optimizer. With their means over layers in place of them a sweep finds the chain that
bounds the cost of all from below; its own maxima bound that of the best from above. A
box of thresholds between which the maxima lie is cut until the two meet: below the
upper ones fewer stages are left, and no stage counts less than the lower ones. Boxes of
all type orders and numbers of micro-batches wait in one queue, the most promising
first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from madmax_lib.planner.hetero.sweep import Chain, Sweeper

_CACHE_BYTES = 256e6  # of tables; the others are built again when needed


@dataclass(order=True)
class _Box:
    """Thresholds of one space that are still to be searched, by the least cost between
    them.
    """

    bound_s: float
    number: int  # of boxes with the same bound the oldest comes first
    space: int = field(compare=False)
    # (3,) of period, gradient all-reduce and optimizer
    low: np.ndarray = field(compare=False)
    high: np.ndarray = field(compare=False)


class Search:
    """The best chain over all spaces; `run` searches until it is proven, or a
    KeyboardInterrupt.

    spaces: makers of a Sweeper each, with the weights (3,) of their maxima. goal_gap:
    share of the cost within which the answer is proven. tick: called after every sweep.
    chain: the best so far; cost_s: what its plan costs; bound_s: the least any plan can
    cost.
    sweeps: those it took. stopped: whether it was interrupted.
    """

    def __init__(
        self,
        spaces: list[tuple[Callable[[], Sweeper], np.ndarray]],
        goal_gap: float,
        tick: Callable[[Search], None],
    ):
        self.makers, self.weights = zip(*spaces, strict=True)
        self.goal_gap = goal_gap
        self.tick = tick
        self.chain: Chain | None = None
        self.cost_s = np.inf
        self.bound_s = 0.0
        self.sweeps = 0
        self.stopped = False
        self._number = count()
        self._cache: dict[int, Sweeper] = {}  # by space, the latest used last
        self._queue: list[_Box] = []

    def run(self) -> Search:
        """Search, and the search itself."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.stopped = True
        return self

    def _run(self):
        for space in range(len(self.makers)):
            self._push(0.0, space, np.zeros(3), np.full(3, np.inf))
        while self._queue:
            # no box is more promising than the first: its bound is that of all
            box = heapq.heappop(self._queue)
            self.bound_s = min(box.bound_s, self.cost_s)
            if box.bound_s >= self._goal():
                return
            self._search(box)
        self.bound_s = self.cost_s

    def _goal(self):
        return self.cost_s * (1 - self.goal_gap)

    def _push(self, bound_s, *box):
        if bound_s < self._goal():
            heapq.heappush(self._queue, _Box(bound_s, next(self._number), *box))

    def _sweeper(self, space):
        sweeper = self._cache.pop(space, None) or self.makers[space]()
        self._cache[space] = sweeper
        size_bytes = sum(other.size_bytes for other in self._cache.values())
        while len(self._cache) > 1 and size_bytes > _CACHE_BYTES:
            size_bytes -= self._cache.pop(next(iter(self._cache))).size_bytes
        return sweeper

    def _search(self, box):
        """The best chain of a box, and smaller boxes that hold every better plan."""
        weights = self.weights[box.space]
        # the longest period counts once more, in the sum of all
        each = weights + np.array([1.0, 0.0, 0.0])
        # where the other maxima are at their least, this one alone reaches the goal
        high = np.minimum(box.high, box.low + (self._goal() - each @ box.low) / each)
        chain = self._sweeper(box.space).chain(high, box.low, weights)
        self.sweeps += 1
        if chain is not None:
            # the chain's cost has its maxima, the sweep counted means
            more = weights * (chain.largest - chain.mean)
            if chain.total + more.sum() < self.cost_s:
                self.chain = chain
                self.cost_s = chain.total + float(more.sum())
            # cut where mean and maximum are farthest apart, just below the maximum of
            # this chain, so that it is in neither half's lower bound again
            axis = int(more.argmax())
            bound_s = max(box.bound_s, chain.total)
            upper_low = box.low.copy()
            lower_high = high.copy()
            cut = (1 - self.goal_gap) * chain.largest[axis]
            upper_low[axis] = lower_high[axis] = cut
            self._push(bound_s, box.space, box.low, lower_high)
            self._push(bound_s, box.space, upper_low, high)
        self.tick(self)
