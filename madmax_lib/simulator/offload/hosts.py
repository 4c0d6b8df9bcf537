"""How fast does a host work for one device? Its share of host memory, of the links to
the devices and of the drives.

All devices of a node move and update at the same time, so each has its share. CPU Adam
is bound by memory traffic: weights, two moments and gradient read; the first three and
a 16-bit copy written.
"""

from dataclasses import dataclass

import numpy as np

from madmax_lib.catalog import Cluster, Host
from madmax_lib.simulator.offload.placement import Method, Split

# fp32 weight, two moments, 16-bit gradient and copy, rounded to whole numbers of fp32
ADAM_BYTES = 28
ACCUMULATE_BYTES = 6  # a 16-bit gradient and the sum so far read, the sum written
# of the memory bandwidth: 1e9 parameters in 0.22 s, 1e10 in 2.57 s on the 256 GB/s of a
# DGX-2 [arXiv 2101.06840
# Table 4, from memory]
_ADAM_SHARE = 0.45


@dataclass(frozen=True)
class Rates:
    """Rates of one device at its host, in bytes/s."""

    link: float  # copies to or from the device, one way
    adam: float  # achieved traffic of host memory
    nvme_read: float = 0.0  # of the drives; 0: there are none
    nvme_write: float = 0.0

    def adam_s(self, parameters: float) -> float:
        """Seconds of CPU Adam."""
        return ADAM_BYTES * parameters / self.adam


def host_of(cluster: Cluster) -> Host:
    """The host of a node. Raises ValueError where it is not known."""
    if cluster.host is None:
        raise ValueError(
            f"{cluster.name}: offload needs a host, but data/hosts.csv has none for it"
        )
    return cluster.host


def rates(cluster: Cluster) -> Rates:
    """Rates of each device while all devices of its node are at work. Raises ValueError
    for a cluster without host.
    """
    host = host_of(cluster)
    devices = cluster.devices_per_node
    link = host.link_bytes_per_s * min(1.0, (host.uplinks or devices) / devices)
    return Rates(
        link=min(link, host.memory_bandwidth_bytes_per_s / devices),
        adam=_ADAM_SHARE * host.memory_bandwidth_bytes_per_s / devices,
        nvme_read=host.nvme_read_bytes_per_s / devices,
        nvme_write=host.nvme_write_bytes_per_s / devices,
    )


@dataclass(frozen=True)
class Offloaded:
    """Facts of an offloaded step beside its plan."""

    method: Method  # what may leave the device
    split: Split  # shares that have left it; arrays for many shares at once
    rates: Rates  # of the host
    micro_batches: int  # per step
    delayed: bool = False  # the update runs beside the next step
    checkpoint_bytes: float = (
        0.0  # of a layer and micro-batch; 0: they stay on the device
    )

    @property
    def returned(self) -> float | np.ndarray:
        """Share of the weights that is on the device, but updated by the host."""
        return np.minimum(self.split.states, 1 - self.split.weights)

    @property
    def drives(self) -> bool:
        """Whether states lie on drives."""
        return self.method.to == "nvme"
