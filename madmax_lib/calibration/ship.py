"""Which constants does the workbench ship? Those of all known rows, with the intervals that folds give.

`python -m madmax_lib.calibration.ship` writes `data/parameters.json`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from madmax_lib.calibration.fit import fit, known_rows
from madmax_lib.calibration.intervals import comparison_quantiles, interval_quantiles
from madmax_lib.calibration.validate import folds
from madmax_lib.simulator.rates.parameters import Parameters, save

__all__ = ["ship"]


def ship(path: str | Path) -> Parameters:
    """Fits the constants of all `known_rows`, adds the intervals that folds give, writes `parameters.json`."""
    rows = known_rows()
    held_out = folds(rows)
    fitted = replace(fit(rows), residuals=interval_quantiles(held_out) | comparison_quantiles(held_out))
    save(fitted, path)
    return fitted


if __name__ == "__main__":
    ship(Path(str(files("madmax_lib") / "data" / "parameters.json")))
