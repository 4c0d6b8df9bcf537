"""Models, systems and published numbers of MAD-Max, and a step of each.

Typed with their sources in `data/models.csv`, `systems.csv` and `published.csv` of this
folder: facts of [Hsia et al., ISCA 2024, arXiv 2310.02784], its artifact and its public
release, in SI units.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import pandas as pd

from madmax_lib.catalog import Cluster
from madmax_lib.papers.madmax.model import OP_COLUMNS, evaluate
from madmax_lib.papers.madmax.rules import MadmaxRules
from madmax_lib.papers.origin import read_table, with_origin

FILES = ("madmax/models", "madmax/systems", "madmax/published")
AS_RELEASED = "MAD-Max as released"
# the serialized time of table I and figure 7 is the sum of these six
PIECES = [*OP_COLUMNS.values()]
COMMUNICATION = PIECES[2:]
_BATCH = {"DLRM": 65_536, "LLM": 2_048, "ViT": 2_048}  # as the release configures them
_SAME = ["model", "system", "task"]
# Memory in units of the weights: the artifact's sheet takes 3 x for training (weights,
# gradients, optimizer); 1 x for inference is ours.
_WEIGHT_COPIES = {"pretrain": 3, "finetune": 3, "inference": 1}


def released(table: pd.DataFrame) -> pd.DataFrame:
    """Table with the files of the paper and the released rules as its origin."""
    return with_origin(table, *FILES, rules=AS_RELEASED)


def suite() -> pd.DataFrame:
    """Models of the paper's suites, as `evaluate` takes them, with the source of each
    row.
    """
    return read_table("madmax/models")


def published(key: str) -> float:
    """A published number, NaN if nothing is published."""
    return float(published_values([key])[0])


def published_values(keys: Sequence[str]) -> np.ndarray:
    """Published numbers (n,), NaN where nothing is published."""
    values = read_table("madmax/published").set_index("key")["value"]
    return values.reindex(keys).to_numpy()


def systems(names: Iterable[str]) -> pd.DataFrame:
    """Systems as `evaluate` takes them (SI units), named by a type and a number of
    devices.

    Raises ValueError for an unknown type, or a name without a number.

    >>> pair = systems(["zionex-128", "NC96ds_A100_v4-64"])
    >>> pair[["name", "num_nodes", "mem_cap"]].values.tolist()
    [['zionex-128', 16, 40000000000.0], ['NC96ds_A100_v4-64', 16, 80000000000.0]]
    """
    types = read_table("madmax/systems").set_index("name", drop=False)
    sizes = {name: name.rpartition("-")[::2] for name in names}
    for name, (kind, devices) in sizes.items():
        if kind not in types.index or not devices.isdigit():
            raise ValueError(
                f"{name!r} is not type-number with one of the types "
                f"{', '.join(types.index)}"
            )
    table = types.loc[[kind for kind, _ in sizes.values()]].reset_index(drop=True)
    table = table.rename(columns={"name": "instance"})
    table["name"] = list(sizes)
    table["num_devices"] = [int(devices) for _, devices in sizes.values()]
    # each GPU of a node has a NIC of its own
    nodes = table["num_devices"] // table["num_ibroce_ports"]
    table["num_nodes"] = np.maximum(nodes, 1)
    # r = 1 on a single node: no AllReduce leaves it
    table["ar_perc_intra"] = table["ar_perc_intra"].where(table["num_nodes"] > 1, 1.0)
    return table.drop(columns="source")


def catalog_systems(clusters: Iterable[Cluster]) -> pd.DataFrame:
    """Clusters of the catalog as systems: data-sheet peaks and links, the utilisation
    of the paper's A100 systems.

    A link counts in full for each direction, unlike the NICs of the release. FP32 means
    TF32 where a device has it.
    """
    utilisations = ["flops_util", "mem_bw_util", "nvlink_util", "ibroce_util"]
    a100 = systems(["zionex-128"]).iloc[0]
    shares = a100[[*utilisations, "ar_perc_intra"]].to_dict()
    rows = []
    for cluster in clusters:
        device = cluster.device
        fp32_flops = device.peak_flops.get("fp32", math.nan)
        rates = {
            "f32_flops": device.peak_flops.get("tf32", fp32_flops),
            "f16_flops": device.peak(device.nearest("fp16")),
            "mem_cap": device.memory_bytes,
            "mem_bw": device.memory_bandwidth_bytes_per_s,
            "num_nvlinks": 1,
            # `evaluate` halves bandwidths, the catalog's are one way
            "bw_per_nvlink": 2 * cluster.intra.bandwidth_bytes_per_s,
            "num_ibroce_ports": cluster.devices_per_node,
            "ibroce_bw": 2 * cluster.inter.bandwidth_bytes_per_s,
        }
        one_node = {"ar_perc_intra": 1.0} if cluster.nodes == 1 else {}
        about = {"name": cluster.name, "gpu": device.name}
        counts = {"num_devices": cluster.world_size, "num_nodes": cluster.nodes}
        rows.append(shares | about | counts | rates | one_node)
    return pd.DataFrame(rows)


def cases(
    models: Sequence[str],
    strategies: Sequence[str],
    names: Sequence[str],
    task: str = "pretrain",
    global_batch: float | None = None,
) -> pd.DataFrame:
    """Every model under every strategy on every system, with the batch of the release
    unless one is given.
    """
    rows = product(models, names, strategies)
    table = pd.DataFrame(rows, columns=["model", "system", "dense_strategy"])
    table["task"] = task
    table["type"] = table["model"].map(suite().set_index("name")["type"])
    batches = table["type"].str.partition("_")[0].map(_BATCH)
    table["global_batch"] = global_batch or batches
    return table


def steps(
    cases: pd.DataFrame,
    on: pd.DataFrame | None = None,
    *,
    rules: str | MadmaxRules = "released",
) -> pd.DataFrame:
    """`evaluate` of the suite's models, with the memory needed and there, whether it
    fits, and the gain over fsdp.

    on: systems as `evaluate` takes them, by default those that the cases name, of the
    paper's types.
    Memory: 3 x weights in training (the artifact's rule), 1 x in inference (ours).
    gain: throughput over that of fsdp for the same model, system and task; NaN where
    fsdp is not among the cases.
    """
    on = systems(cases["system"].unique()) if on is None else on
    table = evaluate(cases, suite(), on, rules=rules)
    copies = table["task"].map(_WEIGHT_COPIES)
    table["memory_needed_gb"] = copies * table["weights_gb_per_device"]
    table["memory_gb"] = table["system"].map(on.set_index("name")["mem_cap"]) / 1e9
    table = table.eval("fits = memory_needed_gb <= memory_gb")
    table = table.eval("exposed_share = exposed_comm_ms / iteration_ms")
    hidden_ms = table["overlapped_comm_ms"]
    comm_ms = table[COMMUNICATION].sum(axis=1)
    table["overlapped_share"] = (hidden_ms / comm_ms).where(comm_ms > 0)
    # gain = throughput over that of fsdp, the paper's baseline; NaN in other rows, so
    # the first of a group is the one of fsdp
    rate = table["throughput_samples_per_s"]
    fsdp = rate.where(table["dense_strategy"] == "fsdp")
    same = [table[column] for column in _SAME]
    table["gain"] = rate / fsdp.groupby(same).transform("first")
    return released(table)


def best(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest row of each model, system and task twice: limit "memory" of those
    that fit, limit "none" of all.
    """
    parts = []
    # without memory limits: the dotted bars of figure 10
    for limit, rows in (("memory", table[table["fits"]]), ("none", table)):
        fastest = rows.groupby(_SAME, sort=False)["throughput_samples_per_s"].idxmax()
        parts.append(table.loc[fastest].assign(limit=limit))
    return released(pd.concat(parts, ignore_index=True))
