"""What is in the catalog? Models, clusters and devices as tables: SI inside, shown as
an engineer writes them.

Each row has its source and date; rows of the folder MADMAX_CATALOG come along.
"""

from __future__ import annotations

import pandas as pd

from madmax_lib.base.units import format_bytes
from madmax_lib.catalog import tables
from madmax_lib.catalog.models import DLRM, Model

__all__ = ["Listing", "clusters", "devices", "models"]

_SHOWN = (
    "parameters",
    "bytes",
    "bytes_per_s",
    "flops",
    "w",
    "usd_per_hour",
)  # ends of names of columns with a unit


class Listing(pd.DataFrame):
    """A table of the catalog by name. Its numbers are plain SI; only what is printed
    has prefixes.
    """

    @property
    def _constructor(self) -> type:
        return Listing

    def _pretty(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                column: [_text(column, value) for value in self[column]]
                for column in self
            },
            self.index,
        )

    def __repr__(self) -> str:
        return self._pretty().to_string(max_rows=60, max_colwidth=40)

    def _repr_html_(self) -> str:
        return self._pretty().to_html(max_rows=200, border=0)


def models() -> Listing:
    """All models of the catalog by name: kind, parameters, active_parameters (of a
    token), shape, source, date.

    sequence: tokens a sample of the pre-training. A shape that a kind has not is 0.
    See also: mm.model, mm.clusters, mm.devices.

    >>> models().loc["llama3-8b", ["kind", "source"]].tolist()
    ['dense', 'arXiv 2407.21783 and released weights']
    """
    rows = {name: _model_row(tables.model(name)) for name in tables.names("models")}
    return _listing("models", rows)


def clusters() -> Listing:
    """All clusters of the catalog by name: device, devices_per_node, links with their
    rate per device, source, date.

    intra_bytes_per_s and inter_bytes_per_s: one way, of each device while all of its
    node send; the names of the links say whether a port belongs to a GPU or to a node.
    host_memory_bytes: of a node, 0 where it is not known. See also: mm.cluster,
    mm.devices.

    >>> clusters().loc["dgx-h100", ["device", "inter"]].tolist()
    ['h100-80', 'ib-ndr-400-per-gpu']
    """
    rows = {}
    for name in tables.names("clusters"):
        one = tables.cluster(name)
        rows[name] = {
            "device": one.device.name,
            "devices_per_node": one.devices_per_node,
            "nodes": one.nodes,
        }
        for place, link in (("intra", one.intra), ("inter", one.inter)):
            rows[name] |= {
                place: link.name,
                f"{place}_bytes_per_s": link.bandwidth_bytes_per_s,
            }
        rows[name]["host_memory_bytes"] = one.host.memory_bytes if one.host else 0.0
    return _listing("clusters", rows)


def devices() -> Listing:
    """All devices of the catalog by name: memory, dense peak by dtype, power, price
    with its date, source, date.

    bf16_flops is fp16's where a device has no bf16; 0 where it does not compute in a
    dtype. NaN: not known. See also: mm.clusters, mm.cluster.

    >>> devices().loc["h100-80", ["family", "price_date"]].tolist()
    ['hopper', '2023-10']
    """
    rows = {}
    prices = (
        tables.table("devices")
        .query("quantity == 'price'")
        .groupby("name")["date"]
        .last()
    )
    for name in tables.names("devices"):
        one = tables.device(name)
        peak = {
            dtype: one.peak_flops.get(dtype, 0.0)
            for dtype in ("fp32", "fp16", "bf16", "fp8")
        }
        rows[name] = {
            "memory_bytes": one.memory_bytes,
            "memory_bytes_per_s": one.memory_bandwidth_bytes_per_s,
        }
        rows[name] |= {
            "fp32_flops": peak["fp32"],
            "bf16_flops": peak["bf16"] or peak["fp16"],
        }
        rows[name] |= {
            "fp8_flops": peak["fp8"],
            "tdp_w": one.tdp_w,
            "usd_per_hour": one.usd_per_hour,
        }
        rows[name] |= {"price_date": prices.get(name, ""), "family": one.family}
    return _listing("devices", rows)


def _listing(file: str, rows: dict[str, dict]) -> Listing:
    origin = tables.table(file).groupby("name")[["source", "date"]].first()
    table = pd.DataFrame.from_dict(rows, orient="index").join(origin)
    return Listing(table.rename_axis("name"))


def _model_row(model: Model) -> dict:
    if isinstance(model, DLRM):
        return {
            "kind": "recommendation",
            "parameters": model.parameters,
            "active_parameters": model.parameters,
            "layers": model.bottom_layers + model.top_layers,
            "hidden": model.mlp_dim,
            "heads": 0,
            "kv_heads": 0,
            "experts": model.experts,
            "vocab": 0,
            "sequence": 0,
        }
    kind = "vision" if model.image else "mixture" if model.experts else "dense"
    if model.blocks:
        kind = (
            "encoder-decoder"
            if model.decoder_sequence
            else "hybrid"
            if model.all_blocks.has_attention
            else "state-space"
        )
    names = (
        "parameters",
        "active_parameters",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "experts",
        "vocab",
        "sequence",
    )
    return {"kind": kind} | {name: getattr(model, name) for name in names}


def _text(column: str, value) -> str:
    """A cell as it is shown; empty where nothing is known."""
    if isinstance(value, str):
        return value
    if not value > 0:
        return ""
    unit = next((unit for unit in _SHOWN if column.endswith(unit)), "")
    if unit == "flops":
        return f"{value / 1e12:,.4g} TFLOP/s"
    if unit == "parameters":
        return f"{value / 1e9:,.4g} B" if value >= 1e9 else f"{value / 1e6:,.4g} M"
    if unit.startswith("bytes"):
        return format_bytes(value) + "/s" * (unit != "bytes")
    return f"{value:,.0f} W" if unit == "w" else f"{value:g}"
