"""Which constants make the step-time model meet measured rows? Bounded robust least squares on log residuals.

Residual of a row: log(predicted / measured) / 0.03, soft-L1; of a constant: its distance from the start value over the
prior width of `data/parameter_bounds.csv`. Rows of one source and model share machine, software and luck, so a row of a
large group weighs less.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.calibration.identifiability import scaled
from madmax_lib.calibration.published_rows import read_rows, to_work
from madmax_lib.datasets import local_data
from madmax_lib.simulator.rates.parameters import Parameters, bounds, start
from madmax_lib.simulator.step.inputs import CLASSES
from madmax_lib.simulator.step.step_time import step_time

__all__ = ["SCALE", "fingerprint", "fit", "known_rows", "posterior", "usable"]

_VTRAIN = "vtrain/ground_truth_multi.shared.csv"  # columns and source: see `published_rows`
_STOP = {"xtol": 1e-4, "ftol": 1e-4, "max_nfev": 60}
SCALE = 0.03  # log residual at which soft-L1 turns from square to absolute; repeated runs differ by 3 to 10 %
GROUP_DAMPING = 0.15  # a row of a (source, model) with n rows weighs n to this power less


def usable(rows: pd.DataFrame) -> pd.Series:
    """Rows that can be fitted: supported, without contradictions, with a measured time."""
    return rows["supported"].astype(bool) & rows["consistent"].astype(bool) & (rows["measured_s"] > 0)


def fit(
    rows: pd.DataFrame,
    *,
    starts: int = 3,
    seed: int = 0,
    bootstrap: int = 0,
    begin: Parameters | None = None,
    only: Sequence[str] | None = None,
) -> Parameters:
    """Constants of the step-time model from measured rows.

    rows: a published table, or the output of `read_rows`. starts: fits from the start values and from random points
    around them; the best counts. bootstrap: refits on groups drawn with replacement; their 5 % and 95 % quantiles
    become the intervals, which otherwise follow from the covariance. begin: constants that are not fitted, and
    where the first fit starts; the start values if None. only: constants to fit, all that the rows can tell if None.
    Raises ValueError if no row can be fitted or a constant is unknown.
    """
    if "supported" not in rows.columns:
        rows = read_rows(rows)
    used = rows[usable(rows)]
    if used.empty:
        raise ValueError("rows: none is supported, consistent and measured")
    problem = _LeastSquares(used, begin or start(), only)
    best = problem.solve(problem.begin)
    random = np.random.default_rng(seed)
    for _ in range(starts - 1):
        other = problem.solve(problem.scatter(random))
        best = other if other.cost < best.cost else best
    return problem.parameters(best, used, bootstrap=bootstrap, random=random)


def _free_constants(rows: pd.DataFrame) -> list[str]:
    """Constants that these rows can say anything about: those of classes that occur, unless fixed by their prior."""
    table = bounds()
    work = to_work(rows)
    groups = {f"{name}:{group}" for kind, names in CLASSES.items() for name in names for group in work.codes[kind][0]}
    groups |= {f"gemm_efficiency:{family}-16" for family in work.codes["family"][0]}
    plain = [name for name in table.index if ":" not in name]
    return [name for name in table.index if (name in groups or name in plain) and table.at[name, "scale"] != "fixed"]


class _LeastSquares:
    """Least squares over the free constants: `point` is in the fitting scale (log or linear)."""

    def __init__(self, rows: pd.DataFrame, begin: Parameters, only: Sequence[str] | None = None):
        table = bounds()
        if unknown := set(only or ()) - set(table.index):
            raise ValueError(f"constant {sorted(unknown)[0]!r} is not in data/parameter_bounds.csv")
        self.names = list(only) if only else _free_constants(rows)
        table = table.loc[self.names]
        self.logarithmic = (table["scale"] == "log").to_numpy()
        table = table.assign(begin=[begin.constants[name] for name in self.names])
        self.prior, self.low, self.high, at = (scaled(table, name) for name in ("start", "low", "high", "begin"))
        self.sigma = table["sigma"].to_numpy(float)
        self.begin = np.clip(at, self.low, self.high)
        self.fixed = dict(begin.constants)
        self.work, self.log_measured = to_work(rows), np.log(rows["measured_s"].to_numpy(float))
        size = rows.groupby("group")["group"].transform("size").to_numpy(float)
        self.weight = size**-GROUP_DAMPING / SCALE

    def values(self, point: np.ndarray) -> np.ndarray:
        return np.where(self.logarithmic, np.exp(point), point)

    def constants(self, point: np.ndarray) -> dict[str, float]:
        return self.fixed | dict(zip(self.names, self.values(point).tolist(), strict=True))

    def residuals(self, point: np.ndarray) -> np.ndarray:
        """Rows, then priors; point may be (..., constants)."""
        values = self.values(point)
        constants = self.fixed | {name: values[..., i : i + 1] for i, name in enumerate(self.names)}
        predicted = step_time(self.work, Parameters(constants=constants))["step_s"]
        of_rows = (np.log(predicted) - self.log_measured) * self.weight
        return np.concatenate([of_rows, (point - self.prior) / self.sigma], axis=-1)

    def jacobian(self, point: np.ndarray) -> np.ndarray:
        """By forward differences, all constants in one evaluation."""
        step = np.sqrt(np.finfo(float).eps) * np.maximum(1.0, np.abs(point))
        step = np.where(point + step > self.high, -step, step)
        moved = point + np.diag(step)
        slopes = (self.residuals(moved) - self.residuals(point)) / (np.diag(moved) - point)[:, None]
        return slopes.T

    def solve(self, point: np.ndarray):
        inside = np.clip(point, self.low + 1e-6, self.high - 1e-6)
        edges = self.low, self.high
        return least_squares(
            self.residuals, inside, self.jacobian, bounds=edges, loss="soft_l1", x_scale=self.sigma, **_STOP
        )

    def scatter(self, random: np.random.Generator) -> np.ndarray:
        return self.prior + self.sigma * random.standard_normal(len(self.prior))

    def parameters(self, result, rows: pd.DataFrame, *, bootstrap: int, random: np.random.Generator) -> Parameters:
        """The solution with covariance (Gauss-Newton), intervals and provenance."""
        covariance, low, high = posterior(result)
        if bootstrap:
            points = [self._resampled(rows, random, result.x) for _ in range(bootstrap)]
            low, high = np.quantile(points, [0.05, 0.95], axis=0)
        low, high = self.values(np.maximum(low, self.low)), self.values(np.minimum(high, self.high))
        ends = zip(low.tolist(), high.tolist(), strict=True)
        return Parameters(
            constants=self.constants(result.x),
            intervals=dict(zip(self.names, ends, strict=True)),
            fitted=tuple(self.names),
            covariance=tuple(map(tuple, covariance.tolist())),
            provenance={"rows": len(rows), "sha256": fingerprint(rows), "cost": float(result.cost)},
        )

    def _resampled(self, rows: pd.DataFrame, random: np.random.Generator, point: np.ndarray) -> np.ndarray:
        groups = rows["group"].unique()
        drawn = random.choice(groups, len(groups))
        part = pd.concat([rows[rows["group"] == name].assign(group=f"{i} {name}") for i, name in enumerate(drawn)])
        other = _LeastSquares(part, Parameters(constants=self.constants(point)), self.names)
        return other.solve(other.begin).x


def posterior(result) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Covariance of a least-squares solution (Gauss-Newton), and low and high end of its 90 % interval."""
    covariance = np.linalg.inv(result.jac.T @ result.jac)
    half_width = 1.645 * np.sqrt(np.diag(covariance))
    return covariance, result.x - half_width, result.x + half_width


def fingerprint(rows: pd.DataFrame) -> str:
    """sha256 of the normalised rows, independent of the order of columns."""
    text = rows.sort_index(axis=1).to_csv(index=False, float_format="%.9g")
    return hashlib.sha256(text.encode()).hexdigest()


def known_rows() -> pd.DataFrame:
    """Normalised rows behind the shipped constants: `data/published_train.csv` and vTrain's multi-node measurements.

    The latter are not part of this project; without them in a data directory, the published rows alone.
    """
    tables = [catalog.table("published_train")]
    with contextlib.suppress(FileNotFoundError):
        tables.append(pd.read_csv(local_data(_VTRAIN)))
    return pd.concat([read_rows(table) for table in tables], ignore_index=True)
