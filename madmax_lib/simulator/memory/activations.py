"""What does a layer keep for its backward pass? Bytes of activations by the formulas of
Korthikanti et al.

arXiv 2205.05198, sections 4 and 5, written per tensor so that grouped queries, gated
feed-forward parts, fused attention, context parallelism and experts follow from the
same count. With 16-bit numbers, as many key-value heads as heads, ffn = 4 h, dropout
and stored scores, a layer keeps s b h (34 + 5 a s / h) bytes. All functions broadcast
over NumPy arrays, so arrays of plans may stand in the place of one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from madmax_lib.catalog import Software, Transformer
from madmax_lib.catalog.blocks import BlockKind, Blocks
from madmax_lib.catalog.mixers import mixer_elements
from madmax_lib.plan import Case, Plans
from madmax_lib.plan.columns import distinct
from madmax_lib.plan.layout import layout_chunks
from madmax_lib.simulator.layers.ops import BYTES
from madmax_lib.simulator.layers.work import any_nonzero
from madmax_lib.simulator.memory.states import width_of

# a dropout mask holds one byte per element [arXiv 2205.05198, section 4.1]
_MASK_BYTES = 1
# fused attention keeps the fp32 log-sum-exp of each row [arXiv 2205.14135]
_LOG_SUM_BYTES = 4
_ROUTER_BYTES = 8  # fp32 logits and probabilities of a mixture's router
_NORM_BYTES = 4  # an RMSNorm of several kernels keeps its input in fp32


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer, one micro-batch; floats or arrays."""

    input: float
    stored: float  # from forward to backward pass
    at_work: float  # in its backward pass: what is recomputed, gradients on their way
    shards: float  # devices that share a tensor of width h


class _Widths(NamedTuple):
    """Elements per token."""

    qkv: float  # queries, keys and values
    latent: float  # latents before and after their norm
    values: float  # attention's output


def dropout_bytes(model: Transformer, software: Software) -> int:
    """Bytes of a mask per element, where the software keeps some: GPT (layer norms) has
    dropout, later ones not.
    """
    drops = model.norm == "layer" and not model.image
    return _MASK_BYTES if drops and "masks" in software.keeps else 0


def layer_bytes(case: Case, word: str, software: Software) -> LayerBytes:
    """Activations of one layer on one device for one micro-batch; the plans of the case
    may be arrays.

    word: the layer's blocks, as in `Transformer.blocks`. software: what it keeps, as
    `states.software_of` gives it.
    """
    blocks = Blocks("".join(BlockKind(letter).usual for letter in word))
    parts = [case.model.variants.get(letter, case.model) for letter in word]
    # the model with the attention of the layer, if there is any
    model = parts[max(blocks.find(BlockKind.ATTENTION), 0)]
    p = case.plan
    tp = p.tp
    h = model.hidden
    heads = model.heads
    tokens = case.tokens
    sequence = case.sequence
    if blocks.has_cross_attention:
        tokens = model.decoder_tokens(tokens)
        sequence = model.decoder_tokens(sequence)
    width = width_of(case.dtype)
    # inputs that products keep
    operand = min(BYTES[case.dtype], width) if software.stored_8bit else width
    # without gradients of their own, products keep no inputs
    trained = np.where(p.lora_rank > 0, 0.0, operand)
    attends = blocks.count("*") + blocks.count("x")
    mixes = sum(kind.is_mixer for kind in blocks.kinds)
    flash = p.attention == "flash"
    dropout = dropout_bytes(model, software)
    shards = np.where(p.sequence_parallel, tp, 1)
    # the first product of a gated part is twice as wide
    halves = 2 if model.gated else 1
    qkv, latent, values = _attention_widths(model, blocks)
    dense = shared = sum(
        part.ffn for part, kind in zip(parts, blocks, strict=True) if kind == "-"
    )
    inner = routed = router = 0
    if blocks.has_experts:
        inner = model.active_experts * model.expert_ffn
        shared = dense + model.shared_experts * model.expert_ffn
        routed = model.active_experts * model.expert_inputs
        router = _ROUTER_BYTES * model.experts
    load = np.where(p.capacity > 0, p.capacity, p.busiest(case.imbalance, model))
    inner = load * inner + shared
    routed = load * routed
    mixed = mixes * mixer_elements(model, blocks)
    mixer = mixes * model.mixer_channels
    # scores and their dropout, or the row sums of fused attention
    scores = blocks.count("*") * heads * sequence / tp
    unfused = scores * (width + (dropout + width if dropout else 0))
    unfused = unfused + _LOG_SUM_BYTES * blocks.count("x") * heads / tp
    core = np.where(flash, _LOG_SUM_BYTES * attends * heads / tp, unfused)
    # experts that tp splits see the tokens of all tp
    copies = width * routed / tp + trained * routed / p.expert_spread
    gate = (halves - 1) * width * ("gate" in software.keeps)
    channel = width * halves + gate + trained
    feed_forward = channel * inner / tp + copies + router / shards
    # inputs of norms and of the first product of each block, with dropout masks
    norm = _NORM_BYTES * ("norm" in software.keeps and model.norm == "rms")
    norms = len(blocks) - model.shared_norm
    entering = attends * operand + (norms - attends) * trained
    gathers = ("gathered" in software.keeps) | (
        ("gathered-alone" in software.keeps) & (p.pp == 1)
    )
    entered = h / shards + gathers * h * (1 - 1 / shards)
    # all streams enter a block, and the one that they become its norm
    streams = model.streams
    stream_bytes = width * (streams + (streams > 1))
    hidden = norms * (stream_bytes + dropout) * h / shards + entering * entered
    # Autocast leaves the sum of the residuals in fp32, which norms keep as it is; FSDP
    # casts parameters and computes in 16 bits throughout.
    autocast = (p.zero < 2) & (width == 2)
    wider = autocast * width * ("stream" in software.keeps)
    more = np.where(wider > 0, wider, norm)
    hidden = hidden + norms * more * h / shards
    # each product casts its input anew: queries, keys and values, and both of a gate
    again_cast = 2 * attends + (halves - 1) * blocks.count("-")
    again_cast = again_cast * autocast * ("casts" in software.keeps)
    hidden = hidden + again_cast * trained * h / shards
    # queries, keys, values and the input of the output projection
    copied = 1 + ("copies" in software.keeps)
    projections = (
        width * (copied * qkv + mixed) + operand * values + trained * mixer
    ) / tp
    projections = projections + width * latent / shards
    stored = tokens * hidden + tokens * projections
    stored = stored + tokens * core + tokens * feed_forward
    # what modules that are computed again do not keep
    in_attention = in_feed_forward = 0.0
    if any_nonzero(p.recomputes_modules):
        latents = (latent - blocks.count("*") * model.rope_head_dim) / 2
        has_experts = blocks.has_experts
        in_attention = _repeated(
            p,
            core_attn=core,
            mla_up_proj=width * (copied * qkv / tp + latents / shards),
            layernorm=(latent > 0) * operand * entered,
        )
        mlp = channel * dense / tp
        mixture = feed_forward - mlp
        experts = _repeated(
            p,
            moe=mixture,
            shared_experts=channel * (shared - dense) / tp,
            moe_act=has_experts * (gate + trained) * (inner - shared) / tp,
        )
        # all of the mixture contains its parts
        in_feed_forward = np.minimum(experts, mixture) + _repeated(
            p,
            layernorm=has_experts * trained * entered,
            mlp=mlp + blocks.count("-") * trained * entered,
        )
    modules = tokens * (in_attention + in_feed_forward)
    selective = stored - tokens * core
    if software.selective_products > 0:
        # torch keeps input, attention's output and every second matrix product
        products = (qkv + halves * inner + mixed) / tp + len(blocks) * h / shards
        products = products / 2 + (values + mixer) / tp + h / shards
        selective = tokens * (width * products + np.where(flash, core, 0))
    full = tokens * (width + wider) * streams * h / shards
    after_recompute = np.select(
        [p.recompute == "full", p.recompute == "selective"],
        [full, selective],
        stored - modules,
    )
    if any_nonzero(p.budget < 1):
        # all but products and attention goes first (`layers.modules`)
        others = tokens * (entering * entered + (gate + trained) * inner / tp)
        beyond = stored - full
        in_budget = full + np.minimum(p.budget * beyond, beyond - others)
        after_recompute = np.where(p.budget < 1, in_budget, after_recompute)
    # attention is computed again when the other half is done with
    again = stored - after_recompute
    again = again - tokens * np.minimum(in_attention, in_feed_forward)
    # gradients on their way through the largest block, and of its input and result
    passing = np.maximum((halves + 1) * inner / tp, np.where(flash, 0, 2 * scores))
    passing = np.maximum(passing, (mixed + mixer) / tp) + routed / tp
    return LayerBytes(
        input=tokens * width * streams * h / shards,
        stored=after_recompute,
        at_work=again + tokens * width * (passing + 2 * streams * h),
        shards=shards,
    )


def _repeated(plans, **parts):
    """Sum of the parts of modules that plans compute again, by module."""
    return sum(plans.recomputes(module) * part for module, part in parts.items())


def _attention_widths(model, blocks):
    own_count = blocks.count("*")
    cross_count = blocks.count("x")
    values = (own_count + cross_count) * model.heads * model.v_head_dim
    if model.kv_lora_rank:
        scored = own_count * model.heads * model.score_dim
        scored += own_count * model.index_heads * model.index_dim / 2
        latent = 2 * (model.q_lora_rank + model.kv_lora_rank) + model.rope_head_dim
        return _Widths(2 * scored + values, own_count * latent, values)
    q = (1 + model.attention_gate) * model.heads * model.head_dim
    q += model.output_groups * model.output_rank + model.compressor_outputs
    q += model.index_heads * model.index_dim / 2
    kv = model.kv_heads * (model.head_dim + model.v_head_dim)
    kv *= not model.reused_keys  # the layer that they are of keeps them
    # keys and values of the encoder
    longer = model.sequence / model.decoder_sequence if cross_count else 0
    qkv = own_count * (q + kv) + cross_count * (q + longer * kv)
    return _Widths(qkv, 2 * model.q_lora_rank, values)


def in_flight(schedule, stage, pp, interleave=1, micro_batches=np.inf):
    """Micro-batches whose activations a pipeline stage holds at once, in units of the
    whole stage.

    gpipe: all. 1f1b: pp - stage. Interleaved: 2 (pp - stage - 1) + (v - 1) pp + 1
    chunks of 1/v stage, which is pp (1 + (pp - 1) / (pp v)) on the first stage [arXiv
    2205.05198, section 4.2.3]; all if there are at most pp. zero-bubble: pp on every
    stage, as weight gradients wait (ZB-H1, arXiv 2401.10241). zbv: 2 pp - stage - 1 of
    the first chunk and stage + 1 of the second, pp on every stage, too; dualpipev one
    more of the first [arXiv 2412.19437, table 2]. Never more than there are.

    >>> [float(in_flight("1f1b", stage, 4)) for stage in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    """
    stage = np.asarray(stage)
    pp = np.asarray(pp)
    v = np.asarray(interleave)
    chunks = np.where(
        micro_batches <= pp, np.inf, 2 * (pp - stage - 1) + (v - 1) * pp + 1
    )
    in_order = np.where(v > 1, chunks / v, pp - stage)
    is_dual = schedule == "dualpipev"
    first = np.minimum(2 * pp - stage - 1 + is_dual, micro_batches)
    folded = (first + np.minimum(stage + 1, micro_batches)) / 2
    batches = np.where(schedule == "zero-bubble", pp, in_order)
    batches = np.where(is_dual | (schedule == "zbv"), folded, batches)
    batches = np.where(schedule == "gpipe", micro_batches, batches)
    return np.minimum(batches, micro_batches)


def in_flight_of_layouts(plans: Plans, stage, batches, micro_batches):
    """Micro-batches in flight (`in_flight`) where layouts make chunks unequal: the
    layers that a stage holds of all of them, over its own.

    Forward passes go round by round through the chunks of a stage, pp micro-batches
    each: the first chunks are ahead.

    >>> from madmax_lib.plan import Plan
    >>> plan = Plan(pp=2, interleave=2, layout="3+2x2+1")
    >>> [float(in_flight_of_layouts(plan, stage, 2.5, 8)) for stage in (0, 1)]
    [2.6, 2.666...]
    """
    group = np.minimum(plans.pp, micro_batches)
    rounds, rest = np.divmod(batches * plans.interleave, plans.interleave * group)
    for word in distinct(plans.layout) - {""}:
        sizes = np.array([*map(sum, layout_chunks(word)), 0])
        passed_layers = layers = 0.0
        for chunk in range(int(np.max(plans.interleave))):
            size = sizes[np.minimum(chunk * plans.pp + stage, len(sizes) - 1)]
            passed = rounds * group + np.clip(rest - chunk * group, 0, group)
            passed_layers = passed_layers + passed * size
            layers = layers + size
        batches = np.where(
            plans.layout == word, passed_layers / np.maximum(layers, 1), batches
        )
    return batches
