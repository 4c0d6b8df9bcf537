"""Blocks of a mixture-of-experts layer, and of a recommendation model.

Experts are split over ep inside dp x cp and each over etp of the tp devices
[Megatron-Core]: a device routes its tokens, sends each to the devices of its experts
(all-to-all, dispatch), computes those that come, and gets them back (combine). Under
sequence parallelism the tp devices of a group each send their part and gather what
arrived before the experts compute; with etp = 1 experts lie over dp x cp x tp, and
nothing is gathered.
"""

from dataclasses import replace

import numpy as np

from madmax_lib.plan import Case
from madmax_lib.plan.rules import RECOMMENDATION, enforce
from madmax_lib.simulator.layers.ops import (
    Block,
    Comm,
    Op,
    linear,
    mirror,
    pointwise,
    precision,
)
from madmax_lib.simulator.layers.work import Work, any_nonzero, layer_block, nonzero

# read per output, and written: the sum reads 16 and 32 bits, join and cast 32 each
_BIAS_BYTES = 14
_ROW_BYTES = 2  # of an element of an embedding table, 16 bit


def mixture_blocks(work: Work, number: int | str, *, exchanged: bool) -> list[Block]:
    """Feed-forward part of a mixture layer: one block, or where tokens are exchanged
    (ep > 1) one between exchanges.
    """
    shape = work.shape
    plan = work.plan
    width = work.width
    etp = plan.tp // plan.expert_spread
    # what exceeds the capacity of an expert is dropped
    capacity = np.where(plan.capacity > 0, plan.capacity, np.inf)
    busiest = np.minimum(plan.busiest(work.imbalance, shape), capacity)
    rows = work.tokens * shape.active_experts * busiest  # a token once for each expert
    tokens = work.tokens / work.spread  # of a tp device between the products
    sent = rows / work.spread * shape.expert_inputs
    entered = tokens * shape.hidden
    router = linear(
        "router", tokens, shape.experts, shape.hidden, width.wide, wide=True
    )
    route = [
        work.norm(),
        router,
        pointwise("permute", entered, sent, width, experts=True),
    ]
    if any_nonzero(shape.expert_latent):
        # the product out of the latent, after the exchange, costs what that into it does
        latent = shape.expert_latent
        route.append(linear("latent", tokens, latent, shape.hidden, width, count=2))
    unpermute = pointwise("unpermute", sent, entered, width, experts=True)
    route_parameters = shape.norm_parameters + shape.router_parameters
    route_parameters = route_parameters + shape.latent_parameters

    local = shape.experts / plan.ep
    local_rows = rows * etp / plan.tp
    inner = shape.expert_ffn / etp
    inputs = shape.expert_inputs
    experts = work.mlp(local_rows, inner, "experts ", local, inputs, experts=True)
    if np.any(shape.mlp_bias):
        experts.append(_expert_biases(work, local_rows))
    experts.append(unpermute)
    expert_parameters = local * shape.expert_parameters / etp

    # in a table of steps some models may have shared experts, and others none
    shared_ffn = shape.shared_experts * shape.expert_ffn
    has_shared = shared_ffn > 0
    shared = []
    if np.any(shared_ffn):
        shared = work.mlp(has_shared * work.tokens, shared_ffn / plan.tp, "shared ")
    shared_parameters = shape.shared_parameters / plan.tp
    if not exchanged:
        ops = [*route, *shared, *experts]
        parameters = route_parameters + shared_parameters + expert_parameters
        ends = _row_sums(work, rows) if np.any(work.sums_rows) else work.ends
        return [layer_block("feed-forward", number, ops, parameters, **ends)]

    blocks = []
    if shared:
        sides = {side: _scaled(comms, has_shared) for side, comms in work.ends.items()}
        blocks.append(layer_block("shared", number, shared, shared_parameters, **sides))
    moved = rows * shape.expert_inputs * width.storage_bytes
    exchange = Comm("all_to_all", "ep", moved / work.spread)
    gathered = moved * etp / plan.tp * (etp > 1)
    return [
        *blocks,
        layer_block("router", number, route, route_parameters),
        layer_block(
            "experts",
            number,
            experts,
            expert_parameters,
            before=(exchange, Comm("all_gather", "etp", gathered)),
            after=(Comm("reduce_scatter", "etp", gathered), exchange),
            expert=True,
        ),
    ]


def _scaled(comms, factor):
    return tuple(replace(comm, size_bytes=factor * comm.size_bytes) for comm in comms)


def _row_sums(work, rows):
    """Collectives of a mixture whose tp ranks sum the rows of experts, and their
    gradients, before tokens are added.
    """
    rows_bytes = work.sums_rows * rows * work.shape.hidden * work.width.storage_bytes
    enter = _scaled(work.enter, 1 - work.sums_rows)
    leave = _scaled(work.leave, 1 - work.sums_rows)
    summed = nonzero(("all_reduce", "tp", rows_bytes))
    split = 1.0 * work.plan.sequence_parallel
    moved = work.sums_rows * work.moved_bytes * split
    gathered = nonzero(("all_gather", "tp", moved))
    return {
        "before": work.enter,
        "after": (*leave, *summed),
        "reverse": ((*mirror(leave), *gathered, *summed), mirror(enter)),
    }


def _expert_biases(work, rows):
    """Biases of experts, added beside their products in fp32: product with the token's
    weight, sum, join, cast.
    """
    shape = work.shape
    inner = shape.expert_ffn / work.plan.tp * work.plan.expert_spread
    outputs = shape.mlp_bias * rows * ((1 + shape.gated) * inner + shape.expert_inputs)
    moved = _BIAS_BYTES / work.width.storage_bytes * outputs
    return pointwise(
        "expert biases", moved, moved, work.width, kind="lookup", experts=True
    )


def dlrm_blocks(case: Case) -> list[Block]:
    """Tables (16 bit) sharded over all devices, looked-up rows exchanged; dense layers
    replicated or sharded by ZeRO.

    Raises ValueError for any degree but dp.
    """
    enforce(RECOMMENDATION, case.plan, case)
    model = case.model
    width = precision(case.dtype)
    samples = case.plan.micro_batch
    # pooled rows, of the samples of one device; each is the sum of `pooling` rows
    pooled_bytes = _ROW_BYTES * model.tables * samples * model.embedding_dim
    lookup = Op(
        "lookup",
        "lookup",
        read_bytes=model.pooling * pooled_bytes,
        written_bytes=pooled_bytes,
        wide=True,
    )
    embedding = Block(
        "embedding",
        (lookup,),
        model.embedding_parameters / case.plan.dp,
        after=(Comm("all_to_all", "dp", pooled_bytes),),
        table=True,
    )

    def layer(name, rows, *matrices, **fields):
        """Products of (inputs, outputs) on rows of activations."""
        copies = fields.pop("copies", 1)
        ops = tuple(
            linear(f"product {i}", rows / copies, outputs, inputs, width, count=copies)
            for i, (inputs, outputs) in enumerate(matrices)
        )
        weights = copies * sum(inputs * outputs for inputs, outputs in matrices)
        return Block(name, ops, weights, recomputed=True, **fields)

    square = (model.mlp_dim, model.mlp_dim)
    h = model.attention_dim
    f = model.transformer_ffn
    tokens = samples * model.transformer_sequence
    bottom = [
        layer(f"bottom {i}", samples, square, overlaps_table=True)
        for i in range(model.bottom_layers)
    ]
    middle = []
    for i in range(model.transformer_layers):
        middle += [
            layer(f"attention {i}", tokens, (h, 3 * h), (h, h)),
            layer(f"feed-forward {i}", tokens, (h, f), (f, h)),
        ]
    rows = samples * max(model.active_experts, 1)  # a sample once for each expert
    top = [
        layer(f"top {i}", rows, square, copies=max(model.experts, 1))
        for i in range(model.top_layers)
    ]
    return [embedding, *bottom, *middle, *top]
