"""The search of Metis: plans for a cluster of several GPU types, with its counts of
steps.

Metis [Um et al., USENIX ATC 2024] and its fork (github.com/livingshade/Metis,
"strategy") as their public releases behave (recorded), every quirk included: counts,
plans and costs equal theirs to the last bit. The two orders that the releases leave
undefined are arguments: `node_order` (a set there) and `model_profile` (the file listed
first there). Which inter-stage plans there are is in `papers.metis.space`, the layers
of a stage in `papers.metis.balance`, costs in `papers.metis.stages`; here each
inter-stage plan is walked from data towards tensor parallelism.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import sub
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from madmax_lib.papers.metis.balance import Balancer, shift_capacity
from madmax_lib.papers.metis.job import MetisJob
from madmax_lib.papers.metis.space import group_lists
from madmax_lib.papers.metis.stages import NotProfiled, RankOrder, cost_ms
from madmax_lib.planner.hetero import Node, load_cluster
from madmax_lib.planner.hetero.profiles import Profiles, load_profiles, plain_sum

_ATTEMPTS = 3


@dataclass(frozen=True)
class MetisResult:
    """Result of a search.

    plans: one row per costed plan, by cost (ms) and then in order of enumeration;
    strategies are [dp, tp] per stage.
    """

    # moves and failed attempts up to the last accepted plan of each inter-stage plan,
    # as Metis counts: what comes after is dropped
    count: int
    count_total: int  # all moves and failed attempts
    inter_stage_plans: int  # device groups with a number of micro-batches
    dropped: int  # accepted plans that could not be costed
    plans: pd.DataFrame = field(repr=False)
    seconds: float  # CPU time without reading files
    reason: str = ""  # why there is no plan

    @property
    def costed_plans(self) -> int:
        """Number of plans with a cost."""
        return len(self.plans)

    @property
    def best_cost_ms(self) -> float:
        """Cost of the first plan; NaN without a plan."""
        return float(self.plans["cost"].iloc[0]) if len(self.plans) else math.nan


def search(
    profiles: str | Path | Profiles,
    hostfile: str | Path | Sequence[Node],
    clusterfile: str | Path | None = None,
    *,
    layers: int,
    global_batch: int,
    node_order: str | Sequence[str],
    model_profile: str | tuple[str, int, int] | None,
    strategy: bool = False,
    variance: float = 1,
    max_permute_len: int,
    max_tp: int,
    max_bs: int,
    hidden: int = 4096,
    sequence: int = 1024,
    vocab: int = 51200,
) -> MetisResult:
    """All plans that Metis costs.

    profiles: folder of profile files, or loaded. hostfile, clusterfile: paths, or the
    nodes in place of the first.
    node_order: GPU types in the order enumerated first. model_profile: such as
    "A100_tp4_bs4", the profile that gives parameters, optimizer and batch generator;
    None is the first in sorted order. strategy: the fork's order of moves. hidden,
    sequence, vocab: of the model, by default those that the release takes for every
    one; pipeline messages follow from them. Raises FileNotFoundError, or ValueError for
    input outside of the rules and for a profile that the search needs and does not
    have.
    """
    if isinstance(hostfile, str | Path):
        if clusterfile is None:
            raise ValueError(f"hostfile={hostfile} needs a clusterfile")
        hostfile = load_cluster(hostfile, clusterfile)
    if not isinstance(profiles, Profiles):
        profiles = load_profiles(profiles)
    if isinstance(node_order, str):
        node_order = node_order.split(",")
    job = MetisJob(
        profiles,
        profiles.named(model_profile),
        nodes=tuple(hostfile),
        order=tuple(node_order),
        layers=layers,
        global_batch=global_batch,
        max_tp=max_tp,
        max_bs=max_bs,
        max_permute_len=max_permute_len,
        variance=variance,
        hidden=hidden,
        sequence=sequence,
        vocab=vocab,
    )
    began = time.process_time()
    walk = _Walk(job, strategy)
    walk.all_lists()
    seconds = time.process_time() - began
    # stable: plans of equal cost stay in order of enumeration
    plans = sorted(walk.plans, key=lambda plan: plan.cost)
    return MetisResult(
        walk.count,
        walk.count_total,
        walk.inter_stage_plans,
        walk.dropped,
        pd.DataFrame(plans, columns=_CostedPlan._fields),
        seconds,
        "" if plans else walk.reason(),
    )


class _CostedPlan(NamedTuple):
    """A plan as Metis prints it: the columns of `MetisResult.plans`."""

    cost: float
    enum_index: int
    node_sequence: list[str]
    device_groups: list[int]
    strategies: list[list[int]]
    batches: int
    layer_partition: list[int]
    partition_attempt: int
    num_stage_used_for_cost: int


class _Placement(NamedTuple):
    """Layers of stages."""

    attempt: int  # that passed the memory check, 0 if none did
    partition: tuple[int, ...]
    free_mb: list[float]  # of each stage, in the last attempt
    first_free_mb: list[float]  # in the first one
    failures: int


class _Walk:
    """One search: its state, counts and plans."""

    def __init__(self, job, strategy):
        self._job = job
        self._strategy = strategy
        self._balancer = Balancer(job.demand)
        self.count = self.count_total = self.inter_stage_plans = self.dropped = 0
        self.plans = []
        # (free MB of the fullest stage, the stage, number of stages), nearest to fitting
        self._least_missing = (-math.inf,)

    def all_lists(self):
        """Every inter-stage plan: every list of device groups with every number of
        micro-batches, the largest first.
        """
        job = self._job
        counts = range(job.global_batch, 0, -1)
        batch_counts = [count for count in counts if job.global_batch % count == 0]
        total = sum(node.gpus for node in job.nodes)
        ranks = RankOrder(job, job.order)
        for sequence, costed, lists in group_lists(
            job.order, total, job.layers, job.variance, job.max_permute_len
        ):
            if sequence != ranks.order:
                ranks = RankOrder(job, sequence)
            for groups in lists:
                runs = list(zip(accumulate(groups, initial=0), groups, strict=False))
                memory_mb = [ranks.memory_mb(start, gpus) for start, gpus in runs]
                for batches in batch_counts:
                    self.inter_stage_plans += 1
                    # the walk begins with dp = GPUs, tp = 1 on every stage
                    stages = [
                        ranks.stage(start, gpus, gpus, batches) for start, gpus in runs
                    ]
                    self._from_data_to_tensor(stages, memory_mb, costed)

    def _from_data_to_tensor(self, stages, memory_mb, costed):
        """Halve dp of one stage after the other until a plan is accepted at once or no
        stage has dp > 1.
        """
        steps = 0  # since the last accepted plan
        invalid = sum(not stage.valid for stage in stages)
        dp = [stage.dp for stage in stages]
        order = []  # stages by free memory, once that was computed
        while True:
            if not invalid:
                placed = self._placement(stages, memory_mb)
                steps += placed.failures
                free_mb = []
                if placed.attempt:
                    free_mb = placed.free_mb
                    self.count += steps
                    self.count_total += steps
                    steps = 0
                    self._record(stages, placed, costed)
                    if placed.attempt == 1:
                        return
                # All that the fork changes: after a failed first attempt its free
                # memory, the most negative first, orders the stages.
                if self._strategy and placed.failures:
                    free_mb = placed.first_free_mb
                order = sorted(range(len(free_mb)), key=free_mb.__getitem__)
            # Without an order the stage with the largest dp is next.
            following = order or [dp.index(max(dp))]
            number = next((number for number in following if dp[number] > 1), None)
            if number is None:
                self.count_total += steps
                return
            steps += 1
            before = stages[number]
            stages[number] = before.halved
            dp[number] //= 2
            invalid += before.valid - before.halved.valid

    def _placement(self, stages, memory_mb):
        """Layers for stages by speed; where memory is short, by a capacity that avoids
        it, up to three attempts.
        """
        # capacity = performance of the stages, normalised to sum 1
        speed = [stage.performance for stage in stages]
        total = plain_sum(speed)
        capacity = [value / total for value in speed]
        first_free_mb = []
        for attempt in count(1):
            partition = self._balancer.partition(capacity)
            demand_mb = [
                stage.demand_mb(x, y)
                for stage, x, y in zip(stages, partition, partition[1:], strict=False)
            ]
            free_mb = list(map(sub, memory_mb, demand_mb))
            first_free_mb = first_free_mb or free_mb
            if (least := min(free_mb)) >= 0:
                return _Placement(
                    attempt, partition, free_mb, first_free_mb, attempt - 1
                )
            if least > self._least_missing[0]:
                self._least_missing = (least, stages[free_mb.index(least)], len(stages))
            tries_left = attempt < _ATTEMPTS
            capacity = tries_left and shift_capacity(capacity, memory_mb, demand_mb)
            if not capacity:
                return _Placement(0, partition, free_mb, first_free_mb, attempt)

    def _record(self, stages, placed, costed):
        try:
            cost = cost_ms(stages, placed.partition, costed)
        except NotProfiled:
            self.dropped += 1
            return
        plan = _CostedPlan(
            cost=cost,
            enum_index=len(self.plans),
            node_sequence=list(stages[0].ranks.order),
            device_groups=[stage.gpus for stage in stages],
            strategies=[stage.degrees for stage in stages],
            batches=stages[0].batches,
            layer_partition=list(placed.partition),
            partition_attempt=placed.attempt,
            num_stage_used_for_cost=costed,
        )
        self.plans.append(plan)

    def reason(self):
        """Reason why there is no plan."""
        if self.dropped:
            return (
                f"no feasible plan: the cost of all {self.dropped} accepted plans "
                "needs batches without a profile"
            )
        if len(self._least_missing) == 1:
            return "no feasible plan: no split of the batch meets max_tp and max_bs"
        missing_mb, stage, count = self._least_missing
        where = (
            f"ranks {stage.start} to {stage.start + stage.gpus - 1} (dp "
            f"{stage.dp}, tp {stage.tp})"
        )
        return (
            f"no feasible plan: at least {-missing_mb * 2**20:.0f} bytes are "
            f"missing, on {where} of {count} stages"
        )
