"""How do Metis' results look: costs by enumeration order, defects of its plans, search times, training curves?"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.papers.origin import with_origin
from madmax_lib.view import drawing as draw

__all__ = ["plot_defects", "plot_orders", "plot_profile_choice", "plot_training"]

_ORDERS = {"A100 first": ("compute", "o"), "V100 first": ("comm", "s")}  # colour and mark
_MODES = {"base": "Metis", "strategy": "Ours"}


def plot_orders(runs: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best cost of each row of table 1 in both orders of the GPU types, beside the two published columns."""
    table = runs[["row", "layers", "gpus", "mode", "node_order", "our_cost_ms", "cost_ms"]].reset_index(drop=True)
    first = table.drop_duplicates(["row", "mode"]).reset_index(drop=True)
    ax = ax or draw.new_axes(height=0.9 + 0.42 * len(first))
    for slot, (order, (fill, _)) in enumerate(_ORDERS.items()):
        part = table[table["node_order"] == order]
        costs = part["our_cost_ms"]
        draw.bars(ax, costs, fill, source="simulated", slot=(slot, 2), notes=[f"   {cost:,.2f}" for cost in costs])
    error = (table["our_cost_ms"] - table["cost_ms"]).abs()
    near = table.loc[error.groupby([table["row"], table["mode"]], sort=False).idxmin()]
    second = near["node_order"].eq("V100 first").to_numpy()
    draw.published(ax, near["cost_ms"], first.index + 0.4 * second - 0.2)
    return draw.finish(
        ax,
        _from_files(table, "profiles", "table1"),
        "The cost column follows the order of GPU types, not the method",
        x="cost of the best plan [ms]",
        rows=[f"{row.layers} layers, {row.gpus} GPUs, “{_MODES[row.mode]}”" for row in first.itertuples()],
        reach=1.16 * table["our_cost_ms"].max(),
        key=[
            *(draw.patch_key(order, fill, "simulated") for order, (fill, _) in _ORDERS.items()),
            draw.mark_key("published"),
        ],
    )


def plot_profile_choice(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best cost against the optimizer time of the profile listed first: `model_profiles`, in both orders."""
    ax = ax or draw.new_axes(height=2.8)
    for order, part in table.groupby("node_order", sort=False):
        fill, mark = _ORDERS[order]
        draw.lines(
            ax, part, "optimizer_ms", "cost_ms", marker=mark, ls="none", color=draw.COLORS[fill], mec="white", ms=6
        )
        low, high = part["cost_ms"].agg(["min", "max"])
        text, style = f"{order}: {low:.0f} to {high:.0f} ms", {"color": draw.COLORS[fill], "fontsize": 8}
        draw.note(ax, part["optimizer_ms"].max(), high, text, dx=-6, dy=9, ha="right", **style)
    ax.margins(y=0.18)
    return draw.finish(
        ax,
        _from_files(table, "profiles", "table1"),
        "The file that happens to be listed first moves the best cost too",
        x="optimizer time in the profile listed first [ms]",
        y="best cost [ms]",
    )


def plot_defects(shares: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of costed plans with each defect: a row per (case, defect, share)."""
    defects = shares["defect"].drop_duplicates().to_list()
    fills = dict(zip(shares["case"].drop_duplicates(), draw.COLORS, strict=False))
    ax = ax or draw.new_axes(height=0.8 + 0.55 * len(defects))
    for slot, (case, fill) in enumerate(fills.items()):
        part = shares[shares["case"] == case].set_index("defect")["share"].loc[defects]
        notes = [f"{share:.0%}" for share in part]
        draw.bars(ax, 100 * part, fill, source="simulated", slot=(slot, len(fills)), notes=notes)
    return draw.finish(
        ax,
        _from_files(shares, "profiles", "table1"),
        "Most plans that Metis costs have stages without layers",
        x="share of the costed plans [%]",
        rows=defects,
        reach=112,
        key=[draw.patch_key(case, fill, "simulated") for case, fill in fills.items()],
    )


def plot_training(summary: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Figure 3: time of an iteration. summary: the published table dp_tp."""
    times_s, kinds = summary["median_ms"] / 1e3, summary["strategy"].map({"DP": "compute", "TP": "comm"})
    title = f"Two P100: tensor parallelism takes {times_s[1] / times_s[0]:.2f}x as long as data parallelism"
    rows, notes = summary["strategy"] + " on 2 GPUs", times_s.map("{:.1f} s".format)
    x = "measured time of an iteration, median [s]"
    return draw.bar_chart(ax, _from_files(summary, "dp_tp"), times_s, title, kinds, notes=notes, x=x, rows=rows)


def _from_files(table: pd.DataFrame, *files: str) -> pd.DataFrame:
    return with_origin(table, *(f"metis/{file}" for file in files), rules="Metis as released")
