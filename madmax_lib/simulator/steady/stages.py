"""How long do the stages of a pipeline take for a micro-batch, and how long do they
wait for each other?
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import LayerTime
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import Held, beside_s, sharded, slowed_s
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.kinds import farther_s, gathered_s
from madmax_lib.simulator.steady.pieces import Pieces

__all__ = ["Stages", "bubble_s", "sends_s", "short_s", "stages_of", "tied_s"]


@dataclass(frozen=True)
class Stages:
    """Stages of a pipeline, a micro-batch in both passes."""

    slowest_s: Number
    sum_s: Number  # of all
    ends_s: tuple[
        Number, Number, Number
    ]  # at the ends of the passes of each, before the first, behind the last
    passes_s: tuple[Number, Number]  # of a layer, forward and backward
    halves_s: tuple[
        Number, Number
    ]  # of its backward pass where that is split: gradients of inputs, of weights
    # of each, traffic of weights at the ends of passes, for which no other stage waits
    edges_s: Number
    first_s: tuple[Number, Number]  # (forward, backward) of the first
    layers: tuple[Number, Number, Number]  # of the first, fullest middle and last
    farther_s: tuple[
        Number, ...
        # of these, for more layers that attend to all, or of long kinds, than the mean has
    ]
    # of the longest chunk for layers of long kinds, beyond those of the mean kind
    chunk_s: Number
    dense: Number  # of a mixture in the first
    held: tuple[
        tuple[Number, Number, Number], ...
    ]  # layers, with experts, stages before, seconds: of these three
    in_first: Number  # 1 where the slowest has the embedding
    in_last: Number  # and the head

    def of_slowest(self, first: Number, middle: Number, last: Number) -> Number:
        """That of the slowest stage."""
        return np.where(self.in_first, first, np.where(self.in_last, last, middle))


def stages_of(steps: Steps, pieces: Pieces) -> Stages:
    """Stages as `plan_layers.chunk_layers` cuts them; a remainder lies in the middle."""
    shape = steps.work.shape
    pp = np.asarray(steps.work.plan.pp)
    first, middle, last = _layers_of_stages(steps)
    passes_s, halves_s = _with_traffic(pieces.layer, pieces)
    layer_s = sum(passes_s)
    head_s = sum(pieces.head.passes_s)
    mixed = np.asarray(shape.experts) > 0
    share = shape.mixture_share_behind
    single = pp == 1
    fewer = np.minimum(np.where(mixed, shape.dense_layers, 0), first)
    cheaper_s = (0.0, 0.0)
    if pieces.dense is not pieces.layer:
        dense_s = _with_traffic(pieces.dense, pieces)[0]
        cheaper_s = [
            less_s - one_s for less_s, one_s in zip(dense_s, passes_s, strict=True)
        ]
    ends_s, first_end_s, last_end_s, edges_s = _ends_s(steps, pieces)
    ways = zip(
        passes_s,
        cheaper_s,
        pieces.embedding.passes_s,
        pieces.head.passes_s,
        strict=True,
    )
    forward_s, backward_s = (
        first * one_s + (fewer * less_s + (embedding_s + single * end_s))
        for one_s, less_s, embedding_s, end_s in ways
    )
    first_s = forward_s + backward_s + ends_s + (first_end_s + single * last_end_s)
    middle_s = np.where(pp > 2, middle * layer_s + ends_s, 0.0)
    before_s = first_end_s + sum(pieces.embedding.passes_s)
    after_s = head_s + last_end_s
    last_s = np.where(pp > 1, last * layer_s + after_s + ends_s, 0.0)
    between = np.where(pp > 2, np.asarray(shape.layers) - first - last, 0.0)
    sum_s = first_s + last_s + between * layer_s + np.maximum(pp - 2, 0) * ends_s
    *farther_s, chunk_s = _farther_s(steps, pieces, first, middle, last)
    if shape.model or np.any(shape.windowed_share > 0):
        first_s, middle_s, last_s = (
            sum(pair)
            for pair in zip((first_s, middle_s, last_s), farther_s, strict=True)
        )
    slowest_s = np.maximum(np.maximum(first_s, middle_s), last_s)
    in_last = (last_s >= slowest_s) | single
    middle_held = np.where(pp > 2, middle, 0)
    last_held = np.where(pp > 1, last, 0)
    held = (
        (first, fewer, 0, first_s),
        (middle_held, 0, pp - 2, middle_s),
        (last_held, 0, pp - 1, last_s),
    )
    return Stages(
        slowest_s=slowest_s,
        sum_s=sum_s,
        ends_s=(ends_s, before_s, after_s),
        passes_s=passes_s,
        halves_s=halves_s,
        edges_s=edges_s,
        first_s=(forward_s, backward_s),
        layers=(first, middle, last),
        farther_s=farther_s,
        chunk_s=chunk_s,
        dense=fewer,
        held=tuple(
            (many, share * (many - dense), *rest) for many, dense, *rest in held
        ),
        in_first=(first_s >= slowest_s) & (single | ~in_last),
        in_last=in_last,
    )


def _farther_s(
    steps: Steps, pieces: Pieces, first: Number, middle: Number, last: Number
) -> tuple[Number, ...]:
    """Seconds of a first, middle and last stage of so many layers, and a chunk, for
    those that attend to all.

    Every so many layers one does, the last of them; the fullest middle stage begins
    with one.
    """
    shape = steps.work.shape
    pp = np.asarray(steps.work.plan.pp)
    chunks = np.asarray(steps.work.plan.interleave)
    if shape.model:
        return farther_s(shape.model, pieces, middle)
    share = shape.windowed_share
    every = chunks * np.maximum(shape.full_every, 1)
    if not np.any(share > 0):
        return 0.0, 0.0, 0.0, 0.0
    full = (
        chunks * np.floor(first / every),
        chunks * np.ceil(middle / every),
        chunks * np.ceil(last / every),
    )
    more = (
        many - (1 - share) * held
        for many, held in zip(full, (first, middle, last), strict=True)
    )
    return *(
        ((share > 0) & (share < 1) & (pp > 1)) * pieces.farther_s * one for one in more
    ), 0.0


def _with_traffic(
    layer: LayerTime, pieces: Pieces
) -> tuple[tuple[Number, Number], tuple[Number, Number]]:
    """Forward and backward pass of a layer, with the traffic of ZeRO-3 beside it, and
    the halves of a split one.

    Gradients of inputs are computed beside gathers, those of weights beside reductions.
    """
    (forward_s, backward_s) = layer.passes_s
    traffic = pieces.layer_traffic
    prices = pieces.prices
    split = prices.split > 0
    halves_s = (backward_s - layer.weight_s, layer.weight_s)
    if not np.any(np.asarray(prices.plan.zero) >= 3):
        return (forward_s, backward_s), halves_s
    reduce_s = (
        np.where(prices.buckets, 0.0, traffic.reduce_s)
        if np.any(prices.buckets)
        else traffic.reduce_s
    )
    together_s = beside_s(backward_s, traffic.backward_s, reduce_s, prices)
    ahead_s = beside_s(forward_s, traffic.forward_s, 0.0, prices)
    if pieces.kinds:
        ahead_s, together_s = gathered_s(
            prices.steps.work.shape.model, pieces, ahead_s, together_s
        )
    if np.any(split):
        inputs_s = beside_s(halves_s[0], traffic.backward_s, 0.0, prices)
        halves_s = inputs_s, beside_s(halves_s[1], 0.0, traffic.reduce_s, prices)
        together_s = np.where(split, sum(halves_s), together_s)
    return (ahead_s, together_s), halves_s


def _ends_s(steps: Steps, pieces: Pieces) -> tuple[Number, Number, Number, Number]:
    """Traffic of ZeRO-3 at the ends of passes: of any stage, the first, the last, and
    for which no other stage waits.

    Beside the first gather and the last reduction of a pass there is no layer. Where
    traffic sets the pace, its last layer computes alone instead, in the backward pass
    beside reductions. The head computes beside one gather. Two layers of each pass are
    gathered before a stage gets a message, and reduced after it has sent its own.
    """
    prices = pieces.prices
    traffic = pieces.layer_traffic
    if not np.any(np.asarray(prices.plan.zero) >= 3):
        return 0.0, 0.0, 0.0, 0.0
    (forward_s, backward_s) = pieces.layer.passes_s
    both_s = traffic.backward_s + traffic.reduce_s
    chunks = np.asarray(prices.plan.interleave)
    weight_s = pieces.layer.weight_s
    layers = np.asarray(steps.work.shape.layers) / (prices.plan.pp * chunks)
    ways = (forward_s, traffic.forward_s), (backward_s, both_s)
    behind_s = [
        np.maximum(more_s - one_s - slowed_s(one_s, more_s, prices), 0.0)
        for one_s, more_s in ways
    ]
    back_s = np.maximum(both_s - layers * behind_s[1], 0.0)
    if np.any(prices.split):
        apart_s = np.minimum(traffic.backward_s, backward_s - weight_s) + np.minimum(
            traffic.reduce_s, weight_s
        )
        back_s = np.where(prices.split > 0, apart_s, back_s)
    if np.any(prices.buckets):
        back_s = np.where(prices.buckets, _buckets_s(steps, pieces), back_s)
    ends_s = chunks * (np.minimum(traffic.forward_s, forward_s) + back_s)
    edges_s = ends_s + chunks * np.minimum(layers, 2) * sum(behind_s)
    beside_head_s = np.minimum(traffic.backward_s, pieces.head.passes_s[1])
    if np.any(prices.gathers_late):
        ends_s, beside_head_s = (
            np.where(prices.gathers_late, 0.0, part) for part in (ends_s, beside_head_s)
        )
        edges_s = np.where(
            prices.gathers_late, chunks * (traffic.forward_s + both_s), edges_s
        )
    first = pieces.first_traffic
    last = pieces.last_traffic
    last_s = (
        last.backward_s
        + last.reduce_s
        + np.maximum(last.forward_s - forward_s, 0.0)
        - beside_head_s
    )
    return ends_s, first.forward_s + first.backward_s + first.reduce_s, last_s, edges_s


def _buckets_s(steps: Steps, pieces: Pieces) -> Number:
    """Gathers and reductions of a backward pass that show where gradients are reduced
    in buckets of several layers.

    Gathers queue behind a bucket on the same stream: compute goes on for the layers
    gathered ahead, then it waits. What the last bucket holds follows the pass.
    """
    prices = pieces.prices
    traffic = pieces.layer_traffic
    layers = np.asarray(steps.work.shape.layers, float)
    count = pieces.layers
    busy_s = pieces.layer.passes_s[1]
    bytes_ = prices.gradient_bytes * np.maximum(count.dense + count.experts, 1.0)
    together = np.clip(np.ceil(prices.plan.bucket_bytes / bytes_), 1.0, layers)
    buckets = np.ceil(layers / together) - 1  # beside the last
    full_s, last_s = (
        sharded(Held(held * count.dense, held * count.experts), prices).reduce_s
        for held in (together, layers - buckets * together)
    )
    busy_s = busy_s + slowed_s(busy_s, traffic.backward_s, prices)
    gained_s = together * (
        busy_s - traffic.backward_s
    )  # by gathers on compute, from bucket to bucket
    slack_s = np.maximum(
        np.minimum(prices.plan.prefetch * busy_s - traffic.backward_s, gained_s), 0.0
    )
    first_s = np.maximum(
        traffic.backward_s - layers * np.maximum(traffic.backward_s - busy_s, 0.0), 0.0
    )
    return first_s + buckets * np.maximum(full_s - slack_s, 0.0) + last_s


def _layers_of_stages(steps: Steps) -> tuple[Number, Number, Number]:
    """Layers of the first, the fullest middle and the last stage; some software cuts at
    equal FLOPs, head included.
    """
    p = steps.work.plan
    layers = np.asarray(steps.work.shape.layers, float)
    pp = np.asarray(p.pp)
    chunks = np.asarray(p.interleave)
    before = np.asarray(p.embedding_as_layer, float)
    behind = np.asarray(p.head_as_layer, float)
    first_stated = np.asarray(p.first_layers)
    last_stated = np.asarray(p.last_layers)
    stated = (first_stated > 0) | (last_stated > 0)
    counted = layers + before + behind - first_stated - last_stated
    parts = np.where(
        stated, np.maximum(pp - (first_stated > 0) - (last_stated > 0), 1), pp * chunks
    )
    even = np.where(stated, 1, chunks) * np.floor(counted / parts)
    rest = np.where(stated, 0, counted % parts)
    begin = np.where(
        before + behind > 0, 0, (parts - rest) // 2
    )  # of the chunks with one more: the middle comes first
    in_first, in_last = (
        np.ceil((begin + rest - s) / pp) - np.ceil((begin - s) / pp)
        for s in (0, pp - 1)
    )
    first = np.where(first_stated > 0, first_stated, even + in_first) - before
    last = np.where(last_stated > 0, last_stated, even + in_last) - behind
    middle = even + np.ceil((rest - in_first - in_last) / np.maximum(pp - 2, 1))
    if np.any(steps.habits.by_flops):
        by_flops = np.asarray(steps.habits.by_flops) > 0
        shape = steps.work.shape
        one = shape.attention_parameters + shape.mlp_parameters(shape.ffn)
        share = (layers + shape.outputs * shape.hidden / one) / pp
        first = np.where(by_flops, np.minimum(np.floor(share) + 1, layers), first)
        last = np.where(
            by_flops, np.maximum(layers - np.floor(share * (pp - 1)) - 1, 0), last
        )
        middle = np.where(
            by_flops, np.floor(share) + (share % 1 * (pp - 1) >= 1), middle
        )
    return np.where(pp == 1, layers, first), middle, np.where(pp == 1, layers, last)


def bubble_s(steps: Steps, pieces: Pieces, stages: Stages) -> Number:
    """Seconds for which the slowest stage waits while the pipeline fills and drains.

    The other stages pass once; where chunks interleave, a chunk of each does, with
    embedding and head. With fewer micro-batches than stages the first goes through all
    chunks, and the others follow behind the longest. Gradients of weights fill the
    bubble of ZB-H1 as long as there are backward passes to wait for [arXiv 2401.10241]:
    with F, B and W of a stage it lasts (pp - 1) (F + B) - min(pp - 1, micro-batches -
    1) min(F, B, W).
    """
    p = steps.work.plan
    count = steps.micro_batches
    pp = np.asarray(p.pp)
    chunks = np.asarray(p.interleave)
    bubble = stages.sum_s - stages.slowest_s - (pp - 1) * stages.edges_s
    if np.any(chunks > 1):
        bubble = np.where(chunks > 1, _chunks_s(steps, stages, bubble), bubble)
    split = pieces.prices.split > 0
    if not np.any(split):
        return bubble
    shape_layers = np.asarray(steps.work.shape.layers)
    most = np.minimum(pp - 1, count - 1)
    ways = []
    for (layers, _, _, stage_s), head in zip(
        stages.held, (None, None, pieces.head), strict=True
    ):
        least_s = _least_s(
            stages, layers, (shape_layers - layers) / np.maximum(pp - 1, 1), head
        )
        filled_s = (shape_layers - layers) * stages.halves_s[1] + most * least_s
        ways.append((count - 1) * (stage_s - stages.slowest_s) - filled_s)
    return np.where(split, np.maximum(bubble + reduce(np.maximum, ways), 0.0), bubble)


def _chunks_s(steps: Steps, stages: Stages, bubble: Number) -> Number:
    """The bubble where chunks interleave, from that of whole stages; it fills and
    drains through the first chunks.
    """
    p = steps.work.plan
    (ends_s, before_s, behind_s) = stages.ends_s
    layer_s = sum(stages.passes_s)
    pp = np.asarray(p.pp)
    chunks = p.interleave
    layers = steps.work.shape.layers
    count = steps.micro_batches
    rest = np.asarray(layers) % (pp * chunks)  # layers lie in the middle
    more = np.clip(pp - (pp * chunks - rest) / 2, 0, pp) / pp - rest / (
        pp * chunks
    )  # of a first chunk than of a mean
    end_s = (
        np.maximum(before_s, behind_s) + np.floor(stages.layers[2] / chunks) * layer_s
    )
    full_s = np.ceil(np.asarray(layers) / (pp * chunks)) * layer_s + stages.chunk_s
    longest_s = np.maximum(full_s, end_s) + ends_s / chunks
    rounds_s = (
        stages.sum_s - (pp - 1 / chunks) * stages.edges_s + (count - 1) * longest_s
    )
    other_s = np.where(stages.in_first, 0.0, before_s) + np.where(
        stages.in_last, 0.0, behind_s
    )
    in_turn_s = (bubble - other_s) / chunks + other_s + more * (pp - 1) * layer_s
    return np.maximum(rounds_s - count * stages.slowest_s, in_turn_s)


def short_s(steps: Steps, whole: Stages, short: Stages) -> Number:
    """Seconds that a short last micro-batch adds to the bubble; stages of the others
    and of that one.

    Under 1F1B the last stage takes it while the one before drains the pipeline, under
    zero-bubble it fills less. With chunks the one before it comes round no sooner.
    """
    p = steps.work.plan
    count = steps.micro_batches
    pp = np.asarray(p.pp)
    chunks = np.asarray(p.interleave)
    shorter_s = whole.first_s[1] - short.first_s[1]
    added_s = -np.minimum((pp - 1) * shorter_s, short.first_s[0])
    if np.any(split := np.equal(p.schedule, "zero-bubble")):
        mean = np.asarray(steps.work.shape.layers) / pp
        less_s = _least_s(whole, mean, mean) - _least_s(short, mean, mean)
        added_s = np.where(split, (count <= pp) * less_s, added_s)
    waited_s = np.maximum(
        shorter_s - (np.floor(steps.in_round) - pp) * whole.first_s[1], 0.0
    )
    return np.where(
        np.equal(p.schedule, "gpipe"),
        0.0,
        np.where(chunks > 1, (1 - 1 / chunks) * waited_s, added_s),
    )


def _least_s(
    stages: Stages, layers: Number, others: Number, head: LayerTime | None = None
) -> Number:
    """The least of a stage's forward pass, its gradients of weights, and those of
    inputs in a stage of other layers.
    """
    (forward_s, _) = stages.passes_s
    (backward_s, weight_s) = stages.halves_s
    head_s = (head.passes_s[0], head.weight_s) if head else (0.0, 0.0)
    own_s = np.minimum(layers * forward_s + head_s[0], layers * weight_s + head_s[1])
    return np.minimum(own_s, others * backward_s)


def tied_s(prices: Prices) -> Number:
    """Sum of the gradients of a tied table on both ends of a pipeline, after the
    passes, where software does so.
    """
    p = prices.plan
    shape = prices.steps.work.shape
    machine = prices.machine
    tied = (
        prices.habits.sums_tied
        * prices.trained
        * (np.asarray(p.pp) > 1)
        * np.equal(shape.head_parameters, 0)
    )
    if not np.any(tied):
        return 0.0
    size = (
        tied
        * prices.gradient_bytes
        * np.where(np.asarray(shape.image) > 0, 0, shape.table_parameters)
        / p.tp
    )
    near, far = (
        prices.comm_s("all_reduce", size, prices.groups[name])
        for name in ("same node", "other node")
    )
    return np.where(p.world_size > machine.node, far, near)


def sends_s(steps: Steps, pieces: Pieces, stages: Stages) -> Number:
    """Messages between stages on the longest path.

    1F1B: pp micro-batches are between the forward and the backward pass of the first
    stage, so a micro-batch takes at least 1/pp of the way there and back. GPipe and
    interleaved schedules wait only while the pipeline fills and drains, with every
    chunk where no more micro-batches than stages go through it in a row. Software whose
    messages stop the host waits for each of them. Where messages wait for their
    receiver no pass hides them.
    """
    p = steps.work.plan
    prices = pieces.prices
    work = steps.work
    pp = np.asarray(p.pp)
    chunks = np.asarray(p.interleave)
    if not np.any(pp > 1):
        return 0.0
    size = (
        work.moved_bytes / p.tp
    )  # each tensor rank sends its part, gathered on arrival [arXiv 2104.04473]
    near, far = (
        prices.comm_s("send_recv", size, prices.groups[name])
        for name in ("same node", "other node")
    )
    on_node = np.maximum(prices.machine.node * pp // p.world_size, 1)  # stages
    crossing = (np.ceil(pp / on_node) - 1) / np.maximum(
        pp - 1, 1
    )  # share of the neighbours on different nodes
    one_s = near + crossing * (far - near)
    count = steps.micro_batches
    way_s = np.maximum(
        (stages.sum_s + 2 * (pp - 1) * one_s) / pp - stages.slowest_s, 0.0
    )
    filling = (chunks > 1) | (np.asarray(p.schedule) == "gpipe")
    spare_s = (steps.in_round - pp) * stages.slowest_s / chunks
    filling_s = 2 * (pp - 1) * one_s + (chunks - 1) * np.maximum(
        2 * pp * one_s - spare_s, 0.0
    )
    shown_s = np.where(
        filling, filling_s, count * way_s + 2 * np.maximum(pp - 2, 0) * one_s
    )
    if np.any(prices.habits.meets):
        shown_s = np.where(prices.habits.meets, _met_s(steps, stages, one_s), shown_s)
    if np.any(prices.habits.blocking_sends):
        stops_s = (
            prices.habits.blocking_sends
            * (2 * one_s + prices.constants["send_stop_s"])
            * count
            * chunks
        )
        shown_s = np.maximum(shown_s, stops_s)
    return np.where(pp > 1, shown_s, 0.0)


def _met_s(steps: Steps, stages: Stages, one_s: Number) -> Number:
    """Messages that travel when both stages wait for them, on the longest path
    (`schedule.messages`).

    GPipe: one before each pass. 1F1B: two with each neighbour between the passes of a
    micro-batch, one to fill and one to drain.
    """
    p = steps.work.plan
    count = steps.micro_batches
    pp = np.asarray(p.pp)
    ways = zip(stages.held, (2, 4, 2), strict=True)
    period_s = reduce(
        np.maximum,
        (
            (layers > 0) * (stage_s + many * one_s)
            for ((layers, *_, stage_s), many) in ways
        ),
    )
    between_s = np.where(
        np.asarray(p.schedule) == "gpipe", 2 * one_s, period_s - stages.slowest_s
    )
    return 2 * (pp - 1) * one_s + (count - 1) * between_s
