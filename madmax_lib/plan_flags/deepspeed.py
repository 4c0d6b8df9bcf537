"""The plan of a DeepSpeed JSON or an Accelerate YAML, with what the training script adds
beside them.
"""

import math

from madmax_lib.base import require_int
from madmax_lib.plan_flags.keys import WORDS, Keys
from madmax_lib.plan_flags.megatron import megatron
from madmax_lib.plan_flags.text import Source

# elements: more than any model has, so that everything is reduced at once
ONE_BUCKET = 1e12
_USUAL_BUCKET = 5e8  # elements: DeepSpeed's reduce_bucket_size
_ZERO = "zero_optimization."
_SIZES = "parallelism_config.parallelism_config_"
# of FSDP 1, by name and number: zero, and whether it shards inside a node
_STRATEGIES = WORDS["sharding_strategies"]


def deepspeed(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from a ds_config.json, in which `auto` is what the training
    script says.

    world_size: devices; without it those that the three batch sizes give.
    """
    values = source.values
    auto = sorted(key for key, value in values.items() if value == "auto")
    # before stages there was ZeRO-1 or nothing
    if isinstance(values.get("zero_optimization"), bool):
        values[_ZERO + "stage"] = int(values.pop("zero_optimization"))
    source.values = {key: value for key, value in values.items() if key not in auto}
    keys = Keys("deepspeed", source)
    # Accelerate and Transformers fill them in
    for key in auto:
        keys.notes.append(f"{key}=auto: set by the training script, here the default")
    tp = keys.count("tensor_parallel.autotp_size", 1, 0) or 1
    cp = keys.count("sequence_parallel_size")
    plan = {
        "tp": tp,
        "sequence_parallel": False,
        "cp": cp,
        "context": "ulysses" if cp > 1 else "ring",
        **keys.fields(),
    }
    for name, what in (("pp", "a pipeline"), ("cp", "sequence parallelism")):
        if tp > 1 and plan.get(name, 1) > 1:
            raise ValueError(
                f"{keys.describe('tensor_parallel.autotp_size')}: AutoTP leaves no "
                f"ranks to {what}"
            )
    plan["dtype"] = _dtype(keys, auto)
    plan |= _batch(keys, plan, world_size)
    plan |= _zero(keys, plan)
    plan |= _offload(keys, plan.get("zero", 0))
    plan |= _experts(keys, tp)
    return plan | {"recompute": _recompute(keys)}, keys


def _dtype(keys, auto):
    """The dtype of the products, None where the training script says it."""
    enabled = [name for name in ("bf16", "fp16") if keys.flag(f"{name}.enabled")]
    if len(enabled) > 1:
        raise ValueError("bf16.enabled and fp16.enabled exclude each other")
    if "bf16.enabled" in auto or "fp16.enabled" in auto:
        return None
    return enabled[0] if enabled else "fp32"


def _recompute(keys):
    interval = "pipeline.activation_checkpoint_interval"
    inputs = "activation_checkpointing.cpu_checkpointing"
    if not {interval, "script.gradient_checkpointing"} & {*keys.values}:
        keys.notes.append("recompute: the training script says it, here none")
    default = int(keys.flag("script.gradient_checkpointing"))
    layers = keys.count(interval, default, 0)  # of which only the first input is kept
    if layers > 1:
        raise ValueError(
            f"{keys.describe(interval)}: a plan recomputes every layer or none"
        )
    if keys.flag(inputs) and layers:
        raise ValueError(
            f"{keys.describe(inputs)}: a plan keeps on the device what it does not "
            "repeat"
        )
    return "full" if layers else "none"


def _batch(keys, plan, world_size):
    """Micro-batch, steps of accumulation and batch, of which one follows from the
    others.

    The check of DeepSpeed comes before it makes groups for AutoTP, whose ranks it
    counts as data parallel ones, unless the script hands it groups (an mpu):
    train_batch_size may then be tp times the samples of a step.
    """
    micro = keys.count("train_micro_batch_size_per_gpu", 0, 0)
    steps = keys.count("gradient_accumulation_steps", 0, 0)
    total = keys.count("train_batch_size", 0, 0)
    micro = micro or keys.count("script.per_device_train_batch_size", 0, 0)
    steps = steps or keys.count("script.gradient_accumulation_steps", 0, 0)
    tp = plan["tp"]
    total = total or keys.count("script.global_batch_size", 0, 0) * tp
    others = tp * plan["cp"] * plan.get("pp", 1)
    dp = keys.count("data_parallel_size", 0, 0)
    has_sizes = micro and steps and total
    if not dp and world_size is None and not has_sizes:
        raise ValueError(
            "world_size is needed: the configuration does not tell how many devices "
            "it is for"
        )
    if not dp and world_size is not None:
        dp = world_size // others
    elif not dp:
        dp = total // (micro * steps * tp)
    if dp < 1 or (world_size is not None and dp * others != world_size):
        raise ValueError(
            f"dp x tp x pp x cp = {dp} x {others} is not the world size {world_size}"
        )
    if has_sizes and total == micro * steps * dp:  # the samples of a step
        total *= tp
    ranks = dp * tp
    if has_sizes and total != micro * steps * ranks:
        raise ValueError(
            f"train_batch_size={total} is not {micro} x {steps} x {ranks} ranks, "
            "micro-batch x accumulation x data parallel"
        )
    if total:
        micro = micro or total // ((steps or 1) * ranks)
    if total and micro:
        steps = total // (micro * ranks)
        if steps * micro * ranks != total:
            raise ValueError(
                f"train_batch_size={total} is not a multiple of {micro} x {ranks}, "
                "micro-batch x ranks"
            )
    # without a micro-batch only dp is known
    if not micro:
        return {"dp": dp}
    return {"dp": dp, "micro_batch": micro, "global_batch": micro * (steps or 1) * dp}


def _zero(keys, plan):
    zero = plan.get("zero", 0)
    elements = keys.number(_ZERO + "reduce_bucket_size", _USUAL_BUCKET)
    width = 4.0 if plan.get("reduce_fp32", False) else 2.0
    fields = {"bucket_bytes": math.inf if elements >= ONE_BUCKET else elements * width}
    overlap = keys.get(_ZERO + "overlap_comm")
    # ZeRO-3 always reduces under the backward pass
    if overlap is not None and zero < 3:
        fields["overlap_dp"] = bool(overlap)
    # hpZ: a second copy of the shards inside a node [arXiv 2306.10209]
    secondary = _ZERO + "zero_hpz_partition_size"
    parts = {
        "qwz": keys.flag(_ZERO + "zero_quantized_weights"),
        "qgz": keys.flag(_ZERO + "zero_quantized_gradients"),
        "hpz": keys.count(secondary) > 1,
    }
    shard = keys.count(_ZERO + "mics_shard_size", -1, -1)
    if zero < 3:
        for part, is_on in parts.items():
            if is_on:
                keys.notes.append(f"{part}: nothing below ZeRO-3")
        return fields
    if parts["hpz"]:
        size = keys.describe(secondary)
        keys.notes.append(f"{size}: must be the devices of a node")
    if keys.get(_ZERO + "stage3_prefetch_bucket_size") == 0:
        fields["prefetch"] = 0
    if shard > 0:  # copies across groups: MiCS [arXiv 2205.00119]
        fields["shard"] = shard
    return fields | parts


def _offload(keys, zero):
    optimizer = _offload_device(keys, "optimizer", "cpu_offload")
    parameters = _offload_device(keys, "param", "cpu_offload_param")
    if parameters and zero < 3:
        keys.notes.append("offload_param: nothing below ZeRO-3")
        parameters = None
    if parameters and not optimizer:
        raise ValueError(
            f"{keys.describe(_ZERO + 'offload_param.device')}: a plan offloads "
            "parameters with the optimizer"
        )
    if not optimizer:
        return {}
    if optimizer == "nvme":
        return {"offload": "nvme"}
    return {"offload": "all" if parameters else "optimizer"}


def _offload_device(keys, what, old_flag):
    """cpu or nvme, where such states are offloaded."""
    name = f"{_ZERO}offload_{what}."
    device = keys.get(name + "device")
    if not device and keys.flag(_ZERO + old_flag):
        device = "cpu"
    if device and keys.get(name + "ratio", 1.0) != 1:
        raise ValueError(
            f"{keys.describe(name + 'ratio')}: a plan offloads all of it or finds the "
            "share itself"
        )
    return device


def _experts(keys, tp):
    """AutoEP; ep_size of deepspeed.moe.layer.MoE is an argument of the script."""
    ep = 1
    if keys.flag("expert_parallel.enabled"):
        ep = keys.count("expert_parallel.autoep_size")
    # an argument of the layer goes before the section
    ep = keys.count("script.ep_size", ep)
    etp = keys.count("expert_parallel.expert_tensor_parallel_size", tp)
    return {"ep": ep, "etp": etp} if ep > 1 and etp != tp else {"ep": ep}


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
    stated = values.get("num_processes") or world
    other = [f"num_processes={stated}: read for {world}"] * (stated != world)
    # fp8 is of the products alone
    dtypes = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}
    dtype = dtypes.get(str(values.get("mixed_precision")).lower(), "fp32")
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        source.values = _section_of(values, kind, dtype)
        read = deepspeed if kind == "DEEPSPEED" else megatron
        plan, keys = read(source, world, layers)
        keys.notes += other
        return plan | {"dtype": dtype}, keys
    keys = Keys("accelerate", source)
    for name in ("distributed_type", "num_processes", "num_machines"):
        keys.get(name)
    if kind not in ("NO", "FSDP", "TP") and not kind.startswith("MULTI_"):
        raise ValueError(
            f"{keys.describe('distributed_type')}: not NO, MULTI_GPU, FSDP, DEEPSPEED, "
            "MEGATRON_LM or TP"
        )
    if keys.get("mixed_precision") == "fp8":
        keys.notes.append("mixed_precision=fp8: of the products, the rest is bf16")
    keys.notes += other
    plan = _mesh(keys, kind, world) | keys.fields()
    plan |= {"sequence_parallel": False, "dtype": dtype}
    # MULTI_GPU and TP are DDP: whole copies
    plan |= _fsdp(keys, plan, world) if kind == "FSDP" else {"zero": 0}
    # copies alone have no shard group
    if not plan["zero"]:
        plan.pop("shard", None)
    repeats = keys.flag("fsdp_config.fsdp_activation_checkpointing") or keys.flag(
        "script.gradient_checkpointing"
    )
    plan["recompute"] = "full" if repeats else "none"
    if "micro_batch" in plan:
        steps = keys.count("script.gradient_accumulation_steps")
        plan["global_batch"] = plan["micro_batch"] * plan["dp"] * steps
    return plan, keys


def _section_of(values, kind, dtype):
    """The values of another framework's section, by its own names."""
    section = f"{kind.lower()}_config."
    if file := values.get(section + "deepspeed_config_file"):
        raise ValueError(
            f"{section}deepspeed_config_file={file}: read that file, it replaces the "
            "other keys"
        )
    inner = {
        key.removeprefix(section).removeprefix("megatron_lm_"): value
        for key, value in values.items()
    }
    is_deepspeed = kind == "DEEPSPEED"
    if dtype != "fp32":
        inner[dtype + ".enabled" if is_deepspeed else dtype] = True
    if is_deepspeed:
        cp, sp, tp = (
            values.get(f"{_SIZES}{axis}_size") or 1 for axis in ("cp", "sp", "tp")
        )
        if max(cp, sp) > 1:
            inner["sequence_parallel_size"] = max(cp, sp)
        if tp > 1:
            inner["tensor_parallel.autotp_size"] = tp
    return inner


def _mesh(keys, kind, world):
    """Degrees of parallelism_config; FSDP shards over dp_shard x cp."""
    copies = keys.count(_SIZES + "dp_replicate_size")
    shards = keys.count(_SIZES + "dp_shard_size")
    tp = keys.count(_SIZES + "tp_size")
    cp = keys.count(_SIZES + "cp_size")
    sp = keys.count(_SIZES + "sp_size")  # Ulysses
    # DeepSpeed's context parallelism is Ulysses
    if keys.get(_SIZES + "cp_backend") == "deepspeed":
        cp, sp = 1, cp
    if cp > 1 and sp > 1:
        raise ValueError(f"{_SIZES}cp_size={cp} and sp_size={sp} exclude each other")
    stated = copies * shards * tp * cp
    if sp > 1 and stated == tp:
        shards = world // (sp * tp)
    elif stated == 1:  # what is not stated is data parallel
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
    plan = {"dp": copies * shards, "tp": tp, "cp": cp * sp}
    plan["context"] = "ulysses" if sp > 1 else "ring"
    if copies > 1 and shards * cp > 1:
        plan["shard"] = shards * cp
    return plan


def _fsdp(keys, plan, world):
    """ZeRO stage, shard group and offload of FSDP 1 and 2."""
    reshard = "fsdp_config.fsdp_reshard_after_forward"
    fields = {}
    if keys.flag("fsdp_config.fsdp_offload_params"):
        fields["offload"] = "all"
    inside = False
    if keys.count("fsdp_config.fsdp_version") > 1:
        zero = 3 if keys.flag(reshard, True) else 2
    else:
        # later versions of Accelerate write FSDP 1's strategy there
        is_word = isinstance(keys.get(reshard), str)
        name = reshard if is_word else "fsdp_config.fsdp_sharding_strategy"
        zero, inside = keys.word(name, _STRATEGIES, "full_shard")
    # one device has nothing to shard
    if plan["dp"] * plan["cp"] == 1:
        return fields | {"zero": 0}
    nodes = keys.count("num_machines")
    if inside and nodes > 1:
        fields["shard"] = world // nodes
    return fields | {"zero": zero, "overlap_gather": zero == 2}
