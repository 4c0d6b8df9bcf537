"""How sure is a prediction? The components of `step.uncertainty`, from sources that the
fit had not seen.

Errors of one source are alike, and no two sources are: the spread is learned from
sources left out whole, which all count the same. The components maximise the likelihood
of the errors under Student's t, which forgives the few runs that went wrong; then one
factor, the quantile, sets the level. For 90 % inside of a further source, 90 (1 + 1/n)
% of the n at hand must: it is one of n + 1 alike [conformal over groups, Dunn et al.
2022, arXiv 1809.07441].
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.stats import norm, t

from madmax_lib.calibration.bayes import gradient
from madmax_lib.calibration.fit import slowness
from madmax_lib.calibration.judge.identifiability import scaled
from madmax_lib.calibration.published.rows import to_steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds
from madmax_lib.simulator.steady.step_time import PARTS, step_time
from madmax_lib.simulator.uncertainty import COMPONENTS, constant_index, width_of

__all__ = [
    "class_of",
    "comparison_widths",
    "coverage",
    "coverage_by_class",
    "sensitivities",
    "spread",
]

_INSIDE = 0.9  # of the rows shall lie in their interval
_FREEDOM = 4.0  # of Student's t
_CLOSE = 1.5  # slowness of layouts that somebody would choose between
_FEWEST = 3  # sources; Student's t has heavy tails below
_STARTS = (0.05, 0.1, 0.2, 0.3)
# squared shares that hold slopes down; slopes below matter to nobody
_RIDGE = 0.3
_LEAST = 0.03


def class_of(rows: pd.DataFrame) -> pd.Series:
    """dense, of whatever is no mixture of experts, or mixture."""
    return pd.Series(
        np.where(rows["kind"] == "mixture", "mixture", "dense"),
        index=rows.index,
        dtype=object,
    )


def spread(table: pd.DataFrame) -> dict[str, float]:
    """Sizes of the components and the quantile, from `validate.folds` by source."""
    parts = table[list(COMPONENTS)].to_numpy(float)
    error = table["log_error"].to_numpy(float)
    weights = 1 / table.groupby("repository")["repository"].transform("size").to_numpy(
        float
    )

    def loss(point: np.ndarray) -> float:
        variance = parts @ np.exp(2 * point)
        return float(
            weights
            @ (
                np.log(variance)
                + (_FREEDOM + 1) * np.log1p(error**2 / (variance * _FREEDOM))
            )
        )

    edges = [(np.log(1e-3), np.log(10.0))] * len(COMPONENTS)
    begins = (np.log([1.0, *[size] * (len(COMPONENTS) - 1)]) for size in _STARTS)
    best = min(
        (minimize(loss, begin, bounds=edges) for begin in begins),
        key=lambda result: result.fun,
    )
    sizes = dict(zip(COMPONENTS, np.exp(best.x).tolist(), strict=True))
    score = np.abs(error) / width_of(table, sizes | {"quantile": 1.0})
    return sizes | {
        "quantile": _quantile(
            score, weights, _INSIDE * (1 + 1 / table["repository"].nunique())
        )
    }


def comparison_widths(table: pd.DataFrame) -> dict[str, float]:
    """Log half-widths of (measured / predicted) of one run over another of the same
    source and model, by class.

    What machine and software do to all runs alike cancels, so plans are compared more
    surely than they are timed. Every group counts alike, whatever its pairs; keys are
    "layouts dense" and "layouts mixture".
    """
    table = table[slowness(table) <= _CLOSE]
    result = {}
    classes = class_of(table)
    for name in pd.unique(classes):
        scores = []
        weights = []
        groups = []
        for group, errors in table[classes == name].groupby("group")["log_error"]:
            first, second = np.triu_indices(len(errors), 1)
            pairs = np.abs(
                errors.to_numpy(float)[first] - errors.to_numpy(float)[second]
            )
            scores = [*scores, *pairs]
            groups = [*groups, *[group] * len(pairs)]
            weights += [1 / max(len(pairs), 1)] * len(pairs)
        if scores:
            result[f"layouts {name}"] = _quantile(
                np.array(scores), np.array(weights)
            ) * _widening(np.array(groups))
    return result


def sensitivities(
    rows: pd.DataFrame, parameters: Parameters
) -> dict[str, dict[str, float]]:
    """How much of a relative change of a constant a step feels, by name of the constant
    and part of the step.

    Least squares of the slopes of log step_s over the shares of the parts, on the rows
    of the fit; so a table of plans gets its intervals without a slope of its own.
    """
    steps = to_steps(rows)
    names = list(parameters.fitted)
    table = (
        bounds().loc[names].assign(at=[parameters.constants[name] for name in names])
    )
    slopes = np.zeros((len(rows), len(bounds())))
    places = parameters.uncertainty[0]
    slopes[:, [places[name] for name in names]] = gradient(
        steps, scaled(table, "at"), names, parameters
    )
    times = step_time(steps, parameters)
    shares = (
        np.stack([times[part] for part in PARTS], axis=1) / times["step_s"][:, None]
    )
    fitted = {places[name] for name in names}
    result = {}
    for name in dict.fromkeys(name.partition(":")[0] for name in names):
        own = np.broadcast_to(constant_index(steps, name, places), len(rows))
        rest = np.isin(own, list(fitted))
        pull = np.vstack([shares[rest], np.sqrt(_RIDGE) * np.eye(len(PARTS))])
        of_steps = np.r_[slopes[rest, own[rest]], np.zeros(len(PARTS))]
        found = np.linalg.lstsq(pull, of_steps, rcond=None)[0]
        kept = {
            part: float(slope)
            for part, slope in zip(PARTS, found, strict=True)
            if abs(slope) > _LEAST
        }
        result |= {name: kept} if kept else {}
    return result


def coverage(
    table: pd.DataFrame, reference: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Whether each row of `validate.folds` lies in an interval that its source had no
    part in, and its half-width.

    The components come from the rows of reference (the table itself if None) of other
    sources. Columns inside and half_width (of the interval over the prediction).
    """
    reference = table if reference is None else reference
    width = np.zeros(len(table))
    for source in pd.unique(table["repository"]):
        out = (table["repository"] == source).to_numpy()
        width[out] = width_of(
            table[out], spread(reference[reference["repository"] != source])
        )
    inside = table["log_error"].abs().to_numpy(float) <= width
    return pd.DataFrame(
        {"inside": inside, "half_width": np.sinh(width)}, index=table.index
    )


def coverage_by_class(
    table: pd.DataFrame, reference: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Rows, share inside and median half-width of `coverage` for dense rows, mixtures
    and all.
    """
    rows = coverage(table, reference)
    classes = class_of(table)
    parts = {name: rows[classes == name] for name in ("dense", "mixture")} | {
        "all": rows
    }
    values = {
        name: (len(part), part["inside"].mean(), part["half_width"].median())
        for name, part in parts.items()
    }
    return pd.DataFrame.from_dict(
        values, orient="index", columns=["rows", "inside", "half_width"]
    )


def _quantile(
    scores: np.ndarray, weights: np.ndarray, inside: float = _INSIDE
) -> float:
    """Weighted quantile, linear between the middles of the weights; the largest beyond
    them.
    """
    order = np.argsort(scores)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return float(np.interp(inside, share, scores[order]))


def _widening(groups: np.ndarray) -> float:
    """Of few groups, as t is over the normal."""
    freedom = max(len(pd.unique(groups)), _FEWEST) - 1
    return float(t.ppf((1 + _INSIDE) / 2, freedom) / norm.ppf((1 + _INSIDE) / 2))
