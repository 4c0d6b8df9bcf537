"""Many plans at once: their columns, and the states that a device of each owns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real

import numpy as np
import pandas as pd

from madmax_lib.base import short_repr
from madmax_lib.catalog import table
from madmax_lib.catalog.software import OVERLAPS, Software
from madmax_lib.plan.layout import layout_chunks

# parts of a layer that may be computed again alone, in the order of their text form
MODULES = table("recompute_modules").set_index("module")
_MANY = 1 << 31  # digits times digits that fit into 64 bits
_Ints = int | np.ndarray
_Floats = float | np.ndarray
Flags = bool | np.ndarray
Texts = str | np.ndarray


@dataclass(frozen=True, eq=False)
class Plans:
    """Many plans: the fields of `Plan`, each one value for all of them or an array;
    arrays broadcast.

    Columns of shape (a, 1) and (1, b) are the a x b plans of a product. A `Plan` is the
    case of one value per field.
    """

    dp: _Ints = 1
    tp: _Ints = 1
    pp: _Ints = 1
    cp: _Ints = 1
    ep: _Ints = 1  # laid over dp x cp x tp / etp
    zero: _Ints = 0  # stage
    micro_batch: _Ints = 1  # samples
    recompute: Texts = "none"
    sequence_parallel: Flags | None = None  # None: where tp > 1
    interleave: _Ints = 1  # chunks per stage
    schedule: Texts = "1f1b"
    offload: Texts | None = None
    prefetch: _Ints = 1  # layers
    bucket_bytes: _Floats = 25.0 * 2**20  # infinite: one reduction at the end
    shard: _Ints = 0  # devices; 0: all of dp x cp
    qwz: Flags = False  # 8-bit gather of weights
    hpz: Flags = False  # second shard inside the node
    qgz: Flags = False  # 4-bit exchange of gradients
    overlap_gather: Flags = False  # of ZeRO-1/2, under the next forward pass
    reduce_fp32: Flags = False
    context: Texts = "ring"
    attention: Texts = "flash"
    first_layers: _Ints = 0  # 0: as the other stages
    last_layers: _Ints = 0  # likewise
    layout: Texts = ""  # of all chunks; empty: as the other fields say
    embedding_as_layer: Flags = False
    head_as_layer: Flags = False
    capacity: _Floats = 0.0  # over the even share; 0: all tokens that come
    etp: _Ints = 0  # 0: tp
    lora_rank: _Ints = 0  # 0: all weights are trained
    overlap_tp: Flags | None = None  # None, in a column NaN: as the software does
    overlap_ep: Flags | None = None
    overlap_dp: Flags | None = None

    def __post_init__(self):
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)

    @classmethod
    def from_table(cls, table: pd.DataFrame) -> Plans:
        """A plan per row; what is missing is at its default.

        Raises ValueError for a column that is no field, or that does not hold numbers,
        or flags, where these stand.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        if not table.columns.is_unique:
            twice = table.columns[table.columns.duplicated()][0]
            raise ValueError(f"column {twice!r} is given twice")
        for name in table.columns:
            if name not in defaults:
                near = difflib.get_close_matches(str(name), defaults, n=3, cutoff=0.0)
                raise ValueError(
                    f"column {name!r} is not a field of Plan; nearest: {', '.join(near)}"
                )
        tp = table["tp"].to_numpy() if "tp" in table else 1
        # what an empty cell stands for; NaN is the None of a column of numbers
        empty = defaults | dict.fromkeys(OVERLAPS, np.nan)
        empty["sequence_parallel"] = tp > 1
        columns = {"dp": np.broadcast_to(1, len(table))}
        columns |= {name: _column(name, of, empty[name]) for name, of in table.items()}
        return cls(**columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that all columns broadcast to, () for a single plan."""
        columns = vars(self).values()
        shapes = {column.shape for column in columns if hasattr(column, "shape")}
        return np.broadcast_shapes(*shapes)

    def busiest(self, imbalance, model):
        """Tokens of the busiest expert device over the mean: at most all tokens, each
        once per active expert.
        """
        # all tokens choose an expert of this device: experts / active over the even
        # share of one of that many devices
        most = np.minimum(self.ep, model.experts / np.maximum(model.active_experts, 1))
        return np.minimum(imbalance, np.maximum(most, 1))

    @property
    def world_size(self) -> _Ints:
        """Devices that a plan needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> _Ints:
        """Devices that hold the same weights and see other tokens: dp x cp."""
        return self.dp * self.cp

    @property
    def sharing(self) -> _Ints:
        """Devices that share the states which ZeRO shards: all of dp x cp, or `shard`
        of them (HSDP).
        """
        # a sum instead of np.where, which would make arrays of a plan's numbers
        return self.shard + (self.shard == 0) * self.replicas

    @property
    def expert_spread(self) -> _Ints:
        """tp / etp: ranks of tp over which whole experts are laid; 1 where tp splits
        each of them.
        """
        is_tp = self.etp == 0
        return is_tp + (1 - is_tp) * self.tp // (self.etp + is_tp)

    @property
    def folds(self) -> Flags:
        """Whether the second chunks run back from the last stage to the first, where
        the head then is.
        """
        folds = (self.schedule == "zbv") | (self.schedule == "dualpipev")
        # one flag where all are alike: formulas stay with numbers
        return np.all(folds) or (np.any(folds) and folds)

    @property
    def defers_weights(self) -> Flags:
        """Whether gradients of weights come later than those of inputs; DualPipeV's
        where the pipeline fills and drains.
        """
        return (self.schedule == "zero-bubble") | self.folds

    @property
    def head_stage(self) -> _Ints:
        """Stage of the head: the last, the first where chunks fold back."""
        return (self.pp - 1) * (1 - self.folds)

    @property
    def ends_as_layers(self) -> _Ints:
        """Layers that embedding and head count as when stages are made equal: 0 to 2."""
        # times 1: the sum of two arrays of flags would be their `or`
        return 1 * self.embedding_as_layer + 1 * self.head_as_layer

    def of_layout(self, count: Callable[[str], int]) -> _Ints:
        """A count of each plan's layout, 0 where none is stated."""
        words = distinct(self.layout) - {""}
        return sum((self.layout == word) * count(word) for word in words)

    @property
    def prediction_stage(self) -> _Ints:
        """Stage of the first MTP layer, which has a copy of the embedding; 0, where the
        embedding is, without one.
        """

        def number(layout):
            chunks = enumerate(layout_chunks(layout))
            return next((i for i, chunk in chunks if chunk.predictions), 0)

        return self.of_layout(number) % self.pp

    @property
    def expert_devices(self) -> str:
        """The devices over which one plan lays its experts, in words."""
        if not self.etp:
            return f"dp x cp = {self.dp} x {self.cp}"
        return f"dp x cp x tp / etp = {self.dp} x {self.cp} x {self.tp} / {self.etp}"

    def recomputes(self, *modules: str) -> Flags:
        """Whether the plan names one of these modules as what to compute again."""
        words = distinct(self.recompute)
        # of few words: text is slow to compare
        those = [word for word in words if {*modules} & {*word.split("+")}]
        if len(those) in (0, len(words)):
            return bool(those)
        return np.isin(self.recompute, those)

    @property
    def recomputes_modules(self) -> Flags:
        """Whether it names any module."""
        return self.recomputes(*MODULES.index)

    @property
    def budget(self) -> _Floats:
        """Share of the activations that a memory budget keeps, of those beyond the input
        of a layer; 1 without one.
        """
        words = [word for word in distinct(self.recompute) if is_budget(word)]
        return 1 - sum((self.recompute == w) * (1 - int(w[6:]) / 100) for w in words)

    def overlaps(self, degree: str, software: Software) -> Flags:
        """Whether communication of tp, ep or dp runs beside compute: as the plan says,
        else as the software does.
        """
        stated = getattr(self, f"overlap_{degree}")
        usual = getattr(software, f"overlap_{degree}")
        if not isinstance(stated, np.ndarray):
            return usual if stated is None else bool(stated)
        return np.where(np.isnan(stated), usual, stated).astype(bool)

    def __getitem__(self, rows) -> Plans:
        """Some of the plans, as views of the columns; of a number, one plan."""
        shape = self.shape
        parts = dict(vars(self))
        for name, column in parts.items():
            if np.ndim(column):
                # a column of categories stays one
                is_whole = np.shape(column) == shape
                part = (column if is_whole else np.broadcast_to(column, shape))[rows]
                value = part.item() if isinstance(part, np.generic) else part
                is_open = isinstance(value, float) and value != value  # NaN: None
                parts[name] = None if is_open else value
        return Plans(**parts)


def is_budget(word: str) -> bool:
    """Whether a recompute is a memory budget, in percent: budget0 to budget99."""
    return re.fullmatch(r"budget(\d|[1-9]\d)", word) is not None


def alike_rows(
    columns: Iterable[np.ndarray | Real | str | None], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """A row of each kind, and the kind of each row, of columns that broadcast to a
    shape; rows are counted along its flat form.

    >>> rows, kinds = alike_rows([np.array([4, 5, 4]), 7], (3,))
    >>> rows.tolist(), kinds.tolist()
    ([2, 1], [0, 1, 0])
    """
    # the columns as digits of one number for each row
    code = np.zeros(shape, np.int64)
    count = 1
    for column in columns:
        if np.ndim(column):
            digit, values = pd.factorize(np.ravel(column), use_na_sentinel=False)
            # digits in the column's shape again, which broadcasts to that of all
            code = code * len(values) + digit.reshape(np.shape(column))
            count *= len(values)
            if count > _MANY:  # its gaps are closed before it grows too large
                code = pd.factorize(code.ravel())[0].reshape(shape)
                count = int(code.max()) + 1
    kind, values = pd.factorize(code.ravel())
    rows = np.empty(len(values), np.int64)
    rows[kind] = np.arange(len(kind))
    return rows, kind


def distinct(words: Texts) -> set[str]:
    """The words of a column, or of one plan."""
    # of a column of categories those alone, which are few
    if isinstance(words, str):
        return {words}
    column = np.ravel(getattr(words, "categories", words))
    # objects may be anything, which need not have a hash
    return {*(column.tolist() if column.dtype.kind == "U" else map(str, column))}


def take_product(values, rows: np.ndarray, columns: np.ndarray):
    """Some rows and columns of a product of plans, or of an array that broadcasts to
    one.

    >>> take_product(np.arange(3).reshape(3, 1), np.array([0, 2]), np.array([5])).tolist()
    [[0], [2]]
    """
    if isinstance(values, Plans):
        parts = vars(values).items()
        return Plans(**{name: take_product(of, rows, columns) for name, of in parts})
    if np.ndim(values) < 2:
        return values
    # an axis of length 1 holds for all of its rows, or columns
    values = values[rows] if len(values) > 1 else values
    return values[:, columns] if values.shape[1] > 1 else values


def in_a_column(products: Sequence[Plans]) -> Plans:
    """The plans of some products one below the other, of shape (all of them, 1); of one
    product itself.
    """
    if len(products) == 1:
        return products[0]
    shapes = [plans.shape for plans in products]
    columns = {}
    for field in fields(Plans):
        parts = [getattr(plans, field.name) for plans in products]
        value = parts[0]
        if any(np.ndim(part) for part in parts) or len({*parts}) > 1:
            every = map(np.broadcast_to, parts, shapes)
            flat = np.concatenate([part.ravel() for part in every])
            # where all are alike formulas stay with one value
            value = flat[0].item() if (flat == flat[0]).all() else flat[:, None]
        columns[field.name] = value
    return Plans(**columns)


def _column(name, column, empty):
    """A column of a table as plans have it; empty: what stands in empty cells."""
    if isinstance(empty, str):
        column = column.astype("category")  # a few words: text is slow to compare
    elif column.dtype.kind in "mMc":  # dates and complex numbers are no numbers here
        column = column.astype(object)
    missing = column.isna().to_numpy()
    values = column.values
    if missing.any():
        values = np.where(missing, empty, values)
    if isinstance(empty, (bool, np.ndarray)):
        if values.dtype != bool:  # 1 and 0 may stand for flags
            _refuse_any(name, [v for v in values if v not in (0, 1)], "True or False")
        return values.astype(bool)
    if isinstance(empty, (int, float)):
        return _as_numbers(name, values, whole_numbers=isinstance(empty, int))
    return values


def _as_numbers(name, column, *, whole_numbers):
    """A column as floats, or as integers of 64 bits where all are whole: gaps make
    floats of them.
    """
    if whole_numbers and column.dtype == np.int64:
        return column
    if column.dtype.kind not in "biuf":
        _refuse_any(name, [v for v in column if not isinstance(v, Real)], "numbers")
    numbers = column.astype(float)
    fits = whole_numbers and (abs(numbers) < 2**62).all() and not (numbers % 1).any()
    return numbers.astype(np.int64) if fits else numbers


def _refuse_any(name, odd, what):
    if odd:
        text = short_repr(odd[0])
        raise ValueError(f"column {name!r} must hold {what}, but holds {text}")


def expert_sharing(sharing, ep, spread=1):
    """Devices that share the states of an expert where `sharing` devices share those of
    dense layers.

    Expert parallelism lies inside dp x cp, or with spread (`Plans.expert_spread`)
    inside dp x cp x spread, so only what it leaves of these devices holds the same
    experts [Megatron-Core: expert data parallelism is dp x cp x tp / (ep x etp);
    torchtitan: the mesh of experts lies inside the shard].
    """
    return np.maximum(sharing * spread / ep, 1)


def owned(dense, experts, sharing, ep, spread=1):
    """Parameters whose states a device owns where `sharing` devices share them; 1
    without ZeRO.

    dense and experts: parameters that the device holds of each kind, those of experts
    after ep and etp have split them.

    >>> float(owned(dense=1200.0, experts=800.0, sharing=8, ep=4))
    550.0
    """
    return dense / sharing + experts / expert_sharing(sharing, ep, spread)
