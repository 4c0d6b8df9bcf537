"""Which stages are possible, and what does each cost? Arrays over groups, degrees and
layer slices.

For one order of the GPU types and one number of micro-batches. A group of n GPUs at a
position is of a class: groups of one type differ by type, size and whether they lie in
one node only, mixed groups by position too. An entry is a class with (dp, tp,
recompute); its replicas come in runs of equal ones (all of type 1, one across the
border, all of type 2, ...), so samples are shared in closed form. The numbers are those
of `hetero.cost`, which counts rank by rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from madmax_lib.planner.hetero.fleets import Fleet, between
from madmax_lib.planner.hetero.prices import PriceList
from madmax_lib.planner.hetero.problem import HeteroProblem

__all__ = ["Grid", "SliceStages", "StageTable"]


class Grid:
    """What all orders and batches share: group sizes, positions on their common grid,
    layer slices.

    sizes: (n,) GPUs of groups, ascending.
    unit: GPUs between two positions; steps: (n,) sizes in units; places: units of the
    whole cluster.
    alike: whether all layers but the first and last cost the same everywhere.
    first, middle, last, whole: (2, rows) first layer and end of slices by where a stage
    stands. The middle slice from layer x to y is row `row(x) + y - x - 1`; where middle
    layers are alike, row(x) is 0.
    sums: of prices by (type, tp, recompute, samples), filled by the stage tables, which
    share them.
    """

    def __init__(self, gpus: int, sizes: Sequence[int], prices: PriceList):
        self.sizes = np.array(sorted(set(sizes)))
        self.unit = int(np.gcd.reduce([gpus, *self.sizes]))
        self.steps, self.places = self.sizes // self.unit, gpus // self.unit
        self.layers = layers = prices.layers
        columns = [prices.parameters_bytes]
        for price in prices.table.values():
            columns += [price.layer_s, price.memory_bytes, price.live_bytes]
        self.alike = all((column[1:-1] == column[1:2]).all() for column in columns)
        from_layers = range(1, min(2, layers - 1) if self.alike else layers - 1)
        middle = [(x, y) for x in from_layers for y in range(x + 1, layers)]
        self.middle = np.array(middle, int).reshape(-1, 2).T
        self.first = np.array([(0, y) for y in range(1, layers)], int).reshape(-1, 2).T
        self.last = (
            np.array([(x, layers) for x in range(1, layers)], int).reshape(-1, 2).T
        )
        self.whole = np.array([[0], [layers]])
        self.sums: dict[tuple, tuple] = {}

    def row(self, x: int) -> int:
        """First middle row of slices that begin at layer x."""
        return 0 if self.alike else (x - 1) * (self.layers - 1) - x * (x - 1) // 2


@dataclass(frozen=True, eq=False)
class SliceStages:
    """Stages over some layer slices, entries sorted by class.

    parts: (e, rows) times of a micro-batch, the gradient all-reduce and the optimizer;
    infinite where impossible.
    """

    entry: np.ndarray  # (e,) numbers in the table
    classes: np.ndarray  # those that occur
    starts: np.ndarray  # where each of them begins
    parts: tuple[np.ndarray, np.ndarray, np.ndarray]
    extra_s: (
        np.ndarray
    )  # (e,) batch generator of a first stage and end of the passes of a last one

    def least(self, values: np.ndarray, classes: int) -> np.ndarray:
        """(classes + 1, rows) the least value of each class; infinite where there is
        none, and in the last row.
        """
        result = np.full((classes + 1, values.shape[1]), np.inf)
        if len(self.entry):
            result[self.classes] = np.minimum.reduceat(values, self.starts, axis=0)
        return result


class _ReplicaSums(NamedTuple):
    """What a replica takes: sums over the first 0, 1, ... layers, and what does not
    depend on layers.
    """

    priced: bool
    base_bytes: float
    memory_bytes: np.ndarray
    live_bytes: np.ndarray
    layer_s: np.ndarray
    sync_s: float = -np.inf
    generator_s: float = -np.inf


class StageTable:
    """Stages of one order of GPU types and number of micro-batches, over a grid.

    size, low, high: (classes,) GPUs of a group, and its first and last type.
    of_class, way, tp, dp: (entries,) class and degrees of an entry; most: samples of
    its largest replica.
    group: (n, places + 1) class of the group of each size at each position, `classes`
    where it ends beyond the GPUs.
    kind: (n, places + 1) what the stage before must know of it, a number in `kinds`:
    (lies in the node of the rank before it, least bandwidth beyond a node).
    """

    def __init__(self, given: HeteroProblem, fleet: Fleet, batches: int, grid: Grid):
        self.prices = given.prices
        self.rules = given.rules
        self.fleet = fleet
        self.batches = batches
        self.grid = grid
        self.samples = given.rules.global_batch // batches
        self._classes()
        self._entries()

    def _classes(self) -> None:
        fleet = self.fleet
        grid = self.grid
        start = np.arange(grid.places + 1) * grid.unit
        end = start + grid.sizes[:, None]
        inside = end <= fleet.size
        start = np.broadcast_to(start, end.shape)[inside]
        stop = end[inside]
        low = fleet.type_of(start)
        high = fleet.type_of(stop - 1)
        one_node = fleet.in_one_node(start, stop)
        fitting = self._fitting_degrees(start, stop)
        place = np.where(low == high, -1, start)
        key = np.stack([stop - start, place, low, high, one_node, fitting], axis=1)
        classes, first, number = np.unique(
            key, axis=0, return_index=True, return_inverse=True
        )
        self.classes = len(classes)
        self.start = start[first]
        self.size = (stop - start)[first]
        self.low = low[first]
        self.high = high[first]
        self.one_node = one_node[first]
        self.fits_node = fitting[first]
        inter = fleet.least["inter_bytes_per_s"][low, high]
        self.group = np.full(end.shape, self.classes)
        self.group[inside] = number.reshape(-1)
        nearby = (
            one_node
            & (start > 0)
            & (fleet.node_of(start) == fleet.node_of(np.maximum(start - 1, 0)))
        )
        values = np.stack([nearby, inter], axis=1)
        self.kinds, code = np.unique(values, axis=0, return_inverse=True)
        self.kind = np.zeros(end.shape, int)
        self.kind[inside] = code.reshape(-1)

    def _fitting_degrees(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Bit mask of the ways whose replicas each lie in one node; all where that is
        not asked for.
        """
        every = np.full(len(start), (1 << len(self.prices.ways)) - 1)
        if not self.rules.tp_in_node:
            return every
        for number, (tp, _) in enumerate(self.prices.ways):
            for rest in range(tp):
                crossed = np.append(
                    self.fleet.bounds[self.fleet.bounds % tp != rest],
                    self.fleet.size + 1,
                )
                here = start % tp == rest
                cut = (
                    crossed[np.searchsorted(crossed, start[here], side="right")]
                    < stop[here]
                )
                every[here] &= ~(cut.astype(int) << number)
        return every

    def _entries(self) -> None:
        """Classes with the ways whose degree divides them, and which all their types
        have prices for.
        """
        ways = self.prices.ways
        types = self.fleet.types
        priced = {key[:3] for key in self.prices.table}
        every = np.arange(self.classes)
        tables = []
        for number, (tp, way) in enumerate(ways):
            unpriced = np.cumsum(
                [0, *((name, tp, way) not in priced for name in types)]
            )
            usable = (
                (self.size % tp == 0)
                & (self.size // tp <= self.samples)
                & (self.fits_node >> number & 1 == 1)
            )
            usable &= unpriced[self.high + 1] == unpriced[self.low]
            tables.append(
                np.stack([every[usable], np.full(usable.sum(), number)], axis=1)
            )
        table = np.concatenate(tables)
        self.of_class, self.way = table[np.lexsort((table[:, 1], table[:, 0]))].T
        self.tp = np.array([tp for tp, _ in ways])[self.way]
        self.dp = self.size[self.of_class] // self.tp
        self._share()

    def _share(self) -> None:
        """Forms of each entry: the (type, way, samples) of its replicas, as codes into
        the rows of `_sums`.
        """
        counts, low, high = self._runs()
        least, more, unshared = self._samples_of_runs(counts, low, high)
        # (entries,) codes, -1 for none
        ways = len(self.prices.ways)
        forms = []
        for run in range(counts.shape[1]):
            for extra, used in (
                (1, more[:, run] > 0),
                (0, more[:, run] < counts[:, run]),
            ):
                for kind in range(len(self.fleet.types)):
                    used_here = (
                        used
                        & (low[:, run] <= kind)
                        & (kind <= high[:, run])
                        & ~unshared
                    )
                    code = (
                        (kind * ways + self.way) * (self.samples + 1)
                        + least[:, run]
                        + extra
                    )
                    forms.append(np.where(used_here, code, -1))
        forms = -np.sort(-np.stack(forms, axis=1), axis=1)
        forms = forms[:, : max(int((forms >= 0).sum(axis=1).max(initial=1)), 1)]
        self.codes, place = np.unique(
            np.where(forms < 0, forms[:, :1], forms), return_inverse=True
        )
        self.forms = place.reshape(forms.shape)
        self.most = np.where(forms >= 0, forms % (self.samples + 1), 0).max(axis=1)

    def _samples_of_runs(
        self, counts, low, high
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`costs.shares` for runs of equal replicas: samples of each, how many take one
        more, and where speeds lack.
        """
        weight = 1 / self._whole_model_s()[low, high, self.way[:, None]]
        weight[(counts > 0).sum(axis=1) == 1] = (
            1.0  # equal replicas need no profile at batch 1
        )
        weight = np.where(counts > 0, weight, 0.0)
        with np.errstate(invalid="ignore"):
            exact = self.samples * weight / (counts * weight).sum(axis=1, keepdims=True)
        unshared = ~np.isfinite(exact).all(axis=1) | ((weight == 0) & (counts > 0)).any(
            axis=1
        )
        exact[unshared] = 0.0
        least = np.floor(exact).astype(int)
        left = self.samples - (counts * least).sum(axis=1)
        order = np.argsort(-np.round(exact - least, 9), axis=1, kind="stable")
        sorted_counts = np.take_along_axis(counts, order, axis=1)
        before = np.cumsum(sorted_counts, axis=1) - sorted_counts
        more = np.empty_like(counts)
        np.put_along_axis(
            more, order, np.clip(left[:, None] - before, 0, sorted_counts), axis=1
        )
        return least, more, unshared

    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Replicas of each run of an entry and the types they span, (entries, runs)
        each; empty runs count 0.
        """
        fleet = self.fleet
        types = len(self.fleet.types)
        start = self.start[self.of_class]
        stop = (self.start + self.size)[self.of_class]
        tp = self.tp
        counts = []
        low = []
        high = []
        seen = np.full(len(start), -1)
        for kind in range(types):
            begin = np.maximum(np.append(0, fleet.ends)[kind], start)
            end = np.minimum(fleet.ends[kind], stop)
            full = np.maximum((end - start) // tp - -(-(begin - start) // tp), 0) * (
                end > begin
            )
            counts.append(full)
            low.append(np.full(len(start), kind))
            high.append(np.full(len(start), kind))
            across = (fleet.ends[kind] - start) // tp
            mixed = (
                (start < fleet.ends[kind])
                & (fleet.ends[kind] < stop)
                & ((fleet.ends[kind] - start) % tp > 0)
            )
            new = mixed & (across != seen)
            seen = np.where(mixed, across, seen)
            counts.append(new.astype(int))
            first = np.where(new, start + across * tp, 0)
            low.append(fleet.type_of(first))
            high.append(fleet.type_of(np.where(new, first + tp - 1, 0)))
        return np.stack(counts, axis=1), np.stack(low, axis=1), np.stack(high, axis=1)

    def _whole_model_s(self) -> np.ndarray:
        """(types, types, ways) time of the model at batch 1 on the slowest of types
        low..high; infinite if unpriced.
        """
        whole_s = np.full((len(self.fleet.types), len(self.prices.ways)), np.inf)
        for kind, name in enumerate(self.fleet.types):
            for number, (tp, way) in enumerate(self.prices.ways):
                if price := self.prices.table.get((name, tp, way, 1)):
                    whole_s[kind, number] = price.layer_s.sum()
        return between(whole_s, np.max)

    @cached_property
    def _sums(self) -> dict[str, np.ndarray]:
        """Columns of `_ReplicaSums` for each code, and the memory of its GPU."""
        rows = []
        capacity_bytes = np.zeros(len(self.codes))
        memory_bytes = self.fleet.of_runs("memory_bytes")
        for place, code in enumerate(self.codes.tolist()):
            rest, samples = divmod(max(code, 0), self.samples + 1)
            kind, way = divmod(rest, len(self.prices.ways))
            capacity_bytes[place] = memory_bytes[kind]
            key = (self.fleet.types[kind], *self.prices.ways[way], samples)
            if key not in self.grid.sums:
                self.grid.sums[key] = self._replica_sums(*key)
            rows.append(self.grid.sums[key])
        rows.append(
            self._replica_sums("", 0, "", 0)
        )  # gives the columns their shape where there is no code
        columns = [np.array(column)[:-1] for column in zip(*rows, strict=True)]
        columns = dict(zip(_ReplicaSums._fields, columns, strict=True))
        return columns | {
            "capacity_bytes": capacity_bytes,
            "priced": columns["priced"] & (self.codes >= 0),
        }

    def _replica_sums(
        self, device: str, tp: int, way: str, samples: int
    ) -> _ReplicaSums:
        """A replica without samples holds memory all the same."""
        pieces = self.prices.pieces(device, tp, way, max(samples, 1))
        nothing = np.zeros(self.grid.layers + 1)
        if None in pieces:
            return _ReplicaSums(False, 0.0, nothing, nothing, nothing)
        held = pieces[0].base_bytes, _cumulative(pieces[0].memory_bytes)
        live_bytes = _cumulative(sum(piece.live_bytes for piece in pieces))
        if not samples:
            return _ReplicaSums(True, *held, live_bytes, nothing)
        layer_s = _cumulative(sum(piece.layer_s for piece in pieces))
        outside_s = (
            sum(piece.sync_s for piece in pieces),
            sum(piece.generator_s for piece in pieces),
        )
        return _ReplicaSums(True, *held, live_bytes, layer_s, *outside_s)

    def stages(
        self, where: str, in_flight: int = 1, *, lacking: bool = False
    ) -> SliceStages:
        """Stages over the middle, first or last slices or the whole model, with
        micro-batches in flight.

        lacking: in place of times, bytes that the fullest GPU lacks.
        """
        grid = self.grid
        rows = getattr(self.grid, where)
        begins = where in ("first", "whole")
        ends = where in ("last", "whole")
        usable = np.ones(len(self.of_class), bool)
        if begins:
            usable &= np.isin(self.of_class, self.group[:, 0])
        if ends:
            usable &= np.isin(
                self.of_class,
                self.group[np.arange(len(grid.sizes)), grid.places - grid.steps],
            )
        entry = np.flatnonzero(usable)
        forms = self.forms[entry]
        sums = self._sums
        unpriced = ~sums["priced"][forms].all(axis=1)
        missing_bytes = self._missing_bytes(forms, rows, in_flight)
        time_s = _largest(_slices(sums["layer_s"], rows), forms)
        time_s = (
            missing_bytes if lacking else np.where(missing_bytes > 0, np.inf, time_s)
        )
        time_s[unpriced] = np.inf
        extra_s = np.zeros(len(entry))
        for name, counts in (("generator_s", begins), ("sync_s", ends)):
            if counts and len(entry):
                extra_s += self.batches * np.where(
                    unpriced, 0.0, sums[name][forms].max(axis=1)
                )
        if where == "last" and self.prices.tied_bytes:
            extra_s += self.fleet.ends_s(
                self.prices.tied_bytes, self.size[self.of_class[entry]], self.tp[entry]
            )
        classes, starts = np.unique(self.of_class[entry], return_index=True)
        return SliceStages(
            entry, classes, starts, (time_s, *self._updates_s(entry, rows)), extra_s
        )

    def _missing_bytes(
        self, forms: np.ndarray, rows: np.ndarray, in_flight: int
    ) -> np.ndarray:
        """(entries, rows) what the fullest GPU of a stage lacks."""
        factor = self.rules.memory_factor
        sums = self._sums
        if not factor:
            return np.zeros((len(forms), rows.shape[1]))
        held_bytes = (
            _slices(sums["memory_bytes"] + in_flight * sums["live_bytes"], rows)
            + sums["base_bytes"][:, None]
        )
        return np.maximum(
            _largest(factor * held_bytes - sums["capacity_bytes"][:, None], forms), 0.0
        )

    def _updates_s(
        self, entry: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gradient all-reduce and optimizer of entries over slices."""
        group = self.of_class[entry]
        dp = self.dp[entry]
        tp = self.tp[entry]
        prices = self.prices
        place = self.low[group], self.high[group], self.size[group]
        size_bytes = _slices(_cumulative(prices.parameters_bytes)[None], rows)
        size_bytes = (
            size_bytes - (rows[1] - rows[0] == prices.layers) * prices.tied_bytes
        )
        byte_s = self.fleet.ring_s(*place, tp, self.one_node[group])
        gradients_s = (2 * (dp - 1) / dp * byte_s / tp)[:, None] * size_bytes
        slowest_s = between(
            np.array([prices.optimizer_s[name] for name in self.fleet.types]), np.max
        )
        share = (rows[1] - rows[0]) / prices.layers
        return gradients_s, (slowest_s[place[:2]] / tp)[:, None] * share

    def send_s(self, entry: np.ndarray) -> np.ndarray:
        """(kinds, entries) time to send to a next stage of each kind, or back."""
        group = self.of_class[entry]
        nearby = self.kinds[:, :1] > 0
        inter = self.kinds[:, 1:]
        size_bytes = self.most[entry] * self.rules.sample_bytes
        inside = nearby & self.one_node[group]
        place = self.low[group], self.high[group], self.size[group]
        return self.fleet.send_s(size_bytes, *place, self.tp[entry], inside, inter)


def _cumulative(values: np.ndarray) -> np.ndarray:
    """(layers + 1,) sums over the first 0, 1, ... layers."""
    return np.append(0.0, np.cumsum(values))


def _slices(sums: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sums over slices from sums over the first layers."""
    return sums[:, rows[1]] - sums[:, rows[0]]


def _largest(values: np.ndarray, forms: np.ndarray) -> np.ndarray:
    """(entries, rows) the largest of the values of each entry's forms."""
    result = values[forms[:, 0]]
    for column in forms.T[1:]:
        np.maximum(result, values[column], out=result)
    return result
