"""What does each operation of a step cost? Seconds of ops, collectives and launches at
the rates that are reached.

One price list for steps laid out event by event and for arrays of plans in closed form.
A product takes the longer of its FLOPs and its bytes, and its bytes again in part, as
operands are fetched before a wave of tiles can start; all else on the device is memory
traffic, but for attention. Constants stand in `data/parameter_bounds.csv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from madmax_lib.catalog.measured_collectives import measured_s
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.other_links import on_links
from madmax_lib.simulator.layers.ops import Block, Op, phases
from madmax_lib.simulator.layers.work import has
from madmax_lib.simulator.rates.collectives import exchange, ring, ring_steps
from madmax_lib.simulator.rates.compute import Number, misfit, optimizer_bytes
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.rates.topology import Group, Groups

__all__ = ["CAUSES", "Prices", "add"]

CAUSES = ("gemm_s", "attention_s", "pointwise_s")  # of compute
_COLLECTIVES = (
    4  # of tensor parallelism in the forward pass of a layer: two gathers, two scatters
)
_CALLS = 2  # of cp, of experts, of FSDP in a layer
_STOP_LAUNCHES = 3  # assumed
_WIRE_SHARE = 1448 / 1538  # of an Ethernet frame is data of TCP
_TENSORS = (
    12  # of a transformer layer: weights and biases of four products and two norms
)


class Prices:
    """Prices of the ops, collectives and launches of steps under parameters; arrays
    where steps are many.
    """

    def __init__(self, steps: Steps, parameters: Parameters):
        self.steps = steps
        self.parameters = parameters
        self.machine = steps.machine
        self.habits = steps.habits
        self.plan = steps.work.plan
        self.constants = parameters.constants
        self.groups = Groups(self.plan, self.machine.node)
        self._rates: dict[tuple[str, str], tuple[Number, Number]] = {}

    @cached_property
    def alone(self) -> Number:
        """Time of compute while no other device computes, over that beside all."""
        return self.constants["alone"]

    @cached_property
    def slower(self) -> Number:
        """Seconds of compute over those at the prices: of ranks that are behind, or
        that have a host to themselves.
        """
        return self.steps.slower * np.where(self.plan.world_size == 1, self.alone, 1.0)

    @cached_property
    def memory(self) -> Number:
        """Bytes/s of the device's memory."""
        return self.machine.memory * self.parameters.memory_efficiency

    @cached_property
    def near(self) -> Number:
        """Seconds per byte of a ring inside a node, per device."""
        share = self.machine.near.constant(self.parameters, "link_share")
        return 1 / (self.machine.link * self.parameters.network_efficiency * share)

    @cached_property
    def network(self) -> tuple[Number, Number, Number]:
        """Seconds per byte of a device's share of the network, of a call that crosses
        it, and of a step of a ring.

        Sockets fill a slow wire, but for the frames' headers; a fast one they reach a
        share of.
        """
        share, sockets, call_s, hop_s = (
            self.machine.network.constant(self.parameters, f"network_{name}")
            for name in ("share", "sockets", "s", "hop_s")
        )
        call_s, hop_s = (
            np.where(self.machine.far_hop > 0, self.machine.far_hop, of)
            for of in (call_s, hop_s)
        )
        rate = self.machine.nic * self.parameters.network_efficiency
        rate = np.maximum(
            share * rate, np.minimum(_WIRE_SHARE * rate, sockets / self.machine.node)
        )
        return 1 / rate, call_s, hop_s

    @cached_property
    def flops(self) -> dict[str, Number]:
        """FLOP/s of products (gemm), of those of heads (wide), of experts, attention,
        and unfused scores.
        """
        m = self.machine
        c = self.constants
        reached = self.parameters.compute_efficiency * m.rate.constant(
            self.parameters, "device_rate"
        )
        reached = reached * self.habits.stack.constant(self.parameters, "stack_rate")
        product = reached * np.where(self.habits.legacy, c["legacy_software"], 1.0)
        gemm = (
            m.peak_gemm * product * m.gemm.constant(self.parameters, "gemm_efficiency")
        )
        gemm = gemm / np.where(m.mx, c["quantise_mx"], 1.0)
        return {
            "gemm": gemm,
            "experts": gemm * c["moe_gemm"],
            "wide": m.peak_wide
            * product
            * m.head.constant(self.parameters, "gemm_efficiency"),
            "attention": m.peak_wide
            * reached
            * m.attention.constant(self.parameters, "attention_efficiency"),
            "scores": m.peak_wide * reached * c["unfused_efficiency"],
        }

    @cached_property
    def _pointwise(self) -> dict[str, Number]:
        """Seconds per byte of pointwise work, that of experts, and that of unfused
        scores.
        """
        factor = (
            self.habits.kernels.constant(self.parameters, "pointwise_factor")
            / self.memory
        )
        return {
            "": factor,
            "experts": factor
            * self.habits.mixture.constant(self.parameters, "moe_pointwise"),
            "core": self.habits.score_bytes
            / 4
            * self.constants["softmax_factor"]
            / self.memory,  # ops have 4 a score
        }

    def op_s(self, op: Op) -> Number:
        """Seconds of an op on the device."""
        if op.kind == "gemm":
            rate = self.flops[
                "experts" if op.experts else "wide" if op.wide else "gemm"
            ]
            bytes_s = op.traffic_bytes / self.memory
            return (
                np.maximum(op.flops / rate, bytes_s)
                + self.constants["gemm_bytes"] * bytes_s
            )
        if op.kind == "attention":
            if not op.shape:
                return op.flops / self.flops["attention"]
            return (
                misfit(self.steps.work.shape.head_dim) * op.flops / self.flops["scores"]
            )
        if op.kind == "lookup":
            return op.traffic_bytes / self.memory
        return (
            op.traffic_bytes
            * self._pointwise["experts" if op.experts else "core" if op.core else ""]
        )

    def block_s(self, block: Block) -> dict[str, dict[str, Number]]:
        """Seconds of a block by phase (forward, recompute, backward, weight) and cause
        (of `CAUSES`).
        """
        selective = self.plan.recompute == "selective"
        repeated = self.habits.repeated
        result: dict[str, dict[str, Number]] = {
            "forward": {},
            "recompute": {},
            "backward": {},
            "weight": {},
        }
        for phase, op in phases(block):
            cause = _cause(op)
            seconds = self.slower * self.op_s(op)
            if phase == "forward" and block.recomputed:
                kept = repeated if cause == "gemm_s" else op.core * (repeated == 0)
                add(
                    result["recompute"],
                    {cause: (self.repeats + selective * kept) * seconds},
                )
            add(
                result[phase],
                {cause: seconds * self.trained if phase == "weight" else seconds},
            )
        if not block.table:
            extra_s = (
                self.habits.kernels.constant(self.parameters, "weight_bytes")
                * block.parameters
                / self.memory
            )
            add(result["weight"], {"gemm_s": self.slower * self.trained * extra_s})
        return result

    def comm_s(
        self, kind: str, size_bytes: Number, group: Group, calls: Number = 1.0
    ) -> Number:
        """Seconds of a collective of a group, split into so many calls; 0 where it
        moves nothing.
        """
        if kind == "copy":
            return 0.0
        priced = "all_gather" if kind == "reduce_scatter" else kind  # its reverse
        if (priced, group.name) not in self._rates:
            self._rates[priced, group.name] = self.rate(priced, group)
        byte_s, call_s = self._rates[priced, group.name]
        seconds = size_bytes * byte_s + (size_bytes > 0) * (calls * call_s)
        for name, points in self.parameters.collectives.items():
            of, ranks, nodes = name.split()
            if of == kind and has(
                there := (group.ranks == int(ranks))
                & (np.ceil(group.nodes) == int(nodes))
            ):
                each = (
                    calls
                    * measured_s(points, size_bytes / calls)
                    * self._rescaled(priced, group, size_bytes / calls)
                )
                seconds = np.where(there, (size_bytes > 0) * each, seconds)
        return seconds

    def _rescaled(self, kind: str, group: Group, size_bytes: Number) -> Number:
        """Time of a call here over that on the links where collectives were measured,
        both by the formulas.
        """
        if (there := self._measured_on) is self:
            return 1.0
        here_s, there_s = (
            size_bytes * a + b
            for a, b in (prices.rate(kind, group) for prices in (self, there))
        )
        return here_s / np.maximum(there_s, 1e-300)

    @cached_property
    def _measured_on(self) -> Prices:
        return on_links(self, self.parameters.links)

    def rate(self, kind: str, group: Group) -> tuple[Number, Number]:
        """Seconds per byte of a collective, and of a call; 0 in a group of one."""
        c = self.constants
        nodes = group.nodes
        (_, far_s, hop_s) = self.network
        in_node_s = np.where(
            self.machine.near_hop > 0, self.machine.near_hop, c["hop_s"]
        )
        many = group.ranks > 1
        crosses = nodes > 1
        near = self.near
        far = self._far(group)
        if kind == "send_recv":
            return many * np.where(crosses, far, near), many * (
                c["collective_s"] + crosses * far_s
            )
        if kind == "all_to_all":
            return self._exchange(group), many * (
                c["collective_s"] + in_node_s * (group.ranks - 1) + crosses * far_s
            )
        byte_s = ring(group.ranks, group.in_node, near, far)
        near_s = c["collective_s"] + in_node_s * (group.in_node - 1)
        if kind == "all_reduce":
            steps = 2 * np.log2(np.maximum(nodes, 1))
            byte_s = (2 - crosses * self.machine.in_network) * byte_s
            near_s = 2 * near_s
        else:
            steps = ring_steps(nodes)
        return byte_s, many * (near_s + crosses * (far_s + hop_s * steps))

    def _far(self, group: Group) -> Number:
        """Seconds per byte of the network that a group has; above a leaf switch it may
        be oversubscribed.
        """
        if not has(np.isfinite(self.machine.leaf)):
            return self.network[0]
        beyond = group.ranks * group.stride > self.machine.leaf
        return self.network[0] * np.where(beyond, self.machine.oversubscription, 1.0)

    def _exchange(self, group: Group) -> Number:
        """All-to-all; that of tokens goes once to a device, or node, of several experts
        where software does so.
        """
        near = self.near
        far = self._far(group)
        if group.name != "ep":
            return exchange(group.ranks, group.in_node, near, far)
        shape = self.steps.work.shape
        share = self.constants["all_to_all_share"]
        active = np.maximum(shape.active_experts, 1)
        nodes = shape.routed_nodes
        copies = (
            np.where(self.habits.send_once, _distinct(group.ranks, active), active)
            / active
        )
        few_nodes = np.minimum(
            np.where(nodes > 0, nodes, np.inf), _distinct(group.nodes, active)
        )
        by_node = (self.habits.send_once > 0) | (nodes > 0)
        fewer = np.where(by_node, few_nodes / active / copies, 1.0)
        return copies * exchange(
            group.ranks, group.in_node, near / share, far * fewer / share
        )

    @cached_property
    def repeats(self) -> Number:
        """1 where the backward pass repeats the forward one, with its collectives."""
        return (self.plan.recompute == "full") + 0.0

    @cached_property
    def split(self) -> Number:
        """1 where the gradients of weights are computed later than those of inputs."""
        return (self.plan.schedule == "zero-bubble") + 0.0

    @cached_property
    def trained(self) -> Number:
        """1, or 0 where the weights are frozen under adapters (LoRA)."""
        return (self.plan.lora_rank == 0) + 0.0

    @cached_property
    def gathers_late(self) -> bool | np.ndarray:
        """Where ZeRO-3 gathers nothing ahead."""
        return (
            (self.plan.prefetch == 0)
            | (self.habits.tensorwise > 0)
            | (self.habits.fsdp_blocks > 0)
        )

    @cached_property
    def reduces_each(self) -> bool | np.ndarray:
        """Where each micro-batch reduces its gradients: by ZeRO-2 without pipeline, by
        some pipelines without ZeRO.
        """
        zero = self.plan.zero
        pp = self.plan.pp
        return ((zero == 2) & (pp == 1)) | (
            (zero == 0) & (pp > 1) & (self.habits.reduces_each > 0)
        )

    @cached_property
    def buckets(self) -> bool | np.ndarray:
        """Where ZeRO-3 reduces gradients in buckets, as DeepSpeed does; beside late
        gathers or a pipeline by layer.
        """
        several = (
            (self.habits.buckets > 0) & (self.plan.zero == 3) & (self.plan.pp == 1)
        )
        return several & np.logical_not(self.gathers_late)

    @cached_property
    def gradient_bytes(self) -> Number:
        """Of a gradient in reductions."""
        wire = np.maximum(self.habits.wire_bytes, self.steps.work.width.storage_bytes)
        return np.where(self.plan.reduce_fp32, 4.0, wire)

    def shard_name(self, expert: bool) -> str:
        """Group that shards the weights of experts or of all else: HSDP's shard, or all
        replicas.
        """
        if has(self.plan.shard):
            return "expert-shard" if expert else "shard"
        return "edp" if expert else "dp"

    def gather_calls(self) -> Number:
        """Calls in which the weights of a layer are gathered."""
        return np.where(self.habits.tensorwise, _TENSORS, 1.0)

    def gather_slowdown(self) -> Number:
        """Of gathers tensor by tensor."""
        return np.where(
            self.habits.tensorwise, 1 / self.constants["tensorwise_share"], 1.0
        )

    def update_s(self, parameters: Number) -> Number:
        """Seconds of the optimizer for the parameters that a device owns."""
        return (
            self.slower
            * optimizer_bytes(parameters)
            * self.constants["optimizer_factor"]
            / self.memory
        )

    @cached_property
    def launch_s(self) -> Number:
        """Seconds of the host for the kernels of a layer and its collectives, forward;
        backward takes twice as many.

        Where messages between stages stop the host, ranks of tp wait for each other's
        hosts in every collective.
        """
        kernels = self.habits.kernels
        tp = self.plan.tp
        calls = (tp > 1) * _COLLECTIVES + self.habits.on_host * self._blocking_calls
        collectives_s = calls * kernels.constant(self.parameters, "comm_launch_s")
        if has(self.habits.blocking_sends):
            stopped = (self.habits.blocking_sends > 0) & (self.plan.pp > 1)
            collectives_s = collectives_s * np.where(stopped, tp, 1)
        return (
            self.habits.forward_kernels * kernels.constant(self.parameters, "launch_s")
            + collectives_s
        )

    @cached_property
    def _blocking_calls(self) -> Number:
        """Other calls that block a process on a CPU, in units of those of tp: of cp, of
        experts, and FSDP's of a layer.

        FSDP2 shards, or where DDP cannot go copies. Counted in traces of gloo: idle
        time per layer beside that of DDP.
        """
        p = self.plan
        wrapped = (p.dp * p.cp > 1) & (
            (np.asarray(p.zero) >= 2) | (np.asarray(p.tp) * p.ep > 1)
        )
        return _CALLS * (
            (np.asarray(p.cp) > 1) + 0.0 + (np.asarray(p.ep) > 1) + wrapped
        )

    @cached_property
    def routing_s(self) -> Number:
        """Seconds of the host for what a mixture layer launches beside a dense one,
        forward; backward takes twice.
        """
        return self.habits.mixture.constant(self.parameters, "moe_launch_s")

    def launches_s(self, blocks: Sequence[Block]) -> Number:
        """Seconds of the host for the kernels of a layer, forward; 0 for the ends of
        the model.
        """
        mixture = any(op.experts for block in blocks for op in block.ops)
        halves = (
            sum(op.name == "norm" for block in blocks for op in block.ops) / 2
        )  # of a layer; each begins with one
        return blocks[0].recomputed * (
            halves * self.launch_s + mixture * self.routing_s
        )

    def stop_s(self, blocks: Sequence[Block]) -> Number:
        """Seconds from the counts of a mixture layer's tokens to its next kernel: two
        launches and a copy between.
        """
        if not any(block.expert for block in blocks):
            return 0.0
        stops = self.habits.counts * (self.plan.capacity == 0)
        return (
            stops
            * _STOP_LAUNCHES
            * self.habits.kernels.constant(self.parameters, "launch_s")
        )

    @cached_property
    def host_s(self) -> Number:
        """Seconds of the host at the end of a step."""
        return self.habits.kernels.constant(self.parameters, "step_s")

    @cached_property
    def hidden_shares(self) -> dict[str, Number]:
        """Share of a block's collectives that runs beside its products, by group."""
        tp = self.habits.overlap_tp * self.habits.hides_tp.constant(
            self.parameters, "tp_hidden"
        )
        return {
            "tp": tp,
            "ep": self.habits.hides_ep
            * self.habits.stack.constant(self.parameters, "ep_hidden"),
        }


def add(
    seconds: dict[str, Number], more: dict[str, Number], share: Number = 1.0
) -> None:
    """More seconds by cause, or a share of them."""
    for cause, part in more.items():
        seconds[cause] = seconds.get(cause, 0.0) + share * part


def _distinct(places: Number, tokens: Number) -> Number:
    """Of so many places, those that as many random tokens are expected to meet."""
    return places * (1 - (1 - 1 / np.maximum(places, 1)) ** tokens)


def _cause(op: Op) -> str:
    return (
        "attention_s" if op.core else "gemm_s" if op.kind == "gemm" else "pointwise_s"
    )
