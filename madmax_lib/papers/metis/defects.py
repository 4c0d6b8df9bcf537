"""What does each defect of Metis do to the cost of a plan?

The correct cost is that of `planner.hetero`. Each class below overrides one term of it
as the public release of Metis [Um et al., USENIX ATC 2024] counts, so that a defect can
be judged alone. A plan comes as Metis gives it: lost layers and empty stages stand only
under the defect that allows them, and are repaired for all others.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd

from madmax_lib.planner.hetero.costs import PlacedStage, PlanCost, shares
from madmax_lib.planner.hetero.prices import MB_BYTES, bits
from madmax_lib.planner.hetero.problem import HeteroProblem
from madmax_lib.planner.hetero.profiles import LayerProfile, Profiles
from madmax_lib.planner.hetero.stage_plan import HeteroPlan

__all__ = ["DEFECTS", "defect_table", "first_listed"]

_MEMORY_FACTOR = 5.0
_LEAST_BYTES = 0.001 * MB_BYTES


class _MetisCost(PlanCost):
    """The correct cost of a plan of Metis; subclasses count one term as Metis does.

    what: what is charged, in words. counted: stages in the cost that Metis printed.
    first_listed: the profile whose optimizer and batch generator Metis takes for all.
    """

    what = "the correct cost"

    def __init__(
        self,
        plan: HeteroPlan | Mapping,
        problem: HeteroProblem,
        first_listed: LayerProfile,
    ):
        read = HeteroPlan.read(plan)
        self.counted = (
            1 if plan is read else int(plan.get("num_stage_used_for_cost", 1))
        )
        self.first_listed = first_listed
        super().__init__(self.accepted(read, problem.prices.layers), problem)

    @staticmethod
    def accepted(plan: HeteroPlan, layers: int) -> HeteroPlan:
        """The plan that is charged."""
        return plan.repaired(layers)


class _UncountedStages(_MetisCost):
    what = "a later node order counts only the first stage of two-stage plans"

    @property
    def charged_stages(self) -> list[PlacedStage]:
        return self.stages[: self.counted]


class _LostLayers(_MetisCost):
    what = "layers that the balancer lost are not computed"

    @staticmethod
    def accepted(plan: HeteroPlan, layers: int) -> HeteroPlan:
        return plan.repaired(max(plan.layer_partition[-1], len(plan.device_groups)))

    def check_layers(self) -> None:
        if self.plan.layer_partition[-1] > self.prices.layers:
            super().check_layers()


class _EmptyStages(_MetisCost):
    what = "stages without layers are accepted"

    @staticmethod
    def accepted(plan: HeteroPlan, layers: int) -> HeteroPlan:
        return replace(plan, layer_partition=(*plan.layer_partition[:-1], layers))

    def check_layers(self) -> None:
        if any(end < start for start, end in pairwise(self.plan.layer_partition)):
            super().check_layers()


class _SpeedOfFirstGpu(_MetisCost):
    what = "a replica of mixed types runs at the speed of its first GPU"

    def replica_types(self, types: np.ndarray) -> np.ndarray:
        return types[:, :1]


class _FirstListedProfile(_MetisCost):
    what = "optimizer and batch generator come from whichever profile is listed first"

    def generator_s(self, stage: PlacedStage) -> float:
        return self.first_listed.batch_generator_ms / 1e3

    def whole_optimizer_s(self, stage: PlacedStage) -> float:
        return 2 * self.first_listed.optimizer_ms / 1e3


# E5 as the study has it, which counts the values of the first listed profile too
class _LinksInside(_FirstListedProfile):
    what = "links between nodes are as fast as inside, sends count elements for bytes"

    def __init__(self, *given):
        super().__init__(*given)
        nodes = [
            replace(node, inter_bytes_per_s=node.intra_bytes_per_s)
            for node in self.fleet.nodes
        ]
        self.fleet = replace(self.fleet, nodes=tuple(nodes))

    def send_s(self, stage: PlacedStage, after: PlacedStage) -> float:
        return super().send_s(stage, after) / self.rules.bytes_per_element


class _MemoryOfFirstType(_MetisCost):
    what = (
        "memory: five times the table of the first type, against the sum over a "
        "stage's GPUs"
    )

    def fits(self) -> bool:
        kinds = self.fleet.type_of(np.arange(self.fleet.size))
        return all(
            _LEAST_BYTES + self._needed_bytes(stage, kinds)
            <= self.fleet.of_runs("memory_bytes")[kinds[stage.start : stage.end]].sum()
            for stage in self.stages
        )

    def _needed_bytes(self, stage: PlacedStage, kinds: np.ndarray) -> float:
        samples = self.rules.global_batch // self.plan.batches
        if len(stage.distinct_types) == 1:
            pieces = [max(samples // stage.dp, 1)]
        else:  # the batch is split over replicas as if the whole cluster were one stage
            first = kinds[:: len(kinds) // stage.dp][: stage.dp]
            weights = [
                1 / self.pieces(stage, kind, 1)[0].layer_s.sum() for kind in first
            ]
            pieces = [
                piece for held in shares(samples, weights) for piece in bits(held)
            ]
        tables = [
            self.pieces(stage, 0, piece)[0].memory_bytes[stage.layers]
            for piece in pieces
        ]
        return _MEMORY_FACTOR * sum(table.sum() for table in tables)


DEFECTS = {
    "E1": _UncountedStages,
    "E2": _LostLayers,
    "E3": _EmptyStages,
    "E4": _SpeedOfFirstGpu,
    "E5": _LinksInside,
    "E6": _MemoryOfFirstType,
    "E7": _FirstListedProfile,
}


def defect_table(
    plan: HeteroPlan | Mapping, problem: HeteroProblem, profiles: Profiles
) -> pd.DataFrame:
    """Cost of a plan in ms, correct and with each defect: columns defect, what,
    cost_ms, highest_ms, fits.

    problem: from `hetero.problem`. profiles: the same, one of which Metis takes for its
    global values; highest_ms differs from cost_ms where that choice matters (E5, E7):
    they are the extremes over all. Raises ValueError as `hetero.cost` does.
    """
    rows = []
    for name, cost in {"none": _MetisCost, **DEFECTS}.items():
        costs = [cost(plan, problem, profile) for profile in first_listed(profiles)]
        totals_ms = [1e3 * sum(one.terms().values()) for one in costs]
        rows.append((name, cost.what, min(totals_ms), max(totals_ms), costs[0].fits()))
    return pd.DataFrame(
        rows, columns=["defect", "what", "cost_ms", "highest_ms", "fits"]
    )


def first_listed(profiles: Profiles) -> list[LayerProfile]:
    """The profiles a folder may list first, one of all with the same optimizer and
    batch generator.
    """
    distinct: dict[tuple[float, float], LayerProfile] = {}
    for profile in profiles.table.values():
        distinct.setdefault((profile.optimizer_ms, profile.batch_generator_ms), profile)
    return list(distinct.values())
