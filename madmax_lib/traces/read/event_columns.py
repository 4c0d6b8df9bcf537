"""Typed events as arrays: one per column, exact nanoseconds, names and threads as
codes.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pandas as pd

from madmax_lib.base.doors import uncollected
from madmax_lib.traces.read.chrome import decode_pieces, packets_of
from madmax_lib.traces.read.events import (
    FAR_NS,
    Args,
    Event,
    NotATrace,
    RawTrace,
)
from madmax_lib.traces.read.values import (
    Codes,
    NeedsDecimal,
    dtype_bytes,
    integer,
    integers,
    nanoseconds,
)

Result = TypeVar("Result")

_BATCH = 4000  # events whose columns are made at once
_NO_ARGS = Args()
# columns of packets' notes that are numbers as they stand; later keys win
_NUMBERS = {
    "stream": "stream",
    "correlation": "correlation",
    "external id": "op",
    "External Id": "op",
    "External id": "op",
}


@dataclass
class EventColumns:
    """Duration events of one file as arrays of one length (n,), in file order."""

    start_ns: np.ndarray  # int64, exact, from the file's own zero
    dur_ns: np.ndarray  # int64, exact
    stream: np.ndarray  # int32, -1 where the event names none
    correlation: np.ndarray  # int64, -1 where there is none
    op: np.ndarray  # int64 operator id, -1 where there is none
    size_bytes: np.ndarray  # float64, NaN where unknown
    name: np.ndarray  # int32 code, index of names; category, thread and group likewise
    category: np.ndarray
    thread: np.ndarray
    group: np.ndarray
    names: list[str]
    categories: list[str]  # lower case
    threads: list[tuple]  # pid, tid
    groups: list[str]  # the first is "", none
    group_rank: int | None  # global rank by the metadata of a collective

    def __len__(self):
        return len(self.start_ns)


def read_columns(path: str | Path) -> tuple[EventColumns, RawTrace]:
    """Read one trace file; see `chrome.decode_pieces` for the errors."""
    trace, columns = with_exact_times(path, _gather)
    trace.warn_of_loss()
    return columns, trace


def with_exact_times(
    path: str | Path, gather: Callable[[RawTrace, bool], Result]
) -> tuple[RawTrace, Result]:
    """A trace and what `gather` makes of it: with floats, and where they would lose
    nanoseconds once more with decimals.
    """

    def read(exact):
        trace = RawTrace(Path(path))
        return trace, gather(trace, exact)

    try:
        try:
            return read(exact=False)
        except NeedsDecimal:
            return read(exact=True)
    except RecursionError:
        raise NotATrace(f"{path}: lists nested too deep for a profiler trace") from None


def _gather(trace, exact):
    codes = {key: Codes() for key in ("name", "category", "thread", "group")}
    codes["group"].of([""])  # code 0: none
    if data := packets_of(trace):
        with uncollected():
            arrays, group_rank = _of_packets(trace, data, codes)
    else:
        arrays, group_rank = _of_events(trace, exact, codes)
    return EventColumns(
        **arrays,
        names=_distinct(codes["name"], arrays["name"]),
        categories=[str(category).strip().lower() for category in codes["category"]],
        threads=list(codes["thread"]),
        groups=list(codes["group"]),
        group_rank=group_rank,
    )


def _of_events(trace, exact, codes):
    """Columns of a Chrome trace, piece by piece, and the rank that it tells."""
    # bytes that grow: arrays of each piece would keep its memory in use
    columns = defaultdict(bytearray)
    group_rank = None
    for events in batches(decode_pieces(trace, exact=exact)):
        rows = complete(events)
        nameless = [e for e in events if e.cat is None and e.dur is not None]
        trace.nameless += len(nameless)
        info = trace.envelope.get("distributedInfo")
        if group_rank is None and not (isinstance(info, dict) and "rank" in info):
            group_rank = _first_rank(event.args for event in rows if event.args)
        piece = _piece(rows, codes, exact)
        for key, values in piece.items():
            columns[key] += values.tobytes()
        # those whose times are no numbers count as unreadable
        lost = len(rows) - len(piece["start_ns"])
        trace.events -= lost
        trace.skipped += lost
    arrays = {
        key: np.frombuffer(columns.pop(key), values.dtype)
        for key, values in piece.items()
    }
    return arrays, group_rank


def _of_packets(trace, data, codes):
    """Columns of a file of packets, and the rank that it tells."""
    # late: few files are packets
    from madmax_lib.traces.read.perfetto import read_packets

    packets = read_packets(trace, data, Args.__struct_encode_fields__)
    texts = list(packets.texts)
    count = len(packets.columns["name"])
    columns = packets.columns | {key: np.full(count, -1) for key in _NUMBERS.values()}
    row, key, value = packets.notes
    for name, column in _NUMBERS.items():
        of_name = key == packets.texts.number(name)
        columns[column][row[of_name]] = integers(value[of_name].tolist())
        key = np.where(of_name, 0, key)
    others = defaultdict(dict)
    for note in np.flatnonzero(key).tolist():
        others[row[note]][texts[key[note]]] = value[note]
    sound = np.maximum(columns["start_ns"], columns["dur_ns"]) < FAR_NS
    lost = count - sound.sum()
    trace.events -= lost
    trace.skipped += lost
    sound &= columns["category"] != packets.texts.number("Trace")
    noted = [row for row in sorted(others) if sound[row]]
    args = msgspec.convert([others[row] for row in noted], list[Args])
    args = [_with_annotation(each) if each.annotation else each for each in args]
    columns["stream"] = _streams(columns["stream"])
    columns["size_bytes"] = np.full(count, np.nan)
    columns["group"] = np.zeros(count, dtype="int32")
    columns["size_bytes"][noted], columns["group"][noted] = _notes(args, codes["group"])
    columns = {key: values[sound] for key, values in columns.items()}
    labels = {"name": texts, "category": texts, "thread": list(packets.threads)}
    for key, values in labels.items():
        code, present = pd.factorize(columns[key])
        columns[key] = codes[key].of([values[each] for each in present])[code]
    return columns, _first_rank(args)


def _first_rank(args):
    ranks = map(_global_rank, args)
    return next((rank for rank in ranks if rank is not None), None)


def batches(pieces: Iterator[list[Event]]) -> Iterator[list[Event]]:
    """Events some thousands at a time: arrays have a cost of their own."""
    events = []
    for piece in pieces:
        events += piece
        if len(events) >= _BATCH:
            yield events
            events = []
    yield events


def complete(events: list[Event]) -> list[Event]:
    """Events that last some time; one span each, if their times are numbers.

    Ascend's profiler names no category: its tasks have a type and belong to the host's
    call with their connection.
    """
    lasting = [event for event in events if event.dur is not None]
    for event in lasting:
        args = event.args
        if event.cat is None and args is not None and args.connection is not None:
            event.cat = "runtime" if args.task is None else "kernel"
            event.args = type(args)(correlation=args.connection)
        elif args is not None and args.annotation is not None:
            event.args = _with_annotation(args)
    # "Trace" are the profiler's own marks of when it recorded
    return [
        event
        for event in lasting
        if event.cat is not None and event.cat != "Trace" and event.ph in ("X", None)
    ]


def _with_annotation(args):
    """Args with what a list of annotations tells of a collective."""
    with contextlib.suppress(msgspec.DecodeError, TypeError):
        for inner in msgspec.json.decode(args.annotation, type=list[type(args)]):
            if inner.collective is not None:
                return msgspec.structs.replace(
                    inner,
                    stream=args.stream,
                    correlation=args.correlation,
                    size_bytes=args.size_bytes,
                )
    return args


def _piece(rows, codes, exact):
    start_ns, start_is_number = nanoseconds([e.ts for e in rows], exact)
    dur_ns, dur_is_number = nanoseconds([e.dur for e in rows], exact)
    sound = start_is_number & dur_is_number
    if not sound.all():  # an event without times cannot be placed: again without it
        rows = [event for event, good in zip(rows, sound, strict=True) if good]
        return _piece(rows, codes, exact)
    args = [e.args or _NO_ARGS for e in rows]
    size_bytes, group = _notes(args, codes["group"])
    op = integers([a.external_id for a in args])
    for spelling in ("external_id_new", "external_id_old"):
        # few rows lack an id, most of them because they have none at all
        without = np.flatnonzero(op == -1).tolist()
        op[without] = integers([getattr(args[row], spelling) for row in without])
    return {
        "start_ns": start_ns,
        "dur_ns": dur_ns,
        "stream": _streams(integers([a.stream for a in args])),
        "correlation": integers([a.correlation for a in args]),
        "op": op,
        "size_bytes": size_bytes,
        "name": codes["name"].of([e.name for e in rows]),
        "category": codes["category"].of([e.cat for e in rows]),
        "thread": codes["thread"].of([(e.pid, e.tid) for e in rows]),
        "group": group,
    }


def _streams(streams):
    """(n,) int32 stream numbers, -1 for none; one too large for that keeps its lower
    bits.
    """
    lower_bits = streams % 2**31
    small = np.where(streams < 2**31, np.maximum(streams, -1), lower_bits)
    return small.astype("int32")


def _notes(args, groups):
    """Sizes in bytes (n,) and codes of groups (n,), of the few events that tell them."""
    sizes = np.full(len(args), np.nan)
    codes = np.zeros(len(args), dtype="int32")
    with_notes = [
        row
        for row, a in enumerate(args)
        if a.size_bytes is not None or a.collective is not None or a.group is not None
    ]
    names = {}
    for row in with_notes:
        sizes[row] = _size_bytes(args[row])
        if args[row].group is not None:
            # with its ranks, as far as they are listed: groups of one name may differ
            name = str(args[row].group)
            ranks = args[row].group_ranks
            names[row] = f"{name} {ranks}" if ranks else name
    codes[list(names)] = groups.of(list(names.values()))
    return sizes, codes


def _distinct(codes, rows):
    """Names as text; two values that print alike (1 and "1") become one."""
    texts = [name if isinstance(name, str) else str(name) for name in codes]
    if len(set(texts)) == len(texts):
        return texts
    # (codes,) the new code of each old one, then of each row
    merged = Codes()
    new_code = merged.of(texts)
    rows[:] = new_code[rows]
    return list(merged)


def _size_bytes(args):
    """Bytes of a copy, or of a collective's larger side; NaN where the event does not
    say.
    """
    size = float("nan")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if args.size_bytes is not None:
            size = float(args.size_bytes)
        elif args.collective is not None:
            # of all-gather and reduce-scatter one side is the shard, the other all of it
            elements = max(int(args.in_elements or 0), int(args.out_elements or 0))
            size = elements * dtype_bytes(str(args.dtype))
    return size if abs(size) < 2**63 else float("nan")


def _global_rank(args):
    """Rank from a collective's metadata: Rank counts inside the group, whose members
    the event may list.
    """
    if args.group_rank is None or (position := integer(args.group_rank)) < 0:
        return None
    ranks = re.findall(r"\d+", str(args.group_ranks or "").split("...")[0])
    rank = integer(ranks[position]) if position < len(ranks) else position
    return rank if 0 <= rank < 2**31 else None
