"""Blocks of mixers, which carry a state from token to token, and of attention to an
encoder: what stands in a layer beside the usual two.

Tensor parallelism splits the channels of a mixer, with its heads and their groups
[Megatron-Core]. A scan is its products, where it has some, and the traffic of its
kernels: they read and write their operands once, and the scores and states of chunks
that they keep [arXiv 2405.21060, section 6; kernels of state-spaces/mamba]. The
convolution before it has the rate of measured ones, and so have the products of the
gated delta rule; no other scan was measured.
"""

from dataclasses import replace

from madmax_lib.catalog.blocks import BlockKind
from madmax_lib.catalog.mixers import (
    chunk_elements,
    convolved_channels,
    mixer_matrices,
    mixer_parameters,
    scan_flops,
)
from madmax_lib.simulator.layers.ops import (
    Block,
    Comm,
    Op,
    attention,
    linear,
    pointwise,
)
from madmax_lib.simulator.layers.work import Work, layer_block, nonzero
from madmax_lib.simulator.rates.compute import attention_flops

# their products have a measured rate of their own
_DELTA_RULES = (BlockKind.DELTA_NET, BlockKind.KIMI_DELTA)


def mixer_blocks(work: Work, number: int | str, kind: BlockKind) -> list[Block]:
    """Norm, products in, convolution, scan and product out; Mamba-1 sums B, C and dt
    over tp between.
    """
    shape = work.shape
    tp = work.plan.tp
    tokens = work.tokens
    width = work.width
    *entering, leaving = mixer_matrices(shape.model, kind)
    parameters = mixer_parameters(shape.model, kind) / tp + shape.norm_parameters
    last = linear("mixer out", tokens, shape.hidden, leaving.inputs / tp, width)
    if kind == BlockKind.MAMBA_1:
        return _mamba1(work, number, entering, last, parameters)
    products = [
        linear(name, tokens, outputs / tp, inputs, width)
        for name, inputs, outputs in entering
    ]
    ops = [work.norm(), *products, *_chunked_scan(work, kind), last]
    return [layer_block("mixer", number, ops, parameters, **work.ends)]


def _mamba1(work, number, matrices, last, parameters):
    model = work.shape.model
    tp = work.plan.tp
    tokens = work.tokens
    width = work.width
    inner = model.mixer_channels / tp
    channels = tokens * inner
    rank = model.mixer_rank
    state = model.mixer_state
    (_, hidden, columns), (_, _, operands), _ = matrices
    first = [
        work.norm(),
        linear("mixer in", tokens, columns / tp, hidden, width),
        _convolution(channels, width),
        linear("mixer x", tokens, operands, inner, width),
    ]
    # x, dt and gate, and B and C of each token, are read; the result is written
    scan = pointwise("scan", 3 * channels + tokens * 2 * state, channels, width)
    second = [linear("mixer dt", tokens, inner, rank, width), scan, last]
    # dt, B and C come from all channels: tp devices sum their parts
    moved = tokens * operands * width.storage_bytes * (tp > 1)
    summed = nonzero(("all_reduce", "tp", moved))
    # their gradients are summed too: a copy's mirror image
    copied = tuple(Comm("copy", comm.group, comm.size_bytes) for comm in summed)
    blocks = [
        layer_block(
            "mixer", number, first, parameters, before=work.enter, after=summed
        ),
        layer_block("scan", number, second, before=copied, after=work.leave),
    ]
    return [replace(block, reverse=block.back) for block in blocks]


def _convolution(elements, width):
    return pointwise("convolution", elements, elements, width, kind="convolution")


def _chunked_scan(work, kind):
    """Convolution, where there is one, scan and gated norm."""
    model = work.shape.model
    tp = work.plan.tp
    tokens = work.tokens
    width = work.width
    inner = model.mixer_channels / tp
    # what the convolution sees, or without one queries, keys and values, is read
    seen = convolved_channels(model, kind)
    read = tokens * (seen or 3 * model.mixer_channels) / tp
    kept_chunks = tokens * chunk_elements(model, kind, work.sequence) / tp
    flops = tokens * scan_flops(model, kind, work.sequence) / tp
    # one product of the same FLOPs: (tokens, k) by (k, inner)
    shape = (1.0, tokens, inner, flops / (2 * tokens * inner))
    rate = "delta_rule" if kind in _DELTA_RULES else "gemm"
    convolved = [_convolution(tokens * seen / tp, width)] if seen else []
    return [
        *convolved,
        Op("scan products", rate, flops, shape=shape, wide=True),
        pointwise("scan", read + kept_chunks, tokens * inner + kept_chunks, width),
        pointwise("gated norm", 2 * tokens * inner, tokens * inner, width),
    ]


def cross_attention(work: Work, encoder: Work, number: int | str) -> Block:
    """Attention of a decoder's tokens to all of the encoder, whose keys and values are
    projected in each layer.
    """
    shape = work.shape
    tp = work.plan.tp
    width = work.width
    tokens = work.tokens
    queries = shape.heads * shape.head_dim / tp
    keys_values = shape.kv_heads * (shape.head_dim + shape.v_head_dim) / tp
    values = shape.heads * shape.v_head_dim / tp
    core_width = shape.core_width / tp
    flops = attention_flops(tokens, encoder.sequence, core_width, causal=False)
    read = tokens * queries + encoder.tokens * keys_values
    ops = (
        work.norm(),
        linear("query", tokens, queries, shape.hidden, width),
        linear("key value", encoder.tokens, keys_values, shape.hidden, width),
        attention("flash", flops, read, tokens * values, width),
        linear("projection", tokens, shape.hidden, values, width),
    )
    return layer_block(
        "cross-attention",
        number,
        ops,
        shape.attention_parameters / tp + shape.norm_parameters,
        before=(*work.enter, *encoder.enter),
        after=work.leave,
    )
