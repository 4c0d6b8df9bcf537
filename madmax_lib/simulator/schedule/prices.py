"""What does each operation of a laid-out step cost? Two price lists: the data sheet's roofline, and the closed form's.

`Fitted` hands the seconds of `step_time` out to the blocks of a layer, cause by cause (products, attention, memory
traffic), in proportion to their roofline time. A laid-out step and its closed form are then the same work at the same
price; they differ only in who waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from madmax_lib.plan import Plan
from madmax_lib.simulator.layers.ops import Block, Op, phases
from madmax_lib.simulator.rates.collectives import all_to_all_s, send_s
from madmax_lib.simulator.rates.compute import compute_s, optimizer_bytes, optimizer_s
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.rates.topology import Group, collective_s, groups
from madmax_lib.simulator.step.inputs import Work
from madmax_lib.simulator.step.step_time import achieved_rates, head_passes, layer_passes
from madmax_lib.simulator.step.traffic import copies_sent, data_s
from madmax_lib.specs import Cluster

__all__ = ["DataSheet", "Fitted"]

_CAUSES = ("gemm_s", "attention_s", "pointwise_s")


class DataSheet:
    """Roofline per op, latency and bandwidth per collective, at the shares of the data sheet that parameters name.

    host_s: idle time of a step while the host works. tp_hidden: share of tensor-parallel collectives that runs beside
    the products it belongs to. traffic_scale: slow-down of FSDP's traffic beside a pass (forward, backward).
    """

    host_s, tp_hidden = 0.0, 0.0

    def __init__(self, plan: Plan, cluster: Cluster, parameters: Parameters):
        self.cluster, self.parameters = cluster, parameters
        share = parameters.network_efficiency
        levels = cluster.intra.bandwidth_bytes_per_s, cluster.inter.bandwidth_bytes_per_s
        self.groups = groups(plan, cluster, *(share * bandwidth for bandwidth in levels))
        self.traffic_scale = {"forward": 1.0, "backward": 1.0}

    def ops_s(self, block: Block, phase: str, ops: Iterable[Op]) -> float:
        """Seconds of the ops of a block in a phase: forward, recompute, backward or weight."""
        return sum(self._roofline_s(op) for op in ops)

    def comm_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of a collective, or of a message to a neighbour (send_recv)."""
        return collective_s(kind, size_bytes, group)

    def update_s(self, parameter_count: float) -> float:
        """Seconds of the optimizer for the parameters that a device owns."""
        return float(optimizer_s(parameter_count, self.cluster.device, self.parameters))

    def _roofline_s(self, op: Op) -> float:
        return float(compute_s(op.flops, op.traffic_bytes, self.cluster.device, op.dtype, self.parameters))


class Fitted(DataSheet):
    """The seconds of the closed form. work: this step, alone; blocks: of all stages, as `plan` lays them out."""

    def __init__(self, work: Work, blocks: list[Block], plan: Plan, cluster: Cluster, parameters: Parameters):
        super().__init__(plan, cluster, parameters)
        self.work, self.rates = work, achieved_rates(work, parameters)
        self.groups = groups(plan, cluster, _only(self.rates["link"]), _only(self.rates["nic"]))
        constants = parameters.constants
        self.host_s = constants["step_s"]
        self.tp_hidden = 1 - constants["tp_exposed"] if work.overlap_tp[0] else 0.0
        self.call_s, self.hop_s = constants["collective_s"], constants["hop_s"]
        self.memory_bytes_per_s = _only(self.rates["memory"]) / constants["optimizer_factor"]
        self.copies = _only(copies_sent(work) / np.maximum(work.active_experts, 1))
        self.exchange_share = constants["all_to_all_share"]
        self.factors: dict[tuple[str, str, str], float] = {}
        self._share_out(blocks, plan.recompute)

    def ops_s(self, block: Block, phase: str, ops: Iterable[Op]) -> float:
        """As `DataSheet.ops_s`; 0 for the embedding, which the closed form leaves out."""
        place = "layer" if block.recomputed else block.name
        return sum(self._roofline_s(op) * self.factors.get((place, phase, _cause(op)), 0.0) for op in ops)

    def comm_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """As `DataSheet.comm_s`, with the closed form's latency of a call."""
        latency_s = self.call_s + (group.ranks - 1) * self.hop_s
        if kind == "send_recv":
            latency_s = latency_s / (group.ranks - 1) if group.name == "cp" else self.call_s
            return float(send_s(size_bytes, group.hop_bytes_per_s, latency_s))
        if kind == "all_to_all":
            copies, share = (self.copies, self.exchange_share) if group.name == "ep" else (1.0, 1.0)
            levels = group.in_node, share * group.near_bytes_per_s, share * group.far_bytes_per_s
            return float(all_to_all_s(size_bytes * copies, group.ranks, *levels, self.call_s))
        halves = group.name == "tp" and kind != "all_reduce"  # gather and scatter are the halves of a reduction
        return collective_s(kind, size_bytes, group, with_latency=False) + latency_s * (0.5 if halves else 1.0)

    def update_s(self, parameter_count: float) -> float:
        """As `DataSheet.update_s`, at the achieved memory bandwidth."""
        return optimizer_bytes(parameter_count) / self.memory_bytes_per_s

    def _share_out(self, blocks: list[Block], recompute: str) -> None:
        """Factors from roofline to fitted seconds by (layer or head, phase, cause), and the slow-down of traffic."""
        w, layers = self.work, [block for block in blocks if block.recomputed]
        passes = layer_passes(w, self.parameters, self.rates)
        forward, backward = ({name: _only(s) for name, s in part.items()} for part in passes)
        shares = w.recompute_gemm, w.recompute_attention, w.recompute_gemm
        again = {name: _only(share) * forward[name] for name, share in zip(_CAUSES, shares, strict=True)}
        seconds = {
            "forward": {name: forward[name] for name in _CAUSES},
            "recompute": again,
            "backward": {name: backward[name] - again[name] for name in _CAUSES},
        }
        beside = data_s(w, self.parameters, self.rates)
        stretch = {"forward": self._stretch("forward", forward, beside[0])}
        stretch["recompute"] = stretch["backward"] = self._stretch("backward", backward, beside[1])
        for phase, causes in seconds.items():
            rooflines = self._rooflines(layers, phase, recompute)
            for name, of_layer in causes.items():
                self._set("layer", phase, name, stretch[phase] * of_layer * _only(w.layers), rooflines.get(name, 0.0))
        head = [block for block in blocks if block.name == "head"]
        for phase, whole_s in zip(("forward", "backward"), head_passes(w, self.parameters, self.rates), strict=True):
            roofline_s = sum(self._rooflines(head, phase, recompute).values())
            for name in _CAUSES:
                self._set("head", phase, name, _only(whole_s), roofline_s)

    def _set(self, place: str, phase: str, cause: str, seconds: float, roofline_s: float) -> None:
        for part in ("backward", "weight") if phase == "backward" else (phase,):
            self.factors[place, part, cause] = seconds / roofline_s if roofline_s else 0.0

    def _rooflines(self, blocks: list[Block], phase: str, recompute: str) -> dict[str, float]:
        """Roofline seconds of blocks by cause; gradients of weights count with the backward pass."""
        result: dict[str, float] = {}
        alike: dict[tuple, list[Block]] = {}  # layers share their ops
        for block in blocks:
            alike.setdefault((block.ops, block.recomputed), []).append(block)
        for same in alike.values():
            parts = phases(same[0], recompute)
            for op in parts[phase] + (parts["weight"] if phase == "backward" else ()):
                result[_cause(op)] = result.get(_cause(op), 0.0) + len(same) * self._roofline_s(op)
        return result

    def _stretch(self, phase: str, causes: dict[str, float], traffic: tuple) -> float:
        """Longer compute by launches and by FSDP's traffic beside it; where traffic is longer, it sets the pace."""
        computed_s = sum(causes[name] for name in _CAUSES)
        busy_s = sum(s for name, s in causes.items() if name != "fsdp_s")
        gather_s, reduce_s = map(_only, traffic)
        late_s = 0.0 if self.work.prefetch[0] > 0 else gather_s
        beside_s, paced_s = gather_s + reduce_s - late_s, busy_s + causes["fsdp_s"] - late_s
        extra_s = causes["launch_s"]
        if busy_s >= beside_s:
            extra_s += paced_s - busy_s
        else:
            self.traffic_scale[phase] = paced_s / beside_s
        return 1 + extra_s / computed_s if computed_s else 1.0


def _only(value) -> float:
    """The number of an array of one."""
    return float(np.ravel(value)[0])


def _cause(op: Op) -> str:
    return "attention_s" if op.core else "gemm_s" if op.kind == "gemm" else "pointwise_s"
