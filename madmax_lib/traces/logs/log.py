"""A log as tables of seconds: phases of steps of processes, and the pace of the job.

Only matrices are kept, a row per process and a column per step, in float32: the lines of
a day would not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

_BARE = ("phase", "count")  # columns without a unit
PACE = ("", "pace")  # column of a process's frame: from end to end of its steps


@dataclass(frozen=True)
class Log:
    """What a log says of the steps of a job.

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


def assembled(
    units: Sequence[tuple], frames: Sequence[pd.DataFrame], tags: dict[int, str], **more
) -> Log:
    """A log of a frame per process.

    units: rank, host and file of each. frames: a row per step, a column per (group,
    phase) in s, and PACE. tags: by step. more: fields of the log.
    """
    steps = np.unique(np.concatenate([frame.index for frame in frames]))
    aligned = [frame.reindex(steps) for frame in frames]
    missing = np.full(len(steps), np.nan)
    phases = {
        key: np.array([one.get(key, missing) for one in aligned], np.float32)
        for key in dict.fromkeys([PACE, *(key for frame in frames for key in frame)])
    }
    table = pd.DataFrame(units, columns=["rank", "host", "file"])
    named = np.array([tags.get(step, "") for step in steps.tolist()], dtype=object)
    pace_s = phases.pop(PACE)
    return Log(table, steps, named, phases, pace_s, **more)


def step_table(log: Log) -> pd.DataFrame:
    """Times over ranks and steps that count: phase (pace: of the job), count, mean_s,
    std_s, min_s, p25_s, median_s, p75_s, max_s; of collectives bandwidth by size.
    """
    if log.sizes is not None:
        return log.sizes
    tables = {PACE: log.pace_s[None]} | log.phases
    times = {
        name: pd.Series(part[:, log.counted].ravel()).describe()
        for (_, name), part in tables.items()
    }
    table = pd.DataFrame(times).T.rename_axis("phase").reset_index()
    quartiles = {"25%": "p25", "50%": "median", "75%": "p75"}
    table = table.rename(columns=quartiles)
    return table.rename(columns=lambda name: name + "_s" * (name not in _BARE))


def middle_of(values: np.ndarray) -> np.ndarray:
    """(steps,) median over processes (processes, steps), NaN where none has a value."""
    result = np.full(values.shape[1], np.nan)
    some = np.isfinite(values).any(axis=0)
    result[some] = np.nanmedian(values[:, some], axis=0)
    return result
