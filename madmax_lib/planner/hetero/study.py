"""What would a plan cost under each defect of Metis, and what can the GPU types do alone? Two tables for comparison.

The defects are those of `hetero.stage_plan.DEFECTS`, each alone. A plan comes as Metis gives it: lost layers and
empty stages count as such only under the defect that allows them, and are repaired for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from madmax_lib.planner.hetero import costs
from madmax_lib.planner.hetero.prices import fleets
from madmax_lib.planner.hetero.profiles import Profiles
from madmax_lib.planner.hetero.solve import Planned, Problem, plan_of
from madmax_lib.planner.hetero.stage_plan import DEFECTS, HeteroPlan

__all__ = ["alone", "defect_table"]


def defect_table(plan: HeteroPlan | Mapping, given: Problem, profiles: Profiles) -> pd.DataFrame:
    """Cost of a plan in ms, correct and with each defect: columns defect, what, cost_ms, highest_ms, fits.

    given: from `hetero.problem`. profiles: the same, one of which Metis takes for its global values; highest_ms differs
    from cost_ms where that choice matters (E5, E7): they are the extremes over all. Raises ValueError as `cost` does.
    """
    raw, layers = HeteroPlan.read(plan), given.prices.layers
    counted = int(plan.get("num_stage_used_for_cost", 1)) if isinstance(plan, Mapping | pd.Series) else 1
    fleet = given.fleet(raw.node_sequence)
    first_listed = sorted({(2 * p.optimizer_ms, p.batch_generator_ms) for p in profiles.table.values()})
    rows = []
    for name in ("", *DEFECTS):
        shape = raw.repaired(layers)
        if name == "E2":
            shape = raw.repaired(max(raw.layer_partition[-1], len(raw.device_groups)))
        elif name == "E3":
            shape = replace(raw, layer_partition=(*raw.layer_partition[:-1], layers))
        totals = []
        for values in first_listed if name in ("E5", "E7") else first_listed[:1]:
            rules = replace(given.rules, defect=name, counted_stages=counted, model_profile=values)
            totals.append(sum(costs.cost_terms(shape, given.prices, fleet, rules).values()))
        fits = costs.fits(shape, given.prices, fleet, rules)
        rows.append((name or "none", DEFECTS.get(name, "the correct cost"), min(totals), max(totals), fits))
    return pd.DataFrame(rows, columns=["defect", "what", "cost_ms", "highest_ms", "fits"])


def alone(best: Planned) -> pd.DataFrame:
    """The best plan of each GPU type alone, and last the given one of all: types, gpus, cost_ms, stages, plan, reason.

    Where no plan is feasible cost_ms is infinite and reason says why.
    """
    given, rows = best.problem, []
    types = given.fleets[0].types
    for name in types:
        nodes = tuple(node for node in given.nodes if node.device == name)
        part = replace(given, nodes=nodes, fleets=tuple(fleets(nodes)))
        try:
            found, reason = plan_of(part, progress=False), ""
        except ValueError as error:
            found, reason = None, str(error)
        cost_ms, stages = (found.cost_ms, len(found.stages)) if found else (float("inf"), 0)
        rows.append((name, part.fleets[0].size, cost_ms, stages, found, reason))
    rows.append(("+".join(types), given.fleets[0].size, best.cost_ms, len(best.stages), best, ""))
    table = pd.DataFrame(rows, columns=["types", "gpus", "cost_ms", "stages", "plan", "reason"])
    table.attrs["provenance"] = best.provenance
    return table
