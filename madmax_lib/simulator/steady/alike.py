"""Which plans of a table are alike in what a part of a step depends on? That part is
worked out once for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass

import numpy as np
import pandas as pd

from madmax_lib.plan.columns import Plans

__all__ = ["kinds_of", "mapped", "spread"]

_SAMPLE = 1024


def kinds_of(
    plan: Plans,
    names: Iterable[str],
    further: Iterable[str] = (),
    where: np.ndarray | bool = True,
) -> tuple[np.ndarray, np.ndarray] | None:
    """A row of each kind of plans, and the kind of each row; None if hardly any two
    rows are alike.

    Plans of a kind have the same `names` and, as far as where is True, the same
    `further` fields.
    """
    size, code, count = *plan.shape, np.zeros(plan.shape, np.int64), 1
    for name in (*names, *further):
        if np.ndim(getattr(plan, name)):
            one, ones = _numbers(getattr(plan, name))
            if name in further:
                one = (one + 1) * where
                ones = ones + 1
            if count * ones > 4 * size:
                code, count = _dense(code, count)
            code = code * ones + one
            count = count * ones
    code, count = _dense(code, count)
    if 2 * count > size:
        return None
    rows = np.empty(count, np.int64)
    rows[code] = np.arange(size)
    return rows, code


def _numbers(column) -> tuple[np.ndarray, int]:
    """A number for each value of a column, and how many there are."""
    if isinstance(column, pd.Categorical):
        return column.codes.astype(np.int64), len(column.categories)
    if column.dtype.kind in "iub":
        low = int(column.min())
        return _dense(column.astype(np.int64) - low, int(column.max()) - low + 1)
    if (
        len(pd.unique(column[:_SAMPLE])) > _SAMPLE // 2
    ):  # most values differ: take it that all do
        return np.arange(len(column)), len(column)
    code, values = pd.factorize(column, use_na_sentinel=False)
    return code, len(values)


def _dense(code: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """The same numbers without gaps."""
    if count > 8 * len(code):
        code, values = pd.factorize(code)
        return code, len(values)
    used = np.zeros(count, bool)
    used[code] = True
    number = np.cumsum(used) - 1
    return number[code], int(number[-1]) + 1


def mapped(function: Callable, *items):
    """The same with a function of all numbers in it; items of the same form go
    together.
    """
    first = items[0]
    if isinstance(first, tuple):
        return tuple(mapped(function, *parts) for parts in zip(*items, strict=True))
    if isinstance(first, dict):
        return {
            name: mapped(function, *(item[name] for item in items)) for name in first
        }
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return type(first)(
            **{
                name: mapped(function, *(getattr(item, name) for item in items))
                for name in names
            }
        )
    return function(*items)


def spread(item, index: np.ndarray):
    """The same with entries of all arrays in it for each index."""
    return mapped(
        lambda part: (
            part[..., index] if np.ndim(part) and np.shape(part)[-1] > 1 else part
        ),
        item,
    )
