"""What is a training step to the machine that runs it? Work, machine and habits of the
software, of one step or many.

`Steps.of` takes a case, whose plan may be the columns of many plans; `Steps.stack`
takes many cases, each of its own model, machine and software. All entries broadcast, so
what depends on one thing only is worked out once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from madmax_lib.catalog.models import Device, Link
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.simulator.layers.ops import Precision, precision
from madmax_lib.simulator.layers.work import HABITS, Shape, Work
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.alike import mapped

__all__ = ["Coded", "Habits", "Hardware", "Steps"]


@dataclass(frozen=True)
class Coded:
    """A class of constants for each step: the names that occur, and the number of each
    step's name.
    """

    names: tuple[str, ...]
    code: np.ndarray | int = 0

    @classmethod
    def of(cls, texts: Sequence[str]) -> Coded:
        """Of a text per step."""
        names, code = np.unique(np.asarray(texts, dtype=str), return_inverse=True)
        return cls(tuple(names.tolist()), code.reshape(-1))

    def keys(self, name: str, known: Container[str]) -> list[str]:
        """`name:class` of each class, or that of other classes, of its width in bits
        where they differ.
        """
        keys = []
        for own in self.names:
            classes = (own, "other", f"other-{own.rpartition('-')[2]}", "other-8")
            keys.append(
                next(key for key in (f"{name}:{of}" for of in classes) if key in known)
            )
        return keys

    def constant(self, parameters: Parameters, name: str) -> Number:
        """For each step, the constant of that name of its class."""
        values = [
            parameters.constants[key] for key in self.keys(name, parameters.constants)
        ]
        if len(values) == 1:
            return values[0]
        return np.concatenate(
            np.broadcast_arrays(*map(np.atleast_1d, values)), axis=-1
        )[..., self.code]


@dataclass(frozen=True)
class Hardware:
    """Data-sheet rates of the devices and links of a step, and the classes of constants
    that say what is reached.
    """

    peak_gemm: Number  # FLOP/s of the products
    peak_wide: Number  # of heads and attention
    memory: Number  # bytes/s
    link: Number  # bytes/s inside a node
    nic: Number  # bytes/s of a device's share of the network
    node: Number  # devices on one fast link
    leaf: Number  # devices under one switch
    oversubscription: Number  # beyond which this divides the network's rate
    in_network: Number  # 1 where switches reduce
    near_hop: Number  # seconds inside a node, 0 for those of its class of links
    far_hop: Number  # of the network likewise
    mx: Number  # 1 for block scaling (MXFP8)
    family: Coded
    rate: Coded
    gemm: Coded
    head: Coded
    attention: Coded
    near: Coded  # link inside a node
    network: Coded


@dataclass(frozen=True)
class Habits:
    """What the software of a step does where the plan does not say, as in `Software`; 1
    or 0 where it is a question.
    """

    kernels: Coded  # how they are made
    stack: Coded  # the software itself
    forward_kernels: Number  # that a layer launches in a forward pass
    hides_tp: Coded  # the way in which tensor-parallel collectives run beside products
    overlap_tp: Number  # whether they do
    hides_ep: Number  # whether exchanges of experts do
    hides_dp: Number  # whether gradients do
    tensorwise: Number  # FSDP gathers tensor by tensor
    reduces_each: (
        Number  # a pipeline without ZeRO reduces gradients with every micro-batch
    )
    legacy: Number  # products of 2021
    score_bytes: Number  # that unfused attention moves per score, forward
    buckets: Number  # ZeRO-3 reduces gradients in buckets, not layer by layer
    # share of the products that selective recompute repeats instead of attention's
    # scores
    repeated: Number
    send_once: Number  # a token goes once to a rank with several of its experts
    sums_tied: Number  # first and last stage add up the gradients of a tied table
    blocking_sends: Number  # messages between stages stop the host
    meets: Number  # a message waits for its receiver, and for what that one sends back
    by_flops: Number  # stages are cut at equal FLOPs, the head's among them
    # the host computes itself (CPU devices), and waits for what it has not issued
    # asynchronously
    on_host: Number
    fsdp_blocks: Number  # among that collectives of FSDP
    counts: Number  # the host stops in mixture layers to read how many tokens come
    wire_bytes: Number  # of a gradient in reductions, where the plan does not say fp32
    mixture: Coded


@dataclass(frozen=True)
class Steps:
    """One training step or many."""

    work: Work  # what is computed
    machine: Hardware  # where
    habits: Habits  # by which software
    global_batch: Number  # samples per step over all devices
    jitter: Number = 0.0  # mean delay of a rank over the time it computes, as in `Case`
    slower: Number = 1.0  # seconds of compute over those at the prices

    @classmethod
    def of(cls, case: Case) -> Steps:
        """Of one case, with one plan or the columns of many."""
        machine, habits = (_coded(row) for row in (_machine(case), _habits(case)))
        return cls(
            Work.of(case),
            Hardware(**machine),
            Habits(**habits),
            case.global_batch,
            case.jitter,
        )

    @classmethod
    def stack(cls, cases: Sequence[Case]) -> Steps:
        """Of many cases of transformers; arrays of shape (n,)."""
        plans = Plans(
            **{
                f.name: np.array([getattr(case.plan, f.name) for case in cases])
                for f in fields(Plans)
            }
        )
        widths = [precision(case.dtype) for case in cases]
        width = Precision(
            *(np.array([getattr(w, name) for w in widths]) for name in _WIDTHS)
        )
        sequence, batch, imbalance, jitter = (
            np.array([getattr(case, name) for case in cases]) for name in _NUMBERS
        )
        habits = (
            np.array([float(getattr(case.software, name)) for case in cases])
            for name in HABITS
        )
        work = Work(
            Shape.stack([case.model for case in cases]),
            plans,
            sequence,
            width,
            imbalance,
            *habits,
        )
        machine, habits = (
            _stacked([read(case) for case in cases]) for read in (_machine, _habits)
        )
        return cls(work, Hardware(**machine), Habits(**habits), batch, jitter)

    def __getitem__(self, rows: np.ndarray) -> Steps:
        """Some of stacked steps."""
        return mapped(lambda part: part[rows] if np.ndim(part) else part, self)

    @property
    def is_table(self) -> bool:
        """Whether these are plans of one case in rows."""
        return len(self.work.plan.shape) == 1 and not np.ndim(self.work.shape.layers)

    @cached_property
    def micro_batches(self) -> Number:
        """Per step and pipeline, the last one perhaps short."""
        return np.ceil(
            self.global_batch / (self.work.plan.dp * self.work.plan.micro_batch)
        )

    @cached_property
    def in_round(self) -> Number:
        """Micro-batches that go through a chunk in a row on average, as
        `schedules.order` groups them; pp at least.
        """
        pp = np.asarray(self.work.plan.pp)
        count = self.micro_batches
        return np.maximum(count / np.maximum(np.floor(count / pp), 1), pp)


_NUMBERS = ("sequence", "global_batch", "imbalance", "jitter")
_WIDTHS = ("operand_bytes", "storage_bytes")


def _machine(case: Case) -> dict[str, float | str]:
    """Fields of `Hardware` of a case."""
    cluster = case.cluster
    device = case.cluster.device
    family = (
        "other" if device.family == "cpu" else device.family
    )  # no constants are fitted
    wide = case.dtype in ("fp32", "tf32", "fp64")
    release = "recent" if case.software.kernels in ("fused", "graph") else "pytorch"
    return {
        "peak_gemm": device.peak(case.dtype),
        "peak_wide": device.peak(case.dtype if wide else device.nearest("bf16")),
        "memory": device.memory_bandwidth_bytes_per_s,
        "link": cluster.intra.bandwidth_bytes_per_s,
        "nic": cluster.inter.bandwidth_bytes_per_s,
        "node": cluster.devices_per_node,
        "leaf": cluster.leaf_devices or float("inf"),
        "oversubscription": cluster.oversubscription,
        "in_network": float(cluster.inter.in_network_reduction),
        "near_hop": cluster.intra.latency_s,
        "far_hop": cluster.inter.latency_s,
        "mx": float(case.dtype == "mxfp8"),
        "family": family,
        "rate": "unlisted"
        if (family, device.rate_class) == ("other", "other")
        else device.rate_class,
        "gemm": f"{family}-{_bits(device, case.dtype)}",
        "head": f"{family}-16",
        "attention": f"hopper-{release}" if family == "hopper" else family,
        "near": _kind(cluster.intra),
        "network": _kind(cluster.inter),
    }


def _kind(link: Link) -> str:
    """Class of constants of a link: the first word of its name, such as nvlink4, pcie,
    ib or efa.

    >>> _kind(Link("pcie4-per-gpu", 1.0)), _kind(Link("ib-ndr-400-per-gpu", 1.0))
    ('pcie', 'ib')
    """
    word = link.name.partition("-")[0]
    through_host = "-host-" in link.name
    return (
        word
        if word.startswith("nvlink")
        else word.rstrip("0123456789") + "-host" * through_host
    )


def _bits(device: Device, dtype: str) -> int:
    """8 and 4 where the device multiplies such numbers, 16 for all others."""
    if dtype == "nvfp4" and "nvfp4" in device.peak_flops:
        return 4
    return (
        8 if dtype in ("fp8", "mxfp8", "nvfp4") and "fp8" in device.peak_flops else 16
    )


def _habits(case: Case) -> dict[str, float | str | np.ndarray]:
    """Fields of `Habits` of a case: what the plan sets, else what the software does."""
    plan = case.plan
    software = case.software
    on_host = float(case.cluster.device.family == "cpu")
    blocks = {way: on_host * (way not in software.cpu_async) for way in ("ddp", "fsdp")}
    plain = (np.asarray(plan.zero) < 2) & (
        np.asarray(plan.tp) * plan.ep == 1
    )  # DDP, else FSDP's own way of copies
    reduced = np.where(plain, 1 - blocks["ddp"], 1 - blocks["fsdp"]) if on_host else 1.0
    return {
        "kernels": software.kernels,
        "stack": software.name,
        "forward_kernels": software.forward_kernels,
        "hides_tp": software.overlap_tp_way,
        "overlap_tp": plan.overlaps("tp", software) * (1 - on_host),
        "hides_ep": plan.overlaps("ep", software) * (1 - on_host),
        "hides_dp": plan.overlaps("dp", software) * reduced,
        "tensorwise": float(software.gathers_tensorwise),
        "reduces_each": float(software.reduces_every_micro_batch),
        "legacy": float(software.legacy),
        "score_bytes": software.score_bytes,
        "buckets": float(software.engine),
        "repeated": software.selective_products,
        "send_once": float(software.send_once),
        "sums_tied": float(software.sums_tied),
        "blocking_sends": float(software.sends_block),
        "meets": on_host
        * (np.not_equal(plan.schedule, "zero-bubble") & np.equal(plan.interleave, 1)),
        "by_flops": float(software.stages_by_flops),
        "on_host": on_host,
        "fsdp_blocks": blocks["fsdp"],
        "counts": (1 - on_host) * software.counts_on_host,
        "wire_bytes": software.wire_bytes,
        "mixture": _mixture(case),
    }


def _mixture(case: Case) -> str | Coded:
    """Class of constants of mixture layers: how their software learns the counts of
    their tokens.
    """
    if not case.model.experts:
        return "none"
    software = case.software
    capacity = case.plan.capacity
    usual = (
        "graph" if software.name == "none" or software.kernels == "graph" else "early"
    )
    if np.ndim(capacity):
        return Coded.of(np.where(capacity > 0, "dropped", usual))
    return "dropped" if capacity else usual


def _coded(row: dict) -> dict:
    return {
        name: Coded((value,)) if isinstance(value, str) else value
        for name, value in row.items()
    }


def _stacked(rows: list[dict]) -> dict:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: (Coded.of if isinstance(values[0], str) else np.array)(values)
        for name, values in columns.items()
    }
