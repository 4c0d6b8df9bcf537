"""What did seed 000, a student project on a fork of vTrain, configure and predict?

Its table of predictions [CSCE-614 Group 2, 2024] holds communication totals and kernel times of three pipeline stages:
enough to check the all-reduces and the graph with recomputation exactly. Its files give the bandwidth of whole systems
where vTrain wants that of a node or a GPU; `unit_findings` notices.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.catalog import cluster, device
from madmax_lib.papers.vtrain_comm import Nccl, communication_s
from madmax_lib.papers.vtrain_config import Config
from madmax_lib.papers.vtrain_graph import Operators
from madmax_lib.specs import Cluster

__all__ = ["as_meant", "communication", "kernel_rates", "stage_operators", "unit_findings"]

_TERMS = ("forward", "backward", "embedding", "output", "update", "embedding_update")
_SPAN = 1e-9  # singular values below this share of the largest count as zero
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


def stage_operators(table: pd.DataFrame) -> dict[tuple[int, int, int], Operators]:
    """Kernel times of the operators by (hidden, tp, micro-batch), from the compute times of three stages per row.

    With n layers per stage and m micro-batches, by the released recomputation:
    a middle stage takes m n (2f + b) + n w, the first m (2 e_f + e_b) + w0 more, the last m (n (f + b) + g) + n w.
    Groups of a sequence length whose rows do not determine all six are left out. How e and g are split is a convention.
    """
    found = {}
    for (*key, _), rows in table.groupby(["hidden_size", "tensor_parallel_size", "micro_batch_size", "max_length"]):
        columns, time_s = [], []
        for row in rows.to_dict("records"):
            n = row["num_layers"] / row["pipeline_parallel_size"]
            m = row["global_batch_size"] / (row["data_parallel_size"] * row["micro_batch_size"])
            columns += [(2 * m * n, m * n, m, 0, n, 1), (2 * m * n, m * n, 0, 0, n, 0), (m * n, m * n, 0, m, n, 0)]
            time_s += [row[f"compute_{stage}_ms"] / 1e3 for stage in ("stage0", "stage1", "laststage")]
        scale = np.linalg.norm(columns, axis=0)
        values, _, rank, _ = np.linalg.lstsq(columns / scale, np.array(time_s), rcond=_SPAN)
        if rank == len(_TERMS):
            found[tuple(int(part) for part in key)] = _operators(*(values / scale))
    return found


def _operators(forward, backward, embedding, output, update, embedding_update) -> Operators:
    return Operators(forward, backward, embedding / 4, embedding / 2, output / 3, output * 2 / 3, update,
                     embedding_update)  # fmt: skip


def unit_findings(config: Config, node: Cluster | None = None) -> list[str]:
    """What in a configuration looks like the total of a system in a field of a node, one line each.

    node: what a node is, the DGX A100 if None: its GPUs, and the bandwidth of all of them together.
    """
    node = node or cluster("dgx-a100")
    size = node.devices_per_node
    nodes, found = config.num_gpus / size, []
    if config.node_size != size and config.node_size == nodes:
        found.append(f"node_size={config.node_size} is the number of nodes; a {node.name} has {size} GPUs")
    totals = {
        "intra_node_bandwidth": ("GB/s", "TB/s", size * node.intra.bandwidth_bytes_per_s / 1e9),
        "inter_node_bandwidth": ("Gb/s", "Tb/s", size * node.inter.bandwidth_bytes_per_s * 8 / 1e9),
    }
    for name, (unit, larger, of_node) in totals.items():
        value = getattr(config, name)
        if nodes > 1 and abs(value * 1e3 / (nodes * of_node) - 1) < _CLOSE:
            found.append(f"{name}={value:g} {unit} is {nodes:.0f} nodes x {of_node:g} {unit} in {larger}")
    return found


def as_meant(config: Config, node: Cluster | None = None) -> Config:
    """The configuration with the GPUs and the network of such a node, the link of one GPU inside it."""
    node = node or cluster("dgx-a100")
    inter = node.devices_per_node * node.inter.bandwidth_bytes_per_s * 8 / 1e9
    return replace(config, node_size=node.devices_per_node, inter_node_bandwidth=inter,
                   intra_node_bandwidth=node.intra.bandwidth_bytes_per_s / 1e9)  # fmt: skip
