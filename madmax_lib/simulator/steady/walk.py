"""Bubble of schedules that have no short formula: their orders are walked with the
seconds of passes, for many plans of one order at a time.

    pass begins = max(pass before on its stage ends, pass that it waits for ends)
    bubble = end of the last pass - work of the slowest stage

Both chunks of a V (zbv, dualpipev) and the chunks of an interleaved zero-bubble schedule
differ in length, and so do the ends of the pipeline.
"""

from functools import lru_cache, reduce

import numpy as np
import pandas as pd

from madmax_lib.plan.layers import chunk_layers
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.schedules import dependency, in_order, order
from madmax_lib.simulator.layers.cuts import cuts_of, plan_of_cut
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.layer_costs import LayerCosts
from madmax_lib.simulator.steady.stages import Stages

_ROUNDS = 3  # of pp micro-batches; what follows repeats the last one


def walked_bubble_s(steps: Steps, costs: LayerCosts, stages: Stages) -> Number:
    """Seconds for which the slowest stage waits; 0 for schedules of a formula."""
    plan = steps.plan
    several = (plan.schedule == "zero-bubble") & (plan.interleave > 1)
    walked = several | plan.folds
    if not np.any(walked):
        return 0.0
    cuts, cut = cuts_of(plan, steps.shape.layers)
    repeats = np.maximum(steps.micro_batches // plan.pp - _ROUNDS + 1, 0)
    count = steps.micro_batches - repeats * plan.pp
    passes = stages.passes
    ends = [
        part
        for end in (costs.embedding, costs.head)
        for part in (
            end.passes_s[0],
            end.passes_s[1] - end.time.weight_s,
            end.time.weight_s,
        )
    ]
    layer = [passes.forward_s, passes.dgrad_s, passes.wgrad_s]
    # of each pass of a chunk
    exposed_s = stages.between_passes_s / (2 * plan.interleave)
    hidden_s = stages.overlapped_by_peers_s / (2 * plan.interleave)
    columns = np.broadcast_arrays(
        np.where(walked, plan.schedule, ""),
        cut,
        count,
        hidden_s,
        exposed_s,
        *layer,
        *ends,
    )
    bubble_s = np.zeros(columns[0].shape)
    schedule, cut, count, *seconds = map(np.ravel, columns)
    groups = pd.DataFrame({"schedule": schedule, "cut": cut, "count": count})
    for (name, number, many), rows in groups.groupby(list(groups)).indices.items():
        if name:
            sizes = _sizes(cuts[number], name)
            parts = [part[rows] for part in seconds]
            bubble_s.flat[rows] = _bubble_s(name, sizes, int(many), parts)
    return bubble_s


def _sizes(cut, schedule):
    """Layers of each chunk of each stage."""
    chunks = chunk_layers(int(cut[-1]), plan_of_cut(cut))
    return [[len(chunk) for chunk in stage] for stage in chunks]


def _bubble_s(schedule, sizes, count, seconds):
    """Bubble of an order. seconds: exposed at the start of a pass, then forward, dgrad
    and wgrad of a layer, the embedding and the head.
    """
    hidden_s, exposed_s, *parts = seconds
    layer, embedding, head = np.reshape(parts, (3, 3, -1))
    pp = len(sizes)
    chunks = len(sizes[0])
    folds = schedule != "zero-bubble"
    work = {
        (stage, chunk): size * layer
        for stage, of_stage in enumerate(sizes)
        for chunk, size in enumerate(of_stage)
    }
    work[0, 0] = work[0, 0] + embedding
    last = (0 if folds else pp - 1, chunks - 1)
    work[last] = work[last] + head
    ends = {}
    free_s = [0.0] * pp
    for stage, slot, waits_for, parts in _walk(schedule, pp, count, chunks):
        ready_s = ends.get(waits_for, 0.0)
        work_s = work[stage, slot[1]][parts].sum(axis=0)
        if slot[0] == "weight":
            free_s[stage] = free_s[stage] + work_s
        else:
            begun_s = np.maximum(free_s[stage] + hidden_s, ready_s)
            free_s[stage] = begun_s + work_s + exposed_s - hidden_s
        ends[stage, slot] = free_s[stage]
    busy_s = [
        sum(work[stage, chunk].sum(axis=0) + 2 * exposed_s for chunk in range(chunks))
        for stage in range(pp)
    ]
    return reduce(np.maximum, free_s) - count * reduce(np.maximum, busy_s)


@lru_cache(maxsize=64)
def _walk(schedule, pp, count, chunks):
    """Slots of all stages in an order that can run: (stage, slot, (stage, slot) that it
    waits for, rows of the seconds that it takes).
    """
    folds = schedule != "zero-bubble"
    orders = [order(schedule, stage, pp, count, chunks) for stage in range(pp)]
    slots = [set(of_stage) for of_stage in orders]
    rows = {"forward": slice(0, 1), "backward": slice(1, 2), "weight": slice(2, 3)}
    result = []
    for stage, slot in in_order(orders, chunks, folds):
        parts = rows[slot[0]]
        if slot[0] == "backward" and ("weight", *slot[1:]) not in slots[stage]:
            parts = slice(1, 3)  # both gradients
        needed = dependency(slot, stage, pp, chunks, folds)
        result.append((stage, slot, needed, parts))
    return result
