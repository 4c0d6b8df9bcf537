"""How do Metis' results look: costs by enumeration order, defects of its plans, search times, training curves?"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.papers.origin import with_origin
from madmax_lib.view import drawing as draw

__all__ = ["plot_defects", "plot_orders", "plot_profile_choice", "plot_search_time", "plot_training"]

_ORDERS = {"A100 first": ("compute", "o"), "V100 first": ("comm", "s")}  # colour and mark
_RUNS = {"DP": "compute", "TP": "comm"}
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
        _from_files(table, "profiles", "published"),
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
        _from_files(table, "profiles", "published"),
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
        _from_files(shares, "profiles", "published"),
        "Most plans that Metis costs have stages without layers",
        x="share of the costed plans [%]",
        rows=defects,
        reach=112,
        key=[draw.patch_key(case, fill, "simulated") for case, fill in fills.items()],
    )


def plot_search_time(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Figure 1: search time against layers on 8 x 4 GPUs, as published."""
    ax = ax or draw.new_axes(height=3.0)
    draw.lines(ax, table, "layers", "search_s", marker="D", ls="--", color=draw.PAPER, mfc="none", lw=1)
    for row in table.itertuples():
        draw.note(ax, row.layers, row.search_s, f"{row.search_s:,.0f} s", dx=7, dy=-8)
    ax.margins(y=0.15)
    return draw.finish(
        ax,
        _from_files(table, "search_time"),
        "Published search times, settings unknown: hours from 24 layers on",
        x="layers",
        y="published search time [s]",
        yscale="log",
        xlim=(5, 90),
    )


def plot_training(summary: pd.DataFrame, logs: pd.DataFrame | None = None) -> Axes:
    """Figure 3: time of an iteration as a bar, or with `logs` the smoothed loss against elapsed time."""
    if logs is not None:
        return _plot_losses(logs)
    ax, times_s = draw.new_axes(height=1.7), summary["median_ms"] / 1e3
    draw.bars(ax, times_s, [_RUNS[run] for run in summary["strategy"]], notes=[f"{time_s:.1f} s" for time_s in times_s])
    ratio = times_s.iloc[1] / times_s.iloc[0]
    return draw.finish(
        ax,
        _from_files(summary, "dp_tp"),
        f"Two P100: tensor parallelism takes {ratio:.2f}x as long as data parallelism",
        x="measured time of an iteration, median [s]",
        rows=[f"{row.strategy} on {row.gpus} GPUs" for row in summary.itertuples()],
        reach=1.15 * times_s.max(),
    )


def _plot_losses(logs: pd.DataFrame) -> Axes:
    ax = draw.new_axes(height=2.9)
    smooth = logs.groupby("run", sort=False)["loss"].transform(lambda loss: loss.ewm(alpha=0.1).mean())
    styles = {run: draw.COLORS[fill] for run, fill in _RUNS.items()}
    ends = {run: run for run in _RUNS}
    draw.lines(ax, logs.assign(loss=smooth), "elapsed_s", "loss", by="run", styles=styles, ends=ends, ls="--", lw=1.5)
    title = "Only the time axis compares: the two learning-rate schedules differ"
    return draw.finish(ax, logs, title, x="elapsed time [s]", y="loss, smoothed", reach=1.06 * logs["elapsed_s"].max())


def _from_files(table: pd.DataFrame, *files: str) -> pd.DataFrame:
    return with_origin(table, *(f"metis/{file}" for file in files), rules="Metis as released")
