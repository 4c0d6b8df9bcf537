"""Spans of timelines as the binary columns that the canvas draws, in rows by rank and
stream.

The columns are start, duration (ticks of about["tick_s"]) and name (index) as int32,
with `hosts` the place of the launch too (-1 without), and kind as uint8: all spans of a
column together; rows one after another, each in order of start. Host threads are as
many rows as their calls are deep.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import BUSY_KINDS, Timeline, busy_spans
from madmax_lib.traces.read.nesting import Nest
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.view.words import COLORS, LABELS, lanes

_LARGEST = 2**31 - 1
_HOST = {"cpu": ("host", "#5f7487"), "annotation": ("annotation", "#8a6d3b")}
_DEEPEST = 40  # levels of a host thread that are drawn


def columns(
    timelines: Sequence[Timeline], titles: Sequence[str], *, hosts: bool = False
) -> tuple[dict, bytes]:
    """Rows, names and kinds as what JSON takes, and the columns; hosts: with host
    threads, and who launched what.

    Raises ValueError for no timeline, for one without device work, and for titles that
    are not as many.
    """
    if not timelines:
        raise ValueError("nothing to show: give at least one timeline")
    if len(titles) != len(timelines):
        raise ValueError(f"{len(titles)} titles for {len(timelines)} timelines")
    if not all(len(busy_spans(timeline.spans)) for timeline in timelines):
        raise ValueError("nothing to show: no span of kind " + ", ".join(BUSY_KINDS))
    rows = []
    spans = []
    for panel, (timeline, title) in enumerate(zip(timelines, titles, strict=True)):
        placed = _placed(timeline, hosts)
        # each timeline from its own first work, its rows below those of the one before
        start_ns = placed.spans["start_ns"] - placed.spans["start_ns"].min()
        row = placed.spans["place"] + sum(map(len, rows))
        spans.append(placed.spans.assign(start_ns=start_ns, place=row))
        simulated = timeline.meta.source == "simulated"
        rows.append(placed.rows.assign(panel=panel, simulated=simulated, title=""))
        rows[-1].loc[0, "title"] = title
    times = pd.concat([part[["place", "start_ns", "dur_ns"]] for part in spans])
    row = times["place"].to_numpy()
    # spans are sent row by row: those of a row are first to end
    count = np.bincount(row)
    end = count.cumsum()
    ranges = pd.concat(rows).drop(columns="place")
    ranges = ranges.assign(first=end - count, end=end)
    start_ns = times["start_ns"].to_numpy()
    end_ns = start_ns + times["dur_ns"].clip(lower=0).to_numpy()
    name = union_categoricals([part["name"] for part in spans])
    name = name.remove_unused_categories()
    kind = union_categoricals([part["kind"] for part in spans])
    kinds = [each for each in (*BUSY_KINDS, *_HOST) if (kind == each).any()]
    looks = {each: (LABELS[each], COLORS[each]) for each in BUSY_KINDS} | _HOST
    last_ns = int(end_ns.max())
    # a nanosecond, or what lets the last end fit into an int32
    tick_ns = max(1, math.ceil(last_ns / _LARGEST))
    about = {
        "rows": ranges.to_dict("records"),
        "names": list(name.categories),
        "count": len(row),
        "tick_s": tick_ns / NS_PER_S,
        "reach": max(last_ns // tick_ns, 1),
        "links": hosts,
        "kinds": [{"label": looks[each][0], "color": looks[each][1]} for each in kinds],
    }
    order = np.lexsort((start_ns, row))  # by row, then by start
    start = start_ns // tick_ns
    numbers = [start[order], (end_ns // tick_ns - start)[order], name.codes[order]]
    if hosts:
        numbers.append(_launched_at(timelines, spans, order))
    codes = kind.set_categories(kinds).codes[order].astype("uint8")
    data = [column.astype("int32").tobytes() for column in numbers]
    return about, b"".join([*data, codes.tobytes()])


class _Placed(NamedTuple):
    """Rows of a timeline from the top, and its spans."""

    rows: pd.DataFrame  # rank, stream, level (-1: at work), label, place
    spans: (
        pd.DataFrame
    )  # with the place of their row, and `at`: their row in the timeline


def _placed(timeline, hosts):
    busy = busy_spans(timeline.spans)
    rows = lanes(busy, timeline.meta)[["rank", "stream", "label"]].assign(level=-1)
    spans = busy.assign(level=-1, at=busy.index)
    if hosts:
        calls = _nested(timeline)
        levels = calls[["rank", "stream", "level"]].drop_duplicates()
        # threads have negative numbers: the first one, -1, comes first
        levels = levels.sort_values(
            ["rank", "stream", "level"], ascending=[True, False, True]
        )
        labels = [
            f"rank {rank} · calls {-stream}" if level == 0 else ""
            for rank, stream, level in levels.itertuples(index=False)
        ]
        rows = pd.concat([rows, levels.assign(label=labels)])
        # host threads below the streams of their rank
        rows = rows.sort_values("rank", kind="stable", ignore_index=True)
        spans = pd.concat([spans, calls], ignore_index=True)
    rows["place"] = range(len(rows))
    keys = ["rank", "stream", "level"]
    return _Placed(rows, spans.merge(rows[[*keys, "place"]], on=keys, how="left"))


def _nested(timeline):
    """Calls and annotations of host threads, with how deep each lies in those around
    it.
    """
    spans = timeline.spans
    of_host = spans["kind"].isin(_HOST) & (spans["stream"] < 0)
    nest = Nest(spans, np.flatnonzero(of_host))
    level = np.zeros(len(nest.rows), dtype="int64")
    around = nest.parent
    # all calls climb at once, a level a turn, until none is inside of another
    while (inside := around >= 0).any():
        level += inside
        around = np.where(inside, nest.parent[around], -1)
    calls = spans.iloc[nest.rows].assign(level=level, at=nest.rows)
    return calls[level < _DEEPEST]


def _launched_at(timelines, spans, order):
    """Position of the launch of each span (n,) among the spans as drawn, -1 without."""
    # the inverse of the order: position[i] is where span i is drawn
    position = np.argsort(order)
    before = 0  # spans of the timelines before
    launch = np.full(len(order), -1, dtype="int64")
    for timeline, part in zip(timelines, spans, strict=True):
        work = device_work(timeline)
        # one more, which -1 (no launch) finds at the end
        of_row = np.full(len(timeline) + 1, -1, dtype="int64")
        of_row[part["at"]] = position[before : before + len(part)]
        launch[of_row[work["row"]]] = of_row[work["launch_row"]]
        before += len(part)
    return launch
