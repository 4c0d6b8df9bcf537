"""Steps without stragglers: how much faster they would be, and which operations, stages
and workers cost the time.

The ideal of an operation is the average over everything of its class: the mean for
computation, the median for communication. Steps are replayed with the own times of
operations, and with some or all of them at their ideal; of a matched call only what
follows its last member's start is own time. Definitions of "Understanding Stragglers in
Large Model Training Using What-if Analysis" (OSDI 2025, arXiv 2505.05713). The ideal
holds the stragglers' share of the average: S is below "all as fast as the best", and 1
where all are slow alike. Names say where, not why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, nan

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import Timeline, with_origin
from madmax_lib.traces.waits.operations import COLUMNS, operations
from madmax_lib.traces.waits.replay import seen_graph

__all__ = ["WithoutStragglers", "what_if_no_stragglers"]

_CLOCK_S = -0.010  # own times below it are errors of clocks
_WORST = 0.03  # of the workers
_NOTHING = 1e-9  # of a step: lost time below it is none


@dataclass(frozen=True, repr=False)
class WithoutStragglers:
    """Answers of `what_if_no_stragglers`. Times in s, means over steps; M are shares of
    T_replay - T_ideal.
    """

    S: float  # slowdown: T_replay / T_ideal
    # what repairing the last stage gives back; NaN with one stage. Not clipped to 0..1
    M_S: float
    M_W: float  # what repairing the worst 3 % of the workers (at least one) gives back
    T_measured: float  # last end - first start
    T_replay: float  # replayed with own times, without launch gaps
    T_ideal: float  # replayed with ideal times
    by_kind: (
        pd.Series
    )  # slowdown with only these operations as they were and all others ideal
    by_stage: pd.Series
    by_dp: pd.Series
    # rank, stage, dp_rank, S: the smaller of its stage's and its dp rank's, or, where
    # these do
    workers: pd.DataFrame
    # not tell ranks apart, of the rank alone
    by_step: pd.DataFrame  # step, measured_s, replay_s, ideal_s, S
    steps_dropped: int  # steps that lack operations which most steps have

    @property
    def by_rank(self) -> pd.Series:
        """Slowdown of each rank, of `workers`."""
        return self.workers.set_index("rank")["S"]

    @property
    def replay_gap(self) -> float:
        """T_measured / T_replay: what launch gaps cost."""
        return self.T_measured / self.T_replay

    @property
    def gaps_rule(self) -> bool:
        """Whether launch gaps, which a replay leaves out, are the story: then S does
        not speak for the step.
        """
        return self.replay_gap > 1.05

    @property
    def costs(self) -> bool:
        """Whether stragglers cost 1 % or more; shares of less than that say nothing."""
        return self.S >= 1.01

    def __repr__(self) -> str:
        gives = {"last stage": self.M_S, f"worst {_WORST:.0%} of the ranks": self.M_W}
        gives = [
            f"{what} {share:.0%}"
            for what, share in gives.items()
            if share == share and self.costs
        ]
        gaps = ", launch gaps are the story" if self.gaps_rule else ""
        lines = [
            f"slowdown by stragglers S = {self.S:.4g}: {self.T_replay:.4g} s a step, "
            f"{self.T_ideal:.4g} s without",
            f"given back by repairing: {', '.join(gives) or 'next to nothing is lost'}",
            f"slowest: rank {self.by_rank.idxmax()}, {self.by_kind.idxmax()}",
            f"measured / replayed = {self.replay_gap:.4g}{gaps}",
        ]
        return "\n".join(lines)


def what_if_no_stragglers(ops: pd.DataFrame | Timeline) -> WithoutStragglers:
    """Gain without stragglers, by kind, stage, worker and step.

    ops: a timeline, or its operations as `operations` gives them. Raises ValueError for
    a timeline or table without operations, and a table that lacks columns or times.
    """
    ops = operations(ops) if isinstance(ops, Timeline) else ops
    if missing := [name for name in COLUMNS if name not in ops]:
        raise ValueError(f"operations lack the column(s) {', '.join(missing)}")
    if not len(ops):
        raise ValueError("no operations: the timeline has no step with device work")
    if bad := (~np.isfinite(ops["start_ts"]) | ~(ops["duration"] >= 0)).sum():
        raise ValueError(
            f"{bad} operations have no finite start_ts or a negative duration"
        )
    ops, dropped = _whole_steps(ops)
    replays = _Replays(ops)
    actual_s, ideal_s = replays.by_step[["replay_s", "ideal_s"]].mean()
    slowdown = {
        column: replays.alone_s(column) / ideal_s
        for column in ("optype", "stage", "dp_rank")
    }
    workers = ops.groupby("rank")[["stage", "dp_rank"]].first()
    # A worker is as slow as the less slow of its stage and its dp rank.
    by_rank = pd.concat([workers[c].map(slowdown[c]) for c in workers], axis=1).min(
        axis=1
    )
    if workers.duplicated().any():
        by_rank = replays.alone_s("rank") / ideal_s
    worst = by_rank.sort_values(ascending=False, kind="stable").index[
        : ceil(len(by_rank) * _WORST - _NOTHING)
    ]
    # M = (T_replay - T_with the part repaired) / (T_replay - T_ideal)  [OSDI 2025]
    lost_s = actual_s - ideal_s
    some = abs(lost_s) > _NOTHING * ideal_s
    last_stage = ops["stage"].max()
    repaired_s = replays.mean_s(
        [
            lambda table: table["stage"] != last_stage,
            lambda table: ~table["rank"].isin(worst),
        ]
    )
    of_stage, of_worst = (actual_s - repaired_s) / lost_s if some else (nan, nan)
    return WithoutStragglers(
        S=actual_s / ideal_s if some else 1.0,
        M_S=of_stage if last_stage > 0 else nan,
        M_W=of_worst,
        T_measured=replays.by_step["measured_s"].mean(),
        T_replay=actual_s,
        T_ideal=ideal_s,
        by_kind=slowdown["optype"].rename_axis("kind"),
        by_stage=slowdown["stage"],
        by_dp=slowdown["dp_rank"],
        workers=with_origin(
            workers.assign(S=by_rank).reset_index(), ops, slowdown=actual_s / ideal_s
        ),
        by_step=replays.by_step,
        steps_dropped=dropped,
    )


class _Replays:
    """The steps of operations as graphs, with own and ideal times."""

    def __init__(self, ops: pd.DataFrame):
        # Of members of a call only the time from the last member's start is their own.
        end = ops["start_ts"] + ops["duration"]
        member_s = end - ops.groupby(["step", "call"])["start_ts"].transform("max")
        member_s = member_s.mask(member_s <= _CLOCK_S, 0.0)
        ops = ops.assign(own_s=member_s.where(ops["call"] >= 0, ops["duration"]))
        of_class = ops.groupby(["optype", "like"])["own_s"]
        median_s = of_class.transform("median")
        ideal_s = median_s.where(ops["is_call"], of_class.transform("mean"))
        self.ops = ops.assign(ideal_s=ideal_s, end_ts=end)
        parts = [part for _, part in self.ops.groupby("step")]
        self._steps = [
            (part, seen_graph(part.reset_index(drop=True))) for part in parts
        ]
        of_step = self.ops.groupby("step")
        measured_s = of_step["end_ts"].max() - of_step["start_ts"].min()
        replay_s, ideal_s = self._step_s(
            [lambda table: table["rank"] >= 0, lambda table: table["rank"] < 0]
        ).T
        table = measured_s.rename("measured_s").reset_index()
        self.by_step = table.assign(
            replay_s=replay_s, ideal_s=ideal_s, S=replay_s / ideal_s
        )

    def mean_s(self, chosen: list[Callable]) -> np.ndarray:
        """Mean step time (n,) if only the operations that each choice takes have their
        own times.
        """
        return self._step_s(chosen).mean(axis=0)

    def alone_s(self, column: str) -> pd.Series:
        """Mean step time by value of the column: only its operations have their own
        times.
        """
        values = sorted(self.ops[column].unique())
        times = self.mean_s(
            [lambda table, value=value: table[column] == value for value in values]
        )
        return pd.Series(times, index=pd.Index(values, name=column), name="S")

    def _step_s(self, chosen: list[Callable]):
        """Step times (steps, choices)."""
        times_s = []
        for table, graph in self._steps:
            actual = np.stack([choice(table).to_numpy() for choice in chosen], axis=1)
            own_s = table["own_s"].to_numpy()
            times_s.append(graph.last_s(own_s, table["ideal_s"].to_numpy(), actual))
        return np.array(times_s)


def _whole_steps(ops: pd.DataFrame):
    """The operations without the steps whose ranks differ from those of most steps, and
    how many steps that leaves out.
    """
    # Operations differ from step to step; their ranks must not.
    ranks = ops.groupby("step")["rank"].agg(lambda rank: frozenset(rank))
    is_usual = ranks == ranks.value_counts().index[0]
    ops = ops[ops["step"].map(is_usual)]
    keys = ["step", "dp_rank", "stage", "rank", "optype", "seq_id"]
    return ops.sort_values(keys, ignore_index=True), (~is_usual).sum()
