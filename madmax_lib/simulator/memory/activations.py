"""What does a layer keep for its backward pass? Bytes of activations by the formulas of
Korthikanti et al.

arXiv 2205.05198, sections 4 and 5, written per tensor so that grouped queries, gated
feed-forward parts, fused attention, context parallelism and experts follow from the
same count. With 16-bit numbers, as many key-value heads as heads, ffn = 4 h, dropout
and stored scores, a layer keeps s b h (34 + 5 a s / h) bytes. All functions broadcast
over NumPy arrays, so arrays of plans may stand in the place of one.
"""

from dataclasses import dataclass

import numpy as np

from madmax_lib.catalog.blocks import Blocks
from madmax_lib.catalog.mixers import mixer_elements
from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.case import Case

__all__ = ["LayerBytes", "dropout_bytes", "in_flight", "layer_bytes"]

_MASK_BYTES = (
    1  # a dropout mask holds one byte per element [arXiv 2205.05198, section 4.1]
)
_LOG_SUM_BYTES = (
    4  # fused attention keeps the fp32 log-sum-exp of each row [arXiv 2205.14135]
)
_ROUTER_BYTES = 8  # fp32 logits and probabilities of a mixture's router
_NORM_BYTES = 4  # an RMSNorm of several kernels keeps its input in fp32


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer may keep, one micro-batch; floats or arrays."""

    input: float  # what full recompute keeps
    hidden: float  # inputs of norms and matrix products of width h, with dropout masks
    projections: float  # queries, keys, values and the input of the output projection
    core: float  # scores and their dropout, or the row sums of fused attention
    feed_forward: float  # inside of the feed-forward part
    # kept by torch's selective recompute: input, attention's output, every second
    # matrix product
    products: float
    passing: float  # gradients on their way through the largest block
    shards: float = 1  # devices that share a tensor of width h

    @property
    def whole(self):
        """All that is kept without recompute."""
        return self.hidden + self.projections + self.core + self.feed_forward

    def kept(self, recompute, *, by_products: bool = False):
        """Bytes kept from forward to backward pass; by_products: torch's selective
        recompute, else Megatron's.
        """
        selective = self.products if by_products else self.whole - self.core
        return np.select(
            [recompute == "full", recompute == "selective"],
            [self.input, selective],
            self.whole,
        )


def dropout_bytes(model: Transformer, further=("masks",)) -> int:
    """Bytes of a mask per element, where the software keeps some: GPT (layer norms) has
    dropout, later ones not.
    """
    return (
        _MASK_BYTES
        if "masks" in further and model.norm == "layer" and not model.image
        else 0
    )


def layer_bytes(
    case: Case,
    word: str = "*-",
    *,
    width: float = 2.0,
    product_width: float | None = None,
    further=("masks",),
) -> LayerBytes:
    """Activations of one layer on one device for one micro-batch; the plans of the case
    may be arrays.

    word: the layer's blocks, as in `Transformer.blocks`. width: bytes per element;
    product_width: of the inputs kept for matrix products, `width` if None. further:
    what the software keeps beside, see `Software.keeps`.
    """
    word = Blocks(word)
    model = case.model
    p = case.plan
    tokens = case.tokens
    tp = case.plan.tp
    tokens, sequence = (
        model.decoder_tokens(n) if word.has_cross_attention else n
        for n in (tokens, case.sequence)
    )
    h = model.hidden
    heads = model.heads
    attends = word.count("*") + word.count("x")
    mixes = word.count("M") + word.count("m")
    flash = p.attention == "flash"
    load = np.where(p.capacity > 0, p.capacity, p.busiest(case.imbalance, model))
    operand = width if product_width is None else product_width
    dropout = dropout_bytes(model, further)
    shards = np.where(p.sequence_parallel, tp, 1)
    halves = (
        2 if model.gated else 1
    )  # the first product of a gated part is twice as wide
    qkv, latent, values = _attention_widths(model, word)
    inner, shared, routed, router = _feed_forward_widths(model, word)
    mixed = mixes * mixer_elements(model, word)
    mixer = mixes * model.mixer_channels
    inner = load * inner + shared
    routed = load * routed
    scores = word.count("*") * heads * sequence / tp
    core = scores * (width + (dropout + width if dropout else 0))
    core = np.where(
        flash,
        _LOG_SUM_BYTES * attends * heads / tp,
        core + _LOG_SUM_BYTES * word.count("x") * heads / tp,
    )
    trained = np.where(
        p.lora_rank > 0, 0.0, operand
    )  # without gradients of their own, products keep no inputs
    copies = (
        width * routed / tp + trained * routed / p.expert_spread
    )  # experts that tp splits see the tokens of all tp
    gate = (halves - 1) * width * ("gate" in further)
    norm = _NORM_BYTES * ("norm" in further and model.norm == "rms")
    feed_forward = (
        (width * halves + gate + trained) * inner / tp + copies + router / shards
    )
    entering = (
        attends * operand + (len(word) - attends) * trained
    )  # of the first product of each block
    between = (len(word) * (width + dropout + norm) + entering) * h / shards
    between = between + entering * h * (1 - 1 / shards) * ("gathered" in further)
    products = (qkv + halves * inner + mixed) / tp + len(word) * h / shards
    passing = np.maximum((halves + 1) * inner / tp, np.where(flash, 0, 2 * scores))
    passing = np.maximum(passing, (mixed + mixer) / tp) + 2 * h + routed / tp
    return LayerBytes(
        input=tokens * width * h / shards,
        hidden=tokens * between,
        projections=tokens
        * (
            (width * (qkv + mixed) + operand * values + trained * mixer) / tp
            + width * latent / shards
        ),
        core=tokens * core,
        feed_forward=tokens * feed_forward,
        products=tokens
        * (
            width * (products / 2 + (values + mixer) / tp + h / shards)
            + np.where(flash, core, 0)
        ),
        passing=tokens * width * passing,
        shards=shards,
    )


def _attention_widths(model: Transformer, word: Blocks):
    """Elements per token: queries, keys and values; latents before and after their
    norm; attention's output.
    """
    own = word.count("*")
    other = word.count("x")
    values = (own + other) * model.heads * model.v_head_dim
    if not model.kv_lora_rank:
        farther = (
            model.sequence / model.decoder_sequence if other else 0
        )  # keys and values of the encoder
        q = model.heads * model.head_dim
        kv = 2 * model.kv_heads * model.head_dim
        return own * (q + kv) + other * (q + farther * kv), 0, values
    scored = model.heads * (model.head_dim + model.rope_head_dim)
    latent = 2 * (model.q_lora_rank + model.kv_lora_rank) + model.rope_head_dim
    return 2 * scored + values, latent, values


def _feed_forward_widths(model: Transformer, word: Blocks):
    """Elements per token inside the (routed, shared) feed-forward parts and of copies
    for experts; router's bytes.
    """
    if not word.has_experts:
        return word.count("-") * model.ffn, 0, 0, 0
    inner = model.active_experts * model.expert_ffn
    copies = model.active_experts * model.hidden
    return (
        inner,
        model.shared_experts * model.expert_ffn,
        copies,
        _ROUTER_BYTES * model.experts,
    )


def in_flight(schedule, stage, pp, interleave=1, micro_batches=np.inf):
    """Micro-batches whose activations a pipeline stage holds at once, in units of the
    whole stage.

    gpipe: all. 1f1b: pp - stage. Interleaved: 2 (pp - stage - 1) + (v - 1) pp + 1
    chunks of 1/v stage, which is pp (1 + (pp - 1) / (pp v)) on the first stage [arXiv
    2205.05198, section 4.2.3]; all if there are at most pp. zero-bubble: pp on every
    stage, as weight gradients wait (ZB-H1, arXiv 2401.10241). Never more than there
    are.

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
    first = np.where(v > 1, pp + (pp - 1) / v, pp)
    gpipe = np.asarray(schedule == "gpipe")
    zero_bubble = np.asarray(schedule == "zero-bubble")
    held = np.select([gpipe, zero_bubble], [micro_batches, first], in_order)
    return np.minimum(held, micro_batches)
