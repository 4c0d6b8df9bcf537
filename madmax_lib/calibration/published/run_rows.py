"""Run directories as rows of `published_train.csv`'s columns.

A row has all that the run was: sizes of the model as JSON, plan in its text form,
software `workbench` (or DeepSpeed), and the `machine.json` of the calibration that it
belongs to, if its folder or the one above has one.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from madmax_lib.runs.read import Run, read_runs

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
    ranks = run.summary.get("ranks", ())
    memory_bytes = [rank.get("memory_peak_bytes") or 0 for rank in ranks]
    # nothing counts allocations on a CPU
    peak_bytes = max(memory_bytes, default=0) or float("nan")
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
        "mem_gb": peak_bytes / 1e9,
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
