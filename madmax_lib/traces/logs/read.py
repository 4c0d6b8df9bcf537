"""Door to logs: which files of a folder they are, told by content, and their reader."""

import re
from collections.abc import Sequence
from pathlib import Path

from madmax_lib.traces.logs.inspector import read_inspector
from madmax_lib.traces.logs.lines import read_columns, read_lines, read_traceml
from madmax_lib.traces.logs.log import Log
from madmax_lib.traces.logs.torchtitan import blocks, read_torchtitan

# what a folder is searched for; a file that is named may be called anything
_SUFFIXES = (".jsonl", ".log", ".csv", ".txt", ".out", ".json", ".gz")
_HEAD_BYTES = 1 << 16
# Kinds, those that say most first: their reader, and what the head of a file of it has
_KINDS = {
    "torchtitan": (read_torchtitan, '"log_type_name":'),
    "inspector": (read_inspector, '"coll_'),
    "traceml": (read_traceml, '"primary_diagnosis":'),
    "columns": (read_columns, r"\A[^\n{}\[\]:]*,[^\n{}\[\]:]*\n"),
    # neither a Chrome trace or another JSON, nor a binary file
    "lines": (read_lines, r'\A(?!\s*[{\[]\s*["{\n]|\0|.\0|[^\n]*\ufffd)'),
}
_TRACE = re.compile(r"\.(json|pftrace|sqlite)(\.gz)?$")


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
    kinds = _log_files(path)
    if not kinds:
        raise ValueError(f"{path}: no readable log here")
    kind, files = next(iter(kinds.items()))
    if pattern:
        return read_lines(files, pattern)
    return read_columns(files, column) if column else _KINDS[kind][0](files)


def _log_files(path):
    """Files of logs by their kind, the kind that says most first: torchtitan,
    inspector, traceml, columns, lines.
    """
    kinds = {kind: [] for kind in _KINDS}
    for root in map(Path, path if isinstance(path, list | tuple) else [path]):
        if not root.exists():
            raise FileNotFoundError(f"{root}: no such file or directory")
        inside = (file for file in sorted(root.rglob("*")) if file.suffix in _SUFFIXES)
        for file in filter(Path.is_file, inside if root.is_dir() else [root]):
            head = next(filter(None, blocks(file, _HEAD_BYTES)), b"")
            if b"\0" in head:  # no text
                continue
            head = head.decode(errors="replace")
            for kind, (_, mark) in _KINDS.items():
                if re.search(mark, head):
                    kinds[kind].append(file)
                    break
    return {kind: files for kind, files in kinds.items() if files}


def find_log(
    paths: Sequence[str], pattern: str | None = None, column: str | None = None
) -> Log | None:
    """The log of some paths, None if they are those of traces: consoles and tables
    beside traces are no logs of their own.
    """
    # what is not there is a pattern, or what the reader of traces will miss
    if not all(Path(path).exists() for path in paths):
        return None
    kinds = _log_files(paths).keys()
    is_log = kinds - {"columns", "lines"} or pattern or column
    inside = [file for path in paths for file in (path, *Path(path).rglob("*"))]
    has_traces = any(_TRACE.search(str(file)) for file in inside)
    if is_log or (kinds and not has_traces):
        return read_log(paths, pattern, column)
    return None
