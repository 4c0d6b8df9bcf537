"""Which blocks make a mixture-of-experts layer and a recommendation model?

Experts are split over ep inside dp x cp and each over etp of the tp devices
[Megatron-Core]: a device routes its tokens, sends each to the devices of its experts
(all-to-all, dispatch), computes those that come, and gets them back (combine). Under
sequence parallelism the tp devices of a group each send their part and gather what
arrived before the experts compute; with etp = 1 experts lie over dp x cp x tp, and
nothing is gathered.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from madmax_lib.plan.case import Case
from madmax_lib.plan.rules import RECOMMENDATION, enforce
from madmax_lib.simulator.layers.ops import (
    Block,
    Comm,
    Op,
    gemm,
    mirror,
    pointwise,
    precision,
)
from madmax_lib.simulator.layers.work import Work, existing
from madmax_lib.simulator.rates.compute import Number

__all__ = ["dlrm_blocks", "mixture_blocks"]

# read per output, and written: the sum reads 16 and 32 bits, join and cast 32 each
_BIAS_BYTES = 14


def mixture_blocks(work: Work, number: int | str, *, exchanged: bool) -> list[Block]:
    """Feed-forward part of a mixture layer: one block, or where tokens are exchanged
    (ep > 1) one between exchanges.
    """
    m = work.shape
    p = work.plan
    width = work.width
    tokens = work.tokens
    etp = p.tp // p.expert_spread
    kept = np.where(
        np.asarray(p.capacity) > 0, p.capacity, np.inf
    )  # the rest is dropped
    busiest = np.minimum(p.busiest(work.imbalance, m), kept)
    used = tokens * m.active_experts * busiest
    local = m.experts / p.ep
    router = gemm(
        "router",
        tokens / work.spread,
        m.experts,
        m.hidden,
        width.wide,
        weights=True,
        wide=True,
    )
    sent = used / work.spread * m.hidden
    permute = pointwise(
        "permute", tokens / work.spread * m.hidden, sent, width, experts=True
    )
    unpermute = pointwise(
        "unpermute", sent, tokens / work.spread * m.hidden, width, experts=True
    )
    own = m.norm_parameters + (m.hidden + m.router_bias) * m.experts
    experts = work.mlp(
        used * etp / p.tp, m.expert_ffn / etp, "experts ", local, experts=True
    )
    if np.any(m.mlp_bias):
        experts += (_expert_biases(work, used * etp / p.tp),)
    expert_parameters = local * m.mlp_parameters(m.expert_ffn) / etp
    shared_width = m.shared_experts * m.expert_ffn
    has = np.asarray(shared_width) > 0  # in a stack others may stand beside
    shared = (
        work.mlp(has * tokens, shared_width / p.tp, "shared ")
        if np.any(shared_width)
        else ()
    )
    shared_parameters = m.shared_experts * m.mlp_parameters(m.expert_ffn) / p.tp
    common = {"unit": f"layer {number}", "recomputed": True}
    whole = {"before": work.enter, "after": work.leave}
    if not exchanged:
        ops = (work.norm(), router, permute, *shared, *experts, unpermute)
        held = own + shared_parameters + expert_parameters
        if np.any(work.sums_rows):
            whole = _row_sums(work, used)
        return [Block(f"feed-forward {number}", ops, held, **whole, **common)]
    moved = used * m.hidden * width.storage_bytes
    exchange = Comm("all_to_all", "ep", moved / work.spread)
    gathered = moved * etp / p.tp * (etp > 1)
    enter = (exchange, Comm("all_gather", "etp", gathered))
    leave = (Comm("reduce_scatter", "etp", gathered), exchange)
    sides = {
        side: tuple(replace(comm, size_bytes=has * comm.size_bytes) for comm in comms)
        for side, comms in whole.items()
    }
    blocks = (
        [Block(f"shared {number}", shared, shared_parameters, **sides, **common)]
        if shared
        else []
    )
    blocks += [Block(f"router {number}", (work.norm(), router, permute), own, **common)]
    ends = {"before": enter, "after": leave, "expert": True}
    return [
        *blocks,
        Block(
            f"experts {number}",
            (*experts, unpermute),
            expert_parameters,
            **ends,
            **common,
        ),
    ]


def _row_sums(work: Work, rows: Number) -> dict[str, tuple]:
    """Collectives of a mixture whose tp ranks sum the rows of experts, and their
    gradients, before tokens are added.
    """
    rows_bytes = work.sums_rows * rows * work.shape.hidden * work.width.storage_bytes
    others = 1 - work.sums_rows
    moved = work.sums_rows * work.moved_bytes
    enter, leave = (
        tuple(replace(comm, size_bytes=others * comm.size_bytes) for comm in comms)
        for comms in (work.enter, work.leave)
    )
    summed = existing(("all_reduce", "tp", rows_bytes))
    parts = np.asarray(work.plan.sequence_parallel, float)
    gathered = existing(("all_gather", "tp", moved * parts))
    return {
        "before": work.enter,
        "after": (*leave, *summed),
        "reverse": ((*mirror(leave), *gathered, *summed), mirror(enter)),
    }


def _expert_biases(work: Work, tokens: Number) -> Op:
    """Biases of experts, added beside their products in fp32: product with the token's
    weight, sum, join, cast.
    """
    m = work.shape
    outputs = (
        m.mlp_bias
        * tokens
        * (
            (1 + m.gated) * m.expert_ffn / work.plan.tp * work.plan.expert_spread
            + m.hidden
        )
    )
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
    plan = case.plan
    width = precision(case.dtype)
    samples = plan.micro_batch
    rows = (
        model.tables * samples * model.embedding_dim
    )  # pooled, of the samples of one device
    lookup = Op(
        "lookup",
        "lookup",
        read_bytes=2 * model.pooling * rows,
        written_bytes=2 * rows,
        wide=True,
    )
    exchange = (Comm("all_to_all", "dp", 2 * rows),)
    held = model.embedding_parameters / plan.dp
    result = [Block("embedding", (lookup,), held, after=exchange, table=True)]

    def layer(
        name: str,
        tokens: float,
        *matrices: tuple[int, int],
        copies: int = 1,
        used: int = 1,
        **more,
    ) -> Block:
        rows = tokens * used / copies
        names = (f"product {i}" for i in range(len(matrices)))
        ops = tuple(
            gemm(product, rows, n, k, width, count=copies, weights=True)
            for product, (k, n) in zip(names, matrices, strict=True)
        )
        return Block(
            name, ops, copies * sum(k * n for k, n in matrices), recomputed=True, **more
        )

    d = model.mlp_dim
    h = model.attention_dim
    f = model.transformer_ffn
    tokens = samples * model.transformer_sequence
    result += [
        layer(f"bottom {i}", samples, (d, d), beside=True)
        for i in range(model.bottom_layers)
    ]
    for i in range(model.transformer_layers):
        result += [layer(f"attention {i}", tokens, (h, 3 * h), (h, h))]
        result += [layer(f"feed-forward {i}", tokens, (h, f), (f, h))]
    experts = {"copies": max(model.experts, 1), "used": max(model.active_experts, 1)}
    return result + [
        layer(f"top {i}", samples, (d, d), **experts) for i in range(model.top_layers)
    ]
