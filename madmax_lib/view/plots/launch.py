"""How do launches, idle time and steps look? Pictures of the tables of `traces.waits`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from madmax_lib.traces.waits.idle import CAUSES
from madmax_lib.units import format_s
from madmax_lib.view.drawing import COLORS, bars, empty, finish, legend, lines, new_axes, patch_key, row_label
from madmax_lib.view.plots.breakdown import breakdown_parts, parts_key

__all__ = ["plot_idle", "plot_launch_floor", "plot_launches", "plot_queue", "plot_steps"]

_CAUSES = {"host_wait": "#525252", "kernel_wait": "#969696", "other": COLORS["idle"]}  # shades of idle
_SMALLEST_S = 1e-7  # below the resolution of most traces, and of no interest on a logarithmic axis
_MOST_ROWS, _STRETCHES = 24, 600
_STREAM_COLORS = [COLORS[kind] for kind in ("compute", "comm", "memcpy", "other")]


def plot_launches(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Kernel duration over launch delay of `launches`, as counts; shaded: shorter than the median launch call."""
    if not len(table):
        return empty(ax, table, "No launches: no work on a device in this trace")
    ax = ax or new_axes(height=3.6, width=5.2)
    delay_s, gpu_s = (table[column].clip(lower=_SMALLEST_S) for column in ("delay_s", "gpu_s"))
    edges = [np.geomspace(_SMALLEST_S, max(values.max(), 1e-5) * 1.01, 41) for values in (delay_s, gpu_s)]
    counts, *_ = np.histogram2d(delay_s, gpu_s, bins=edges)
    delay_bin, gpu_bin = np.nonzero(counts)
    delays_s, gpus_s = (np.sqrt(edge[1:] * edge[:-1]) for edge in edges)
    data = pd.DataFrame({"delay_s": delays_s[delay_bin], "gpu_s": gpus_s[gpu_bin]})
    data["count"] = counts[delay_bin, gpu_bin].astype(int)
    shade = {"c": data["count"], "norm": LogNorm(vmin=0.3, vmax=max(counts.max(), 2)), "cmap": "Blues"}
    points = ax.scatter(data["delay_s"] * 1e6, data["gpu_s"] * 1e6, s=11, marker="s", edgecolor="none", **shade)
    ax.figure.colorbar(points, ax=ax, label="launches", pad=0.02)
    call_us, least_us = table["cpu_s"].median() * 1e6, _SMALLEST_S * 1e6 / 2
    ax.axhspan(least_us, call_us, facecolor=COLORS["idle"], alpha=0.5, zorder=0)
    shorter = f"shorter than the median launch call, {call_us:.3g} µs"
    ax.text(0.98, 0.03, shorter, transform=ax.transAxes, ha="right", fontsize=7)
    title = f"{(table['gpu_s'] < table['cpu_s']).mean():.0%} of the kernels are shorter than their launch"
    limits = {"xscale": "log", "yscale": "log", "xlim": (least_us, None), "ylim": (least_us, None)}
    x, y = "launch delay [µs] (0 at the left edge)", "kernel duration [µs]"
    return finish(ax, data, title, x=x, y=y, origin=table, **limits)


def plot_queue(series: pd.DataFrame, ax: Axes | None = None, *, rank: int | None = None) -> Axes:
    """Launches that wait, over time, for each stream of one rank (the first) of `queue_series`."""
    if not len(series):
        return empty(ax, series, "No queue: no launches in this trace")
    rank = series["rank"].min() if rank is None else rank
    of_rank = series[series["rank"] == rank]
    if not len(of_rank):
        raise ValueError(f"rank {rank} has no launches; those with some are {sorted(series['rank'].unique())}")
    ax = ax or new_axes(height=2.6)
    of_rank = of_rank.assign(time_s=of_rank["time_s"] - of_rank["time_s"].min())
    streams = [_outline(part) for _, part in of_rank.groupby("stream")]
    busiest = sorted(streams, key=lambda part: -part["length"].max())[: len(_STREAM_COLORS)]
    data = pd.concat(busiest, ignore_index=True)
    styles = dict(zip(data["stream"].unique(), _STREAM_COLORS, strict=False))
    labels = {stream: f"stream {stream}" for stream in styles}
    style = {"linewidth": 1, "drawstyle": "steps-post"}
    lines(ax, data, "time_s", "length", by="stream", styles=styles, labels=labels, units=(1e-3, 1), **style)
    legend(ax, where="beside")
    stream, most = data["stream"].iloc[0], busiest[0]["length"].max()
    title = f"Rank {rank}: up to {most:,} launches wait on stream {stream}"
    limits = {"xlim": (0, None), "ylim": (0, None)}
    return finish(ax, data, title, x="time [ms]", y="launches waiting", origin=series, **limits)


def plot_idle(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Idle time of each stream by cause, of `idle`; the streams with most idle time, at most 24."""
    if not len(table):
        return empty(ax, table, "No idle time to explain: no device stream in this trace")
    idle_s = table.pivot_table(index=["rank", "stream"], columns="cause", values="idle_s", aggfunc="sum")
    most = idle_s.sum(axis=1).nlargest(_MOST_ROWS).index
    idle_ms = idle_s.loc[idle_s.index.isin(most), list(CAUSES)] * 1e3
    ax = ax or new_axes(height=1.2 + 0.24 * len(idle_ms))
    ends = bars(ax, idle_ms, {cause: _CAUSES[cause] for cause in CAUSES}, source=table.attrs.get("source"))
    shares = table.groupby("cause")["idle_s"].sum() / max(table["idle_s"].sum(), 1e-12)
    largest = shares.idxmax().replace("_", " ").capitalize()
    title = f"{largest} is {shares.max():.0%} of the idle time of streams"
    key = [patch_key(cause.replace("_", " "), _CAUSES[cause]) for cause in CAUSES]
    rows = [row_label(rank, stream) for rank, stream in idle_ms.index]
    return finish(ax, table, title, x="idle time [ms]", rows=rows, reach=1.03 * ends.max(), key=key)


def plot_steps(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Parts of every step of `steps`, mean over the ranks, with its time on the host as a mark; warm-up is shaded."""
    if not len(table):
        return empty(ax, table, "No steps in this trace")
    parts = breakdown_parts(table)
    columns = ["compute_s", "exposed_comm_s", "rest_s", "idle_s", "total_s", "wall_s", "period_s", "warmup", "cut"]
    flags = {"warmup": float, "cut": float}
    mean = table.assign(rest_s=parts["memcpy"]).astype(flags).groupby("step")[columns].mean()
    ax = ax or new_axes(height=1.2 + 0.28 * len(mean))
    parts_ms, wall_ms, places = parts.groupby(table["step"]).mean() * 1e3, mean["wall_s"] * 1e3, np.arange(len(mean))
    ends = bars(ax, parts_ms, source=table.attrs.get("source"))
    ax.vlines(wall_ms, places - 0.45, places + 0.45, color="black", linewidth=1.4)
    reach = max(ends.max(), wall_ms.max()) * 1.1
    for place, row in enumerate(mean.itertuples()):
        if row.warmup or row.cut:
            ax.axhspan(place - 0.5, place + 0.5, facecolor=COLORS["idle"], alpha=0.4, zorder=0)
            ax.text(reach * 0.99, place, "warm-up" if row.warmup else "cut", ha="right", va="center", fontsize=7)
    every = -(-len(mean) // _MOST_ROWS)
    rows = ["" if place % every else f"step {step}" for place, step in enumerate(mean.index)]
    x, key = "time [ms]; black line: duration on the host", parts_key(parts)
    return finish(ax, mean.reset_index(), _steps_message(table), x=x, rows=rows, reach=reach, key=key, origin=table)


def plot_launch_floor(table: pd.DataFrame, ax: Axes | None = None, *, launch_s: float | None = None) -> Axes:
    """Step time over device speed, with and without the cost of launches, mean over the ranks, of `launch_floor`."""
    if not len(table):
        return empty(ax, table, "No computation in this trace")
    mean = table.groupby("speedup")[["step_s", "free_s", "share"]].mean().reset_index()
    ax = ax or new_axes(height=2.9, width=5.2)
    label = "every computation costs a launch" + (f" of {format_s(launch_s)}" if launch_s else "")
    step_ms, free_ms, color = mean["step_s"] * 1e3, mean["free_s"] * 1e3, COLORS["compute"]
    ax.plot(mean["speedup"], step_ms, color=color, marker="o", markersize=3, label=label)
    ax.plot(mean["speedup"], free_ms, color=color, linestyle="--", label="launches are free")
    ax.fill_between(mean["speedup"], free_ms, step_ms, color=COLORS["idle"], alpha=0.6)
    legend(ax, where="lower left")
    half = mean[mean["share"] >= 0.5]
    title = f"Launches are at most {mean['share'].max():.0%} of a step"
    if len(half):
        title = f"From {half['speedup'].iloc[0]:.3g}x on, half of a step would be launches"
    x, y = "device speed, relative to the traced one", "computation in a step [ms]"
    return finish(ax, mean, title, x=x, y=y, xscale="log", yscale="log", origin=table)


def _outline(part: pd.DataFrame) -> pd.DataFrame:
    """The highest and the last length in each of 600 stretches of time, so that a picture of any trace stays small."""
    stretch = (part["time_s"] / max(part["time_s"].max(), 1e-12) * _STRETCHES).astype(int)
    last = np.r_[part.index[:-1][np.diff(stretch) > 0], part.index[-1:]]
    return part.loc[np.union1d(part.groupby(stretch)["length"].idxmax(), last)]


def _steps_message(table: pd.DataFrame) -> str:
    counted = table[~(table["warmup"] | table["cut"]).astype(bool)]
    pace_s = counted.groupby("step")["period_s"].mean().dropna()
    pace_s = pace_s if len(pace_s) else counted.groupby("step")["wall_s"].mean()
    left_out = table["step"].nunique() - counted["step"].nunique()
    text = f"A step takes {format_s(pace_s.median())}" if len(pace_s) else "No whole step"
    if len(pace_s) > 1:
        text += f" ({format_s(pace_s.min())} to {format_s(pace_s.max())})"
    return text + (f", {left_out} left out" if left_out else "")
