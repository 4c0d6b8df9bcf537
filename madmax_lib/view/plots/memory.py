"""How do the tables of `traces.operators.memory` look? Memory over time, by category, and the holders of its peak.

Memory in use is violet, what is there from before the trace grey; a dark line is what the allocator has reserved.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.timeline import Timeline
from madmax_lib.traces.operators.memory import BEFORE, CATEGORIES, held_at_peak, memory_timeline, peak
from madmax_lib.units import bytes_unit, format_bytes, format_s
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, new_axes

__all__ = ["plot_held", "plot_memory", "plot_memory_categories"]

_BINS = 300  # of the time axis: each keeps its first, lowest, highest and last value, so that pictures stay small
_CATEGORY_COLORS = dict(
    zip(
        CATEGORIES,
        ("#4c5b7a", "#8a7bb5", "#b9c6dd", "#d9cf8f", "#c2566e", "#5fa3a3", "#e3a7b3", COLORS["idle"]),
        strict=True,
    )
)


def plot_memory(
    timeline: Timeline, ax: Axes | None = None, *, rank: int | None = None, device: str | None = None
) -> Axes:
    """Allocated and reserved memory of one device over time, steps marked, the peak labelled with its top holders.

    Without rank or device: the one with the highest peak. Raises ValueError for a device that has no events.
    """
    peaks = _chosen(peak(timeline), rank, device)
    if not len(peaks):
        return _empty(ax, timeline)
    ax, top = ax or new_axes(height=3.2), peaks.loc[peaks["peak_bytes"].idxmax()]
    table = _chosen(memory_timeline(timeline, top["device"]), top["rank"], None)
    drawn = _thinned(table, "allocated_bytes")
    unit, factor = bytes_unit(np.nanmax([top["peak_bytes"], top["reserved_bytes"]]))
    source, time_ms = timeline.meta.source, drawn["time_s"] * 1e3
    used, older = drawn["allocated_bytes"] / factor, drawn["before_bytes"] / factor
    reserved = drawn["reserved_bytes"] / factor
    ax.fill_between(time_ms, older, used, step="post", **fill_of("other", source))
    ax.fill_between(time_ms, 0, older, step="post", **fill_of("idle", source))
    ax.step(time_ms, reserved, where="post", color="#444444", linewidth=1)
    if reserved.notna().any():
        _name(ax, "reserved", time_ms.iloc[-1], reserved.iloc[-1], (0, 3))
    if older.iloc[-1] > 0.1 * used.max():
        _name(ax, BEFORE, time_ms.iloc[-1], 0, (-3, 3))
    high = np.nanmax([1.6 * top["peak_bytes"] / factor, 1.15 * reserved.max(), 1e-9])
    ax.set(xlim=(time_ms.iloc[0], max(time_ms.iloc[-1], time_ms.iloc[0] + 1e-3)), ylim=(0, high))
    ax.set(xlabel="time [ms]", ylabel=f"memory [{unit}]")
    _mark_steps(ax, table)
    _label_peak(ax, top, held_at_peak(timeline, 3), factor)
    where = f"rank {top['rank']}, {top['device']}" if len(timeline.ranks) > 1 else top["device"]
    ax.set_title(
        f"Peak {format_bytes(top['peak_bytes'])} on {where} after {format_s(top['time_s'])}{_in_step(top['step'])}"
    )
    return keep_data(ax, drawn, timeline)


def plot_memory_categories(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Stacked area of `read_memory_timeline`: what kind of data fills the memory, over time."""
    ax = ax or new_axes(height=3.2)
    wide = pd.DataFrame(table["size_bytes"].to_numpy().reshape(-1, len(CATEGORIES)), columns=CATEGORIES)
    if not len(wide):
        ax.set(title="An empty memory timeline", xticks=[], yticks=[])
        return keep_data(ax, table)
    wide = wide.assign(total=wide.sum(axis=1), time_s=table["time_s"].to_numpy()[:: len(CATEGORIES)])
    drawn = _thinned(wide, "total")
    high = wide.loc[wide["total"].idxmax()]
    unit, factor = bytes_unit(high["total"])
    shown = [c for c in CATEGORIES if drawn[c].max() > 0.003 * high["total"]]
    below = np.zeros(len(drawn))
    for category in shown:
        above = below + drawn[category].to_numpy() / factor
        style = fill_of("idle", table.attrs.get("source")) | {"facecolor": _CATEGORY_COLORS[category]}
        label = category.replace("_", " ")
        ax.fill_between(drawn["time_s"] * 1e3, below, above, step="post", label=label, **style)
        below = above
    most = high[list(CATEGORIES)].astype(float).idxmax()
    share = high[most] / max(high["total"], 1)
    ax.set(xlim=(0, max(drawn["time_s"].max() * 1e3, 1e-3)), xlabel="time [ms]", ylabel=f"memory [{unit}]",
           ylim=(0, 1.1 * high["total"] / factor))  # fmt: skip
    ax.set_title(f"Peak {format_bytes(high['total'])}: {share:.0%} {most.replace('_', ' ')}")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return keep_data(ax, drawn.drop(columns="total")[["time_s", *CATEGORIES]], table)


def plot_held(
    table: pd.DataFrame, ax: Axes | None = None, *, rank: int | None = None, device: str | None = None
) -> Axes:
    """Bars of `held_at_peak` for one device: bytes of each operator, and their share as text.

    Without rank or device: the one with the highest peak. Raises ValueError for a device that has no events.
    """
    part = _chosen(table, rank, device)
    if not len(part):
        return _empty(ax, table)
    peaks = part.groupby(["rank", "device"], sort=False)["size_bytes"].sum()
    of_rank, of_device = peaks.idxmax()
    part = part[(part["rank"] == of_rank) & (part["device"] == of_device)]
    ax = ax or new_axes(height=1.1 + 0.28 * len(part))
    unit, factor = bytes_unit(part["size_bytes"].max())
    older, source = (part["operator"] == BEFORE).to_numpy(), table.attrs.get("source")
    for kind, rows in (("other", ~older), ("idle", older)):
        ax.barh(np.flatnonzero(rows), part["size_bytes"][rows] / factor, height=0.75, **fill_of(kind, source))
    for place, row in enumerate(part.itertuples()):
        count = "" if np.isnan(row.count) else f", {row.count:,.0f} allocation{'s' if row.count > 1 else ''}"
        ax.annotate(f"{row.share:.1%}{count}", (max(row.size_bytes, 0) / factor, place), (3, 0),
                    textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    ax.set_yticks(range(len(part)), [_short(name) for name in part["operator"]])
    where = of_device if table["rank"].nunique() == 1 else f"{of_device} of rank {of_rank}"
    ax.set(ylim=(len(part) - 0.4, -0.6), xlabel=f"held at the peak of {where} [{unit}]")
    ax.set(xlim=(0, 1.32 * max(part["size_bytes"].max() / factor, 1e-9)))
    known = part[~older].sort_values("share", ascending=False)
    names = f"{_short(known['operator'].iloc[0])} holds {known['share'].iloc[0]:.0%}" if len(known) else "No operator"
    before = part.loc[older, "share"].sum()
    ax.set_title(f"{names} of the peak" + (f", {before:.0%} is from {BEFORE}" if before else ""))
    return keep_data(ax, part, table)


def _chosen(table: pd.DataFrame, rank: int | None, device: str | None) -> pd.DataFrame:
    """Rows of a rank and a device, where they are given."""
    keep = np.ones(len(table), dtype=bool)
    for column, value in (("rank", rank), ("device", device)):
        keep &= True if value is None else (table[column] == value).to_numpy()
    if len(table) and not keep.any():
        known = ", ".join(f"{d} of rank {r}" for r, d in table[["rank", "device"]].drop_duplicates().to_numpy())
        raise ValueError(f"rank={rank}, device={device} has no allocator events; there are {known}")
    return table[keep]


def _empty(ax: Axes | None, origin: Timeline | pd.DataFrame) -> Axes:
    ax = ax or new_axes(height=0.6)
    ax.set(title="No allocator events: record with profile_memory=True", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return keep_data(ax, memory_timeline(origin) if isinstance(origin, Timeline) else origin, origin)


def _name(ax: Axes, text: str, time_ms: float, value: float, offset: tuple[int, int]) -> None:
    """The name of a line or area, at its right end."""
    ax.annotate(text, (time_ms, value), offset, textcoords="offset points", ha="right", fontsize=8)


def _thinned(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """First, lowest, highest and last row of each stretch of time."""
    time_s = table["time_s"].to_numpy()
    width_s = max(time_s.max() - time_s.min(), 1e-12) / _BINS
    stretch = ((time_s - time_s.min()) / width_s).astype(np.int64)
    values = table[column].reset_index(drop=True).groupby(stretch)
    places = pd.Series(np.arange(len(table))).groupby(stretch)
    rows = np.concatenate([values.idxmin(), values.idxmax(), places.min(), places.max()])
    return table.iloc[np.unique(rows)].reset_index(drop=True)


def _mark_steps(ax: Axes, table: pd.DataFrame) -> None:
    """A line where each step begins to allocate, numbered unless they are many."""
    first = table[table["step"] >= 0].groupby("step")["time_s"].min() * 1e3
    for step, time_ms in first.items() if len(first) > 1 else ():
        ax.axvline(time_ms, color="#888888", linewidth=0.6, linestyle=":")
        if len(first) <= 12:
            ax.annotate(f" step {step}", (time_ms, 0.99), xycoords=("data", "axes fraction"), va="top", fontsize=7)


def _label_peak(ax: Axes, top: pd.Series, held: pd.DataFrame, factor: float) -> None:
    """A dot at the peak and a text on its wider side: who holds it."""
    held = held[(held["rank"] == top["rank"]) & (held["device"] == top["device"])]
    lines = [f"{share:.0%} {_short(name)}" for name, share in zip(held["operator"], held["share"], strict=True)]
    place = top["time_s"] * 1e3, top["peak_bytes"] / factor
    ax.plot(*place, "o", color="black", markersize=4)
    right = place[0] > np.mean(ax.get_xlim())
    ax.annotate("held by\n" + "\n".join(lines), place, (-8 if right else 8, 5), textcoords="offset points", fontsize=7,
                ha="right" if right else "left", va="bottom",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85})  # fmt: skip


def _in_step(step: int) -> str:
    return f", in step {step}" if step > 0 else ""


def _short(name: str) -> str:
    """An operator's name that fits beside a bar.

    >>> _short("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"), _short("aten::mm")
    ('AccumulateGrad', 'aten::mm')
    """
    name = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("torch::autograd::")
    return name if len(name) <= 36 else name[:35] + "…"
