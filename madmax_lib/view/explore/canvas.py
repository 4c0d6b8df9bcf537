"""What does the canvas draw? The spans of timelines as binary columns, in rows by rank
and stream.

The columns are start, duration (ticks of about["tick_s"]) and name (index) as int32,
with `hosts` the place of the launch too (-1 without), and kind as uint8: all spans of a
column together; rows one after another, each in order of start. Host threads are as
many rows as their calls are deep.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.read.nesting import Nest
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.view.commands.words import COLORS, LABELS, lanes

__all__ = ["busy_spans", "columns"]

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
    if not all(len(busy_spans(timeline)) for timeline in timelines):
        raise ValueError("nothing to show: no span of kind " + ", ".join(BUSY_KINDS))
    placed = [_placed(timeline, hosts) for timeline in timelines]
    rows, row = _rows(timelines, titles, placed)
    spans = [spans for _, spans in placed]
    start_ns = np.concatenate(
        [part["start_ns"] - part["start_ns"].min() for part in spans]
    )
    end_ns = start_ns + np.concatenate([part["dur_ns"].clip(lower=0) for part in spans])
    name, kind = (
        union_categoricals([part[column] for part in spans])
        for column in ("name", "kind")
    )
    name = name.remove_unused_categories()
    kinds = [each for each in (*BUSY_KINDS, *_HOST) if (kind == each).any()]
    tick_ns = max(1, math.ceil(int(end_ns.max()) / _LARGEST))
    about = {"rows": rows, "names": list(name.categories), "count": len(row)}
    about |= {
        "tick_s": tick_ns / NS_PER_S,
        "reach": max(int(end_ns.max()) // tick_ns, 1),
        "links": hosts,
    }
    about["kinds"] = [
        dict(zip(("label", "color"), _look(each), strict=True)) for each in kinds
    ]
    order = np.lexsort((start_ns, row))
    start = start_ns // tick_ns
    numbers = [start[order], (end_ns // tick_ns - start)[order], name.codes[order]]
    if hosts:
        numbers.append(_launched_at(timelines, spans, order))
    codes = kind.set_categories(kinds).codes[order].astype(np.uint8)
    return about, b"".join(
        [*(column.astype(np.int32).tobytes() for column in numbers), codes.tobytes()]
    )


def busy_spans(timeline: Timeline) -> pd.DataFrame:
    """The spans in which a device, or a thread that stands for one, is at work."""
    return timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]


def _look(kind: str) -> tuple[str, str]:
    return _HOST[kind] if kind in _HOST else (LABELS[kind], COLORS[kind])


def _placed(timeline: Timeline, hosts: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows (rank, stream, level, label) from the top, and the spans with the place of
    their row; level -1: at work.
    """
    busy = busy_spans(timeline)
    rows = lanes(busy, timeline.meta)[["rank", "stream", "label"]].assign(level=-1)
    spans = busy.assign(level=-1, at=busy.index)
    if hosts:
        calls = _nested(timeline)
        levels = calls[["rank", "stream", "level"]].drop_duplicates()
        levels = levels.assign(thread=-levels["stream"]).sort_values(
            ["rank", "thread", "level"]
        )
        text = (
            "rank "
            + levels["rank"].astype(str)
            + " · calls "
            + levels["thread"].astype(str)
        )
        rows = pd.concat(
            [rows, levels.assign(label=text.where(levels["level"] == 0, ""))]
        ).drop(columns="thread")
        rows = rows.sort_values("rank", kind="stable", ignore_index=True)
        spans = pd.concat([spans, calls], ignore_index=True)
    rows = rows.assign(place=range(len(rows)))
    return rows, spans.merge(
        rows[["rank", "stream", "level", "place"]],
        on=["rank", "stream", "level"],
        how="left",
    )


def _nested(timeline: Timeline) -> pd.DataFrame:
    """Calls and annotations of host threads, with how deep each lies in those around
    it.
    """
    spans = timeline.spans
    nest = Nest(
        spans, np.flatnonzero(spans["kind"].isin(_HOST) & (spans["stream"] < 0))
    )
    level = np.zeros(len(nest.rows), dtype=np.int64)
    around = nest.parent
    while (inside := around >= 0).any():
        level += inside
        around = np.where(inside, nest.parent[around], -1)
    calls = spans.iloc[nest.rows].assign(level=level, at=nest.rows)
    return calls[level < _DEEPEST]


def _rows(timelines, titles, placed) -> tuple[list[dict], np.ndarray]:
    """The rows of all timelines with the range of their spans, and the row of each
    span.
    """
    rows = []
    places = []
    for panel, (timeline, title, (drawn, spans)) in enumerate(
        zip(timelines, titles, placed, strict=True)
    ):
        places.append(len(rows) + spans["place"].to_numpy())
        about = {
            "title": "",
            "panel": panel,
            "simulated": timeline.meta.source == "simulated",
        }
        rows += [
            row | about
            for row in drawn[["label", "rank", "stream", "level"]].to_dict("records")
        ]
        rows[-len(drawn)]["title"] = title
    row = np.concatenate(places)
    ends = np.bincount(row, minlength=len(rows)).cumsum().tolist()
    ranges = [{"first": first, "end": end} for first, end in pairwise([0, *ends])]
    return [about | place for about, place in zip(rows, ranges, strict=True)], row


def _launched_at(
    timelines: Sequence[Timeline], spans: list[pd.DataFrame], order: np.ndarray
) -> np.ndarray:
    """Where the launch of each span (n,) is drawn, -1 without."""
    place = np.empty(len(order), dtype=np.int64)
    before = 0
    place[order] = np.arange(len(order))
    launch = np.full(len(order), -1, dtype=np.int64)
    for timeline, part in zip(timelines, spans, strict=True):
        work = device_work(timeline)
        of_row = np.full(
            len(timeline) + 1, -1, dtype=np.int64
        )  # the last one: no launch
        of_row[part["at"].to_numpy()] = place[before : before + len(part)]
        launch[of_row[work["row"].to_numpy()]] = of_row[work["launch_row"].to_numpy()]
        before += len(part)
    return launch
