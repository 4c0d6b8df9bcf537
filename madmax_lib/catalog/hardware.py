"""Devices, links, hosts and clusters: what a model is trained on.

Everything is SI: bytes, FLOP/s, bytes/s, W. A link's bandwidth is per device and one
way.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from madmax_lib.base.fields import (
    check_fields,
    dataclass_repr,
    is_whole,
    require_int,
    require_number,
    same_fields,
    short_repr,
)
from madmax_lib.catalog.refusals import refuse

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8")
_FAMILIES = ("ampere", "hopper", "blackwell", "cpu", "other")
# spellings of torch, numpy and people; and what stands for a dtype where a device lacks
# it, nearest first
_NAMES = json.loads((files("madmax_lib") / "data" / "dtype_names.json").read_text())
# less is a number in GB or TFLOP where bytes or FLOP are wanted
_LEAST_BYTES = {
    "memory_bytes": 1e6,
    "memory_bandwidth_bytes_per_s": 1e6,
    "bandwidth_bytes_per_s": 1e4,  # of a slow network
}
_LEAST_FLOPS = 1e7


def _check_units(item):
    """Raises ValueError where a field in bytes, or bytes/s, was given in GB."""
    for name, least in _LEAST_BYTES.items():
        if getattr(item, name, least) < least:
            refuse(item, name, "is in bytes, 1 GB being 1e9")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    >>> Device("mine", 80e9, 3.35e12, {"bf16": 989e12}).peak("bf16")
    989000000000000.0
    """

    name: str  # in the catalog
    memory_bytes: float  # capacity
    memory_bandwidth_bytes_per_s: float  # of that memory
    # dense, by dtype of `DTYPES`, with fp32 sums; others it lacks
    peak_flops: Mapping[str, float]
    tdp_w: float = float("nan")  # power limit in W; NaN: unknown
    usd_per_hour: float = float("nan")  # price of an hour; NaN: unknown
    # whose fitted constants it has: ampere, hopper, blackwell, or cpu; other: none
    family: str = "other"
    # device whose fitted constant `device_rate` it has; other: the family's rate is its
    # own
    rate_class: str = "other"
    sms: int = 0  # streaming multiprocessors, of AMD compute units; 0: unknown
    l2_bytes: float = float("nan")  # second-level cache; NaN: unknown
    # of all its links to its peers (NVLink, Infinity Fabric), one way; 0: none
    scale_up_bytes_per_s: float = 0.0
    # of a process beside the tensors of a step, measured on CPUs; NaN: as on GPUs
    process_bytes: float = float("nan")

    __repr__ = dataclass_repr
    __eq__ = same_fields

    def __hash__(self):
        return hash(self.name)

    def __post_init__(self):
        check_fields(self, "memory_bytes", "memory_bandwidth_bytes_per_s")
        _check_units(self)
        if self.family not in _FAMILIES:
            refuse(self, "family", f"is not one of {', '.join(_FAMILIES)}")
        if not self.peak_flops:
            raise ValueError(
                f"{self.name}: peak_flops={{}}: give one of {', '.join(DTYPES)} to "
                "compute in"
            )
        for dtype, peak in self.peak_flops.items():
            what = f"{self.name}: peak_flops of {dtype_named(dtype)}"
            require_number(what, peak, positive=True)
            if peak < _LEAST_FLOPS:
                raise ValueError(f"{what}={peak:g} is in FLOP/s, 1 TFLOP/s being 1e12")

    @property
    def is_measured(self) -> bool:
        """Whether runs on it, or on its family, have set constants."""
        return self.rate_class != "successor" and (
            (self.family, self.rate_class) != ("other", "other")
        )

    def nearest(self, dtype: str) -> str:
        """The dtype, or what stands for it where the device lacks it: fp16 for bf16.
        ValueError if nothing does.
        """
        for choice in (dtype_named(dtype), *_NAMES["wider"].get(dtype, ())):
            if choice in self.peak_flops:
                return choice
        raise ValueError(
            f"{self.name} does not compute in {dtype}; it does in "
            f"{', '.join(self.peak_flops)}"
        )

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises ValueError for a dtype that it does not compute
        in.
        """
        if (nearest := self.nearest(dtype)) != dtype:
            raise ValueError(
                f"{self.name} does not compute in {dtype}; give dtype={nearest!r}"
            )
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Link:
    """A network level: bytes that one device sends per second across it, one way.

    A node whose 8 devices share one port of 100 Gbit/s (12.5e9 bytes/s) has 12.5e9 / 8
    for each of them.
    """

    name: str
    bandwidth_bytes_per_s: float  # per device, one way
    latency_s: float = 0.0  # of one hop; 0 for that of its class of links, as fitted
    # switches add what passes, as NVLink SHARP and InfiniBand SHARP do
    in_network_reduction: bool = False

    def __post_init__(self):
        check_fields(self, "bandwidth_bytes_per_s")
        _check_units(self)
        if self.latency_s >= 1:
            refuse(self, "latency_s", "is in seconds, 1 us being 1e-6")


@dataclass(frozen=True)
class Host:
    """Memory, links and drives that a node has beside its devices."""

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    link_bytes_per_s: float  # achieved one way between that memory and one device
    uplinks: int = 0  # devices that can use that rate at once; 0: all
    nvme_bytes: float = 0.0  # of all drives together, as are their rates; 0: none
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    tdp_w: float = float("nan")  # of the processors; NaN: unknown

    __repr__ = dataclass_repr
    __eq__ = same_fields

    def __hash__(self):
        return hash(self.name)

    def __post_init__(self):
        check_fields(
            self, "memory_bytes", "memory_bandwidth_bytes_per_s", "link_bytes_per_s"
        )
        slowest = min(self.nvme_read_bytes_per_s, self.nvme_write_bytes_per_s)
        if self.nvme_bytes and not slowest > 0:
            refuse(self, "nvme_bytes", "needs rates to read and to write")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, below leaf switches (or sets of rails), below a
    spine; links' rates are per device.

    >>> from madmax_lib import catalog
    >>> catalog.cluster("dgx-h100", nodes=2).world_size
    16

    nics_per_node makes no step faster or slower, as `inter` is per device already: it
    says how many devices of a node share a port, which plans over several kinds of
    nodes (`planner.hetero`) take into account.
    """

    name: str  # in the catalog
    device: Device  # what computes
    devices_per_node: int  # in one node or NVLink domain
    nodes: int
    intra: Link  # between the devices of a node
    # between nodes, at the rate that each device has when all of its node send
    inter: Link
    host: Host | None = None  # of each node; None: not known
    # network ports of a node, together for all its devices; None: one per device
    nics_per_node: int | None = None
    # that reach each other without the spine, whole nodes; None: all
    leaf_devices: int | None = None
    # of the spine: traffic that crosses it has inter / oversubscription
    oversubscription: float = 1.0

    __repr__ = dataclass_repr

    def __post_init__(self):
        check_fields(self, "devices_per_node", "nodes", "nics_per_node", "leaf_devices")
        if self.leaf_devices and self.leaf_devices % self.devices_per_node:
            rule = f"are not whole nodes of {self.devices_per_node}"
            refuse(self, "leaf_devices", rule)
        if not self.oversubscription >= 1:
            refuse(self, "oversubscription", "must be 1 or more")

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.devices_per_node * self.nodes


def node_extent(
    name: str, usual: tuple[int, int], nodes: int | None, devices: int | None
) -> tuple[int, int]:
    """(devices of a node, nodes) that are asked for; usual: those of the cluster.

    Raises ValueError for numbers that do not go together.
    """
    full, usual_nodes = usual
    if nodes is not None:
        nodes = require_int(f"{name}: nodes", nodes, 1)
    if devices is None:
        return full, nodes or usual_nodes
    used = 0
    if is_whole(devices, 1):
        nodes = nodes or max(1, int(devices) // full)
        used = int(devices) // nodes
    if not (0 < used <= full and used * nodes == devices):
        raise ValueError(
            f"{name}: devices={short_repr(devices)} on {nodes or 'any'} nodes are "
            f"neither whole nodes of {full} nor a part of each node"
        )
    return used, nodes


def part_of_machine(
    machine: Cluster, nodes: int | None, devices: int | None
) -> Cluster:
    """A calibrated machine with other nodes. Raises ValueError where its network is not
    known.
    """
    usual = (machine.devices_per_node, machine.nodes)
    used, nodes = node_extent(machine.name, usual, nodes, devices)
    if nodes > machine.nodes == 1:
        raise ValueError(
            f"{machine.name}: nodes={nodes}, but it was calibrated on one host, without "
            "a network; calibrate over two hosts, or state it: --network 25gbit, in Python "
            "replace(mm.machine(...).cluster, nodes=..., inter=mm.Link(name, bytes/s))"
        )
    return replace(machine, devices_per_node=used, nodes=nodes)


def dtype_named(name: object) -> str:
    """The key of `DTYPES` of a name, torch's among them. Raises ValueError for an
    unknown one.

    >>> dtype_named("bfloat16"), dtype_named("torch.float8_e4m3fn"), dtype_named("bf16")
    ('bf16', 'fp8', 'bf16')
    """
    text = str(name).removeprefix("torch.").lower()
    key = _NAMES["spellings"].get(text, text)
    if key not in DTYPES:
        raise ValueError(f"dtype={short_repr(name)} is not one of {', '.join(DTYPES)}")
    return key
