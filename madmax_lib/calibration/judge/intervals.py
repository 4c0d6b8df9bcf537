"""Widths of predictions: the components of `simulator.uncertainty`, from sources that
the fit had not seen.

Errors of one source are alike, and no two sources are: the spread is learned from
sources left out whole, which all count the same. The components maximise the likelihood
of the errors under Student's t, which forgives the few runs that went wrong; then one
factor, the quantile, sets the level. For 90 % inside of a further source, 90 (1 + 1/n)
% of the n at hand must: it is one of n + 1 alike [conformal over groups, Dunn et al.
2022, arXiv 1809.07441].

Stacks that nobody knows err more, and to one side. Of a row whose step changes by p
when the rate of its software does (p < 0 [`uncertainty.pace`]), and of known variance v,

    log(measured / predicted) = -p slower + sqrt(v + (p pace)^2) t

with Student's t of 4: of 2, 3, 4, 6, 10 and infinitely many degrees of freedom 4 are the
likeliest, so their tails are heavy.
"""

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.stats import norm, t

from madmax_lib.calibration.bayes import gradient
from madmax_lib.calibration.fit import slowness
from madmax_lib.calibration.published.rows import to_steps
from madmax_lib.calibration.scale import FittingScale
from madmax_lib.simulator.rates.parameters import Parameters, bounds
from madmax_lib.simulator.steady.step_time import PARTS, step_time
from madmax_lib.simulator.uncertainty import COMPONENTS, constant_index, width_of

_INSIDE = 0.9  # share of the rows that shall lie in their interval
_FREEDOM = 4.0  # of Student's t
_CLOSE = 1.5  # slowness of layouts that somebody would choose between
_FEWEST = 3  # sources; Student's t has heavy tails below
_STARTS = (0.05, 0.1, 0.2, 0.3)  # sizes of the components where a search begins
# squared shares that hold slopes down; slopes below `_LEAST` matter to nobody
_RIDGE = 0.3
_LEAST = 0.03


def class_of(rows: pd.DataFrame) -> pd.Series:
    """The class of each row: mixture for mixtures of experts, else dense."""
    classes = np.where(rows["kind"] == "mixture", "mixture", "dense")
    return pd.Series(classes, index=rows.index, dtype=object)


def spread(table: pd.DataFrame) -> dict[str, float]:
    """Sizes of the components and the quantile, from `validate.folds` by source.

    A column unknown has the pace of rows of stacks that nobody knows, 0 of others: then
    slower is how much slower these are, and what they scatter more is apart.
    """
    paces = table.get("unknown", 0.0 * table["log_error"]).to_numpy(float)
    parts = np.column_stack([table[list(COMPONENTS)], paces**2]).astype(float)
    errors = table["log_error"].to_numpy(float)
    weights = _weights(table)

    def loss(point):
        """Minus twice the log likelihood of Student's t, but for constants.

        log v + (f + 1) log(1 + e^2 / (v f)), where the sizes squared times the parts
        are the variance v.
        """
        variance = parts @ np.exp(2 * point[:-1])
        rest = errors + paces * point[-1]
        tails = np.log1p(rest**2 / (variance * _FREEDOM))
        return float(weights @ (np.log(variance) + (_FREEDOM + 1) * tails))

    count = len(COMPONENTS)
    edges = [(np.log(1e-3), np.log(10.0))] * (count + 1) + [(-1.0, 1.0)]
    # the first component is a factor, the others are logarithmic errors
    begins = (np.log([1.0, *[size] * count, 1.0]) for size in _STARTS)
    best = min(
        (minimize(loss, begin, bounds=edges) for begin in begins),
        key=lambda solution: solution.fun,
    )
    sizes = dict(zip(COMPONENTS, np.exp(best.x).tolist(), strict=False))
    # the few rows of LoRA, which err most, do not set the level of all
    usual = table[(paces == 0) & (table["lora"] == 0)]
    score = np.abs(usual["log_error"]) / width_of(usual, sizes | {"quantile": 1.0})
    return {
        **sizes,
        "quantile": level(usual, score),
        "slower": float(best.x[-1]),
    }


def level(table: pd.DataFrame, scores: pd.Series) -> float:
    """The score that 90 % of a further source of rows stay below."""
    inside = _INSIDE * (1 + 1 / table["repository"].nunique())
    return _quantile(scores.to_numpy(float), _weights(table), inside)


def _weights(table):
    """(n,) all sources count the same, whatever their rows."""
    sources = table.groupby("repository")["repository"]
    return 1 / sources.transform("size").to_numpy(float)


def comparison_widths(table: pd.DataFrame) -> dict[str, float]:
    """Log half-widths of one run over another of the same source and model, by class.

    What machine and software do to all runs alike cancels in (measured / predicted), so
    plans are compared more surely than they are timed. Every group counts alike,
    whatever its pairs; keys are "layouts dense" and "layouts mixture".
    """
    table = table[slowness(table) <= _CLOSE]
    widths = {}
    for name, rows in table.groupby(class_of(table), sort=False):
        scores = []
        weights = []
        groups = 0
        for _, errors in rows.groupby("group")["log_error"]:
            errors = errors.to_numpy(float)
            # indices of the upper triangle: each pair of runs once
            first, second = np.triu_indices(len(errors), 1)
            pairs = np.abs(errors[first] - errors[second])
            scores += pairs.tolist()
            weights += [1 / max(len(pairs), 1)] * len(pairs)
            groups += len(pairs) > 0
        if scores:
            # few groups show too little of the spread, by as much as t exceeds the
            # normal
            freedom = max(groups, _FEWEST) - 1
            end = (1 + _INSIDE) / 2
            widening = float(t.ppf(end, freedom) / norm.ppf(end))
            width = _quantile(np.array(scores), np.array(weights))
            widths[f"layouts {name}"] = width * widening
    return widths


def sensitivities(
    rows: pd.DataFrame, parameters: Parameters
) -> dict[str, dict[str, float]]:
    """Slopes of log step_s by name of a constant and part of the step.

    A slope is the relative change of a step that consists of that part over the
    relative change of the constant. Least squares of the slopes of the rows of the fit
    over the shares of the parts; so a table of plans gets its intervals without a slope
    of its own.
    """
    steps = to_steps(rows)
    scale = FittingScale.of(parameters.fitted)
    point = scale.point(parameters.constants)
    row_of = parameters.uncertainty[0]
    fitted = [row_of[name] for name in scale.names]
    slopes = np.zeros((len(rows), len(bounds())))
    slopes[:, fitted] = gradient(steps, scale, point, parameters)
    times = step_time(steps, parameters)
    # (n, parts) shares of each step
    shares = np.stack([times[part] for part in PARTS], axis=1)
    shares = shares / times["step_s"][:, None]
    result = {}
    for name in bounds()["name"].loc[list(scale.names)].unique():
        constant = np.broadcast_to(constant_index(steps, name, row_of), len(rows))
        moved = np.isin(constant, fitted)
        # ridge: a further row per part that pulls its slope to 0
        pull = np.vstack([shares[moved], np.sqrt(_RIDGE) * np.eye(len(PARTS))])
        of_steps = np.r_[slopes[moved, constant[moved]], np.zeros(len(PARTS))]
        of_parts = np.linalg.lstsq(pull, of_steps, rcond=None)[0].tolist()
        large = {
            part: slope
            for part, slope in zip(PARTS, of_parts, strict=True)
            if abs(slope) > _LEAST
        }
        if large:
            result[name] = large
    return result


def _quantile(scores, weights, inside=_INSIDE):
    """Weighted quantile, linear between the middles of the weights.

    The largest score stands beyond them.
    """
    order = np.argsort(scores)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return float(np.interp(inside, share, scores[order]))
