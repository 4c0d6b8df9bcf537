"""What does a step draw? Power between idle and the device's limit by how busy it is; energy follows.

P = idle + (TDP - idle) x utilisation, by phase: matrix products and memory-bound work at the limit, communication and
waiting near idle. The shares are round numbers read off published idle powers (A100 SXM 50 to 60 of 400 W, H100 SXM 70
to 120 of 700 W) and the 40 to 60 % of TDP that NCCL phases show; expect a quarter of error either way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from madmax_lib.specs import Device

__all__ = ["device_energy_j"]

_IDLE, _COMM = 0.15, 0.5  # of the TDP
_COMPUTE = ("gemm_s", "attention_s", "pointwise_s", "head_s", "optimizer_s")
_TRAFFIC = ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "pp_s")


def device_energy_j(parts: Mapping[str, np.ndarray], device: Device) -> np.ndarray:
    """Joules of one device in a step from its parts (`step_time.PARTS` and step_s), same shape.

    Raises ValueError for a device whose TDP is not known.
    """
    if not device.tdp_w > 0:
        raise ValueError(f"{device.name} has no TDP in the catalog, energy cannot be told")
    busy_s = sum(np.asarray(parts[name]) for name in _COMPUTE)
    comm_s = sum(np.asarray(parts[name]) for name in _TRAFFIC)
    idle_s = parts["step_s"] - busy_s - comm_s
    return device.tdp_w * (busy_s + _COMM * comm_s + _IDLE * idle_s)
