"""Which constants make the step-time model meet measured rows? Bounded robust least
squares on log residuals.

Residual of a row: log(predicted / measured) / 0.03, soft-L1; of a constant: its
distance from the start value over the prior width of `data/parameter_bounds.csv`. Rows
of one source and model share machine, software and luck, so a row of a large group
weighs less.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.calibration.bayes import StackPrior, gradient
from madmax_lib.calibration.judge.identifiability import scaled
from madmax_lib.calibration.published.rows import read_rows, to_steps, to_table
from madmax_lib.catalog.datasets import local_data
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds, shipped, start
from madmax_lib.simulator.steady.step_time import step_s

__all__ = [
    "SCALE",
    "SLOWEST",
    "fingerprint",
    "fit",
    "known_rows",
    "posterior",
    "slowness",
    "update",
    "usable",
    "weights",
]

# columns and sources: see `published_rows`
_LOCAL = (
    "vtrain/ground_truth_multi.shared.csv",
    "published_more/published_more.csv",
    "published_more/layout_sweep.csv",
)
_STOP = {"xtol": 1e-4, "ftol": 1e-4}
# evaluations from a distance and from near the solution; after 3 a fold still knows its
# rows
_MOST = 60
_FEW = 10
# log residual at which soft-L1 turns from square to absolute; repeated runs differ by 3
# to 10 %
SCALE = 0.03
_SILENT = 1e-9  # relative change of a time that is arithmetic
_FULL = 40  # rows of a repository that count in full
# factor between measured and predicted beyond which a row of one's own is a mistake
_FARTHEST = 10.0
SLOWEST = (
    3.0  # slowness of a layout that is fitted; beyond, stacks fail in ways of their own
)
GROUP_DAMPING = (
    0.15  # a row of a (source, model) with n rows weighs n to this power less
)


def usable(rows: pd.DataFrame) -> pd.Series:
    """Rows that can be fitted: supported, without contradictions, with a measured time."""
    timed = (rows["measured_s"] > 0) & (rows["measured_s"] < np.inf)
    return rows["supported"].astype(bool) & rows["consistent"].astype(bool) & timed


def fit(
    rows: pd.DataFrame | str | Path,
    *,
    starts: int = 3,
    begin: Parameters | None = None,
    near: Parameters | None = None,
    only: Sequence[str] | None = None,
) -> Parameters:
    """Constants of the step-time model from measured rows.

    rows: a published table, a folder of runs, or the output of `read_rows`. starts:
    fits from the start values and from random points around them; the best counts.
    begin: constants that are not fitted, and where the first fit starts; the start
    values if None. near: a fit of almost the same rows, whose constants are few
    evaluations away. only: constants to fit, all that the rows can tell if None. The
    intervals follow from the covariance. Rows that cannot be timed are left out. Raises
    ValueError for a value that cannot be read, with row and column, if no row can be
    fitted or a constant is unknown.
    """
    if "supported" not in (rows := to_table(rows)).columns:
        rows = read_rows(rows)
        unread = rows[
            ~rows["supported"].astype(bool) & rows["reason"].str.match(r"\w+=")
        ]
        if len(unread):
            raise ValueError(f"row {unread.index[0]}: {unread['reason'].iloc[0]}")
    used = rows[usable(rows)]
    used = used[slowness(used) <= SLOWEST]
    if used.empty:
        raise ValueError("rows: none is supported, consistent and measured")
    problem = _LeastSquares(used, begin or start(), near.fitted if near else only)
    best = (
        problem.solve(problem.point(near), _FEW)
        if near
        else problem.solve(problem.begin)
    )
    random = np.random.default_rng(0)
    for _ in range(starts - 1):
        other = problem.solve(problem.scatter(random))
        best = other if other.cost < best.cost else best
    return problem.parameters(best, used)


def update(
    rows: pd.DataFrame | str | Path, begin: Parameters | None = None
) -> Parameters:
    """Constants after a few measured rows of one's own stack, two to five or more, or a
    folder of runs, by Bayes' rule.

    rows: columns of `data/published_train.csv`, or the output of `read_rows`. At the
    least model (of the catalog, else layers, hidden, heads, seq_len too), gpu (or
    cluster besides), n_gpus, global_batch (samples per step), and a time:
    iteration_time_s (seconds per step), tokens_per_s_per_gpu or tflops_per_gpu. One's
    own rows have no column source; then what a row does not state is as in `estimate`:
    dp follows from n_gpus, tp pp cp ep vpp micro_batch are 1, zero_stage 0, recompute
    none, precision bf16, software none, seq_len (tokens per sample) the model's. A
    column plan, such as dp2.tp2.z1, says more than those. Others: software,
    network_gbit (Gbit/s per device), devices_per_node, overlap_tp overlap_ep overlap_dp
    (1 or 0), lora_rank. begin: constants before, the shipped ones if None.

    The prior has the covariance of begin (the shipped constants if None), as much wider
    as strangers err, and a further part of the prior width of each constant, by which a
    stack may differ from those of the fit. Software that has no rows in the fit moves
    `stack_rate:other`; predictions then name the same software, or none. The covariance
    and with it the intervals shrink; on the rows themselves the mean error never grows.
    Raises ValueError for rows that cannot be used, with the reason of the first.

    >>> rows = pd.DataFrame({"model": "llama3-8b", "gpu": "h100", "n_gpus": [8, 16], "global_batch": [16, 32],
    ...     "zero_stage": 3, "software": "torchtitan", "iteration_time_s": [3.2, 3.3]})
    >>> steps = to_steps(read_rows(rows))
    >>> (step_s(steps, shipped()) < step_s(steps, update(rows))).tolist()  # slower than the stacks of the fit
    [True, True]
    """
    begin = begin or shipped()
    if "supported" not in (rows := to_table(rows)).columns:
        rows = read_rows(rows)
    if (refused := rows[~usable(rows)]).size or rows.empty:
        reasons = refused["reason"].where(
            refused["reason"] != "", "no time is measured"
        )
        others = (
            f" ({len(refused) - 1} more rows cannot be used)"
            if len(refused) > 1
            else ""
        )
        lines = (f"row {index}: {reason}{others}" for index, reason in reasons.items())
        raise ValueError(next(lines, "rows: there are none"))
    steps = to_steps(rows)
    measured_s = rows["measured_s"].to_numpy(float)
    predicted_s = step_s(steps, begin)
    for row in np.flatnonzero(
        np.abs(np.log(measured_s / predicted_s)) > np.log(_FARTHEST)
    ):
        times = f"{measured_s[row]:.4g} s measured, {predicted_s[row]:.4g} s predicted"
        raise ValueError(
            f"row {rows.index[row]}: {times}; is it in seconds, and the plan the one "
            "that ran?"
        )
    updated = StackPrior(begin).given(steps, np.log(measured_s))
    origin = {"update": {"rows": len(rows), "sha256": fingerprint(rows)}}
    return replace(updated, provenance={**begin.provenance, **origin})


def _free_constants(steps: Steps, begin: Parameters) -> list[str]:
    """Constants that move the time of any of these steps, of those that no prior fixes."""
    table = bounds()[bounds()["scale"] != "fixed"]
    values = np.array([begin.constants[name] for name in table.index])
    farther = np.where(values > table["start"], table["low"], table["high"]).astype(
        float
    )
    points = np.where(np.eye(len(values), dtype=bool), farther, values)
    moved = begin.constants | {
        name: points[:, i : i + 1] for i, name in enumerate(table.index)
    }
    seconds, at = (
        step_s(steps, Parameters(constants=of)) for of in (moved, begin.constants)
    )
    return table.index[(np.abs(seconds / at - 1) > _SILENT).any(axis=1)].tolist()


class _LeastSquares:
    """Least squares over the free constants: `point` is in the fitting scale (log or
    linear).
    """

    def __init__(
        self, rows: pd.DataFrame, begin: Parameters, only: Sequence[str] | None = None
    ):
        table = bounds()
        if unknown := set(only or ()) - set(table.index):
            raise ValueError(
                f"constant {sorted(unknown)[0]!r} is not in data/parameter_bounds.csv"
            )
        self.steps = to_steps(rows)
        self.names = list(only) if only else _free_constants(self.steps, begin)
        table = table.loc[self.names]
        self.logarithmic = (table["scale"] == "log").to_numpy()
        table = table.assign(begin=[begin.constants[name] for name in self.names])
        self.prior, self.low, self.high, at = (
            scaled(table, name) for name in ("start", "low", "high", "begin")
        )
        self.sigma = table["sigma"].to_numpy(float)
        self.begin = np.clip(at, self.low, self.high)
        self.fixed = Parameters(
            constants=begin.constants, collectives=begin.collectives, links=begin.links
        )
        self.log_measured = np.log(rows["measured_s"].to_numpy(float))
        self.weight = weights(rows) / SCALE

    def values(self, point: np.ndarray) -> np.ndarray:
        return np.where(self.logarithmic, np.exp(point), point)

    def constants(self, point: np.ndarray) -> dict[str, float]:
        return self.fixed.constants | dict(
            zip(self.names, self.values(point).tolist(), strict=True)
        )

    def residuals(self, point: np.ndarray) -> np.ndarray:
        """Rows, then priors."""
        predicted = step_s(
            self.steps, replace(self.fixed, constants=self.constants(point))
        )
        of_rows = (np.log(predicted) - self.log_measured) * self.weight
        return np.concatenate([of_rows, (point - self.prior) / self.sigma])

    def jacobian(self, point: np.ndarray) -> np.ndarray:
        slopes = gradient(self.steps, point, self.names, self.fixed)
        return np.vstack([slopes * self.weight[:, None], np.diag(1 / self.sigma)])

    def point(self, parameters: Parameters) -> np.ndarray:
        """Where these constants are."""
        return scaled(
            bounds()
            .loc[self.names]
            .assign(at=[parameters.constants[name] for name in self.names]),
            "at",
        )

    def solve(self, point: np.ndarray, evaluations: int = _MOST):
        inside = np.clip(point, self.low + 1e-6, self.high - 1e-6)
        edges = self.low, self.high
        return least_squares(
            self.residuals,
            inside,
            self.jacobian,
            bounds=edges,
            loss="soft_l1",
            x_scale=self.sigma,
            max_nfev=evaluations,
            **_STOP,
        )

    def scatter(self, random: np.random.Generator) -> np.ndarray:
        return self.prior + self.sigma * random.standard_normal(len(self.prior))

    def parameters(self, result, rows: pd.DataFrame) -> Parameters:
        """The solution with covariance (Gauss-Newton), intervals and provenance."""
        covariance, low, high = posterior(result)
        low = self.values(np.maximum(low, self.low))
        high = self.values(np.minimum(high, self.high))
        ends = zip(low.tolist(), high.tolist(), strict=True)
        return replace(
            self.fixed,
            constants=self.constants(result.x),
            intervals=dict(zip(self.names, ends, strict=True)),
            fitted=tuple(self.names),
            covariance=tuple(map(tuple, covariance.tolist())),
            provenance={
                "rows": len(rows),
                "sha256": fingerprint(rows),
                "cost": float(result.cost),
                "scale": _scale_of(rows),
            },
        )


def _scale_of(rows: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """By device family: between which devices, and tokens per sample, 90 % of its rows
    lie.
    """
    cases = rows["case"]
    sizes = {
        "devices": [case.plan.world_size for case in cases],
        "sequence": [case.sequence for case in cases],
    }
    ends = (
        pd.DataFrame(sizes, dtype=float)
        .groupby(rows["family"].to_numpy())
        .quantile([0.05, 0.95])
    )
    return {
        family: {name: ends.loc[family, name].tolist() for name in sizes}
        for family in rows["family"].unique()
    }


def weights(rows: pd.DataFrame) -> np.ndarray:
    """Of rows in the fit: less for one of many of a source and model, and of many of a
    repository.

    So do layouts that are slower than the best one of their model and devices: what
    slows them down most is seldom what the model knows.
    """
    of_group, of_all = (
        rows.groupby(name)[name].transform("size").to_numpy(float)
        for name in ("group", "repository")
    )
    return (
        of_group**-GROUP_DAMPING
        * np.minimum((_FULL / of_all) ** 0.5, 1.0)
        * slowness(rows) ** -0.5
    )


def slowness(rows: pd.DataFrame) -> np.ndarray:
    """Measured time over the best of the same group, devices, batch and data type."""
    alike = rows.groupby(["group", "n_gpus", "global_batch", "dtype"], dropna=False)[
        "measured_s"
    ]
    return rows["measured_s"].to_numpy(float) / alike.transform("min").to_numpy(float)


def posterior(result) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Covariance of a least-squares solution (Gauss-Newton), and low and high end of
    its 90 % interval.
    """
    covariance = np.linalg.inv(result.jac.T @ result.jac)
    half_width = 1.645 * np.sqrt(np.diag(covariance))
    return covariance, result.x - half_width, result.x + half_width


def fingerprint(rows: pd.DataFrame) -> str:
    """sha256 of the normalised rows, independent of the order of columns."""
    text = rows.sort_index(axis=1).to_csv(index=False, float_format="%.9g")
    return hashlib.sha256(text.encode()).hexdigest()


def known_rows() -> pd.DataFrame:
    """Normalised rows behind the shipped constants: `data/published_train.csv`, and
    tables of a data directory.

    The latter are not part of this project: vTrain's multi-node measurements, runs of
    further stacks, and a sweep of layouts of one stack. What is missing is left out.
    """
    tables = [catalog.table("published_train")]
    for name in _LOCAL:
        with contextlib.suppress(FileNotFoundError):
            tables.append(pd.read_csv(local_data(name), encoding="utf-8-sig"))
    return pd.concat([read_rows(table) for table in tables], ignore_index=True)
