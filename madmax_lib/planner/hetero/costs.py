"""Cost of a heterogeneous plan: the one correct definition, rank by rank.

A stage has dp replicas of tp consecutive ranks. A micro-batch of global_batch / batches
samples is split over the replicas in proportion to their speed; a replica waits for the
slowest GPU type in it and works on its samples in pieces of powers of two, which are
what profiles hold. In seconds:

    cost = (batches - 1) max period + sum periods + batches (last sync + first batch
    generator)
           + max gradient all-reduce + max optimizer + all-reduce of a table that first
           and last stage share
    period = stage + 2 send, and 2 send of the stage before where messages wait for it

A micro-batch takes a stage its passes and the message to the next stage and back. Under
1F1B no period is longer: from any stage on, as many micro-batches as stages are left go
round at once, each there and back. Processes on CPUs slow each other down while they
compute, by `PriceList.crowding` if all do. The plan is infeasible, its cost infinite, where a
GPU lacks memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

import numpy as np
import pandas as pd

from madmax_lib.planner.hetero.fleets import HeteroProblem, Span
from madmax_lib.planner.hetero.prices import Price
from madmax_lib.planner.hetero.stage_plan import HeteroPlan


def shares(samples: int, weights: Sequence[float]) -> list[int]:
    """Samples of each replica in proportion to its weight, by largest remainder; ties
    go to the first.

    >>> shares(8, [1, 1, 2])
    [2, 2, 4]
    """
    exact = samples * (np.asarray(weights) / np.sum(weights))
    counts = np.floor(exact)
    # Rounded to 9 digits, remainders that are equal but for rounding errors tie.
    order = np.argsort(-np.round(exact - counts, 9), kind="stable")
    left = samples - int(counts.sum())
    counts[order[:left]] += 1
    return counts.astype(int).tolist()


@dataclass(frozen=True, eq=False)
class PlacedStage:
    """A stage laid over the ranks."""

    # ranks and layers count from 0
    start: int  # its first rank
    end: int  # the rank after its last
    dp: int
    tp: int
    recompute: str
    layers: slice  # the slice of the model's layers
    types: np.ndarray  # (dp, tp) numbers of GPU types, a row per replica
    samples: list[int]  # of a micro-batch, of each replica

    @property
    def distinct_types(self) -> list[int]:
        """GPU types of the stage, each once."""
        return np.unique(self.types).tolist()

    @property
    def span(self) -> Span:
        """Its first and last type, and its GPUs."""
        return Span(self.types.min(), self.types.max(), self.end - self.start)

    @property
    def layer_count(self) -> int:
        """Layers of the stage."""
        return self.layers.stop - self.layers.start

    def replicas(self) -> set[tuple[tuple[int, ...], int]]:
        """Distinct (types, samples) of the replicas."""
        return {
            (tuple(row), samples)
            for row, samples in zip(self.types.tolist(), self.samples, strict=True)
        }


class PlanCost:
    """One plan of a problem: what it is charged for, and what memory it takes.

    plan, problem: what it was made of; fleet: the cluster in the plan's order; stages:
    laid over its ranks. Raises ValueError for a plan that does not fit cluster, layers
    or batch, or that needs a profile there is not.
    """

    least_layers = 1  # of a stage

    def __init__(self, plan: HeteroPlan, problem: HeteroProblem):
        self.plan = plan
        self.problem = problem
        self.prices = problem.prices
        self.rules = problem.rules
        self.fleet = problem.fleet(plan.node_sequence)
        self.check()
        starts = accumulate(plan.device_groups, initial=0)
        self.stages = [
            self._placed(number, *ranks)
            for number, ranks in enumerate(pairwise(starts))
        ]

    def total_s(self) -> float:
        """Sum of the terms; infinite where a GPU lacks memory."""
        return float(sum(self.terms().values())) if self.fits() else math.inf

    def terms(self) -> dict[str, float]:
        """Terms of the cost in seconds, see the head of the module."""
        stages = self.stages
        batches = self.plan.batches
        times_s = np.array([self.stage_s(stage) for stage in stages])
        # activations go to the next stage, their gradients come back
        sends_s = 2 * np.array(self.sends_s())
        periods_s = times_s + sends_s
        # Where messages wait for their receiver, a stage stops for those of the one
        # before it too; the last of sends_s is 0.
        longest_s = max(periods_s + self.prices.meets * np.roll(sends_s, 1))
        # 1F1B: the first micro-batch passes all stages, each other one follows a period
        # of the slowest stage later; what messages add to it is a term of its own
        execution_s = (batches - 1) * max(times_s) + sum(times_s)
        passes_s = (batches - 1) * longest_s + sum(periods_s)
        # While a process computes, this share of the others does:
        #   (work of all / passes - 1) / others
        work_s = batches * times_s @ self.plan.device_groups
        busy = (work_s / passes_s - 1) / max(self.fleet.size - 1, 1)
        return {
            "execution_s": execution_s * (1 + self.prices.crowding * busy),
            "sync_s": batches * self.sync_s(stages[-1]),
            "send_s": passes_s - execution_s,
            "generator_s": batches * self.generator_s(stages[0]),
            "gradients_s": max(map(self.gradients_s, stages)),
            "tied_s": self.tied_s(stages[-1]) if len(stages) > 1 else 0.0,
            "optimizer_s": max(map(self.optimizer_s, stages)),
        }

    def fits(self) -> bool:
        """Whether every GPU has enough memory."""
        if not self.rules.memory_factor:  # no limit
            return True
        table = self.memory_table()
        return bool((table["used_bytes"] <= table["capacity_bytes"]).all())

    def memory_table(self) -> pd.DataFrame:
        """The fullest GPU of each type in each stage: columns stage, device,
        used_bytes, capacity_bytes.

        A GPU holds what its type's prices say at the largest piece of its replica's
        samples (at least one), and what lives between forward and backward pass for
        each micro-batch in flight: as many as stages follow, itself included (1F1B).
        """
        capacity_bytes = self.fleet.of_runs("memory_bytes")
        rows = []
        for number, stage in enumerate(self.stages):
            # 1F1B fills the pipeline before the first backward pass
            in_flight = min(self.plan.batches, len(self.stages) - number)
            for kind in stage.distinct_types:
                replica_bytes = [
                    self._gpu_bytes(stage, kind, samples, in_flight)
                    for types, samples in stage.replicas()
                    if kind in types
                ]
                rows.append(
                    {
                        "stage": number,
                        "device": self.fleet.types[kind],
                        "used_bytes": self.rules.memory_factor * max(replica_bytes),
                        "capacity_bytes": capacity_bytes[kind],
                    }
                )
        return pd.DataFrame(rows)

    def check(self) -> None:
        """Raises ValueError where the plan does not tile cluster, layers and batch."""
        plan = self.plan
        fleet = self.fleet
        rules = self.rules
        if sum(plan.device_groups) != fleet.size:
            raise ValueError(
                f"device_groups hold {sum(plan.device_groups)} GPUs, the cluster has "
                f"{fleet.size}"
            )
        if plan.batches < 1 or rules.global_batch % plan.batches:
            raise ValueError(
                f"batches={plan.batches} does not divide "
                f"global_batch={rules.global_batch}"
            )
        samples = rules.global_batch // plan.batches
        for number, (dp, tp) in enumerate(plan.strategies):
            if dp > samples:
                raise ValueError(
                    f"stage {number}: dp={dp} exceeds the {samples} samples of a "
                    "micro-batch"
                )
            # first rank of each replica: tp consecutive ones make a replica
            begins = sum(plan.device_groups[:number]) + tp * np.arange(dp)
            if rules.tp_in_node and not fleet.in_one_node(begins, begins + tp).all():
                raise ValueError(
                    f"stage {number}: tp={tp} reaches beyond a node, which "
                    "tp_in_node excludes"
                )
        cuts = list(plan.layer_partition)
        layers = self.prices.layers
        if (cuts[0], cuts[-1]) != (0, layers) or min(np.diff(cuts)) < self.least_layers:
            raise ValueError(
                f"layer_partition {cuts} does not tile {layers} layers, embedding and "
                f"head included, with {self.least_layers} or more a stage"
            )

    def pieces(self, stage: PlacedStage, kind: int, samples: int) -> list[Price]:
        """Prices of the pieces of some samples on a type number at the degree and
        recompute of a stage.
        """
        return self.prices.get(
            self.fleet.types[kind], stage.tp, stage.recompute, samples
        )

    def stage_s(self, stage: PlacedStage) -> float:
        """Time of a micro-batch in a stage."""
        return self._slowest_s(stage, lambda price: price.layer_s[stage.layers].sum())

    def sync_s(self, stage: PlacedStage) -> float:
        """Time of a micro-batch outside of the layers."""
        return self._slowest_s(stage, lambda price: price.sync_s)

    def generator_s(self, stage: PlacedStage) -> float:
        """Time to load a micro-batch."""
        return self._slowest_s(stage, lambda price: price.generator_s)

    def sends_s(self) -> list[float]:
        """Time of each stage to send to the next one; the last has none."""
        neighbours = pairwise(self.stages)
        return [*starmap(self.send_s, neighbours), 0.0]

    def send_s(self, stage: PlacedStage, after: PlacedStage) -> float:
        """Time to send the activations of the largest replica to the next stage, or
        their gradients back.
        """
        inside = self.fleet.in_one_node(stage.start, after.end)
        # the slower end of a message sets its rate
        next_rate = self.fleet.least["inter_bytes_per_s"][after.span[:2]]
        size_bytes = max(stage.samples) * self.rules.sample_bytes
        return float(
            self.fleet.send_s(size_bytes, stage.span, stage.tp, inside, next_rate)
        )

    def gradients_s(self, stage: PlacedStage) -> float:
        """Ring all-reduce of the gradients over the replicas."""
        size_bytes = self.prices.parameters_bytes[stage.layers].sum()
        if len(self.stages) == 1:  # embedding and head are then one table
            size_bytes -= self.prices.tied_bytes
        one_node = self.fleet.in_one_node(stage.start, stage.end)
        byte_s = self.fleet.ring_s(stage.span, stage.tp, one_node)
        # t = 2 (dp - 1) / dp x size / bandwidth, of a tp-th of the gradients
        # [Patarasuk & Yuan 2009]
        return float(2 * (stage.dp - 1) / stage.dp * byte_s / stage.tp * size_bytes)

    def tied_s(self, stage: PlacedStage) -> float:
        """All-reduce of a table that the last stage shares with the first."""
        if not self.prices.tied_bytes:
            return 0.0
        gpus = stage.end - stage.start
        return float(self.fleet.ends_s(self.prices.tied_bytes, gpus, stage.tp))

    def optimizer_s(self, stage: PlacedStage) -> float:
        """Update of the layers of a stage: tp ranks share it, layers count alike."""
        share = stage.layer_count / self.prices.layers
        whole_s = max(
            self.prices.optimizer_s[self.fleet.types[kind]]
            for kind in stage.distinct_types
        )
        return whole_s / stage.tp * share

    def _placed(self, number, start, end):
        plan = self.plan
        dp, tp = plan.strategies[number]
        recompute = plan.recompute[number]
        layers = slice(*plan.layer_partition[number : number + 2])
        # (dp, tp): a replica is a row of consecutive ranks
        types = self.fleet.type_of(np.arange(start, end)).reshape(dp, tp)
        micro_batch = self.rules.global_batch // plan.batches
        samples = shares(micro_batch, self.speeds(types, tp, recompute))
        return PlacedStage(start, end, dp, tp, recompute, layers, types, samples)

    def speeds(self, types: np.ndarray, tp: int, recompute: str) -> list[float]:
        """Speeds of the replicas of (dp, tp) types, in proportion to which they share
        samples.
        """
        # equal replicas need no profile at batch 1
        if len(types) == 1 or types.min() == types.max():
            return [1.0] * len(types)
        # of a sample through all layers; a replica waits for its slowest type
        model_s = {}
        for kind in np.unique(types):
            price, *_ = self.prices.get(self.fleet.types[kind], tp, recompute, 1)
            model_s[kind] = price.layer_s.sum()
        return [1 / max(model_s[kind] for kind in row) for row in types.tolist()]

    def _slowest_s(self, stage, seconds):
        """The largest sum over the pieces of a micro-batch, of all replicas and their
        types.
        """
        work = set()
        for types, samples in stage.replicas():
            if samples:  # a replica without samples does not compute
                work |= {(kind, samples) for kind in types}
        return max(
            sum(map(seconds, self.pieces(stage, kind, samples)))
            for kind, samples in sorted(work)
        )

    def _gpu_bytes(self, stage, kind, samples, in_flight):
        """Memory of a GPU of a replica with so many samples."""
        pieces = self.pieces(stage, kind, max(samples, 1))
        live_bytes = sum(piece.live_bytes[stage.layers].sum() for piece in pieces)
        return (
            pieces[0].base_bytes
            + pieces[0].memory_bytes[stage.layers].sum()
            + in_flight * live_bytes
        )
