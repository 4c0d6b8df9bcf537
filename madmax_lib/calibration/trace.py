"""What does a user's own trace say about the constants? Kernel seconds of a measured
Timeline against the model's.

Profile a run, fit, then predict what cannot be run:
`estimate(..., parameters=fit_timeline(...))`. Matrix products, attention, pointwise
work, optimizer and the time of the whole step give one constant each, of several traces
together; all-reduces inside a node give the share of the link. Everything else keeps
the constants it starts from. A trace that cannot be one of its case is refused
(`trace_checks`), what the fit leaves of each part is told, and the interval of a step
holds it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.calibration.fit import SCALE, posterior
from madmax_lib.calibration.trace_checks import check_trace
from madmax_lib.catalog.measured_collectives import KINDS, MeasuredCollectives
from madmax_lib.plan.case import Case
from madmax_lib.simulator.costs.inputs import ClassColumn, Steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds, shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.simulator.uncertainty import log_width
from madmax_lib.timeline.kinds import collective_names
from madmax_lib.timeline.timeline import Meta, Timeline
from madmax_lib.traces.comm.collectives import bus_factor, calls

__all__ = ["fit_timeline", "kernel_seconds", "kernel_timeline", "slowest_stage"]

_CAUSES = {
    "optimizer_s": "optimizer",
    "attention_s": "attention",
    "gemm_s": "gemm",
}  # classes of data/op_classes.csv
_NEWER = {"gemm_s": "nvjet"}  # names of cuBLAS on Hopper and Blackwell
_OF_KERNELS = ("pointwise_factor", "step_s")  # constants of how kernels are made
_FITTED = ("gemm_s", "attention_s", "pointwise_s", "optimizer_s", "step_s")
_LARGE_BYTES = 1e6  # smaller messages show latency, not bandwidth
_KERNELS = {
    "gemm_s": "sm90_xmma_gemm_bf16",
    "attention_s": "flash_fwd_kernel",
    "pointwise_s": "vectorized_elementwise_kernel",
    "optimizer_s": "multi_tensor_apply_kernel",
}


def kernel_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds per step of compute kernels by cause (gemm_s, attention_s, optimizer_s,
    pointwise_s) and of the
    step itself (step_s).

    Medians over ranks and steps; a step lasts from its first span on a device to its
    last. Spans outside of steps (step -1) count if there are no others. Raises
    ValueError if there is no compute span.
    """
    spans = timeline.spans
    spans = spans[spans["kind"].isin(["compute", "comm", "memcpy"])]
    spans = spans[spans["step"] >= 0] if (spans["step"] >= 0).any() else spans
    compute = spans[spans["kind"] == "compute"]
    if compute.empty:
        raise ValueError("timeline: no compute span, nothing to fit")
    names = compute["name"].astype(str)
    causes = {name: _cause(name) for name in names.unique()}
    seconds = compute["dur_ns"].astype(float) / 1e9
    sums = (
        seconds.groupby([compute["rank"], compute["step"], names.map(causes)])
        .sum()
        .unstack(fill_value=0.0)
    )
    result = {
        cause: float(sums[cause].median()) if cause in sums else 0.0
        for cause in (*_CAUSES, "pointwise_s")
    }
    ends = spans.assign(end_ns=spans["start_ns"] + spans["dur_ns"]).groupby(
        ["rank", "step"]
    )
    result["step_s"] = float(
        ((ends["end_ns"].max() - ends["start_ns"].min()) / 1e9).median()
    )
    return result


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
    run. The interval of each run's step holds what was measured: residuals["stranger"]
    grows until it does. Raises ValueError for a trace without compute, and one that
    cannot be of its case: device, dtype, FLOPs or groups.
    """
    traces = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    cases = [case] if isinstance(case, Case) else list(case)
    if not traces or len(traces) != len(cases):
        raise ValueError(
            f"{len(traces)} traces and {len(cases)} cases: each trace needs its own"
        )
    for trace, of in zip(traces, cases, strict=True):
        check_trace(trace, of)
    begin = shipped()
    runs = []
    start = {}
    names = {}
    for trace, of in zip(traces, cases, strict=True):
        steps = _steps(of)
        runs.append((steps, slowest_stage(trace, of)))
        start |= _link_share(trace, of, steps.machine.near)
        classes = {
            "gemm_efficiency": steps.machine.gemm,
            "attention_efficiency": steps.machine.attention,
        }
        classes |= dict.fromkeys(_OF_KERNELS, steps.traits.kernels)
        names |= {
            coded.keys(name, bounds().index)[0]: None for name, coded in classes.items()
        }
        names |= {"optimizer_factor": None} if runs[-1][1]["optimizer_s"] > 0 else {}
    start = dict(begin.constants) | start
    names = list(names)
    collectives = {**begin.collectives, **_collectives(traces, cases)}
    first = cases[0].cluster
    solution, edges = _solve(runs, start, names, collectives)
    covariance, *ends = posterior(solution)
    ends = np.exp(np.clip(ends, *edges)).T.tolist()
    fitted = replace(
        begin,
        constants=start | dict(zip(names, np.exp(solution.x).tolist(), strict=True)),
        intervals={
            **begin.intervals,
            **dict(zip(names, map(tuple, ends), strict=True)),
        },
        fitted=tuple(names),
        covariance=tuple(map(tuple, covariance.tolist())),
        collectives=collectives,
        links=begin.links
        or tuple(
            link.bandwidth_bytes_per_s
            for link in (first.intra, first.inter)
            if collectives
        ),
    )
    errors = [_errors(_seconds(steps, fitted), measured) for steps, measured in runs]
    origin = {
        "source": "timeline",
        "device": traces[0].meta.device,
        **runs[0][1],
        "errors": errors,
    }
    origin |= {"scale": begin.provenance.get("scale", {})}
    return replace(
        fitted, residuals=_wide_enough(fitted, cases, runs), provenance=origin
    )


def _solve(
    runs: list[tuple[Steps, dict]],
    start: dict[str, float],
    names: list[str],
    collectives: dict[str, tuple],
):
    """Least squares over the logarithms of the named constants, and their bounds; runs:
    steps and measured seconds.
    """
    table = bounds().loc[names]
    low, high, sigma = (
        table[column].to_numpy(float) for column in ("low", "high", "sigma")
    )
    prior = np.log(np.clip([start[name] for name in names], low, high))
    edges = (np.log(low), np.log(high))

    def residuals(point: np.ndarray) -> np.ndarray:
        constants = start | dict(zip(names, np.exp(point).tolist(), strict=True))
        parameters = Parameters(constants=constants, collectives=collectives)
        of_parts = []
        for steps, measured in runs:
            seconds = _seconds(steps, parameters)
            of_parts += [
                np.log(seconds[part] / measured[part]) / SCALE
                for part in _FITTED
                if measured[part] > 0
            ]
        return np.array([*of_parts, *((point - prior) / sigma)])

    inside = np.clip(prior, edges[0] + 1e-6, edges[1] - 1e-6)
    return least_squares(residuals, inside, bounds=edges), edges


def _collectives(traces: list[Timeline], cases: list[Case]) -> dict[str, tuple]:
    """What traces of all ranks show of their collectives, as `Parameters` take it:
    groups with two sizes or more.

    A call takes what the rank that came last sees. gloo reduces and scatters by an
    all-reduce.
    """
    tables = []
    for trace, case in zip(traces, cases, strict=True):
        table = calls(trace)
        table = table[
            (table["call"] >= 0) & (table["size_bytes"] > 0) & (table["duration_s"] > 0)
        ]
        keys = {
            "collective": "first",
            "group_size": "first",
            "size_bytes": "max",
            "duration_s": "min",
        }
        table = table.groupby("call").agg(keys).assign(nodes=1)
        table["nodes"] = -(-table["group_size"] // case.cluster.devices_per_node)
        table["collective"] = table["collective"].replace(
            {"send": "send_recv", "recv": "send_recv"}
        )
        tables.append(table)
        if case.cluster.device.family == "cpu":
            tables.append(
                table[table["collective"] == "all_reduce"].assign(
                    collective="reduce_scatter"
                )
            )
    rows = pd.concat(tables).rename(
        columns={"group_size": "ranks", "duration_s": "seconds"}
    )
    rows = rows[rows["collective"].isin(KINDS)]
    sizes = rows.groupby(["collective", "ranks", "nodes"])["size_bytes"].transform(
        "nunique"
    )
    return MeasuredCollectives(rows[sizes > 1]).curves if (sizes > 1).any() else {}


def slowest_stage(timeline: Timeline, case: Case) -> dict[str, float]:
    """`kernel_seconds`, of a pipeline those of the rank that computes longest: it is
    what the model times.
    """
    if case.plan.pp == 1:
        return kernel_seconds(timeline)
    ranks = [kernel_seconds(timeline.select(ranks=[rank])) for rank in timeline.ranks]
    slowest = max(ranks, key=lambda seconds: sum(seconds.values()) - seconds["step_s"])
    return slowest | {"step_s": max(seconds["step_s"] for seconds in ranks)}


def _errors(seconds: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    return {
        part: seconds[part] / value - 1 for part, value in measured.items() if value > 0
    }


def _wide_enough(
    parameters: Parameters, cases: list[Case], runs: list[tuple]
) -> dict[str, float]:
    """Residuals whose interval of each case's step holds what was measured."""
    residuals = dict(parameters.residuals)
    if "quantile" not in residuals:
        return residuals
    for case, (_, measured) in zip(cases, runs, strict=True):
        steps = Steps.of(case)
        times = step_time(steps, parameters)
        error = abs(float(np.log(times["step_s"][0] / measured["step_s"])))
        width = float(np.ravel(log_width(steps, times, parameters))[0])
        missing = (error / residuals["quantile"]) ** 2 - (
            width / residuals["quantile"]
        ) ** 2
        if missing > 0:
            residuals["stranger"] = float(
                np.sqrt(residuals["stranger"] ** 2 + missing * (1 + 1e-6))
            )
            parameters = replace(parameters, residuals=residuals)
    return residuals


def kernel_timeline(
    case: Case,
    parameters: Parameters,
    *,
    steps: int = 5,
    noise: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """Not a recording: what a profiler would show of a machine with these constants,
    one kernel per cause and step.

    noise: standard deviation of the logarithm of a kernel's time. It shows what
    `fit_timeline` can find: the constants that made it are known. Raises ValueError for
    a pipeline.
    """
    if case.plan.pp > 1:
        raise ValueError(
            f"pp={case.plan.pp}: a pipeline's kernels belong to different stages; "
            "profile with pp=1"
        )
    parts = _seconds(_steps(case), parameters)
    random = np.random.default_rng(seed)
    rows = []
    now = 0
    for step in range(steps):
        begin = now
        for cause, name in _KERNELS.items():
            length = round(
                parts[cause] * np.exp(noise * random.standard_normal()) * 1e9
            )
            rows.append((7, "compute", name, now, length, step))
            now += length
        now = max(now, begin + round(parts["step_s"] * 1e9))
        rows.append(
            (8, "memcpy", "Memcpy DtoH", now - 1, 1, step)
        )  # the loss is read: the step ends
    spans = pd.DataFrame(
        rows, columns=["stream", "kind", "name", "start_ns", "dur_ns", "step"]
    )
    spans = spans.assign(rank=0, correlation=-1, op=-1, group=None, size_bytes=np.nan)
    origin = {
        "model": case.model.name,
        "cluster": case.cluster.name,
        "nodes": case.cluster.nodes,
    }
    origin |= {"plan": str(case.plan), "global_batch": case.global_batch}
    return Timeline(
        spans,
        Meta(source="simulated", device=case.cluster.device.name, provenance=origin),
    )


def _steps(case: Case) -> Steps:
    """The run as a step to be timed, its collectives beside no products."""
    return Steps.of(replace(case, plan=replace(case.plan, overlap_tp=False)))


def _seconds(steps: Steps, parameters: Parameters) -> dict[str, float]:
    """Seconds of a step by cause; the head's matrix products count as such."""
    seconds = {
        name: float(value[0]) for name, value in step_time(steps, parameters).items()
    }
    return seconds | {"gemm_s": seconds["gemm_s"] + seconds["head_s"]}


def _cause(name: str) -> str:
    """The first cause whose pattern is in the name; other compute kernels are
    pointwise.
    """
    return next(
        (cause for cause, pattern in _patterns() if pattern.search(name)), "pointwise_s"
    )


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[str, re.Pattern]]:
    table = catalog.table("op_classes").set_index("class")["pattern"]
    texts = {
        cause: "|".join(filter(None, [table[kind], _NEWER.get(cause)]))
        for cause, kind in _CAUSES.items()
    }
    return [(cause, re.compile(text, re.IGNORECASE)) for cause, text in texts.items()]


def _link_share(timeline: Timeline, case: Case, near: ClassColumn) -> dict[str, float]:
    """Share of the link that large all-reduces reach, where all devices of the run are
    one group inside a node.
    """
    plan = case.plan
    ranks = case.plan.world_size
    spans = timeline.spans
    if (
        not 1 < ranks <= case.cluster.devices_per_node
        or max(plan.dp, plan.tp, plan.cp) != ranks
    ):
        return {}
    spans = spans[
        (spans["kind"] == "comm")
        & (spans["size_bytes"].fillna(0).astype(float) >= _LARGE_BYTES)
    ]
    spans = (
        spans[collective_names(spans["name"].astype(str).tolist()) == "all_reduce"]
        if len(spans)
        else spans
    )
    if spans.empty:
        return {}
    rates = (
        bus_factor("all_reduce", ranks)
        * spans["size_bytes"].astype(float)
        / (spans["dur_ns"] / 1e9)
    )
    (name,) = near.keys("link_share", bounds().index)
    share = float(rates.median() / case.cluster.intra.bandwidth_bytes_per_s)
    low, high = bounds().loc[name, ["low", "high"]]
    return {name: min(max(share, low), high)}
