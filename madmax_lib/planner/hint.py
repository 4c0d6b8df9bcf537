"""A better batch or number of devices, from small searches with neighbours of both.

A batch that few degrees of data parallelism divide, or that leaves a pipeline a handful
of micro-batches, costs more than any choice of plan; so does a number of nodes without
divisors.
"""

import math
from dataclasses import replace

import pandas as pd

from madmax_lib.planner.evaluate import SearchProblem, evaluate
from madmax_lib.planner.space import legal_degrees

_NEAR = 0.25  # how far a neighbour may be, as a share of the batch or the nodes
_MOST_NEIGHBOURS = 3  # beside the nearest: each costs a search
# Gains that are worth saying: a neighbour is a small change, twice the batch is another
# training and must save more.
_WORTH = 1.08
_WORTH_TWICE = 1.3
# choices that a neighbour takes from the best plans; pp and the micro-batch are free,
# since they are what another batch changes
_FROM_BEST = (
    "tp",
    "cp",
    "ep",
    "zero",
    "recompute",
    "schedule",
    "attention",
    "sequence_parallel",
    "context",
)


def hint(problem: SearchProblem, different: pd.DataFrame) -> str:
    """The gain of another batch per sample, or of fewer devices per step; empty if
    nothing is worth saying.

    different: plans of the search, in whose degrees the neighbours are searched.
    """
    case = problem.case
    if not len(different) or problem.objective != "time":
        return ""
    batch = case.global_batch
    nodes = case.cluster.nodes
    world = case.cluster.world_size
    step_s = different["step_s"].min()
    small = _small(problem, different)
    batches = _neighbours(batch, world)
    *gains, twice = (
        step_s / batch / (_least_s(small, near, nodes) / near)
        for near in [*batches, 2 * batch]
    )
    gain, best = max(zip(gains, batches, strict=True), default=(1.0, batch))
    if gain > _WORTH:
        return (
            f"batch {best:,} would be {gain:.2f}x faster per sample; it shares "
            f"the divisor {math.gcd(best, world):,} with the devices, {batch:,} only "
            f"{math.gcd(batch, world):,}"
        )
    # more nodes would of course be faster: only fewer are a finding
    near_nodes = _neighbours(nodes, 1 << nodes.bit_length())
    fewer = [near for near in near_nodes if near < nodes]
    gains = [step_s / _least_s(small, batch, near) for near in fewer]
    gain, best = max(zip(gains, fewer, strict=True), default=(1.0, nodes))
    if gain > _WORTH:
        devices = best * case.cluster.devices_per_node
        return f"{devices:,} devices would be {gain:.2f}x faster, as more degrees divide them"
    if twice > _WORTH_TWICE:
        why = "more samples share the fixed costs"
        if different["pp"].iloc[0] > 1:
            why = "each pipeline gets more micro-batches"
        return f"batch {2 * batch:,} would be {twice:.2f}x faster per sample, as {why}"
    return ""


def _small(problem, different):
    """The problem in the choices of its best plans, for one answer."""
    best = {name: tuple(different[name].unique().tolist()) for name in _FROM_BEST}
    space = replace(
        problem.space,
        **best,
        hybrid=(),
        overlap_gather=True,
        prefetch=1,
        usual_interleave=True,
        quantised=False,
    )
    return replace(problem, space=space, top=1)


def _least_s(problem, batch, nodes):
    """Seconds of the best plan, infinite if none fits."""
    case = problem.case
    cluster = replace(case.cluster, nodes=nodes)
    problem = replace(problem, case=replace(case, global_batch=batch, cluster=cluster))
    degrees, _ = legal_degrees(problem.space, problem.case)
    table = evaluate(problem, degrees).table
    return float(table["step_s"][0]) if table else math.inf


def _neighbours(number, world):
    """Numbers near by that have more divisors in common with a world than all that are
    nearer, nearest first.

    >>> _neighbours(1000, 1024), _neighbours(2401, 1200)
    ([992, 1024], [2400])
    """
    neighbours = []
    most = math.gcd(number, world)
    for far in range(1, int(_NEAR * number) + 1):
        for near in (number - far, number + far):
            if math.gcd(near, world) > most:
                neighbours.append(near)
                most = math.gcd(near, world)
    # the nearest, and the farthest, which share most
    return neighbours[:1] + neighbours[1:][-_MOST_NEIGHBOURS:]
