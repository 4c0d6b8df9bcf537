"""The best chain of stages: dynamic programming over layers and ranks, backwards from
the last stage.

    least(x, p, k) = min over stages (n, y, way) at rank p of  stage + 2 send(k') +
    least(y, p + n, k')

k is what the stage before must know of this one (`StageTable.kind`). With a maximum in
place of the sum the same sweep gives the least bottleneck. Where activations in flight
count, the state also has the number of stages left.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from madmax_lib.planner.hetero.fleets import Fleet, HeteroProblem
from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.planner.hetero.stages import Grid, StageTable

OPEN = (math.inf, math.inf, math.inf)  # no threshold for any part
_NONE = (0.0, 0.0, 0.0)
# Up to here all group sizes are swept at once, beyond one by one: blocks stay in the
# cache.
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Chain:
    """Stages from the first layer to the last."""

    total: float  # what the sweep added up, or the largest of it
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
    middle: list[list[np.ndarray]]  # blocks of stages by level
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
    lacking: missing memory in place of times.
    """

    def __init__(
        self,
        problem: HeteroProblem,
        grid: Grid,
        batches: int,
        fleet: Fleet,
        levels=1,
        *,
        lacking=False,
    ):
        self.table = StageTable(problem, fleet, batches, grid)
        self.levels = levels
        self.stages = {
            (where, level): self.table.stages(where, level + 1, lacking=lacking)
            for level in range(levels)
            for where in ("first", "middle", "last", "single")
            if level == 0 or where != "single"
        }
        self.sends_s = {}
        for (where, level), stages in self.stages.items():
            sends = where in ("first", "middle") and not lacking
            # there and back, (kinds, entries, 1) beside rows of slices
            send_s = 2 * self.table.send_s(stages.entry)[:, :, None]
            self.sends_s[where, level] = send_s * sends
        # (sizes, places + 1) where the next stage begins; places + 1: beyond the GPUs
        self.ahead = np.minimum(
            np.arange(grid.places + 1) + grid.steps[:, None], grid.places + 1
        )
        self.ending = grid.places - grid.steps  # where the last stage begins, by size
        together = grid.middle.shape[1] * self.ahead.size * 8 <= _BLOCK_BYTES
        sizes = range(len(grid.sizes))
        self._scratch = np.empty(0)
        self.bands = (
            [slice(0, len(sizes))] if together else [slice(i, i + 1) for i in sizes]
        )

    @property
    def size_bytes(self) -> int:
        """Memory of the tables."""
        stages = self.stages.values()
        return sum(part.nbytes for stage in stages for part in stage.parts)

    def chain(
        self,
        high=OPEN,
        low=_NONE,
        weights=_NONE,
        *,
        bottleneck: bool = False,
    ) -> Chain | None:
        """The chain of least total, or longest period, of those whose parts are at most
        high; None if there is none.

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
            if not bottleneck:
                begin, end = getattr(self.table.grid, key[0])
                share = (end - begin) / self.table.grid.layers
                parts = (period_s, gradients_s, optimizer_s)
                means_s = sum(
                    weight * np.maximum(part, least)
                    for weight, part, least in zip(weights, parts, low, strict=True)
                    if weight
                )
                # (entries, 1): what a stage costs once, whatever its slice
                period_s = period_s + share * means_s + stages.extra_s[:, None]
            values[key] = period_s
        combine = np.maximum if bottleneck else np.add
        state = self._descend(values, combine)
        if not np.isfinite(state.total):
            return None
        return self._path(state, values, combine, low)

    def _descend(self, values, combine):
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
                for band, block in zip(self.bands, middle[level], strict=True):
                    rows = block[:, grid.row(x) : grid.row(x) + layers - 1 - x]
                    next_layers = slice(x + 1, x + 1 + rows.shape[1])
                    for source in self._sources(level) if rows.size else ():
                        # a stage to layer y meets the best chain from y on
                        ahead = reach[source][:, next_layers, band, : rows.shape[3]]
                        self._improve(
                            least[level][:, x], combine, rows, ahead, kind[band]
                        )
                reach[level][:, x] = least[level][:, x][:, self.ahead]
        starts = {
            (level, source): combine(
                ends.first[level], reach[source][:, 1:layers, :, 0]
            )
            for level in levels
            for source in self._sources(level)
        }
        return _State(starts, middle, ends.last, reach, ends.single)

    def _improve(self, least, combine, rows, ahead, kind):
        """Least of each kind and place, lowered by stages over rows with what lies
        ahead of them.
        """
        # scratch memory: new pages for each block would cost as much as its sums
        size = math.prod(rows.shape)
        if len(self._scratch) < size:
            self._scratch = np.empty(size)
        out = self._scratch[:size].reshape(rows.shape)
        options = combine(rows, ahead, out=out)
        # (kinds of the next stage, ends, sizes, places): the first two as one axis, of
        # which numpy finds the least in one pass
        flat = options.reshape(-1, options[0, 0].size).min(axis=0)
        lowest = flat.reshape(options.shape[2:])  # (sizes, places)
        for code in range(len(least)):
            of_kind = lowest
            if len(least) > 1:
                of_kind = np.where(kind[:, : lowest.shape[1]] == code, lowest, np.inf)
            target = least[code, : of_kind.shape[1]]
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
        """(kinds, rows, sizes, places) least values of each band of sizes, without what
        is infinite at the end.
        """
        stages = self.stages["middle", level]
        blocks = []
        classes = [stages.least(value, self.table.classes) for value in values]
        for band in self.bands:
            group = self.table.group[band, : 1 + int(self.ending[band].max())]
            finite = np.isfinite(np.min(classes, axis=0)[np.unique(group)]).any(axis=0)
            count = len(finite)
            if self.table.grid.uniform:
                # rows are then by length: thresholds cut the longest slices
                count = int(np.max(np.flatnonzero(finite), initial=-1)) + 1
            # rows first and contiguous, since slices of them are added
            blocks.append(
                np.stack(
                    [
                        np.ascontiguousarray(least[:, :count].T)[:, group]
                        for least in classes
                    ]
                )
            )
        return blocks

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

    def _path(self, state, values, combine, low):
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
            option = self._next_option(state, option, position, combine)
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

    def _next_option(self, state, before, position, combine):
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
        for band, block in zip(self.bands, state.middle[level], strict=True):
            rows = block[:, first_row : first_row + count, :, position : position + 1]
            next_layers = slice(begin + 1, begin + 1 + rows.shape[1])
            for source in self._sources(level) if rows.size else ():
                ahead = state.reach[source][
                    :, next_layers, band, position : position + 1
                ]
                # (kinds, ends, sizes) at the one place
                sums = combine(rows, ahead)[..., 0]
                options = np.where(of_kind[band], sums, np.inf)
                if options.min() < best:
                    best = options.min()
                    kind, row, size = _argmin(options)
                    answer = _Option(
                        "middle",
                        level,
                        kind,
                        begin + 1 + row,
                        band.start + size,
                        source,
                    )
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
            node_sequence=table.fleet.types,
            device_groups=tuple(gpus),
            strategies=tuple(degrees),
            batches=table.batches,
            layer_partition=tuple(cuts),
            recompute=tuple(table.prices.ways[way][1] for way in table.way[entries]),
        )


def _argmin(options):
    """Indices of the least value."""
    return [int(index) for index in np.unravel_index(options.argmin(), options.shape)]
