"""A rule of the book, the judgement of one plan, and what each field of a plan may hold."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Real

import numpy as np

from madmax_lib.base import is_whole, short_repr
from madmax_lib.catalog import data_file, read_object
from madmax_lib.plan.columns import MODULES, distinct, is_budget

ZERO_PLUS = ("qwz", "hpz", "qgz")  # the three parts of ZeRO++ [arXiv 2306.10209]
_DEGREES = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave")
_COUNTS = ("etp", "lora_rank", "prefetch", "shard", "first_layers", "last_layers")
_CHOICES = read_object(data_file("plan_choices.json"))
_LEAST_POSITIVE = 5e-324  # the smallest number above 0


@dataclass(frozen=True)
class Rule:
    """A rule of the book."""

    name: str  # the rule in general, under which a search counts what it drops
    broken: Callable[..., bool | np.ndarray]  # which plans break it, a flag or a mask
    # words for one plan that does: a format of plan p and case c, or a function of both
    text: str | Callable[..., str]
    # whether some stacks run such plans all the same: padded, cut unevenly, or with
    # samples left over
    may_pad: bool = False

    def words(self, plan, case) -> str:
        """Why a plan that breaks it is not legal."""
        if isinstance(self.text, str):
            return self.text.format(p=plan, c=case)
        return self.text(plan, case)


def enforce(rules: Iterable[Rule], plan, case) -> None:
    """Raises ValueError, in the words of the first rule that a single plan breaks."""
    for rule in rules:
        if rule.broken(plan, case):
            raise ValueError(rule.words(plan, case))


def is_not_among(value, choices: tuple):
    """Whether a field is none of its choices, a flag or a mask; of recompute, modules
    joined by + and budgets are choices too.
    """
    if "selective" in choices:
        modules = {*MODULES.index}
        words = distinct(value)
        choices += tuple(
            word for word in words if {*word.split("+")} <= modules or is_budget(word)
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "b" and True in choices:
        return False
    if not hasattr(value, "shape"):
        return value not in choices
    is_choice = [value == choice for choice in choices]
    if None in choices:
        is_choice.append(value != value)  # NaN is the None of a column of numbers
    return ~np.logical_or.reduce(is_choice)


def _is_not_number(value, least):
    """Whether a field is below `least` or no number; it may be infinite."""
    if not isinstance(value, (Real, np.ndarray)):
        return True
    return np.logical_not(value >= least)  # NaN is not, either


def _field_rule(name, general, is_wrong, words):
    """The rule of one field; general: its name for all values, words: for one."""
    return Rule(
        f"{name} must be {general}",
        lambda p, c: is_wrong(getattr(p, name)),
        lambda p, c: f"{name}={short_repr(getattr(p, name))} {words}",
    )


def _count_rule(name, least):
    def is_wrong(value):
        if isinstance(value, np.ndarray):
            is_fraction = value % 1 != 0 if value.dtype.kind == "f" else False
            return (value < least) | is_fraction
        return not isinstance(value, int) or not is_whole(value, least)

    words = f"must be a whole number of at least {least}"
    return _field_rule(name, "a whole number", is_wrong, words)


FIELDS: dict[str, Rule] = {  # of one field each
    **{name: _count_rule(name, 1) for name in _DEGREES},
    **{name: _count_rule(name, 0) for name in _COUNTS},
    **{
        name: _field_rule(
            name,
            "known",
            partial(is_not_among, choices=choices),
            f"is not one of {', '.join(map(str, choices))}"
            + ", budget0 to budget99" * (name == "recompute"),
        )
        for name, choices in _CHOICES.items()
    },
    "bucket_bytes": _field_rule(
        "bucket_bytes",
        "positive",
        partial(_is_not_number, least=_LEAST_POSITIVE),
        "must be positive",
    ),
    "capacity": _field_rule(
        "capacity",
        "0 or more",
        partial(_is_not_number, least=0),
        "must be a number, not negative",
    ),
}
