"""Does a step fit? Bytes on a device by pipeline stage and component, and their peak.

Model states follow ZeRO [arXiv 1910.02054], activations arXiv 2205.05198 (`activations`). A step has three moments that
may set the peak: the loss of the last stage (logits), the backward pass of a layer (what was recomputed, gradients on
their way) and the optimizer (its temporaries); `peak_bytes` takes the largest on top of what is always there.
`stage_bytes` holds the formulas and broadcasts over arrays of plans and stages, `memory` is its table for one plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.plan import Plan
from madmax_lib.plan_layers import chunk_layers
from madmax_lib.simulator.activations import dropout_bytes, in_flight, layer_bytes
from madmax_lib.simulator.ops import BYTES
from madmax_lib.specs import DLRM, Device, Model, Transformer

__all__ = ["FRAGMENTATION", "PHASES", "STACKS", "Stack", "by_phase", "default_stack", "dlrm_bytes", "held_layers",
           "memory", "moment_peak", "peak_bytes", "stage_bytes", "stage_parameters", "usable_bytes"]  # fmt: skip


@dataclass(frozen=True)
class Stack:
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
STACKS = {
    "torch": Stack(weights=4, gradients=4, casts=2, buckets=4, temporary=4, weights_from=2, logits=12),
    "megatron": Stack(weights=2, gradients=4, copy=4, stored_8bit=True),
    "deepspeed": Stack(weights=2, gradients=2, copy=4, accumulator=4, temporary=4, engine=True),
}
PHASES = {
    "weights": "always", "gradients": "always", "optimizer": "always", "buckets": "always", "activations": "pass",
    "gathered weights": "pass", "logits": "loss", "block at work": "backward", "optimizer temporaries": "step",
    "context": "always", "fragmentation": "always",
}  # fmt: skip
_MOMENTS = {"adam": 8, "momentum": 4, "sgd": 0}  # fp32 optimizer state, bytes per parameter
_FUSED_LOGITS = 4  # logits and their gradient in 16 bits, the rest stays in registers [flash-attn cross_entropy]
_LIVE_PARAMETERS = 1e9  # DeepSpeed stage3_max_live_parameters, default
_HPZ_DEVICES = 8  # a node, over which ZeRO++ shards its second copy of the weights [arXiv 2306.10209]
# Nobody publishes these three apart. Chosen once, round, so that the 37 published rows of device memory (BLOOM,
# torchtitan) come out with little bias; other rows publish what the allocator handed out and do not see them
_CUDA_BYTES = 0.5e9  # context and kernels of one process
_COMMUNICATOR_BYTES = 0.5e9  # buffers of NCCL, per group of ranks
FRAGMENTATION = 0.07  # of the allocated peak: held by the caching allocator, in no tensor


def memory(
    model: Model,
    plan: Plan,
    *,
    sequence: int | None = None,
    dtype: str = "bf16",
    global_batch: int | None = None,
    optimizer: str = "adam",
    stack: str | None = None,
    fused_loss: bool = False,
    trainable: float = 1.0,
) -> pd.DataFrame:
    """Bytes on one device of each pipeline stage: columns stage, component, phase, size_bytes.

    sequence: tokens per sample, the model's own if None. global_batch: samples per step, which limits the micro-batches
    a stage can hold; as many as the pipeline wants if None. stack: whose habits, a name of `STACKS`, `default_stack`
    if None. fused_loss: cross entropy without fp32 logits. trainable: share of the parameters with gradients. phase:
    when the bytes are there, see `peak_bytes`. Offload is not counted, all lies on the device: see `fits` for it.
    Raises ValueError for an unknown optimizer, stack or dtype, for gpipe without global_batch, a DLRM with tp or pp.

    >>> gpt = catalog.model("gpt2-large")
    >>> parts = memory(gpt, Plan(dp=4, zero=3)).set_index("component")["size_bytes"]  # FSDP: 4 + 4 + 8 bytes
    >>> (parts[["weights", "gradients", "optimizer"]] / gpt.parameters).tolist()  # of which each rank holds a quarter
    [1.0, 1.0, 2.0]
    """
    options = {"dtype": dtype, "optimizer": optimizer, "stack": stack or default_stack(plan), "trainable": trainable}
    if isinstance(model, DLRM):
        stages, parts = np.zeros(1, dtype=int), dlrm_bytes(model, plan, **options)
    else:
        if plan.schedule == "gpipe" and global_batch is None:
            raise ValueError("schedule='gpipe' keeps every micro-batch, global_batch is needed")
        batches = np.inf if global_batch is None else np.ceil(global_batch / (plan.dp * plan.micro_batch))
        layers, mixtures = held_layers(model, plan)
        stages = np.arange(plan.pp)
        parts = stage_bytes(model, plan, stages, layers, mixtures, sequence=sequence, micro_batches=batches,
                            fused_loss=fused_loss, **options)  # fmt: skip
    rows = [(int(stage), name, PHASES[name], float(np.broadcast_to(size, stages.shape)[stage]))
            for stage in stages for name, size in parts.items()]  # fmt: skip
    return pd.DataFrame(rows, columns=["stage", "component", "phase", "size_bytes"])


def held_layers(model: Transformer, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Layers of each pipeline stage, and how many of them have experts, (pp,) each."""
    first = model.dense_layers if model.experts else model.layers  # layer with experts
    held = [[layer for chunk in stage for layer in chunk] for stage in chunk_layers(model.layers, plan)]
    layers, mixtures = np.array([(len(of), sum(layer >= first for layer in of)) for of in held]).T
    return layers, mixtures


def peak_bytes(table: pd.DataFrame, *, allocated: bool = False) -> float:
    """Bytes of the fullest stage at its fullest moment.

    A stage holds what is there always, and either its pass, with the loss or a layer's backward on top, or the
    optimizer's temporaries. allocated: without context and fragmentation, as torch.cuda.max_memory_allocated counts.

    >>> gpt = catalog.model("gpt2-large")
    >>> [round(peak_bytes(memory(gpt, Plan(dp=4, zero=zero))) / 1e9, 1) for zero in range(4)]
    [21.6, 9.1, 7.9, 7.2]
    """
    if allocated:
        table = table[~table["component"].isin(["context", "fragmentation"])]
    stage, phase, size_bytes = (table[name].to_numpy() for name in ("stage", "phase", "size_bytes"))
    sums = {name: np.bincount(stage, np.where(phase == name, size_bytes, 0.0)) for name in PHASES.values()}
    return float(moment_peak(sums).max())


def usable_bytes(device: Device) -> float:
    """Memory a process can have, where someone has published it, else the data sheet's."""
    known = catalog.table("published_memory")
    known = known[(known["quantity"] == "usable") & (known["device"] == device.name)]
    return float(known["value"].iloc[-1]) * 2**30 if len(known) else device.memory_bytes


def default_stack(plan: Plan) -> str:
    """The software such a plan is usually run with.

    DDP and FSDP are torch's; tensor and pipeline parallelism without FSDP are Megatron's; ZeRO 1 and 2 alone are
    DeepSpeed's.
    """
    if plan.zero == 3 or (plan.zero == 0 and plan.tp * plan.pp == 1):
        return "torch"
    return "megatron" if plan.tp * plan.pp > 1 else "deepspeed"


def stage_bytes(
    model: Transformer,
    plan: Plan,
    stage,
    layers,
    mixtures=0,
    *,
    stack: str,
    sequence: int | None = None,
    dtype: str = "bf16",
    micro_batches=np.inf,
    optimizer: str = "adam",
    fused_loss: bool = False,
    trainable: float = 1.0,
) -> dict[str, np.ndarray]:
    """Bytes by component of a pipeline stage; plan, stage, layers, mixtures and micro_batches may be arrays.

    plan: a Plan, or anything with its fields, each a value or an array. layers: of the stage; `mixtures` of them have
    experts. Options as in `memory`. Raises ValueError for an unknown stack, optimizer or dtype.
    """
    p, software, width = _fields(plan), _software(stack, dtype), _width(dtype)
    stage, layers, mixtures = np.asarray(stage), np.asarray(layers), np.asarray(mixtures)
    sequence = sequence or model.sequence
    tokens = p.micro_batch * sequence / p.cp
    held = in_flight(p.schedule, stage, p.pp, p.interleave, micro_batches)
    shapes = {"tp": p.tp, "sequence_parallel": p.sequence_parallel, "width": width, "flash": p.attention == "flash",
              "product_width": min(BYTES[dtype], width) if software.stored_8bit else width,
              "load": np.where(p.capacity > 0, p.capacity, 1.0)}  # fmt: skip
    kept, moving = 0.0, 0.0
    for mixture, number in ((False, layers - mixtures), (True, mixtures)):
        layer = layer_bytes(model, tokens, sequence, mixture=mixture and model.experts > 0, **shapes)
        one = layer.kept(p.recompute, by_products=stack == "torch")
        again = np.where(p.recompute == "none", 0.0, layer.whole - one)
        kept = kept + number * one
        moving = np.maximum(moving, np.where(number > 0, again + layer.passing, 0.0))
    masks = dropout_bytes(model) * tokens * model.hidden / layer.shards  # of the embedding, in the first chunk only
    masks = np.where(stage == 0, masks * in_flight(p.schedule, stage, p.pp, 1, micro_batches), 0.0)
    sent = np.where(p.pp > 1, layer.input, 0.0) * software.engine
    outputs = p.micro_batch * model.classes if model.image else tokens * model.vocab
    waiting = np.where(p.schedule == "gpipe", held, 1.0)  # logits of micro-batches whose backward has not begun
    logits = (_FUSED_LOGITS if fused_loss else software.logits) * waiting * outputs / p.tp + 2 * layer.input
    count = stage_parameters(model, p, stage, layers, mixtures)
    parts = _states(p, count, software, optimizer, trainable) | {
        "activations": held * (kept + sent) + masks,
        "logits": np.where(stage == p.pp - 1, logits, 0.0),
        "block at work": moving,
    }
    return parts | _overhead(p, parts)


def dlrm_bytes(model: DLRM, plan: Plan, *, stack: str, dtype: str, optimizer: str, trainable: float = 1.0) -> dict:
    """Bytes by component of a recommendation model: fp16 tables over all devices, fp32 dense layers by ZeRO stage.

    Tables are updated in their backward pass by row-wise Adagrad, one fp32 number per row [FBGEMM]. Fields of the plan
    may be arrays. Raises ValueError for tp, pp or cp.
    """
    p = _fields(plan)
    if np.any(p.tp * p.pp * p.cp > 1):
        raise ValueError(f"{model.name}: recommendation models are split by dp only, got {plan}")
    _width(dtype)
    tables, dense = model.embedding_parameters, model.parameters - model.embedding_parameters
    count = SimpleNamespace(dense=dense, experts=0.0, ends=0.0, block=max(model.mlp_dim**2, 4 * model.attention_dim**2))
    parts = _states(p, count, _software(stack, "fp32"), optimizer, trainable)
    parts["weights"] = parts["weights"] + 2 * tables / p.dp
    parts["optimizer"] = parts["optimizer"] + 4 * tables / model.embedding_dim / p.dp
    pooled = 2 * 2 * model.tables * model.embedding_dim  # before and after the exchange, fp16
    products = 4 * model.mlp_dim * (model.bottom_layers + model.top_layers * max(model.active_experts, 1))
    tokens = (
        4 * model.transformer_layers * model.transformer_sequence * (6 * model.attention_dim + model.transformer_ffn)
    )
    parts |= {"activations": p.micro_batch * (pooled + products + tokens)}
    return parts | _overhead(p, parts)


def _fields(plan) -> SimpleNamespace:
    return SimpleNamespace(**{name: np.asarray(getattr(plan, name)) for name in Plan.__dataclass_fields__})


def _width(dtype: str) -> float:
    """Bytes of an activation: fp8 and fp4 products stand between 16-bit tensors."""
    return max(_known("dtype", dtype, BYTES), 2)


def _software(stack: str, dtype: str) -> Stack:
    """Habits of a stack; in fp32 training everything is as wide as the weights and nothing is copied."""
    software = _known("stack", stack, STACKS)
    if _width(dtype) == 2:
        return software
    return replace(software, weights=4, gradients=4, copy=0, casts=0, accumulator=0,
                   temporary=software.temporary if stack == "torch" else 0)  # fmt: skip


def stage_parameters(model: Transformer, p, stage, layers, mixtures) -> SimpleNamespace:
    """Parameters on a device before ZeRO: dense, experts, ends (embedding and head) and block, its largest layer."""
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
    return SimpleNamespace(dense=dense, experts=mixtures * experts, ends=ends, block=block)


def _states(p, count, software: Stack, optimizer: str, trainable: float) -> dict:
    """Weights, gradients, optimizer and the buffers that move them.

    ZeRO shards over dp x cp, or `shard` of them, and experts over what of it expert parallelism leaves.
    """
    moments = _known("optimizer", optimizer, _MOMENTS)
    ranks = p.dp * p.cp
    sharing = np.where(p.shard > 0, p.shard, ranks)
    whole = count.dense + count.experts
    shard = count.dense / sharing + count.experts / np.maximum(sharing / p.ep, 1)
    gradients = software.gradients + software.accumulator * p.reduce_fp32
    updated = trainable * np.where(p.zero >= 1, shard, whole)
    return {
        "weights": software.weights * np.where(p.zero >= software.weights_from, shard, whole),
        "gradients": trainable * gradients * np.where(p.zero >= 2, shard, whole),
        "optimizer": (moments + software.copy) * updated,
        "buckets": np.where(ranks > 1, trainable * _buckets(p, software, whole), 0.0),
        "gathered weights": _gathered(p, software, count, whole, gradients),
        "optimizer temporaries": software.temporary * updated * (moments > 0),
    }


def _buckets(p, software: Stack, whole):
    """DDP copies all gradients into its buckets; DeepSpeed has one bucket to reduce and one to gather."""
    if software.engine:
        return np.where(p.zero >= 1, 2 * np.minimum(p.bucket_bytes, software.weights * whole), 0.0)
    return np.where(p.zero < 2, software.buckets * whole, 0.0)


def _gathered(p, software: Stack, count, whole, gradients):
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


def _overhead(p, parts: dict) -> dict:
    """CUDA context and communicators, and what the caching allocator cannot hand out."""
    groups = sum((np.asarray(degree) > 1).astype(int) for degree in (p.tp, p.dp * p.cp, p.pp, p.ep))
    peak = moment_peak(by_phase(parts.items()))
    return {"context": _CUDA_BYTES + _COMMUNICATOR_BYTES * groups, "fragmentation": FRAGMENTATION * peak}


def by_phase(sizes: Iterable[tuple[str, np.ndarray]], phases: dict[str, str] = PHASES) -> dict[str, np.ndarray]:
    """Sums of (component, bytes) over the components of each phase."""
    sums = dict.fromkeys(phases.values(), 0.0)
    for name, size in sizes:
        sums[phases[name]] = sums[phases[name]] + size
    return sums


def moment_peak(sizes):
    """Bytes of the fullest moment from the sums by phase."""
    during = sizes["pass"] + np.maximum(sizes["loss"], sizes["backward"])
    return sizes["always"] + np.maximum(during, sizes["step"])


def _known(what: str, name: str, known: dict):
    if name not in known:
        raise ValueError(f"{what}={name!r} is not one of {', '.join(known)}")
    return known[name]
