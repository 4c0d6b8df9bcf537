"""What the rows say about each constant: priors beside posteriors, constants at a bound,
correlated pairs.

In the scale of the fit (log or linear) a prior has the width `sigma` of
`data/parameter_bounds.csv` and the posterior the square root of its covariance.
`learned` = 1 - (posterior / prior width)^2 is the share of the prior's variance that
the rows have removed: 0 = nothing was learned and the constant stands where it started,
1 = the rows alone fix it.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.calibration.fit import moves
from madmax_lib.calibration.published.rows import to_steps
from madmax_lib.calibration.scale import scaled
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.timeline.timeline import with_origin

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
_DETERMINES = 0.01  # log change of a row's time; repeated runs differ by 3 to 10 %
_AT_BOUND = 0.005  # of the way between the bounds


def constants_of(parameters: Parameters) -> pd.DataFrame:
    """A row per fitted constant, indexed by `name:group`.

    Columns start, low, high (bounds), fitted, interval_low, interval_high (90 %), moved
    (in prior widths), learned (0..1), state (one of `STATES`) and note. Raises
    ValueError for parameters without a fit.
    """
    if not parameters.fitted:
        raise ValueError("parameters: nothing was fitted, there is no covariance")
    columns = ["start", "low", "high", "scale"]
    priors = bounds().loc[list(parameters.fitted)]
    table = priors[columns].copy()
    table["fitted"] = [parameters.constants[name] for name in table.index]
    intervals = [parameters.intervals[name] for name in table.index]
    table["interval_low"], table["interval_high"] = np.transpose(intervals)
    at, start, low, high = (
        scaled(table, column) for column in ("fitted", "start", "low", "high")
    )
    width = np.sqrt(np.diag(np.array(parameters.covariance)))
    sigma = priors["sigma"].to_numpy()
    moved = (at - start) / sigma
    learned = np.clip(1 - (width / sigma) ** 2, 0, 1)
    table["moved"] = moved
    table["learned"] = learned
    # the first condition that holds gives the state
    states = {
        "at a bound": np.minimum(at - low, high - at) < _AT_BOUND * (high - low),
        "fixed by rows": learned >= _MOST,
        "pulled off its prior": (learned < _LITTLE) & (np.abs(moved) > _FAR),
        "prior alone": learned < _LITTLE,
    }
    table["state"] = np.select([*states.values()], [*states], "rows and prior")
    sha256 = parameters.provenance.get("sha256", "")
    origin = {"files": {"rows": {"sha256": sha256}}, "rules": "calibration.fit"}
    return with_origin(table.assign(note=priors["note"]), origin)


def strongest_pairs(parameters: Parameters, count: int = 10) -> pd.DataFrame:
    """The most correlated pairs: first, second, correlation.

    The product or the ratio of such constants is known better than each of them.
    """
    covariance = np.array(parameters.covariance)
    names = np.array(parameters.fitted)
    width = np.sqrt(np.diag(covariance))
    # indices of the upper triangle, each pair once
    first, second = np.triu_indices(len(names), 1)
    pairs = pd.DataFrame({"first": names[first], "second": names[second]})
    pairs["correlation"] = (covariance / np.outer(width, width))[first, second]
    order = pairs["correlation"].abs().sort_values(ascending=False, kind="stable").index
    return pairs.loc[order[:count]].reset_index(drop=True)


def determined_by(parameters: Parameters, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose time each fitted constant moves by 1 % or more over the width of
    its prior: how many, of how many sources, and the source that has most of them.
    """
    is_determined = moves(to_steps(rows), parameters.fitted, parameters) > _DETERMINES
    # (rows, constants), a line per source
    by_source = pd.DataFrame(is_determined, columns=parameters.fitted).groupby(
        rows["repository"].to_numpy()
    )
    counts = by_source.sum()
    return pd.DataFrame(
        {
            "rows": counts.sum(),
            "sources": (counts > 0).sum(),
            "most of": counts.idxmax().where(counts.any(), ""),
        }
    )


def leverage(parameters: Parameters, steps: Steps) -> pd.DataFrame:
    """Changes of predictions when one constant crosses its 90 % interval.

    Columns median and largest of |log(step at one end / step at the other)| over the
    steps, a row per fitted constant.
    """
    rows = {}
    for name in parameters.fitted:
        ends = [
            replace(parameters, constants={**parameters.constants, name: value})
            for value in parameters.intervals[name]
        ]
        low_s, high_s = (step_time(steps, end)["step_s"] for end in ends)
        change = np.abs(np.log(high_s / low_s))
        rows[name] = (float(np.median(change)), float(change.max()))
    return pd.DataFrame.from_dict(rows, orient="index", columns=["median", "largest"])
