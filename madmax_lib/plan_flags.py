"""Which plan do the flags of Megatron-LM or the configuration of torchtitan describe? Fields of a `Plan`, as a dict.

Flags that say nothing about the plan (model shape, data, optimizer, logging) are passed over. A flag that could change
the plan and is not known, or that a plan cannot express, is refused in one line: ValueError with flag, value and rule.
"""

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["megatron", "torchtitan"]

# words in a flag that may change how a step is laid out; what comes after has them but does not
_MATTERS = re.compile(
    r"parallel|pipeline|virtual|recompute|checkpoint-activations|shard|fsdp|zero|offload|bucket|"
    r"overlap|micro-batch|distributed-optimizer|mapping|capacity"
)
_HARMLESS = re.compile(
    r"^((no-)?(ckpt|overlap-p2p)-|(no-)?(tp-comm|async)-|distributed-|data-parallel-random-init|moe-pad|align-|ddp-pad|"
    r"zero-centered|overlap-moe|moe-shared-expert-overlap|rampup|dataloader)|embedding-init"
)
_COUNTS = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "micro-batch-size": "micro_batch",
    "decoder-first-pipeline-num-layers": "first_layers",
    "decoder-last-pipeline-num-layers": "last_layers",
    "num-virtual-stages-per-pipeline-rank": "interleave",
}
_ENDS = {
    "account-for-embedding-in-pipeline-split": "embedding_as_layer",
    "account-for-loss-in-pipeline-split": "head_as_layer",
}
_OVERLAPS = {"tp-comm-overlap": "overlap_tp", "overlap-moe-expert-parallel-comm": "overlap_ep"}
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_EXCHANGES = {"p2p": "ring", "a2a": "ulysses"}
_READ_ELSEWHERE = {
    "world-size", "nnodes", "nproc-per-node", "data-parallel-size", "num-layers", "sequence-parallel",
    "recompute-method", "recompute-granularity", "recompute-activations", "recompute-num-layers",
    "recompute-modules", "checkpoint-activations", "cp-comm-type", "use-distributed-optimizer",
    "num-distributed-optimizer-instances", "use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp",
    "data-parallel-sharding-strategy", "overlap-grad-reduce", "overlap-param-gather", "ddp-bucket-size",
    "num-layers-per-virtual-pipeline-stage", "expert-tensor-parallel-size", "moe-expert-capacity-factor",
    "optimizer-cpu-offload", "optimizer-offload-fraction",
}  # fmt: skip


def megatron(args: str | Sequence[str] | Mapping[str, object], world_size: int | None = None) -> dict:
    """Fields of a plan from Megatron-LM's command line, or from its arguments by name.

    The number of devices: world_size, or torchrun's --nnodes and --nproc-per-node, or --data-parallel-size; without any
    the fewest the degrees need. Raises ValueError in the flag's words.
    """
    flags = _from_mapping(args) if isinstance(args, Mapping) else _from_words(args)
    known = _READ_ELSEWHERE | set(_COUNTS) | set(_ENDS)
    for name in flags:
        if name not in known and _MATTERS.search(name) and not _HARMLESS.search(name):
            raise ValueError(f"--{name}={flags[name]}: not known, and it could change the plan")
    plan = {field: _count(flags, name) for name, field in _COUNTS.items() if name in flags}
    plan |= {field: True for name, field in _ENDS.items() if name in flags}
    tp, pp, cp = (plan.get(name, 1) for name in ("tp", "pp", "cp"))
    etp = _count(flags, "expert-tensor-parallel-size", tp)
    plan |= {"etp": etp} if etp != tp else {}
    plan["dp"] = _data_parallel(flags, tp * pp * cp, plan.get("ep", 1), cp * tp // max(etp, 1), world_size)
    plan["sequence_parallel"] = "sequence-parallel" in flags and tp > 1  # Megatron-LM turns it off with tp=1
    if "num-layers-per-virtual-pipeline-stage" in flags:
        plan["interleave"] = _interleave(flags, pp)
    _check_ends(flags, plan)
    plan |= _sharding(flags, plan["dp"] * cp) | _gradients(flags, plan["dp"] * cp) | _recompute(flags)
    plan["overlap_gather"] = "overlap-param-gather" in flags and plan["zero"] < 3
    plan |= {field: True for name, field in _OVERLAPS.items() if name in flags and plan.get(field[-2:], 1) > 1}
    if "cp-comm-type" in flags and cp > 1:
        plan["context"] = _choice("--cp-comm-type", flags["cp-comm-type"], _EXCHANGES)
    unfused = flags.get("attention-backend") in ("unfused", "local") or flags.get("transformer-impl") == "local"
    plan["attention"] = "unfused" if unfused and "use-flash-attn" not in flags else "flash"
    if "moe-expert-capacity-factor" in flags:
        plan["capacity"] = float(flags["moe-expert-capacity-factor"])
    if "optimizer-cpu-offload" in flags:
        if float(share := flags.get("optimizer-offload-fraction", "1")) != 1.0:
            raise ValueError(f"--optimizer-offload-fraction={share}: a plan offloads all of it")
        plan["offload"] = "optimizer"
    return plan


def _from_words(args: str | Sequence[str]) -> dict[str, str]:
    """Flags of a command line with their first value; programs and further values are passed over.

    >>> _from_words("torchrun --nnodes 2 train.py --bf16 --micro-batch-size=4")
    {'nnodes': '2', 'bf16': '', 'micro-batch-size': '4'}
    """
    words = [str(word) for word in args] if not isinstance(args, str) else shlex.split(args.replace("\\\n", " "))
    given: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            given.append([name.replace("_", "-"), *([value] if value else [])])
        elif given:
            given[-1].append(word)
    flags: dict[str, str] = {}
    for name, *values in given:
        value = values[0] if values else ""
        if flags.get(name, value) != value:
            raise ValueError(f"--{name} is given twice, as {flags[name]} and as {value}")
        flags[name] = value
    return flags


def _from_mapping(args: Mapping[str, object]) -> dict[str, str]:
    """Arguments by name, with or without dashes; None and False are not set."""
    given = {name: value for name, value in args.items() if value is not None and value is not False}
    return {str(k).lstrip("-").replace("_", "-"): "" if v is True else str(v) for k, v in given.items()}


def _count(flags: Mapping[str, str], name: str, default: int = 1) -> int:
    text = flags.get(name, str(default))
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"--{name}={text} is not a whole number")
    return int(text)


def _choice(name: str, value: str, known: Mapping[str, object]):
    if value not in known:
        raise ValueError(f"{name}={value}: a plan knows {', '.join(map(str, known))}")
    return known[value]


def _data_parallel(flags: Mapping[str, str], model_devices: int, ep: int, beside: int, world_size: int | None) -> int:
    stated = [world_size] if world_size is not None else []
    if "world-size" in flags:
        stated.append(_count(flags, "world-size"))
    if "nproc-per-node" in flags:
        stated.append(_count(flags, "nproc-per-node") * _count(flags, "nnodes"))
    if "data-parallel-size" in flags:
        stated.append(_count(flags, "data-parallel-size") * model_devices)
    if len(set(stated)) > 1:
        raise ValueError(f"the flags give different numbers of devices: {', '.join(map(str, stated))}")
    devices = stated[0] if stated else model_devices * max(-(-ep // beside), 1)
    if devices % model_devices:
        raise ValueError(f"tp x pp x cp = {model_devices} does not divide world size {devices}")
    return devices // model_devices


def _interleave(flags: Mapping[str, str], pp: int) -> int:
    each = _count(flags, "num-layers-per-virtual-pipeline-stage")
    if "num-virtual-stages-per-pipeline-rank" in flags:
        both = "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
        raise ValueError(f"{both} exclude each other")
    if "num-layers" not in flags:
        raise ValueError(f"--num-layers-per-virtual-pipeline-stage={each} needs --num-layers")
    layers = _count(flags, "num-layers")
    if not each or layers % (pp * each):
        raise ValueError(f"--num-layers-per-virtual-pipeline-stage={each}: pp x {each} does not divide {layers} layers")
    return layers // (pp * each)


def _check_ends(flags: Mapping[str, str], plan: dict) -> None:
    """Megatron-LM counts embedding and loss as layers only for equal stages, and cuts stated ends into equal chunks."""
    for end in ("first", "last"):
        if plan.get(f"{end}_layers", 0) % plan.get("interleave", 1):
            name = f"--decoder-{end}-pipeline-num-layers={plan[f'{end}_layers']}"
            raise ValueError(f"{name} is not a multiple of the {plan['interleave']} virtual stages")
    stages, extra = plan.get("pp", 1) * plan.get("interleave", 1), sum(name in flags for name in _ENDS)
    layers = _count(flags, "num-layers", 0)
    if extra and layers and (layers + extra) % stages:
        raise ValueError(
            f"--account-for-...-in-pipeline-split: {layers} + {extra} layers do not divide over {stages} stages"
        )


def _sharding(flags: Mapping[str, str], replicas: int) -> dict:
    if {"use-megatron-fsdp", "use-custom-fsdp"} & set(flags):
        strategy = flags.get("data-parallel-sharding-strategy", "no_shard")
        zero = _choice("--data-parallel-sharding-strategy", strategy, _STRATEGIES)
    else:
        zero = 3 if "use-torch-fsdp2" in flags else int("use-distributed-optimizer" in flags)
    copies = _count(flags, "num-distributed-optimizer-instances")
    if copies == 1:
        return {"zero": zero}
    if replicas % copies:
        raise ValueError(f"--num-distributed-optimizer-instances={copies} does not divide dp x cp = {replicas}")
    return {"zero": zero, "shard": replicas // copies}


def _gradients(flags: Mapping[str, str], replicas: int) -> dict:
    """Megatron-LM adds bf16 gradients up, and reduces them, in fp32; without overlap in one piece at the end."""
    fp32 = "accumulate-allreduce-grads-in-fp32" in flags or ("bf16" in flags and "grad-reduce-in-bf16" not in flags)
    if "overlap-grad-reduce" not in flags:
        return {"reduce_fp32": fp32, "bucket_bytes": float("inf")}
    default = max(40_000_000, 1_000_000 * replicas)  # parameters; megatron/core/distributed, DistributedDataParallel
    return {"reduce_fp32": fp32, "bucket_bytes": (4.0 if fp32 else 2.0) * _count(flags, "ddp-bucket-size", default)}


def _recompute(flags: Mapping[str, str]) -> dict:
    granularity = flags.get("recompute-granularity", "")
    if "recompute-activations" in flags and granularity not in ("", "selective"):
        raise ValueError(f"--recompute-activations is selective, but --recompute-granularity={granularity}")
    if granularity not in ("", "full", "selective"):
        raise ValueError(f"--recompute-granularity={granularity} is not full or selective")
    if flags.get("recompute-method") == "block":
        raise ValueError("--recompute-method=block: a plan recomputes every layer or none")
    if flags.get("recompute-modules", "core_attn") != "core_attn":
        raise ValueError(f"--recompute-modules={flags['recompute-modules']}: a plan recomputes core_attn alone")
    if "checkpoint-activations" in flags or granularity == "full":
        return {"recompute": "full"}
    return {"recompute": "selective" if granularity or "recompute-activations" in flags else "none"}


_TITAN_SCHEDULES = {"1f1b": ("1f1b", 1), "gpipe": ("gpipe", 1), "interleaved1f1b": ("1f1b", 2)}
_TITAN_KNOWN = {
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree",
    "pipeline_parallel_degree", "expert_parallel_degree", "expert_tensor_parallel_degree", "fsdp_reshard_after_forward",
    "pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage", "pipeline_parallel_microbatch_size",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
    "disable_loss_parallel", "enable_async_tensor_parallel", "enable_compiled_autograd",
    "context_parallel_rotate_method",
}  # fmt: skip


def torchtitan(source: str | Path, world_size: int | None = None, layers: int | None = None) -> dict:
    """Fields of a plan from a torchtitan configuration, a TOML file or its text.

    world_size: devices, needed where data_parallel_shard_degree is -1. layers: of the model, needed where
    pipeline_parallel_layers_per_stage is set. Raises ValueError in the key's words, FileNotFoundError for no file.
    """
    config = _toml(source)
    degrees = config.get("parallelism", {})
    if unknown := sorted(set(degrees) - _TITAN_KNOWN):
        raise ValueError(f"parallelism.{unknown[0]}={degrees[unknown[0]]}: not known, and it could change the plan")
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    plan = {short: _whole(degrees, f"{name}_parallel_degree", 1) for short, name in names.items()}
    copies, shards = _titan_shards(degrees, plan["tp"] * plan["pp"] * plan["cp"], world_size)
    plan["dp"] = copies * shards
    spread = shards * plan["cp"]
    reshard = degrees.get("fsdp_reshard_after_forward", "default")
    always = reshard == "always" or (reshard == "default" and plan["pp"] == 1)
    plan["zero"] = 0 if spread == 1 else 3 if always else 2
    plan |= {"shard": spread} if copies > 1 and spread > 1 else {}
    plan |= {"overlap_gather": True} if plan["zero"] == 2 else {}
    etp = _whole(degrees, "expert_tensor_parallel_degree", 1)
    plan |= {"etp": etp} if plan["ep"] > 1 and etp != plan["tp"] else {}
    plan |= {"overlap_tp": True} if degrees.get("enable_async_tensor_parallel") and plan["tp"] > 1 else {}
    training = config.get("training", {})
    plan["reduce_fp32"] = training.get("mixed_precision_reduce", "float32") == "float32"
    plan |= {"offload": "all"} if training.get("enable_cpu_offload") else {}
    plan |= _titan_pipeline(degrees, plan["pp"], layers) | {"recompute": _titan_recompute(config)}
    return plan | {"micro_batch": _titan_micro_batch(degrees, training, plan["pp"])}


def _toml(source: str | Path) -> dict:
    text = str(source)
    if isinstance(source, Path) or ("\n" not in text and "[" not in text):
        text = Path(source).read_text()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source if text != source else 'configuration'}: not TOML ({error})") from None


def _whole(table: Mapping, name: str, default: int, least: int = 1) -> int:
    value = table.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def _titan_shards(degrees: Mapping, model_devices: int, world_size: int | None) -> tuple[int, int]:
    """Copies and shards of data parallelism; -1 shards over the rest of the world."""
    copies, shards = _whole(degrees, "data_parallel_replicate_degree", 1), degrees.get("data_parallel_shard_degree", -1)
    if shards == -1 and world_size is None:
        raise ValueError("data_parallel_shard_degree=-1 is the rest of the world: world_size is needed")
    if shards == -1:
        shards = world_size // (model_devices * copies)
    shards = _whole({"data_parallel_shard_degree": shards}, "data_parallel_shard_degree", 1)
    if world_size is not None and copies * shards * model_devices != world_size:
        product = f"{copies} x {shards} x {model_devices}"
        raise ValueError(f"replicate x shard x (tp x pp x cp) = {product} is not the world size {world_size}")
    return copies, shards


def _titan_pipeline(degrees: Mapping, pp: int, layers: int | None) -> dict:
    if pp == 1:
        return {}
    name = degrees.get("pipeline_parallel_schedule", "1F1B")
    schedule, interleave = _choice("pipeline_parallel_schedule", name.lower(), _TITAN_SCHEDULES)
    ends = [_whole(degrees, f"pipeline_parallel_{end}_stage_less_layers", 1, 0) for end in ("first", "last")]
    if max(ends) > 1:
        raise ValueError(f"pipeline_parallel_..._stage_less_layers={max(ends)}: a plan takes off one layer at most")
    if each := degrees.get("pipeline_parallel_layers_per_stage"):
        if layers is None:
            raise ValueError(f"pipeline_parallel_layers_per_stage={each} needs the number of layers")
        stages = -(-(layers + sum(ends)) // _whole(degrees, "pipeline_parallel_layers_per_stage", 1))
        if stages % pp or (stages > pp) != (interleave > 1):
            made = f"pipeline_parallel_layers_per_stage={each} makes {stages} stages of {layers} layers"
            raise ValueError(f"{made}, but pp={pp} and the schedule is {name}")
        interleave = stages // pp
    first, last = map(bool, ends)
    return {"schedule": schedule, "interleave": interleave, "embedding_as_layer": first, "head_as_layer": last}


def _titan_recompute(config: Mapping) -> str:
    """Selective per operation stands as "selective": products are kept, the rest is recomputed."""
    table = config.get("activation_checkpoint", {})
    mode, option = table.get("mode", "selective"), str(table.get("selective_ac_option", "op"))
    if mode == "selective" and option != "op":
        if option != "1":
            raise ValueError(f"selective_ac_option={option}: a plan recomputes every layer or none")
        mode = "full"
    return _choice("activation_checkpoint.mode", mode, {"none": "none", "selective": "selective", "full": "full"})


def _titan_micro_batch(degrees: Mapping, training: Mapping, pp: int) -> int:
    """Samples of a forward pass: of the local batch, which a pipeline splits."""
    name = "local_batch_size" if "local_batch_size" in training else "batch_size"
    local = _whole(training, name, 8)  # torchtitan's default
    if pp == 1:
        return local
    size = _whole(degrees, "pipeline_parallel_microbatch_size", 1)
    if local % size:
        raise ValueError(f"pipeline_parallel_microbatch_size={size} does not divide {name}={local}")
    return size
