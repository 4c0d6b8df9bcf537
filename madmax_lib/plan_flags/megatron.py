"""The plan of Megatron-LM's arguments, or of those that Megatron-Bridge hands to it."""

import math
import re
from itertools import groupby, product

from madmax_lib.plan.columns import MODULES
from madmax_lib.plan.layout import Chunk, layout_chunks, layout_text
from madmax_lib.plan_flags.keys import WORDS, Keys, is_known, rows_of
from madmax_lib.plan_flags.text import Source

_NARROW = ("bf16", "fp16", "torch.bfloat16", "torch.float16")
_STRATEGIES = WORDS["megatron_fsdp"]
_LETTERS = WORDS["megatron_layout"]
_ENDS = {  # flags of ends that count as layers
    "account-for-embedding-in-pipeline-split": "embedding_as_layer",
    "account-for-loss-in-pipeline-split": "head_as_layer",
}
# sections of Megatron-Bridge whose keys are Megatron-LM's arguments
_SECTIONS = WORDS["bridge_sections"]
# keys of comm_overlap that Bridge turns on where they are null
_AUTOMATIC = WORDS["bridge_automatic"]
# of DistributedDataParallel in megatron/core/distributed
_LEAST_BUCKET = 40_000_000  # parameters
_BUCKET_PER_RANK = 1_000_000


def megatron(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from flags by name, with or without dashes, or the MODEL_ARGS of
    a functional test.

    The number of devices: world_size, or torchrun's --nnodes and --nproc-per-node, or
    --data-parallel-size; without any the fewest that the degrees need.
    """
    prefix = "MODEL_ARGS."
    arguments = {
        key.removeprefix(prefix): value
        for key, value in source.values.items()
        if key.startswith(prefix)
    }
    values = {}
    for key, value in (arguments or source.values).items():
        if value is not None and value is not False:
            # dotted keys are of other sections
            flag = key if "." in key else key.lstrip("-").replace("_", "-")
            values[flag] = value
    source.values = values
    source.form = "flags"
    return _read(Keys("megatron-lm", source), world_size, layers)


def bridge(
    source: Source, world_size: int | None, layers: int | None
) -> tuple[dict, Keys]:
    """Fields of a plan from a ConfigContainer, or from overrides of a recipe, which say
    only part of it.
    """
    values = source.values
    is_complete = "ConfigContainer" in str(values.get("_target_"))
    source.values = {}
    source.form = "yaml"
    keys = Keys("megatron-lm", source)
    _put_arguments(keys, values)
    _put_reduce_dtype(keys, values)
    overlaps = any(key.startswith("comm_overlap") for key in values)
    if not is_complete and overlaps and keys.flag("use-distributed-optimizer"):
        for name, (flag, value) in _AUTOMATIC.items():
            if values.get(f"comm_overlap.{name}") is None:
                keys.values[flag] = value
    # Bridge's own defaults
    keys.values.setdefault("data-parallel-sharding-strategy", "no_shard")
    keys.values.setdefault("optimizer-offload-fraction", 0.0)
    # its name was read above: it is understood
    precision = str(keys.get("mixed_precision"))
    if re.search("fp8|fp4", precision):
        keys.notes.append(
            f"mixed_precision={precision}: 8 and 4 bits are of the products"
        )
    if not is_complete:
        keys.notes.append(
            "partial: what these overrides omit comes from the recipe; here, from "
            "Megatron's defaults"
        )
    plan, keys = _read(keys, world_size, layers)
    if not is_complete and plan["dtype"] == "fp32":
        plan["dtype"] = None  # the recipe's
    return plan, keys


def _put_arguments(keys, values):
    """Hand the keys of Bridge to Megatron-LM's names, where it has one."""
    names = {row["key"]: row["means"][1:] for row in rows_of("megatron-bridge")}
    for key, value in values.items():
        section, _, name = key.partition(".")
        is_argument = section in _SECTIONS and "." not in name
        flag = names.get(key, name.replace("_", "-") if is_argument else key)
        # Bridge writes None, False or -1 for none
        if flag == key or value not in (None, False, -1):
            keys.set(flag if is_known("megatron-lm", flag) else key, value, key)


def _put_reduce_dtype(keys, values):
    """Say in Megatron-LM's flags in what gradients are reduced; the last key counts."""
    in_fp32 = [
        value
        for key, value in values.items()
        if key.endswith(".grad_reduce_in_fp32") and value is not None
    ]
    if precision := str(values.get("mixed_precision") or ""):
        in_fp32 = ["bf16" in precision]  # its name goes before what ddp says
        keys.values["bf16" if in_fp32[0] else "fp16"] = True
    if in_fp32:
        fp32 = "accumulate-allreduce-grads-in-fp32"
        keys.values.pop(fp32, None)
        keys.values[fp32 if in_fp32[-1] else "grad-reduce-in-bf16"] = True


def _read(keys, world_size, layers):
    plan = keys.fields()
    tp = plan.get("tp", 1)
    cp = plan.get("cp", 1)
    ep = plan.get("ep", 1)
    for flag, field in _ENDS.items():
        if keys.flag(flag):
            plan[field] = True
    etp = keys.count("expert-tensor-parallel-size", tp)
    if etp != tp and (ep > 1 or keys.flag("num-experts")):
        plan["etp"] = etp
    # what ep needs at least of dp: experts lie over dp x cp x tp / etp
    least_dp = max(-(-ep // max(cp * tp // max(etp, 1), 1)), 1)
    plan["dp"] = _data_parallel(keys, tp * plan.get("pp", 1) * cp, least_dp, world_size)
    # Megatron-LM turns it off with tp=1
    plan["sequence_parallel"] = keys.flag("sequence-parallel") and tp > 1
    plan |= _stages(keys, plan, keys.count("num-layers", layers or 0, 0))
    plan |= _sharding(keys, plan["dp"] * cp) | _gradients(keys, plan["dp"] * cp)
    plan["recompute"] = _recompute(keys)
    # FSDP gathers in its passes anyway
    plan["overlap_gather"] |= keys.flag("overlap-param-gather") and plan["zero"] < 3
    plan |= _attention(keys) | _offload(keys)
    # without the degree they say nothing
    for field, degree in (("overlap_tp", tp), ("overlap_ep", ep), ("context", cp)):
        if degree == 1:
            plan.pop(field, None)
    if plan.get("capacity", 0) < 0:  # Megatron-LM's word for none
        plan["capacity"] = 0.0
    plan["dtype"] = next((d for d in ("bf16", "fp16") if keys.flag(d)), "fp32")
    # the batch grows while the model trains
    if keys.flag("step-batch-size-schedule"):
        plan["global_batch"] = None
        schedule = keys.describe("step-batch-size-schedule")
        keys.notes.append(f"{schedule}: no single global batch")
    elif "micro_batch" in plan:
        plan.setdefault("global_batch", plan["micro_batch"] * plan["dp"])
    return plan, keys


def _attention(keys):
    is_unfused = (
        keys.get("attention-backend") in ("unfused", "local")
        or keys.get("transformer-impl") == "local"
    )
    is_flash = not is_unfused or keys.flag("use-flash-attn")
    return {"attention": "flash" if is_flash else "unfused"}


def _offload(keys):
    if not keys.flag("optimizer-cpu-offload"):
        return {}
    share = keys.get("optimizer-offload-fraction", 1)
    if share != 1:
        raise ValueError(
            f"{keys.describe('optimizer-offload-fraction')}: a plan offloads all of "
            f"it, not {share}"
        )
    return {"offload": "optimizer"}


def _data_parallel(keys, model_devices, least_dp, world_size):
    """dp, from the number of devices that the caller, the flags or the launcher give."""
    stated = [world_size] if world_size is not None else []
    # a dump of arguments has it
    if "world-size" in keys.values:
        stated.append(keys.count("world-size"))
    # variables that a script works out may not be those of this run
    if not (stated and keys.expanded):
        launched = keys.count("nproc-per-node", 0, 0) * keys.count("nnodes")
        stated += [launched] if launched else []
    if "data-parallel-size" in keys.values:
        stated.append(keys.count("data-parallel-size") * model_devices)
    if len(set(stated)) > 1:
        raise ValueError(
            "the flags give different numbers of devices: "
            f"{', '.join(map(str, stated))}"
        )
    devices = stated[0] if stated else model_devices * least_dp
    if devices % model_devices:
        raise ValueError(
            f"tp x pp x cp = {model_devices} does not divide world size {devices}"
        )
    return devices // model_devices


def _stages(keys, plan, layers):
    """Megatron-LM counts embedding and loss as layers only for equal stages, and cuts
    stated ends into equal chunks.
    """
    pp = plan.get("pp", 1)
    chunks = plan.get("interleave", 1)
    extra = sum(field in plan for field in _ENDS.values())
    each = "num-layers-per-virtual-pipeline-stage"
    # a layout says all stages
    if keys.get("pipeline-model-parallel-layout"):
        return _layout(plan, layers, keys)
    if keys.count(each, 0, 0):
        if "interleave" in plan:
            raise ValueError(
                f"--{each} and --num-virtual-stages-per-pipeline-rank exclude each other"
            )
        chunks = _chunks(keys.count(each), layers, extra, pp)
    for end in ("first", "last"):
        count = plan.get(f"{end}_layers", 0)
        if count % chunks:
            raise ValueError(
                f"--decoder-{end}-pipeline-num-layers={count} is not a multiple of the "
                f"{chunks} virtual stages"
            )
    if extra and layers and (layers + extra) % (pp * chunks):
        raise ValueError(
            f"--account-for-...-in-pipeline-split: {layers} + {extra} layers do not "
            f"divide over {pp * chunks} stages"
        )
    # micro-batches that a stage passes through one chunk before the next
    group = keys.count("microbatch-group-size-per-virtual-pipeline-stage", pp)
    if chunks > 1 and group != pp:
        raise ValueError(
            f"{keys.describe('microbatch-group-size-per-virtual-pipeline-stage')}: a "
            f"plan has groups of pp={pp}"
        )
    return {"interleave": chunks} if chunks > 1 else {}


def _chunks(each, layers, extra, pp):
    """Chunks of a stage, of `each` layers; extra: ends that count as layers."""
    name = f"--num-layers-per-virtual-pipeline-stage={each}"
    if not layers:
        raise ValueError(f"{name} needs --num-layers")
    counted = layers + extra
    if counted % (pp * each):
        text = f"{layers} + {extra} layers" if extra else f"{layers} layers"
        raise ValueError(f"{name}: pp x {each} does not divide {text}")
    return counted // pp // each


def _layout(plan, layers, keys):
    """Fields of the stages of a layout: of equal ones but for their ends, else of a
    plan's layout.
    """
    chunks = _laid_out(keys)
    name = keys.describe("pipeline-model-parallel-layout")
    pp = plan.get("pp", 1)
    counts = [chunk.layers for chunk in chunks]
    stated = layers or sum(counts)
    if len(chunks) % pp or sum(counts) != stated:
        raise ValueError(
            f"{name} has {sum(counts)} layers in {len(chunks)} stages, for {stated} "
            f"layers over pp={pp}"
        )
    interleave = len(chunks) // pp
    if plan.get("interleave", interleave) != interleave:
        raise ValueError(
            f"{name} has {interleave} virtual stages, not {plan['interleave']}"
        )
    fields = {"interleave": interleave} if interleave > 1 else {}
    if pp == 1:
        return fields
    first, *middle, last = counts
    predicts = sum(chunk.predictions for chunk in chunks)
    if keys.count("mtp-num-layers", predicts, 0) != predicts:
        raise ValueError(
            f"{name} has {predicts} MTP layers, but {keys.describe('mtp-num-layers')}"
        )
    # equal stages, if embedding or head count as a layer
    for head, embedding in product((0, 1), (0, 1)):
        if not predicts and len({first + embedding, *middle, last + head}) == 1:
            ends = zip(_ENDS.values(), (embedding, head), strict=True)
            return fields | {field: True for field, is_counted in ends if is_counted}
    # ends of stated length, the rest equal
    if not predicts and interleave == 1 and len(set(middle)) <= 1 and first and last:
        return {"first_layers": first, "last_layers": last}
    return fields | {"layout": layout_text(chunks)}


def _laid_out(keys):
    """Chunks of a layout: `Et*3|(tt|)*29,m|L` has E embedding, t layer, m MTP layer, L
    loss; in a list of lists these are words.
    """
    name = "pipeline-model-parallel-layout"
    layout = keys.get(name)
    if isinstance(layout, list):
        layout = "|".join(
            "".join(_LETTERS.get(word, "?") for word in stage) for stage in layout
        )
    text = str(layout).replace(",", "")
    before = ""
    while text != before:  # (tt|)*3 or t*3 may stand inside another
        before = text
        text = re.sub(
            r"\(([^()]*)\)\*(\d+)|(\w)\*(\d+)",
            lambda m: (m[1] or m[3]) * int(m[2] or m[4]),
            text,
        )
    if not re.fullmatch(r"E[|t]*[|m]*L", text):
        raise ValueError(
            f"{keys.describe(name)} must have E, layers t, MTP layers m and L in this "
            "order, in stages between |"
        )
    return tuple(Chunk(stage.count("t"), stage.count("m")) for stage in text.split("|"))


def layout_letters(text: str) -> str:
    """A plan's layout in Megatron's letters.

    >>> layout_letters("3+2x2+0m")
    'Et*3|(tt|)*2mL'
    """
    stages = ["t" * layers + "m" * more for layers, more in layout_chunks(text)]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    parts = []
    for stage, equal in groupby(stages):
        letters = re.sub(r"t{3,}", lambda match: f"t*{len(match[0])}", stage)
        count = len(list(equal))
        parts.append(f"({letters}|)*{count}" if count > 1 else f"{letters}|")
    return "".join(parts)[:-1]


def _sharding(keys, replicas):
    """ZeRO stage and shard group: of Megatron's FSDP, PyTorch's, or the optimizer's."""
    megatron_fsdp = keys.flag("use-megatron-fsdp")
    torch_fsdp = keys.flag("use-torch-fsdp2")
    strategy = keys.word(
        "data-parallel-sharding-strategy", _STRATEGIES, "optim_grads_params"
    )
    # PyTorch FSDP that keeps what it gathered is ZeRO-2
    keeps = keys.flag("torch-fsdp2-no-reshard-after-forward") and torch_fsdp
    if megatron_fsdp:
        zero = strategy
    elif torch_fsdp:
        zero = 2 if keeps else 3
    else:
        zero = int(keys.flag("use-distributed-optimizer"))
    fields = {"zero": zero, "overlap_gather": keeps}
    # the optimizer may be sharded in groups: HSDP
    copies = keys.count("num-distributed-optimizer-instances")
    if replicas % copies:
        raise ValueError(
            f"--num-distributed-optimizer-instances={copies} does not divide dp x cp "
            f"= {replicas}"
        )
    if copies > 1:
        fields["shard"] = replicas // copies
    return fields


def _gradients(keys, replicas):
    """Megatron-LM adds bf16 gradients up, and reduces them, in fp32; without overlap in
    one piece at the end.
    """
    # without these the main gradients are fp32
    narrow = keys.flag("grad-reduce-in-bf16")
    narrow |= keys.get("main-grads-dtype") in _NARROW
    fp32 = keys.flag("accumulate-allreduce-grads-in-fp32")
    fp32 |= keys.flag("bf16") and not narrow
    fp32 |= keys.get("megatron-fsdp-grad-comm-dtype") == "fp32"
    default = max(_LEAST_BUCKET, _BUCKET_PER_RANK * replicas)
    size_bytes = (4.0 if fp32 else 2.0) * keys.count("ddp-bucket-size", default)
    if not keys.flag("overlap-grad-reduce"):
        size_bytes = math.inf
    return {"reduce_fp32": fp32, "bucket_bytes": size_bytes}


def _recompute(keys):
    words = {word: word for word in ("none", "full", "selective")}
    granularity = keys.word("recompute-granularity", words, "none")
    # its short form
    if keys.flag("recompute-activations"):
        if granularity == "full":
            raise ValueError(
                "--recompute-activations is selective, but --recompute-granularity=full"
            )
        granularity = "selective"
    if granularity == "full":
        method = keys.get("recompute-method")
        if method is None:
            raise ValueError("--recompute-granularity=full needs --recompute-method")
        # uniform units of one layer: the others keep some layers, or one input of several
        wrong = "recompute-method" if method != "uniform" else ""
        if not wrong and keys.count("recompute-num-layers") != 1:
            wrong = "recompute-num-layers"
        if wrong:
            raise ValueError(
                f"{keys.describe(wrong)}: a plan recomputes every layer or none, each by "
                "itself"
            )
    if granularity != "selective":
        return granularity
    # words of a command line, or a list of overrides or of YAML
    modules = re.findall(r"\w+", str(keys.get("recompute-modules", "core_attn")))
    if others := sorted({*modules} - {*MODULES.index}):
        raise ValueError(
            f"--recompute-modules: a plan does not recompute {', '.join(others)} alone, "
            f"but {', '.join(MODULES.index)}"
        )
    # what selective is there without a list
    return "selective" if modules == ["core_attn"] else "+".join(modules) or "none"
