"""How far are predictions from measured rows? Predictions with their intervals, folds,
errors, ranks, baseline.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from madmax_lib.calibration.fit import SLOWEST, fingerprint, fit, slowness, usable
from madmax_lib.calibration.judge.intervals import class_of, coverage
from madmax_lib.calibration.published.row_plans import case_memory
from madmax_lib.calibration.published.rows import (
    model_flops,
    read_rows,
    to_steps,
    to_table,
)
from madmax_lib.calibration.verdict.expect import VERDICTS, verdicts
from madmax_lib.plan.case import Case
from madmax_lib.simulator.memory.memory import peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.simulator.uncertainty import components, log_width
from madmax_lib.timeline.timeline import with_origin

__all__ = [
    "baseline",
    "confusion",
    "errors",
    "folds",
    "layout_ranks",
    "predict",
    "score",
]

_PREDICTED = ["predicted_s", "low_s", "high_s", "predicted_memory_bytes"]
_FOLDS = 10
_FACTORS = (
    1 / 3,
    1 / 2,
    1.0,
    1.6,
    2.0,
    3.0,
)  # by which `confusion` makes reported times longer


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
        known = shipped()
        parameters = replace(
            parameters, residuals=known.residuals, sensitivities=known.sensitivities
        )
    rows = to_table(rows)
    read = read_rows(rows)
    supported = read["supported"].to_numpy(bool, copy=True)
    reason = read["reason"].to_numpy(object, copy=True)
    result = rows.assign(**dict.fromkeys(_PREDICTED, np.nan))
    if supported.any():
        part = read[supported]
        steps = to_steps(part)
        with np.errstate(all="ignore"):
            times = step_time(steps, parameters)
            predicted = times["step_s"]
            factor = np.exp(log_width(steps, times, parameters))
        held = [
            _peak_bytes(*row)
            for row in zip(part["case"], part["recompute_stated"], strict=True)
        ]
        finite = np.isfinite(predicted) & (predicted > 0)
        columns = np.where(
            finite, [predicted, predicted / factor, predicted * factor, held], np.nan
        )
        result.loc[supported, _PREDICTED] = columns.T
        reason[supported] = np.where(
            finite, reason[supported], "no finite time follows from these sizes"
        )
        supported[supported] = finite
    room = [
        usable_bytes(case.cluster.device) if case else np.nan for case in read["case"]
    ]
    too_large = result["predicted_memory_bytes"].to_numpy(float) > np.array(room)
    return result.assign(
        fits=supported & ~too_large, supported=supported, reason=reason
    )


def folds(
    rows: pd.DataFrame, *, by: str = "group", near: Parameters | None = None
) -> pd.DataFrame:
    """Every row that a fit takes, predicted by a fit that has not seen its fold.

    rows: a published table or the output of `read_rows`. by: what stays together in one
    of ten folds, "group" (a source and model) or nothing ("random"); or "source", a
    fold for each repository. near: a fit of all rows, the shipped constants if None;
    the fits begin there, and what they do not see returns to its prior. Returns the
    normalised rows with fold, predicted_s, log_error = log(measured / predicted) and
    the `uncertainty.components` of its variance. Which fold a group is in depends on
    its name only.
    """
    if "supported" not in rows.columns:
        rows = read_rows(rows)
    rows = rows[usable(rows)]
    rows = rows[slowness(rows) <= SLOWEST]
    near = near or shipped()
    fold = _fold_of(rows, by)
    parts = []
    for number in np.unique(fold):
        out = rows[fold == number]
        fitted = replace(
            fit(rows[fold != number], starts=1, near=near),
            sensitivities=near.sensitivities,
        )
        steps = to_steps(out)
        times = step_time(steps, fitted)
        columns = {"fold": number, "predicted_s": times["step_s"]}
        parts.append(out.assign(**columns, **components(steps, times, fitted)))
    result = pd.concat(parts).iloc[
        np.argsort(np.argsort(fold, kind="stable"))
    ]  # as the rows were
    result["log_error"] = np.log(
        result["measured_s"].astype(float) / result["predicted_s"]
    )
    return with_origin(
        result,
        {"files": {"rows": {"sha256": fingerprint(rows)}}, "rules": f"folds by {by}"},
    )


def baseline(rows: pd.DataFrame, fold: np.ndarray | None = None) -> np.ndarray:
    """Seconds by one achieved FLOP/s per (device, 16/8/4-bit class): the median of the
    rows outside the fold.

    rows: normalised. fold: of each row; all rows are their own reference if None. A
    device and class that no row outside the fold has takes the median share of the
    peak.
    """
    about = rows[["case", "source"]].to_dict("records")
    flops = np.array([model_flops(row["case"], row) for row in about])
    peak = np.array(
        [
            case.plan.world_size * case.cluster.device.peak(case.dtype)
            for case in rows["case"]
        ]
    )
    share = flops / rows["measured_s"].to_numpy(float) / peak
    keys = (
        rows["gpu"] + " " + rows["dtype"].str.extract(r"(\d+)$", expand=False)
    )  # bits
    result = np.full(len(rows), np.nan)
    for number in [None] if fold is None else np.unique(fold):
        out = np.ones(len(rows), bool) if fold is None else fold == number
        seen = out if fold is None else ~out
        medians = pd.Series(share[seen]).groupby(keys.to_numpy()[seen]).median()
        shares = keys[out].map(medians).fillna(np.median(share[seen])).to_numpy()
        result[out] = flops[out] / (shares * peak[out])
    return result


def errors(table: pd.DataFrame, by: str | list[str]) -> pd.DataFrame:
    """Rows, bias (median log error), MAPE and median absolute error (ratios) of `folds`
    by source, gpu, model, ...
    """
    absolute = np.abs(np.expm1(-table["log_error"].astype(float)))
    groups = table.assign(absolute=absolute).groupby(by)
    result = groups["absolute"].agg(rows="size", mape="mean", median="median")
    result.insert(1, "bias", groups["log_error"].median())
    result.attrs.update(table.attrs)
    return result


def confusion(
    table: pd.DataFrame, reference: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Verdicts about reported runs as they are, and made slower and faster: a row per
    class and factor.

    table, reference: of `folds`, as in `intervals.coverage`. Columns kind, factor (of
    the measured time), truth, right (share of the verdicts that decide) and the number
    of each of `expect.VERDICTS`.
    """
    high_s = table["predicted_s"] * np.exp(
        np.arcsinh(coverage(table, reference)["half_width"])
    )
    rows = []
    for factor in _FACTORS:
        truth = "fine" if factor == 1 else "slow" if factor > 1 else "suspiciously fast"
        said = verdicts(
            factor * table["measured_s"].astype(float), table["predicted_s"], high_s
        )
        for kind, part in pd.Series(said, table.index).groupby(table["kind"]):
            counts = {name: int((part == name).sum()) for name in VERDICTS}
            right = counts[truth] / max(len(part) - counts["cannot tell"], 1)
            rows.append(
                {
                    "kind": kind,
                    "factor": factor,
                    "truth": truth,
                    "right": right,
                    **counts,
                }
            )
    return pd.DataFrame(rows).sort_values(["kind", "factor"], ignore_index=True)


def score(table: pd.DataFrame) -> dict[str, float]:
    """MAPE and median of dense and of mixture rows (ratios)."""
    by_kind = errors(table.assign(kind=class_of(table)), "kind")
    return {
        f"{kind} {name}": float(by_kind.at[kind, name])
        for kind in by_kind.index
        for name in ("mape", "median")
    }


def layout_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Does the model rank the layouts of one model as they were measured? Spearman's
    correlation by model of `folds`.

    Columns rows and ranks (every run counts), layouts and layout_ranks (runs of one
    layout, such as those of different days, count as their mean). Models with less than
    four layouts are left out.
    """
    layout = ["dp", "tp", "pp", "heads", "micro_batch", "global_batch", "dtype"]
    heads = [case.model.heads for case in table["case"]]
    table = table.assign(measured_s=table["measured_s"].astype(float), heads=heads)
    rows = {}
    for model, runs in table.groupby("model"):
        means = runs.groupby(layout)[["measured_s", "predicted_s"]].mean()
        ranks = [
            spearmanr(part["measured_s"], part["predicted_s"]).statistic
            for part in (runs, means)
        ]
        rows[model] = (len(runs), ranks[0], len(means), ranks[1])
    result = pd.DataFrame.from_dict(
        rows, orient="index", columns=["rows", "ranks", "layouts", "layout_ranks"]
    )
    return result[result["layouts"] >= 4]


def _fold_of(rows: pd.DataFrame, by: str) -> np.ndarray:
    if by == "source":
        return pd.factorize(rows["repository"])[0]
    if by == "random":
        return np.random.default_rng(0).permutation(len(rows)) % _FOLDS
    if by != "group":
        raise ValueError(f"by={by!r} is not one of group, source, random")
    names = sorted(
        rows["group"].unique(),
        key=lambda name: hashlib.sha256(name.encode()).hexdigest(),
    )
    return (
        rows["group"].map({name: i % _FOLDS for i, name in enumerate(names)}).to_numpy()
    )


def _held(case: Case, recompute_stated: bool) -> pd.DataFrame:
    """The `memory` of a row; recompute that a source does not state is the least that
    fits: none, selective or full.
    """
    known = recompute_stated or case.plan.recompute != "none"
    for recompute in [case.plan.recompute] if known else ["none", "selective", "full"]:
        table = case_memory(replace(case, plan=replace(case.plan, recompute=recompute)))
        if peak_bytes(table) <= usable_bytes(case.cluster.device):
            break
    return table


def _peak_bytes(case: Case, recompute_stated: bool) -> float:
    """Of the fullest device; NaN where the plan cannot be laid out."""
    try:
        return peak_bytes(_held(case, recompute_stated))
    except ValueError:
        return float("nan")
