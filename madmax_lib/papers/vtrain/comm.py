"""Times of vTrain's collectives: tables of measured all-reduces inside a node, bandwidths
beyond.

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
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.papers.vtrain.config import Config, Sizes, VTrainRules, parse_rules

_MIB = 2**20
_NAME = re.compile(r"AR_GPU(\d+)_1M_(\d+)M_LUT(?:\.csv)?")
# of a node, as vTrain counts them whatever node_size is
_NICS = 4
_GPUS_PER_NIC = 2


@dataclass(frozen=True)
class Nccl:
    """Measured all-reduces of one kind of GPU, by group size.

    >>> RINGS.duration_s  # no tables: all-reduces inside a node are rings
    {}
    """

    duration_s: Mapping[int, np.ndarray]  # in place, (sizes,) at 1, 2, 3, ... MiB
    bus_gb_per_s: Mapping[int, float]  # bus bandwidth at the largest size


RINGS = Nccl({}, {})  # no tables: all-reduces inside a node are rings at its bandwidth


class GradientTimes(NamedTuple):
    """Seconds of the gradient all-reduce by pipeline stage, NaN where there is none."""

    first_s: np.ndarray
    middle_s: np.ndarray  # of each stage between them
    last_s: np.ndarray


def load_nccl(directory: str | Path) -> Nccl:
    """The tables AR_GPU{n}_1M_{m}M_LUT of one kind of GPU, as nccl-tests prints them:
    time in ns, bandwidth in GB/s.

    Raises FileNotFoundError for a folder without tables, ValueError for a table with
    other columns or sizes.
    """
    directory = Path(directory)
    tables = {}
    for path in sorted(directory.glob("AR_GPU*")):
        if match := _NAME.fullmatch(path.name):
            tables[int(match[1])] = _read(path)
    if not tables:
        inner = sorted(
            path.name for path in directory.glob("*") if any(path.glob("AR_GPU*"))
        )
        hint = f"; it has folders of GPUs: {', '.join(inner)}" if inner else ""
        raise FileNotFoundError(f"{directory}: no AR_GPU<n>_1M_<m>M_LUT tables{hint}")
    # vTrain reads the in-place columns, as gradients are reduced in place
    duration_s = {ranks: table[:, 5] / NS_PER_S for ranks, table in tables.items()}
    bus = {ranks: float(table[-1, 6]) for ranks, table in tables.items()}
    return Nccl(duration_s, bus)


def _read(path):
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
    group = _Group(shape.tp, 1, leaves_node)
    return _all_reduce_s(shape, nccl, rules, group, shape.activation_bytes)


def gradient_s(shape: Sizes, nccl: Nccl, rules: VTrainRules) -> GradientTimes:
    """Seconds of the gradient all-reduce of the first, a middle and the last stage."""
    tp = np.asarray(shape.tp)
    pp = np.asarray(shape.pp)
    # As released the network counts only from tp >= node_size on, even if the
    # data-parallel group spans nodes. Its ranks are tp GPUs apart.
    leaves_node = tp >= shape.node_size
    if rules.node_aware:
        leaves_node = tp * shape.dp > shape.node_size
    # (first, last): a single stage is both
    ends = ((True, pp == 1), (False, False), (False, True))
    sizes = [shape.gradient_bytes(first=first, last=last) for first, last in ends]
    group = _Group(shape.dp, tp, leaves_node)
    first_s, middle_s, last_s = (
        _all_reduce_s(shape, nccl, rules, group, size_bytes) for size_bytes in sizes
    )
    middle_s = np.where(pp > 2, middle_s, np.nan)
    return GradientTimes(first_s, middle_s, np.where(pp > 1, last_s, np.nan))


def send_s(shape: Sizes, rules: VTrainRules):
    """Seconds that a pipeline stage is blocked by sending a micro-batch's activations
    or their gradient.
    """
    node_rate = shape.inter_gbit_per_s * rules.giga / 8
    if not rules.node_aware:
        # P = 2 x (2 b s h) / (W / 8 / 4): one of four NICs, which two GPUs share; as
        # released inside a node too
        return _GPUS_PER_NIC * shape.activation_bytes / (node_rate / _NICS)
    inside = np.asarray(shape.tp) * shape.dp * shape.pp <= shape.node_size
    intra_rate = shape.intra_gbyte_per_s * rules.giga
    rate = np.where(inside, intra_rate, node_rate / shape.node_size)
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
    gradients = gradient_s(shape, nccl, rules)
    first_s, middle_s, last_s = (float(np.nan_to_num(part_s)) for part_s in gradients)
    # comm = 4 L m AR(t, 2 b s h) + sum over stages of AR(d, G)
    calls = 4 * shape.layers * shape.micro_batches
    activations_s = calls * float(tensor_s(shape, nccl, rules))
    return activations_s + first_s + max(shape.pp - 2, 0) * middle_s + last_s


class _Group(NamedTuple):
    """Group of an all-reduce: numbers, or arrays (n,)."""

    ranks: int
    stride: int  # GPUs from one rank to the next
    leaves_node: bool


def _all_reduce_s(shape, nccl, rules, group, size_bytes):
    """Seconds of an all-reduce, by the network if its group leaves the node."""
    *group, size_bytes = np.broadcast_arrays(*group, size_bytes)
    ranks, stride, leaves_node = group
    # ring: T = 2(n-1)/n x bytes / bandwidth
    ring = 2 * (ranks - 1) / ranks
    intra_rate = shape.intra_gbyte_per_s * rules.giga
    inside_s = ring * size_bytes / intra_rate
    for n in nccl.duration_s:
        inside_s = np.where(ranks == n, _table_s(nccl, n, size_bytes, rules), inside_s)
    rate = shape.inter_gbit_per_s * rules.giga / 8
    if rules.node_aware:
        # the groups that leave a node side by side share its network
        rate = np.minimum(rate / np.minimum(stride, shape.node_size), intra_rate)
    outside_s = ring * size_bytes / rate
    return np.where(ranks > 1, np.where(leaves_node, outside_s, inside_s), 0.0)


def _table_s(nccl, ranks, size_bytes, rules):
    """Seconds from the table of a group size, beyond its end from the bus bandwidth
    there.
    """
    table_s = nccl.duration_s[ranks]
    mib = size_bytes / _MIB
    # As released bytes / bus bandwidth beyond the table, without the ring factor: up to
    # 1.75 times too fast for 8 ranks.
    ring = 2 * (ranks - 1) / ranks if rules.ring_factor else 1.0
    beyond = ring / (nccl.bus_gb_per_s[ranks] * rules.giga)
    if not rules.whole_mib:
        inside = np.interp(mib, np.arange(1, len(table_s) + 1), table_s)
        return np.where(mib > len(table_s), size_bytes * beyond, inside)
    # entry k holds k + 1 MiB; what rounds to 0 MiB is free
    mib = np.rint(mib)
    entry = np.clip(mib, 1, len(table_s)).astype(int) - 1
    inside = np.where(mib < 1, 0.0, table_s[entry])
    return np.where(mib > len(table_s), mib * _MIB * beyond, inside)
