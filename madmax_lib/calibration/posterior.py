"""Bayes' rule for a few measured rows of one stack, linearised around the solution.

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

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.calibration.scale import ConstantKey, FittingScale
from madmax_lib.simulator import Parameters, bounds, constant_index
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.steady.step_time import step_s

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
        return log_measured - np.log(step_s(steps, scale.moved(begin, point)))

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
