"""Side tables of a trace: what its events say beyond their times. Collective metadata,
allocator events, shapes, graphs and waits.

A second pass over the file with every field, made when an analysis first asks
(`Timeline.side_tables`).
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from madmax_lib.timeline.kinds import COLLECTIVES, POINT_TO_POINT
from madmax_lib.timeline.side_tables import SIDE_TABLES, SideTables, conform
from madmax_lib.timeline.timeline import SPANS, Timeline
from madmax_lib.traces.read.cache import cached, content_sha256
from madmax_lib.traces.read.chrome import decode_pieces
from madmax_lib.traces.read.event_columns import Codes, complete, with_exact_times
from madmax_lib.traces.read.events import Args, Event, RawTrace
from madmax_lib.traces.read.values import FAR_US, integers, nanoseconds

__all__ = ["side_tables_of"]

# allreduce, _allreduce_base and ALL-REDUCE are all_reduce; the order is that of
# COLLECTIVES, in which a reduce-scatter is found before reduce and scatter
_SPELLINGS = {
    re.compile(collective.replace("_", ".?"), re.IGNORECASE): collective
    for collective in COLLECTIVES
    if collective not in POINT_TO_POINT
}
_BATCH = 4000  # events whose columns are made at once
_NULL = (b"", b"null")
_OPERATORS = ("cpu_op", "operator")
# by c10::DeviceType (c10/core/DeviceType.h)
_DEVICES = {
    0: "cpu",
    1: "cuda",
    6: "hip",
    7: "fpga",
    9: "xla",
    12: "xpu",
    15: "hpu",
    17: "lazy",
    18: "ipu",
    19: "mtia",
    20: "privateuse1",
}


class _FullArgs(Args, frozen=True, gc=False):
    """Every field of args that an analysis reads."""

    group_size: Any = msgspec.field(default=None, name="Group size")
    in_splits: Any = msgspec.field(default=None, name="In split size")
    out_splits: Any = msgspec.field(default=None, name="Out split size")
    sequence_in_group: Any = msgspec.field(default=None, name="Seq")
    source_rank: Any = msgspec.field(default=None, name="Src Rank")
    target_rank: Any = msgspec.field(default=None, name="Dst Rank")
    address: Any = msgspec.field(default=None, name="Addr")
    allocated: Any = msgspec.field(default=None, name="Bytes")
    total_allocated: Any = msgspec.field(default=None, name="Total Allocated")
    total_reserved: Any = msgspec.field(default=None, name="Total Reserved")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    strides: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Strides")
    inputs: msgspec.Raw = msgspec.field(
        default=msgspec.Raw(b""), name="Concrete Inputs"
    )
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    graph: Any = msgspec.field(default=None, name="graph id")
    sync_kind: Any = msgspec.field(default=None, name="cuda_sync_kind")
    waits_for_stream: Any = msgspec.field(default=None, name="wait_on_stream")
    waits_for_correlation: Any = msgspec.field(
        default=None, name="wait_on_cuda_event_record_corr_id"
    )


class _FullEvent(Event, gc=False):
    args: _FullArgs | None = None


def side_tables_of(path: str | Path, sha256: str, rank: int) -> SideTables:
    """Side tables of one file, read on first use; their rows are those of
    `event_columns.read_columns`.

    Raises, then, FileNotFoundError when the file has gone and ValueError when it has
    changed.
    """
    return SideTables(partial(_load, Path(path), sha256, rank))


def _load(path: Path, sha256: str, rank: int):
    """Tables of a file, from the cache if they are there."""

    def read():
        if content_sha256(path) != sha256:
            raise ValueError(f"{path}: has changed since it was read; read it again")
        tables = _side_tables_of_file(path, rank)
        # the cache holds timelines: one without spans carries the tables
        no_spans = {column: pd.Series([], dtype=d) for column, d in SPANS.items()}
        side_tables = SideTables(partial(dict, tables))
        return Timeline(pd.DataFrame(no_spans), side_tables=side_tables)

    return cached(sha256, f"side tables {rank}", read).side_tables.present()


def _side_tables_of_file(path: Path, rank: int):
    """The tables of a file that are not empty, whether it changed or not."""
    _, parts = with_exact_times(path, partial(_gather, rank=rank))
    return {
        name: conform(name, _joined(parts[name])) for name in SIDE_TABLES if parts[name]
    }


def _gather(trace: RawTrace, exact: bool, rank: int):
    """Columns of each table, in pieces; rows are counted as `read_columns` counts."""
    parts = {name: [] for name in SIDE_TABLES}
    threads = Codes()
    rows_before = 0
    for events in _batches(decode_pieces(trace, exact=exact, event=_FullEvent)):
        rows = _with_times(complete(events), exact)
        threads.pairs([e.pid for e in rows], [e.tid for e in rows])
        for name, chosen in _chosen(rows).items():
            if chosen:
                columns = _COLUMNS[name]([rows[i] for i in chosen])
                parts[name].append({"row": rows_before + np.array(chosen), **columns})
        rows_before += len(rows)
        # allocator events are instants, without a duration: they are no rows
        instants = [
            e for e in events if e.ph == "i" and e.name == "[memory]" and e.args
        ]
        if instants:
            instants = _with_times(instants, exact)
            parts["memory"].append(_memory(instants, exact, threads, rank))
    # the file's zero may stand behind its events, so it is added last
    for part in parts["memory"]:
        part["time_ns"] = part["time_ns"] + trace.base_ns
    return parts


def _batches(pieces: Iterator[list]):
    """Events some thousands at a time: arrays have a cost of their own."""
    events = []
    for piece in pieces:
        events += piece
        if len(events) >= _BATCH:
            yield events
            events = []
    yield events


def _chosen(rows: list[_FullEvent]):
    """Numbers of the rows that belong to each table."""
    # a batch has few spellings of categories and thousands of rows
    forms = {e.cat: e.cat.strip().lower() for e in rows if isinstance(e.cat, str)}
    operators = {category for category, form in forms.items() if form in _OPERATORS}
    syncs = {category for category, form in forms.items() if form == "cuda_sync"}
    named = [(i, e.cat) for i, e in enumerate(rows) if isinstance(e.cat, str)]
    with_args = [(i, e.args) for i, e in enumerate(rows) if e.args is not None]
    # gloo's annotations tell shapes as operators do
    shaped = {
        i for i, args in with_args if args.shapes and bytes(args.shapes) not in _NULL
    }
    waits = [i for i, category in named if category in syncs] if syncs else []
    return {
        "operators": sorted(shaped.union(i for i, cat in named if cat in operators)),
        "syncs": [i for i in waits if i not in shaped],
        "calls": [i for i, args in with_args if args.collective is not None],
        # None: not told; 0: not in a graph
        "graphs": [i for i, args in with_args if args.graph not in (None, 0)],
    }


def _with_times(events: list[_FullEvent], exact: bool):
    """Events whose times are numbers."""
    durations = [0 if e.dur is None else e.dur for e in events]
    times = [e.ts for e in events]
    # the usual case without a conversion: plain numbers, none out of bounds
    if {*map(type, times), *map(type, durations)} <= {int, float}:
        values = times + durations
        if not values or (min(values) > -FAR_US and max(values) < FAR_US):
            return events
    sound = nanoseconds(times, exact)[1] & nanoseconds(durations, exact)[1]
    return [event for event, good in zip(events, sound, strict=True) if good]


def _calls(rows: list[_FullEvent]):
    args = [e.args for e in rows]
    return {
        "collective": [_collective(str(a.collective)) for a in args],
        "dtype": [str(a.dtype or "").lower() for a in args],
        "in_elements": integers([a.in_elements for a in args]),
        "out_elements": integers([a.out_elements for a in args]),
        "group_size": integers([a.group_size for a in args]),
        "ranks": [_numbers(a.group_ranks) for a in args],
        "in_splits": [_numbers(a.in_splits) for a in args],
        "out_splits": [_numbers(a.out_splits) for a in args],
        "sequence": integers([a.sequence_in_group for a in args]),
        "source_rank": integers([a.source_rank for a in args]),
        "target_rank": integers([a.target_rank for a in args]),
    }


def _numbers(listed):
    """A list of numbers as text, up to where it is shortened."""
    return ",".join(re.findall(r"\d+", str(listed or "").split("...")[0]))


def _collective(name: str):
    """Canonical name: all_reduce for allreduce and _allreduce_base, all_to_all for
    all_to_allv.

    >>> _collective("_reduce_scatter_base"), _collective("send")
    ('reduce_scatter', 'send')
    """
    matches = (each for pattern, each in _SPELLINGS.items() if pattern.search(name))
    return next(matches, name)


def _memory(events: list[_FullEvent], exact: bool, threads: Codes, rank: int):
    def device(args: _FullArgs):
        name = str(args.device_type)
        if isinstance(args.device_type, int):
            name = _DEVICES.get(args.device_type, f"device type {name}")
        is_single = name == "cpu" or args.device_id in (None, -1)
        return name if is_single else f"{name}:{args.device_id}"

    args = [e.args for e in events]
    return {
        "rank": [rank] * len(events),
        "stream": [-1 - threads.number((e.pid, e.tid)) for e in events],
        "time_ns": nanoseconds([e.ts for e in events], exact)[0],
        "size_bytes": integers([a.allocated for a in args], missing=0),
        "address": integers([a.address for a in args]),
        "allocated_bytes": integers([a.total_allocated for a in args]),
        "reserved_bytes": integers([a.total_reserved for a in args]),
        "device": [device(a) for a in args],
    }


def _operators(rows: list[_FullEvent]):
    args = [e.args or _NO_ARGS for e in rows]
    return {
        "shapes": _texts([a.shapes for a in args]),
        "types": _texts([a.types for a in args]),
        "strides": _texts([a.strides for a in args]),
        "inputs": _texts([a.inputs for a in args]),
        "sequence": integers([a.sequence for a in args]),
        "forward_thread": integers([a.forward_thread for a in args]),
    }


def _texts(values: list[msgspec.Raw]):
    """JSON of each value without blanks, "" without a value; most repeat, so each text
    is decoded once.
    """
    raw = list(map(bytes, values))
    texts = {}
    for text in set(raw):
        texts[text] = ""
        if text not in _NULL:
            with contextlib.suppress(msgspec.DecodeError):  # such as NaN
                texts[text] = msgspec.json.encode(msgspec.json.decode(text)).decode()
    return [texts[text] for text in raw]


def _syncs(rows: list[_FullEvent]):
    args = [e.args or _NO_ARGS for e in rows]
    return {
        "name": [str(a.sync_kind or e.name) for a, e in zip(args, rows, strict=True)],
        "stream": integers([a.waits_for_stream for a in args]),
        "correlation": integers([a.waits_for_correlation for a in args]),
    }


_NO_ARGS = _FullArgs()
_COLUMNS: dict[str, Callable[[list], dict]] = {
    "calls": _calls,
    "operators": _operators,
    "graphs": lambda rows: {"graph": integers([e.args.graph for e in rows])},
    "syncs": _syncs,
}


def _joined(parts: list[dict]):
    """Columns of a table from its pieces."""

    def array(values):
        # an array of text is as wide as its longest item: texts stay objects
        is_text = len(values) > 0 and isinstance(values[0], str)
        return np.asarray(values, dtype=object if is_text else None)

    return {
        key: np.concatenate([array(part[key]) for part in parts]) for key in parts[0]
    }
