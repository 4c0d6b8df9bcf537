"""Door to logs: which files of a folder they are, told by content, and their reader."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from madmax_lib.traces.logs.inspector import read_inspector
from madmax_lib.traces.logs.lines import read_columns, read_lines
from madmax_lib.traces.logs.log import Log
from madmax_lib.traces.logs.summaries import read_traceml
from madmax_lib.traces.logs.torchtitan import blocks, read_torchtitan
from madmax_lib.traces.read.files import iterations
from madmax_lib.traces.read.readers import TRACE_SUFFIXES

# what a folder is searched for; a file that is named may be called anything
_SUFFIXES = (".jsonl", ".log", ".csv", ".txt", ".out", ".json", ".gz")
_READERS: dict[str, Callable[[Sequence[Path]], Log]] = {
    # those that say most first
    "torchtitan": read_torchtitan,
    "inspector": read_inspector,
    "traceml": read_traceml,
    "columns": read_columns,
    "lines": read_lines,
}
_HEAD_LINES = 20
_HEAD_BYTES = 1 << 16
_UNREADABLE = 8  # letters of a text that are none, at most


def find_log(
    paths: Sequence[str | Path], pattern: str | None = None, column: str | None = None
) -> Log | None:
    """The log of some paths, None if they are those of traces: a folder that has both
    is one of traces, unless its logs are of a kind that names ranks.
    """
    paths = [Path(path) for path in paths]
    if not (pattern or column):
        if not all(path.exists() for path in paths):
            return None  # a pattern, or what the reader of traces will miss
        kinds = set(log_files(paths).values())
        if not kinds & {"torchtitan", "inspector", "traceml"}:
            inside = [
                f
                for path in paths
                for f in (path.iterdir() if path.is_dir() else [path])
            ]
            is_trace = any(
                file.suffix in TRACE_SUFFIXES and not _kind(file)
                for file in inside
                if file.is_file()
            )
            if is_trace or not kinds or any(iterations(path) for path in paths):
                return None
    return read_log(paths, pattern, column)


def read_log(
    path: str | Path | Sequence[str | Path],
    pattern: str | None = None,
    column: str | None = None,
) -> Log:
    """The log of a job: torchtitan's structured logs, NCCL Inspector's, traceml's
    summary, or step times of a console or a table.

    path: a file, a folder with those of all processes, or a list. pattern: a regular
    expression for console lines, as `lines` says. column: the time in a table. Raises
    FileNotFoundError, and ValueError for what is no log. See also: mm.read_trace.
    """
    found = log_files(path)
    kinds = dict.fromkeys(found.values())
    kind = next((kind for kind in _READERS if kind in kinds), None)
    kind = "lines" if pattern else "columns" if column else kind
    wanted = {"lines": ("lines", "columns")}.get(kind, (kind,)) if pattern else (kind,)
    paths = [one for one, its in found.items() if its in wanted]
    if not paths:
        raise ValueError(f"{path}: no log here that can be read")
    how = {
        name: value
        for name, value in (("pattern", pattern), ("column", column))
        if value
    }
    return _READERS[kind](paths, **how)


def log_files(path: str | Path | Sequence[str | Path]) -> dict[Path, str]:
    """Files of logs and their kinds: torchtitan, inspector, traceml, columns, lines."""
    if isinstance(path, (list, tuple)):
        return {file: kind for one in path for file, kind in log_files(one).items()}
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    files = [path]
    if path.is_dir():
        files = sorted(
            f for f in path.rglob("*") if f.suffix in _SUFFIXES and f.is_file()
        )
    kinds = {file: _kind(file) for file in files}
    return {file: kind for file, kind in kinds.items() if kind}


def _kind(path):
    """Kind of a file by its first lines; empty for a trace, or what is none."""
    name = path.name.removesuffix(".gz")
    head = next(blocks(path, _HEAD_BYTES)).decode(errors="replace").lstrip()
    if not head or "\0" in head or head.count("\ufffd") > _UNREADABLE:
        return ""
    if head[0] not in "{[":
        return "columns" if name.endswith(".csv") else "lines"
    for line in head.splitlines()[:_HEAD_LINES]:
        try:
            keys = json.loads(line)
        except ValueError:
            break
        if "log_type_name" in keys:
            return "torchtitan"
        if {"coll_perf", "dump_stats", "p2p_perf"} & set(keys):
            return "inspector"
        if {"_step", "step"} & set(keys):
            return "columns"
    if '"step_time"' in head and '"primary_diagnosis"' in head:
        return "traceml"
    return "" if name.endswith(".json") or '"traceEvents"' in head else "lines"
