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

from dataclasses import dataclass
from math import ceil, nan

import numpy as np
import pandas as pd

from madmax_lib.timeline import Timeline, with_origin
from madmax_lib.traces.waits.operations import NEEDED, operations
from madmax_lib.traces.waits.replay import pipeline_graph, seen_graph
from madmax_lib.traces.waits.step_times import step_s

_COMPUTE = (
    "forward-compute",
    "backward-compute",
    "optimizer",
    "gc",
)  # and every name without communication
_TWO_SIDED = {
    f"{way}-{side}": f"{way}-pp-comm"
    for way in ("forward", "backward")
    for side in ("send", "recv")
}
_CALLS = (
    *_TWO_SIDED,
    "params-all-gather",
    "grads-reduce-scatter",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
)
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
    T_measured: float  # of a timeline the recurring step, else last end - first start
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

    def __repr__(self):
        gives = {"last stage": self.M_S, f"worst {_WORST:.0%} of the ranks": self.M_W}
        gives = [
            f"{what} {share:.0%}"
            for what, share in gives.items()
            if share == share and self.costs
        ]
        gaps = ", launch gaps matter more" if self.gaps_rule else ""
        lines = [
            f"slowdown by stragglers S = {self.S:.4g}: {self.T_replay:.4g} s a step, "
            f"{self.T_ideal:.4g} s without",
            f"a fix gains: {', '.join(gives) or 'next to nothing'}",
            f"slowest: rank {self.by_rank.idxmax()}, {self.by_kind.idxmax()}",
            f"measured / replayed = {self.replay_gap:.4g}{gaps}",
        ]
        return "\n".join(lines)


def what_if_no_stragglers(ops: pd.DataFrame | Timeline) -> WithoutStragglers:
    """Gain without stragglers, by kind, stage, worker and step.

    ops: a timeline, or one row per operation: dp_rank, stage, rank, step, optype,
    start_ts and duration (s, on one clock), seq_id; as `operations` gives them, or
    those of a pipelined job by name (forward-compute, backward-send, ...), which wait
    for one another as in 1F1B. Raises ValueError for columns that are missing, kinds
    that are not known, and interleaved chunks (mc above 0).
    """
    # steps may overlap on a device, or leave it idle between them
    paced_s = nan
    if isinstance(ops, Timeline):
        paced_s = step_s(ops)
        ops = operations(ops)
    ops, dropped = _whole_steps(_checked(ops))
    replays = _Replays(ops)
    actual_s, ideal_s = replays.by_step[["replay_s", "ideal_s"]].mean()
    slowdown = {
        column: replays.alone_s(column) / ideal_s
        for column in ("kind", "stage", "dp_rank")
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
    is_worst = ops["rank"].isin(worst)
    is_last = ops["stage"] == ops["stage"].max()
    repaired_s = replays.step_s(~is_worst, ~is_last).mean(axis=0)
    of_worst, of_last = (actual_s - repaired_s) / (lost_s if some else nan)
    return WithoutStragglers(
        S=actual_s / ideal_s if some else 1.0,
        T_measured=paced_s if paced_s > 0 else replays.by_step["measured_s"].mean(),
        T_replay=actual_s,
        T_ideal=ideal_s,
        by_kind=slowdown["kind"],
        by_stage=slowdown["stage"],
        by_dp=slowdown["dp_rank"],
        workers=with_origin(
            workers.assign(S=by_rank).reset_index(), ops, slowdown=actual_s / ideal_s
        ),
        by_step=replays.by_step,
        steps_dropped=dropped,
        M_W=of_worst,
        M_S=nan if is_last.all() else of_last,
    )


class _Replays:
    """The steps of operations as graphs, with own and ideal times."""

    def __init__(self, ops):
        # Of members of a call only the time from the last member's start is their own.
        end = ops["start_ts"] + ops["duration"]
        member_s = end - ops.groupby(["step", "met"])["start_ts"].transform("max")
        member_s = member_s.mask(member_s <= _CLOCK_S, 0.0)
        own_s = member_s.where(ops["met"] >= 0, ops["duration"])
        ops = ops.assign(own_s=own_s, kind=ops["optype"].replace(_TWO_SIDED))
        of_class = ops.groupby(["optype", "like"])["own_s"]
        average = of_class.transform("median").where(
            ops["is_call"], of_class.transform("mean")
        )
        self.ops = ops.assign(ideal_s=average)
        parts = [part for _, part in self.ops.groupby("step")]
        usual = None
        if "stream" not in ops:  # the steps of a pipeline are alike
            usual = pipeline_graph(parts[0].reset_index(drop=True))
        self.steps = [
            (part, usual or seen_graph(part.reset_index(drop=True))) for part in parts
        ]
        whole_s = [
            (p["start_ts"] + p["duration"]).max() - p["start_ts"].min() for p in parts
        ]
        every = ops["rank"] >= 0
        replay_s, ideal_s = self.step_s(every, ~every).T
        columns = {
            "step": [p["step"].iloc[0] for p in parts],
            "measured_s": whole_s,
            "replay_s": replay_s,
            "ideal_s": ideal_s,
            "S": replay_s / ideal_s,
        }
        self.by_step = pd.DataFrame(columns)

    def step_s(self, *actual):
        """Step times (steps, n) if only the operations of each mask have their own
        times, all others the ideal ones.
        """
        chosen = np.stack(actual, axis=1)
        # (operations, 1) times beside (operations, n) masks
        return np.array(
            [
                graph.ends_s(
                    np.where(chosen[part.index], part[["own_s"]], part[["ideal_s"]])
                ).max(axis=0)
                for part, graph in self.steps
            ]
        )

    def alone_s(self, column):
        """Mean step time by value of the column: only its operations have their own
        times.
        """
        values = sorted(self.ops[column].unique())
        times = self.step_s(*(self.ops[column] == value for value in values))
        return pd.Series(times.mean(axis=0), pd.Index(values, name=column), name="S")


def _checked(ops):
    """The operations in float64, in one order in every step, with met (number of the
    call in its step, -1 alone),
    is_call, and like (what tells classes of one kind apart).
    """
    if missing := [name for name in NEEDED if name not in ops]:
        raise ValueError(f"operations lack the column(s) {', '.join(missing)}")
    if ops.empty:
        raise ValueError("no operations: the timeline has no step with device work")
    ops = ops.astype({"optype": str, "start_ts": "float64", "duration": "float64"})
    if bad := (~np.isfinite(ops["start_ts"]) | ~(ops["duration"] >= 0)).sum():
        raise ValueError(
            f"{bad} operations have no finite start_ts or a negative duration"
        )
    ops = ops.sort_values(
        ["step", "dp_rank", "stage", "rank", "optype", "seq_id"], ignore_index=True
    )
    if "stream" in ops:
        return ops.assign(met=ops["call"])
    if unknown := sorted(set(ops["optype"]) - {*_COMPUTE, *_CALLS}):
        raise ValueError(
            f"operations of kind {unknown[0]!r} are not known; known are "
            f"{', '.join(_COMPUTE + _CALLS)}"
        )
    if "mc" in ops and ops["mc"].max() > 0:
        raise ValueError("mc above 0: interleaved chunks are not replayed")
    if ops.duplicated(["step", "dp_rank", "stage", "optype", "seq_id"]).any():
        raise ValueError(
            "an operation (step, dp_rank, stage, optype, seq_id) is in two rows"
        )
    kind = ops["optype"]
    is_call = kind.isin(_CALLS)
    boundary = (
        ops["stage"] + kind.eq("forward-send") - kind.eq("backward-send")
    )  # sends meet receives of the neighbour
    over_dp = kind.isin(("params-all-gather", "grads-reduce-scatter"))
    # The first and the last stage share the embedding table.
    over_ends = kind.eq("embedding-grads-all-reduce")
    # The norm of the gradients is summed over all ranks.
    everyone = kind.eq("optimizer-clip-main-grad")
    alone = (
        ~is_call
        | kind.eq("layernorm-grads-all-reduce")
        | over_ends & ~ops["stage"].isin((0, ops["stage"].max()))
    )
    where = boundary.mask(over_ends | everyone, -1)
    members = [
        kind.replace(_TWO_SIDED),
        where,
        ops["dp_rank"].mask(over_dp | everyone, -1),
        ops["seq_id"],
    ]
    met = ops.groupby(members, sort=False).ngroup().mask(alone, -1)
    # A message has two members: its send and its receive.
    sides = kind.isin(_TWO_SIDED)
    if (ops[sides].groupby([ops["step"], met]).size() != 2).any():
        raise ValueError(
            "a send has no receive in the neighbouring stage, or a receive no send"
        )
    return ops.assign(is_call=is_call, met=met, like=0)


def _whole_steps(ops):
    """Without the steps whose operations differ from those of most steps (seen
    operations: whose ranks differ).
    """
    # Seen operations differ from step to step; their ranks must not.
    what = ["rank"] if "stream" in ops else ["dp_rank", "stage", "optype", "seq_id"]
    each = ops.drop_duplicates(["step", *what])
    # A sum of hashes does not depend on the order of the operations.
    sets = (
        pd.util.hash_pandas_object(each[what].astype(str), index=False)
        .groupby(each["step"])
        .sum()
    )
    usual = sets.index[sets == sets.mode()[0]]
    return ops[ops["step"].isin(usual)].reset_index(drop=True), len(sets) - len(usual)
