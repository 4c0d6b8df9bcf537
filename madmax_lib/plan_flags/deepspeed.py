"""Which plan do a DeepSpeed JSON and an Accelerate YAML state? What the training script
adds stands beside them.
"""

import math

from madmax_lib.base.fields import require_int
from madmax_lib.plan_flags.keys import Keys
from madmax_lib.plan_flags.megatron import megatron
from madmax_lib.plan_flags.text import Source

__all__ = ["ONE_BUCKET", "accelerate", "deepspeed"]

ONE_BUCKET = (
    1e12  # elements: more than any model has, so that everything is reduced at once
)
_ZERO = "zero_optimization."
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_SIZES = "parallelism_config.parallelism_config_"
# of FSDP 1, in the order of its numbers: zero, and whether it shards inside a node
_STRATEGIES = {
    "full_shard": (3, False),
    "shard_grad_op": (2, False),
    "no_shard": (0, False),
    "hybrid_shard": (3, True),
    "hybrid_shard_zero2": (2, True),
}
_STRATEGIES |= dict(zip("12345", _STRATEGIES.values(), strict=True))


def deepspeed(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from a ds_config.json, in which `auto` is what the training
    script says.

    world_size: devices; without it those that the three batch sizes give.
    """
    auto = sorted(key for key, value in source.values.items() if value == "auto")
    if isinstance(source.values.get("zero_optimization"), bool):
        source.values[_ZERO + "stage"] = int(source.values.pop("zero_optimization"))
    source.values = {
        key: value for key, value in source.values.items() if key not in auto
    }
    keys = Keys("deepspeed", source)
    keys.notes += [
        f"{key}=auto: the training script's, here the default" for key in auto
    ]
    plan = {
        "tp": keys.count("tensor_parallel.autotp_size", 1, 0) or 1,
        "sequence_parallel": False,
    }
    plan["cp"] = keys.count("sequence_parallel_size")
    plan["context"] = "ulysses" if plan["cp"] > 1 else "ring"
    plan |= keys.fields()
    for name, what in (("pp", "a pipeline"), ("cp", "sequence parallelism")):
        if plan["tp"] > 1 and plan.get(name, 1) > 1:
            raise ValueError(
                f"{keys.say('tensor_parallel.autotp_size')}: AutoTP leaves no ranks "
                f"to {what}"
            )
    enabled = {name for name in ("bf16", "fp16") if keys.on(f"{name}.enabled")}
    if len(enabled) > 1:
        raise ValueError("bf16.enabled and fp16.enabled exclude each other")
    plan["dtype"] = (
        None
        if {"bf16.enabled", "fp16.enabled"} & set(auto)
        else next(iter(enabled), "fp32")
    )
    plan |= _batch(keys, plan, world_size)
    plan |= (
        _zero(keys, plan)
        | _offload(keys, plan.get("zero", 0))
        | _experts(keys, plan["tp"])
    )
    each = "pipeline.activation_checkpoint_interval"
    inputs = "activation_checkpointing.cpu_checkpointing"
    full = keys.count(each, int(keys.on("script.gradient_checkpointing")), 0)
    if full > 1:
        raise ValueError(f"{keys.say(each)}: a plan recomputes every layer or none")
    if keys.on(inputs) and full:
        raise ValueError(
            f"{keys.say(inputs)}: a plan keeps on the device what it does not repeat"
        )
    return plan | {"recompute": "full" if full else "none"}, keys


def _batch(keys: Keys, plan: dict, world_size: int | None) -> dict:
    """Micro-batch, steps of accumulation and batch, of which one follows from the
    others.

    The check of DeepSpeed comes before it makes groups for AutoTP, whose ranks it
    counts as data parallel ones, unless the script hands it groups (an mpu):
    train_batch_size may then be tp times the samples of a step.
    """
    names = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
    )
    micro, steps, total = (keys.count(name, 0, 0) for name in names)
    micro = micro or keys.count("script.per_device_train_batch_size", 0, 0)
    steps = steps or keys.count("script.gradient_accumulation_steps", 0, 0)
    tp = plan["tp"]
    samples = keys.count("script.global_batch_size", 0, 0)
    others = tp * plan["cp"] * plan.get("pp", 1)
    total = total or samples * tp
    dp = keys.count("data_parallel_size", 0, 0)
    if not dp and world_size is None and not (micro and steps and total):
        raise ValueError(
            "world_size is needed: the configuration does not tell how many devices "
            "it is for"
        )
    dp = dp or (
        world_size // others
        if world_size is not None
        else total // (micro * steps * tp)
    )
    if dp < 1 or (world_size is not None and dp * others != world_size):
        raise ValueError(
            f"dp x tp x pp x cp = {dp} x {others} is not the world size {world_size}"
        )
    if micro and steps and total == micro * steps * dp:
        total *= tp
    if micro and steps and total and total != micro * steps * dp * tp:
        product = f"{micro} x {steps} x {dp * tp} ranks"
        raise ValueError(
            f"train_batch_size={total} is not {product}, micro-batch x accumulation "
            "x data parallel"
        )
    if total and not micro:
        micro = total // ((steps or 1) * dp * tp)
    if total and micro:
        steps = total // (micro * dp * tp)
        if steps * micro * dp * tp != total:
            raise ValueError(
                f"train_batch_size={total} is no multiple of {micro} x {dp * tp}, "
                "micro-batch x ranks"
            )
    if not micro:
        return {"dp": dp}
    return {"dp": dp, "micro_batch": micro, "global_batch": micro * (steps or 1) * dp}


def _zero(keys: Keys, plan: dict) -> dict:
    zero = plan.get("zero", 0)
    wide = plan.get("reduce_fp32", False)
    size = keys.number(_ZERO + "reduce_bucket_size", 5e8)
    fields = {
        "bucket_bytes": math.inf
        if size >= ONE_BUCKET
        else size * (4.0 if wide else 2.0)
    }
    overlap = keys.get(_ZERO + "overlap_comm")
    if overlap is not None and zero < 3:
        fields["overlap_dp"] = bool(overlap)
    parts = {
        "qwz": keys.on(_ZERO + "zero_quantized_weights"),
        "qgz": keys.on(_ZERO + "zero_quantized_gradients"),
    }
    inside = keys.count(_ZERO + "zero_hpz_partition_size")
    group = keys.count(_ZERO + "mics_shard_size", -1, -1)
    parts["hpz"] = inside > 1
    if zero < 3:
        keys.notes += [
            f"{part}: nothing below ZeRO-3" for part, on in parts.items() if on
        ]
        return fields
    if inside > 1:
        keys.notes.append(
            f"{keys.say(_ZERO + 'zero_hpz_partition_size')}: must be the devices of "
            "a node"
        )
    if keys.get(_ZERO + "stage3_prefetch_bucket_size") == 0:
        fields["prefetch"] = 0
    return fields | parts | ({"shard": group} if group > 0 else {})


def _offload(keys: Keys, zero: int) -> dict:
    device = {}
    for what, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        name = f"{_ZERO}offload_{what}."
        device[what] = keys.get(name + "device") or (
            "cpu" if keys.on(_ZERO + old) else None
        )
        if device[what] and keys.get(name + "ratio", 1.0) != 1:
            raise ValueError(
                f"{keys.say(name + 'ratio')}: a plan offloads all of it or finds the "
                "share itself"
            )
    if device["param"] and zero < 3:
        keys.notes.append("offload_param: nothing below ZeRO-3")
        device["param"] = None
    if device["param"] and not device["optimizer"]:
        raise ValueError(
            f"{keys.say(_ZERO + 'offload_param.device')}: a plan offloads parameters "
            "with the optimizer"
        )
    if not device["optimizer"]:
        return {}
    if device["optimizer"] == "nvme":
        return {"offload": "nvme"}
    return {"offload": "all" if device["param"] else "optimizer"}


def _experts(keys: Keys, tp: int) -> dict:
    """AutoEP; ep_size of deepspeed.moe.layer.MoE is an argument of the script."""
    ep = (
        keys.count("expert_parallel.autoep_size")
        if keys.on("expert_parallel.enabled")
        else 1
    )
    ep = keys.count("script.ep_size", ep)
    etp = keys.count("expert_parallel.expert_tensor_parallel_size", tp)
    return {"ep": ep} | ({"etp": etp} if ep > 1 and etp != tp else {})


def accelerate(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from the YAML of `accelerate config`; num_processes are those of
    all machines.
    """
    values = source.values
    kind = str(values.get("distributed_type") or "NO").upper()
    world = world_size or require_int(
        "num_processes", values.get("num_processes") or 1, 1
    )
    dtype = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(
        str(values.get("mixed_precision")).lower(), "fp32"
    )
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        section = f"{kind.lower()}_config."
        if file := values.get(section + "deepspeed_config_file"):
            raise ValueError(
                f"{section}deepspeed_config_file={file}: read that file, it replaces "
                "the other keys"
            )
        read, on = (deepspeed, ".enabled") if kind == "DEEPSPEED" else (megatron, "")
        inner = {
            key.removeprefix(section).removeprefix("megatron_lm_"): value
            for key, value in values.items()
        }
        source.values = inner | ({dtype + on: True} if dtype != "fp32" else {})
        sizes = {
            axis: values.get(f"{_SIZES}{axis}_size") or 1 for axis in ("cp", "sp", "tp")
        }
        if kind == "DEEPSPEED" and max(sizes["cp"], sizes["sp"]) > 1:
            source.values["sequence_parallel_size"] = max(sizes["cp"], sizes["sp"])
        if kind == "DEEPSPEED" and sizes["tp"] > 1:
            source.values["tensor_parallel.autotp_size"] = sizes["tp"]
        plan, keys = read(source, world, layers)
        return plan | {"dtype": dtype}, keys
    keys = Keys("accelerate", source)
    for name in (
        "distributed_type",
        "num_processes",
        "num_machines",
        "mixed_precision",
    ):
        keys.get(name)
    if kind not in ("NO", "FSDP", "TP") and not kind.startswith("MULTI_"):
        raise ValueError(
            f"{keys.say('distributed_type')}: not NO, MULTI_GPU, FSDP, DEEPSPEED, "
            "MEGATRON_LM or TP"
        )
    if dtype == "bf16" and keys.get("mixed_precision") == "fp8":
        keys.notes.append("mixed_precision=fp8: of the products, the rest is bf16")
    plan = (
        _mesh(keys, kind, world)
        | keys.fields()
        | {"sequence_parallel": False, "dtype": dtype}
    )
    plan |= _fsdp(keys, plan, world) if kind == "FSDP" else {"zero": 0}
    if not plan["zero"]:
        plan.pop("shard", None)
    full = keys.on("fsdp_config.fsdp_activation_checkpointing") or keys.on(
        "script.gradient_checkpointing"
    )
    plan["recompute"] = "full" if full else "none"
    if "micro_batch" in plan:
        plan["global_batch"] = (
            plan["micro_batch"]
            * plan["dp"]
            * keys.count("script.gradient_accumulation_steps")
        )
    return plan, keys


def _mesh(keys: Keys, kind: str, world: int) -> dict:
    """Degrees of parallelism_config; FSDP shards over dp_shard x cp."""
    copies, shards, tp, cp, sp = (keys.count(f"{_SIZES}{axis}_size") for axis in _AXES)
    if keys.get(_SIZES + "cp_backend") == "deepspeed":
        cp, sp = 1, cp
    if cp > 1 and sp > 1:
        raise ValueError(f"{_SIZES}cp_size={cp} and sp_size={sp} exclude each other")
    stated = copies * shards * tp * cp
    if sp > 1 and stated == tp:
        shards = world // (sp * tp)
    elif stated == 1:
        copies, shards = (1, world) if kind == "FSDP" else (world, 1)
    if copies * shards * tp * cp * sp != world:
        raise ValueError(
            f"parallelism_config: {copies} x {shards} x {tp} x {cp * sp} is not "
            f"num_processes={world}"
        )
    if copies > 1 and shards == 1 and (tp > 1 or cp > 1):
        raise ValueError(
            f"{_SIZES}dp_replicate_size={copies} with tp or cp needs dp_shard_size "
            "above 1"
        )
    plan = {
        "dp": copies * shards,
        "tp": tp,
        "cp": cp * sp,
        "context": "ulysses" if sp > 1 else "ring",
    }
    return plan | ({"shard": shards * cp} if copies > 1 and shards * cp > 1 else {})


def _fsdp(keys: Keys, plan: dict, world: int) -> dict:
    name = "fsdp_config.fsdp_sharding_strategy"
    again = "fsdp_config.fsdp_reshard_after_forward"
    offload = {"offload": "all"} if keys.on("fsdp_config.fsdp_offload_params") else {}
    if keys.count("fsdp_config.fsdp_version") > 1:
        zero = 3 if keys.on(again, True) else 2
        inside = False
    else:
        zero, inside = keys.word(
            again if isinstance(keys.get(again), str) else name,
            _STRATEGIES,
            "full_shard",
        )
    if plan["dp"] * plan["cp"] == 1:
        return {"zero": 0} | offload
    hybrid = (
        {"shard": world // keys.count("num_machines")}
        if inside and keys.count("num_machines") > 1
        else {}
    )
    return {"zero": zero, "overlap_gather": zero == 2} | hybrid | offload
