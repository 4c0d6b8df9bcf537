"""The best chain of stages: dynamic programming over layers and ranks, backwards from
the last stage.

    least(x, p, k) = min over stages (n, y, way) at rank p of  stage + 2 send(k') +
    least(y, p + n, k')

k is what the stage before must know of this one (`StageTable.kind`). Where activations
in flight count, the state also has the number of stages left.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from madmax_lib.planner.hetero.fleets import Fleet, HeteroProblem
from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.planner.hetero.stages import Grid, StageTable

_OPEN = (math.inf, math.inf, math.inf)  # no threshold for any part
_NONE = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Chain:
    """Stages from the first layer to the last."""

    total: float  # what the sweep added up
    # (3,) seconds of period, gradient all-reduce and optimizer, of the slowest stages
    largest: np.ndarray
    # (3,) of these over layers, of every stage at least what the sweep took for the
    # least
    mean: np.ndarray
    plan: HeteroPlan  # the stages as a plan


@dataclass(frozen=True)
class _Option:
    """One stage of the best chain."""

    where: str  # first, middle, last or single
    level: int  # stages after it, as far as told apart
    next_kind: int  # of the next stage
    end: int  # layer after its last
    size: int  # number of its group size
    next_level: int  # of the next stage


@dataclass(frozen=True, eq=False)
class _State:
    """Least totals of chains by their first stage, as a sweep leaves them."""

    # by (level, next level) of a first stage, over (kind, end, size)
    starts: dict[tuple[int, int], np.ndarray]
    middle: list[np.ndarray]  # stages by level
    last: np.ndarray  # (layers, sizes)
    reach: list[np.ndarray]  # by level, what lies ahead of a stage
    single: float  # of one stage alone

    @cached_property
    def total(self):
        """The least of all."""
        starts = [float(part.min(initial=np.inf)) for part in self.starts.values()]
        return min([self.single, *starts])


class _Ends(NamedTuple):
    """Least values of the stages at the ends of chains, by group size."""

    first: list[np.ndarray]  # by level, (kinds, rows, sizes)
    last: np.ndarray  # (rows, sizes)
    single: float  # of one stage alone


class Sweeper:
    """Sweeps over the stages of a number of micro-batches and an order of the GPU
    types.

    levels: stages left that are told apart, 1 where activations in flight do not count.
    """

    def __init__(
        self,
        problem: HeteroProblem,
        grid: Grid,
        batches: int,
        fleet: Fleet,
        levels=1,
    ):
        self.table = StageTable(problem, fleet, batches, grid)
        self.levels = levels
        self.stages = {
            (where, level): self.table.stages(where, level + 1)
            for level in range(levels)
            for where in ("first", "middle", "last", "single")
            if level == 0 or where != "single"
        }
        self.sends_s = {}
        for (where, level), stages in self.stages.items():
            sends = where in ("first", "middle")
            # there and back, (kinds, entries, 1) beside rows of slices
            send_s = 2 * self.table.send_s(stages.entry)[:, :, None]
            self.sends_s[where, level] = send_s * sends
        # (sizes, places + 1) where the next stage begins; places + 1: beyond the GPUs
        self.ahead = np.minimum(
            np.arange(grid.places + 1) + grid.steps[:, None], grid.places + 1
        )
        self.ending = grid.places - grid.steps  # where the last stage begins, by size

    @property
    def size_bytes(self) -> int:
        """Memory of the tables."""
        stages = self.stages.values()
        return sum(part.nbytes for stage in stages for part in stage.parts)

    def chain(
        self,
        high=_OPEN,
        low=_NONE,
        weights=_NONE,
    ) -> Chain | None:
        """The chain of least total of those whose parts are at most high; None if there
        is none.

        The total has weights times the mean of each part over layers, of every stage at
        least low. So it bounds from below what chains cost whose largest parts lie
        between low and high: a mean is at most the largest.
        """
        values = {}
        for key, stages in self.stages.items():
            time_s, gradients_s, optimizer_s = stages.parts
            inside = (gradients_s <= high[1]) & (optimizer_s <= high[2])
            # (kinds, entries, rows)
            period_s = np.where(inside, time_s, np.inf) + self.sends_s[key]
            np.putmask(period_s, period_s > high[0], np.inf)
            begin, end = getattr(self.table.grid, key[0])
            share = (end - begin) / self.table.grid.layers
            parts = (period_s, gradients_s, optimizer_s)
            means_s = sum(
                weight * np.maximum(part, least)
                for weight, part, least in zip(weights, parts, low, strict=True)
                if weight
            )
            # (entries, 1): what a stage costs once, whatever its slice
            values[key] = period_s + share * means_s + stages.extra_s[:, None]
        state = self._descend(values)
        if not np.isfinite(state.total):
            return None
        return self._path(state, values, low)

    def _descend(self, values):
        """Least totals of chains from every layer and place to the end, by level."""
        grid = self.table.grid
        kind = self.table.kind
        kinds = len(self.table.kinds)
        layers = grid.layers
        sizes = np.arange(len(grid.sizes))
        levels = range(self.levels)
        # least[level][k, x, p]: of chains that begin at layer x and place p, whose first
        # stage is of kind k; reach: the same where a stage of each size would end
        least = [np.full((kinds, layers + 1, grid.places + 2), np.inf) for _ in levels]
        reach = [np.full((kinds, layers + 1, *kind.shape), np.inf) for _ in levels]
        ends = self._ends(values)
        middle = [
            self._middle(values["middle", level], level) for level in range(self.levels)
        ]
        for level in levels:
            for x in range(layers - 1, 0, -1):
                if level == 0:  # the last stage, with none after it
                    least[0][kind[sizes, self.ending], x, self.ending] = ends.last[
                        x - 1
                    ]
                rows = middle[level][:, grid.row(x) : grid.row(x) + layers - 1 - x]
                next_layers = slice(x + 1, x + 1 + rows.shape[1])
                for source in self._sources(level) if rows.size else ():
                    # a stage to layer y meets the best chain from y on
                    ahead = reach[source][:, next_layers, :, : rows.shape[3]]
                    self._improve(least[level][:, x], rows + ahead)
                reach[level][:, x] = least[level][:, x][:, self.ahead]
        starts = {
            (level, source): ends.first[level] + reach[source][:, 1:layers, :, 0]
            for level in levels
            for source in self._sources(level)
        }
        return _State(starts, middle, ends.last, reach, ends.single)

    def _improve(self, least, options):
        """Least of each kind and place, lowered by stages with what lies ahead of them,
        (kinds of the next stage, ends, sizes, places).
        """
        lowest = options.min(axis=(0, 1))
        places = lowest.shape[1]
        for code, target in enumerate(least[:, :places]):
            of_kind = np.where(self.table.kind[:, :places] == code, lowest, np.inf)
            np.minimum(target, of_kind.min(axis=0), out=target)

    def _ends(self, values):
        group = self.table.group
        first = [
            self._least("first", level, values, group[:, 0])
            for level in range(self.levels)
        ]
        ending = group[np.arange(len(group)), self.ending]
        last = self._least("last", 0, values, ending)[0]
        single = math.inf
        if self.ending[-1] == 0:  # the largest group holds all GPUs
            single = float(self._least("single", 0, values, group[-1:, 0])[0, 0, 0])
        return _Ends(first, last, single)

    def _middle(self, values, level):
        """(kinds, rows, sizes, places) least values, without what is infinite at the
        end.
        """
        stages = self.stages["middle", level]
        classes = np.stack(
            [stages.least(value, self.table.classes) for value in values]
        )
        group = self.table.group[:, : 1 + int(self.ending.max())]
        count = classes.shape[2]
        if self.table.grid.uniform:
            # rows are then by length: thresholds cut the longest slices
            finite = np.isfinite(classes).any(axis=(0, 1))
            count = int(np.max(np.flatnonzero(finite), initial=-1)) + 1
        # rows before groups and contiguous, since slices of them are added
        rows = np.ascontiguousarray(classes[:, :, :count].transpose(0, 2, 1))
        return rows[:, :, group]

    def _least(self, where, level, values, group):
        """(kinds, rows, groups) least values of some groups."""
        stages = self.stages[where, level]
        return np.stack(
            [
                stages.least(value, self.table.classes).T[:, group]
                for value in values[where, level]
            ]
        )

    def _sources(self, level):
        """Levels of the stage after one: the last level stands for all higher ones."""
        sources = [level] if level == self.levels - 1 else []
        if level:
            sources.append(level - 1)
        return tuple(sources)

    def _path(self, state, values, low):
        """The chain behind a total: at each stage the option of least value, the first
        on ties.
        """
        option = self._first_option(state)
        begin = 0  # first layer of the stage
        position = 0  # and its place on the grid of ranks
        cuts = [0]
        entries = []
        parts = []
        while True:
            entry, entry_parts = self._entry(option, begin, position, values)
            cuts.append(option.end)
            entries.append(entry)
            parts.append(entry_parts)
            if option.where in ("last", "single"):
                break
            begin = option.end
            position += int(self.table.grid.steps[option.size])
            option = self._next_option(state, option, position)
        mean = np.diff(cuts) / cuts[-1] @ np.maximum(parts, low)
        plan = self._plan(cuts, entries)
        return Chain(state.total, np.max(parts, axis=0), mean, plan)

    def _first_option(self, state):
        best = state.single
        last_size = len(self.ending) - 1
        answer = _Option("single", 0, 0, self.table.grid.layers, last_size, 0)
        for (level, source), options in state.starts.items():
            if options.min(initial=np.inf) < best:
                best = options.min()
                kind, row, size = _argmin(options)
                answer = _Option("first", level, kind, row + 1, size, source)
        return answer

    def _next_option(self, state, before, position):
        """The stage after one, which begins where that ends."""
        grid = self.table.grid
        level = before.next_level
        begin = before.end
        best = np.inf
        answer = None
        of_kind = self.table.kind[:, position] == before.next_kind
        if level == 0:
            for size in np.flatnonzero((self.ending == position) & of_kind):
                best = state.last[begin - 1, size]
                answer = _Option("last", 0, 0, grid.layers, int(size), 0)
        first_row = grid.row(begin)
        count = grid.layers - 1 - begin
        middle = state.middle[level]
        if position >= middle.shape[3]:  # only a last stage begins there
            return answer
        # (kinds, ends, sizes) at the one place
        rows = middle[:, first_row : first_row + count, :, position]
        next_layers = slice(begin + 1, begin + 1 + rows.shape[1])
        for source in self._sources(level) if rows.size else ():
            sums = rows + state.reach[source][:, next_layers, :, position]
            options = np.where(of_kind, sums, np.inf)
            if options.min() < best:
                best = options.min()
                kind, row, size = _argmin(options)
                end = begin + 1 + row
                answer = _Option("middle", level, kind, end, size, source)
        return answer

    def _entry(self, option, begin, position, values):
        """Number of the cheapest entry of a stage, and its parts."""
        key = option.where, option.level
        stages = self.stages[key]
        end = option.end
        # row of the slice begin..end, as `Grid` orders them
        row = {
            "first": end - 1,
            "last": begin - 1,
            "single": 0,
            "middle": self.table.grid.row(max(begin, 1)) + end - begin - 1,
        }[option.where]
        group = self.table.group[option.size, position]
        number = int(np.searchsorted(stages.classes, group))
        # entries of the class
        start, stop = [*stages.starts, len(stages.entry)][number : number + 2]
        chosen = start + int(values[key][option.next_kind, start:stop, row].argmin())
        send_s = self.sends_s[key][option.next_kind, chosen, 0]
        time_s, *updates_s = (float(part[chosen, row]) for part in stages.parts)
        return int(stages.entry[chosen]), [time_s + float(send_s), *updates_s]

    def _plan(self, cuts, entries):
        table = self.table
        gpus = table.size[table.of_class[entries]].tolist()
        degrees = zip(
            table.dp[entries].tolist(), table.tp[entries].tolist(), strict=True
        )
        return HeteroPlan(
            node_sequence=table.fleet.order,
            device_groups=tuple(gpus),
            strategies=tuple(degrees),
            batches=table.batches,
            layer_partition=tuple(cuts),
            recompute=tuple(table.prices.ways[way][1] for way in table.way[entries]),
        )


def _argmin(options):
    """Indices of the least value."""
    return [int(index) for index in np.unravel_index(options.argmin(), options.shape)]
