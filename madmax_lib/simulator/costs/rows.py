"""Functions over all numbers of nested values, such as those of some rows of a table."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass

import numpy as np


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
