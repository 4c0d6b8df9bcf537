"""How do the tables of `traces.operators.memory` look? Memory over time, of snapshots
too, and the holders of its peak.

Memory in use is violet, what is there from before the trace grey; a dark line is what
the allocator has reserved.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import bytes_unit, format_bytes, format_s
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.forensics.read_snapshots import Snapshot
from madmax_lib.traces.forensics.snapshots import (
    snapshot_held,
    snapshot_peak,
    snapshot_timeline,
)
from madmax_lib.traces.operators.memory import (
    BEFORE,
    held_at_peak,
    memory_timeline,
    peak,
)
from madmax_lib.view import drawing as draw

__all__ = ["plot_held", "plot_memory"]

_NO_EVENTS = "No allocator events: record with profile_memory=True"
_NO_HISTORY = (
    "A snapshot without history: call "
    "torch.cuda.memory._record_memory_history() before the steps"
)
_MOST_STEPS = 12  # up to which steps are numbered


def plot_memory(
    timeline: Timeline | Snapshot, ax: Axes | None = None, *, device: str | None = None
) -> Axes:
    """Allocated and reserved memory of one device over time, steps marked, the peak
    labelled with its top holders.

    The device with the highest peak, or of those so named. Of a snapshot without times
    (before torch 2.2) over its events. Raises ValueError for a device that has no
    events.
    """
    table, peaks, holders = _tables(timeline)
    peaks = _named(peaks, device)
    if not len(peaks) or not len(table):
        missing = _NO_EVENTS if isinstance(timeline, Timeline) else _NO_HISTORY
        return draw.empty(
            ax, table, missing, timeline if isinstance(timeline, Timeline) else holders
        )
    top = peaks.loc[peaks["peak_bytes"].idxmax()]
    table = table[(table["device"] == top["device"]) & (table["rank"] == top["rank"])]
    drawn = draw.thinned(table, "allocated_bytes")
    unit, factor = bytes_unit(np.nanmax([top["peak_bytes"], top["reserved_bytes"]]))
    time_ms = drawn["time_s"] * 1e3
    older = drawn["before_bytes"] / factor
    reserved = drawn["reserved_bytes"] / factor
    parts = pd.DataFrame(
        {"idle": older, "other": drawn["allocated_bytes"] / factor - older}
    )
    ax = ax or draw.new_axes(height=3.2)
    draw.areas(
        ax,
        time_ms,
        parts,
        {"idle": "idle", "other": "other"},
        source=table.attrs["source"],
        step="post",
    )
    ax.step(time_ms, reserved, where="post", color="#444444", linewidth=1)
    at_end = {"dx": -3, "dy": 3, "va": "baseline", "ha": "right", "fontsize": 8}
    if reserved.notna().any():
        draw.note(ax, time_ms.iloc[-1], reserved.iloc[-1], "reserved", **at_end)
    if older.iloc[-1] > 0.1 * drawn["allocated_bytes"].max() / factor:
        draw.note(ax, time_ms.iloc[-1], 0, BEFORE, **at_end)
    high = np.nanmax([1.6 * top["peak_bytes"] / factor, 1.15 * reserved.max(), 1e-9])
    ax.set(
        xlim=(time_ms.iloc[0], max(time_ms.iloc[-1], time_ms.iloc[0] + 1e-3)),
        ylim=(0, high),
    )
    _mark_steps(ax, table)
    _label_peak(ax, top, holders, factor)
    where = f"{top['device']} of rank {top['rank']}"
    when, x = (
        (f"at {top['moment']}", "event")
        if "moment" in top
        else (f"after {format_s(top['time_s'])}", "time [ms]")
    )
    title = f"Peak {format_bytes(top['peak_bytes'])} on {where} {when}"
    return draw.finish(ax, drawn, title, x=x, y=f"memory [{unit}]", origin=holders)


def _tables(
    source: Timeline | Snapshot,
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Memory over time, the peaks, and who holds them."""
    if isinstance(source, Timeline):
        return memory_timeline(source), peak(source), held_at_peak(source, 3)
    table = snapshot_timeline(source).assign(step=-1)
    peaks = snapshot_peak(source)
    level = table["allocated_bytes"].fillna(
        table["requested_bytes"]
    )  # where sizes of blocks cannot be told
    if table["time_s"].isna().any():
        table["time_s"] = table.groupby(["rank", "device"]).cumcount() / 1e3
        peaks["time_s"] = peaks["event"] / 1e3
        peaks["moment"] = "event " + peaks["event"].astype(str)
    holders = snapshot_held(source, top=3).rename(columns={"site": "operator"})
    holders["operator"] = holders["operator"].str.split(" < ").str[0]
    return table.assign(allocated_bytes=level), peaks, holders


def plot_held(
    table: pd.DataFrame, ax: Axes | None = None, *, device: str | None = None
) -> Axes:
    """Bars of `held_at_peak` for one device: bytes of each operator, and their share as
    text.

    The device with the highest peak, or of those so named. Raises ValueError for one
    that has no events.
    """
    part = _named(table, device)
    if not len(part):
        return draw.empty(ax, table, _NO_EVENTS)
    rank, device = (
        part.groupby(["rank", "device"], sort=False)["size_bytes"].sum().idxmax()
    )
    part = part[(part["rank"] == rank) & (part["device"] == device)]
    unit, factor = bytes_unit(part["size_bytes"].max())
    counts = [
        "" if np.isnan(count) else f", {draw.plural(count, 'allocation')}"
        for count in part["count"]
    ]
    rows = [draw.short_name(name) for name in part["operator"]]
    older = part["operator"] == BEFORE
    title = (
        f"{rows[part['share'].argmax()]} holds {part['share'].max():.0%} of the peak"
    )
    ending = {
        "notes": part["share"].map("{:.1%}".format) + counts,
        "rows": rows,
        "origin": table,
    }
    ending["x"] = f"held at the peak of {device} of rank {rank} [{unit}]"
    kinds = list(older.map({True: "idle", False: "other"}))
    return draw.bar_chart(
        ax, part, part["size_bytes"].clip(lower=0) / factor, title, kinds, **ending
    )


def _named(table: pd.DataFrame, device: str | None) -> pd.DataFrame:
    """Rows of the devices of a name, all without one."""
    part = table if device is None else table[table["device"] == device]
    if len(table) and not len(part):
        raise ValueError(
            f"device {device!r} has no allocator events; there are "
            f"{', '.join(table['device'].unique())}"
        )
    return part


def _mark_steps(ax: Axes, table: pd.DataFrame) -> None:
    """A line where each step begins to allocate, numbered unless they are many."""
    first = table[table["step"] >= 0].groupby("step")["time_s"].min() * 1e3
    for step, time_ms in first.items() if len(first) > 1 else ():
        ax.axvline(time_ms, color="#888888", linewidth=0.6, linestyle=":")
        if len(first) <= _MOST_STEPS:
            ax.text(
                time_ms,
                0.99,
                f" step {step}",
                transform=ax.get_xaxis_transform(),
                va="top",
                fontsize=7,
            )


def _label_peak(ax: Axes, top: pd.Series, held: pd.DataFrame, factor: float) -> None:
    """A dot at the peak and a text on its wider side: who holds it."""
    held = held[(held["rank"] == top["rank"]) & (held["device"] == top["device"])]
    holders = [
        f"{row.share:.0%} {draw.short_name(row.operator)}" for row in held.itertuples()
    ]
    time_ms = top["time_s"] * 1e3
    peak_size = top["peak_bytes"] / factor
    ax.plot(time_ms, peak_size, "o", color="black", markersize=4)
    side = (
        {"dx": -8, "ha": "right"}
        if time_ms > np.mean(ax.get_xlim())
        else {"dx": 8, "ha": "left"}
    )
    draw.note(
        ax,
        time_ms,
        peak_size,
        "\n".join(["held by", *holders]),
        dy=5,
        va="bottom",
        box=True,
        **side,
    )
