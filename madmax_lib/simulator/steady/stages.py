"""Stages of a pipeline: layers of each, seconds of a micro-batch, and traffic of weights
that no layer hides.

A pipeline is as fast as its bottleneck stage, which is the first (it has the
embedding), the fullest of the middle, or the last (it has the head).

Stacks of several kinds of layers: gathers that run under a layer of another kind, and
stages of a pipeline whose layers are not the mean one.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from madmax_lib.plan.layers import chunk_layers
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.traffic import (
    ParameterCount,
    gathers_of,
    overlapped_s,
)
from madmax_lib.simulator.layers.cuts import cuts_of, kinds_of_chunks, plan_of_cut
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.layer_costs import LayerCosts

_ROUNDING = 1e-9  # relative difference of times that are equal


@dataclass(frozen=True)
class PipelineStage:
    """One stage; 0 layers where a pipeline has no such stage."""

    layers: Number
    moe_layers: Number
    upstream: Number  # stages before it
    seconds: Number  # of a micro-batch, both passes
    excess_s: Number  # of that beyond as many mean layers


@dataclass(frozen=True)
class LayerPasses:
    """Seconds of a layer and micro-batch with the traffic of ZeRO-3 beside it."""

    forward_s: Number
    backward_s: Number
    dgrad_s: Number  # of the backward pass where that is split
    wgrad_s: Number

    @property
    def both_s(self) -> Number:
        """Forward and backward pass."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class _ExposedTraffic:
    """Seconds of ZeRO-3's traffic of a micro-batch under which no layer computes."""

    each_s: Number = 0.0  # at the ends of the passes of any stage
    embedding_s: Number = 0.0  # of the first stage beside
    head_s: Number = 0.0  # of the last stage beside
    overlapped_by_peers_s: Number = 0.0  # of each stage, for which no other waits
    stalls_s: Number = 0.0  # between the layers of a backward pass


@dataclass(frozen=True)
class Stages:
    """Stages of a pipeline, a micro-batch in both passes."""

    three: tuple[PipelineStage, ...]  # first, fullest middle and last
    slowest_s: Number
    sum_s: Number  # of all stages
    passes: LayerPasses  # of a layer
    between_passes_s: Number  # of a stage: exposed gathers, and the switches to a pass
    switches_s: Number
    embedding_s: Number  # embedding with its traffic, at the first stage
    head_s: Number  # head with its traffic, at the last stage
    overlapped_by_peers_s: Number  # traffic of each for which no other stage waits
    stalls_s: Number  # of a backward pass between its layers
    first_forward_s: Number  # of the first stage
    first_backward_s: Number
    longest_chunk_excess_s: Number  # of the longest chunk, beyond mean layers
    dense_layers: Number  # of a mixture in the first stage
    has_embedding: Number  # 1 where the bottleneck stage is the first
    has_head: Number  # 1 where it is the last

    def at_bottleneck(self, name: str) -> Number:
        """Field of that name of the bottleneck stage."""
        first, middle, last = (getattr(stage, name) for stage in self.three)
        inner = np.where(self.has_head, last, middle)
        return np.where(self.has_embedding, first, inner)


def stages_of(steps: Steps, costs: LayerCosts) -> Stages:
    """Stages as `plan.layers.chunk_layers` cuts them; a remainder lies in the middle."""
    shape = steps.shape
    plan = steps.plan
    pp = plan.pp
    together = plan.head_stage == 0  # both ends of the model on the first stage
    first, middle, last = _stage_layers(steps)
    passes = _layer_passes(costs.layer, costs)
    layer_s = passes.both_s
    exposed = _exposed_traffic(steps, costs)
    # a chunk of each stage begins a forward and a backward pass
    switches_s = 2 * plan.interleave * costs.prices.switch_s
    each_s = exposed.each_s + switches_s
    # the first layers of a mixture may be dense, which takes them more or less time
    dense = np.minimum(shape.dense_layers, first)
    forward_less_s = 0.0
    backward_less_s = 0.0
    if np.any(dense):
        dense_passes = _layer_passes(costs.dense, costs)
        forward_less_s = dense_passes.forward_s - passes.forward_s
        backward_less_s = dense_passes.backward_s - passes.backward_s
    embedding_forward_s, embedding_backward_s = costs.embedding.passes_s
    head_forward_s, head_backward_s = costs.head.passes_s
    forward_s = first * passes.forward_s + (
        dense * forward_less_s + (embedding_forward_s + together * head_forward_s)
    )
    backward_s = first * passes.backward_s + (
        dense * backward_less_s + (embedding_backward_s + together * head_backward_s)
    )
    end_s = exposed.embedding_s + together * exposed.head_s
    first_s = forward_s + backward_s + each_s + end_s
    # all others are alike where the last has no head
    has_middle = pp > 2 - plan.folds
    middle_s = np.where(has_middle, middle * layer_s + each_s, 0.0)
    head_s = sum(costs.head.passes_s) + exposed.head_s
    last_s = last * layer_s + (1 - together) * head_s + each_s
    last_s = np.where(pp > 1, last_s, 0.0)
    between = np.where(pp > 2, shape.layers - first - last, 0.0)
    middle_ends_s = np.maximum(pp - 2, 0) * each_s
    sum_s = first_s + last_s + between * layer_s + middle_ends_s
    excess = _excess(steps, costs, (first, middle, last))
    first_s = first_s + excess.first_s
    middle_s = middle_s + excess.middle_s
    last_s = last_s + excess.last_s
    slowest_s = np.maximum(np.maximum(first_s, middle_s), last_s)
    # of equally slow stages the last is told, whichever is rounded up
    least_s = slowest_s * (1 - _ROUNDING)
    is_first = first_s >= least_s
    has_head = np.where(together, is_first, last_s >= least_s)
    share = shape.moe_share_after_dense
    middle = np.where(has_middle, middle, 0)
    last = np.where(pp > 1, last, 0)
    return Stages(
        three=(
            PipelineStage(first, share * (first - dense), 0, first_s, excess.first_s),
            PipelineStage(middle, share * middle, pp - 2, middle_s, excess.middle_s),
            PipelineStage(last, share * last, pp - 1, last_s, excess.last_s),
        ),
        slowest_s=slowest_s,
        sum_s=sum_s,
        passes=passes,
        between_passes_s=each_s,
        switches_s=switches_s,
        embedding_s=exposed.embedding_s + sum(costs.embedding.passes_s),
        head_s=head_s,
        overlapped_by_peers_s=exposed.overlapped_by_peers_s,
        stalls_s=exposed.stalls_s,
        first_forward_s=forward_s,
        first_backward_s=backward_s,
        longest_chunk_excess_s=excess.longest_chunk_s,
        dense_layers=dense,
        has_embedding=is_first & (together | ~has_head),
        has_head=has_head,
    )


def _stage_layers(steps):
    """Layers of the first, the fullest middle and the last stage; some software cuts at
    equal FLOPs, head included.
    """
    shape = steps.shape
    pp = steps.plan.pp
    layers = 1.0 * shape.layers
    cuts, index = cuts_of(steps.plan, shape.layers)
    # (first, fullest middle, last) of each cut, then of each plan
    sizes = np.array([_layers_of_cut(one) for one in cuts], float)
    first, middle, last = sizes.T[:, index]
    balances = (steps.traits.balances_flops > 0) & (pp > 1)
    if np.any(balances):
        # the head counts as so many layers as its FLOPs are
        layer = shape.attention_parameters + shape.mlp_parameters(shape.ffn)
        share = (layers + shape.outputs * shape.hidden / layer) / pp
        floor = np.floor(share)
        at_most = np.minimum(floor + 1, layers)
        at_least = np.maximum(layers - np.floor(share * (pp - 1)) - 1, 0)
        first = np.where(balances, at_most, first)
        last = np.where(balances, at_least, last)
        middle = np.where(balances, floor + (share % 1 * (pp - 1) >= 1), middle)
    return np.broadcast_arrays(first, middle, last)


@lru_cache(maxsize=4096)
def _layers_of_cut(cut: tuple):
    """Layers of the first, the fullest middle and the last stage."""
    plan = plan_of_cut(cut)
    sizes = [sum(map(len, stage)) for stage in chunk_layers(int(cut[-1]), plan)]
    inner = sizes[1 : plan.head_stage or None]
    return [sizes[0], max(inner, default=0), sizes[-1]]


def _excess(steps, costs, layers):
    """Seconds of stages beyond as many mean layers: of a stack of several kinds, or
    where every so many layers one attends to all, the last of them; the fullest middle
    stage begins with one.
    """
    shape = steps.shape
    if shape.model:
        return _stage_excess(shape.model, costs, layers[1])
    share = shape.windowed_share
    if not np.any(share > 0):
        return StageExcess()
    chunks = steps.plan.interleave
    is_mixed = (share > 0) & (share < 1) & (steps.plan.pp > 1)
    every = chunks * np.maximum(shape.full_every, 1)
    excess_s = is_mixed * costs.dense.full_attention_excess_s
    rounded = (np.floor, np.ceil, np.ceil)
    return StageExcess(
        *(
            excess_s * (chunks * to_whole(count / every) - (1 - share) * count)
            for to_whole, count in zip(rounded, layers, strict=True)
        )
    )


def _layer_passes(layer, costs):
    """Passes of a layer with the traffic of ZeRO-3 beside it: gathers beside dgrad,
    reductions beside wgrad.
    """
    forward_s, backward_s = layer.passes_s
    traffic = costs.layer.traffic
    prices = costs.prices
    wgrad_s = layer.time.weight_s
    dgrad_s = backward_s - wgrad_s
    if not np.any(prices.plan.zero >= 3):
        return LayerPasses(forward_s, backward_s, dgrad_s, wgrad_s)
    reduce_s = traffic.reduce_s
    if np.any(prices.sharded_buckets):  # theirs show at the end of the pass
        reduce_s = np.where(prices.sharded_buckets, 0.0, reduce_s)
    ahead_s = overlapped_s(forward_s, traffic.forward_s, 0.0, prices)
    back_s = overlapped_s(backward_s, traffic.backward_s, reduce_s, prices)
    if costs.kinds:
        model = prices.steps.shape.model
        ahead_s, back_s = _gathered_passes_s(model, costs, ahead_s, back_s)
    split = prices.splits_backward > 0
    if np.any(split):
        gathered_s = overlapped_s(dgrad_s, traffic.backward_s, 0.0, prices)
        reduced_s = overlapped_s(wgrad_s, 0.0, traffic.reduce_s, prices)
        dgrad_s = np.where(split, gathered_s, dgrad_s)
        wgrad_s = np.where(split, reduced_s, wgrad_s)
        back_s = np.where(split, gathered_s + reduced_s, back_s)
    return LayerPasses(ahead_s, back_s, dgrad_s, wgrad_s)


def _exposed_traffic(steps, costs):
    """Traffic of ZeRO-3 at the ends of passes.

    Under the first gather and the last reduction of a pass there is no layer. Where
    traffic sets the pace, its last layer computes alone instead, in the backward pass
    beside reductions. The head computes beside one gather. Two layers of each pass are
    gathered before a stage gets a message, and reduced after it has sent its own.
    """
    prices = costs.prices
    traffic = costs.layer.traffic
    if not np.any(prices.plan.zero >= 3):
        return _ExposedTraffic()
    forward_s, backward_s = costs.layer.passes_s
    wgrad_s = costs.layer.time.weight_s
    chunks = prices.plan.interleave
    layers = steps.shape.layers / (prices.plan.pp * chunks)
    # by which traffic of a layer takes longer than the layer it runs under
    both_s = traffic.backward_s + traffic.reduce_s
    ahead_lag_s, back_lag_s = (
        np.maximum(comm_s - one_s - prices.contention_s(one_s, comm_s), 0.0)
        for one_s, comm_s in ((forward_s, traffic.forward_s), (backward_s, both_s))
    )
    back_s = np.maximum(both_s - layers * back_lag_s, 0.0)
    split = prices.splits_backward > 0
    if np.any(split):
        gather_s = np.minimum(traffic.backward_s, backward_s - wgrad_s)
        apart_s = gather_s + np.minimum(traffic.reduce_s, wgrad_s)
        back_s = np.where(split, apart_s, back_s)
    buckets = prices.sharded_buckets
    stalls_s = 0.0
    if np.any(buckets):
        ends_s, stalls_s = _sharded_buckets_s(steps, costs)
        stalls_s = np.where(buckets, stalls_s, 0.0)
        back_s = np.where(buckets, ends_s + stalls_s, back_s)
    each_s = chunks * (np.minimum(traffic.forward_s, forward_s) + back_s)
    lag_s = ahead_lag_s + back_lag_s
    by_peers_s = each_s + chunks * np.minimum(layers, 2) * lag_s
    beside_head_s = np.minimum(traffic.backward_s, costs.head.passes_s[1])
    late = prices.gathers_late
    if np.any(late):
        each_s = np.where(late, 0.0, each_s)
        beside_head_s = np.where(late, 0.0, beside_head_s)
        in_turn_s = chunks * (traffic.forward_s + both_s)
        by_peers_s = np.where(late, in_turn_s, by_peers_s)
    first = costs.embedding.traffic
    last = costs.head.traffic
    longer_s = np.maximum(last.forward_s - forward_s, 0.0)
    return _ExposedTraffic(
        each_s,
        first.forward_s + first.backward_s + first.reduce_s,
        last.backward_s + last.reduce_s + longer_s - beside_head_s,
        by_peers_s,
        stalls_s,
    )


def _sharded_buckets_s(steps, costs):
    """Gathers and reductions of a backward pass that show at its ends, and between its
    layers, where ZeRO-3 reduces gradients in buckets of several layers.

    Gathers queue behind a bucket on the same stream: compute goes on for the layers
    gathered ahead, then it waits. What the last bucket holds follows the pass.
    """
    prices = costs.prices
    gather_s = costs.layer.traffic.backward_s
    layers = 1.0 * steps.shape.layers
    count = costs.layer.count
    parameters = np.maximum(count.dense + count.experts, 1.0)
    layer_bytes = prices.gradient_bytes * parameters
    together = np.clip(np.ceil(prices.plan.bucket_bytes / layer_bytes), 1.0, layers)
    full_buckets = np.ceil(layers / together) - 1  # before the last
    full_s, last_s = (
        gathers_of(
            ParameterCount(many * count.dense, many * count.experts), prices
        ).reduce_s
        for many in (together, layers - full_buckets * together)
    )
    # of the mean layer: dense ones of a mixture exchange no tokens
    dense = steps.shape.dense_layers / layers
    mean_s = (1 - dense) * costs.layer.passes_s[1] + dense * costs.dense.passes_s[1]
    compute_s = mean_s + prices.contention_s(mean_s, gather_s)
    # what gathers gain on compute from bucket to bucket, at most `prefetch` layers
    gained_s = together * (compute_s - gather_s)
    ahead_s = prices.plan.prefetch * compute_s - gather_s
    slack_s = np.maximum(np.minimum(ahead_s, gained_s), 0.0)
    lag_s = layers * np.maximum(gather_s - compute_s, 0.0)
    first_s = np.maximum(gather_s - lag_s, 0.0)
    return first_s + last_s, full_buckets * np.maximum(full_s - slack_s, 0.0)


@dataclass(frozen=True)
class StageExcess:
    """Seconds of a micro-batch beyond those of as many mean layers."""

    first_s: Number = 0.0
    middle_s: Number = 0.0  # of the slowest one
    last_s: Number = 0.0
    longest_chunk_s: Number = 0.0


def _gathered_passes_s(model, costs, forward_s, backward_s):
    """Forward and backward pass of the mean layer under ZeRO-3, each under the gather
    of the next layer in its pass; gradients are reduced under the layer that follows.

    forward_s, backward_s: passes as of mean layers, for what gathers late.
    """
    prices = costs.prices
    words = model.layer_kinds
    number = {word: i for i, word in enumerate(model.kinds)}
    # triples of neighbours: (layer before, layer, layer after), the last next to the
    # first of the next micro-batch
    triples = Counter(
        (number[words[i - 1]], number[word], number[words[(i + 1) % len(words)]])
        for i, word in enumerate(words)
    )
    by_layer = np.where(prices.sharded_buckets, 0.0, 1.0)
    sums_s = [0.0, 0.0]
    for triple, count in triples.items():
        before, layer, after = (costs.kinds[i] for i in triple)
        fetched_s = before.traffic.backward_s + by_layer * after.traffic.reduce_s
        back_s = layer.traffic.backward_s + by_layer * layer.traffic.reduce_s
        # traffic that runs under the layer, traffic of the layer itself
        ways = (
            (after.traffic.forward_s, layer.traffic.forward_s),
            (fetched_s, back_s),
        )
        for way, (comm_s, contending_s) in enumerate(ways):
            compute_s = layer.passes_s[way]
            slowed_s = compute_s + prices.contention_s(compute_s, contending_s)
            one_s = np.maximum(slowed_s, comm_s)
            sums_s[way] = sums_s[way] + count / len(words) * one_s
    late = prices.gathers_late
    return (
        np.where(late, forward_s, sums_s[0]),
        np.where(late, backward_s, sums_s[1]),
    )


def _stage_excess(model, costs, middle):
    """Seconds of stages and of the longest chunk beyond those of their mean layers.

    middle: layers of the fullest middle stage.
    """
    plan = costs.prices.plan
    mean_s = sum(costs.layer.passes_s)
    excess_s = [sum(kind.passes_s) - mean_s for kind in costs.kinds]
    parts = (mean_s, *excess_s)
    shape = np.broadcast_shapes(plan.shape or (1,), *map(np.shape, parts))
    excess_s = np.stack([np.broadcast_to(part, shape) for part in excess_s])
    mean_s = np.broadcast_to(mean_s, shape)
    middle = np.broadcast_to(middle, shape)
    cuts, index = cuts_of(plan)
    index = np.broadcast_to(index, shape)
    result = np.zeros((4, *shape))
    for number, cut in enumerate(cuts):
        cut_plan = plan_of_cut(cut)
        chunks = kinds_of_chunks(model, cut_plan)
        rows = index == number
        of_stage = chunks.sum(axis=1)  # (stages, kinds)
        stages_s = of_stage @ excess_s[:, rows]
        result[0][rows] = stages_s[0]
        result[2][rows] = stages_s[-1]
        inner = slice(1, cut_plan.head_stage or None)
        if len(of_stage[inner]):
            layers = of_stage.sum(axis=1, keepdims=True)
            whole_s = layers * mean_s[rows] + stages_s
            mean_middle_s = middle[rows] * mean_s[rows]
            result[1][rows] = whole_s[inner].max(axis=0) - mean_middle_s
        # all chunks of all stages below each other, (stages x chunks, kinds)
        each = chunks.reshape(-1, len(costs.kinds))
        layers = each.sum(axis=1, keepdims=True)
        chunks_s = layers * mean_s[rows] + each @ excess_s[:, rows]
        mean_chunk_s = np.ceil(model.layers / len(each)) * mean_s[rows]
        result[3][rows] = chunks_s.max(axis=0) - mean_chunk_s
    return StageExcess(*result)
