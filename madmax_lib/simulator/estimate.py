"""Seconds of a step in closed form: model, cluster and one plan or a table of plans in,
a row per plan out.

The formulas are those of `steady.step_time`, with the shipped constants unless others
are given; no Python loop over plans.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.base import require_type
from madmax_lib.catalog import DLRM, Cluster, Model, Software
from madmax_lib.plan import Case
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import Plan, plans_of
from madmax_lib.plan.rules import check_plan
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import plans_peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    constants_of,
    shipped,
    software_of,
)
from madmax_lib.simulator.steady.step_time import PARTS, step_time
from madmax_lib.simulator.uncertainty import log_width

_BLOCK = 1 << 16  # plans at a time: their arrays stay in the cache
# rows of a table whose memory is counted unasked, in less than a fifth of a second
_COUNTED = 100_000
_SECONDS = ("step_s", "low_s", "high_s", *PARTS)
# rows of the array of results: all but the last as columns of the table
_COLUMNS = (*_SECONDS, "mfu", "tokens_per_s", "memory_bytes")


def estimate(
    model: Model | str,
    cluster: Cluster | str,
    plan_or_table: Plan | str | Sequence[Plan | str] | pd.DataFrame,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    parameters: Parameters | None = None,
    imbalance: float | str = 1.0,
    jitter: float | str = 0.0,
    optimizer: str = "adam",
    policy=None,
    fits: bool | None = None,
) -> pd.DataFrame:
    """Seconds of a training step and its parts, one row per plan.

    model, cluster: or their names. plan_or_table: a Plan or its text, a list of them,
    or a table whose columns are fields of Plan (missing ones at their default), or that
    of a search; its index is kept. software: that trains, a name of `data/software.csv`
    or one of your own; that of the parameters or any if None. parameters: the shipped
    fit if None, or that of the `machine.json` that cluster names; `Parameters()` is the
    ideal machine.
    imbalance, jitter, optimizer: how uneven experts and ranks are, and what updates the
    weights, as in `Case`.
    Columns: step_s, low_s and high_s (90 % interval, NaN for parameters that know
    none), the parts named in `step_time.PARTS` (exposed seconds, their sum is step_s),
    mfu (dense model FLOPs over the peak of dtype), tokens_per_s, memory_bytes (peak of
    the fullest device) and fits (as `fits` says it). The last two cost as much time as
    all others together: fits=False leaves them out, True asks for them in tables above
    100,000 rows too. A table's row that the cluster or batch cannot hold is NaN and
    does not fit; then a column reason says of each row which rule it breaks, empty for
    the others. With offload in a plan or table there are two columns more: offload_s, a
    part too, and offload_share, of what may leave the device. If policy names none, that
    is all of it under a software that is named, else it is found as in
    `offload.best_offload`. Such rows are worked out one by one, and are NaN where no
    share fits, as their memory_bytes always are. Raises ValueError for such a Plan, an
    unknown column or dtype, or a recommendation model. See also: mm.simulate,
    mm.search, mm.fits, mm.memory, mm.expect.

    >>> table = pd.DataFrame({"dp": [8, 4, 3], "tp": [1, 2, 1]})  # 3 of 8 is no layout
    >>> steps = estimate("gpt2-large", "dgx-a100", table, global_batch=64)
    >>> (steps["low_s"] < steps["high_s"]).tolist(), steps["step_s"].isna().tolist()
    ([True, True, False], [False, False, True])
    """
    plan, index = plans_of(plan_or_table)
    is_table = index is not None
    parameters = constants_of(cluster, parameters)
    software = software_of(software, parameters)
    step = (sequence, dtype, software, imbalance, jitter, optimizer)
    case = Case.of_step(model, cluster, plan, global_batch, *step)
    if isinstance(case.model, DLRM):
        raise ValueError(
            f"{case.model.name}: recommendation models have no closed form; use "
            "simulate"
        )
    parameters = require_type("parameters", parameters, Parameters, shipped)
    counted = not is_table or len(index) <= _COUNTED
    if fits is not None:
        counted = require_type("fits", fits, bool)
    if is_table:
        values = _values_of_table(case, parameters, counted)
    else:
        check_plan(case)
        values = _values(case, parameters, counted)
    added = {}
    refused = {}
    if case.plan.offload is not None or policy is not None:
        added, refused = _with_offload(values, case, parameters, policy)
    table = _as_table(values, case, index, counted, added)
    is_wrong = np.isnan(values[0])
    if is_table and is_wrong.any():
        reasons = _reasons(case, is_wrong, refused)
        table.insert(table.shape[1] - counted, "reason", reasons)
    return table


def _as_table(values, case, index, counted, offload):
    """Table of `estimate` from rows of `_COLUMNS` and columns of offload."""
    step_s = values[0]
    values[-3] = case.mfu(step_s)
    values[-2] = case.global_batch * case.sequence / step_s
    width = len(_COLUMNS) - (not counted)
    table = pd.DataFrame(
        values[:width].T, columns=_COLUMNS[:width], index=index, copy=False
    )
    for name, column in reversed(offload.items()):
        table.insert(len(_SECONDS), name, column)
    if counted:
        memory_bytes = values[-1]
        # that of plans with offload is not counted; a share was found that fits
        is_away = np.isnan(memory_bytes) & ~np.isnan(step_s)
        usable = usable_bytes(case.device)
        table["fits"] = (memory_bytes <= usable) | is_away
    return table


def _reasons(case, is_wrong, refused):
    """The rule that each plan of a table breaks where it is wrong (n,), or why its
    offload was refused; else empty.
    """
    verdict = legal(replace(case, plan=case.plan[is_wrong]))
    names = np.array([*(rule.name for rule in verdict.rules), ""], dtype=object)
    reasons = np.full(len(is_wrong), "", dtype=object)
    reasons[is_wrong] = names[verdict.first_broken_rule]
    reasons[list(refused)] = list(refused.values())
    return reasons


def _values_of_table(case, parameters, counted):
    """Values (columns, n) of a table, NaN where a plan is not legal."""
    plan = case.plan
    (size,) = plan.shape
    if size > _BLOCK:
        parts = (plan[start : start + _BLOCK] for start in range(0, size, _BLOCK))
        cases = (replace(case, plan=part) for part in parts)
        return np.hstack([_values_of_table(c, parameters, counted) for c in cases])
    mask = legal(case).mask
    if mask.all():
        return _values(case, parameters, counted)
    values = np.full((len(_COLUMNS), size), np.nan)
    legal_case = replace(case, plan=plan[mask])
    values[:, mask] = _values(legal_case, parameters, counted)
    return values


def _values(case, parameters, counted=False):
    """Values (columns, n) of legal plans: seconds, and peak bytes of a device if they
    are counted, NaN for plans with offload.
    """
    size = int(np.prod(case.plan.shape))
    values = np.empty((len(_COLUMNS), size))
    if not size:
        return values
    if counted:
        is_away = np.not_equal(case.plan.offload, None)
        values[-1] = np.where(is_away, np.nan, plans_peak_bytes(case))
    steps = Steps.of(case)
    times = step_time(steps, parameters)
    factor = np.exp(log_width(steps, times, parameters))
    times["low_s"] = times["step_s"] / factor
    times["high_s"] = times["step_s"] * factor
    for row, name in zip(values, _SECONDS, strict=False):
        row[:] = times[name]
    return values


def _with_offload(values, case, parameters, policy):
    """Columns that offload adds to a table, and the reason of each row that cannot
    offload; rows that have it are timed one by one, and their values replaced.
    """
    # offload is a wing: imported where a step needs it
    from madmax_lib.simulator.offload.offload import Policy, offload_row

    require_type("policy", policy, Policy | None)

    def seconds_of(one):
        """Seconds of one plan, without what offload adds."""
        return dict(
            zip(_SECONDS, _values(one, parameters)[:, 0].tolist(), strict=False)
        )

    size = values.shape[1]
    kinds = np.broadcast_to(np.asarray(case.plan.offload, dtype=object), size)
    rows = np.flatnonzero(np.not_equal(kinds, None))
    refused = {}
    if not rows.size:
        return {}, refused
    is_single = isinstance(case.plan, Plan)
    added = {"offload_s": np.zeros(size), "offload_share": np.full(size, np.nan)}
    columns = dict(zip(_SECONDS, values, strict=False)) | added
    for row in rows:
        try:
            plan = case.plan if is_single else Plan(**vars(case.plan[row]))
            one = replace(case, plan=plan)
            seconds = offload_row(one, parameters, policy, seconds_of)
        except ValueError as error:
            if is_single:
                raise
            seconds = dict.fromkeys(("step_s", "low_s", "high_s"), np.nan)
            refused[row] = str(error)
        for name, value in seconds.items():
            columns[name][row] = value
    return added, refused
