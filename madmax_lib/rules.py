"""What is a rule of the book? Its name, the plans that break it, and the words; and how one plan is judged."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["Rule", "enforce", "is_not_among"]


@dataclass(frozen=True)
class Rule:
    """A rule of the book."""

    name: str  # the rule in general, under which a search counts what it drops
    broken: Callable[..., bool | np.ndarray]  # which plans break it, a flag or a mask
    words: Callable[..., str]  # what is said of one plan that does


def enforce(rules: Iterable[Rule], plan, case) -> None:
    """Raises ValueError, in the words of the first rule that a single plan breaks."""
    for rule in rules:
        if rule.broken(plan, case):
            raise ValueError(rule.words(plan, case))


def is_not_among(value, choices: tuple):
    """Where a field is none of its choices, a flag or a mask."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "b" and True in choices:
        return False
    if hasattr(value, "shape"):  # NaN is the None of a column of numbers
        known = [value == choice if choice is not None else (value == choice) | (value != value) for choice in choices]
        return ~np.logical_or.reduce(known)
    return value not in choices
