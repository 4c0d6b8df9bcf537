"""What may each field of a plan hold? A rule of the book for each, of one plan or of a column of many."""

from collections.abc import Callable
from numbers import Real

import numpy as np

from madmax_lib.fields import is_whole, shown
from madmax_lib.rules import Rule, is_not_among
from madmax_lib.software import OVERLAPS

__all__ = ["FIELDS", "ZERO_PLUS"]

ZERO_PLUS = ("qwz", "hpz", "qgz")
_LEAST = dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"), 1) | dict.fromkeys(
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
_FLAGS = (*ZERO_PLUS, "overlap_gather", "reduce_fp32", "embedding_as_layer", "head_as_layer")
_CHOICES |= dict.fromkeys(_FLAGS, (False, True))


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
        lambda p, c: f"{name}={shown(getattr(p, name))} {words}",
    )


def _count_rule(name: str, least: int) -> Rule:
    words = f"must be a whole number of at least {least}"
    return _field_rule(name, "a whole number", lambda value: _is_not_count(value, least), words)


def _choice_rule(name: str, choices: tuple) -> Rule:
    words = f"is not one of {', '.join(map(str, choices))}"
    return _field_rule(name, "known", lambda value: is_not_among(value, choices), words)


# of one field each
FIELDS = {name: _count_rule(name, least) for name, least in _LEAST.items()}
FIELDS |= {name: _choice_rule(name, choices) for name, choices in _CHOICES.items()}
FIELDS |= {
    "bucket_bytes": _field_rule(
        "bucket_bytes", "positive", lambda value: _is_not_number(value, 5e-324), "must be positive"
    ),
    "capacity": _field_rule(
        "capacity", "0 or more", lambda value: _is_not_number(value, 0), "must be a number, not negative"
    ),
}
