"""Is the batch or the number of devices the problem? Small searches with neighbours of
both.

A batch that few degrees of data parallelism divide, or that leaves a pipeline a handful
of micro-batches, costs more than any choice of plan; so does a number of nodes without
divisors.
"""

import math
from dataclasses import replace

import pandas as pd

from madmax_lib.planner.evaluate import SearchProblem, evaluate
from madmax_lib.planner.space import legal_degrees

__all__ = ["hint"]

# batches and numbers of nodes this close, so many of each
_NEAR = 0.25
_TRIED = 3
# gains that are worth saying, of a neighbour and of twice the batch
_WORTH = 1.08
_WORTH_TWICE = 1.3


def hint(problem: SearchProblem, different: pd.DataFrame) -> str:
    """What another batch would gain per sample, or fewer devices per step; empty if
    nothing is worth saying.

    different: plans of the search, in whose degrees the neighbours are searched.
    """
    case = problem.case
    if not len(different) or problem.objective != "time":
        return ""
    batch = case.global_batch
    nodes = case.cluster.nodes
    step_s = different["step_s"].min()
    small = replace(problem, space=_narrow(problem, different), top=1)
    per_sample = {
        near: _least_s(small, near, nodes) / near
        for near in [*_neighbours(batch, case.cluster.world_size), 2 * batch]
    }
    gains = {near: step_s / batch / seconds for near, seconds in per_sample.items()}
    twice = gains.pop(2 * batch)
    best = max(gains, key=gains.get, default=batch)
    if gains.get(best, 1.0) > _WORTH:
        return (
            f"batch {best:,} would be {gains[best]:.2f}x faster per sample: "
            f"{_divides(case, batch, best)}"
        )
    fewer = {
        near: step_s / _least_s(small, batch, near)
        for near in _neighbours(nodes, 1 << nodes.bit_length())
        if near < nodes
    }
    best = max(fewer, key=fewer.get, default=nodes)
    if fewer.get(best, 1.0) > _WORTH:
        devices = best * case.cluster.devices_per_node
        return (
            f"{devices:,} devices would be {fewer[best]:.2f}x faster: more "
            "degrees divide them"
        )
    if twice > _WORTH_TWICE:
        why = (
            "more micro-batches for each pipeline"
            if different["pp"].iloc[0] > 1
            else "fixed costs for more samples"
        )
        return f"batch {2 * batch:,} would be {twice:.2f}x faster per sample: {why}"
    return ""


def _narrow(problem: SearchProblem, different: pd.DataFrame):
    """Its space in the choices of the best plans; pp and the micro-batch are free."""
    names = (
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
    found = {name: tuple(dict.fromkeys(different[name].tolist())) for name in names}
    usual = {
        "hybrid": (),
        "overlap_gather": (True,),
        "reduce_fp32": (False, True),
        "prefetch": (1,),
    }
    return replace(
        problem.space, **found | usual, usual_interleave=True, quantised=False
    )


def _least_s(problem: SearchProblem, batch: int, nodes: int) -> float:
    """Seconds of the best plan, infinite if none fits."""
    case = problem.case
    cluster = (
        case.cluster
        if nodes == case.cluster.nodes
        else replace(case.cluster, nodes=nodes)
    )
    problem = replace(problem, case=replace(case, global_batch=batch, cluster=cluster))
    table = evaluate(problem, legal_degrees(problem.space, problem.case)[0]).table
    return float(table["step_s"][0]) if table else float("inf")


def _neighbours(number: int, world: int) -> list[int]:
    """Numbers near by that have more divisors in common with a world than all that are
    nearer, nearest first.

    >>> _neighbours(1000, 1024), _neighbours(2401, 1200)
    ([992, 1024], [2400])
    """
    found = []
    most = math.gcd(number, world)
    for far in range(1, int(_NEAR * number) + 1):
        for near in (number - far, number + far):
            if math.gcd(near, world) > most:
                found = [*found, near]
                most = math.gcd(near, world)
    return found[:1] + found[1:][-_TRIED:]


def _divides(case, batch: int, better: int) -> str:
    world = case.cluster.world_size
    shared = math.gcd(better, world), math.gcd(batch, world)
    return (
        f"it shares the divisor {shared[0]:,} with the devices, {batch:,} only "
        f"{shared[1]:,}"
    )
