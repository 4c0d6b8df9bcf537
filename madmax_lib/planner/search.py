"""Which plan is best? Every legal plan of a space is timed and its memory checked; the best, and the Pareto front.

A search deals the degrees of a `space` out in parts (`distribute`), each of which is worked out by `evaluate`.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from madmax_lib.case import Case
from madmax_lib.fields import argument, shown, whole
from madmax_lib.plan import Plan
from madmax_lib.planner.distribute import run_parts
from madmax_lib.planner.evaluate import Found, SearchProblem, energy_j
from madmax_lib.planner.space import SEARCHED, Space, legal_degrees, plan_of
from madmax_lib.plans import Plans
from madmax_lib.simulator.memory.memory import usable_bytes
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.inputs import Steps
from madmax_lib.simulator.step.step_time import step_time
from madmax_lib.simulator.step.uncertainty import log_width
from madmax_lib.software import Software
from madmax_lib.specs import DLRM, Cluster, Transformer

__all__ = ["SearchResult", "search"]


@dataclass(frozen=True)
class SearchResult:
    """What a search has shown; tables in order of the objective.

    table: the best `top` plans, with the fields of Plan, plan (its text), step_s, low_s and high_s (90 % interval),
        memory_bytes (of the fullest device), mfu, tokens_per_s, cost_usd (per step, NaN without a price) and energy_j
        (all devices).
    pareto: plans that no other one beats in time and memory, same columns.
    evaluated: legal plans that were timed.
    feasible: those of them that fit.
    seconds: of the search, wall clock.
    dropped: rule, count, of: degrees ("layouts") that no plan was made of, by rule, and plans that do not fit.
    complete: False if interrupted (default True).
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

    model, cluster: or their names. objective: time, cost (needs a price per device-hour, the catalog's if usd_per_hour
    is None), energy or memory. space: the full `Space` if None, `Space.quick()` for what people usually run. software:
    that trains, a name of `data/software.csv` or one of your own; that of the parameters or any if None. imbalance: of
    experts, as in `Case`.
    client: a dask client that takes shards of the space. directory: where finished shards are kept, so that a stopped
    search goes on. shard of shards: this part only, for job arrays; it may hold no plan that fits. Interrupting returns
    the best so far with complete=False.
    Raises ValueError naming the rule that leaves no plan, or the least memory that one would need.

    >>> small = {"dtype": "fp16", "space": Space.quick(), "progress": False}
    >>> found = search("gpt2", "kaggle-2xt4", global_batch=8, top=3, **small)
    >>> found.best.world_size, len(found.table), found.table["step_s"].is_monotonic_increasing
    (2, 3, True)
    """
    software = getattr(parameters, "software", None) if software is None else software
    case = Case.of_step(model, cluster, Plan(), global_batch, sequence, dtype, software, imbalance, jitter)
    model, cluster, shard = case.model, case.cluster, whole("shard", shard)
    if isinstance(model, DLRM):
        raise ValueError(f"{model.name}: recommendation models are split by dp only, no search is needed")
    if client is not None and not hasattr(client, "scatter"):
        raise ValueError(f"client={shown(client)} must be a dask client")
    if shard >= whole("shards", shards, 1):
        raise ValueError(f"shard={shard} is not one of 0 to {shards - 1} (shards={shards})")
    start = time.perf_counter()
    price = cluster.device.usd_per_hour if usd_per_hour is None else usd_per_hour
    room_bytes = usable_bytes(cluster.device)
    space, parameters = argument("space", space, Space, Space), argument("parameters", parameters, Parameters, shipped)
    problem = SearchProblem(case, space, objective, top, parameters, price, room_bytes)
    degrees, dropped = legal_degrees(problem.space, case)
    if not degrees:
        reasons = "; ".join(f"{rule} ({count} dropped)" for rule, count in dropped.most_common())
        raise ValueError(f"no layout of {model.name} on {cluster.world_size} devices: {reasons}")
    found, complete = run_parts(problem, degrees[shard::shards], client, directory, progress)
    if complete and not found.feasible and shards == 1:
        raise ValueError(_too_large(problem, found))
    table, front = (_finished(case, problem.parameters, pd.DataFrame(part)) for part in (found.table, found.front))
    rules = [(rule, count, "layouts") for rule, count in sorted(dropped.items())]
    rules.append(("must fit in memory", found.evaluated - found.feasible, "plans"))
    rules = pd.DataFrame(rules, columns=["rule", "count", "of"])
    seconds = time.perf_counter() - start
    return SearchResult(table, front, found.evaluated, found.feasible, seconds, rules, complete)


def _finished(case: Case, parameters: Parameters, table: pd.DataFrame) -> pd.DataFrame:
    """With the text of each plan, its interval, MFU, tokens per second and energy."""
    if not len(table):
        return table
    tokens = case.global_batch * case.sequence
    flops = 3 * case.model.forward_flops(case.global_batch, case.sequence)
    peak = case.cluster.world_size * case.cluster.device.peak(case.dtype)
    table = table.drop(columns="place").reset_index(drop=True)
    case = replace(case, plan=Plans.from_table(table[list(SEARCHED)]))
    steps = Steps.of(case)
    factor, place = np.exp(log_width(steps, step_time(steps, parameters), parameters)), table.columns.get_loc("step_s")
    table.insert(place + 1, "low_s", table["step_s"] / factor)
    table.insert(place + 2, "high_s", table["step_s"] * factor)
    if case.cluster.device.tdp_w > 0:
        table["energy_j"] = energy_j(case, parameters)
    table.insert(0, "plan", [str(plan_of(row)) for row in table.to_dict("records")])
    return table.assign(mfu=flops / table["step_s"] / peak, tokens_per_s=tokens / table["step_s"])


def _too_large(problem: SearchProblem, found: Found) -> str:
    model, device = problem.case.model.name, problem.case.cluster.device.name
    if not found.evaluated:
        return f"no plan of {model}: the space names no micro-batch, schedule or ZeRO stage that divides"
    least, room = (f"{size / 1e9:.1f} GB" for size in (found.least_bytes, problem.room_bytes))
    return (
        f"no plan of {model} fits: the least needs {least} per device, {device} has {room} ({found.evaluated:,} plans)"
    )
