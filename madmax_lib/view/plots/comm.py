"""Pictures of collectives, stragglers and clocks: the tables of `traces.comm` and
`traces.stragglers`.
"""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import format_bytes, format_s
from madmax_lib.traces.comm.collectives import bandwidths
from madmax_lib.view.drawing import (
    COLORS,
    bar_chart,
    empty,
    finish,
    log_axis,
    new_axes,
    rank_labels,
)

_MOST_ROWS = 16
# points beyond are drawn as pixels, so that pictures of any trace stay small
_MOST_POINTS = 1000
_HIDDEN = {"exposed": "comm", "hidden under compute": "hidden"}


def plot_groups(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Time of each process group and collective of `by_group`, mean over its ranks,
    split into transfer and waiting.

    At most the 16 that take most time; of a single rank the waiting is not known and
    counts as transfer.
    """
    top = table.head(_MOST_ROWS).reset_index(drop=True)
    if top.empty:
        return empty(ax, top, "No communication in this trace", table)
    wait_s = top["wait_s"].fillna(0)
    parts = pd.DataFrame({"comm": top["total_s"] - wait_s, "idle": wait_s})
    # sums over ranks to means, seconds to ms
    per_rank_ms = parts.div(top["ranks"] / 1e3, axis=0)
    total_s = max(table["total_s"].sum(), 1e-12)
    # waiting is known where the arrival of other ranks is
    if table["wait_s"].notna().any():
        waiting = table["wait_s"].sum() / total_s
        title = f"{waiting:.0%} of the communication is waiting for the last rank"
        key = {"transfer": "comm", "waiting": "idle"}
    else:
        most = _name(top["collective"][0]).capitalize()
        share = top["total_s"][0] / total_s
        title = f"{most} takes {share:.0%} of the communication"
        key = {"transfer and waiting (one rank: not told apart)": "comm"}
    # "dp [0,1,2,3,4,5,6,7]" becomes "dp [0 … 7]"
    ranks = r" \[(\d+),[^]]{9,}[ ,](\d+)\]"
    groups = top["group"].astype(str).str.replace(ranks, r" [\1 … \2]", regex=True)
    labels = top["collective"].map(_name) + " · " + groups
    return bar_chart(
        ax,
        top[["group", "collective", "ranks", "total_s", "wait_s"]],
        per_rank_ms,
        title,
        x="time per rank [ms]",
        rows=list(labels.str.removesuffix(" · ")),
        key=key,
    )


def plot_bandwidth(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Bus bandwidth over message size of `calls`, both logarithmic; a call of several
    ranks is one point.

    The marker is the rank with the shortest time, which hardly waits; the line below it
    reaches to the slowest rank.
    """
    points = bandwidths(table)
    if points.empty:
        return empty(ax, points, "No bandwidth: no call tells its size", table)
    ax = ax or new_axes(height=3.6)
    size_bytes = points["size_bytes"]
    slow_gb_per_s = points["slowest_bytes_per_s"] / 1e9
    fast_gb_per_s = points["bus_bytes_per_s"] / 1e9
    line = {"color": COLORS["hidden"], "linewidth": 0.8, "zorder": 1}
    many = {"rasterized": len(points) > _MOST_POINTS}
    ax.vlines(size_bytes, slow_gb_per_s, fast_gb_per_s, **line, **many)
    import seaborn  # late: it brings scipy.stats, a second of every start

    drawn = points.assign(gb_per_s=fast_gb_per_s, call=points["collective"].map(_name))
    look = {"style": "call", "color": COLORS["comm"], "s": 34, "ax": ax, "zorder": 2}
    seaborn.scatterplot(drawn, x="size_bytes", y="gb_per_s", **look, **many)
    log_axis(ax, "x", size_bytes.min(), size_bytes.max(), format_bytes)
    log_axis(ax, "y", slow_gb_per_s.min(), fast_gb_per_s.max(), "{:g}".format)
    ax.grid(axis="y")
    best = fast_gb_per_s.idxmax()
    name = _name(points["collective"][best]).capitalize()
    size = format_bytes(size_bytes[best])
    return finish(
        ax,
        points,
        f"{name} reaches {fast_gb_per_s[best]:.3g} GB/s with {size}",
        x="message size",
        y="bus bandwidth [GB/s]",
        where="beside",
        origin=table,
    )


def plot_stragglers(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Time that the others wait for each rank, of `stragglers`: exposed and hidden; the
    share of calls it is last in.
    """
    # of ranks with equal costs those with the lower numbers stay
    by_rank = table.sort_values("rank")
    top = by_rank.nlargest(_MOST_ROWS, "cost_s", keep="all").head(_MOST_ROWS)
    top = top.sort_values("rank")
    if not (top["cost_s"] > 0).any():
        return empty(ax, top, "No rank waits for another", table)
    exposed_s = top["exposed_cost_s"]
    parts = pd.DataFrame({"comm": exposed_s, "hidden": top["cost_s"] - exposed_s})
    last = top["share"].map("last in {:.0%}".format)
    worst = top.loc[top["cost_s"].idxmax()]
    # `often_last`: ranks that are last more often than chance would have them
    often_last = table.attrs["often_last"]
    chance = "" if worst["rank"] in often_last else " (no more than by chance)"
    return bar_chart(
        ax,
        top,
        parts * 1e3,
        f"Rank {worst['rank']:.0f} is last in {worst['share']:.0%} of its calls{chance} "
        f"and costs the others {format_s(worst['cost_s'])}",
        x="waiting of the other ranks [ms]",
        rows=rank_labels(top["rank"]),
        key=_HIDDEN,
        notes=last.where(top["share"] > 0, "never last"),
    )


def _name(collective):
    return collective.replace("_", "-")
