"""What did each phase of a run draw? The meter's log joined to the phases of the steps by time.

power.csv counts from the first step on and so do the steps, one after another; inside a step data, forward, backward
and optimizer follow each other. With several micro-batches passes alternate, and their phases are then told together.
A phase shorter than the meter's period has the power that was read around it, so means over many steps say more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.runs.measure.meter import COLUMNS, Reading, energy_j
from madmax_lib.runs.read import PHASES, read_steps

__all__ = ["energy_by_method", "phase_energy"]


def phase_energy(directory: str | Path) -> pd.DataFrame:
    """Energy of a run by step and phase: step, phase (the four, and rest of the step), seconds, energy_j, power_w.

    NaN where the meter has no reading around. Raises FileNotFoundError for a run without a power log.
    """
    log = Path(directory) / "power.csv"
    if not log.exists():
        raise FileNotFoundError(f"{log}: the run has no power log, its meter had nothing to read")
    readings = [Reading(*row) for row in pd.read_csv(log)[list(COLUMNS)].itertuples(index=False)]
    rows, begin_s = [], 0.0
    for step in read_steps(directory).itertuples():
        spent = [getattr(step, f"{name}_s") for name in PHASES]
        for name, seconds in zip((*PHASES, "rest"), [*spent, max(step.total_s - sum(spent), 0.0)], strict=True):
            joule = energy_j(readings, begin_s, begin_s + seconds)
            rows.append((step.step, name, seconds, joule, joule / seconds if seconds > 0 else np.nan))
            begin_s += seconds
    return pd.DataFrame(rows, columns=["step", "phase", "seconds", "energy_j", "power_w"])


def energy_by_method(runs: Mapping[str, str | Path]) -> pd.DataFrame:
    """Energy per token of some runs: method, step_s, power_w, token_j, means over all steps but the first.

    runs: directories by name. What a run's meter did not tell is NaN.
    """
    rows = []
    for name, directory in runs.items():
        steps = read_steps(directory).iloc[1:]
        joule = steps["energy_j"].sum(min_count=len(steps)) / steps["tokens"].sum() if len(steps) else np.nan
        rows.append((name, steps["total_s"].mean(), steps["power_w"].mean(), joule))
    return pd.DataFrame(rows, columns=["method", "step_s", "power_w", "token_j"])
