"""Which constants does the workbench ship? Those of all its rows, with the intervals
that sources left out give.

`python -m madmax_lib.calibration.ship` writes `data/parameters.json`, unless the same
constants stand there already.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from madmax_lib.calibration.fit import fit, known_rows, usable
from madmax_lib.calibration.judge.intervals import (
    comparison_widths,
    sensitivities,
    spread,
)
from madmax_lib.calibration.judge.validate import folds
from madmax_lib.simulator.rates.parameters import Parameters, load, save

__all__ = ["ship"]

# relative differences: where the fit stops, which another machine's arithmetic shifts,
# and digits that the file has
_SAME_CONSTANTS = 1e-4
_SAME_INTERVALS = 1e-3


def ship(path: str | Path) -> Parameters:
    """Fits the constants of all `known_rows`, adds the intervals that sources left out
    give, writes `parameters.json`.

    A file that has the same constants and intervals, but for digits that the fit leaves
    open, stays as it is.
    """
    rows = known_rows()
    rows = rows[usable(rows)]
    fitted = fit(rows)
    fitted = replace(fitted, sensitivities=sensitivities(rows, fitted))
    apart = folds(rows, by="source", near=fitted)
    held_out = folds(rows, near=fitted)
    fitted = replace(fitted, residuals=spread(apart) | comparison_widths(held_out))
    if Path(path).exists() and _same(present := load(path), fitted):
        return present
    save(fitted, path)
    return fitted


def _same(a: Parameters, b: Parameters) -> bool:
    """From the same rows, and no further apart than fits on two machines are."""
    if (
        a.provenance["sha256"] != b.provenance["sha256"]
        or a.fitted != b.fitted
        or set(a.residuals) != set(b.residuals)
    ):
        return False
    constants = (
        np.isclose(value, b.constants[name], rtol=_SAME_CONSTANTS)
        for name, value in a.constants.items()
    )
    intervals = (
        np.isclose(size, b.residuals[name], rtol=_SAME_INTERVALS)
        for name, size in a.residuals.items()
    )
    return all(constants) and all(intervals)


if __name__ == "__main__":
    ship(Path(str(files("madmax_lib") / "data" / "parameters.json")))
