"""What a published row states: its fields, and by them the model, device, network, data
type and software of a run.

What a row does not state comes from tables, with citations: `data/row_clusters.csv` for
a source (cluster, network, software, recompute, whether the loss is compiled too),
`data/row_models.csv` for a model, by its name, beside the catalog. A number that is
none, or out of its range, is refused with its column. The style of a layer, gated or
not, is the one whose parameters are nearest to the stated number.
"""

import json
import math
import re
from dataclasses import asdict, replace
from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.catalog import DLRM, Cluster, Device, Transformer
from madmax_lib.catalog.software import OVERLAPS, Software
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import MODULES
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import lacking

_VISION = re.compile(r"(vit|deit3?|beit)([-_]|\b)", re.I)
_OTHERS = re.compile(
    r"dlrm|mixer|swin|resne|convnext|efficientnet|regnet|vgg|.*\bmamba\b", re.I
)
_MIXTURE = re.compile(r"\d+x\d+b|[-_ ]a\d+b|moe", re.I)
_ENCODER = re.compile(r"(deberta|roberta|electra|.*\bbert)\b", re.I)
_MASKED = 0.15  # of an encoder's tokens [BERT, arXiv 1810.04805, 3.1]
_PATCH = re.compile(r"patch(\d+)|/(\d+)")  # vit-b/16
_IMAGENET_CLASSES = 1000
_GPT_VOCAB = 50257  # rows of GPT-2's token table, where a row states none
# elements: defaults of Megatron-Core and DeepSpeed
_BUCKET = 40e6
_DEEPSPEED_BUCKET = 5e8
# column of each field that a model must have, and of others that it may have
_NEEDED = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "sequence": "seq_len",
}
_DIMENSIONS = _NEEDED | {name: name for name in ("kv_heads", "ffn", "vocab")}
_EXPERTS = ("experts", "active_experts", "shared_experts", "expert_ffn", "dense_layers")
# of a count; of others 10^8: more is a mistake of units
_MOST = pd.read_csv(catalog.data_file("stated_most.csv"), index_col="field")["most"]
_MOST_OTHERWISE = 10**8
_LLAMA_STYLE = {
    "gated": True,
    "norm": "rms",
    "positions": "rope",
    "attention_bias": "none",
    "mlp_bias": False,
}
_NO_FACTS = {"pattern", "gpu", "source"}  # columns of row_clusters.csv that find a row
_NETWORK = {"cluster", "devices_per_node", "network_gbit"}
# torchtune's flags add up
_COMPILED = re.compile(r"\bcompile\b|cumulative flags up to \+ (?!packed)", re.I)
# DeepSpeed's, which SC'21 and others ran in codes without it
_ZERO_3 = re.compile(r"\bZeRO-3\b")
_SENDS_ONCE = re.compile(r"DeepEP|HybridEP")  # dispatchers
# Bridge captures them since 26.06
_GRAPHS = re.compile(
    r"CUDA graphs|_cg\.sh|\b(26\.(0[6-9]|1\d)|2[7-9]\.\d\d)(\.\d+)? NeMo"
)
_OVERLAPS_TP = re.compile(r"async tp|tp-comm-overlap", re.I)
_DTYPES = {  # by the first name in the text
    r"fp4": "nvfp4",
    r"mxfp8|fp8-mx": "mxfp8",
    r"fp8|float8": "fp8",
    r"(?<![a-z])(fp|float)16": "fp16",
    r"tf32": "tf32",
    r"(fp|float)32": "fp32",
    r"bf16|bfloat|amp|mixed": "bf16",
}


def text_of(raw: dict, name: str) -> str:
    """A field as text, empty if it is not stated."""
    value = raw.get(name)
    is_missing = value is None or value is pd.NA or value != value  # NaN
    return "" if is_missing else str(value).strip()


def number_of(raw: dict, name: str) -> float:
    """A field as a number, NaN if it is not stated. Raises ValueError if it is no
    finite number.
    """
    text = text_of(raw, name)
    try:
        value = float(raw[name]) if text else np.nan
    except (TypeError, ValueError):
        raise ValueError(f"{name}={text!r} is not a number") from None
    if math.isinf(value):
        raise ValueError(f"{name}={text} must be finite")
    return value


def positive_of(raw: dict, name: str, default: float = np.nan) -> float:
    """A field as a number, the default if it is not stated. Raises ValueError if it is
    not above 0.
    """
    value = number_of(raw, name)
    if value <= 0:
        raise ValueError(f"{name}={value:g} must be above 0")
    return default if math.isnan(value) else value


def count_of(raw: dict, name: str, default=None, *, least: int = 1):
    """A field as a whole number, the default if it is not stated. Raises ValueError for
    another number.
    """
    value = number_of(raw, name)
    if math.isnan(value):
        return default
    most = _MOST.get(name, _MOST_OTHERWISE)
    if value % 1 or not least <= value <= most:
        raise ValueError(
            f"{name}={value:g} must be a whole number of {least} to {most}"
        )
    return int(value)


def remarks_of(raw: dict) -> str:
    """A row's words: title, model and notes."""
    return "; ".join(text_of(raw, name) for name in ("table_row", "model", "notes"))


def model_of(raw: dict) -> Transformer:
    """The model of a row. Raises ValueError for one that is no plain transformer, or
    for what is not stated.

    A row of a run of this project has all its sizes, as JSON.
    """
    name = text_of(raw, "model") or "unnamed"
    if sizes := text_of(raw, "sizes"):
        return Transformer(**json.loads(sizes))
    if _OTHERS.match(name):
        raise ValueError(f"{name} is not a plain transformer")
    stated = {field: count_of(raw, column) for field, column in _DIMENSIONS.items()}
    stated |= {field: count_of(raw, field, least=0) for field in _EXPERTS}
    stated = {field: value for field, value in stated.items() if value is not None}
    listed = _listed(name)
    for field in ("hidden", "heads"):
        if stated.get(field, listed.get(field)) != listed.get(field):
            listed = {}  # another model of that name
    base = listed or {k: v for k, v in _facts(name).items() if k != "model"}
    fields = base | stated | {"name": name}
    for field, column in _NEEDED.items():
        if not fields.get(field):
            raise ValueError(f"{column} is not stated")
    if _VISION.match(name):
        return _vision(fields)
    is_mixture = _MIXTURE.search(name) or number_of(raw, "ep") > 1
    if is_mixture and not fields.get("experts"):
        raise ValueError(
            f"experts of {name!r} are not stated and not in data/row_models.csv"
        )
    # a proxy may have fewer layers than the model it stands for
    fields["dense_layers"] = min(fields.get("dense_layers", 0), fields["layers"])
    if listed:
        return Transformer(**fields)
    usual = {"ffn": 4 * fields["hidden"], "vocab": _GPT_VOCAB}
    if _ENCODER.match(name):
        usual["predicted_share"] = _MASKED
    return _of_style(usual | fields, positive_of(raw, "params_b"))


def _of_style(fields, billions):
    """A model of GPT's or LLaMA's style, with the token table as head or not, as the
    stated parameters tell.

    Not stated: gated where the feed-forward part is not four times the width, and in
    mixtures; then with a head.
    """
    styles = [
        style | {"tied": tied} for style in ({}, _LLAMA_STYLE) for tied in (True, False)
    ]
    models = [Transformer(**(style | fields)) for style in styles]
    if billions > 0:
        return min(models, key=lambda model: abs(model.parameters / 1e9 - billions))
    is_plain = fields["ffn"] == 4 * fields["hidden"] and not fields.get("experts")
    return models[0] if is_plain else models[-1]


def _vision(fields):
    """A vision transformer: the patch is in its name, the image follows from its
    tokens, the classes are ImageNet's.
    """
    match = _PATCH.search(fields["name"])
    patch = int(match[1] or match[2]) if match else fields.get("patch", 0)
    if not patch:
        raise ValueError(f"{fields['name']}: the patch is not stated")
    # a square of patches, and the class token
    patches = round(math.sqrt(fields["sequence"] - 1))
    shape = {field: fields[field] for field in ("name", "layers", "hidden", "heads")}
    return Transformer(
        **shape,
        ffn=fields.get("ffn", 4 * fields["hidden"]),
        image=patch * patches,
        patch=patch,
        classes=_IMAGENET_CLASSES,
    )


@lru_cache(maxsize=256)
def _facts(name):
    """Fields of a model by its name in `data/row_models.csv`, empty without a row."""
    for facts in catalog.table("row_models").drop(columns="source").to_dict("records"):
        if re.search(facts.pop("pattern"), name, re.I):
            stated = {field: text for field, text in facts.items() if text}
            return {k: v if k == "model" else int(v) for k, v in stated.items()}
    return {}


@lru_cache(maxsize=256)
def _listed(name):
    """Fields of the catalog's model of a name or of a row's spelling of it, empty if
    there is none.
    """
    try:
        model = catalog.model(_facts(name).get("model") or name)
    except (ValueError, OSError):
        return {}
    return {} if isinstance(model, DLRM) else asdict(model)


def completed(raw: dict) -> tuple[dict, Device]:
    """The row with what is known of its source where it says nothing, and the catalog's
    device.

    A column `cluster` replaces the network of the source, and the device where it is a
    `machine.json`. Raises ValueError for no or an unknown device.
    """
    gpu = text_of(raw, "gpu")
    cluster = text_of(raw, "cluster")
    if not gpu:
        raise ValueError("gpu is not stated")
    is_machine = cluster.endswith(".json")
    device = catalog.cluster(cluster).device if is_machine else catalog.device(gpu)
    left_out = _NO_FACTS | (_NETWORK if cluster else set())
    # the first row for this source and its device
    row = {}
    for row in _sources():
        is_its = not row["gpu"] or re.match(rf"{row['gpu']}(-|$)", device.name)
        if is_its and re.search(row["pattern"], text_of(raw, "source")):
            break
    else:
        row = {}
    facts = {
        name: fact
        for name, fact in row.items()
        if name not in left_out and not text_of(raw, name)
    }
    return raw | facts, device


@lru_cache(maxsize=1)
def _sources():
    return catalog.table("row_clusters").to_dict("records")


def machine_of(raw: dict, device: Device, devices: int) -> tuple[Cluster, str]:
    """So many devices in the largest equal nodes, and the data type of the products,
    the nearest that they compute in.

    `network_gbit` is the rate of the network per device. Not stated: the catalog's
    first cluster with such devices, bf16. Raises ValueError where there is none.
    """
    gpus = count_of(raw, "devices_per_node", 0)
    name = text_of(raw, "cluster") or catalog.cluster_with(device, gpus)
    full = catalog.cluster(name).devices_per_node
    most = min(gpus or full, devices)
    node = next(size for size in range(most, 0, -1) if devices % size == 0)
    nodes = devices // node
    # a stated node may be larger than the catalog's: its links are of that, then
    cluster = catalog.cluster(name, nodes=nodes, devices=nodes * min(node, full))
    inter = cluster.inter
    rate = inter.bandwidth_bytes_per_s
    gbit = positive_of(raw, "network_gbit", 8e-9 * rate)  # 1 Gbit/s: 0.125e9 bytes/s
    cluster = replace(
        cluster,
        device=device,
        devices_per_node=node,
        inter=replace(inter, bandwidth_bytes_per_s=gbit / 8e-9),
    )
    return cluster, device.nearest(_dtype(text_of(raw, "precision").lower()))


def _dtype(text):
    """The data type that a precision names first, before its brackets if it can."""
    if not text:
        return "bf16"
    for part in (text.split("(")[0], text):
        for pattern, dtype in _DTYPES.items():
            if re.search(pattern, part):
                return dtype
    raise ValueError(f"precision={text!r} names no data type")


def software_of(raw: dict, device: Device) -> Software:
    """The software that the row or its source names; else fp16 on A100 is Megatron of
    2021, FSDP is PyTorch, the rest unknown.

    A row without a source is one's own: it has the software that it names, or none, as
    in `estimate`.

    Compiled layers and CUDA graphs have rows of their own in `data/software.csv`, as
    far as a software has both ways.
    """
    named = text_of(raw, "software")
    like = text_of(raw, "like")
    if not text_of(raw, "source"):
        return catalog.software(named or "none", like)
    if not named and count_of(raw, "zero_stage", 0, least=0) >= 2:
        named = "fsdp2"
    elif not named and device.name.startswith("a100"):
        named = "megatron-2021" if "fp16" in text_of(raw, "precision") else ""
    software = catalog.software(named or "none", like)
    remarks = remarks_of(raw)
    for variant, pattern in (("compiled", _COMPILED), ("graph", _GRAPHS)):
        other = f"{software.name}-{variant}"
        if pattern.search(remarks) and other in catalog.names("software"):
            software = catalog.software(other)
    if 3 not in software.zero and _ZERO_3.search(remarks):
        software = replace(software, zero=(*software.zero, 3), engine=True)
    compiles_loss = software.kernels == "compiled" and text_of(raw, "fused_loss") == "1"
    return replace(
        software,
        fused_loss=software.fused_loss or compiles_loss,
        send_once=software.send_once or bool(_SENDS_ONCE.search(remarks)),
    )


def habits_of(raw: dict, case: Case) -> dict:
    """Recompute, attention, overlap, reductions: as stated, else as the software does."""
    software = case.software
    remarks = remarks_of(raw)
    recompute = text_of(raw, "recompute").lower()
    precision = text_of(raw, "precision").lower()
    overlaps = {"overlap_tp": True} if _OVERLAPS_TP.search(remarks) else {}
    for name in OVERLAPS:
        stated = count_of(raw, name, least=0)
        if stated is not None:
            overlaps[name] = bool(stated)
    if case.plan.zero == 3:  # which always hides its reductions
        overlaps.pop("overlap_dp", None)
    # Megatron before sequence parallelism
    is_old = software.unfused_attention and not case.model.image
    is_unfused = software.unfused_attention or "no flash" in remarks
    elements = _DEEPSPEED_BUCKET if software.engine else _BUCKET
    is_ddp = software.bucket_bytes > 0  # DDP has buckets of its own
    return overlaps | {
        "recompute": recompute_of(recompute, case),
        "sequence_parallel": case.plan.tp > 1
        and (not is_old or "sequence" in recompute),
        "attention": "unfused" if is_unfused else "flash",
        "reduce_fp32": "fp32 grad" in precision or "fp32 all-reduce" in remarks,
        "capacity": 1.0 if "tokendrop" in remarks else 0.0,
        "bucket_bytes": Plan.bucket_bytes if is_ddp else elements * software.wire_bytes,
    }


def recompute_of(text: str, case: Case) -> str:
    """The recompute that a text states; not stated: full for software of 2021, none for
    others. Half of the layers counts as all; modules of what the model lacks, not.

    Raises ValueError for another word.
    """
    if not text:
        return "full" if case.software.legacy else "none"
    if text.startswith("full") or "2nd" in text:  # every second layer
        return "full"
    if re.match("(selective|none)(?!:)", text):
        return "selective" if "selective" in text else "none"
    words = re.findall(r"\w+", text.removeprefix("selective:"))
    # by their ends: norm, act, attn, shared_expert
    named = [{m for m in MODULES.index if m.endswith((w, f"{w}s"))} for w in words]
    if not all(named):
        raise ValueError(
            f"recompute={text!r} is not one of none, selective, full, nor modules, of "
            f"{', '.join(MODULES.index)}"
        )
    modules = set().union(*named).difference(lacking(case.model))
    return "selective" if modules == {"core_attn"} else "+".join(modules) or "none"
