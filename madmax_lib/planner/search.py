"""Which plan is best? Of every legal plan of a space the memory, of those that fit the
time; the best, and the front.

A search deals the degrees of a `space` out in parts (`distribute`), each of which is
worked out by `evaluate`.
"""

import time
from collections import Counter
from dataclasses import replace

import pandas as pd

from madmax_lib import catalog
from madmax_lib.base.fields import require_int, require_type, short_repr
from madmax_lib.catalog.models import DLRM, Cluster, Transformer
from madmax_lib.catalog.software import Software
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.plan_flags.write import STACKS
from madmax_lib.planner.answer import SearchResult, described, different
from madmax_lib.planner.distribute import run_parts
from madmax_lib.planner.evaluate import Found, SearchProblem
from madmax_lib.planner.space import Space, legal_degrees
from madmax_lib.simulator.memory.memory import usable_bytes
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    constants_of,
    shipped,
    software_of,
)

__all__ = ["check_case", "search", "stacks_of"]


def search(
    model: Transformer | str,
    cluster: Cluster | str,
    global_batch: int,
    objective: str = "time",
    top: int = 20,
    space: Space | None = None,
    software: str | Software | None = None,
    client=None,
    *,
    sequence: int | None = None,
    dtype: str = "bf16",
    parameters: Parameters | None = None,
    imbalance: float | str = 1.0,
    jitter: float | str = 0.0,
    usd_per_hour: float | None = None,
    directory=None,
    shard: int = 0,
    shards: int = 1,
    progress: bool = True,
) -> SearchResult:
    """The best plans for a model on a cluster.

    model, cluster: or their names. objective: time, cost (needs a price per
    device-hour, the catalog's if usd_per_hour is None), energy or memory. space: the
    full `Space` if None, `Space.quick()` for what people usually run. software: that
    trains, a name of `data/software.csv` or one of your own; that of the parameters if
    None. Without any, a plan must be launched by one of the `STACKS` whose
    configuration `plan_flags` writes, and is priced as by tuned Megatron; on TPUs by
    JAX.
    imbalance: of experts, as in `Case`.
    client: a dask client that takes shards of the space. directory: where finished
    shards are kept, so that a stopped search goes on. shard of shards: this part only,
    for job arrays; it may hold no plan that fits. Interrupting returns the best so far
    with complete=False. Raises ValueError naming the rule that leaves no plan, or the
    least memory that one would need. See also: mm.estimate, mm.tune, mm.planner.Space,
    mm.planner.campaign.

    >>> small = {"dtype": "fp16", "space": Space.quick(), "progress": False}
    >>> found = search("gpt2", "kaggle-2xt4", global_batch=8, top=3, **small)
    >>> found.best.world_size, len(found.table), found.table["step_s"].is_monotonic_increasing
    (2, 3, True)
    """
    parameters = constants_of(cluster, parameters)
    further = (sequence, dtype, software_of(software, parameters), imbalance, jitter)
    case = Case.of_step(model, cluster, Plan(), global_batch, *further)
    check_case(case)
    _check(client, shard, shards)
    start = time.perf_counter()
    problem = _problem(case, space, objective, top, parameters, usd_per_hour)
    degrees, dropped = legal_degrees(problem.space, case)
    if not degrees:
        reasons = "; ".join(
            f"{rule} ({count} dropped)" for rule, count in dropped.most_common()
        )
        raise ValueError(
            f"no layout of {case.model.name} on {case.cluster.world_size} devices: "
            f"{reasons}"
        )
    found, complete = run_parts(
        problem, degrees[shard::shards], client, directory, progress
    )
    if complete and not found.feasible and shards == 1:
        raise ValueError(_too_large(problem, found))
    table, front, ways = (pd.DataFrame(),) * 3
    if found.feasible:
        table, front = (
            described(problem, part)[0] for part in (found.table, found.front)
        )
        ways = different(problem, found.ways)
    counts = (found.evaluated, found.feasible, time.perf_counter() - start)
    rules = _dropped(dropped, found)
    return SearchResult(
        table,
        front.drop(columns="ties", errors="ignore"),
        ways,
        *counts,
        rules,
        problem,
        complete,
    )


def _dropped(layouts: Counter, found: Found) -> pd.DataFrame:
    """How many layouts and plans each rule has dropped."""
    rules = [(rule, count, "layouts") for rule, count in sorted(layouts.items())]
    rules.append(("a stack must launch it", found.idle, "plans"))
    rules.append(("must fit in memory", found.evaluated - found.feasible, "plans"))
    return pd.DataFrame(rules, columns=["rule", "count", "of"])


def check_case(case: Case) -> None:
    """Raises ValueError for what cannot be searched."""
    if isinstance(case.model, DLRM):
        raise ValueError(
            f"{case.model.name}: recommendation models are split by dp only, no "
            "search is needed"
        )
    if not case.sequence:
        raise ValueError(
            f"{case.model.name} has no sequence of its own; give sequence=, the "
            "tokens per sample"
        )


def stacks_of(case: Case) -> tuple[Software, ...]:
    """Who may train: the software that is named, else JAX on TPUs, else the `STACKS`."""
    usual = ("jax",) if case.cluster.device.name.startswith("tpu") else STACKS
    return (case.software,) if case.software else tuple(map(catalog.software, usual))


def _check(client, shard: int, shards: int) -> None:
    if client is not None and not hasattr(client, "scatter"):
        raise ValueError(f"client={short_repr(client)} must be a dask client")
    if require_int("shard", shard) >= require_int("shards", shards, 1):
        raise ValueError(
            f"shard={shard} is not one of 0 to {shards - 1} (shards={shards})"
        )


def _problem(
    case: Case, space, objective: str, top: int, parameters, usd_per_hour
) -> SearchProblem:
    price = case.cluster.device.usd_per_hour if usd_per_hour is None else usd_per_hour
    space = require_type("space", space, Space, Space)
    parameters = require_type("parameters", parameters, Parameters, shipped)
    stacks = stacks_of(case)
    case = replace(case, software=stacks[0]) if len(stacks) == 1 else case
    room_bytes = usable_bytes(case.cluster.device)
    return SearchProblem(
        case, space, objective, top, parameters, price, room_bytes, stacks
    )


def _too_large(problem: SearchProblem, found: Found) -> str:
    model = problem.case.model.name
    device = problem.case.cluster.device.name
    if not found.evaluated and found.idle:
        stacks = ", ".join(stack.name for stack in problem.stacks)
        return (
            f"no plan of {model}: {stacks} launches none of the {found.idle:,} of "
            "the space"
        )
    if not found.evaluated:
        return (
            f"no plan of {model}: the space names no micro-batch, schedule or "
            "ZeRO stage that divides"
        )
    least, room = (
        f"{size / 1e9:.1f} GB" for size in (found.least_bytes, problem.room_bytes)
    )
    return (
        f"no plan of {model} fits: the least needs {least} per device, {device} "
        f"has {room} ({found.evaluated:,} plans)"
    )
