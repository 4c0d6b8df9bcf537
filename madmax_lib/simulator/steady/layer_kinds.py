"""Stacks of several kinds of layers: gathers that run under a layer of another kind, and
stages of a pipeline whose layers are not the mean one.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from madmax_lib.catalog.models import Transformer
from madmax_lib.simulator.layers.cuts import cuts_of, kinds_of_chunks, plan_of_cut
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.layer_costs import LayerCosts


@dataclass(frozen=True)
class StageExcess:
    """Seconds of a micro-batch beyond those of as many mean layers."""

    first_s: Number = 0.0
    middle_s: Number = 0.0  # of the slowest one
    last_s: Number = 0.0
    longest_chunk_s: Number = 0.0


def gathered_passes_s(
    model: Transformer, costs: LayerCosts, forward_s: Number, backward_s: Number
) -> tuple[Number, Number]:
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


def stage_excess(model: Transformer, costs: LayerCosts, middle: Number) -> StageExcess:
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
        chunks = kinds_of_chunks(model, plan_of_cut(cut))
        rows = index == number
        of_stage = chunks.sum(axis=1)  # (stages, kinds)
        stages_s = of_stage @ excess_s[:, rows]
        result[0][rows] = stages_s[0]
        result[2][rows] = stages_s[-1]
        if len(of_stage) > 2:
            layers = of_stage.sum(axis=1, keepdims=True)
            whole_s = layers * mean_s[rows] + stages_s
            mean_middle_s = middle[rows] * mean_s[rows]
            result[1][rows] = whole_s[1:-1].max(axis=0) - mean_middle_s
        # all chunks of all stages below each other, (stages x chunks, kinds)
        each = chunks.reshape(-1, len(costs.kinds))
        layers = each.sum(axis=1, keepdims=True)
        chunks_s = layers * mean_s[rows] + each @ excess_s[:, rows]
        mean_chunk_s = np.ceil(model.layers / len(each)) * mean_s[rows]
        result[3][rows] = chunks_s.max(axis=0) - mean_chunk_s
    return StageExcess(*result)
