"""Pictures of memory over time, of snapshots too, and of the holders of its peak: the
tables of `traces.operators.memory`.

Memory in use is purple, what is there from before the trace grey; a dark line is what
the allocator has reserved.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import bytes_unit, format_bytes, format_s
from madmax_lib.timeline import Timeline
from madmax_lib.traces.operators.memory import (
    BEFORE,
    held_at_peak,
    memory_timeline,
    peak,
)
from madmax_lib.view.drawing import (
    empty,
    fill_of,
    finish,
    new_axes,
    note,
    short_name,
    thinned,
)

if TYPE_CHECKING:
    from madmax_lib.traces.forensics.read_snapshots import Snapshot


_NO_EVENTS = "No allocator events: record with profile_memory=True"
_NO_HISTORY = (
    "A snapshot without history: call "
    "torch.cuda.memory._record_memory_history() before the steps"
)
_MOST_STEPS = 12  # up to which steps are numbered
_VISIBLE = 0.1  # of the highest level: memory from before needs as much for its label


class _Tables(NamedTuple):
    series: pd.DataFrame  # memory over time
    peaks: pd.DataFrame  # of each device
    holders: pd.DataFrame  # who holds the peaks


def plot_memory(
    timeline: "Timeline | Snapshot",
    ax: Axes | None = None,
    *,
    device: str | None = None,
) -> Axes:
    """Allocated and reserved memory of one device over time, steps marked, the peak
    labelled with its top holders.

    The device with the highest peak, or of those so named. Of a snapshot without times
    (before torch 2.2) over its events. Raises ValueError for a device that has no
    events.
    """
    tables = _tables(timeline)
    peaks = _of_device(tables.peaks, device)
    series = tables.series
    if peaks.empty or series.empty:
        if isinstance(timeline, Timeline):
            return empty(ax, series, _NO_EVENTS, timeline)
        return empty(ax, series, _NO_HISTORY, tables.holders)
    top = peaks.loc[peaks["peak_bytes"].idxmax()]
    series = _of_peak(series, top)
    drawn = thinned(series, "allocated_bytes")
    levels = [top["peak_bytes"], top["reserved_bytes"]]
    unit, factor = bytes_unit(np.nanmax(levels), binary=True)
    ax = ax or new_axes(height=3.2)
    _draw_levels(ax, drawn, series.attrs["source"], top["peak_bytes"], factor)
    _mark_steps(ax, series)
    _label_peak(ax, top, _of_peak(tables.holders, top), factor)
    x = "time [ms]"
    moment = f"after {format_s(top['time_s'])}"
    if "moment" in top:  # of a snapshot without times
        x = "event"
        moment = f"at {top['moment']}"
    where = f"{top['device']} of rank {top['rank']}"
    return finish(
        ax,
        drawn,
        f"Peak {format_bytes(top['peak_bytes'], binary=True)} on {where} {moment}",
        x=x,
        y=f"memory [{unit}]",
        origin=tables.holders,
    )


def _tables(source):
    """Memory over time, the peaks, and who holds them."""
    if isinstance(source, Timeline):
        holders = held_at_peak(source, 3)
        return _Tables(memory_timeline(source), peak(source), holders)
    from madmax_lib.traces.forensics import snapshots  # late: a wing

    series = snapshots.snapshot_timeline(source).assign(step=-1)
    peaks = snapshots.snapshot_peak(source)
    if series["time_s"].isna().any():
        # the axis is in ms, so that event n stands at n
        series["time_s"] = series.groupby(["rank", "device"]).cumcount() / 1e3
        peaks["time_s"] = peaks["event"] / 1e3
        peaks["moment"] = "event " + peaks["event"].astype(str)
    holders = snapshots.snapshot_held(source, top=3).rename(
        columns={"site": "operator"}
    )
    # the innermost frame of a stack "f < g < h"
    holders["operator"] = holders["operator"].str.split(" < ").str[0]
    return _Tables(series, peaks, holders)


def _of_device(table, device):
    """Rows of the devices of a name, all without one."""
    part = table if device is None else table[table["device"] == device]
    if len(table) and part.empty:
        devices = ", ".join(table["device"].unique())
        raise ValueError(
            f"device {device!r} has no allocator events; there are {devices}"
        )
    return part


def _of_peak(table, top):
    """Rows of the device and rank of a peak."""
    return table[(table["device"] == top["device"]) & (table["rank"] == top["rank"])]


def _draw_levels(ax, drawn, source, peak_bytes, factor):
    """Draw what is from before, what is allocated above it, and the line of what is
    reserved.
    """
    time_ms = drawn["time_s"] * 1e3
    older = drawn["before_bytes"] / factor
    allocated = drawn["allocated_bytes"] / factor
    reserved = drawn["reserved_bytes"] / factor
    ax.fill_between(time_ms, older, step="post", **fill_of("idle", source))
    above = fill_of("memory", source)
    ax.fill_between(time_ms, older, allocated, step="post", **above)
    ax.step(time_ms, reserved, where="post", color="#444444", linewidth=1)
    at_end = {"dx": -3, "dy": 3, "va": "baseline", "ha": "right", "fontsize": 8}
    if reserved.notna().any():
        note(ax, time_ms.iloc[-1], reserved.iloc[-1], "reserved", **at_end)
    if older.iloc[-1] > _VISIBLE * allocated.max():
        note(ax, time_ms.iloc[-1], 0, BEFORE, **at_end)
    # room above the peak for the names of its holders
    high = np.nanmax([1.6 * peak_bytes / factor, 1.15 * reserved.max(), 1e-9])
    begin_ms = time_ms.iloc[0]
    ax.set(xlim=(begin_ms, max(time_ms.iloc[-1], begin_ms + 1e-3)), ylim=(0, high))


def _mark_steps(ax, series):
    """A line where each step begins to allocate, numbered unless they are many."""
    first_s = series[series["step"] >= 0].groupby("step")["time_s"].min()
    if len(first_s) < 2:
        return
    # x in ms, y in shares of the axes
    text = {"transform": ax.get_xaxis_transform(), "va": "top", "fontsize": 7}
    for step, time_s in first_s.items():
        ax.axvline(time_s * 1e3, color="#888888", linewidth=0.6, linestyle=":")
        if len(first_s) <= _MOST_STEPS:
            ax.text(time_s * 1e3, 0.99, f" step {step}", **text)


def _label_peak(ax, top, holders, factor):
    """A dot at the peak and a text on its wider side: who holds it."""
    names = [
        f"{row.share:.0%} {short_name(row.operator)}" for row in holders.itertuples()
    ]
    time_ms = top["time_s"] * 1e3
    level = top["peak_bytes"] / factor
    ax.plot(time_ms, level, "o", color="black", markersize=4)
    side = {"dx": 8, "ha": "left"}
    if time_ms > np.mean(ax.get_xlim()):
        side = {"dx": -8, "ha": "right"}
    note(
        ax,
        time_ms,
        level,
        "\n".join(["held by", *names]),
        dy=5,
        va="bottom",
        **side,
    )
