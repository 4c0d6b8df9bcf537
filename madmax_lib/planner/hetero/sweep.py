"""The best chain of stages: dynamic programming over layers and ranks, backwards from
the last stage.

    least(x, p, k) = min over stages (n, y, way) at rank p of  stage + 2 send(k') +
    least(y, p + n, k')

k is what the stage before must know of this one (`StageTable.kind`). With a maximum in
place of the sum the same sweep gives the least bottleneck. Where activations in flight
count, the state also has the number of stages left.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from madmax_lib.planner.hetero.fleets import Fleet
from madmax_lib.planner.hetero.problem import HeteroProblem
from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.planner.hetero.stages import Grid, StageTable

__all__ = ["Chain", "Sweeper"]

_OPEN = (math.inf, math.inf, math.inf)  # no threshold for any part
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

    level: int  # stages from it on, as far as told apart
    end: int  # layer after its last
    size: int  # number of its group size
    next_level: int  # of the next stage, 0 for none
    next_kind: int  # of the next stage


class _State(NamedTuple):
    """Values of stages and least totals of chains, as a sweep leaves them."""

    # of a first or later stage, by level: (kinds, rows, sizes, places) of each band of
    # sizes
    blocks: dict[tuple[str, int], list[np.ndarray]]
    # by level, what lies ahead of a stage: (kinds, layers + 1, sizes, places + 1)
    reach: list[np.ndarray]
    combine: Callable  # np.add, or np.maximum for a bottleneck


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
        levels: int = 1,
        *,
        lacking: bool = False,
    ):
        self.table = StageTable(problem, fleet, batches, grid)
        self.levels = range(1, levels + 1)
        self.lacking = lacking
        # as many micro-batches are in flight in a stage as stages are left
        self.stages = {
            (where, level): self.table.stages(where, level, lacking=lacking)
            for level in self.levels
            for where in grid.slices
        }
        # there and back, (kinds, entries, 1) beside rows of slices
        self.sends_s = {
            key: 2 * self.table.send_s(stages.entry)[:, :, None] * (not lacking)
            for key, stages in self.stages.items()
        }
        # (sizes, places + 1) where the next stage begins; places + 1: beyond the GPUs
        self.ahead = np.minimum(
            np.arange(grid.places + 1) + grid.steps[:, None], grid.places + 1
        )
        self.ending = grid.places - grid.steps  # where the last stage begins, by size
        self._scratch = np.empty(0)
        sizes = range(len(grid.sizes))
        every = [slice(0, len(sizes))]
        together = grid.layers * self.ahead.size * 8 <= _BLOCK_BYTES
        one_by_one = [slice(size, size + 1) for size in sizes]
        self.bands = {"first": every, "later": every if together else one_by_one}

    @property
    def size_bytes(self) -> int:
        """Memory of the tables."""
        stages = self.stages.values()
        return sum(part.nbytes for stage in stages for part in stage.parts)

    def chain(self, high=_OPEN, low=_NONE, weights=_NONE) -> Chain | None:
        """The chain of least total, or of least bytes lacking on one GPU, of those whose
        parts are at most high; None if there is none.

        The total has weights times the mean of each part over layers, of every stage at
        least low. So it bounds from below what chains cost whose largest parts lie
        between low and high: a mean is at most the largest.
        """
        grid = self.table.grid
        values = {}
        for key, stages in self.stages.items():
            begin, end = grid.slices[key[0]]
            is_last = end == grid.layers
            time_s, gradients_s, optimizer_s = stages.parts
            inside = (gradients_s <= high[1]) & (optimizer_s <= high[2])
            # (kinds, entries, rows); the last stage sends nothing on
            sends_s = self.sends_s[key] * ~is_last
            period_s = np.where(inside, time_s, np.inf) + sends_s
            np.putmask(period_s, period_s > high[0], np.inf)
            if not self.lacking:
                share = (end - begin) / grid.layers
                parts = (period_s, gradients_s, optimizer_s)
                means_s = sum(
                    weight * np.maximum(part, least)
                    for weight, part, least in zip(weights, parts, low, strict=True)
                    if weight
                )
                # (entries, 1): what a stage costs once, whatever its slice
                once_s = stages.begin_s[:, None] + stages.end_s[:, None] * is_last
                period_s = period_s + share * means_s + once_s
            values[key] = period_s
        blocks = {key: self._blocks(key, values[key]) for key in values}
        state = self._descend(blocks, np.maximum if self.lacking else np.add)
        total, first = self._best(state, 0, 0, None)
        return None if first is None else self._path(state, first, values, low, total)

    def _descend(self, blocks: dict, combine: Callable):
        """Least totals of chains from every layer and position to the end, by level."""
        grid = self.table.grid
        kind = self.table.kind
        # least[level][k, x, p]: of chains that begin at layer x and position p, whose first
        # stage is of kind k; reach: the same where a stage of each size would end
        shape = (len(self.table.kinds), grid.layers + 1, grid.places + 2)
        least = [np.full(shape, np.inf) for _ in range(len(self.levels) + 1)]
        # level 0: nothing is left where layers and GPUs are used up
        least[0][0, grid.layers, grid.places] = 0.0
        reach = [totals[:, :, self.ahead] for totals in least]
        bands = self.bands["later"]
        for band, block in zip(bands, blocks["later", 1], strict=True):
            # a last stage of each size begins at one position: (sizes, rows)
            position = self.ending[band]
            size = np.arange(len(position))
            last = block[0, : grid.layers - 1, size, position]
            begins = slice(1, 1 + last.shape[1])
            least[1][kind[band][size, position], begins, position] = last
        for level in self.levels:
            for x in range(grid.layers - 1, 0, -1):
                for band, block in zip(bands, blocks["later", level], strict=True):
                    for source in filter(None, self._sources(level)):
                        # a stage to layer y meets the best chain from y on
                        rows, first_end = grid.rows(x, source)
                        values = block[:, rows]
                        if not values.size:
                            continue
                        ends = slice(first_end, first_end + values.shape[1])
                        ahead = reach[source][:, ends, band, : values.shape[3]]
                        self._improve(
                            least[level][:, x], combine, values, ahead, kind[band]
                        )
                reach[level][:, x] = least[level][:, x][:, self.ahead]
        return _State(blocks, reach, combine)

    def _improve(
        self,
        least: np.ndarray,
        combine: Callable,
        rows: np.ndarray,
        ahead: np.ndarray,
        kind: np.ndarray,
    ):
        """Least of each kind and position, lowered by stages over rows with what lies
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

    def _blocks(self, key: tuple[str, int], values: np.ndarray):
        """(kinds, rows, sizes, places) least values of each band of sizes, without what
        is infinite at the end.
        """
        stages = self.stages[key]
        blocks = []
        classes = [stages.least(value, self.table.classes) for value in values]
        for band in self.bands[key[0]]:
            places = 1 + int(self.ending[band].max()) if key[0] == "later" else 1
            group = self.table.group[band, :places]
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

    def _sources(self, level: int):
        """Levels of the stage after one: the last level stands for all higher ones."""
        return (level - 1, level) if level == self.levels[-1] else (level - 1,)

    def _best(self, state: _State, x: int, position: int, before: _Option | None):
        """Least total of the chains from a layer and position, and the first stage of that
        chain; the first on ties.

        before: the stage that ends there, None for the first of all.
        """
        where = "later" if before else "first"
        of_kind = self.table.kind[:, position]
        is_next = of_kind == before.next_kind if before else of_kind >= 0
        best = np.inf
        answer = None
        for level in [before.next_level] if before else self.levels:
            for band, block in zip(
                self.bands[where], state.blocks[where, level], strict=True
            ):
                for source in self._sources(level):
                    rows, first_end = self.table.grid.rows(x, source)
                    values = block[:, rows, :, position : position + 1]
                    if not values.size:
                        continue
                    ends = slice(first_end, first_end + values.shape[1])
                    ahead = state.reach[source][:, ends, band, position : position + 1]
                    # (kinds, ends, sizes) at the one position
                    totals = state.combine(values, ahead)[..., 0]
                    options = np.where(is_next[band], totals, np.inf)
                    if options.min() < best:
                        best = options.min()
                        kind, row, size = np.unravel_index(
                            options.argmin(), options.shape
                        )
                        answer = _Option(
                            level, first_end + row, band.start + size, source, kind
                        )
        return best, answer

    def _path(self, state: _State, option: _Option, values: dict, low, total: float):
        """The chain behind a total: at each stage the option of least value."""
        begin = 0  # first layer of the stage
        position = 0  # and where it begins on the grid of ranks
        cuts = [0]
        entries = []
        parts = []
        while option:
            entry, entry_parts = self._entry(option, begin, position, values)
            cuts.append(int(option.end))
            entries.append(entry)
            parts.append(entry_parts)
            begin = option.end
            position += int(self.table.grid.steps[option.size])
            if not option.next_level:
                break
            _, option = self._best(state, begin, position, option)
        mean = np.diff(cuts) / cuts[-1] @ np.maximum(parts, low)
        plan = self._plan(cuts, entries)
        return Chain(float(total), np.max(parts, axis=0), mean, plan)

    def _entry(self, option: _Option, begin: int, position: int, values: dict):
        """Number of the cheapest entry of a stage, and its parts."""
        key = ("later" if begin else "first", option.level)
        stages = self.stages[key]
        rows, first_end = self.table.grid.rows(begin, option.next_level)
        row = rows.start + option.end - first_end
        group = self.table.group[option.size, position]
        number = int(np.searchsorted(stages.classes, group))
        # entries of the class
        start, stop = [*stages.starts, len(stages.entry)][number : number + 2]
        chosen = start + int(values[key][option.next_kind, start:stop, row].argmin())
        send_s = 0.0
        if option.next_level:
            send_s = self.sends_s[key][option.next_kind, chosen, 0]
        time_s, *updates_s = (float(part[chosen, row]) for part in stages.parts)
        return int(stages.entry[chosen]), [time_s + float(send_s), *updates_s]

    def _plan(self, cuts: list[int], entries: list[int]):
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
