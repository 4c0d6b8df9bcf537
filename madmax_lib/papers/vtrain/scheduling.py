"""Does a cluster that knows the best plan of a job for every number of GPUs serve more jobs in time?

After the second case study of vTrain [Bang et al., MICRO 2024]: 1,024 GPUs, an elastic scheduler that gives every job
the fewest GPUs that meet its deadline and the rest where it speeds up most, as ElasticFlow [Gu et al., ASPLOS 2023].
Baselines know the throughputs of one plan per model, scaled by data parallelism; the other scheduler knows the fastest
plan. The paper's jobs and baseline plans are not public: ours are generated from a seed, so only the trend compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from madmax_lib.catalog import device, model
from madmax_lib.papers.origin import with_origin
from madmax_lib.papers.vtrain.studies import plan_grid, published, steps

__all__ = ["Job", "Outcome", "changes", "job_trace", "schedule", "study", "throughputs"]

MODELS = ("megatron-1.7b", "megatron-3.6b", "megatron-7.5b", "megatron-18b", "megatron-39b")
SIZES = (8, 16, 32, 64, 128, 256, 512)
_BATCH = 512
_HOUR_S = 3600.0
_SLACK_S = 1e-3  # rounding of times that add up


@dataclass(frozen=True)
class Job:
    """Training of a model for a number of steps, asked for at arrival_s; deadline_s is a time, too."""

    model: str
    arrival_s: float
    steps: float
    deadline_s: float


@dataclass(frozen=True)
class Outcome:
    """end_s: of each job (n,), NaN for those that were refused. met: share of all jobs that ended in time."""

    end_s: np.ndarray
    met: float
    mean_completion_s: float
    makespan_s: float


def throughputs(models: Sequence[str] = MODELS, sizes: Sequence[int] = SIZES) -> pd.DataFrame:
    """Steps per second of each model on each number of A100-80, where a plan fits.

    Columns: model, gpus; best: of all plans; heuristic: tp 8, the GPUs of a node, and the fewest stages that fit
    [arXiv 2104.04473]; scaled: tp and pp that are fastest on the smallest number of GPUs. More GPUs are more dp there.
    """
    rows, room = [], device("a100-80").memory_bytes
    for name in models:
        shape, heuristic, scaled = model(name), (), ()
        for gpus in sizes:
            found = steps(shape, plan_grid(shape, gpus, _BATCH), global_batch=_BATCH)
            found = found[found["memory_bytes"] <= room]
            if found.empty:
                continue
            heuristic = heuristic or (8, found.loc[found["tp"] == 8, "pp"].min())
            scaled = scaled or tuple(found.loc[found["step_s"].idxmin(), ["tp", "pp"]])
            rates = [1 / found.loc[(found[["tp", "pp"]] == plan).all(axis=1), "step_s"].min()
                     for plan in (heuristic, scaled)]  # fmt: skip
            rows.append((name, gpus, *rates, 1 / found["step_s"].min()))
    table = pd.DataFrame(rows, columns=["model", "gpus", "heuristic", "scaled", "best"])
    return with_origin(table, "models", rules="vTrain corrected, recompute on all stages")


def job_trace(rates: pd.DataFrame, count: int, seed: int = 0) -> list[Job]:
    """Jobs that arrive at random within a day, each 1 to 12 h long on 64 to 256 GPUs by the heuristic plan.

    Deadlines leave 0.8 to 2 times that.
    """
    random = np.random.default_rng(seed)
    known = rates.dropna().set_index(["model", "gpus"])["heuristic"]
    names, jobs = rates["model"].unique(), []
    for arrival_s in np.sort(random.uniform(0, 24 * _HOUR_S, count)):
        name, gpus = random.choice(names), int(random.choice([64, 128, 256]))
        length_s = np.exp(random.uniform(0, np.log(12))) * _HOUR_S
        room_s = length_s * random.uniform(0.8, 2.0)
        jobs.append(Job(str(name), float(arrival_s), length_s * known[name, gpus], float(arrival_s + room_s)))
    return jobs


def schedule(
    jobs: Sequence[Job], rates: pd.DataFrame, column: str, *, gpus: int = 1024, deadlines: bool = True
) -> Outcome:
    """Runs the jobs (in order of arrival) on a cluster that re-divides its GPUs whenever a job comes or ends.

    rates: of `throughputs`; column: the one that the scheduler knows and jobs run by. deadlines: a job is refused when
    its deadline and those of the jobs admitted before cannot all be met; without, all run, first come first served.
    Raises ValueError for a job whose model fits on no number of GPUs of the cluster.
    """
    tables = {name: part.dropna(subset=[column]).set_index("gpus")[column].to_dict()
              for name, part in rates.groupby("model")}  # fmt: skip
    if missing := {job.model for job in jobs if min(tables.get(job.model, {}), default=np.inf) > gpus}:
        raise ValueError(f"{sorted(missing)[0]} has no throughput on {gpus} GPUs or fewer")
    left, end_s, active = [job.steps for job in jobs], np.full(len(jobs), np.nan), []
    now_s, coming = 0.0, 0
    while coming < len(jobs) or active:
        shares = _divide(jobs, active, left, tables, now_s, gpus, deadlines) or {}
        speed = {i: tables[jobs[i].model].get(shares.get(i, 0), 0.0) for i in active}
        ends = {i: now_s + left[i] / speed[i] for i in active if speed[i] > 0}
        first = min(ends, key=ends.get, default=None)
        arrival_s = jobs[coming].arrival_s if coming < len(jobs) else np.inf
        then_s = min(arrival_s, ends[first] if first is not None else np.inf)
        for i in active:
            left[i] = max(left[i] - speed[i] * (then_s - now_s), 0.0)
        now_s = then_s
        if arrival_s <= then_s:
            if not deadlines or _divide(jobs, [*active, coming], left, tables, now_s, gpus, True) is not None:
                active.append(coming)
            coming += 1
        else:
            active.remove(first)
            end_s[first] = now_s
    deadline_s, arrival_s = (np.array([getattr(job, name) for job in jobs]) for name in ("deadline_s", "arrival_s"))
    met = float(np.mean(end_s <= deadline_s + _SLACK_S))
    return Outcome(end_s, met, float(np.nanmean(end_s - arrival_s)), float(np.nanmax(end_s)))


def study(
    counts: Sequence[int] = (64, 128), seeds: Sequence[int] = range(5), *, baseline: str = "heuristic"
) -> pd.DataFrame:
    """Best plans over the baseline's on generated traces, one row per trace.

    Columns: jobs, seed, met_baseline, met_best, deadline_ratio (best over baseline), completion_change and
    makespan_change (relative; without deadlines, all jobs run). baseline: "heuristic" or "scaled", see `throughputs`.
    """
    rates, rows = throughputs(), []
    for count, seed in product(counts, seeds):
        jobs = job_trace(rates, count, seed)
        base, best = (schedule(jobs, rates, column) for column in (baseline, "best"))
        free_base, free_best = (schedule(jobs, rates, column, deadlines=False) for column in (baseline, "best"))
        rows.append((count, seed, base.met, best.met, best.met / base.met,
                     free_best.mean_completion_s / free_base.mean_completion_s - 1,
                     free_best.makespan_s / free_base.makespan_s - 1))  # fmt: skip
    columns = ["jobs", "seed", "met_baseline", "met_best", "deadline_ratio", "completion_change", "makespan_change"]
    return with_origin(pd.DataFrame(rows, columns=columns), "models", "vtrain/published",
                       rules="own job traces, vTrain corrected")  # fmt: skip


def changes(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `study` one change at a time, beside the published one: what, seed, change and published (relative).

    The paper gives completion and makespan without the number of jobs; here they are those of the larger count.
    """
    parts = []
    for count, rows in table.groupby("jobs"):
        found = {f"deadlines met, {count} jobs": (rows["deadline_ratio"] - 1, f"scheduling_deadline_{count}", 1.0)}
        if count == table["jobs"].max():
            found["mean completion time"] = rows["completion_change"], "scheduling_jct", 0.0
            found["makespan"] = rows["makespan_change"], "scheduling_makespan", 0.0
        for what, (change, key, base) in found.items():
            told = published(key) - base
            parts.append(pd.DataFrame({"what": what, "seed": rows["seed"], "change": change, "published": told}))
    result = pd.concat(parts, ignore_index=True)
    result.attrs.update(table.attrs)
    return result


def _divide(
    jobs: Sequence[Job], active: Sequence[int], left: Sequence[float], tables: dict, now_s: float, gpus: int,
    deadlines: bool,
) -> dict[int, int] | None:  # fmt: skip
    """GPUs of each job: the fewest that it needs, then the rest; None if deadlines cannot all be met."""
    shares: dict[int, int] = {}
    free = gpus
    for i in active:
        table = tables[jobs[i].model]
        room_s = jobs[i].deadline_s - now_s + _SLACK_S
        enough = [size for size, rate in table.items() if not deadlines or left[i] / rate <= room_s]
        if not enough or enough[0] > free:
            if deadlines:
                return None
            continue
        shares[i] = enough[0]
        free -= enough[0]
    return _spread(jobs, shares, tables, free)


def _spread(jobs: Sequence[Job], shares: dict[int, int], tables: dict, free: int) -> dict[int, int]:
    """Gives free GPUs to the job whose speed grows most per GPU, relative to its speed, again and again."""
    while True:
        best, gain = None, 0.0
        for i, size in shares.items():
            table = tables[jobs[i].model]
            if 2 * size in table and size <= free:
                more = (table[2 * size] / table[size] - 1) / size
                best, gain = (i, more) if more > gain else (best, gain)
        if best is None:
            return shares
        free -= shares[best]
        shares[best] *= 2
