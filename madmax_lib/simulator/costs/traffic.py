"""What moves because data parallelism replicates or shards weights and gradients, and
for how long?

Per device, ZeRO-3 gathers the weights of a layer for both passes and scatters its
gradients; the other stages reduce gradients in buckets beside the last backward pass,
and ZeRO-1/2 gather the updated weights [arXiv 1910.02054]. Compute beside communication
is slowed [arXiv 2507.03114].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from madmax_lib.plan.columns import owned
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.rates.compute import Number

__all__ = [
    "Gradients",
    "Held",
    "Sharded",
    "beside_s",
    "gradients",
    "held",
    "reduced_s",
    "sharded",
    "slowed_s",
]

# bytes
_INT8 = 1.0
_INT4 = 0.5


@dataclass(frozen=True)
class Held:
    """Parameters of some blocks on a device, before data parallelism shards them: all
    but experts, and experts.
    """

    dense: Number
    experts: Number

    @property
    def parts(self) -> tuple[tuple[bool, Number], ...]:
        """(whether experts, parameters), where there are any."""
        return tuple(
            (kind, count)
            for kind, count in ((False, self.dense), (True, self.experts))
            if np.any(count)
        )

    def owned(self, prices: Prices) -> Number:
        """Those of them whose optimizer states a device owns; none that are frozen."""
        p = prices.plan
        sharing = np.where(np.asarray(p.zero) >= 1, p.sharing, 1)
        return prices.trained * owned(
            self.dense, self.experts, sharing, p.ep, p.expert_spread
        )


@dataclass(frozen=True)
class Sharded:
    """Seconds of the traffic of ZeRO-3 for some blocks: gathers for forward and
    backward pass, and reductions.
    """

    forward_s: Number
    backward_s: Number
    reduce_s: Number


@dataclass(frozen=True)
class Gradients:
    """Seconds of the gradient traffic of a stage."""

    reduce_s: Number  # of all its gradients, bucket by bucket
    whole_s: Number  # of all at once
    # without HSDP's copies, which are reduced once a step, on their own stream
    each_s: Number
    last_s: Number  # of the last bucket
    ready: Number  # layers whose gradients fill the first bucket
    gather_s: Number  # of its updated weights (ZeRO-1/2)


def held(blocks: Sequence[Block]) -> Held:
    """Parameters of blocks; looked-up tables are not among them."""
    dense, experts = (
        sum(
            (
                block.parameters
                for block in blocks
                if block.expert == kind and not block.table
            ),
            0.0,
        )
        for kind in (False, True)
    )
    return Held(dense, experts)


def sharded(count: Held, prices: Prices) -> Sharded:
    """Traffic of ZeRO-3 for weights in each micro-batch; none for other stages."""
    plan = prices.plan
    full = np.asarray(plan.zero) >= 3
    if not np.any(full):
        return Sharded(0.0, 0.0, 0.0)
    storage = prices.steps.work.width.storage_bytes
    width = np.where(plan.qwz, np.minimum(_INT8, storage), storage)
    slow = prices.gather_slowdown()
    calls = prices.gather_calls()
    forward_s = 0.0
    backward_s = 0.0
    reduce_s = 0.0
    for expert, parameters in count.parts:
        group = prices.groups[prices.shard_name(expert)]
        size = full * parameters
        gather_s = prices.comm_s("all_gather", slow * width * size, group, calls)
        again_s = gather_s
        scatter_s = prices.comm_s(
            "reduce_scatter", prices.gradient_bytes * size, group, calls
        )
        if not expert and np.any(plan.hpz):
            again_s = np.where(
                plan.hpz,
                prices.comm_s("all_gather", storage * size, prices.groups["node"]),
                again_s,
            )
        if not expert and np.any(plan.qgz):
            scatter_s = np.where(plan.qgz, _quantised_s(prices, size), scatter_s)
        forward_s = forward_s + gather_s
        backward_s = backward_s + again_s
        reduce_s = reduce_s + scatter_s
    return Sharded(forward_s, backward_s, prices.trained * reduce_s)


def gradients(
    layer: Held, layers: Number, ends: tuple[Number, Number], prices: Prices
) -> Gradients:
    """Gradient traffic of a stage of so many layers, with the parameters of an
    embedding and of a head.

    ZeRO-3 has reduced within its shard already: what is left is that of HSDP's copies,
    which ZeRO-1/2 have too. The head's gradients come first, the embedding's last. Each
    chunk of a stage has buckets of its own.
    """
    plan = prices.plan
    zero = np.asarray(prices.plan.zero)
    chunks = prices.plan.interleave
    full = zero >= 3
    split = (zero == 1) | (zero == 2)
    within_s = 0.0
    across_s = 0.0
    last_s = 0.0
    gather_s = 0.0
    ready = 0.0
    buckets = 1.0
    for expert, count in layer.parts:
        replicas = prices.groups[prices.shard_name(expert)]
        share = prices.gradient_bytes / np.where(full, replicas.ranks, 1)
        calls, number, last = _bucket_calls(
            share * count, plan.bucket_bytes, layers / chunks, full
        )
        buckets = np.maximum(buckets, number)
        first_bytes = np.where(full, 1.0, plan.bucket_bytes)
        parts = [(layers, last, share * count, calls)]
        for in_last, end in () if expert else ((1.0, ends[0]), (number <= 1, ends[1])):
            if np.any(end):
                parts.append(
                    (
                        1.0,
                        in_last,
                        share * end,
                        np.maximum(np.ceil(share * end / plan.bucket_bytes), 1.0),
                    )
                )
        for times, in_last, size_bytes, calls in parts:
            one_s = reduced_s(size_bytes, calls, expert, prices)
            within_s = within_s + times * one_s[0]
            across_s = across_s + times * one_s[1]
            last_s = last_s + in_last * sum(one_s)
        first_bytes = first_bytes if expert else first_bytes - share * ends[1]
        together = np.where(
            np.asarray(count) > 0,
            np.ceil(first_bytes / np.maximum(share * count, 1.0)),
            0.0,
        )
        ready = np.maximum(ready, together)  # no experts wait for nothing
        if np.any(split):
            bytes_ = prices.steps.work.width.storage_bytes * (
                layers * count + (0.0 if expert else sum(ends))
            )
            gather_s = gather_s + split * prices.comm_s(
                "all_gather", bytes_, replicas, layers
            )
    whole_s = within_s + across_s
    reduce_s = np.maximum(within_s, across_s) + np.minimum(within_s, across_s) / (
        buckets * chunks
    )
    return Gradients(
        reduce_s,
        whole_s,
        within_s,
        np.minimum(last_s, whole_s / chunks),
        ready,
        gather_s,
    )


def reduced_s(
    size_bytes: Number, calls: Number, expert: bool, prices: Prices
) -> tuple[Number, Number]:
    """Seconds in which gradients are reduced, below ZeRO-3 among those that shard the
    states, and by HSDP's copies.
    """
    zero = np.asarray(prices.plan.zero)
    name = prices.shard_name(expert)
    group = prices.groups[name]
    copies = prices.groups[name.replace("shard", "replicate")]
    halves_s = (
        prices.comm_s("reduce_scatter", size_bytes, group, calls)
        if np.any(zero > 0)
        else 0.0
    )
    whole_s = (
        prices.comm_s("all_reduce", size_bytes, group, calls)
        if np.any(zero == 0)
        else 0.0
    )
    within_s = np.where(zero == 0, whole_s, np.where(zero < 3, halves_s, 0.0))
    hybrid = np.asarray(prices.plan.shard) > 0
    if not np.any(hybrid):
        return within_s, 0.0
    part_bytes = size_bytes / np.where(zero < 3, group.ranks, 1)
    return within_s, np.where(
        hybrid, prices.comm_s("all_reduce", part_bytes, copies, calls), 0.0
    )


def beside_s(
    busy_s: Number, gather_s: Number, reduce_s: Number, prices: Prices
) -> Number:
    """Seconds of compute with traffic of weights beside it: they slow each other down,
    the longer one counts.

    Gathers tensor by tensor, or not ahead, are beside nothing, nor are reductions then,
    which come before them.
    """
    moved_s = gather_s + reduce_s
    together_s = np.maximum(busy_s + slowed_s(busy_s, moved_s, prices), moved_s)
    if not np.any(prices.gathers_late):
        return together_s
    return np.where(
        prices.gathers_late & (np.asarray(gather_s) > 0), busy_s + moved_s, together_s
    )


def slowed_s(busy_s: Number, moved_s: Number, prices: Prices) -> Number:
    """Seconds that so much communication beside it adds to compute."""
    slow = prices.constants["contention"]
    return np.minimum(slow / (1 + slow) * moved_s, slow * busy_s)


def _quantised_s(prices: Prices, parameters: Number) -> Number:
    """ZeRO++'s exchange of 4-bit gradients: inside the node, then across [arXiv
    2306.10209].
    """
    node = prices.groups["node"]
    size = _INT4 * parameters
    across_s = prices.comm_s("all_to_all", size / node.ranks, prices.groups["across"])
    return prices.comm_s("all_to_all", size, node) + across_s


def _bucket_calls(
    layer_bytes: Number, bucket_bytes: Number, layers: Number, full: Number
) -> tuple[Number, ...]:
    """Calls that reduce the gradients of a layer, buckets of so many layers, and layers
    in the last of them.

    Buckets close at the end of a layer, under ZeRO-3 (full) of each, and at last; one
    is reduced in several calls where it is larger.

    >>> one, other = _bucket_calls(100.0, 30.0, 8, False), _bucket_calls(10.0, 25.0, 8, False)
    >>> [float(part) for part in (*one, *other)]
    [4.0, 8.0, 1.0, 0.75, 3.0, 2.0]
    """
    bytes_ = np.maximum(layer_bytes, 1.0)
    together = np.where(
        full, 1.0, np.minimum(np.ceil(bucket_bytes / bytes_), np.maximum(layers, 1))
    )
    buckets = np.maximum(np.ceil(layers / together), 1)
    calls = (
        np.maximum(np.ceil(together * bytes_ / bucket_bytes), 1.0)
        * buckets
        / np.maximum(layers, 1)
    )
    return calls, buckets, layers - (buckets - 1) * together
