"""Which traces of a folder belong together? Those of one job, and of one of the cycles
that its profiler recorded.

A schedule with repeat=2 leaves two files per rank, of the same process and one after
the other: two cycles. Files of another world size, device, set of operators or process,
or recorded at another time, are of another job.
"""

import warnings
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from madmax_lib.base.units import format_s
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.read.events import TraceWarning

__all__ = ["one_job"]

_ALIKE = (
    0.5  # of the operators of the one with fewer: less in common is another program
)
_FEW = 10  # operators, of which nothing follows
_APART_NS = (
    10 * 10**9
)  # between traces of one cycle: more than clocks of one cluster differ


class _File(NamedTuple):
    """What tells the job of a trace; 0 or empty where it is not known."""

    path: Path
    rank: int
    world_size: int
    device: str
    process: str
    operators: frozenset
    steps: frozenset
    start_ns: int
    end_ns: int


def one_job(
    timelines: dict[Path, Timeline], cycle: int | None = None, *, listed: bool = False
) -> dict[Path, Timeline]:
    """One trace per rank: those of the newest cycle, or of one by its number from 0,
    with a TraceWarning that says so.

    Raises ValueError where there are several jobs, naming them, and for a cycle that is
    not there. listed: the user named each file, so that times and steps that differ are
    a warning.
    """
    files = [_file(path, timeline) for path, timeline in timelines.items()]
    of_rank = defaultdict(list)
    for file in files:
        if reason := _apart(files[0], file) or next(
            filter(None, (_apart(file, o) for o in of_rank[file.rank])), ""
        ):
            raise ValueError(
                f"traces of more than one job, {reason}; give the files of one of them"
            )
        of_rank[file.rank].append(file)
    cycles = max(
        (sorted(each, key=lambda f: f.start_ns) for each in of_rank.values()),
        key=len,
        default=[],
    )
    if cycle is not None and not 0 <= cycle < len(cycles):
        raise ValueError(
            f"no cycle {cycle}; found {', '.join(map(str, range(len(cycles))))}"
        )
    if not cycles:
        return {}
    at = cycles[-1 if cycle is None else cycle]
    chosen = [
        min(each, key=lambda f: abs(f.start_ns - at.start_ns))
        for each in of_rank.values()
    ]
    if len(cycles) > 1 and cycle is None:
        text = (
            f"{len(cycles)} cycles are recorded; read is the last, number "
            f"{len(cycles) - 1} from 0"
        )
        warnings.warn(
            f"{at.path.parent}: {text}; iteration= takes another",
            TraceWarning,
            stacklevel=4,
        )
    for file in chosen:
        if reason := _other_moment(at, file):
            text = f"{at.path} and {file.path} {reason}"
            if not listed:
                raise ValueError(
                    f"{text}: not one job; give a list of the files to read them "
                    "together"
                )
            warnings.warn(text, TraceWarning, stacklevel=4)
    return {file.path: timelines[file.path] for file in chosen}


def _file(path: Path, timeline: Timeline) -> _File:
    spans = timeline.spans
    meta = timeline.meta
    (rank,) = timeline.ranks
    start_ns = 0
    end_ns = 0
    if len(spans) and meta.clock == "unix":
        start_ns = spans["start_ns"].min()
        end_ns = (spans["start_ns"] + spans["dur_ns"]).max()
    host = (
        -1
        - spans["stream"].to_numpy()[(spans["kind"] == "cpu") & (spans["stream"] < 0)]
    )
    threads = meta.provenance["threads"][str(rank)]
    process = threads[np.bincount(host).argmax()].split(" tid")[0] if len(host) else ""
    operators = frozenset(
        name for name in spans["name"].cat.categories if name.startswith("aten::")
    )
    steps = frozenset(timeline.steps) - {0}
    world = meta.world_size if meta.world_size > 1 else 0
    return _File(
        path,
        rank,
        world,
        meta.device,
        process,
        operators,
        steps,
        int(start_ns),
        int(end_ns),
    )


def _apart(a: _File, b: _File) -> str:
    """Why two traces are of different jobs, in words; "" where they may be of one."""
    if a is b:
        return ""
    names = f"{a.path} and {b.path}"
    fewer = min(len(a.operators), len(b.operators))
    for field in ("world_size", "device"):
        values = getattr(a, field), getattr(b, field)
        if all(values) and values[0] != values[1]:
            return (
                f"{names} have the {field.replace('_', ' ')}s {values[0]} and "
                f"{values[1]}"
            )
    if fewer >= _FEW and len(a.operators & b.operators) < _ALIKE * fewer:
        return f"{names} have hardly an operator in common"
    if a.rank == b.rank and (
        a.process != b.process
        or (a.start_ns < b.end_ns and b.start_ns < a.end_ns)
        or not a.start_ns
    ):
        return f"{names} are both rank {a.rank}"
    return ""


def _other_moment(a: _File, b: _File) -> str:
    gap_ns = max(a.start_ns, b.start_ns) - min(a.end_ns, b.end_ns)
    if not (a.start_ns and b.start_ns) or gap_ns <= 0:
        return ""
    if gap_ns > _APART_NS:
        return f"were recorded {format_s(gap_ns / 1e9)} apart"
    return (
        "have no step in common"
        if a.steps and b.steps and not a.steps & b.steps
        else ""
    )
