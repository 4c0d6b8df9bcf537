"""Which plan does a configuration of torchtitan state? TOML to February 2026, then JSON
dumps and command lines.
"""

import re

from madmax_lib.plan_flags.keys import Keys
from madmax_lib.plan_flags.text import Source

__all__ = ["torchtitan"]

_SCHEDULES = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("1f1b", 2),
}


def torchtitan(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan.

    world_size: devices, needed where data_parallel_shard_degree is -1. layers: of the
    model, needed where pipeline_parallel_layers_per_stage is set and the dump does not
    list them.
    """
    source.values = {
        re.sub(r"\.no_(?=enable_)", ".", k): v is not True if ".no_enable_" in k else v
        for k, v in source.values.items()
    }
    keys = Keys("torchtitan", source)
    keys.refuse_unknown()
    plan = {
        short: keys.count(f"parallelism.{name}_parallel_degree")
        for short, name in _DEGREES.items()
    }
    copies, shards = _shards(keys, plan["tp"] * plan["pp"] * plan["cp"], world_size)
    plan["dp"], spread = copies * shards, shards * plan["cp"]
    reshard = keys.word("parallelism.fsdp_reshard_after_forward", _RESHARD, "default")
    always = plan["pp"] == 1 if reshard is None else reshard
    plan["zero"] = 0 if spread == 1 else 3 if always else 2
    plan |= {"shard": spread} if copies > 1 and spread > 1 else {}
    plan |= {"overlap_gather": True} if plan["zero"] == 2 else {}
    etp = keys.count(
        "parallelism.expert_tensor_parallel_degree", 1
    )  # 1 since there is no such key
    if plan["ep"] > 1 and etp != plan["tp"]:
        if plan["tp"] % etp:
            raise ValueError(
                f"expert_tensor_parallel_degree: etp={etp} does not divide "
                f"tp={plan['tp']}"
            )
        plan["etp"] = etp
    plan["sequence_parallel"] = (
        keys.flag("parallelism.enable_sequence_parallel", True) and plan["tp"] > 1
    )
    asynchronous = keys.flag("parallelism.enable_async_tensor_parallel") | keys.flag(
        "compile.enable_async_tensor_parallel"
    )
    plan |= {"overlap_tp": True} if asynchronous and plan["tp"] > 1 else {}
    plan["reduce_fp32"] = (
        keys.get("training.mixed_precision_reduce", "float32") == "float32"
    )
    plan |= {"offload": "all"} if keys.flag("training.enable_cpu_offload") else {}
    listed = keys.get("model_spec.model.layers")
    plan |= _pipeline(
        keys, plan["pp"], len(listed) if isinstance(listed, list) else layers
    )
    plan |= (
        _batch(keys, plan)
        | {"recompute": _recompute(keys), "dtype": "bf16"}
        | keys.fields()
    )
    if keys.form == "flags":
        keys.notes.append(
            "partial: what the flags leave out is the config function's, and here "
            "torchtitan's default"
        )
    return plan, keys


_DEGREES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_RESHARD = {"always": True, "never": False, "default": None}


def _shards(keys: Keys, model_devices: int, world_size: int | None) -> tuple[int, int]:
    """Copies and shards of data parallelism; -1 shards over the rest of the world."""
    name = "parallelism.data_parallel_shard_degree"
    copies = keys.count("parallelism.data_parallel_replicate_degree")
    shards = keys.get(name, -1)
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


def _pipeline(keys: Keys, pp: int, layers: int | None) -> dict:
    ends = [
        keys.count(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, 0)
        for end in ("first", "last")
    ]
    schedule = keys.get("parallelism.pipeline_parallel_schedule", "1F1B")
    each = 0
    if pp == 1:
        return {}
    kind, interleave = keys.word(
        "parallelism.pipeline_parallel_schedule", _SCHEDULES, "1F1B"
    )
    for name in (
        "module_fqns_per_model_part",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_split_points",
    ):
        if keys.get(f"parallelism.{name}"):
            raise ValueError(
                f"{keys.describe(f'parallelism.{name}')}: a plan has no stages or "
                "schedules of one's own"
            )
    if max(ends) > 1:
        raise ValueError(
            f"pipeline_parallel_..._stage_less_layers={max(ends)}: a plan takes off "
            "one layer at most"
        )
    if each := keys.count("parallelism.pipeline_parallel_layers_per_stage", 0, 0):
        if layers is None:
            raise ValueError(
                f"pipeline_parallel_layers_per_stage={each} needs the number of layers"
            )
        stages = -(-(layers + sum(ends)) // each)
        if stages % pp or (stages > pp) != (interleave > 1):
            made = (
                f"pipeline_parallel_layers_per_stage={each} makes {stages} stages "
                f"of {layers} layers"
            )
            raise ValueError(f"{made}, but pp={pp} and the schedule is {schedule}")
        interleave = stages // pp
    first, last = map(bool, ends)
    return {
        "schedule": kind,
        "interleave": interleave,
        "embedding_as_layer": first,
        "head_as_layer": last,
    }


def _recompute(keys: Keys) -> str:
    """Selective per operation stands as "selective": products are kept, the rest is
    recomputed.

    Modes stand in TOML and in dumps to June 2026. Later policies are told by the keys
    that they have.
    """
    stated = {
        key.split(".")[1]
        for key in keys.values
        if key.startswith("activation_checkpoint.")
    }
    old = keys.form != "flags" and not any(
        key.startswith("model_spec") for key in keys.values
    )
    for name in stated:
        keys.get(f"activation_checkpoint.{name}")
    if "mode" in stated or old:
        mode = str(
            keys.get("activation_checkpoint.mode")
            or ("none" if "mode" in stated else "selective")
        )
        option = str(
            keys.get("activation_checkpoint.selective_ac_option", "2" if old else "op")
        )
        if mode == "selective" and option != "op":
            if option != "1":
                raise ValueError(
                    f"selective_ac_option={option}: a plan recomputes every layer or "
                    "none"
                )
            mode = "full"
    elif not stated:
        mode = "none"
    else:
        mode = "memory_budget" if "memory_budget" in stated else "full"
        mode = (
            "selective" if any("force_recompute" in name for name in stated) else mode
        )
    if mode not in ("none", "selective", "full"):
        raise ValueError(
            f"activation_checkpoint.mode={mode}: a plan knows none, selective, full"
        )
    return mode


def _batch(keys: Keys, plan: dict) -> dict:
    """Samples of a forward pass, of the local batch, which a pipeline splits; batch and
    sequence of a step.
    """
    dp = plan["dp"]
    pp = plan["pp"]
    if "training.num_tokens_per_microbatch_per_dp_rank" in keys.values:
        return _token_batch(
            keys, dp * (keys.count("parallelism.num_pp_microbatches") if pp > 1 else 1)
        )
    local = keys.count("training.local_batch_size", 8)  # torchtitan's default
    name = "pipeline_parallel_microbatch_size"
    micro = local
    if pp > 1:
        count = keys.count(
            "parallelism.pipeline_parallel_microbatches", 0, 0
        )  # to April 2025
        micro = local // count if count else keys.count(f"parallelism.{name}")
        if local % micro:
            raise ValueError(f"{name}={micro} does not divide local_batch_size={local}")
    total = keys.count("training.global_batch_size", -1, -1)
    total = local * dp if total == -1 else total
    if total < 1 or total % (local * dp):
        raise ValueError(
            f"training.global_batch_size={total} is not a multiple of "
            f"local_batch_size x dp = {local} x {dp}"
        )
    return {
        "micro_batch": micro,
        "global_batch": total,
        "sequence": keys.count("training.seq_len", 2048),
    }


def _token_batch(keys: Keys, passes: int) -> dict:
    """The same where torchtitan counts tokens, since August 2026."""
    name = "training.num_tokens_per_microbatch_per_dp_rank"
    sequence = keys.count("training.max_context_length", 2048)
    tokens = keys.count(name)
    total = keys.count("training.num_tokens_per_train_step", -1, -1)
    if tokens % sequence:
        raise ValueError(
            f"{name}={tokens} is no multiple of max_context_length={sequence}: a "
            "plan has whole samples"
        )
    total = tokens * passes if total == -1 else total
    if total < 1 or total % (tokens * passes):
        raise ValueError(
            f"training.num_tokens_per_train_step={total} is no multiple of {tokens} "
            f"x {passes} tokens"
        )
    return {
        "micro_batch": tokens // sequence,
        "global_batch": total // sequence,
        "sequence": sequence,
    }
