"""The best plans of a search, ten different ones with what speaks for and against each,
and a hint.

A predicted step is as sure as its interval, but plans of one model on one machine under
one software err together: what the constants leave open moves them alike, as far as
their steps consist of the same parts. What is left of the spread between runs of the
same source and model (`benchmarks/shipped.py`) is each plan's own. With both, the
probability that a plan is the fastest is the share of draws in which it is.
"""

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import require_int, same_fields
from madmax_lib.plan import Plan, Plans
from madmax_lib.planner.evaluate import (
    LAYOUT_KEY,
    MOST_LAYOUTS,
    Columns,
    PartialResult,
    SearchProblem,
    front_of,
)
from madmax_lib.planner.hint import hint
from madmax_lib.planner.space import SEARCHED, fixed_fields, plan_of
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import plans_peak_bytes, usable_bytes
from madmax_lib.simulator.memory.stacks import unlaunchable
from madmax_lib.simulator.power import device_energy_j
from madmax_lib.simulator.steady.step_time import PARTS, step_s, step_time
from madmax_lib.simulator.uncertainty import log_width, shared_errors

_MOST_DIFFERENT = 10  # rows of the table of different plans
_DRAWS = 4096  # of all errors: a probability of 50 % is then known to 0.8 %
_SIGMAS = 1.645  # half-width of a 90 % interval in standard deviations
_LEAST_OWN = 0.25  # of the spread between two plans, which their constants leave
_NOT_WORTH_SAYING = 0.005  # of a step: rounds to 0 or 1 %
_WORDS = catalog.table("step_words").set_index("part")["words"]  # of parts of a step
_CLOSE = "; too close to tell, measure several (mm.tune)"
_LAYER_PARTS = ["gemm_s", "attention_s", "pointwise_s"]
# columns of the notebook's table
_COLUMNS = [
    "plan",
    "launched_s",
    "step_s",
    "low_s",
    "high_s",
    "mfu",
    "memory_gb",
    "probability",
    "why",
    "limit",
    "stacks",
]


@dataclass(frozen=True, repr=False)
class SearchResult:
    """Result of a search; tables in order of the objective.

        result = mm.search("llama2-70b", "dgx-h100", 256)
        result.best, result.different, result.configuration()

    table: the best `top` plans, those of equal time and memory as one, with plan (its
        text), stacks (software that launches and holds it, the best first), the fields of
        Plan, step_s, low_s and high_s (90 % interval), launched_s (as the first of
        stacks, where none was named: times and costs then go in its order),
        memory_bytes (of the fullest device; where none was named, under that stack),
        mfu, tokens_per_s, cost_usd (per step, as launched; NaN without a price),
        energy_j (all devices).
    pareto: plans that no other one beats in time and memory, same columns; where no
        software was named in launched_s, of those of table, different and step_s' front.
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
    beats: with `like`, the recipe and what beats it, the best of each number of
        changes (`planner.beats`).
    problem: what was searched.
    complete: False if interrupted (default True).
    """

    table: pd.DataFrame
    evaluated: int
    feasible: int
    seconds: float
    dropped: pd.DataFrame
    problem: SearchProblem
    front: pd.DataFrame  # plans of which `pareto` is made when it is asked for
    layouts: pd.DataFrame  # and `different`
    complete: bool = True
    beats: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def pareto(self) -> pd.DataFrame:
        """Plans that no other one beats in time and memory."""
        table = described(self.problem, self.front).table
        if "launched_s" not in table:
            return table
        seconds = table["launched_s"].to_numpy()
        memory_bytes = table["memory_bytes"].to_numpy()
        rows = front_of(seconds, memory_bytes, seconds > 0)
        return table.iloc[rows].reset_index(drop=True)

    @cached_property
    def different(self) -> pd.DataFrame:
        """The best of each way to split the model."""
        return different(self.problem, self.layouts)

    @property
    def best(self) -> Plan:
        """The best plan. Raises ValueError if none fits."""
        return self._plan(0)

    def _plan(self, row):
        count = len(self.table)
        if require_int("row", row) >= count:
            rule = f"row={row}: the table has {count}" if count else "no plan fits"
            raise ValueError(rule)
        fixed = fixed_fields(self.problem.case.plan)
        return plan_of(self.table.iloc[row].to_dict() | fixed)

    def configuration(self, row: int = 0, software: str | None = None) -> str:
        """The plan of a row of the table in the words of a stack that launches it, as
        `plan_flags.write` states it.

        software: one of its stacks, the first if None. Raises ValueError for a stack
        without configuration.
        """
        from madmax_lib import plan_flags  # a wing

        plan = self._plan(row)
        case = self.problem.case
        if software is None:
            software = self.table["stacks"].iloc[row].split()[0]
        # 8 bits are of the products alone: frameworks state them elsewhere
        dtype = case.dtype if case.dtype in ("bf16", "fp16", "fp32") else None
        if dtype is None:
            warnings.warn(
                f"the configuration is in bf16: say dtype={case.dtype} of the products "
                "in the words of its stack",
                stacklevel=2,
            )
        return plan_flags.write(
            plan,
            software,
            model=case.model,
            global_batch=case.global_batch,
            sequence=case.sequence,
            dtype=dtype,
            devices_per_node=case.cluster.devices_per_node,
        )

    @property
    def software(self) -> str:
        """Software whose plans they are, and as which they are timed."""
        name = self.problem.case.software.name
        if name != "none":
            return f"{name}: only plans it launches, timed with its overlaps"
        stacks = ", ".join(stack.name for stack in self.problem.stacks)
        return (
            f"none named: plans that {stacks} can launch; launched_s: the step under the "
            "first of a plan's stacks; step_s: under tuned Megatron-Core"
        )

    @property
    def too_large(self) -> str:
        """Memory of a recipe, by our count, that does not fit; else empty."""
        if not len(self.beats) or self.beats["fits"].iloc[0]:
            return ""
        device = self.problem.case.device
        needed_gb = self.beats["memory_bytes"].iloc[0] / 1e9
        return (
            f"counted at {needed_gb:.1f} GB the recipe does not fit: {device.name} has "
            f"{usable_bytes(device) / 1e9:.1f} GB; what fits comes first, faster or not"
        )

    @cached_property
    def hint(self) -> str:
        """Another batch or number of devices, where these are the problem; else empty.
        Takes a few small searches.
        """
        layouts = self.layouts.head(_MOST_DIFFERENT)
        return hint(self.problem, layouts) if self.complete else ""

    def _lines(self):
        case = self.problem.case
        rule = "a stack must launch it"
        unlaunched = self.dropped.set_index("rule")["count"].get(rule, 0)
        headline = (
            f"{case.model.name} on {case.cluster.world_size:,} x "
            f"{case.device.name}, batch {case.global_batch:,}: "
            f"{self.evaluated:,} plans in {self.seconds:.1f} s, {self.feasible:,} fit"
        )
        if unlaunched:
            headline += f", {unlaunched:,} more launched by no stack"
        if not len(self.table):
            return [headline, "no plan fits"]
        best = self.table.iloc[0]
        ten = self.different
        lines = [
            headline,
            f"best: {best.plan}, {best.step_s:.3g} s (90 %: {best.low_s:.3g} to "
            f"{best.high_s:.3g} s), MFU {best.mfu:.0%}, "
            f"{best.memory_bytes / 1e9:.0f} GB, {best.stacks}",
            f"why: {ten['why'].iloc[0]}; limit: {ten['limit'].iloc[0]}",
        ]
        if "launched_s" in best:
            lines[1] += f"; {best.launched_s:.3g} s as the first of these"
        if self.problem.is_for_speed and ten["probability"].notna().all():
            chances = ", ".join(
                f"{row.plan} {row.probability:.0%}" for row in ten[:3].itertuples()
            )
            close = _CLOSE if ten["probability"].iloc[0] < 0.5 else ""
            lines.append(f"probability to be the fastest: {chances}{close}")
        lines += filter(None, [self.too_large])
        for row in self.beats[1:].drop_duplicates("count").itertuples():
            lines.append(
                f"{row.changes}: saves {row.saves:.0%} of the recipe's step (90 %: "
                f"{row.saves_low:.0%} to {row.saves_high:.0%})"
            )
        if len(self.beats) == 1:
            lines.append("nothing so near is faster than the recipe")
        lines.append(f"software: {self.software}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return [*lines, _configured(self, best.stacks)]

    def __eq__(self, other):
        """Whether two searches found the same, however long each took."""
        if not isinstance(other, SearchResult):
            return False
        # plans before they are described are numbered by who worked them out
        same = {name: getattr(self, name) for name in ("seconds", "front", "layouts")}
        return same_fields(self, replace(other, **same))

    def __repr__(self):
        return "\n".join(self._lines())

    def _repr_html_(self):
        lines = "<br>".join(self._lines())
        if not len(self.table):
            return f"<p>{lines}</p>"
        memory_gb = self.different["memory_bytes"] / 1e9
        ten = self.different.assign(memory_gb=memory_gb)[_COLUMNS]
        share = "{:.0%}".format
        html = ten.to_html(
            index=False,
            border=0,
            float_format="{:.3g}".format,
            formatters={"mfu": share, "probability": share},
        )
        return f"<p>{lines}</p>{html}"


def _configured(result, stacks):
    """Line that says which framework's configuration can be written."""
    try:
        from madmax_lib.plan_flags.keys import framework_named  # a wing

        framework = framework_named(stacks.split()[0])
        with warnings.catch_warnings(action="ignore"):
            result.configuration()
    except (ImportError, ValueError):
        return f"cannot write a configuration for {stacks}"
    return f"found.configuration() writes it for {framework}"


class Described(NamedTuple):
    """Plans, their steps, and these in parts."""

    table: pd.DataFrame
    steps: Steps
    times: Columns


def described(problem: SearchProblem, columns: Columns) -> Described:
    """Plans with their texts, stacks, intervals, MFU, tokens per second and energy; of
    none an empty table.
    """
    if not len(columns):
        return Described(pd.DataFrame(), None, {})
    parameters = problem.parameters
    table = pd.DataFrame(columns).drop(columns="position").reset_index(drop=True)
    fixed = fixed_fields(problem.case.plan)
    plans = replace(Plans.from_table(table[list(SEARCHED)]), **fixed)
    case = replace(problem.case, plan=plans)
    steps = Steps.of(case)
    times = step_time(steps, parameters)
    seconds = table["step_s"]
    # errors are of the logarithm, so intervals are a factor to either side
    factor = np.exp(log_width(steps, times, parameters))
    launched = _as_launched(case, problem)
    left = table.loc[:, :"step_s"]
    if case.software.name == "none":
        left = left.assign(launched_s=launched["step_s"])
        table["cost_usd"] *= launched["step_s"] / seconds
        # of a recipe that no stack holds as the usual software does
        table["memory_bytes"] = launched["memory_bytes"].fillna(table["memory_bytes"])
    left = left.assign(low_s=seconds / factor, high_s=seconds * factor)
    table = pd.concat([left, table.loc[:, "memory_bytes":]], axis=1)
    device = case.device
    if device.tdp_w > 0:
        table["energy_j"] = case.cluster.world_size * device_energy_j(times, device)
    table.insert(0, "stacks", launched["stacks"])
    table.insert(
        0, "plan", [str(plan_of(row | fixed)) for row in table.to_dict("records")]
    )
    tokens = case.global_batch * case.sequence
    table = table.assign(mfu=case.mfu(seconds), tokens_per_s=tokens / seconds)
    return Described(table, steps, times)


def in_launched_order(problem: SearchProblem, result: PartialResult) -> PartialResult:
    """The same plans in order of the time that their first stacks take; any of them may
    be of the front.
    """
    parts = map(pd.DataFrame, (result.table, result.layouts, result.front))
    rows = pd.concat(parts, ignore_index=True)
    seconds = described(problem, rows).table["launched_s"]
    rows = rows.loc[seconds.sort_values(kind="stable").index]
    table = rows.drop_duplicates(["step_s", "memory_bytes"])
    layouts = rows.drop_duplicates(list(LAYOUT_KEY)).head(MOST_LAYOUTS)
    return replace(result, table=dict(table), layouts=dict(layouts), front=dict(rows))


def _as_launched(case, problem):
    """Stacks that launch and hold each plan of a table, the fastest first or where
    memory is the objective that with least, and step_s and memory_bytes under the first.
    """
    shape = (2, len(problem.stacks), *case.plan.shape)
    seconds, memory_bytes = np.full(shape, np.inf)
    masks = unlaunchable(case, problem.stacks)
    for row, (stack, broken) in enumerate(zip(problem.stacks, masks, strict=True)):
        plans = np.flatnonzero(~np.broadcast_to(broken[0], case.plan.shape))
        if not len(plans):
            continue
        launched = replace(case, plan=case.plan[plans], software=stack)
        peaks = plans_peak_bytes(launched)
        # with one software named, plans were evaluated in its memory already
        fits = bool(problem.case.software) | (peaks <= problem.room_bytes)
        step = step_s(Steps.of(launched), problem.parameters)
        seconds[row, plans] = np.where(fits, step, np.inf)
        memory_bytes[row, plans] = np.where(fits, peaks, np.inf)
    by = memory_bytes if problem.objective == "memory" else seconds
    order = np.argsort(by, axis=0, kind="stable")
    counts = np.isfinite(by).sum(axis=0)
    names = np.array([stack.name for stack in problem.stacks])[order]
    texts = [" ".join(row[:count]) for row, count in zip(names.T, counts, strict=True)]
    first = (order[0], np.arange(len(texts)))
    columns = {"step_s": seconds[first], "memory_bytes": memory_bytes[first]}
    return pd.DataFrame({"stacks": texts, **columns}).replace(np.inf, np.nan)


def different(problem: SearchProblem, columns: Columns) -> pd.DataFrame:
    """The first ten of the best plans of each layout, with probability, why and limit."""
    plans = described(problem, columns)
    if not len(plans.table):
        return plans.table
    seconds = parts_in_words(plans)
    table = plans.table.assign(probability=_chances(plans, problem))
    return table.head(_MOST_DIFFERENT).assign(
        why=_reasons(seconds), limit=_limits(seconds.head(_MOST_DIFFERENT))
    )


def parts_in_words(plans: Described) -> pd.DataFrame:
    """Seconds of each step by what takes them, in words; they add up to the step."""
    seconds = pd.DataFrame({name: plans.times[name] for name in PARTS})
    layers_s = seconds[_LAYER_PARTS].sum(axis=1)
    # full recompute runs the forward pass twice: of forward, forward and a backward
    # pass of twice as much, a quarter is repeated
    seconds["repeated_s"] = layers_s / 4 * (plans.table["recompute"] == "full")
    seconds["work_s"] = layers_s + seconds["head_s"] - seconds["repeated_s"]
    return seconds[_WORDS.index].rename(columns=_WORDS)


def errors_of(plans: Described, problem: SearchProblem) -> np.ndarray:
    """Covariance (n, n) of log(measured / predicted) of plans on one machine; NaN for
    parameters that know no intervals.
    """
    count = len(plans.times["step_s"])
    kind = "mixture" if problem.case.model.experts else "dense"
    width = problem.parameters.residuals.get(f"layouts {kind}")
    if width is None:
        return np.full((count, count), np.nan)
    # what uncertain constants leave
    shared = shared_errors(plans.steps, plans.times, problem.parameters)
    spread = (width / _SIGMAS) ** 2  # variance of the log ratio of two plans' steps
    # Var(a - b) = Var(a) + Var(b) - 2 Cov(a, b): what constants explain of it; half of
    # the rest belongs to each of the two plans
    variances = shared.diagonal()
    explained = (np.add.outer(variances, variances) - 2 * shared)[
        np.triu_indices(count, 1)
    ]
    rest = spread - np.median(explained) if explained.size else spread
    rest = max(rest, _LEAST_OWN * spread)
    return shared + rest / 2 * np.eye(count)


def _chances(plans, problem):
    """Probability of each plan to be the fastest; NaN where errors are unknown."""
    count = len(plans.times["step_s"])
    covariance = errors_of(plans, problem)
    if np.isnan(covariance).any():
        return np.full(count, np.nan)
    # correlated errors are the root of their covariance times independent ones
    root = np.linalg.cholesky(covariance)
    errors = np.random.default_rng(0).standard_normal((_DRAWS, count)) @ root.T
    seconds = plans.table.get("launched_s", plans.times["step_s"])
    fastest = np.argmin(np.asarray(np.log(seconds)) + errors, axis=1)
    return np.bincount(fastest, minlength=count) / _DRAWS


def _limits(seconds):
    """The two largest parts of each step beside compute, as shares of it."""
    shares = seconds.div(seconds.sum(axis=1), axis=0).drop(columns="compute")
    limits = []
    for _, row in shares.iterrows():
        largest = row[row > _NOT_WORTH_SAYING].nlargest(2).items()
        words = [f"{name} {share:.0%}" for name, share in largest]
        limits.append(", ".join(words) or "compute alone")
    return limits


def _reasons(seconds):
    """The part in which each of the first steps saves most beside the median of all, in
    shares of the median step.
    """
    if len(seconds) == 1:
        return ["no other way to split it fits"]
    step_s = seconds.sum(axis=1).median()
    saved = ((seconds.median() - seconds) / step_s).head(_MOST_DIFFERENT)
    return [
        f"saves {share:.0%} of a step in {part}"
        if share > _NOT_WORTH_SAYING
        else "no part stands out"
        for share, part in zip(saved.max(axis=1), saved.idxmax(axis=1), strict=True)
    ]
