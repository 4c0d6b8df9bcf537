"""Which plan trains a model fastest on GPUs of several types? Stages, groups, degrees
and layer cuts, exactly.

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
from madmax_lib.planner.hetero.fleets import fleets
from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.planner.hetero.prices import MB_BYTES
from madmax_lib.planner.hetero.problem import HeteroProblem, given_or_made
from madmax_lib.planner.hetero.stages import Grid
from madmax_lib.planner.hetero.sweep import OPEN, Sweeper
from madmax_lib.planner.hetero.thresholds import Search

__all__ = ["alone", "plan"]

_EVERY_SIZE = 32  # GPUs up to which groups of every size are tried


def plan(
    given: HeteroProblem | None = None,
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

    given: the problem; if None, inputs are those of `problem`, such as profiles,
    hostfile, clusterfile, layers and global_batch. groups: GPUs that a device group may
    have; if None any number up to 32 GPUs, beyond: powers of two, all of a type and
    all. gap: share of the cost within which the answer is proven; 1e-9 is exact. A
    KeyboardInterrupt returns the best plan so far. Raises ValueError for bad input, and
    where no plan is feasible, with the reason.
    """
    given = given_or_made(given, inputs)
    if not 1e-12 <= require_number("gap", gap) < 1:
        raise ValueError(f"gap={gap} is not in 1e-12..1")
    gpus = given.fleets[0].size
    sizes = (
        _default_sizes(given)
        if groups is None
        else require_type("groups", groups, Sequence)
    )
    if not sizes or not all(is_whole(size, 1) for size in sizes) or max(sizes) > gpus:
        raise ValueError(
            f"groups={list(sizes)} must be sizes from 1 to the {gpus} GPUs of the "
            "cluster"
        )
    grid = Grid(gpus, sizes, given.prices)
    best = _search(given, grid, gap, progress, deep=False)
    if best.chain is not None and not PlanCost(best.chain.plan, given).fits():
        best = _search(given, grid, gap, progress, deep=True)
    if best.chain is None:
        if best.stopped:
            raise KeyboardInterrupt("interrupted before a first plan was found")
        raise ValueError(_reason(given, grid))
    costs = PlanCost(best.chain.plan, given)
    return Planned(
        costs,
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
    given = best.problem
    types = best.problem.fleets[0].types
    rows = []
    for name in types:
        nodes = tuple(node for node in given.nodes if node.device == name)
        part = replace(given, nodes=nodes, fleets=tuple(fleets(nodes)))
        try:
            own = plan(part, progress=False)
            rows.append(
                (name, part.fleets[0].size, own.cost_ms, len(own.stages), own, "")
            )
        except ValueError as error:
            rows.append((name, part.fleets[0].size, math.inf, 0, None, str(error)))
    rows.append(
        (
            "+".join(types),
            given.fleets[0].size,
            best.cost_ms,
            len(best.stages),
            best,
            "",
        )
    )
    table = pd.DataFrame(
        rows, columns=["types", "gpus", "cost_ms", "stages", "plan", "reason"]
    )
    table.attrs["provenance"] = best.provenance
    return table


def _default_sizes(given: HeteroProblem) -> list[int]:
    """Powers of two begin with the smaller of a node and the mean group of stages of
    one layer, as Metis has them.
    """
    fleet = given.fleets[0]
    layers = given.prices.layers
    if fleet.size <= _EVERY_SIZE:
        return list(range(1, fleet.size + 1))
    least = min(*(node.gpus for node in given.nodes), max(fleet.size // layers, 1))
    powers = [1 << k for k in range(fleet.size.bit_length()) if 1 << k >= least]
    return sorted({*powers, *np.diff(fleet.ends, prepend=0).tolist(), fleet.size})


def _search(
    given: HeteroProblem, grid: Grid, gap: float, progress: bool, *, deep: bool
) -> Search:
    """deep: activations of all micro-batches in flight count; else of one, which bounds
    the cost from below.
    """
    most_stages = min(grid.layers, given.fleets[0].size // int(grid.sizes[0]))
    spaces = []
    for batches, fleet in given.spaces():
        levels = min(batches, most_stages) if deep else 1
        spaces.append(
            (
                partial(Sweeper, given, grid, batches, fleet, levels),
                np.array([batches - 1.0, 1.0, 1.0]),
            )
        )
    with bar(desc="planning", unit="sweep", show=progress) as done:

        def tick(search: Search) -> None:
            done.update()
            done.set_postfix(best_ms=f"{1e3 * search.cost_s:.6g}", refresh=False)

        return Search(spaces, gap, tick).run()


def _reason(given: HeteroProblem, grid: Grid) -> str:
    """Why no plan is feasible: the plan that lacks the least memory and where, or that
    none is covered at all.
    """
    sweepers = (Sweeper(given, grid, *space, lacking=True) for space in given.spaces())
    chains = [
        chain for sweeper in sweepers if (chain := sweeper.chain(OPEN, bottleneck=True))
    ]
    if not chains:
        names = sorted({key[0] for key in given.prices.table})
        there = ". ".join(f"{name}: {given.prices.covered(name)}" for name in names)
        return (
            "no feasible plan: no groups, degrees and micro-batches are covered "
            f"by the profiles ({there})"
        )
    nearest = min(chains, key=lambda chain: chain.total).plan
    table = PlanCost(nearest, given).memory_table()
    worst = table.loc[(table["used_bytes"] - table["capacity_bytes"]).idxmax()]
    lacking_bytes = worst["used_bytes"] - worst["capacity_bytes"]
    return (
        f"no feasible plan: at least {lacking_bytes:.0f} bytes "
        f"({lacking_bytes / MB_BYTES:.0f} MB) are missing on a "
        f"{worst['device']} of {worst['capacity_bytes'] / MB_BYTES:.0f} MB, in stage "
        f"{worst['stage']} of "
        f"{len(nearest.device_groups)} with {nearest.batches} micro-batches"
    )
