"""Which devices talk to each other, over which link? The groups of a plan on a cluster, and the time of a collective.

Devices are numbered with tp innermost, then cp, dp and pp [Megatron-LM]; experts' groups lie in dp x cp in the same
order. A group is every `stride`-th device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from madmax_lib.plan import Plan
from madmax_lib.plans import expert_sharing
from madmax_lib.simulator.rates.collectives import all_gather_s, all_reduce_s, all_to_all_s, send_s, shared_bandwidth
from madmax_lib.specs import Cluster

__all__ = ["Group", "collective_s", "groups", "member_name"]


@dataclass(frozen=True)
class Group:
    """Equal groups of devices that are `stride` apart, and the network that one of them sees.

    name: tp, cp, ep, dp ..., see `groups`.
    ranks: devices of a group.
    stride: distance of neighbours in the numbering of devices.
    bandwidth_bytes_per_s: of a device in a ring.
    latency_s: of a message.
    hop_bytes_per_s: of a message to a neighbour alone.
    in_node: devices of a group on a node.
    near_bytes_per_s, far_bytes_per_s: inside a node and between nodes, per device.
    """

    name: str
    ranks: int
    stride: int
    bandwidth_bytes_per_s: float
    latency_s: float
    hop_bytes_per_s: float
    in_node: int
    near_bytes_per_s: float
    far_bytes_per_s: float


def groups(plan: Plan, cluster: Cluster, link_bytes_per_s: float, nic_bytes_per_s: float) -> dict[str, Group]:
    """All groups of a plan by name, at achieved rates inside a node and of a network port.

    tp, cp, ep, dp (gradients: dp x cp), edp (gradients of experts), shard and replicate (HSDP), the same of experts,
    node and across (the two levels of ZeRO++), pp; pairs of pipeline stages on the same node and on others.
    """
    replicas, tp, shard = plan.dp * plan.cp, plan.tp, plan.sharing
    expert_shard = int(expert_sharing(shard, plan.ep))
    in_node = int(np.gcd(replicas, max(cluster.devices_per_node // tp, 1)))
    shapes = {
        "tp": (tp, 1),
        "cp": (plan.cp, tp),
        "ep": (plan.ep, tp),
        "dp": (replicas, tp),
        "edp": (replicas // plan.ep, tp * plan.ep),
        "shard": (shard, tp),
        "replicate": (replicas // shard, tp * shard),
        "expert-shard": (expert_shard, tp * plan.ep),
        "expert-replicate": (replicas // (plan.ep * expert_shard), tp * plan.ep * expert_shard),
        "node": (in_node, tp),
        "across": (replicas // in_node, tp * in_node),
        "pp": (plan.pp, tp * replicas),
        "same node": (2, 1),
        "other node": (2, cluster.devices_per_node),
    }
    near, far = link_bytes_per_s, nic_bytes_per_s
    result = {}
    for name, (ranks, stride) in shapes.items():
        inside = ranks * stride <= cluster.devices_per_node
        bandwidth = float(shared_bandwidth(ranks, stride, cluster.devices_per_node, near, far))
        latency_s = (cluster.intra if inside else cluster.inter).latency_s
        in_node = ranks if inside else max(cluster.devices_per_node // stride, 1)
        hop = near if inside else far
        result[name] = Group(name, ranks, stride, bandwidth, latency_s, hop, in_node, near, far)
    return result


def collective_s(kind: str, size_bytes: float, group: Group, *, with_latency: bool = True) -> float:
    """Seconds of one collective of a group; send_recv is a message to a neighbour."""
    latency_s = group.latency_s if with_latency else 0.0
    if kind == "send_recv":
        return float(send_s(size_bytes, group.hop_bytes_per_s, latency_s))
    if kind == "all_to_all":
        levels = group.in_node, group.near_bytes_per_s, group.far_bytes_per_s
        return float(all_to_all_s(size_bytes, group.ranks, *levels, latency_s))
    formula = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "reduce_scatter": all_gather_s}[kind]
    return float(formula(size_bytes, group.ranks, group.bandwidth_bytes_per_s, latency_s))


def member_name(name: str, rank: int, count: int, stride: int) -> str:
    """Name of a rank's group of `count` ranks with its members.

    >>> member_name("ep", 5, 2, 4)
    'ep [1, 5]'
    """
    first = rank - rank // stride % count * stride
    return f"{name} {[*range(first, first + count * stride, stride)]}"
