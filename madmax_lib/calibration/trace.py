"""What does a user's own trace say about the constants? Kernel seconds of a measured Timeline against the model's.

Profile one device or one node, fit, then predict what cannot be run: `estimate(..., parameters=fit_timeline(...))`.
Matrix products, attention, pointwise work and the time of the whole step give one constant each; all-reduces inside a
node give the share of the link. Everything else keeps the constants it starts from.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.calibration.fit import SCALE, posterior
from madmax_lib.case import Case
from madmax_lib.kinds import collective_names
from madmax_lib.simulator.rates.parameters import Parameters, bounds, shipped
from madmax_lib.simulator.step.inputs import Coded, Steps
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.timeline import Meta, Timeline
from madmax_lib.traces.comm.collectives import bus_factor

__all__ = ["fit_timeline", "kernel_seconds", "kernel_timeline"]

_CAUSES = {"optimizer_s": "optimizer", "attention_s": "attention", "gemm_s": "gemm"}  # classes of data/op_classes.csv
_NEWER = {"gemm_s": "nvjet"}  # names of cuBLAS on Hopper and Blackwell
_OF_KERNELS = ("pointwise_factor", "step_s")  # constants of how kernels are made
_LARGE_BYTES = 1e6  # smaller messages show latency, not bandwidth
_KERNELS = {
    "gemm_s": "sm90_xmma_gemm_bf16",
    "attention_s": "flash_fwd_kernel",
    "pointwise_s": "vectorized_elementwise_kernel",
    "optimizer_s": "multi_tensor_apply_kernel",
}


def kernel_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds per step of compute kernels by cause (gemm_s, attention_s, optimizer_s, pointwise_s) and of the
    step itself (step_s).

    Medians over ranks and steps; a step lasts from its first span on a device to its last. Spans outside of steps
    (step -1) count if there are no others. Raises ValueError if there is no compute span.
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
    sums = seconds.groupby([compute["rank"], compute["step"], names.map(causes)]).sum().unstack(fill_value=0.0)
    result = {cause: float(sums[cause].median()) if cause in sums else 0.0 for cause in (*_CAUSES, "pointwise_s")}
    ends = spans.assign(end_ns=spans["start_ns"] + spans["dur_ns"]).groupby(["rank", "step"])
    result["step_s"] = float(((ends["end_ns"].max() - ends["start_ns"].min()) / 1e9).median())
    return result


def fit_timeline(timeline: Timeline, case: Case, begin: Parameters | None = None) -> Parameters:
    """Constants that make the model meet a measured run of this case, its software one of the catalog.

    begin: where the rest comes from, the shipped constants if None. Bounds and priors are those of
    `data/parameter_bounds.csv`, the priors around `begin`. Raises ValueError for a pipeline (profile one stage instead)
    and a Timeline without compute.
    """
    steps = _steps(case)
    begin, measured = begin or shipped(), kernel_seconds(timeline)
    machine, kernels = steps.machine, steps.habits.kernels
    start = dict(begin.constants) | _link_share(timeline, case, machine.near)
    classes = {"gemm_efficiency": machine.gemm, "attention_efficiency": machine.attention}
    names = [of.keys(name, bounds().index)[0] for name, of in (classes | dict.fromkeys(_OF_KERNELS, kernels)).items()]
    solution, edges = _solve(steps, start, names, measured)
    covariance, *ends = posterior(solution)
    ends = np.exp(np.clip(ends, *edges)).T.tolist()
    return Parameters(
        constants=start | dict(zip(names, np.exp(solution.x).tolist(), strict=True)),
        intervals={**begin.intervals, **dict(zip(names, map(tuple, ends), strict=True))},
        fitted=tuple(names),
        covariance=tuple(map(tuple, covariance.tolist())),
        residuals=begin.residuals,
        sensitivities=begin.sensitivities,
        provenance={"source": "timeline", "device": timeline.meta.device, **measured},
    )


def _solve(steps: Steps, start: dict[str, float], names: list[str], measured: dict[str, float]):
    """Least squares over the logarithms of the named constants, and their bounds."""
    table = bounds().loc[names]
    low, high, sigma = (table[column].to_numpy(float) for column in ("low", "high", "sigma"))
    prior, edges = np.log(np.clip([start[name] for name in names], low, high)), (np.log(low), np.log(high))
    causes = [cause for cause in ("gemm_s", "attention_s", "pointwise_s", "step_s") if measured[cause] > 0]

    def residuals(point: np.ndarray) -> np.ndarray:
        constants = start | dict(zip(names, np.exp(point).tolist(), strict=True))
        seconds = _seconds(steps, Parameters(constants=constants))
        of_causes = [np.log(seconds[cause] / measured[cause]) / SCALE for cause in causes]
        return np.array([*of_causes, *((point - prior) / sigma)])

    inside = np.clip(prior, edges[0] + 1e-6, edges[1] - 1e-6)
    return least_squares(residuals, inside, bounds=edges), edges


def kernel_timeline(
    case: Case, parameters: Parameters, *, steps: int = 5, noise: float = 0.0, seed: int = 0
) -> Timeline:
    """Not a recording: what a profiler would show of a machine with these constants, one kernel per cause and step.

    noise: standard deviation of the logarithm of a kernel's time. It shows what `fit_timeline` can find: the constants
    that made it are known. Raises ValueError for a pipeline.
    """
    parts = _seconds(_steps(case), parameters)
    random, rows, now = np.random.default_rng(seed), [], 0
    for step in range(steps):
        begin = now
        for cause, name in _KERNELS.items():
            length = round(parts[cause] * np.exp(noise * random.standard_normal()) * 1e9)
            rows.append((7, "compute", name, now, length, step))
            now += length
        now = max(now, begin + round(parts["step_s"] * 1e9))
        rows.append((8, "memcpy", "Memcpy DtoH", now - 1, 1, step))  # the loss is read: the step ends
    spans = pd.DataFrame(rows, columns=["stream", "kind", "name", "start_ns", "dur_ns", "step"])
    spans = spans.assign(rank=0, correlation=-1, op=-1, group=None, size_bytes=np.nan)
    origin = {"model": case.model.name, "cluster": case.cluster.name, "nodes": case.cluster.nodes}
    origin |= {"plan": str(case.plan), "global_batch": case.global_batch}
    return Timeline(spans, Meta(source="simulated", device=case.cluster.device.name, provenance=origin))


def _steps(case: Case) -> Steps:
    """The run as a step to be timed, its collectives beside no products. Raises ValueError for a pipeline."""
    if case.plan.pp > 1:
        raise ValueError(f"pp={case.plan.pp}: a pipeline's kernels belong to different stages; profile with pp=1")
    return Steps.of(replace(case, plan=replace(case.plan, overlap_tp=False)))


def _seconds(steps: Steps, parameters: Parameters) -> dict[str, float]:
    """Seconds of a step by cause; the head's matrix products count as such."""
    seconds = {name: float(value[0]) for name, value in step_time(steps, parameters).items()}
    return seconds | {"gemm_s": seconds["gemm_s"] + seconds["head_s"]}


def _cause(name: str) -> str:
    """The first cause whose pattern is in the name; other compute kernels are pointwise."""
    return next((cause for cause, pattern in _patterns() if pattern.search(name)), "pointwise_s")


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[str, re.Pattern]]:
    table = catalog.table("op_classes").set_index("class")["pattern"]
    texts = {cause: "|".join(filter(None, [table[kind], _NEWER.get(cause)])) for cause, kind in _CAUSES.items()}
    return [(cause, re.compile(text, re.IGNORECASE)) for cause, text in texts.items()]


def _link_share(timeline: Timeline, case: Case, near: Coded) -> dict[str, float]:
    """Share of the link that large all-reduces reach, where all devices of the run are one group inside a node."""
    plan, ranks, spans = case.plan, case.plan.world_size, timeline.spans
    if not 1 < ranks <= case.cluster.devices_per_node or max(plan.dp, plan.tp, plan.cp) != ranks:
        return {}
    spans = spans[(spans["kind"] == "comm") & (spans["size_bytes"].fillna(0).astype(float) >= _LARGE_BYTES)]
    spans = spans[collective_names(spans["name"].astype(str).tolist()) == "all_reduce"] if len(spans) else spans
    if spans.empty:
        return {}
    rates = bus_factor("all_reduce", ranks) * spans["size_bytes"].astype(float) / (spans["dur_ns"] / 1e9)
    (name,) = near.keys("link_share", bounds().index)
    share = float(rates.median() / case.cluster.intra.bandwidth_bytes_per_s)
    low, high = bounds().loc[name, ["low", "high"]]
    return {name: min(max(share, low), high)}
