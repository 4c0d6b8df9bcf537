"""What have the rows said about each constant? Priors beside posteriors, constants at a
bound, correlated pairs.

In the scale of the fit (log or linear) a prior has the width `sigma` of
`data/parameter_bounds.csv` and the posterior the square root of its covariance.
`learned` = 1 - (posterior / prior width)^2 is the share of the prior's variance that
the rows have removed: 0 = nothing was learned and the constant stands where it started,
1 = the rows alone fix it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.timeline.timeline import with_origin

__all__ = ["STATES", "constants_of", "leverage", "scaled", "strongest_pairs"]

STATES = (
    "fixed by rows",
    "rows and prior",
    "pulled off its prior",
    "prior alone",
    "at a bound",
)
# learned: above, the rows fix a constant; below, the prior does
_MOST = 0.75
_LITTLE = 0.2
# prior widths; from there the robust loss of the prior leaves a wider posterior, though
# the rows have spoken
_FAR = 1.0
_AT_BOUND = 0.005  # of the way between the bounds


def constants_of(parameters: Parameters) -> pd.DataFrame:
    """A row per fitted constant, indexed by `name:group`.

    Columns start, low, high (bounds), fitted, interval_low, interval_high (90 %), moved
    (in prior widths), learned (0..1), state (one of `STATES`) and note. Raises
    ValueError for parameters without a fit.
    """
    if not parameters.fitted:
        raise ValueError("parameters: nothing was fitted, there is no covariance")
    table = (
        bounds()
        .loc[
            list(parameters.fitted), ["start", "low", "high", "sigma", "scale", "note"]
        ]
        .copy()
    )
    table["fitted"] = [parameters.constants[name] for name in table.index]
    intervals = [parameters.intervals[name] for name in table.index]
    table["interval_low"], table["interval_high"] = np.transpose(intervals)
    at, first, low, high = (
        scaled(table, column) for column in ("fitted", "start", "low", "high")
    )
    width = np.sqrt(np.diag(np.array(parameters.covariance)))
    table["moved"] = (at - first) / table["sigma"].to_numpy()
    table["learned"] = np.clip(1 - (width / table["sigma"].to_numpy()) ** 2, 0, 1)
    edge = np.minimum(at - low, high - at) < _AT_BOUND * (high - low)
    learned = table["learned"].to_numpy()
    little = learned < _LITTLE
    far = table["moved"].abs().to_numpy() > _FAR
    cases = [edge, learned >= _MOST, little & far, little]
    table["state"] = np.select(
        cases,
        ["at a bound", "fixed by rows", "pulled off its prior", "prior alone"],
        STATES[1],
    )
    origin = {
        "files": {"rows": {"sha256": parameters.provenance.get("sha256", "")}},
        "rules": "calibration.fit",
    }
    return with_origin(
        table.drop(columns=["sigma", "note"]).assign(note=table["note"]), origin
    )


def scaled(table: pd.DataFrame, column: str) -> np.ndarray:
    """A column of `constants_of` or `bounds` in the scale of the fit."""
    values = table[column].to_numpy(float)
    return np.where(table["scale"] == "log", np.log(np.maximum(values, 1e-300)), values)


def strongest_pairs(parameters: Parameters, count: int = 10) -> pd.DataFrame:
    """The most correlated pairs (first, second, correlation): their product or ratio is
    known better than each.
    """
    covariance = np.array(parameters.covariance)
    names = np.array(parameters.fitted)
    width = np.sqrt(np.diag(covariance))
    first, second = np.triu_indices(len(names), 1)
    pairs = pd.DataFrame({"first": names[first], "second": names[second]})
    pairs["correlation"] = (covariance / np.outer(width, width))[first, second]
    order = pairs["correlation"].abs().sort_values(ascending=False, kind="stable").index
    return pairs.loc[order[:count]].reset_index(drop=True)


def leverage(parameters: Parameters, steps: Steps) -> pd.DataFrame:
    """How far predictions move when a constant goes through its 90 % interval, the
    others standing still.

    Columns median and largest of |log(step at one end / step at the other)| over the
    steps.
    """
    rows = {}
    for name in parameters.fitted:
        ends = [
            parameters.constants | {name: value} for value in parameters.intervals[name]
        ]
        low_s, high_s = (
            step_time(steps, replace(parameters, constants=end))["step_s"]
            for end in ends
        )
        change = np.abs(np.log(high_s / low_s))
        rows[name] = (float(np.median(change)), float(change.max()))
    return pd.DataFrame.from_dict(rows, orient="index", columns=["median", "largest"])
