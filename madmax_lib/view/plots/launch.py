"""Pictures of launches, idle time and steps: the tables of `traces.waits`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from madmax_lib.base import format_s
from madmax_lib.view.drawing import (
    COLORS,
    SHADES,
    bar_chart,
    empty,
    finish,
    new_axes,
    row_label,
)
from madmax_lib.view.plots.breakdown import breakdown_parts, parts_key

_CAUSES = {  # shades of idle
    "host wait": "#525252",
    "kernel wait": "#969696",
    "other": COLORS["idle"],
}
# below the resolution of most traces, and of no interest on a logarithmic axis
_SMALLEST_S = 1e-7
_MOST_ROWS = 24
_BINS = 40  # of a histogram, on each axis


def plot_launches(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Kernel duration over launch delay of `launches`, as counts; shaded: shorter than
    the median launch call.
    """
    if table.empty:
        return empty(ax, table, "No launches: no work on a device in this trace")
    ax = ax or new_axes(height=3.6, width=5.2)
    data = _launch_counts(table)
    most = max(data["count"].max(), 2)
    points = ax.scatter(
        data["delay_s"] * 1e6,
        data["gpu_s"] * 1e6,
        s=11,
        marker="s",
        edgecolor="none",
        c=data["count"],
        norm=LogNorm(vmin=0.3, vmax=most),  # below 1, so that one launch still shows
        cmap=SHADES,
    )
    ax.figure.colorbar(points, ax=ax, label="launches", pad=0.02)
    # a kernel shorter than this leaves the device waiting for the next launch
    call_us = table["cpu_s"].median() * 1e6
    least_us = _SMALLEST_S * 1e6 / 2
    ax.axhspan(least_us, call_us, facecolor=COLORS["idle"], alpha=0.5, zorder=0)
    ax.text(
        0.98,
        0.03,
        f"shorter than the median launch call, {call_us:.3g} µs",
        transform=ax.transAxes,
        ha="right",
        fontsize=7,
    )
    short = (table["gpu_s"] < table["cpu_s"]).mean()
    return finish(
        ax,
        data,
        f"{short:.0%} of the kernels are shorter than their launch",
        x="launch delay [µs] (0 at the left edge)",
        y="kernel duration [µs]",
        xscale="log",
        yscale="log",
        xlim=(least_us, None),
        ylim=(least_us, None),
        origin=table,
    )


def _launch_counts(table):
    """Launches by bins of delay and duration, which are equal in logarithm; bins with
    none are left out.
    """
    bins = {}
    for name in ("delay_s", "gpu_s"):
        time_s = table[name].clip(lower=_SMALLEST_S)
        # the top edge a per cent beyond the longest, which would fall out by rounding
        top_s = max(time_s.max(), 1e-5) * 1.01
        edges = np.geomspace(_SMALLEST_S, top_s, _BINS + 1)
        # a bin is told by the geometric mean of its edges
        middles = np.sqrt(edges[1:] * edges[:-1])
        bins[name] = pd.cut(time_s, edges, right=False, labels=middles).astype(float)
    return pd.DataFrame(bins).value_counts().sort_index().reset_index()


def plot_idle(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Idle time of each stream by cause, of `idle`; the streams with most idle time, at
    most 24.
    """
    if table.empty:
        return empty(
            ax, table, "No idle time to explain: no device stream in this trace"
        )
    named = table.assign(cause=table["cause"].astype(str).str.replace("_", " "))
    idle_s = named.pivot_table(
        index=["rank", "stream"], columns="cause", values="idle_s", aggfunc="sum"
    )
    # of all streams, those without a row too
    shares = idle_s.sum() / max(table["idle_s"].sum(), 1e-12)
    most = idle_s.sum(axis=1).nlargest(_MOST_ROWS)
    idle_s = idle_s[idle_s.index.isin(most.index)]
    return bar_chart(
        ax,
        table,
        idle_s * 1e3,
        f"{shares.idxmax().capitalize()} is {shares.max():.0%} of the idle time of streams",
        x="idle time [ms]",
        rows=[row_label(*row) for row in idle_s.index],
        key=_CAUSES,
        fill=_CAUSES,
    )


def plot_steps(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Parts of every step of `steps`, mean over the ranks, with its time on the host as
    a mark; warm-up is named.
    """
    if table.empty:
        return empty(ax, table, "No steps in this trace")
    parts = breakdown_parts(table)
    columns = [
        "compute_s",
        "exposed_comm_s",
        "rest_s",
        "idle_s",
        "total_s",
        "wall_s",
        "step_s",
        "warmup",
        "cut",
    ]
    flags = {"warmup": float, "cut": float}  # their mean: on how many of the ranks
    rows = table.assign(rest_s=parts["memcpy"]).astype(flags)
    mean = rows.groupby("step")[columns].mean()
    notes = np.where(mean["cut"] > 0, "cut", "")
    notes = np.where(mean["warmup"] > 0, "warm-up", notes)
    every = -(-len(mean) // _MOST_ROWS)  # of many steps only every n-th has its number
    labels = [f"step {step}" for step in mean.index]
    # means over the ranks
    parts_ms = parts.groupby(table["step"]).mean() * 1e3
    step_s = mean["step_s"][notes == ""].dropna()
    title = "No whole step"
    if len(step_s):
        ends = f"{format_s(step_s.min())} to {format_s(step_s.max())}"
        title = f"A step takes {format_s(step_s.median())} ({ends})"
        # warm-up and cut ones
        if left_out := np.count_nonzero(notes):
            title += f"; {left_out} left out"
    ax = bar_chart(
        ax,
        mean.reset_index(),
        parts_ms,
        title,
        x="time [ms]; black line: duration on the host",
        rows=["" if row % every else label for row, label in enumerate(labels)],
        key=parts_key(parts),
        notes=notes,
    )
    ax.plot(mean["wall_s"] * 1e3, range(len(mean)), "k|", ms=11, mew=1.4)
    return ax
