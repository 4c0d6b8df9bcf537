"""What do machine and software of a source do? Rates, network, precision, recompute, sharding, overlap of a row.

Facts per source stand in `data/row_clusters.csv` with their citation; what a row does not state follows one rule here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np

from madmax_lib import catalog
from madmax_lib.simulator.estimate import family, machine_fields, matrix_fields
from madmax_lib.simulator.memory.memory import usable_bytes
from madmax_lib.specs import Cluster, Device

__all__ = ["device_of", "machine_of", "number_of", "software_of", "text_of"]

_DEFAULT_CLUSTER = {
    "v100": "dgx-2",
    "a100-40": "dgx-a100-40",
    "a100": "dgx-a100",
    "h100": "dgx-h100",
    "h800": "hgx-h800",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "mi300x": "mi300x-8",
    "mi250x": "frontier-node",
    "gaudi2": "gaudi2-8",
    "t4": "kaggle-2xt4",
    "rtx-3090": "rtx-3090-2",
    "rtx-2080": "rtx-2080-ti-4",
    "p100": "kaggle-p100",
}
_OLD = ("legacy", "deepspeed", "deepspeed-plain")  # Megatron of 2021-22: unfused attention, full recompute
_SELECTIVE_GEMM = 0.35  # share of the matrix products that per-operator selective checkpointing repeats (torchtitan)


def device_of(raw: dict) -> Device:
    """The catalog's device of a row. Raises ValueError for none or an unknown one."""
    text = text_of(raw, "gpu")
    if not text:
        raise ValueError("gpu is not stated")
    return _named_device(text)


def machine_of(raw: dict, row: dict, device: Device) -> dict:
    """Rates of the data sheet; network and software of the source, else one default per device.

    A column `cluster` (a name of the catalog) replaces the network.
    """
    facts = next((f for f in _cluster_facts() if re.search(f["pattern"], row["source"]) and _is(device, f["gpu"])), {})
    wanted = text_of(raw, "cluster")
    name = wanted or next((c for n, c in _DEFAULT_CLUSTER.items() if device.name.startswith(n)), "")
    if not name:
        raise ValueError(f"no default cluster of {device.name}, name one in a column cluster")
    cluster = replace(_cluster(name), device=device)
    software = facts.get("stack") or _default_stack(raw, family(device))
    stack = "compiled" if software == "eager" and re.search(r"\bcompile\b", _remarks(raw)) else software
    stack = stack.removesuffix("-plain")
    dtype = _dtype(text_of(raw, "precision").lower(), device)
    fields, classes = machine_fields(cluster, dtype, stack=stack)
    if facts and not wanted:
        fields |= {"domain": facts["domain"], "nic": facts["nic_gb_per_s"] * 1e9}
        fields |= {"link": facts["link_gb_per_s"] * 1e9} if facts["link_gb_per_s"] else {}
        classes["network"] = classes["family"] if facts["network"] == "ib" else facts["network"]
    if classes["attention"] == "hopper-recent" and row["source"] and "Megatron-Bridge" not in row["source"]:
        classes["attention"] = "hopper-nvidia"  # NeMo and Megatron-Core rows of 2024
    return fields | classes | {
        "gpu": device.name, "dtype": dtype, "memory_bytes": _room(device.name), "software": software,
        "calibrated": classes["family"] != "other", "fused_loss": facts.get("fused_loss", 1.0),
        "legacy": facts.get("legacy", 0.0), "overlap_tp": facts.get("overlap_tp", 1.0),
        "interleaves": facts.get("interleaves", 1.0),
    }  # fmt: skip


def software_of(raw: dict, row: dict, device: Device) -> dict:
    """What the software of the source does: precision, recompute, sharding, overlap, fused kernels."""
    software, notes, precision = row["software"], _remarks(raw), text_of(raw, "precision").lower()
    recompute = _recompute(text_of(raw, "recompute").lower(), software)
    zero, shard = _sharding(raw, row, device, software, notes)
    task = next((t for t in ("lora", "sft") if re.search(rf"\b{t}\b", notes, re.I)), "pretrain")
    old, bridge = software in _OLD, "Megatron-Bridge" in row["source"]
    wire = {"legacy": 4.0, "deepspeed-plain": 4.0, "deepspeed": 10.0 if "fp32 grad" in precision else 6.0}
    sequence_parallel = row["tp"] > 1 and (not old or "sequence" in recompute["said"])
    scaled_8bit = "float8" in precision and "rowwise" not in precision  # torchao gathers 8 bits with one scale
    return matrix_fields(device, row["dtype"]) | recompute | {
        "rowwise": float("rowwise" in precision), "zero": zero, "shard": shard, "task": task,
        "trained": 0.0 if task == "lora" else 1.0, "mixture": _mixture_era(row, notes),
        "sequence_parallel": float(sequence_parallel), "send_once": float(bridge),
        "overlap_tp": float(row["overlap_tp"] > 0 or "async tp" in notes.lower()), "overlap_dp": float(not old),
        "unfused": float(old), "legacy": row["legacy"], "gradient_wire_bytes": wire.get(software, 6.0),
        "ends_as_layers": float(software.startswith("deepspeed")), "gather_bytes": 1.0 if scaled_8bit else 2.0,
        "tensorwise": float(old),  # DeepSpeed of 2021 gathers tensor by tensor
        "counts_recompute": text_of(raw, "flops_kind").startswith(("hardware", "as published")),
        "out_of_memory": bool(re.search(r"(^|;)\s*OOM\b", notes)),
    }  # fmt: skip


def _dtype(text: str, device: Device) -> str:
    """Data type of the matrix products by its first name in the text; a device without it runs the next wider one."""
    first = text.split("(")[0] or text
    kind = "nvfp4" if "fp4" in first else "mxfp8" if re.search(r"mxfp8|fp8-mx", first) else "bf16"
    kind = "fp8" if kind == "bf16" and re.search(r"fp8|float8", text) else kind
    kind = "fp32" if re.fullmatch(r"fp32|float32", first.strip()) else kind
    if kind == "nvfp4" and kind not in device.peak_flops:
        kind = "fp8"
    return "bf16" if kind in ("fp8", "mxfp8") and "fp8" not in device.peak_flops else kind


def _recompute(text: str, software: str) -> dict:
    """Share of the forward pass that is repeated; not stated means full for Megatron of 2021-22, none for others."""
    stated = bool(text)
    said = text or ("full" if software in _OLD else "none")
    if "2nd" in said:
        gemm = attention = tp = 0.5
    elif said.startswith("full"):
        gemm = attention = tp = 1.0
    elif "selective" in said and software in ("eager", "compiled"):
        gemm, attention, tp = _SELECTIVE_GEMM, 0.0, 0.0
    else:
        gemm, attention, tp = 0.0, float("selective" in said), 0.0
    return {
        "said": said,
        "recompute_stated": stated,
        "recompute_gemm": gemm,
        "recompute_attention": attention,
        "recompute_tp": tp,
    }


def _sharding(raw: dict, row: dict, device: Device, software: str, notes: str) -> tuple[float, float]:
    """ZeRO stage and devices that share the weights.

    Not stated: FSDP if 6 bytes per weight of a stage exceed the memory, else the distributed optimizer of Megatron-Core
    (1), or 0 for Megatron of 2021.
    """
    zero = number_of(raw, "zero_stage")
    width = row["expert_ffn"] * (row["experts"] / row["ep"] + row["shared_experts"]) if row["experts"] else row["ffn"]
    weights = row["layers"] * (row["attention_weights"] + (2 + row["gated"]) * row["hidden"] * width)
    if not zero >= 0:
        too_big = row["pp"] == 1 and 6 * weights / row["tp"] > device.memory_bytes
        zero = 3.0 if too_big else 0.0 if software in _OLD else 1.0
    data = row["dp"] * row["cp"]
    shard = data if zero >= 2 else 1.0
    return zero, min(shard, row["domain"]) if "HSDP" in notes else shard


def _mixture_era(row: dict, notes: str) -> str:
    """Megatron-Bridge says its release in the row; other software counts as that before 26.06."""
    if not row["experts"]:
        return "none"
    if "tokendrop" in notes:
        return "dropped"
    release = re.search(r"\b(2\d)\.(\d\d)(?:\.\d+)? NeMo", notes)
    return "graph" if release and int(release[1]) * 100 + int(release[2]) >= 2606 else "early"


def _default_stack(raw: dict, family: str) -> str:
    """Software of an unknown source: fp16 on A100 is Megatron of 2021, FSDP is PyTorch, the rest Megatron-Core."""
    if family == "ampere" and "fp16" in text_of(raw, "precision") and not number_of(raw, "zero_stage") >= 2:
        return "legacy"
    return "eager" if number_of(raw, "zero_stage") >= 2 else "fused"


def _is(device: Device, gpu: str) -> bool:
    return not gpu or bool(re.match(rf"{gpu}(-|$)", device.name))


@lru_cache(maxsize=1)
def _cluster_facts() -> list[dict]:
    numbers = ("domain", "link_gb_per_s", "nic_gb_per_s", "overlap_tp", "interleaves", "fused_loss", "legacy")
    return [row | {name: float(row[name] or 0) for name in numbers}
            for row in catalog.table("row_clusters").to_dict("records")]  # fmt: skip


def _remarks(raw: dict) -> str:
    return f"{text_of(raw, 'table_row')}; {text_of(raw, 'model')}; {text_of(raw, 'notes')}"


@lru_cache(maxsize=64)
def _cluster(name: str) -> Cluster:
    return catalog.cluster(name)


@lru_cache(maxsize=64)
def _room(name: str) -> float:
    return usable_bytes(_named_device(name))


@lru_cache(maxsize=64)
def _named_device(name: str) -> Device:
    return catalog.device(name)


def text_of(raw: dict, name: str) -> str:
    """A field as text, empty if it is not stated."""
    value = raw.get(name)
    return "" if value is None or value != value else str(value).strip()


def number_of(raw: dict, name: str) -> float:
    """A field as a number, NaN if it is not one."""
    try:
        return float(raw.get(name, np.nan))
    except (TypeError, ValueError):
        return np.nan
