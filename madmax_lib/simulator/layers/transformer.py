"""Which blocks make a transformer? Embedding, layers and head under tensor, sequence,
context and expert parallelism.

Tensor parallelism splits weights by columns, then by rows [Megatron-LM, arXiv
1909.08053]; sequence parallelism splits what lies between [arXiv 2205.05198]; context
parallelism splits the tokens of a sequence. `chunk_blocks` cuts a model, a
recommendation model too, into the blocks of each pipeline stage.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from madmax_lib.catalog.models import DLRM, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.layers import chunk_layers
from madmax_lib.simulator.layers.mixers import cross_attention, mixer_blocks
from madmax_lib.simulator.layers.moe import dlrm_blocks, mixture_blocks
from madmax_lib.simulator.layers.ops import (
    Block,
    Comm,
    Op,
    attention,
    gemm,
    mirror,
    pointwise,
)
from madmax_lib.simulator.layers.work import Work, existing, has
from madmax_lib.simulator.rates.compute import Number, attention_flops

__all__ = [
    "chunk_blocks",
    "embedding_block",
    "ends_by_flops",
    "head_block",
    "layer_blocks",
]

_LOGIT_BYTES = (
    2,
    6,
)  # read and written per logit: 16-bit logits, their fp32 copy and its gradient


def chunk_blocks(case: Case) -> list[list[list[Block]]]:
    """Blocks of each chunk of each stage.

    Raises ValueError for layers that the stages cannot share, and for a DLRM with more
    than dp.
    """
    if isinstance(case.model, DLRM):
        return [[dlrm_blocks(case)]]
    work = Work.of(case)
    kinds = {}
    words = case.model.layer_kinds

    def blocks(layer: int) -> list[Block]:
        kind = words[layer], case.model.layer_window(layer) > 0
        if kind not in kinds:
            kinds[kind] = layer_blocks(work, layer, *kind, exchanged=case.plan.ep > 1)
        return [
            replace(
                block,
                name=f"{block.name.split()[0]} {layer}",
                unit=f"layer {layer}",
                cost_key=(*kind, number),
            )
            for number, block in enumerate(kinds[kind])
        ]

    stages = chunk_layers(case.model.layers, case.plan)
    if case.software.stages_by_flops and case.plan.pp > 1:
        if case.plan.interleave > 1:
            raise ValueError(
                f"interleave={case.plan.interleave}: {case.software.name} has one "
                "chunk per stage"
            )
        ends = pairwise([0, *ends_by_flops(case.model, case.plan.pp).tolist()])
        stages = [[range(first, end)] for first, end in ends]
    result = [
        [[block for layer in layers for block in blocks(layer)] for layers in stage]
        for stage in stages
    ]
    result[0][0].insert(0, embedding_block(work))
    result[-1][-1].append(head_block(work))
    return result


def ends_by_flops(model: Transformer, pp: int) -> np.ndarray:
    """Layers up to the end of each stage, (pp,): it ends with the layer that exceeds
    its even share of the FLOPs.

    The head counts, so that the last stages have fewer layers or none [nanotron,
    models/base.py, build_model].
    """
    layer = model.attention_parameters + model.mlp_parameters(model.ffn)
    share = (model.layers + model.vocab * model.hidden / layer) / pp
    number = np.arange(pp)
    ends = (
        np.maximum.accumulate(np.floor(share * (number + 1)).astype(int) + 1 - number)
        + number
    )
    return np.append(np.minimum(ends[:-1], model.layers), model.layers)


def layer_blocks(
    work: Work,
    number: int | str,
    word: str,
    windowed: bool = False,
    *,
    exchanged: bool = True,
) -> list[Block]:
    """Blocks of one layer, whose letters are a word. exchanged: experts lie on several
    devices (ep > 1).
    """
    encoder = work
    blocks = []
    work = work.decoder if "x" in word else work
    for letter in word:
        if letter == "*":
            causal = "x" in word or not (
                work.shape.model and work.shape.model.decoder_sequence
            )
            blocks += _attention(work, number, windowed, causal)
        elif letter == "x":
            blocks.append(cross_attention(work, encoder, number))
        elif letter in "Mm":
            blocks += mixer_blocks(work, number, letter)
        else:
            blocks += (
                mixture_blocks(work, number, exchanged=exchanged)
                if letter == "E"
                else _dense(work, number)
            )
    return blocks


def embedding_block(work: Work) -> Block:
    """Rows of the token table, or the projection of patches."""
    if work.shape.model and work.shape.model.decoder_sequence:
        work = replace(work, sequence=work.sequence + work.decoder.sequence)
    m = work.shape
    p = work.plan
    elements = work.tokens * work.shape.hidden
    ops = []
    image = np.asarray(m.image, float)
    if has(image):  # the class token is a parameter
        patches = image * (work.tokens * p.cp - p.micro_batch) / p.cp
        inputs = m.patch_inputs
        out = m.hidden / p.tp
        ops += [
            gemm(
                "patches",
                patches,
                out,
                inputs,
                work.width,
                weights=True,
                input_grad=False,
            )
        ]
    if has(1 - image):
        looked_up = elements * (1 - image)
        ops += [
            pointwise(
                "lookup",
                looked_up,
                looked_up,
                work.width,
                kind="lookup",
                input_grad=False,
            )
        ]
    return Block(
        "embedding", tuple(ops), m.embedding_parameters / p.tp, after=work.leave
    )


def head_block(work: Work) -> Block:
    """Final norm, logits and loss; the products stay in 16 bit [Transformer Engine
    recipes].
    """
    work = work.decoder
    m = work.shape
    p = work.plan
    wide = work.width.wide
    rows = np.where(np.asarray(m.image) > 0, p.micro_batch, work.tokens)
    out = m.outputs / p.tp
    logits = gemm("logits", rows, out, m.hidden, wide, weights=True, wide=True)
    read, written = (size * rows * out for size in _LOGIT_BYTES)
    loss = Op("loss", "pointwise", 0.0, read, written, wide=True)
    tied_copy = m.table_parameters * (
        np.asarray(p.pp) > 1
    )  # a tied table is held twice
    held = (
        np.where(np.asarray(m.head_parameters) > 0, m.head_parameters, tied_copy) / p.tp
        + m.norm_parameters
    )
    whole = existing(
        (
            "all_gather",
            "tp",
            work.gathers_logits * rows * m.outputs * work.width.storage_bytes,
        )
    )
    reverse = (
        ((), mirror(work.enter)) if whole else None
    )  # of the gradient of the logits a rank takes its part
    return Block(
        "head",
        (work.norm(), logits, loss),
        held,
        before=work.enter,
        after=whole,
        reverse=reverse,
    )


def _attention(
    work: Work, number: int | str, windowed: bool, causal: bool
) -> list[Block]:
    """Norm, products, scores and projection; under context parallelism three blocks."""
    m = work.shape
    p = work.plan
    width = work.width
    extra = (
        2 * m.head_dim * np.maximum(p.tp - m.kv_heads, 0)
    )  # heads that several tp devices hold
    products = [
        gemm(
            name,
            work.tokens,
            (outputs + (extra if name == "qkv" else 0)) / p.tp,
            inputs,
            width,
            weights=True,
        )
        for name, inputs, outputs in m.matrices
    ]
    if has(m.rope):
        channels = np.where(
            np.asarray(m.rope_head_dim) > 0, m.rope_head_dim, m.head_dim
        )
        rotated = m.rope * work.tokens * (m.heads + m.kv_heads) * channels / p.tp
        products.append(pointwise("rotary", rotated, rotated, width))
    products += _adapters(work)
    projection = gemm(
        "projection", work.tokens, m.hidden, m.projection / p.tp, width, weights=True
    )
    last = (m.projection * m.hidden + m.attention_bias * m.hidden) / p.tp
    held = (m.attention_parameters + extra * m.hidden) / p.tp + m.norm_parameters
    core = _core(work, windowed, causal)
    common = {"unit": f"layer {number}", "recomputed": True}
    if not has(np.asarray(p.cp) > 1):
        parts = (work.norm(), *products, *core, projection)
        return [
            Block(
                f"attention {number}",
                parts,
                held,
                before=work.enter,
                after=work.leave,
                **common,
            )
        ]
    to_heads, to_tokens, ring_bytes = _exchanges(work)
    return [
        Block(
            f"qkv {number}",
            (work.norm(), *products),
            held - last,
            before=work.enter,
            after=to_heads,
            **common,
        ),
        Block(
            f"core {number}",
            (*core, *_merge(work)),
            after=to_tokens,
            ring_bytes=ring_bytes,
            **common,
        ),
        Block(f"projection {number}", (projection,), last, after=work.leave, **common),
    ]


def _adapters(work: Work) -> list[Op]:
    """What LoRA adds to attention's products: inputs are read once more, outputs read
    and written [2106.09685].

    Beside them stand the two products of an adapter, whose operands these are.
    """
    rank = np.asarray(work.plan.lora_rank)
    if not has(adapted := rank > 0):
        return []
    ends = [
        *(
            (inputs, outputs / work.plan.tp)
            for _, inputs, outputs in work.shape.matrices
        )
    ]
    ends.append((work.shape.projection / work.plan.tp, work.shape.hidden))
    read, written = (
        adapted * work.tokens * sum(part)
        for part in zip(*((i + o, o) for i, o in ends), strict=True)
    )
    both = sum(sum(part) for part in ends)
    products = Op(
        "adapter products",
        "gemm",
        2 * work.tokens * rank * both,
        shape=(1.0, work.tokens, rank, both),
    )
    return [pointwise("adapters", read, written, work.width), products]


def _core(work: Work, windowed: bool, causal: bool) -> tuple[Op, ...]:
    """Scores, softmax and weighted values: one kernel with the causal half, or the full
    square through memory.
    """
    m = work.shape
    p = work.plan
    s = work.sequence
    width = work.width
    heads = m.heads / p.tp
    scored = m.head_dim + m.rope_head_dim
    unfused = np.asarray(np.asarray(p.attention) == "unfused", float)
    ops: list[Op] = []
    if has(1 - unfused):
        window = m.window if windowed else 0
        flops = attention_flops(
            work.tokens,
            s,
            m.core_width / p.tp,
            causal=causal & (np.asarray(m.image) == 0),
            window=window,
        )
        read = work.tokens * sum(_widths(work)) / p.tp
        written = work.tokens * heads * m.v_head_dim
        ops += [
            attention(
                "flash",
                *((1 - unfused) * part for part in (flops, read, written)),
                width,
            )
        ]
    if has(unfused):
        rows = work.tokens / p.micro_batch
        scores = unfused * heads * work.tokens * s
        each = {
            "count": unfused * p.micro_batch * heads,
            "kind": "attention",
            "core": True,
            "wide": True,
        }
        ops += [
            gemm("scores", rows, s, scored, width.wide, **each),
            pointwise("softmax", scores, scores, width, core=True),
            gemm("values", rows, m.v_head_dim, s, width.wide, **each),
        ]
    return tuple(ops)


def _widths(work: Work) -> tuple[Number, Number, Number]:
    """Channels of queries, keys and values of a token."""
    m = work.shape
    scored = m.head_dim + m.rope_head_dim
    return m.heads * scored, m.kv_heads * scored, m.kv_heads * m.v_head_dim


def _exchanges(work: Work) -> tuple[tuple[Comm, ...], tuple[Comm, ...], Number]:
    """Of context parallelism: collectives before and after the core (Ulysses), bytes
    passed on per step (ring).
    """
    p = work.plan
    widths = (*_widths(work), work.shape.heads * work.shape.v_head_dim)
    q, k, v, out = (
        work.tokens * channels / p.tp * work.width.storage_bytes for channels in widths
    )
    split = np.asarray(p.cp) > 1
    ulysses = np.asarray((np.asarray(p.context) == "ulysses") & split, float)
    ring_bytes = (k + v) * (split - ulysses)
    to_heads = ("all_to_all", "cp", ulysses * (q + k + v))
    to_tokens = ("all_to_all", "cp", ulysses * out)
    return existing(to_heads), existing(to_tokens), ring_bytes


def _merge(work: Work) -> tuple[Op, ...]:
    """What the steps of a ring add: each but the first reads its output and updates the
    fp32 sum.
    """
    ring = (np.asarray(work.plan.context) == "ring") * (work.plan.cp - 1)
    outputs = (
        2 * ring * work.tokens * work.shape.heads * work.shape.v_head_dim / work.plan.tp
    )  # fp32: twice the width
    return (
        (pointwise("merge", 1.5 * outputs, outputs, work.width),) if has(ring) else ()
    )


def _dense(work: Work, number: int | str) -> list[Block]:
    m = work.shape
    p = work.plan
    ops = (work.norm(), *work.mlp(work.tokens, m.ffn / p.tp))
    held = m.mlp_parameters(m.ffn) / p.tp + m.norm_parameters
    ends = {"before": work.enter, "after": work.leave}
    return [
        Block(
            f"feed-forward {number}",
            ops,
            held,
            unit=f"layer {number}",
            recomputed=True,
            **ends,
        )
    ]
