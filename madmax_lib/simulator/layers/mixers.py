"""Which blocks make a state-space mixer, and attention to an encoder? What stands in a
layer beside the usual two.

Tensor parallelism splits the channels of a mixer, Mamba-2's with its heads and their
groups [Megatron-Core]. A scan is its products, where it has some, and the traffic of
its kernels: they read and write their operands once, and Mamba-2's the scores and
states of chunks in fp32 [arXiv 2405.21060, section 6; kernels of state-spaces/mamba].
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from madmax_lib.catalog.mixers import (
    chunk_elements,
    mixer_matrices,
    mixer_parameters,
    scan_flops,
)
from madmax_lib.simulator.layers.ops import Block, Comm, Op, attention, gemm, pointwise
from madmax_lib.simulator.layers.work import Work, existing
from madmax_lib.simulator.rates.compute import attention_flops

__all__ = ["cross_attention", "mixer_blocks"]


def mixer_blocks(work: Work, number: int | str, letter: str) -> list[Block]:
    """Norm, product in, convolution, scan and product out; Mamba-1 sums B, C and dt
    over tp between.
    """
    m = work.shape
    tp = work.plan.tp
    tokens = work.tokens
    width = work.width
    stack = m.model
    common = {"unit": f"layer {number}", "recomputed": True}
    inner = stack.mixer_channels / tp
    matrices = mixer_matrices(stack, letter)
    held = mixer_parameters(stack, letter) / tp + m.norm_parameters
    first = gemm("mixer in", tokens, matrices[0][2] / tp, m.hidden, width, weights=True)
    last = gemm("mixer out", tokens, m.hidden, inner, width, weights=True)
    if letter == "M":
        mixed = inner + 2 * stack.mixer_groups * stack.mixer_state / tp
        conv = tokens * mixed
        kept = tokens * chunk_elements(stack, work.sequence) / tp
        flops = tokens * scan_flops(stack, letter, work.sequence) / tp
        products = Op(
            "scan products",
            "gemm",
            flops,
            shape=(1.0, tokens, inner, flops / (2 * tokens * inner)),
            wide=True,
        )
        scan = pointwise("scan", conv + kept, tokens * inner + kept, width)
        gate = pointwise("gated norm", 2 * tokens * inner, tokens * inner, width)
        ops = (
            work.norm(),
            first,
            pointwise("convolution", conv, conv, width),
            products,
            scan,
            gate,
            last,
        )
        return [
            Block(
                f"mixer {number}",
                ops,
                held,
                before=work.enter,
                after=work.leave,
                **common,
            )
        ]
    rank = stack.mixer_rank
    channels = tokens * inner
    small = rank + 2 * stack.mixer_state
    conv = pointwise("convolution", channels, channels, width)
    ops = (
        work.norm(),
        first,
        conv,
        gemm("mixer x", tokens, small, inner, width, weights=True),
    )
    dt = gemm("mixer dt", tokens, inner, rank, width, weights=True)
    scan = pointwise(
        "scan", 3 * channels + tokens * 2 * stack.mixer_state, channels, width
    )
    moved = tokens * small * width.storage_bytes * (np.asarray(tp) > 1)
    summed = existing(("all_reduce", "tp", moved))
    back = tuple(
        Comm("copy", comm.group, comm.size_bytes) for comm in summed
    )  # their gradients are summed too
    blocks = [
        Block(f"mixer {number}", ops, held, before=work.enter, after=summed, **common),
        Block(
            f"scan {number}", (dt, scan, last), before=back, after=work.leave, **common
        ),
    ]
    return [replace(block, reverse=block.back) for block in blocks]


def cross_attention(work: Work, encoder: Work, number: int | str) -> Block:
    """Attention of a decoder's tokens to all of the encoder, whose keys and values are
    projected in each layer.
    """
    m = work.shape
    tp = work.plan.tp
    width = work.width
    q = m.heads * m.head_dim / tp
    kv = m.kv_heads * (m.head_dim + m.v_head_dim) / tp
    values = m.heads * m.v_head_dim / tp
    flops = attention_flops(
        work.tokens, encoder.sequence, m.core_width / tp, causal=False
    )
    read = work.tokens * q + encoder.tokens * kv
    ops = (
        work.norm(),
        gemm("query", work.tokens, q, m.hidden, width, weights=True),
        gemm("key value", encoder.tokens, kv, m.hidden, width, weights=True),
        attention("flash", flops, read, work.tokens * values, width),
        gemm("projection", work.tokens, m.hidden, values, width, weights=True),
    )
    ends = {
        "before": (*work.enter, *encoder.enter),
        "after": work.leave,
        "unit": f"layer {number}",
        "recomputed": True,
    }
    return Block(
        f"cross-attention {number}",
        ops,
        m.attention_parameters / tp + m.norm_parameters,
        **ends,
    )
