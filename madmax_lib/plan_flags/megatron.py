"""Which plan do Megatron-LM's arguments state, or those that Megatron-Bridge hands to
it?
"""

import math
import re
from itertools import product

from madmax_lib.plan_flags.keys import Keys, is_known, rows_of
from madmax_lib.plan_flags.text import Source

__all__ = ["bridge", "megatron"]

_NARROW = ("bf16", "fp16", "torch.bfloat16", "torch.float16")
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_ENDS = {"account-for-embedding-in-pipeline-split": "embedding_as_layer"}
_ENDS |= {"account-for-loss-in-pipeline-split": "head_as_layer"}
_SECTIONS = (
    "model",
    "ddp",
    "dist",
    "train",
    "optimizer",
    "comm_overlap",
)  # of Megatron-Bridge
_AUTOMATIC = {
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "ddp-bucket-size": 128 * 2**20,
}


def megatron(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from flags by name, with or without dashes, or the MODEL_ARGS of
    a functional test.

    The number of devices: world_size, or torchrun's --nnodes and --nproc-per-node, or
    --data-parallel-size; without any the fewest that the degrees need.
    """
    values = {
        k.removeprefix("MODEL_ARGS."): v
        for k, v in source.values.items()
        if k.startswith("MODEL_ARGS.")
    }
    values = {
        k if "." in k else k.lstrip("-").replace("_", "-"): v
        for k, v in (values or source.values).items()
    }
    source.values = {
        key: value
        for key, value in values.items()
        if value is not None and value is not False
    }
    source.form = "flags"
    return _read(Keys("megatron-lm", source), world_size, layers)


def bridge(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from a ConfigContainer, or from overrides of a recipe, which say
    only part of it.
    """
    values = source.values
    whole = "ConfigContainer" in str(source.values.get("_target_"))
    source.values = {}
    source.form = "yaml"
    keys = Keys("megatron-lm", source)
    names = {row["key"]: row["means"][1:] for row in rows_of("megatron-bridge")}
    for key, value in values.items():
        section, _, name = key.partition(".")
        plain = names.get(
            key,
            name.replace("_", "-") if section in _SECTIONS and "." not in name else key,
        )
        if plain == key or value not in (
            None,
            False,
            -1,
        ):  # which Bridge writes for none
            keys.set(plain if is_known("megatron-lm", plain) else key, value, key)
    wide = [
        value
        for key, value in values.items()
        if key.endswith(".grad_reduce_in_fp32") and value is not None
    ]
    if precision := str(values.get("mixed_precision") or ""):
        wide = ["bf16" in precision]  # its name goes before what ddp says
        keys.values["bf16" if wide[0] else "fp16"] = True
    if wide:
        keys.values.pop("accumulate-allreduce-grads-in-fp32", None)
        keys.values[
            "accumulate-allreduce-grads-in-fp32" if wide[-1] else "grad-reduce-in-bf16"
        ] = True
    if (
        not whole
        and any(key.startswith("comm_overlap") for key in values)
        and keys.flag("use-distributed-optimizer")
    ):
        for name, value in _AUTOMATIC.items():  # where it is null, Bridge turns it on
            if (
                values.get(
                    "comm_overlap." + name.removeprefix("ddp-").replace("-", "_")
                )
                is None
            ):
                keys.values[name] = value
    keys.values = {
        "data-parallel-sharding-strategy": "no_shard",
        "optimizer-offload-fraction": 0.0,
    } | keys.values
    keys.get("mixed_precision")
    if not whole:
        keys.notes.append(
            "partial: what these overrides leave out is the recipe's, and here "
            "Megatron's default"
        )
    plan, keys = _read(keys, world_size, layers)
    stated = whole or plan["dtype"] != "fp32"
    return plan | {"dtype": plan["dtype"] if stated else None}, keys


def _read(keys: Keys, world_size: int | None, layers: int | None) -> tuple[dict, Keys]:
    plan = keys.fields()
    tp, pp, cp, ep = (plan.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    for name, field in _ENDS.items():
        plan |= {field: True} if keys.flag(name) else {}
    etp = keys.count("expert-tensor-parallel-size", tp)
    plan |= {"etp": etp} if etp != tp and (ep > 1 or keys.flag("num-experts")) else {}
    plan["dp"] = _data_parallel(
        keys, tp * pp * cp, ep, cp * tp // max(etp, 1), world_size
    )
    plan["sequence_parallel"] = (
        keys.flag("sequence-parallel") and tp > 1
    )  # Megatron-LM turns it off with tp=1
    layers = keys.count("num-layers", layers or 0, 0)
    plan |= _stages(keys, plan, layers)
    plan |= _sharding(keys, plan["dp"] * cp)
    plan |= _gradients(keys, plan["dp"] * cp) | {"recompute": _recompute(keys)}
    plan["overlap_gather"] |= keys.flag("overlap-param-gather") and plan["zero"] < 3
    for field in ("tp", "ep"):
        if plan.get(field, 1) == 1:
            plan.pop(f"overlap_{field}", None)
    if cp == 1:
        plan.pop("context", None)
    unfused = (
        keys.get("attention-backend") in ("unfused", "local")
        or keys.get("transformer-impl") == "local"
    )
    plan["attention"] = (
        "unfused" if unfused and not keys.flag("use-flash-attn") else "flash"
    )
    if plan.get("capacity", 0) < 0:
        plan["capacity"] = 0.0
    if keys.flag("optimizer-cpu-offload"):
        if (share := keys.get("optimizer-offload-fraction", 1)) != 1:
            raise ValueError(
                f"{keys.describe('optimizer-offload-fraction')}: a plan offloads all of "
                f"it, not {share}"
            )
        plan["offload"] = "optimizer"
    plan["dtype"] = (
        "bf16" if keys.flag("bf16") else "fp16" if keys.flag("fp16") else "fp32"
    )
    if keys.flag("step-batch-size-schedule"):
        plan["global_batch"] = None
        keys.notes.append(
            f"{keys.describe('step-batch-size-schedule')}: no single global batch"
        )
    elif "micro_batch" in plan:
        plan.setdefault("global_batch", plan["micro_batch"] * plan["dp"])
    return plan, keys


def _data_parallel(
    keys: Keys, model_devices: int, ep: int, beside: int, world_size: int | None
) -> int:
    stated = [world_size] if world_size is not None else []
    if "world-size" in keys.values:
        stated.append(keys.count("world-size"))
    launched = (
        keys.count("nproc-per-node", 0, 0) * keys.count("nnodes")
        if not (stated and keys.expanded)
        else 0
    )
    stated += [launched] if launched else []
    if "data-parallel-size" in keys.values:
        stated.append(keys.count("data-parallel-size") * model_devices)
    if len(set(stated)) > 1:
        raise ValueError(
            "the flags give different numbers of devices: "
            f"{', '.join(map(str, stated))}"
        )
    devices = stated[0] if stated else model_devices * max(-(-ep // beside), 1)
    if devices % model_devices:
        raise ValueError(
            f"tp x pp x cp = {model_devices} does not divide world size {devices}"
        )
    return devices // model_devices


def _stages(keys: Keys, plan: dict, layers: int) -> dict:
    """Megatron-LM counts embedding and loss as layers only for equal stages, and cuts
    stated ends into equal chunks.
    """
    pp = plan.get("pp", 1)
    v = plan.get("interleave", 1)
    extra = sum(field in plan for field in _ENDS.values())
    if layout := keys.get("pipeline-model-parallel-layout"):
        if v > 1 or keys.get("num-layers-per-virtual-pipeline-stage"):
            raise ValueError(
                f"{keys.describe('pipeline-model-parallel-layout')} and virtual stages "
                "exclude each other"
            )
        return _layout(str(layout), pp, keys)
    if each := keys.count("num-layers-per-virtual-pipeline-stage", 0, 0):
        name = f"--num-layers-per-virtual-pipeline-stage={each}"
        if "interleave" in plan:
            both = (
                "--num-layers-per-virtual-pipeline-stage and "
                "--num-virtual-stages-per-pipeline-rank"
            )
            raise ValueError(f"{both} exclude each other")
        if not layers:
            raise ValueError(f"{name} needs --num-layers")
        if (layers + extra) % (pp * each):
            counted = f"{layers} layers" if not extra else f"{layers} + {extra} layers"
            raise ValueError(f"{name}: pp x {each} does not divide {counted}")
        v = (layers + extra) // pp // each
    for end in ("first", "last"):
        if plan.get(f"{end}_layers", 0) % v:
            name = f"--decoder-{end}-pipeline-num-layers={plan[f'{end}_layers']}"
            raise ValueError(f"{name} is not a multiple of the {v} virtual stages")
    if extra and layers and (layers + extra) % (pp * v):
        rule = f"{layers} + {extra} layers do not divide over {pp * v} stages"
        raise ValueError(f"--account-for-...-in-pipeline-split: {rule}")
    group = keys.count("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if v > 1 and group != pp:
        raise ValueError(
            f"{keys.describe('microbatch-group-size-per-virtual-pipeline-stage')}: a plan "
            f"has groups of pp={pp}"
        )
    return {"interleave": v} if v > 1 else {}


def _layout(layout: str, pp: int, keys: Keys) -> dict:
    """Fields of equal stages but for their ends: `Et*3|(tt|)*29,m|L` has E embedding, t
    layer, m MTP layer, L loss.
    """
    text = layout.replace(",", "")
    before = ""
    while text != before:
        before = text
        text = re.sub(
            r"\(([^()]*)\)\*(\d+)|(\w)\*(\d+)",
            lambda m: (m[1] or m[3]) * int(m[2] or m[4]),
            text,
        )
    stages = text.split("|")
    problem = (
        f"{keys.describe('pipeline-model-parallel-layout')}: its stages of "
        f"{[s.count('t') for s in stages]} layers"
    )
    if set(text) - set("EtL|") or len(stages) % pp:
        raise ValueError(
            f"{problem}, or what else they hold, could change the plan, which has "
            f"layers over pp={pp} alone"
        )
    counts = [stage.count("t") for stage in stages]
    v = len(stages) // pp
    fields = {"interleave": v} if v > 1 else {}
    for head, embedding in product((0, 1), (0, 1)):
        if len({*counts[1:-1], counts[0] + embedding, counts[-1] + head}) == 1:
            return fields | _ends(embedding, head)
    if v == 1 and len(set(counts[1:-1])) <= 1:
        return {"first_layers": counts[0], "last_layers": counts[-1]}
    raise ValueError(
        f"{problem} could change the plan, whose stages are equal but for the ends"
    )


def _ends(embedding: int, head: int) -> dict:
    return {
        field: True
        for field, counts in zip(_ENDS.values(), (embedding, head), strict=True)
        if counts
    }


def _sharding(keys: Keys, replicas: int) -> dict:
    fsdp = keys.flag("use-megatron-fsdp")
    torch = keys.flag("use-torch-fsdp2")
    strategy = keys.word(
        "data-parallel-sharding-strategy", _STRATEGIES, "optim_grads_params"
    )
    keeps = keys.flag("torch-fsdp2-no-reshard-after-forward") and torch
    zero = (
        strategy
        if fsdp
        else (2 if keeps else 3)
        if torch
        else int(keys.flag("use-distributed-optimizer"))
    )
    copies = keys.count("num-distributed-optimizer-instances")
    if replicas % copies:
        raise ValueError(
            f"--num-distributed-optimizer-instances={copies} does not divide dp x cp "
            f"= {replicas}"
        )
    shard = {"shard": replicas // copies} if copies > 1 else {}
    return {"zero": zero, "overlap_gather": keeps} | shard


def _gradients(keys: Keys, replicas: int) -> dict:
    """Megatron-LM adds bf16 gradients up, and reduces them, in fp32; without overlap in
    one piece at the end.
    """
    narrow = keys.flag("grad-reduce-in-bf16") | (
        keys.get("main-grads-dtype") in _NARROW
    )
    fp32 = keys.flag("accumulate-allreduce-grads-in-fp32") or (
        keys.flag("bf16") and not narrow
    )
    fp32 |= keys.get("megatron-fsdp-grad-comm-dtype") == "fp32"
    default = max(
        40_000_000, 1_000_000 * replicas
    )  # parameters; megatron/core/distributed, DistributedDataParallel
    size = keys.count("ddp-bucket-size", default)
    late = not keys.flag("overlap-grad-reduce")
    return {
        "reduce_fp32": fp32,
        "bucket_bytes": math.inf if late else (4.0 if fp32 else 2.0) * size,
    }


def _recompute(keys: Keys) -> str:
    granularity = keys.get("recompute-granularity", "")
    short = keys.flag("recompute-activations")
    if short and granularity not in ("", "selective"):
        raise ValueError(
            "--recompute-activations is selective, but "
            f"--recompute-granularity={granularity}"
        )
    if granularity not in ("", "full", "selective"):
        raise ValueError(
            f"{keys.describe('recompute-granularity')} is not full or selective"
        )
    if granularity == "full":
        if keys.get("recompute-method") is None:
            raise ValueError("--recompute-granularity=full needs --recompute-method")
        if (
            keys.get("recompute-method") != "uniform"
            or keys.count("recompute-num-layers") != 1
        ):
            several = (
                "recompute-num-layers"
                if keys.get("recompute-method") == "uniform"
                else "recompute-method"
            )
            raise ValueError(
                f"{keys.describe(several)}: a plan recomputes every layer or none, each "
                "by itself"
            )
        return "full"
    if granularity or short:
        if (modules := str(keys.get("recompute-modules", "core_attn"))).strip(
            "[]"
        ) != "core_attn":
            raise ValueError(
                f"--recompute-modules={modules}: a plan recomputes core_attn alone"
            )
        return "selective"
    return "none"
