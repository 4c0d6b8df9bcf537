"""Blocks of a transformer: embedding, layers and head under tensor, sequence, context
and expert parallelism.

Tensor parallelism splits weights by columns, then by rows [Megatron-LM, arXiv
1909.08053]; sequence parallelism splits what lies between [arXiv 2205.05198]; context
parallelism splits the tokens of a sequence. `chunk_blocks` cuts a model, a
recommendation model too, into the blocks of each pipeline stage.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from madmax_lib.catalog import DLRM
from madmax_lib.catalog.blocks import WINDOWED, BlockKind, Blocks
from madmax_lib.plan import Case
from madmax_lib.simulator.layers.cuts import cut_model
from madmax_lib.simulator.layers.mixers import cross_attention, mixer_blocks
from madmax_lib.simulator.layers.modules import with_repeats
from madmax_lib.simulator.layers.moe import dlrm_blocks, mixture_blocks
from madmax_lib.simulator.layers.ops import (
    Block,
    Comms,
    Op,
    attention,
    gemm,
    linear,
    mirror,
    pointwise,
    scaled,
)
from madmax_lib.simulator.layers.work import (
    Shape,
    Work,
    any_nonzero,
    layer_block,
    nonzero,
)
from madmax_lib.simulator.rates.compute import Number, attention_flops

# read and written per logit: 16-bit logits, their fp32 copy and its gradient
_LOGIT_BYTES_READ = 2
_LOGIT_BYTES_WRITTEN = 6


def chunk_blocks(case: Case) -> list[list[list[Block]]]:
    """Blocks of each chunk of each stage.

    Raises ValueError for layers that the stages cannot share, and for a DLRM with more
    than dp.
    """
    model = case.model
    if isinstance(model, DLRM):
        return [[dlrm_blocks(case)]]
    plan = case.plan
    work = Work.of(case)
    kinds = {}

    def blocks(layer):
        """Blocks of a layer: those of its kind, under its own number."""
        kind = model.layer_kinds[layer], model.layer_window(layer) > 0
        if kind not in kinds:
            kinds[kind] = layer_blocks(work, layer, *kind, exchanged=plan.ep > 1)
        return [
            replace(
                block,
                name=f"{block.name.split()[0]} {layer}",
                unit=f"layer {layer}",
                cost_key=(*kind, number),
            )
            for number, block in enumerate(kinds[kind])
        ]

    result = [
        [[block for layer in layers for block in blocks(layer)] for layers in stage]
        for stage in cut_model(model, plan, case.software)
    ]
    result[0][0].insert(0, embedding_block(work))
    result[plan.head_stage][-1].append(head_block(work))
    return result


def layer_blocks(
    work: Work,
    number: int | str,
    word: str,
    windowed: bool = False,
    *,
    exchanged: bool = True,
) -> list[Block]:
    """Blocks of one layer. word: its blocks, as in `Transformer.blocks`; exchanged:
    experts lie on several devices (ep > 1).
    """
    layer = Blocks(word)
    encoder = work
    work = work.decoder if layer.has_cross_attention else work
    model = work.shape.model
    is_encoder = model and model.decoder_sequence and not layer.has_cross_attention
    variants = model.variants if model else {}
    blocks = []
    for letter in layer:
        kind = BlockKind(letter).usual
        part = work
        if letter in variants:
            part = replace(work, shape=Shape.of(variants[letter]))
        if kind == BlockKind.ATTENTION:
            near = windowed or letter in WINDOWED
            blocks += _attention(part, number, near, not is_encoder)
        elif kind == BlockKind.CROSS_ATTENTION:
            blocks.append(cross_attention(work, encoder, number))
        elif kind.is_mixer:
            blocks += mixer_blocks(work, number, kind)
        elif kind == BlockKind.EXPERTS:
            blocks += mixture_blocks(work, number, exchanged=exchanged)
        else:
            blocks.append(_feed_forward(part, number))
    return with_repeats(blocks, work)


def embedding_block(work: Work) -> Block:
    """Rows of the token table, or the projection of patches; the tower before it."""
    model = work.shape.model
    if model and model.decoder_sequence:  # tokens of both stacks
        work = replace(work, sequence=work.sequence + work.decoder.sequence)
    shape = work.shape
    plan = work.plan
    ops = []
    image = 1.0 * shape.image
    if any_nonzero(image):
        # the class token, one a sample, is a parameter
        patches = image * (work.tokens * plan.cp - plan.micro_batch) / plan.cp
        columns = shape.hidden / plan.tp
        inputs = shape.patch_inputs
        ops.append(
            linear("patches", patches, columns, inputs, work.width, input_grad=False)
        )
    if any_nonzero(1 - image):
        rows = work.tokens * shape.hidden * (1 - image)
        ops.append(
            pointwise("lookup", rows, rows, work.width, kind="lookup", input_grad=False)
        )
    parameters = shape.embedding_parameters / plan.tp
    after = work.leave
    if shape.tower:
        seen_ops, moved = _tower(work)
        ops += seen_ops
        after += moved
    return Block("embedding", tuple(ops), parameters, after=after)


def _tower(work):
    """Ops of all layers of the tower and of the projector, and what tp ranks sum: each
    kind once, of the size of all together.
    """
    tower = work.shape.tower
    images = work.shape.images
    width = work.width
    seen = replace(work, shape=Shape.of(tower), sequence=tower.sequence)
    patches = images * seen.tokens
    columns = tower.hidden / work.plan.tp
    inputs = seen.shape.patch_inputs
    ops = [linear("patches", patches, columns, inputs, width, input_grad=False)]
    layers = tower.layers * images
    blocks = layer_blocks(seen, 0, "*-", exchanged=False)
    ops += [scaled(op, layers) for block in blocks for op in block.ops]
    # one product of as many weights: (tokens, k) by (k, hidden)
    hidden = work.shape.hidden
    depth = work.shape.projector_parameters / hidden / work.plan.tp
    tokens = patches / work.shape.merged_patches
    ops.append(linear("projector", tokens, hidden, depth, width))
    summed = [comm for block in blocks for comm in block.after if comm.group == "tp"]
    sizes = [(comm.kind, "tp", layers * comm.size_bytes) for comm in summed]
    return ops, nonzero(*sizes)


def head_block(work: Work) -> Block:
    """Final norm, logits and loss; the products stay in 16 bit [Transformer Engine
    recipes].
    """
    work = work.decoder
    shape = work.shape
    plan = work.plan
    # of an image the class token alone, of an encoder the masked tokens
    predicted = work.tokens * shape.predicted_share
    rows = np.where(shape.image > 0, plan.micro_batch, predicted)
    columns = shape.outputs / plan.tp
    logits = linear("logits", rows, columns, shape.hidden, work.width.wide, wide=True)
    loss = Op(
        "loss",
        "pointwise",
        read_bytes=_LOGIT_BYTES_READ * rows * columns,
        written_bytes=_LOGIT_BYTES_WRITTEN * rows * columns,
        wide=True,
    )
    # a pipeline holds a tied table twice
    tied_copy = shape.table_parameters * (plan.head_stage > 0)
    is_untied = shape.head_parameters > 0
    weights = np.where(is_untied, shape.head_parameters, tied_copy) / plan.tp
    moved = work.gathers_logits * rows * shape.outputs * work.width.storage_bytes
    gathered = nonzero(("all_gather", "tp", moved))
    return Block(
        "head",
        (work.norm(), logits, loss),
        weights + shape.norm_parameters,
        before=work.enter,
        after=gathered,
        # of the gradient of the logits a rank takes its part
        reverse=((), mirror(work.enter)) if gathered else None,
    )


def _attention(work, number, windowed, causal):
    """Norm, products, scores and projection; under context parallelism three blocks."""
    shape = work.shape
    tp = work.plan.tp
    tokens = work.tokens
    width = work.width
    # heads of keys and values that several tp devices hold
    copied = shape.key_value_outputs * np.maximum(tp - shape.kv_heads, 0)
    first = [work.norm()]
    for name, inputs, outputs in shape.matrices:
        columns = (outputs + (copied if name in ("kv", "qkv") else 0)) / tp
        first.append(linear(name, tokens, columns, inputs, width))
    if any_nonzero(shape.rope):
        has_latent = shape.rope_head_dim > 0
        channels = np.where(has_latent, shape.rope_head_dim, shape.head_dim)
        heads = (shape.heads + shape.kv_heads) / tp
        rotated = shape.rope * tokens * heads * channels
        first.append(pointwise("rotary", rotated, rotated, width))
    first += _adapters(work)
    core = _core(work, windowed, causal)
    projection = linear(
        "projection", tokens, shape.hidden, shape.projection / tp, width
    )
    parameters = (shape.attention_parameters + copied * shape.hidden) / tp
    parameters = parameters + shape.norm_parameters
    if not any_nonzero(work.plan.cp > 1):
        ops = [*first, *core, projection]
        return [layer_block("attention", number, ops, parameters, **work.ends)]
    last = (shape.projection + shape.attention_bias) * shape.hidden / tp
    exchanges = _exchanges(work)
    return [
        layer_block(
            "qkv",
            number,
            first,
            parameters - last,
            before=work.enter,
            after=exchanges.to_heads,
        ),
        layer_block(
            "core",
            number,
            [*core, *_merge(work)],
            after=exchanges.to_tokens,
            ring_bytes=exchanges.ring_bytes,
        ),
        layer_block("projection", number, [projection], last, after=work.leave),
    ]


def _adapters(work):
    """Ops that LoRA adds to attention's products: inputs are read once more, outputs
    read and written [2106.09685].

    Beside them stand the two products of an adapter, whose operands these are.
    """
    rank = work.plan.lora_rank
    is_adapted = rank > 0
    if not any_nonzero(is_adapted):
        return []
    shape = work.shape
    tp = work.plan.tp
    columns = [(inputs, outputs / tp) for _, inputs, outputs in shape.matrices]
    ends = [*columns, (shape.projection / tp, shape.hidden)]
    read = is_adapted * work.tokens * sum(inputs + outputs for inputs, outputs in ends)
    written = is_adapted * work.tokens * sum(outputs for _, outputs in ends)
    # B (A x): rank x (inputs + outputs) of each matrix
    both = sum(inputs + outputs for inputs, outputs in ends)
    products = Op(
        "adapter products",
        "gemm",
        2 * work.tokens * rank * both,
        shape=(1.0, work.tokens, rank, both),
    )
    return [pointwise("adapters", read, written, work.width), products]


def _core(work, windowed, causal):
    """Scores, softmax and weighted values: one kernel with the causal half, or the full
    square through memory.
    """
    shape = work.shape
    plan = work.plan
    tokens = work.tokens
    width = work.width
    heads = shape.heads / plan.tp
    # in a table of steps some may have fused attention, and others not
    unfused = 1.0 * (plan.attention == "unfused")
    fused = 1 - unfused
    ops = []
    if any_nonzero(fused):
        flops = attention_flops(
            tokens,
            work.sequence,
            shape.core_width / plan.tp,
            causal=causal & (shape.image == 0) & (shape.predicted_share >= 1),
            window=shape.window if windowed else 0,
        )
        ratio = np.maximum(shape.compression, 1)
        if any_nonzero(shape.compression):
            # of each `ratio` tokens one: those of a window of chosen ones, or all
            flops = flops + attention_flops(
                tokens,
                work.sequence,
                shape.core_width / plan.tp / ratio,
                window=shape.index_top * ratio,
            )
        if any_nonzero(shape.index_heads):
            # one product a score, where attention has two
            index_width = shape.index_heads * shape.index_dim / plan.tp / 2 / ratio
            flops = flops + attention_flops(tokens, work.sequence, index_width)
        read = tokens * shape.qkv_channels / plan.tp
        written = tokens * heads * shape.v_head_dim
        ops.append(
            attention("flash", fused * flops, fused * read, fused * written, width)
        )
    if any_nonzero(unfused):
        rows = tokens / plan.micro_batch
        scores = unfused * heads * tokens * work.sequence
        each = {
            "count": unfused * plan.micro_batch * heads,
            "kind": "attention",
            "core": True,
            "wide": True,
        }
        s = work.sequence
        ops += [
            gemm("scores", rows, s, shape.score_dim, width.wide, **each),
            pointwise("softmax", scores, scores, width, core=True),
            gemm("values", rows, shape.v_head_dim, s, width.wide, **each),
        ]
    return ops


class _Exchanges(NamedTuple):
    """Communication of context parallelism."""

    to_heads: Comms  # before the core: Ulysses [arXiv 2309.14509]
    to_tokens: Comms  # after it
    ring_bytes: Number  # passed on per step of a ring [arXiv 2310.01889]


def _exchanges(work):
    shape = work.shape
    plan = work.plan
    channel_bytes = work.tokens / plan.tp * work.width.storage_bytes
    split = plan.cp > 1
    ulysses = 1.0 * ((plan.context == "ulysses") & split)
    results = shape.heads * shape.v_head_dim
    to_heads = ulysses * channel_bytes * shape.qkv_channels
    return _Exchanges(
        nonzero(("all_to_all", "cp", to_heads)),
        nonzero(("all_to_all", "cp", ulysses * channel_bytes * results)),
        channel_bytes * shape.key_value_channels * (split - ulysses),
    )


def _merge(work):
    """Sums that the steps of a ring add: each but the first reads its output and updates
    the fp32 sum.
    """
    steps = (work.plan.context == "ring") * (work.plan.cp - 1)
    if not any_nonzero(steps):
        return []
    channels = work.shape.heads * work.shape.v_head_dim / work.plan.tp
    # fp32 is twice the width of an element: 1 + 2 are read, 2 written
    outputs = steps * work.tokens * channels
    return [pointwise("merge", 3 * outputs, 2 * outputs, work.width)]


def _feed_forward(work, number):
    """Norm and the two products, or three with a gate, of a dense layer.

    [arXiv 1909.08053, section 3: columns of the first, rows of the second]
    """
    shape = work.shape
    tp = work.plan.tp
    ops = [work.norm(), *work.mlp(work.tokens, shape.ffn / tp)]
    parameters = shape.mlp_parameters(shape.ffn) / tp + shape.norm_parameters
    return layer_block("feed-forward", number, ops, parameters, **work.ends)
