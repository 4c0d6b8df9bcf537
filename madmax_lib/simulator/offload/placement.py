"""Where does each byte of a training step lie: on the device, in host memory or on
drives?

ZeRO-Offload [arXiv 2101.06840] keeps 16-bit weights on the device and moves gradients
and Adam's states to the host; ZeRO-3 Offload moves the weights too; ZeRO-Infinity
[arXiv 2104.07857] moves all states to drives and checkpoints of activations to the
host; PatrickStar [arXiv 2108.05818] and Gemini move chunks of states and need no room
for gradients. `share` says how much of what may leave the device does leave it: states
of the optimizer go first, since weights and their chunks travel with every pass.

Chunks hold tensors in the order of the model: one that does not fit in what is left
opens the next chunk, and the rest stays empty. Their size is searched so that the tails
are small. A tensor larger than a chunk, as an embedding table can be, gets one of its
own. The four lists (16-bit weights, fp32 weights, two moments) are cut alike; gradients
take the place of the 16-bit weights: 14 bytes a parameter.

How fast does a host work for one device? Its share of host memory, of the links to
the devices and of the drives.

All devices of a node move and update at the same time, so each has its share. CPU Adam
is bound by memory traffic: weights, two moments and gradient read; the first three and
a 16-bit copy written.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from madmax_lib.base import (
    is_number,
    require_number,
    require_type,
    short_repr,
)
from madmax_lib.catalog import Cluster, Host, data_file, read_object
from madmax_lib.plan import Case, Plan
from madmax_lib.simulator.memory.memory import (
    FRAGMENTATION,
    by_phase,
    held_layers,
    moment_peak,
    stage_bytes,
)
from madmax_lib.simulator.memory.states import (
    software_of,
    stage_parameters,
    state_bytes,
)

PLACES = ("device", "host", "nvme")
# components that offload leaves as they are
_AS_WITHOUT = (
    "buckets",
    "gathered weights",
    "activations",
    "logits",
    "block at work",
    "context",
)
_MOMENTS_BYTES = 8  # of Adam, fp32, per parameter
# layers whose gradients or checkpoints are on their way at once: one is copied, one is
# filled
_WINDOW = 2
_MI = 2**20
# elements; from 32 Mi over a range of 128 Mi, as dheerj188/HeterogeneousTraining-IISc
# runs Gemini
_SIZES = range(32 * _MI, 161 * _MI, 4 * _MI)


@dataclass(frozen=True)
class Method:
    """Bytes that 16-bit training with Adam holds, and which may leave the device."""

    gradients: float  # bytes per parameter
    optimizer: float
    moves_weights: bool = True  # weights leave the device too
    to: str = "host"  # or nvme: where the states go
    buffer: float = 1.0  # bytes reserved there for each byte kept
    checkpoints: bool = False  # those of activations leave too
    weights: float = 2.0  # bytes per parameter


# optimizer: 2 on the device, 2 + 12 on the host [arXiv 2101.06840]. all: DeepSpeed's
# estimator for ZeRO-3 counts 18
# (fp32 gradients) and half as much again for buffers
# [estimate_zero3_model_states_mem_needs_all_cold].
# chunks: gradients take the place of weights [arXiv 2108.05818]. nvme: 20 [arXiv
# 2104.07857, section 3]
_METHODS = read_object(data_file("offload_methods.json"))
METHODS = {name: Method(**fields) for name, fields in _METHODS.items()}


@dataclass(frozen=True)
class Policy:
    """Way in which states leave the device. Raises ValueError for a share outside 0..1 or
    negative bytes.

    share: 0..1 of what may leave the device, 1 for static full offload, which is how
    training stacks do it (default None: the best one is searched).
    gradient_bytes: per parameter beside the weights (default None: the method's).
    checkpoints: of full recompute go to the host (default None: as the method does).
    delayed: the update runs beside the next step's passes, one step late (default
    False) [arXiv 2101.06840, 5.2].
    """

    share: float | None = None
    gradient_bytes: float | None = None
    checkpoints: bool | None = None
    delayed: bool = False

    def __post_init__(self):
        if self.share is not None and not (is_number(self.share) and self.share <= 1):
            raise ValueError(f"share={short_repr(self.share)} is not in 0..1")
        if self.gradient_bytes is not None:
            require_number("gradient_bytes", self.gradient_bytes)

    def method(self, plan: Plan) -> Method:
        """The plan's method with what this policy changes."""
        method = METHODS[plan.offload]
        if self.gradient_bytes is not None:
            method = replace(method, gradients=self.gradient_bytes)
        checkpoints = self.checkpoints
        if checkpoints is None:
            checkpoints = method.checkpoints
        return replace(method, checkpoints=checkpoints and plan.recompute == "full")


def policy_of(policy: Policy | None, case: Case) -> Policy:
    """The policy; without one all that may leave the device does, as stacks do it, or
    the best share where no software is named and for chunks. Raises ValueError for what
    is none.
    """
    is_open = case.software.name == "none" or case.plan.offload == "chunks"
    usual = partial(Policy, share=None if is_open else 1.0)
    return require_type("policy", policy, Policy, usual)


@dataclass(frozen=True)
class Split:
    """Shares that lie off the device, each a share 0..1 or an array of them."""

    states: float | np.ndarray  # of the optimizer's states and of the gradients
    weights: float | np.ndarray  # of the 16-bit weights


def split_of(method: Method, share) -> Split:
    """Split of a share (a number or an array) of the bytes that may leave; the
    optimizer's states leave first.
    """
    states = method.optimizer + method.gradients
    weights = method.weights * method.moves_weights
    leaving = share * (states + weights)
    return Split(
        np.minimum(leaving / states, 1.0),
        np.maximum(leaving - states, 0.0) / max(weights, 1.0),
    )


def streams_gradients(plan: Plan) -> bool:
    """Whether gradients leave with every micro-batch; else they are summed on the
    device until the last one.
    """
    return plan.zero == 3 or plan.replicas == 1 or (plan.zero == 2 and plan.pp == 1)


def bytes_by_place(
    case: Case, share, policy: Policy
) -> dict[tuple[str, str], np.ndarray]:
    """Bytes of one device's part of each stage: {(component, place): (..., pp)}; the
    host's part is per device too.

    case: as `normalised` gives it. share: of what may leave the device, a number or an
    array of shape (k, 1).
    """
    model = case.model
    plan = case.plan
    method = policy.method(case.plan)
    stages = np.arange(plan.pp)
    kinds = held_layers(model, plan)
    parts = stage_bytes(replace(case, software="deepspeed"), stages, kinds)
    count = stage_parameters(model, plan, stages, kinds)
    layers = sum(kinds.values())
    share = np.asarray(share, dtype=float)
    sizes = _states(case, count, method, split_of(method, share))
    sizes |= {(name, "device"): parts[name] for name in _AS_WITHOUT}
    if plan.zero < 3:
        window_bytes = _WINDOW * method.weights * count.block
        sizes["gradients on their way", "device"] = window_bytes
    if plan.offload == "chunks":
        waste = _chunk_waste(model)
        # chunks of all states are a little larger than what they hold
        for where in PLACES[:2]:
            states = sizes["weights", where] + sizes["optimizer", where]
            sizes["chunk tails", where] = states * waste / (1 - waste)
    if method.checkpoints:  # but for those of two layers
        checkpoints = sizes["activations", "device"]
        moving = np.minimum(_WINDOW / np.maximum(layers, 1), 1.0)
        sizes["checkpoints on their way", "device"] = moving * checkpoints
        sizes["activations", "host"] = checkpoints
        sizes["activations", "device"] = 0 * checkpoints
    if method.to == "nvme":
        # pinned host memory: weights of a few layers, two tiles of the optimizer's states
        window = (plan.prefetch + 2) * method.weights
        window += _WINDOW * (method.optimizer + method.gradients)
        sizes["staging", "host"] = window * (count.block / plan.sharing)
    used_bytes = _device_peak(sizes) - sizes["context", "device"]
    sizes["fragmentation", "device"] = FRAGMENTATION * used_bytes
    shape = np.broadcast_shapes(share.shape, stages.shape)
    return {key: np.broadcast_to(size, shape) for key, size in sizes.items()}


def _tensor_sizes(model):
    """Elements of every parameter tensor, in the order of the model."""
    h = model.hidden
    norm = model.norm_parameters
    attention = [inputs * outputs for _, inputs, outputs in model.attention_matrices]
    # biases and norms of queries and keys
    rest = model.attention_parameters - sum(attention)
    table = 3 * model.patch**2 * h + h if model.image else model.vocab * h
    sizes = [table, model.embedding_parameters - table]
    for layer in range(model.layers):
        width = model.ffn
        copies = 1
        router = 0
        if model.is_mixture(layer):
            width = model.expert_ffn
            copies = model.experts + model.shared_experts
            router = (h + model.router_bias) * model.experts
        matrices = [h * width] * (3 if model.gated else 2)
        biases = 0
        if model.mlp_bias:
            biases = model.mlp_parameters(width) - sum(matrices)
        sizes += [norm, *attention, rest, norm, router, *copies * [*matrices, biases]]
    # what a model lacks is no tensor
    return [size for size in (*sizes, norm, model.head_parameters) if size]


def _packed(sizes, chunk):
    """Share 0..1 that is empty of the chunks that hold tensors of these sizes in order.

    >>> _packed([3, 3, 3, 9], 8)  # 7 of two chunks of 8 and one of 9
    0.28
    """
    chunks = []  # elements of each
    room = 0  # left in the open one
    for size in sizes:
        if size > chunk:
            chunks.append(size)  # one of its own
        elif size > room:
            chunks.append(chunk)
            room = chunk - size
        else:
            room -= size
    return 1 - sum(sizes) / sum(chunks)


@lru_cache(maxsize=256)
def _chunk_waste(model):
    """Share 0..1 of the elements of a model's chunks that is empty, at the chunk size
    with the smallest tails.

    Sizes from 32 to 160 Mi elements in steps of 4 Mi; a smaller model gets one chunk.
    """
    sizes = _tensor_sizes(model)
    if sum(sizes) <= _SIZES.start:
        return _packed(sizes, sum(sizes))
    return min(_packed(sizes, chunk) for chunk in _SIZES)


def _device_peak(sizes):
    """Bytes of a device of each stage at its fullest moment."""
    on_device = [
        (name, size) for (name, where), size in sizes.items() if where == "device"
    ]
    return moment_peak(by_phase(on_device))


def peaks_by_place(
    sizes: dict[tuple[str, str], np.ndarray], devices: int
) -> dict[str, np.ndarray]:
    """Bytes of the fullest device, and of host and drives of a node with as many
    `devices` of the fullest stage.
    """
    peaks = {"device": _device_peak(sizes).max(axis=-1)}
    for where in PLACES[1:]:
        away = [size for (_, at), size in sizes.items() if at == where]
        peaks[where] = devices * sum(away, np.zeros(1)).max(axis=-1)
    return peaks


def as_table(sizes: dict[tuple[str, str], np.ndarray], devices: int) -> pd.DataFrame:
    """component, place, size_bytes: of the fullest device, and of all `devices` of a
    node for host and drives.
    """
    fullest = int(np.argmax(_device_peak(sizes)))
    rows = [
        (*key, float(size[..., fullest]) * (1 if key[1] == "device" else devices))
        for key, size in sizes.items()
    ]
    rows.sort(key=lambda row: PLACES.index(row[1]))
    table = pd.DataFrame(rows, columns=["component", "place", "size_bytes"])
    return table[table["size_bytes"] > 0].reset_index(drop=True)


def _states(case, count, method, split):
    """Weights, gradients and optimizer states by place."""
    software = replace(
        software_of("deepspeed", "fp16"),
        weight_bytes=method.weights,
        accumulator_bytes=0,
        gradient_bytes=method.gradients,
        copy_bytes=method.optimizer - _MOMENTS_BYTES,
    )
    states = state_bytes(case.plan, count, software, "adam", 1.0)
    names = "weights", "gradients", "optimizer"
    away = dict(zip(names, (split.weights, split.states, split.states), strict=True))
    sizes = {(name, "device"): states[name] * (1 - away[name]) for name in names}
    if case.micro_batches > 1 and not streams_gradients(case.plan):
        # they are summed as wide as the weights
        gradients = np.maximum(sizes["gradients", "device"], states["weights"])
        sizes["gradients", "device"] = gradients
    temporaries = states["optimizer temporaries"] * (1 - split.states)
    sizes["optimizer temporaries", "device"] = temporaries
    return sizes | {
        (name, method.to): method.buffer * states[name] * away[name] for name in names
    }


# fp32 weight, two moments, 16-bit gradient and copy, rounded to whole numbers of fp32
_ADAM_BYTES = 28
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
        return _ADAM_BYTES * parameters / self.adam


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
