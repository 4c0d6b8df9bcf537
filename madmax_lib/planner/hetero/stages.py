"""Possible stages and what each costs: arrays over groups, degrees and layer slices.

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

from madmax_lib.planner.hetero.fleets import Fleet, HeteroProblem, Span, between
from madmax_lib.planner.hetero.prices import PriceList


class Grid:
    """Facts that all orders and batches share: group sizes, positions on their common grid,
    layer slices.

    sizes: (n,) GPUs of groups, ascending.
    unit: GPUs between two positions; steps: (n,) sizes in units; places: units of the
    whole cluster.
    uniform: whether all layers but the first and last cost the same everywhere.
    first, middle, last, single: (2, rows) first layer and end of slices by where a stage
    stands. The middle slice from layer x to y is row `row(x) + y - x - 1`; where middle
    layers are uniform, row(x) is 0.
    sums: of prices by (type, tp, recompute, samples), filled by the stage tables, which
    share them.
    """

    def __init__(self, gpus: int, sizes: Sequence[int], prices: PriceList):
        self.sizes = np.array(sorted(set(sizes)))
        # groups begin where others end, so only at multiples of the common divisor
        self.unit = int(np.gcd.reduce([gpus, *self.sizes]))
        self.steps = self.sizes // self.unit
        self.places = gpus // self.unit
        self.layers = layers = prices.layers
        columns = [prices.parameters_bytes]
        for price in prices.table.values():
            columns += [price.layer_s, price.memory_bytes, price.live_bytes]
        self.uniform = all((column[1:-1] == column[1:2]).all() for column in columns)
        # of equal layers, slices from layer 1 stand for all of their length
        starts = range(1, min(2, layers - 1) if self.uniform else layers - 1)
        inner = range(1, layers)
        self.middle = _pairs((x, y) for x in starts for y in range(x + 1, layers))
        self.first = _pairs((0, y) for y in inner)
        self.last = _pairs((x, layers) for x in inner)
        self.single = _pairs([(0, layers)])
        self.sums: dict[tuple, tuple] = {}

    def row(self, x: int) -> int:
        """First middle row of slices that begin at layer x."""
        if self.uniform:
            return 0
        # rows before it: sum of layers - 1 - x' over x' = 1 .. x - 1
        return (x - 1) * (self.layers - 1) - x * (x - 1) // 2


def _pairs(slices):
    """Slices as (2, rows): first layers, and ends; (2, 0) where there are none."""
    return np.array(list(slices), int).reshape(-1, 2).T


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
    # (e,) batch generator of a first stage and end of the passes of a last one
    extra_s: np.ndarray

    def least(self, values: np.ndarray, classes: int) -> np.ndarray:
        """(classes + 1, rows) the least value of each class; infinite where there is
        none, and in the last row.
        """
        result = np.full((classes + 1, values.shape[1]), np.inf)
        if len(self.entry):
            result[self.classes] = np.minimum.reduceat(values, self.starts, axis=0)
        return result


class _ReplicaSums(NamedTuple):
    """Costs of a replica: sums over the first 0, 1, ... layers, and what does not
    depend on layers.
    """

    priced: bool  # whether there are prices for it at all
    base_bytes: float
    memory_bytes: np.ndarray  # (layers + 1,), as the next two
    live_bytes: np.ndarray
    layer_s: np.ndarray
    # least of all, so that a replica without samples is never the slowest
    sync_s: float = -np.inf
    generator_s: float = -np.inf


class _Runs(NamedTuple):
    """Runs of equal replicas of entries, (entries, runs) each."""

    count: np.ndarray  # replicas of a run, 0 for an empty one
    low: np.ndarray  # types that one of them spans, from
    high: np.ndarray  # to


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

    def __init__(self, problem: HeteroProblem, fleet: Fleet, batches: int, grid: Grid):
        self.prices = problem.prices
        self.rules = problem.rules
        self.fleet = fleet
        self.batches = batches
        self.grid = grid
        self.samples = problem.rules.global_batch // batches
        self._classes()
        self._entries()

    def _classes(self):
        fleet = self.fleet
        grid = self.grid
        # (sizes, places + 1) of every group; those that end beyond the GPUs drop out
        start = np.arange(grid.places + 1) * grid.unit
        end = start + grid.sizes[:, None]
        inside = end <= fleet.size
        start = np.broadcast_to(start, end.shape)[inside]
        stop = end[inside]
        low = fleet.type_of(start)
        high = fleet.type_of(stop - 1)
        one_node = fleet.in_one_node(start, stop)
        fitting = self._fitting_degrees(start, stop)
        # groups of one type are alike wherever they begin
        mixed_start = np.where(low == high, -1, start)
        key = np.stack(
            [stop - start, mixed_start, low, high, one_node, fitting], axis=1
        )
        # rows of equal keys are a class, known by the first of its groups
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
        # numpy 2.0 alone gives the inverse of rows as a column
        self.group[inside] = number.reshape(-1)
        before = fleet.node_of(np.maximum(start - 1, 0))
        nearby = fleet.node_of(start) == before
        nearby &= one_node & (start > 0)
        values = np.stack([nearby, inter], axis=1)
        # what the stage before looks at: rows (nearby, bandwidth), each once
        self.kinds, code = np.unique(values, axis=0, return_inverse=True)
        self.kind = np.zeros(end.shape, int)
        # flat, as above
        self.kind[inside] = code.reshape(-1)

    def _fitting_degrees(self, start, stop):
        """Bit mask of the ways whose replicas each lie in one node; all where that is
        not asked for.
        """
        every = np.full(len(start), (1 << len(self.prices.ways)) - 1)
        if not self.rules.tp_in_node:
            return every
        bounds = self.fleet.bounds
        for number, (tp, _) in enumerate(self.prices.ways):
            # Replicas of a group begin at its start and every tp ranks on: a border of
            # nodes cuts one unless it lies on that comb. A group fits if the next such
            # border after its start is not inside it.
            for rest in range(tp):
                crossed = np.append(bounds[bounds % tp != rest], self.fleet.size + 1)
                here = start % tp == rest
                following = np.searchsorted(crossed, start[here], side="right")
                cut = crossed[following] < stop[here]
                every[here] &= ~(cut.astype(int) << number)
        return every

    def _entries(self):
        """Classes with the ways whose degree divides them, and which all their types
        have prices for.
        """
        ways = self.prices.ways
        types = self.fleet.types
        priced = {key[:3] for key in self.prices.table}
        every = np.arange(self.classes)
        classes = []
        numbers = []
        for number, (tp, way) in enumerate(ways):
            lacks = [(name, tp, way) not in priced for name in types]
            # types without a price among low..high: a difference of running counts
            unpriced = np.cumsum([0, *lacks])
            usable = unpriced[self.high + 1] == unpriced[self.low]
            usable &= self.size % tp == 0
            usable &= self.size // tp <= self.samples  # a replica has work
            usable &= self.fits_node >> number & 1 == 1
            classes.append(every[usable])
            numbers.append(np.full(usable.sum(), number))
        of_class = np.concatenate(classes)
        way = np.concatenate(numbers)
        order = np.lexsort((way, of_class))  # by class, then way
        self.of_class = of_class[order]
        self.way = way[order]
        self.tp = np.array([tp for tp, _ in ways])[self.way]
        self.dp = self.size[self.of_class] // self.tp
        self._share()

    def _share(self):
        """Forms of each entry: the (type, way, samples) of its replicas, as codes into
        the rows of `_sums`.
        """
        runs = self._runs()
        least, more = self._samples_of_runs(runs)
        # A code is the number (kind, way, samples) in mixed base; -1 is none. Replicas
        # of a run take `least` samples or one more.
        ways = len(self.prices.ways)
        forms = []
        for run in range(runs.count.shape[1]):
            one_more = more[:, run]
            for extra, used in ((1, one_more > 0), (0, one_more < runs.count[:, run])):
                used = used & (least[:, run] >= 0)
                for kind in range(len(self.fleet.types)):
                    spanned = runs.low[:, run] <= kind
                    spanned &= kind <= runs.high[:, run]
                    samples = least[:, run] + extra
                    code = (kind * ways + self.way) * (self.samples + 1) + samples
                    forms.append(np.where(used & spanned, code, -1))
        # (entries, forms), used ones first, as many columns as some entry needs
        forms = -np.sort(-np.stack(forms, axis=1), axis=1)
        most_forms = (forms >= 0).sum(axis=1).max(initial=1)
        forms = forms[:, : max(int(most_forms), 1)]
        # An unused form repeats the first, which changes no maximum. Codes are then
        # numbered from 0; the inverse of unique is flat in some versions of numpy.
        filled = np.where(forms < 0, forms[:, :1], forms)
        self.codes, number = np.unique(filled, return_inverse=True)
        self.forms = number.reshape(forms.shape)
        self.most = np.where(forms >= 0, forms % (self.samples + 1), 0).max(axis=1)

    def _samples_of_runs(self, runs):
        """Samples of a replica of each run, -1 in entries where speeds lack, and how
        many replicas take one more: `costs.shares` for runs of equal replicas.
        """
        counts = runs.count
        # (entries, runs) speeds, of the (entries, 1) ways
        weight = 1 / self._whole_model_s()[runs.low, runs.high, self.way[:, None]]
        # equal replicas need no profile at batch 1
        weight[(counts > 0).sum(axis=1) == 1] = 1.0
        weight = np.where(counts > 0, weight, 0.0)
        total = (counts * weight).sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            exact = self.samples * weight / total
        unshared = ~np.isfinite(exact).all(axis=1)
        unshared |= ((weight == 0) & (counts > 0)).any(axis=1)
        exact[unshared] = 0.0
        least = np.floor(exact).astype(int)
        left = self.samples - (counts * least).sum(axis=1)
        # what is left goes to runs of largest remainder first, one to each replica;
        # `before` counts the replicas served before a run, in that order
        order = np.argsort(-np.round(exact - least, 9), axis=1, kind="stable")
        sorted_counts = np.take_along_axis(counts, order, axis=1)
        before = np.cumsum(sorted_counts, axis=1) - sorted_counts
        more = np.empty_like(counts)
        # (entries, 1) - (entries, runs)
        served = np.clip(left[:, None] - before, 0, sorted_counts)
        np.put_along_axis(more, order, served, axis=1)
        least[unshared] = -1
        return least, more

    def _runs(self):
        """Replicas of each type, and one across each border of types if it cuts one."""
        fleet = self.fleet
        types = len(self.fleet.types)
        start = self.start[self.of_class]
        stop = (self.start + self.size)[self.of_class]
        tp = self.tp
        counts = []
        low = []
        high = []
        counted = np.full(len(start), -1)  # the last replica across a border
        for kind in range(types):
            # whole replicas between the borders of a type: floor of the end minus
            # ceiling of the begin, in replicas from the group's start
            begin = np.maximum(np.append(0, fleet.ends)[kind], start)
            end = np.minimum(fleet.ends[kind], stop)
            full = (end - start) // tp - -(-(begin - start) // tp)
            counts.append(np.maximum(full, 0) * (end > begin))
            low.append(np.full(len(start), kind))
            high.append(np.full(len(start), kind))
            # the replica that the type's end cuts; one may lie across several ends
            border = fleet.ends[kind]
            across = (border - start) // tp
            mixed = (start < border) & (border < stop)
            mixed &= (border - start) % tp > 0
            new = mixed & (across != counted)
            counted = np.where(mixed, across, counted)
            counts.append(new.astype(int))
            first = np.where(new, start + across * tp, 0)
            low.append(fleet.type_of(first))
            high.append(fleet.type_of(np.where(new, first + tp - 1, 0)))
        return _Runs(*(np.stack(part, axis=1) for part in (counts, low, high)))

    def _whole_model_s(self):
        """(types, types, ways) time of the model at batch 1 on the slowest of types
        low..high; infinite if unpriced.
        """
        model_s = np.full((len(self.fleet.types), len(self.prices.ways)), np.inf)
        for kind, name in enumerate(self.fleet.types):
            for number, (tp, way) in enumerate(self.prices.ways):
                if price := self.prices.table.get((name, tp, way, 1)):
                    model_s[kind, number] = price.layer_s.sum()
        return between(model_s, np.max)

    @cached_property
    def _sums(self):
        """Columns of `_ReplicaSums` for each code, and the memory of its GPU."""
        rows = []
        capacity_bytes = np.zeros(len(self.codes))
        memory_bytes = self.fleet.of_runs("memory_bytes")
        for number, code in enumerate(self.codes.tolist()):
            # digits of the code: see `_share`
            rest, samples = divmod(max(code, 0), self.samples + 1)
            kind, way = divmod(rest, len(self.prices.ways))
            capacity_bytes[number] = memory_bytes[kind]
            key = (self.fleet.types[kind], *self.prices.ways[way], samples)
            if key not in self.grid.sums:
                self.grid.sums[key] = self._replica_sums(*key)
            rows.append(self.grid.sums[key])
        # one more row, cut off again: it gives columns their shape without any code
        rows.append(self._replica_sums("", 0, "", 0))
        columns = [np.array(column)[:-1] for column in zip(*rows, strict=True)]
        columns = dict(zip(_ReplicaSums._fields, columns, strict=True))
        return columns | {
            "capacity_bytes": capacity_bytes,
            "priced": columns["priced"] & (self.codes >= 0),
        }

    def _replica_sums(self, device, tp, way, samples):
        """Sums of a replica; one without samples holds memory all the same."""
        pieces = self.prices.pieces(device, tp, way, max(samples, 1))
        nothing = np.zeros(self.grid.layers + 1)
        if None in pieces:
            return _ReplicaSums(False, 0.0, nothing, nothing, nothing)
        states = (pieces[0].base_bytes, _cumulative(pieces[0].memory_bytes))
        live_bytes = _cumulative(sum(piece.live_bytes for piece in pieces))
        if not samples:
            return _ReplicaSums(True, *states, live_bytes, nothing)
        layer_s = _cumulative(sum(piece.layer_s for piece in pieces))
        sync_s = sum(piece.sync_s for piece in pieces)
        generator_s = sum(piece.generator_s for piece in pieces)
        return _ReplicaSums(True, *states, live_bytes, layer_s, sync_s, generator_s)

    def stages(self, where: str, in_flight: int = 1) -> SliceStages:
        """Stages over the middle, first or last slices or the whole model, with
        micro-batches in flight.
        """
        grid = self.grid
        rows = getattr(self.grid, where)
        begins = where in ("first", "single")
        ends = where in ("last", "single")
        usable = np.ones(len(self.of_class), bool)
        if begins:  # groups at rank 0
            usable &= np.isin(self.of_class, self.group[:, 0])
        if ends:  # groups that end with the last rank
            sizes = np.arange(len(grid.sizes))
            last = self.group[sizes, grid.places - grid.steps]
            usable &= np.isin(self.of_class, last)
        entry = np.flatnonzero(usable)
        forms = self.forms[entry]
        sums = self._sums
        unpriced = ~sums["priced"][forms].all(axis=1)
        time_s = _largest(_slices(sums["layer_s"], rows), forms)
        time_s[self._is_short(forms, rows, in_flight)] = np.inf
        time_s[unpriced] = np.inf
        extra_s = np.zeros(len(entry))
        for name, counts in (("generator_s", begins), ("sync_s", ends)):
            if counts and len(entry):
                extra_s += self.batches * np.where(
                    unpriced, 0.0, sums[name][forms].max(axis=1)
                )
        if where == "last" and self.prices.tied_bytes:
            gpus = self.size[self.of_class[entry]]
            extra_s += self.fleet.ends_s(self.prices.tied_bytes, gpus, self.tp[entry])
        # entries are sorted by class, so each begins once
        classes, starts = np.unique(self.of_class[entry], return_index=True)
        parts = (time_s, *self._updates_s(entry, rows))
        return SliceStages(entry, classes, starts, parts, extra_s)

    def _is_short(self, forms, rows, in_flight):
        """(entries, rows) whether the fullest GPU of a stage lacks memory."""
        factor = self.rules.memory_factor
        sums = self._sums
        if not factor:
            return np.zeros((len(forms), rows.shape[1]), bool)
        # (codes, rows) of slices, and (codes, 1) of what layers do not change
        layer_bytes = sums["memory_bytes"] + in_flight * sums["live_bytes"]
        gpu_bytes = _slices(layer_bytes, rows) + sums["base_bytes"][:, None]
        missing_bytes = factor * gpu_bytes - sums["capacity_bytes"][:, None]
        return _largest(missing_bytes, forms) > 0

    def _updates_s(self, entry, rows):
        """Gradient all-reduce and optimizer of entries over slices."""
        group = self.of_class[entry]
        dp = self.dp[entry]
        tp = self.tp[entry]
        prices = self.prices
        span = self._span(group)
        layers = rows[1] - rows[0]
        size_bytes = _slices(_cumulative(prices.parameters_bytes)[None], rows)
        # one stage holds the table of embedding and head once
        size_bytes = size_bytes - (layers == prices.layers) * prices.tied_bytes
        byte_s = self.fleet.ring_s(span, tp, self.one_node[group])
        # (entries, 1) x (rows,), as in `costs.PlanCost.gradients_s`
        ring_s = 2 * (dp - 1) / dp * byte_s / tp
        gradients_s = ring_s[:, None] * size_bytes
        of_types_s = np.array([prices.optimizer_s[name] for name in self.fleet.types])
        slowest_s = between(of_types_s, np.max)[span.low, span.high]
        # (entries, 1) x (rows,)
        return gradients_s, (slowest_s / tp)[:, None] * (layers / prices.layers)

    def _span(self, group):
        """Types and GPUs of groups of some classes."""
        return Span(self.low[group], self.high[group], self.size[group])

    def send_s(self, entry: np.ndarray) -> np.ndarray:
        """(kinds, entries) time to send to a next stage of each kind, or back."""
        group = self.of_class[entry]
        # (kinds, 1) beside (entries,)
        nearby = self.kinds[:, :1] > 0
        inter = self.kinds[:, 1:]
        size_bytes = self.most[entry] * self.rules.sample_bytes
        inside = nearby & self.one_node[group]
        return self.fleet.send_s(
            size_bytes, self._span(group), self.tp[entry], inside, inter
        )


def _cumulative(values):
    """(layers + 1,) sums over the first 0, 1, ... layers."""
    return np.append(0.0, np.cumsum(values))


def _slices(sums, rows):
    """Sums over slices from sums over the first layers."""
    return sums[:, rows[1]] - sums[:, rows[0]]


def _largest(values, forms):
    """(entries, rows) the largest of the values of each entry's forms."""
    result = values[forms[:, 0]]
    for column in forms.T[1:]:
        np.maximum(result, values[column], out=result)
    return result
