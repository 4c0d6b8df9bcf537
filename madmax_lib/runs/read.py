"""What does a run directory hold? spec.json, env.json, steps.csv and summary.json, also of a run that was cut short.

steps.csv has one row per step, appended as the run goes on. Times are seconds of rank 0: total_s is wall time, the
phases are those of `Job.step`. samples and tokens are the real ones of all ranks (tokens = samples x positions), loss
is the global mean, accuracy 0..1. memory_*_bytes are of rank 0's device, empty on a CPU; power_w and energy_j of all
devices of the first machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import pandas as pd

from madmax_lib.atomic import replacing
from madmax_lib.runs.spec import RunSpec

__all__ = ["COLUMNS", "PHASES", "Run", "known", "last_checkpoint", "read_json", "read_run", "read_runs", "read_steps",
           "runs_table", "write_json"]  # fmt: skip

PHASES = ("data", "forward", "backward", "optimizer")
COLUMNS = ("step", *(f"{name}_s" for name in PHASES), "total_s", "samples", "tokens", "loss", "accuracy",
           "validation_loss", "overflow", "memory_allocated_bytes", "memory_reserved_bytes", "memory_peak_bytes",
           "host_rss_bytes", "power_w", "energy_j")  # fmt: skip
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
    env, summary = (read_json(directory / f"{name}.json") for name in ("env", "summary"))
    return Run(directory, spec, env, read_steps(directory), summary)


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


def read_steps(directory: str | Path) -> pd.DataFrame:
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


def last_checkpoint(directory: Path) -> Path | None:
    """The last complete checkpoint of a run directory; its name is the number of steps it holds."""
    latest = directory / "checkpoints" / "latest"
    return latest.with_name(latest.read_text()) if latest.exists() else None


def _typed(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    try:
        table = table.replace("", "nan").astype(float)
        return table.astype({"step": int, "samples": int, "tokens": int, "overflow": bool})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_json(path: Path) -> dict:
    """What a JSON file holds, nothing where there is none. Raises ValueError naming the file for other content."""
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def write_json(path: Path, content: dict) -> None:
    """As a file that `read_json` reads, with null for what is not known."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(known(content), indent=1) + "\n")


def known(value):
    """The same with null for NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: known(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [known(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
