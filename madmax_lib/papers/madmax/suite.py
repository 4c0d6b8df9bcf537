"""Which models, systems and published numbers does MAD-Max talk about, and what is a step of each?

Typed with their sources in `data/models.csv`, `systems.csv` and `published.csv` of this folder: facts of
[Hsia et al., ISCA 2024, arXiv 2310.02784], its artifact and its public release. Human units there, SI units here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

import pandas as pd

from madmax_lib.papers import origin
from madmax_lib.papers.madmax.model import evaluate
from madmax_lib.papers.madmax.rules import Rules
from madmax_lib.papers.origin import read_table
from madmax_lib.specs import Cluster

__all__ = [
    "COMMUNICATION", "PIECES", "best", "cases", "catalog_systems", "class_strategies", "published", "steps", "suite",
    "systems", "with_origin",
]  # fmt: skip

COMMUNICATION = ["all2all_ms", "allreduce_ms", "allgather_ms", "reducescatter_ms"]
PIECES = ["gemm_ms", "emb_ms", *COMMUNICATION]
_FILES = ("madmax/models", "madmax/systems", "madmax/published")
_BATCH = {"DLRM": 65_536, "LLM": 2_048, "ViT": 2_048}  # as the release configures them
_SAME = ["model", "system", "task"]
_WEIGHT_COPIES = {"inference": 1}  # else 3, the rule of the artifact's sheet for training


def with_origin(table: pd.DataFrame, *names: str, rules: str = "MAD-Max as released") -> pd.DataFrame:
    """As `origin.with_origin`; the files of the paper's suites if none are named."""
    return origin.with_origin(table, *(names or _FILES), rules=rules)


def suite() -> pd.DataFrame:
    """Models of the paper's suites, as `evaluate` takes them, with the source of each row."""
    return read_table("madmax/models").copy()


def published(key: str | None = None) -> pd.DataFrame | float:
    """Published numbers: key, figure, claim, value, unit, whether it follows from public material, source.

    With a key its value, NaN if nothing is published.
    """
    if key is None:
        return read_table("madmax/published").copy()
    return _published_values().get(key, math.nan)


@lru_cache(maxsize=1)
def _published_values() -> dict[str, float]:
    return read_table("madmax/published").set_index("key")["value"].to_dict()


def systems(sizes: Iterable[tuple[str, int]]) -> pd.DataFrame:
    """Systems of a type and a number of devices, named type-number, as `evaluate` takes them (SI units).

    Raises ValueError for an unknown type.

    >>> systems([("zionex", 128), ("NC96ds_A100_v4", 64)])[["name", "num_nodes", "mem_cap"]].values.tolist()
    [['zionex-128', 16, 40000000000.0], ['NC96ds_A100_v4-64', 16, 80000000000.0]]
    """
    known = read_table("madmax/systems").set_index("name")
    rows = []
    for name, devices in sizes:
        if name not in known.index:
            raise ValueError(f"unknown system type {name!r}; known: {', '.join(known.index)}")
        row = known.loc[name]
        nodes = max(devices // row["devices_per_node"], 1)
        peaks = {"f64_flops": "fp64_tflops", "f32_flops": "fp32_tflops", "f16_flops": "fp16_tflops",
                 "i8_ops": "int8_tops"}  # fmt: skip
        rows.append({
            "name": f"{name}-{devices}", "instance": name, "gpu": row["gpu"], "provider": row["provider"],
            "num_devices": devices, "num_nodes": nodes, **{key: row[peak] * 1e12 for key, peak in peaks.items()},
            "flops_util": row["flops_util"], "mem_cap": row["memory_gb"] * 1e9, "mem_bw": row["memory_gb_per_s"] * 1e9,
            "mem_bw_util": row["memory_util"], "num_nvlinks": row["nvlinks"],
            "bw_per_nvlink": row["nvlink_gb_per_s"] * 1e9, "nvlink_util": row["nvlink_util"],
            "num_ibroce_ports": row["devices_per_node"], "ibroce_bw": row["nic_gb_per_s"] * 1e9,
            "ibroce_util": row["nic_util"], "ar_perc_intra": 1.0 if nodes == 1 else row["ar_perc_intra"],
            "usd_per_gpu_hour": row["usd_per_gpu_hour"], "tdp_w_per_gpu": row["tdp_w_per_gpu"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def catalog_systems(clusters: Iterable[Cluster]) -> pd.DataFrame:
    """Clusters of the catalog as systems: data-sheet peaks and links, the utilisation of the paper's A100 systems.

    A link counts in full for each direction, unlike the NICs of the release. FP32 means TF32 where a device has it.
    """
    share = read_table("madmax/systems").set_index("name").loc["zionex"]
    rows = []
    for one in clusters:
        peaks = one.device.peak_flops
        rows.append({
            "name": one.name, "gpu": one.device.name, "num_devices": one.world_size, "num_nodes": one.nodes,
            "f32_flops": peaks.get("tf32", peaks.get("fp32", math.nan)), "f16_flops": one.device.peak("bf16"),
            "flops_util": share["flops_util"], "mem_cap": one.device.memory_bytes,
            "mem_bw": one.device.memory_bandwidth_bytes_per_s, "mem_bw_util": share["memory_util"], "num_nvlinks": 1,
            "bw_per_nvlink": 2 * one.intra.bandwidth_bytes_per_s, "nvlink_util": share["nvlink_util"],
            "num_ibroce_ports": one.devices_per_node, "ibroce_bw": 2 * one.inter.bandwidth_bytes_per_s,
            "ibroce_util": share["nic_util"], "ar_perc_intra": 1.0 if one.nodes == 1 else share["ar_perc_intra"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def cases(
    models: Sequence[str], strategies: Sequence[str], names: Sequence[str], task: str = "pretrain",
    global_batch: float | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Every model under every strategy on every system, with the batch of the release unless one is given."""
    kinds = suite().set_index("name")["type"]
    rows = [
        {"model": model, "type": kinds[model], "system": name, "task": task, "dense_strategy": strategy,
         "global_batch": global_batch or _BATCH[kinds[model].split("_")[0]]}
        for model in models for name in names for strategy in strategies
    ]  # fmt: skip
    return pd.DataFrame(rows)


def steps(cases: pd.DataFrame, systems: pd.DataFrame, *, rules: str | Rules = "released") -> pd.DataFrame:
    """`evaluate` of the suite's models, with the memory needed and there, whether it fits, and the gain over fsdp.

    Memory: 3 x weights in training (the artifact's rule), 1 x in inference (ours). gain: throughput over that of fsdp
    for the same model, system and task; NaN where fsdp is not among the cases.
    """
    table = evaluate(cases, suite(), systems, rules=rules)
    copies = table["task"].map(_WEIGHT_COPIES).fillna(3)
    table["memory_needed_gb"] = copies * table["weights_gb_per_device"]
    table["memory_gb"] = table["system"].map(systems.set_index("name")["mem_cap"]) / 1e9
    table["fits"] = table["memory_needed_gb"] <= table["memory_gb"]
    comm_ms = table[COMMUNICATION].sum(axis=1)
    table["exposed_share"] = table["exposed_comm_ms"] / table["iteration_ms"]
    table["overlapped_share"] = (table["overlapped_comm_ms"] / comm_ms).where(comm_ms > 0)
    fsdp = table[table["dense_strategy"] == "fsdp"].set_index(_SAME)["throughput_samples_per_s"]
    base = fsdp.reindex(pd.MultiIndex.from_frame(table[_SAME])).to_numpy()
    table["gain"] = table["throughput_samples_per_s"] / base
    return with_origin(table)


def best(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest row of each model, system and task twice: limit "memory" of those that fit, limit "none" of all."""
    parts = []
    for limit, rows in (("memory", table[table["fits"]]), ("none", table)):
        fastest = rows.groupby(_SAME, sort=False)["throughput_samples_per_s"].idxmax()
        parts.append(table.loc[fastest].assign(limit=limit))
    return with_origin(pd.concat(parts, ignore_index=True))


def class_strategies(model: str, name: str, devices: int) -> pd.DataFrame:
    """Every pair of a strategy for the MLPs and one for the transformer blocks of a model on a system.

    Columns of `steps`, with mlp and transformer; gain over fsdp for both classes.
    """
    pairs = list(product(("fsdp", "ddp", "tp,ddp", "fsdp,ddp"), repeat=2))
    texts = [f"mlp={mlp}; transformer={blocks}" for mlp, blocks in pairs]
    table = steps(cases([model], texts, [f"{name}-{devices}"]), systems([(name, devices)]))
    table[["mlp", "transformer"]] = pairs
    fsdp = table.loc[(table["mlp"] == "fsdp") & (table["transformer"] == "fsdp"), "throughput_samples_per_s"]
    table["gain"] = table["throughput_samples_per_s"] / fsdp.iloc[0]
    return table
