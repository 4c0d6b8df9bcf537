"""Bubble of schedules that defer gradients of weights: their orders are walked with the
seconds of passes, for many plans of one order at a time.

    pass begins = max(pass before on its stage ends, pass that it waits for ends)
    bubble = end of the last pass - work of the slowest stage

With F, B and W of a stage (forward, dgrad, wgrad) and equal stages that of ZB-H1 is
(pp - 1)(F + B - min(F, B, W)) [arXiv 2401.10241]; but chunks differ in length, and so do
the ends of the pipeline.
"""

import numpy as np

from madmax_lib.plan.layers import chunk_layers
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.schedules import turns
from madmax_lib.simulator.layers.cuts import cuts_of, plan_of_cut
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.layer_costs import LayerCosts
from madmax_lib.simulator.steady.stages import Stages

_PASSES = ("forward", "backward", "weight", "both")  # the last: both gradients
_ROUNDS = 3  # of pp micro-batches; what follows repeats the last one


def walked_bubble_s(steps: Steps, costs: LayerCosts, stages: Stages) -> Number:
    """Seconds for which the slowest stage waits, of schedules that defer gradients of
    weights; 0 for others.
    """
    plan = steps.plan
    repeats = np.maximum(steps.micro_batches // plan.pp - _ROUNDS + 1, 0)
    count = steps.micro_batches - repeats * plan.pp
    passes = stages.passes
    seconds = [passes.forward_s, passes.dgrad_s, passes.wgrad_s]
    for end in (costs.embedding, costs.head):
        forward_s, backward_s = end.passes_s
        wgrad_s = end.time.weight_s
        seconds += [forward_s, backward_s - wgrad_s, wgrad_s]
    # of a pass of a chunk, for which no other stage waits, and beside its layers
    shares_s = (stages.overlapped_by_peers_s, stages.between_passes_s)
    seconds += [share_s / (2 * plan.interleave) for share_s in shares_s]
    cuts, index = cuts_of(plan, count, steps.shape.layers)
    index, *seconds = np.broadcast_arrays(index, *seconds)
    bubble_s = np.zeros(index.shape)
    for number, cut in enumerate(cuts):
        one = plan_of_cut(cut)
        if one.defers_weights:
            rows = index == number
            of_rows = np.array([part[rows] for part in seconds])
            bubble_s[rows] = _bubble_s(one, *map(int, cut[-2:]), of_rows)
    return bubble_s


def _bubble_s(plan, count, layers, seconds):
    """Bubble of one order. seconds: (11, plans), of the forward pass, dgrad and wgrad of
    a layer, the embedding and the head, and those beside.
    """
    # (forward, dgrad, wgrad) of each as (3, plans), to which both gradients are added
    parts = seconds[:9].reshape(3, 3, -1)
    both = parts[:, 1:2] + parts[:, 2:]
    layer, embedding, head = np.append(parts, both, axis=1)
    hidden_s, exposed_s = seconds[9:]
    sizes = [[len(chunk) for chunk in stage] for stage in chunk_layers(layers, plan)]
    # (stages, chunks, passes, plans): layers of a chunk times seconds of a layer
    work = np.multiply.outer(np.array(sizes), layer)
    work[0, 0] += embedding
    work[plan.head_stage, -1] += head
    ends = {}
    free_s = [0.0] * plan.pp
    steps = turns(plan.schedule, plan.pp, count, plan.interleave)
    for stage, slot, awaits, with_weights in steps:
        direction, chunk, _ = slot
        kind = "both" if with_weights else direction
        work_s = work[stage, chunk, _PASSES.index(kind)]
        if direction != "weight":
            begun_s = np.maximum(free_s[stage] + hidden_s, ends.get(awaits, 0.0))
            free_s[stage] = begun_s + exposed_s - hidden_s
        free_s[stage] = free_s[stage] + work_s
        ends[stage, slot] = free_s[stage]
    busy_s = work[:, :, :3].sum(axis=(1, 2)).max(axis=0)
    busy_s = busy_s + 2 * plan.interleave * exposed_s
    return np.max(free_s, axis=0) - count * busy_s
