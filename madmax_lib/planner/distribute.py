"""Parts of the space, worked out here or by any executor, and kept to go on after a stop.

A part is a fixed share of the degrees; its result does not depend on who works it out,
and results are merged by a total order, so a serial search, one on many workers and a
resumed one end the same. The part of a worker that dies is done again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from madmax_lib.base.atomic import replacing
from madmax_lib.base.executors import as_they_end
from madmax_lib.base.fields import require_type
from madmax_lib.base.progress import bar
from madmax_lib.planner.evaluate import (
    PartialResult,
    SearchProblem,
    evaluate,
    merged,
)
from madmax_lib.planner.space import Degrees

_PARTS = 64  # enough to keep a cluster busy, few enough to merge in no time
_TABLES = ("table", "front", "layouts")  # of a PartialResult


def run_parts(
    problem: SearchProblem,
    degrees: Sequence[Degrees],
    client=None,
    directory: str | Path | None = None,
    progress: bool = True,
) -> tuple[PartialResult, bool]:
    """The best of all parts, and whether all were done. directory: finished parts are
    kept there and read again.

    Raises ValueError if the directory holds parts of another search.
    """
    # every 64th of the degrees, so that parts are about equally large
    parts = {i: degrees[i::_PARTS] for i in range(min(_PARTS, len(degrees)))}
    folder = _folder(directory, problem, degrees)
    stored = {number: part for number in parts if (part := _load(folder, number))}
    result = merged(problem, list(stored.values()))
    todo = {number: part for number, part in parts.items() if number not in stored}
    work = partial(evaluate, problem)
    if client is None:
        results = ((number, work(part)) for number, part in todo.items())
    else:
        results = as_they_end(client, work, todo)
    with bar(
        total=len(parts),
        initial=len(stored),
        desc="searching",
        unit="part",
        show=progress,
    ) as done:
        try:
            for number, part in results:
                _save(folder, number, part)
                result = merged(problem, [result, part])
                done.update()
        except KeyboardInterrupt:
            return result, False
    return result, True


def _folder(directory, problem, degrees):
    """The directory, with what is searched written down, or checked if it was there."""
    if directory is None:
        return None
    folder = Path(require_type("directory", directory, str | Path))
    digest = hashlib.sha256(repr((asdict(problem), degrees)).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "search.json"
    if note.exists() and json.loads(note.read_text()).get("sha256") != digest:
        raise ValueError(
            f"{folder} holds parts of another search; give an empty directory"
        )
    # the model is for people; the digest alone decides
    facts = {"sha256": digest, "model": problem.case.model.name}
    with replacing(note) as temporary:
        temporary.write_text(json.dumps(facts) + "\n")
    return folder


def _save(folder, number, part):
    """Write a part, its columns as lists."""
    if folder is None:
        return
    with replacing(folder / f"part-{number:02d}.json") as temporary:
        temporary.write_text(json.dumps(vars(part), default=lambda of: of.tolist()))


def _load(folder, number):
    """The stored result of a part; None if there is none, or none that can be read."""
    if folder is None:
        return None
    try:
        content = json.loads((folder / f"part-{number:02d}.json").read_text())
        for name in _TABLES:
            columns = content[name].items()
            content[name] = {column: np.array(of) for column, of in columns}
        return PartialResult(**content)
    except (OSError, ValueError, KeyError):  # torn, or of another version: done again
        return None
