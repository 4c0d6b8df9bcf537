"""Does a training step fit, where does what lie, and how large may a model be?

With offload, a share of the states leaves the device: enough that the device holds the
rest, and no more than host and drives take. Without, everything is on the device, as
`memory` counts it. The largest model is searched among GPT-2-like shapes, wider and
deeper, until a step does not fit.
"""

import warnings
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import format_bytes, same_fields, short_repr
from madmax_lib.catalog import Cluster, Model, Software, Transformer
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.rules import check_plan
from madmax_lib.simulator.memory.memory import (
    bytes_by_component,
    memory,
    peak_bytes,
    usable_bytes,
)
from madmax_lib.simulator.memory.stacks import holders
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.placement import (
    METHODS,
    PLACES,
    Policy,
    as_table,
    bytes_by_place,
    host_of,
    peaks_by_place,
    policy_of,
)

# the least share to 1e-8
_SHARES = np.linspace(0.0, 1.0, 101)
_ROUNDS = 3
_HOST_RESERVED = (
    0.05  # of host memory, for the system and the processes; a round number
)
# by method: its plan, beside dp and recompute; static: all that may leave the device
# does; study: its name in the study of notebook 55
SIZE_METHODS = pd.read_csv(catalog.data_file("size_methods.csv"), index_col="method")
_WIDTHS = pd.read_csv(catalog.data_file("gpt_widths.csv"))["hidden"].tolist()
# GPT-2's vocabulary and sequence, as in the sources compared with
_HEAD_DIM = 128
_SEQUENCE = 1024
_VOCAB = 50257
# layers at least, and at most per unit of width
_FLATTEST = 16
_DEEPEST = 1 / 24


@dataclass(frozen=True, repr=False)
class FitsResult:
    """Whether a step can be run, and what it holds where.

    fits: whether every place has room for its fullest moment.
    table: component, place (device, host, nvme), size_bytes of the fullest device or of
        a node, usable_bytes and margin_bytes of the place. Not all components of a
        device exist at once, so their sum may be above its peak.
    share: of what may leave the device, 0..1 (default NaN: without offload).
    stacks: names, joined by blanks, of known software that launches the plan and holds
        it, where none was named and it does not fit as usually run (default empty).
    """

    fits: bool
    table: pd.DataFrame
    share: float = float("nan")
    stacks: str = ""

    __eq__ = same_fields

    def __repr__(self):
        verdict = "fits" if self.fits else "does not fit"
        if self.share == self.share:
            verdict += f" with {self.share:.0%} of the states away from the device"
        if self.stacks:
            verdict += f" as such plans are usually run, but does under {self.stacks}"
        lines = [f"{verdict}; {self.bound} is tightest"]
        for name, row in self._places().iterrows():
            used = format_bytes(row.usable_bytes - row.margin_bytes)
            left = format_bytes(abs(row.margin_bytes))
            way = "left" if row.margin_bytes >= 0 else "short"
            room = format_bytes(row.usable_bytes)
            lines.append(f"{name}: {used} of {room}, {left} {way}")
        return "\n".join(lines)

    @property
    def margins_bytes(self) -> dict[str, float]:
        """Bytes left by place, negative where they are too few."""
        return dict(self._places()["margin_bytes"])

    @property
    def bound(self) -> str:
        """The place with the smallest share of its room left."""
        places = self._places()
        return str((places["margin_bytes"] / places["usable_bytes"]).idxmin())

    def _places(self):
        return self.table.drop_duplicates("place").set_index("place")


def fits(
    model: Model | str,
    cluster: Cluster | str,
    plan: Plan | str,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    imbalance: float | str = 1.0,
    policy: Policy | None = None,
) -> FitsResult:
    """Whether a step of a model under a plan fits a cluster, with the place of every
    component.

    model, cluster, plan: or their names and its text. sequence: tokens per sample, the
    model's own if None. software: whose habits, as in `memory`; under offload always
    DeepSpeed's. imbalance: of experts, as in `Case`. policy: how states leave the
    device; if it names no share, the least one that the device needs; if None, all that
    may leave under a software that is named, as stacks do it. Raises ValueError
    for a plan that cannot be laid over model and cluster, or an offload to what the
    cluster lacks. See also: mm.memory, mm.largest_model, mm.planner.lever_table.

    >>> [fits("llama2-7b", "dgx-a100", plan, global_batch=8).fits for plan in ("dp8", "dp8.z3")]
    [False, True]
    """
    case = Case.of_step(
        model,
        cluster,
        Plan.parse(plan),
        global_batch,
        sequence,
        dtype,
        software,
        imbalance,
    )
    model = case.model
    cluster = case.cluster
    plan = case.plan
    check_plan(case)
    policy = policy_of(policy, case)
    share = float("nan")
    room = room_bytes(cluster, plan)
    if plan.offload is None:
        parts = bytes_by_component(case).items()
        sizes = {(name, "device"): size for name, size in parts}
    else:
        if case.software.name not in ("none", "deepspeed"):
            warnings.warn(
                "what stays on the device beside an offload is counted as DeepSpeed "
                f"holds it, not {case.software.name}",
                stacklevel=2,
            )
        case = normalised(case)
        possible = shares_that_fit(case, policy, room)
        usual = 1.0 if policy.share is None else policy.share
        share = float([*possible, usual][0])
        sizes = bytes_by_place(case, share, policy)
    peaks = peaks_by_place(sizes, cluster.devices_per_node)
    margins = {name: size - float(peaks[name]) for name, size in room.items()}
    table = as_table(sizes, cluster.devices_per_node)
    table["usable_bytes"] = table["place"].map(room)
    table["margin_bytes"] = table["place"].map(margins)
    fit = min(margins.values()) >= 0
    is_open = plan.offload is None and case.software.name == "none"
    stacks = holders(case) if is_open and not fit else []
    return FitsResult(fit, table, share, " ".join(stacks))


def shares_that_fit(case: Case, policy: Policy, room: dict[str, float]) -> np.ndarray:
    """Shares in ascending order that device, host and drives can hold: those of a grid,
    and the least of all.

    room: of `room_bytes`.
    """

    is_searched = policy.share is None
    shares = _SHARES if is_searched else np.array([policy.share])
    on_device, off_device = _room_for(shares, case, policy, room)
    # closer to what the device needs
    for _ in range(_ROUNDS if is_searched and on_device.any() else 0):
        first = int(on_device.argmax())
        if first == 0:
            break
        between = np.linspace(shares[first - 1], shares[first], len(_SHARES))[1:]
        shares = np.concatenate([between, shares[first + 1 :]])
        on_device, off_device = _room_for(shares, case, policy, room)
    return shares[on_device & off_device]


def _room_for(shares, case, policy, room):
    """Whether the device, and whether host and drives, have room for each share."""
    # shares below each other, (shares, 1), stages beside each other
    sizes = bytes_by_place(case, shares[:, None], policy)
    peaks = peaks_by_place(sizes, case.cluster.devices_per_node)
    on_device, *off_device = (peaks[name] <= room[name] for name in PLACES)
    return on_device, np.logical_and(*off_device)


def room_bytes(cluster: Cluster, plan: Plan) -> dict[str, float]:
    """Bytes that training can have on a device, and for all devices of a node in host
    memory and on drives.
    """
    room = {"device": usable_bytes(cluster.device)}
    if plan.offload is None:
        return room
    host = host_of(cluster)
    if METHODS[plan.offload].to == "nvme" and not host.nvme_bytes:
        raise ValueError(f"offload=nvme, but {host.name} has no drives")
    return room | {
        "host": (1 - _HOST_RESERVED) * host.memory_bytes,
        "nvme": host.nvme_bytes,
    }


class LargestModel(NamedTuple):
    """The largest model of a method, its plan and whether it fits."""

    model: Transformer
    plan: Plan
    fits: FitsResult


def largest_model(cluster: Cluster | str, method: str) -> LargestModel:
    """The largest GPT-2-like model of a method on all devices of a cluster, by data
    parallelism alone; its plan, fit.

    method: ddp, zero-1, zero-2, zero-3, zero-offload, zero-3-offload, zero-infinity,
    chunks or chunks-static. Full recompute, one sample of 1,024 tokens per device,
    heads of 128 channels, 16 layers or more and at most one per 24 channels.
    Raises ValueError for an unknown method, or one whose smallest model does not fit.
    See also: mm.fits, mm.memory.
    """
    if method not in SIZE_METHODS.index.tolist():
        raise ValueError(
            f"method={short_repr(method)} is not one of {', '.join(SIZE_METHODS.index)}"
        )
    cluster = catalog.cluster(cluster)
    way = SIZE_METHODS.loc[method]
    plan = Plan.parse(f"dp{cluster.world_size}.full.{way.plan}")
    policy = Policy(share=1.0 if way.static else None)
    room = room_bytes(cluster, plan)

    def holds(width, layers):
        case = Case(gpt_shape(width, layers), cluster, plan, plan.dp, dtype="fp16")
        if plan.offload:
            return len(shares_that_fit(case, policy, room)) > 0
        parts = memory(case.model, plan, global_batch=plan.dp, dtype="fp16")
        return peak_bytes(parts) <= room["device"]

    best = None
    for width in _WIDTHS:
        least = _FLATTEST
        if best:
            # layers of this width with which a model is larger than the best one
            one, two = (gpt_shape(width, layers).parameters for layers in (1, 2))
            beyond = (gpt_shape(*best).parameters - one) // (two - one) + 2
            least = max(least, beyond)
        depths = range(least, max(int(width * _DEEPEST), _FLATTEST) + 1)
        if count := bisect_left(
            depths, True, key=lambda layers: not holds(width, layers)
        ):
            best = width, depths[count - 1]
    if best is None:
        raise ValueError(
            f"{method} on {cluster.name}: not even {_WIDTHS[0]} channels and "
            f"{_FLATTEST} layers fit"
        )
    model = gpt_shape(*best)
    result = fits(
        model, cluster, plan, global_batch=plan.dp, dtype="fp16", policy=policy
    )
    return LargestModel(model, plan, result)


def gpt_shape(
    hidden: int, layers: int, sequence: int = _SEQUENCE, heads: int = 0
) -> Transformer:
    """A GPT-2-like model of any size."""
    name = f"gpt-{hidden}x{layers}"
    return Transformer(
        name, layers, hidden, heads or hidden // _HEAD_DIM, 4 * hidden, sequence, _VOCAB
    )
