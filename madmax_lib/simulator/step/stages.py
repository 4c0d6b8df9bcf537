"""How long do the stages of a pipeline take for a micro-batch, and how long do they wait for each other?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.step.inputs import Steps
from madmax_lib.simulator.step.layer_time import LayerTime
from madmax_lib.simulator.step.pieces import Pieces
from madmax_lib.simulator.step.traffic import beside_s, slowed_s

__all__ = ["Stages", "bubble_s", "sends_s", "stages_of"]


@dataclass(frozen=True)
class Stages:
    """Stages of a pipeline, a micro-batch in both passes."""

    slowest_s: Number
    sum_s: Number  # of all
    edges_s: Number  # of each, traffic of weights at the ends of passes, for which no other stage waits
    first_s: tuple[Number, Number]  # (forward, backward) of the first
    first_layers: Number  # that it has
    layers: Number  # of the slowest
    dense: Number  # of a mixture among them
    fullest: Number  # layers of the fullest stage
    mixed: Number  # with experts of that which has most
    in_first: Number  # 1 where the slowest has the embedding
    in_last: Number  # and the head


def stages_of(steps: Steps, pieces: Pieces) -> Stages:
    """Stages as `plan_layers.chunk_layers` cuts them; a remainder lies in the middle."""
    shape, pp = steps.work.shape, np.asarray(steps.work.plan.pp)
    first, middle, last = _layers_of_stages(steps)
    layer_s = _with_traffic(pieces.layer, pieces)
    dense_s = layer_s if pieces.dense is pieces.layer else _with_traffic(pieces.dense, pieces)
    layers_s, head_s = layer_s[0] + layer_s[1], sum(pieces.head.passes_s)
    fewer = np.minimum(np.where(np.asarray(shape.experts) > 0, shape.dense_layers, 0), first)
    cheaper = [less_s - one_s for less_s, one_s in zip(dense_s, layer_s, strict=True)]
    ends_s, first_end_s, last_end_s = _ends_s(steps, pieces)
    single = pp == 1
    forward_s, backward_s = (
        first * one_s + fewer * less_s + embedding_s + single * end_s
        for one_s, less_s, embedding_s, end_s in zip(
            layer_s, cheaper, pieces.embedding.passes_s, pieces.head.passes_s, strict=True
        )
    )
    first_s = forward_s + backward_s + ends_s + first_end_s + single * last_end_s
    middle_s = np.where(pp > 2, middle * layers_s + ends_s, 0.0)
    last_s = np.where(pp > 1, last * layers_s + head_s + ends_s + last_end_s, 0.0)
    between = np.where(pp > 2, np.asarray(shape.layers) - first - last, 0.0)
    slowest_s = np.maximum(np.maximum(first_s, middle_s), last_s)
    in_last = (last_s >= slowest_s) | single
    in_first = (first_s >= slowest_s) & (single | ~in_last)
    return Stages(
        slowest_s=slowest_s,
        sum_s=first_s + last_s + between * layers_s + np.maximum(pp - 2, 0) * ends_s,
        edges_s=_edges_s(pieces, ends_s),
        first_s=(forward_s, backward_s),
        first_layers=first,
        layers=np.where(in_first, first, np.where(in_last, last, middle)),
        dense=np.where(in_first, fewer, 0),
        fullest=np.maximum(first, np.where(pp > 2, np.maximum(middle, last), last)),
        mixed=np.where(
            np.asarray(shape.experts) > 0, np.maximum(first - fewer, np.where(pp > 2, middle, last * (pp > 1))), 0
        ),
        in_first=in_first,
        in_last=in_last,
    )


def _with_traffic(layer: LayerTime, pieces: Pieces) -> tuple[Number, Number]:
    """Forward and backward pass of a layer, with the traffic of ZeRO-3 beside it."""
    (forward_s, backward_s), traffic, prices = layer.passes_s, pieces.layer_traffic, pieces.prices
    if not np.any(np.asarray(prices.plan.zero) >= 3):
        return forward_s, backward_s
    split, together_s = prices.split > 0, beside_s(backward_s, traffic.backward_s, traffic.reduce_s, prices)
    if np.any(split):
        together_s = np.where(split, sum(_halves_s(layer, pieces)), together_s)
    return beside_s(forward_s, traffic.forward_s, 0.0, prices), together_s


def _halves_s(layer: LayerTime, pieces: Pieces) -> tuple[Number, Number]:
    """Split backward pass of a layer: gradients of inputs beside gathers, those of weights beside reductions."""
    traffic, prices = pieces.layer_traffic, pieces.prices
    inputs_s = beside_s(layer.passes_s[1] - layer.weight_s, traffic.backward_s, 0.0, prices)
    return inputs_s, beside_s(layer.weight_s, 0.0, traffic.reduce_s, prices)


def _ends_s(steps: Steps, pieces: Pieces) -> tuple[Number, Number, Number]:
    """Traffic of ZeRO-3 at the ends of passes, where nothing computes beside it: of any stage, the first, the last.

    Beside the first gather and the last reduction of a pass there is no layer. Where traffic sets the pace, its last
    layer computes alone instead, in the backward pass beside reductions. The head computes beside one gather.
    """
    prices, traffic = pieces.prices, pieces.layer_traffic
    if not np.any(np.asarray(prices.plan.zero) >= 3):
        return 0.0, 0.0, 0.0
    (forward_s, backward_s), both_s = pieces.layer.passes_s, traffic.backward_s + traffic.reduce_s
    chunks = np.asarray(prices.plan.interleave)
    layers = np.asarray(steps.work.shape.layers) / (prices.plan.pp * chunks)
    behind_s = np.maximum(both_s - backward_s - slowed_s(backward_s, both_s, prices), 0.0)
    back_s, weight_s = np.maximum(both_s - layers * behind_s, 0.0), pieces.layer.weight_s
    if np.any(prices.split):
        apart_s = np.minimum(traffic.backward_s, backward_s - weight_s) + np.minimum(traffic.reduce_s, weight_s)
        back_s = np.where(prices.split > 0, apart_s, back_s)
    ends_s = chunks * (np.minimum(traffic.forward_s, forward_s) + back_s)
    beside_head_s = np.minimum(traffic.backward_s, pieces.head.passes_s[1])
    if np.any(prices.gathers_late):
        ends_s = np.where(prices.gathers_late, 0.0, ends_s)
        beside_head_s = np.where(prices.gathers_late, 0.0, beside_head_s)
    first, last = pieces.first_traffic, pieces.last_traffic
    last_s = last.backward_s + last.reduce_s + np.maximum(last.forward_s - forward_s, 0.0) - beside_head_s
    return ends_s, first.forward_s + first.backward_s + first.reduce_s, last_s


def _edges_s(pieces: Pieces, ends_s: Number) -> Number:
    """Gathers before a stage gets a message, of two layers in each pass, and reductions after it has sent its own."""
    prices, traffic, plan = pieces.prices, pieces.layer_traffic, pieces.prices.plan
    if not np.any(np.asarray(plan.zero) >= 3):
        return 0.0
    late, moved = prices.gathers_late, (traffic.forward_s, traffic.backward_s + traffic.reduce_s)
    ahead = np.minimum(np.asarray(prices.steps.work.shape.layers) / plan.pp, 2 * plan.interleave)
    busy = (one + slowed_s(one, more, prices) for one, more in zip(pieces.layer.passes_s, moved, strict=True))
    ahead_s = ends_s + ahead * sum(np.maximum(more - one, 0.0) for one, more in zip(busy, moved, strict=True))
    return np.where(late, plan.interleave * sum(moved), ahead_s)


def _layers_of_stages(steps: Steps) -> tuple[Number, Number, Number]:
    """Layers of the first, the fullest middle and the last stage; some software cuts at equal FLOPs, head included."""
    p, layers = steps.work.plan, np.asarray(steps.work.shape.layers, float)
    pp = np.asarray(p.pp)
    before, behind = np.asarray(p.embedding_as_layer, float), np.asarray(p.head_as_layer, float)
    first_stated, last_stated = np.asarray(p.first_layers), np.asarray(p.last_layers)
    stated = (first_stated > 0) | (last_stated > 0)
    counted = layers + before + behind - first_stated - last_stated
    others = np.maximum(pp - (first_stated > 0) - (last_stated > 0), 1)
    even, rest = np.floor(counted / others), np.where(stated, 0, counted % others)
    to_first = np.where(before + behind > 0, rest > 0, rest >= np.maximum(pp - 1, 1))  # the middle comes first
    first = np.where(first_stated > 0, first_stated, even + to_first) - before
    last = np.where(last_stated > 0, last_stated, even) - behind
    middle = even + (rest > 0)
    if np.any(steps.habits.by_flops):
        by_flops, shape = np.asarray(steps.habits.by_flops) > 0, steps.work.shape
        one = shape.attention_parameters + shape.mlp_parameters(shape.ffn)
        share = (layers + shape.outputs * shape.hidden / one) / pp
        first = np.where(by_flops, np.minimum(np.floor(share) + 1, layers), first)
        last = np.where(by_flops, np.maximum(layers - np.floor(share * (pp - 1)) - 1, 0), last)
        middle = np.where(by_flops, np.ceil(share), middle)
    return np.where(pp == 1, layers, first), middle, np.where(pp == 1, layers, last)


def bubble_s(steps: Steps, pieces: Pieces, stages: Stages) -> Number:
    """Seconds for which the slowest stage waits while the pipeline fills and drains.

    The other stages pass once; where chunks interleave a chunk of each does, and with less micro-batches than stages
    every chunk waits for the first to come round. Gradients of weights fill the bubble of ZB-H1 as long as there are
    backward passes to wait for [arXiv 2401.10241]: with F, B and W of a stage it lasts
    (pp - 1) (F + B) - min(pp - 1, micro-batches - 1) min(W, B).
    """
    p, count = steps.work.plan, steps.micro_batches
    pp, chunks = np.asarray(p.pp), np.asarray(p.interleave)
    bubble = (stages.sum_s - stages.slowest_s - (pp - 1) * stages.edges_s) / chunks
    if np.any(chunks > 1):
        others_s = stages.slowest_s - stages.edges_s
        bubble = bubble + np.maximum(pp - count, 0) * (chunks - 1) * others_s / chunks
    split = pieces.prices.split > 0
    if not np.any(split):
        return bubble
    layers = np.asarray(steps.work.shape.layers) / pp
    backward_s, weight_s = (layers * half_s for half_s in _halves_s(pieces.layer, pieces))
    filled_s = (pp - 1) * weight_s + np.minimum(pp - 1, count - 1) * np.minimum(weight_s, backward_s)
    return np.where(split, np.maximum(bubble - filled_s, 0.0), bubble)


def sends_s(steps: Steps, pieces: Pieces, stages: Stages) -> Number:
    """Messages between stages on the longest path.

    1F1B: pp micro-batches are between the forward and the backward pass of the first stage, so a micro-batch takes at
    least 1/pp of the way there and back. GPipe and interleaved schedules wait only while the pipeline fills and
    drains. Software whose messages stop the host waits for each of them.
    """
    p, prices, work = steps.work.plan, pieces.prices, steps.work
    pp, chunks = np.asarray(p.pp), np.asarray(p.interleave)
    if not np.any(pp > 1):
        return 0.0
    size = work.moved_bytes / p.tp  # each tensor rank sends its part, gathered on arrival [arXiv 2104.04473]
    near, far = (prices.comm_s("send_recv", size, prices.groups[name]) for name in ("same node", "other node"))
    on_node = np.maximum(prices.machine.node * pp // p.world_size, 1)  # stages
    crossing = (np.ceil(pp / on_node) - 1) / np.maximum(pp - 1, 1)  # share of the neighbours on different nodes
    one_s, count = near + crossing * (far - near), steps.micro_batches
    way_s = np.maximum((stages.sum_s + 2 * (pp - 1) * one_s) / pp - stages.slowest_s, 0.0)
    filling = (chunks > 1) | (np.asarray(p.schedule) == "gpipe")
    shown_s = np.where(filling, 2 * (pp * chunks - 1) * one_s, count * way_s + 2 * np.maximum(pp - 2, 0) * one_s)
    if np.any(prices.habits.blocking_sends):
        stops_s = prices.habits.blocking_sends * (2 * one_s + prices.constants["send_stop_s"]) * count * chunks
        shown_s = np.maximum(shown_s, stops_s)
    return np.where(pp > 1, shown_s, 0.0)
