"""Which plan does Metis choose for a cluster of several GPU types, after how many steps?

Metis [Um et al., USENIX ATC 2024] and its fork (github.com/livingshade/Metis, "strategy") as their public releases
behave (recorded), every quirk included: counts, plans and costs equal theirs to the last bit. The two orders that the
releases leave undefined are arguments: `node_order` (a set there) and `model_profile` (the file listed first there).
Which inter-stage plans there are is in `papers.metis.space`, the layers of a stage in `papers.metis.balance`, costs in
`papers.metis.stages`; here each inter-stage plan is walked from data towards tensor parallelism.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from madmax_lib.papers.metis.balance import Balancer, shift_capacity
from madmax_lib.papers.metis.job import Job, load_job, order_of, whole_above_0
from madmax_lib.papers.metis.space import Block, blocks, divisors
from madmax_lib.papers.metis.stages import Layout, NotProfiled, Stage, cost_ms
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.profiles import Profiles, plain_sum

__all__ = ["SearchResult", "search"]

_COLUMNS = ["cost", "enum_index", "node_sequence", "device_groups", "strategies", "batches", "layer_partition",
            "partition_attempt", "num_stage_used_for_cost"]  # fmt: skip
_ATTEMPTS = 3


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    count: moves and failed attempts up to the last accepted plan of each inter-stage plan, as Metis counts.
    count_total: all moves and failed attempts.
    plans: one row per costed plan, by cost (ms) and then in order of enumeration; strategies are [dp, tp] per stage.
    dropped: accepted plans that could not be costed. seconds: CPU time of each trial without reading files.
    reason: why there is no plan, else empty.
    """

    count: int
    count_total: int
    inter_stage_plans: int
    dropped: int
    plans: pd.DataFrame = field(repr=False)
    seconds: tuple[float, ...]
    reason: str = ""

    @property
    def costed_plans(self) -> int:
        """Number of plans with a cost."""
        return len(self.plans)

    @property
    def best_cost_ms(self) -> float:
        """Cost of the first plan; NaN without a plan."""
        return float(self.plans["cost"].iloc[0]) if len(self.plans) else math.nan

    @property
    def seconds_mean(self) -> float:
        """Mean CPU time of a trial."""
        return statistics.fmean(self.seconds)

    @property
    def seconds_spread(self) -> float:
        """Standard deviation over trials; 0 for one."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0


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
    hidden: int = 4096,
    sequence: int = 1024,
    vocab: int = 51200,
    trials: int = 1,
) -> SearchResult:
    """All plans that Metis costs.

    profiles: folder of profile files, or loaded. hostfile, clusterfile: paths, or the nodes in place of the first.
    node_order: GPU types in the order enumerated first. model_profile: such as "A100_tp4_bs4", the profile that gives
    parameters, optimizer and batch generator; None is the first in sorted order. strategy: the fork's order of moves.
    Raises ValueError for input outside of the rules and for a profile that the search needs and does not have.
    """
    job, nodes = load_job(profiles, hostfile, clusterfile, model_profile=model_profile, layers=layers,
                          global_batch=global_batch, max_tp=max_tp, max_bs=max_bs, hidden=hidden, sequence=sequence,
                          vocab=vocab)  # fmt: skip
    order = order_of(node_order, nodes)
    whole_above_0("max_permute_len", max_permute_len)
    whole_above_0("trials", trials)
    if not variance > 0:
        raise ValueError(f"variance={variance!r} must be above 0")
    gpus = sum(node.gpus for node in nodes)
    seconds = []
    for _ in range(trials):
        began = time.process_time()
        walk = _Walk(job, nodes, strategy)
        walk.all(blocks(order, gpus, layers, variance=variance, max_permute_len=max_permute_len))
        seconds.append(time.process_time() - began)
    plans = pd.DataFrame(sorted(walk.plans, key=lambda plan: plan[0]), columns=_COLUMNS)
    return SearchResult(walk.count, walk.count_total, walk.inter_stage_plans, walk.dropped, plans, tuple(seconds),
                        "" if walk.plans else walk.reason())  # fmt: skip


class _Placed(NamedTuple):
    """Layers of stages. attempt: 0 where none of them passed; free: MB of each stage, of the last and of the first."""

    attempt: int
    partition: tuple[int, ...]
    free_mb: list[float]
    first_free_mb: list[float]
    failures: int


class _Walk:
    """One search: its state, counts and plans."""

    def __init__(self, job: Job, nodes: Sequence[Node], strategy: bool):
        self._job, self._nodes, self._strategy = job, nodes, strategy
        self._balancer = Balancer(job.demand)
        self.count = self.count_total = self.inter_stage_plans = self.dropped = 0
        self.plans: list[tuple] = []
        self._least_missing: tuple = (-math.inf,)

    def all(self, every: Iterable[Block]) -> None:
        """Every inter-stage plan of every block."""
        counts, layout = divisors(self._job.global_batch), None
        for block in every:
            if layout is None or layout.order != block.sequence:
                layout = Layout(self._nodes, block.sequence, self._job)
            for groups in block.groups:
                starts = list(accumulate(groups, initial=0))
                memory_mb = [layout.memory_mb(start, gpus) for start, gpus in zip(starts, groups, strict=False)]
                shown = (list(block.sequence), list(groups))
                for batches in counts:
                    self.inter_stage_plans += 1
                    stages = [layout.stage(start, gpus, gpus, batches)
                              for start, gpus in zip(starts, groups, strict=False)]  # fmt: skip
                    self._from_data_to_tensor(stages, memory_mb, shown, block.costed_stages)

    def _from_data_to_tensor(self, stages: list[Stage], memory_mb: list[float], shown: tuple, costed: int) -> None:
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
                    self._record(stages, placed, shown, costed)
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
            demand_mb = [stage.demand_mb(x, y)
                         for stage, x, y in zip(stages, partition, partition[1:], strict=False)]  # fmt: skip
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

    def _record(self, stages: list[Stage], placed: _Placed, shown: tuple, costed: int) -> None:
        try:
            cost = cost_ms(stages, placed.partition, costed)
        except NotProfiled:
            self.dropped += 1
            return
        strategies = [stage.degrees for stage in stages]
        self.plans.append((cost, len(self.plans), *shown, strategies, stages[0].batches, list(placed.partition),
                           placed.attempt, costed))  # fmt: skip

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
