"""Which chain of stages is best? Dynamic programming over layers and ranks, backwards from the last stage.

    least(x, p, k) = min over stages (n, y, way) at rank p of  stage + send(k') + least(y, p + n, k')

k is what the stage before must know of this one (`Space.kind`). With a maximum in place of the sum the same sweep
gives the least bottleneck. Where activations in flight count, the state also has the number of stages left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.planner.hetero.stages import Space

__all__ = ["Chain", "Sweeper"]

_BLOCK_BYTES = 2**20  # up to here all group sizes are swept at once, beyond one by one: blocks stay in the cache


@dataclass(frozen=True)
class Chain:
    """Stages from the first layer to the last: total of the sweep, the largest of each part, and the plan."""

    total: float
    largest: tuple[float, float, float]
    plan: HeteroPlan


class Sweeper:
    """Sweeps over one space; levels: stages left that are told apart, 1 where activations in flight do not count."""

    def __init__(self, space: Space, levels: int = 1, *, lacking: bool = False):
        self.space, self.levels = space, levels
        self.tables = {
            (where, level): space.stages(where, level + 1, lacking=lacking)
            for level in range(levels)
            for where in ("first", "middle", "last", "whole")
            if level == 0 or where != "whole"
        }
        self.send_ms = {key: space.send_ms(stages.entry) for key, stages in self.tables.items()}
        layout = space.layout
        self.ahead = np.minimum(np.arange(layout.places + 1) + layout.steps[:, None], layout.places + 1)
        self.ending = layout.places - layout.steps
        together = layout.middle.shape[1] * self.ahead.size * 8 <= _BLOCK_BYTES
        sizes = range(len(layout.sizes))
        self._scratch = np.empty(0)
        self.bands = [slice(0, len(sizes))] if together else [slice(i, i + 1) for i in sizes]

    @property
    def size_bytes(self) -> int:
        """Memory of the tables."""
        return sum(part.nbytes for stages in self.tables.values() for part in stages.parts)

    def bottleneck(self, part: int) -> float:
        """Least possible largest value of a part (0 stage, 1 gradients, 2 optimizer) over all chains."""
        values = {}
        for key, stages in self.tables.items():
            possible = np.where(np.isfinite(stages.parts[0]), stages.parts[part], np.inf)
            values[key] = np.broadcast_to(possible, (len(self.space.kinds), *possible.shape))
        return self._descend(values, np.maximum)[0]

    def chain(self, corner: tuple[float, float, float], *, bottleneck: bool = False) -> Chain | None:
        """The chain of least total among those whose parts are at most the corner's; None if there is none."""
        values = {}
        for key, stages in self.tables.items():
            time_ms, gradients_ms, optimizer_ms = stages.parts
            inside = (time_ms <= corner[0]) & (gradients_ms <= corner[1]) & (optimizer_ms <= corner[2])
            alone = np.where(inside, time_ms if bottleneck else time_ms + stages.extra_ms[:, None], np.inf)
            send_ms = 0.0 if bottleneck or key[0] in ("last", "whole") else self.send_ms[key][:, :, None]
            values[key] = np.broadcast_to(alone, (len(self.space.kinds), *alone.shape)) + send_ms
        combine = np.maximum if bottleneck else np.add
        total, state = self._descend(values, combine)
        if not np.isfinite(total):
            return None
        return self._path(total, state, values, combine)

    def _descend(self, values: dict, combine) -> tuple[float, dict]:
        """Least total, and the arrays that `_path` goes back through."""
        layout, kind, kinds = self.space.layout, self.space.kind, len(self.space.kinds)
        layers, sizes = layout.layers, np.arange(len(layout.sizes))
        least = [np.full((kinds, layers + 1, layout.places + 2), np.inf) for _ in range(self.levels)]
        reach = [np.full((kinds, layers + 1, *kind.shape), np.inf) for _ in range(self.levels)]
        first, last, whole = self._ends(values)
        middle = [self._middle(values["middle", level], level) for level in range(self.levels)]
        for level in range(self.levels):
            for x in range(layers - 1, 0, -1):
                if level == 0:
                    least[0][kind[sizes, self.ending], x, self.ending] = last[x - 1]
                for band, block in zip(self.bands, middle[level], strict=True):
                    rows = block[:, layout.row(x) : layout.row(x) + layers - 1 - x]
                    for source in self._sources(level) if rows.size else ():
                        ahead = reach[source][:, x + 1 : x + 1 + rows.shape[1], band, : rows.shape[3]]
                        self._improve(least[level][:, x], combine, rows, ahead, kind[band])
                reach[level][:, x] = least[level][:, x][:, self.ahead]
        starts = {(level, source): combine(first[level], reach[source][:, 1:layers, :, 0])
                  for level in range(self.levels) for source in self._sources(level)}  # fmt: skip
        every = min([whole, *(float(options.min(initial=np.inf)) for options in starts.values())])
        return every, {"last": last, "middle": middle, "reach": reach, "starts": starts, "whole": whole}

    def _improve(self, least: np.ndarray, combine, rows: np.ndarray, ahead: np.ndarray, kind: np.ndarray) -> None:
        """Least of each kind and place, lowered by stages over rows with what lies ahead of them."""
        options = combine(rows, ahead, out=self._room(rows.shape))
        found = options.reshape(-1, options[0, 0].size).min(axis=0).reshape(options.shape[2:])
        for code in range(len(least)):
            one = found if len(least) == 1 else np.where(kind[:, : found.shape[1]] == code, found, np.inf)
            np.minimum(least[code, : one.shape[1]], one.min(axis=0), out=least[code, : one.shape[1]])

    def _room(self, shape: tuple[int, ...]) -> np.ndarray:
        """Scratch memory: new pages for each block would cost as much as its sums."""
        size = math.prod(shape)
        if len(self._scratch) < size:
            self._scratch = np.empty(size)
        return self._scratch[:size].reshape(shape)

    def _ends(self, values: dict) -> tuple[list[np.ndarray], np.ndarray, float]:
        """Least values by group size: first stages of each level, (kinds, rows, sizes), last stages, whole."""
        group = self.space.group
        first = [self._least("first", level, values, group[:, 0]) for level in range(self.levels)]
        last = self._least("last", 0, values, group[np.arange(len(group)), self.ending])[0]
        whole = self._least("whole", 0, values, group[-1:, 0])[0, 0, 0] if self.ending[-1] == 0 else np.inf
        return first, last, float(whole)

    def _middle(self, values: np.ndarray, level: int) -> list[np.ndarray]:
        """(kinds, rows, sizes, places) least values of each band of sizes, without what is infinite at the end."""
        stages, blocks = self.tables["middle", level], []
        classes = [stages.least(value, self.space.classes) for value in values]
        for band in self.bands:
            group = self.space.group[band, : 1 + int(self.ending[band].max())]
            finite = np.isfinite(classes[0][np.unique(group)]).any(axis=0)
            count = len(finite) if not self.space.layout.alike else int(np.max(np.flatnonzero(finite), initial=-1)) + 1
            found = [np.ascontiguousarray(one[:, :count].T)[:, group] for one in classes]
            blocks.append(found[0][None] if len(found) == 1 else np.stack(found))
        return blocks

    def _least(self, where: str, level: int, values: dict, group: np.ndarray) -> np.ndarray:
        """(kinds, rows, groups) least values of some groups."""
        stages = self.tables[where, level]
        return np.stack([stages.least(value, self.space.classes).T[:, group] for value in values[where, level]])

    def _sources(self, level: int) -> tuple[int, ...]:
        """Levels of the stage after one: the last level stands for all higher ones."""
        last = (level,) if level == self.levels - 1 else ()
        return (*last, level - 1) if level else last

    def _path(self, total: float, state: dict, values: dict, combine) -> Chain:
        """The chain behind a total: at each stage the option of least value, the first on ties."""
        steps, found = self.space.layout.steps, []
        where, level, code, y, size, source = self._start(state)
        place = 0
        while True:
            found.append((y, *self._entry(where, level, code, y, size, place, found[-1][0] if found else 0, values)))
            if where in ("last", "whole"):
                break
            place, level = place + int(steps[size]), source
            where, code, y, size, source = self._next(state, code, level, y, place, combine)
        return self._chain(total, found)

    def _start(self, state: dict) -> tuple:
        """(where, level, kind of the next stage, end, size, level of the next stage) of the first stage."""
        best, answer = state["whole"], ("whole", 0, 0, self.space.layout.layers, len(self.ending) - 1, 0)
        for (level, source), options in state["starts"].items():
            if options.min(initial=np.inf) < best:
                best = options.min()
                code, row, size = map(int, np.unravel_index(options.argmin(), options.shape))
                answer = ("first", level, code, row + 1, size, source)
        return answer

    def _next(self, state: dict, kind: int, level: int, x: int, place: int, combine) -> tuple:
        """As `_start`, without the level, of the stage of a kind that begins at a layer and place."""
        layout, best, answer = self.space.layout, np.inf, None
        mine = self.space.kind[:, place] == kind
        for size in np.flatnonzero((self.ending == place) & mine) if level == 0 else ():
            best = state["last"][x - 1, size]
            answer = ("last", 0, layout.layers, int(size), 0)
        for band, block in zip(self.bands, state["middle"][level], strict=True):
            rows = block[:, layout.row(x) : layout.row(x) + layout.layers - 1 - x, :, place : place + 1]
            for source in self._sources(level) if rows.size else ():
                ahead = state["reach"][source][:, x + 1 : x + 1 + rows.shape[1], band, place : place + 1]
                options = np.where(mine[band, None], combine(rows, ahead), np.inf)[..., 0]
                if options.min() < best:
                    best = options.min()
                    code, row, size = map(int, np.unravel_index(options.argmin(), options.shape))
                    answer = ("middle", code, x + 1 + row, band.start + size, source)
        return answer

    def _entry(self, where: str, level: int, code: int, y: int, size: int, place: int, x: int, values: dict) -> tuple:
        """Number of the cheapest entry of a stage, and its parts."""
        layout, stages = self.space.layout, self.tables[where, level]
        row = {"first": y - 1, "last": x - 1, "whole": 0}.get(where, layout.row(max(x, 1)) + y - x - 1)
        number = int(np.searchsorted(stages.classes, self.space.group[size, place]))
        start, stop = [*stages.starts, len(stages.entry)][number : number + 2]
        chosen = start + int(values[where, level][code, start:stop, row].argmin())
        return int(stages.entry[chosen]), tuple(float(part[chosen, row]) for part in stages.parts)

    def _chain(self, total: float, found: list[tuple]) -> Chain:
        space, entries = self.space, [entry for _, entry, _ in found]
        gpus = space.size[space.of_class[entries]].tolist()
        plan = HeteroPlan(
            node_sequence=space.fleet.types,
            device_groups=tuple(gpus),
            strategies=tuple(zip(space.dp[entries].tolist(), space.tp[entries].tolist(), strict=True)),
            batches=space.batches,
            layer_partition=(0, *(y for y, *_ in found)),
            recompute=tuple(space.prices.ways[way][1] for way in space.way[entries]),
        )
        largest = tuple(max(parts[number] for *_, parts in found) for number in range(3))
        return Chain(total, largest, plan)
