"""What is a rule of the book, how is one plan judged, and what may each field of a plan
hold?
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Real

import numpy as np

from madmax_lib.base.fields import is_whole, short_repr
from madmax_lib.catalog.software import OVERLAPS

__all__ = ["FIELDS", "ZERO_PLUS", "Rule", "enforce", "is_not_among"]

ZERO_PLUS = ("qwz", "hpz", "qgz")
_LEAST = dict.fromkeys(
    ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"), 1
) | dict.fromkeys(
    ("etp", "lora_rank", "prefetch", "shard", "first_layers", "last_layers"), 0
)
_CHOICES = {
    "zero": (0, 1, 2, 3),
    "context": ("ring", "ulysses"),
    "attention": ("flash", "unfused"),
    "recompute": ("none", "selective", "full"),
    "schedule": ("gpipe", "1f1b", "zero-bubble"),
    "offload": (None, "optimizer", "all", "chunks", "nvme"),
} | dict.fromkeys((*OVERLAPS, "sequence_parallel"), (None, False, True))
_FLAGS = (
    *ZERO_PLUS,
    "overlap_gather",
    "reduce_fp32",
    "embedding_as_layer",
    "head_as_layer",
)
_CHOICES |= dict.fromkeys(_FLAGS, (False, True))


@dataclass(frozen=True)
class Rule:
    """A rule of the book."""

    name: str  # the rule in general, under which a search counts what it drops
    broken: Callable[..., bool | np.ndarray]  # which plans break it, a flag or a mask
    text: (
        str | Callable[..., str]
        # what is said of one plan that does: a format of plan p and case c, or a function
    )

    def words(self, plan, case) -> str:
        """What is said of a plan that breaks it."""
        return (
            self.text.format(p=plan, c=case)
            if isinstance(self.text, str)
            else self.text(plan, case)
        )


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
        known = [
            value == choice
            if choice is not None
            else (value == choice) | (value != value)
            for choice in choices
        ]
        return ~np.logical_or.reduce(known)
    return value not in choices


def _is_not_count(value, least: int):
    if isinstance(value, np.ndarray):
        return (value < least) | (value % 1 != 0 if value.dtype.kind == "f" else False)
    return not isinstance(value, int) or not is_whole(value, least)


def _is_not_number(value, least: float):
    """A number may be infinite."""
    if not isinstance(value, (Real, np.ndarray)):
        return True
    return np.logical_not(value >= least)


def _field_rule(name: str, general: str, is_wrong: Callable, words: str) -> Rule:
    return Rule(
        f"{name} must be {general}",
        lambda p, c: is_wrong(getattr(p, name)),
        lambda p, c: f"{name}={short_repr(getattr(p, name))} {words}",
    )


FIELDS: dict[str, Rule] = {}  # of one field each
for _name, _least in _LEAST.items():
    _words = f"must be a whole number of at least {_least}"
    FIELDS[_name] = _field_rule(
        _name, "a whole number", partial(_is_not_count, least=_least), _words
    )
for _name, _known in _CHOICES.items():
    _words = f"is not one of {', '.join(map(str, _known))}"
    FIELDS[_name] = _field_rule(
        _name, "known", partial(is_not_among, choices=_known), _words
    )
_positive = partial(_is_not_number, least=5e-324)
_not_negative = partial(_is_not_number, least=0)
FIELDS["bucket_bytes"] = _field_rule(
    "bucket_bytes", "positive", _positive, "must be positive"
)
FIELDS["capacity"] = _field_rule(
    "capacity", "0 or more", _not_negative, "must be a number, not negative"
)
