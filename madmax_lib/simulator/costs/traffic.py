"""Collectives of weights and gradients: what data parallelism, ZeRO, HSDP and ZeRO++
move, told once for both forms.

Per device and step, P parameters of w bytes: DDP all-reduces P w; ZeRO-1/2
reduce-scatter the gradients and gather the updated weights; ZeRO-3 gathers P w for
every forward and every backward pass and scatters the gradients [arXiv 1910.02054].
HSDP does so inside a shard and all-reduces the shards of its copies once a step. ZeRO++
gathers 8-bit weights (qwz), gathers inside the node for the backward pass (hpz), and
exchanges 4-bit gradients inside the node, then across (qgz) [arXiv 2306.10209].

A `Transfer` applies to some plans of an array: the event engine issues those that apply
to its plan, one after another, the steady form sums what they cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from madmax_lib.plan.columns import owned
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.work import any_nonzero
from madmax_lib.simulator.rates.compute import Number

_INT8_BYTES = 1.0
_INT4_BYTES = 0.5


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of some blocks on a device, before data parallelism shards them."""

    dense: Number  # all but those of experts
    experts: Number

    @property
    def parts(self) -> tuple[tuple[bool, Number], ...]:
        """(whether of experts, parameters), where there are any."""
        both = ((False, self.dense), (True, self.experts))
        return tuple((experts, count) for experts, count in both if np.any(count))

    def owned(self, prices: Prices) -> Number:
        """Parameters whose optimizer states a device owns; none that are frozen."""
        p = prices.plan
        sharing = np.where(p.zero >= 1, p.sharing, 1)
        count = owned(self.dense, self.experts, sharing, p.ep, p.expert_spread)
        return prices.trained * count


def parameter_count(blocks: Sequence[Block]) -> ParameterCount:
    """Parameters of blocks; looked-up tables are not among them."""
    counts = [0.0, 0.0]
    for block in blocks:
        if not block.table:
            counts[block.expert] = counts[block.expert] + block.parameters
    return ParameterCount(*counts)


@dataclass(frozen=True)
class Transfer:
    """A collective of weights or gradients."""

    kind: str
    group: str  # name of `Groups`
    bytes_: Number  # of a parameter; of ZeRO++'s exchanges, a share of it
    applies: Number = True  # plans that have it
    calls: Number = 1.0


def _transfers_s(transfers, parameters, prices):
    """Seconds of transfers of so many parameters, one after another."""
    seconds = 0.0
    for one in transfers:
        if any_nonzero(one.applies):
            size = one.bytes_ * parameters
            part_s = prices.comm_s(one.kind, size, prices.groups[one.group], one.calls)
            seconds = seconds + np.where(one.applies, part_s, 0.0)
    return seconds


def shard_group(prices: Prices, *, experts: bool) -> str:
    """Group that shards weights: HSDP's shard, or all replicas."""
    if any_nonzero(prices.plan.shard):
        return "expert-shard" if experts else "shard"
    return "edp" if experts else "dp"


def gather_transfers(
    prices: Prices, *, experts: bool, backward: bool
) -> list[Transfer]:
    """Gather of sharded weights before a pass: of ZeRO-3, and of ZeRO-1/2 after the
    update.
    """
    plan = prices.plan
    storage = prices.steps.work.width.storage_bytes
    full = plan.zero >= 3
    # tensor by tensor in more calls, at a share of the rate
    share = np.where(
        prices.traits.tensorwise, prices.constants["tensorwise_share"], 1.0
    )
    slowdown = np.where(full, 1 / share, 1.0)
    calls = np.where(full, prices.gather_calls(), 1.0)
    quantised = np.minimum(_INT8_BYTES, storage)
    width = np.where(plan.qwz, quantised, storage) * slowdown
    group = shard_group(prices, experts=experts)
    if experts or not backward or not any_nonzero(plan.hpz):
        return [Transfer("all_gather", group, width, True, calls)]
    # hpz keeps a second copy of the weights inside the node for the backward pass
    in_node = plan.hpz
    return [
        Transfer("all_gather", group, width, np.logical_not(in_node), calls),
        Transfer("all_gather", "node", storage, in_node),
    ]


def reduce_transfers(
    prices: Prices, *, experts: bool, calls: Number = 1.0
) -> list[Transfer]:
    """Reduction of gradients among the devices that share their states, in so many
    calls; HSDP's copies follow (`copies_transfer`).
    """
    plan = prices.plan
    zero = plan.zero
    group = shard_group(prices, experts=experts)
    width = prices.gradient_bytes
    quantised = plan.qgz if not experts else False
    halves = (zero > 0) & np.logical_not(quantised)
    transfers = [
        Transfer("all_reduce", group, width, zero == 0, calls),
        Transfer("reduce_scatter", group, width, halves, calls),
    ]
    if any_nonzero(quantised):
        int4 = np.minimum(_INT4_BYTES, width)
        in_node = prices.groups["node"].ranks
        transfers += [
            Transfer("all_to_all", "node", int4, quantised),
            Transfer("all_to_all", "across", int4 / in_node, quantised),
        ]
    return transfers


def copies_transfer(prices: Prices, *, experts: bool, calls: Number = 1.0) -> Transfer:
    """All-reduce of a shard's gradients between HSDP's copies, once a step."""
    ranks = prices.groups[shard_group(prices, experts=experts)].ranks
    group = "expert-replicate" if experts else "replicate"
    hybrid = prices.plan.shard > 0
    width = prices.gradient_bytes / ranks
    return Transfer("all_reduce", group, width, hybrid, calls)


@dataclass(frozen=True)
class Gathers:
    """Seconds of the traffic of ZeRO-3 for some blocks and micro-batch."""

    forward_s: Number
    backward_s: Number
    reduce_s: Number


def gathers_of(count: ParameterCount, prices: Prices) -> Gathers:
    """Traffic of ZeRO-3 for weights in each micro-batch; none of other stages."""
    full = prices.plan.zero >= 3
    if not np.any(full):
        return Gathers(0.0, 0.0, 0.0)
    forward_s = 0.0
    backward_s = 0.0
    reduce_s = 0.0
    calls = prices.gather_calls()
    for experts, parameters in count.parts:
        moved = full * parameters
        ahead = gather_transfers(prices, experts=experts, backward=False)
        back = gather_transfers(prices, experts=experts, backward=True)
        reductions = reduce_transfers(prices, experts=experts, calls=calls)
        forward_s = forward_s + _transfers_s(ahead, moved, prices)
        backward_s = backward_s + _transfers_s(back, moved, prices)
        reduce_s = reduce_s + _transfers_s(reductions, moved, prices)
    return Gathers(forward_s, backward_s, prices.trained * reduce_s)


def overlapped_s(
    compute_s: Number, gather_s: Number, reduce_s: Number, prices: Prices
) -> Number:
    """Duration of compute that overlaps FSDP traffic: they slow each other down, the
    longer one counts.

    Gathers tensor by tensor, or not ahead, overlap nothing; nor do reductions then,
    which come before them on the stream.
    """
    comm_s = gather_s + reduce_s
    slowed_s = compute_s + prices.contention_s(compute_s, comm_s)
    together_s = np.maximum(slowed_s, comm_s)
    late = prices.gathers_late
    if not np.any(late):
        return together_s
    in_turn = late & (gather_s > 0)
    return np.where(in_turn, compute_s + comm_s, together_s)


@dataclass(frozen=True)
class ReducedTime:
    """Seconds in which gradients are reduced below ZeRO-3, and of HSDP's copies, which
    have a stream of their own.
    """

    within_s: Number  # among those that share the states
    across_s: Number  # between copies


def reduced_time(
    parameters: Number, calls: Number, prices: Prices, *, experts: bool
) -> ReducedTime:
    """Reductions of the gradients of so many parameters; those of ZeRO-3 within a shard
    are part of its micro-batches (`gathers_of`).
    """
    below = prices.plan.zero < 3
    within_s = 0.0
    if any_nonzero(below):
        transfers = reduce_transfers(prices, experts=experts, calls=calls)
        within_s = np.where(below, _transfers_s(transfers, parameters, prices), 0.0)
    copies = copies_transfer(prices, experts=experts, calls=calls)
    return ReducedTime(within_s, _transfers_s([copies], parameters, prices))


def tied_s(prices: Prices) -> Number:
    """Seconds in which both ends of a pipeline sum the gradients of a tied table, after
    the passes, where software does so.
    """
    p = prices.plan
    shape = prices.steps.shape
    is_tied = (shape.head_parameters == 0) * (p.head_stage > 0)
    sums = prices.traits.sums_tied * prices.trained * is_tied
    if not np.any(sums):
        return 0.0
    table = np.where(shape.image > 0, 0, shape.table_parameters)
    size = sums * prices.gradient_bytes * table / p.tp
    near_s, far_s = prices.pair_s("all_reduce", size)
    return np.where(p.world_size > prices.machine.node, far_s, near_s)
