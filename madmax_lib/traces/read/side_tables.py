"""Side tables of a trace: what its events say beyond their times. Collective metadata,
allocator events, counters, shapes and waits.

A second pass over the file with every field, made when an analysis first asks
(`Timeline.side_tables`).
"""

import contextlib
import json
import re
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
from madmax_lib.traces.read.event_columns import (
    batches,
    complete,
    with_exact_times,
)
from madmax_lib.traces.read.events import ARGS_KEYS, Args, Event
from madmax_lib.traces.read.values import (
    FAR_US,
    Codes,
    integers,
    nanoseconds,
    recorded_codes,
)

# allreduce, _allreduce_base and ALL-REDUCE are all_reduce; the order is that of
# COLLECTIVES, in which a reduce-scatter is found before reduce and scatter
_SPELLINGS = {
    re.compile(collective.replace("_", ".?"), re.IGNORECASE): collective
    for collective in COLLECTIVES
    if collective not in POINT_TO_POINT
}
_NO_TEXT = msgspec.Raw(b"")
_NULL = (b"", b"null")
_OPERATORS = ("cpu_op", "operator")
# fields of _FullArgs by table and column, where they are called otherwise
_FIELDS = {
    ("calls", "ranks"): "group_ranks",
    ("calls", "sequence"): "sequence_in_group",
    ("syncs", "stream"): "waits_for_stream",
    ("syncs", "correlation"): "waits_for_correlation",
}


class _FullArgs(Args, frozen=True, gc=False, rename=ARGS_KEYS):
    """Every field of args that an analysis reads."""

    group_size: Any = None
    in_splits: Any = None
    out_splits: Any = None
    sequence_in_group: Any = None
    source_rank: Any = None
    target_rank: Any = None
    address: Any = None
    allocated: Any = None
    allocated_bytes: Any = None
    reserved_bytes: Any = None
    device_type: Any = None
    device_id: Any = None
    shapes: msgspec.Raw = _NO_TEXT
    types: msgspec.Raw = _NO_TEXT
    strides: msgspec.Raw = _NO_TEXT
    inputs: msgspec.Raw = _NO_TEXT
    sequence: Any = None
    forward_thread: Any = None
    sync_kind: Any = None
    waits_for_stream: Any = None
    waits_for_correlation: Any = None
    value: Any = None


_ARGS_KEYS = dict(
    zip(_FullArgs.__struct_fields__, _FullArgs.__struct_encode_fields__, strict=True)
)


class _FullEvent(Event, gc=False):
    args: _FullArgs | None = None


def recorded_args(side_tables: SideTables) -> pd.Series:
    """Text by row of the spans: members of the JSON object of its args, which tell what
    is known of an operator or a collective beside its times.
    """
    parts = []
    for name in ("operators", "calls"):
        table = side_tables[name]
        text = pd.Series("", index=table["row"], dtype=object)
        for column, dtype in SIDE_TABLES[name].items():
            field = _FIELDS.get((name, column), column)
            # members of a group stand beside its name
            if field not in _ARGS_KEYS or column == "ranks":
                continue
            write = str if dtype == "int64" else _WRITTEN.get(column, json.dumps)
            # a column has few values, and each is written once
            values = table[column].unique()
            written = {
                value: f'"{_ARGS_KEYS[field]}": {write(value)}, '
                for value in values
                if value not in ("", -1)
            }
            text += table[column].map(written).astype(object).fillna("").to_numpy()
        parts.append(text)
    return pd.concat(parts).groupby(level=0).sum()


def load_side_tables(path: Path, sha256: str, rank: int) -> dict[str, pd.DataFrame]:
    """Tables of a file, from the cache if they are there; their rows are those of
    `event_columns.read_columns`. Raises as `kineto` says.
    """

    def read():
        if content_sha256(path) != sha256:
            raise ValueError(f"{path}: has changed since it was read; read it again")
        _, parts = with_exact_times(path, partial(_gather, rank=rank))
        # tables that are not empty
        tables = {
            name: conform(name, _joined(part)) for name, part in parts.items() if part
        }
        # the cache holds timelines: one without spans carries the tables
        no_spans = {column: pd.Series([], dtype=d) for column, d in SPANS.items()}
        side_tables = SideTables(partial(dict, tables))
        return Timeline(pd.DataFrame(no_spans), side_tables=side_tables)

    return cached(sha256, f"side tables {rank}", read).side_tables.present()


def _gather(trace, exact, rank):
    """Columns of each table, in pieces; rows are counted as `read_columns` counts."""
    parts = {name: [] for name in SIDE_TABLES}
    threads = Codes()
    rows_before = 0
    for events in batches(decode_pieces(trace, exact=exact, event=_FullEvent)):
        rows = _with_times(complete(events), exact)
        threads.of([(e.pid, e.tid) for e in rows])
        for name, chosen in _chosen(rows).items():
            if chosen:
                columns = _columns(name, [rows[i] for i in chosen])
                parts[name].append({"row": rows_before + np.array(chosen), **columns})
        rows_before += len(rows)
        # allocator events are instants, without a duration: they are no rows
        instants = [
            e for e in events if e.ph == "i" and e.name == "[memory]" and e.args
        ]
        if instants:
            instants = _with_times(instants, exact)
            parts["memory"].append(_memory(instants, exact, threads, rank))
        if samples := [e for e in events if e.ph == "C" and e.args]:
            samples = _with_times(samples, exact)
            counters = {
                "rank": [rank] * len(samples),
                "time_ns": nanoseconds([e.ts for e in samples], exact)[0],
                "name": [str(e.name) for e in samples],
                "value": np.array([_number(e.args.value) for e in samples]),
            }
            parts["counters"].append(counters)
    # the file's zero may stand behind its events, so it is added last
    for part in parts["memory"] + parts["counters"]:
        part["time_ns"] = part["time_ns"] + trace.base_ns
    return parts


def _chosen(rows):
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
    }


def _with_times(events, exact):
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


def _columns(name, rows):
    """Columns of a table that are fields of args: numbers, and texts by _TEXTS."""
    args = [e.args or _NO_ARGS for e in rows]
    columns = {}
    for column, dtype in SIDE_TABLES[name].items():
        field = _FIELDS.get((name, column), column)
        if field not in _FullArgs.__struct_fields__:
            continue
        values = [getattr(each, field) for each in args]
        if column in _TEXTS:
            columns[column] = _TEXTS[column](values)
        elif dtype == "int64":
            columns[column] = integers(values)
    if name == "syncs":
        kinds = [each.sync_kind for each in args]
        names = [kind or e.name for kind, e in zip(kinds, rows, strict=True)]
        columns["name"] = list(map(str, names))
    return columns


def _listed(values):
    """Lists of numbers as text, up to where they are shortened."""
    texts = [str(value or "").split("...")[0] for value in values]
    return [",".join(re.findall(r"\d+", text)) for text in texts]


def _collective(name):
    """Canonical name: all_reduce for allreduce and _allreduce_base, all_to_all for
    all_to_allv.

    >>> _collective("_reduce_scatter_base"), _collective("send")
    ('reduce_scatter', 'send')
    """
    matches = (each for pattern, each in _SPELLINGS.items() if pattern.search(name))
    return next(matches, name)


def _memory(events, exact, threads, rank):
    def device(args):
        name = str(args.device_type)
        if isinstance(args.device_type, int):
            name = recorded_codes("device type").get(
                args.device_type, f"device type {name}"
            )
        is_single = name == "cpu" or args.device_id in (None, -1)
        return name if is_single else f"{name}:{args.device_id}"

    args = [e.args for e in events]
    return _columns("memory", events) | {
        "rank": [rank] * len(events),
        "stream": [-1 - threads.number((e.pid, e.tid)) for e in events],
        "time_ns": nanoseconds([e.ts for e in events], exact)[0],
        "size_bytes": integers([a.allocated for a in args], missing=0),
        "device": [device(a) for a in args],
    }


def _number(value):
    # Kineto's and cuspy's counters have their value under an empty key; others' none
    return float(value) if isinstance(value, int | float) else np.nan


def _texts(values):
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


_NO_ARGS = _FullArgs()
# columns of text, made of the values of their rows
_TEXTS = {
    "collective": lambda values: [_collective(str(value)) for value in values],
    "dtype": lambda values: [str(value or "").lower() for value in values],
    **dict.fromkeys(("ranks", "in_splits", "out_splits"), _listed),
    **dict.fromkeys(("shapes", "types", "strides", "inputs"), _texts),
}


# columns that are JSON already, or lists, in an event's args; others are plain words
_WRITTEN = {
    **dict.fromkeys(("shapes", "types", "strides", "inputs"), str),
    **dict.fromkeys(("in_splits", "out_splits"), '"[{}]"'.format),
}


def _joined(parts):
    """Columns of a table from its pieces."""

    def array(values):
        # an array of text is as wide as its longest item: texts stay objects
        is_text = len(values) > 0 and isinstance(values[0], str)
        return np.asarray(values, dtype=object if is_text else None)

    return {
        key: np.concatenate([array(part[key]) for part in parts]) for key in parts[0]
    }
