"""Which devices talk to each other? The groups of a plan, and how they lie on the
nodes.

Devices are numbered with tp innermost, then cp, dp and pp [Megatron-LM]; experts'
groups lie in dp x cp in the same order, under etp = 1 in dp x cp x tp. A group is every
`stride`-th device. All numbers may be arrays.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from madmax_lib.plan.columns import Plans, expert_sharing
from madmax_lib.simulator.rates.compute import Number


@dataclass(frozen=True)
class Group:
    """Equal groups of devices."""

    name: str  # tp, cp, ep, dp ..., see `Groups`
    ranks: Number  # devices of a group
    stride: Number  # distance of neighbours in the numbering of devices
    in_node: Number  # devices that every group has on each of its nodes, at least

    @cached_property
    def nodes(self) -> Number:
        """Nodes over which a group is spread."""
        return self.ranks / self.in_node


class Groups:
    """Groups of a plan on nodes of `node` devices, by name.

    tp, cp, ep, etp, dp (gradients: dp x cp), edp (gradients of experts), shard and
    replicate (HSDP), the same of experts, node and across (the two levels of ZeRO++),
    pp; pairs of stages on the same node and on others.
    """

    def __init__(self, plan: Plans, node: Number):
        self.plan = plan
        self.node = node
        self.of = cache(self._of)

    def __getitem__(self, name: str) -> Group:
        return self.of(name)

    def _of(self, name):
        ranks, stride = self._shapes[name]
        if name == "same node":
            return Group(name, ranks, stride, 2)
        if name == "other node":
            return Group(name, ranks, stride, 1)
        span = np.asarray(ranks * stride, dtype=np.int64)
        shared = np.gcd(span, np.asarray(self.node, dtype=np.int64)) // np.asarray(
            stride, dtype=np.int64
        )
        return Group(name, ranks, stride, np.clip(shared, 1, ranks))

    @cached_property
    def _shapes(self):
        """Ranks and stride by name."""
        p = self.plan
        replicas = p.replicas
        shard = p.sharing
        # degrees of a table may be anything, as long as they are not judged
        node = np.asarray(np.maximum(self.node // p.tp, 1), dtype=np.int64)
        in_node = np.gcd(np.asarray(replicas, dtype=np.int64), node)
        etp = p.tp // p.expert_spread
        holders = replicas * p.expert_spread
        expert_shard = np.asarray(
            expert_sharing(shard, p.ep, p.expert_spread), dtype=np.int64
        )
        return {
            "tp": (p.tp, 1),
            "cp": (p.cp, p.tp),
            "dp": (replicas, p.tp),
            "shard": (shard, p.tp),
            "replicate": (replicas // shard, p.tp * shard),
            "node": (in_node, p.tp),
            "across": (replicas // in_node, p.tp * in_node),
            "pp": (p.pp, p.tp * replicas),
            "same node": (2, 1),
            "other node": (2, 1),
            "ep": (p.ep, etp),
            "etp": (etp, 1),
            "edp": (holders // p.ep, etp * p.ep),
            "expert-shard": (expert_shard, etp * p.ep),
            "expert-replicate": (
                holders // (p.ep * expert_shard),
                etp * p.ep * expert_shard,
            ),
        }


def member_name(name: str, rank: int, count: int, stride: int) -> str:
    """Name of a rank's group of `count` ranks with its members.

    >>> member_name("ep", 5, 2, 4)
    'ep [1, 5]'
    """
    first = rank - rank // stride % count * stride
    return f"{name} {[*range(first, first + count * stride, stride)]}"
