"""How do collectives, stragglers and clocks look? Pictures of `traces.comm` and `traces.stragglers`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from madmax_lib.kinds import COLLECTIVES
from madmax_lib.units import format_bytes, format_s
from madmax_lib.view.drawing import COLORS, fill_of, keep_data, kind_legend, new_axes, rank_axis

__all__ = ["plot_bandwidth", "plot_clock_offsets", "plot_groups", "plot_skew", "plot_stragglers"]

_MARKERS = dict(zip((*COLLECTIVES, "send", "recv"), "osD^vPXhd<>*p12"[: len(COLLECTIVES) + 2], strict=True))
_MOST_ROWS, _MOST_POINTS = 16, 1000  # points beyond are drawn as pixels, so that pictures of any trace stay small
_US = 1e6


def plot_groups(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Time of each process group and collective of `by_group`, mean over its ranks, split into transfer and waiting.

    At most the 16 that take most time; of a single rank the waiting is not known and counts as transfer.
    """
    shown = table.head(_MOST_ROWS).reset_index(drop=True)
    if not len(shown):
        return _empty(ax, "No communication in this trace", shown, table)
    ax = ax or new_axes(height=1.3 + 0.32 * len(shown))
    wait_ms = shown["wait_s"].fillna(0) / shown["ranks"] * 1e3
    transfer_ms = shown["total_s"] / shown["ranks"] * 1e3 - wait_ms
    source = table.attrs.get("source")
    ax.barh(range(len(shown)), transfer_ms, height=0.7, **fill_of("comm", source))
    ax.barh(range(len(shown)), wait_ms, left=transfer_ms, height=0.7, **fill_of("idle", source))
    labels = [_label(group, collective) for group, collective in zip(shown["group"], shown["collective"], strict=True)]
    ax.set_yticks(range(len(shown)), labels)
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="time per rank [ms]")
    if table["wait_s"].notna().any():
        share = table["wait_s"].sum() / max(table["total_s"].sum(), 1e-12)
        ax.set_title(f"{share:.0%} of the communication is waiting for the last rank")
        kind_legend(ax, ["comm", "idle"], {"comm": "transfer", "idle": "waiting"})
    else:
        top = shown.iloc[0]
        share = top["total_s"] / max(table["total_s"].sum(), 1e-12)
        ax.set_title(f"{_name(top['collective']).capitalize()} takes {share:.0%} of the communication")
        kind_legend(ax, ["comm"], {"comm": "transfer and waiting (one rank: not told apart)"})
    columns = ["group", "collective", "ranks", "total_s", "wait_s"]
    return keep_data(ax, shown[columns], table)


def plot_bandwidth(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bus bandwidth over message size of `calls`, both logarithmic; a call of several ranks is one point.

    The marker is the rank with the shortest time, which hardly waits; the line below it reaches to the slowest rank.
    """
    own = pd.Series(-1 - np.arange(len(table)), index=table.index)
    units = table.assign(call=table["call"].where(table["call"] >= 0, own)).groupby(["collective", "call"], sort=False)
    points = units.agg(
        size_bytes=("size_bytes", "mean"),
        bus_bytes_per_s=("bus_bytes_per_s", "max"),
        slowest_bytes_per_s=("bus_bytes_per_s", "min"),
    )
    points = points[(points["size_bytes"] > 0) & (points["bus_bytes_per_s"] > 0)].reset_index().drop(columns="call")
    if not len(points):
        return _empty(ax, "No bandwidth: no call tells its size", points, table)
    ax = ax or new_axes(height=3.6)
    many = len(points) > _MOST_POINTS
    ends = points["slowest_bytes_per_s"] / 1e9, points["bus_bytes_per_s"] / 1e9
    ax.vlines(points["size_bytes"], *ends, color=COLORS["hidden"], linewidth=0.8, zorder=1, rasterized=many)
    style = fill_of("comm", table.attrs.get("source")) | {"edgecolor": "white", "linewidth": 0.4}
    for name, part in points.groupby("collective", sort=False):
        ax.scatter(part["size_bytes"], part["bus_bytes_per_s"] / 1e9, s=34, marker=_MARKERS.get(name, "o"),
                   label=_name(name), zorder=2, rasterized=many, **style)  # fmt: skip
    _log_axis(ax, "x", points["size_bytes"].min(), points["size_bytes"].max(), format_bytes)
    _log_axis(ax, "y", ends[0].min(), ends[1].max(), "{:g}".format)
    ax.set(xlabel="message size", ylabel="bus bandwidth [GB/s]")
    ax.grid(axis="y")
    best = points.loc[points["bus_bytes_per_s"].idxmax()]
    rate = f"{best['bus_bytes_per_s'] / 1e9:.3g} GB/s"
    ax.set_title(f"{_name(best['collective']).capitalize()} reaches {rate} with {format_bytes(best['size_bytes'])}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return keep_data(ax, points, table)


def plot_skew(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Last arrival minus first arrival of each call of `skew`, by collective; the bar is the median."""
    by_median = table.groupby("collective")["skew_s"].median().sort_values(ascending=False)
    drawn = table[["step", "group", "collective", "last_rank", "skew_s", "transfer_s"]]
    if not (table["skew_s"] > 0).any():
        text = "All ranks arrive together" if len(table) else "No skew: no call has two ranks here"
        return _empty(ax, text, drawn, table)
    ax = ax or new_axes(height=1.3 + 0.55 * len(by_median))
    style = fill_of("comm", table.attrs.get("source")) | {"edgecolor": "white", "linewidth": 0.3}
    for place, (name, median_s) in enumerate(by_median.items()):
        skew_s = table.loc[(table["collective"] == name) & (table["skew_s"] > 0), "skew_s"]
        height = place + (np.arange(len(skew_s)) % 7 - 3) * 0.07  # side by side, and the same in every run
        ax.scatter(skew_s, height, s=22, rasterized=len(table) > _MOST_POINTS, **style)
        ax.vlines(median_s or np.nan, place - 0.38, place + 0.38, color="black", linewidth=1.2)
    ax.set_yticks(range(len(by_median)), [_name(name) for name in by_median.index])
    late_s = table.loc[table["skew_s"] > 0, "skew_s"]
    _log_axis(ax, "x", late_s.min(), late_s.max(), format_s)
    ax.set(ylim=(len(by_median) - 0.4, -0.6), xlabel="last arrival - first arrival (bar: median)")
    skew_s, transfer_s = table["skew_s"].median(), table["transfer_s"].median()
    ax.set_title(f"Median skew {format_s(skew_s)}, {skew_s / max(transfer_s, 1e-12):.2g} times the median transfer")
    return keep_data(ax, drawn, table)


def plot_stragglers(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What the others wait for each rank, of `stragglers`: exposed and hidden; the share of calls it is last in."""
    table = table.sort_values("rank").nlargest(_MOST_ROWS, "cost_s", keep="all").head(_MOST_ROWS).sort_values("rank")
    if not len(table) or not table["cost_s"].max() > 0:
        text = "No rank waits for another" if len(table) else "No stragglers: no call has two ranks here"
        return _empty(ax, text, table, table)
    ax = ax or new_axes(height=1.3 + 0.28 * len(table))
    exposed_ms, hidden_ms = table["exposed_cost_s"] * 1e3, (table["cost_s"] - table["exposed_cost_s"]) * 1e3
    source = table.attrs.get("source")
    ax.barh(range(len(table)), exposed_ms, height=0.75, **fill_of("comm", source))
    ax.barh(range(len(table)), hidden_ms, left=exposed_ms, height=0.75, **fill_of("hidden", source))
    for place, (cost_s, share) in enumerate(zip(table["cost_s"], table["share"], strict=True)):
        text = f"last in {share:.0%}" if share else "never last"
        ax.annotate(text, (cost_s * 1e3, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    rank_axis(ax, table["rank"])
    top = table.loc[table["cost_s"].idxmax()]
    ax.set(xlabel="waiting of the other ranks [ms]", xlim=(0, table["cost_s"].max() * 1e3 * 1.15))
    cost = f"costs the others {format_s(top['cost_s'])}"
    ax.set_title(f"Rank {top['rank']:.0f} is last in {top['share']:.0%} of its calls and {cost}")
    kind_legend(ax, ["comm", "hidden"], {"comm": "exposed", "hidden": "hidden under compute"})
    return keep_data(ax, table)


def plot_clock_offsets(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How far the clock of each rank is ahead, of `clock_offsets`, with the spread of its ends; at most 64 ranks."""
    drawn = table.iloc[table["offset_s"].abs().argsort(kind="stable").iloc[::-1][:64]].sort_values("rank")
    if not table["calls"].sum():
        return _empty(ax, "Clocks cannot be compared: no call has two ranks here", drawn, table)
    ax = ax or new_axes(height=1.1 + 0.24 * len(drawn))
    color = {"color": COLORS["comm"], "ecolor": COLORS["hidden"], "fmt": "o", "markersize": 5, "elinewidth": 3}
    spread_us = drawn["spread_s"].fillna(0) * _US
    ax.errorbar(drawn["offset_s"] * _US, range(len(drawn)), xerr=spread_us, **color)
    rank_axis(ax, drawn["rank"])
    ax.axvline(0, color="black", linewidth=0.8, zorder=0)
    ax.set(xlabel="clock ahead of the reference [µs]")
    largest, spread = table["offset_s"].abs().max(), table["spread_s"].median()
    if largest <= table["spread_s"].max():
        ax.set_title(f"Clocks agree: {format_s(largest)} apart at most, ends scatter by {format_s(spread)}")
    else:
        ax.set_title(f"Clocks lie up to {format_s(largest)} apart, ends scatter by {format_s(spread)}")
    handles = [
        Line2D([], [], color=COLORS["comm"], marker="o", linestyle=""),
        Line2D([], [], color=COLORS["hidden"], lw=3),
    ]
    below = -0.75 / ax.figure.get_figheight()
    ax.legend(handles, ["offset", "spread of the ends"], ncols=2, loc="upper right", bbox_to_anchor=(1.0, below))
    return keep_data(ax, drawn, table)


def _empty(ax: Axes | None, title: str, drawn: pd.DataFrame, table: pd.DataFrame) -> Axes:
    ax = ax or new_axes(height=0.6)
    ax.set(title=title, xticks=[], yticks=[])
    return keep_data(ax, drawn, table)


def _log_axis(ax: Axes, which: str, low: float, high: float, text: Callable[[float], str]) -> None:
    """Logarithmic from low to high with some room, ticks as text: at 1, 2 and 5 of a decade where there are few."""
    ax.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.8, high * 1.8)})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())


def _name(collective: str) -> str:
    return collective.replace("_", "-")


def _label(group: str, collective: str) -> str:
    """Collective and group, whose list of ranks is shortened."""
    head, _, ranks = group.partition(" [")
    ranks = ranks.rstrip("]")
    short = ranks if len(ranks) <= 12 else f"{ranks.split(',')[0]} … {ranks.split(',')[-1].strip()}"
    return f"{_name(collective)} · {head} [{short}]" if ranks else _name(collective) + (f" · {group}" if group else "")
