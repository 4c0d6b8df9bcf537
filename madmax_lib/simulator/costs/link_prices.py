"""Seconds of collectives on the links of a cluster, from sizes, groups and rates.

A collective takes  t = size x byte_s + calls x call_s  with byte_s and call_s of its
kind and group; where it was measured, the measured curve takes the place of the formula.
size is the message of one rank: the whole buffer for all-reduce, the gathered buffer
for all-gather and gather, the input for reduce-scatter and all-to-all. A group of one
rank takes no time. Ring formulas: Patarasuk & Yuan 2009; Thakur, Rabenseifner & Gropp 2005.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from madmax_lib.catalog.measured_collectives import measured_s
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.layers.work import any_nonzero
from madmax_lib.simulator.rates.compute import Number, distinct_bins
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.rates.topology import Group

_WIRE_SHARE = 1448 / 1538  # of an Ethernet frame is data of TCP
_TREE_STEPS = 32  # per doubling of the nodes: what a ring of 256 nodes takes
_SAME = 1e-3  # relative difference of rates that are only written differently


class _Measured(NamedTuple):
    """Conditions of a measured curve."""

    kind: str
    ranks: int
    nodes: int


@dataclass(frozen=True)
class _Network:
    """Rates of the network as a device sees it."""

    byte_s: Number  # of the device's share of it
    call_s: Number  # of a call that crosses it
    hop_s: Number  # of a step of a ring on it


class LinkPrices:
    """Prices of collectives of steps under parameters; arrays where steps are many."""

    def __init__(self, steps: Steps, parameters: Parameters):
        self.steps = steps
        self.parameters = parameters
        self.machine = steps.machine
        self._rates: dict[tuple[str, str], tuple[Number, Number]] = {}

    def comm_s(
        self, kind: str, size_bytes: Number, group: Group, calls: Number = 1.0
    ) -> Number:
        """Seconds of a collective of a group, split into so many calls; 0 where it
        moves nothing.
        """
        if kind == "copy":
            return 0.0
        # a reduce-scatter is an all-gather run backwards
        priced = "all_gather" if kind == "reduce_scatter" else kind
        if (priced, group.name) not in self._rates:
            self._rates[priced, group.name] = self.rate(priced, group)
        byte_s, call_s = self._rates[priced, group.name]
        moves = size_bytes > 0
        seconds = size_bytes * byte_s + moves * (calls * call_s)
        for measured, points in self._curves.items():
            if measured.kind != kind:
                continue
            nodes = np.ceil(group.nodes)
            is_here = (group.ranks == measured.ranks) & (nodes == measured.nodes)
            # A larger group takes as much longer as the formulas say: priced by these
            # alone it could be cheaper than the one that was measured. On which links
            # that was has to be known.
            is_alike = (nodes > 1) == (measured.nodes > 1)
            is_larger = is_alike & (group.ranks > measured.ranks)
            is_larger = is_larger & bool(self.parameters.links)
            smaller = Group(
                group.name, measured.ranks, 1, measured.ranks / measured.nodes
            )
            each_bytes = size_bytes / calls
            for mask, timed in ((is_larger, smaller), (is_here, group)):
                if any_nonzero(mask):
                    each_s = measured_s(points, each_bytes)
                    scale = self._rescaled(priced, group, each_bytes, timed)
                    seconds = np.where(mask, moves * (calls * each_s * scale), seconds)
        return seconds

    def rate(self, kind: str, group: Group) -> tuple[Number, Number]:
        """Seconds per byte of a collective, and of a call; 0 in a group of one."""
        c = self.parameters.constants
        nodes = group.nodes
        network = self._network
        near_hop = self.machine.near_hop
        hop_s = np.where(near_hop > 0, near_hop, c["hop_s"])
        many = group.ranks > 1
        crosses = nodes > 1
        near = self._near_byte_s
        far = self._far_byte_s(group)
        if kind == "send_recv":
            call_s = c["collective_s"] + crosses * network.call_s
            return many * np.where(crosses, far, near), many * call_s
        if kind in ("all_to_all", "gather"):
            # the root of a gather receives what each rank of an all-to-all does
            hops_s = hop_s * (group.ranks - 1)
            call_s = c["collective_s"] + hops_s + crosses * network.call_s
            if kind == "gather":
                return exchange(group.ranks, group.in_node, near, far), many * call_s
            return self._exchange_byte_s(group), many * call_s
        byte_s = ring(group.ranks, group.in_node, near, far)
        near_s = c["collective_s"] + hop_s * (group.in_node - 1)
        if kind == "all_reduce":
            # scatter and gather: twice the bytes, unless switches reduce; across nodes
            # up and down a tree
            steps = 2 * np.log2(np.maximum(nodes, 1))
            byte_s = (2 - crosses * self.machine.in_network) * byte_s
            near_s = 2 * near_s
        else:
            steps = _ring_steps(nodes)
        far_s = crosses * (network.call_s + network.hop_s * steps)
        return byte_s, many * (near_s + far_s)

    @cached_property
    def _curves(self):
        """Measured curves by what they were measured on, from keys such as
        `all_reduce 8 1` of files of parameters.
        """
        curves = {}
        for key, points in self.parameters.collectives.items():
            kind, ranks, nodes = key.split()
            curves[_Measured(kind, int(ranks), int(nodes))] = points
        # of a group the largest of the smaller ones comes last
        return dict(sorted(curves.items()))

    @cached_property
    def _near_byte_s(self):
        """Seconds per byte of a ring inside a node, per device."""
        share = self.machine.near.constant(self.parameters, "link_share")
        return 1 / (self.machine.link * self.parameters.network_efficiency * share)

    @cached_property
    def _network(self):
        """Rates of the network: sockets fill a slow wire, but for the frames' headers;
        a fast one they reach a share of.
        """
        machine = self.machine
        share, sockets, call_s, hop_s = (
            machine.network.constant(self.parameters, f"network_{name}")
            for name in ("share", "sockets", "s", "hop_s")
        )
        # a stated latency takes the place of that of the class of links
        stated = machine.far_hop > 0
        call_s = np.where(stated, machine.far_hop, call_s)
        hop_s = np.where(stated, machine.far_hop, hop_s)
        rate = machine.nic * self.parameters.network_efficiency
        slow_wire = np.minimum(_WIRE_SHARE * rate, sockets / machine.node)
        return _Network(1 / np.maximum(share * rate, slow_wire), call_s, hop_s)

    def _far_byte_s(self, group):
        """Seconds per byte of the network that a group has; above a leaf switch it may
        be oversubscribed.
        """
        machine = self.machine
        if not any_nonzero(np.isfinite(machine.leaf)):
            return self._network.byte_s
        is_above = group.ranks * group.stride > machine.leaf
        return self._network.byte_s * np.where(is_above, machine.oversubscription, 1.0)

    def _exchange_byte_s(self, group):
        """Seconds per byte of an all-to-all; a token goes once to a device, or node,
        with several of its experts where software does so.
        """
        near = self._near_byte_s
        far = self._far_byte_s(group)
        if group.name != "ep":
            return exchange(group.ranks, group.in_node, near, far)
        shape = self.steps.shape
        send_once = self.steps.traits.send_once
        share = self.parameters.constants["all_to_all_share"]
        active = np.maximum(shape.active_experts, 1)
        limit = shape.routed_nodes  # nodes that a token is sent to at most, 0: any
        # copies of a token over its active experts: to devices, and of those to nodes
        devices = np.where(send_once, distinct_bins(group.ranks, active), active)
        copies = devices / active
        most_nodes = np.where(limit > 0, limit, np.inf)
        nodes = np.minimum(most_nodes, distinct_bins(group.nodes, active))
        by_node = (send_once > 0) | (limit > 0)
        fewer = np.where(by_node, nodes / active / copies, 1.0)
        far = far * fewer / share
        return copies * exchange(group.ranks, group.in_node, near / share, far)

    def _rescaled(self, kind, group, size_bytes, timed):
        """Time of a call here over that of the group that was timed, on the links where
        collectives were measured, both by the formulas.
        """
        if timed is group and self._measured_on is self:
            return 1.0
        here_s, there_s = (
            size_bytes * byte_s + call_s
            for byte_s, call_s in (
                self.rate(kind, group),
                self._measured_on.rate(kind, timed),
            )
        )
        return here_s / np.maximum(there_s, 1e-300)

    @cached_property
    def _measured_on(self):
        """Prices on the links that the collectives of the parameters were measured on;
        itself where its machine has them, or none are stated.
        """
        machine = self.machine
        links = self.parameters.links
        pairs = zip((machine.link, machine.nic), links, strict=False)
        if all(np.allclose(*pair, rtol=_SAME, atol=0) for pair in pairs):
            return self
        warnings.warn(
            f"collectives were measured on links of {links[0]:.3g} and "
            f"{links[1]:.3g} bytes/s, inside a node and of a device's share of the "
            "network; here they are scaled to other links by the formulas",
            stacklevel=2,
        )
        machine = replace(machine, link=links[0], nic=links[1])
        return LinkPrices(replace(self.steps, machine=machine), self.parameters)


def ring(ranks, in_node, near, far):
    """Seconds per byte of a ring's all-gather, or reduce-scatter, its reverse: (p-1)/p
    of the bytes at the slower pace.

    near, far: seconds per byte between ranks of a node, and of one of its in_node ports
    to other nodes.

    >>> groups = ((1, 1), (2, 2), (8, 8), (16, 8), (2, 1))
    >>> [round(float(1e9 * ring(p, n, 1e-11, 9.6e-11)), 5) for p, n in groups]
    [0.0, 0.005, 0.00875, 0.01125, 0.048]
    """
    # one rank of each node sends on, over the ports of all of its ranks there
    far_s = (ranks > in_node) * far / in_node
    near_s = (in_node > 1) * near
    return (ranks - 1) / ranks * np.maximum(far_s, near_s)


def exchange(ranks, in_node, near, far):
    """Seconds per byte of an all-to-all: each rank sends 1/p to every other one, over
    both levels at once; the same of a gather, as its root receives as much.

    Of 16 ranks on two nodes half of the bytes take the slow level:

    >>> [round(float(1e9 * exchange(p, 8, 1 / 350e9, 1 / 25e9)), 4) for p in (8, 16)]
    [0.0025, 0.02]
    """
    return np.maximum((in_node - 1) * near, (ranks - in_node) * far) / ranks


def _ring_steps(nodes):
    """Steps between nodes of an all-gather or reduce-scatter: a ring, and above some
    250 nodes a tree's growth.

    A ring takes nodes - 1 steps; parallel aggregated trees (PAT, NCCL 2.23) grow with
    the logarithm.

    >>> _ring_steps([1, 2, 4096]).tolist()
    [0.0, 1.0, 384.0]
    """
    nodes = np.maximum(nodes, 1.0)
    return np.minimum(nodes - 1, _TREE_STEPS * np.log2(nodes))
