"""How sure is a predicted step? The kinds of steps that err alike, and the width of a 90 % interval.

The widths come with the parameters: what `calibration.intervals` found in rows that the fit had not seen, by kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step.inputs import Work

__all__ = ["SPLITS", "comparison_width", "known_width", "log_width", "split_of"]

SPLITS = ("mixture", "sharded", "old model parallel", "model parallel", "data parallel")
_UNKNOWN_FAMILY = 2.5  # for a family without rows: known ones timed as if unknown err 2.2 x as much, of only three


def split_of(experts, zero, tp, pp, unfused) -> np.ndarray:
    """Place in `SPLITS`: how a model is split decides which errors it has."""
    parallel = tp * pp > 1
    return np.select([experts > 0, zero >= 2, parallel & (unfused > 0), parallel], [0, 1, 2, 3], 4)


def known_width(residuals: Mapping[str, list[float]], family: str, split: str) -> float:
    """Half-width of log(measured / predicted) of a kind; few rows: of its class, or of all; NaN if nothing is known."""
    names = f"{family} {split}", "mixture" if split == "mixture" else "dense", "all"
    found = next((residuals[name][1] for name in names if name in residuals), float("nan"))
    return found * (_UNKNOWN_FAMILY if family == "other" else 1.0)


def comparison_width(parameters: Parameters, mixture: bool) -> float:
    """Half-width of the 90 % interval of log(measured / predicted) of one plan over another of the same model.

    NaN for parameters that know none.
    """
    found = parameters.residuals.get("layouts mixture" if mixture else "layouts dense")
    return float("nan") if found is None else found[1]


def log_width(work: Work, parameters: Parameters) -> np.ndarray:
    """`known_width` of each step, of the shape of work."""
    families, code = work.codes["family"]
    table = np.array([[known_width(parameters.residuals, family, split) for split in SPLITS] for family in families])
    split = split_of(work.experts, work.zero, work.tp, work.pp, work.unfused)
    return np.broadcast_to(table[code, split], work.shape)
