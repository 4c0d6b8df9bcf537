"""How long do vTrain's collectives take? Tables of measured all-reduces inside a node,
bandwidths beyond.

A tensor-parallel group reduces its activations twice in each pass of a layer, a
data-parallel group the whole fp16 gradient of a pipeline stage once. As vTrain [Bang et
al., MICRO 2024] does it (behaviour recorded); where it deviates from what one would
expect, `VTrainRules` has a switch. All functions broadcast over the arrays of a
`Sizes`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.papers.vtrain.config import Config, Sizes, VTrainRules, parse_rules

__all__ = [
    "RINGS",
    "Nccl",
    "communication_s",
    "gradient_s",
    "load_nccl",
    "send_s",
    "tensor_s",
]

_MIB = 2**20
_NAME = re.compile(r"AR_GPU(\d+)_1M_(\d+)M_LUT(?:\.csv)?")
# of a node, as vTrain counts them whatever node_size is
_NICS = 4
_GPUS_PER_NIC = 2


@dataclass(frozen=True)
class Nccl:
    """Measured all-reduces of one kind of GPU, by group size.

    duration_s: in place, seconds (sizes,) at 1, 2, 3, ... MiB.
    bus_gb_per_s: bus bandwidth at the largest size.
    """

    duration_s: Mapping[int, np.ndarray]
    bus_gb_per_s: Mapping[int, float]


RINGS = Nccl({}, {})  # no tables: all-reduces inside a node are rings at its bandwidth


def load_nccl(directory: str | Path) -> Nccl:
    """The tables AR_GPU{n}_1M_{m}M_LUT of one kind of GPU, as nccl-tests prints them:
    time in ns, bandwidth in GB/s.

    Raises FileNotFoundError for a folder without tables, ValueError for a table with
    other columns or sizes.
    """
    directory = Path(directory)
    paths = {
        int(m[1]): path
        for path in sorted(directory.glob("AR_GPU*"))
        if (m := _NAME.fullmatch(path.name))
    }
    if not paths:
        inner = sorted(
            path.name for path in directory.glob("*") if any(path.glob("AR_GPU*"))
        )
        hint = f"; it has folders of GPUs: {', '.join(inner)}" if inner else ""
        raise FileNotFoundError(f"{directory}: no AR_GPU<n>_1M_<m>M_LUT tables{hint}")
    tables = {ranks: _read(path) for ranks, path in paths.items()}
    duration_s = {ranks: table[:, 5] / NS_PER_S for ranks, table in tables.items()}
    return Nccl(
        duration_s, {ranks: float(table[-1, 6]) for ranks, table in tables.items()}
    )


def _read(path: Path) -> np.ndarray:
    """(sizes, 7): bytes, count, type, then time and bus bandwidth out of place and in
    place.
    """
    table = pd.read_csv(path)
    if table.shape[1] != 7 or not len(table):
        raise ValueError(
            f"{path}: {table.shape[1]} columns and {len(table)} rows are not an "
            "all-reduce table of 7"
        )
    values = table.apply(pd.to_numeric, errors="coerce").to_numpy(float)
    sizes = _MIB * np.arange(1, len(values) + 1)
    if not np.array_equal(values[:, 0], sizes) or not (values[:, 3:] > 0).all():
        raise ValueError(
            f"{path}: sizes are not 1, 2, 3, ... MiB or a time is not positive"
        )
    return values


def tensor_s(shape: Sizes, nccl: Nccl, rules: VTrainRules):
    """Seconds of one all-reduce of a tensor-parallel group."""
    leaves_node = rules.node_aware & (np.asarray(shape.tp) > shape.node_size)
    return _all_reduce_s(
        shape, nccl, rules, shape.tp, shape.activation_bytes, 1, leaves_node
    )


def gradient_s(shape: Sizes, nccl: Nccl, rules: VTrainRules) -> tuple:
    """Seconds of the gradient all-reduce of the first, a middle and the last stage, NaN
    where there is none.
    """
    tp = np.asarray(shape.tp)
    pp = np.asarray(shape.pp)
    leaves_node = (
        tp * shape.dp > shape.node_size if rules.node_aware else tp >= shape.node_size
    )
    ends = ((True, pp == 1), (False, False), (False, True))
    sizes = (shape.gradient_bytes(first=first, last=last) for first, last in ends)
    first, middle, last = (
        _all_reduce_s(shape, nccl, rules, shape.dp, size, tp, leaves_node)
        for size in sizes
    )
    return first, np.where(pp > 2, middle, np.nan), np.where(pp > 1, last, np.nan)


def send_s(shape: Sizes, rules: VTrainRules):
    """Seconds that a pipeline stage is blocked by sending a micro-batch's activations
    or their gradient.
    """
    node_rate = shape.inter_gbit_per_s * rules.giga / 8
    if not rules.node_aware:
        return _GPUS_PER_NIC * shape.activation_bytes / (node_rate / _NICS)
    inside = np.asarray(shape.tp) * shape.dp * shape.pp <= shape.node_size
    rate = np.where(
        inside, shape.intra_gbyte_per_s * rules.giga, node_rate / shape.node_size
    )
    return shape.activation_bytes / rate


def communication_s(
    config: Config | Mapping, nccl: Nccl, rules: str | VTrainRules = "released"
) -> float:
    """Seconds of all all-reduces of a step, summed over pipeline stages, as vTrain
    reports them for its stream Comm.

    Four per layer and micro-batch over the tensor-parallel group, one per stage over
    the data-parallel group; those of a recomputed forward pass are not counted, sending
    is not either. config: or a row with its fields.
    """
    rules = parse_rules(rules)
    shape = (config if isinstance(config, Config) else Config.of(config)).shape
    first, middle, last = (
        float(np.nan_to_num(part)) for part in gradient_s(shape, nccl, rules)
    )
    of_tensor = (
        4 * shape.layers * shape.micro_batches * float(tensor_s(shape, nccl, rules))
    )
    return of_tensor + first + max(shape.pp - 2, 0) * middle + last


def _all_reduce_s(
    shape: Sizes, nccl: Nccl, rules: VTrainRules, ranks, size_bytes, stride, leaves_node
):
    """Seconds of an all-reduce of ranks that are `stride` GPUs apart, by the network if
    it leaves the node.
    """
    ranks, size_bytes, stride, leaves_node = np.broadcast_arrays(
        ranks, size_bytes, stride, leaves_node
    )
    ring = 2 * (ranks - 1) / ranks
    inside_s = ring * size_bytes / (shape.intra_gbyte_per_s * rules.giga)
    for n in nccl.duration_s:
        inside_s = np.where(ranks == n, _table_s(nccl, n, size_bytes, rules), inside_s)
    rate = shape.inter_gbit_per_s * rules.giga / 8
    if rules.node_aware:  # the groups that leave a node side by side share its network
        rate = np.minimum(
            rate / np.minimum(stride, shape.node_size),
            shape.intra_gbyte_per_s * rules.giga,
        )
    return np.where(
        ranks > 1, np.where(leaves_node, ring * size_bytes / rate, inside_s), 0.0
    )


def _table_s(
    nccl: Nccl, ranks: int, size_bytes: np.ndarray, rules: VTrainRules
) -> np.ndarray:
    """Seconds from the table of a group size, beyond its end from the bus bandwidth
    there.
    """
    table_s = nccl.duration_s[ranks]
    mib = size_bytes / _MIB
    ring = 2 * (ranks - 1) / ranks if rules.ring_factor else 1.0
    beyond = ring / (nccl.bus_gb_per_s[ranks] * rules.giga)
    if not rules.whole_mib:
        inside = np.interp(mib, np.arange(1, len(table_s) + 1), table_s)
        return np.where(mib > len(table_s), size_bytes * beyond, inside)
    mib = np.rint(mib)
    entry = np.clip(mib, 1, len(table_s)).astype(int) - 1
    return np.where(
        mib > len(table_s), mib * _MIB * beyond, np.where(mib < 1, 0.0, table_s[entry])
    )
