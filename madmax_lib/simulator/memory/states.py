"""What do weights, gradients and optimizer states take on a device? By ZeRO stage and
by the habits of the software.

Model states follow ZeRO [arXiv 1910.02054].
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from madmax_lib import catalog
from madmax_lib.catalog import DLRM, Software, Transformer
from madmax_lib.plan import Case
from madmax_lib.plan.columns import Plans, expert_sharing, owned
from madmax_lib.simulator.layers.ops import precision

USUAL_SOFTWARE = ("megatron-core", "automodel", "megatron-deepspeed")
# numbers of the optimizer's state per parameter
_MOMENTS = catalog.table("optimizers", numbers=True).set_index("optimizer")["moments"]
_LIVE_PARAMETERS = 1e9  # DeepSpeed stage3_max_live_parameters, default
# a node, over which ZeRO++ shards its second copy of the weights [arXiv 2306.10209]
_HPZ_DEVICES = 8


def default_software(plan: Plans) -> str | np.ndarray:
    """The software such a plan is usually run with.

    Tensor, pipeline and expert parallelism are Megatron's; without them ZeRO 1 and 2
    are DeepSpeed's, DDP and FSDP PyTorch's, with fused kernels, whose fp32 loss may
    take more from ZeRO 2 to 3 than a small model saves.
    """
    alone = np.where(np.isin(plan.zero, (0, 3)), *USUAL_SOFTWARE[1:])
    usual = np.where(plan.tp * plan.pp * plan.ep > 1, USUAL_SOFTWARE[0], alone)
    return usual if usual.ndim else usual.item()


def normalised(case: Case) -> Case:
    """The case with the sharding that its offload implies: chunks, and all on one
    device, are sharded as by ZeRO-3.

    Raises ValueError for what offload is not modelled for.
    """
    plan = case.plan
    offload = f"offload={case.plan.offload}"
    if isinstance(case.model, DLRM):
        raise ValueError(f"{case.model.name}: {offload} is for transformers")
    if case.dtype not in ("bf16", "fp16"):
        raise ValueError(
            f"{offload} is modelled for 16-bit training, not dtype={case.dtype!r}"
        )
    if case.optimizer != "adam":
        raise ValueError(f"{offload} is of Adam, not optimizer={case.optimizer!r}")
    if plan.offload == "optimizer" or plan.zero == 3:
        return case
    if plan.offload != "chunks" and plan.replicas > 1:
        raise ValueError(f"{offload} needs zero=3, but zero={plan.zero}")
    return case.with_plan(zero=3)


def width_of(dtype: str) -> float:
    """Bytes of an activation: fp8 and fp4 products stand between 16-bit tensors."""
    return precision(dtype).storage_bytes


@cache
def software_of(name: str, dtype: str) -> Software:
    """Software by what it holds; in fp32 training everything is as wide as the weights and
    nothing is copied.
    """
    software = catalog.software(name)
    if width_of(dtype) == 2:
        return software
    single = {
        "weight_bytes": 4,
        "gradient_bytes": 4,
        "copy_bytes": 0,
        "cast_bytes": 0,
        "accumulator_bytes": 0,
    }
    if software.copy_bytes:  # gradients are not widened for the update
        single["temporary_bytes"] = 0
    return replace(software, bucket_bytes=4 * (software.bucket_bytes > 0), **single)


@dataclass(frozen=True)
class StageParameters:
    """Parameters of a pipeline stage on one device, before ZeRO shards them; numbers or
    arrays.
    """

    dense: float  # all but routed experts
    experts: float  # routed experts, after ep and etp have split them
    ends: float  # those of embedding and head, which `dense` includes
    block: float  # of the largest layer
    routed: float = 0  # those of them that are routed experts
    # of the adapters of attention's products, per rank [NeMo, llama2_70b_lora of MLPerf
    # 4.0]
    adapted: float = 0


def stage_parameters(
    model: Transformer, p: Plans, stage, layers: dict
) -> StageParameters:
    """Parameters of a stage that holds so many layers of each kind, words of their
    blocks.
    """
    experts = model.experts * model.expert_parameters / p.tp * p.expert_spread / p.ep
    router = model.router_parameters + model.latent_parameters
    # a pipeline holds the table twice
    table = 0 if model.image else model.vocab * model.hidden
    is_copied = (p.head_stage > 0) & (p.head_stage != p.prediction_stage)
    tied = np.where(is_copied, table, 0)
    last = stage == p.head_stage
    embeds = (stage == 0) | (stage == p.prediction_stage)
    ends = embeds * model.embedding_parameters
    ends = (ends + last * (model.head_parameters or tied)) / p.tp
    ends = ends + last * model.norm_parameters
    dense = 0.0
    mixtures = 0
    attends = 0
    block = 0.0
    for word, count in layers.items():
        layer = len(word) * model.norm_parameters
        for letter in word:
            layer = layer + (
                router + model.shared_parameters / p.tp
                if letter == "E"
                else model.block_parameters(letter) / p.tp
            )
        dense = dense + count * layer
        block = np.maximum(block, (count > 0) * (layer + word.has_experts * experts))
        mixtures = mixtures + word.has_experts * count
        attends = attends + word.count("*") * count
    adapters = sum(inputs + outputs for _, inputs, outputs in model.attention_matrices)
    return StageParameters(
        dense=dense + ends,
        experts=mixtures * experts,
        ends=ends,
        block=block,
        routed=np.minimum(experts, block),
        adapted=attends * adapters / p.tp,
    )


def state_bytes(
    p: Plans,
    count: StageParameters,
    software: Software,
    optimizer: str,
    trainable: float,
) -> dict:
    """Weights, gradients, optimizer and the buffers that move them.

    ZeRO shards over dp x cp, or `shard` of them, and experts over what of it expert
    parallelism leaves. Frozen weights are as wide as those that compute uses.
    trainable: share with gradients, where the plan has no adapters.
    """
    moments = _MOMENTS[optimizer] * software.moment_bytes
    parameters = count.dense + count.experts
    if optimizer == "muon":  # but for tables and head, which Adam updates
        moments = moments * (1 + count.ends / np.maximum(parameters, 1))
    trainable = np.where(
        p.lora_rank > 0,
        p.lora_rank * count.adapted / np.maximum(parameters, 1),
        trainable,
    )
    shard = owned(count.dense, count.experts, p.sharing, p.ep, p.expert_spread)
    compute = software.cast_bytes or software.weight_bytes
    weights = trainable * software.weight_bytes + (1 - trainable) * compute
    gradients = trainable * (
        software.gradient_bytes + software.accumulator_bytes * p.reduce_fp32
    )
    updated = trainable * np.where(p.zero >= 1, shard, parameters)
    # DDP copies all gradients into its buckets
    bucketed = p.zero < 2
    buckets = software.bucket_bytes * parameters
    if software.engine:  # one bucket to reduce and one to gather
        bucketed = p.zero >= 1
        buckets = 2 * np.minimum(p.bucket_bytes, software.weight_bytes * parameters)
    return {
        "weights": weights
        * np.where(p.zero >= software.weights_sharded_from, shard, parameters),
        "gradients": gradients * np.where(p.zero >= 2, shard, parameters),
        "optimizer": (moments + software.copy_bytes) * updated,
        "buckets": np.where(bucketed & (p.replicas > 1), trainable * buckets, 0.0),
        "gathered weights": _gathered(p, software, count, shard, gradients, trainable),
        "optimizer temporaries": software.temporary_bytes * updated * (moments > 0),
    }


def _gathered(p, software, count, shard, gradients, trainable):
    """Weights beside the owned ones while a pass runs, and the gradients of a block
    before they are scattered.

    ZeRO 3: the block at work and those gathered ahead, at most all; torch keeps
    embedding and head whole, with their gradients. ZeRO 2 in torch: all weights. Where
    a pipeline does not free them, all weights stay, and all gradients as wide as they
    are reduced, until the last micro-batch. Without sharding, autocast's casts, which
    recompute frees with their block.
    """
    compute = software.cast_bytes or software.weight_bytes
    parameters = count.dense + count.experts
    layer = count.block
    if not software.cast_bytes:  # what a device has for itself is there already
        alone = np.where(
            expert_sharing(p.sharing, p.ep, p.expert_spread) > 1, 0, count.routed
        )
        layer = np.where(p.sharing > 1, layer - alone, 0)
    most = _LIVE_PARAMETERS if software.engine else np.inf
    block = compute * np.minimum((1 + p.prefetch) * layer, most)
    scattered = (compute + gradients) * np.minimum(layer, most)
    if software.weights_sharded_from == 3:
        others = parameters - shard
        block = np.minimum(block, compute * others)
        scattered = np.minimum(scattered, gradients * others)
        return np.select(
            [p.zero == 3, p.zero == 2],
            [block + scattered, 0.0 if software.engine else scattered],
            0.0,
        )
    block = block + compute * parameters / _HPZ_DEVICES * p.hpz
    everything = compute * parameters + scattered
    freed = np.minimum(
        block + scattered + (1 + trainable) * compute * count.ends, everything
    )
    if not software.frees_under_pipeline:
        everything = np.where(
            p.pp > 1,
            (compute + trainable * software.wire_bytes) * parameters,
            everything,
        )
        freed = np.where(p.pp > 1, everything, freed)
    casts = (
        trainable
        * software.cast_bytes
        * np.where(p.recompute == "none", parameters, count.block)
    )
    return np.select([p.zero == 3, p.zero == 2], [freed, everything], casts)
