"""What does a part of the space hold? Memory of all its plans, times of those that fit,
its best ones and Pareto front.

The formulas are those of `mm.estimate` and `mm.memory`. The plans of some degrees come
as products of two short lists (`space`), so millions of them are done per second in
little memory. A plan counts if one of the stacks launches it and its configuration can
say so. Plans of equal time and memory are one: that of the smaller degrees in the order
tp, cp, pp, ep, then of the earlier choice of the `Space`. Order goes to less memory,
then to less time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import or_

import numpy as np

from madmax_lib.base.fields import require_int, require_number, short_repr
from madmax_lib.catalog.software import Software
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans, take_product
from madmax_lib.plan.rules import SOFTWARE, STATED
from madmax_lib.planner.space import (
    SEARCHED,
    Degrees,
    Space,
    pass_choices,
    sharding_choices,
)
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import plans_peak_bytes, table_peak_bytes
from madmax_lib.simulator.memory.states import default_software
from madmax_lib.simulator.power import device_energy_j
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.step_time import step_s, step_time

__all__ = [
    "WAY",
    "Found",
    "SearchProblem",
    "energy_j",
    "evaluate",
    "launched_by",
    "merged",
]

_BLOCK = 1 << 16  # plans at a time: their arrays stay in the cache
_OBJECTIVES = {
    "time": "step_s",
    "cost": "cost_usd",
    "energy": "energy_j",
    "memory": "memory_bytes",
}
_TIES = ("tp", "cp", "pp", "ep", "place")
_WAYS = 100  # that are kept
_ROUNDED = 1 << 12  # of the bits of a number: plans closer than 1e-12 are equal

WAY = ("tp", "cp", "pp", "ep", "zero", "recompute")  # what makes a plan different


@dataclass(frozen=True)
class SearchProblem:
    """What is searched: everything that decides the result, for a worker on another
    machine too.
    """

    # model, cluster, batch, sequence, dtype and software; its plan is not looked at
    case: Case
    space: Space  # values that are tried
    objective: str  # a key of `_OBJECTIVES`
    top: int  # plans to keep
    parameters: Parameters  # constants of the step-time model
    usd_per_hour: float  # price of a device, NaN where unknown
    room_bytes: float  # memory of a device that a plan may use
    stacks: tuple[Software, ...]  # one of which must launch a plan; empty: any will do

    def __post_init__(self):
        if self.objective not in list(_OBJECTIVES):
            raise ValueError(
                f"objective={short_repr(self.objective)} is not one of "
                f"{', '.join(_OBJECTIVES)}"
            )
        require_number("usd_per_hour", self.usd_per_hour, unknown=True)
        if self.objective == "cost" and not self.usd_per_hour > 0:
            device = self.case.cluster.device.name
            raise ValueError(
                f"objective='cost' needs a price: {device} has none in the catalog, "
                "give usd_per_hour"
            )
        object.__setattr__(self, "top", require_int("top", self.top, 1))


@dataclass(frozen=True)
class Found:
    """What a part of the space has shown; its tables are columns of equal length, none
    where nothing fits.
    """

    table: dict[str, np.ndarray]  # best plans so far
    front: dict[str, np.ndarray]  # Pareto front so far, in time and memory
    ways: dict[str, np.ndarray]  # the best plan so far of each `WAY` to split the model
    idle: int  # plans that no stack launches
    evaluated: int  # the others
    feasible: int  # those of them that fit
    least_bytes: float  # memory of the smallest plan


def evaluate(problem: SearchProblem, part: Iterable[Degrees]) -> Found:
    """Looks at all plans of some degrees."""
    return merged(
        problem, [block for degrees in part for block in _blocks_of(problem, degrees)]
    )


def merged(problem: SearchProblem, parts: Sequence[Found]) -> Found:
    """The best of what was found in some parts, in order."""
    order = (_OBJECTIVES[problem.objective], "memory_bytes", "step_s")
    table = _without_ties(_joined([part.table for part in parts], *order))
    front = _joined([part.front for part in parts], "step_s", "memory_bytes")
    ways = _joined([part.ways for part in parts], *order)
    if table:
        least = _front(
            front["step_s"], front["memory_bytes"], np.ones(len(front["place"]), bool)
        )
        table = _rows(table, slice(problem.top))
        front = _rows(front, least)
        ways = _rows(ways, slice(_WAYS))
    counts = (
        sum(getattr(part, name) for part in parts)
        for name in ("idle", "evaluated", "feasible")
    )
    least_bytes = min((part.least_bytes for part in parts), default=float("inf"))
    return Found(table, front, ways, *counts, least_bytes)


def _blocks_of(problem: SearchProblem, degrees: Degrees) -> Iterator[Found]:
    """The plans of some degrees, block by block."""
    rows = pass_choices(problem.space, problem.case, degrees)
    columns = sharding_choices(problem.space, degrees, problem.case)
    if not rows or not columns:
        return
    plans = Plans(**vars(degrees), **rows, **columns)
    masks = tuple(~broken for broken in _refused(plans, problem)) or (
        np.ones((1, 1), bool),
    )
    place = np.arange(plans.shape[0] * plans.shape[1]).reshape(plans.shape)
    rows, columns = _touched(reduce(or_, masks), plans.shape)
    skipped = place.size - len(rows) * len(columns)
    if not len(rows):
        yield Found({}, {}, {}, skipped, 0, 0, float("inf"))
        return
    size = max(_BLOCK // len(columns), 1)
    for part in np.split(rows, range(size, len(rows), size)):
        here, *masked = (
            take_product(values, part, columns) for values in (plans, place, *masks)
        )
        yield _evaluated(problem, here, *masked, skipped=skipped)
        skipped = 0


def _touched(mask: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a product in which a mask is true somewhere."""
    return tuple(
        np.flatnonzero(np.broadcast_to(mask.any(axis), shape[1 - axis]))
        for axis in (1, 0)
    )


def _refused(plans: Plans, problem: SearchProblem) -> list[np.ndarray]:
    """Of each stack, the plans that it does not launch, or that its configuration
    cannot say; with two axes each.
    """
    cases = (replace(problem.case, software=stack) for stack in problem.stacks)
    rules = SOFTWARE + STATED
    return [
        np.atleast_2d(
            reduce(or_, (rule.broken(plans, case) for rule in rules), np.False_)
        )
        for case in cases
    ]


def launched_by(plans: Plans, problem: SearchProblem) -> list[str]:
    """Names of the stacks that launch each plan of a table within the memory of a
    device, joined by blanks.
    """
    runs = []
    for stack, broken in zip(problem.stacks, _refused(plans, problem), strict=True):
        launched = ~np.broadcast_to(broken[0], plans.shape)
        rows = np.flatnonzero(launched)
        if (
            len(rows) and not problem.case.software
        ):  # else memory is that of the stack already
            held = table_peak_bytes(
                replace(problem.case, plan=plans[rows], software=stack)
            )
            launched[rows] = held <= problem.room_bytes
        runs.append(launched)
    names = [stack.name for stack in problem.stacks]
    return [
        " ".join(name for name, run in zip(names, row, strict=True) if run)
        for row in zip(*runs, strict=True)
    ]


def _evaluated(
    problem: SearchProblem,
    plans: Plans,
    place: np.ndarray,
    *masks: np.ndarray,
    skipped: int,
) -> Found:
    """A product of plans; those that fit are timed. place: among all of the same
    degrees; masks: of each stack.
    """
    runs = np.broadcast_to(reduce(or_, masks), plans.shape)
    memory = np.broadcast_to(
        _rounded(plans_peak_bytes(replace(problem.case, plan=plans))), plans.shape
    )
    fits = (memory <= problem.room_bytes) & runs
    if (
        problem.stacks and not problem.case.software
    ):  # also in the memory of a stack that launches it
        fits = _roomy(problem, plans, masks, fits)
    launched = int(runs.sum())
    least_bytes = float(memory.min(where=runs, initial=np.inf))
    counts = skipped + runs.size - launched, launched, int(fits.sum()), least_bytes
    rows, columns = _touched(fits, fits.shape)
    if not len(rows):
        return Found({}, {}, {}, *counts)
    plans, place, memory, fits = (
        take_product(values, rows, columns) for values in (plans, place, memory, fits)
    )
    case = replace(problem.case, plan=plans)
    times = np.broadcast_to(
        _rounded(step_s(Steps.of(case), problem.parameters)), fits.shape
    )
    values = {"step_s": times, "memory_bytes": memory}
    values["cost_usd"] = times * (case.cluster.world_size * problem.usd_per_hour / 3600)
    if problem.objective == "energy":
        values["energy_j"] = np.broadcast_to(
            energy_j(case, problem.parameters), fits.shape
        )
    objective = np.where(fits, values[_OBJECTIVES[problem.objective]], np.inf)
    best, ties = _smallest(objective, memory, times, problem.top)
    ways = np.array(list(_best_of_ways(plans, objective, memory, times)), int)
    chosen = best, _front(times, memory, fits), ways
    table, front, ways = (
        _columns(plans, values | {"place": place}, at) for at in chosen
    )
    return Found(table | {"ties": ties}, front, ways, *counts)


def _roomy(
    problem: SearchProblem,
    plans: Plans,
    masks: tuple[np.ndarray, ...],
    fits: np.ndarray,
) -> np.ndarray:
    """Which of the plans that fit do so in the memory of a stack that launches them
    too.
    """
    roomy = np.zeros(fits.shape, bool)
    usual = plans.tp * plans.pp * plans.ep > 1 and default_software(plans)
    for stack, mask in zip(problem.stacks, masks, strict=True):
        wanted = fits & mask & ~roomy
        if stack.name != usual and wanted.any():  # the usual one's memory is known
            part = _touched(wanted, fits.shape)
            held = plans_peak_bytes(
                replace(problem.case, plan=take_product(plans, *part), software=stack)
            )
            wanted[np.ix_(*part)] &= held <= problem.room_bytes
        roomy |= wanted
    return roomy


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers to twelve digits, so that plans which differ in the last bits are equal."""
    bits = np.ascontiguousarray(values, float).view(np.int64)
    return ((bits + _ROUNDED // 2) & -_ROUNDED).view(float)


def _best_of_ways(
    plans: Plans, objective: np.ndarray, memory: np.ndarray, step_s: np.ndarray
) -> Iterator[int]:
    """Flat positions of the best plan of each ZeRO stage and recompute, of plans of the
    same degrees.
    """
    rows = plans.recompute[:, 0]
    columns = plans.zero[0]
    for recompute, zero in product(dict.fromkeys(rows), dict.fromkeys(columns)):
        at = np.ix_(np.flatnonzero(rows == recompute), np.flatnonzero(columns == zero))
        part = objective[at]
        if (least := part.min()) < np.inf:
            row, column = (
                at[axis].ravel()[i] for axis, i in enumerate(np.nonzero(part == least))
            )
            first = np.lexsort((row, step_s[row, column], memory[row, column]))[0]
            yield row[first] * len(columns) + column[first]


def energy_j(case: Case, parameters: Parameters) -> np.ndarray:
    """Energy of all devices in a step, by plan."""
    times = step_time(Steps.of(case), parameters)
    return case.cluster.world_size * device_energy_j(times, case.cluster.device)


def _smallest(
    objective: np.ndarray, memory: np.ndarray, step_s: np.ndarray, count: int
) -> tuple:
    """(flat positions of the `count` smallest finite values in order, how many tie with
    each in time and memory).
    """
    flat = objective.reshape(-1)
    wanted = count
    finite = np.flatnonzero(np.isfinite(flat))
    while True:
        at = finite
        if wanted < len(at):
            at = at[flat[at] <= np.partition(flat[at], wanted - 1)[wanted - 1]]
        sizes = memory.reshape(-1)[at]
        times = step_s.reshape(-1)[at]
        kept, ties = _first_of_ties(
            np.lexsort((at, times, sizes, flat[at])), times, sizes
        )
        if len(kept) >= count or len(at) == len(finite):
            return at[kept[:count]], ties[:count]
        wanted *= 4


def _first_of_ties(
    order: np.ndarray,
    times: np.ndarray,
    sizes: np.ndarray,
    ties: np.ndarray | None = None,
) -> tuple:
    """(those of an order of plans that no earlier one equals in time and memory, how
    many later ones equal each).
    """
    pairs = (times + 1j * sizes)[order]
    _, first, which = np.unique(pairs, return_index=True, return_inverse=True)
    counts = np.bincount(which, None if ties is None else ties[order] + 1.0).astype(int)
    kept = np.sort(first)
    return order[kept], counts[which[kept]] - 1


def _without_ties(table: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not table:
        return table
    order = np.arange(len(table["place"]))
    kept, ties = _first_of_ties(
        order, table["step_s"], table["memory_bytes"], table["ties"]
    )
    return _rows(table, kept) | {"ties": ties}


def _front(step_s: np.ndarray, memory: np.ndarray, fits: np.ndarray) -> np.ndarray:
    """Flat positions of feasible plans that no other one beats in time and memory."""
    times = step_s.reshape(-1)
    sizes = memory.reshape(-1)
    at = np.flatnonzero(fits)
    if at.size:  # one plan beats most of the others, which need not be sorted
        good = at[np.argmin(times[at] * sizes[at])]
        at = at[(times[at] < times[good]) | (sizes[at] < sizes[good]) | (at == good)]
    at = at[np.lexsort((at, sizes[at], times[at]))]
    return at[sizes[at] < np.minimum.accumulate(np.r_[np.inf, sizes[at][:-1]])]


def _columns(plans: Plans, values: dict, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Chosen plans of a product as columns."""
    shape = values["place"].shape
    row, column = np.unravel_index(chosen, shape)
    every = {
        name: np.broadcast_to(getattr(plans, name), shape) for name in SEARCHED
    } | values
    return {name: value[row, column] for name, value in every.items()} | {
        "ties": 0 * chosen
    }


def _joined(parts: list[dict[str, np.ndarray]], *order: str) -> dict[str, np.ndarray]:
    """Rows of all tables in the order of some columns, ties by their plans."""
    filled = [part for part in parts if part]
    table = {
        name: np.concatenate([part[name] for part in filled])
        for name in (filled or [{}])[0]
    }
    return table and _rows(
        table, np.lexsort([table[name] for name in reversed((*order, *_TIES))])
    )


def _rows(
    table: dict[str, np.ndarray], rows: np.ndarray | slice
) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in table.items()}
