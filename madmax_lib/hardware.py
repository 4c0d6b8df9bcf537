"""On what is a model trained? Devices, links, hosts and clusters.

Everything is SI: bytes, FLOP/s, bytes/s, W. A link's bandwidth is per device and one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Cluster", "Device", "Host", "Link", "check_positive"]

_DTYPE_FALLBACK = {"bf16": "fp16", "fp16": "bf16", "tf32": "fp32", "fp8": "bf16", "mxfp8": "fp8", "nvfp4": "fp8"}


@dataclass(frozen=True)
class Device:
    """One accelerator.

    name: in the catalog.
    memory_bytes: capacity.
    memory_bandwidth_bytes_per_s: of that memory.
    peak_flops: dense peak in FLOP/s by dtype (fp64 fp32 tf32 fp16 bf16 fp8 mxfp8 nvfp4 int8).
    tdp_w: power limit in W (default NaN: unknown).
    usd_per_hour: price of an hour (default NaN: unknown).
    family: architecture whose fitted constants it has (default other: none are fitted).
    rate_class: device whose fitted constant `device_rate` it has (default other: the family's rate is its own).
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float] = field(hash=False)
    tdp_w: float = float("nan")
    usd_per_hour: float = float("nan")
    family: str = "other"
    rate_class: str = "other"

    def __post_init__(self):
        check_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s")

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s; a dtype the device lacks runs at the next wider one it has.

        Raises ValueError for a dtype that is unknown, or where the device has no such wider one.
        """
        wanted, seen = dtype, set()  # fp16 and bf16 stand for each other
        while wanted not in self.peak_flops:
            if wanted in seen or wanted not in _DTYPE_FALLBACK:
                raise ValueError(f"{self.name} has no peak for dtype {dtype!r}; it has {', '.join(self.peak_flops)}")
            seen.add(wanted)
            wanted = _DTYPE_FALLBACK[wanted]
        return self.peak_flops[wanted]


@dataclass(frozen=True)
class Link:
    """A network level.

    name: in the catalog.
    bandwidth_bytes_per_s: per device, one way.
    latency_s: of one hop (default 0).
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self):
        check_positive(self, "bandwidth_bytes_per_s")


@dataclass(frozen=True)
class Host:
    """What stands beside the devices of a node: memory, the links to it, and drives.

    name: of the host.
    memory_bytes, memory_bandwidth_bytes_per_s: of its memory.
    link_bytes_per_s: achieved one way between that memory and one device.
    uplinks: devices that can use that rate at once (default 0: all).
    nvme_bytes, nvme_read_bytes_per_s, nvme_write_bytes_per_s: of all drives together (default 0: none).
    tdp_w: of the processors (default NaN: unknown).
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    uplinks: int = 0
    nvme_bytes: float = 0.0
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    tdp_w: float = float("nan")

    def __post_init__(self):
        check_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s", "link_bytes_per_s")
        if self.nvme_bytes and not min(self.nvme_read_bytes_per_s, self.nvme_write_bytes_per_s) > 0:
            raise ValueError(f"{self.name}: nvme_bytes={self.nvme_bytes} needs rates to read and to write")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    name: in the catalog.
    device: what computes.
    devices_per_node, nodes: how many.
    intra: link between the devices of a node.
    inter: link between nodes.
    host: of each node (default None: not known).
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    intra: Link
    inter: Link
    host: Host | None = None

    def __post_init__(self):
        check_positive(self, "devices_per_node", "nodes")

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.devices_per_node * self.nodes


def check_positive(item, *names: str) -> None:
    """Raises ValueError for a field that is not above zero."""
    for name in names:
        value = getattr(item, name)
        if not value > 0:
            raise ValueError(f"{item.name}: {name}={value} must be positive")
