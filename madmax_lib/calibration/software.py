"""What do machine and software of a source do? Rates, network, precision, recompute, sharding, overlap of a row.

Facts per source stand in `data/row_clusters.csv` with their citation. Its last rows are for any other source and name
the cluster in which a device is assumed to be. What a row does not state follows one rule here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np

from madmax_lib import catalog
from madmax_lib.simulator.estimate import machine_fields, matrix_fields
from madmax_lib.simulator.memory.memory import usable_bytes
from madmax_lib.specs import Device

__all__ = ["device_of", "machine_of", "number_of", "positive_of", "software_of", "text_of"]

_OLD = ("legacy", "deepspeed", "deepspeed-plain")  # Megatron of 2021-22: unfused attention, full recompute
_WIRE_BYTES = {"legacy": 4.0, "deepspeed-plain": 4.0}  # per gradient, reduced and gathered; 6 for other software
_SELECTIVE_GEMM = 0.35  # share of the matrix products that per-operator selective checkpointing repeats (torchtitan)


def device_of(raw: dict) -> Device:
    """The catalog's device of a row. Raises ValueError for none or an unknown one."""
    text = text_of(raw, "gpu")
    if not text:
        raise ValueError("gpu is not stated")
    return _device(text)


def machine_of(raw: dict, row: dict, device: Device) -> dict:
    """Rates of the data sheet; network and software of the source, or those assumed for the device.

    A column `cluster` (a name of the catalog) replaces the network.
    """
    sources = [f for f in _source_facts() if re.search(f["pattern"], row["source"]) and _is(device, f["gpu"])]
    facts, stated = sources[0], text_of(raw, "cluster")
    name = stated or next((f["cluster"] for f in sources if f["cluster"]), "")
    if not name:
        raise ValueError(f"no default cluster of {device.name}, name one in a column cluster")
    cluster = replace(_cluster(name), device=device)
    software = facts["software"] or _default_software(raw, device.family)
    compiled = software == "eager" and re.search(r"\bcompile\b", _remarks(raw))
    dtype = _dtype(text_of(raw, "precision").lower(), device)
    fields, classes = machine_fields(
        cluster, dtype, kernels="compiled" if compiled else software.removesuffix("-plain")
    )
    if not stated:
        network = {"domain": facts["domain"], "link": 1e9 * facts["link_gb_per_s"], "nic": 1e9 * facts["nic_gb_per_s"]}
        fields |= {name: value for name, value in network.items() if value}
        classes["network"] = classes["family"] if facts["network"] == "ib" else facts["network"]
    if classes["attention"] == "hopper-recent" and row["source"] and "Megatron-Bridge" not in row["source"]:
        classes["attention"] = "hopper-nvidia"  # NeMo and Megatron-Core rows of 2024
    habits = {name: facts[name] for name in ("fused_loss", "legacy", "overlap_tp", "interleaves")}
    fields |= classes | habits | {"gpu": device.name, "dtype": dtype, "software": software}
    return fields | {"memory_bytes": _usable_bytes(device.name), "calibrated": classes["family"] != "other"}


def software_of(raw: dict, row: dict, device: Device) -> dict:
    """What the software of the source does: precision, recompute, sharding, overlap, fused kernels."""
    software, notes, precision = row["software"], _remarks(raw), text_of(raw, "precision").lower()
    old, bridge = software in _OLD, "Megatron-Bridge" in row["source"]
    recompute = _recompute(text_of(raw, "recompute").lower(), software)
    zero, shard = _sharding(raw, row, device, notes)
    task = next((t for t in ("lora", "sft") if re.search(rf"\b{t}\b", notes, re.I)), "pretrain")
    scaled_8bit = "float8" in precision and "rowwise" not in precision  # torchao gathers 8 bits with one scale
    wide_gradients = software == "deepspeed" and "fp32 grad" in precision
    counted = text_of(raw, "flops_kind").startswith(("hardware", "as published"))
    fields = matrix_fields(device, row["dtype"]) | recompute
    fields.update(
        zero=zero, shard=shard, gradient_wire_bytes=10.0 if wide_gradients else _WIRE_BYTES.get(software, 6.0)
    )
    fields.update(rowwise=float("rowwise" in precision), gather_bytes=1.0 if scaled_8bit else 2.0)
    fields.update(task=task, trained=float(task != "lora"), mixture=_mixture_era(row, notes))
    fields.update(sequence_parallel=float(row["tp"] > 1 and (not old or "sequence" in recompute["said"])))
    fields.update(overlap_tp=float(row["overlap_tp"] > 0 or "async tp" in notes.lower()), overlap_dp=float(not old))
    fields.update(unfused=float(old), tensorwise=float(old))  # DeepSpeed of 2021 gathers tensor by tensor
    fields.update(send_once=float(bridge), ends_as_layers=float(software.startswith("deepspeed")))
    return fields | {"counts_recompute": counted, "out_of_memory": bool(re.search(r"(^|;)\s*OOM\b", notes))}


def _dtype(text: str, device: Device) -> str:
    """Data type of the matrix products by its first name in the text; a device without it runs the nearest."""
    first = text.split("(")[0] or text
    kind = "nvfp4" if "fp4" in first else "mxfp8" if re.search(r"mxfp8|fp8-mx", first) else "bf16"
    kind = "fp8" if kind == "bf16" and re.search(r"fp8|float8", text) else kind
    kind = "fp32" if re.fullmatch(r"fp32|float32", first.strip()) else kind
    return device.nearest(kind)


def _recompute(text: str, software: str) -> dict:
    """Share of the forward pass that is repeated; not stated means full for Megatron of 2021-22, none for others."""
    said = text or ("full" if software in _OLD else "none")
    if "2nd" in said:
        gemm = attention = tp = 0.5
    elif said.startswith("full"):
        gemm = attention = tp = 1.0
    elif "selective" in said and software in ("eager", "compiled"):
        gemm, attention, tp = _SELECTIVE_GEMM, 0.0, 0.0
    else:
        gemm, attention, tp = 0.0, float("selective" in said), 0.0
    shares = {"recompute_gemm": gemm, "recompute_attention": attention, "recompute_tp": tp}
    return {"said": said, "recompute_stated": bool(text), **shares}


def _sharding(raw: dict, row: dict, device: Device, notes: str) -> tuple[float, float]:
    """ZeRO stage and devices that share the weights.

    Not stated: FSDP if 6 bytes per weight of a stage exceed the memory, else the distributed optimizer of Megatron-Core
    (1), or 0 for Megatron of 2021.
    """
    zero = number_of(raw, "zero_stage")
    width = row["expert_ffn"] * (row["experts"] / row["ep"] + row["shared_experts"]) if row["experts"] else row["ffn"]
    weights = row["layers"] * (row["attention_weights"] + (2 + row["gated"]) * row["hidden"] * width)
    if not zero >= 0:
        too_big = row["pp"] == 1 and 6 * weights / row["tp"] > device.memory_bytes
        zero = 3.0 if too_big else 0.0 if row["software"] in _OLD else 1.0
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


def _default_software(raw: dict, family: str) -> str:
    """Of an unknown source: fp16 on A100 is Megatron of 2021, FSDP is PyTorch, the rest Megatron-Core."""
    if number_of(raw, "zero_stage") >= 2:
        return "eager"
    return "legacy" if family == "ampere" and "fp16" in text_of(raw, "precision") else "fused"


def _is(device: Device, gpu: str) -> bool:
    return not gpu or bool(re.match(rf"{gpu}(-|$)", device.name))


def _remarks(raw: dict) -> str:
    return f"{text_of(raw, 'table_row')}; {text_of(raw, 'model')}; {text_of(raw, 'notes')}"


@lru_cache(maxsize=1)
def _source_facts() -> list[dict]:
    table = catalog.table("row_clusters")
    numbers = ["domain", "link_gb_per_s", "nic_gb_per_s", "overlap_tp", "interleaves", "fused_loss", "legacy"]
    table[numbers] = table[numbers].replace("", "0").astype(float)
    return table.to_dict("records")


_cluster = lru_cache(maxsize=64)(catalog.cluster)
_device = lru_cache(maxsize=64)(catalog.device)


@lru_cache(maxsize=64)
def _usable_bytes(device: str) -> float:
    return usable_bytes(_device(device))


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


def positive_of(raw: dict, name: str, default: float = np.nan) -> float:
    """A field as a number above 0, else the default."""
    value = number_of(raw, name)
    return value if value > 0 else default
