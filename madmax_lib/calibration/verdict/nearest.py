"""Published runs most like a given one: by model, device, count, precision, sequence and
how it is split.
"""

from functools import lru_cache

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.calibration.fit import usable
from madmax_lib.calibration.published.rows import (
    facts_of,
    flops_and_peaks,
    read_rows,
    to_steps,
)
from madmax_lib.plan.case import Case
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.steady.step_time import step_s

_ABOUT = ["source", "model", "gpu", "n_gpus", "dtype", "software", "plan"]
_COLUMNS = [*_ABOUT, "step_s", "mfu", "over_predicted"]
_SAME_RUN = ["model", "gpu", "n_gpus", "dtype", "plan"]
_SHOWN = 3
# distance of runs a factor of two apart in a size or degree
_SIZES = {"parameters": 1.0, "devices": 0.3, "sequence": 0.5}
_DEGREES = {"tp": 0.2, "pp": 0.2, "cp": 0.2, "micro_batch": 0.05}
# and of runs that differ in one of these
_CHOICES = {
    "gpu": 1.5,
    "family": 2.0,
    "bits": 1.0,
    "kind": 3.0,
    "software": 0.5,
    "recompute": 0.3,
    "zero": 0.3,
}


def nearest(case: Case) -> pd.DataFrame:
    """The most similar rows of `data/published_train.csv`, the nearest first, of
    different models, counts or plans.

    mfu: 6 FLOPs per parameter and token, and attention, over the peak of the dtype;
    over_predicted: measured step over that of the shipped constants, which have seen
    these rows.
    """
    rows, facts = _published()
    asked = _facts(case)
    distance = np.zeros(len(rows))
    for name, weight in (_SIZES | _DEGREES).items():
        doublings = np.abs(np.log2(facts[name].to_numpy(float) / asked[name]))
        distance += weight * doublings
    for name, weight in _CHOICES.items():
        distance += weight * (facts[name] != asked[name]).to_numpy(float)
    table = rows.assign(distance=distance).sort_values("distance", kind="stable")
    table = table.drop_duplicates(_SAME_RUN).head(_SHOWN)
    return table[_COLUMNS].reset_index(drop=True)


def _facts(case: Case):
    return facts_of(case) | {
        "parameters": case.model.active_parameters,
        "devices": case.plan.world_size,
        "sequence": case.sequence,
        "bits": case.dtype[-1],  # the last digit tells 16, 8, 4 and 32 bits apart
    }


@lru_cache(maxsize=1)
def _published():
    """Usable published rows with columns of `nearest`, and what they are compared by."""
    rows = read_rows(catalog.table("published_train"))
    rows = rows[usable(rows)].reset_index(drop=True)
    flops, peaks = flops_and_peaks(rows)
    measured_s = rows["measured_s"].to_numpy(float)
    rows = rows.assign(
        plan=[str(case.plan) for case in rows["case"]],
        step_s=measured_s,
        mfu=flops / measured_s / peaks,
        over_predicted=measured_s / step_s(to_steps(rows), shipped()),
    )
    return rows, pd.DataFrame([_facts(case) for case in rows["case"]])
