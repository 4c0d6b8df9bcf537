"""Which published runs are most like this one? By model, device, count, precision,
sequence and how it is split.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.fit import usable
from madmax_lib.calibration.published.rows import (
    facts_of,
    model_flops,
    read_rows,
    to_steps,
)
from madmax_lib.plan.case import Case
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.steady.step_time import step_s

__all__ = ["nearest"]

_COLUMNS = [
    "source",
    "model",
    "gpu",
    "n_gpus",
    "dtype",
    "software",
    "plan",
    "step_s",
    "mfu",
    "over_predicted",
]
_SHOWN = 3
# how far runs are apart: a factor of two in size counts as much as ...
_SIZES = {"parameters": 1.0, "devices": 0.3, "sequence": 0.5}
_CHOICES = {
    "gpu": 1.5,
    "family": 2.0,
    "bits": 1.0,
    "kind": 3.0,
    "software": 0.5,
    "recompute": 0.3,
    "zero": 0.3,
}
_DEGREES = {"tp": 0.2, "pp": 0.2, "cp": 0.2, "micro_batch": 0.05}


def nearest(case: Case) -> pd.DataFrame:
    """The most similar rows of `data/published_train.csv`, the nearest first, of
    different models, counts or plans.

    mfu: 6 FLOPs per parameter and token, and attention, over the peak of the dtype;
    over_predicted: measured step over that of the shipped constants, which have seen
    these rows.
    """
    rows, facts = _published()
    own = _facts(case)
    distance = np.zeros(len(rows))
    for name, weight in (_SIZES | _DEGREES).items():
        distance += weight * np.abs(np.log2(facts[name].to_numpy(float) / own[name]))
    for name, weight in _CHOICES.items():
        distance += weight * (facts[name] != own[name]).to_numpy(float)
    table = rows.assign(distance=distance).sort_values("distance", kind="stable")
    table = table.drop_duplicates(["model", "gpu", "n_gpus", "dtype", "plan"]).head(
        _SHOWN
    )
    return table[_COLUMNS].reset_index(drop=True)


def _facts(case: Case) -> dict[str, float | str]:
    sizes = {
        "parameters": case.model.active_parameters,
        "devices": case.plan.world_size,
        "sequence": case.sequence,
    }
    return facts_of(case) | sizes | {"bits": case.dtype[-1]}


@lru_cache(maxsize=1)
def _published() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Usable published rows with columns of `nearest`, and what they are compared by."""
    rows = read_rows(catalog.table("published_train"))
    rows = rows[usable(rows)].reset_index(drop=True)
    flops = np.array(
        [
            model_flops(row["case"], row)
            for row in rows[["case", "source"]].to_dict("records")
        ]
    )
    peak = np.array(
        [
            case.plan.world_size * case.cluster.device.peak(case.dtype)
            for case in rows["case"]
        ]
    )
    seconds = rows["measured_s"].to_numpy(float)
    over = seconds / step_s(to_steps(rows), shipped())
    plans = [str(case.plan) for case in rows["case"]]
    rows = rows.assign(
        plan=plans, step_s=seconds, mfu=flops / seconds / peak, over_predicted=over
    )
    return rows, pd.DataFrame([_facts(case) for case in rows["case"]])
