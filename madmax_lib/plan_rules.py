"""Which plans are legal? The rule book: a table of rules, each with its name, the plans that break it, and the words.

A rule sees the plans (`p`: a `Plan`, or `Plans` with arrays) and their case (`c`: model, cluster, batch, sequence), and
gives a flag or a mask. The rules say what can be laid out at all; what a search does not try, a runner has not built or
a formula does not cover is said where that is so. `plans.legal` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

__all__ = [
    "ALONE",
    "BATCH",
    "CLUSTER",
    "RECOMMENDATION",
    "STAGES",
    "TRANSFORMER",
    "ZERO_PLUS",
    "Rule",
    "enforce",
    "layers_between",
]

ZERO_PLUS = ("qwz", "hpz", "qgz")
_COUNTS = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave")
_CHOICES = {
    "zero": (0, 1, 2, 3),
    "context": ("ring", "ulysses"),
    "attention": ("flash", "unfused"),
    "recompute": ("none", "selective", "full"),
    "schedule": ("gpipe", "1f1b", "zero-bubble"),
    "offload": (None, "optimizer", "all", "chunks", "nvme"),
}


@dataclass(frozen=True)
class Rule:
    """A rule of the book.

    name: the rule in general, under which a search counts what it drops.
    broken: which plans break it, a flag or a mask.
    words: what is said of one plan that does.
    """

    name: str
    broken: Callable[..., bool | np.ndarray]
    words: Callable[..., str]


def enforce(rules: Iterable[Rule], plan, case) -> None:
    """Raises ValueError, in the words of the first rule that a single plan breaks."""
    for rule in rules:
        if rule.broken(plan, case):
            raise ValueError(rule.words(plan, case))


def _is_not_count(value):
    if isinstance(value, np.ndarray):
        return (value < 1) | (value % 1 != 0)
    return not isinstance(value, int) or isinstance(value, bool) or value < 1


def _is_not_among(value, choices: tuple):
    if isinstance(value, np.ndarray):
        return ~np.logical_or.reduce([value == choice for choice in choices])
    return value not in choices


def _leaves_rest(count, degree):
    """Where a degree does not divide a count; 0 divides everything, as it stands for no choice."""
    return count % (degree + (degree == 0)) != 0


def _count_rule(name: str) -> Rule:
    return Rule(
        f"{name} must be a whole number",
        lambda p, c: _is_not_count(getattr(p, name)),
        lambda p, c: f"{name}={getattr(p, name)!r} must be a whole number of at least 1",
    )


def _choice_rule(name: str, choices: tuple) -> Rule:
    return Rule(
        f"{name} must be known",
        lambda p, c: _is_not_among(getattr(p, name), choices),
        lambda p, c: f"{name}={getattr(p, name)!r} is not one of {', '.join(map(str, choices))}",
    )


def _end_rules(name: str) -> tuple[Rule, Rule]:
    return (
        Rule(
            f"{name} needs a pipeline",
            lambda p, c: (getattr(p, name) < 0) | ((getattr(p, name) > 0) & (p.pp == 1)),
            lambda p, c: f"{name}={getattr(p, name)} needs a pipeline and at least one layer, pp={p.pp}",
        ),
        Rule(
            f"interleave must divide {name}",
            lambda p, c: _leaves_rest(getattr(p, name), p.interleave),
            lambda p, c: f"interleave={p.interleave} does not divide {name}={getattr(p, name)}",
        ),
    )


def _zero_plus(p) -> str:
    return f"{next(name for name in ZERO_PLUS if getattr(p, name))} (ZeRO++)"


# of the fields of a plan alone
ALONE = (
    *map(_count_rule, _COUNTS),
    *(_choice_rule(name, choices) for name, choices in _CHOICES.items()),
    Rule(
        "ep must divide dp x cp",
        lambda p, c: _leaves_rest(p.dp * p.cp, p.ep),
        lambda p, c: f"ep={p.ep} does not divide dp x cp = {p.dp} x {p.cp}",
    ),
    Rule(
        "interleave needs a pipeline",
        lambda p, c: (p.interleave > 1) & (p.pp == 1),
        lambda p, c: f"interleave={p.interleave} needs a pipeline, but pp=1",
    ),
    Rule(
        "prefetch and bucket_bytes must not be negative",
        lambda p, c: (p.prefetch < 0) | np.logical_not(p.bucket_bytes > 0),
        lambda p, c: f"prefetch={p.prefetch} and bucket_bytes={p.bucket_bytes} must not be negative",
    ),
    Rule(
        "capacity must not be negative",
        lambda p, c: np.logical_not(p.capacity >= 0),
        lambda p, c: f"capacity={p.capacity} must not be negative",
    ),
    Rule(
        "shard must divide dp x cp",
        lambda p, c: (p.shard < 0) | _leaves_rest(p.dp * p.cp, p.shard),
        lambda p, c: f"shard={p.shard} does not divide dp x cp = {p.dp} x {p.cp}",
    ),
    Rule(
        "shard needs ZeRO",
        lambda p, c: (p.shard > 0) & (p.zero == 0),
        lambda p, c: f"shard={p.shard} needs zero of at least 1, but zero=0 shards nothing",
    ),
    Rule(
        "shard and ep must nest",
        lambda p, c: (p.shard > 0) & (_leaves_rest(p.shard, p.ep) & _leaves_rest(p.ep, p.shard)),
        lambda p, c: f"shard={p.shard} and ep={p.ep}: one must divide the other",
    ),
    Rule(
        "ZeRO++ needs zero=3",
        lambda p, c: (p.qwz | p.hpz | p.qgz) & (p.zero != 3),
        lambda p, c: f"{_zero_plus(p)} needs zero=3, but zero={p.zero}",
    ),
    Rule(
        "ZeRO++ excludes HSDP",
        lambda p, c: (p.qwz | p.hpz | p.qgz) & (p.shard > 0),
        lambda p, c: f"{_zero_plus(p)} and shard={p.shard} (HSDP) exclude each other",
    ),
    Rule(
        "overlap_gather needs zero of 1 or 2",
        lambda p, c: p.overlap_gather & (p.zero != 1) & (p.zero != 2),
        lambda p, c: f"overlap_gather is for zero=1 and zero=2, but zero={p.zero}",
    ),
    *_end_rules("first_layers"),
    *_end_rules("last_layers"),
    Rule(
        "an end counts as a layer or has its own layers",
        lambda p, c: (p.embedding_as_layer & (p.first_layers > 0)) | (p.head_as_layer & (p.last_layers > 0)),
        lambda p, c: "embedding_as_layer and first_layers, head_as_layer and last_layers exclude each other",
    ),
)

CLUSTER = (
    Rule(
        "dp x tp x pp x cp must fill the cluster",
        lambda p, c: p.world_size != c.cluster.world_size,
        lambda p, c: (
            f"dp x tp x pp x cp = {p.dp} x {p.tp} x {p.pp} x {p.cp} = {p.world_size}, "
            f"but {c.cluster.name} has {c.cluster.world_size} devices"
        ),
    ),
)


def layers_between(p, layers):
    """(layers, virtual stages) between the first and last stage of stated length; embedding and head may count."""
    counted = layers + p.embedding_as_layer + p.head_as_layer - p.first_layers - p.last_layers
    return counted, (p.pp - (p.first_layers > 0) - (p.last_layers > 0)) * p.interleave


def _is_not_shared(p, layers):
    counted, stages = layers_between(p, layers)
    return (counted < stages) | ((stages == 0) & (counted != 0))


def _is_uneven(p, layers):
    """Beside ends of stated length the other stages must come out equal [Megatron-LM]."""
    counted, stages = layers_between(p, layers)
    return ((p.first_layers > 0) | (p.last_layers > 0)) & _leaves_rest(counted, stages)


# of a plan and a number of layers
STAGES = (
    Rule(
        "the ends must leave layers for the other stages",
        _is_not_shared,
        lambda p, layers: (
            f"first_layers={p.first_layers} and last_layers={p.last_layers} do not leave {layers} layers "
            f"for pp x interleave = {p.pp} x {p.interleave}"
        ),
    ),
    Rule(
        "the stages between stated ends must be equal",
        _is_uneven,
        lambda p, layers: (
            f"pp x interleave = {p.pp} x {p.interleave}: {layers_between(p, layers)[0]} layers do not divide evenly "
            f"over {layers_between(p, layers)[1]} stages"
        ),
    ),
)


def _of_layers(rule: Rule) -> Rule:
    return Rule(rule.name, lambda p, c: rule.broken(p, c.model.layers), lambda p, c: rule.words(p, c.model.layers))


TRANSFORMER = (
    Rule(
        "tp must divide the attention heads",
        lambda p, c: _leaves_rest(c.model.heads, p.tp),
        lambda p, c: f"tp={p.tp} does not divide {c.model.heads} attention heads of {c.model.name}",
    ),
    Rule(  # where tp is a multiple of them, each tp rank holds one of the heads
        "tp must divide the key-value heads, or be a multiple",
        lambda p, c: _leaves_rest(c.model.kv_heads, p.tp) & _leaves_rest(p.tp, c.model.kv_heads),
        lambda p, c: f"tp={p.tp} does not divide {c.model.kv_heads} key-value heads of {c.model.name}",
    ),
    Rule(  # each rank has every head for its part of the tokens, then a part of the heads [Ulysses, arXiv 2309.14509]
        "cp must divide the heads of a tp rank under Ulysses",
        lambda p, c: (p.context == "ulysses") & _leaves_rest(c.model.heads // p.tp, p.cp),
        lambda p, c: (
            f"cp={p.cp} does not divide {c.model.heads // p.tp} attention heads of a tp rank of {c.model.name}"
        ),
    ),
    Rule(  # all ranks hold equal parts: nobody pads a sequence for one of them
        "cp must divide the sequence",
        lambda p, c: _leaves_rest(c.sequence, p.cp),
        lambda p, c: f"cp={p.cp} does not divide {c.sequence} tokens of {c.model.name}",
    ),
    Rule(  # a rank takes an early and a late piece, so that all compute as many causal scores [arXiv 2407.21783, 3.3.2]
        "2 cp must divide the sequence",
        lambda p, c: (p.context == "ring") & (p.cp > 1) & _leaves_rest(c.sequence, 2 * p.cp) & (not c.model.image),
        lambda p, c: (
            f"2 cp = {2 * p.cp} does not divide {c.sequence} tokens of {c.model.name}: "
            "each rank of a causal ring holds an early and a late piece"
        ),
    ),
    Rule(
        "ep must divide the experts",
        lambda p, c: _leaves_rest(c.model.experts or p.ep, p.ep),
        lambda p, c: f"ep={p.ep} does not divide {c.model.experts} experts of {c.model.name}",
    ),
    Rule(
        "ep needs experts",
        lambda p, c: (p.ep > 1) & (not c.model.experts),
        lambda p, c: f"ep={p.ep}, but {c.model.name} has no experts",
    ),
    Rule(
        "ep with tp needs sequence_parallel",
        lambda p, c: (p.ep > 1) & (p.tp > 1) & np.logical_not(p.sequence_parallel),
        lambda p, c: f"ep={p.ep} with tp={p.tp} needs sequence_parallel",
    ),
    Rule(
        "pp must not exceed the layers",
        lambda p, c: p.pp * p.interleave > c.model.layers,
        lambda p, c: f"pp x interleave = {p.pp} x {p.interleave} exceeds {c.model.layers} layers of {c.model.name}",
    ),
    Rule(
        "interleave needs schedule='1f1b'",
        lambda p, c: (p.interleave > 1) & (p.schedule != "1f1b"),
        lambda p, c: f"interleave={p.interleave} needs schedule='1f1b', got {p.schedule!r}",
    ),
    *map(_of_layers, STAGES),
)

RECOMMENDATION = (
    Rule(
        "recommendation models are split by dp only",
        lambda p, c: (p.world_size != p.dp) | (p.ep > 1),
        lambda p, c: f"{c.model.name}: recommendation models are split by dp only, got {p}",
    ),
)

BATCH = (
    Rule(
        "dp must divide the global batch",
        lambda p, c: (c.global_batch < 1) | _leaves_rest(c.global_batch, p.dp),
        lambda p, c: (
            f"global_batch={c.global_batch} is not a multiple of dp x micro_batch = {p.dp} x {p.micro_batch}, "
            "nor, with a short last micro-batch, of dp"
        ),
    ),
)
