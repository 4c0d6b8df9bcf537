"""The fastest plan on GPUs of several types: stages, groups, degrees and layer cuts,
exactly.

The correct counterpart of Metis [Um et al., USENIX ATC 2024]: `plan` finds the cheapest
plan by the cost that `hetero.costs` defines, by dynamic programming over layers and
ranks under thresholds for the cost's maxima. Prices come from profiles in Metis' format
or from the simulator.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from madmax_lib.base.fields import is_whole, require_number, require_type
from madmax_lib.base.progress import bar
from madmax_lib.planner.hetero.costs import PlanCost
from madmax_lib.planner.hetero.fleets import HeteroProblem, fleets, problem_from
from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.planner.hetero.prices import MB_BYTES
from madmax_lib.planner.hetero.stages import Grid
from madmax_lib.planner.hetero.sweep import OPEN, Sweeper
from madmax_lib.planner.hetero.thresholds import Search

_EVERY_SIZE = 32  # GPUs up to which groups of every size are tried


def plan(
    problem: HeteroProblem | None = None,
    *,
    groups: Sequence[int] | None = None,
    gap: float = 1e-9,
    progress: bool = True,
    **inputs,
) -> Planned:
    """The cheapest plan over all orders of GPU types, stages, groups, (dp, tp), layer
    cuts and micro-batches.

    With at most 24 orders of the nodes all of these, so that stages of one type need
    not be neighbours.

    problem: if None, that of the inputs of `hetero.problem`, such as profiles, hostfile,
    clusterfile, layers and global_batch. groups: GPUs that a device group may
    have; if None any number up to 32 GPUs, beyond: powers of two, all of a type and
    all. gap: share of the cost within which the answer is proven; 1e-9 is exact. A
    KeyboardInterrupt returns the best plan so far. Raises ValueError for bad input, and
    where no plan is feasible, with the reason.
    """
    problem = problem_from(problem, inputs)
    if not 1e-12 <= require_number("gap", gap) < 1:
        raise ValueError(f"gap={gap} is not in 1e-12..1")
    gpus = problem.fleets[0].size
    sizes = require_type("groups", groups, Sequence, lambda: _default_sizes(problem))
    if not sizes or not all(is_whole(size, 1) for size in sizes) or max(sizes) > gpus:
        raise ValueError(
            f"groups={list(sizes)} must be sizes from 1 to the {gpus} GPUs of the "
            "cluster"
        )
    grid = Grid(gpus, sizes, problem.prices)
    # Activations of one micro-batch in flight bound those of all from below: if the
    # best plan fits with all of them too, it is the best of the problem.
    best = _search(problem, grid, gap, progress, deep=False)
    if best.chain is not None and not PlanCost(best.chain.plan, problem).fits():
        best = _search(problem, grid, gap, progress, deep=True)
    if best.chain is None:
        if best.stopped:
            raise KeyboardInterrupt("interrupted before a first plan was found")
        raise ValueError(_reason(problem, grid))
    costs = PlanCost(best.chain.plan, problem)
    return Planned(
        costs,
        # rounding may put the bound a bit above the cost
        bound_ms=1e3 * min(best.bound_s, costs.total_s()),
        gap=best.gap,
        stopped=best.stopped,
        sweeps=best.sweeps,
    )


def alone(best: Planned) -> pd.DataFrame:
    """The best plan of each GPU type alone, and last the given one of all: types, gpus,
    cost_ms, stages, plan, reason.

    Where no plan is feasible cost_ms is infinite and reason says why.
    """
    problem = best.problem
    types = problem.fleets[0].types

    def row(names, gpus, planned, reason=""):
        return {
            "types": names,
            "gpus": gpus,
            "cost_ms": planned.cost_ms if planned else math.inf,
            "stages": len(planned.stages) if planned else 0,
            "plan": planned,
            "reason": reason,
        }

    rows = []
    for name in types:
        nodes = tuple(node for node in problem.nodes if node.device == name)
        part = replace(problem, nodes=nodes, fleets=tuple(fleets(nodes)))
        gpus = part.fleets[0].size
        try:
            rows.append(row(name, gpus, plan(part, progress=False)))
        except ValueError as error:
            rows.append(row(name, gpus, None, str(error)))
    rows.append(row("+".join(types), problem.fleets[0].size, best))
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = best.provenance
    return table


def _default_sizes(problem):
    """Sizes of groups: on few GPUs all; else those of a type, all, and powers of two from
    the smaller of a node and the mean group of stages of one layer, as Metis has them.
    """
    fleet = problem.fleets[0]
    layers = problem.prices.layers
    if fleet.size <= _EVERY_SIZE:
        return list(range(1, fleet.size + 1))
    least = min(*(node.gpus for node in problem.nodes), max(fleet.size // layers, 1))
    powers = [1 << k for k in range(fleet.size.bit_length()) if 1 << k >= least]
    return sorted({*powers, *np.diff(fleet.ends, prepend=0).tolist(), fleet.size})


def _search(problem, grid, gap, progress, *, deep):
    """Search over all orders of types and numbers of micro-batches.

    deep: activations of all micro-batches in flight count; else of one, which bounds
    the cost from below.
    """
    most_stages = min(grid.layers, problem.fleets[0].size // int(grid.sizes[0]))
    spaces = []
    for batches, fleet in problem.spaces():
        # a stage has as many micro-batches in flight as stages are left, at most all
        levels = min(batches, most_stages) if deep else 1
        sweeper = partial(Sweeper, problem, grid, batches, fleet, levels)
        # how often each maximum counts: periods, gradients, optimizer
        spaces.append((sweeper, np.array([batches - 1.0, 1.0, 1.0])))
    with bar(desc="planning", unit="sweep", show=progress) as done:

        def tick(search):
            done.update()
            done.set_postfix(best_ms=f"{1e3 * search.cost_s:.6g}", refresh=False)

        return Search(spaces, gap, tick).run()


def _reason(problem, grid):
    """Why no plan is feasible: the plan that lacks the least memory and where, or that
    none is covered at all.
    """
    chains = []
    for space in problem.spaces():
        # the plan whose fullest GPU lacks the least bytes
        sweeper = Sweeper(problem, grid, *space, lacking=True)
        if chain := sweeper.chain(OPEN, bottleneck=True):
            chains.append(chain)
    if not chains:
        prices = problem.prices
        names = sorted({key[0] for key in prices.table})
        there = ". ".join(f"{name}: {prices.covered(name)}" for name in names)
        return (
            "no feasible plan: no groups, degrees and micro-batches are covered "
            f"by the profiles ({there})"
        )
    nearest = min(chains, key=lambda chain: chain.total).plan
    table = PlanCost(nearest, problem).memory_table()
    worst = table.loc[(table["used_bytes"] - table["capacity_bytes"]).idxmax()]
    lacking_bytes = worst["used_bytes"] - worst["capacity_bytes"]
    return (
        f"no feasible plan: at least {lacking_bytes:.0f} bytes "
        f"({lacking_bytes / MB_BYTES:.0f} MB) are missing on a "
        f"{worst['device']} of {worst['capacity_bytes'] / MB_BYTES:.0f} MB, in stage "
        f"{worst['stage']} of "
        f"{len(nearest.device_groups)} with {nearest.batches} micro-batches"
    )
