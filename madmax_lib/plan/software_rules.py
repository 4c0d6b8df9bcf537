"""Rules of the book for the plans that a software can run, where a case names one:
by `data/software.csv`.

`SOFTWARE` is what it can run at all. A plan also says things that its configuration has
no word for, mostly by default (DeepSpeed has no sequence parallelism, torchtitan always
sums gradients in fp32): `STATED` leaves these out too, so that what a search finds can
be written by `plan_flags.write`.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_

import numpy as np

from madmax_lib.catalog import DLRM
from madmax_lib.plan.rule import ZERO_PLUS, Rule, is_not_among


def _software_rule(what, broken, words):
    """broken: of plans and the software of their case; words: what it does not run, a
    format of the plan.
    """
    return Rule(
        f"the software must run {what}",
        lambda p, c: broken(p, c.software),
        f"{{c.software.name}} does not run {words}",
    )


def _zero_plus_rule(part):
    """The software must have a part of ZeRO++ where a plan does.

    A part stands for itself in the words of the rule.
    """

    def broken(p, software):
        return getattr(p, part) & (part not in software.zero_plus_plus)

    return _software_rule(part, broken, part)


def _kind_of(model):
    if isinstance(model, DLRM):
        return "recommendation"
    return "image" if model.image else "language"


def _lie_elsewhere(p, placement):
    """Whether experts lie where a software does not lay them: over dp x cp x tp, or over
    dp x cp with each split over tp.
    """
    if not placement:
        return p.ep > 1
    over_tp = p.expert_spread > 1
    is_elsewhere = (over_tp & ("dp-cp-tp" not in placement)) | (
        ~np.asarray(over_tp) & ("dp-cp" not in placement)
    )
    return (p.ep > 1) & (p.tp > 1) & is_elsewhere


def _is_not_counted_out(p, c):
    """Whether a software that counts layers of a chunk cannot say a plan's chunks.

    It rounds the layers of each up, and may come out at fewer chunks [torchtitan].
    """
    counted = c.model.layers + p.ends_as_layers
    chunks = p.pp * p.interleave
    each = -(-counted // chunks)
    return (p.interleave > 2) & (-(-counted // each) != chunks)


# choices of several fields: where a plan makes one, and its words
_CHOICES: dict[str, tuple[Callable, str]] = {
    "copies-in-cp": (
        lambda p, c: (p.zero == 0) & (p.cp > 1),
        "zero=0 with cp={p.cp}, over which it shards",
    ),
    "copies-in-tp": (
        lambda p, c: (p.zero == 0) & (p.tp > 1) & (p.dp > 1),
        "zero=0 with tp={p.tp}",
    ),
    "tp-under-pp": (lambda p, c: (p.tp > 1) & (p.pp > 1), "tp={p.tp} with pp={p.pp}"),
    "tp-in-cp": (lambda p, c: (p.tp > 1) & (p.cp > 1), "tp={p.tp} with cp={p.cp}"),
    "late-gather": (
        lambda p, c: (p.zero == 2) & np.logical_not(p.overlap_gather),
        "zero=2 without overlap_gather",
    ),
    "shards-in-cp": (
        lambda p, c: (p.shard > 0) & (p.shard % p.cp != 0),
        "shard={p.shard}, no multiple of cp={p.cp}",
    ),
    "shard-is-cp": (
        lambda p, c: (p.shard == p.cp) & (p.tp * p.cp > 1),
        "shard={p.shard}, no more than cp={p.cp}",
    ),
    "shard-below-3": (
        lambda p, c: (p.shard > 0) & (p.zero < 3),
        "shard={p.shard} with zero={p.zero}",
    ),
    "uneven": (
        # stated ends may be uneven, where embedding and head do not count
        lambda p, c: (
            (p.pp > 1)
            & (p.layout == "")
            & ((p.first_layers + p.last_layers == 0) | (p.ends_as_layers > 0))
            & ((c.model.layers + p.ends_as_layers) % (p.pp * p.interleave) != 0)
        ),
        "pp x interleave = {p.pp} x {p.interleave}, which does not divide the layers",
    ),
    "ragged": (
        lambda p, c: (
            (p.first_layers % p.interleave > 0) | (p.last_layers % p.interleave > 0)
        ),
        "ends of {p.first_layers} and {p.last_layers} layers in {p.interleave} chunks",
    ),
    "one-chunk": (
        lambda p, c: (p.schedule == "zero-bubble") & (p.interleave == 1),
        "zero-bubble with one chunk per stage",
    ),
    "zero-bubble-chunks": (
        lambda p, c: (p.schedule == "zero-bubble") & (p.interleave > 1),
        "zero-bubble with interleave={p.interleave}",
    ),
    "layout": (lambda p, c: p.layout != "", "layout={p.layout}"),
    "gather-alone": (
        lambda p, c: p.overlap_gather & np.isinf(p.bucket_bytes),
        "overlap_gather without reductions that overlap (one-bucket)",
    ),
    "modules": (lambda p, c: p.recomputes_modules, "recompute={p.recompute}"),
    "rounded": (
        _is_not_counted_out,
        "pp x interleave = {p.pp} x {p.interleave} for so many layers",
    ),
}
_MATTERS = {  # where a choice of one field changes anything
    "reduce_fp32": lambda p: p.replicas > 1,
    "prefetch": lambda p: (p.zero == 3) & (p.replicas > 1),
    "sequence_parallel": lambda p: p.tp > 1,
}


def _makes(choice, p, c):
    """Whether plans make a choice: field=value, field=any (above zero), or a word of
    `_CHOICES`.
    """
    name, _, value = choice.partition("=")
    if choice in _CHOICES:
        return _CHOICES[choice][0](p, c)
    if not value or name not in vars(p):
        raise ValueError(
            f"software {c.software.name}: {choice!r} is neither field=value nor one of "
            f"{', '.join(_CHOICES)}"
        )
    ours = getattr(p, name)
    wanted = float(value) if value.isdigit() else value
    is_made = ours > 0 if value == "any" else ours == wanted
    return is_made & _MATTERS[name](p) if name in _MATTERS else is_made


def _choices_rule(which, verb):
    """The rule of all choices that a software lists in a field, `refuses` or `unsaid`."""

    def broken(p, c):
        is_made = (_makes(choice, p, c) for choice in getattr(c.software, which))
        return reduce(or_, is_made, False)

    def words(p, c):
        choices = getattr(c.software, which)
        choice = next(choice for choice in choices if _makes(choice, p, c))
        text = _CHOICES[choice][1].format(p=p) if choice in _CHOICES else choice
        return f"{c.software.name} does not {verb} {text}"

    return Rule(f"the software must {verb} the choices", broken, words)


SOFTWARE = (  # where a case names one, by `data/software.csv`
    Rule(
        "the software must train such models",
        lambda p, c: (p.dp > 0) & (_kind_of(c.model) not in c.software.trains),
        lambda p, c: (
            f"{c.software.name} does not train {_kind_of(c.model)} models such as "
            f"{c.model.name}"
        ),
    ),
    _software_rule(
        "tp", lambda p, s: (p.tp > 1) & (not s.tensor_parallel), "tp={p.tp}"
    ),
    _software_rule(
        "the schedule",
        lambda p, s: (p.pp > 1) & is_not_among(p.schedule, s.schedules),
        "pp={p.pp} under {p.schedule}",
    ),
    _software_rule(
        "interleave",
        lambda p, s: (p.interleave > 1) & (not s.interleave or s.stages_by_flops),
        "interleave={p.interleave}",
    ),
    _software_rule(
        "the ZeRO stage",
        lambda p, s: np.where(
            p.pp > 1,
            is_not_among(p.zero, s.zero_under_pipeline),
            is_not_among(p.zero, s.zero),
        ),
        "zero={p.zero} with pp={p.pp}",
    ),
    _software_rule(
        "memory budgets",
        lambda p, s: (p.budget < 1) & (not s.memory_budget),
        "recompute={p.recompute}",
    ),
    _software_rule(
        "HSDP",
        lambda p, s: (p.shard > 0) & (not s.hybrid_shard),
        "shard={p.shard} (HSDP)",
    ),
    *map(_zero_plus_rule, ZERO_PLUS),
    _software_rule(
        "such cp",
        lambda p, s: (p.cp > 1) & is_not_among(p.context, s.context),
        "cp={p.cp} by {p.context}",
    ),
    _software_rule(
        "ep there",
        lambda p, s: _lie_elsewhere(p, s.expert_placement),
        "ep={p.ep} over {p.expert_devices}",
    ),
    _choices_rule("refuses", "run"),
)
# beyond what it runs: what its configuration has words for
STATED = (_choices_rule("unsaid", "say"),)
