"""Which plan does Metis choose for a cluster of several GPU types, after how many steps?

Metis [Um et al., USENIX ATC 2024] and its fork (github.com/livingshade/Metis, "strategy") as their public releases
behave (recorded), every quirk included: counts, plans and costs equal theirs to the last bit. The two orders that the
releases leave undefined are arguments: `node_order` (a set there) and `model_profile` (the file listed first there).
Which inter-stage plans there are is in `papers.metis.space`, the layers of a stage in `papers.metis.balance`, costs in
`papers.metis.stages`; here each inter-stage plan is walked from data towards tensor parallelism.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from madmax_lib.papers.metis.balance import Balancer, shift_capacity
from madmax_lib.papers.metis.job import MetisJob, check_whole, load_job, order_of
from madmax_lib.papers.metis.space import GroupList, divisors, group_lists
from madmax_lib.papers.metis.stages import NotProfiled, RankOrder, Stage, cost_ms
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.profiles import Profiles, plain_sum

__all__ = ["MetisResult", "search"]

_ATTEMPTS = 3


@dataclass(frozen=True)
class MetisResult:
    """What a search came to.

    count: moves and failed attempts up to the last accepted plan of each inter-stage plan, as Metis counts.
    count_total: all moves and failed attempts.
    inter_stage_plans: device groups with a number of micro-batches that were tried.
    dropped: accepted plans that could not be costed.
    plans: one row per costed plan, by cost (ms) and then in order of enumeration; strategies are [dp, tp] per stage.
    seconds: CPU time without reading files.
    reason: why there is no plan, else empty.
    """

    count: int
    count_total: int
    inter_stage_plans: int
    dropped: int
    plans: pd.DataFrame = field(repr=False)
    seconds: float
    reason: str = ""

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
    node_order: Sequence[str],
    model_profile: str | tuple[str, int, int] | None,
    strategy: bool = False,
    variance: float = 1,
    max_permute_len: int,
    max_tp: int,
    max_bs: int,
    **sizes: int,
) -> MetisResult:
    """All plans that Metis costs.

    profiles: folder of profile files, or loaded. hostfile, clusterfile: paths, or the nodes in place of the first.
    node_order: GPU types in the order enumerated first. model_profile: such as "A100_tp4_bs4", the profile that gives
    parameters, optimizer and batch generator; None is the first in sorted order. strategy: the fork's order of moves.
    sizes: hidden, sequence and vocab of `MetisJob`. Raises ValueError for input outside of the rules and for a profile
    that the search needs and does not have.
    """
    limits = {"layers": layers, "global_batch": global_batch, "max_tp": max_tp, "max_bs": max_bs}
    job, nodes = load_job(profiles, hostfile, clusterfile, model_profile=model_profile, **limits, **sizes)
    order = order_of(node_order, nodes)
    check_whole("max_permute_len", max_permute_len)
    if not variance > 0:
        raise ValueError(f"variance={variance!r} must be above 0")
    began = time.process_time()
    gpus = sum(node.gpus for node in nodes)
    walk = _Walk(job, nodes, strategy)
    walk.all(group_lists(order, gpus, layers, variance=variance, max_permute_len=max_permute_len))
    seconds = time.process_time() - began
    return MetisResult(
        walk.count,
        walk.count_total,
        walk.inter_stage_plans,
        walk.dropped,
        pd.DataFrame(sorted(walk.plans, key=lambda plan: plan.cost), columns=_CostedPlan._fields),
        seconds,
        "" if walk.plans else walk.reason(),
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


class _Placed(NamedTuple):
    """Layers of stages. attempt: 0 where none of them passed; free: MB of each stage, of the last and of the first."""

    attempt: int
    partition: tuple[int, ...]
    free_mb: list[float]
    first_free_mb: list[float]
    failures: int


class _Walk:
    """One search: its state, counts and plans."""

    def __init__(self, job: MetisJob, nodes: Sequence[Node], strategy: bool):
        self._job, self._nodes, self._strategy = job, nodes, strategy
        self._balancer = Balancer(job.demand)
        self.count = self.count_total = self.inter_stage_plans = self.dropped = 0
        self.plans: list[_CostedPlan] = []
        self._least_missing: tuple = (-math.inf,)

    def all(self, lists: Iterable[GroupList]) -> None:
        """Every inter-stage plan of every list of device groups."""
        batch_counts, ranks = divisors(self._job.global_batch), None
        for groups_list in lists:
            if ranks is None or ranks.order != groups_list.sequence:
                ranks = RankOrder(self._nodes, groups_list.sequence, self._job)
            for groups in groups_list.groups:
                starts = list(accumulate(groups[:-1], initial=0))
                placed = list(zip(starts, groups, strict=True))
                memory_mb = [ranks.memory_mb(start, gpus) for start, gpus in placed]
                for batches in batch_counts:
                    self.inter_stage_plans += 1
                    stages = [ranks.stage(start, gpus, gpus, batches) for start, gpus in placed]
                    self._from_data_to_tensor(stages, memory_mb, groups_list.costed_stages)

    def _from_data_to_tensor(self, stages: list[Stage], memory_mb: list[float], costed: int) -> None:
        """Halve dp of one stage after the other until a plan is accepted at once or no stage has dp > 1."""
        steps, invalid = 0, sum(not stage.valid for stage in stages)
        moves = _Moves(stages)
        while True:
            if not invalid:
                placed = self._place(stages, memory_mb)
                steps += placed.failures
                failed = placed.first_free_mb if placed.failures else []
                if placed.attempt:
                    self.count += steps
                    self.count_total += steps
                    steps = 0
                    self._record(stages, placed, costed)
                    if placed.attempt == 1:
                        return
                moves.by(failed if self._strategy and failed else placed.free_mb if placed.attempt else [])
            stage = moves.next()
            if stage < 0:
                self.count_total += steps
                return
            steps += 1
            before, after = stages[stage], stages[stage].halved
            stages[stage] = after
            invalid += before.valid - after.valid

    def _place(self, stages: list[Stage], memory_mb: list[float]) -> _Placed:
        """Layers for stages by speed; where memory is short, by a capacity that avoids it, up to three attempts."""
        speed = [stage.performance for stage in stages]
        total = plain_sum(speed)
        capacity = [value / total for value in speed]
        first_free_mb: list[float] = []
        attempt = 0
        while True:
            attempt += 1
            partition = self._balancer.partition(capacity)
            demand_mb = [stage.demand_mb(x, y) for stage, x, y in zip(stages, partition, partition[1:], strict=False)]
            free_mb = [has - needs for has, needs in zip(memory_mb, demand_mb, strict=True)]
            first_free_mb = first_free_mb or free_mb
            if (least := min(free_mb)) >= 0:
                return _Placed(attempt, partition, free_mb, first_free_mb, attempt - 1)
            if least > self._least_missing[0]:
                self._least_missing = (least, stages[free_mb.index(least)], len(stages))
            shifted = shift_capacity(capacity, memory_mb, demand_mb) if attempt < _ATTEMPTS else None
            if shifted is None:
                return _Placed(0, partition, free_mb, first_free_mb, attempt)
            capacity = shifted

    def _record(self, stages: list[Stage], placed: _Placed, costed: int) -> None:
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

    def reason(self) -> str:
        """Why no plan was found."""
        if self.dropped:
            return f"no feasible plan: the cost of all {self.dropped} accepted plans needs batches without a profile"
        if len(self._least_missing) == 1:
            return "no feasible plan: no split of the batch meets max_tp and max_bs"
        missing_mb, stage, count = self._least_missing
        where = f"ranks {stage.start} to {stage.start + stage.gpus - 1} (dp {stage.dp}, tp {stage.tp})"
        return f"no feasible plan: at least {-missing_mb * 2**20:.0f} bytes are missing, on {where} of {count} stages"


class _Moves:
    """Whose dp is halved next: the stage with least free memory, without knowledge the one with the largest dp."""

    def __init__(self, stages: list[Stage]):
        self._dp = [stage.dp for stage in stages]
        self._order: list[int] = []
        self._at = 0

    def by(self, free: list[float]) -> None:
        """From now on by these values, ascending; by dp if there are none."""
        self._order, self._at = sorted(range(len(free)), key=free.__getitem__), 0

    def next(self) -> int:
        """The stage, whose dp is then half; -1 where all have one replica."""
        dp, order = self._dp, self._order
        if order:
            while self._at < len(order) and dp[order[self._at]] == 1:
                self._at += 1
            if self._at == len(order):
                return -1
            stage = order[self._at]
        else:
            stage = dp.index(max(dp))
            if dp[stage] == 1:
                return -1
        dp[stage] //= 2
        return stage
