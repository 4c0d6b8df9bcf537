"""Which blocks make a mixture-of-experts layer and a recommendation model?

Experts are split over ep inside dp x cp and over tp [Megatron-Core]: a device routes its tokens, sends each to the
devices of its experts (all-to-all, dispatch), computes those that come, and gets them back (combine). Under sequence
parallelism the tp devices of a group each send their part and gather what arrived before the experts compute.
"""

from __future__ import annotations

from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.plan_rules import RECOMMENDATION, enforce
from madmax_lib.simulator.layers.ops import Block, Comm, Op, gemm, pointwise, storage_bytes, wide

__all__ = ["dlrm_blocks", "mixture_blocks", "mlp_ops"]


def mlp_ops(case: Case, tokens: float, width: float, prefix: str = "", experts: float = 1) -> tuple[Op, Op, Op]:
    """Products and activation of a feed-forward block; `experts` equal ones share the tokens."""
    model, dtype, inner, share = case.model, case.dtype, width / case.plan.tp, tokens / experts
    up = 1 + model.gated
    return (
        gemm(f"{prefix}up", share, up * inner, model.hidden, dtype, count=experts, weights=True),
        pointwise(f"{prefix}activation", tokens * up * inner, tokens * inner, dtype),
        gemm(f"{prefix}down", share, model.hidden, inner, dtype, count=experts, weights=True),
    )


def _load_factor(plan: Plan, imbalance: float) -> float:
    """Tokens of the busiest device over the even share; experts of a capacity drop what is beyond it.

    >>> _load_factor(Plan(capacity=1.25), 1.5), _load_factor(Plan(), 1.5)
    (1.25, 1.5)
    """
    if not imbalance >= 1:
        raise ValueError(f"imbalance={imbalance} must be at least 1: the busiest device over the mean")
    return min(imbalance, plan.capacity) if plan.capacity else imbalance


def mixture_blocks(
    case: Case, layer: int, norm: Op, imbalance: float, ends: tuple[tuple[Comm, ...], tuple[Comm, ...]]
) -> list[Block]:
    """Feed-forward part of a mixture layer. ends: collectives that start and end a tensor-parallel block."""
    model, plan, dtype, tokens = case.model, case.plan, case.dtype, case.tokens
    spread = plan.tp if plan.sequence_parallel else 1
    used, width, local = (
        tokens * model.active_experts * _load_factor(plan, imbalance),
        model.expert_ffn,
        model.experts / plan.ep,
    )
    router = gemm("router", tokens / spread, model.experts, model.hidden, wide(dtype), weights=True)
    sent = used / spread * model.hidden
    permute = pointwise("permute", tokens / spread * model.hidden, sent, dtype)
    unpermute = pointwise("unpermute", sent, tokens / spread * model.hidden, dtype)
    own = model.norm_parameters + (model.hidden + model.router_bias) * model.experts
    experts = mlp_ops(case, used, width, "experts ", local)
    expert_parameters = local * model.mlp_parameters(width) / plan.tp
    shared = model.shared_experts * width
    shared_ops = mlp_ops(case, tokens, shared, "shared ") if shared else ()
    shared_parameters = model.shared_experts * model.mlp_parameters(width) / plan.tp
    common, whole = {"unit": f"layer {layer}", "recomputed": True}, {"before": ends[0], "after": ends[1]}
    if plan.ep == 1:
        ops, held = (
            (norm, router, permute, *shared_ops, *experts, unpermute),
            own + shared_parameters + expert_parameters,
        )
        return [Block(f"feed-forward {layer}", ops, held, **whole, **common)]
    moved = used * model.hidden * storage_bytes(dtype)
    exchange = Comm("all_to_all", "ep", moved / spread)
    enter, leave = (exchange, Comm("all_gather", "tp", moved)), (Comm("reduce_scatter", "tp", moved), exchange)
    blocks = [Block(f"shared {layer}", shared_ops, shared_parameters, **whole, **common)] if shared else []
    blocks += [Block(f"router {layer}", (norm, router, permute), own, after=enter, **common)]
    blocks += [Block(f"experts {layer}", (*experts, unpermute), expert_parameters, after=leave, expert=True, **common)]
    return blocks


def dlrm_blocks(case: Case) -> list[Block]:
    """Tables (16 bit) sharded over all devices, looked-up rows exchanged; dense layers replicated or sharded by ZeRO.

    Raises ValueError for any degree but dp.
    """
    enforce(RECOMMENDATION, case.plan, case)
    model, plan, dtype = case.model, case.plan, case.dtype
    samples = plan.micro_batch
    rows = model.tables * samples * model.embedding_dim  # pooled, of the samples of one device
    lookup = Op("lookup", "lookup", "fp16", read_bytes=2 * model.pooling * rows, written_bytes=2 * rows)
    exchange = (Comm("all_to_all", "dp", 2 * rows),)
    held = model.embedding_parameters / plan.dp
    result = [Block("embedding", (lookup,), held, after=exchange, table=True)]

    def layer(name: str, tokens: float, *matrices: tuple[int, int], copies: int = 1, used: int = 1, **more) -> Block:
        rows, names = tokens * used / copies, (f"product {i}" for i in range(len(matrices)))
        ops = tuple(
            gemm(product, rows, n, k, dtype, count=copies, weights=True)
            for product, (k, n) in zip(names, matrices, strict=True)
        )
        return Block(name, ops, copies * sum(k * n for k, n in matrices), recomputed=True, **more)

    d, h, f = model.mlp_dim, model.attention_dim, model.transformer_ffn
    tokens = samples * model.transformer_sequence
    result += [layer(f"bottom {i}", samples, (d, d), beside=True) for i in range(model.bottom_layers)]
    for i in range(model.transformer_layers):
        result += [layer(f"attention {i}", tokens, (h, 3 * h), (h, h))]
        result += [layer(f"feed-forward {i}", tokens, (h, f), (f, h))]
    experts = {"copies": max(model.experts, 1), "used": max(model.active_experts, 1)}
    return result + [layer(f"top {i}", samples, (d, d), **experts) for i in range(model.top_layers)]
