"""A Timeline as a profiler trace again, for Perfetto and for HTA: one Chrome-trace JSON
file per rank, or Perfetto's packets.

Rows are chosen in `export_rows`, names in `kernel_names`; here they become text.
Format: Kineto, 2024.
"""

import itertools
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from isal import igzip

from madmax_lib.base.atomic import replacing
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.export_packets import packets
from madmax_lib.traces.export_rows import rank_table
from madmax_lib.traces.read.events import FAR_NS, SOURCE_KEY
from madmax_lib.traces.read.kernel_names import original_name

_US = 1000
_LINES = 20_000  # events per write


def export_trace(timeline: Timeline, directory: str | Path) -> list[Path]:
    """Write `rank{r}.json.gz` for every rank into a directory, which is made if needed;
    the paths in order of rank.

    `read_trace` of the result has the same spans to the nanosecond: stream, kind,
    start, duration, step, correlation, op, group, size and name. Exceptions: kind
    "other" comes back as memcpy (the reader knows no other) and allocator events (kind
    memory) not at all. Host threads keep their numbers unless a selection has left gaps
    between them.

    Simulated spans on a device get host rows that Timeline does not have and no
    breakdown counts: an operator and a cudaLaunchKernel (host time is not simulated: at
    most 1 us, at the kernel's start), a ProfilerStep per step and, after several steps,
    one of no duration that HTA drops in place of the last. So do spans whose steps the
    other rows do not tell. Of a measured trace with several steps HTA drops the last,
    as it does of the original. Waits (kind idle) carry no stream, because HTA would
    count them as kernels.

    A directory that ends in .pftrace or .pftrace.gz is the name of a file of Perfetto's
    packets, with `_rank{r}` in it where there are several; they read back alike.

    Raises ValueError for spans that such a file cannot tell apart (work on host threads
    beside device streams, host operators inside of each other, steps that overlap on
    the host), negative durations or times beyond 2**62 ns, and OSError for a directory
    that is none. Files are written to temporary names first and renamed when all are
    complete. See also: mm.read_trace.
    """
    require_type("timeline", timeline, Timeline)
    directory = Path(directory).expanduser()
    stem, is_packed, ending = directory.name.partition(".pftrace")
    # Before any work: a long timeline takes minutes to write.
    if directory.exists() and not directory.is_dir() and not is_packed:
        raise NotADirectoryError(f"{directory}: is not a directory")
    _check(timeline.spans)
    tables = {rank: rank_table(timeline, rank) for rank in timeline.ranks}
    base_ns = _base_ns(timeline, tables)
    texts = {
        f"rank{rank}": _document(timeline, base_ns, rank, table)
        for rank, table in tables.items()
    }
    if not is_packed:
        paths = [directory / f"{name}.json.gz" for name in texts]
    else:
        stems = [f"{stem}_{name}" for name in texts] if len(texts) > 1 else [stem]
        paths = [directory.with_name(f"{each}.pftrace{ending}") for each in stems]
    with ExitStack() as stack:  # renames when every file is complete
        for path, text in zip(paths, texts.values(), strict=True):
            raw = stack.enter_context(stack.enter_context(replacing(path)).open("wb"))
            if path.suffix == ".gz":
                raw = stack.enter_context(
                    igzip.IGzipFile("", "wb", fileobj=raw, mtime=0)
                )
            pieces = map(str.encode, text)
            if is_packed:
                pieces = packets(msgspec.json.decode(b"".join(pieces)))
            raw.writelines(pieces)
    return paths


def _check(spans):
    start = spans["start_ns"].to_numpy()
    dur = spans["dur_ns"].to_numpy()
    # An end that overflows shows as one before its start.
    with np.errstate(over="ignore"):
        end = start + dur
    negative = "has a negative duration (was the trace read with hta_compatible=True?)"
    rules = {
        negative: dur < 0,
        "lies outside of 3e18 ns": (start <= -FAR_NS) | (dur >= FAR_NS) | (end < start),
        "has an infinite size_bytes": np.isinf(spans["size_bytes"]),
    }
    for rule, wrong in rules.items():
        if wrong.any():
            row = int(wrong.argmax())
            span = f"span {row} ({spans['name'].iloc[row]})"
            raise ValueError(f"{span}, {start[row]} ns + {dur[row]} ns, {rule}")


def _base_ns(timeline, tables):
    """One zero for all ranks, because HTA compares their ts; whole us, and no ts is
    negative.
    """
    starts_ns = [table["start_ns"] for table in tables.values() if len(table)]
    first = min((int(start_ns.min()) for start_ns in starts_ns), default=0)
    last = max((int(start_ns.max()) for start_ns in starts_ns), default=0)
    # Whole microseconds, so that ts keeps its three decimals.
    base_ns = first // _US * _US if timeline.meta.clock == "unix" or first < 0 else 0
    if last - base_ns >= FAR_NS:
        raise ValueError(
            f"spans start later than 3e18 ns after {base_ns} ns; a trace file cannot "
            "hold them"
        )
    return base_ns


def _document(timeline, base_ns, rank, table):
    """The file, one event per line; the envelope on its own line and with blanks, as
    HTA looks for the rank.
    """
    meta = timeline.meta
    # HTA tells GPU from CPU runs by the backend.
    backend = "nccl" if (table["stream"] >= 0).any() else "gloo"
    info = {"backend": backend, "rank": rank}
    envelope = {
        "schemaVersion": 1,
        "distributedInfo": info | {"world_size": meta.world_size},
        SOURCE_KEY: meta.source,
        "deviceProperties": [{"id": 0, "name": meta.device}] if meta.device else [],
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": base_ns,
        "traceName": f"{meta.source} rank {rank}",
    }
    yield json.dumps(envelope)[:-1] + ', "traceEvents": [\n'
    names = [f"rank {rank} {meta.device or 'device'}", f"rank {rank} host"]
    parts = _names(table, names), _spans(table, base_ns), _flows(table, base_ns)
    lines = itertools.chain(*parts)
    # A comma goes between blocks of lines, not after the last one: JSON allows none.
    separator = ""
    while block := list(itertools.islice(lines, _LINES)):
        yield separator + ",\n".join(block)
        separator = ",\n"
    yield "\n]}\n"


def _names(table, names):
    """Names and order of processes, the device and the host, and of threads."""
    for pid, name in enumerate(names):
        yield _meta(pid, 0, "process_name", name)
        yield _meta(pid, 0, "process_sort_index", pid)
    # Streams in order, then host threads -1, -2, ...
    for stream in sorted(set(table["stream"].tolist()), key=lambda s: (s < 0, abs(s))):
        pid, tid = _thread(stream)
        name = f"stream {stream}" if stream >= 0 else f"host thread {-stream}"
        yield _meta(pid, tid, "thread_name", name)
        yield _meta(pid, tid, "thread_sort_index", tid)


def _meta(pid, tid, name, value):
    # Metadata events of the Chrome trace format: M, with name or sort_index.
    args = {"sort_index" if isinstance(value, int) else "name": value}
    return json.dumps(
        {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}
    )


def _thread(stream):
    """pid and tid of a stream, or of a host thread, which is a negative one."""
    return int(stream < 0), abs(stream)


def _spans(table, base_ns):
    """One event per row; what rows have in common is made once."""
    # Text that rows share, by the fields that decide it.
    common = {}
    keys = zip(*(table[column].tolist() for column in _Row._fields), strict=True)
    start = _microseconds(table["start_ns"] - base_ns)
    dur = _microseconds(table["dur_ns"])
    single = ("correlation", "op", "size_bytes", "recorded")
    values = (table[column].tolist() for column in single)
    for key, ts, length, correlation, op, size, recorded in zip(
        keys, start, dur, *values, strict=True
    ):
        if key not in common:
            common[key] = _common(_Row(*key))
        head, tail = common[key]
        args = "" if correlation == -1 else f'"correlation": {correlation}, '
        args += "" if op == -1 else f'"External id": {op}, '
        args += "" if size != size else f'"bytes": {_number(size)}, '
        args += recorded
        yield f'{head}, "ts": {ts}, "dur": {length}, "args": {{{args}{tail}}}}}'


class _Row(NamedTuple):
    """Fields of a row that many rows have in common."""

    cat: str
    label: str
    name: str
    kind: str
    stream: int
    group: str
    collective: str


def _common(row):
    """Text before the times, and the last of the args: kind always, stream only of what
    HTA shall count as a kernel.
    """
    # Allocator events are instants; all others have a duration (X).
    phase = "i" if row.kind == "memory" else "X"
    pid, tid = _thread(row.stream)
    name = f'"cat": "{row.cat}", "name": {_text(row.label)}'
    head = f'{{"ph": "{phase}", {name}, "pid": {pid}, "tid": {tid}'
    args = [f'"kind": "{row.kind}"']
    if row.label != row.name:
        args.append(f'"op name": {_text(original_name(row.label))}')
    if row.stream >= 0 and row.kind in BUSY_KINDS:
        args.append(f'"device": 0, "stream": {row.stream}')
    if row.collective:
        args.append(f'"Collective name": "{row.collective}"')
    # "0 [0, 1]": the reader adds the members to the name
    name, members = re.fullmatch(r"(.*?)(?: (\[.*\]))?", row.group, re.DOTALL).groups()
    if row.group:
        args.append(f'"Process Group Name": {_text(name)}')
    if members:
        args.append(f'"Process Group Ranks": {_text(members)}')
    return head, ", ".join(args)


def _flows(table, base_ns):
    """Arrows from launches to kernels."""
    correlation = table["correlation"].to_numpy()
    numbered = correlation >= 0
    launches = np.flatnonzero(numbered & (table["cat"] == "cuda_runtime"))
    works = (table["stream"] >= 0) & table["kind"].isin(BUSY_KINDS)
    kernels = np.flatnonzero(numbered & works)
    # First launch of each correlation, and its row for each kernel.
    numbers, first = np.unique(correlation[launches], return_index=True)
    kernels = kernels[np.isin(correlation[kernels], numbers)]
    launches = launches[first][np.searchsorted(numbers, correlation[kernels])]
    columns = [correlation[kernels].tolist()]
    for rows in (launches, kernels):
        ends = table[["start_ns", "stream"]].iloc[rows]
        columns.append(_microseconds(ends["start_ns"] - base_ns))
        columns.append(ends["stream"].tolist())
    for number, ts, launcher, at, stream in zip(*columns, strict=True):
        # async CPU to GPU, as Kineto calls the arrows of launches
        row = f'"cat": "ac2g", "name": "ac2g", "id": {number}'
        yield f'{{"ph": "s", {row}, "pid": 1, "tid": {-launcher}, "ts": {ts}}}'
        yield f'{{"ph": "f", {row}, "pid": 0, "tid": {stream}, "ts": {at}, "bp": "e"}}'


_DECIMALS = [f".{ns:03d}" for ns in range(_US)]


def _microseconds(ns):
    """Exact decimal text of times that are not negative."""
    return [
        f"{us}{_DECIMALS[rest]}"
        for us, rest in zip((ns // _US).tolist(), (ns % _US).tolist(), strict=True)
    ]


def _number(value):
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _text(value):
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{value!r} is not valid Unicode and cannot be written to JSON"
        ) from None
