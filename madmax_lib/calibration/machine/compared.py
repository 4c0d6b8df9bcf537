"""What is predicted of a run on a calibrated machine, and what was measured? Step,
shares, overlap and memory.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.calibration.machine.machine import Machine
from madmax_lib.calibration.trace import kernel_seconds
from madmax_lib.plan.case import Case
from madmax_lib.runs.read import Run
from madmax_lib.runs.spec import RunSpec
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.simulator.simulate import simulate
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.traces.read.kineto import read_trace

__all__ = ["case_of", "compared", "predicted", "process_bytes", "traced_parts"]


def traced_parts(run: Run) -> dict[str, float]:
    """Seconds of a step, as it was measured without the profiler, and of the parts that
    the trace tells apart.
    """
    return kernel_seconds(read_trace(run.directory)) | {
        "step_s": run.summary["step_s"]["median"]
    }


def case_of(spec: RunSpec, machine: Machine) -> Case:
    """A run as a step on as many devices of the machine."""
    plan = spec.plan
    world = spec.plan.world_size
    plan = replace(plan, context="ulysses") if plan.cp > 1 else plan
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
    what = {
        "global_batch": case.global_batch,
        "sequence": case.sequence,
        "dtype": case.dtype,
    }
    step = simulate(
        case.model, case.cluster, case.plan, parameters=machine.parameters, **what
    )
    row = estimate(
        case.model, case.cluster, case.plan, parameters=machine.parameters, **what
    ).iloc[0]
    step_s = float((step.spans["start_ns"] + step.spans["dur_ns"]).max() / NS_PER_S)
    ends = {
        name: step_s * float(row[name] / row["step_s"]) for name in ("low_s", "high_s")
    }
    about = {
        "model": spec.model,
        "strategy": spec.strategy,
        "predicted_s": step_s,
        **ends,
    }
    about |= _shares(breakdown(step), "predicted", step_s)
    return about | {
        "predicted_bytes": _held_bytes(
            case, allocated=case.cluster.device.family != "cpu"
        )
    }


def compared(prediction: pd.Series, run: Run) -> dict[str, object]:
    """A row of results.csv: the prediction, what was measured, and the error (predicted
    / measured - 1).
    """
    step_s = run.summary["step_s"]["median"]
    table = breakdown(read_trace(run.directory))
    measured = {"measured_s": step_s, "error": prediction["predicted_s"] / step_s - 1}
    measured |= _shares(table, "measured", float(table["total_s"].mean()))
    return prediction.to_dict() | measured | {"measured_bytes": _measured_bytes(run)}


def _shares(table: pd.DataFrame, which: str, total_s: float) -> dict[str, float]:
    """Compute and exposed communication as shares of the time, and overlap; mean of the
    ranks.
    """
    shares = {
        name: float(table[f"{name}_s"].mean() / total_s)
        for name in ("compute", "exposed_comm")
    }
    return {
        f"{which}_{name}": value
        for name, value in {**shares, "overlap": float(table["overlap"].mean())}.items()
    }


def process_bytes(run: Run, machine: Machine) -> float:
    """What a process holds beside the tensors of a step: Python, torch and their
    allocators.
    """
    return _measured_bytes(run) - _held_bytes(
        case_of(run.spec, machine), allocated=True
    )


def _held_bytes(case: Case, *, allocated: bool) -> float:
    what = {
        name: getattr(case, name)
        for name in ("sequence", "dtype", "global_batch", "software", "cluster")
    }
    return peak_bytes(memory(case.model, case.plan, **what), allocated=allocated)


def _measured_bytes(run: Run) -> float:
    """Of the fullest rank: allocated on a GPU, resident on a CPU."""
    ranks = run.summary.get("ranks") or [run.summary]
    return float(
        max(rank.get("memory_peak_bytes") or rank["host_rss_bytes"] for rank in ranks)
    )
