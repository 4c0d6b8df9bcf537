"""Predictions of a run on a calibrated machine beside what was measured: step, shares,
overlap and memory.
"""

from dataclasses import replace

import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.calibration.machine.machine import Machine
from madmax_lib.calibration.trace import kernel_seconds
from madmax_lib.plan import Case
from madmax_lib.runs import RunSpec
from madmax_lib.runs.read import Run
from madmax_lib.simulator import estimate, peak_bytes, simulate
from madmax_lib.simulator.memory.memory import memory_of
from madmax_lib.timeline import breakdown
from madmax_lib.traces import read_trace


def traced_parts(run: Run) -> dict[str, float]:
    """Seconds of the parts that a trace tells apart, and of the step.

    The step is that without the profiler.
    """
    parts = kernel_seconds(read_trace(run.directory))
    return parts | {"step_s": run.summary["step_s"]["median"]}


def case_of(spec: RunSpec, machine: Machine) -> Case:
    """A run as a step on as many devices of the machine."""
    plan = spec.plan
    world = plan.world_size
    if plan.cp > 1:  # these runs share a sequence by Ulysses
        plan = replace(plan, context="ulysses")
    # a run may be smaller than the machine
    node = min(world // spec.hosts, machine.cluster.devices_per_node) or 1
    cluster = replace(machine.cluster, devices_per_node=node, nodes=world // node)
    return Case(
        spec.shapes,
        cluster,
        plan,
        spec.global_batch,
        spec.sequence or None,
        machine.dtype,
        "workbench",
    )


def predicted(machine: Machine, spec: RunSpec) -> dict[str, object]:
    """Step, its interval, shares of it, overlap (NaN for one rank) and memory of a run,
    before it is made.
    """
    case = case_of(spec, machine)
    timeline = case.answer(simulate, parameters=machine.parameters)
    spans = timeline.spans
    row = case.answer(estimate, parameters=machine.parameters).iloc[0]
    step_s = float((spans["start_ns"] + spans["dur_ns"]).max() / NS_PER_S)
    # torch counts allocations on a GPU, a CPU shows whole processes
    on_gpu = case.device.family != "cpu"
    return {
        "model": spec.model,
        "strategy": spec.strategy,
        "predicted_s": step_s,
        # the interval of the closed form, around the engine's step
        "low_s": step_s * float(row["low_s"] / row["step_s"]),
        "high_s": step_s * float(row["high_s"] / row["step_s"]),
        **_shares(breakdown(timeline), "predicted", step_s),
        "predicted_bytes": peak_bytes(memory_of(case), allocated=on_gpu),
    }


def compared(prediction: pd.Series, run: Run) -> dict[str, object]:
    """A row of results.csv: the prediction, what was measured, and the error (predicted
    / measured - 1).
    """
    step_s = run.summary["step_s"]["median"]
    table = breakdown(read_trace(run.directory))
    return prediction.to_dict() | {
        "measured_s": step_s,
        "error": prediction["predicted_s"] / step_s - 1,
        "inside": prediction["low_s"] <= step_s <= prediction["high_s"],
        **_shares(table, "measured", float(table["total_s"].mean())),
        "measured_bytes": _measured_bytes(run),
    }


def _shares(table, which, total_s):
    """Compute and exposed communication as shares of the time, and overlap.

    table: of `breakdown`, whose ranks are averaged.
    """
    mean = table.mean(numeric_only=True)
    return {
        f"{which}_compute": float(mean["compute_s"] / total_s),
        f"{which}_exposed_comm": float(mean["exposed_comm_s"] / total_s),
        f"{which}_overlap": float(mean["overlap"]),
    }


def process_bytes(run: Run, machine: Machine) -> float:
    """Bytes of a process beside the tensors of a step: Python, torch, their allocators."""
    case = case_of(run.spec, machine)
    return _measured_bytes(run) - peak_bytes(memory_of(case), allocated=True)


def _measured_bytes(run):
    """Bytes of the fullest rank: allocated on a GPU, resident on a CPU."""
    if run.device_bytes > 0:
        return run.device_bytes
    ranks = run.summary.get("ranks") or [run.summary]
    return float(max(rank["host_rss_bytes"] for rank in ranks))
