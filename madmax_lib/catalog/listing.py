"""The catalog as tables: models, clusters and devices, SI inside, shown as an engineer
writes them.

Each row has its source and date; rows of the folder MADMAX_CATALOG come along.
"""

import pandas as pd

from madmax_lib.base.units import format_bytes
from madmax_lib.catalog import tables
from madmax_lib.catalog.models import DLRM
from madmax_lib.catalog.software import STRANGER

_SHAPE = (  # columns of a model, which a kind may not have
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
_ORIGIN = ["stack", "source", "date"]
_DEFAULT = "default of the workbench"


class Listing(pd.DataFrame):
    """A table of the catalog by name. Its numbers are plain SI; only what is printed
    has prefixes.
    """

    @property
    def _constructor(self):
        return Listing

    def _pretty(self):
        texts = {column: [_text(column, v) for v in self[column]] for column in self}
        return pd.DataFrame(texts, self.index)

    def __repr__(self):
        return self._pretty().to_string(max_rows=60, max_colwidth=72)

    def _repr_html_(self):
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
            "intra": one.intra.name,
            "intra_bytes_per_s": one.intra.bandwidth_bytes_per_s,
            "inter": one.inter.name,
            "inter_bytes_per_s": one.inter.bandwidth_bytes_per_s,
            "host_memory_bytes": one.host.memory_bytes if one.host else 0.0,
        }
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
    table = tables.table("devices").query("quantity == 'price'")
    price_dates = table.groupby("name")["date"].last()
    for name in tables.names("devices"):
        one = tables.device(name)
        peaks = dict.fromkeys(("fp32", "fp16", "fp8"), 0.0) | one.peak_flops
        rows[name] = {
            "memory_bytes": one.memory_bytes,
            "memory_bytes_per_s": one.memory_bandwidth_bytes_per_s,
            "fp32_flops": peaks["fp32"],
            "bf16_flops": peaks.get("bf16", peaks["fp16"]),
            "fp8_flops": peaks["fp8"],
            "tdp_w": one.tdp_w,
            "usd_per_hour": one.usd_per_hour,
            "price_date": price_dates.get(name, ""),
            "family": one.family,
        }
    return _listing("devices", rows)


def software(name: str) -> Listing:
    """Assumptions about a training software, a row each: value, stack (whose fact it
    is, by `like`; empty for a default of the workbench), source, date.

    The rows are indexed by the assumption in words. See also: mm.clusters, and
    catalog.software, which has them as fields.

    >>> table = software("megatron-bridge")
    >>> table.loc["bytes of a gradient in reductions", ["value", "stack"]].tolist()
    ['2.0', 'nemo']
    """
    spec = tables.software(name)
    facts = {}
    listed = tables.table("software")
    stack = spec.name
    if spec.rates == STRANGER:
        stack = ""
        of_class = tables.class_facts(spec.name)
        facts = {fact["field"]: fact | {"stack": fact["word"]} for fact in of_class}
    while stack:  # from one to that which it is like; the nearest one's facts stay
        rows = listed[listed["name"] == stack].to_dict("records")
        stated = {row["field"]: row | {"stack": stack} for row in rows}
        facts = stated | facts
        stack = stated.get("like", {}).get("value", "")
    rows = {}
    for field, words in tables.table("software_words").to_numpy():
        value = getattr(spec, field)
        texts = map(str, value) if isinstance(value, tuple) else [f"{value}"]
        fact = {"value": " ".join(texts) or "none", "stack": "", "source": _DEFAULT}
        origin = facts.get(field, {})
        rows[words] = fact | {key: origin[key] for key in _ORIGIN if key in origin}
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["value", *_ORIGIN])
    return Listing(table.fillna("").rename_axis("assumption"))


def _listing(file, rows):
    origin = tables.table(file).groupby("name")[["source", "date"]].first()
    table = pd.DataFrame.from_dict(rows, orient="index").join(origin)
    return Listing(table.rename_axis("name"))


def _model_row(model):
    row = {"kind": _kind(model)} | {name: getattr(model, name, 0) for name in _SHAPE}
    if isinstance(model, DLRM):
        row |= {
            "active_parameters": model.parameters,
            "layers": model.bottom_layers + model.top_layers,
            "hidden": model.mlp_dim,
        }
    return row


def _kind(model):
    if isinstance(model, DLRM):
        return "recommendation"
    if model.decoder_sequence:
        return "encoder-decoder"
    if model.all_blocks.has_mixer:
        return "hybrid" if model.all_blocks.has_attention else "state-space"
    if model.image:
        return "vision"
    return "mixture" if model.experts else "dense"


def _text(column, value):
    """A cell as an engineer writes it, by the unit at the end of the column's name;
    empty where nothing is known.
    """
    if isinstance(value, str):
        return value
    if not value > 0:  # NaN too
        return ""
    if column.endswith("flops"):
        return f"{value / 1e12:,.5g} TFLOP/s"
    if column.endswith("parameters"):
        return f"{value / 1e9:,.4g} B" if value >= 1e9 else f"{value / 1e6:,.4g} M"
    if column.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if column.endswith("bytes"):
        return format_bytes(value)
    return f"{value:,.0f} W" if column.endswith("_w") else f"{value:g}"
