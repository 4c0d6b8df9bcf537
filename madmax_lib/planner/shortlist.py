"""Which of the best plans are worth measuring? Those that the model cannot tell from the best one.

A predicted step is as sure as its 90 % interval, but plans of one model on one machine err together: two of them are
compared with the spread of runs of the same source and model (`calibration.intervals.comparison_quantiles`).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.uncertainty import comparison_width
from madmax_lib.specs import Transformer

__all__ = ["shortlist"]

_WAY = ["tp", "cp", "pp", "ep", "zero", "recompute"]


def shortlist(table: pd.DataFrame, model: Transformer, parameters: Parameters | None = None) -> pd.DataFrame:
    """The best plan of each way to split the model, and whether it may be the fastest.

    table: of a search; plans with the same tp, cp, pp, ep, ZeRO stage and recompute count as one way. Adds ratio (step
    over that of the first plan), ratio_low, ratio_high (90 %) and worth_measuring (ratio_low reaches 1). Raises
    ValueError for parameters that know no intervals.
    """
    width = comparison_width(parameters or shipped(), bool(model.experts))
    if np.isnan(width):
        raise ValueError("parameters without residuals: fit them with calibration.fit.ship, or use the shipped ones")
    table = table.drop_duplicates(_WAY).reset_index(drop=True)
    ratio = table["step_s"] / table["step_s"].iloc[0]
    low, high = ratio * np.exp(-width), ratio * np.exp(width)
    return table.assign(ratio=ratio, ratio_low=low, ratio_high=high, worth_measuring=low <= 1.0)
