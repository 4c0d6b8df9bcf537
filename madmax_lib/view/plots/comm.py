"""How do collectives, stragglers and clocks look? Pictures of `traces.comm` and
`traces.stragglers`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.units import format_bytes, format_s
from madmax_lib.timeline.kinds import COLLECTIVES
from madmax_lib.traces.comm.collectives import bandwidths
from madmax_lib.view import drawing as draw

__all__ = [
    "plot_bandwidth",
    "plot_clock_offsets",
    "plot_groups",
    "plot_skew",
    "plot_stragglers",
    "plot_workers",
]

_MARKERS = dict(
    zip(
        (*COLLECTIVES, "send", "recv"),
        "osD^vPXhd<>*p12"[: len(COLLECTIVES) + 2],
        strict=True,
    )
)
_MOST_ROWS = 16
_MOST_RANKS = 64
_MOST_POINTS = (
    1000  # points beyond are drawn as pixels, so that pictures of any trace stay small
)
_CLOCK = {"offset": draw.COLORS["comm"], "spread of the ends": draw.COLORS["hidden"]}


def plot_groups(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Time of each process group and collective of `by_group`, mean over its ranks,
    split into transfer and waiting.

    At most the 16 that take most time; of a single rank the waiting is not known and
    counts as transfer.
    """
    columns = ["group", "collective", "ranks", "total_s", "wait_s"]
    shown = table.head(_MOST_ROWS).reset_index(drop=True)
    if not len(shown):
        return draw.empty(ax, shown, "No communication in this trace", table)
    wait_s = shown["wait_s"].fillna(0)
    per_rank_ms = pd.DataFrame({"comm": shown["total_s"] - wait_s, "idle": wait_s}).div(
        shown["ranks"] / 1e3, axis=0
    )
    total_s = max(table["total_s"].sum(), 1e-12)
    if table["wait_s"].notna().any():
        title = (
            f"{table['wait_s'].sum() / total_s:.0%} of the communication is "
            "waiting for the last rank"
        )
        key = {"transfer": "comm", "waiting": "idle"}
    else:
        most = _name(shown["collective"][0]).capitalize()
        share = shown["total_s"][0] / total_s
        title = f"{most} takes {share:.0%} of the communication"
        key = {"transfer and waiting (one rank: not told apart)": "comm"}
    ending = {
        "x": "time per rank [ms]",
        "rows": _group_labels(shown),
        "key": key,
        "origin": table,
    }
    return draw.bar_chart(ax, shown[columns], per_rank_ms, title, **ending)


def plot_bandwidth(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bus bandwidth over message size of `calls`, both logarithmic; a call of several
    ranks is one point.

    The marker is the rank with the shortest time, which hardly waits; the line below it
    reaches to the slowest rank.
    """
    points = bandwidths(table)
    if not len(points):
        return draw.empty(ax, points, "No bandwidth: no call tells its size", table)
    ax = ax or draw.new_axes(height=3.6)
    many = len(points) > _MOST_POINTS
    size_bytes = points["size_bytes"]
    low = points["slowest_bytes_per_s"] / 1e9
    high = points["bus_bytes_per_s"] / 1e9
    ax.vlines(
        size_bytes,
        low,
        high,
        color=draw.COLORS["hidden"],
        linewidth=0.8,
        zorder=1,
        rasterized=many,
    )
    style = draw.fill_of("comm", table.attrs.get("source")) | {
        "linewidth": 0.4,
        "rasterized": many,
        "s": 34,
    }
    for name, part in points.groupby("collective", sort=False):
        mark = {"marker": _MARKERS.get(name, "o"), "label": _name(name)}
        ax.scatter(
            part["size_bytes"], part["bus_bytes_per_s"] / 1e9, zorder=2, **mark, **style
        )
    draw.log_axis(ax, "x", size_bytes.min(), size_bytes.max(), format_bytes)
    draw.log_axis(ax, "y", low.min(), high.max(), "{:g}".format)
    ax.grid(axis="y")
    draw.legend(ax, where="beside")
    best = _name(points["collective"][high.idxmax()])
    size = format_bytes(size_bytes[high.idxmax()])
    title = f"{best.capitalize()} reaches {high.max():.3g} GB/s with {size}"
    return draw.finish(
        ax, points, title, x="message size", y="bus bandwidth [GB/s]", origin=table
    )


def plot_skew(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Last arrival minus first arrival of each call of `skew`, by collective; the bar
    is the median.
    """
    drawn = table[["step", "group", "collective", "last_rank", "skew_s", "transfer_s"]]
    late = table[table["skew_s"] > 0]
    if not len(late):
        return draw.empty(
            ax, drawn, "No skew: no two ranks arrive at different times", table
        )
    by_median = (
        table.groupby("collective")["skew_s"].median().sort_values(ascending=False)
    )
    ax = ax or draw.new_axes(height=1.3 + 0.55 * len(by_median))
    style = draw.fill_of("comm", table.attrs.get("source")) | {
        "linewidth": 0.3,
        "rasterized": len(table) > _MOST_POINTS,
    }
    for place, (name, median_s) in enumerate(by_median.items()):
        skew_s = late.loc[late["collective"] == name, "skew_s"]
        height = (
            place + (np.arange(len(skew_s)) % 7 - 3) * 0.07
        )  # side by side, and the same in every run
        ax.scatter(skew_s, height, s=22, **style)
        ax.vlines(
            median_s or np.nan, place - 0.38, place + 0.38, color="black", linewidth=1.2
        )
    draw.log_axis(ax, "x", late["skew_s"].min(), late["skew_s"].max(), format_s)
    skew_s = table["skew_s"].median()
    transfer_s = table["transfer_s"].median()
    title = (
        f"Median skew {format_s(skew_s)}, {skew_s / max(transfer_s, 1e-12):.2g} "
        "times the median transfer"
    )
    rows = [_name(name) for name in by_median.index]
    return draw.finish(
        ax,
        drawn,
        title,
        x="last arrival - first arrival (bar: median)",
        rows=rows,
        origin=table,
    )


def plot_stragglers(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What the others wait for each rank, of `stragglers`: exposed and hidden; the
    share of calls it is last in.
    """
    shown = (
        table.sort_values("rank")
        .nlargest(_MOST_ROWS, "cost_s", keep="all")
        .head(_MOST_ROWS)
        .sort_values("rank")
    )
    if not (shown["cost_s"] > 0).any():
        return draw.empty(ax, shown, "No rank waits for another", table)
    exposed_s = shown["exposed_cost_s"]
    cost_ms = (
        pd.DataFrame({"comm": exposed_s, "hidden": shown["cost_s"] - exposed_s}) * 1e3
    )
    notes = [
        f"last in {share:.0%}" if share else "never last" for share in shown["share"]
    ]
    top = shown.loc[shown["cost_s"].idxmax()]
    often = "is" if top["rank"] in table.attrs["often_last"] else "is, as by chance,"
    cost = f"costs the others {format_s(top['cost_s'])}"
    title = (
        f"Rank {top['rank']:.0f} {often} last in {top['share']:.0%} of its calls "
        f"and {cost}"
    )
    ending = {
        "rows": draw.rank_labels(shown["rank"]),
        "key": {"exposed": "comm", "hidden under compute": "hidden"},
    }
    x = "waiting of the other ranks [ms]"
    return draw.bar_chart(
        ax, shown, cost_ms, title, notes=notes, x=x, origin=table, **ending
    )


def plot_workers(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Slowdown by each worker alone, of `what_if_no_stragglers(...).workers`:
    data-parallel rank by stage.
    """
    if table.empty:
        return draw.empty(ax, table, "No step to replay", table)
    cells = table.pivot_table(
        index="dp_rank", columns="stage", values="S", aggfunc="max"
    ).head(_MOST_RANKS)
    worst = table.loc[table["S"].idxmax()]
    ax = ax or draw.new_axes(height=1.3 + 0.3 * len(cells))
    draw.grid(
        ax, cells, texts=cells.map("{:.3f}".format), limits=(1, max(1.02, worst["S"]))
    )
    title = (
        f"Stragglers slow the step by {table.attrs['slowdown'] - 1:.1%}, rank "
        f"{worst['rank']:.0f} alone by "
    )
    title += f"{worst['S'] - 1:.1%}"
    return draw.finish(
        ax, table, title, x="stage", y="data-parallel rank", origin=table
    )


def plot_clock_offsets(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How far the clock of each rank is ahead, of `clock_offsets`, with the spread of
    its ends; at most 64 ranks.
    """
    farthest = table["offset_s"].abs().argsort(kind="stable").iloc[::-1][:_MOST_RANKS]
    drawn = table.iloc[farthest].sort_values("rank")
    if not table["calls"].sum():
        return draw.empty(
            ax, drawn, "Clocks cannot be compared: no call has two ranks here", table
        )
    ax = ax or draw.new_axes(height=1.1 + 0.24 * len(drawn))
    offset_us = drawn["offset_s"] * 1e6
    spread_us = drawn["spread_s"].fillna(0) * 1e6
    (dot, bar) = _CLOCK.values()
    ax.errorbar(
        offset_us,
        range(len(drawn)),
        xerr=spread_us,
        fmt="o",
        color=dot,
        ecolor=bar,
        ms=5,
        elinewidth=3,
    )
    ax.axvline(0, color="black", linewidth=0.8, zorder=0)
    largest_s = table["offset_s"].abs().max()
    spread_s = table["spread_s"].median()
    title = (
        f"Clocks are up to {format_s(largest_s)} apart, ends scatter by "
        f"{format_s(spread_s)}"
    )
    ending = {"rows": draw.rank_labels(drawn["rank"]), "key": _CLOCK}
    return draw.finish(
        ax, drawn, title, x="clock ahead of the reference [µs]", origin=table, **ending
    )


def _name(collective: str) -> str:
    return collective.replace("_", "-")


def _group_labels(table: pd.DataFrame) -> list[str]:
    """Collective and group, whose list of ranks is shortened."""
    groups = (
        table["group"]
        .astype(str)
        .str.replace(r" \[(\d+),[^]]{9,}[ ,](\d+)\]", r" [\1 … \2]", regex=True)
    )
    return [
        f"{_name(name)} · {group}".removesuffix(" · ")
        for name, group in zip(table["collective"], groups, strict=True)
    ]
