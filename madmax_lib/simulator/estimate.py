"""How long does a step take, in closed form? Model, cluster and one plan or a table of
plans in, a row per plan out.

The formulas are those of `step_time`, with the shipped constants unless others are
given; no Python loop over plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type
from madmax_lib.catalog.models import DLRM, Cluster, Model
from madmax_lib.catalog.software import Software
from madmax_lib.plan.case import Case
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import Plan, plans_of
from madmax_lib.plan.rules import enforce, rules_of
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import table_peak_bytes, usable_bytes
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.offload import best_offload
from madmax_lib.simulator.offload.placement import Policy
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    constants_of,
    shipped,
    software_of,
)
from madmax_lib.simulator.steady.alike import kinds_of
from madmax_lib.simulator.steady.step_time import PARTS, bodies_of, step_time
from madmax_lib.simulator.uncertainty import log_width

__all__ = ["estimate"]

_CHUNK = 1 << 15  # plans at a time: their arrays stay in the cache
_BLOCK = 1 << 20  # between them nothing is shared, so that memory has a bound
_SAMPLE = 1024
_STEP = ("step_s", "low_s", "high_s")
_COLUMNS = (*_STEP, *PARTS)
_SUMS = ("mfu", "tokens_per_s", "memory_bytes")
# rows of a table whose memory is counted unasked, in less than a fifth of a second
_COUNTED = 100_000


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
    policy: Policy | None = None,
    fits: bool | None = None,
) -> pd.DataFrame:
    """Seconds of a training step and its parts, one row per plan.

    model, cluster: or their names. plan_or_table: a Plan or its text, a list of them,
    or a table whose columns are fields of Plan (missing ones at their default), or that
    of a search; its index is kept. software: that trains, a name of `data/software.csv`
    or one of your own; that of the parameters or any if None. parameters: the shipped
    fit if None, or that of the `machine.json` that cluster names; `Parameters()` is the
    ideal machine.
    imbalance, jitter: how uneven experts and ranks are, as in `Case`.
    Columns: step_s, low_s and high_s (90 % interval, NaN for parameters that know
    none), the parts named in `step_time.PARTS` (exposed seconds, their sum is step_s),
    mfu (dense model FLOPs over the peak of dtype), tokens_per_s, memory_bytes (peak of
    the fullest device) and fits (as `fits` says it). The last two cost as much time as
    all others together: fits=False leaves them out, True asks for them in tables above
    100,000 rows too. A table's row that the cluster or batch cannot hold is NaN and
    does not fit; then a column reason says of each row which rule it breaks, empty for
    the others. With offload in a plan or table there are two columns more: offload_s, a
    part too, and offload_share, of what may leave the device, found as in
    `offload.best_offload` if policy names none; such rows are worked out one by one,
    and are NaN where no share fits, as their memory_bytes always are. Raises ValueError
    for such a Plan, an unknown column or dtype, or a recommendation model. See also:
    mm.simulate, mm.search, mm.fits, mm.memory, mm.expect.

    >>> table = pd.DataFrame({"dp": [8, 4, 3], "tp": [1, 2, 1]})  # three devices of eight are no layout
    >>> steps = estimate("gpt2-large", "dgx-a100", table, global_batch=64)
    >>> (steps["low_s"] < steps["high_s"]).tolist(), steps["step_s"].isna().tolist()
    ([True, True, False], [False, False, True])
    """
    (plan, index) = plans_of(plan_or_table)
    parameters = constants_of(cluster, parameters)
    many = index is not None
    further = (sequence, dtype, software_of(software, parameters), imbalance, jitter)
    case = Case.of_step(model, cluster, plan, global_batch, *further)
    if isinstance(case.model, DLRM):
        raise ValueError(
            f"{case.model.name}: recommendation models have no closed form; use "
            "simulate"
        )
    parameters = require_type("parameters", parameters, Parameters, shipped)
    policy = require_type("policy", policy, Policy, Policy)
    if not many:
        enforce(rules_of(case), case.plan, case)
    counted = (
        not many or len(index) <= _COUNTED
        if fits is None
        else require_type("fits", fits, bool)
    )
    if many:
        values = _rows_of_table(case, parameters, counted)
    else:
        values = _rows(
            case, parameters, counted, np.empty((len(_COLUMNS) + len(_SUMS), 1))
        )
    further, refused = (
        ({}, {})
        if case.plan.offload is None
        else _with_offload(values, case, parameters, policy)
    )
    reasons = (
        _reasons(case, np.isnan(values[0]), refused)
        if many and np.isnan(values[0]).any()
        else None
    )
    return _as_table(values, case, index, counted, further, reasons)


def _as_table(
    values: np.ndarray, case: Case, index, counted: bool, further: dict, reasons
) -> pd.DataFrame:
    """The table of `estimate`, of rows of `_COLUMNS`, further columns of offload and
    why rows are NaN, if any is.
    """
    flops = 3 * case.model.forward_flops(case.global_batch, case.sequence)
    values[-3] = flops / (
        values[0] * case.cluster.world_size * case.cluster.device.peak(case.dtype)
    )
    values[-2] = case.global_batch * case.sequence / values[0]
    width = values.shape[0] - (not counted)
    table = pd.DataFrame(
        values[:width].T, columns=[*_COLUMNS, *_SUMS][:width], index=index, copy=False
    )
    for name, column in reversed(further.items()):
        table.insert(len(_COLUMNS), name, column)
    if reasons is not None:
        table["reason"] = reasons
    if counted:
        away = np.isnan(values[-1]) & ~np.isnan(values[0])
        table["fits"] = (values[-1] <= usable_bytes(case.cluster.device)) | away
    return table


def _reasons(case: Case, wrong: np.ndarray, refused: dict[int, str]) -> np.ndarray:
    """The rule that each plan of a table breaks where it is wrong (n,), or why its
    offload was refused; else empty.
    """
    verdict = legal(replace(case, plan=case.plan[wrong]))
    reasons = np.full(len(wrong), "", dtype=object)
    reasons[wrong] = np.array(
        [*(rule.name for rule in verdict.rules), ""], dtype=object
    )[verdict.first_broken_rule]
    reasons[list(refused)] = list(refused.values())
    return reasons


def _rows_of_table(case: Case, parameters: Parameters, counted: bool) -> np.ndarray:
    """`_rows` of a table, NaN where a plan is not legal; equal rows are worked out
    once.
    """
    plan = case.plan
    (size,) = case.plan.shape
    if size > _BLOCK:
        blocks = (plan[start : start + _BLOCK] for start in range(0, size, _BLOCK))
        return np.hstack(
            [
                _rows_of_table(replace(case, plan=block), parameters, counted)
                for block in blocks
            ]
        )
    if (
        size > _SAMPLE
        and kinds_of(plan[:: size // _SAMPLE], vars(plan))
        and (kinds := kinds_of(plan, vars(plan)))
    ):
        rows, index = kinds
        return _rows_of_table(replace(case, plan=plan[rows]), parameters, counted).take(
            index, axis=1
        )
    mask = legal(case).mask
    values = np.empty((len(_COLUMNS) + len(_SUMS), size))
    if mask.all():
        return _rows(case, parameters, counted, values)
    values.fill(np.nan)
    return _rows(
        replace(case, plan=plan[mask]),
        parameters,
        counted,
        values,
        np.flatnonzero(mask),
    )


def _rows(
    case: Case,
    parameters: Parameters,
    counted: bool,
    values: np.ndarray,
    places: np.ndarray | None = None,
) -> np.ndarray:
    """`_COLUMNS` of legal plans, and their memory if it is counted, put in their places
    among values (all if None).
    """
    if counted and case.plan.shape != (0,):
        values[-1, slice(None) if places is None else places] = _device_bytes(case)
    steps = Steps.of(case)
    size = values.shape[1] if places is None else len(places)
    bodies = bodies_of(steps, parameters) if size > _CHUNK else None
    for start in range(0, size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = steps[rows] if size > _CHUNK else steps
        times = step_time(part, parameters, bodies and bodies(rows))
        factor = np.exp(log_width(part, times, parameters))
        times |= {"low_s": times["step_s"] / factor, "high_s": times["step_s"] * factor}
        for row, name in zip(values, _COLUMNS, strict=False):
            row[rows if places is None else places[rows]] = times[name]
    return values


def _device_bytes(case: Case) -> np.ndarray:
    """Peak bytes of a device, NaN for plans with offload."""
    if case.plan.offload is None:
        return table_peak_bytes(case)
    return np.where(np.equal(case.plan.offload, None), table_peak_bytes(case), np.nan)


def _with_offload(
    values: np.ndarray, case: Case, parameters: Parameters, policy: Policy
) -> tuple[dict, dict]:
    """Columns offload_s and offload_share, with values of the rows that offload timed
    one by one; none without them.

    Beside them, by row, why it cannot offload.
    """
    size = values.shape[1]
    rows = np.flatnonzero(
        [offload is not None for offload in np.broadcast_to(case.plan.offload, size)]
    )
    refused: dict[int, str] = {}
    if not rows.size:
        return {}, refused
    single = isinstance(case.plan, Plan)
    further = {"offload_s": np.zeros(size), "offload_share": np.full(size, np.nan)}
    columns = dict(zip(_COLUMNS, values, strict=False)) | further
    for row in rows:
        try:
            plan = case.plan if single else Plan(**vars(case.plan[row]))
            seconds = _offloaded(replace(case, plan=plan), parameters, policy)
        except ValueError as error:
            if single:
                raise
            seconds = dict.fromkeys(_STEP, np.nan)
            refused[row] = str(error)
        for name, value in seconds.items():
            columns[name][row] = value
    return further, refused


def _offloaded(case: Case, parameters: Parameters, policy: Policy) -> dict[str, float]:
    """A row of one plan with offload."""
    enforce(rules_of(case), case.plan, case)
    case = normalised(case)
    row = dict(
        zip(
            _COLUMNS,
            _rows(case, parameters, False, np.empty((len(_COLUMNS), 1)))[:, 0].tolist(),
            strict=True,
        )
    )
    factor = row["high_s"] / row["step_s"]
    (_, times) = best_offload(case, parameters, policy)
    row["optimizer_s"] = float(times.update_s[0])
    row["offload_s"] = float(times.total_s[0]) - row["optimizer_s"]
    row["step_s"] = sum(row[name] for name in (*PARTS, "offload_s"))
    row["low_s"], row["high_s"] = row["step_s"] / factor, row["step_s"] * factor
    return row | {"offload_share": float(times.share[0])}
