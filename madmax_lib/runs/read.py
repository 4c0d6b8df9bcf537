"""What does a run directory hold? spec.json, env.json, steps.csv and summary.json, also of a run that was cut short.

steps.csv has one row per step, appended as the run goes on. Times are seconds of rank 0: total_s is wall time, the
phases are those of `Job.step`. samples and tokens are the real ones of all ranks (tokens = samples x positions), loss
is the global mean, accuracy 0..1. memory_*_bytes are of rank 0's device, empty on a CPU; power_w and energy_j of all
devices of the first machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from madmax_lib.runs.spec import RunSpec

__all__ = ["COLUMNS", "Run", "read_run", "read_runs", "read_steps", "runs_table"]

COLUMNS = (
    "step",
    "data_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "total_s",
    "samples",
    "tokens",
    "loss",
    "accuracy",
    "validation_loss",
    "overflow",
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "memory_peak_bytes",
    "host_rss_bytes",
    "power_w",
    "energy_j",
)


_QUANTITIES = ("samples_per_s", "tokens_per_s", "mfu", "hfu", "loss_last", "host_rss_bytes", "energy_per_sample_j")


@dataclass(frozen=True)
class Run:
    """A run directory: what was asked, where it ran, each step, and the summary (empty if there is none yet)."""

    directory: Path
    spec: RunSpec
    env: dict
    steps: pd.DataFrame
    summary: dict


def read_run(directory: str | Path) -> Run:
    """A run directory, complete or not. Raises FileNotFoundError without a spec.json, ValueError for bad content."""
    directory = Path(directory)
    if not (directory / "spec.json").exists():
        raise FileNotFoundError(f"{directory}: no run directory, it has no spec.json")
    spec = RunSpec.from_json((directory / "spec.json").read_text())
    return Run(directory, spec, _json(directory / "env.json"), read_steps(directory), _json(directory / "summary.json"))


def read_runs(folder: str | Path) -> dict[str, Run]:
    """All run directories of a folder by their name, in order of it.

    Raises FileNotFoundError if there is none.
    """
    found = {path.parent.name: read_run(path.parent) for path in sorted(Path(folder).glob("*/spec.json"))}
    if not found:
        raise FileNotFoundError(f"{folder}: no run directories here")
    return found


def runs_table(runs: dict[str, Run]) -> pd.DataFrame:
    """One row per run of `read_runs`, by the number of dimensions that its strategy splits.

    dimensions: how many of dp, tp, pp, cp and ep are above 1. step_s with its quartiles, samples_per_s, tokens_per_s,
    mfu, hfu (0..1), loss_last, host_rss_bytes of rank 0, energy_per_sample_j; NaN where a run does not tell.
    """
    rows = []
    for name, run in runs.items():
        plan, told = run.spec.plan, run.summary
        spread = told.get("step_s", {})
        degrees = (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)
        row = {"run": name, "model": run.spec.model, "strategy": name.partition("_")[2], "ranks": plan.world_size}
        row |= {"dimensions": sum(degree > 1 for degree in degrees), "status": told.get("status", "unfinished")}
        row |= {"step_s": spread.get("median"), "step_p25_s": spread.get("p25"), "step_p75_s": spread.get("p75")}
        rows.append(row | {quantity: told.get(quantity) for quantity in _QUANTITIES})
    numbers = ["step_s", "step_p25_s", "step_p75_s", *_QUANTITIES]
    table = pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))
    return table.sort_values(["dimensions", "ranks", "run"]).reset_index(drop=True)


def read_steps(directory: Path) -> pd.DataFrame:
    """steps.csv of a run directory, with no rows where it is missing; a last line that was cut short is left out.

    Raises ValueError, naming the file, for another table.
    """
    path = Path(directory) / "steps.csv"
    if not path.exists():
        return _typed(pd.DataFrame(columns=list(COLUMNS)), path)
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines or tuple(lines[0].split(",")) != COLUMNS:
        raise ValueError(f"{path}: not a table of steps, its columns must be {','.join(COLUMNS)}")
    rows = [line.split(",") for line in lines[1:]]
    if bad := [number for number, row in enumerate(rows, 2) if len(row) != len(COLUMNS)]:
        raise ValueError(f"{path}: line {bad[0]} has not {len(COLUMNS)} values")
    return _typed(pd.DataFrame(rows, columns=list(COLUMNS)), path)


def _typed(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    try:
        table = table.replace("", "nan").astype(float)
        return table.astype({"step": int, "samples": int, "tokens": int, "overflow": bool})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
