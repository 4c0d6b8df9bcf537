"""Cost of a plan with each defect of Metis alone.

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

from madmax_lib.planner.hetero import HeteroPlan, HeteroProblem
from madmax_lib.planner.hetero.costs import PlanCost, shares
from madmax_lib.planner.hetero.prices import MB_BYTES, bits
from madmax_lib.planner.hetero.profiles import LayerProfile, Profiles

# of the release: weights to states, and what even an empty stage demands
_MEMORY_FACTOR = 5.0
_LEAST_BYTES = 0.001 * MB_BYTES


class _MetisCost(PlanCost):
    """The correct cost of a plan of Metis; subclasses count one term as Metis does.

    what: what is charged, in words. counted: stages in the cost that Metis printed.
    first_listed: the profile whose optimizer and batch generator Metis takes for all.
    """

    what = "the correct cost"

    def __init__(self, plan, problem, first_listed):
        parsed = HeteroPlan.read(plan)
        self.counted = 1
        if plan is not parsed:  # a row that Metis printed
            self.counted = int(plan.get("num_stage_used_for_cost", 1))
        self.first_listed = first_listed
        super().__init__(self.accepted(parsed, problem.prices.layers), problem)

    @staticmethod
    def accepted(plan, layers):
        """Plan that is charged."""
        return plan.repaired(layers)


class _UncountedStages(_MetisCost):
    what = "a later node order counts only the first stage of two-stage plans"

    @property
    def charged_stages(self):
        return self.stages[: self.counted]


class _LostLayers(_MetisCost):
    what = "layers that the balancer lost are not computed"

    @staticmethod
    def accepted(plan, layers):
        # as many layers as the plan has; an empty stage still gets one
        return plan.repaired(max(plan.layer_partition[-1], len(plan.device_groups)))

    def check_layers(self):
        if self.plan.layer_partition[-1] > self.prices.layers:
            super().check_layers()


class _EmptyStages(_MetisCost):
    what = "stages without layers are accepted"

    @staticmethod
    def accepted(plan, layers):
        # lost layers go to the last stage, empty stages stay
        return replace(plan, layer_partition=(*plan.layer_partition[:-1], layers))

    def check_layers(self):
        if any(end < start for start, end in pairwise(self.plan.layer_partition)):
            super().check_layers()


class _SpeedOfFirstGpu(_MetisCost):
    what = "a replica of mixed types runs at the speed of its first GPU"

    def replica_types(self, types):
        return types[:, :1]


class _FirstListedProfile(_MetisCost):
    what = "optimizer and batch generator come from whichever profile is listed first"

    def generator_s(self, stage):
        return self.first_listed.batch_generator_ms / 1e3

    def whole_optimizer_s(self, stage):
        # Metis stores the time twice
        return 2 * self.first_listed.optimizer_ms / 1e3


# E5 as the study has it, which counts the values of the first listed profile too
class _LinksInside(_FirstListedProfile):
    what = "links between nodes are as fast as inside, sends count elements for bytes"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        nodes = [
            replace(node, inter_bytes_per_s=node.intra_bytes_per_s)
            for node in self.fleet.nodes
        ]
        self.fleet = replace(self.fleet, nodes=tuple(nodes))

    def send_s(self, stage, after):
        return super().send_s(stage, after) / self.rules.bytes_per_element


class _MemoryOfFirstType(_MetisCost):
    what = (
        "memory: five times the table of the first type, against the sum over a "
        "stage's GPUs"
    )

    def fits(self):
        kinds = self.fleet.type_of(np.arange(self.fleet.size))
        gpu_bytes = self.fleet.of_runs("memory_bytes")[kinds]
        return all(
            _LEAST_BYTES + self._needed_bytes(stage, kinds)
            <= gpu_bytes[stage.start : stage.end].sum()
            for stage in self.stages
        )

    def _needed_bytes(self, stage, kinds):
        samples = self.rules.global_batch // self.plan.batches
        if len(stage.distinct_types) == 1:
            pieces = [max(samples // stage.dp, 1)]
        else:
            # The batch is split over replicas as if the whole cluster were one stage:
            # one block of GPUs per replica, by the speed of its first GPU.
            first = kinds[:: len(kinds) // stage.dp][: stage.dp]
            speeds = [
                1 / self.pieces(stage, kind, 1)[0].layer_s.sum() for kind in first
            ]
            # profiles exist for powers of two: the set bits of a replica's batch
            pieces = [
                piece for batch in shares(samples, speeds) for piece in bits(batch)
            ]
        return _MEMORY_FACTOR * sum(
            self.pieces(stage, 0, piece)[0].memory_bytes[stage.layers].sum()
            for piece in pieces
        )


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
    """Profiles that a folder may list first, one of all with the same optimizer and
    batch generator.
    """
    distinct = {}
    for profile in profiles.table.values():
        distinct.setdefault((profile.optimizer_ms, profile.batch_generator_ms), profile)
    return list(distinct.values())
