"""Predictions of measured rows: with intervals, and by fits that have not seen them."""

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.calibration.fit import SLOWEST, fingerprint, fit, slowness, usable
from madmax_lib.calibration.published.row_plans import least_memory
from madmax_lib.calibration.published.rows import (
    read_rows,
    to_steps,
    to_table,
)
from madmax_lib.simulator.memory.memory import peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.simulator.uncertainty import components, log_width, pace
from madmax_lib.timeline.timeline import with_origin

__all__ = ["folds", "predict"]

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
        [usable_bytes(case.cluster.device) if case else np.nan for case in read["case"]]
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
