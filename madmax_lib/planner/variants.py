"""What do a few plans cost, side by side? Time with interval, memory and whether they fit, one row per plan."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.offload.fits import fits
from madmax_lib.simulator.step.step_time import COMMUNICATION
from madmax_lib.specs import Cluster, Model

__all__ = ["EXPOSED", "variants"]

EXPOSED = list(COMMUNICATION)  # as an index of columns


def variants(model: Model, cluster: Cluster, plans: Iterable[Plan | str], *, global_batch: int,
             sequence: int | None = None, dtype: str = "bf16", parameters=None) -> pd.DataFrame:  # fmt: skip
    """Columns of `estimate`, exposed (share of the step), memory_gb and fits, indexed by the text of each plan.

    Raises ValueError, as the plan does, for one that cannot be laid out.
    """
    rows = {}
    for plan in plans:
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        row = estimate(model, cluster, plan, global_batch=global_batch, sequence=sequence, dtype=dtype,
                       parameters=parameters).iloc[0]  # fmt: skip
        found = fits(model, cluster, plan, global_batch=global_batch, sequence=sequence, dtype=dtype)
        held = found.table[found.table["place"] == "device"].iloc[0]
        held_gb = (held["usable_bytes"] - held["margin_bytes"]) / 1e9
        rows[str(plan)] = row.to_dict() | {"exposed": row[EXPOSED].sum() / row["step_s"], "memory_gb": held_gb,
                                           "fits": found.fits}  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index")
