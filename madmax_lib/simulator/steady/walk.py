"""Bubble of schedules that defer gradients of weights: the longest of the paths through
the order of their passes.

    pass begins = max(pass before on its stage ends, pass that it waits for ends)
    bubble = end of the last pass - work of the slowest stage

The end is the largest of many sums of the seconds of passes, one for each path, of which
few are ever the largest. Orders are walked with seconds drawn at random to find these;
a plan is then a product of matrices. With F, B and W of a stage (forward, dgrad, wgrad)
and equal stages the longest gives ZB-H1 a bubble of (pp - 1)(F + B - min(F, B, W))
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

_SCHEDULES = ("zero-bubble", "zbv", "dualpipev")
_PASSES = ("forward", "backward", "weight", "both")  # the last: both gradients
_ROUNDS = 3  # of pp micro-batches; what follows repeats the last one
# Seconds that orders are walked with, as multiples of a forward pass of a layer: powers
# of 4 between these. Forward, dgrad and wgrad of layer, embedding and head, then what
# other stages do not wait for, and what lies beside the layers.
_LOW = np.array([0, -0.2, -2.5, -5, -5, -5, -3, -3, -3, -4, -5])
_HIGH = np.array([0, 1, 0.6, -0.5, -0.5, -0.5, 1.5, 1.5, 1.5, 1, 0.5])
_DRAWS = 256  # find all but paths that are longer by 1 % of few steps
_NUDGE = 1e-6  # by which seconds are changed, one kind at a time, to count them


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
    schedule = sum(i * (plan.schedule == name) for i, name in enumerate(_SCHEDULES))
    cuts, index = cuts_of(plan, schedule, count, steps.shape.layers)
    deferred, index, *seconds = np.broadcast_arrays(
        plan.defers_weights, index, *seconds
    )
    index = index[deferred]
    seconds = np.array([part[deferred] for part in seconds])
    walked_s = np.empty(len(index))
    for number in np.unique(index):
        rows = index == number
        # (paths, plans) and (stages, plans); a product of matrices would start threads
        ends_s, work_s = (
            np.einsum("ck,kp->cp", counts, seconds[:, rows])
            for counts in _paths(cuts[number])
        )
        walked_s[rows] = ends_s.max(axis=0) - work_s.max(axis=0)
    bubble_s = np.zeros(deferred.shape)
    bubble_s[deferred] = walked_s
    return bubble_s


@lru_cache(maxsize=4096)
def _paths(cut):
    """How often each kind of seconds is on the longest paths of an order, (paths, 11),
    and in the work of its stages, (stages, 11).
    """
    exponents = np.random.default_rng(0).uniform(_LOW, _HIGH, (_DRAWS, len(_LOW)))
    # (kinds, 1 + kinds, draws): as drawn, then with each kind nudged
    nudges = np.insert(_NUDGE * np.eye(len(_LOW)), 0, 0, axis=1)
    seconds = (4.0**exponents).T[:, None] + nudges[:, :, None]
    walked = _walk(cut, seconds)
    # the end is a sum of whole numbers of them, as is the work of each stage
    counts = np.rint((walked[:, 1:] - walked[:, :1]) / _NUDGE)
    return np.unique(counts[0], axis=1).T, np.unique(counts[1:, :, 0], axis=0)


def _walk(cut, seconds):
    """End of the last pass of an order, and the work of each stage, (1 + pp, ...).

    seconds: (11, ...), of the forward pass, dgrad and wgrad of a layer, the embedding
    and the head, and those beside.
    """
    plan = plan_of_cut(cut)
    schedule, count, layers = map(int, cut[-3:])
    # (forward, dgrad, wgrad) of each, to which both gradients are added
    parts = seconds[:9].reshape(3, 3, *seconds.shape[1:])
    both = parts[:, 1:2] + parts[:, 2:]
    layer, embedding, head = np.append(parts, both, axis=1)
    hidden_s, exposed_s = seconds[9:]
    sizes = [[len(chunk) for chunk in stage] for stage in chunk_layers(layers, plan)]
    # (stages, chunks, passes, ...): layers of a chunk times seconds of a layer
    work = np.multiply.outer(np.array(sizes), layer)
    work[0, 0] += embedding
    work[plan.head_stage, -1] += head
    busy_s = work[:, :, :3].sum(axis=(1, 2)) + 2 * plan.interleave * exposed_s
    ends = {None: 0.0}
    free_s = [0.0] * plan.pp
    steps = turns(_SCHEDULES[schedule], plan.pp, count, plan.interleave)
    for stage, slot, awaits, with_weights in steps:
        direction, chunk, _ = slot
        kind = "both" if with_weights else direction
        work_s = work[stage, chunk, _PASSES.index(kind)]
        if direction != "weight":
            begun_s = np.maximum(free_s[stage] + hidden_s, ends.pop(awaits, 0.0))
            free_s[stage] = begun_s + exposed_s - hidden_s
        free_s[stage] = free_s[stage] + work_s
        ends[stage, slot] = free_s[stage]
    return np.array([np.max(free_s, axis=0), *(count * busy_s)])
