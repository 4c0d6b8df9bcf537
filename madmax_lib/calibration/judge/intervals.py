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


def spread(
    table: pd.DataFrame, strangers: pd.DataFrame | None = None
) -> dict[str, float]:
    """Sizes of the components and the quantile, from `validate.folds` by source; with
    strangers (`strangers.unknown_rows`) slower and pace too.
    """
    both = table.assign(pace=0.0)
    if strangers is not None:
        both = pd.concat([both, strangers])
    names = [*COMPONENTS, "pace"]
    parts = both[names].to_numpy(float)
    paces = parts[:, -1].copy()
    parts[:, -1] **= 2
    errors = both["log_error"].to_numpy(float)
    weights = _weights(both)

    def loss(point):
        """Minus twice the log likelihood of Student's t, but for constants.

        log v + (f + 1) log(1 + e^2 / (v f)), where the sizes squared times the parts
        are the variance v.
        """
        variance = parts @ np.exp(2 * point[:-1])
        rest = errors + paces * point[-1]
        tails = np.log1p(rest**2 / (variance * _FREEDOM))
        return float(weights @ (np.log(variance) + (_FREEDOM + 1) * tails))

    edges = [(np.log(1e-3), np.log(10.0))] * len(names) + [(-1.0, 1.0)]
    # the first component is a factor, the others are logarithmic errors
    begins = (np.log([1.0, *[size] * (len(names) - 1), 1.0]) for size in _STARTS)
    solutions = (minimize(loss, begin, bounds=edges) for begin in begins)
    best = min(solutions, key=lambda solution: solution.fun)
    sizes = dict(zip(COMPONENTS, np.exp(best.x).tolist(), strict=False))
    # the few rows of LoRA, which err most, do not set the level of all
    table = table[table["lora"] == 0]
    score = np.abs(table["log_error"]) / width_of(table, sizes | {"quantile": 1.0})
    sizes["quantile"] = _quantile(score.to_numpy(), _weights(table), _inside(table))
    if strangers is None:
        return sizes
    slower = float(best.x[-1])
    return sizes | {"slower": slower, "pace": _pace(strangers, sizes, slower)}


def _weights(table: pd.DataFrame):
    """(n,) all sources count the same, whatever their rows."""
    sources = table.groupby("repository")["repository"]
    return 1 / sources.transform("size").to_numpy(float)


def _inside(table: pd.DataFrame):
    """Share of these sources that must lie inside for 90 % of a further one."""
    return _INSIDE * (1 + 1 / table["repository"].nunique())


def _pace(strangers: pd.DataFrame, sizes: dict, slower: float):
    """Spread of the log rate of strangers, by which 90 % of a further stack lie inside
    an interval of the quantile that known stacks have.
    """
    pace = strangers["pace"].to_numpy(float)
    rest = strangers["log_error"].to_numpy(float) + pace * slower
    # a row is inside from the spread on at which rest^2 = known^2 + (q p spread)^2
    missing = np.maximum(rest**2 - width_of(strangers, sizes) ** 2, 0.0)
    spreads = np.sqrt(missing) / (sizes["quantile"] * np.abs(pace))
    return _quantile(spreads, _weights(strangers), _inside(strangers))


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


def _quantile(scores, weights, inside: float = _INSIDE):
    """Weighted quantile, linear between the middles of the weights.

    The largest score stands beyond them.
    """
    order = np.argsort(scores)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return float(np.interp(inside, share, scores[order]))
