"""Whose is a run directory, and where does the run in it go on? One launcher at a time,
and nothing lost unasked.

A directory with files of another run is refused. The same run is taken up at its last
checkpoint if it did not complete, and is made again if it did, or if it has no
checkpoint.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from madmax_lib.base.atomic import write_text
from madmax_lib.runs.read import Resolved, read_json, read_spec, write_json
from madmax_lib.runs.spec import RunSpec

__all__ = ["Occupied", "clear", "last_checkpoint", "owned", "refuse", "starts"]

_RESULTS = ("steps.csv", "checkpoints", "trace_rank*.json.gz", "memory_rank*")
_OF_A_START = ("env.json", "power.csv", "summary.json", "logs")


class Occupied(FileExistsError):
    """The directory holds another run, or this one is on."""


@contextmanager
def owned(directory: Path) -> Iterator[int]:
    """Make a directory and keep other launchers out of it; a handle that keeps them out
    while a process has it.

    Raises Occupied if one is at work there, OSError for a place that cannot hold a run.
    """
    import fcntl  # not on Windows

    _check_place(directory)
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
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
    _check_place(directory)
    before = _before(directory, spec)
    if read_json(directory / "summary.json").get("status") == "completed":
        return (0,)
    if not (checkpoint := last_checkpoint(directory)):
        return (0,)
    for name in ("device", "data", "tokenizer") if before else ():
        if (was := getattr(before, name)) != (now := getattr(resolved, name)):
            raise ValueError(
                f"{directory}: its run began with {name} {was}, now it is {now}; "
                "give a new directory"
            )
    done = int(checkpoint.name)
    return (
        *(start for start in (before.starts if before else ()) if start < done),
        done,
    )


def clear(directory: Path, done: int) -> None:
    """Remove what a start at step `done` would mix with: all of an earlier run, or what
    it did after that step.
    """
    if done and (steps := directory / "steps.csv").exists():
        rows = [
            line
            for line in _text(steps).splitlines(keepends=True)
            if line.endswith("\n")
        ]
        kept = [
            row
            for row in rows
            if not row[0].isdecimal() or int(row.partition(",")[0]) < done
        ]
        write_text(steps, "".join(kept))
    everything = (
        *_OF_A_START,
        *_RESULTS,
        "spec.json",
    )  # the last says whose files the others are
    for path in [
        path
        for pattern in (_OF_A_START if done else everything)
        for path in directory.glob(pattern)
    ]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def refuse(directory: Path, spec: RunSpec, reason: str) -> None:
    """Write down why a run cannot start; what it did before is kept. Raises Occupied
    for another run.
    """
    _before(directory, spec)
    if not (directory / "spec.json").exists():
        write_json(directory / "spec.json", asdict(spec))
    write_json(directory / "summary.json", {"status": "refused", "error": reason})


def last_checkpoint(directory: Path) -> Path | None:
    """The last complete checkpoint of a run directory; its name is the number of steps
    it holds.

    Raises ValueError where the one that is named is not there.
    """
    folder = directory / "checkpoints"
    if not (folder / "latest").exists():
        return None
    name = _text(folder / "latest")
    if not (name.isdecimal() and (folder / name).is_dir()):
        raise ValueError(
            f"{folder / 'latest'}: names {name[:40]!r}, which is no checkpoint here; "
            f"delete {folder}"
        )
    return folder / name


def _before(directory: Path, spec: RunSpec) -> Resolved | None:
    """What an earlier launch of a run resolved, None if there was none. Raises Occupied
    for another run.
    """
    if not (directory / "spec.json").exists():
        if left := [
            path.name for pattern in _RESULTS for path in directory.glob(pattern)
        ]:
            raise Occupied(
                f"{directory}: holds {left[0]} of a run that has no spec.json; give "
                "a new directory"
            )
        return None
    try:
        earlier, resolved = read_spec(directory)
    except ValueError:
        earlier = None
    if earlier != spec:
        raise Occupied(f"{directory}: holds another run; give a new directory")
    return resolved


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _check_place(directory: Path) -> None:
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not place.is_dir():
        raise NotADirectoryError(
            f"{directory}: a run needs a directory, this is a file"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{directory}: may not be written to")
