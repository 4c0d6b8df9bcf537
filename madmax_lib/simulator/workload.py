"""What has to be computed and moved? A model cut by a plan, as a list of blocks per pipeline stage.

A block is the smallest part that is computed between two collectives: embedding, attention or feed-forward part of a
layer, head. Amounts are per device and micro-batch, forward; the backward pass takes twice the FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from madmax_lib.plan import Plan
from madmax_lib.specs import DLRM, Model, Transformer

__all__ = ["BYTES", "Block", "blocks", "stage_layers"]

BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 0.5, "int8": 1}


@dataclass(frozen=True)
class Block:
    """Forward work of one device on one micro-batch.

    flops: matrix products; core_flops: those of attention scores, which selective recompute repeats. traffic_bytes:
    parameters and activations read and written. parameters: held by the device before data-parallel sharding.
    tp_bytes: activation that tensor parallelism reduces after the block. all_to_all_bytes: pooled embeddings that the
    devices exchange after the block. 0 where there is none.
    """

    name: str
    flops: float
    traffic_bytes: float
    parameters: float
    tp_bytes: float = 0.0
    all_to_all_bytes: float = 0.0
    core_flops: float = 0.0


def stage_layers(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage; a remainder goes to the middle stages, which have neither embedding nor head.

    >>> stage_layers(10, 4)
    [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
    """
    even, rest = divmod(layers, pp)
    sizes = [even] * pp
    middle_first = sorted(range(pp), key=lambda stage: abs(stage - (pp - 1) / 2))
    for stage in middle_first[:rest]:
        sizes[stage] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(pp)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def blocks(model: Model, plan: Plan, sequence: int | None = None, *, dtype: str = "bf16") -> list[list[Block]]:
    """Blocks of each pipeline stage, forward order, one micro-batch. Raises ValueError for a DLRM with tp or pp."""
    if isinstance(model, DLRM):
        return [_dlrm_blocks(model, plan)]
    s = sequence or model.sequence
    tokens, width = plan.micro_batch * s, BYTES[dtype]
    stages = []
    for stage, layers in enumerate(stage_layers(model.layers, plan.pp)):
        stage_blocks = [_embedding(model, plan, tokens, width)] if stage == 0 else []
        for layer in layers:
            stage_blocks.append(_attention(model, plan, tokens, s, width, layer))
            stage_blocks.append(_feed_forward(model, plan, tokens, width, layer))
        if stage == plan.pp - 1:
            stage_blocks.append(_head(model, plan, tokens, width))
        stages.append(stage_blocks)
    return stages


def _embedding(model: Transformer, plan: Plan, tokens: float, width: float) -> Block:
    hidden = tokens * model.hidden
    patches = tokens - plan.micro_batch  # the class token is a parameter
    flops = 2 * patches * 3 * model.patch**2 * model.hidden / plan.tp if model.image else 0.0
    moved = hidden * width
    return Block("embedding", flops, 2 * moved, model.embedding_parameters / plan.tp, moved if plan.tp > 1 else 0.0)


def _attention(model: Transformer, plan: Plan, tokens: float, sequence: float, width: float, layer: int) -> Block:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    core_flops = tokens * 4 * sequence * q / plan.tp
    flops = tokens * 2 * model.hidden * (2 * q + 2 * kv) / plan.tp + core_flops
    parameters = model.attention_parameters / plan.tp + model.norm_parameters
    moved = tokens * model.hidden * width
    traffic = parameters * width + 4 * moved + 2 * tokens * (q + 2 * kv) * width / plan.tp
    reduced = moved if plan.tp > 1 else 0.0
    return Block(f"attention {layer}", flops, traffic, parameters, reduced, core_flops=core_flops)


def _feed_forward(model: Transformer, plan: Plan, tokens: float, width: float, layer: int) -> Block:
    moved = tokens * model.hidden * width
    matrices = 3 if model.gated else 2
    if model.experts and layer >= model.dense_layers:
        used = model.active_experts + model.shared_experts
        flops = 2 * tokens * model.hidden * (used * matrices * model.expert_ffn + model.experts) / plan.tp
        parameters = model.moe_parameters / plan.tp
        inner = tokens * used * model.expert_ffn
    else:
        flops = 2 * tokens * matrices * model.hidden * model.ffn / plan.tp
        parameters = model.mlp_parameters(model.ffn) / plan.tp
        inner = tokens * model.ffn
    parameters += model.norm_parameters
    traffic = parameters * width + 4 * moved + 2 * (matrices - 1) * inner * width / plan.tp
    return Block(f"feed-forward {layer}", flops, traffic, parameters, moved if plan.tp > 1 else 0.0)


def _head(model: Transformer, plan: Plan, tokens: float, width: float) -> Block:
    if model.image:
        flops, out = 2 * plan.micro_batch * model.hidden * model.classes, plan.micro_batch * model.classes
    else:
        flops, out = 2 * tokens * model.hidden * model.vocab, tokens * model.vocab
    held = model.head_parameters or (model.vocab * model.hidden if plan.pp > 1 else 0)  # a tied table is held twice
    parameters = held / plan.tp + model.norm_parameters
    traffic = (parameters + tokens * model.hidden) * width + out * 4 / plan.tp
    return Block("head", flops / plan.tp, traffic, parameters)


def _dlrm_blocks(model: DLRM, plan: Plan) -> list[Block]:
    """Tables (fp16) sharded over all devices; dense layers (fp32) replicated, or sharded by ZeRO."""
    if plan.world_size > plan.dp:
        raise ValueError(f"{model.name}: recommendation models are split by dp only, got {plan}")
    samples = plan.micro_batch
    lookup_bytes = model.tables * samples * model.pooling * model.embedding_dim * 2
    pooled_bytes = model.tables * samples * model.embedding_dim * 2 if plan.dp > 1 else 0.0
    held = model.embedding_parameters / plan.dp
    result = [Block("embedding", 0.0, lookup_bytes, held, all_to_all_bytes=pooled_bytes)]

    def layer(name: str, matrix: float, tokens: float, width: float, copies: int = 1, used: int = 1) -> Block:
        return Block(name, 2 * tokens * used * matrix, 4 * (copies * matrix + 2 * tokens * width), copies * matrix)

    d, h, tokens = model.mlp_dim, model.attention_dim, samples * model.transformer_sequence
    result += [layer(f"bottom {i}", d * d, samples, d) for i in range(model.bottom_layers)]
    for i in range(model.transformer_layers):
        result.append(layer(f"attention {i}", 4 * h * h, tokens, h))
        result.append(layer(f"feed-forward {i}", 2 * h * model.transformer_ffn, tokens, h))
    experts = {"copies": max(model.experts, 1), "used": max(model.active_experts, 1)}
    return result + [layer(f"top {i}", d * d, samples, d, **experts) for i in range(model.top_layers)]
