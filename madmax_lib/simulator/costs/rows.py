"""Rows of a table of plans that share a part of their step: the part is worked out once
for each kind of row. And functions over all numbers of nested values.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pandas as pd

from madmax_lib.plan.columns import Plans

_SAMPLE = 1024  # values of a column that are looked at first
_SPARSE = 8  # codes of more values than this per row are counted by hashing


@dataclass(frozen=True)
class UniqueRows:
    """One row of each kind, and the kind of each row."""

    rows: np.ndarray  # (kinds,) a row of each kind
    inverse: np.ndarray  # (n,) kind of each row


@dataclass(frozen=True)
class _Codes:
    """Numbers (n,) from 0 to below `count`."""

    code: np.ndarray
    count: int

    def dense(self):
        """The same numbers without gaps."""
        if self.count > _SPARSE * len(self.code):
            code, values = pd.factorize(self.code)
            return _Codes(code, len(values))
        used = np.zeros(self.count, bool)
        used[self.code] = True
        number = np.cumsum(used) - 1
        return _Codes(number[self.code], int(number[-1]) + 1)


def unique_rows(
    plan: Plans,
    names: Iterable[str],
    more_names: Iterable[str] = (),
    where: np.ndarray | bool = True,
) -> UniqueRows | None:
    """Kinds of plans, whose rows have the same `names` and, as far as where is True,
    the same `more_names`; None if hardly any two rows are alike.
    """
    (size,) = plan.shape
    kinds = _Codes(np.zeros(size, np.int64), 1)
    for name in (*names, *more_names):
        column = getattr(plan, name)
        if not np.ndim(column):
            continue
        values = _codes(column)
        if name in more_names:  # 0 for all rows where it does not matter
            values = _Codes((values.code + 1) * where, values.count + 1)
        # columns are digits of one number; gaps are closed before it grows too large
        if kinds.count * values.count > 4 * size:
            kinds = kinds.dense()
        code = kinds.code * values.count + values.code
        kinds = _Codes(code, kinds.count * values.count)
    kinds = kinds.dense()
    if 2 * kinds.count > size:
        return None
    rows = np.empty(kinds.count, np.int64)
    rows[kinds.code] = np.arange(size)
    return UniqueRows(rows, kinds.code)


def _codes(column):
    """A number for each value of a column."""
    if isinstance(column, pd.Categorical):
        return _Codes(column.codes.astype(np.int64), len(column.categories))
    if column.dtype.kind in "iub":
        low = int(column.min())
        span = int(column.max()) - low + 1
        return _Codes(column.astype(np.int64) - low, span).dense()
    # most values of a sample differ: take it that all do
    if len(pd.unique(column[:_SAMPLE])) > _SAMPLE // 2:
        return _Codes(np.arange(len(column)), len(column))
    code, values = pd.factorize(column, use_na_sentinel=False)
    return _Codes(code, len(values))


def map_leaves(function: Callable, *items):
    """Value like the first item whose numbers are the function's results; items of the
    same form go together.
    """
    first = items[0]
    if isinstance(first, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(*items, strict=True))
    if isinstance(first, dict):
        return {
            name: map_leaves(function, *(item[name] for item in items))
            for name in first
        }
    if is_dataclass(first):
        values = {
            field.name: map_leaves(
                function, *(getattr(item, field.name) for item in items)
            )
            for field in fields(first)
        }
        return type(first)(**values)
    return function(*items)


def take_rows(item, index: np.ndarray):
    """The same value with the entries of its arrays, along their last axis, that
    `index` names.
    """

    def entries(part):
        is_column = np.ndim(part) and np.shape(part)[-1] > 1
        return part[..., index] if is_column else part

    return map_leaves(entries, item)
