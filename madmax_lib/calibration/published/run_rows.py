"""Run directories as rows of `published_train.csv`'s columns.

A row has all that the run was: sizes of the model as JSON, plan in its text form,
software `workbench` (or DeepSpeed), and the `machine.json` of the calibration that it
belongs to, if its folder or the one above has one.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.runs.read import Run, read_runs, runs_table
from madmax_lib.simulator import memory, peak_bytes
from madmax_lib.timeline import breakdown
from madmax_lib.traces import read_trace
from madmax_lib.traces.read.cache import content_sha256

_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
# fields of a plan that are columns under the same names
_DEGREES = ("tp", "pp", "dp", "cp", "ep")


def run_rows(folder: str | Path) -> pd.DataFrame:
    """One row per completed run of a folder, indexed by its name.

    Raises FileNotFoundError where there is no run, ValueError where none is completed.
    """
    path = Path(folder)
    if (path / "spec.json").exists():  # the folder of a run itself
        runs = {path.name: read_runs(path.parent)[path.name]}
    else:
        runs = read_runs(path)
    rows = {
        name: run_row(run)
        for name, run in runs.items()
        if run.summary.get("status") == "completed"
    }
    if not rows:
        raise ValueError(f"{folder}: none of {len(runs)} runs is completed")
    return pd.DataFrame.from_dict(rows, orient="index")


def run_row(run: Run, machine: str | Path = "") -> dict:
    """A run as a row.

    machine: `machine.json` of where it ran, found by its directory if not given.
    """
    spec = run.spec
    plan = spec.plan
    model = spec.shapes
    plan_text = str(plan)
    # these runs share a sequence by Ulysses, which a spec need not say
    if plan.cp > 1 and "ulysses" not in plan_text:
        plan_text += ".ulysses"
    row = {
        "source": f"run of this project: {run.directory.name}",
        "table_row": run.directory.name,
        "model": model.name,
        "params_b": model.parameters / 1e9,
        **{name: getattr(model, name) for name in _SIZES},
        "seq_len": spec.sequence or model.sequence,
        "gpu": run.env.get("device", ""),
        "n_gpus": plan.world_size,
        **{name: getattr(plan, name) for name in _DEGREES},
        "vpp": plan.interleave,
        "zero_stage": plan.zero,
        "micro_batch": plan.micro_batch,
        "global_batch": spec.global_batch,
        "precision": run.env.get("dtype", spec.dtype),
        "recompute": plan.recompute,
        "iteration_time_s": run.summary["step_s"]["median"],
        "mem_gb": run.device_bytes / 1e9,
        "time_basis": "median of the counted steps",
        "software": "deepspeed" if spec.engine == "deepspeed" else "workbench",
        # hosts of a testbed stand for nodes
        "devices_per_node": plan.world_size // spec.hosts,
        "plan": plan_text,
        "sizes": json.dumps(asdict(model)),
    }
    if not machine:
        # beside the run, or above its folder
        directory = run.directory.resolve()
        folders = (directory, *directory.parents[:2])
        paths = (folder / "machine.json" for folder in folders)
        machine = next((path for path in paths if path.exists()), "")
    if machine:
        row["cluster"] = str(machine)
    return row


def trace_breakdowns(runs: dict[str, Run]) -> pd.DataFrame:
    """Breakdown of the traced steps of each run, mean of its ranks: shares of the time,
    and overlap.

    Columns: run, strategy, dimensions, ranks, compute, exposed_comm, idle (0..1),
    overlap. From breakdown.csv where a run has one (it was slimmed), else from its
    traces. attrs carry the files.
    """
    rows = []
    files = {}
    for about in runs_table(runs).to_dict("records"):
        directory = runs[about["run"]].directory
        path = directory / "breakdown.csv"
        if path.exists():
            table = pd.read_csv(path)
            digests = {path.name: content_sha256(path)}
        else:
            table = breakdown(read_trace(directory))
            traced = table.attrs["provenance"]["files"].values()
            digests = {file["name"]: file["sha256"] for file in traced}
        files |= {f"{about['run']}/{name}": digest for name, digest in digests.items()}
        row = {name: about[name] for name in ("run", "strategy", "dimensions", "ranks")}
        # shares of each rank, then their mean: ranks may run for unlike times
        for name in ("compute", "exposed_comm", "idle"):
            row[name] = (table[f"{name}_s"] / table["total_s"]).mean()
        # one process has nothing to hide
        row["overlap"] = table["overlap"].mean() if about["ranks"] > 1 else np.nan
        rows.append(row)
    result = pd.DataFrame(rows)
    result.attrs["provenance"] = {"files": files}
    return result


def memory_table(runs: dict[str, Run]) -> pd.DataFrame:
    """Memory of the fullest rank's device by run, beside its plan and status.

    predicted_bytes: allocated at the peak, of `mm.memory` in the habits of this
    project's runs: low-rank training has gradients of its updates alone.
    measured_bytes: torch.cuda.max_memory_allocated, NaN on a CPU, where nothing counts
    allocations (host_rss_bytes holds Python and torch too). A run out of memory has its
    plan and prediction here, and what its first steps took. reason: why there is no
    prediction, such as offload in fp32. attrs carry the model and the files.
    """
    predictions = {}
    reasons = {}
    for name, run in runs.items():
        try:
            predictions[name] = _predicted_bytes(run)
        except ValueError as refusal:
            reasons[name] = str(refusal)
    table = runs_table(runs)[["run", "strategy", "dimensions", "status"]]
    table = table.assign(
        plan=[str(runs[name].spec.plan) for name in table["run"]],
        predicted_bytes=[predictions.get(name, np.nan) for name in table["run"]],
        measured_bytes=[runs[name].device_bytes for name in table["run"]],
        reason=[reasons.get(name, "") for name in table["run"]],
    )
    table.attrs["provenance"] = {"files": steps_files(runs)}
    table.attrs["model"] = next(iter(runs.values())).spec.model
    return table


def steps_files(runs: dict[str, Run]) -> dict[str, str]:
    """sha256 of the steps.csv of each run, by name."""
    paths = {name: run.directory / "steps.csv" for name, run in runs.items()}
    return {
        f"{name}/steps.csv": content_sha256(path)
        for name, path in paths.items()
        if path.exists()
    }


def _predicted_bytes(run):
    """Bytes allocated at the peak of the fullest rank."""
    spec = run.spec
    job = run.env.get("job", {})
    # adapters: parameters that are trained over those that are there
    trainable = job.get("trained_local_parameters", 1) / job.get("local_parameters", 1)
    name = "deepspeed" if spec.engine == "deepspeed" else "workbench"
    software = catalog.software(name + "-compiled" * spec.compile)
    # these runs take plans that the released stack would refuse
    software = replace(
        software,
        zero=(0, 1, 2, 3),
        expert_placement=("dp-cp",),
        context=("ring", "ulysses"),
    )
    table = memory(
        spec.shapes,
        spec.plan,
        sequence=spec.sequence or None,
        dtype=run.env.get("dtype", spec.dtype),  # the latter may be auto
        global_batch=spec.global_batch,
        software=software,
        trainable=trainable,
    )
    return peak_bytes(table, allocated=True)
