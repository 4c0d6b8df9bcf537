"""What do weights, gradients and optimizer states take on a device? By ZeRO stage and by the habits of the software.

Model states follow ZeRO [arXiv 1910.02054].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from madmax_lib.plans import Plans, owned
from madmax_lib.simulator.layers.ops import BYTES
from madmax_lib.specs import Transformer

__all__ = ["SOFTWARE", "Habits", "default_software", "software_of", "stage_parameters", "state_bytes", "width_of"]


@dataclass(frozen=True)
class Habits:
    """What a training software holds in 16-bit training, in bytes per parameter unless said otherwise.

    copy: fp32 weights of the optimizer, 0 if the weights are fp32 themselves. casts: copies that compute uses instead
    of the weights. accumulator: fp32 gradients beside the others if they are reduced in fp32. buckets: gradients once
    more in DDP's buckets. temporary: while the optimizer runs, per parameter that it updates. weights_from: ZeRO stage
    from which weights are sharded. logits: per logit at the loss. stored_8bit: fp8 products keep their inputs in
    8 bits. engine: DeepSpeed's, whose stages keep what they have sent, with a bucket to reduce and one to gather, and
    ZeRO-3 gathering at most 1e9 parameters.
    """

    weights: float
    gradients: float
    copy: float = 0
    casts: float = 0
    accumulator: float = 0
    buckets: float = 0
    temporary: float = 0
    weights_from: int = 3
    logits: float = 10
    engine: bool = False
    stored_8bit: bool = False


# torch: autocast or FSDP mixed precision on fp32 weights; DDP without gradient_as_bucket_view; AdamW(foreach=True)
#   makes a list of fp32 roots; cross entropy holds log-softmax and two gradients in fp32 [PyTorch 2.5 sources].
# megatron: fp32 main gradients, fused Adam: 18 B, 6 + 12/d with the distributed optimizer [Megatron-LM docs]; logits in
#   16 bits, as fp32 softmax and its gradient [megatron/core/tensor_parallel/cross_entropy.py]; Transformer Engine.
# deepspeed: 2 + 2 + 12 [arXiv 1910.02054]; the gradient shard becomes fp32 for the update; BF16_Optimizer adds fp32
#   gradients; pipeline outputs live until their backward pass (Megatron frees them, arXiv 2205.05198 appendix B).
SOFTWARE = {
    "torch": Habits(weights=4, gradients=4, casts=2, buckets=4, temporary=4, weights_from=2, logits=12),
    "megatron": Habits(weights=2, gradients=4, copy=4, stored_8bit=True),
    "deepspeed": Habits(weights=2, gradients=2, copy=4, accumulator=4, temporary=4, engine=True),
}
_MOMENTS = {"adam": 8, "momentum": 4, "sgd": 0}  # fp32 optimizer state, bytes per parameter
_LIVE_PARAMETERS = 1e9  # DeepSpeed stage3_max_live_parameters, default
_HPZ_DEVICES = 8  # a node, over which ZeRO++ shards its second copy of the weights [arXiv 2306.10209]


def default_software(plan: Plans) -> str:
    """The software such a plan is usually run with.

    DDP and FSDP are torch's; tensor and pipeline parallelism without FSDP are Megatron's; ZeRO 1 and 2 alone are
    DeepSpeed's.
    """
    if plan.zero == 3 or (plan.zero == 0 and plan.tp * plan.pp == 1):
        return "torch"
    return "megatron" if plan.tp * plan.pp > 1 else "deepspeed"


def width_of(dtype: str) -> float:
    """Bytes of an activation: fp8 and fp4 products stand between 16-bit tensors."""
    return max(_known("dtype", dtype, BYTES), 2)


def software_of(name: str, dtype: str) -> Habits:
    """Habits of a training software; in fp32 training everything is as wide as the weights and nothing is copied."""
    software = _known("software", name, SOFTWARE)
    if width_of(dtype) == 2:
        return software
    temporary = software.temporary if name == "torch" else 0
    return replace(software, weights=4, gradients=4, copy=0, casts=0, accumulator=0, temporary=temporary)


@dataclass(frozen=True)
class StageParameters:
    """Parameters of a pipeline stage on one device, before ZeRO shards them; numbers or arrays.

    dense: all but routed experts.
    experts: routed experts, after ep has split them.
    ends: those of embedding and head, which `dense` includes.
    block: of the largest layer.
    """

    dense: float
    experts: float
    ends: float
    block: float


def stage_parameters(model: Transformer, p: Plans, stage, layers, mixtures) -> StageParameters:
    """Parameters of a stage with so many layers, `mixtures` of them with experts."""
    expert = model.mlp_parameters(model.expert_ffn) / p.tp
    experts = model.experts * expert / p.ep
    router = model.moe_parameters - (model.experts + model.shared_experts) * model.mlp_parameters(model.expert_ffn)
    beside = router + model.shared_experts * expert
    attention = model.attention_parameters / p.tp + 2 * model.norm_parameters
    feed_forward = model.mlp_parameters(model.ffn) / p.tp
    tied = np.where(p.pp > 1, 0 if model.image else model.vocab * model.hidden, 0)  # a pipeline holds the table twice
    first, last = stage == 0, stage == p.pp - 1
    ends = (first * model.embedding_parameters + last * (model.head_parameters or tied)) / p.tp
    ends = ends + last * model.norm_parameters
    dense = layers * attention + (layers - mixtures) * feed_forward + mixtures * beside + ends
    block = attention + np.maximum((layers > mixtures) * feed_forward, (mixtures > 0) * (experts + beside))
    return StageParameters(dense, mixtures * experts, ends, block)


def state_bytes(p: Plans, count: StageParameters, software: Habits, optimizer: str, trainable: float) -> dict:
    """Weights, gradients, optimizer and the buffers that move them.

    ZeRO shards over dp x cp, or `shard` of them, and experts over what of it expert parallelism leaves.
    """
    moments = _known("optimizer", optimizer, _MOMENTS)
    whole = count.dense + count.experts
    shard = owned(count.dense, count.experts, p.sharing, p.ep)
    gradients = software.gradients + software.accumulator * p.reduce_fp32
    updated = trainable * np.where(p.zero >= 1, shard, whole)
    return {
        "weights": software.weights * np.where(p.zero >= software.weights_from, shard, whole),
        "gradients": trainable * gradients * np.where(p.zero >= 2, shard, whole),
        "optimizer": (moments + software.copy) * updated,
        "buckets": np.where(p.dp * p.cp > 1, trainable * _buckets(p, software, whole), 0.0),
        "gathered weights": _gathered(p, software, count, whole, gradients),
        "optimizer temporaries": software.temporary * updated * (moments > 0),
    }


def _buckets(p: Plans, software: Habits, whole):
    """DDP copies all gradients into its buckets; DeepSpeed has one bucket to reduce and one to gather."""
    if software.engine:
        return np.where(p.zero >= 1, 2 * np.minimum(p.bucket_bytes, software.weights * whole), 0.0)
    return np.where(p.zero < 2, software.buckets * whole, 0.0)


def _gathered(p: Plans, software: Habits, count: StageParameters, whole, gradients):
    """Weights beside the owned ones while a pass runs, and the gradients of a block before they are scattered.

    ZeRO 3: the block at work and those gathered ahead; torch keeps embedding and head whole, with their gradients.
    ZeRO 2 in torch: all weights. Without sharding, autocast's casts, which recompute frees with their block.
    """
    compute = software.casts or software.weights
    block = (1 + p.prefetch) * compute * count.block
    if software.engine:
        block = np.minimum(block, compute * _LIVE_PARAMETERS)
    scattered = (compute + gradients) * count.block
    if software.weights_from == 3:
        return np.where(p.zero == 3, block + np.minimum(scattered, (compute + gradients) * _LIVE_PARAMETERS), 0.0)
    block = block + compute * whole / _HPZ_DEVICES * p.hpz
    casts = software.casts * np.where(p.recompute == "none", whole, count.block)
    levels = [block + scattered + 2 * compute * count.ends, compute * whole + scattered]
    return np.select([p.zero == 3, p.zero == 2], levels, casts)


def _known(what: str, name: str, known: dict):
    if name not in known:
        raise ValueError(f"{what}={name!r} is not one of {', '.join(known)}")
    return known[name]
