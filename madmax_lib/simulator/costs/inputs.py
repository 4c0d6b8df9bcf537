"""A training step as the machine that runs it sees it: work, hardware and what the
software does, of one step or many.

`Steps.of` takes a case, whose plan may be the columns of many plans; `Steps.stack`
takes many cases, each of its own model, machine and software. All entries broadcast, so
what depends on one thing only is worked out once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property

import numpy as np

from madmax_lib.catalog import Device
from madmax_lib.catalog.kernel_rates import kernel_rates
from madmax_lib.catalog.muon import muon_flops
from madmax_lib.plan import Case, Plans
from madmax_lib.simulator.costs.rows import map_leaves
from madmax_lib.simulator.layers.work import Shape, Work
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters

# of memory's rate: what large convolutions reach at most (H100 and L40S, measured)
_CONVOLVED = 0.68
# device rates of which all runs at hand are mixtures of experts [AMD-AGI/Primus]
_OF_MIXTURES = ("mi355x",)


@dataclass(frozen=True)
class ClassColumn:
    """Class of fitted constants that each step uses."""

    names: tuple[str, ...]  # classes that occur
    code: np.ndarray | int = 0  # (n,) index into `names` of each step

    @classmethod
    def of(cls, texts: Sequence[str]) -> ClassColumn:
        """Column of a class name per step."""
        names, code = np.unique(np.asarray(texts, dtype=str), return_inverse=True)
        # numpy 2.0 shapes the inverse like its input, later ones flatten it
        return cls(tuple(names.tolist()), code.reshape(-1))

    def keys(self, name: str, constants: Container[str]) -> list[str]:
        """Key `name:class` of each class; of a class without one that of others, where
        they differ by width that of its width in bits (`ampere-16` -> `other-16`).
        """
        keys = []
        for class_name in self.names:
            bits = class_name.rpartition("-")[2]
            nearest = (class_name, "other", f"other-{bits}", "other-8")
            options = (f"{name}:{option}" for option in nearest)
            keys.append(next(key for key in options if key in constants))
        return keys

    def constant(self, parameters: Parameters, name: str) -> Number:
        """Value for each step of the constant of that name."""
        constants = parameters.constants
        values = [constants[key] for key in self.keys(name, constants)]
        if len(values) == 1:
            return values[0]
        # constants of shape (p, 1) are p machines: classes side by side, (p, classes),
        # then one per step, (p, n)
        columns = np.broadcast_arrays(*map(np.atleast_1d, values))
        return np.concatenate(columns, axis=-1)[..., self.code]


class _Classified:
    """Fields of which names of classes become columns of that class alone."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, str):
                object.__setattr__(self, name, ClassColumn((value,)))


@dataclass(frozen=True)
class Hardware(_Classified):
    """Data-sheet rates of the devices and links of a step, and the classes of constants
    that say which share of them is reached.
    """

    peak_gemm: Number  # FLOP/s of products in the dtype of the step
    peak_wide: Number  # FLOP/s of heads and attention, which stay in 16 bits
    # the same that large products reach alone
    gemm_alone: Number
    wide_alone: Number
    memory: Number  # bytes/s of the device's memory
    convolution: Number  # bytes/s of causal convolutions alone
    delta_rule: Number  # FLOP/s of the gated delta rule alone
    link: Number  # bytes/s inside a node, per device and direction
    nic: Number  # bytes/s of a device's share of the network
    node: Number  # devices on one fast link
    leaf: Number  # devices under one leaf switch
    oversubscription: Number  # divides the network's rate above a leaf switch
    in_network: Number  # 1 where switches reduce
    near_hop: Number  # seconds of a hop in a node; 0: those of its class of links
    far_hop: Number  # the same of the network
    mx: Number  # 1 for block scaling (MXFP8)
    family: ClassColumn
    rate: ClassColumn
    gemm: ClassColumn
    head: ClassColumn
    attention: ClassColumn
    near: ClassColumn  # link inside a node
    network: ClassColumn


@dataclass(frozen=True)
class SoftwareTraits(_Classified):
    """Behaviour of the software of a step where the plan does not say, as in `Software`.

    A question is answered by 1 or 0.
    """

    kernels: ClassColumn  # eager, fused, graph ...: how kernels are made
    stack: ClassColumn  # the software itself
    mixture: ClassColumn  # how mixture layers learn the counts of their tokens
    forward_kernels: Number  # launched by a layer in a forward pass
    hides_tp: ClassColumn  # how tensor-parallel collectives run beside products
    overlap_tp: Number  # do they?
    hides_ep: Number  # do exchanges of experts overlap?
    hides_dp: Number  # do reductions of gradients overlap?
    tensorwise: Number  # does FSDP gather tensor by tensor?
    reduces_each: Number  # does each micro-batch reduce, in a pipeline without ZeRO?
    era_2021: Number  # products as slow as in 2021
    score_bytes: Number  # moved by unfused attention per score, forward
    pads_vocabulary: Number  # to a multiple of 8 and more?
    buckets: Number  # does ZeRO-3 reduce in buckets, not layer by layer?
    recomputed_gemm_share: Number  # of products repeated by selective recompute
    send_once: Number  # is a token sent once to a rank with several of its experts?
    sums_tied: Number  # do both ends of a pipeline sum a tied table's gradients?
    blocking_sends: Number  # do messages between stages stop the host?
    rendezvous_sends: Number  # does a message wait for its receiver (Gloo)?
    balances_flops: Number  # are stages cut at equal FLOPs, the head's included?
    on_host: Number  # is the device a CPU, which issues its own kernels?
    fsdp_blocks: Number  # does the host wait in FSDP's collectives?
    syncs_token_counts: Number  # does the host stop to read how many tokens come?
    wire_bytes: Number  # of a gradient in reductions, unless the plan says fp32


@dataclass(frozen=True)
class Steps:
    """One training step or many, and the machine that runs them.

    >>> steps = Steps.of(Case("gpt2", "dgx-a100", Plans(dp=8), 64))
    >>> float(steps.micro_batches)
    8.0
    """

    work: Work
    machine: Hardware
    traits: SoftwareTraits
    global_batch: Number  # samples per step over all devices
    jitter: Number = 0.0  # mean delay of a rank over the time it computes
    optimizer_flops: Number = 0.0  # of an update, over parameters: Muon's
    slower: Number = 1.0  # seconds of compute over those at the prices

    @classmethod
    def of(cls, case: Case) -> Steps:
        """Step of one case, with one plan or the columns of many."""
        flops = 0.0
        if case.optimizer == "muon":
            flops = muon_flops(case.model) / case.model.parameters
        return cls(
            Work.of(case),
            _hardware(case),
            _traits(case),
            case.global_batch,
            case.jitter,
            flops,
        )

    @classmethod
    def stack(cls, cases: Sequence[Case]) -> Steps:
        """Steps of many cases of transformers; arrays of shape (n,)."""
        return _stacked([cls.of(case) for case in cases])

    def __getitem__(self, rows: np.ndarray) -> Steps:
        """Some of stacked steps."""
        return map_leaves(lambda part: part[rows] if np.ndim(part) else part, self)

    @property
    def plan(self) -> Plans:
        """Split of the model."""
        return self.work.plan

    @property
    def shape(self) -> Shape:
        """Dimensions of the model."""
        return self.work.shape

    @cached_property
    def micro_batches(self) -> Number:
        """Micro-batches per step and pipeline, the last one perhaps short."""
        plan = self.plan
        return np.ceil(self.global_batch / (plan.dp * plan.micro_batch))

    @cached_property
    def round_size(self) -> Number:
        """Micro-batches that go through a chunk in a row on average, as
        `schedules.order` groups them; pp at least.
        """
        pp = self.plan.pp
        count = self.micro_batches
        rounds = np.maximum(np.floor(count / pp), 1)
        return np.maximum(count / rounds, pp)


def _hardware(case):
    """Hardware of a case."""
    cluster = case.cluster
    device = cluster.device
    # no constants are fitted to CPUs: a user's own calibration brings them
    family = "other" if device.family == "cpu" else device.family
    is_unlisted = (family, device.rate_class) == ("other", "other")
    # what mixtures lose, a dense model need not
    is_dense = not getattr(case.model, "experts", 0)
    is_unlisted |= device.rate_class in _OF_MIXTURES and is_dense
    # 8 and 4 where the device multiplies such numbers, 16 for all others
    peaks = device.peak_flops
    is_low = case.dtype in ("fp8", "mxfp8", "nvfp4") and "fp8" in peaks
    bits = 8 if is_low else 16
    if case.dtype == "nvfp4" and "nvfp4" in peaks:
        bits = 4
    is_wide = case.dtype in ("fp32", "tf32", "fp64")
    if case.dtype == "fp32" and device.family == "other":
        bits = 32  # before Ampere without tensor cores
    wide_dtype = case.dtype if is_wide else device.nearest("bf16")
    convolution = device.memory_bandwidth_bytes_per_s
    delta_rule = device.peak(wide_dtype)
    if device.family != "cpu":
        alone = _mean_rate(device, "convolution", "bf16", "bytes_per_s")
        convolution = min(_CONVOLVED * convolution, alone)
        delta_rule = _mean_rate(device, "delta_rule", "bf16", "flops_per_s")
    release = "recent" if case.software.kernels in ("fused", "graph") else "pytorch"
    return Hardware(
        peak_gemm=device.peak(case.dtype),
        peak_wide=device.peak(wide_dtype),
        gemm_alone=products_alone(device, case.dtype),
        wide_alone=products_alone(device, wide_dtype),
        memory=device.memory_bandwidth_bytes_per_s,
        convolution=convolution,
        delta_rule=delta_rule,
        link=cluster.intra.bandwidth_bytes_per_s,
        nic=cluster.inter.bandwidth_bytes_per_s,
        node=cluster.devices_per_node,
        leaf=cluster.leaf_devices or float("inf"),
        oversubscription=cluster.oversubscription,
        in_network=float(cluster.inter.in_network_reduction),
        near_hop=cluster.intra.latency_s,
        far_hop=cluster.inter.latency_s,
        mx=float(case.dtype == "mxfp8"),
        family=family,
        rate="unlisted" if is_unlisted else device.rate_class,
        gemm=f"{family}-{bits}",
        head=f"{family}-{max(bits, 16)}",
        attention=f"hopper-{release}" if family == "hopper" else family,
        near=_link_class(cluster.intra),
        network=_link_class(cluster.inter),
    )


def products_alone(device: Device, dtype: str) -> float:
    """FLOP/s of large products on a device that does nothing else, by measured kernels;
    a CPU has the rate that its calibration measured. The measured ones are of tensor
    cores: cores without reach nearly all of their peak.
    """
    on_cuda_cores = dtype == "fp32" and device.family == "other"
    if device.family == "cpu" or on_cuda_cores:
        return device.peak(dtype)
    return _mean_rate(device, "gemm", dtype, "flops_per_s")


def _mean_rate(device, operation, dtype, name):
    rates = kernel_rates(device, operation, dtype).rates
    return float(np.exp(np.mean([np.log(getattr(rate, name)) for rate in rates])))


def _link_class(link):
    """Class of constants of a link: the first word of its name, such as nvlink4, pcie,
    ib or efa.

    >>> from madmax_lib.catalog import Link
    >>> [_link_class(Link(name, 1e9)) for name in ("pcie4-per-gpu", "ib-ndr-400-per-gpu")]
    ['pcie', 'ib']
    """
    word = link.name.partition("-")[0]
    if word.startswith("nvlink"):  # generations differ in what they reach
        return word
    through_host = "-host-" in link.name
    return word.rstrip("0123456789") + "-host" * through_host


def _traits(case):
    """Traits of the software of a case: what the plan sets, else what the software
    does.
    """
    plan = case.plan
    software = case.software
    on_host = float(case.device.family == "cpu")
    # a CPU process waits in collectives that it does not issue asynchronously
    blocks = {way: on_host * (way not in software.cpu_async) for way in ("ddp", "fsdp")}
    # below ZeRO-2 and without tp and ep it is DDP that reduces, else FSDP's replicas
    is_ddp = (plan.zero < 2) & (plan.tp * plan.ep == 1)
    free = 1.0
    if on_host:
        free = np.where(is_ddp, 1 - blocks["ddp"], 1 - blocks["fsdp"])
    # how mixture layers learn the counts of their tokens
    mixture = "none"
    if case.model.experts:
        has_graph = software.name == "none" or software.kernels == "graph"
        mixture = "graph" if has_graph else "early"
        # with a capacity, tokens beyond it are dropped and no count is needed
        mixture = np.where(np.asarray(plan.capacity) > 0, "dropped", mixture)
        mixture = ClassColumn.of(mixture) if mixture.ndim else mixture.item()
    in_turn = (plan.schedule != "zero-bubble") & (plan.interleave == 1)
    return SoftwareTraits(
        kernels=software.kernels,
        stack=software.rates or software.name,
        mixture=mixture,
        forward_kernels=software.forward_kernels,
        hides_tp=software.overlap_tp_way,
        overlap_tp=plan.overlaps("tp", software) * (1 - on_host),
        hides_ep=plan.overlaps("ep", software) * (1 - on_host),
        hides_dp=plan.overlaps("dp", software) * free,
        tensorwise=float(software.gathers_tensorwise),
        reduces_each=float(software.reduces_every_micro_batch),
        era_2021=float(software.legacy),
        score_bytes=software.score_bytes,
        pads_vocabulary=float(software.pads_vocabulary),
        buckets=float(software.engine),
        recomputed_gemm_share=software.selective_products,
        send_once=float(software.send_once),
        sums_tied=float(software.sums_tied),
        blocking_sends=float(software.sends_block),
        rendezvous_sends=on_host * in_turn,
        balances_flops=float(software.stages_by_flops),
        on_host=on_host,
        fsdp_blocks=blocks["fsdp"],
        syncs_token_counts=(1 - on_host) * software.counts_on_host,
        wire_bytes=software.wire_bytes,
    )


def _stacked(items):
    """Value like each of the items, with the numbers of all as arrays, (n,)."""
    first = items[0]
    if isinstance(first, ClassColumn):
        return ClassColumn.of([one.names[0] for one in items])
    if isinstance(first, Shape):
        return Shape.stack(items)
    if not is_dataclass(first):
        return np.array(items)
    columns = {
        field.name: _stacked([getattr(item, field.name) for item in items])
        for field in fields(first)
    }
    return Plans(**columns) if isinstance(first, Plans) else type(first)(**columns)
