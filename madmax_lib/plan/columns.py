"""Many plans at once: their columns, and what a device owns of the states."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from madmax_lib.base.fields import short_repr
from madmax_lib.catalog.software import OVERLAPS, Software

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Plans", "expert_sharing", "owned", "product_part"]

Ints = int | np.ndarray
Floats = float | np.ndarray
Flags = bool | np.ndarray
Texts = str | np.ndarray


@dataclass(frozen=True, eq=False)
class Plans:
    """Many plans: the fields of `Plan`, each one value for all of them or an array;
    arrays broadcast.

    Columns of shape (a, 1) and (1, b) are the a x b plans of a product. A `Plan` is the
    case of one value per field.
    """

    dp: Ints = 1
    tp: Ints = 1
    pp: Ints = 1
    cp: Ints = 1
    ep: Ints = 1
    zero: Ints = 0
    micro_batch: Ints = 1
    recompute: Texts = "none"
    sequence_parallel: Flags | None = None
    interleave: Ints = 1
    schedule: Texts = "1f1b"
    offload: Texts | None = None
    prefetch: Ints = 1
    bucket_bytes: Floats = 25.0 * 2**20
    shard: Ints = 0
    qwz: Flags = False
    hpz: Flags = False
    qgz: Flags = False
    overlap_gather: Flags = False
    reduce_fp32: Flags = False
    context: Texts = "ring"
    attention: Texts = "flash"
    first_layers: Ints = 0
    last_layers: Ints = 0
    embedding_as_layer: Flags = False
    head_as_layer: Flags = False
    capacity: Floats = 0.0
    etp: Ints = 0
    lora_rank: Ints = 0
    overlap_tp: Flags | None = None
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
            raise ValueError(
                f"column {table.columns[table.columns.duplicated()][0]!r} is given "
                "twice"
            )
        if unknown := [name for name in table.columns if name not in defaults]:
            near = difflib.get_close_matches(str(unknown[0]), defaults, n=3, cutoff=0.0)
            raise ValueError(
                f"column {unknown[0]!r} is not a field of Plan; nearest: "
                f"{', '.join(near)}"
            )
        columns = {"dp": np.broadcast_to(1, len(table))}
        defaults |= dict.fromkeys(OVERLAPS, np.nan)
        defaults["sequence_parallel"] = (
            table["tp"].to_numpy() > 1 if "tp" in table else False
        )
        for name, column in table.items():
            if isinstance(defaults[name], str):
                column = column.astype(
                    "category"
                )  # numbers of a few words: text is slow to compare
            column = column.astype(object) if column.dtype.kind in "mMc" else column
            missing = column.isna().to_numpy()
            column = column.values
            column = (
                np.where(missing, defaults[name], column) if missing.any() else column
            )
            if isinstance(defaults[name], bool) or name == "sequence_parallel":
                column = _as_flags(name, column)
            elif isinstance(defaults[name], (int, float)):
                column = _as_numbers(
                    name, column, whole=isinstance(defaults[name], int)
                )
            columns[name] = column
        return cls(**columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that all columns broadcast to, () for a single plan."""
        return np.broadcast_shapes(
            *{
                column.shape
                for column in vars(self).values()
                if hasattr(column, "shape")
            }
        )

    def busiest(self, imbalance, model):
        """Tokens of the busiest expert device over the mean: at most all tokens, each
        once per active expert.
        """
        most = np.minimum(self.ep, model.experts / np.maximum(model.active_experts, 1))
        return np.minimum(imbalance, np.maximum(most, 1))

    @property
    def world_size(self) -> Ints:
        """Devices that a plan needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sharing(self) -> Ints:
        """Devices that share the states which ZeRO shards: all of dp x cp, or `shard`
        of them (HSDP).
        """
        return self.shard + (self.shard == 0) * self.dp * self.cp

    @property
    def expert_spread(self) -> Ints:
        """tp / etp: ranks of tp over which whole experts are laid; 1 where tp splits
        each of them.
        """
        return (self.etp == 0) + (self.etp > 0) * self.tp // (
            self.etp + (self.etp == 0)
        )

    @property
    def expert_devices(self) -> str:
        """The devices over which one plan lays its experts, in words."""
        if not self.etp:
            return f"dp x cp = {self.dp} x {self.cp}"
        return f"dp x cp x tp / etp = {self.dp} x {self.cp} x {self.tp} / {self.etp}"

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
                part = (
                    column
                    if np.shape(column) == shape
                    else np.broadcast_to(column, shape)
                )[rows]
                value = part.item() if isinstance(part, np.generic) else part
                parts[name] = (
                    None if isinstance(value, float) and value != value else value
                )
        return Plans(**parts)


def product_part(values, rows: np.ndarray, columns: np.ndarray):
    """Some rows and columns of a product of plans, or of an array that broadcasts to
    one.

    >>> product_part(np.arange(3)[:, None], np.array([0, 2]), np.array([5])).tolist()
    [[0], [2]]
    """
    if isinstance(values, Plans):
        return Plans(
            **{
                name: product_part(column, rows, columns)
                for name, column in vars(values).items()
            }
        )
    if np.ndim(values) < 2:
        return values
    values = values[rows] if len(values) > 1 else values
    return values[:, columns] if values.shape[1] > 1 else values


def _as_flags(name: str, column: np.ndarray) -> np.ndarray:
    """A column of flags, for which 1 and 0 may stand."""
    if column.dtype != bool and (
        odd := [value for value in column if value not in (0, 1)]
    ):
        raise ValueError(
            f"column {name!r} must hold True or False, but holds {short_repr(odd[0])}"
        )
    return column.astype(bool)


def _as_numbers(name: str, column: np.ndarray, *, whole: bool) -> np.ndarray:
    """A column as floats, or as integers of 64 bits where all are whole: gaps make
    floats of them.
    """
    if whole and column.dtype == np.int64:
        return column
    odd = (
        []
        if column.dtype.kind in "biuf"
        else [value for value in column if not isinstance(value, Real)]
    )
    if odd:
        raise ValueError(
            f"column {name!r} must hold numbers, but holds {short_repr(odd[0])}"
        )
    numbers = column.astype(float)
    return (
        numbers.astype(np.int64)
        if whole and (abs(numbers) < 2**62).all() and not (numbers % 1).any()
        else numbers
    )


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
