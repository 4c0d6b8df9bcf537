"""Seconds of ops, collectives, launches and updates at the rates that are reached.

One price list for steps laid out event by event and for arrays of plans in closed form.
A product takes the longer of its FLOPs and its bytes, and its bytes again in part, as
operands are fetched before a wave of tiles can start; all else on the device is memory
traffic, but for attention. Constants stand in `data/parameter_bounds.csv`.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.link_prices import LinkPrices
from madmax_lib.simulator.costs.overlap import Overlap
from madmax_lib.simulator.layers.ops import Block, Op, phases
from madmax_lib.simulator.layers.work import any_nonzero
from madmax_lib.simulator.rates.compute import (
    Number,
    Parts,
    misalignment,
    misfit,
    optimizer_bytes,
)
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.rates.topology import Groups

CAUSES = ("gemm_s", "attention_s", "pointwise_s")  # of compute
_TP_COLLECTIVES = 4  # of a layer's forward pass: two gathers, two scatters
_CALLS = 2  # of cp, of experts, of FSDP in a layer
_STOP_LAUNCHES = 3  # from counts of tokens to the next kernel; assumed
# from a message to the first kernel of the pass that it begins: receive, wait, autograd.
# Of 91 published steps with chunks the median error is 2.95 % at 8 to 12, 3.01 % at 0.
_SWITCH_LAUNCHES = 8
_TENSORS = 12  # of a layer: weights and biases of four products and two norms
_SCORE_BYTES = 4  # that ops have for a score of unfused attention


class Prices(LinkPrices, Overlap):
    """Prices of the ops, collectives and launches of steps under parameters, and what
    hides under what; arrays where steps are many.
    """

    def __init__(self, steps: Steps, parameters: Parameters):
        super().__init__(steps, parameters)
        self.traits = steps.traits
        self.plan = steps.plan
        self.constants = parameters.constants
        self.groups = Groups(self.plan, self.machine.node)
        # compute time of one busy rank relative to all ranks busy: on a CPU ranks share
        # cores and memory
        self.solo_time_ratio = parameters.constants["alone"]

    def pair_s(self, kind: str, size_bytes: Number) -> tuple[Number, Number]:
        """Seconds of a collective of two stages on one node, and on two."""
        groups = (self.groups[name] for name in ("same node", "other node"))
        return tuple(self.comm_s(kind, size_bytes, group) for group in groups)

    @cached_property
    def slower(self) -> Number:
        """Seconds of compute over those at the prices: of ranks that are behind, or
        that have a host to themselves.
        """
        is_solo = self.plan.world_size == 1
        return self.steps.slower * np.where(is_solo, self.solo_time_ratio, 1.0)

    @cached_property
    def memory(self) -> Number:
        """Bytes/s of the device's memory."""
        return self.machine.memory * self.parameters.memory_efficiency

    @cached_property
    def flops(self) -> dict[str, Number]:
        """FLOP/s of products (gemm), of those of heads (wide), of experts, attention,
        and unfused scores: data sheet, or for products the rate alone, x device x stack
        x kind of op.
        """
        machine = self.machine
        traits = self.traits
        c = self.constants

        def share(column, name):
            return column.constant(self.parameters, name)

        device = share(machine.rate, "device_rate")
        reached = self.parameters.compute_efficiency * device
        reached = reached * share(traits.stack, "stack_rate")
        product = reached * np.where(traits.era_2021, c["legacy_software"], 1.0)
        on_paper = c["data_sheet"] > 0
        gemm = np.where(on_paper, machine.peak_gemm, machine.gemm_alone)
        gemm = gemm * product * share(machine.gemm, "gemm_efficiency")
        gemm = gemm / np.where(machine.mx, c["quantise_mx"], 1.0)
        wide = np.where(on_paper, machine.peak_wide, machine.wide_alone)
        wide = wide * product * share(machine.head, "gemm_efficiency")
        attention = share(machine.attention, "attention_efficiency")
        return {
            "gemm": gemm,
            "experts": gemm * c["moe_gemm"],
            "wide": wide,
            "attention": machine.peak_wide * reached * attention,
            "scores": machine.peak_wide * reached * c["unfused_efficiency"],
        }

    @cached_property
    def _pointwise(self):
        """Seconds per byte of pointwise work, that of experts, and that of unfused
        scores.
        """
        traits = self.traits
        factor = traits.kernels.constant(self.parameters, "pointwise_factor")
        usual = factor / self.memory
        experts = traits.mixture.constant(self.parameters, "moe_pointwise")
        moved = traits.score_bytes / _SCORE_BYTES
        scores = moved * self.constants["softmax_factor"] / self.memory
        return {"": usual, "experts": usual * experts, "core": scores}

    def op_s(self, op: Op) -> Number:
        """Seconds of an op on the device."""
        if op.kind == "gemm":
            # t = max(FLOPs / rate, bytes / memory) + gemm_bytes x bytes / memory
            rate = "experts" if op.experts else "wide" if op.wide else "gemm"
            bytes_s = op.traffic_bytes / self.memory
            tiles_s = np.maximum(op.flops / self.flops[rate], bytes_s)
            if op.name == "logits":
                raw = (1 - self.traits.pads_vocabulary) * (1 - self.traits.on_host)
                slow = misalignment(op.shape[2]) - 1
                tiles_s = tiles_s * (1 + raw * slow)
            return tiles_s + self.constants["gemm_bytes"] * bytes_s
        if op.kind == "attention":
            if not op.shape:  # fused
                return op.flops / self.flops["attention"]
            head_dim = self.steps.shape.head_dim
            return misfit(head_dim) * op.flops / self.flops["scores"]
        if op.kind == "lookup":
            return op.traffic_bytes / self.memory
        if op.kind == "delta_rule":
            reached = self.machine.delta_rule * self.parameters.compute_efficiency
            return op.flops / reached
        if op.kind == "convolution":
            reached = self.machine.convolution * self.parameters.memory_efficiency
            return op.traffic_bytes / reached
        cause = "experts" if op.experts else "core" if op.core else ""
        return op.traffic_bytes * self._pointwise[cause]

    def block_s(self, block: Block) -> dict[str, Parts]:
        """Seconds of a block by phase (forward, recompute, backward: dgrad, weight:
        wgrad) and cause (of `CAUSES`).
        """
        selective = self.plan.recompute == "selective"
        gemm_share = self.traits.recomputed_gemm_share
        names = ("forward", "recompute", "backward", "weight")
        result = {name: {} for name in names}
        for phase, op in phases(block):
            cause = _cause(op)
            seconds = self.slower * self.op_s(op)
            if phase == "forward" and block.recomputed:
                # selective recompute repeats a share of the products, or where that is
                # 0 attention's scores
                scores = op.core * (gemm_share == 0)
                again = selective * (gemm_share if cause == "gemm_s" else scores)
                repeated_s = (self.repeats + again + op.again) * seconds
                add(result["recompute"], {cause: repeated_s})
            if phase == "weight":
                seconds = seconds * self.trained
            add(result[phase], {cause: seconds})
        if not block.table:
            # wgrad is added to gradients in fp32, which lie in memory
            factor = self.traits.kernels.constant(self.parameters, "weight_bytes")
            extra_s = factor * block.parameters / self.memory
            add(result["weight"], {"gemm_s": self.slower * self.trained * extra_s})
        return result

    @cached_property
    def repeats(self) -> Number:
        """1 where the backward pass repeats all of the forward one, with its
        collectives.
        """
        return (self.plan.recompute == "full") + 0.0

    @cached_property
    def repeats_feed_forward(self) -> tuple[Number, Number]:
        """1 where it repeats that of dense layers, and of mixtures, alone."""
        repeats = self.plan.recomputes
        return 1.0 * repeats("mlp"), 1.0 * repeats("moe")

    @cached_property
    def trained(self) -> Number:
        """1, or 0 where the weights are frozen under adapters (LoRA)."""
        return (self.plan.lora_rank == 0) + 0.0

    @cached_property
    def gradient_bytes(self) -> Number:
        """Bytes of a gradient in reductions."""
        wire = np.maximum(self.traits.wire_bytes, self.steps.work.width.storage_bytes)
        return np.where(self.plan.reduce_fp32, 4.0, wire)

    def gather_calls(self) -> Number:
        """Calls in which the weights of a layer are gathered."""
        return np.where(self.traits.tensorwise, _TENSORS, 1.0)

    def update_s(self, parameters: Number) -> Number:
        """Seconds of the optimizer for the parameters that a device owns: Adam's bytes,
        and Muon's products, which the owners of shards divide among them.
        """
        bytes_s = optimizer_bytes(parameters) / self.memory
        flops_s = parameters * self.steps.optimizer_flops / self.flops["gemm"]
        return self.slower * (bytes_s * self.constants["optimizer_factor"] + flops_s)

    @cached_property
    def launch_s(self) -> Number:
        """Seconds of the host for the kernels of a layer and its collectives, forward;
        backward takes twice as many.

        Where messages between stages stop the host, ranks of tp wait for each other's
        hosts in every collective.
        """
        traits = self.traits
        tp = self.plan.tp
        calls = (tp > 1) * _TP_COLLECTIVES + traits.on_host * self._blocking_calls
        call_s = traits.kernels.constant(self.parameters, "comm_launch_s")
        collectives_s = calls * call_s
        if any_nonzero(traits.blocking_sends):
            stopped = (traits.blocking_sends > 0) & (self.plan.pp > 1)
            collectives_s = collectives_s * np.where(stopped, tp, 1)
        return traits.forward_kernels * self._kernel_launch_s + collectives_s

    @cached_property
    def _blocking_calls(self):
        """Other calls that block a process on a CPU, in units of those of tp: of cp, of
        experts, and FSDP's of a layer.

        FSDP2 shards, or where DDP cannot go copies. Counted in traces of gloo: idle
        time per layer beside that of DDP.
        """
        p = self.plan
        needs_fsdp = (p.zero >= 2) | (p.tp * p.ep > 1)
        wrapped = (p.replicas > 1) & needs_fsdp
        several = (p.cp > 1) + 0.0 + (p.ep > 1)
        return _CALLS * (several + wrapped)

    @cached_property
    def routing_s(self) -> Number:
        """Seconds of the host for what a mixture layer launches beside a dense one,
        forward; backward takes twice.
        """
        return self.traits.mixture.constant(self.parameters, "moe_launch_s")

    def launches_s(self, blocks: Sequence[Block], *phases: str) -> Number:
        """Seconds of the host for the kernels of a layer in phases (forward, backward,
        recompute); 0 for the ends of the model.
        """
        # dgrad and wgrad launch once each
        passes = {"forward": 1, "backward": 2}
        seconds = 0.0
        for block in blocks:
            names = [op.name for op in block.ops]
            # attention and feed-forward part are half a layer each, and begin with a norm
            halves = names.count("norm") / 2
            once_s = halves * self.launch_s + ("router" in names) * self.routing_s
            # compiled kernels that a memory budget repeats are few
            again = self.repeats + block.again * (self.plan.budget == 1)
            times = sum(passes.get(phase, again) for phase in phases)
            seconds = seconds + block.recomputed * times * once_s
        return seconds

    def stop_s(self, blocks: Sequence[Block]) -> Number:
        """Seconds from the counts of a mixture layer's tokens to its next kernel: two
        launches and a copy between.
        """
        if not any(block.expert for block in blocks):
            return 0.0
        stops = self.traits.syncs_token_counts * (self.plan.capacity == 0)
        return stops * _STOP_LAUNCHES * self._kernel_launch_s

    @cached_property
    def switch_s(self) -> Number:
        """Seconds from the message that a pass of a pipeline's chunk waits for to its
        first kernel.
        """
        switches = (self.plan.pp > 1) * self.launches_ahead
        return switches * _SWITCH_LAUNCHES * self._kernel_launch_s

    @cached_property
    def _kernel_launch_s(self):
        return self.traits.kernels.constant(self.parameters, "launch_s")

    @cached_property
    def host_s(self) -> Number:
        """Seconds of the host at the end of a step."""
        return self.traits.kernels.constant(self.parameters, "step_s")

    def contention_s(self, compute_s: Number, comm_s: Number) -> Number:
        """Seconds that communication beside it adds to compute: both share memory and
        SMs, so compute is slower by a factor 1 + c while communication lasts.

            added = min(c / (1 + c) T_comm, c T_compute)      [arXiv 2507.03114]
        """
        slow = self.constants["contention"]
        return np.minimum(slow / (1 + slow) * comm_s, slow * compute_s)


def add(seconds: Parts, more: Parts, share: Number = 1.0) -> None:
    """Add seconds by cause, or a share of them."""
    for cause, part in more.items():
        seconds[cause] = seconds.get(cause, 0.0) + share * part


def _cause(op):
    if op.core:
        return "attention_s"
    return "gemm_s" if op.kind in ("gemm", "delta_rule") else "pointwise_s"
