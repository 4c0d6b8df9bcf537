"""Explanations of a step that is not as predicted: parts and causes.

A cause is one change of the run, such as a network at a quarter of its rate, estimated
again; it explains as much of the gap as log(step if so / predicted) is of log(measured
/ predicted). A trace tells which part is off.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.calibration.trace import slowest_stage
from madmax_lib.calibration.trace_checks import check_trace
from madmax_lib.plan import Case
from madmax_lib.simulator import Parameters, estimate
from madmax_lib.simulator.steady.step_time import COMMUNICATION
from madmax_lib.timeline import Timeline
from madmax_lib.traces import step_s, steps as steps_of

# parts of a step: columns of `estimate`
_PARTS = {
    "matrix products": ("gemm_s", "head_s"),
    "attention": ("attention_s",),
    "pointwise kernels": ("pointwise_s",),
    "optimizer": ("optimizer_s", "offload_s"),
    "communication": COMMUNICATION,
    "waiting": ("launch_s", "bubble_s", "overhead_s"),
}
# parts that kernels tell apart: entries of `slowest_stage`
_TRACED = {
    "matrix products": "gemm_s",
    "attention": "attention_s",
    "pointwise kernels": "pointwise_s",
    "optimizer": "optimizer_s",
}
_MOST = 8  # rows of a table
# share of the gap that a cause explains: less is noise, and from 2 the prediction would
# be as far off on the other side
_LEAST_SHARE = 0.05
_MOST_SHARE = 2.0
_LINK_SHARES = (2, 4, 10)  # by which a link may be slower
_CAPPED = 0.7  # of the clocks under a power cap
_CAUSE_COLUMNS = ["part", "cause", "step_s", "explains"]


@dataclass(frozen=True)
class Outlook:
    """A run and its prediction."""

    case: Case
    parameters: Parameters
    row: dict[str, float]  # of `estimate`
    predicted_s: float
    factor: float  # of the 90 % interval, to both sides

    @classmethod
    def of(cls, case: Case, parameters: Parameters) -> Outlook:
        """The outlook of a case.

        Raises ValueError, as `estimate` does, for a step that cannot be laid out.
        """
        row = case.answer(estimate, parameters=parameters).iloc[0].to_dict()
        return cls(case, parameters, row, row["step_s"], row["high_s"] / row["step_s"])


class _Cause(NamedTuple):
    """One change of a run."""

    part: str  # of `_PARTS`, or number where a number was misread
    cause: str
    step_s: float  # if so


def timed_s(timeline: Timeline) -> float:
    """Seconds of a step, as `step_s` of the traces has them.

    Raises ValueError for a trace whose steps are not marked.
    """
    if not timeline.steps:
        raise ValueError(
            "timeline: no step marks (profiler.step()): the step must be "
            "given as a number"
        )
    return step_s(timeline)


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
    traced = {} if timeline is None else _traced(timeline, outlook.case)
    table = pd.DataFrame({"part": [*predicted], "predicted_s": [*predicted.values()]})
    table["measured_s"] = table["part"].map(traced).astype(float)
    table["excess_s"] = table["measured_s"] - table["predicted_s"]
    gap_s = measured_s - outlook.predicted_s
    # the part that would fill the gap, if all others were as predicted
    alone_s = table["predicted_s"] + gap_s
    possible = (table["predicted_s"] > 0) & (alone_s > 0)
    table["factor"] = (alone_s / table["predicted_s"]).where(possible)
    if timeline is None:
        # the part that would change least comes first
        change = np.abs(np.log(table["factor"]))
        order = change.sort_values().index
    else:
        # the part that is farthest off on the side of the step
        side = np.sign(gap_s) or 1.0
        order = (-side * table["excess_s"]).sort_values().index
    return table.loc[order].reset_index(drop=True)


def _traced(timeline, case):
    """Seconds of each part in a step of a trace.

    What is neither compute nor exposed communication is waiting.
    """
    if not timeline.steps:
        return {}
    seconds = slowest_stage(timeline, case)
    table = steps_of(timeline)
    table = table[~table["cut"]]
    compute_s, exposed_s = (
        float(table[name].median()) for name in ("compute_s", "exposed_comm_s")
    )
    traced = {part: seconds[name] for part, name in _TRACED.items()}
    # what is hidden costs nothing
    traced["communication"] = exposed_s
    traced["waiting"] = max(timed_s(timeline) - compute_s - exposed_s, 0.0)
    return traced


def causes(
    outlook: Outlook, measured_s: float, source: str, timeline: Timeline | None
) -> pd.DataFrame:
    """Causes that would bring the prediction closer to the measured step.

    Columns part, cause, step_s if so, explains, best first. source: name of the
    argument that told the measured step, which may be misread. timeline: of the run,
    which may contradict it; causes in the part that is off come first then.
    """
    gap = np.log(measured_s / outlook.predicted_s)
    rows = []
    for cause in (*_misread(outlook, source), *_changed(outlook)):
        share = np.log(cause.step_s / outlook.predicted_s) / gap if gap else 0.0
        # a misread number explains all or nothing
        left = abs(np.log(measured_s / cause.step_s))
        if cause.part == "number" and left >= np.log(outlook.factor):
            continue
        if _LEAST_SHARE < share < _MOST_SHARE:
            rows.append((*cause, share))
    table = pd.DataFrame(rows, columns=_CAUSE_COLUMNS)
    table = table.sort_values(
        "explains", ignore_index=True, key=lambda share: (share - 1).abs()
    )
    if timeline is not None:
        table = _by_trace(table, outlook, measured_s, timeline)
    return table.head(_MOST)


def _by_trace(table, outlook, measured_s, timeline):
    """Causes with the seconds of their parts, those first whose part is off."""
    parts = parts_of(outlook, measured_s, timeline)
    columns = ["part", "predicted_s", "measured_s"]
    table = table.merge(parts[columns], on="part", how="left")
    rank_of = {part: rank for rank, part in enumerate(parts["part"])}
    rank = table["part"].map(rank_of).fillna(-1)  # misread numbers before all parts
    table = table.loc[rank.sort_values(kind="stable").index].reset_index(drop=True)
    from madmax_lib.calibration.job.attention import check_attention  # a wing

    try:
        check_trace(timeline, outlook.case)
        check_attention(timeline, outlook.case)
    except ValueError as error:
        first = {"part": "trace", "cause": str(error)}
        first = pd.DataFrame([first], columns=table.columns)
        table = pd.concat([first, table], ignore_index=True).astype(table.dtypes)
    return table


def _misread(outlook, source):
    """Steps of a run as predicted whose number meant something else."""
    case = outlook.case
    predicted_s = outlook.predicted_s
    world = case.plan.world_size
    count = case.micro_batches
    causes = {
        "tokens_per_s": [
            ("tokens_per_s is for one device, not for all", predicted_s * world)
        ],
        "tokens_per_s_per_device": [
            ("tokens_per_s_per_device is for all devices", predicted_s / world)
        ],
        "step_s": [
            ("step_s is in milliseconds", predicted_s * 1e3),
            ("step_s covers one micro-batch", predicted_s / count),
        ],
        "tflops": [("tflops is for all devices", predicted_s / world)],
    }
    if case.plan.recompute == "full":
        # four passes for three
        hardware = "tflops includes recomputation (hardware FLOPs)"
        causes["tflops"].append((hardware, predicted_s * 3 / 4))
    for cause, seconds in causes.get(source, ()):
        yield _Cause("number", cause, seconds)
    if count > 1:
        cause = "global_batch is one micro-batch of all devices"
        yield _Cause("number", cause, predicted_s * count)


def _changed(outlook):
    """Steps of changed runs, of those that can be laid out."""
    for part, cause, case in _changes(outlook.case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # links are changed here on purpose
            try:
                row = case.answer(estimate, parameters=outlook.parameters)
            except ValueError:
                continue
        yield _Cause(part, cause, row["step_s"].item())


def _changes(case):
    """Part, cause and changed case, the parts in turn."""
    yield from _changed_products(case)
    yield from _changed_communication(case)
    model = case.model
    if model.heads:
        for kernel in {"flash", "unfused"} - {case.plan.attention}:
            yield "attention", f"{kernel} attention", case.with_plan(attention=kernel)
    if not model.image and case.sequence % 2 == 0:
        half = replace(case, sequence=case.sequence // 2)
        yield "number", "samples are half as long", half
    # one rank waits for nobody
    if case.plan.world_size > 1:
        cause = "stragglers (ranks 10 % late on average)"
        yield "waiting", cause, replace(case, jitter=0.1)


def _changed_products(case):
    """Changes of what devices compute, and how fast."""
    part = "matrix products"
    device = case.device
    capped = {dtype: _CAPPED * peak for dtype, peak in device.peak_flops.items()}
    cluster = replace(case.cluster, device=replace(device, peak_flops=capped))
    yield part, "clocks at 70 % (power cap, heat)", replace(case, cluster=cluster)
    # the stated type may not be the one that ran
    for dtype in ("fp8", "bf16", "tf32", "fp32"):
        if dtype in device.peak_flops and dtype != case.dtype:
            cause = f"products in {dtype}, not {case.dtype}"
            yield part, cause, replace(case, dtype=dtype)
    for recompute in ("none", "selective", "full"):
        if recompute != case.plan.recompute:
            cause = f"recompute is {recompute}"
            yield part, cause, case.with_plan(recompute=recompute)
    if not case.plan.lora_rank:
        yield part, "weights are frozen (LoRA)", case.with_plan(lora_rank=16)


def _changed_communication(case):
    """Changes of links, and of what their traffic hides under."""
    part = "communication"
    cluster = case.cluster
    plan = case.plan
    links = {
        "inter": ("network between nodes", cluster.nodes),
        "intra": ("link in a node", cluster.devices_per_node),
    }
    for name, (words, ends) in links.items():
        link = getattr(cluster, name)
        for share in _LINK_SHARES if ends > 1 else ():
            rate = link.bandwidth_bytes_per_s / share
            slower = {name: replace(link, bandwidth_bytes_per_s=rate)}
            cause = f"{words} at 1/{share} of its rate"
            yield part, cause, replace(case, cluster=replace(cluster, **slower))
    # overlap_dp is a choice below ZeRO 3
    degrees = {
        "tp": plan.tp,
        "dp": plan.replicas * (plan.zero < 3),
        "ep": plan.ep,
    }
    for dimension, degree in degrees.items():
        for hidden in (False, True) if degree > 1 else ():
            cause = f"{dimension} communication {'hidden' if hidden else 'not hidden'}"
            yield part, cause, case.with_plan(**{f"overlap_{dimension}": hidden})
    # each gather then stands before its layer
    if plan.zero == 3 and plan.prefetch:
        yield part, "layers not prefetched (FSDP)", case.with_plan(prefetch=0)
    if case.model.experts and plan.ep > 1:
        uneven = replace(case, imbalance="measured")
        yield part, "uneven experts, as measured elsewhere", uneven
