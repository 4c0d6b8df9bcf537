"""What did every rank do, according to its PyTorch-profiler trace? Kineto/Chrome JSON
in, one `Timeline` out.

`timeline_rows` says what the rows mean; here files are found, read once (then from the
cache), in parallel where that pays, and put together. `hta_compatible=True` follows HTA
0.5.0: rows by stream, its kernel kinds, rounding and last-step rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from madmax_lib.base.fields import require_type
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import Timeline, concat
from madmax_lib.traces.read.cache import cached, content_sha256
from madmax_lib.traces.read.events import OtherContent, TraceWarning
from madmax_lib.traces.read.files import (
    EXPORT_SUFFIX,
    find_traces,
    iteration_folder,
    iterations,
    rank_in_name,
)
from madmax_lib.traces.read.jobs import one_job
from madmax_lib.traces.read.parallel import read_all
from madmax_lib.traces.read.side_tables import side_tables_of
from madmax_lib.traces.read.steps import hta_rows
from madmax_lib.traces.read.timeline_rows import read_file

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["TraceWarning", "read_trace"]


def read_trace(
    source: str | Path | Sequence[str | Path],
    *,
    hta_compatible: bool = False,
    iteration: int | None = None,
    kinds: str | Path | None = None,
    client: Client | None = None,
) -> Timeline:
    """Read traces of one or many ranks: the profiler's, or SQLite exports of Nsight
    Systems (`nsys`).

    source: a file (plain or gzip, whatever its name), a pattern such as
    runs/*/rank*.json, a directory, or a list of them. Of a directory all traces, or
    those of the newest `iteration_N` folder in torchtitan's layout; of several cycles
    per rank (`repeat=2`) the last. `iteration` chooses another: N, or the cycle from 0.
    kinds: CSV with rows to put before `data/kernel_kinds.csv`. client: a
    dask.distributed client whose workers see the same files; without one, large sets
    are read in local processes. Nothing is ever written beside the input; what was read
    is kept in the user's cache folder unless MADMAX_NO_CACHE=1. A file of a directory
    that fails costs its own rank, with a TraceWarning and in
    `meta.provenance["unread"]`. Raises FileNotFoundError, and ValueError with file and
    reason for what is no trace, or of another job (`jobs`). See also: mm.breakdown,
    mm.plot_timeline, mm.compare, mm.traces.advise, mm.dataset.
    """
    require_type("source", source, str | Path | list | tuple)
    read = partial(_read_one, hta=hta_compatible, user_kinds=kinds)
    listed = isinstance(source, (list, tuple))
    in_folder = not listed and Path(source).expanduser().is_dir()
    paths = find_traces(source, iteration)
    if exports := [path for path in paths if path.suffix == EXPORT_SUFFIX]:
        return _read_exports(exports, paths, hta_compatible, kinds)
    timelines, failures = _read_files(paths, read, client)
    below = in_folder and iterations(Path(source).expanduser())
    if not timelines and below:
        newest = iteration_folder(Path(source).expanduser(), iteration)
        timelines, failures = _read_files(find_traces(newest), read, client)
    if failures and not (in_folder and timelines):
        raise next(iter(failures.values()))
    timelines = one_job(timelines, None if below else iteration, listed=listed)
    unread = {}
    for path, reason in failures.items():
        if not isinstance(
            reason, OtherContent
        ):  # a run directory may hold configurations and metrics too
            unread[path.name] = str(reason) or type(reason).__name__
            warnings.warn(
                f"{path}: left out, the others were read: {unread[path.name]}",
                TraceWarning,
                stacklevel=2,
            )
    for path, timeline in timelines.items():
        for text in timeline.meta.provenance.get("warnings", {}).get(
            str(timeline.ranks[0]), []
        ):
            warnings.warn(f"{path}: {text}", TraceWarning, stacklevel=2)
    by_rank = {timeline.ranks[0]: timeline for timeline in timelines.values()}
    whole = concat(list((hta_rows(by_rank) if hta_compatible else by_rank).values()))
    return (
        _with_provenance(whole, whole.side_tables, unread=unread) if unread else whole
    )


def _read_exports(
    exports: list[Path], paths: list[Path], hta: bool, kinds: str | Path | None
) -> Timeline:
    from madmax_lib.traces.nsys import read_exports

    if hta:
        raise ValueError(
            f"{exports[0]}: hta_compatible is of PyTorch's traces; HTA reads no "
            "exports of Nsight Systems"
        )
    if len(exports) < len(paths):
        other = next(path for path in paths if path not in exports)
        raise ValueError(
            f"{exports[0]} of Nsight Systems beside {other}: give the files of one "
            "of them"
        )
    return read_exports(exports, kinds)


def _read_files(
    paths: list[Path], read, client
) -> tuple[dict[Path, Timeline], dict[Path, Exception]]:
    """Timeline of each file, and what is wrong with the others."""
    results = read_all(read, paths, client)
    failures = {
        path: result
        for path, result in results.items()
        if isinstance(result, Exception)
    }
    return {
        path: result for path, result in results.items() if path not in failures
    }, failures


def _read_one(path: Path, *, hta: bool, user_kinds: str | Path | None) -> Timeline:
    sha256 = content_sha256(path)
    options = (
        f"rules {hta} name {rank_in_name(path)} kinds "
        f"{content_sha256(Path(user_kinds)) if user_kinds else ''}"
    )
    timeline = cached(
        sha256,
        options,
        partial(read_file, path, sha256, hta=hta, user_kinds=user_kinds),
    )
    (rank,) = timeline.ranks
    files = {
        str(rank): {"name": path.name, "sha256": sha256}
    }  # a cached one may have had another name
    return _with_provenance(timeline, side_tables_of(path, sha256, rank), files=files)


def _with_provenance(timeline: Timeline, side_tables: SideTables, **more) -> Timeline:
    meta = replace(timeline.meta, provenance={**timeline.meta.provenance, **more})
    return replace(timeline, meta=meta, side_tables=side_tables)
