"""How is a search spread out, and how does it go on after a stop? Parts of the space,
here or on dask workers.

A part is a fixed share of the degrees; its result does not depend on who works it out,
and results are merged by a total order, so a serial search, one on many workers and a
resumed one end the same. dask starts the part of a worker that dies again.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from madmax_lib.base.atomic import replacing
from madmax_lib.base.fields import require_type
from madmax_lib.base.progress import bar
from madmax_lib.planner.evaluate import Found, SearchProblem, evaluate, merged
from madmax_lib.planner.space import Degrees

__all__ = ["run_parts"]

_PARTS = 64
_RETRIES = 3  # of a part whose worker died
_TABLES = ("table", "front", "ways")
_COUNTS = ("idle", "evaluated", "feasible", "least_bytes")


def run_parts(
    problem: SearchProblem,
    degrees: Sequence[Degrees],
    client=None,
    directory: str | Path | None = None,
    progress: bool = True,
) -> tuple[Found, bool]:
    """(what was found, whether all parts were done). directory: finished parts are kept
    there and read again.

    Raises ValueError if the directory holds parts of another search.
    """
    parts = {i: degrees[i::_PARTS] for i in range(min(_PARTS, len(degrees)))}
    folder = _folder(directory, problem, degrees)
    kept = {number: part for number in parts if (part := _load(folder, number))}
    found = merged(problem, list(kept.values()))
    todo = [part for part in parts.items() if part[0] not in kept]
    here = ((number, evaluate(problem, part)) for number, part in todo)
    results = here if client is None else _on_workers(evaluate, problem, todo, client)
    with bar(
        total=len(parts),
        initial=len(kept),
        desc="searching",
        unit="part",
        show=progress,
    ) as done:
        try:
            for number, result in results:
                _save(folder, number, result)
                found = merged(problem, [found, result])
                done.update()
        except KeyboardInterrupt:
            return found, False
    return found, True


def _on_workers(work, problem, todo, client) -> Iterator[tuple]:
    from distributed import as_completed

    problem = client.scatter(problem, broadcast=True, hash=False)
    futures = {
        client.submit(work, problem, part, retries=_RETRIES, pure=False): number
        for number, part in todo
    }
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        client.cancel(list(futures))


def _folder(
    directory: str | Path | None, problem: SearchProblem, degrees: Sequence[Degrees]
) -> Path | None:
    """The directory, with what is searched written down, or checked if it was there."""
    if directory is None:
        return None
    folder = Path(require_type("directory", directory, str | Path))
    digest = hashlib.sha256(repr((asdict(problem), degrees)).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "search.json"
    case = problem.case
    if note.exists() and json.loads(note.read_text()).get("sha256") != digest:
        raise ValueError(
            f"{folder} holds parts of another search; give an empty directory"
        )
    names = {"model": case.model.name, "cluster": case.cluster.name}
    facts = {"sha256": digest, **names, "global_batch": case.global_batch}
    with replacing(note) as temporary:
        temporary.write_text(json.dumps(facts) + "\n")
    return folder


def _save(folder: Path | None, number: int, found: Found) -> None:
    if folder is None:
        return
    tables = [
        pd.DataFrame(getattr(found, name)).assign(kept_as=name) for name in _TABLES
    ]
    table = pd.concat(tables, ignore_index=True)
    table.attrs = {name: getattr(found, name) for name in _COUNTS}
    with replacing(folder / f"part-{number:02d}.parquet") as temporary:
        table.to_parquet(temporary)


def _load(folder: Path | None, number: int) -> Found | None:
    """What was kept of a part; None if nothing, or nothing readable."""
    path = folder / f"part-{number:02d}.parquet" if folder else None
    if path is None or not path.exists():
        return None
    try:
        table = pd.read_parquet(path)
        counts = {name: table.attrs[name] for name in _COUNTS}
    except (OSError, ValueError, KeyError):
        return None
    parts = (
        table[table["kept_as"] == name].drop(columns="kept_as") for name in _TABLES
    )
    return Found(
        *({name: column.to_numpy() for name, column in part.items()} for part in parts),
        **counts,
    )
