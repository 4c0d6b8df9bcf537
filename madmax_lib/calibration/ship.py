"""The constants that the workbench ships: those of all its rows, with the intervals
that sources left out give.

`python -m madmax_lib.calibration.ship` writes `data/parameters.json`, unless the same
constants stand there already.
"""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import loky
import numpy as np

from madmax_lib.calibration.fit import fit, known_rows, usable
from madmax_lib.calibration.judge.intervals import (
    comparison_widths,
    folds,
    sensitivities,
)
from madmax_lib.simulator.rates.parameters import Parameters, load, save

# relative differences: where the fit stops, which another machine's arithmetic shifts,
# and digits that the file has
_SAME_CONSTANTS = 1e-4
_SAME_INTERVALS = 1e-3
# Variables that BLAS and LAPACK read once, when numpy loads them. Sums of several
# threads are rounded in another order, which moves where a fit stops.
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}


def ship(path: str | Path) -> Parameters:
    """Fit the constants of all `known_rows` and write them with their intervals.

    The intervals are those that sources left out give. A file that has the same
    constants and intervals, but for digits that the fit leaves open, stays as it is.
    The fit runs in a process of its own, on one thread whatever the machine has.
    """
    rows = known_rows()
    with loky.ProcessPoolExecutor(1, env=_ONE_THREAD) as process:
        fitted = process.submit(_fitted, rows[usable(rows)]).result()
    if Path(path).exists() and _same(present := load(path), fitted):
        return present
    save(fitted, path)
    return fitted


def _fitted(rows):
    """The constants of rows with their intervals."""
    # a wing, which the rest of the calibration does without
    from madmax_lib.calibration.verdict.strangers import (
        spread_of_both,
        unknown_rows,
        with_prior,
    )

    fitted = fit(rows)
    fitted = replace(fitted, sensitivities=sensitivities(rows, fitted))
    # errors of further sources and stacks set the components, those of further models
    # the width of a comparison
    without_source = folds(rows, by="source", near=fitted)
    without_model = folds(rows, near=fitted)
    strangers = unknown_rows(rows, fitted)
    widths = spread_of_both(without_source, strangers) | comparison_widths(
        without_model
    )
    return with_prior(fitted, widths)


def _same(a, b):
    """From the same rows, and no further apart than fits on two machines are."""
    same_rows = a.provenance["sha256"] == b.provenance["sha256"]
    if not same_rows or a.fitted != b.fitted or set(a.residuals) != set(b.residuals):
        return False
    same_constants = (
        np.isclose(value, b.constants[name], rtol=_SAME_CONSTANTS)
        for name, value in a.constants.items()
    )
    same_intervals = (
        np.isclose(size, b.residuals[name], rtol=_SAME_INTERVALS)
        for name, size in a.residuals.items()
    )
    return all(same_constants) and all(same_intervals)


if __name__ == "__main__":
    ship(Path(str(files("madmax_lib") / "data" / "parameters.json")))
