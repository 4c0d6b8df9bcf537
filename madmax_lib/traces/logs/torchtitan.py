"""torchtitan's structured logs: spans of the host, a JSON object per line and a file per
process and start.

Durations are the `value` of ends (a monotonic clock); the pace is the difference of the
ends of steps on one clock, as clocks of hosts differ. Format: torchtitan 0.3.0,
observability/structured_logger/jsonl_handler.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from isal import igzip

from madmax_lib.traces.logs.log import Log, Phase, middle_of

_BLOCK_BYTES = 1 << 22
_NESTED = 4000  # lines of a file that tell which phase is inside of which
_MS = 1e-3
_END = "_end"
_HIDDEN = (
    "spans of the host: a slow GPU or link makes all ranks wait alike, not visible here"
)


class _Line(msgspec.Struct, gc=False):
    """What is read of a line."""

    log_type: str
    log_type_name: str
    time_us: int = 0
    step: int | None = None
    value: Any = None
    step_tags: list[str] = ()
    rank: int = -1
    source: str = ""
    host_name: str = ""
    pid: int = 0
    tid: int = 0
    task_name: str | None = None


@dataclass
class _File:
    """A process from one start to its end."""

    path: Path
    first: _Line
    first_us: int
    last_us: int
    steps: np.ndarray  # (steps,)
    ends_us: np.ndarray  # (steps,) last end of each
    seconds: dict[str, np.ndarray]  # (steps,) by phase
    tags: dict[int, str]
    parents: dict[str, str]
    lost: int  # lines that are cut or no JSON
    later: list = field(default_factory=list)  # files of later starts


def blocks(path: Path, size_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """Whole lines of a file, some MB at a time; compressed or not."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    rest = b""
    with (igzip.open if is_gzip else open)(path, "rb") as file:
        try:
            while data := file.read(size_bytes):
                whole, _, tail = (rest + data).rpartition(b"\n")
                yield whole
                rest = tail
        except EOFError:  # a compressed file that ends early
            pass
    yield rest


def decoded(block: bytes, decoder: msgspec.json.Decoder) -> tuple[list, int]:
    """Objects of the lines of a block, and how many lines are none."""
    try:
        return decoder.decode_lines(block), 0
    except msgspec.MsgspecError:
        objects = []
        lines = block.splitlines()
        for line in lines:
            try:
                objects.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        return objects, sum(map(bool, lines)) - len(objects)


def read_torchtitan(paths: Sequence[Path]) -> Log:
    """The log of a job, of the files of its processes.

    A later start of a process overrides the steps that it repeats. Processes with one
    source and rank that ran at the same time are two. Raises ValueError where no file
    has the end of a step.
    """
    files = [file for path in paths if len((file := _read(path)).steps)]
    if not files:
        raise ValueError(f"{paths[0]}: no step has ended in this log")
    units = _processes(files)
    steps = np.unique(np.concatenate([file.steps for unit in units for file in unit]))
    tags = np.full(len(steps), "", dtype=object)
    names = dict.fromkeys(name for file in files for name in file.seconds)
    shape = (len(units), len(steps))
    seconds = {name: np.full(shape, np.nan, np.float32) for name in names}
    pace_s = np.full(shape, np.nan, np.float32)
    for row, unit in enumerate(units):
        for file in unit:
            at = np.searchsorted(steps, file.steps)
            # what an earlier start did of these steps was lost
            for values in (*seconds.values(), pace_s):
                values[row, at[0] :] = np.nan
            for name, values in file.seconds.items():
                seconds[name][row, at] = values
            follows = np.diff(file.steps) == 1
            between_s = np.diff(file.ends_us) * 1e-6
            pace_s[row, at[1:][follows]] = between_s[follows]
            marks = np.array([file.tags.get(step, "") for step in file.steps.tolist()])
            tags[at[marks != ""]] = marks[marks != ""]
            tags[at[0]] = "start"
    heads = [unit[-1].first for unit in units]
    sources = [head.source for head in heads]
    table = pd.DataFrame({"rank": [head.rank for head in heads]})
    table["host"] = [head.host_name for head in heads]
    table["group"] = sources
    table["file"] = [str(unit[-1].path) for unit in units]
    group = pd.factorize(table["group"])[0]
    parents = {name: of for file in files for name, of in file.parents.items()}
    return Log(
        source="torchtitan",
        units=table,
        steps=steps,
        pace_s=middle_of(pace_s),
        own_pace_s=pace_s,
        tags=tags,
        phases={
            name: Phase(values, steps, group, parents.get(name, ""))
            for name, values in seconds.items()
        },
        together=set(sources) == {"training"},
        notes=tuple(_notes(files, table)),
    )


def _notes(files, table):
    yield _HIDDEN
    ranks = set(table["rank"])
    if missing := sorted(set(range(max(ranks) + 1)) - ranks):
        yield f"no file of rank {', '.join(map(str, missing[:8]))}"
    for file in files:
        if file.lost:
            yield f"{file.path.name}: {file.lost} lines are cut or no JSON"


def _processes(files):
    """Files of each process, by start."""
    processes = defaultdict(list)
    for file in sorted(files, key=lambda file: file.first_us):
        key = (file.first.source, file.first.rank)
        for unit in processes[key]:
            # it began when the other had ended: a restart
            if unit[-1].last_us <= file.first_us:
                unit.append(file)
                break
        else:
            processes[key].append([file])
    return [unit for _, units in sorted(processes.items()) for unit in units]


def _read(path):
    """What is kept of a file."""
    decoder = msgspec.json.Decoder(_Line)
    names: dict[str, int] = {}
    parts = []
    tags = {}
    head = []
    lost = 0
    last_us = 0
    for block in blocks(path):
        lines, bad = decoded(block, decoder)
        lost += bad
        if not lines:
            continue
        head += lines[: _NESTED - len(head)]
        last_us = lines[-1].time_us
        ends = [
            (
                line.step,
                names.setdefault(line.log_type_name, len(names)),
                line.value,
                line.time_us,
            )
            for line in lines
            if line.log_type == "event"
            and line.value is not None
            and line.step is not None
        ]
        tags |= {
            line.step: "+".join(line.step_tags) for line in lines if line.step_tags
        }
        if ends:
            parts.append(np.array(ends, dtype=np.float64))
    first = next((line for line in head if line.source), _Line("", ""))
    rows = np.concatenate(parts) if parts else np.empty((0, 4))
    steps, at = np.unique(rows[:, 0].astype(np.int64), return_inverse=True)
    # rows of a step are told apart by phase: column = step x phases + phase
    cell = at * len(names) + rows[:, 1].astype(np.int64)
    shape = (len(steps), len(names))
    total_ms = np.bincount(cell, rows[:, 2], minlength=len(steps) * len(names)).reshape(
        shape
    )
    count = np.bincount(cell, minlength=len(steps) * len(names)).reshape(shape)
    ends_us = np.zeros(len(steps))
    np.maximum.at(ends_us, at, rows[:, 3])
    seconds_s = np.where(count > 0, total_ms * _MS, np.nan).astype(np.float32)
    return _File(
        path=path,
        first=first,
        first_us=head[0].time_us if head else 0,
        last_us=last_us,
        steps=steps,
        ends_us=ends_us,
        seconds={
            name.removesuffix(_END): seconds_s[:, column]
            for name, column in names.items()
        },
        tags=tags,
        parents=_parents(head),
        lost=lost,
    )


def _parents(lines):
    """The phase that each phase is inside of, from starts and ends of one task."""
    parents = {}
    open_ = defaultdict(list)
    for line in lines:
        if line.log_type != "event":
            continue
        stack = open_[line.tid, line.task_name]
        name, _, what = line.log_type_name.rpartition("_")
        if what == "start":
            parents.setdefault(name, stack[-1] if stack else "")
            stack.append(name)
        elif what == "end" and name in stack:
            del stack[stack.index(name) :]
    return parents
