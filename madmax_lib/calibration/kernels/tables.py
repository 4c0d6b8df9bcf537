"""Tables of measured kernels and collectives in one layout, that of
`kernels.fit`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.catalog.hardware import dtype_named
from madmax_lib.catalog.kernel_rates import OPERANDS
from madmax_lib.simulator.layers.ops import BYTES
from madmax_lib.simulator.rates.compute import distinct_bins

# aiconfigurator's columns; of state-space layers a group is a head of keys
_NAMES = json.loads(catalog.data_file("kernel_columns.json").read_text())
_OPERATIONS = {"context_attention": "attention", "alltoall": "all_to_all"}
_SCANS = {"causal_conv1d_fn": "convolution", "chunk_gated_delta_rule": "delta_rule"}
# tokens of a sequence: shorter ones are those of serving
_SHORTEST = 128
# NCCL 2.26: what is older belongs to trainings of years ago
_NCCL = 26
# whose collectives in that table are a thousand times too slow
_DOUBTFUL_LINKS = ("l40s",)
# whose convolutions there move 8 TB/s through a memory of 2
_DOUBTFUL_SCANS = ("a100-80",)
# wider ones run in kernels of their own
_WIDEST_HEAD = 256
_DEEPEP_SMS = 20
_MOE_MATRICES = 3  # of an expert with a gate


def read_kernels(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Rows of files, CSV or Parquet, and of folders of them.

    Columns: as `kernels.fit` says. Raises ValueError naming the file for one
    that is of none of the layouts that are read.
    """
    files = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.parquet")) + sorted(path.glob("*.csv"))
        files += inside if path.is_dir() else [path]
    parts = []
    for file in files:
        is_parquet = file.suffix == ".parquet"
        table = pd.read_parquet(file) if is_parquet else pd.read_csv(file)
        parts.append(_in_layout(table, file))
    table = pd.concat(parts, ignore_index=True)
    return table.assign(device=table["device"].map(_device_name))


def _device_name(name):
    """The catalog's name of a device, where it has it."""
    device = catalog.device_named(name)
    return device.name if device else name


def _in_layout(table, file):
    """A table in our layout."""
    columns = set(table.columns)
    if {"gpu", "op_name"} <= columns:
        return _aiconfigurator(table)
    if {"kernel", "moved_bytes"} <= columns:
        return _bench_kernels(table)
    if {"collective", "machine"} <= columns:
        table = table[table["nodes"] == 1]
        return table.rename(columns={"collective": "operation", "machine": "device"})
    if missing := {"operation", "device", "dtype", "seconds"} - columns:
        raise ValueError(f"{file}: column(s) {', '.join(sorted(missing))} missing")
    return table


def _aiconfigurator(table):
    """Rows of what training runs: no decoding, no compressed caches, no windows."""
    table = table.rename(columns=_NAMES)
    operation = table["operation"].replace(_OPERATIONS)
    table = table.assign(
        operation=operation, source="aiconfigurator: " + table["source"]
    )
    kind = operation.iloc[0]
    if kind == "attention":
        # a cache in 8 bits, Triton's kernels and decoding are of inference
        of_inference = table["kernel_source"].str.contains("triton|decode")
        of_inference |= (table["kv_cache_dtype"] != "bfloat16") | (
            table["window_size"] > 0
        )
        table = table[~of_inference & (table["head_dim"] <= _WIDEST_HEAD)]
        return table.assign(dtype="bf16")
    if kind == "normal":
        return _deepep(table)
    if "d_conv" in table:
        return _scans(table)
    if "message_size" in table:
        minor = table["source"].str.extract(r"nccl 2\.(\d+)")[0].astype(int)
        trusted = ~table["device"].isin(_DOUBTFUL_LINKS)
        table = table[trusted & (minor >= _NCCL)]
        element_bytes = table["dtype"].map({"half": 2, "int8": 1})
        return table.assign(size_bytes=table["message_size"] * element_bytes)
    table = table.assign(dtype=table["dtype"].replace("bfloat16", "bf16"))
    return _moe(table) if kind == "moe" else table


def _deepep(table):
    """Exchanges of tokens with experts inside a node: bytes that a rank sends, in 8
    bits to the experts and in 16 back.
    """
    # DeepEP's own number of multiprocessors; a single expert is another use. A node of
    # GB200 has 4 devices, others 8.
    usual = (table["node_num"] == 1) & (table["dispatch_sms"] == _DEEPEP_SMS)
    table = table[usual & (table["num_topk"] > 1)]
    ranks = np.where(table["device"] == "gb200", 4.0, 8.0)
    # a token goes once to each device that has some of its experts
    copies = distinct_bins(ranks, table["num_topk"])
    values = table["num_token"] * table["hidden_size"] * copies
    parts = []
    for operation, element_bytes in (("dispatch", 1), ("combine", 2)):
        time_us = table[f"{operation}_transmit_us"] + table[f"{operation}_notify_us"]
        part = table.assign(operation=operation, dtype="", ranks=ranks)
        part = part.assign(size_bytes=values * element_bytes, seconds=time_us * 1e-6)
        parts.append(part)
    return pd.concat(parts)


def _scans(table):
    """Gated delta rules, and the causal convolutions before them and Mamba-2's scans."""
    kernel = table["kernel_source"].str.extract(f"({'|'.join(_SCANS)})")[0]
    table = table.assign(operation=kernel.map(_SCANS), dtype="bf16")
    trained = table["operation"].notna() & (table["phase"] == "context")
    trained &= ~table["device"].isin(_DOUBTFUL_SCANS)
    table = table[trained & (table["sequence"] >= _SHORTEST)]
    # keys and queries (or B and C) and values pass the convolution
    keys = 2 * table["kv_heads"] * table["state"]
    channels = keys + table["heads"] * table["head_dim"]
    elements = table["num_tokens"] * channels
    return table.assign(
        flops=2.0 * table["d_conv"] * elements,
        size_bytes=2.0 * BYTES["bf16"] * elements,
    )


def _moe(table):
    """Experts of a device: work of the tokens that are routed to it, with the fastest
    kernel for each shape.
    """
    shape = ["device", "dtype", "num_tokens", "hidden_size", "inter_size", "topk"]
    shape += ["num_experts", "moe_tp_size", "moe_ep_size"]
    in_dtypes = table["dtype"].isin([*BYTES, *OPERANDS])
    balanced = table["distribution"] == "balanced"
    # some devices were only measured under a skewed routing
    skewed = ~table["device"].isin(table.loc[balanced, "device"])
    table = table[in_dtypes & (balanced | skewed)].sort_values("seconds")
    table = table.drop_duplicates(shape).sort_index()
    hidden = table["hidden_size"]
    width = table["inter_size"] / table["moe_tp_size"]
    experts = table["num_experts"] / table["moe_ep_size"]
    routed = table["num_tokens"] * table["topk"] / table["moe_ep_size"]
    used = distinct_bins(experts, routed)  # to which some token is routed
    operand_bytes = table["dtype"].map(lambda name: BYTES[OPERANDS.get(name, name)])
    weights = _MOE_MATRICES * used * hidden * width
    activations = routed * (2 * hidden + _MOE_MATRICES * width)
    return table.assign(
        flops=2 * _MOE_MATRICES * routed * hidden * width,
        size_bytes=operand_bytes * weights + 2 * BYTES["bf16"] * activations,
    )


def _bench_kernels(table):
    """Products of `madmax bench`: forward, by PyTorch's own kernels; shape: tokens,
    hidden and ffn.
    """
    linear = table["kernel"].str.fullmatch("linear.* forward")
    table = table[linear & (table["how"] == "eager")]
    block = table["shape"].str.split("x", expand=True).astype(float)
    hidden, ffn = block[1], block[2]
    is_up = table["kernel"].str.contains(" up ")
    is_down = table["kernel"].str.contains(" down ")
    return table.assign(
        operation="gemm",
        device=table["machine"],
        dtype=table["dtype"].map(dtype_named),
        seconds=table["median_s"],
        m=block[0],
        n=ffn.where(is_up, hidden),
        k=ffn.where(is_down, hidden),
    )
