"""Files that hold the traces of a run: by name, pattern, list, directory or
torchtitan's `iteration_N` folders.
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.readers import TRACE_SUFFIXES, reader_of

_ITERATION = re.compile(r"iteration_(\d+)$")


def find_traces(
    source: str | Path | Sequence[str | Path], iteration: int | None = None
) -> list[Path]:
    """Trace files of a source in a fixed order, without opening them.

    Raises FileNotFoundError for what is not there, ValueError for an empty directory or
    list and an unknown iteration.
    """
    if isinstance(source, (list, tuple)):
        if not source:
            raise ValueError("no trace files in an empty list")
        return [path for item in source for path in find_traces(item, iteration)]
    if not str(source):
        raise ValueError("no trace: the path is empty")
    path = Path(source).expanduser()
    if not path.exists():
        # a pattern; pathlib globs below a folder, here below / or the working directory
        root = Path(path.anchor)
        if matches := sorted(root.glob(str(path.relative_to(root)))):
            return find_traces(matches, iteration)
        raise FileNotFoundError(f"{path}: no such file or directory")
    if path.suffix == ".nsys-rep":
        raise ValueError(
            f"{path}: only Nsight Systems can read this report; nsys export --type "
            "sqlite writes one that can be read here"
        )
    if not path.is_dir():
        return [path]
    traces = _in_folder(path)
    if (not traces or iteration is not None) and iterations(path):
        traces = _in_folder(iteration_folder(path, iteration))
    if not traces:
        folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
        inside = [folder.name for folder in folders if _in_folder(folder)]
        hint = f"; its folders {', '.join(inside[:5])} have some" if inside else ""
        raise ValueError(
            f"{path}: no trace files (.json, .json.gz, .sqlite) in this directory{hint}"
        )
    return traces


def rank_in_name(path: Path) -> int | None:
    """Rank that a file name tells: rank-3.json, worker7_step_12.json.gz, vLLM's
    dp0_pp0_tp3_rank3, SGLang's 17-TP-3.

    >>> rank_in_name(Path("trace_rank12.json.gz")), rank_in_name(Path("1756-TP-3.trace.json.gz"))
    (12, 3)
    """
    for word in ("rank", "worker", "gpu", "device", r"\bTP"):
        if match := re.search(rf"{word}[-_.]?(\d+)", path.name, re.IGNORECASE):
            return int(match[1])
    return None


def _in_folder(folder: Path):
    """Trace files of a folder; their numbers count as numbers: rank2 before rank10."""

    def natural_order(path):
        parts = re.split(r"(\d+)", path.name)
        return [int(part) if part.isdigit() else part for part in parts]

    files = [
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.suffix in TRACE_SUFFIXES
        and not path.name.startswith(".")
    ]
    # a database beside the profiler's traces is not one of them
    traces = [path for path in files if reader_of(path) is None]
    return sorted(traces or files, key=natural_order)


def iterations(folder: Path) -> dict[int, Path]:
    """The `iteration_N` folders at most two levels down, by N."""
    inside = [*sorted(folder.glob("*")), *sorted(folder.glob("*/*"))]
    return {
        int(name[1]): path
        for path in inside
        if path.is_dir() and (name := _ITERATION.match(path.name))
    }


def iteration_folder(folder: Path, iteration: int | None = None) -> Path:
    """Folder of one iteration: the newest unless one is asked for, with a TraceWarning
    where there are several.

    Raises ValueError, listing those that are there, for an iteration that is not.
    """
    folders = iterations(folder)
    newest = max(folders)
    if iteration is None and len(folders) > 1:
        text = f"{len(folders)} iterations are recorded; reading the newest, {newest}"
        warnings.warn(
            f"{folder}: {text}; pass iteration= or its folder to choose another",
            TraceWarning,
            stacklevel=4,  # the line that called read_trace
        )
    iteration = newest if iteration is None else iteration
    if iteration not in folders:
        numbers = ", ".join(map(str, sorted(folders)))
        raise ValueError(f"{folder}: no iteration_{iteration}; found {numbers}")
    return folders[iteration]
