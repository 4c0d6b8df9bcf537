"""A log as tables of seconds: phases of steps of processes, and the pace of the job.

Only matrices are kept, a row per process and a column per step, in float32: the lines of
a day would not fit.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

PACE = ("", "pace")  # column of a process's frame: from end to end of its steps


@dataclass(frozen=True)
class Log:
    """Steps of a job, as a log has them.

    >>> read_log("structured_logs").phases["training", "fwd_bwd"]  # doctest: +SKIP
    """

    units: pd.DataFrame  # a row per process: rank, host, file
    steps: np.ndarray  # (steps,) their numbers, ascending
    tags: np.ndarray  # (steps,) what makes a step special, such as "gc"; "" for none
    # (processes, steps) s by group of processes that are alike, and name; NaN elsewhere
    phases: dict[tuple[str, str], np.ndarray]
    own_pace_s: np.ndarray  # (processes, steps) from end to end of steps, or as logged
    source: str = ""  # the program that wrote it
    # whether the processes take every step together, so that the others wait for one
    together: bool = False
    # whether a phase ends for all at once, so that the late one's is the shortest
    waits: bool = False
    sizes: pd.DataFrame | None = None  # of collectives: bus bandwidth by size
    notes: tuple[str, ...] = ()  # what is missing, damaged or not visible

    @property
    def pace_s(self) -> np.ndarray:
        """(steps,) the job's pace; NaN where nothing is known of it."""
        return middle_of(self.own_pace_s)

    @property
    def counted(self) -> np.ndarray:
        """(steps,) whether a step counts: no tag, and not the first of a start."""
        plain = self.tags == ""
        return plain if plain.any() else ~plain

    @property
    def step_s(self) -> np.ndarray:
        """(n,) pace in the steps that count and have one."""
        return self.pace_s[self.counted & np.isfinite(self.pace_s)]


def assembled(table: pd.DataFrame, units: pd.DataFrame, **more) -> Log:
    """A log of a table: a row per process and step, a column per (group, phase) in s,
    and PACE.

    units: as in the log, by the first level of the rows. more: fields of the log, tags
    by step.
    """
    table = table.astype("float32")
    phases = {key: table[key].unstack().to_numpy() for key in table}
    steps = table.index.unique(1).sort_values().to_numpy()
    tags = more.pop("tags", {})
    named = np.array([tags.get(step, "") for step in steps.tolist()], dtype=object)
    pace_s = phases.pop(PACE, np.full((1, len(steps)), np.nan))
    return Log(units, steps, named, phases, pace_s, **more)


def step_table(log: Log) -> pd.DataFrame:
    """Times over ranks and steps that count: phase (pace: of the job), count, p10_s,
    median_s, p90_s; of collectives bus bandwidth by size.
    """
    if log.sizes is not None:
        return log.sizes
    rows = []
    for (_, name), seconds in ({PACE: log.pace_s[None]} | log.phases).items():
        times_s = pd.Series(seconds[:, log.counted].ravel()).dropna()
        rows.append([name, len(times_s), *times_s.quantile([0.1, 0.5, 0.9])])
    return pd.DataFrame(rows, columns=["phase", "count", "p10_s", "median_s", "p90_s"])


def middle_of(values: np.ndarray) -> np.ndarray:
    """(steps,) median over processes (processes, steps), NaN where none has a value."""
    return pd.DataFrame(values).median().to_numpy()
