"""What does a step draw? Power between idle and the device's limit by how busy it is;
energy follows.

P = idle + (TDP - idle) x utilisation, by phase: matrix products and memory-bound work
at the limit, communication and waiting near idle. The shares are assumptions, round and
from memory (devices idle at 15 % of their limit, communicate at half of it), not fitted
to any measurement; expect a quarter of error either way. Hosts are taken alike: their
processors idle at a share of their limit while the devices work, and reach it under CPU
Adam.
"""

from collections.abc import Mapping

import numpy as np

from madmax_lib.catalog import Cluster, Device
from madmax_lib.simulator.steady.step_time import COMMUNICATION, COMPUTE

ERROR = 0.25  # of the energy of a step, either way
# of the TDP
_SHARES = {"compute": 1.0, "communication": 0.5, "waiting": 0.15}
_HOST_IDLE = 0.4  # of the processors' TDP: they launch, and feed data


def device_energy_j(parts: Mapping[str, np.ndarray], device: Device) -> np.ndarray:
    """Joules of one device in a step from its parts (`step_time.PARTS` and step_s),
    same shape.

    Raises ValueError for a device whose TDP is not known.
    """
    seconds = _phases_s(parts, device).items()
    return device.tdp_w * sum(_SHARES[name] * spent for name, spent in seconds)


def step_energy(
    row: Mapping[str, float], cluster: Cluster, tokens: float, host_busy_s: float = 0.0
) -> dict[str, float]:
    """Energy of a step of all nodes: devices_j, host_j (NaN where no TDP of the
    processors is known), token_j with
    token_low_j and token_high_j (`ERROR` either way).

    row: of `estimate`. tokens: of the step. host_busy_s: seconds that the processors
    compute. The host's energy counts in token_j where it is known. Raises ValueError
    for a device whose TDP is not known.
    """
    devices_j = cluster.world_size * float(device_energy_j(row, cluster.device))
    host_w = cluster.host.tdp_w if cluster.host else float("nan")
    busy_s = min(host_busy_s, row["step_s"])
    host_j = cluster.nodes * host_w * (_HOST_IDLE * (row["step_s"] - busy_s) + busy_s)
    token_j = np.nansum([devices_j, host_j]) / tokens
    spread = {
        "token_low_j": (1 - ERROR) * token_j,
        "token_high_j": (1 + ERROR) * token_j,
    }
    return {"devices_j": devices_j, "host_j": host_j, "token_j": token_j, **spread}


def _phases_s(parts, device):
    """Seconds of a step by phase, of a device whose TDP is known."""
    if not device.tdp_w > 0:
        raise ValueError(
            f"{device.name} has no TDP in the catalog, so its energy is unknown"
        )
    seconds = {
        "compute": sum(parts[name] for name in COMPUTE),
        "communication": sum(parts[name] for name in COMMUNICATION),
    }
    return seconds | {"waiting": parts["step_s"] - sum(seconds.values())}
