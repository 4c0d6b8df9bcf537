"""How long does a step take, in closed form? Model, cluster and one plan or a table of plans in, a row per plan out.

The formulas are those of `step_time`, with the shipped constants unless others are given; no Python loop over plans.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.plan_rules import enforce
from madmax_lib.plans import Plans, legal, rules_of
from madmax_lib.simulator.offload.offload import best_offload
from madmax_lib.simulator.offload.placement import Policy, normalised
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.inputs import Steps
from madmax_lib.simulator.step.pieces import distinct
from madmax_lib.simulator.step.step_time import PARTS, step_time
from madmax_lib.simulator.step.uncertainty import log_width
from madmax_lib.software import Software
from madmax_lib.specs import DLRM, Cluster, Model

__all__ = ["estimate"]

_CHUNK = 16384  # plans at a time: their arrays stay in the cache
_STEP = ("step_s", "low_s", "high_s")


def estimate(
    model: Model | str,
    cluster: Cluster | str,
    plan_or_table: Plan | str | pd.DataFrame,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    parameters: Parameters | None = None,
    imbalance: float | str = 1.0,
    jitter: float | str = 0.0,
    policy: Policy | None = None,
) -> pd.DataFrame:
    """Seconds of a training step and its parts, one row per plan.

    model, cluster: or their names. plan_or_table: a Plan or its text, or a table whose columns are fields of Plan
    (missing ones at their default); its index is kept. software: that trains, a name of `data/software.csv` or one of
    your own; any if None. parameters: the shipped fit if None; `Parameters()` is the ideal machine.
    imbalance, jitter: how uneven experts and ranks are, as in `Case`.
    Columns: step_s, low_s and high_s (90 % interval, NaN for parameters that know none), the parts named in
    `step_time.PARTS` (exposed seconds, their sum is step_s), mfu (dense model FLOPs over the peak of dtype),
    tokens_per_s. A table's row that the cluster or batch cannot hold is NaN.
    With offload in a plan or table there are two columns more: offload_s, a part too, and offload_share, of what may
    leave the device, found as in `offload.best_offload` if policy names none; such rows are worked out one by one, and
    are NaN where no share fits. Raises ValueError for such a Plan, an unknown column, dtype, or a recommendation model.

    >>> table = pd.DataFrame({"dp": [8, 4, 3], "tp": [1, 2, 1]})  # three devices of eight are no layout
    >>> steps = estimate("gpt2-large", "dgx-a100", table, global_batch=64)
    >>> (steps["low_s"] < steps["high_s"]).tolist(), steps["step_s"].isna().tolist()
    ([True, True, False], [False, False, True])
    """
    many = isinstance(plan_or_table, pd.DataFrame)
    plan = Plans.from_table(plan_or_table) if many else Plan.parse(plan_or_table)
    index = plan_or_table.index if many else pd.RangeIndex(1)
    case = Case(model, cluster, plan, global_batch, sequence or 0, dtype, software, imbalance, jitter)
    if isinstance(case.model, DLRM):
        raise ValueError(f"{case.model.name}: recommendation models have no closed form; use simulate")
    parameters, policy = parameters or shipped(), policy or Policy()
    if not many:
        enforce(rules_of(case), case.plan, case)
        times = _times(case, parameters)
    else:
        rows, alike = distinct(plan, vars(plan))
        chunks = [plan[rows[start : start + _CHUNK]] for start in range(0, max(len(rows), 1), _CHUNK)]
        parts = [_times_of_legal(replace(case, plan=chunk), parameters) for chunk in chunks]
        times = {name: np.concatenate([part[name] for part in parts])[alike] for name in (*_STEP, *PARTS)}
    table = {name: times[name] for name in (*_STEP, *PARTS)}
    if case.plan.offload is not None:
        table |= _with_offload(table, case, parameters, policy)
    tokens = global_batch * case.sequence
    flops = 3 * case.model.forward_flops(global_batch, sequence)
    table["mfu"] = flops / (table["step_s"] * case.cluster.world_size * case.cluster.device.peak(dtype))
    table["tokens_per_s"] = tokens / table["step_s"]
    return pd.DataFrame(table, index=index)


def _times(case: Case, parameters: Parameters) -> dict[str, np.ndarray]:
    """Seconds of the steps and their parts, with intervals."""
    steps = Steps.of(case)
    times = step_time(steps, parameters)
    width = log_width(steps, times, parameters)
    return times | {"low_s": times["step_s"] * np.exp(-width), "high_s": times["step_s"] * np.exp(width)}


def _times_of_legal(case: Case, parameters: Parameters) -> dict[str, np.ndarray]:
    """`_times` of a table, NaN where a plan is not legal; those with cp apart, whose attention has more blocks."""
    mask = legal(case).mask
    cut = mask & (case.plan.cp > 1)
    if mask.all() and (cut.all() or not cut.any()):
        return _times(case, parameters)
    table = {name: np.full(len(mask), np.nan) for name in (*_STEP, *PARTS)}
    for rows in filter(np.any, (cut, mask & ~cut)):
        times = _times(replace(case, plan=case.plan[rows]), parameters)
        for name, column in table.items():
            column[rows] = times[name]
    return table


def _with_offload(table: dict, case: Case, parameters: Parameters, policy: Policy) -> dict[str, np.ndarray]:
    """Columns of a table with the rows that offload timed one by one; none if there are none."""
    size = len(table["step_s"])
    rows = np.flatnonzero([offload is not None for offload in np.broadcast_to(case.plan.offload, size)])
    if not rows.size:
        return {}
    single = isinstance(case.plan, Plan)
    columns = {name: np.array(table[name]) for name in (*_STEP, *PARTS)}
    columns |= {"offload_s": np.zeros(size), "offload_share": np.full(size, np.nan)}
    for row in rows:
        try:
            plan = case.plan if single else Plan(**vars(case.plan[row]))
            seconds = _offloaded(replace(case, plan=plan), parameters, policy)
        except ValueError:
            if single:
                raise
            seconds = dict.fromkeys(_STEP, np.nan)
        for name, value in seconds.items():
            columns[name][row] = value
    return columns


def _offloaded(case: Case, parameters: Parameters, policy: Policy) -> dict[str, float]:
    """A row of one plan with offload."""
    enforce(rules_of(case), case.plan, case)
    case = normalised(case)
    steps = Steps.of(case)
    parts = step_time(steps, parameters)
    row = {name: float(part[0]) for name, part in parts.items()}
    _, times = best_offload(case, parameters, policy)
    width = float(log_width(steps, parts, parameters)[0])
    row["optimizer_s"] = float(times.update_s[0])
    row["offload_s"] = float(times.total_s[0]) - row["optimizer_s"]
    row["step_s"] = sum(row[name] for name in (*PARTS, "offload_s"))
    row["low_s"], row["high_s"] = row["step_s"] * np.exp(-width), row["step_s"] * np.exp(width)
    return row | {"offload_share": float(times.share[0])}
