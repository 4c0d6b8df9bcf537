"""Fit of the step-time model's constants to measured rows: bounded, robust least squares.

Residual of a row: log(predicted / measured) / 0.03, soft-L1; of a constant: its
distance from the start value over the prior width of `data/parameter_bounds.csv`. Rows
of one source and model share machine, software and luck, so a row of a large group
weighs less.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.calibration.posterior import gradient, updated
from madmax_lib.calibration.published.rows import read_rows, to_steps, to_table
from madmax_lib.calibration.scale import FittingScale, covariance_of
from madmax_lib.catalog import local_data
from madmax_lib.plan.legal import could_run, legal
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds, shipped, start
from madmax_lib.simulator.steady.step_time import step_s

# files of a data directory, with the columns that `published.rows` reads
_LOCAL = (
    "vtrain/ground_truth_multi.shared.csv",
    "published_more/published_more.csv",
    "published_more/layout_sweep.csv",
)
_TOLERANCES = {"xtol": 1e-4, "ftol": 1e-4}
# evaluations from a distance, and from near the solution, where 3 already bring a fold
# back to its rows
_MOST_EVALUATIONS = 60
_FEW_EVALUATIONS = 10
_INSIDE = 1e-6  # from a bound, on which `least_squares` may not begin
# log residual at which soft-L1 turns from square to absolute; repeated runs differ by 3
# to 10 %
SCALE = 0.03
_FULL = 40  # rows of a repository that count in full
# factor between measured and predicted beyond which a row of one's own is a mistake
_ABSURD = 10.0
# slowness of a layout that is fitted; beyond, stacks fail in ways of their own
SLOWEST = 3.0
# a row of a (source, model) with n rows weighs n to this power less
_GROUP_DAMPING = 0.15


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
    evaluations away. only: constants to fit; if None those of which the rows say more
    than their priors do, and the others stay where they begin. The
    intervals follow from the covariance. Rows that cannot be timed are left out. Raises
    ValueError for a value that cannot be read, with row and column, if no row can be
    fitted or a constant is unknown.
    """
    rows = to_table(rows)
    if "supported" not in rows.columns:
        rows = read_rows(rows)
        # a field that cannot be read begins its reason with name=value
        unread = rows[
            ~rows["supported"].astype(bool) & rows["reason"].str.match(r"\w+=")
        ]
        if len(unread):
            raise ValueError(f"row {unread.index[0]}: {unread['reason'].iloc[0]}")
    rows = rows[usable(rows)]
    rows = rows[slowness(rows) <= SLOWEST]
    if rows.empty:
        raise ValueError("rows: none is usable (supported, consistent and measured)")
    problem = _LeastSquares(rows, begin or start(), near.fitted if near else only)
    if near:
        point = problem.scale.point(near.constants)
        best = problem.solve(point, _FEW_EVALUATIONS)
    else:
        best = problem.solve(problem.begin)
    random = np.random.default_rng(0)
    for _ in range(starts - 1):
        other = problem.solve(problem.scatter(random))
        best = other if other.cost < best.cost else best
    return problem.parameters(best, rows)


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
    (1 or 0), lora_rank, like (software that yours is built on). begin: constants before,
    the shipped ones if None.

    The prior has the covariance of begin (the shipped constants if None), as much wider
    as strangers err, and a further part of the prior width of each constant and of the
    pace of all of them, by which a stack may differ from those of the fit. Software that
    is in no table moves `stack_rate:stranger`, and any other without rows in the fit
    `stack_rate:other`; predictions then name the same software. The covariance and with
    it the intervals shrink, unless the rows scatter more than those of other stacks; on
    the rows themselves the mean error never grows. Rows of one step alone are noted in
    provenance["update"]["note"]. A row that ran may break the rules of uneven stages
    and padding. Raises ValueError for rows that cannot be used, with the reason of the
    first.

    Two runs that are slower than those of the fit:

    >>> rows = pd.DataFrame({"model": "llama3-8b", "gpu": "h100", "software": "torchtitan"}, [0, 1])
    >>> rows = rows.assign(n_gpus=[8, 16], zero_stage=3, global_batch=[16, 32])
    >>> rows = rows.assign(iteration_time_s=[3.2, 3.3])
    >>> steps = to_steps(read_rows(rows))
    >>> (step_s(steps, shipped()) < step_s(steps, update(rows))).tolist()
    [True, True]
    """
    begin = begin or shipped()
    rows = to_table(rows)
    if "supported" not in rows.columns:
        rows = read_rows(rows)
    rows = _as_they_ran(rows)
    steps = to_steps(rows)
    measured_s = rows["measured_s"].to_numpy(float)
    predicted_s = step_s(steps, begin)
    mistaken = np.abs(np.log(measured_s / predicted_s)) > np.log(_ABSURD)
    if mistaken.any():
        row = int(mistaken.argmax())
        raise ValueError(
            f"row {rows.index[row]}: {measured_s[row]:.4g} s measured, "
            f"{predicted_s[row]:.4g} s predicted; is it in seconds, and the plan the one "
            "that ran?"
        )
    constants = updated(begin, steps, np.log(measured_s))
    origin = {"update": {"rows": len(rows), "sha256": fingerprint(rows)}}
    # rows of one step alone tell how fast that is
    if rows["case"].astype(str).nunique() == 1:
        origin["update"]["note"] = (
            "the rows share one model, plan and batch: they give its step time, "
            "but not which part of the step is slow"
        )
    return replace(constants, provenance={**begin.provenance, **origin})


def _as_they_ran(rows):
    """Rows of one's own, of which a layout that ran is no error. Raises ValueError with
    the reason of the first that cannot be used.
    """
    # what ran is no error, though the book would lay it out otherwise
    ran = [
        case is not None and reason == str(legal(case).words()) and could_run(case)
        for case, reason in zip(rows["case"], rows["reason"], strict=True)
    ]
    rows = rows.assign(consistent=rows["consistent"].astype(bool) | np.array(ran, bool))
    refused = rows[~usable(rows)]
    if rows.empty:
        raise ValueError("rows: empty")
    if len(refused):
        reason = refused["reason"].iloc[0] or "no time is measured"
        more = len(refused) - 1
        others = f" ({more} more rows cannot be used)" if more else ""
        raise ValueError(f"row {refused.index[0]}: {reason}{others}")
    if any(
        case.dtype == "fp32" and "tf32" in case.device.peak_flops
        for case in rows["case"]
    ):
        warnings.warn(
            "fp32 rows: set tf32 if torch was allowed to use it", stacklevel=2
        )
    return rows


class _LeastSquares:
    """Least squares over the constants that rows can tell; a point is in fitting scale."""

    def __init__(self, rows, begin, only=None):
        self.steps = to_steps(rows)
        self.weight = weights(rows) / SCALE
        names = only or _free_constants(self.steps, begin, self.weight)
        self.scale = scale = FittingScale.of(names)
        self.begin = np.clip(scale.point(begin.constants), scale.low, scale.high)
        self.fixed = Parameters(
            constants=begin.constants, collectives=begin.collectives, links=begin.links
        )
        self.log_measured = np.log(rows["measured_s"].to_numpy(float))

    def residuals(self, point):
        """(rows + constants,) weighted log errors, then distances from the priors."""
        predicted = step_s(self.steps, self.scale.moved(self.fixed, point))
        errors = (np.log(predicted) - self.log_measured) * self.weight
        return np.concatenate([errors, (point - self.scale.prior) / self.scale.sigma])

    def jacobian(self, point):
        """(rows + constants, constants) slopes of `residuals`."""
        slopes = gradient(self.steps, self.scale, point, self.fixed)
        # a row's weight holds for all its slopes
        weighted = slopes * self.weight[:, None]
        return np.vstack([weighted, np.diag(1 / self.scale.sigma)])

    def solve(self, point, evaluations=_MOST_EVALUATIONS):
        low, high = self.scale.low, self.scale.high
        return least_squares(
            self.residuals,
            np.clip(point, low + _INSIDE, high - _INSIDE),
            self.jacobian,
            bounds=(low, high),
            loss="soft_l1",
            x_scale=self.scale.sigma,
            max_nfev=evaluations,
            **_TOLERANCES,
        )

    def scatter(self, random):
        """A random point of the prior."""
        sigma = self.scale.sigma
        return self.scale.prior + sigma * random.standard_normal(len(sigma))

    def parameters(self, solution, rows):
        """The constants of a solution with their covariance and provenance."""
        fitted = self.scale.solved(self.fixed, solution.x, covariance_of(solution))
        origin = {
            "rows": len(rows),
            "sha256": fingerprint(rows),
            "cost": float(solution.cost),
            "scale": _scale_of(rows),
        }
        return replace(fitted, provenance=origin)


def moves(steps: Steps, names: Sequence[str], parameters: Parameters) -> np.ndarray:
    """(n, names) by how much log step_s changes over the width of a constant's prior."""
    scale = FittingScale.of(names)
    constants = parameters.constants
    point = scale.point(constants)
    slopes = gradient(steps, scale, point, Parameters(constants=constants))
    return np.abs(slopes) * scale.sigma


def _free_constants(steps, begin, weight):
    """Constants of which these steps say more than their priors, by the variances:

    sum over rows of (move weight)^2 >= 1
    """
    names = bounds().index[bounds()["scale"] != "fixed"]
    # a step may wait for its host at one of these points alone
    largest = np.maximum(moves(steps, names, begin), moves(steps, names, shipped()))
    # each row's weight holds for all constants
    weighted = largest * np.atleast_1d(weight)[:, None]
    information = (weighted**2).sum(axis=0)
    return names[information >= min(1.0, information.max())].tolist()


def _scale_of(rows):
    """Devices and tokens per sample between which 90 % of the rows of a family lie."""
    cases = rows["case"]
    sizes = {
        "devices": [case.plan.world_size for case in cases],
        "sequence": [case.sequence for case in cases],
    }
    by_family = pd.DataFrame(sizes, dtype=float).groupby(rows["family"].to_numpy())
    ends = by_family.quantile([0.05, 0.95])
    return {
        family: {name: ends.loc[family, name].tolist() for name in sizes}
        for family in rows["family"].unique()
    }


def weights(rows: pd.DataFrame) -> np.ndarray:
    """Weight of each row in a fit.

    One of many rows of a source and model, or of a repository, weighs less. So do
    layouts that are slower than the best one of their model and devices: what slows
    them down most is seldom what the model knows.
    """
    of_group, of_repository = (
        rows.groupby(name)[name].transform("size").to_numpy(float)
        for name in ("group", "repository")
    )
    damping = of_group**-_GROUP_DAMPING * np.minimum(
        (_FULL / of_repository) ** 0.5, 1.0
    )
    return damping * slowness(rows) ** -0.5


def slowness(rows: pd.DataFrame) -> np.ndarray:
    """Measured time over the best of the same group, devices, batch and data type."""
    keys = ["group", "n_gpus", "global_batch", "dtype"]
    best_s = rows.groupby(keys, dropna=False)["measured_s"].transform("min")
    return rows["measured_s"].to_numpy(float) / best_s.to_numpy(float)


def fingerprint(rows: pd.DataFrame) -> str:
    """sha256 of the normalised rows, independent of the order of columns."""
    text = rows.sort_index(axis=1).to_csv(index=False, float_format="%.9g")
    return hashlib.sha256(text.encode()).hexdigest()


def known_rows(**stated: str) -> pd.DataFrame:
    """Normalised rows behind the shipped constants.

    `data/published_train.csv`, and tables of a data directory that are not part of this
    project: vTrain's multi-node measurements, runs of further stacks, and a sweep of
    layouts of one stack. What is missing is left out. stated: columns that all rows
    have in place of their own, such as software.
    """
    tables = [catalog.table("published_train")]
    for name in _LOCAL:
        with contextlib.suppress(FileNotFoundError):
            tables.append(pd.read_csv(local_data(name), encoding="utf-8-sig"))
    rows = [read_rows(table.assign(**stated)) for table in tables]
    return pd.concat(rows, ignore_index=True)
