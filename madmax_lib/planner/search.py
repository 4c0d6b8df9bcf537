"""Which plan is best? Every legal plan of a space is timed and its memory checked; the best, and the Pareto front.

The formulas are those of `mm.estimate` and `mm.memory`. Plans come layout by layout as products of two short lists
(`space`), so a search does millions of them per second in little memory. Ties go to less memory, then to the smaller
degrees in the order tp, cp, pp, ep and the earlier choice of the `Space`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.planner.space import Layout, Space, layouts, namespace, passes, plan_of, shards
from madmax_lib.simulator.estimate import work_of
from madmax_lib.simulator.memory import usable_bytes
from madmax_lib.simulator.parameters import Parameters, shipped
from madmax_lib.simulator.peaks import plans_peak_bytes
from madmax_lib.simulator.power import device_energy_j
from madmax_lib.simulator.step_time import step_time
from madmax_lib.specs import DLRM, Cluster, Transformer

__all__ = ["Found", "Problem", "SearchResult", "search", "search_layouts"]

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


@dataclass(frozen=True)
class SearchResult:
    """Plans in order of the objective. table: the best `top`; pareto: no other plan is better in time and memory.

    Both have the fields of Plan, step_s, memory_bytes (of the fullest device), mfu, tokens_per_s, cost_usd (per step,
    NaN without a price) and energy_j (all devices). evaluated: legal plans that were timed; feasible: those that fit.
    dropped: layouts that no plan was made of, by rule, and plans that do not fit. complete: False if interrupted.
    """

    table: pd.DataFrame
    pareto: pd.DataFrame
    evaluated: int
    feasible: int
    seconds: float
    dropped: pd.DataFrame = field(repr=False)
    complete: bool = True

    @property
    def best(self) -> Plan:
        """The best plan. Raises ValueError if none fits."""
        if not len(self.table):
            raise ValueError("no plan fits")
        return plan_of(self.table.iloc[0].to_dict())


def search(
    model: Transformer,
    cluster: Cluster,
    global_batch: int,
    objective: str = "time",
    top: int = 20,
    space: Space | None = None,
    client=None,
    *,
    sequence: int | None = None,
    dtype: str = "bf16",
    parameters: Parameters | None = None,
    usd_per_hour: float | None = None,
    directory=None,
    shard: int = 0,
    shards: int = 1,
    progress: bool = True,
) -> SearchResult:
    """The best plans for a model on a cluster.

    objective: time, cost (needs a price per device-hour, the catalog's if usd_per_hour is None), energy or memory.
    space: the full `Space` if None, `Space.quick()` for what people usually run. client: a dask client that takes
    shards of the space. directory: where finished shards are kept, so that a stopped search goes on. shard of shards:
    this part only, for job arrays. Interrupting returns the best so far with complete=False.
    Raises ValueError naming the rule that leaves no plan, or the least memory that one would need.
    """
    from madmax_lib.planner.shards import run_parts  # spreads work, needed here alone

    if isinstance(model, DLRM):
        raise ValueError(f"{model.name}: recommendation models are split by dp only, no search is needed")
    start = time.perf_counter()
    price = cluster.device.usd_per_hour if usd_per_hour is None else usd_per_hour
    problem = Problem(model, cluster, global_batch, objective, top, space or Space(), sequence or model.sequence,
                      dtype, parameters or shipped(), price, usable_bytes(cluster.device))  # fmt: skip
    legal, dropped = layouts(problem.space, model, cluster, global_batch, problem.sequence)
    if not legal:
        raise ValueError(f"no layout of {model.name} on {cluster.world_size} devices: {_reasons(dropped)}")
    found, complete = run_parts(problem, legal[shard::shards], client, directory, progress)
    if complete and not found.feasible:
        raise ValueError(_too_large(problem, found))
    return _result(problem, found, dropped, time.perf_counter() - start, complete)


def search_layouts(problem: Problem, at: Iterable[Layout]) -> Found:
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
    plans = namespace(at, rows | columns)
    times = step_time(work_of(problem.model, problem.cluster, plans, problem.global_batch, problem.sequence,
                              problem.dtype), problem.parameters)  # fmt: skip
    memory = plans_peak_bytes(problem.model, vars(at), rows, columns, global_batch=problem.global_batch,
                              sequence=problem.sequence, dtype=problem.dtype)  # fmt: skip
    fits = memory <= problem.room_bytes
    values = {"step_s": times["step_s"], "memory_bytes": memory} | _costs(problem, times)
    best = _smallest(np.where(fits, values[OBJECTIVES[problem.objective]], np.inf), memory, problem.top)
    front = _front(values["step_s"], memory, fits)
    tables = (_columns(at, rows, columns, values, chosen, place) for chosen in (best, front))
    return *tables, memory.size, int(fits.sum()), float(memory.min())


def _costs(problem: Problem, times) -> dict[str, np.ndarray]:
    devices = problem.cluster.world_size
    costs = {"cost_usd": times["step_s"] * devices * problem.usd_per_hour / 3600}
    if problem.cluster.device.tdp_w > 0 or problem.objective == "energy":
        costs["energy_j"] = devices * device_energy_j(times, problem.cluster.device)
    return costs


def _smallest(objective: np.ndarray, memory: np.ndarray, count: int) -> np.ndarray:
    """Flat positions of the `count` smallest finite values, with all that tie with the last."""
    flat = objective.reshape(-1)
    if count < flat.size:
        limit = np.partition(flat, count - 1)[count - 1]
        at = np.flatnonzero(flat <= limit) if np.isfinite(limit) else np.flatnonzero(np.isfinite(flat))
    else:
        at = np.flatnonzero(np.isfinite(flat))
    return at[np.lexsort((at, memory.reshape(-1)[at], flat[at]))][:count]


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


def _result(problem: Problem, found: Found, dropped: Counter, seconds: float, complete: bool) -> SearchResult:
    table, front = (_finished(problem, part) for part in (found.table, found.front))
    rules = pd.DataFrame([(rule, count, "layouts") for rule, count in sorted(dropped.items())]
                         + [("must fit in memory", found.evaluated - found.feasible, "plans")],
                         columns=["rule", "count", "of"])  # fmt: skip
    return SearchResult(table, front, found.evaluated, found.feasible, seconds, rules, complete)


def _finished(problem: Problem, table: pd.DataFrame) -> pd.DataFrame:
    """With the text of each plan, MFU and tokens per second."""
    if not len(table):
        return table
    tokens = problem.global_batch * problem.sequence
    flops = 3 * problem.model.forward_flops(problem.global_batch, problem.sequence)
    peak = problem.cluster.world_size * problem.cluster.device.peak(problem.dtype)
    table = table.drop(columns="place").reset_index(drop=True)
    table.insert(0, "plan", [str(plan_of(row)) for row in table.to_dict("records")])
    return table.assign(mfu=flops / table["step_s"] / peak, tokens_per_s=tokens / table["step_s"])


def _reasons(dropped: Counter) -> str:
    return "; ".join(f"{rule} ({count} dropped)" for rule, count in dropped.most_common())


def _too_large(problem: Problem, found: Found) -> str:
    if not found.evaluated:
        return f"no plan of {problem.model.name}: the space names no micro-batch, schedule or ZeRO stage that divides"
    device = problem.cluster.device.name
    return (f"no plan of {problem.model.name} fits: the least needs {found.least_bytes / 1e9:.1f} GB per device, "
            f"{device} has {problem.room_bytes / 1e9:.1f} GB ({found.evaluated:,} plans)")  # fmt: skip
