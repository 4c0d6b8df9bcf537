"""The best plans and the Pareto front of a part of the space.

The formulas are those of `mm.estimate` and `mm.memory`. The plans of some degrees come
as products of two short lists (`space`), so millions of them are done per second in
little memory; where a product is small those of several degrees are one column. A plan
counts if one of the stacks launches it and its configuration can
say so. Plans of equal time and memory are one: that of the smaller degrees in the order
tp, cp, pp, ep, then of the earlier choice of the `Space`. Order goes to less memory,
then to less time.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import numpy as np

from madmax_lib.base import (
    require_int,
    require_number,
    same_fields,
    short_repr,
)
from madmax_lib.catalog import Software
from madmax_lib.plan import Case
from madmax_lib.plan.columns import Plans, alike_rows, in_a_column, take_product
from madmax_lib.planner.space import (
    SEARCHED,
    Degrees,
    Space,
    fixed_fields,
    pass_choices,
    sharding_choices,
)
from madmax_lib.simulator import Parameters
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import plans_peak_bytes
from madmax_lib.simulator.memory.stacks import unlaunchable
from madmax_lib.simulator.memory.states import USUAL_SOFTWARE
from madmax_lib.simulator.power import device_energy_j
from madmax_lib.simulator.steady.step_time import step_s, step_time

_Array = np.ndarray
Columns = dict[str, _Array]  # a table: arrays of equal length by name
# column by which each objective orders plans
_OBJECTIVES = {
    "time": "step_s",
    "cost": "cost_usd",
    "energy": "energy_j",
    "memory": "memory_bytes",
}
# Two plans with the same value of these are one way to split the model.
LAYOUT_KEY = ("tp", "cp", "pp", "ep", "zero", "recompute")
MOST_LAYOUTS = 100  # kept: the chances of `answer` are among a hundred
# what decides between plans of equal time and memory, so that results do not hang on
# the order in which parts are merged
_TIE_BREAKERS = ("tp", "cp", "pp", "ep", "position")
# Plans evaluated at a time. 2^16 doubles are half a MiB: the arrays of a block stay in
# the second-level cache.
_BLOCK_PLANS = 1 << 16
# Numpy's calls for one block take as long as the formulas of so many plans in a column.
_SMALL_PLANS = 1 << 11
_TOGETHER = 16  # such products in a column
# memory under the usual software over the room, up to which another may hold a plan
_LESS = 2.0
# The last 12 of the 52 bits of a fraction are rounded away: 2^-40 is about 1e-12, more
# than formulas in another order differ by and far less than plans do.
_ROUNDED_BITS = 1 << 12


@dataclass(frozen=True)
class SearchProblem:
    """Everything that decides the result of a search, for a worker on another machine
    too.
    """

    # model, cluster, batch, sequence, dtype and software; of its plan what no search
    # sets, and with `changes` the recipe that they lead from
    case: Case
    space: Space  # values that are tried
    objective: str  # a key of `_OBJECTIVES`
    top: int  # plans to keep
    parameters: Parameters  # constants of the step-time model
    usd_per_hour: float  # price of a device, NaN where unknown
    room_bytes: float  # memory of a device that a plan may use
    stacks: tuple[Software, ...]  # one of which must launch a plan; empty: any will do
    changes: int | None = None  # most `changes` from that plan

    __eq__ = same_fields

    def __post_init__(self):
        if self.objective not in list(_OBJECTIVES):
            raise ValueError(
                f"objective={short_repr(self.objective)} is not one of "
                f"{', '.join(_OBJECTIVES)}"
            )
        require_number("usd_per_hour", self.usd_per_hour, unknown=True)
        # "not above 0" is true of NaN too, which "at most 0" is not
        if self.objective == "cost" and not self.usd_per_hour > 0:
            device = self.case.device.name
            raise ValueError(
                f"objective='cost' needs a price: {device} has none of this year in the "
                "catalog; give usd_per_hour=, its price"
            )
        object.__setattr__(self, "top", require_int("top", self.top, 1))

    @property
    def is_for_speed(self) -> bool:
        """Whether the fastest plan is the best: it is the cheapest, too."""
        return self.objective in ("time", "cost")

    @property
    def most_plans(self) -> int:
        """Plans to keep on the way: the stacks that launch them may change their order."""
        return max(self.top, MOST_LAYOUTS)


@dataclass(frozen=True)
class PartialResult:
    """The best plans of a part of the space, and counts of the others.

    The tables are columns of equal length; there are none where nothing fits.
    """

    table: Columns  # best plans so far
    front: Columns  # Pareto front so far, in time and memory
    layouts: Columns  # the best plan so far of each `LAYOUT_KEY`
    unlaunched: int = 0  # plans that no stack launches
    evaluated: int = 0  # the others
    feasible: int = 0  # those of them that fit
    least_bytes: float = math.inf  # memory of the smallest plan


def evaluate(problem: SearchProblem, part: Iterable[Degrees]) -> PartialResult:
    """The best of all plans of some degrees."""
    return merged(problem, list(evaluated(problem, part)))


def evaluated(
    problem: SearchProblem, part: Iterable[Degrees]
) -> Iterator[PartialResult]:
    """The best of the plans of some degrees, block by block."""
    small = []
    for plans in filter(None, (_product(problem, degrees) for degrees in part)):
        if math.prod(plans.shape) > _SMALL_PLANS:
            yield from _blocks_of(problem, plans)
        else:
            small.append(plans)
        if len(small) == _TOGETHER:
            yield from _blocks_of(problem, in_a_column(small))
            small = []
    if small:
        yield from _blocks_of(problem, in_a_column(small))


def merged(problem: SearchProblem, parts: Sequence[PartialResult]) -> PartialResult:
    """The best of some parts, in order."""
    order = (_OBJECTIVES[problem.objective], "memory_bytes", "step_s")
    table = _joined([part.table for part in parts], *order)
    front = _joined([part.front for part in parts], "step_s", "memory_bytes")
    layouts = _joined([part.layouts for part in parts], *order)
    if table:
        # two parts may hold plans of equal time and memory
        first = _first_of_ties(slice(None), table["step_s"], table["memory_bytes"])
        table = _rows(table, first[: problem.most_plans])
        seconds = front["step_s"]
        front = _rows(front, front_of(seconds, front["memory_bytes"], seconds > 0))
        layouts = _rows(layouts, slice(MOST_LAYOUTS))
    counts = (
        sum(getattr(part, name) for part in parts)
        for name in ("unlaunched", "evaluated", "feasible")
    )
    least_bytes = min((part.least_bytes for part in parts), default=math.inf)
    return PartialResult(table, front, layouts, *counts, least_bytes)


def _product(problem, degrees):
    """All plans of some degrees, None without any."""
    passes = pass_choices(problem.space, problem.case, degrees)
    shardings = sharding_choices(problem.space, degrees, problem.case)
    if passes and shardings:
        fixed = fixed_fields(problem.case.plan)
        return Plans(**degrees._asdict(), **passes, **shardings, **fixed)
    return None


def _blocks_of(problem, plans):
    """The best of the plans of a product, block by block."""
    near = True
    if problem.changes is not None:
        from madmax_lib.planner.changes import near_recipe  # a wing

        near = near_recipe(plans, problem.case, problem.changes)
        if not near.any():
            return
    broken = unlaunchable(replace(problem.case, plan=plans), problem.stacks)
    # without stacks anything is launched
    masks = [near & ~mask for mask in broken] or [np.ones((1, 1), bool)]
    # (a, b) number of each plan, in the order of degrees and of their choices
    position = np.arange(math.prod(plans.shape)).reshape(plans.shape)
    rows, columns = _nonempty_rows_and_columns(reduce(or_, masks), plans.shape)
    # what no stack launches, and is left out
    yield PartialResult({}, {}, {}, position.size - len(rows) * len(columns))
    if not len(rows):
        return
    block_rows = max(_BLOCK_PLANS // len(columns), 1)
    for part in np.split(rows, range(block_rows, len(rows), block_rows)):
        yield _evaluate_block(
            problem,
            take_product(plans, part, columns),
            take_product(position, part, columns),
            [take_product(mask, part, columns) for mask in masks],
        )


def _nonempty_rows_and_columns(mask, shape):
    """Rows and columns of a product in which a mask is true somewhere.

    mask: of that shape or (a, 1), (1, b), (1, 1), as rules that look at one of the
    lists leave it.
    """
    rows = np.broadcast_to(mask.any(axis=1), shape[0])
    columns = np.broadcast_to(mask.any(axis=0), shape[1])
    return np.flatnonzero(rows), np.flatnonzero(columns)


def _evaluate_block(problem, plans, position, masks):
    """The best of a product of plans; those that fit are timed.

    position: number of each plan among those of its degrees. masks: by stack, what it
    launches.
    """
    launched = np.broadcast_to(reduce(or_, masks), plans.shape)
    memory = _rounded(plans_peak_bytes(replace(problem.case, plan=plans)))
    memory = np.broadcast_to(memory, plans.shape)
    evaluated = int(launched.sum())
    counts = {
        "unlaunched": launched.size - evaluated,
        "evaluated": evaluated,
        "least_bytes": float(memory.min(where=launched, initial=np.inf)),
    }
    held_bytes = np.where(launched, memory, np.inf)
    # Without a named software memory is that of the usual one, and a plan must fit in
    # that of a stack that launches it, which may be less.
    if problem.stacks and not problem.case.software:
        held_bytes = _held_bytes(problem, plans, masks, memory)
        if problem.objective == "memory":
            memory = _rounded(held_bytes)
    fits = held_bytes <= problem.room_bytes
    counts["feasible"] = int(fits.sum())
    rows, columns = _nonempty_rows_and_columns(fits, fits.shape)
    if not len(rows):
        return PartialResult({}, {}, {}, **counts)
    plans, position, memory, fits = (
        take_product(values, rows, columns)
        for values in (plans, position, memory, fits)
    )
    case = replace(problem.case, plan=plans)
    times = _rounded(step_s(Steps.of(case), problem.parameters))
    times = np.broadcast_to(times, fits.shape)
    world = case.cluster.world_size
    usd_per_s = world * problem.usd_per_hour / 3600
    values = {"step_s": times, "memory_bytes": memory, "cost_usd": times * usd_per_s}
    if problem.objective == "energy":
        parts = step_time(Steps.of(case), problem.parameters)
        joules = world * device_energy_j(parts, case.device)
        values["energy_j"] = np.broadcast_to(joules, fits.shape)
    objective = np.where(fits, values[_OBJECTIVES[problem.objective]], np.inf)
    values["position"] = position
    chosen = (
        _smallest(objective, memory, times, problem.most_plans),
        front_of(times, memory, fits),
        _best_of_layouts(plans, objective, memory, times),
    )
    return PartialResult(*(_columns(plans, values, at) for at in chosen), **counts)


def _held_bytes(problem, plans, masks, memory):
    """Peak bytes under a stack that launches each plan and holds it, infinite where none
    does: under the first of them, and under the least where memory is the objective.

    masks: by stack, what it launches; memory: under the usual software.
    """
    held_bytes = np.full(memory.shape, np.inf)
    near = memory <= _LESS * problem.room_bytes
    are_usual = np.all(plans.tp * plans.pp * plans.ep > 1)
    usual = USUAL_SOFTWARE[0] if are_usual else ""
    for stack, mask in zip(problem.stacks, masks, strict=True):
        open_ones = (
            near & mask & (np.isinf(held_bytes) | (problem.objective == "memory"))
        )
        if not open_ones.any():
            continue
        part = _nonempty_rows_and_columns(open_ones, memory.shape)
        at = np.ix_(*part)
        peaks = memory[at]
        if stack.name != usual:
            fewer = take_product(plans, *part)
            peaks = plans_peak_bytes(replace(problem.case, plan=fewer, software=stack))
        fits = open_ones[at] & (peaks <= problem.room_bytes)
        held_bytes[at] = np.minimum(held_bytes[at], np.where(fits, peaks, np.inf))
    return held_bytes


def _rounded(values):
    """Positive numbers to twelve digits, so that plans which differ in the last bits
    are equal.
    """
    # The bits of a positive double, read as an integer, grow with its value, exponent
    # above fraction. Adding half of the last kept bit and clearing what is below it
    # rounds to the nearest; a carry out of the fraction raises the exponent, as it
    # should. Rounding decimal digits instead needs log10 and a power for each number.
    bits = np.ascontiguousarray(values, float).view(np.int64)
    return ((bits + _ROUNDED_BITS // 2) & -_ROUNDED_BITS).view(float)


def _best_of_layouts(plans, objective, memory, step_s):
    """Flat positions of the best plan of each `LAYOUT_KEY` that fits."""
    keys = (getattr(plans, name) for name in LAYOUT_KEY)
    _, layout = alike_rows(keys, objective.shape)
    flat = objective.ravel()
    least = np.full(layout.max() + 1, np.inf)
    np.minimum.at(least, layout, flat)
    at = np.flatnonzero(np.isfinite(flat) & (flat == least[layout]))
    # of equal objectives the least memory, then time, then the first
    at = at[np.lexsort((at, step_s.flat[at], memory.flat[at]))]
    _, first = np.unique(layout[at], return_index=True)
    return at[first]


def _smallest(objective, memory, step_s, count):
    """Flat positions of the `count` smallest finite values in order, of plans that tie
    in time and memory the first.
    """
    flat = objective.ravel()
    finite = np.flatnonzero(np.isfinite(flat))
    wanted = count
    while True:
        # A partition is linear where a sort of all is not. What ties with the last
        # wanted value is taken along, so that the first of its ties is among them.
        at = finite
        if wanted < len(at):
            last_wanted = np.partition(flat[at], wanted - 1)[wanted - 1]
            at = at[flat[at] <= last_wanted]
        sizes = memory.ravel()[at]
        times = step_s.ravel()[at]
        # lexsort's last key counts most: the objective, then memory, then time
        order = np.lexsort((at, times, sizes, flat[at]))
        first = order[_first_of_ties(order, times, sizes)]
        if len(first) >= count or len(at) == len(finite):
            return at[first[:count]]
        wanted *= 4  # too many were ties: look farther


def _first_of_ties(order, times, sizes):
    """Places in an order of plans of those that no earlier one equals in time and
    memory.
    """
    # np.unique of rows of two columns sorts them as raw bytes, several times slower
    # than numbers: a pair is one complex number, which numpy orders by its real part,
    # then by its imaginary one.
    pairs = (times + 1j * sizes)[order]
    _, first = np.unique(pairs, return_index=True)
    return np.sort(first)  # unique gave them by value


def front_of(step_s, memory, fits):
    """Flat positions of feasible plans that no other one beats in time and memory."""
    times = step_s.ravel()
    sizes = memory.ravel()
    at = np.flatnonzero(fits)
    if at.size:
        # the plan of least time x memory beats most others, which need not be sorted
        good = at[np.argmin(times[at] * sizes[at])]
        at = at[(times[at] < times[good]) | (sizes[at] < sizes[good]) | (at == good)]
    # by time; a plan stays if it needs less memory than all that are faster
    at = at[np.lexsort((at, sizes[at], times[at]))]
    faster_bytes = np.minimum.accumulate(np.r_[np.inf, sizes[at][:-1]])
    return at[sizes[at] < faster_bytes]


def _columns(plans, values, chosen):
    """Chosen plans of a product as columns."""
    shape = values["position"].shape
    columns = {name: getattr(plans, name) for name in SEARCHED} | values
    return {
        name: np.broadcast_to(column, shape).flat[chosen]
        for name, column in columns.items()
    }


def _joined(parts, *order):
    """Rows of all tables in the order of some columns, ties by their plans."""
    filled = [part for part in parts if part]
    if not filled:
        return {}
    table = {
        name: np.concatenate([part[name] for part in filled]) for name in filled[0]
    }
    keys = (*order, *_TIE_BREAKERS)
    return _rows(table, np.lexsort([table[name] for name in reversed(keys)]))


def _rows(table, rows):
    return {name: column[rows] for name, column in table.items()}
