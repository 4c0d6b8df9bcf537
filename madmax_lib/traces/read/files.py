"""Files that hold the traces of a run: by name, pattern, list, directory, archive or
torchtitan's `iteration_N` folders.
"""

import atexit
import re
import shutil
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.readers import TRACE_SUFFIXES, reader_of

_ITERATION = re.compile(r"iteration_(\d+)$")
_ARCHIVE = re.compile(r"\.(?:zip|tgz|tar(?:\.gz|\.bz2|\.xz)?)$")
# what `madmax train` writes beside them
_BESIDE = ("env.json", "spec.json", "summary.json")
# below a folder without traces, from the nearest; the last two are TensorBoard's
_DEEPER = ("*", "*/*", "plugins/profile/*", "*/plugins/profile/*")


def find_traces(
    source: str | Path | Sequence[str | Path], iteration: int | None = None
) -> list[Path]:
    """Trace files of a source in a fixed order, without opening them.

    Raises FileNotFoundError for what is not there, ValueError for an empty directory or
    list and an unknown iteration.
    """
    if isinstance(source, list | tuple):
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
    if path.is_file() and _ARCHIVE.search(path.name):
        path = _unpacked(path)
    if not path.is_dir():
        return [path]
    traces = _in_folder(path)
    if (not traces or iteration is not None) and iterations(path):
        traces = _in_folder(iteration_folder(path, iteration))
    packed = sorted(each for each in path.iterdir() if _ARCHIVE.search(each.name))
    if packed and set(traces) <= set(packed):
        return find_traces(packed, iteration)
    return traces or _deeper(path)


def _unpacked(path):
    """Folder with what an archive holds, which is there as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="madmax-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        else:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
    except (EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise ValueError(f"{path}: damaged archive ({error})") from None
    return folder


def _deeper(path):
    """Traces of the folders below one that has none: of those that a rank names
    together, else of the only one, of TensorBoard's the last.
    """
    for pattern in _DEEPER:
        inside = [each for each in sorted(path.glob(pattern)) if each.is_dir()]
        if folders := [folder for folder in inside if _in_folder(folder)]:
            break
    # the name of a file may tell a rank too, but those of another folder are another run
    is_rank = [rank_in_name(folder / "trace") is not None for folder in folders]
    if not all(is_rank):
        if len(folders) > 1 and not pattern.endswith("profile/*"):
            names = ", ".join(str(folder.relative_to(path)) for folder in folders[:5])
            raise ValueError(
                f"{path}: no trace files in this directory; its folders {names} have "
                "some: name one of them, or all as FOLDER/*"
            )
        folders = folders[-1:]
    names = ", ".join(str(folder.relative_to(path)) for folder in folders)
    traces = [trace for folder in folders for trace in _in_folder(folder)]
    if not traces:
        raise ValueError(
            f"{path}: no trace files (.json, .json.gz, .pftrace, .sqlite) in this directory"
        )
    text = f"{path}: no trace files in this directory; reading those of {names}"
    warnings.warn(text, TraceWarning, stacklevel=4)  # the line that called read_trace
    return traces


def rank_in_name(path: Path) -> int | None:
    """Rank that a file name tells: rank-3.json, worker7_step_12.json.gz, vLLM's
    dp0_pp0_tp3_rank3, SGLang's 17-TP-3; else the name of its folder, rank_3.

    >>> rank_in_name(Path("trace_rank12.json.gz")), rank_in_name(Path("1756-TP-3.trace.json.gz"))
    (12, 3)
    """
    words = ("rank", "worker", "gpu", "device", r"\bTP")
    # a folder's whole name, as of one per rank
    places = [(path.name, ""), (path.parent.name, "$")]
    for name, end in places:
        for word in words:
            pattern = rf"{'^' * bool(end)}{word}[-_.]?(\d+){end}"
            if match := re.search(pattern, name, re.IGNORECASE):
                return int(match[1])
    return None


def _in_folder(folder):
    """Trace files of a folder; their numbers count as numbers: rank2 before rank10."""

    def natural_order(path):
        parts = re.split(r"(\d+)", path.name)
        return [int(part) if part.isdigit() else part for part in parts]

    named = [
        path
        for path in folder.iterdir()
        if path.suffix in TRACE_SUFFIXES
        and not path.name.startswith(".")
        and path.name not in _BESIDE
    ]
    files = [path for path in named if path.is_file()]
    if broken := [path for path in named if path.is_symlink() and not path.exists()]:
        text = (
            f"{broken[0]}: a link to a file that is not there, {broken[0].readlink()}"
        )
        warnings.warn(text, TraceWarning, stacklevel=5)
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
