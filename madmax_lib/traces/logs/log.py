"""A log as tables of seconds: phases of steps of processes, and the pace of the job.

Only matrices are kept, a row per process and a column per step, in float32: the lines of
a day would not fit.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import with_origin

FIELDS = ("rank", "host", "group", "file")
_LEAST_KEPT = 0.5  # of the steps; where more are left out, all are kept


@dataclass(frozen=True)
class Phase:
    """A part of the step, on all processes.

    seconds: (processes, steps), NaN where a process has none. steps: (steps,) their
        numbers. group: (processes,) which are compared with one another; -1 not at all.
    parent: the phase that it is inside of, empty for none. waits: whether it ends for
        all at once, as a collective does, so that the shortest is the late one's.
    """

    seconds: np.ndarray = field(repr=False)
    steps: np.ndarray = field(repr=False)
    group: np.ndarray = field(repr=False)
    parent: str = ""
    waits: bool = False


@dataclass(frozen=True)
class Log:
    """What a log says of the steps of a job.

    >>> read_log("structured_logs").phases["fwd_bwd"].seconds      # doctest: +SKIP
    """

    source: str  # the program that wrote it
    units: pd.DataFrame  # a row per process: rank, host, group, file
    steps: np.ndarray  # (steps,) numbers of steps, ascending
    pace_s: np.ndarray  # (steps,) from end to end of steps, of the job; NaN unknown
    tags: np.ndarray  # (steps,) what makes a step special, such as "gc"; "" for none
    phases: dict[str, Phase]
    # (processes, steps) the pace of each, where the log has their clocks
    own_pace_s: np.ndarray | None = None
    # whether the processes take every step together, so that the others wait for one
    together: bool = False
    sizes: pd.DataFrame | None = None  # of collectives: bus bandwidth by size
    notes: tuple[str, ...] = ()  # what is missing, damaged or not visible

    @property
    def counted(self) -> np.ndarray:
        """(steps,) whether a step counts: no tag, and not the first of a start."""
        plain = self.tags == ""
        enough = plain.sum() > (1 - _LEAST_KEPT) * len(plain)
        return plain if enough else self.tags != "start"

    @property
    def step_s(self) -> np.ndarray:
        """(n,) times of the steps that count and have one."""
        times_s = self.pace_s[self.counted]
        return times_s[np.isfinite(times_s)]

    @property
    def table(self) -> pd.DataFrame:
        """All of it as rows: rank, host, file, phase, step, duration_s, tags."""
        parts = []
        tags = dict(zip(self.steps.tolist(), self.tags, strict=True))
        for name, phase in self.phases.items():
            unit, step = np.nonzero(np.isfinite(phase.seconds))
            part = self.units[["rank", "host", "file"]].iloc[unit]
            numbers = phase.steps[step]
            part = part.assign(
                phase=name, step=numbers, duration_s=phase.seconds[unit, step]
            )
            parts.append(part.assign(tags=[tags.get(n, "") for n in numbers.tolist()]))
        return with_origin(pd.concat(parts, ignore_index=True), self.origin)

    @property
    def origin(self) -> dict:
        """The files, as a provenance of tables has them."""
        files = dict.fromkeys(self.units["file"])
        return {"files": {name: {"name": Path(name).name} for name in files}}


def step_table(log: Log) -> pd.DataFrame:
    """Times of phases over the steps that count: phase (step: the pace of the job),
    ranks, steps, median_s, p10_s, p90_s, slowest_rank (by its median), slowest_s.

    Of collectives their bus bandwidth by size, as `bus_bandwidth` has it.
    """
    if log.sizes is not None:
        return with_origin(log.sizes, log.origin)
    rows = []
    if len(times_s := log.step_s):
        low, middle, high = np.quantile(times_s, [0.1, 0.5, 0.9])
        row = {"phase": "step", "ranks": len(log.units), "steps": len(times_s)}
        rows.append(row | {"median_s": middle, "p10_s": low, "p90_s": high})
    for name, phase in log.phases.items():
        values = phase.seconds[:, numbered_steps(log, phase)]
        some = np.isfinite(values).any(axis=1)
        if name == "step" or not some.any():
            continue
        low, middle, high = np.nanquantile(values[some], [0.1, 0.5, 0.9])
        medians = np.nanmedian(values[some], axis=1)
        row = {"phase": name, "ranks": int(some.sum()), "steps": values.shape[1]}
        row |= {"median_s": middle, "p10_s": low, "p90_s": high}
        row["slowest_rank"] = log.units["rank"].to_numpy()[some][medians.argmax()]
        rows.append(row | {"slowest_s": medians.max()})
    return with_origin(pd.DataFrame(rows), log.origin)


def middle_of(values: np.ndarray) -> np.ndarray:
    """(steps,) median over processes (processes, steps), NaN where none has a value."""
    result = np.full(values.shape[1], np.nan)
    some = np.isfinite(values).any(axis=0)
    result[some] = np.nanmedian(values[:, some], axis=0)
    return result


def numbered_steps(log: Log, phase: Phase) -> np.ndarray:
    """(n,) which columns of a phase are of steps that count."""
    if phase.steps is log.steps:
        return log.counted
    # calls of a collective have numbers of their own; the first sets links up
    return phase.steps > phase.steps.min(initial=0)
