"""The plan of a torchtitan configuration: TOML to February 2026, then JSON dumps and
command lines.
"""

import re

from madmax_lib.plan_flags.keys import WORDS, Keys
from madmax_lib.plan_flags.text import Source

# schedule and chunks per stage
SCHEDULES = WORDS["torchtitan_schedules"]
_DEGREES = WORDS["torchtitan_degrees"]
_RESHARD = WORDS["torchtitan_reshard"]
# stages and schedules of one's own, which a plan does not have
_CUSTOM = (
    "module_fqns_per_model_part",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_split_points",
)
_RECOMPUTES = ("none", "selective", "full")
_BUDGET = "memory_budget"
# torchtitan's defaults
_LOCAL_BATCH = 8
_SEQUENCE = 2048


def torchtitan(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan.

    world_size: devices, needed where data_parallel_shard_degree is -1. layers: of the
    model, needed where pipeline_parallel_layers_per_stage is set and the dump does not
    list them.
    """
    # --no-enable-... turns a flag off
    source.values = {
        re.sub(r"\.no_(?=enable_)", ".", k): v is not True if ".no_enable_" in k else v
        for k, v in source.values.items()
    }
    keys = Keys("torchtitan", source)
    # before anything is worked out: a later parallelism could change all of it
    keys.refuse_unknown()
    plan = {
        short: keys.count(f"parallelism.{name}_parallel_degree")
        for short, name in _DEGREES.items()
    }
    plan |= _fsdp(keys, plan, world_size) | _tensor(keys, plan)
    reduce_dtype = keys.get("training.mixed_precision_reduce", "float32")
    plan["reduce_fp32"] = reduce_dtype == "float32"
    if keys.flag("training.enable_cpu_offload"):
        plan["offload"] = "all"
    # a dump lists the layers of the model
    listed = keys.get("model_spec.model.layers")
    if isinstance(listed, list):
        layers = len(listed)
    plan |= _pipeline(keys, plan["pp"], layers) | _batch(keys, plan)
    plan |= {"recompute": _recompute(keys), "dtype": "bf16"}
    plan |= keys.fields()
    if keys.form == "flags":
        keys.notes.append(
            "partial: what the flags omit comes from the config function; here "
            "torchtitan's default"
        )
    return plan, keys


def _fsdp(keys, plan, world_size):
    """Data parallelism and its shards, which lie over cp too."""
    # HSDP: copies of groups that shard over dp_shard x cp
    copies, shards = _shards(keys, plan["tp"] * plan["pp"] * plan["cp"], world_size)
    spread = shards * plan["cp"]
    reshard = keys.word("parallelism.fsdp_reshard_after_forward", _RESHARD, "default")
    if reshard is None:  # a pipeline would gather for each micro-batch
        reshard = plan["pp"] == 1
    zero = 0
    if spread > 1:
        zero = 3 if reshard else 2
    fields = {"dp": copies * shards, "zero": zero}
    if copies > 1 and spread > 1:
        fields["shard"] = spread
    if zero == 2:
        fields["overlap_gather"] = True
    return fields


def _tensor(keys, plan):
    """Tensor parallelism of layers and of experts."""
    tp = plan["tp"]
    fields = {}
    # without the key whole experts lie over tp, as since there is no such key
    etp = keys.count("parallelism.expert_tensor_parallel_degree", 1)
    if plan["ep"] > 1 and etp != tp:
        if tp % etp:
            raise ValueError(
                f"expert_tensor_parallel_degree: etp={etp} does not divide tp={tp}"
            )
        fields["etp"] = etp
    splits_sequence = keys.flag("parallelism.enable_sequence_parallel", True)
    fields["sequence_parallel"] = splits_sequence and tp > 1
    overlaps = keys.flag("parallelism.enable_async_tensor_parallel")
    overlaps |= keys.flag("compile.enable_async_tensor_parallel")
    if overlaps and tp > 1:
        fields["overlap_tp"] = True
    return fields


def _shards(keys, model_devices, world_size):
    """Copies and shards of data parallelism; -1 shards over the rest of the world."""
    name = "parallelism.data_parallel_shard_degree"
    copies = keys.count("parallelism.data_parallel_replicate_degree")
    shards = keys.get(name, -1)
    # the default: all devices that the other degrees leave
    if shards == -1:
        if world_size is None:
            raise ValueError(
                "data_parallel_shard_degree=-1 is the rest of the world: world_size "
                "is needed"
            )
        shards = world_size // (model_devices * copies)
    else:
        shards = keys.count(name)
    if world_size is not None and copies * shards * model_devices != world_size:
        product = f"{copies} x {shards} x {model_devices}"
        raise ValueError(
            f"replicate x shard x (tp x pp x cp) = {product} is not the world size "
            f"{world_size}"
        )
    return copies, shards


def _pipeline(keys, pp, layers):
    prefix = "parallelism.pipeline_parallel_"
    first = keys.count(f"{prefix}first_stage_less_layers", 1, 0)
    last = keys.count(f"{prefix}last_stage_less_layers", 1, 0)
    schedule = keys.get(f"{prefix}schedule", "1F1B")
    if pp == 1:
        return {}
    schedules = {name.lower(): means for name, means in SCHEDULES.items()}
    kind, interleave = keys.word(f"{prefix}schedule", schedules, "1F1B")
    for name in _CUSTOM:
        key = f"parallelism.{name}"
        if keys.get(key):
            raise ValueError(
                f"{keys.describe(key)}: a plan has no custom stages or schedules"
            )
    if max(first, last) > 1:
        raise ValueError(
            f"pipeline_parallel_..._stage_less_layers={max(first, last)}: a plan takes "
            "off one layer at most"
        )
    if each := keys.count(f"{prefix}layers_per_stage", 0, 0):
        name = f"pipeline_parallel_layers_per_stage={each}"
        if layers is None:
            raise ValueError(f"{name} needs the number of layers")
        stages = -(-(layers + first + last) // each)  # rounded up
        # a schedule of one chunk has pp stages, an interleaved one a multiple
        if stages % pp or (stages > pp) != (interleave > 1):
            raise ValueError(
                f"{name} makes {stages} stages of {layers} layers, but pp={pp} and the "
                f"schedule is {schedule}"
            )
        interleave = stages // pp
    return {
        "schedule": kind,
        "interleave": interleave,
        "embedding_as_layer": bool(first),
        "head_as_layer": bool(last),
    }


def _recompute(keys):
    """Selective per operation stands as "selective": products are kept, the rest is
    recomputed.

    Modes stand in TOML and in dumps to June 2026. Later policies are told by the keys
    that they have.
    """
    prefix = "activation_checkpoint."
    stated = {key.split(".")[1] for key in keys.values if key.startswith(prefix)}
    # dumps of 2025 are whole, and have the section job
    has_job = any(key.startswith("job.") for key in keys.values)
    is_old = keys.form == "toml" or has_job
    for name in stated:
        keys.get(prefix + name)
    if "mode" in stated or is_old:
        # without a mode every second layer was recomputed
        default = "none" if "mode" in stated else "selective"
        mode = str(keys.get(prefix + "mode") or default)
        option = str(keys.get(prefix + "selective_ac_option", "2" if is_old else "op"))
        if mode == "selective" and option != "op":
            if option != "1":
                raise ValueError(
                    f"selective_ac_option={option}: a plan recomputes every layer or "
                    "none"
                )
            mode = "full"
    elif any("force_recompute" in name for name in stated):
        mode = "selective"
    elif "memory_budget" in stated:
        mode = _BUDGET
    else:
        mode = "full" if stated else "none"
    if mode.replace("-", "_") == _BUDGET:
        return _budget(keys)
    if mode not in _RECOMPUTES:
        raise ValueError(
            f"activation_checkpoint.mode={mode}: a plan knows {', '.join(_RECOMPUTES)}, "
            f"{_BUDGET}"
        )
    return mode


def _budget(keys):
    """Recompute within a memory budget, which torch's compiler keeps to."""
    name = f"activation_checkpoint.{_BUDGET}"
    if not keys.flag("compile.enable"):
        raise ValueError(f"{name} needs compile.enable")
    share = keys.number(name, 0.5)
    percent = round(100 * share)
    if not 0 <= share <= 1 or abs(100 * share - percent) > 1e-9:
        raise ValueError(f"{keys.describe(name)} is not a whole percentage of 0 to 1")
    return f"budget{percent}" if percent < 100 else "none"


def _batch(keys, plan):
    """Samples of a forward pass, of the local batch, which a pipeline splits; batch and
    sequence of a step.
    """
    dp = plan["dp"]
    has_pipeline = plan["pp"] > 1
    if "training.num_tokens_per_microbatch_per_dp_rank" in keys.values:
        passes = keys.count("parallelism.num_pp_microbatches") if has_pipeline else 1
        return _token_batch(keys, dp * passes)
    local = keys.count("training.local_batch_size", _LOCAL_BATCH)
    name = "pipeline_parallel_microbatch_size"
    micro = local
    if has_pipeline:
        # to April 2025 a number of micro-batches, since then their size
        count = keys.count("parallelism.pipeline_parallel_microbatches", 0, 0)
        micro = local // count if count else keys.count(f"parallelism.{name}")
        if local % micro:
            raise ValueError(f"{name}={micro} does not divide local_batch_size={local}")
    words = f"is not a multiple of local_batch_size x dp = {local} x {dp}"
    total = _total(keys, "training.global_batch_size", local * dp, words)
    sequence = keys.count("training.seq_len", _SEQUENCE)
    return {"micro_batch": micro, "global_batch": total, "sequence": sequence}


def _total(keys, name, once, words):
    """Batch of a step, of which `once` is without accumulation."""
    total = keys.count(name, -1, -1)
    if total == -1:
        total = once
    if total < 1 or total % once:
        raise ValueError(f"{name}={total} {words}")
    return total


def _token_batch(keys, passes):
    """The same where torchtitan counts tokens, since August 2026."""
    name = "training.num_tokens_per_microbatch_per_dp_rank"
    sequence = keys.count("training.max_context_length", _SEQUENCE)
    tokens = keys.count(name)
    # a plan counts whole samples
    if tokens % sequence:
        raise ValueError(
            f"{name}={tokens} is not a multiple of max_context_length={sequence}: a "
            "plan has whole samples"
        )
    words = f"is not a multiple of {tokens} x {passes} tokens"
    total = _total(keys, "training.num_tokens_per_train_step", tokens * passes, words)
    return {
        "micro_batch": tokens // sequence,
        "global_batch": total // sequence,
        "sequence": sequence,
    }
