"""The rule book, which says what plans are legal: a table of rules, each with its name,
the plans that break it, and the words.

A rule sees the plans (`p`: a `Plan`, or `Plans` with arrays) and their case (`c`:
model, cluster, batch, sequence), and gives a flag or a mask. The rules say what can be
laid out at all; what a search does not try, a runner has not built or a formula does
not cover is said where that is so. `legal.legal` applies them.
"""

from typing import NamedTuple

import numpy as np

from madmax_lib.catalog import DLRM, Model
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import MODULES
from madmax_lib.plan.layout import layout_chunks, layout_layers
from madmax_lib.plan.rule import FIELDS, ZERO_PLUS, Rule, enforce
from madmax_lib.plan.software_rules import SOFTWARE, STATED

__all__ = [
    "ALONE",
    "BATCH",
    "NEST",
    "RECOMMENDATION",
    "SOFTWARE",
    "STAGES",
    "STATED",
    "Rule",
    "check_plan",
    "enforce",
    "layers_between",
    "rules_of",
]


def _leaves_rest(count, degree):
    """Whether a degree does not divide a count; 0 divides everything, as it stands for
    no choice.
    """
    if isinstance(degree, int) and degree <= 1:
        return False  # the common case, without a calculation of arrays
    return count % np.maximum(degree, 1) != 0


def _pipeline_rule(name, default):
    """A field is at its default where there is one stage.

    default: 1 or 0, what the field is without a pipeline.
    """
    text = f"{name}={{p.{name}}} needs a pipeline, but pp=1"
    return Rule(
        f"{name} needs a pipeline",
        lambda p, c: (getattr(p, name) > default) & (p.pp == 1),
        text,
    )


def _has_zero_plus(p):
    return p.qwz | p.hpz | p.qgz


def _zero_plus(p):
    return f"{next(name for name in ZERO_PLUS if getattr(p, name))} (ZeRO++)"


# ranks of a shard and of a group of experts
NEST = Rule(
    "shard and ep must nest",
    lambda p, c: (
        (p.shard > 0)
        & _leaves_rest(p.shard * p.expert_spread, p.ep)
        & _leaves_rest(p.ep, p.shard * p.expert_spread)
    ),
    "shard={p.shard} and ep={p.ep}: one must divide the other",
)
# of the fields of a plan alone
ALONE = (
    *FIELDS.values(),
    Rule(
        "etp must divide tp",
        lambda p, c: _leaves_rest(p.tp, p.etp),
        "etp={p.etp} does not divide tp={p.tp}",
    ),
    Rule(
        "ep must divide dp x cp",
        lambda p, c: _leaves_rest(p.replicas * p.expert_spread, p.ep),
        "ep={p.ep} does not divide {p.expert_devices}",
    ),
    *map(_pipeline_rule, ("interleave", "first_layers", "last_layers"), (1, 0, 0)),
    Rule(
        "shard must divide dp x cp",
        lambda p, c: _leaves_rest(p.replicas, p.shard),
        "shard={p.shard} does not divide dp x cp = {p.dp} x {p.cp}",
    ),
    Rule(
        "shard needs ZeRO",
        lambda p, c: (p.shard > 0) & (p.zero == 0),
        "shard={p.shard} needs zero of at least 1, but zero=0 shards nothing",
    ),
    NEST,
    Rule(
        "ZeRO++ needs zero=3",
        lambda p, c: _has_zero_plus(p) & (p.zero != 3),
        lambda p, c: f"{_zero_plus(p)} needs zero=3, but zero={p.zero}",
    ),
    Rule(
        "ZeRO++ excludes HSDP",
        lambda p, c: _has_zero_plus(p) & (p.shard > 0),
        lambda p, c: f"{_zero_plus(p)} and shard={p.shard} (HSDP) exclude each other",
    ),
    Rule(
        "overlap_gather needs zero of 1 or 2",
        lambda p, c: p.overlap_gather & (p.zero != 1) & (p.zero != 2),
        "overlap_gather is for zero=1 and zero=2, but zero={p.zero}",
    ),
    Rule(
        "overlap_dp=False needs zero below 3",
        # None, and NaN in a column, leave it open
        lambda p, c: (p.overlap_dp == 0) & (p.zero == 3),
        "overlap_dp=False is for zero below 3: ZeRO-3 always reduces during compute; "
        "prefetch=0 gathers late",
    ),
    Rule(
        "an end counts as a layer or has its own layers",
        lambda p, c: (
            (p.embedding_as_layer & (p.first_layers > 0))
            | (p.head_as_layer & (p.last_layers > 0))
        ),
        "embedding_as_layer and first_layers, head_as_layer and last_layers exclude "
        "each other",
    ),
    Rule(
        "a layout states all chunks",
        lambda p, c: (
            (p.layout != "")
            & (
                (
                    p.of_layout(lambda text: len(layout_chunks(text)))
                    != p.pp * p.interleave
                )
                | (p.first_layers + p.last_layers + p.ends_as_layers > 0)
            )
        ),
        "layout={p.layout} must have pp x interleave = {p.pp} x {p.interleave} chunks, "
        "and no first_layers, last_layers, embedding_as_layer or head_as_layer beside it",
    ),
)


def _not_filled(p, c):
    """Words of the devices that a plan needs, with the nodes that have as many, or the
    part of one.

    Neither is named where the plan fills the last of several in part.
    """
    nodes = p.world_size / c.cluster.devices_per_node
    way_out = f"; give nodes={nodes:.0f}" if nodes == int(nodes) else ""
    if nodes < 1:
        way_out = f"; give devices={p.world_size}"
    return (
        f"dp x tp x pp x cp = {p.dp} x {p.tp} x {p.pp} x {p.cp} = {p.world_size}, but "
        f"{c.cluster.name} has {c.cluster.world_size} devices{way_out}"
    )


# of a plan and the cluster: every device has work
_CLUSTER = (
    Rule(
        "dp x tp x pp x cp must fill the cluster",
        lambda p, c: p.world_size != c.cluster.world_size,
        _not_filled,
    ),
)


class Between(NamedTuple):
    """Layers and stages between the first and last stage of stated length."""

    layers: int | np.ndarray  # embedding and head may count as one each
    stages: int | np.ndarray  # virtual ones: chunks

    @property
    def lacks_layers(self) -> bool | np.ndarray:
        """Whether a stage would be empty, or layers left over."""
        is_left_over = (self.stages == 0) & (self.layers != 0)
        return (self.layers < self.stages) | is_left_over


def layers_between(p, layers) -> Between:
    """Layers and virtual stages between the first and last stage of stated length."""
    counted = layers + p.ends_as_layers - p.first_layers - p.last_layers
    stages = p.pp - (p.first_layers > 0) - (p.last_layers > 0)
    return Between(counted, stages * p.interleave)


# of a plan and a number of layers
STAGES = (
    Rule(
        "a layout must have the layers of the model",
        lambda p, layers: (p.layout != "") & (p.of_layout(layout_layers) != layers),
        lambda p, layers: (
            f"layout={p.layout} has {layout_layers(p.layout)} layers, MTP layers among "
            f"them, for a model of {layers}"
        ),
    ),
    Rule(
        "the ends must leave layers for the other stages",
        lambda p, layers: (p.layout == "") & layers_between(p, layers).lacks_layers,
        "first_layers={p.first_layers} and last_layers={p.last_layers} do not leave {c} "
        "layers for pp x interleave = {p.pp} x {p.interleave}",
    ),
    # beside ends of stated length [Megatron-LM]; else a remainder has its places
    Rule(
        "the stages between stated ends must be equal",
        lambda p, layers: (
            ((p.first_layers > 0) | (p.last_layers > 0))
            & _leaves_rest(*layers_between(p, layers))
        ),
        lambda p, layers: (
            f"pp x interleave = {p.pp} x {p.interleave}: "
            "{0.layers} layers do not divide evenly over {0.stages} stages"
        ).format(layers_between(p, layers)),
    ),
)


def _of_layers(rule):
    """A rule of `STAGES` for the layers of a case's model.

    The rule itself judges a number of layers, for those who cut without a case.
    """
    return Rule(
        rule.name,
        lambda p, c: rule.broken(p, c.model.layers),
        lambda p, c: rule.words(p, c.model.layers),
        may_pad=True,
    )


def _shape_rule(name, what, count, unit):
    """A degree must divide what a model has; count: of a case."""
    return Rule(
        f"{name} must divide {what}",
        lambda p, c: _leaves_rest(count(c), getattr(p, name)),
        lambda p, c: (
            f"{name}={getattr(p, name)} does not divide {count(c)} {unit} of "
            f"{c.model.name}"
        ),
        may_pad=True,
    )


def _kinds_rule(name, what, broken):
    """A choice is not modelled for layers of several kinds."""
    return Rule(
        f"{name} must be modelled for the kinds of layers",
        broken,
        lambda p, c: (
            f"{name}={getattr(p, name)}: {what} is not modelled for layers "
            f"{' '.join(c.model.kinds)} of {c.model.name}"
        ),
    )


def lacking(model: Model) -> list[str]:
    """Modules of recompute that a model does not have."""
    needs = MODULES["needs"].items()
    return [name for name, need in needs if not getattr(model, need)]


_TRANSFORMER = (
    Rule(
        "a model needs tokens",
        lambda p, c: (p.dp > 0) & (not c.sequence),
        "{c.model.name} has no sequence of its own; give sequence=, the tokens per "
        "sample",
    ),
    Rule(
        "lora_rank must not exceed the width",
        lambda p, c: p.lora_rank > c.model.hidden,
        "lora_rank={p.lora_rank} exceeds the {c.model.hidden} channels of "
        "{c.model.name}",
    ),
    _shape_rule(
        "tp",
        "the attention heads",
        lambda c: c.model.tp_heads * c.model.all_blocks.has_attention,
        "attention heads",
    ),
    _shape_rule(
        "tp",
        "the groups of mixers",
        lambda c: c.model.mixer_groups or c.model.mixer_heads,
        "mixer groups",
    ),
    _shape_rule(
        "tp",
        "the channels of mixers",
        lambda c: c.model.mixer_channels,
        "mixer channels",
    ),
    _kinds_rule(
        "cp",
        "context parallelism",
        lambda p, c: (
            (p.cp > 1)
            & bool(
                c.model.all_blocks.has_mixer
                or c.model.all_blocks.has_cross_attention
                or c.model.output_rank
            )
        ),
    ),
    _kinds_rule(
        "pp",
        "a pipeline through encoder and decoder",
        lambda p, c: (p.pp > 1) & c.model.all_blocks.has_cross_attention,
    ),
    _kinds_rule(
        "pp",
        "stages cut at equal FLOPs",
        lambda p, c: (
            (p.pp > 1)
            & bool(c.model.blocks and c.software and c.software.stages_by_flops)
        ),
    ),
    _kinds_rule(
        "offload",
        "it",
        lambda p, c: np.not_equal(p.offload, None) & bool(c.model.blocks),
    ),
    _kinds_rule(
        "lora_rank", "it", lambda p, c: (p.lora_rank > 0) & bool(c.model.blocks)
    ),
    Rule(  # where tp is a multiple of them, each tp rank holds one of the heads
        "tp must divide the key-value heads, or be a multiple",
        lambda p, c: (
            c.model.all_blocks.has_attention
            & _leaves_rest(c.model.kv_heads, p.tp)
            & _leaves_rest(p.tp, c.model.kv_heads)
        ),
        "tp={p.tp} does not divide {c.model.kv_heads} key-value heads of {c.model.name}",
        may_pad=True,
    ),
    # each rank has every head for its part of the tokens, then a part of the heads
    # [Ulysses, arXiv 2309.14509]
    Rule(
        "cp must divide the heads of a tp rank under Ulysses",
        lambda p, c: (
            (p.context == "ulysses") & _leaves_rest(c.model.tp_heads // p.tp, p.cp)
        ),
        lambda p, c: (
            f"cp={p.cp} does not divide {c.model.tp_heads // p.tp} attention heads of a "
            f"tp rank of {c.model.name}"
        ),
    ),
    # all ranks hold equal parts: nobody pads a sequence for one of them
    _shape_rule("cp", "the sequence", lambda c: c.sequence, "tokens"),
    # a rank takes an early and a late piece, so that all compute as many causal scores
    # [arXiv 2407.21783, 3.3.2]
    Rule(
        "2 cp must divide the sequence",
        lambda p, c: (
            (p.context == "ring")
            & (p.cp > 1)
            & _leaves_rest(c.sequence, 2 * p.cp)
            & (not c.model.image)
        ),
        lambda p, c: (
            f"2 cp = {2 * p.cp} does not divide {c.sequence} tokens of {c.model.name}: "
            "each rank of a causal ring holds an early and a late piece"
        ),
        may_pad=True,
    ),
    _shape_rule("ep", "the experts", lambda c: c.model.experts, "experts"),
    Rule(
        "ep needs experts",
        lambda p, c: ((p.ep > 1) | (p.etp > 0)) & (not c.model.experts),
        lambda p, c: (
            f"ep={p.ep}{f' and etp={p.etp}' * (p.etp > 0)}, but {c.model.name} has "
            "no experts"
        ),
    ),
    Rule(
        "ep with tp needs sequence_parallel",
        lambda p, c: (
            ((p.ep > 1) | (p.expert_spread > 1))
            & (p.tp > 1)
            & np.logical_not(p.sequence_parallel)
        ),
        "ep={p.ep} with tp={p.tp} needs sequence_parallel",
    ),
    Rule(
        "pp must not exceed the layers",
        # chunks may be empty: that of an end which counts as a layer, and those that the
        # layers of an end leave; -n % v is what n lacks to a multiple of v
        lambda p, c: (
            (p.layout == "") * p.pp * p.interleave
            > c.model.layers
            + p.ends_as_layers
            + -p.first_layers % p.interleave
            + -p.last_layers % p.interleave
        ),
        "pp x interleave = {p.pp} x {p.interleave} exceeds {c.model.layers} layers "
        "of {c.model.name}",
        may_pad=True,
    ),
    Rule(
        "interleave needs another schedule than gpipe",
        lambda p, c: (p.interleave > 1) & (p.schedule == "gpipe"),
        "interleave={p.interleave} needs schedule='1f1b', got {p.schedule!r}",
    ),
    Rule(
        "a V has two chunks per stage, whose lengths follow",
        lambda p, c: (
            p.folds
            & (
                (p.interleave != 2)
                | (p.first_layers + p.last_layers > 0)
                | (p.layout != "")
            )
        ),
        "schedule={p.schedule!r} needs interleave=2 (v2) and no first_layers, "
        "last_layers or layout, got interleave={p.interleave}",
    ),
    *map(_of_layers, STAGES),
    Rule(
        "a memory budget is modelled for dense layers",
        lambda p, c: (p.budget < 1) & bool(c.model.experts or c.model.blocks),
        "recompute={p.recompute}: a memory budget is not modelled for layers of "
        "{c.model.name}",
    ),
    Rule(
        "a model must have the modules that are recomputed",
        lambda p, c: p.recomputes(*lacking(c.model)),
        lambda p, c: (
            f"recompute={p.recompute}, but {c.model.name} lacks "
            f"{', '.join(lacking(c.model))}"
        ),
    ),
)

# of a DLRM, whose tables lie over all devices
RECOMMENDATION = (
    Rule(
        "recommendation models are split by dp only",
        lambda p, c: (p.world_size != p.dp) | (p.ep > 1),
        lambda p, c: (
            f"{c.model.name}: recommendation models are split by dp only, got {p}"
        ),
    ),
)

# of a plan and the samples of a step
BATCH = (
    Rule(
        "dp must divide the global batch",
        lambda p, c: (c.global_batch < 1) | _leaves_rest(c.global_batch, p.dp),
        "global_batch={c.global_batch} is not a multiple of dp x micro_batch = "
        "{p.dp} x {p.micro_batch}, nor, with a short last micro-batch, of dp",
        may_pad=True,
    ),
    Rule(
        "micro_batch must not exceed the samples of a rank",
        lambda p, c: p.micro_batch * p.dp > c.global_batch,
        lambda p, c: (
            f"micro_batch={p.micro_batch} exceeds the {c.global_batch // p.dp} samples "
            f"that global_batch={c.global_batch} leaves each of dp={p.dp}; nearest: "
            f"micro_batch={c.global_batch // p.dp}"
        ),
    ),
    Rule(  # [torch, ScheduleDualPipeV]
        "dualpipev needs 2 pp micro-batches",
        lambda p, c: (
            (p.schedule == "dualpipev")
            & (c.global_batch <= (2 * p.pp - 1) * p.dp * p.micro_batch)
        ),
        "schedule='dualpipev' needs 2 pp = 2 x {p.pp} micro-batches, of which "
        "global_batch={c.global_batch} has fewer",
    ),
)


def rules_of(case: Case) -> tuple[Rule, ...]:
    """The rules that apply to a case, in order: of what is given."""
    rules = ALONE
    if case.cluster:
        rules += _CLUSTER
    rules += RECOMMENDATION if isinstance(case.model, DLRM) else _TRANSFORMER
    if case.global_batch is not None:
        rules += BATCH
    return rules + SOFTWARE if case.software else rules


def check_plan(case: Case) -> None:
    """Raises ValueError, in the words of the first of these that the plan breaks."""
    enforce(rules_of(case), case.plan, case)
