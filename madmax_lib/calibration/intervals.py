"""How sure is a prediction? 90 % intervals from rows that the fit had not seen, and how often they hold.

The score of a row is |log(measured / predicted)| in folds that keep a source and model together, as in split conformal
prediction [Lei et al. 2018, arXiv 1604.04173]. It has no sign: whether an unknown machine or software is faster or
slower than the model is a matter of chance, and two large groups would make the signs of a whole kind. Rows of a
source and model err together, so a row of n such rows weighs n ** -1/2, and a kind of few groups is widened as
Student's t is over the normal. Kinds with few rows lean on all rows of their class, dense or mixture.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy.stats import norm, t

from madmax_lib.simulator.step.uncertainty import SPLITS, known_width, split_of

__all__ = [
    "class_of",
    "comparison_quantiles",
    "coverage",
    "coverage_by_class",
    "interval_quantiles",
    "kind_of",
    "quantiles_of",
]

_INSIDE = 0.9  # of the rows shall lie in their interval
_SHRINK = 15  # rows at which a kind and its class count alike
_GROUP_POWER = 0.5  # between all rows equal (0) and all groups equal (1)
_FEWEST_GROUPS = 3  # Student's t has heavy tails below


def class_of(rows: pd.DataFrame) -> pd.Series:
    """dense or mixture (of experts)."""
    return pd.Series(np.where(rows["experts"].astype(float) > 0, "mixture", "dense"), index=rows.index, dtype=object)


def kind_of(rows: pd.DataFrame) -> pd.Series:
    """Kinds of rows whose errors are alike: family and how the model is split."""
    split = split_of(*(rows[name].astype(float) for name in ("experts", "zero", "tp", "pp", "unfused")))
    return rows["family"].astype(str) + " " + np.array(SPLITS)[split]


def interval_quantiles(table: pd.DataFrame) -> dict[str, list[float]]:
    """Log quantiles (low, high) by kind, class (dense, mixture) and of all rows ("all") from `validate.folds`."""
    scores = table["log_error"].abs().to_numpy(float)
    weights = table.groupby("group")["group"].transform("size").to_numpy(float) ** -_GROUP_POWER
    classes, kinds = class_of(table).to_numpy(), kind_of(table).to_numpy()
    groups = table["group"].to_numpy()
    everything = np.ones(len(table), bool)
    result = {"all": _quantile(scores, weights) * _widening(groups)}
    result |= {name: _quantile(scores[of], weights[of]) for name, of in _parts(classes, everything)}
    for name, of in _parts(classes, everything):
        for kind, rows in _parts(kinds, of):
            weight = rows.sum() / (rows.sum() + _SHRINK)
            own = weight * _quantile(scores[rows], weights[rows]) + (1 - weight) * result[name]
            result[kind] = own * _widening(groups[rows])
    for name, of in _parts(classes, everything):
        result[name] = result[name] * _widening(groups[of])
    return {name: [-float(width), float(width)] for name, width in result.items()}


def comparison_quantiles(table: pd.DataFrame) -> dict[str, list[float]]:
    """Log quantiles of (measured / predicted) of one run over another of the same source and model, by class.

    What machine and software do to all runs alike cancels, so plans are compared more surely than they are timed.
    Every group counts alike, whatever its pairs; keys are "layouts dense" and "layouts mixture".
    """
    result, classes = {}, class_of(table)
    for name in pd.unique(classes):
        scores, weights, groups = [], [], []
        for group, errors in table[classes == name].groupby("group")["log_error"]:
            first, second = np.triu_indices(len(errors), 1)
            pairs = np.abs(errors.to_numpy(float)[first] - errors.to_numpy(float)[second])
            scores, groups = [*scores, *pairs], [*groups, *[group] * len(pairs)]
            weights += [1 / max(len(pairs), 1)] * len(pairs)
        if scores:
            width = _quantile(np.array(scores), np.array(weights)) * _widening(np.array(groups))
            result[f"layouts {name}"] = [-float(width), float(width)]
    return result


def quantiles_of(rows: pd.DataFrame, residuals: Mapping[str, list[float]]) -> np.ndarray:
    """(n, 2) log quantiles of rows by kind, else class; wider where the family is not calibrated."""
    families = rows["family"].astype(str)
    splits = [kind.removeprefix(f"{family} ") for family, kind in zip(families, kind_of(rows), strict=True)]
    width = [known_width(residuals, family, split) for family, split in zip(families, splits, strict=True)]
    return np.outer(width, [-1.0, 1.0])


def coverage(table: pd.DataFrame, reference: pd.DataFrame | None = None, by: str = "fold") -> pd.DataFrame:
    """Whether each row of `validate.folds` lies in an interval it had no part in, and its half-width.

    The interval is made from the rows of reference (the table itself if None) that have another value of column `by`.
    Columns inside and half_width (of the interval over the prediction).
    """
    reference = table if reference is None else reference
    inside, width = np.zeros(len(table), bool), np.zeros(len(table))
    error, part, others = table["log_error"].to_numpy(float), table[by].to_numpy(), reference[by].to_numpy()
    for name in pd.unique(part):
        out = part == name
        low, high = quantiles_of(table[out], interval_quantiles(reference[others != name])).T
        inside[out] = (error[out] >= low) & (error[out] <= high)
        width[out] = (np.exp(high) - np.exp(low)) / 2
    return pd.DataFrame({"inside": inside, "half_width": width}, index=table.index)


def coverage_by_class(table: pd.DataFrame, reference: pd.DataFrame | None = None, by: str = "fold") -> pd.DataFrame:
    """Rows, share inside and median half-width of `coverage` for dense rows, mixtures and all."""
    rows, classes = coverage(table, reference, by), class_of(table)
    parts = {name: rows[classes == name] for name in ("dense", "mixture")} | {"all": rows}
    values = {name: (len(part), part["inside"].mean(), part["half_width"].median()) for name, part in parts.items()}
    return pd.DataFrame.from_dict(values, orient="index", columns=["rows", "inside", "half_width"])


def _parts(names: np.ndarray, within: np.ndarray):
    return [(str(name), within & (names == name)) for name in pd.unique(names[within])]


def _quantile(scores: np.ndarray, weights: np.ndarray) -> float:
    """Weighted quantile, linear between the middles of the weights."""
    order = np.argsort(scores)
    share = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return float(np.interp(_INSIDE, share, scores[order]))


def _widening(groups: np.ndarray) -> float:
    freedom = max(len(pd.unique(groups)), _FEWEST_GROUPS) - 1
    return float(t.ppf((1 + _INSIDE) / 2, freedom) / norm.ppf((1 + _INSIDE) / 2))
