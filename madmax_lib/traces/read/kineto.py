"""`read_trace`: traces of all ranks in, one `Timeline` out. Kineto/Chrome JSON here,
other formats by `readers`.

`timeline_rows` says what the rows mean; here files are found, read once (then from the
cache), in parallel where that pays, and put together. `hta_compatible=True` follows HTA
0.5.0: rows by stream, its kernel kinds, rounding and last-step rule.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from madmax_lib.base.fields import require_type
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import Timeline, concat
from madmax_lib.traces.read.cache import cached, content_sha256
from madmax_lib.traces.read.events import OtherContent, TraceWarning
from madmax_lib.traces.read.files import (
    find_traces,
    iteration_folder,
    iterations,
    rank_in_name,
)
from madmax_lib.traces.read.jobs import one_job
from madmax_lib.traces.read.parallel import read_all
from madmax_lib.traces.read.pattern import cut_by_pattern
from madmax_lib.traces.read.readers import reader_of
from madmax_lib.traces.read.steps import hta_rows
from madmax_lib.traces.read.timeline_rows import read_file


def read_trace(
    source: str | Path | Sequence[str | Path],
    *,
    hta_compatible: bool = False,
    iteration: int | None = None,
    kinds: str | Path | None = None,
    client=None,
) -> Timeline:
    """Read traces of one or many ranks: the profiler's, or SQLite exports of Nsight
    Systems (`nsys`).

    source: a file (plain or gzip, whatever its name), a pattern such as
    runs/*/rank*.json, a directory, a zip or tar archive, or a list of them. Of a
    directory all traces, those of its folders rank_0, rank_1, ..., TensorBoard's last, or
    those of the newest `iteration_N` folder in torchtitan's layout; of several cycles
    per rank (`repeat=2`) the last. `iteration` chooses another: N, or the cycle from 0.
    kinds: CSV with rows to put before `data/kernel_kinds.csv`. Large sets are read in
    local processes, or by the workers of client, any executor that sees the same files.
    Steps that nothing marks are found by what recurs (`pattern`), with a TraceWarning.
    Nothing is ever written beside the input; what was
    read is kept in the user's cache folder unless MADMAX_NO_CACHE=1. A file of a directory
    that fails costs its own rank, with a TraceWarning and in
    `meta.provenance["unread"]`. Raises FileNotFoundError, and ValueError with file and
    reason for what is no trace, or of another job (`jobs`). See also: mm.breakdown,
    mm.plot_timeline, mm.compare, mm.traces.advise, mm.dataset.
    """
    require_type("source", source, str | Path | list | tuple)
    paths = find_traces(source, iteration)
    # the first file of another format decides; files of two formats are refused
    reader = next(filter(None, map(reader_of, paths)), None)
    if reader:
        return cut_by_pattern(_read_others(reader, paths, hta_compatible, kinds))
    read = partial(_read_one, hta=hta_compatible, user_kinds=kinds)
    listed = isinstance(source, list | tuple)
    folder = None if listed else Path(source).expanduser()
    # or in an archive
    in_folder = folder is not None and folder.exists() and paths != [folder]
    timelines, failures = _read_files(paths, read, client)
    iteration_folders = in_folder and iterations(folder)
    if not timelines and iteration_folders:
        # what lay beside torchtitan's iteration folders was configuration, no trace
        newest = iteration_folder(folder, iteration)
        timelines, failures = _read_files(find_traces(newest), read, client)
    if failures and not (in_folder and timelines):
        raise next(iter(failures.values()))
    # `iteration` numbers either folders or cycles of the profiler
    cycle = None if iteration_folders else iteration
    timelines = one_job(timelines, cycle, listed=listed)
    unread = _warn_of_failures(failures)
    for path, timeline in timelines.items():
        # stored with the timeline, because one from the cache warns as well
        by_rank = timeline.meta.provenance.get("warnings", {})
        for text in by_rank.get(str(timeline.ranks[0]), []):
            warnings.warn(f"{path}: {text}", TraceWarning, stacklevel=2)
    of_rank = {timeline.ranks[0]: timeline for timeline in timelines.values()}
    if hta_compatible:
        of_rank = hta_rows(of_rank)
    joined = concat(list(of_rank.values()))
    if unread:
        joined = _with_provenance(joined, joined.side_tables, unread=unread)
    return joined if hta_compatible else cut_by_pattern(joined)


def _read_others(reader, paths, hta, kinds):
    """Timeline of files of another format."""
    own_paths = [path for path in paths if path.suffix == reader.suffix]
    if hta:
        raise ValueError(
            f"{own_paths[0]}: hta_compatible is for PyTorch traces; HTA cannot read "
            f"exports of {reader.program}"
        )
    if len(own_paths) < len(paths):
        other = next(path for path in paths if path not in own_paths)
        raise ValueError(
            f"{own_paths[0]} of {reader.program} beside {other}: give the files of one "
            "of them"
        )
    return reader.load()(own_paths, kinds)


def _read_files(paths, read, client):
    """Timeline of each file, and what is wrong with the others."""
    timelines = {}
    failures = {}
    for path, result in read_all(read, paths, client).items():
        kind = failures if isinstance(result, Exception) else timelines
        kind[path] = result
    return timelines, failures


def _warn_of_failures(failures):
    """Reason for each file that should have been a trace, after a warning; a run
    directory may hold configurations and metrics too.
    """
    unread = {}
    for path, reason in failures.items():
        if isinstance(reason, OtherContent):
            continue
        text = str(reason) or type(reason).__name__
        unread[path.name] = text.removeprefix(f"{path}: ")
        warnings.warn(
            f"{path}: skipped, the others were read: {unread[path.name]}",
            TraceWarning,
            stacklevel=3,
        )
    return unread


def _read_one(path, *, hta, user_kinds):
    sha256 = content_sha256(path)
    # all that decides what is made of the bytes: the name may tell the rank
    kinds_sha256 = content_sha256(Path(user_kinds)) if user_kinds else ""
    options = f"rules {hta} name {rank_in_name(path)} kinds {kinds_sha256}"
    make = partial(read_file, path, sha256, hta=hta, user_kinds=user_kinds)
    timeline = cached(sha256, options, make)
    (rank,) = timeline.ranks
    # the same bytes may have been cached under another name
    files = {str(rank): {"name": path.name, "sha256": sha256}}
    side_tables = SideTables(partial(_side_tables, path, sha256, rank))
    return _with_provenance(timeline, side_tables, files=files)


def _side_tables(path, sha256, rank):
    """Side tables of one file by name, on first use.

    Raises FileNotFoundError when the file has gone and ValueError when it has changed.
    """
    # late: a first look at a trace does without them
    from madmax_lib.traces.read.side_tables import load_side_tables

    return load_side_tables(path, sha256, rank)


def _with_provenance(timeline, side_tables, **more):
    meta = replace(timeline.meta, provenance=timeline.meta.provenance | more)
    return replace(timeline, meta=meta, side_tables=side_tables)
