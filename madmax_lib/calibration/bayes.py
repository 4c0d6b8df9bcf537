"""What do a few measured rows of one stack say about its constants? Bayes' rule,
linearised around the solution.

Before the first row a stack has the constants of all others, as uncertain as strangers
are: the covariance of the fit times the factor by which they err more than it says, and
a part of each prior's width, by which stacks differ. With slopes J of log step_s and
noise N, rows move the constants by P J' (J P J' + N)^-1 times their error. Intervals
hold that part of stacks as what every source has of its own, so they shrink from the
covariance of the fit alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from madmax_lib.calibration.judge.identifiability import scaled
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import Parameters, bounds
from madmax_lib.simulator.steady.step_time import step_s
from madmax_lib.simulator.uncertainty import constant_index

__all__ = ["StackPrior", "gradient"]

# of a prior's width, by which the constants of one stack differ from those of all
_OWN = 0.5
# log error that the best constants of a stack leave in a row; Student's t forgives
# larger ones
_NOISE = 0.06
_FREEDOM = 3.0  # of Student's t
_ROUNDS = 6  # linearisations


def gradient(
    steps: Steps, point: np.ndarray, names: Sequence[str], begin: Parameters
) -> np.ndarray:
    """(n, names) slopes of log step_s at point, by constants in their fitting scale;
    the rest is that of begin.

    A step has one constant of a name, and of `gemm_efficiency` one of each width, so
    these move at once.
    """
    logarithmic = (bounds().loc[list(names), "scale"] == "log").to_numpy()
    alike, group = np.unique(
        [re.sub(r":.*?(-\d+)?$", r"\1", name) for name in names], return_inverse=True
    )
    size = np.sqrt(np.finfo(float).eps) * np.maximum(1.0, np.abs(point))
    moved = np.vstack(
        [point, np.where(np.arange(len(alike))[:, None] == group, point + size, point)]
    )
    values = np.where(logarithmic, np.exp(moved), moved)
    constants = begin.constants | {
        name: values[:, i : i + 1] for i, name in enumerate(names)
    }
    seconds = np.log(step_s(steps, replace(begin, constants=constants)))
    slopes = (seconds[1:] - seconds[0])[group].T / (point + size - point)
    return np.where(_occurs(steps, names, begin, len(slopes)), slopes, 0.0)


def _occurs(
    steps: Steps, names: Sequence[str], begin: Parameters, count: int
) -> np.ndarray:
    """(count, names) whether a step has the constant: of its products, or of those of
    its heads.
    """
    places = {name: place for place, name in enumerate(begin.constants)}
    fields = [
        (name, None) for name in dict.fromkeys(name.partition(":")[0] for name in names)
    ]
    result = np.zeros((count, len(places)), bool)
    for name, field in [*fields, ("gemm_efficiency", "head")]:
        result[np.arange(count), constant_index(steps, name, places, field)] = True
    return result[:, [places[name] for name in names]]


class StackPrior:
    """What is known of one stack before its first row: constants and covariance, in the
    fitting scale.
    """

    def __init__(self, begin: Parameters):
        table = bounds()[bounds()["low"] < bounds()["high"]]
        table = table.assign(at=[begin.constants[name] for name in table.index])
        self.begin = begin
        self.names = table.index.tolist()
        self.logarithmic = (table["scale"] == "log").to_numpy()
        self.at, self.low, self.high = (
            scaled(table, name) for name in ("at", "low", "high")
        )
        places, covariance = begin.uncertainty
        of_table = [places[name] for name in self.names]
        self.inflation = max(begin.residuals.get("constants", 1.0), 1.0) ** 2
        self.shared = covariance[np.ix_(of_table, of_table)]
        own = np.diag((_OWN * table["sigma"].to_numpy(float)) ** 2)
        self.covariance = self.inflation * self.shared + own

    def given(self, steps: Steps, log_measured: np.ndarray) -> Parameters:
        """Constants after rows: of the Gauss-Newton steps from the prior, the one that
        meets the rows best on average.

        The prior is one of them, so no update makes the rows worse. A row is forgiven
        what it alone is off, not what all are before the first step.
        """
        best = point = self.at
        error = self._error(steps, log_measured, point)
        least = _mean(error)
        noise = _forgiven(error - np.median(error))
        for _ in range(_ROUNDS):
            slopes = gradient(steps, point, self.names, self.begin)
            gain = _gain(self.covariance, slopes, noise)
            point = np.clip(
                self.at + gain @ (error + slopes @ (point - self.at)),
                self.low,
                self.high,
            )
            error = self._error(steps, log_measured, point)
            noise = _forgiven(error)
            if _mean(error) < least:
                best = point
                least = _mean(error)
        gain = _gain(self.shared, slopes, noise / self.inflation)
        return self._parameters(best, self.shared - gain @ slopes @ self.shared)

    def _error(
        self, steps: Steps, log_measured: np.ndarray, point: np.ndarray
    ) -> np.ndarray:
        """log(measured / predicted)."""
        return log_measured - np.log(
            step_s(steps, replace(self.begin, constants=self._constants(point)))
        )

    def _constants(self, point: np.ndarray) -> dict[str, float]:
        values = np.where(self.logarithmic, np.exp(point), point)
        return self.begin.constants | dict(
            zip(self.names, values.tolist(), strict=True)
        )

    def _parameters(self, point: np.ndarray, covariance: np.ndarray) -> Parameters:
        width = 1.645 * np.sqrt(np.diag(covariance))
        ends = np.clip([point - width, point + width], self.low, self.high)
        low, high = np.where(self.logarithmic, np.exp(ends), ends).tolist()
        return replace(
            self.begin,
            constants=self._constants(point),
            intervals=dict(zip(self.names, zip(low, high, strict=True), strict=True)),
            fitted=tuple(self.names),
            covariance=tuple(map(tuple, covariance.tolist())),
        )


def _forgiven(error: np.ndarray) -> np.ndarray:
    """Variance of each row's noise, as Student's t weighs errors."""
    return _NOISE**2 * (_FREEDOM + (error / _NOISE) ** 2) / (_FREEDOM + 1)


def _gain(covariance: np.ndarray, slopes: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return (
        covariance
        @ slopes.T
        @ np.linalg.inv(slopes @ covariance @ slopes.T + np.diag(noise))
    )


def _mean(error: np.ndarray) -> float:
    """Relative error of predictions."""
    return float(np.abs(np.expm1(-error)).mean())
