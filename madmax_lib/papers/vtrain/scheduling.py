"""Does a cluster that knows the best plan of a job for every number of GPUs serve more jobs in time?

After the second case study of vTrain [Bang et al., MICRO 2024]: 1,024 GPUs, an elastic scheduler that gives every job
the fewest GPUs that meet its deadline and the rest where it speeds up most, as ElasticFlow [Gu et al., ASPLOS 2023].
The paper's jobs and baseline plans are not public: ours are generated from a seed, so only the trend compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
import pandas as pd

from madmax_lib.catalog import device, model
from madmax_lib.papers.origin import with_origin
from madmax_lib.papers.vtrain.studies import plan_grid, published, steps

__all__ = ["scheduling_study", "throughputs"]

MODELS = ("megatron-1.7b", "megatron-3.6b", "megatron-7.5b", "megatron-18b", "megatron-39b")
SIZES = (8, 16, 32, 64, 128, 256, 512)
_BATCH, _HOUR_S = 512, 3600.0
_SLACK_S = 1e-3  # rounding of times that add up


@dataclass(eq=False)
class _Job:
    number: int
    arrival_s: float
    left: float  # steps
    deadline_s: float
    speeds: dict[int, float]  # steps per second by number of GPUs, ascending
    gpus: int = 0

    def end_s(self, now_s: float) -> float:
        return now_s + self.left / self.speeds[self.gpus] if self.gpus else inf


def throughputs(models: Sequence[str] = MODELS, sizes: Sequence[int] = SIZES) -> pd.DataFrame:
    """Steps per second of each model on each number of A100-80, where a plan fits.

    Columns: model, gpus; best: of all plans; heuristic: tp 8, the GPUs of a node, and the fewest stages that fit
    [arXiv 2104.04473]; scaled: tp and pp that are fastest on the smallest number of GPUs. More GPUs are more dp there.
    """
    rows, capacity_bytes = [], device("a100-80").memory_bytes
    for name in models:
        heuristic = scaled = None
        for gpus in sizes:
            plans = steps(model(name), plan_grid(model(name), gpus, _BATCH), global_batch=_BATCH)
            fastest_s = plans[plans["memory_bytes"] <= capacity_bytes].groupby(["tp", "pp"])["step_s"].min()
            if len(fastest_s):
                heuristic = heuristic or (8, fastest_s[8].index.min())
                scaled = scaled or fastest_s.idxmin()
                chosen_s = [fastest_s.get(heuristic, np.nan), fastest_s.get(scaled, np.nan), fastest_s.min()]
                rows.append((name, gpus, *(1 / step_s for step_s in chosen_s)))
    return pd.DataFrame(rows, columns=["model", "gpus", "heuristic", "scaled", "best"])


def scheduling_study(
    rates: pd.DataFrame,
    counts: Sequence[int] = (64, 128),
    seeds: Sequence[int] = range(5),
    *,
    baseline: str = "heuristic",
) -> pd.DataFrame:
    """What best plans change over the baseline's on generated traces: what, seed, change, published (both relative).

    rates: of `throughputs`; baseline: its column "heuristic" or "scaled". The paper gives completion and makespan
    without the number of jobs; here they are those of the last count, without deadlines, so that all jobs run.
    """
    theirs = {f"deadlines met, {count} jobs": published(f"scheduling_deadline_{count}") - 1 for count in counts}
    theirs |= {"mean completion time": published("scheduling_jct"), "makespan": published("scheduling_makespan")}
    changes = {seed: _changes(rates, counts, seed, (baseline, "best")) for seed in seeds}
    rows = [(what, seed, changes[seed][what], theirs[what]) for what, seed in product(theirs, seeds)]
    table = pd.DataFrame(rows, columns=["what", "seed", "change", "published"])
    return with_origin(table, "models", "vtrain/published", rules="own job traces, vTrain corrected")


def _changes(rates: pd.DataFrame, counts: Sequence[int], seed: int, columns: tuple[str, str]) -> dict[str, float]:
    """Relative change of each measure from the first to the second column of rates, on the traces of a seed."""
    values = {}
    for count in counts:
        jobs = _job_trace(rates, count, seed)
        ends_s = [_schedule(jobs, rates, column) for column in columns]
        values[f"deadlines met, {count} jobs"] = [(ends <= jobs["deadline_s"] + _SLACK_S).mean() for ends in ends_s]
    ends_s = [_schedule(jobs, rates, column, deadlines=False) for column in columns]
    values["mean completion time"] = [(ends - jobs["arrival_s"]).mean() for ends in ends_s]
    values["makespan"] = [ends.max() for ends in ends_s]
    return {what: best / base - 1 for what, (base, best) in values.items()}


def _job_trace(rates: pd.DataFrame, count: int, seed: int) -> pd.DataFrame:
    """Jobs in order of arrival within a day: model, arrival_s, steps, deadline_s.

    Each takes 1 to 12 h on 64 to 256 GPUs by the heuristic plan, and its deadline leaves 0.8 to 2 times that.
    """
    random = np.random.default_rng(seed)
    speeds = rates.dropna().set_index(["model", "gpus"])["heuristic"]
    names, rows = rates["model"].unique(), []
    for arrival_s in np.sort(random.uniform(0, 24 * _HOUR_S, count)):
        name, gpus = random.choice(names), random.choice([64, 128, 256])
        length_s = np.exp(random.uniform(0, np.log(12))) * _HOUR_S
        rows.append((name, arrival_s, length_s * speeds[name, gpus], arrival_s + length_s * random.uniform(0.8, 2.0)))
    return pd.DataFrame(rows, columns=["model", "arrival_s", "steps", "deadline_s"])


def _schedule(
    jobs: pd.DataFrame, rates: pd.DataFrame, column: str, *, gpus: int = 1024, deadlines: bool = True
) -> np.ndarray:
    """End of each job in seconds (n,), NaN if refused; the cluster re-divides its GPUs whenever a job comes or ends.

    column: of `rates`, the one that the scheduler knows and jobs run by. deadlines: a job is refused when its deadline
    and those of the jobs admitted before cannot all be met; without, all run, first come first served. Raises
    ValueError for a job whose model fits on no number of GPUs of the cluster.
    """
    usable = rates[rates["gpus"] <= gpus].dropna(subset=[column])
    speeds = {name: part.set_index("gpus")[column].to_dict() for name, part in usable.groupby("model")}
    if missing := set(jobs["model"]) - set(speeds):
        raise ValueError(f"{min(missing)} has no throughput on {gpus} GPUs or fewer")
    end_s, now_s, running = np.full(len(jobs), np.nan), 0.0, []
    coming = [
        _Job(row.Index, row.arrival_s, row.steps, row.deadline_s if deadlines else inf, speeds[row.model])
        for row in jobs.itertuples()
    ]
    while coming or running:
        _divide(running, now_s, gpus)
        first_s, first = min(((job.end_s(now_s), job.number) for job in running), default=(inf, None))
        then_s = min(coming[0].arrival_s if coming else inf, first_s)
        for job in running:
            job.left = max(job.left - job.speeds.get(job.gpus, 0.0) * (then_s - now_s), 0.0)
        now_s = then_s
        if not coming or coming[0].arrival_s > now_s:
            end_s[first] = now_s
            running = [job for job in running if job.number != first]
        elif _divide([*running, new := coming.pop(0)], now_s, gpus):
            running.append(new)
    return end_s


def _divide(running: Sequence[_Job], now_s: float, free: int) -> bool:
    """Gives each job the fewest GPUs that it needs, then the rest; False if deadlines cannot all be met.

    Free GPUs go to the job whose speed grows most per GPU, relative to its speed, again and again.
    """
    for job in running:
        rest_s = job.deadline_s - now_s + _SLACK_S
        fewest = next((size for size, speed in job.speeds.items() if job.left / speed <= rest_s), inf)
        if fewest > free and job.deadline_s < inf:
            return False
        job.gpus = fewest if fewest <= free else 0
        free -= job.gpus

    def gain(job: _Job) -> float:
        more = job.speeds.get(2 * job.gpus, 0.0) if 0 < job.gpus <= free else 0.0
        return (more / job.speeds[job.gpus] - 1) / job.gpus if more else 0.0

    while running and gain(best := max(running, key=gain)) > 0:
        free -= best.gpus
        best.gpus *= 2
    return True
