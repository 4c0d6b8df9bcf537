"""Constants from a user's own trace: kernel seconds of a measured Timeline against the
model's.

Profile a run, fit, then predict what cannot be run:
`estimate(..., parameters=fit_timeline(...))`. Matrix products, attention, pointwise
work, optimizer and the time of the whole step give one constant each, of several traces
together; all-reduces inside a node give the share of the link. Everything else keeps
the constants it starts from. A trace that cannot be one of its case is refused
(`trace_checks`), what the fit leaves of each part is told, and the interval of a step
holds it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.base import NS_PER_S
from madmax_lib.base.collectives import TIMED, bus_factor
from madmax_lib.calibration.fit import SCALE
from madmax_lib.calibration.scale import FittingScale, covariance_of
from madmax_lib.calibration.trace_checks import check_trace, fit_notes
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.plan import Case
from madmax_lib.simulator import Parameters, bounds, shipped, step_time
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.uncertainty import log_width
from madmax_lib.timeline import Timeline, ends_ns
from madmax_lib.timeline.kinds import collective_names
from madmax_lib.traces import calls
from madmax_lib.traces.waits.launch import device_work

# part of a step: class of data/op_classes.csv whose pattern its kernels match, the
# first that does
_CLASSES = {"optimizer_s": "optimizer", "attention_s": "attention", "gemm_s": "gemm"}
_CUBLAS = {"gemm_s": "nvjet"}  # names on Hopper and Blackwell, further patterns
_FITTED = ("gemm_s", "attention_s", "pointwise_s", "optimizer_s", "step_s")
_LARGE_BYTES = 1e6  # smaller messages show latency, not bandwidth
_FROM_BOUND = 1e-6  # where `least_squares` may begin
_WIDER = (
    1 + 1e-6
)  # of a variance, so that the interval holds what it must after rounding


@dataclass(frozen=True)
class _Run:
    """A traced run: the step as the model times it, and its measured seconds by part."""

    case: Case
    steps: Steps
    measured: dict[str, float]


def kernel_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds per step of compute kernels by cause (gemm_s, attention_s, optimizer_s,
    pointwise_s) and of the step itself (step_s).

    What a call of an optimizer launches is its work, whatever the kernels are called.
    Medians over ranks and steps; a step lasts from its first span on a device to its
    last. Spans outside of steps (step -1) count if there are no others. Raises
    ValueError if there is no compute span.
    """
    spans = _in_steps(timeline)
    compute = spans[spans["kind"] == "compute"]
    if compute.empty:
        raise ValueError("timeline: no compute span, nothing to fit")
    names = compute["name"].astype(str)
    causes = names.map({name: _cause(name) for name in names.unique()})
    causes = causes.mask(_in_optimizer(timeline, compute), "optimizer_s")
    by_cause = compute["dur_ns"].groupby([compute["rank"], compute["step"], causes])
    # a rank without kernels of a cause spends nothing on it
    sums_s = by_cause.sum().unstack(fill_value=0) / NS_PER_S
    causes = [*_CLASSES, "pointwise_s"]
    seconds = sums_s.reindex(columns=causes, fill_value=0.0).median().to_dict()
    return seconds | {"step_s": float(step_seconds(timeline).median())}


def step_seconds(timeline: Timeline) -> pd.Series:
    """Seconds of each rank and step, from its first span on a device to its last."""
    spans = _in_steps(timeline)
    ends = spans.assign(end_ns=spans["start_ns"] + spans["dur_ns"])
    ends = ends.groupby(["rank", "step"])
    return (ends["end_ns"].max() - ends["start_ns"].min()) / NS_PER_S


def _in_optimizer(timeline, compute):
    """Whether each compute span (n,) is launched, or on a host runs, in a call that
    torch's profiler labels as a step of an optimizer.
    """
    spans = timeline.spans
    is_call = spans["name"].str.startswith("Optimizer.step#") & (spans["stream"] < 0)
    marks = spans.loc[is_call, ["rank", "start_ns", "dur_ns"]]
    launched = device_work(timeline).query("launch_row >= 0").set_index("row")
    launched = launched.loc[launched.index.intersection(compute.index), "launch_ns"]
    issued = compute[["rank", "start_ns"]].assign(row=compute.index)
    issued.loc[launched.index, "start_ns"] = launched
    # the last call that began before the launch of each span
    nearest = pd.merge_asof(
        issued.sort_values("start_ns"),
        marks.assign(end_ns=ends_ns(marks)).sort_values("start_ns"),
        on="start_ns",
        by="rank",
    )
    inside = nearest["start_ns"] < nearest["end_ns"]
    return inside.set_axis(nearest["row"]).reindex(compute.index)


def _in_steps(timeline):
    """Device work; where steps are marked, that outside of them is no part of one."""
    spans = timeline.spans
    spans = spans[spans["kind"].isin(["compute", "comm", "memcpy"])]
    is_marked = spans["step"] >= 0
    return spans[is_marked] if is_marked.any() else spans


def fit_timeline(
    timeline: Timeline | Sequence[Timeline], case: Case | Sequence[Case]
) -> Parameters:
    """Constants that make the model meet measured runs, their software ones of the
    catalog.

    timeline, case: one trace and its run, or as many of both: of GPUs or of processes
    on a CPU; of a pipeline one stage or all, which are fitted to the one that computes
    longest. The rest comes from the shipped constants; bounds and priors are those of
    `data/parameter_bounds.csv`, the priors around the shipped ones.
    provenance["errors"]: predicted / measured - 1 of each part and the step, a dict per
    run; provenance["notes"]: what of it no constant can meet, in words. The interval of
    each run's step holds what was measured: residuals["stranger"] grows until it does.
    Raises ValueError for a trace without compute, and one that cannot be of its case:
    device, dtype, FLOPs or groups.
    """
    traces = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    cases = [case] if isinstance(case, Case) else list(case)
    if not traces or len(traces) != len(cases):
        raise ValueError(
            f"{len(traces)} traces and {len(cases)} cases: each trace needs its own"
        )
    for trace, case in zip(traces, cases, strict=True):
        check_trace(trace, case)
    begin = shipped()
    runs = []
    constants = dict(begin.constants)
    names = {}  # an ordered set
    for trace, case in zip(traces, cases, strict=True):
        run = _Run(case, _steps(case), slowest_stage(trace, case))
        constants |= _link_share(trace, run)
        names |= dict.fromkeys(_constants_of(run))
        runs.append(run)
    links = begin.links
    collectives = _collectives(traces, cases)
    collectives = {**begin.collectives, **collectives}
    if collectives and not links:
        ends = (cases[0].cluster.intra, cases[0].cluster.inter)
        links = tuple(link.bandwidth_bytes_per_s for link in ends)
    # constants that any of the runs tells, fitted to all of them together
    scale = FittingScale.of(names)
    # the kernels of a run may be slower than those of all published ones
    scale = replace(scale, low=scale.low - np.log(2) * scale.logarithmic)
    solution = _solve(
        runs, Parameters(constants=constants, collectives=collectives), scale
    )
    begin = replace(begin, constants=constants, collectives=collectives, links=links)
    fitted = scale.solved(begin, solution.x, covariance_of(solution))
    origin = _origin(traces, runs, fitted)
    residuals = _wide_enough(fitted, runs)
    return replace(fitted, residuals=residuals, provenance=origin)


def _origin(traces, runs, fitted):
    """Provenance of a fit: what was measured, and what it leaves of it."""
    errors = []
    notes = []
    for trace, run in zip(traces, runs, strict=True):
        seconds = _seconds(run.steps, fitted)
        missed = {
            part: seconds[part] / measured - 1
            for part, measured in run.measured.items()
            if measured > 0
        }
        errors.append(missed)
        notes += fit_notes(trace, run.case, missed, fitted)
    return {
        "source": "timeline",
        "device": traces[0].meta.device,
        **runs[0].measured,
        "errors": errors,
        "scale": fitted.provenance.get("scale", {}),
        "notes": notes,
    }


def _constants_of(run):
    """Constants that a run can tell, by the classes of its device and kernels."""
    machine = run.steps.machine
    kernels = run.steps.traits.kernels
    classes = {
        "gemm_efficiency": machine.gemm,
        "attention_efficiency": machine.attention,
        "pointwise_factor": kernels,
        "step_s": kernels,
    }
    for name, of_class in classes.items():
        yield of_class.keys(name, bounds().index)[0]
    if run.measured["optimizer_s"] > 0:
        yield "optimizer_factor"


def _solve(runs, begin, scale):
    """Least squares over the constants of the scale; the others are those of begin."""
    prior = np.clip(scale.point(begin.constants), scale.low, scale.high)

    def residuals(point):
        parameters = scale.moved(begin, point)
        errors = []
        for run in runs:
            seconds = _seconds(run.steps, parameters)
            # a part that the plan has not, as LoRA's optimizer, fits nothing
            errors += [
                np.log(seconds[part] / run.measured[part]) / SCALE
                for part in _FITTED
                if min(seconds[part], run.measured[part]) > 0
            ]
        return np.array([*errors, *((point - prior) / scale.sigma)])

    inside = np.clip(prior, scale.low + _FROM_BOUND, scale.high - _FROM_BOUND)
    return least_squares(residuals, inside, bounds=(scale.low, scale.high))


def _collectives(traces, cases):
    """Collectives of traces of all ranks, as `Parameters` take them: groups with two
    sizes or more.
    """
    tables = []
    for trace, case in zip(traces, cases, strict=True):
        table = calls(trace)
        matched = (table["call"] >= 0) & (table["size_bytes"] > 0)
        table = table[matched & (table["duration_s"] > 0)]
        is_exposed = table["exposed_s"] > table["duration_s"] / 2
        table = table.assign(is_exposed=is_exposed)
        # a call takes what the rank that came last sees: the others wait for it
        table = table.groupby("call").agg(
            collective=("collective", "first"),
            ranks=("group_size", "first"),
            size_bytes=("size_bytes", "max"),
            seconds=("duration_s", "min"),
            exposed=("is_exposed", "mean"),
        )
        # rounded up to whole nodes
        nodes = -(-table["ranks"] // case.cluster.devices_per_node)
        both = {"send": "send_recv", "recv": "send_recv"}
        table = table.assign(nodes=nodes, collective=table["collective"].replace(both))
        on_cpu = case.device.family == "cpu"
        table = _with_cores(table) if on_cpu else table
        tables.append(table)
        if on_cpu:
            # gloo reduces and scatters by an all-reduce
            reduces = table[table["collective"] == "all_reduce"]
            tables.append(reduces.assign(collective="reduce_scatter"))
    rows = pd.concat(tables)
    rows = rows[rows["collective"].isin(TIMED)]
    groups = rows.groupby(["collective", "ranks", "nodes"])["size_bytes"]
    # a line through one size tells no latency
    rows = rows[groups.transform("nunique") > 1]
    return MeasuredCollectives(rows).curves if len(rows) else {}


def _with_cores(calls):
    """Seconds of collectives by kind, group and size as they take with cores of their
    own, of calls of processes on a CPU.

    A call under compute waits for cores that others have. Of a size that is seen only so
    the fastest call counts, at no more seconds a byte than one that nothing hides:
        t(s) <= s min(t_exposed / s_exposed)
    """
    group = ["collective", "ranks", "nodes"]
    by_size = calls.groupby([*group, "size_bytes"])["seconds"]
    exposed = calls[calls["exposed"] > 0.5].groupby([*group, "size_bytes"])["seconds"]
    table = by_size.min().rename("fastest_s").reset_index()
    table = table.merge(exposed.median().rename("exposed_s").reset_index(), how="left")
    per_byte = (table["exposed_s"] / table["size_bytes"]).groupby(
        [table[name] for name in group]
    )
    most_s = table["size_bytes"] * per_byte.transform("min")
    seconds = table["exposed_s"].fillna(np.fmin(table["fastest_s"], most_s))
    return table.assign(seconds=seconds)


def slowest_stage(timeline: Timeline, case: Case) -> dict[str, float]:
    """`kernel_seconds`, of a pipeline those of the rank that computes longest: it is
    what the model times.
    """
    if case.plan.pp == 1:
        return kernel_seconds(timeline)
    ranks = [kernel_seconds(timeline.select(ranks=[rank])) for rank in timeline.ranks]
    # the longest kernels; a step is as long as the slowest rank's
    slowest = max(ranks, key=lambda seconds: sum(seconds.values()) - seconds["step_s"])
    return slowest | {"step_s": max(seconds["step_s"] for seconds in ranks)}


def _wide_enough(parameters, runs):
    """Residuals whose interval of each run's step holds what was measured."""
    residuals = dict(parameters.residuals)
    if "quantile" not in residuals:
        return residuals
    for run in runs:
        steps = Steps.of(run.case)
        times = step_time(steps, parameters)
        error = float(np.log(times["step_s"][0] / run.measured["step_s"]))
        width = float(np.ravel(log_width(steps, times, parameters))[0])
        # variances add, each the half-width over the quantile, squared
        missing = (error**2 - width**2) / residuals["quantile"] ** 2
        if missing > 0:
            variance = residuals["stranger"] ** 2 + missing * _WIDER
            residuals["stranger"] = float(np.sqrt(variance))
            parameters = replace(parameters, residuals=residuals)
    return residuals


def _steps(case):
    """The run as a step to be timed, its collectives beside no products."""
    return Steps.of(case.with_plan(overlap_tp=False))


def _seconds(steps, parameters):
    """Seconds of a step by cause; the head's matrix products count as such."""
    times = step_time(steps, parameters)
    seconds = {name: float(value[0]) for name, value in times.items()}
    return seconds | {"gemm_s": seconds["gemm_s"] + seconds["head_s"]}


def _cause(name):
    """The first cause whose pattern is in the name; other kernels are pointwise."""
    causes = (cause for cause, pattern in _patterns() if pattern.search(name))
    return next(causes, "pointwise_s")


@lru_cache(maxsize=1)
def _patterns():
    """Causes with the patterns of their kernels' names, in order."""
    table = catalog.table("op_classes").set_index("class")["pattern"]
    patterns = []
    for cause, kind in _CLASSES.items():
        text = "|".join(filter(None, [table[kind], _CUBLAS.get(cause)]))
        patterns.append((cause, re.compile(text, re.IGNORECASE)))
    return patterns


def _link_share(timeline, run):
    """Share of the link that large all-reduces reach.

    Nothing unless all devices of the run are one group inside a node.
    """
    plan = run.case.plan
    cluster = run.case.cluster
    ranks = plan.world_size
    one_group = max(plan.dp, plan.tp, plan.cp) == ranks
    if not (one_group and 1 < ranks <= cluster.devices_per_node):
        return {}
    spans = timeline.spans
    large = spans["size_bytes"].fillna(0).astype(float) >= _LARGE_BYTES
    spans = spans[(spans["kind"] == "comm") & large]
    if len(spans):
        # other collectives pass other multiples of their size on
        names = collective_names(spans["name"].astype(str).tolist())
        spans = spans[names == "all_reduce"]
    if spans.empty:
        return {}
    sent_bytes = bus_factor("all_reduce", ranks) * spans["size_bytes"].astype(float)
    rate = float((sent_bytes / (spans["dur_ns"] / NS_PER_S)).median())
    (name,) = run.steps.machine.near.keys("link_share", bounds().index)
    # a share outside the bounds would be no share of this link
    low, high = bounds().loc[name, ["low", "high"]]
    share = rate / cluster.intra.bandwidth_bytes_per_s
    return {name: min(max(share, low), high)}
