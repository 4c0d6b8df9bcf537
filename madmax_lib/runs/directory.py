"""Ownership of a run directory and the step its run goes on at: one launcher at a time,
and nothing lost unasked.

A directory with files of another run is refused. The same run is taken up at its last
checkpoint if it did not complete, and is made again if it did, or if it has no
checkpoint.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from madmax_lib.base.atomic import write_text
from madmax_lib.runs.read import Resolved, read_json, read_spec, write_json
from madmax_lib.runs.spec import RunSpec

__all__ = ["Occupied", "clear", "last_checkpoint", "owned", "refuse", "starts"]

# Patterns of what a run leaves: results of all its starts, and files that every start
# writes anew.
_RESULTS = ("steps.csv", "checkpoints", "trace_rank*.json.gz", "memory_rank*")
_OF_A_START = ("env.json", "power.csv", "summary.json", "logs")


class Occupied(FileExistsError):
    """The directory holds another run, or this one is on."""


@contextmanager
def owned(directory: Path) -> Iterator[int]:
    """Make a directory and keep other launchers out of it; a handle that keeps them out
    while a process has it.

    Raises Occupied if one is at work there, OSError for a path that cannot hold a run.
    """
    import fcntl  # not on Windows

    _check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        # a lock of the kernel's: it goes with the last process that has the handle,
        # whatever ends that
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(f"{directory}: a run is on there") from None
        except OSError:  # a file system without locks
            pass
        yield handle
    finally:
        os.close(handle)


def starts(directory: Path, spec: RunSpec, resolved: Resolved) -> tuple[int, ...]:
    """The steps that a run was and is started at, the last being the one to go on with;
    changes nothing.

    Raises Occupied for another run, ValueError if this one cannot go on as it began,
    OSError as `owned` does.
    """
    _check_writable(directory)
    before = _earlier_launch(directory, spec)
    completed = read_json(directory / "summary.json").get("status") == "completed"
    if completed or not (checkpoint := last_checkpoint(directory)):
        return (0,)
    done = int(checkpoint.name)
    if not before:
        return (done,)
    # a loss curve of two datasets or a timing of two devices would be nobody's
    for name in ("device", "data", "tokenizer"):
        was = getattr(before, name)
        now = getattr(resolved, name)
        if was != now:
            raise ValueError(
                f"{directory}: its run began with {name} {was}, now it is {now}; "
                "give a new directory"
            )
    return (*(start for start in before.starts if start < done), done)


def clear(directory: Path, done: int) -> None:
    """Remove what a start at step `done` would mix with: all of an earlier run, or what
    it did after that step.
    """
    if done and (steps := directory / "steps.csv").exists():
        # the header, and complete rows of steps that the checkpoint holds
        lines = _text(steps).splitlines(keepends=True)
        rows = [
            line
            for line in lines
            if line.endswith("\n")
            and (not line[0].isdecimal() or int(line.partition(",")[0]) < done)
        ]
        write_text(steps, "".join(rows))
    patterns = _OF_A_START
    if not done:  # spec.json goes last: it says whose files the others are
        patterns = (*_OF_A_START, *_RESULTS, "spec.json")
    for pattern in patterns:
        for path in [*directory.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def refuse(directory: Path, spec: RunSpec, reason: str) -> None:
    """Write down why a run cannot start; what it did before stays. Raises Occupied for
    another run.
    """
    _earlier_launch(directory, spec)
    if not (directory / "spec.json").exists():
        write_json(directory / "spec.json", asdict(spec))
    write_json(directory / "summary.json", {"status": "refused", "error": reason})


def last_checkpoint(directory: Path) -> Path | None:
    """The last complete checkpoint of a run directory; its name is the number of steps
    it holds.

    Raises ValueError where the one that is named is not there.
    """
    folder = directory / "checkpoints"
    latest = folder / "latest"
    if not latest.exists():
        return None
    name = _text(latest)
    if not (name.isdecimal() and (folder / name).is_dir()):
        raise ValueError(
            f"{latest}: names {name[:40]!r}, which is no checkpoint here; delete {folder}"
        )
    return folder / name


def _earlier_launch(directory, spec):
    """Values that an earlier launch of a run resolved, None if there was none. Raises Occupied
    for another run.
    """
    if not (directory / "spec.json").exists():
        for pattern in _RESULTS:
            for path in directory.glob(pattern):
                raise Occupied(
                    f"{directory}: holds {path.name} of a run that has no spec.json; "
                    "give a new directory"
                )
        return None
    with suppress(ValueError):  # an unreadable spec.json is another run's
        earlier, resolved = read_spec(directory)
        if earlier == spec:
            return resolved
    raise Occupied(f"{directory}: holds another run; give a new directory")


def _text(path):
    return path.read_text(errors="replace")


def _check_writable(directory):
    ancestors = (directory, *directory.parents)
    nearest = next(path for path in ancestors if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"{directory}: a run needs a directory, this is a file"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory}: may not be written to")
