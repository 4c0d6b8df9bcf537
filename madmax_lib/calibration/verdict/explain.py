"""What could explain a step that is not as predicted, and what would be faster? Parts,
causes and neighbour plans.

A cause is one change of the run, such as a network at a quarter of its rate, estimated
again; it explains as much of the gap as log(step if so / predicted) is of log(measured
/ predicted). A trace tells which part is off.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from madmax_lib.calibration.trace import kernel_seconds, slowest_stage
from madmax_lib.calibration.trace_checks import check_trace
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.step_time import COMMUNICATION
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.waits.step_times import steps as steps_of

__all__ = ["Outlook", "causes", "neighbours", "parts_of", "timed_s"]

_PARTS = {  # of a step, by the columns of `estimate`
    "matrix products": ("gemm_s", "head_s"),
    "attention": ("attention_s",),
    "pointwise kernels": ("pointwise_s",),
    "optimizer": ("optimizer_s", "offload_s"),
    "communication": COMMUNICATION,
    "waiting": ("launch_s", "bubble_s", "overhead_s"),
}
_TRACED = dict(
    zip(_PARTS, ("gemm_s", "attention_s", "pointwise_s", "optimizer_s"), strict=False)
)
_LEAST_GAIN = 1.01  # of a neighbour plan
_MOST = 8  # rows of a table
_TIMES = (0.5, 2)  # of a degree or micro-batch


@dataclass(frozen=True)
class Outlook:
    """A run and its prediction: the row of `estimate`, the step, and its 90 % interval
    as a factor to both sides.
    """

    case: Case
    parameters: Parameters
    row: dict[str, float]
    predicted_s: float
    factor: float

    @classmethod
    def of(cls, case: Case, parameters: Parameters) -> Outlook:
        """Raises ValueError, as `estimate` does, for a step that cannot be laid out."""
        row = _estimated(case, case.plan, parameters).iloc[0].to_dict()
        return cls(case, parameters, row, row["step_s"], row["high_s"] / row["step_s"])


def _estimated(
    case: Case, plan: Plan | pd.DataFrame, parameters: Parameters
) -> pd.DataFrame:
    how = {
        "global_batch": case.global_batch,
        "sequence": case.sequence,
        "dtype": case.dtype,
    }
    how |= {
        "software": case.software,
        "imbalance": case.imbalance,
        "jitter": case.jitter,
        "parameters": parameters,
    }
    return estimate(case.model, case.cluster, plan, **how)


def timed_s(timeline: Timeline) -> float:
    """Seconds of a step: the median from start to start, of a single step the device's.

    Raises ValueError for a trace whose steps are not marked, or without compute.
    """
    if not timeline.steps:
        raise ValueError(
            "timeline: no step is marked (profiler.step()), so the step must be "
            "given as a number"
        )
    table = steps_of(timeline)
    table = table[~(table["cut"] | table["warmup"])]
    periods = table["period_s"].dropna()
    return (
        float(periods.median()) if len(periods) else kernel_seconds(timeline)["step_s"]
    )


def parts_of(
    outlook: Outlook, measured_s: float, timeline: Timeline | None
) -> pd.DataFrame:
    """Parts of the step: predicted_s, measured_s (NaN without a timeline), excess_s,
    and factor, the largest first.

    factor: by which this part alone would have to change to explain the step, NaN where
    it cannot.
    """
    predicted = {
        part: sum(outlook.row.get(name, 0.0) for name in names)
        for part, names in _PARTS.items()
    }
    table = pd.DataFrame(
        {"part": list(predicted), "predicted_s": list(predicted.values())}
    )
    traced = (
        dict.fromkeys(predicted, np.nan)
        if timeline is None
        else _traced(timeline, outlook.case)
    )
    table["measured_s"] = table["part"].map(traced)
    table["excess_s"] = table["measured_s"] - table["predicted_s"]
    alone_s = table["predicted_s"] + measured_s - outlook.predicted_s
    table["factor"] = (alone_s / table["predicted_s"]).where(
        (table["predicted_s"] > 0) & (alone_s > 0)
    )
    if timeline is None:
        return table.sort_values(
            "factor", ignore_index=True, key=lambda factor: np.abs(np.log(factor))
        )
    side = np.sign(measured_s - outlook.predicted_s) or 1.0
    return table.sort_values(
        "excess_s", ignore_index=True, key=lambda excess: -side * excess
    )


def _traced(timeline: Timeline, case: Case) -> dict[str, float]:
    """Seconds of each part in a step of a trace; what is neither compute nor exposed
    communication is waiting.
    """
    if not timeline.steps:
        return dict.fromkeys(_PARTS, np.nan)
    seconds = slowest_stage(timeline, case)
    table = steps_of(timeline)
    table = table[~table["cut"]]
    compute_s, exposed_s = (
        float(table[name].median()) for name in ("compute_s", "exposed_comm_s")
    )
    waiting_s = max(timed_s(timeline) - compute_s - exposed_s, 0.0)
    traced = {part: seconds[name] for part, name in _TRACED.items()}
    return traced | {"communication": exposed_s, "waiting": waiting_s}


def causes(
    outlook: Outlook, measured_s: float, given: str, timeline: Timeline | None
) -> pd.DataFrame:
    """What would bring the prediction closer to the measured step: part, cause, step_s
    if so, explains, best first.

    given: name of the argument that told the measured step, which may be misread.
    timeline: of the run, which may contradict it; causes in the part that is off come
    first then.
    """
    gap = np.log(measured_s / outlook.predicted_s)
    rows = []
    for part, cause, step_s in (*_misread(outlook, given), *_changed(outlook)):
        share = np.log(step_s / outlook.predicted_s) / gap if gap else 0.0
        wholly = part != "number" or abs(np.log(measured_s / step_s)) < np.log(
            outlook.factor
        )
        if (
            0.05 < share < 2.0 and wholly
        ):  # closer than the prediction is; a misread number explains all or nothing
            rows.append(
                {"part": part, "cause": cause, "step_s": step_s, "explains": share}
            )
    table = pd.DataFrame(rows, columns=["part", "cause", "step_s", "explains"])
    table = table.sort_values(
        "explains", ignore_index=True, key=lambda share: (share - 1).abs()
    )
    if timeline is None:
        return table.head(_MOST)
    parts = parts_of(outlook, measured_s, timeline)
    table = table.merge(
        parts[["part", "predicted_s", "measured_s"]], on="part", how="left"
    )
    order = {part: place for place, part in enumerate(parts["part"])}
    table = table.sort_values(
        "part",
        kind="stable",
        ignore_index=True,
        key=lambda part: part.map(order).fillna(-1),
    )
    try:
        check_trace(timeline, outlook.case)
    except ValueError as error:
        first = pd.DataFrame(
            [{"part": "trace", "cause": str(error)}], columns=table.columns
        )
        table = pd.concat([first, table], ignore_index=True).astype(table.dtypes)
    return table.head(_MOST)


def _misread(outlook: Outlook, given: str) -> Iterator[tuple[str, str, float]]:
    """What a run as predicted would show if its number meant something else."""
    case = outlook.case
    normal_s = outlook.predicted_s
    world = case.plan.world_size
    count = case.micro_batches
    if given == "tokens_per_s":
        yield (
            "number",
            "tokens_per_s is that of one device, not of all",
            normal_s * world,
        )
    if given == "tokens_per_s_per_device":
        yield (
            "number",
            "tokens_per_s_per_device is that of all devices",
            normal_s / world,
        )
    if given == "step_s":
        yield "number", "step_s is in milliseconds", normal_s * 1e3
        yield "number", "step_s is of one micro-batch", normal_s / count
    if given == "tflops":
        yield "number", "tflops is of all devices", normal_s / world
        if case.plan.recompute == "full":
            yield (
                "number",
                "tflops counts what is recomputed (hardware FLOPs)",
                normal_s * 3 / 4,
            )
    if count > 1:
        yield (
            "number",
            "global_batch is that of a micro-batch of all devices",
            normal_s * count,
        )


def _changed(outlook: Outlook) -> Iterator[tuple[str, str, float]]:
    """Part, cause and step of changed runs, of those that can be laid out."""
    for part, cause, case in _changes(outlook.case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # links are changed here on purpose
            try:
                step_s = float(
                    _estimated(case, case.plan, outlook.parameters)["step_s"].iloc[0]
                )
            except ValueError:
                continue
        yield part, cause, step_s


def _changes(case: Case) -> Iterator[tuple[str, str, Case]]:
    """Part, cause and changed case."""
    model = case.model
    cluster = case.cluster
    device = case.cluster.device
    plan = case.plan
    slower = replace(
        device,
        peak_flops={kind: 0.7 * peak for kind, peak in device.peak_flops.items()},
    )
    yield (
        "matrix products",
        "clocks at 70 % (power cap, heat)",
        replace(case, cluster=replace(cluster, device=slower)),
    )
    for dtype in ("fp8", "bf16", "tf32", "fp32"):
        if dtype in device.peak_flops and dtype != case.dtype:
            yield (
                "matrix products",
                f"products in {dtype}, not {case.dtype}",
                replace(case, dtype=dtype),
            )
    links = {
        "inter": ("network between nodes", cluster.nodes),
        "intra": ("link in a node", cluster.devices_per_node),
    }
    for link, (where, ends) in links.items():
        for share in (2, 4, 10) if ends > 1 else ():
            rate = getattr(cluster, link).bandwidth_bytes_per_s / share
            other = replace(
                cluster,
                **{link: replace(getattr(cluster, link), bandwidth_bytes_per_s=rate)},
            )
            yield (
                "communication",
                f"{where} at 1/{share} of its rate",
                replace(case, cluster=other),
            )
    degrees = {
        "overlap_tp": plan.tp,
        "overlap_dp": plan.dp * plan.cp * (plan.zero < 3),
        "overlap_ep": plan.ep,
    }
    for name, degree in degrees.items():
        for beside in (False, True) if degree > 1 else ():
            words = (
                f"{name.removeprefix('overlap_')} communication "
                f"{'hidden' if beside else 'not hidden'}"
            )
            yield (
                "communication",
                words,
                replace(case, plan=replace(plan, **{name: beside})),
            )
    if plan.zero == 3 and plan.prefetch:
        yield (
            "communication",
            "layers not prefetched (FSDP)",
            replace(case, plan=replace(plan, prefetch=0)),
        )
    for how in ("none", "selective", "full"):
        if how != plan.recompute:
            yield (
                "matrix products",
                f"recompute is {how}",
                replace(case, plan=replace(plan, recompute=how)),
            )
    for how in ({"flash", "unfused"} if model.heads else set()) - {plan.attention}:
        yield (
            "attention",
            f"{how} attention",
            replace(case, plan=replace(plan, attention=how)),
        )
    if not plan.lora_rank:
        yield (
            "matrix products",
            "weights are frozen (LoRA)",
            replace(case, plan=replace(plan, lora_rank=16)),
        )
    if not model.image and case.sequence % 2 == 0:
        yield (
            "number",
            "samples are half as long",
            replace(case, sequence=case.sequence // 2),
        )
    if plan.world_size > 1:
        yield (
            "waiting",
            "stragglers (ranks 10 % late on average)",
            replace(case, jitter=0.1),
        )
    if model.experts and plan.ep > 1:
        yield (
            "communication",
            "uneven experts, as measured elsewhere",
            replace(case, imbalance="measured"),
        )


def neighbours(outlook: Outlook) -> pd.DataFrame:
    """Plans one change away that fit and are faster: change, plan, step_s and gain,
    best first.
    """
    case = outlook.case
    rows = []
    for change in _steps_away(case.plan):
        try:
            rows.append(
                (
                    ", ".join(f"{name} {value}" for name, value in change.items()),
                    replace(case.plan, **change),
                )
            )
        except ValueError:
            continue
    table = pd.DataFrame(rows, columns=["change", "plan"])
    times = _estimated(case, table[["plan"]], outlook.parameters)
    table = table.assign(
        plan=table["plan"].map(str),
        step_s=times["step_s"],
        gain=outlook.predicted_s / times["step_s"],
    )
    table = table[times["fits"] & (table["gain"] >= _LEAST_GAIN)].drop_duplicates(
        "plan"
    )
    return table.sort_values("gain", ascending=False, ignore_index=True).head(_MOST)


def _steps_away(plan: Plan) -> Iterator[dict[str, object]]:
    """Changes of one choice of a plan; a degree is taken from dp or given to it."""
    for name in ("tp", "pp", "cp"):
        for times in _TIMES:
            degrees = getattr(plan, name) * times, plan.dp / times
            if all(degree >= 1 and degree % 1 == 0 for degree in degrees):
                yield {
                    name: int(degrees[0]),
                    "dp": int(degrees[1]),
                    **({"interleave": 1} if name == "pp" else {}),
                }
    for name in ("micro_batch", "ep", "interleave"):
        yield from (
            {name: int(getattr(plan, name) * times)}
            for times in _TIMES
            if getattr(plan, name) * times >= 1
        )
    for name, choices in (
        ("recompute", ("none", "selective", "full")),
        ("zero", range(4)),
    ):
        yield from (
            {name: choice} for choice in choices if choice != getattr(plan, name)
        )
    for name in (
        "overlap_tp",
        "overlap_dp",
        "overlap_ep",
        "overlap_gather",
        "sequence_parallel",
    ):
        yield from ({name: True},) if not getattr(plan, name) else ()
