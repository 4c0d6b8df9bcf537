"""The best plan of a space: of every legal plan the memory, of those that fit the time.

A search deals the degrees of a `space` out in parts (`distribute`), each of which is
worked out by `evaluate`.
"""

import time
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.base import require_int, require_type
from madmax_lib.base.executors import submitter
from madmax_lib.catalog import DLRM, Cluster, Model, Software
from madmax_lib.catalog.tables import price_of
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.answer import (
    SearchResult,
    described,
    in_launched_order,
)
from madmax_lib.planner.distribute import run_parts
from madmax_lib.planner.evaluate import SearchProblem
from madmax_lib.planner.space import Space, legal_degrees
from madmax_lib.simulator import usable_bytes
from madmax_lib.simulator.memory.memory import plans_peak_bytes
from madmax_lib.simulator.memory.stacks import stacks_of
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    constants_of,
    shipped,
    software_of,
)

_CHANGES = 3  # most that a person makes in a recipe at a time


def search(
    model: Model | str,
    cluster: Cluster | str,
    global_batch: int,
    objective: str = "time",
    top: int = 20,
    space: Space | None = None,
    software: str | Software | None = None,
    client=None,
    *,
    like=None,
    sequence: int | None = None,
    dtype: str = "bf16",
    parameters: Parameters | None = None,
    imbalance: float | str = 1.0,
    jitter: float | str = 0.0,
    optimizer: str = "adam",
    usd_per_hour: float | None = None,
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
    configuration `plan_flags` writes, and held by it; those that are best as under tuned
    Megatron, and of each layout, are ranked under the fastest such stack; on TPUs under
    JAX.
    like: a recipe, that is a Plan, its text, or a configuration of a framework (file,
    text, dictionary, log): the plans that at most three changes of it lead to, whose
    `beats` says which are faster, by how much, how surely and why. The space is then of
    usual choices if None, the software that of the configuration. A recipe was run: if
    by our count it does not fit, neither need what beats it, and what fits is listed too.
    imbalance, optimizer: of experts, and what updates the weights, as in `Case`.
    client: an executor that takes shards of the space: anything with `submit`, such as
    a ProcessPoolExecutor, mpi4py.futures or a dask client. shard of shards: this part
    only, for job arrays; it may hold no plan that fits. Interrupting returns the best
    so far with complete=False. Raises ValueError naming the rule that leaves no plan, or the
    least memory that one would need. See also: mm.estimate, mm.tune, mm.planner.Space,
    mm.planner.campaign.

    >>> small = {"dtype": "fp16", "space": Space.quick(), "progress": False}
    >>> found = search("gpt2", "kaggle-2xt4", global_batch=8, top=3, **small)
    >>> found.best.world_size, len(found.table), found.table["launched_s"].is_monotonic_increasing
    (2, 3, True)
    """
    start_s = time.perf_counter()
    parameters = constants_of(cluster, parameters)
    software = software_of(software, parameters)
    case = Case.of_step(
        model,
        cluster,
        Plan(),
        global_batch,
        *(sequence, dtype, software, imbalance, jitter, optimizer),
    )
    check_case(case)
    if like is not None:
        from madmax_lib.planner.changes import space_of, with_recipe  # a wing

        case = with_recipe(case, like)
        space = space or space_of(case.plan)
    stacks = stacks_of(case)
    if len(stacks) == 1:
        # memory and time are then those of the one stack that may launch a plan
        case = replace(case, software=stacks[0])
    problem = SearchProblem(
        case,
        require_type("space", space, Space, Space),
        objective,
        top,
        require_type("parameters", parameters, Parameters, shipped),
        price_of(case.device, usd_per_hour),
        usable_bytes(case.device),
        stacks,
        None if like is None else _CHANGES,
    )
    if client is not None:
        submitter(client)
    if require_int("shard", shard) >= require_int("shards", shards, 1):
        raise ValueError(
            f"shard={shard} is not one of 0 to {shards - 1} (shards={shards})"
        )
    degrees, dropped = _degrees_of(problem)
    # every so-many-th of the degrees: neighbours hold plans of about equal number
    part = degrees[shard::shards]
    result, complete = run_parts(problem, part, client, progress)
    if like is not None and complete and not result.feasible:
        # a recipe was run, so what takes no more memory than it may run too
        problem = replace(problem, room_bytes=np.max(plans_peak_bytes(case)))
        result, complete = run_parts(problem, part, client, progress)
    # a shard may hold nothing that fits, and so may what an interruption left
    if complete and not result.feasible and shards == 1:
        raise ValueError(_nothing_fits(problem, result))
    answer = _answer(problem, result, dropped, complete)
    if like is not None:
        from madmax_lib.planner.beats import beats  # a wing

        answer = replace(answer, beats=beats(problem, degrees))
    return replace(answer, seconds=time.perf_counter() - start_s)


def _degrees_of(problem):
    """Degrees of a problem's space, and how many each rule drops. Raises ValueError
    where none is left.
    """
    case = problem.case
    degrees, dropped = legal_degrees(problem.space, case)
    if not degrees:
        reasons = "; ".join(
            f"{rule} ({count} dropped)" for rule, count in dropped.most_common()
        )
        reasons = reasons or "no degrees of the space fill them"
        raise ValueError(
            f"no layout of {case.model.name} on {case.cluster.world_size} devices: "
            f"{reasons}"
        )
    return degrees, dropped


def _answer(problem, result, dropped, complete):
    """The plans that were found, and what the rules have dropped."""
    launched = "a stack must launch it"
    if problem.changes:
        launched += f", in at most {problem.changes} changes"
    # layouts are dropped by rules of the book, plans by what launches and holds them
    rules = [(rule, count, "layouts") for rule, count in sorted(dropped.items())]
    rules.append((launched, result.unlaunched, "plans"))
    rules.append(("must fit in memory", result.evaluated - result.feasible, "plans"))
    # energy and memory are of the usual software
    is_open = problem.case.software.name == "none"
    if result.feasible and is_open and problem.is_for_speed:
        result = in_launched_order(problem, result)
    table = pd.DataFrame(result.table).head(problem.top)
    return SearchResult(
        described(problem, table).table,
        result.evaluated,
        result.feasible,
        0.0,  # seconds, when it ends
        pd.DataFrame(rules, columns=["rule", "count", "of"]),
        problem,
        pd.DataFrame(result.front),
        pd.DataFrame(result.layouts),
        complete,
    )


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


def _nothing_fits(problem, result):
    """Why a search ends without a plan: nothing is launched, or nothing is small enough."""
    model = problem.case.model.name
    device = problem.case.device.name
    if result.evaluated:
        return (
            f"no plan of {model} fits: the least needs {result.least_bytes / 1e9:.1f} GB "
            f"per device, {device} has {problem.room_bytes / 1e9:.1f} GB "
            f"({result.evaluated:,} plans)"
        )
    if result.unlaunched:
        stacks = ", ".join(stack.name for stack in problem.stacks)
        return (
            f"no plan of {model}: {stacks} launches none of the "
            f"{result.unlaunched:,} of the space"
        )
    return (
        f"no plan of {model}: the space names no micro-batch, schedule or ZeRO stage "
        "that divides"
    )
