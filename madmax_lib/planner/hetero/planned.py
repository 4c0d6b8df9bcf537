"""What is a plan made of, and what can each GPU type do alone? The planner's answer, in ms and MB for its readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pandas as pd

from madmax_lib.planner.hetero.costs import PlanCost
from madmax_lib.planner.hetero.prices import MB_BYTES
from madmax_lib.planner.hetero.problem import HeteroProblem, problem
from madmax_lib.planner.hetero.stage_plan import HeteroPlan

__all__ = ["Planned", "cost", "cost_of", "planned_of"]


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan with its cost; nothing is proven of it by default.

    costs: the plan, its problem, and what it is charged for in seconds.
    bound_ms: no plan of the search space costs less.
    gap: share of the cost between the two.
    stopped: whether the search was interrupted.
    sweeps, cpu_s: effort of the search.
    """

    costs: PlanCost
    bound_ms: float = 0.0
    gap: float = 1.0
    stopped: bool = False
    sweeps: int = 0
    cpu_s: float = 0.0

    @property
    def plan(self) -> HeteroPlan:
        """The plan itself."""
        return self.costs.plan

    @property
    def problem(self) -> HeteroProblem:
        """What was searched."""
        return self.costs.problem

    @cached_property
    def cost_ms(self) -> float:
        """What `cost` says of the plan."""
        return 1e3 * self.costs.total_s()

    @cached_property
    def terms(self) -> dict[str, float]:
        """Terms of the cost in ms."""
        return {f"{name.removesuffix('_s')}_ms": 1e3 * value for name, value in self.costs.terms().items()}

    @property
    def samples(self) -> tuple[list[int], ...]:
        """Samples of a micro-batch that each replica of each stage takes."""
        return tuple(stage.samples for stage in self.costs.stages)

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per stage: ranks, GPU types, degrees, layers, samples of its replicas, its times."""
        costs = self.costs
        sends_s = [costs.send_s(*neighbours) for neighbours in pairwise(costs.stages)] + [0.0]
        rows = [
            {
                "stage": number,
                "first_rank": stage.start,
                "gpus": stage.end - stage.start,
                "types": "+".join(costs.fleet.types[kind] for kind in stage.distinct_types),
                "dp": stage.dp,
                "tp": stage.tp,
                "recompute": stage.recompute,
                "first_layer": stage.layers.start,
                "layers": stage.layer_count,
                "least_samples": min(stage.samples),
                "most_samples": max(stage.samples),
                "stage_ms": 1e3 * costs.stage_s(stage),
                "send_ms": 1e3 * send_s,
                "gradients_ms": 1e3 * costs.gradients_s(stage),
                "optimizer_ms": 1e3 * costs.optimizer_s(stage),
            }
            for number, (stage, send_s) in enumerate(zip(costs.stages, sends_s, strict=True))
        ]
        return pd.DataFrame(rows)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The fullest GPU of each type in each stage: stage, device, used_mb, capacity_mb."""
        table = self.costs.memory_table()
        sizes_mb = {"used_mb": table["used_bytes"] / MB_BYTES, "capacity_mb": table["capacity_bytes"] / MB_BYTES}
        return table[["stage", "device"]].assign(**sizes_mb)

    @property
    def provenance(self) -> dict:
        """What a picture or timeline of the plan was made from."""
        return {"plan": json.dumps(self.plan.as_dict()), "global_batch": self.problem.rules.global_batch}


def cost(plan: HeteroPlan | Mapping, **inputs) -> float:
    """The correct cost of a plan in ms: the one that `hetero.plan` minimises, infinite where a GPU lacks memory.

    plan: a HeteroPlan, or a mapping or table row with its fields, such as those that Metis proposes; one that loses
    layers or has empty stages is repaired first (`HeteroPlan.repaired`). inputs: those of `problem`. Raises ValueError
    for a plan that does not fit cluster or batch, and for a missing profile.
    """
    return cost_of(plan, problem(**inputs))


def cost_of(plan: HeteroPlan | Mapping, given: HeteroProblem) -> float:
    """`cost` for a problem that was read before."""
    return planned_of(plan, given).cost_ms


def planned_of(plan: HeteroPlan | Mapping, given: HeteroProblem) -> Planned:
    """A plan of one's own, repaired as in `cost`, with its cost, terms and tables."""
    return Planned(PlanCost(HeteroPlan.read(plan).repaired(given.prices.layers), given))
