"""Measured rates of kernels and collectives, each alone on a device, and of devices
that nobody measured: `data/kernel_rates.csv`, which `calibration.kernels.fit` makes.

The time of a kernel is a roofline [Williams et al., CACM 2009] with a launch:

  t = max(issue, latency + apart / bandwidth + max(FLOPs / rate, moved / bandwidth))
  FLOPs = area (depth + lost_depth)

A device without rows has the shares of its data sheet that those of its generation
reach. Rows of a user's table in the folder MADMAX_CATALOG take the place of ours.
"""

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib.base.collectives import bus_factor
from madmax_lib.base.fields import short_repr
from madmax_lib.catalog import tables
from madmax_lib.catalog.hardware import Device

Number = float | np.ndarray

# number formats of kernels that are no dtype of a device: scales by block of 128 values
# [arXiv 2412.19437]
OPERANDS = {"fp8_block": "fp8"}
# the format whose shares one without rows has; others have those of bf16
_LIKE = {"mxfp8": "fp8"}
# What these move passes through the multiprocessors: an H200 is as fast as an H100, and
# devices left out are priced best so.
_BY_SMS = ("attention", "convolution")
# of a device without links to its peers: PCIe 4.0 x16, as `data/links.csv` has it
_PCIE_BYTES_PER_S = 31.5e9


@dataclass(frozen=True)
class KernelWork:
    """Work of a call; arrays broadcast."""

    area: Number  # FLOPs of a unit of depth: 2 m n of an (m, k) by (k, n) product
    depth: Number  # length of the sums: k of a product, channels of a head
    moved_bytes: Number  # between memory and device while it computes
    apart_bytes: Number = 0.0  # before or after that
    # area that tiles of the result take in whole waves over the multiprocessors
    tiled_area: Number = 0.0


@dataclass(frozen=True)
class KernelRate:
    """Rate of an operation in a number format on a device."""

    latency_s: float
    flops_per_s: float
    bytes_per_s: float
    issue_s: float = 0.0  # no call ends before it: the host's, under larger work
    # depth that costs as much as the ends of each sum: a tile's prologue and epilogue
    lost_depth: float = 0.0
    in_waves: bool = False  # tiles run in whole waves

    def seconds(self, work: KernelWork) -> Number:
        """Seconds of a call, by the equation above."""
        area = work.tiled_area if self.in_waves else work.area
        flops = area * (work.depth + self.lost_depth)
        compute_s = flops / self.flops_per_s
        memory_s = work.moved_bytes / self.bytes_per_s
        apart_s = work.apart_bytes / self.bytes_per_s
        whole_s = self.latency_s + apart_s + np.maximum(compute_s, memory_s)
        return np.maximum(self.issue_s, whole_s)


@dataclass(frozen=True)
class CollectiveRate:
    """Rate of a collective by ranks in two regimes of sizes, parted at `parted_bytes`.

      t = latency + wires size / bandwidth

    with wires, the share of the buffer that each link carries, (p-1)/p, twice that for
    all-reduce [nccl-tests, PERFORMANCE.md]. Between measured numbers of ranks both are
    read off a line in log2(p); beyond them they are those of the nearest.
    """

    kind: str
    ranks: np.ndarray  # (r,) measured
    parted_bytes: np.ndarray  # (r,)
    latency_s: np.ndarray  # (2, r): small, large
    bytes_per_s: np.ndarray  # (2, r): bus bandwidth

    def seconds(self, size_bytes: Number, ranks: Number) -> Number:
        """Seconds of a call on the buffer of a rank; 0 where nothing moves."""
        ranks = np.asarray(ranks, dtype=float)
        many = np.maximum(ranks, 1.0)
        wires = bus_factor(self.kind, many)

        def at(values):
            return np.interp(np.log2(many), np.log2(self.ranks), values)

        small_s, large_s = (
            at(latency_s) + wires * size_bytes / at(bytes_per_s)
            for latency_s, bytes_per_s in zip(
                self.latency_s, self.bytes_per_s, strict=True
            )
        )
        is_small = size_bytes <= at(self.parted_bytes)
        seconds = np.where(is_small, small_s, large_s)
        return np.where((ranks > 1) & (np.asarray(size_bytes) > 0), seconds, 0.0)


@dataclass(frozen=True)
class DeviceRates:
    """Rates that price an operation on a device: its own, or those of several measured
    devices, scaled to its data sheet.
    """

    device: Device  # that they are for
    is_measured: bool  # itself, not others like it
    rates: tuple[KernelRate | CollectiveRate, ...]
    # standard deviation of the logarithm of measured over priced seconds; of a device
    # without rows that of shares between all measured devices is in it
    spread: float
    sources: tuple[str, ...]

    @property
    def wave_sms(self) -> int:
        """Multiprocessors of the device where tiles run in whole waves on it, else 0."""
        return self.device.sms * any(rate.in_waves for rate in self.rates)

    def seconds(self, *work) -> Number:
        """Seconds: geometric mean over the rates."""
        if len(self.rates) == 1:
            return self.rates[0].seconds(*work)
        # seconds of 0 have a logarithm, too
        logs = [np.log(np.maximum(r.seconds(*work), 1e-300)) for r in self.rates]
        seconds = np.exp(np.mean(logs, axis=0))
        return np.where(seconds > 1e-200, seconds, 0.0)


def kernel_rates(
    device: str | Device, operation: str, dtype: str = "bf16"
) -> DeviceRates:
    """Rates of an operation on a device, looked up once.

    device: of the catalog by name, or one of your own. operation: gemm, attention, moe,
    or a collective inside a node. dtype: of the products, of `hardware.DTYPES` or
    fp8_block; a device that lacks it computes in what stands for it. ValueError for
    unknown ones.
    """
    if os.environ.get(tables.USER_FOLDER):  # a user's table may have changed
        return _shipped_rates.__wrapped__(device, operation, dtype)
    return _shipped_rates(device, operation, dtype)


@lru_cache(maxsize=256)
def _shipped_rates(device, operation, dtype):
    facts = tables.table("kernel_rates", numbers=True)
    return rates_from(facts, device, operation, dtype)


def rates_from(
    facts: pd.DataFrame, device: str | Device, operation: str, dtype: str = "bf16"
) -> DeviceRates:
    """Rates of an operation on a device by facts of your own, as `kernel_rates` has them."""
    device = tables.device(device) if isinstance(device, str) else device
    if not isinstance(device, Device):
        raise ValueError(f"device={short_repr(device)} must be a Device or its name")
    rows = facts[facts["operation"] == operation]
    if rows.empty:
        names = ", ".join(facts["operation"].unique())
        raise ValueError(f"operation={short_repr(operation)} is not one of {names}")
    is_link = rows["ranks"].notna().all()
    if not is_link:
        wanted = OPERANDS.get(dtype, dtype)
        nearest = device.nearest(wanted)
        dtype = dtype if nearest == wanted else nearest
        like = (dtype, _LIKE.get(dtype), "bf16")
        measured = next(name for name in like if name in set(rows["dtype"]))
        rows = rows[rows["dtype"] == measured]
    # a user's rows stand after ours
    rows = rows.drop_duplicates(["device", "ranks", "from_bytes"], keep="last")
    by_device = {
        name: _collective_rate(part, device)
        if is_link
        else _kernel_rate(part.iloc[0], device, dtype)
        for name, part in rows.groupby("device")
    }
    names = _nearest(device, list(by_device))
    chosen = rows[rows["device"].isin(names)]
    spread = chosen["spread"].median()
    if names != [device.name]:
        shares = [np.max(rate.bytes_per_s) for rate in by_device.values()]
        if not is_link:
            shares = [rate.flops_per_s for rate in by_device.values()]
        spread = np.hypot(spread, np.std(np.log(shares)))
    return DeviceRates(
        device=device,
        is_measured=names == [device.name],
        rates=tuple(by_device[name] for name in names),
        spread=float(spread),
        sources=tuple(chosen["source"].unique()),
    )


def _nearest(device, measured):
    """Names of the measured devices that stand for one: itself, else its family, else
    those that have links to their peers where it has, else all.
    """
    if device.name in measured:
        return [device.name]
    devices = [each for name in measured if (each := tables.device_named(name))]
    has_links = device.scale_up_bytes_per_s > 0
    family = [each for each in devices if each.family == device.family != "other"]
    similar = [each for each in devices if (each.scale_up_bytes_per_s > 0) == has_links]
    return [each.name for each in family or similar or devices]


def _kernel_rate(row, device, dtype):
    """The rate that a row of the table has on a device: the same shares of its data
    sheet.
    """
    reference = tables.device_named(row["device"]) or device
    peak = device.peak_flops[OPERANDS.get(dtype, dtype)]
    reference_peak = reference.peak_flops[OPERANDS.get(row["dtype"], row["dtype"])]
    scale = device.memory_bandwidth_bytes_per_s / reference.memory_bandwidth_bytes_per_s
    if row["operation"] in _BY_SMS and device.sms and reference.sms:
        scale = device.sms / reference.sms
    return KernelRate(
        latency_s=row["latency_s"],
        flops_per_s=row["flops_per_s"] * peak / reference_peak,
        bytes_per_s=row["bytes_per_s"] * scale,
        issue_s=row["issue_s"],
        lost_depth=row["lost_depth"],
        in_waves=row["in_waves"] > 0,
    )


def _collective_rate(rows, device):
    """Rows of a collective on the links of a device."""
    reference = tables.device_named(rows["device"].iloc[0]) or device
    scale = _link_bytes_per_s(device) / _link_bytes_per_s(reference)
    rows = rows.sort_values(["ranks", "from_bytes"])
    ranks = rows["ranks"].unique()

    def regimes(name):
        # rows alternate: small and large sizes of each number of ranks
        return rows[name].to_numpy().reshape(len(ranks), 2).T

    return CollectiveRate(
        kind=rows["operation"].iloc[0],
        ranks=ranks,
        parted_bytes=regimes("from_bytes")[1],
        latency_s=regimes("latency_s"),
        bytes_per_s=regimes("bytes_per_s") * scale,
    )


def _link_bytes_per_s(device):
    """Rate of a device's links to its peers, one way."""
    return device.scale_up_bytes_per_s or _PCIE_BYTES_PER_S
