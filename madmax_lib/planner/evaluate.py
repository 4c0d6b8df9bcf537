"""What does a part of the space hold? Times and memory of all its plans, its best ones and its Pareto front.

The formulas are those of `mm.estimate` and `mm.memory`. Plans come layout by layout as products of two short lists
(`space`), so millions of them are done per second in little memory. Ties go to less memory, then to less time, then to
the smaller degrees in the order tp, cp, pp, ep and the earlier choice of the `Space`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from madmax_lib.case import Case
from madmax_lib.planner.space import Layout, Space, passes, shards
from madmax_lib.plans import Plans
from madmax_lib.simulator.estimate import work_of
from madmax_lib.simulator.memory.peaks import plans_peak_bytes
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step.power import device_energy_j
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.specs import Cluster, Transformer

__all__ = ["OBJECTIVES", "Found", "Problem", "evaluate", "merged"]

_BLOCK = 1 << 16  # plans at a time: their arrays stay in the cache
OBJECTIVES = {"time": "step_s", "cost": "cost_usd", "energy": "energy_j", "memory": "memory_bytes"}


@dataclass(frozen=True)
class Problem:
    """What is searched: everything that decides the result, for a shard on another machine too."""

    model: Transformer
    cluster: Cluster
    global_batch: int
    objective: str
    top: int
    space: Space
    sequence: int
    dtype: str
    parameters: Parameters
    usd_per_hour: float
    room_bytes: float

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        if self.objective == "cost" and not self.usd_per_hour > 0:
            raise ValueError(f"objective='cost' needs a price: {self.cluster.device.name} has none in the catalog, "
                             "give usd_per_hour")  # fmt: skip
        if self.top < 1 or self.global_batch < 1:
            raise ValueError(f"top={self.top} and global_batch={self.global_batch} must be at least 1")


@dataclass
class Found:
    """What a part of the space has shown: best plans and Pareto front so far, and counts."""

    table: pd.DataFrame
    front: pd.DataFrame
    evaluated: int = 0
    feasible: int = 0
    least_bytes: float = float("inf")

    def __add__(self, other: Found) -> Found:
        return Found(pd.concat([self.table, other.table]), pd.concat([self.front, other.front]),
                     self.evaluated + other.evaluated, self.feasible + other.feasible,
                     min(self.least_bytes, other.least_bytes))  # fmt: skip


def evaluate(problem: Problem, at: Iterable[Layout]) -> Found:
    """Times all plans of some layouts."""
    pieces = [piece for layout in at for piece in _of_layout(problem, layout)]
    tables, fronts = (_frame([piece[i] for piece in pieces]) for i in (0, 1))
    evaluated, feasible = (sum(piece[i] for piece in pieces) for i in (2, 3))
    least_bytes = min((piece[4] for piece in pieces), default=float("inf"))
    return merged(problem, Found(tables, fronts, evaluated, feasible, least_bytes))


def merged(problem: Problem, found: Found) -> Found:
    """The best of what was found, in order."""
    order = [OBJECTIVES[problem.objective], "memory_bytes", "step_s", "tp", "cp", "pp", "ep", "place"]
    if not len(found.table):
        return found
    table = found.table.sort_values(order, kind="stable", ignore_index=True)[: problem.top]
    front = found.front.sort_values(["step_s", "memory_bytes", *order[3:]], kind="stable", ignore_index=True)
    least = np.minimum.accumulate(np.r_[np.inf, front["memory_bytes"].to_numpy(float)[:-1]])
    return replace(found, table=table, front=front[front["memory_bytes"] < least].reset_index(drop=True))


def _of_layout(problem: Problem, at: Layout) -> Iterator[tuple]:
    """Of each block of plans: columns of the best and of the front, plans, those that fit, least memory."""
    rows = passes(problem.space, problem.model, at, problem.global_batch)
    columns = shards(problem.space, at, problem.cluster)
    if not rows or not columns:
        return
    count, width = len(rows["micro_batch"]), columns["zero"].shape[1]
    block = max(_BLOCK // width, 1)
    for first in range(0, count, block):
        part = {name: choice[first : first + block] for name, choice in rows.items()}
        yield _of_block(problem, at, part, columns, first * width)


def _of_block(problem: Problem, at: Layout, rows: dict, columns: dict, place: int) -> tuple:
    plans = Plans(**vars(at), **rows, **columns)
    case = Case(problem.model, problem.cluster, plans, problem.global_batch, problem.sequence, problem.dtype)
    times, memory = step_time(work_of(case), problem.parameters), plans_peak_bytes(case)
    fits = memory <= problem.room_bytes
    values = {"step_s": times["step_s"], "memory_bytes": memory} | _costs(problem, times)
    wanted = np.where(fits, values[OBJECTIVES[problem.objective]], np.inf)
    best = _smallest(wanted, memory, values["step_s"], problem.top)
    front = _front(values["step_s"], memory, fits)
    tables = (_columns(at, rows, columns, values, chosen, place) for chosen in (best, front))
    return *tables, memory.size, int(fits.sum()), float(memory.min())


def _costs(problem: Problem, times) -> dict[str, np.ndarray]:
    devices = problem.cluster.world_size
    costs = {"cost_usd": times["step_s"] * devices * problem.usd_per_hour / 3600}
    if problem.cluster.device.tdp_w > 0 or problem.objective == "energy":
        costs["energy_j"] = devices * device_energy_j(times, problem.cluster.device)
    return costs


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
    at = np.flatnonzero(fits)
    at = at[np.lexsort((at, memory.reshape(-1)[at], step_s.reshape(-1)[at]))]
    least = np.minimum.accumulate(np.r_[np.inf, memory.reshape(-1)[at][:-1]])
    return at[memory.reshape(-1)[at] < least]


def _columns(at: Layout, rows: dict, columns: dict, values: dict, chosen: np.ndarray, place: int) -> dict:
    """Chosen plans of a product as columns; place counts the plans of a layout in order."""
    row, column = np.unravel_index(chosen, values["memory_bytes"].shape)
    result = {name: np.full(len(chosen), degree) for name, degree in vars(at).items()}
    result |= {name: choice[row, 0] for name, choice in rows.items()}
    result |= {name: choice[0, column] for name, choice in columns.items()}
    return result | {name: value[row, column] for name, value in values.items()} | {"place": place + chosen}


def _frame(parts: list[dict]) -> pd.DataFrame:
    return pd.DataFrame({name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {})
