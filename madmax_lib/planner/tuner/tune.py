"""Trials of a few plans, one after another or side by side on workers: which one is the
fastest in truth.

`tune` asks a `Tuner` for plans, has them measured and tells it. A trial is any
callable, or a run of `mm.launch`.
"""

import subprocess
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from madmax_lib.base import require_int, require_type, short_repr
from madmax_lib.base.executors import first_ended, submitter, workers_of
from madmax_lib.base.progress import bar
from madmax_lib.catalog import Cluster, Model, Software
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.layouts import runnable
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space
from madmax_lib.planner.tuner.jobs import Jobs, WaitingError
from madmax_lib.planner.tuner.tuner import Tuner
from madmax_lib.runs import RunSpec, gpu_count, launch as start
from madmax_lib.runs.read import read_json
from madmax_lib.simulator import Parameters

__all__ = ["Tuner", "tune"]

# of a trial; other exceptions are mistakes
_FAILURES = (RuntimeError, OSError, subprocess.SubprocessError)
_TOP = 500  # plans of a search of which those are taken that a run can have


def tune(
    model: Model | str,
    cluster: Cluster | str,
    *,
    global_batch: int,
    launch: Callable[[Plan], float | None] | RunSpec,
    trials: int = 10,
    sequence: int | None = None,
    dtype: str = "bf16",
    plans: Iterable[Plan | str] | pd.DataFrame | None = None,
    software: str | Software | None = None,
    parameters: Parameters | None = None,
    seed: int = 0,
    state: str | Path | None = None,
    directory: str | Path | None = None,
    client=None,
    progress: bool = True,
) -> Tuner:
    """Measure plans until there are so many trials, and return the `Tuner`: its best,
    trials and table.

    launch: takes a Plan and returns the seconds of a step, or None if it fails; a
    RuntimeError, MemoryError or OSError counts as a failure too. Or the `RunSpec` of a
    run, whose strategy becomes each of the plans; the runs are kept in directory, and a
    plan takes the median of its steps; the plans, if none are given, are the best that
    can run. Or `Jobs` for torchrun, Slurm or Kubernetes.
    trials: with those of an earlier call that the file `state` keeps. client: any
    executor, as of `mm.search`, whose workers try one plan each at a time. The other
    arguments are those of `Tuner`. Interrupted, it returns what was learnt so far.
    Raises ValueError for wrong arguments. See also: mm.search, mm.launch, mm.planner.Tuner.

    >>> seconds = {"dp8": 0.4, "dp8.z1": 0.3, "dp8.z2": None, "dp8.z3": 0.5}
    >>> case = {"global_batch": 64, "plans": list(seconds), "trials": 4, "progress": False}
    >>> str(tune("gpt2-large", "dgx-a100", launch=lambda plan: seconds[str(plan)], **case).best)
    'dp8.z1'
    """
    trials = require_int("trials", trials, 1)
    case = {
        "global_batch": global_batch,
        "sequence": sequence,
        "dtype": dtype,
        "software": software,
        "parameters": parameters,
    }
    if isinstance(launch, RunSpec):
        if not str(require_type("directory", directory, str | Path)):
            raise ValueError("directory='' names no folder for the runs")
        launch = _Run(launch, Path(directory))
        plans = launch.plans(model, cluster, case) if plans is None else plans
    elif isinstance(launch, Jobs):
        step = Case.of_step(
            model, cluster, Plan(), global_batch, sequence, dtype, software
        )
        launch = replace(launch, case=step)
    elif not callable(launch):
        raise ValueError(
            f"launch={short_repr(launch)} must be a callable of a Plan, or a RunSpec"
        )
    tuner = Tuner(model, cluster, plans=plans, seed=seed, state=state, **case)
    todo = max(min(trials - len(tuner.trials), tuner.left), 0)
    if client is None:
        results = (_trial(launch, tuner.ask()) for _ in range(todo))
    else:
        results = _on_workers(tuner, launch, todo, client)
    with bar(total=todo, desc="tuning", unit="trial", show=progress) as done:
        try:
            for plan, step_s, reason in results:
                tuner.tell(plan, step_s, reason)
                done.update()
        except KeyboardInterrupt:
            pass
        except WaitingError as waiting:
            warnings.warn(str(waiting), stacklevel=2)
    tried = tuner.trials
    if len(tried) and tried["step_s"].isna().all():
        reason = tried["reason"].iloc[-1] or "no seconds"
        warnings.warn(f"no trial ran, the last: {reason}", stacklevel=2)
    return tuner


@dataclass(frozen=True)
class _Run:
    """A trial that is a run."""

    spec: RunSpec
    directory: Path

    def __call__(self, plan):
        # a strategy without mb leaves it open
        text = str(plan) if plan.micro_batch > 1 else f"{plan}.mb1"
        spec = replace(self.spec, strategy=text, ranks=None)
        directory = start(spec, self.directory / spec.name, check=False)
        summary = read_json(directory / "summary.json")
        return summary["step_s"]["median"] if summary["status"] == "completed" else None

    def plans(self, model, cluster, case):
        """The best plans of a search that can run."""
        space = replace(
            Space.quick(),
            hybrid=(),
            overlap_gather=(False,),
            # patches of an image are not split over ranks
            sequence_parallel=(not self.spec.shapes.image,),
        )
        gpus = gpu_count() if self.spec.device != "cpu" else 0
        spec = replace(self.spec, ranks=None)
        table = search(
            model, cluster, top=_TOP, space=space, progress=False, **case
        ).table
        return [text for text in table["plan"] if runnable(spec, text, gpus)]


class _Trial(NamedTuple):
    plan: Plan
    step_s: float | None = None  # None if it failed
    reason: str = ""  # of the failure


def _trial(launch, plan):
    """Trial of a plan, with the reason of a failure."""
    try:
        return _Trial(plan, launch(plan))
    except MemoryError as error:
        return _Trial(plan, reason=f"out of memory: {error}")
    except _FAILURES as error:
        return _Trial(plan, reason=str(error) or type(error).__name__)


def _on_workers(tuner, launch, todo, client):
    """Trials, as many at once as there are workers; the next plan is asked for when the
    result of one is in.
    """
    submit = submitter(client)
    workers = workers_of(client)
    running = set()
    try:
        while todo or running:
            while todo and len(running) < workers:
                running.add(submit(_trial, launch, tuner.ask()))
                todo -= 1
            for future in first_ended(running):
                running.remove(future)
                yield future.result()
    finally:
        for future in running:
            future.cancel()
