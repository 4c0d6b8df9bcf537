"""Bubble of schedules that defer gradients of weights, and of chunks of any length: the
longest of the paths through the order of their passes.

    pass begins = max(pass before on its stage ends, pass that it waits for ends)
    bubble = end of the last pass - work of the slowest stage

which grows with the micro-batches where stages differ.

An end is the largest of many sums of the seconds of passes, one for each path, of which
few are ever the largest. Orders are walked with seconds drawn at random to find these;
the ends of plans are then sums of few products. With F, B and W of a stage (forward,
dgrad, wgrad) and equal stages the bubble of ZB-H1 is (pp - 1)(F + B - min(F, B, W))
[arXiv 2401.10241].
"""

from functools import lru_cache

import numpy as np

from madmax_lib.plan.layers import chunk_layers
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.schedules import turns
from madmax_lib.simulator.layers.cuts import cuts_of, plan_of_cut
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.layer_costs import LayerCosts
from madmax_lib.simulator.steady.stages import Stages

_SCHEDULES = ("zero-bubble", "zbv", "dualpipev", "1f1b", "gpipe")
_PASSES = ("forward", "backward", "weight")
_ROUNDS = 3  # of pp micro-batches; others take as long as the last of them
# Kinds of seconds: the passes of a layer, of a dense one before mixtures, of the
# embedding and of the head, then of a pass what lies beside its layers, and what of it
# other stages do not wait for.
_KINDS = 14
_DRAWS = 128  # find all paths but such as are longer by 1 % of a step


def with_walked_bubbles(
    steps: Steps, costs: LayerCosts, stages: Stages, bubble: Number
) -> Number:
    """Seconds for which the slowest stage waits: as they are, or walked where gradients
    of weights come later and where a layout states the chunks.
    """
    plan = steps.plan
    walked = plan.defers_weights | (plan.layout != "")
    if not np.any(walked):
        return bubble
    count = np.minimum(steps.micro_batches, _ROUNDS * plan.pp)
    passes = stages.passes
    seconds = [passes.forward_s, passes.dgrad_s, passes.wgrad_s]
    for part in (costs.dense, costs.embedding, costs.head):
        forward_s, backward_s = part.passes_s
        wgrad_s = part.time.weight_s
        seconds += [forward_s, backward_s - wgrad_s, wgrad_s]
    for of_stage_s in (stages.between_passes_s, stages.overlapped_by_peers_s):
        seconds.append(of_stage_s / (2 * plan.interleave))
    schedule = np.select(
        [plan.schedule == name for name in _SCHEDULES], range(len(_SCHEDULES))
    )
    shape = steps.shape
    cuts, index = cuts_of(plan, schedule, count, shape.layers, shape.dense_layers)
    walked, bubble, *columns = np.broadcast_arrays(
        walked, bubble, index, *seconds, steps.micro_batches
    )
    index, *table = (column[walked] for column in columns)
    table = np.array(table)
    walked_s = np.empty(len(index))
    for number in np.unique(index):
        rows = index == number
        *cut, count, layers, dense = cuts[number]
        ends, work = _paths((*cut, count, layers, dense))
        before, _ = _paths((*cut, max(count - cut[0], 1), layers, dense))
        *_, batches = table[:, rows]
        # (paths, plans) or (stages, plans); a product of matrices would start threads
        end_s, before_s, work_s = (
            np.einsum("ck,kp->cp", counts, table[:-1, rows]).max(axis=0)
            for counts in (ends, before, work)
        )
        more = (batches - count) / cut[0]  # rounds
        walked_s[rows] = end_s + more * (end_s - before_s) - batches * work_s
    bubble = bubble.copy()
    bubble[walked] = walked_s
    return bubble


@lru_cache(maxsize=4096)
def _paths(cut):
    """Counts of each kind of seconds on the longest paths of an order, (paths, kinds),
    and in the work of its stages with a micro-batch, (stages, kinds).
    """
    plan = plan_of_cut(cut)
    schedule, count, layers, dense = map(int, cut[-4:])
    chunks = chunk_layers(layers, plan)
    # layers of each chunk, after the first dense ones and among them
    later, leading = (
        [[sum(low <= i < high for i in chunk) for chunk in stage] for stage in chunks]
        for low, high in ((dense, layers), (0, dense))
    )
    # (stages, chunks, passes, kinds)
    work = np.zeros((plan.pp, plan.interleave, 3, _KINDS))
    passes = np.arange(3)
    work[..., passes, passes] = np.array(later)[..., None]
    work[..., passes, passes + 3] = np.array(leading)[..., None]
    work[0, 0, passes, passes + 6] = 1
    work[plan.head_stage, -1, passes, passes + 9] = 1
    work[..., :2, 12] = 1  # wgrad is beside nothing
    rng = np.random.default_rng(0)
    seconds = 4.0 ** rng.uniform(-4, 1, (_DRAWS, _KINDS))
    # all beside layers is often small
    seconds[:, 6:] *= rng.random((_DRAWS, 1)) ** 4
    free = np.zeros((plan.pp, _DRAWS, _KINDS))  # the path to the end of each stage
    ends = {}
    steps = turns(_SCHEDULES[schedule], plan.pp, count, plan.interleave)
    for stage, slot, awaits, with_weights in steps:
        direction, chunk, _ = slot
        path = free[stage]
        if awaits:
            other = ends.pop(awaits)
            other[:, 13] -= 1
            waits = np.einsum("dk,dk->d", other - path, seconds) > 0
            path[waits] = other[waits]
        first = _PASSES.index(direction)
        for counts in work[stage, chunk, first : first + 1 + with_weights]:
            path += counts
        if direction != "weight":
            ends[stage, slot] = path.copy()
    last = (free * seconds).sum(axis=2).argmax(axis=0)
    longest = free[last, np.arange(_DRAWS)]
    return np.unique(longest, axis=0), np.unique(work.sum(axis=(1, 2)), axis=0)
