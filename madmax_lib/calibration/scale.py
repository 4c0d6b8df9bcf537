"""The scale in which constants are fitted, and what a solution in it says.

Times, shares and rates move as logarithms and hidden shares as they are, as the column
`scale` of `data/parameter_bounds.csv` says. A point is an array of fitted constants in
that scale; its uncertainty is the inverse of the Gauss-Newton matrix J'J.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
from scipy.optimize import OptimizeResult

from madmax_lib.simulator import Parameters, bounds

_HALF_90 = (
    1.645  # standard deviations from the mean of a normal to the ends of its 90 %
)
_TINY = 1e-300  # in place of 0, whose logarithm is none


class ConstantKey(NamedTuple):
    """The parts of a text such as `gemm_efficiency:hopper-8`, as files name a constant."""

    name: str
    device_class: str = ""  # or class of links or software; "" where there is one alone
    bits: str = ""  # of the operands, where classes differ by them

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key of a constant's text."""
        name, _, group = text.partition(":")
        device_class, _, bits = group.rpartition("-")
        return cls(name, device_class, bits) if bits.isdigit() else cls(name, group)


def scaled(table: pd.DataFrame, column: str) -> np.ndarray:
    """A column of `bounds` or `constants_of` in the scale of the fit."""
    values = table[column].to_numpy(float)
    return np.where(table["scale"] == "log", np.log(np.maximum(values, _TINY)), values)


def covariance_of(solution: OptimizeResult) -> np.ndarray:
    """Covariance of a least-squares solution whose residuals have unit variance."""
    return np.linalg.inv(solution.jac.T @ solution.jac)


@dataclass(frozen=True, eq=False)
class FittingScale:
    """Some constants with their bounds and priors; arrays are (n,), in fitting scale."""

    names: tuple[str, ...]
    logarithmic: np.ndarray
    prior: np.ndarray  # start values
    low: np.ndarray
    high: np.ndarray
    sigma: np.ndarray  # widths of the priors

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """The scale of constants by name. Raises ValueError for an unknown one."""
        if unknown := set(names) - set(bounds().index):
            raise ValueError(
                f"constant {sorted(unknown)[0]!r} is not in data/parameter_bounds.csv"
            )
        table = bounds().loc[list(names)]
        start, low, high = (scaled(table, name) for name in ("start", "low", "high"))
        logarithmic = (table["scale"] == "log").to_numpy()
        sigma = table["sigma"].to_numpy(float)
        return cls(tuple(names), logarithmic, start, low, high, sigma)

    def point(self, constants: Mapping[str, float]) -> np.ndarray:
        """The point at which these constants are."""
        values = np.array([constants[name] for name in self.names], float)
        logarithms = np.log(np.maximum(values, _TINY))
        return np.where(self.logarithmic, logarithms, values)

    def values(self, point: np.ndarray) -> np.ndarray:
        """Constants of one point or of a row each."""
        return np.where(self.logarithmic, np.exp(point), point)

    def moved(self, begin: Parameters, point: np.ndarray) -> Parameters:
        """The constants of begin moved to a point; the rest stays."""
        values = zip(self.names, self.values(point).tolist(), strict=True)
        return replace(begin, constants={**begin.constants, **dict(values)})

    def solved(
        self, begin: Parameters, point: np.ndarray, covariance: np.ndarray
    ) -> Parameters:
        """The constants of begin moved to a point, with covariance and 90 % intervals."""
        half_width = _HALF_90 * np.sqrt(np.diag(covariance))
        ends = np.clip([point - half_width, point + half_width], self.low, self.high)
        pairs = zip(*self.values(ends).tolist(), strict=True)
        return replace(
            self.moved(begin, point),
            intervals={**begin.intervals, **dict(zip(self.names, pairs, strict=True))},
            fitted=self.names,
            covariance=tuple(map(tuple, covariance.tolist())),
        )
