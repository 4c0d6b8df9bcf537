"""What does a part of the space hold? Times and memory of all its plans, its best ones and its Pareto front.

The formulas are those of `mm.estimate` and `mm.memory`. The plans of some degrees come as products of two short lists
(`space`), so millions of them are done per second in little memory. Ties go to less memory, then to less time, then to
the smaller degrees in the order tp, cp, pp, ep and the earlier choice of the `Space`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from madmax_lib.case import Case
from madmax_lib.fields import number, shown, whole
from madmax_lib.plan_rules import SOFTWARE
from madmax_lib.planner.space import SEARCHED, Degrees, Space, pass_choices, sharding_choices
from madmax_lib.plans import Plans
from madmax_lib.simulator.memory.memory import plans_peak_bytes
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step.inputs import Steps
from madmax_lib.simulator.step.power import device_energy_j
from madmax_lib.simulator.step.step_time import step_s, step_time

__all__ = ["Found", "SearchProblem", "energy_j", "evaluate", "merged"]

_BLOCK = 1 << 16  # plans at a time: their arrays stay in the cache
_OBJECTIVES = {"time": "step_s", "cost": "cost_usd", "energy": "energy_j", "memory": "memory_bytes"}
_TIES = ("tp", "cp", "pp", "ep", "place")


@dataclass(frozen=True)
class SearchProblem:
    """What is searched: everything that decides the result, for a worker on another machine too."""

    case: Case  # model, cluster, batch, sequence, dtype and software; its plan is not looked at
    space: Space  # values that are tried
    objective: str  # a key of `_OBJECTIVES`
    top: int  # plans to keep
    parameters: Parameters  # constants of the step-time model
    usd_per_hour: float  # price of a device, NaN where unknown
    room_bytes: float  # memory of a device that a plan may use

    def __post_init__(self):
        if self.objective not in list(_OBJECTIVES):
            raise ValueError(f"objective={shown(self.objective)} is not one of {', '.join(_OBJECTIVES)}")
        number("usd_per_hour", self.usd_per_hour, unknown=True)
        if self.objective == "cost" and not self.usd_per_hour > 0:
            device = self.case.cluster.device.name
            raise ValueError(f"objective='cost' needs a price: {device} has none in the catalog, give usd_per_hour")
        object.__setattr__(self, "top", whole("top", self.top, 1))


@dataclass(frozen=True)
class Found:
    """What a part of the space has shown; its tables are columns of equal length, none where nothing fits."""

    table: dict[str, np.ndarray]  # best plans so far
    front: dict[str, np.ndarray]  # Pareto front so far, in time and memory
    evaluated: int  # plans that were timed
    feasible: int  # those of them that fit
    least_bytes: float  # memory of the smallest plan


def evaluate(problem: SearchProblem, part: Iterable[Degrees]) -> Found:
    """Times all plans of some degrees."""
    return merged(problem, [block for degrees in part for block in _blocks_of(problem, degrees)])


def merged(problem: SearchProblem, parts: Sequence[Found]) -> Found:
    """The best of what was found in some parts, in order."""
    table = _joined([part.table for part in parts], _OBJECTIVES[problem.objective], "memory_bytes", "step_s")
    front = _joined([part.front for part in parts], "step_s", "memory_bytes")
    if table:
        least = _front(front["step_s"], front["memory_bytes"], np.ones(len(front["place"]), bool))
        table, front = _rows(table, slice(problem.top)), _rows(front, least)
    least_bytes = min((part.least_bytes for part in parts), default=float("inf"))
    return Found(table, front, sum(part.evaluated for part in parts), sum(part.feasible for part in parts), least_bytes)


def _blocks_of(problem: SearchProblem, degrees: Degrees) -> Iterator[Found]:
    """The plans of some degrees, block by block."""
    rows = _launchable(pass_choices(problem.space, problem.case, degrees), vars(degrees), problem.case)
    beside = vars(degrees) | {name: choice[:1] for name, choice in rows.items()}
    columns = _launchable(sharding_choices(problem.space, degrees, problem.case.cluster), beside, problem.case)
    if not rows or not columns:
        return
    count, width = len(rows["micro_batch"]), columns["zero"].shape[1]
    size = max(_BLOCK // width, 1)
    for first in range(0, count, size):
        part = {name: choice[first : first + size] for name, choice in rows.items()}
        yield _evaluated(problem, Plans(**vars(degrees), **part, **columns), first * width)


def _launchable(choices: dict[str, np.ndarray], others: dict, case: Case) -> dict[str, np.ndarray]:
    """Those of the choices that the software runs beside the others, all where none is named; none if none is left."""
    if not case.software or not choices:
        return choices
    plans = Plans(**others, **choices)
    runs = ~np.logical_or.reduce([np.broadcast_to(rule.broken(plans, case), plans.shape) for rule in SOFTWARE])
    shape = [-1 if size > 1 else 1 for size in plans.shape]
    return {name: choice[runs].reshape(shape) for name, choice in choices.items()} if runs.any() else {}


def _evaluated(problem: SearchProblem, plans: Plans, place: int) -> Found:
    """A product of plans; place: of its first plan among all of the same degrees."""
    case = replace(problem.case, plan=plans)
    memory, steps = plans_peak_bytes(case), Steps.of(case)
    values = {"step_s": np.broadcast_to(step_s(steps, problem.parameters), memory.shape), "memory_bytes": memory}
    values["cost_usd"] = values["step_s"] * (case.cluster.world_size * problem.usd_per_hour / 3600)
    if problem.objective == "energy":
        values["energy_j"] = np.broadcast_to(energy_j(case, problem.parameters), memory.shape)
    fits = memory <= problem.room_bytes
    objective = np.where(fits, values[_OBJECTIVES[problem.objective]], np.inf)
    best = _smallest(objective, memory, values["step_s"], problem.top)
    front = _front(values["step_s"], memory, fits)
    tables = (_columns(plans, values, chosen, place) for chosen in (best, front))
    return Found(*tables, memory.size, int(fits.sum()), float(memory.min()))


def energy_j(case: Case, parameters: Parameters) -> np.ndarray:
    """Energy of all devices in a step, by plan."""
    times = step_time(Steps.of(case), parameters)
    return case.cluster.world_size * device_energy_j(times, case.cluster.device)


def _smallest(objective: np.ndarray, memory: np.ndarray, step_s: np.ndarray, count: int) -> np.ndarray:
    """Flat positions of the `count` smallest finite values in order, ties by memory, time and position."""
    flat = objective.reshape(-1)
    at = np.flatnonzero(np.isfinite(flat))
    if count < len(at):
        at = np.flatnonzero(flat <= np.partition(flat, count - 1)[count - 1])
    keys = at, step_s.reshape(-1)[at], memory.reshape(-1)[at], flat[at]
    return at[np.lexsort(keys)][:count]


def _front(step_s: np.ndarray, memory: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """Flat positions of feasible plans that no other one beats in time and memory."""
    times, sizes, at = step_s.reshape(-1), memory.reshape(-1), np.flatnonzero(fits)
    if at.size:  # one plan beats most of the others, which need not be sorted
        good = at[np.argmin(times[at] * sizes[at])]
        at = at[(times[at] < times[good]) | (sizes[at] < sizes[good]) | (at == good)]
    at = at[np.lexsort((at, sizes[at], times[at]))]
    return at[sizes[at] < np.minimum.accumulate(np.r_[np.inf, sizes[at][:-1]])]


def _columns(plans: Plans, values: dict, chosen: np.ndarray, place: int) -> dict[str, np.ndarray]:
    """Chosen plans of a product as columns; place counts the plans of the same degrees in order."""
    shape = values["memory_bytes"].shape
    row, column = np.unravel_index(chosen, shape)
    every = {name: np.broadcast_to(getattr(plans, name), shape) for name in SEARCHED} | values
    return {name: value[row, column] for name, value in every.items()} | {"place": place + chosen}


def _joined(parts: list[dict[str, np.ndarray]], *order: str) -> dict[str, np.ndarray]:
    """Rows of all tables in the order of some columns, ties by their plans."""
    filled = [part for part in parts if part]
    table = {name: np.concatenate([part[name] for part in filled]) for name in (filled or [{}])[0]}
    return table and _rows(table, np.lexsort([table[name] for name in reversed((*order, *_TIES))]))


def _rows(table: dict[str, np.ndarray], rows: np.ndarray | slice) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in table.items()}
