"""Fit of the step-time model's constants to measured rows: bounded, robust least squares.

Residual of a row: log(predicted / measured) / 0.03, soft-L1; of a constant: its
distance from the start value over the prior width of `data/parameter_bounds.csv`. Rows
of one source and model share machine, software and luck, so a row of a large group
weighs less.

Bayes' rule for a few measured rows of one stack, linearised around the solution.

Before the first row a stack has the constants of all others, as uncertain as strangers
are: the covariance of the fit times the factor by which they err more than it says, a
part of each prior's width, by which stacks differ, and a pace, by which all that a
stack does is slower. With P the covariance, J the slopes of log step_s and N the noise,
rows move the constants by

    P J' (J P J' + N)^-1 error          [Kalman gain times innovation]

Intervals hold the part in which stacks differ as what every source has of its own, so
they shrink from the covariance of the fit alone. That part grows where the rows scatter
more than those of other stacks. Chosen on stacks left out (`benchmarks/strangers.py`).
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
from madmax_lib.calibration.published.rows import read_rows, to_steps, to_table
from madmax_lib.calibration.scale import ConstantKey, FittingScale, covariance_of
from madmax_lib.catalog import local_data
from madmax_lib.plan.legal import could_run, legal
from madmax_lib.simulator import constant_index
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
        case.dtype == "fp32" and "tf32" in case.cluster.device.peak_flops
        for case in rows["case"]
    ):
        warnings.warn(
            "fp32 rows: set tf32 if torch was allowed to use it", stacklevel=2
        )
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
        constants = self.fixed.constants | self.scale.constants(point)
        predicted = step_s(self.steps, replace(self.fixed, constants=constants))
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


# share of a prior's width by which the constants of one stack differ from those of all
_STACK_SHARE = 0.5
# log factor by which stacks differ in the pace of all that they do
_PACE = 0.15
_SLOWING = ("link_share", "network_share", "stack_rate")  # shares: less is slower
_PACED = (
    "collective_s",
    "hop_s",
    "optimizer_factor",
)  # of no class, beside the classes
# log error that the best constants of a stack leave in a row; Student's t forgives
# larger ones
_NOISE = 0.1
_SURE = 4.0  # rows that the scatter of other stacks counts as, beside those given
_FREEDOM = 3.0  # of Student's t
_ROUNDS = 6  # linearisations


def gradient(
    steps: Steps, scale: FittingScale, point: np.ndarray, begin: Parameters
) -> np.ndarray:
    """(n, names) slopes of log step_s at a point by forward differences.

    Constants that are not of the scale are those of begin. A step has one constant of a
    name, and of `gemm_efficiency` one of each width, so all classes of a name move at
    once: the Jacobian costs an evaluation per name, not per constant.
    """
    keys = [ConstantKey.parse(text) for text in scale.names]
    groups = pd.MultiIndex.from_tuples([(key.name, key.bits) for key in keys])
    group, _ = groups.factorize()
    # sqrt(eps) of the point balances truncation against rounding
    size = np.sqrt(np.finfo(float).eps) * np.maximum(1.0, np.abs(point))
    beyond = point + size
    # (groups, names): row g has the constants of group g moved
    moves = np.arange(group.max() + 1)[:, None] == group
    values = scale.values(np.vstack([point, np.where(moves, beyond, point)]))
    # each constant as a column (1 + groups, 1), which broadcasts against the steps
    columns = {name: values[:, i : i + 1] for i, name in enumerate(scale.names)}
    moved = replace(begin, constants=begin.constants | columns)
    log_s = np.log(step_s(steps, moved))
    change = log_s[1:] - log_s[0]
    # a constant has the change of its group, over the step that rounding left
    slopes = change[group].T / (beyond - point)
    return np.where(_occurs(steps, scale, len(slopes)), slopes, 0.0)


def _occurs(steps, scale, count):
    """(count, names) whether a step has the constant: in its products or its heads."""
    table = bounds()
    row_of = {name: row for row, name in enumerate(table.index)}
    names = table["name"].loc[list(scale.names)].unique()
    occurs = np.zeros((count, len(row_of)), bool)
    every = np.arange(count)
    for name in names:
        occurs[every, constant_index(steps, name, row_of)] = True
    # heads may be wider than products, so they have an efficiency of their own
    of_heads = constant_index(steps, "gemm_efficiency", row_of, "head")
    occurs[every, of_heads] = True
    return occurs[:, [row_of[name] for name in scale.names]]


def updated(begin: Parameters, steps: Steps, log_measured: np.ndarray) -> Parameters:
    """Constants of a stack after rows: the Gauss-Newton point with the least mean error.

    The prior is one of the points, so no update makes the rows worse. A row is forgiven
    what it alone is off, not what all are before the first step.
    """
    table = bounds()
    scale = FittingScale.of(table.index[table["low"] < table["high"]])
    row_of, all_covariance = begin.uncertainty
    rows = [row_of[name] for name in scale.names]
    shared = all_covariance[np.ix_(rows, rows)]
    # strangers err more than the covariance says by this factor, squared
    inflation = max(begin.residuals.get("constants", 1.0), 1.0) ** 2
    of_stack = np.diag((_STACK_SHARE * scale.sigma) ** 2)
    # of what these rows have alone: other stacks keep theirs
    occurs = _occurs(steps, scale, len(log_measured)).any(axis=0)
    slower = _slower(scale) * occurs
    of_pace = _PACE**2 * np.outer(slower, slower)
    covariance = inflation * shared + of_stack + of_pace

    def error_at(point):
        """(n,) log(measured / predicted)."""
        constants = begin.constants | scale.constants(point)
        return log_measured - np.log(step_s(steps, replace(begin, constants=constants)))

    prior = start = best = point = scale.point(begin.constants)
    is_free = np.ones(len(prior), bool)
    error = error_at(point)
    least = _mean_error(error)
    noise = _noise_variance(error - np.median(error))
    residuals = _with_scatter(begin.residuals, error)
    for _ in range(_ROUNDS):
        slopes = gradient(steps, scale, point, begin)
        gain = _gain(covariance * np.outer(is_free, is_free), slopes, noise)
        # always from the prior: the error is linearised at the point
        moved = start + gain @ (error + slopes @ (point - start))
        point = np.clip(moved, scale.low, scale.high)
        # a constant that meets its bound stays there, and the others take the rest
        is_free &= point == moved
        start = np.where(is_free, prior, point)
        error = error_at(point)
        noise = _noise_variance(error - np.median(error))
        if _mean_error(error) < least:
            best = point
            least = _mean_error(error)
    # P - K J P, of the part that all stacks share
    gain = _gain(shared, slopes, noise / inflation)
    covariance = shared - gain @ slopes @ shared
    widened = replace(begin, intervals={}, residuals=residuals)
    return scale.solved(widened, best, covariance)


def _slower(scale):
    """(names,) direction in which a whole step takes longer by a factor: 1 for times
    and traffic, -1 for shares of a rate, 0 for what makes no pace.

    Products and attention have that of the stack alone, else it would count twice.
    """
    table = bounds().loc[list(scale.names)]
    is_paced = table["field"].isin(["kernels", "stack", "mixture", "near", "network"])
    is_paced |= table["name"].isin(_PACED)
    is_paced &= table["scale"] != "linear"  # hidden shares
    is_share = table["name"].isin(_SLOWING)
    return np.where(is_share, -1.0, 1.0) * is_paced.to_numpy()


def _with_scatter(residuals, error):
    """Sizes of `uncertainty.COMPONENTS`, with what a stack has of its own as large as
    its rows scatter around their mean.

    s^2 = (f s0^2 + sum (e - mean e)^2) / (f + n - 1), never below s0^2: the posterior
    of a variance whose prior counts as f rows [Gelman et al., Bayesian Data Analysis].
    """
    usual = residuals.get("stranger", np.inf)
    scattered = _SURE * usual**2 + np.sum((error - error.mean()) ** 2)
    size = float(np.sqrt(scattered / (_SURE + len(error) - 1)))
    return {**residuals, "stranger": size} if size > usual else residuals


def _noise_variance(error):
    """Variance of each row's noise, as Student's t weighs errors.

    s^2 (v + (e/s)^2) / (v + 1): rows that are far off count little.
    """
    return _NOISE**2 * (_FREEDOM + (error / _NOISE) ** 2) / (_FREEDOM + 1)


def _gain(covariance, slopes, noise):
    """(names, n) Kalman gain P J' (J P J' + N)^-1."""
    of_rows = slopes @ covariance @ slopes.T + np.diag(noise)
    return covariance @ slopes.T @ np.linalg.inv(of_rows)


def _mean_error(error):
    """Mean of |predicted / measured - 1|."""
    return float(np.abs(np.expm1(-error)).mean())
