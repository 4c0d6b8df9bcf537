"""How long does a device compute? Roofline of matrix products and memory traffic, and the optimizer's traffic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from madmax_lib.specs import Device

__all__ = ["Parameters", "compute_s", "optimizer_s"]

_ADAM_BYTES = 30  # fp32 parameter, two moments and gradient read; the first three and a 16-bit copy written


@dataclass(frozen=True)
class Parameters:
    """Achieved shares of the data-sheet rates, 0..1; the default is the ideal machine, nothing is fitted."""

    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    network_efficiency: float = 1.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise ValueError(f"{name}={value} is not in (0, 1]")


def compute_s(flops, traffic_bytes, device: Device, dtype: str, parameters: Parameters):
    """Seconds of work that is bound by matrix products or by memory traffic, whichever is slower (roofline)."""
    by_flops = flops / (device.peak(dtype) * parameters.compute_efficiency)
    by_memory = traffic_bytes / (device.memory_bandwidth_bytes_per_s * parameters.memory_efficiency)
    return np.maximum(by_flops, by_memory)


def optimizer_s(parameter_count, device: Device, parameters: Parameters):
    """Seconds of a mixed-precision Adam update of the parameters a device owns: memory traffic only."""
    return parameter_count * _ADAM_BYTES / (device.memory_bandwidth_bytes_per_s * parameters.memory_efficiency)
