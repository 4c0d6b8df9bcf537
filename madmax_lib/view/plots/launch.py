"""How do launches, idle time and steps look? Pictures of the tables of `traces.waits`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from madmax_lib.base.units import format_s
from madmax_lib.view import drawing as draw
from madmax_lib.view.plots.breakdown import breakdown_parts, parts_key

__all__ = [
    "plot_idle",
    "plot_launch_floor",
    "plot_launches",
    "plot_queue",
    "plot_steps",
]

_CAUSES = {
    "host_wait": "#525252",
    "kernel_wait": "#969696",
    "other": draw.COLORS["idle"],
}  # shades of idle
# below the resolution of most traces, and of no interest on a logarithmic axis
_SMALLEST_S = 1e-7
_MOST_ROWS = 24


def plot_launches(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Kernel duration over launch delay of `launches`, as counts; shaded: shorter than
    the median launch call.
    """
    if not len(table):
        return draw.empty(ax, table, "No launches: no work on a device in this trace")
    ax = ax or draw.new_axes(height=3.6, width=5.2)
    times_s = [table[column].clip(lower=_SMALLEST_S) for column in ("delay_s", "gpu_s")]
    edges = [
        np.geomspace(_SMALLEST_S, max(values.max(), 1e-5) * 1.01, 41)
        for values in times_s
    ]
    counts, *_ = np.histogram2d(*times_s, bins=edges)
    bins = np.nonzero(counts)
    delay_s, gpu_s = (
        np.sqrt(edge[1:] * edge[:-1])[place]
        for edge, place in zip(edges, bins, strict=True)
    )
    data = pd.DataFrame(
        {"delay_s": delay_s, "gpu_s": gpu_s, "count": counts[bins].astype(int)}
    )
    shade = {
        "c": data["count"],
        "norm": LogNorm(vmin=0.3, vmax=max(counts.max(), 2)),
        "cmap": "Blues",
    }
    points = ax.scatter(
        delay_s * 1e6, gpu_s * 1e6, s=11, marker="s", edgecolor="none", **shade
    )
    ax.figure.colorbar(points, ax=ax, label="launches", pad=0.02)
    call_us = table["cpu_s"].median() * 1e6
    least_us = _SMALLEST_S * 1e6 / 2
    ax.axhspan(least_us, call_us, facecolor=draw.COLORS["idle"], alpha=0.5, zorder=0)
    shorter = f"shorter than the median launch call, {call_us:.3g} µs"
    ax.text(0.98, 0.03, shorter, transform=ax.transAxes, ha="right", fontsize=7)
    title = (
        f"{(table['gpu_s'] < table['cpu_s']).mean():.0%} of the kernels are "
        "shorter than their launch"
    )
    limits = {
        "xscale": "log",
        "yscale": "log",
        "xlim": (least_us, None),
        "ylim": (least_us, None),
    }
    labels = {
        "x": "launch delay [µs] (0 at the left edge)",
        "y": "kernel duration [µs]",
    }
    return draw.finish(ax, data, title, origin=table, **labels, **limits)


def plot_queue(series: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Launches that wait, over time, for each stream of the first rank of
    `queue_series`.
    """
    if not len(series):
        return draw.empty(ax, series, "No queue: no launches in this trace")
    ax = ax or draw.new_axes(height=2.6)
    rank = series["rank"].min()
    of_rank = series[series["rank"] == rank]
    of_rank = of_rank.assign(time_s=of_rank["time_s"] - of_rank["time_s"].min())
    streams = [draw.thinned(part, "length") for _, part in of_rank.groupby("stream")]
    busiest = sorted(streams, key=lambda part: -part["length"].max())[
        : len(draw.SERIES)
    ]
    data = pd.concat(busiest, ignore_index=True)
    styles = dict(zip(data["stream"].unique(), draw.SERIES, strict=False))
    labels = {stream: f"stream {stream}" for stream in styles}
    style = {
        "by": "stream",
        "styles": styles,
        "labels": labels,
        "linewidth": 1,
        "drawstyle": "steps-post",
    }
    draw.lines(ax, data, "time_s", "length", units=(1e-3, 1), **style)
    draw.legend(ax, where="beside")
    title = (
        f"Rank {rank}: up to {data['length'].max():,} launches wait on stream "
        f"{data['stream'][0]}"
    )
    limits = {"xlim": (0, None), "ylim": (0, None)}
    return draw.finish(
        ax, data, title, x="time [ms]", y="launches waiting", origin=series, **limits
    )


def plot_idle(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Idle time of each stream by cause, of `idle`; the streams with most idle time, at
    most 24.
    """
    if not len(table):
        return draw.empty(
            ax, table, "No idle time to explain: no device stream in this trace"
        )
    idle_s = table.pivot_table(
        index=["rank", "stream"], columns="cause", values="idle_s", aggfunc="sum"
    )
    shares = idle_s.sum() / max(table["idle_s"].sum(), 1e-12)
    shown_s = idle_s.loc[
        idle_s.index.isin(idle_s.sum(axis=1).nlargest(_MOST_ROWS).index)
    ]
    title = (
        f"{shares.idxmax().replace('_', ' ').capitalize()} is {shares.max():.0%} "
        "of the idle time of streams"
    )
    key = {cause.replace("_", " "): color for cause, color in _CAUSES.items()}
    ending = {
        "x": "idle time [ms]",
        "rows": [draw.row_label(*row) for row in shown_s.index],
        "key": key,
    }
    return draw.bar_chart(ax, table, shown_s * 1e3, title, _CAUSES, **ending)


def plot_steps(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Parts of every step of `steps`, mean over the ranks, with its time on the host as
    a mark; warm-up is shaded.
    """
    if not len(table):
        return draw.empty(ax, table, "No steps in this trace")
    parts = breakdown_parts(table)
    columns = [
        "compute_s",
        "exposed_comm_s",
        "rest_s",
        "idle_s",
        "total_s",
        "wall_s",
        "period_s",
        "warmup",
        "cut",
    ]
    flags = {"warmup": float, "cut": float}
    mean = (
        table.assign(rest_s=parts["memcpy"])
        .astype(flags)
        .groupby("step")[columns]
        .mean()
    )
    every = -(-len(mean) // _MOST_ROWS)
    rows = [
        "" if place % every else f"step {step}" for place, step in enumerate(mean.index)
    ]
    notes = np.where(
        mean["warmup"] > 0, "warm-up", np.where(mean["cut"] > 0, "cut", "")
    )
    counted = mean[notes == ""]
    step_s = (
        counted["period_s"] if counted["period_s"].notna().any() else counted["wall_s"]
    ).dropna()
    title = "No whole step"
    if len(step_s):
        ends = f"{format_s(step_s.min())} to {format_s(step_s.max())}"
        title = (
            f"A step takes {format_s(step_s.median())} ({ends}), "
            f"{len(mean) - len(counted)} left out"
        )
    ending = {
        "x": "time [ms]; black line: duration on the host",
        "rows": rows,
        "key": parts_key(parts),
    }
    parts_ms = parts.groupby(table["step"]).mean() * 1e3
    ax = draw.bar_chart(
        ax, mean.reset_index(), parts_ms, title, notes=notes, origin=table, **ending
    )
    places = np.arange(len(mean))
    ax.vlines(
        mean["wall_s"] * 1e3, places - 0.45, places + 0.45, color="black", linewidth=1.4
    )
    for place in np.flatnonzero(notes != ""):
        ax.axhspan(
            place - 0.5, place + 0.5, facecolor=draw.COLORS["idle"], alpha=0.4, zorder=0
        )
    return ax


def plot_launch_floor(
    table: pd.DataFrame, ax: Axes | None = None, *, launch_s: float | None = None
) -> Axes:
    """Step time over device speed, with and without the cost of launches, mean over the
    ranks, of `launch_floor`.
    """
    if not len(table):
        return draw.empty(ax, table, "No computation in this trace")
    mean = table.groupby("speedup")[["step_s", "free_s", "share"]].mean().reset_index()
    ax = ax or draw.new_axes(height=2.9, width=5.2)
    label = "every computation costs a launch" + (
        f" of {format_s(launch_s)}" if launch_s else ""
    )
    step_ms = mean["step_s"] * 1e3
    free_ms = mean["free_s"] * 1e3
    color = draw.COLORS["compute"]
    ax.plot(
        mean["speedup"], step_ms, color=color, marker="o", markersize=3, label=label
    )
    ax.plot(
        mean["speedup"], free_ms, color=color, linestyle="--", label="launches are free"
    )
    ax.fill_between(
        mean["speedup"], free_ms, step_ms, color=draw.COLORS["idle"], alpha=0.6
    )
    draw.legend(ax, where="lower left")
    title = (
        f"Launches are {mean['share'].min():.0%} to {mean['share'].max():.0%} of a step"
    )
    labels = {
        "x": "device speed, relative to the traced one",
        "y": "computation in a step [ms]",
    }
    return draw.finish(
        ax, mean, title, xscale="log", yscale="log", origin=table, **labels
    )
