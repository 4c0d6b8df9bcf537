"""Does a training step fit, and where does what lie? Device, host memory and drives beside what a cluster has.

With offload, a share of the states leaves the device: enough that the device holds the rest, and no more than host and
drives take. Without, everything is on the device, as `memory` counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.simulator.offload.placement import (
    METHODS,
    PLACES,
    Policy,
    as_table,
    device_peak,
    normalised,
    off_device,
    place,
    usable_host_bytes,
)
from madmax_lib.specs import Cluster, Host, Model

__all__ = ["FitsResult", "fits", "host_of", "room_bytes", "shares_that_fit"]

_SHARES, _ROUNDS = np.linspace(0.0, 1.0, 101), 3  # the least share to 1e-8


@dataclass(frozen=True)
class FitsResult:
    """fits: whether a step can be run. table: component, place (device, host, nvme), size_bytes, on the fullest device
    and of a node; usable_bytes and margin_bytes of the place at its fullest moment. The components of a device do not
    all exist at that moment, so their sum may be more. share: of what may leave the device, NaN without offload.
    """

    fits: bool
    table: pd.DataFrame = field(repr=False)
    share: float = float("nan")

    @property
    def margins_bytes(self) -> dict[str, float]:
        """What is left by place, negative where it is too little."""
        return dict(self.table.drop_duplicates("place").set_index("place")["margin_bytes"])

    @property
    def bound(self) -> str:
        """The place with the smallest share of its room left."""
        places = self.table.drop_duplicates("place").set_index("place")
        return str((places["margin_bytes"] / places["usable_bytes"]).idxmin())


def fits(model: Model, cluster: Cluster, plan: Plan, *, global_batch: int, sequence: int | None = None,
         dtype: str = "bf16", stack: str | None = None, policy: Policy | None = None) -> FitsResult:  # fmt: skip
    """Whether a step of a model under a plan fits a cluster, with the place of every component.

    sequence: tokens per sample, the model's own if None. stack: whose software, as in `memory` (without offload).
    policy: how states leave the device; the least share that the device needs is found if it names none.
    Raises ValueError for a plan that cannot be laid over model and cluster, or an offload to what the cluster lacks.

    >>> from madmax_lib.catalog import cluster, model
    >>> [fits(model("llama2-7b"), cluster("dgx-a100", nodes=1), Plan(dp=8, zero=zero), global_batch=8).fits
    ...  for zero in (0, 3)]
    [False, True]
    """
    plan.check(model, cluster, global_batch, sequence or 0)
    plan.micro_batches(global_batch)
    if plan.offload is None:
        table = memory(model, plan, sequence=sequence, dtype=dtype, global_batch=global_batch, stack=stack)
        return _result(_fullest(table), {"device": peak_bytes(table)}, room_bytes(cluster, plan))
    plan, policy, room = normalised(plan, model, dtype), policy or Policy(), room_bytes(cluster, plan)
    shape = {"sequence": sequence, "dtype": dtype, "global_batch": global_batch}
    possible = shares_that_fit(model, cluster, plan, policy, room=room, **shape)
    share = float(possible[0]) if len(possible) else 1.0 if policy.share is None else policy.share
    sizes = place(model, plan, share, policy, **shape)
    devices = cluster.devices_per_node
    peaks = {"device": float(device_peak(sizes).max())}
    peaks |= {where: devices * float(off_device(sizes, where).max()) for where in PLACES[1:]}
    return _result(as_table(sizes, devices), peaks, room, share)


def shares_that_fit(model: Model, cluster: Cluster, plan: Plan, policy: Policy, *, sequence: int | None = None,
                    dtype: str = "bf16", global_batch: int | None = None, room: dict[str, float] | None = None
                    ) -> np.ndarray:  # fmt: skip
    """Shares in ascending order that device, host and drives can hold: those of a grid, and the least of all.

    room: of `room_bytes`, if it is known already.
    """
    tried = _SHARES if policy.share is None else np.array([policy.share])
    shape = {"sequence": sequence, "dtype": dtype, "global_batch": global_batch}
    room, devices = room or room_bytes(cluster, plan), cluster.devices_per_node

    def held(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = place(model, plan, shares.reshape(-1, 1), policy, **shape)
        beside = [devices * off_device(sizes, where).max(axis=-1) <= room[where] for where in PLACES[1:]]
        return device_peak(sizes).max(axis=-1) <= room["device"], np.logical_and.reduce(beside)

    on_device, beside = held(tried)
    for _ in range(_ROUNDS if policy.share is None and on_device.any() else 0):  # closer to what the device needs
        first = int(on_device.argmax())
        if first == 0:
            break
        between = np.linspace(tried[first - 1], tried[first], len(_SHARES))[1:]
        tried = np.concatenate([between, tried[first + 1 :]])
        on_device, beside = held(tried)
    return tried[on_device & beside]


def room_bytes(cluster: Cluster, plan: Plan) -> dict[str, float]:
    """Bytes that training can have on a device, and for all devices of a node in host memory and on drives."""
    room = {"device": usable_bytes(cluster.device)}
    if plan.offload is None:
        return room
    host = host_of(cluster)
    if METHODS[plan.offload].to == "nvme" and not host.nvme_bytes:
        raise ValueError(f"offload=nvme, but {host.name} has no drives")
    return room | {"host": usable_host_bytes(host), "nvme": host.nvme_bytes}


def host_of(cluster: Cluster) -> Host:
    """The host of a node. Raises ValueError where it is not known."""
    if cluster.host is None:
        raise ValueError(f"{cluster.name}: offload needs a host, but data/hosts.csv has none for it")
    return cluster.host


def _fullest(table: pd.DataFrame) -> pd.DataFrame:
    """Components of the fullest stage."""
    peaks = {stage: peak_bytes(part.assign(stage=0)) for stage, part in table.groupby("stage")}
    part = table[(table["stage"] == max(peaks, key=peaks.get)) & (table["size_bytes"] > 0)]
    return part.assign(place="device")[["component", "place", "size_bytes"]].reset_index(drop=True)


def _result(table: pd.DataFrame, peaks: dict[str, float], room: dict[str, float], share: float = float("nan")
            ) -> FitsResult:  # fmt: skip
    margins = {where: room[where] - peak for where, peak in peaks.items()}
    table = table.assign(usable_bytes=table["place"].map(room), margin_bytes=table["place"].map(margins))
    return FitsResult(all(margin >= 0 for margin in margins.values()), table, share)
