"""How do a few plans compare? Their costs side by side, and which of a search's best ones are worth measuring.

A predicted step is as sure as its 90 % interval, but plans of one model on one machine err together: two of them are
compared with the spread of runs of the same source and model (`calibration.intervals.comparison_quantiles`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.offload.fits import fits
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.step_time import COMMUNICATION
from madmax_lib.simulator.step.uncertainty import comparison_width
from madmax_lib.specs import Cluster, Model, Transformer

__all__ = ["EXPOSED", "shortlist", "variants"]

EXPOSED = list(COMMUNICATION)  # as an index of columns
_WAY = ["tp", "cp", "pp", "ep", "zero", "recompute"]


def variants(
    model: Model,
    cluster: Cluster,
    plans: Iterable[Plan | str],
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    parameters: Parameters | None = None,
) -> pd.DataFrame:
    """Columns of `estimate`, exposed (share of the step), memory_gb and fits, indexed by the text of each plan.

    Raises ValueError, as the plan does, for one that cannot be laid out.
    """
    shape, rows = {"global_batch": global_batch, "sequence": sequence, "dtype": dtype}, {}
    for plan in plans:
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        row = estimate(model, cluster, plan, **shape, parameters=parameters).iloc[0]
        result = fits(model, cluster, plan, **shape)
        device = result.table[result.table["place"] == "device"].iloc[0]
        memory_gb = (device["usable_bytes"] - device["margin_bytes"]) / 1e9
        costs = {"exposed": row[EXPOSED].sum() / row["step_s"], "memory_gb": memory_gb, "fits": result.fits}
        rows[str(plan)] = row.to_dict() | costs
    return pd.DataFrame.from_dict(rows, orient="index")


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
