"""What did seed 000, a student project on a fork of vTrain, configure and predict?

Its table of predictions [CSCE-614 Group 2, 2024] holds communication totals and kernel times of three pipeline stages:
enough to check the all-reduces, and in a test the graph with recomputation, exactly. Its files give the bandwidth of
whole systems where vTrain wants that of a node or a GPU; `unit_findings` notices.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.catalog import cluster, device
from madmax_lib.papers.vtrain.comm import Nccl, communication_s
from madmax_lib.papers.vtrain.config import Config

__all__ = ["SEED", "as_meant", "communication", "kernel_rates", "unit_findings"]

SEED = Config(
    tensor_parallel_size=8,
    data_parallel_size=32,
    pipeline_parallel_size=8,
    global_batch_size=2048,
    num_layers=96,
    hidden_size=8192,
    num_attention_heads=64,
    inter_node_bandwidth=409.6,
    intra_node_bandwidth=614.4,
    node_size=256,
)  # of its GPT with 96 layers on 2,048 A100
_CLOSE = 0.01


def communication(table: pd.DataFrame, nccl: Nccl) -> pd.DataFrame:
    """Communication of each row by the released rules beside the table's own, in ms, with the relative error.

    A row whose fields are no valid configuration has NaN and the reason.
    """
    rows = []
    for row in table.to_dict("records"):
        try:
            ours_ms, reason = 1e3 * communication_s(Config.of(row), nccl), ""
        except ValueError as error:
            ours_ms, reason = np.nan, str(error)
        rows.append((row["group"], row["tag"], row["comm_total_ms"], ours_ms, reason))
    result = pd.DataFrame(rows, columns=["group", "tag", "theirs_ms", "ours_ms", "reason"], index=table.index)
    return result.assign(error=result["ours_ms"] / result["theirs_ms"] - 1)


def kernel_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the A100's 16-bit peak that the kernels of a middle stage reach: group, tag, hidden, tp, share.

    FLOPs of its layers, forward twice and backward, over its compute time and the peak. More than 1 cannot be: likely
    the trace was recorded with less work, as vTrain's name of a trace does not tell the sequence.
    """
    rows = []
    for row in table[table["pipeline_parallel_size"] > 2].to_dict("records"):
        try:
            config = Config.of(row)
        except ValueError:
            continue
        s, one = config.shape, replace(config, vocab_size=1).model
        flops = 4 * one.forward_flops(s.micro_batch * s.micro_batches, s.sequence) / (s.pp * s.tp)
        peak = device(config.gpu_name).peak("fp16")
        rows.append((row["group"], row["tag"], s.hidden, s.tp, flops / (row["compute_stage1_ms"] / 1e3 * peak)))
    return pd.DataFrame(rows, columns=["group", "tag", "hidden", "tp", "share"])


def unit_findings(config: Config) -> list[str]:
    """What in a configuration looks like the total of a system in a field of a DGX A100, one line each."""
    meant = as_meant(config)
    size, findings = meant.node_size, []
    nodes = config.num_gpus / size
    if config.node_size != size and config.node_size == nodes:
        findings.append(f"node_size={config.node_size} is the number of nodes; a dgx-a100 has {size} GPUs")
    totals = {
        "intra_node_bandwidth": ("GB/s", "TB/s", size * meant.intra_node_bandwidth),
        "inter_node_bandwidth": ("Gb/s", "Tb/s", meant.inter_node_bandwidth),
    }
    for name, (unit, larger, of_node) in totals.items():
        value = getattr(config, name)
        if nodes > 1 and abs(value * 1e3 / (nodes * of_node) - 1) < _CLOSE:
            findings.append(f"{name}={value:g} {unit} is {nodes:.0f} nodes x {of_node:g} {unit} in {larger}")
    return findings


def as_meant(config: Config) -> Config:
    """The configuration with the GPUs and the network of a DGX A100, the link of one GPU inside it."""
    node = cluster("dgx-a100")
    inter = node.devices_per_node * node.inter.bandwidth_bytes_per_s * 8 / 1e9
    intra = node.intra.bandwidth_bytes_per_s / 1e9
    return replace(config, node_size=node.devices_per_node, inter_node_bandwidth=inter, intra_node_bandwidth=intra)
