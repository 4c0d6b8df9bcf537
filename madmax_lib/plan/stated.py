"""What does a row say? Its fields, and by them the model, device, network, data type
and software of a run.

What a row does not state comes from tables, with citations: `data/row_clusters.csv` for
a source (cluster, network, software, recompute, whether the loss is compiled too),
`data/row_models.csv` for a model, by its name, beside the catalog. A number that is
none, or out of its range, is refused with its column. The style of a layer, gated or
not, is the one whose parameters are nearest to the stated number.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.catalog.models import DLRM, Cluster, Device, Transformer
from madmax_lib.catalog.software import OVERLAPS, Software
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan

__all__ = [
    "completed",
    "count_of",
    "habits_of",
    "machine_of",
    "model_of",
    "number_of",
    "positive_of",
    "recompute_of",
    "remarks_of",
    "software_of",
    "text_of",
]

_VISION = re.compile(r"(vit|deit3?|beit)([-_]|\b)", re.I)
_OTHERS = re.compile(
    r"dlrm|mixer|swin|resne|convnext|efficientnet|regnet|vgg|.*\bmamba\b", re.I
)
_MIXTURE = re.compile(r"\d+x\d+b|[-_ ]a\d+b|moe", re.I)
# elements: defaults of Megatron-Core and DeepSpeed
_BUCKET = 40e6
_DEEPSPEED_BUCKET = 5e8
_NEEDED = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "sequence": "seq_len",
}  # field: column
_DIMENSIONS = _NEEDED | {name: name for name in ("kv_heads", "ffn", "vocab")}
_MOST = dict.fromkeys(
    ("layers", "experts", "pp", "vpp"), 10**4
)  # of a count; of others 10^8
_MOST |= dict.fromkeys(
    ("hidden", "heads", "kv_heads", "ffn", "expert_ffn"), 10**6
) | dict.fromkeys(OVERLAPS, 1)
_EXPERTS = ("experts", "active_experts", "shared_experts", "expert_ffn", "dense_layers")
_GATED = {
    "gated": True,
    "norm": "rms",
    "positions": "rope",
    "attention_bias": "none",
    "mlp_bias": False,
}
_ABOUT = ("pattern", "gpu", "source")  # columns of row_clusters.csv that are no facts
_NETWORK = ("cluster", "devices_per_node", "network_gbit")
_COMPILED = re.compile(
    r"\bcompile\b|cumulative flags up to \+ (?!packed)", re.I
)  # torchtune's flags add up
_ZERO_3 = re.compile(
    r"\bZeRO-3\b"
)  # DeepSpeed's, which SC'21 and others ran in codes without it
_SENDS_ONCE = re.compile(r"DeepEP|HybridEP")  # dispatchers
_GRAPHS = re.compile(
    r"CUDA graphs|_cg\.sh|\b(26\.(0[6-9]|1\d)|2[7-9]\.\d\d)(\.\d+)? NeMo"
)  # Bridge since 26.06
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
    return (
        "" if value is None or value is pd.NA or value != value else str(value).strip()
    )


def number_of(raw: dict, name: str) -> float:
    """A field as a number, NaN if it is not stated. Raises ValueError if it is no
    finite number.
    """
    if not (text := text_of(raw, name)):
        return np.nan
    try:
        value = float(raw[name])
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
    return value if value > 0 else default


def count_of(raw: dict, name: str, default=None, *, least: int = 1):
    """A field as a whole number, the default if it is not stated. Raises ValueError for
    another number.
    """
    value = number_of(raw, name)
    most = _MOST.get(name, 10**8)
    if value == value and (value % 1 or not least <= value <= most):
        raise ValueError(
            f"{name}={value:g} must be a whole number of {least} to {most}"
        )
    return int(value) if value == value else default


def remarks_of(raw: dict) -> str:
    """What a row says in words: title, model and notes."""
    return "; ".join(text_of(raw, name) for name in ("table_row", "model", "notes"))


def model_of(raw: dict) -> Transformer:
    """The model of a row. Raises ValueError for one that is no plain transformer, or
    for what is not stated.

    A row of a run of this project has all its sizes, as JSON.
    """
    name = text_of(raw, "model") or "unnamed"
    if text_of(raw, "sizes"):
        return Transformer(**json.loads(text_of(raw, "sizes")))
    if _OTHERS.match(name):
        raise ValueError(f"{name} is not a plain transformer")
    own = {field: count_of(raw, column) for field, column in _DIMENSIONS.items()}
    own |= {field: count_of(raw, field, least=0) for field in _EXPERTS}
    own = {field: value for field, value in own.items() if value is not None}
    listed = _listed(name)
    if any(
        own.get(field, listed.get(field)) != listed.get(field)
        for field in ("hidden", "heads")
    ):
        listed = {}  # another model of that name
    facts = {field: value for field, value in _facts(name).items() if field != "model"}
    fields = (listed or facts) | own | {"name": name}
    for field, column in _NEEDED.items():
        if not fields.get(field):
            raise ValueError(f"{column} is not stated")
    if _VISION.match(name):
        return _vision(fields)
    if not fields.get("experts") and (
        _MIXTURE.search(name) or number_of(raw, "ep") > 1
    ):
        raise ValueError(
            f"experts of {name!r} are not stated and not in data/row_models.csv"
        )
    fields["dense_layers"] = min(
        fields.get("dense_layers", 0), fields["layers"]
    )  # of a proxy with fewer layers
    if listed:
        return Transformer(**fields)
    return _of_style(
        {"ffn": 4 * fields["hidden"], "vocab": 50257} | fields,
        positive_of(raw, "params_b"),
    )


def _of_style(fields: dict, billions: float) -> Transformer:
    """Of GPT's or LLaMA's style, with the token table as head or not, as the stated
    parameters tell.

    Not stated: gated where the feed-forward part is not four times the width, and in
    mixtures; then with a head.
    """
    models = [
        Transformer(**(style | fields), tied=tied)
        for style in ({}, _GATED)
        for tied in (True, False)
    ]
    if billions > 0:
        return min(models, key=lambda model: abs(model.parameters / 1e9 - billions))
    return models[
        -1 if fields["ffn"] != 4 * fields["hidden"] or fields.get("experts") else 0
    ]


def _vision(fields: dict) -> Transformer:
    """A vision transformer: the patch is in its name, the image follows from its
    tokens, the classes are ImageNet's.
    """
    patch = re.search(r"patch(\d+)|/(\d+)", fields["name"])
    size = int(patch[1] or patch[2]) if patch else fields.get("patch", 0)
    if not size:
        raise ValueError(f"{fields['name']}: the patch is not stated")
    image = size * round(math.sqrt(fields["sequence"] - 1))  # beside the class token
    shape = {field: fields[field] for field in ("name", "layers", "hidden", "heads")}
    return Transformer(
        **shape,
        ffn=fields.get("ffn", 4 * fields["hidden"]),
        image=image,
        patch=size,
        classes=1000,
    )


@lru_cache(maxsize=256)
def _facts(name: str) -> dict:
    """What `data/row_models.csv` says of a model by its name, empty if nothing."""
    for facts in catalog.table("row_models").drop(columns="source").to_dict("records"):
        if re.search(facts.pop("pattern"), name, re.I):
            return {
                field: value if field == "model" else int(value)
                for field, value in facts.items()
                if value
            }
    return {}


@lru_cache(maxsize=256)
def _listed(name: str) -> dict:
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
    if not text_of(raw, "gpu"):
        raise ValueError("gpu is not stated")
    own = text_of(raw, "cluster").endswith(".json")
    device = (
        catalog.cluster(text_of(raw, "cluster")).device
        if own
        else catalog.device(text_of(raw, "gpu"))
    )
    rows = (
        row for row in _sources() if re.search(row["pattern"], text_of(raw, "source"))
    )
    facts = next(
        (
            row
            for row in rows
            if re.match(rf"{row['gpu']}(-|$)", device.name) or not row["gpu"]
        ),
        {},
    )
    left_out = _ABOUT + (_NETWORK if text_of(raw, "cluster") else ())
    return raw | {
        name: fact
        for name, fact in facts.items()
        if name not in left_out and not text_of(raw, name)
    }, device


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
    cluster = catalog.cluster(
        name, nodes=devices // node, devices=devices // node * min(node, full)
    )
    cluster = replace(cluster, device=device, devices_per_node=node)
    gbit = positive_of(raw, "network_gbit", 8e-9 * cluster.inter.bandwidth_bytes_per_s)
    text = text_of(raw, "precision").lower()
    first = text.split("(")[0] or text
    named = [
        dtype
        for part in (first, text)
        for pattern, dtype in _DTYPES.items()
        if re.search(pattern, part)
    ]
    if text and not named:
        raise ValueError(f"precision={text!r} names no data type")
    dtype = device.nearest(next(iter(named), "bf16"))
    return replace(
        cluster, inter=replace(cluster.inter, bandwidth_bytes_per_s=gbit / 8e-9)
    ), dtype


def software_of(raw: dict, device: Device) -> Software:
    """As the row or its source names it; else fp16 on A100 is Megatron of 2021, FSDP is
    PyTorch, the rest unknown.

    A row without a source is one's own: it has the software that it names, or none, as
    in `estimate`.

    Compiled layers and CUDA graphs have rows of their own in `data/software.csv`, as
    far as a software has both ways.
    """
    if not text_of(raw, "source"):
        return _software(text_of(raw, "software") or "none")
    old = device.name.startswith("a100") and "fp16" in text_of(raw, "precision")
    usual = (
        "fsdp2"
        if count_of(raw, "zero_stage", 0, least=0) >= 2
        else "megatron-2021"
        if old
        else "none"
    )
    software = _software(text_of(raw, "software") or usual)
    remarks = remarks_of(raw)
    for variant, pattern in (("compiled", _COMPILED), ("graph", _GRAPHS)):
        other = _software(f"{software.name}-{variant}")
        if pattern.search(remarks) and other.name != "none":
            software = other
    if 3 not in software.zero and _ZERO_3.search(remarks):
        software = replace(software, zero=(*software.zero, 3), engine=True)
    loss = software.fused_loss or (
        software.kernels == "compiled" and text_of(raw, "fused_loss") == "1"
    )
    once = software.send_once or bool(_SENDS_ONCE.search(remarks))
    return replace(software, fused_loss=loss, send_once=once)


@lru_cache(maxsize=1)
def _sources() -> list[dict]:
    return catalog.table("row_clusters").to_dict("records")


@lru_cache(maxsize=64)
def _software(name: str) -> Software:
    """Of the catalog, any for an unknown one."""
    try:
        return catalog.software(name)
    except ValueError:
        return catalog.software("none")


def habits_of(raw: dict, case: Case) -> dict:
    """Recompute, attention, overlap, reductions: as stated, else as the software does."""
    software = case.software
    remarks = remarks_of(raw)
    said = text_of(raw, "recompute").lower()
    precision = text_of(raw, "precision").lower()
    overlaps = (
        {"overlap_tp": True}
        if re.search(r"async tp|tp-comm-overlap", remarks, re.I)
        else {}
    )
    overlaps |= {
        name: bool(stated)
        for name in OVERLAPS
        if (stated := count_of(raw, name, least=0)) is not None
    }
    if case.plan.zero == 3:  # which always hides its reductions
        overlaps.pop("overlap_dp", None)
    old = (
        software.unfused_attention and not case.model.image
    )  # Megatron before sequence parallelism
    elements = _DEEPSPEED_BUCKET if software.engine else _BUCKET
    return overlaps | {
        "recompute": recompute_of(said, software),
        "sequence_parallel": case.plan.tp > 1 and (not old or "sequence" in said),
        "attention": "unfused"
        if software.unfused_attention or "no flash" in remarks
        else "flash",
        "reduce_fp32": "fp32 grad" in precision or "fp32 all-reduce" in remarks,
        "capacity": 1.0 if "tokendrop" in remarks else 0.0,
        "bucket_bytes": Plan.bucket_bytes
        if software.bucket_bytes
        else elements * software.wire_bytes,  # DDP's own
    }


def recompute_of(said: str, software: Software) -> str:
    """Not stated: full for software of 2021, none for others. Half of the layers counts
    as all.

    Of modules recomputed alone, those with attention's core are selective; norms,
    activations and experts have no field and count as none.
    """
    if not said:
        return "full" if software.legacy else "none"
    if said.startswith("full") or "2nd" in said:
        return "full"
    if not re.match("selective|none", said):
        raise ValueError(f"recompute={said!r} is not one of none, selective, full")
    modules = re.search(r"selective:(.*)", said)
    return (
        "selective"
        if "selective" in said and (not modules or "attn" in modules[1])
        else "none"
    )
