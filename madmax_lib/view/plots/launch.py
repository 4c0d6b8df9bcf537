"""How do launches, idle time and steps look? Pictures of the tables of `traces.waits`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch

from madmax_lib.traces.waits.idle import CAUSES
from madmax_lib.units import format_s
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, kind_legend, new_axes

__all__ = ["plot_idle", "plot_launch_floor", "plot_launches", "plot_queue", "plot_steps"]

_CAUSES = {"host_wait": "#525252", "kernel_wait": "#969696", "other": COLORS["idle"]}  # shades of idle
_CAUSE_LABELS = {"host_wait": "host wait", "kernel_wait": "kernel wait", "other": "other"}
_SMALLEST_S = 1e-7  # below the resolution of most traces, and of no interest on a logarithmic axis
_MOST_ROWS, _STRETCHES = 24, 600


def plot_launches(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Kernel duration over launch delay of `launches`, as counts; shaded: shorter than the median launch call."""
    ax = ax or new_axes(height=3.6, width=5.2)
    if not len(table):
        ax.set(title="No launches: no work on a device in this trace", xticks=[], yticks=[])
        return keep_data(ax, table)
    delay_s, gpu_s = (table[column].clip(lower=_SMALLEST_S) for column in ("delay_s", "gpu_s"))
    edges = [np.geomspace(_SMALLEST_S, max(values.max(), 1e-5) * 1.01, 41) for values in (delay_s, gpu_s)]
    counts, *_ = np.histogram2d(delay_s, gpu_s, bins=edges)
    x, y = np.nonzero(counts)
    centers = [np.sqrt(edge[1:] * edge[:-1]) for edge in edges]
    data = pd.DataFrame({"delay_s": centers[0][x], "gpu_s": centers[1][y], "count": counts[x, y].astype(int)})
    shown = {"c": data["count"], "norm": LogNorm(vmin=0.3, vmax=max(counts.max(), 2)), "cmap": "Blues"}
    points = ax.scatter(data["delay_s"] * 1e6, data["gpu_s"] * 1e6, s=11, marker="s", edgecolor="none", **shown)
    ax.figure.colorbar(points, ax=ax, label="launches", pad=0.02)
    call_us = table["cpu_s"].median() * 1e6
    ax.axhspan(_SMALLEST_S * 1e6 / 2, call_us, facecolor=COLORS["idle"], alpha=0.5, zorder=0)
    ax.annotate(f"shorter than the median launch call, {call_us:.3g} µs", (0.98, 0.03),
                xycoords="axes fraction", ha="right", fontsize=7)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(_SMALLEST_S * 1e6 / 2, None), ylim=(_SMALLEST_S * 1e6 / 2, None))
    ax.set(xlabel="launch delay [µs] (0 at the left edge)", ylabel="kernel duration [µs]")
    short = (table["gpu_s"] < table["cpu_s"]).mean()
    ax.set_title(f"{short:.0%} of the kernels are shorter than their launch")
    return keep_data(ax, data, table)


def plot_queue(series: pd.DataFrame, ax: Axes | None = None, *, rank: int | None = None) -> Axes:
    """Launches that wait, over time, for each stream of one rank (the first) of `queue_series`."""
    ax = ax or new_axes(height=2.6)
    if not len(series):
        ax.set(title="No queue: no launches in this trace", xticks=[], yticks=[])
        return keep_data(ax, series)
    rank = series["rank"].min() if rank is None else rank
    of_rank = series[series["rank"] == rank]
    if not len(of_rank):
        raise ValueError(f"rank {rank} has no launches; those with some are {sorted(series['rank'].unique())}")
    zero_s = of_rank["time_s"].min()
    drawn = [_outline(part.assign(time_s=part["time_s"] - zero_s)) for _, part in of_rank.groupby("stream")]
    palette = [COLORS[kind] for kind in ("compute", "comm", "memcpy", "other")]
    busiest = sorted(drawn, key=lambda part: -part["length"].max())
    for color, part in zip(palette, busiest, strict=False):
        ax.plot(part["time_s"] * 1e3, part["length"], color=color, linewidth=1, drawstyle="steps-post",
                label=f"stream {part['stream'].iloc[0]}")  # fmt: skip
    ax.set(xlabel="time [ms]", ylabel="launches waiting", xlim=(0, None), ylim=(0, None))
    top = busiest[0]
    ax.set_title(f"Rank {rank}: up to {top['length'].max():,} launches wait on stream {top['stream'].iloc[0]}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return keep_data(ax, pd.concat(busiest[: len(palette)], ignore_index=True), series)


def plot_idle(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Idle time of each stream by cause, of `idle`; the streams with most idle time, at most 24."""
    if not len(table):
        ax = ax or new_axes(height=1.2)
        ax.set(title="No idle time to explain: no device stream in this trace", xticks=[], yticks=[])
        return keep_data(ax, table)
    grid = table.pivot_table(index=["rank", "stream"], columns="cause", values="idle_s", aggfunc="sum")
    most = grid.sum(axis=1).nlargest(_MOST_ROWS).index
    grid = grid.loc[grid.index.isin(most), list(CAUSES)] * 1e3
    ax = ax or new_axes(height=1.2 + 0.24 * len(grid))
    left, source = np.zeros(len(grid)), table.attrs.get("source")
    for cause in CAUSES:
        style = {**fill_of("idle", source), "facecolor": _CAUSES[cause]}
        ax.barh(range(len(grid)), grid[cause], left=left, height=0.75, **style)
        left = left + grid[cause].to_numpy()
    ax.set_yticks(range(len(grid)), [f"rank {rank} · stream {stream}" for rank, stream in grid.index])
    ax.set(ylim=(len(grid) - 0.4, -0.6), xlabel="idle time [ms]", xlim=(0, max(left.max() * 1.03, 1e-6)))
    shares = table.groupby("cause")["idle_s"].sum() / max(table["idle_s"].sum(), 1e-12)
    ax.set_title(f"{_CAUSE_LABELS[shares.idxmax()].capitalize()} is {shares.max():.0%} of the idle time of streams")
    handles = [Patch(color=_CAUSES[cause], label=_CAUSE_LABELS[cause]) for cause in CAUSES]
    below = -0.75 / ax.figure.get_figheight()
    ax.legend(handles=handles, ncols=3, loc="upper right", bbox_to_anchor=(1.0, below))
    return keep_data(ax, table)


def plot_steps(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Parts of every step of `steps`, mean over the ranks, with its time on the host as a mark; warm-up is shaded."""
    parts = {"compute": "compute_s", "comm": "exposed_comm_s", "memcpy": "rest_s", "idle": "idle_s"}
    rest_s = (table["non_compute_s"] - table["exposed_comm_s"]).clip(lower=0)
    columns = [*parts.values(), "total_s", "wall_s", "period_s", "warmup", "cut"]
    mean = table.assign(rest_s=rest_s).astype({"warmup": float, "cut": float}).groupby("step")[columns].mean()
    ax = ax or new_axes(height=1.2 + 0.28 * len(mean))
    if not len(mean):
        ax.set(title="No steps in this trace", xticks=[], yticks=[])
        return keep_data(ax, table)
    places, left, source = np.arange(len(mean)), np.zeros(len(mean)), table.attrs.get("source")
    for kind, column in parts.items():
        ax.barh(places, mean[column] * 1e3, left=left, height=0.75, **fill_of(kind, source))
        left = left + mean[column].to_numpy() * 1e3
    ax.vlines(mean["wall_s"] * 1e3, places - 0.45, places + 0.45, color="black", linewidth=1.4)
    reach = max(left.max(), mean["wall_s"].max() * 1e3) * 1.1 or 1.0
    for place, (warmup, cut) in enumerate(zip(mean["warmup"], mean["cut"], strict=True)):
        if warmup or cut:
            ax.axhspan(place - 0.5, place + 0.5, facecolor=COLORS["idle"], alpha=0.4, zorder=0)
            ax.text(reach * 0.99, place, "warm-up" if warmup else "cut", ha="right", va="center", fontsize=7)
    every = -(-len(mean) // 24)
    ax.set_yticks(places[::every], [f"step {step}" for step in mean.index[::every]])
    ax.set(xlabel="time [ms]; black line: duration on the host", xlim=(0, reach), ylim=(len(mean) - 0.4, -0.6))
    ax.set_title(_steps_message(table))
    shown = [kind for kind, column in parts.items() if mean[column].sum() > 0]
    kind_legend(ax, shown, {"comm": "exposed communication", "memcpy": "copies and other"})
    return keep_data(ax, mean.reset_index(), table)


def plot_launch_floor(table: pd.DataFrame, ax: Axes | None = None, *, launch_s: float | None = None) -> Axes:
    """Step time over device speed, with and without the cost of launches, mean over the ranks, of `launch_floor`."""
    mean = table.groupby("speedup")[["step_s", "free_s", "share"]].mean().reset_index()
    ax = ax or new_axes(height=2.9, width=5.2)
    if not len(mean):
        ax.set(title="No computation in this trace", xticks=[], yticks=[])
        return keep_data(ax, table)
    label = "every computation costs a launch" + (f" of {format_s(launch_s)}" if launch_s else "")
    ax.plot(mean["speedup"], mean["step_s"] * 1e3, color=COLORS["compute"], marker="o", markersize=3, label=label)
    ax.plot(mean["speedup"], mean["free_s"] * 1e3, color=COLORS["compute"], linestyle="--", label="launches are free")
    ax.fill_between(mean["speedup"], mean["free_s"] * 1e3, mean["step_s"] * 1e3, color=COLORS["idle"], alpha=0.6)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="device speed, relative to the traced one",
        ylabel="computation in a step [ms]",
    )
    half = mean[mean["share"] >= 0.5]
    if len(half):
        ax.set_title(f"From {half['speedup'].iloc[0]:.3g}x on, half of a step would be launches")
    else:
        ax.set_title(f"Launches are at most {mean['share'].max():.0%} of a step")
    ax.legend(loc="lower left")
    return keep_data(ax, mean, table)


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
