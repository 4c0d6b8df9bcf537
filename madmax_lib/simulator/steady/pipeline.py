"""Bubble and messages of a pipeline: seconds for which its bottleneck stage waits.

m micro-batches through stages of T_s seconds, the slowest of T_max, take

    T = m T_max + (sum of T_s - T_max) + messages      [Narayanan et al. 2021]

and the bracket is the bubble: the other stages compute once while the pipeline fills
and drains.
"""

from functools import reduce

import numpy as np

from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.layer_costs import LayerCosts
from madmax_lib.simulator.steady.stages import Stages
from madmax_lib.simulator.steady.walk import with_walked_bubbles


def bubble_s(steps: Steps, costs: LayerCosts, stages: Stages) -> Number:
    """Seconds for which the slowest stage waits while the pipeline fills and drains.

    The other stages pass once; where chunks interleave, a chunk of each does, with
    embedding and head. Where gradients of weights fill it, or chunks are of any
    length, the order is walked.
    """
    plan = steps.plan
    pp = plan.pp
    hidden_s = (pp - 1) * stages.overlapped_by_peers_s
    bubble = stages.sum_s - stages.slowest_s - hidden_s
    several = plan.interleave > 1
    if np.any(several):
        bubble = np.where(several, _interleaved_bubble_s(steps, stages, bubble), bubble)
    return with_walked_bubbles(steps, costs, stages, bubble)


def _interleaved_bubble_s(steps, stages, bubble):
    """Bubble where chunks interleave, from that of whole stages: it fills and drains
    through the first chunks.

    With fewer micro-batches than stages the first goes through all chunks, and the
    others follow behind the longest.
    """
    plan = steps.plan
    count = steps.micro_batches
    layers = steps.shape.layers
    pp = plan.pp
    chunks = plan.interleave
    layer_s = stages.passes.both_s
    # layers of a first chunk beyond those of a mean one: a remainder lies in the middle
    parts = pp * chunks
    rest = layers % parts
    more = np.clip(pp - (parts - rest) / 2, 0, pp) / pp - rest / parts
    # the longest chunk: a full one, or that with an end of the model
    end_s = np.maximum(stages.embedding_s, stages.head_s)
    end_s = end_s + np.floor(stages.three[-1].layers / chunks) * layer_s
    full_s = np.ceil(layers / parts) * layer_s + stages.longest_chunk_excess_s
    longest_s = np.maximum(full_s, end_s) + stages.between_passes_s / chunks
    by_peers_s = (pp - 1 / chunks) * stages.overlapped_by_peers_s
    one_round_s = stages.sum_s - by_peers_s + (count - 1) * longest_s
    # ends of the model that the bottleneck stage does not compute itself
    ends_s = np.where(stages.has_embedding, 0.0, stages.embedding_s)
    ends_s = ends_s + np.where(stages.has_head, 0.0, stages.head_s)
    in_turn_s = (bubble - ends_s) / chunks + ends_s + more * (pp - 1) * layer_s
    return np.maximum(one_round_s - count * stages.slowest_s, in_turn_s)


def short_batch_s(steps: Steps, usual: Stages, short: Stages) -> Number:
    """Seconds that a short last micro-batch adds to the bubble; stages of the others
    and of that one.

    Under 1F1B the last stage takes it while the one before drains the pipeline. With
    chunks the one before it comes round no sooner.
    """
    plan = steps.plan
    pp = plan.pp
    chunks = plan.interleave
    shorter_s = usual.first_backward_s - short.first_backward_s
    added_s = -np.minimum((pp - 1) * shorter_s, short.first_forward_s)
    extra = np.floor(steps.round_size) - pp  # of a round beyond one of each stage
    waited_s = np.maximum(shorter_s - extra * usual.first_backward_s, 0.0)
    in_rounds_s = (1 - 1 / chunks) * waited_s
    added_s = np.where(chunks > 1, in_rounds_s, added_s)
    return np.where((plan.schedule == "gpipe") | plan.defers_weights, 0.0, added_s)


def messages_s(steps: Steps, costs: LayerCosts, stages: Stages) -> Number:
    """Seconds of messages between stages on the longest path.

    1F1B: pp micro-batches are between the forward and the backward pass of the first
    stage, so a micro-batch takes at least 1/pp of the way there and back. GPipe and
    interleaved schedules wait only while the pipeline fills and drains, with every
    chunk where no more micro-batches than stages go through it in a row. Software whose
    messages stop the host waits for each of them. Where messages wait for their
    receiver no pass hides them.
    """
    plan = steps.plan
    prices = costs.prices
    traits = prices.traits
    pp = plan.pp
    chunks = plan.interleave
    count = steps.micro_batches
    if not np.any(pp > 1):
        return 0.0
    one_s = _message_s(steps, costs)
    both_ways_s = 2 * (pp - 1) * one_s
    period_s = (stages.sum_s + both_ways_s) / pp
    wait_s = np.maximum(period_s - stages.slowest_s, 0.0)
    steady_s = count * wait_s + 2 * np.maximum(pp - 2, 0) * one_s
    # chunks come round after round_size passes, which hide what they take
    spare_s = (steps.round_size - pp) * stages.slowest_s / chunks
    rounds_s = (chunks - 1) * np.maximum(2 * pp * one_s - spare_s, 0.0)
    only_fills = (chunks > 1) | (plan.schedule == "gpipe")
    exposed_s = np.where(only_fills, both_ways_s + rounds_s, steady_s)
    if np.any(traits.rendezvous_sends):
        met_s = _rendezvous_s(steps, stages, one_s)
        exposed_s = np.where(traits.rendezvous_sends, met_s, exposed_s)
    if np.any(traits.blocking_sends):
        stop_s = traits.blocking_sends * (2 * one_s + prices.constants["send_stop_s"])
        exposed_s = np.maximum(exposed_s, stop_s * count * chunks)
    return np.where(pp > 1, exposed_s, 0.0)


def _message_s(steps, costs):
    """Seconds of a message between neighbouring stages, of which some lie on one node."""
    plan = steps.plan
    prices = costs.prices
    pp = plan.pp
    near_s, far_s = prices.pair_s("send_recv", steps.work.sent_bytes)
    on_node = np.maximum(prices.machine.node * pp // plan.world_size, 1)  # stages
    crossing = (np.ceil(pp / on_node) - 1) / np.maximum(pp - 1, 1)
    return near_s + crossing * (far_s - near_s)


def _rendezvous_s(steps, stages, one_s):
    """Messages that travel when both stages wait for them, on the longest path
    (`events.passes`).

    GPipe: one before each pass. 1F1B: two with each neighbour between the passes of a
    micro-batch, one to fill and one to drain.
    """
    plan = steps.plan
    pp = plan.pp
    neighbours = (1, 2, 1)  # of the first, a middle and the last stage
    periods_s = [
        (stage.layers > 0) * (stage.seconds + 2 * count * one_s)
        for stage, count in zip(stages.three, neighbours, strict=True)
    ]
    period_s = reduce(np.maximum, periods_s)
    is_gpipe = plan.schedule == "gpipe"
    between_s = np.where(is_gpipe, 2 * one_s, period_s - stages.slowest_s)
    return 2 * (pp - 1) * one_s + (steps.micro_batches - 1) * between_s
