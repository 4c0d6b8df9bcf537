"""What does a run tell a fit? Run directories as rows of `published_train.csv`'s
columns.

A row has all that the run was: sizes of the model as JSON, plan in its text form,
software `workbench` (or DeepSpeed), and the `machine.json` of the calibration that it
belongs to, if its folder or the one above has one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from madmax_lib.runs.read import Run, read_runs

__all__ = ["run_row", "run_rows"]


def run_rows(folder: str | Path) -> pd.DataFrame:
    """One row per completed run of a folder, indexed by its name.

    Raises FileNotFoundError where there is no run, ValueError where none is completed.
    """
    path = Path(folder)
    runs = (
        {path.name: read_runs(path.parent)[path.name]}
        if (path / "spec.json").exists()
        else read_runs(path)
    )
    rows = {
        name: run_row(run)
        for name, run in runs.items()
        if run.summary.get("status") == "completed"
    }
    if not rows:
        raise ValueError(f"{folder}: none of {len(runs)} runs is completed")
    return pd.DataFrame.from_dict(rows, orient="index")


def run_row(run: Run, machine: str | Path = "") -> dict:
    """A run as a row; machine: `machine.json` of where it ran, found by its directory
    if not given.
    """
    spec = run.spec
    plan = run.spec.plan
    model = run.spec.shapes
    machine = machine or _machine_file(run.directory)
    memory = [
        rank["memory_peak_bytes"]
        for rank in run.summary.get("ranks", ())
        if rank.get("memory_peak_bytes")
    ]
    tokens = spec.sequence or model.sequence
    return {
        "source": f"run of this project: {run.directory.name}",
        "table_row": run.directory.name,
        "model": model.name,
        "params_b": model.parameters / 1e9,
        **{
            name: getattr(model, name)
            for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        },
        "seq_len": tokens,
        "gpu": run.env.get("device", ""),
        "n_gpus": plan.world_size,
        **{name: getattr(plan, name) for name in ("tp", "pp", "dp", "cp", "ep")},
        "vpp": plan.interleave,
        "zero_stage": plan.zero,
        "micro_batch": plan.micro_batch,
        "global_batch": spec.global_batch,
        "precision": run.env.get("dtype", spec.dtype),
        "recompute": plan.recompute,
        "iteration_time_s": run.summary["step_s"]["median"],
        "mem_gb": max(memory, default=float("nan")) / 1e9,
        "time_basis": "median of the counted steps",
        "software": "deepspeed" if spec.engine == "deepspeed" else "workbench",
        "devices_per_node": plan.world_size // spec.hosts,
        "plan": _plan_text(run),
        "sizes": json.dumps(asdict(model)),
        **({"cluster": str(machine)} if machine else {}),
    }


def _plan_text(run: Run) -> str:
    """The plan as it ran: with Ulysses where a sequence is shared."""
    text = str(run.spec.plan)
    return text if run.spec.plan.cp == 1 or "ulysses" in text else f"{text}.ulysses"


def _machine_file(directory: Path) -> str:
    """The machine.json beside or above a run, empty if there is none."""
    places = (
        directory.resolve() / "machine.json",
        *(p / "machine.json" for p in directory.resolve().parents[:2]),
    )
    return next((str(path) for path in places if path.exists()), "")
