"""Which plans can a software run? Rules of the book that apply where a case names one, by `data/software.csv`."""

from collections.abc import Callable

import numpy as np

from madmax_lib.rules import Rule, is_not_among
from madmax_lib.specs import DLRM

__all__ = ["SOFTWARE"]


def _software_rule(what: str, broken: Callable, words: str) -> Rule:
    """broken: of plans and the software of their case; words: what it does not run, a format of the plan."""
    text = f"{{c.software.name}} does not run {words}"
    return Rule(f"the software must run {what}", lambda p, c: broken(p, c.software), text)


def _kind_of(model) -> str:
    return "recommendation" if isinstance(model, DLRM) else "image" if model.image else "language"


def _lie_elsewhere(p, places: tuple[str, ...]):
    whole, split = "dp-cp-tp" not in places, "dp-cp" not in places
    return (p.ep > 1) & (
        (not places) | ((p.tp > 1) & (((p.expert_spread > 1) & whole) | ((p.expert_spread == 1) & split)))
    )


def _zero_is_not_run(p, s):
    return np.where(p.pp > 1, is_not_among(p.zero, s.zero_under_pipeline), is_not_among(p.zero, s.zero))


def _kind_is_not_run(degree, kind, kinds: tuple[str, ...]):
    return (degree > 1) & is_not_among(kind, kinds)


SOFTWARE = (
    Rule(
        "the software must train such models",
        lambda p, c: (p.dp > 0) & (_kind_of(c.model) not in c.software.trains),
        lambda p, c: f"{c.software.name} does not train {_kind_of(c.model)} models such as {c.model.name}",
    ),
    _software_rule("tp", lambda p, s: (p.tp > 1) & (not s.tensor_parallel), "tp={p.tp}"),
    _software_rule(
        "the schedule", lambda p, s: _kind_is_not_run(p.pp, p.schedule, s.schedules), "pp={p.pp} under {p.schedule}"
    ),
    _software_rule("interleave", lambda p, s: (p.interleave > 1) & (not s.interleave), "interleave={p.interleave}"),
    _software_rule("the ZeRO stage", _zero_is_not_run, "zero={p.zero} with pp={p.pp}"),
    _software_rule("HSDP", lambda p, s: (p.shard > 0) & (not s.hybrid_shard), "shard={p.shard} (HSDP)"),
    _software_rule("qwz", lambda p, s: p.qwz & ("qwz" not in s.zero_plus_plus), "qwz"),
    _software_rule("hpz", lambda p, s: p.hpz & ("hpz" not in s.zero_plus_plus), "hpz"),
    _software_rule("qgz", lambda p, s: p.qgz & ("qgz" not in s.zero_plus_plus), "qgz"),
    _software_rule("such cp", lambda p, s: _kind_is_not_run(p.cp, p.context, s.context), "cp={p.cp} by {p.context}"),
    _software_rule("ep there", lambda p, s: _lie_elsewhere(p, s.expert_placement), "ep={p.ep} over {p.expert_devices}"),
)
