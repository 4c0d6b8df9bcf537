"""Tables of NVIDIA's aiconfigurator [github.com/ai-dynamo/aiconfigurator, systems/data]
in the layout that `calibration.fit_rates` reads.

    python benchmarks/aiconfigurator.py TABLE... [--output FILE]

fits Parquet files of it, prints the errors on rows that a fit leaves out by their hash,
and writes the facts: `madmax_lib/data/kernel_rates.csv`.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration import fit_rates, held_out, kernel_errors
from madmax_lib.catalog import OPERANDS
from madmax_lib.simulator import BYTES, distinct_bins

# aiconfigurator's columns; of state-space layers a group is a head of keys
_NAMES = {
    "gpu": "device",
    "op_name": "operation",
    "library": "source",
    "gemm_dtype": "dtype",
    "moe_dtype": "dtype",
    "nccl_dtype": "dtype",
    "batch_size": "batch",
    "isl": "sequence",
    "num_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "num_gpus": "ranks",
    "seq_len": "sequence",
    "num_v_heads": "heads",
    "nheads": "heads",
    "num_k_heads": "kv_heads",
    "n_groups": "kv_heads",
    "head_v_dim": "head_dim",
    "head_k_dim": "state",
    "d_state": "state",
}
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


def read_tables(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Rows of files, one kind of operation in each; columns as `fit_rates` takes them."""
    parts = [_in_layout(pd.read_parquet(path)) for path in paths]
    table = pd.concat(parts, ignore_index=True)
    devices = {name: catalog.device_named(name) for name in table["device"].unique()}
    known = {name: device.name for name, device in devices.items() if device}
    return table.assign(device=table["device"].replace(known))


def _in_layout(table):
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


def main():
    """Facts of tables, after their errors on held-out rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("tables", nargs="+", help="Parquet files")
    parser.add_argument("--output", help="CSV that takes the facts")
    options = parser.parse_args()
    table = read_tables(options.tables)
    out = held_out(table)
    rest = table[out]
    errors = kernel_errors(rest, fit_rates(table[~out])).abs()
    dtype = rest["dtype"].where(rest["ranks"].isna(), "")
    print(
        errors.groupby([rest["operation"], rest["device"], dtype]).median().to_string()
    )
    if options.output:
        fit_rates(table).to_csv(options.output, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
