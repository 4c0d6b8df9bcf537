"""What does a search answer? The best plans, ten different ones with what speaks for
and against each, and a hint.

A predicted step is as sure as its interval, but plans of one model on one machine under
one software err together: what the constants leave open moves them alike, as far as
their steps consist of the same parts. What is left of the spread between runs of the
same source and model (`calibration.intervals.comparison_widths`) is each plan's own.
With both, the probability that a plan is the fastest is the share of draws in which it
is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd

from madmax_lib import plan_flags
from madmax_lib.base.fields import require_int
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.plan import Plan
from madmax_lib.plan_flags.keys import framework_named
from madmax_lib.planner.evaluate import SearchProblem, energy_j, launched_by
from madmax_lib.planner.hint import hint
from madmax_lib.planner.space import SEARCHED, plan_of
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.step_time import PARTS, step_s, step_time
from madmax_lib.simulator.uncertainty import log_width, shared_errors

__all__ = ["SearchResult", "described", "different"]

_SHOWN = 10
# at least a quarter of the spread between plans is their own
_DRAWS = 4096
_SIGMAS = 1.645
_OWN = 0.25
_WORDS = {
    "launch_s": "waiting for the host",
    "tp_s": "tp communication",
    "cp_s": "cp communication",
    "ep_s": "expert exchange",
    "fsdp_s": "gathers of weights",
    "bubble_s": "pipeline bubble",
    "pp_s": "pipeline messages",
    "dp_s": "reduction of gradients",
    "optimizer_s": "optimizer",
    "overhead_s": "fixed overhead",
    "repeated_s": "repeated forward passes",
    "work_s": "compute",
}
_CLOSE = "; too close to tell, measure several (mm.tune)"
_PASSES = ["gemm_s", "attention_s", "pointwise_s"]
_COLUMNS = (
    "plan",
    "step_s",
    "low_s",
    "high_s",
    "mfu",
    "memory_gb",
    "probability",
    "why",
    "limit",
    "stacks",
)


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What a search has shown; tables in order of the objective.

    table: the best `top` plans, those of equal time and memory as one, with plan (its
        text), stacks (software that launches it), the fields of Plan, step_s, low_s and
        high_s (90 % interval), launched_s (as the first of stacks, where none was
        named), memory_bytes (of the fullest device), mfu, tokens_per_s, cost_usd (per
        step, NaN without a price), energy_j (all devices) and ties (plans as good).
    pareto: plans that no other one beats in time and memory, same columns.
    different: the best of each way to split the model (tp, cp, pp, ep, ZeRO stage,
        recompute), ten of them: same columns, and probability (of being the fastest of
        a hundred such), why (the part in which it saves most, in shares of their median
        step) and limit (the largest parts of its step beside compute; of communication
        what nothing hides).
    evaluated: plans that were looked at: legal, and launched by a stack.
    feasible: those of them that fit and were timed.
    seconds: of the search, wall clock.
    dropped: rule, count, of: degrees ("layouts") that no plan was made of, by rule, and
        plans that no stack launches or that do not fit.
    problem: what was searched.
    complete: False if interrupted (default True).
    """

    table: pd.DataFrame
    pareto: pd.DataFrame
    different: pd.DataFrame
    evaluated: int
    feasible: int
    seconds: float
    dropped: pd.DataFrame = field(repr=False)
    problem: SearchProblem = field(repr=False)
    complete: bool = True

    @property
    def best(self) -> Plan:
        """The best plan. Raises ValueError if none fits."""
        return self._plan(0)

    def _plan(self, row: int) -> Plan:
        if require_int("row", row) >= len(self.table):
            raise ValueError(
                "no plan fits"
                if not len(self.table)
                else f"row={row}: the table has {len(self.table)}"
            )
        return plan_of(self.table.iloc[row].to_dict())

    def configuration(self, row: int = 0, software: str | None = None) -> str:
        """The plan of a row of the table in the words of a stack that launches it, as
        `plan_flags.write` states it.

        software: one of its stacks, the first if None. Raises ValueError for a stack
        without configuration.
        """
        plan = self._plan(row)
        case = self.problem.case
        stack = (
            self.table["stacks"].iloc[row].split()[0] if software is None else software
        )
        run = {
            "model": case.model,
            "global_batch": case.global_batch,
            "sequence": case.sequence,
        }
        dtype = (
            case.dtype if case.dtype in ("bf16", "fp16", "fp32") else None
        )  # 8 bits are of the products alone
        return plan_flags.write(
            plan,
            stack,
            **run,
            dtype=dtype,
            devices_per_node=case.cluster.devices_per_node,
        )

    @property
    def software(self) -> str:
        """Whose plans they are, and as whose they are timed."""
        if self.problem.case.software:
            return (
                f"{self.problem.case.software.name}: only what it launches, timed "
                "as it overlaps"
            )
        stacks = ", ".join(stack.name for stack in self.problem.stacks)
        return (
            f"none named: what {stacks} can launch, ranked as by tuned "
            "Megatron-Core; launched_s: as its first stack"
        )

    @cached_property
    def hint(self) -> str:
        """Another batch or number of devices, where these are the problem; else empty.
        Takes a few small searches.
        """
        return hint(self.problem, self.different) if self.complete else ""

    def _lines(self) -> list[str]:
        case = self.problem.case
        skipped = self.dropped.loc[
            self.dropped["rule"].str.startswith("a stack"), "count"
        ]
        cluster = f"{case.cluster.world_size:,} x {case.cluster.device.name}"
        counts = (
            f"{self.evaluated:,} plans in {self.seconds:.1f} s, {self.feasible:,} fit"
        )
        lines = [
            f"{case.model.name} on {cluster}, batch {case.global_batch:,}: {counts}"
        ]
        lines[0] += (
            f", {skipped.sum():,} more launched by no stack" if skipped.sum() else ""
        )
        if not len(self.table):
            return [*lines, "no plan fits"]
        best = self.table.iloc[0]
        ten = self.different
        sure = f"{best.step_s:.3g} s (90 %: {best.low_s:.3g} to {best.high_s:.3g} s)"
        lines.append(
            f"best: {best.plan}, {sure}, MFU {best.mfu:.0%}, "
            f"{best.memory_bytes / 1e9:.0f} GB, {best.stacks}"
        )
        lines.append(f"why: {ten['why'].iloc[0]}; limit: {ten['limit'].iloc[0]}")
        if ten["probability"].notna().all():
            chances = ", ".join(
                f"{row.plan} {row.probability:.0%}" for row in ten[:3].itertuples()
            )
            close = ten["probability"].iloc[0] < 0.5
            lines.append(
                f"probability to be the fastest: {chances}{_CLOSE if close else ''}"
            )
        lines += [
            f"software: {self.software}",
            f"hint: {self.hint}" if self.hint else "",
            _launching(best.stacks),
        ]
        return [line for line in lines if line]

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        lines = "<br>".join(self._lines())
        if not len(self.table):
            return f"<p>{lines}</p>"
        ten = self.different.assign(memory_gb=self.different["memory_bytes"] / 1e9)[
            list(_COLUMNS)
        ]
        share = "{:.0%}".format
        number = "{:.3g}".format
        shown = {"mfu": share, "probability": share} | dict.fromkeys(
            ("step_s", "low_s", "high_s", "memory_gb"), number
        )
        return f"<p>{lines}</p>{ten.to_html(index=False, formatters=shown, border=0)}"


def _launching(stacks: str) -> str:
    try:
        framework = framework_named(stacks.split()[0])
    except ValueError:
        return f"no configuration of {stacks} is written here"
    return f"found.configuration() writes it for {framework}"


def described(
    problem: SearchProblem, columns: dict
) -> tuple[pd.DataFrame, Steps, dict]:
    """Plans with their texts, stacks, intervals, MFU, tokens per second and energy;
    their steps, and these in parts.
    """
    case = problem.case
    parameters = problem.parameters
    table = pd.DataFrame(columns)
    tokens = case.global_batch * case.sequence
    flops = 3 * case.model.forward_flops(case.global_batch, case.sequence)
    peak = case.cluster.world_size * case.cluster.device.peak(case.dtype)
    table = table.drop(columns="place").reset_index(drop=True)
    case = replace(case, plan=Plans.from_table(table[list(SEARCHED)]))
    steps = Steps.of(case)
    times = step_time(steps, parameters)
    place = table.columns.get_loc("step_s")
    factor = np.exp(log_width(steps, times, parameters))
    table.insert(place + 1, "low_s", table["step_s"] / factor)
    table.insert(place + 2, "high_s", table["step_s"] * factor)
    if case.cluster.device.tdp_w > 0:
        table["energy_j"] = energy_j(case, parameters)
    table.insert(0, "stacks", launched_by(case.plan, problem))
    if not problem.case.software:
        table.insert(
            table.columns.get_loc("step_s") + 1,
            "launched_s",
            _launched_s(case, table["stacks"], problem),
        )
    table.insert(0, "plan", [str(plan_of(row)) for row in table.to_dict("records")])
    return (
        table.assign(
            mfu=flops / table["step_s"] / peak, tokens_per_s=tokens / table["step_s"]
        ),
        steps,
        times,
    )


def _launched_s(case: Case, stacks: pd.Series, problem: SearchProblem) -> np.ndarray:
    """Seconds of each plan of a case as the first of its stacks."""
    seconds = np.full(len(stacks), np.nan)
    first = stacks.str.split().str[0]
    for stack in problem.stacks:
        rows = np.flatnonzero(first == stack.name)
        if len(rows):
            seconds[rows] = step_s(
                Steps.of(replace(case, plan=case.plan[rows], software=stack)),
                problem.parameters,
            )
    return seconds


def different(problem: SearchProblem, columns: dict) -> pd.DataFrame:
    """The first ten of the best plans of each way, with probability, why and limit."""
    table, steps, times = described(problem, columns)
    seconds = pd.DataFrame({name: times[name] for name in PARTS})
    seconds["repeated_s"] = (
        seconds[_PASSES].sum(axis=1) / 4 * (table["recompute"] == "full")
    )
    seconds["work_s"] = (
        seconds[[*_PASSES, "head_s"]].sum(axis=1) - seconds["repeated_s"]
    )
    seconds = seconds[list(_WORDS)]
    chances = _chances(
        steps, times, problem.parameters, bool(problem.case.model.experts)
    )
    table = table.drop(columns="ties").assign(probability=chances).head(_SHOWN)
    return table.assign(why=_reasons(seconds), limit=_limits(seconds.head(_SHOWN)))


def _chances(
    steps: Steps, times: dict, parameters: Parameters, experts: bool
) -> np.ndarray:
    """Probability of each plan to be the fastest; NaN for parameters that know no
    intervals.
    """
    width = parameters.residuals.get(f"layouts {'mixture' if experts else 'dense'}")
    if width is None:
        return np.full(len(times["step_s"]), np.nan)
    shared = shared_errors(steps, times, parameters)
    wanted = (width / _SIGMAS) ** 2
    first, second = np.triu_indices(len(shared), 1)
    apart = shared[first, first] + shared[second, second] - 2 * shared[first, second]
    own = (
        max(wanted - np.median(apart), _OWN * wanted) / 2 if apart.size else wanted / 2
    )
    root = np.linalg.cholesky(shared + own * np.eye(len(shared)))
    errors = np.random.default_rng(0).standard_normal((_DRAWS, len(shared))) @ root.T
    fastest = np.argmin(np.log(times["step_s"]) + errors, axis=1)
    return np.bincount(fastest, minlength=len(shared)) / _DRAWS


def _limits(seconds: pd.DataFrame) -> list[str]:
    """The two largest parts of each step beside compute, as shares of it."""
    shares = seconds.div(seconds.sum(axis=1), axis=0).drop(columns="work_s")
    largest = [row.nlargest(2) for _, row in shares.iterrows()]
    return [
        ", ".join(
            f"{_WORDS[name]} {share:.0%}"
            for name, share in row.items()
            if share > 0.005
        )
        or "compute alone"
        for row in largest
    ]


def _reasons(seconds: pd.DataFrame) -> list[str]:
    """The part in which each of the first steps saves most beside the median of all, in
    shares of the median step.
    """
    if len(seconds) == 1:
        return ["no other way to split it fits"]
    saved = (seconds.median() - seconds) / seconds.sum(axis=1).median()
    return [
        f"saves {row.max():.0%} of a step in {_WORDS[row.idxmax()]}"
        if row.max() > 0.005
        else "no part stands out"
        for _, row in saved.head(_SHOWN).iterrows()
    ]
