"""Rows of a table of plans that share a part of their step: the part is worked out once
for each kind of row. And functions over all numbers of nested values.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass

import numpy as np

from madmax_lib.plan.columns import Plans, alike_rows


def unique_rows(
    plan: Plans,
    names: Iterable[str],
    more_names: Iterable[str] = (),
    where: np.ndarray | bool = True,
) -> tuple[np.ndarray, np.ndarray] | None:
    """A row of each kind of plans, and the kind of each row (n,); None if hardly any two
    are alike.

    Rows of a kind have the same `names` and, as far as where is True, the same numbers
    of `more_names`.
    """
    columns = [getattr(plan, name) for name in names]
    columns += [np.multiply(getattr(plan, name), where) for name in more_names]
    rows, kind = alike_rows(columns, plan.shape)
    return (rows, kind) if 2 * len(rows) <= len(kind) else None


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
