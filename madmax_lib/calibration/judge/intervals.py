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

Predictions of measured rows: with intervals, and by fits that have not seen them.

What the rows say about each constant: priors beside posteriors, constants at a bound,
correlated pairs.

In the scale of the fit (log or linear) a prior has the width `sigma` of
`data/parameter_bounds.csv` and the posterior the square root of its covariance.
`learned` = 1 - (posterior / prior width)^2 is the share of the prior's variance that
the rows have removed: 0 = nothing was learned and the constant stands where it started,
1 = the rows alone fix it.
"""

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from madmax_lib.calibration.fit import (
    SLOWEST,
    fingerprint,
    fit,
    moves,
    slowness,
    usable,
)
from madmax_lib.calibration.published.row_plans import least_memory
from madmax_lib.calibration.published.rows import (
    read_rows,
    to_steps,
    to_table,
)
from madmax_lib.calibration.scale import scaled
from madmax_lib.simulator import (
    Parameters,
    bounds,
    peak_bytes,
    shipped,
    step_time,
    usable_bytes,
)
from madmax_lib.simulator.uncertainty import (
    COMPONENTS,
    components,
    log_width,
    pace,
    width_of,
)
from madmax_lib.timeline import with_origin

__all__ = ["folds", "predict"]

_INSIDE = 0.9  # share of the rows that shall lie in their interval
_FREEDOM = 4.0  # of Student's t
_STARTS = (0.05, 0.1, 0.2, 0.3)  # sizes of the components where a search begins


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
    return weighted_quantile(scores.to_numpy(float), _weights(table), inside)


def _weights(table):
    """(n,) all sources count the same, whatever their rows."""
    sources = table.groupby("repository")["repository"]
    return 1 / sources.transform("size").to_numpy(float)


def weighted_quantile(
    scores: np.ndarray, weights: np.ndarray, inside: float = _INSIDE
) -> float:
    """Weighted quantile of (n,) scores, linear between the middles of the weights.

    The largest score stands beyond them.
    """
    order = np.argsort(scores)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return float(np.interp(inside, share, scores[order]))


_PREDICTED = ["predicted_s", "low_s", "high_s", "predicted_memory_bytes"]
_FOLDS = 10


def predict(
    rows: pd.DataFrame | str | Path, parameters: Parameters | None = None
) -> pd.DataFrame:
    """A published table or a folder of runs with predictions beside it: the same rows
    and index, and after its columns

    predicted_s, low_s, high_s: seconds of a step and its 90 % interval, by the
    residuals of the parameters.
    predicted_memory_bytes: peak of the fullest device.
    fits: whether the memory suffices, also for rows whose source reports none.
    supported, reason: whether a row can be predicted, and why not; a contradiction in
    it is named, but predicted.

    rows: as in `fit.update`, but without a time. parameters: the shipped constants if
    None; the shipped residuals stand in where they have none. What cannot be predicted
    is NaN; a table never fails because of one row.
    """
    parameters = parameters or shipped()
    if not parameters.residuals:
        widths = {
            name: getattr(shipped(), name) for name in ("residuals", "sensitivities")
        }
        parameters = replace(parameters, **widths)
    rows = to_table(rows)
    read = read_rows(rows)
    supported = read["supported"].to_numpy(bool, copy=True)
    reason = read["reason"].to_numpy(object, copy=True)
    result = rows.assign(**dict.fromkeys(_PREDICTED, np.nan))
    if supported.any():
        columns = _predictions(read[supported], parameters)
        result.loc[supported, _PREDICTED] = columns
        finite = np.isfinite(columns[:, 0])
        reason[supported] = np.where(
            finite, reason[supported], "no finite time follows from these sizes"
        )
        # a mask of the supported rows, spread over all of them
        supported[supported] = finite
    room_bytes = np.array(
        [usable_bytes(case.device) if case else np.nan for case in read["case"]]
    )
    too_large = result["predicted_memory_bytes"].to_numpy(float) > room_bytes
    return result.assign(
        fits=supported & ~too_large, supported=supported, reason=reason
    )


def _predictions(rows, parameters):
    """(n, 4) columns `_PREDICTED` of supported rows, NaN where no time is finite."""
    steps = to_steps(rows)
    with np.errstate(all="ignore"):
        times = step_time(steps, parameters)
        step_s = times["step_s"]
        # the interval is symmetric in log seconds
        factor = np.exp(log_width(steps, times, parameters))
    memory_bytes = np.full(len(rows), np.nan)
    stated = zip(rows["case"], rows["recompute_stated"], strict=True)
    for row, (case, recompute_stated) in enumerate(stated):
        with suppress(ValueError):  # a plan that cannot be laid out
            memory_bytes[row] = peak_bytes(least_memory(case, recompute_stated))
    finite = np.isfinite(step_s) & (step_s > 0)
    columns = [step_s, step_s / factor, step_s * factor, memory_bytes]
    return np.where(finite, columns, np.nan).T


def folds(
    rows: pd.DataFrame,
    *,
    by: str | pd.Series = "group",
    near: Parameters | None = None,
    priced: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Every row that a fit takes, predicted by a fit that has not seen its fold.

    rows: a published table or the output of `read_rows`. by: what stays together in one
    of ten folds, "group" (a source and model) or nothing ("random"); or "source", a
    fold for each repository; or a name for each row, a fold for each name. near: a fit
    of all rows, the shipped constants if None; the fits begin there, and what they do
    not see returns to its prior. priced: the rows that are predicted in place of these,
    by index, such as the same of unknown software. Returns the predicted rows with fold
    and the columns of `with_errors`. Which fold a group is in depends on its name only.
    """
    if "supported" not in rows.columns:
        rows = read_rows(rows)
    rows = rows[usable(rows)]
    rows = rows[slowness(rows) <= SLOWEST]
    near = near or shipped()
    fold = _fold_of(rows, by)
    priced = rows if priced is None else priced.loc[rows.index]
    can_price = usable(priced).to_numpy()
    parts = []
    for number in np.unique(fold[can_price]):
        out = priced[can_price & (fold == number)]
        fitted = fit(rows[fold != number], starts=1, near=near)
        # slopes by parts are those of the fit of all rows
        fitted = replace(fitted, sensitivities=near.sensitivities)
        parts.append(with_errors(out, fitted).assign(fold=number))
    # the parts stand fold by fold; the inverse of that permutation restores the order
    order = np.argsort(np.argsort(fold[can_price], kind="stable"))
    result = pd.concat(parts).iloc[order]
    file = {"rows": {"sha256": fingerprint(rows)}}
    return with_origin(
        result, {"files": file, "rules": f"folds by {getattr(by, 'name', by)}"}
    )


def with_errors(rows: pd.DataFrame, parameters: Parameters) -> pd.DataFrame:
    """Normalised rows with predicted_s, log_error, the `uncertainty.components` of its
    variance, and how much of it the rate of the software moves (`uncertainty.pace`).
    """
    steps = to_steps(rows)
    times = step_time(steps, parameters)
    log_error = np.log(rows["measured_s"].astype(float) / times["step_s"])
    return rows.assign(
        predicted_s=times["step_s"],
        log_error=log_error,
        pace=pace(times, parameters),
        **components(steps, times, parameters),
    )


def _fold_of(rows, by):
    """(n,) number of each row's fold."""
    if isinstance(by, pd.Series):
        return pd.factorize(by[rows.index])[0]
    if by == "source":
        return pd.factorize(rows["repository"])[0]
    if by == "random":
        return np.random.default_rng(0).permutation(len(rows)) % _FOLDS
    if by != "group":
        raise ValueError(f"by={by!r} is not one of group, source, random")
    # a hash of the name puts groups in an order that no further row changes
    names = sorted(
        rows["group"].unique(),
        key=lambda name: hashlib.sha256(name.encode()).hexdigest(),
    )
    numbers = {name: i % _FOLDS for i, name in enumerate(names)}
    return rows["group"].map(numbers).to_numpy()


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
        raise ValueError("parameters: nothing was fitted, so there is no covariance")
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
