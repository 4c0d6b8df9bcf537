"""Traces of a folder that belong together: of one job, and of one of the cycles that
its profiler recorded.

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

# share of the operators of the trace with fewer that two traces of one program have in
# common; pipeline stages differ, but most of what they call is the same
_SAME_PROGRAM_SHARE = 0.5
_FEW_OPERATORS = 10  # from fewer nothing follows
_APART_NS = 10 * 10**9  # more than clocks of one cluster differ


class _File(NamedTuple):
    """Marks of the job of a trace; 0 or empty where they are not known."""

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
    of_rank = _by_rank(files)
    # cycles are counted on the rank that has most of them
    cycles = max(of_rank.values(), key=len, default=[])
    if cycle is not None and not 0 <= cycle < len(cycles):
        numbers = ", ".join(map(str, range(len(cycles))))
        raise ValueError(f"no cycle {cycle}; found {numbers}")
    if not cycles:
        return {}
    # of the other ranks, the file that began closest to it
    leader = cycles[-1 if cycle is None else cycle]
    chosen = [
        min(each, key=lambda file: abs(file.start_ns - leader.start_ns))
        for each in of_rank.values()
    ]
    if len(cycles) > 1 and cycle is None:
        text = (
            f"{len(cycles)} cycles are recorded; reading the last, number "
            f"{len(cycles) - 1} from 0"
        )
        warnings.warn(
            f"{leader.path.parent}: {text}; pass iteration= to choose another",
            TraceWarning,
            stacklevel=4,  # the line that called read_trace
        )
    for file in chosen:
        if reason := _other_moment(leader, file):
            text = f"{leader.path} and {file.path} {reason}"
            if not listed:
                raise ValueError(
                    f"{text}: not one job; give a list of the files to read them "
                    "together"
                )
            warnings.warn(text, TraceWarning, stacklevel=4)
    return {file.path: timelines[file.path] for file in chosen}


def _by_rank(files):
    """Files of each rank in order of time. Raises ValueError for those of two jobs."""
    of_rank = defaultdict(list)
    for file in files:
        # each against the first file, and against all of its rank
        for other in (files[0], *of_rank[file.rank]):
            if reason := _other_job(other, file):
                raise ValueError(
                    f"traces of more than one job, {reason}; give the files of one "
                    "of them"
                )
        of_rank[file.rank].append(file)
    return {
        rank: sorted(each, key=lambda file: file.start_ns)
        for rank, each in of_rank.items()
    }


def _file(path, timeline):
    spans = timeline.spans
    meta = timeline.meta
    (rank,) = timeline.ranks
    start_ns = 0
    end_ns = 0
    if len(spans) and meta.clock == "unix":
        start_ns = spans["start_ns"].min()
        end_ns = (spans["start_ns"] + spans["dur_ns"]).max()
    # the process of the busiest host thread: stream -1 is thread 0 of the provenance
    on_host = (spans["kind"] == "cpu") & (spans["stream"] < 0)
    thread = -1 - spans["stream"][on_host]
    threads = meta.provenance.get("threads", {}).get(str(rank), [])
    process = ""
    if len(thread) and threads:
        process = threads[np.bincount(thread).argmax()].split(" tid")[0]
    names = spans["name"].cat.categories
    operators = frozenset(name for name in names if name.startswith("aten::"))
    return _File(
        path,
        rank,
        world_size=meta.world_size if meta.world_size > 1 else 0,
        device=meta.device,
        process=process,
        operators=operators,
        steps=frozenset(timeline.steps) - {0},  # without annotations all is step 0
        start_ns=int(start_ns),
        end_ns=int(end_ns),
    )


def _other_job(a, b):
    """Why two traces are of different jobs, in words; "" where they may be of one."""
    if a is b:
        return ""
    names = f"{a.path} and {b.path}"
    for field in ("world_size", "device"):
        first, second = getattr(a, field), getattr(b, field)
        if first and second and first != second:
            return f"{names} have the {field.replace('_', ' ')}s {first} and {second}"
    fewer = min(len(a.operators), len(b.operators))
    common = len(a.operators & b.operators)
    if fewer >= _FEW_OPERATORS and common < _SAME_PROGRAM_SHARE * fewer:
        return f"{names} have hardly an operator in common"
    # two files of a rank are two cycles only of one process, one after the other
    overlap = a.start_ns < b.end_ns and b.start_ns < a.end_ns
    cycles = a.process == b.process and a.start_ns and not overlap
    if a.rank == b.rank and not cycles:
        return f"{names} are both rank {a.rank}"
    return ""


def _other_moment(a, b):
    """Why two traces are not of one moment, in words; "" where they may be."""
    # negative where they overlap
    gap_ns = max(a.start_ns, b.start_ns) - min(a.end_ns, b.end_ns)
    if not (a.start_ns and b.start_ns) or gap_ns <= 0:
        return ""
    if gap_ns > _APART_NS:
        return f"were recorded {format_s(gap_ns / 1e9)} apart"
    if a.steps and b.steps and not a.steps & b.steps:
        return "have no step in common"
    return ""
