"""How long do vTrain's collectives take? Tables of measured all-reduces inside a node, bandwidths beyond.

A tensor-parallel group reduces its activations twice in each pass of a layer, a data-parallel group the whole fp16
gradient of a pipeline stage once. As vTrain [Bang et al., MICRO 2024] does it (behaviour recorded); where it deviates
from what one would expect, `Rules` has a switch. All functions broadcast over the arrays of a `Shape`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.papers.vtrain.config import Config, Shape
from madmax_lib.papers.vtrain.rules import Rules, parse_rules
from madmax_lib.units import NS_PER_S

__all__ = ["RINGS", "Nccl", "activation_bytes", "communication_s", "gradient_bytes", "gradient_s", "load_nccl",
           "send_s", "tensor_s"]  # fmt: skip

_MIB = 2**20
_NAME = re.compile(r"AR_GPU(\d+)_1M_(\d+)M_LUT(?:\.csv)?")
_NICS, _GPUS_PER_NIC = 4, 2  # of a node, as vTrain counts them whatever node_size is


@dataclass(frozen=True)
class Nccl:
    """Measured all-reduces: in-place seconds (sizes,) by group size, at 1, 2, 3, ... MiB; bus bandwidth at the end."""

    duration_s: Mapping[int, np.ndarray]
    bus_gb_per_s: Mapping[int, float]


RINGS = Nccl({}, {})  # no tables: all-reduces inside a node are rings at its bandwidth


def load_nccl(directory: str | Path) -> Nccl:
    """The tables AR_GPU{n}_1M_{m}M_LUT of one kind of GPU, as nccl-tests prints them: time in ns, bandwidth in GB/s.

    Raises FileNotFoundError for a folder without tables, ValueError for a table with other columns or sizes.
    """
    directory = Path(directory)
    found = {int(m[1]): path for path in sorted(directory.glob("AR_GPU*")) if (m := _NAME.fullmatch(path.name))}
    if not found:
        inner = sorted(path.name for path in directory.glob("*") if any(path.glob("AR_GPU*")))
        hint = f"; it has folders of GPUs: {', '.join(inner)}" if inner else ""
        raise FileNotFoundError(f"{directory}: no AR_GPU<n>_1M_<m>M_LUT tables{hint}")
    tables = {ranks: _read(path) for ranks, path in found.items()}
    return Nccl({n: table[:, 5] / NS_PER_S for n, table in tables.items()},
                {n: float(table[-1, 6]) for n, table in tables.items()})  # fmt: skip


def _read(path: Path) -> np.ndarray:
    """(sizes, 7): bytes, count, type, then time and bus bandwidth out of place and in place."""
    table = pd.read_csv(path)
    if table.shape[1] != 7 or not len(table):
        raise ValueError(f"{path}: {table.shape[1]} columns and {len(table)} rows are not an all-reduce table of 7")
    values = table.apply(pd.to_numeric, errors="coerce").to_numpy(float)
    sizes = _MIB * np.arange(1, len(values) + 1)
    if not np.array_equal(values[:, 0], sizes) or not (values[:, 3:] > 0).all():
        raise ValueError(f"{path}: sizes are not 1, 2, 3, ... MiB or a time is not positive")
    return values


def activation_bytes(shape: Shape):
    """fp16 activations of a micro-batch: what tensor parallelism reduces and a pipeline stage sends."""
    return 2 * shape.micro_batch * shape.sequence * shape.hidden


def gradient_bytes(shape: Shape, *, first: bool, last: bool):
    """fp16 gradient of a pipeline stage: its layers, token and position embedding on the first, output on the last.

    >>> gradient_bytes(Shape(1, 2, 4, 1, 2, 16, 1024, 1024), first=True, last=False) / 2**20
    196.259765625
    """
    h, t = shape.hidden, shape.tp
    attention = 3 * h * (h // t) + (3 * h) // t + h * (h // t) + h
    feed_forward = h * (4 * h // t) + (4 * h) // t + 4 * h * (h // t) + h
    vocabulary = (shape.vocab // t) * h
    ends = first * (vocabulary + shape.sequence * h) + last * vocabulary
    return 2 * (shape.layers // shape.pp * (4 * h + attention + feed_forward) + ends)


def tensor_s(shape: Shape, nccl: Nccl, rules: Rules):
    """Seconds of one all-reduce of a tensor-parallel group."""
    leaves_node = rules.node_aware & (np.asarray(shape.tp) > shape.node_size)
    return _all_reduce_s(shape, nccl, rules, shape.tp, activation_bytes(shape), 1, leaves_node)


def gradient_s(shape: Shape, nccl: Nccl, rules: Rules) -> tuple:
    """Seconds of the gradient all-reduce of the first, a middle and the last stage, NaN where there is none."""
    tp, pp = np.asarray(shape.tp), np.asarray(shape.pp)
    leaves_node = tp * shape.dp > shape.node_size if rules.node_aware else tp >= shape.node_size
    first, middle, last = (
        _all_reduce_s(shape, nccl, rules, shape.dp, gradient_bytes(shape, first=a, last=b), tp, leaves_node)
        for a, b in ((True, pp == 1), (False, False), (False, True))
    )
    return first, np.where(pp > 2, middle, np.nan), np.where(pp > 1, last, np.nan)


def send_s(shape: Shape, rules: Rules):
    """Seconds that a pipeline stage is blocked by sending a micro-batch's activations or their gradient."""
    s = shape
    if not rules.node_aware:
        return _GPUS_PER_NIC * activation_bytes(s) / (s.inter_gbit_per_s * rules.giga / 8 / _NICS)
    outside = s.inter_gbit_per_s * rules.giga / 8 / s.node_size
    inside = s.intra_gbyte_per_s * rules.giga
    return activation_bytes(s) / np.where(np.asarray(s.tp) * s.dp * s.pp <= s.node_size, inside, outside)


def communication_s(config: Config | Mapping, nccl: Nccl, rules: str | Rules = "released") -> float:
    """Seconds of all all-reduces of a step, summed over pipeline stages, as vTrain reports them for its stream Comm.

    Four per layer and micro-batch over the tensor-parallel group, one per stage over the data-parallel group; those
    of a recomputed forward pass are not counted, sending is not either. config: or a row with its fields.
    """
    rules, shape = parse_rules(rules), (config if isinstance(config, Config) else Config.of(config)).shape
    first, middle, last = (float(np.nan_to_num(part)) for part in gradient_s(shape, nccl, rules))
    of_tensor = 4 * shape.layers * shape.micro_batches * float(tensor_s(shape, nccl, rules))
    return of_tensor + first + max(shape.pp - 2, 0) * middle + last


def _all_reduce_s(shape: Shape, nccl: Nccl, rules: Rules, ranks, size_bytes, stride, leaves_node):
    """Seconds of an all-reduce of ranks that are `stride` GPUs apart, by the network if it leaves the node."""
    ranks, size_bytes, stride, leaves_node = np.broadcast_arrays(ranks, size_bytes, stride, leaves_node)
    ring = 2 * (ranks - 1) / ranks
    inside_s = ring * size_bytes / (shape.intra_gbyte_per_s * rules.giga)
    for n in nccl.duration_s:
        inside_s = np.where(ranks == n, _table_s(nccl, n, size_bytes, rules), inside_s)
    rate = shape.inter_gbit_per_s * rules.giga / 8
    if rules.node_aware:  # the groups that leave a node side by side share its network
        rate = np.minimum(rate / np.minimum(stride, shape.node_size), shape.intra_gbyte_per_s * rules.giga)
    return np.where(ranks > 1, np.where(leaves_node, ring * size_bytes / rate, inside_s), 0.0)


def _table_s(nccl: Nccl, ranks: int, size_bytes: np.ndarray, rules: Rules) -> np.ndarray:
    """Seconds from the table of a group size, beyond its end from the bus bandwidth there."""
    known, mib = nccl.duration_s[ranks], size_bytes / _MIB
    ring = 2 * (ranks - 1) / ranks if rules.ring_factor else 1.0
    beyond = ring / (nccl.bus_gb_per_s[ranks] * rules.giga)
    if not rules.whole_mib:
        inside = np.interp(mib, np.arange(1, len(known) + 1), known)
        return np.where(mib > len(known), size_bytes * beyond, inside)
    mib = np.rint(mib)
    place = np.clip(mib, 1, len(known)).astype(int) - 1
    return np.where(mib > len(known), mib * _MIB * beyond, np.where(mib < 1, 0.0, known[place]))
