"""Reductions of gradients that no backward pass hides.

A bucket is reduced once its layers' gradients exist, on a stream of its own; what is
left when the last backward pass ends is exposed [PyTorch DDP, VLDB 2020, section 3.2]:

    exposed = max(T_reduce - T_backward after the first bucket, T_last bucket)
"""

from dataclasses import dataclass

import numpy as np

from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import (
    ParameterCount,
    reduced_time,
    shard_group,
)
from madmax_lib.simulator.rates.compute import Number


@dataclass(frozen=True)
class PassesOfStage:
    """The stage whose last backward pass ends last, the first one: what its gradients
    are reduced under.
    """

    layers: Number
    layer: ParameterCount  # of its mean layer
    embedding_parameters: Number
    head_parameters: Number  # where it has the head, in a pipeline of one stage
    forward_s: Number  # of a micro-batch
    backward_s: Number
    last_forward_s: Number  # of the last micro-batch, which may be short
    last_backward_s: Number  # of it, the part that ends with gradients of weights
    layer_s: Number  # of that part for a layer
    head_s: Number  # and for the head if it is there
    launched_s: Number  # of the host for a backward pass


@dataclass(frozen=True)
class ExposedGradients:
    """Seconds of gradient traffic that shows, and what it slows down."""

    during_s: Number = 0.0  # while passes follow
    after_s: Number = 0.0  # after the last one
    after_host_s: Number = 0.0  # the same where the host sets the pace


@dataclass(frozen=True)
class _Gradients:
    """Seconds of the gradient traffic of a stage."""

    reduce_s: Number  # of all its gradients, bucket by bucket on two streams
    serial_s: Number  # of all, one after another
    within_s: Number  # without HSDP's copies, which are reduced once a step
    last_bucket_s: Number
    first_bucket_layers: Number  # whose gradients fill the first bucket
    gather_s: Number  # of its updated weights (ZeRO-1/2)


@dataclass(frozen=True)
class _Buckets:
    """Buckets of the gradients of a chunk of layers."""

    calls: Number  # for the gradients of a layer
    count: Number
    last_layers: Number  # in the last of them

    @classmethod
    def of(
        cls, layer_bytes: Number, bucket_bytes: Number, layers: Number, full: Number
    ):
        """Buckets close at the end of a layer, under ZeRO-3 (full) of each, and at
        last; one is reduced in several calls where it is larger.

        >>> _Buckets.of(100.0, 30.0, 8, False) == _Buckets(4.0, 8.0, 1.0)
        True
        >>> _Buckets.of(10.0, 25.0, 8, False) == _Buckets(0.75, 3.0, 2.0)
        True
        """
        bytes_ = np.maximum(layer_bytes, 1.0)
        fill = np.minimum(np.ceil(bucket_bytes / bytes_), np.maximum(layers, 1))
        together = np.where(full, 1.0, fill)
        count = np.maximum(np.ceil(layers / together), 1)
        each = np.maximum(np.ceil(together * bytes_ / bucket_bytes), 1.0)
        calls = each * count / np.maximum(layers, 1)
        return cls(calls, count, layers - (count - 1) * together)


def exposed_gradients(stage: PassesOfStage, prices: Prices) -> ExposedGradients:
    """Gradient traffic that no compute hides.

    Gradients are reduced in buckets under the last backward pass of a stage, the first
    one's, which ends last; weights of ZeRO-1/2 are gathered under its first forward
    pass, or after the update.
    """
    moved = _gradients(stage, prices)
    if not np.any(moved.reduce_s):
        return ExposedGradients()
    reductions = _exposed_reductions(stage, moved, prices)
    chunks = prices.plan.interleave
    gather_s = moved.gather_s
    late = np.logical_not(prices.plan.overlap_gather) | (prices.traits.on_host > 0)
    # each chunk's weights have the passes of the chunks before it to arrive
    forward_s = stage.forward_s / chunks
    rounds_s = (chunks - 1) * prices.steps.round_size * forward_s
    shown_s = np.maximum(gather_s / chunks - forward_s, gather_s - forward_s - rounds_s)
    shown_s = np.maximum(shown_s, gather_s / np.maximum(stage.layers, 1))
    during_s = reductions.during_s + np.where(late, 0.0, shown_s)
    late_s = np.where(late, gather_s, 0.0)
    trained = prices.trained
    return ExposedGradients(
        trained * during_s,
        trained * (reductions.after_s + late_s),
        trained * (reductions.after_host_s + late_s),
    )


def _gradients(stage, prices):
    """Gradient traffic of a stage.

    ZeRO-3 has reduced within its shard already: what is left is that of HSDP's copies,
    which ZeRO-1/2 have too. The head's gradients come first, the embedding's last. Each
    chunk of a stage has buckets of its own.
    """
    plan = prices.plan
    zero = plan.zero
    chunks = plan.interleave
    full = zero >= 3
    gathers = (zero == 1) | (zero == 2)
    ends = (stage.embedding_parameters, stage.head_parameters)
    within_s = 0.0
    across_s = 0.0
    last_s = 0.0
    gather_s = 0.0
    ready = 0.0
    most_buckets = 1.0
    for experts, count in stage.layer.parts:
        replicas = prices.groups[shard_group(prices, experts=experts)]
        width = prices.gradient_bytes / np.where(full, replicas.ranks, 1)
        bucket_bytes = plan.bucket_bytes
        layers = stage.layers / chunks
        buckets = _Buckets.of(width * count, bucket_bytes, layers, full)
        most_buckets = np.maximum(most_buckets, buckets.count)
        # (how many, of them in the last bucket, parameters of each, calls of each)
        parts = [(stage.layers, buckets.last_layers, count, buckets.calls)]
        if not experts:
            for in_last, end in ((1.0, ends[0]), (buckets.count <= 1, ends[1])):
                if np.any(end):
                    calls = np.maximum(np.ceil(width * end / bucket_bytes), 1.0)
                    parts.append((1.0, in_last, end, calls))
        for times, in_last, parameters, calls in parts:
            one = reduced_time(parameters, calls, prices, experts=experts)
            within_s = within_s + times * one.within_s
            across_s = across_s + times * one.across_s
            last_s = last_s + in_last * (one.within_s + one.across_s)
        # the head's gradients are there first; no experts wait for nothing
        first_bytes = np.where(full, 1.0, bucket_bytes)
        first_bytes = first_bytes if experts else first_bytes - width * ends[1]
        fill = np.ceil(first_bytes / np.maximum(width * count, 1.0))
        ready = np.maximum(ready, np.where(count > 0, fill, 0.0))
        if np.any(gathers):
            parameters = stage.layers * count + (0.0 if experts else sum(ends))
            size_bytes = prices.steps.work.width.storage_bytes * parameters
            one_s = prices.comm_s("all_gather", size_bytes, replicas, stage.layers)
            gather_s = gather_s + gathers * one_s
    serial_s = within_s + across_s
    # two streams: the shorter one shows with its last bucket
    shorter_s = np.minimum(within_s, across_s)
    reduce_s = np.maximum(within_s, across_s) + shorter_s / (most_buckets * chunks)
    last_s = np.minimum(last_s, serial_s / chunks)
    return _Gradients(reduce_s, serial_s, within_s, last_s, ready, gather_s)


def _exposed_reductions(stage, moved, prices):
    """Reductions that show: of all micro-batches but the last, after the last pass, and
    after that of the host.
    """
    steps = prices.steps
    plan = prices.plan
    chunks = plan.interleave
    backward_s = stage.backward_s
    last_s = stage.last_backward_s
    in_chunk = stage.layers / chunks
    # a bucket that a chunk does not fill is reduced when nothing computes any more
    fills = moved.first_bucket_layers <= np.maximum(np.ceil(in_chunk), 1)
    slower_s = np.where(fills, prices.contention_s(last_s, moved.reduce_s), 0.0)
    ready = np.minimum(moved.first_bucket_layers, in_chunk)
    begun_s = ready * stage.layer_s + stage.head_s
    later_s = (1 - 1 / chunks) * steps.round_size * backward_s
    # stages of ZB-V end up to a W of a chunk (wgrad) after each other: the second has
    # least time between its last passes
    turn_s = (plan.schedule == "zbv") * (plan.pp - 2) * last_s / chunks
    later_s = np.where(plan.folds, turn_s, later_s)
    rest_s = _left_s(moved, last_s + slower_s, begun_s, later_s, chunks)
    drain_s = _drain_s(stage, slower_s, prices)
    rest_s = rest_s + slower_s + np.where(plan.defers_weights, 0.0, drain_s)
    launched_s = stage.launched_s
    begun_s = ready * launched_s / np.maximum(stage.layers, 1)
    later_s = (1 - 1 / chunks) * steps.round_size * launched_s
    host_s = _left_s(moved, launched_s, begun_s, later_s, chunks)
    hides = prices.hides_reductions
    after_s = np.where(hides, rest_s, moved.serial_s)
    after_host_s = np.where(hides, host_s, moved.serial_s)
    each = prices.reduces_each
    if not np.any(each):
        return ExposedGradients(0.0, after_s, after_host_s)
    beside_s = np.where(fills, prices.contention_s(backward_s, moved.within_s), 0.0)
    # a short last micro-batch fills its first bucket sooner
    sooner_s = ready / np.maximum(in_chunk, 1) * (backward_s - last_s)
    # from one backward pass to the next, and to the last
    gap_s = stage.forward_s + backward_s
    last_gap_s = stage.last_forward_s + backward_s - sooner_s
    between_s, before_last_s = (
        np.where(hides, np.maximum(moved.within_s - gap, beside_s), moved.within_s)
        for gap in (gap_s, last_gap_s)
    )
    count = steps.micro_batches
    during_s = np.maximum(count - 2, 0) * between_s + (count > 1) * before_last_s
    return ExposedGradients(each * during_s, after_s, after_host_s)


def _left_s(moved, pass_s, begun_s, later_s, chunks):
    """Reductions left when the last backward pass ends, whose first bucket is full
    after begun_s.

    later_s: passes between the last ones of a stage's chunks.
    """
    room_s = np.maximum(pass_s / chunks - begun_s, 0.0)
    last_chunk_s = moved.reduce_s / chunks - room_s
    all_chunks_s = moved.reduce_s - room_s - later_s
    return np.maximum(np.maximum(last_chunk_s, all_chunks_s), moved.last_bucket_s)


def _drain_s(stage, slower_s, prices):
    """Seconds by which the last passes of the other stages end later where each of a
    stage's is slower by so many.

    They follow the passes of the micro-batch before, which may be longer, or come in
    rounds of more than all stages.
    """
    plan = prices.plan
    pp = plan.pp
    chunks = plan.interleave
    last_s = stage.last_backward_s
    in_rounds = (chunks > 1) | (plan.schedule == "gpipe")
    between_s = np.where(in_rounds, 0.0, stage.last_forward_s)
    more = np.floor(prices.steps.round_size) - pp  # the last round is not the longest
    longer_s = (pp - 1) * (stage.backward_s - last_s) - between_s
    longer_s = longer_s + (1 - 1 / chunks) * more * last_s
    later_s = np.maximum((pp - 1) * slower_s, longer_s)
    return later_s - np.maximum(longer_s, 0.0)
