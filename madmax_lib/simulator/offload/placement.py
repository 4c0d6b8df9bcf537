"""Where does each byte of a training step lie: on the device, in host memory or on drives?

ZeRO-Offload [arXiv 2101.06840] keeps 16-bit weights on the device and moves gradients and Adam's states to the host;
ZeRO-3 Offload moves the weights too; ZeRO-Infinity [arXiv 2104.07857] moves all states to drives and checkpoints of
activations to the host; PatrickStar [arXiv 2108.05818] and Gemini move chunks of states and need no room for gradients.
`share` says how much of what may leave the device does leave it: states of the optimizer go first, since weights and
their chunks travel with every pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import FRAGMENTATION, PHASES, by_phase, held_layers, moment_peak, stage_bytes
from madmax_lib.simulator.memory.states import stage_parameters
from madmax_lib.simulator.offload.chunks import best_chunks
from madmax_lib.specs import DLRM, Host, Model, Transformer

__all__ = ["METHODS", "PLACES", "Method", "Policy", "Split", "as_table", "device_peak", "normalised", "off_device",
           "place", "split_of", "streams_gradients", "usable_host_bytes"]  # fmt: skip

PLACES = ("device", "host", "nvme")
_PHASES = PHASES | {"gradients on their way": "backward", "checkpoints on their way": "backward",
                    "chunk tails": "always", "staging": "always"}  # fmt: skip
_HOST_RESERVED = 0.05  # of host memory, for the system and the processes; a round number
_WINDOW = 2  # layers whose gradients or checkpoints are on their way at once: one is copied, one is filled


@dataclass(frozen=True)
class Method:
    """Bytes per parameter of 16-bit training with Adam, and what may leave the device.

    weights, gradients, optimizer: bytes per parameter. moves_weights: weights leave the device too. to: host or nvme.
    buffer: bytes reserved for each byte kept there. checkpoints: those of activations leave too.
    """

    gradients: float
    optimizer: float
    moves_weights: bool = True
    to: str = "host"
    buffer: float = 1.0
    checkpoints: bool = False
    weights: float = 2.0


# optimizer: 2 on the device, 2 + 12 on the host [arXiv 2101.06840]. all: DeepSpeed's estimator for ZeRO-3 counts 18
#   (fp32 gradients) and half as much again for buffers [estimate_zero3_model_states_mem_needs_all_cold].
# chunks: gradients take the place of weights [arXiv 2108.05818]. nvme: 20 [arXiv 2104.07857, section 3]
METHODS = {
    "optimizer": Method(gradients=2, optimizer=12, moves_weights=False),
    "all": Method(gradients=4, optimizer=12, buffer=1.5),
    "chunks": Method(gradients=0, optimizer=12),
    "nvme": Method(gradients=2, optimizer=16, to="nvme", checkpoints=True),
}


@dataclass(frozen=True)
class Policy:
    """How states leave the device, where that is not left to be found.

    share: of what may leave the device (1: static full offload), None to find it. gradient_bytes: per parameter beside
    the weights, None for the method's. checkpoints: of full recompute go to the host, None as the method does. delayed:
    the update runs beside the next step's passes, one step late [arXiv 2101.06840, section 5.2].
    Raises ValueError for a share outside 0..1 or negative bytes.
    """

    share: float | None = None
    gradient_bytes: float | None = None
    checkpoints: bool | None = None
    delayed: bool = False

    def __post_init__(self):
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share} is not in 0..1")
        if self.gradient_bytes is not None and not self.gradient_bytes >= 0:
            raise ValueError(f"gradient_bytes={self.gradient_bytes} must not be negative")

    def method(self, plan: Plan) -> Method:
        """The plan's method with what this policy changes."""
        found = METHODS[plan.offload]
        gradients = found.gradients if self.gradient_bytes is None else self.gradient_bytes
        checkpoints = found.checkpoints if self.checkpoints is None else self.checkpoints
        return replace(found, gradients=gradients, checkpoints=checkpoints and plan.recompute == "full")


@dataclass(frozen=True)
class Split:
    """Shares (0..1) of the optimizer's states with the gradients, and of the weights, that lie off the device."""

    states: float
    weights: float


def normalised(plan: Plan, model: Model, dtype: str = "bf16") -> Plan:
    """The plan with the sharding that its offload implies: chunks, and all on one device, are sharded as by ZeRO-3.

    Raises ValueError for what offload is not modelled for.
    """
    if isinstance(model, DLRM):
        raise ValueError(f"{model.name}: offload={plan.offload} is for transformers")
    if dtype not in ("bf16", "fp16"):
        raise ValueError(f"offload={plan.offload} is modelled for 16-bit training, not dtype={dtype!r}")
    if plan.offload == "optimizer" or plan.zero == 3:
        return plan
    if plan.offload != "chunks" and plan.dp * plan.cp > 1:
        raise ValueError(f"offload={plan.offload} needs zero=3, but zero={plan.zero}")
    return replace(plan, zero=3)


def split_of(method: Method, share) -> Split:
    """Split of a share (a number or an array) of the bytes that may leave; the optimizer's states leave first."""
    states, weights = method.optimizer + method.gradients, method.weights * method.moves_weights
    leaving = np.asarray(share) * (states + weights)
    return Split(np.minimum(leaving / states, 1.0), np.maximum(leaving - states, 0.0) / max(weights, 1.0))


def streams_gradients(plan: Plan) -> bool:
    """Whether gradients leave with every micro-batch; else they are summed on the device until the last one."""
    return plan.zero == 3 or plan.dp * plan.cp == 1 or (plan.zero == 2 and plan.pp == 1)


def usable_host_bytes(host: Host) -> float:
    """Memory of a node's host that training can have."""
    return (1 - _HOST_RESERVED) * host.memory_bytes


def place(model: Transformer, plan: Plan, share, policy: Policy | None = None, *, sequence: int | None = None,
          dtype: str = "bf16", global_batch: int | None = None) -> dict[tuple[str, str], np.ndarray]:  # fmt: skip
    """Bytes of one device's part of each stage: {(component, place): (..., pp)}; the host's part is per device too.

    plan: as `normalised` gives it. share: of what may leave the device, a number or an array of shape (k, 1).
    """
    policy = policy or Policy()
    method, share = policy.method(plan), np.asarray(share, dtype=float)
    layers, mixtures = held_layers(model, plan)
    stages, batches = np.arange(plan.pp), _batches(plan, global_batch)
    parts = stage_bytes(model, plan, stages, layers, mixtures, stack="deepspeed", sequence=sequence, dtype=dtype,
                        micro_batches=batches)  # fmt: skip
    count = stage_parameters(model, plan, stages, layers, mixtures)
    split = split_of(method, share)
    sizes = _states(plan, count, method, split, batches > 1)
    for name in ("buckets", "gathered weights", "activations", "logits", "block at work", "context"):
        sizes[name, "device"] = parts[name]
    if plan.zero < 3:
        sizes["gradients on their way", "device"] = _WINDOW * method.weights * count.block
    if plan.offload == "chunks":
        _with_tails(sizes, best_chunks(model).waste)
    if method.checkpoints:
        _move_checkpoints(sizes, layers)
    if method.to == "nvme":
        sizes["staging", "host"] = _staging(plan, count, method)
    sizes["fragmentation", "device"] = FRAGMENTATION * (device_peak(sizes) - sizes["context", "device"])
    shape = np.broadcast_shapes(share.shape, stages.shape)
    return {key: np.broadcast_to(size, shape) for key, size in sizes.items()}


def device_peak(sizes: dict[tuple[str, str], np.ndarray]) -> np.ndarray:
    """Bytes of a device of each stage at its fullest moment."""
    on_device = [(name, size) for (name, where), size in sizes.items() if where == "device"]
    return moment_peak(by_phase(on_device, _PHASES))


def off_device(sizes: dict[tuple[str, str], np.ndarray], where: str) -> np.ndarray:
    """Bytes of one device's part of each stage that lie in host memory or on drives."""
    return sum(size * (at == where) for (_, at), size in sizes.items())


def as_table(sizes: dict[tuple[str, str], np.ndarray], devices: int) -> pd.DataFrame:
    """component, place, size_bytes: of the fullest device, and of all `devices` of a node for host and drives."""
    fullest = int(np.argmax(device_peak(sizes)))
    rows = [(name, where, float(size[..., fullest]) * (1 if where == "device" else devices))
            for (name, where), size in sizes.items()]  # fmt: skip
    table = pd.DataFrame(rows, columns=["component", "place", "size_bytes"])
    order = table["place"].map(PLACES.index)
    return table[table["size_bytes"] > 0].assign(order=order).sort_values("order", kind="stable").drop(
        columns="order").reset_index(drop=True)  # fmt: skip


def _states(plan: Plan, count, method: Method, split: Split, accumulates: bool) -> dict:
    """Weights, gradients and optimizer states by place."""
    ranks = plan.dp * plan.cp
    sharing = plan.shard or ranks
    whole = count.dense + count.experts
    shard = count.dense / sharing + count.experts / np.maximum(sharing / plan.ep, 1)
    weights = method.weights * (shard if plan.zero == 3 else whole)
    owned = shard if plan.zero >= 1 else whole
    gradients, optimizer = method.gradients * (shard if plan.zero >= 2 else whole), method.optimizer * owned
    on_device = 0.0 if streams_gradients(plan) or not accumulates else method.weights * whole
    return {
        ("weights", "device"): weights * (1 - split.weights),
        ("gradients", "device"): np.maximum(gradients * (1 - split.states), on_device),
        ("optimizer", "device"): optimizer * (1 - split.states),
        ("optimizer temporaries", "device"): 4 * owned * (1 - split.states),
        ("weights", method.to): method.buffer * weights * split.weights,
        ("gradients", method.to): method.buffer * gradients * split.states,
        ("optimizer", method.to): method.buffer * optimizer * split.states,
    }


def _with_tails(sizes: dict, waste: float) -> None:
    """Chunks of all states are a little larger than what they hold."""
    for where in ("device", "host"):
        held = sum(size for (name, at), size in sizes.items() if at == where and name in ("weights", "optimizer"))
        sizes["chunk tails", where] = held * waste / (1 - waste)


def _move_checkpoints(sizes: dict, layers: np.ndarray) -> None:
    """Activations to the host but for those of two layers."""
    held = sizes["activations", "device"]
    on_their_way = np.minimum(_WINDOW / np.maximum(layers, 1), 1.0) * held
    sizes["activations", "device"] = 0 * held
    sizes["checkpoints on their way", "device"] = on_their_way
    sizes["activations", "host"] = held


def _staging(plan: Plan, count, method: Method) -> np.ndarray:
    """Pinned host memory between drives and devices: weights of a few layers, two tiles of the optimizer's states."""
    sharing = plan.shard or plan.dp * plan.cp
    block = count.block / sharing
    return (plan.prefetch + 2) * method.weights * block + _WINDOW * (method.optimizer + method.gradients) * block


def _batches(plan: Plan, global_batch: int | None) -> float:
    return np.inf if global_batch is None else float(np.ceil(global_batch / (plan.dp * plan.micro_batch)))
