"""Accuracy of the model on rows that its fit has not seen: errors by kind and source,
coverage of the intervals, and a baseline.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from madmax_lib.calibration.judge.intervals import class_of, spread
from madmax_lib.calibration.published.rows import flops_and_peaks
from madmax_lib.simulator import width_of


def baseline(rows: pd.DataFrame, fold: np.ndarray | None = None) -> np.ndarray:
    """Seconds by one achieved FLOP/s per (device, 16/8/4-bit class): the median of the
    rows outside the fold.

    rows: normalised. fold: of each row; all rows are their own reference if None. A
    device and class that no row outside the fold has takes the median share of the
    peak.
    """
    flops, peak = flops_and_peaks(rows)
    measured_s = rows["measured_s"].to_numpy(float)
    share = flops / measured_s / peak
    # products of one width run on the same units
    bits = rows["dtype"].str.extract(r"(\d+)$", expand=False)
    keys = rows["gpu"] + " " + bits
    result = np.full(len(rows), np.nan)
    for number in [None] if fold is None else np.unique(fold):
        out = np.ones(len(rows), bool) if fold is None else fold == number
        seen = out if fold is None else ~out
        medians = pd.Series(share[seen]).groupby(keys.to_numpy()[seen]).median()
        # a device that nobody else ran takes the median share of all
        shares = keys[out].map(medians).fillna(np.median(share[seen]))
        reached = shares.to_numpy() * peak[out]
        result[out] = flops[out] / reached
    return result


def errors(table: pd.DataFrame, by: str | list[str]) -> pd.DataFrame:
    """Rows, bias, MAPE and median absolute error of `folds` by source, gpu, model, ...

    bias: median log error; the others are ratios.
    """
    absolute = np.abs(np.expm1(-table["log_error"].astype(float)))
    groups = table.assign(absolute=absolute).groupby(by)
    result = groups["absolute"].agg(
        rows="size",
        mape="mean",
        median="median",
    )
    # the sign of the error, which the absolute ones hide
    result.insert(1, "bias", groups["log_error"].median())
    result.attrs.update(table.attrs)
    return result


def score(table: pd.DataFrame) -> dict[str, float]:
    """MAPE and median of dense and of mixture rows (ratios)."""
    by_kind = errors(table.assign(kind=class_of(table)), "kind")
    return {
        f"{kind} {name}": float(by_kind.at[kind, name])
        for kind in by_kind.index
        for name in ("mape", "median")
    }


def coverage(
    table: pd.DataFrame,
    reference: pd.DataFrame | None = None,
    sizes_of: Callable[[pd.DataFrame, str], dict[str, float]] | None = None,
) -> pd.DataFrame:
    """Whether each row of `validate.folds` lies in its interval, and its half-width.

    A row's source has no part in its interval: the components come from the rows of
    reference (the table itself if None) of other sources, by `intervals.spread` or by
    sizes_of, a function of these rows and the source. Columns inside and half_width (of
    the interval over the prediction).
    """
    if reference is None:
        reference = table
    width = np.zeros(len(table))
    for source in pd.unique(table["repository"]):
        out = (table["repository"] == source).to_numpy()
        others = reference[reference["repository"] != source]
        sizes = sizes_of(others, source) if sizes_of else spread(others)
        width[out] = width_of(table[out], sizes)
    error = table["log_error"].to_numpy(float)
    inside = np.abs(error) <= width
    # the interval goes from exp(-w) to exp(w): half of it is sinh(w)
    columns = {"inside": inside, "half_width": np.sinh(width)}
    return pd.DataFrame(columns, index=table.index)
