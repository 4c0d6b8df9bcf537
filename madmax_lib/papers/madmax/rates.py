"""What does a GPU of a MAD-Max system reach, and how long does a collective take at that rate?

Peaks and links times constant utilisations, as the public release of [Hsia et al., ISCA 2024, arXiv 2310.02784] has
them (behaviour recorded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import NamedTuple

from madmax_lib.papers.madmax.rules import GLOBAL, INTRA

__all__ = ["Collective", "GpuRates", "check_fields", "rates_of"]

_PEAKS = {8: "f64_flops", 4: "f32_flops", 2: "f16_flops", 1: "i8_ops"}  # by bytes of a parameter


class GpuRates(NamedTuple):
    """What a GPU reaches: FLOP/s, bytes/s of its memory, and bytes/s by collective and level."""

    flops_per_s: float
    memory_bytes_per_s: float
    bandwidth_bytes_per_s: dict[tuple[str, str], float]

    def collective(self, name: str, size_bytes: float, level: str, what: str, blocking: bool = False) -> Collective:
        """A collective with its duration, bytes / bandwidth: no latency, no ring factor."""
        duration_s = size_bytes / self.bandwidth_bytes_per_s[name, level]
        return Collective(name, size_bytes, duration_s, level, what, blocking)


class Collective(NamedTuple):
    """A collective: `what` is the cargo (weights, activations, gradients); the next layer waits if it is blocking."""

    name: str
    size_bytes: float
    duration_s: float
    level: str
    what: str
    blocking: bool


def rates_of(system: Mapping, param_bytes: float) -> GpuRates:
    """Effective rates of a system: peak times utilisation; NVLink and NIC bandwidths are given for both ways.

    All2All runs at NVLink rate inside a node and at NIC rate globally; AllReduce mixes both by ar_perc_intra, AllGather
    and ReduceScatter are twice as fast as AllReduce.
    """
    if param_bytes not in _PEAKS:
        raise ValueError(f"bytes_per_nonemb_param={param_bytes} is not one of 8, 4, 2, 1")
    peak, nodes = _PEAKS[param_bytes], system["num_nodes"]
    used = (peak, "flops_util", "mem_bw", "mem_bw_util", "num_nvlinks", "bw_per_nvlink", "nvlink_util")
    check_fields("system", system, used)
    intra = system["num_nvlinks"] * system["bw_per_nvlink"] / 2 * system["nvlink_util"]
    inter = mixed = intra
    if nodes > 1:
        check_fields("system", system, ("num_ibroce_ports", "ibroce_bw", "ibroce_util", "ar_perc_intra"))
        per_node = system["num_ibroce_ports"] * system["ibroce_bw"] / 2 * system["ibroce_util"]
        inter = per_node / (system["num_devices"] / nodes)
        mixed = system["ar_perc_intra"] * intra + (1 - system["ar_perc_intra"]) * inter
    bandwidths = {("all_to_all", INTRA): intra, ("all_to_all", GLOBAL): inter}
    for level, reduce in ((INTRA, intra), (GLOBAL, mixed)):
        bandwidths["all_reduce", level] = reduce
        bandwidths["all_gather", level] = bandwidths["reduce_scatter", level] = 2 * reduce
    return GpuRates(system[peak] * system["flops_util"], system["mem_bw"] * system["mem_bw_util"], bandwidths)


def check_fields(what: str, row: Mapping, fields: tuple[str, ...]) -> None:
    """Raises ValueError for a field of `row` that is missing, not positive, or out of the range its name tells."""
    for field in fields:
        value, where = row.get(field), f"of {what} {row.get('name', '')}"
        may_be_zero = field == "ar_perc_intra" and value == 0
        if not (isinstance(value, Real) and 0 < value < math.inf) and not may_be_zero:
            raise ValueError(f"{field}={value} {where} is not a positive number")
        if value > 1 and (field.endswith("_util") or field == "ar_perc_intra"):
            raise ValueError(f"{field}={value} {where} is a share and cannot exceed 1")
        if field.startswith("num_") and value != int(value):
            raise ValueError(f"{field}={value} {where} is not a whole number")
