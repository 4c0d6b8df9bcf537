"""Pictures of vTrain's tables and case studies; published numbers are hollow diamonds."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    COLORS,
    DASHED,
    PAPER,
    SERIES,
    finish,
    lines,
    log_axis,
    mark_key,
    new_axes,
    note,
    published,
)

_TP = {  # colour and mark by tensor parallelism
    4: ("#529d3f", "o"),
    8: (COLORS["compute"], "s"),
    16: (COLORS["comm"], "^"),
    32: ("#8d6bb8", "D"),
}
_PLANS = {"given": (8, 8, 35), "found": (8, 12, 21)}  # of MT-NLG


def plot_space(space: pd.DataFrame, quoted: float) -> Axes:
    """Utilisation over the number of GPUs, a colour and mark per tp, larger marks for
    more stages.

    space: of `design_space`. quoted: the published utilisation of (16, 16, 105).
    """
    space = space[["tp", "dp", "pp", "gpus", "step_s", "utilisation"]]
    ax = new_axes(height=3.8)
    for tp, part in space.groupby("tp"):
        color, mark = _TP[tp]
        style = {
            "marker": mark,
            "facecolors": "none",
            "edgecolors": color,
            "linewidths": 0.8,
            "label": f"tp {tp}",
        }
        ax.scatter(
            part["gpus"], 100 * part["utilisation"], s=4 + 0.6 * part["pp"], **style
        )
    line = {"arrowstyle": "-", "lw": 0.6, "color": PAPER}
    plans = space.set_index(["tp", "dp", "pp"])[["gpus", "utilisation"]]
    places = {(8, 8, 35): (-130, -70), (8, 12, 21): (12, 26), (16, 16, 105): (-80, -16)}
    for plan, (dx, dy) in places.items():
        gpus, share = plans.loc[plan]
        ax.plot(gpus, 100 * share, "o", ms=4, color=PAPER)
        note(ax, gpus, 100 * share, str(plan), dx=dx, dy=dy, arrowprops=line)
    published(ax, gpus, 100 * quoted, label="published, (16, 16, 105)")
    axes = {
        "x": "GPUs (A100)",
        "y": "model FLOPs over peak [%]",
        "xscale": "log",
        "ylim": (0, None),
    }
    title = "MT-NLG: more GPUs cost utilisation (larger marks: more stages)"
    return finish(ax, space, title, **axes, where="upper right", columns=2)


def plot_costs(space: pd.DataFrame, plans: pd.DataFrame) -> Axes:
    """Cost over days of the training by plans that fit in 80 GB, two of them beside
    what was published.

    space: of `design_space`. plans: of `plan_table`.
    """
    ax = new_axes(height=3.8)
    # plans in the range of the published ones, in the 80 GB of an A100
    near = space[space["days"].between(30, 60) & (space["memory_bytes"] < 80e9)]
    near = near[["tp", "dp", "pp", "gpus", "days", "cost_usd"]]
    for tp, part in near.groupby("tp"):
        color, mark = _TP[tp]
        ax.plot(
            part["days"],
            part["cost_usd"] / 1e6,
            mark,
            ms=4,
            mfc="none",
            mec=color,
            label=f"tp {tp}",
        )
    both = plans.set_index("key")[["ours", "theirs"]]
    for name, plan in _PLANS.items():
        days = both.loc[f"plan_{name}_days"]
        cost = both.loc[f"plan_{name}_cost"] / 1e6
        ax.plot(days["ours"], cost["ours"], "o", ms=4, color=PAPER)
        ax.plot(days, cost, color=PAPER, lw=0.7, ls=":")
        note(ax, days["ours"], cost["ours"], f"{name} {plan}", dx=7, dy=4)
        published(ax, days["theirs"], cost["theirs"])
    ax.margins(y=0.12)
    key = [*ax.get_legend_handles_labels()[0], mark_key("published")]
    saved = -both.loc["plan_cost_change"]
    title = (
        f"MT-NLG: the plan found saves {saved['ours']:.1%} (published "
        f"{saved['theirs']:.1%})"
    )
    axes = {"x": "days for 270 B tokens", "y": "cost [M USD]"}
    return finish(ax, near, title, **axes, key=key, where="upper left", columns=4)


def plot_compute_optimal(
    table: pd.DataFrame, quoted: pd.DataFrame, budget_days: float
) -> Axes:
    """Days that compute-optimal models take, over their size; those within the budget
    are filled.

    table: of `compute_optimal`. quoted: parameters, days of published models.
    """
    ax = new_axes(height=3.6)
    blue = COLORS["compute"]
    feasible = table["feasible"]
    lines(ax, table, "parameters", "days", units=(1e9, 1), color=blue, lw=0.8)
    for part, face, name in (
        (feasible, blue, f"within {budget_days:g} days"),
        (~feasible, "white", "too long"),
    ):
        ax.plot(
            table["parameters"][part] / 1e9,
            table["days"][part],
            "o",
            ms=5,
            mec=blue,
            mfc=face,
            label=name,
        )
    ax.axhline(budget_days, **DASHED)
    published(
        ax,
        quoted["parameters"] / 1e9,
        quoted["days"],
        label="published (at most, for the smaller one)",
    )
    # rows are sorted by size
    largest = table[feasible].iloc[-1]
    naive = table[table["naive"]].iloc[-1]
    for row, text in (
        (largest, "largest within the budget"),
        (naive, "at full utilisation"),
    ):
        size = row["parameters"] / 1e9
        note(ax, size, row["days"], f"{size:.2f} B, {text}", dx=10, dy=-8)
    for which, values in (("x", table["parameters"] / 1e9), ("y", table["days"])):
        log_axis(ax, which, values.min(), values.max(), "{:g}".format)
    axes = {"x": "parameters [B], 20 tokens for each", "y": "days on 3,360 A100"}
    share = largest["parameters"] / naive["parameters"]
    title = (
        f"In {budget_days:g} days one trains {share:.0%} of the size that peak "
        "FLOP/s promise"
    )
    return finish(ax, table, title, **axes, where="upper left")


def plot_layouts(table: pd.DataFrame) -> Axes:
    """Step time over depth for each layout (tp, dp, pp), seed 000's quoted times
    beside; table: of `layouts`.
    """
    ax = new_axes(height=4.0)
    deepest = table.sort_values("layers").groupby("layout", sort=False).tail(1)
    ends = deepest.sort_values("step_s")
    label_s = -np.inf
    gap = ends["step_s"].max() / 24  # the height of a label
    for end, color in zip(ends.itertuples(), SERIES, strict=False):
        part = table[table["layout"] == end.layout].sort_values("layers")
        lines(ax, part, "layers", "step_s", marker="o", ms=3, lw=1, color=color)
        published(ax, part["layers"], part["published_s"], mec=color, ms=7, mew=1.3)
        label_s = max(end.step_s, label_s + gap)  # labels keep their distance
        note(ax, end.layers, label_s, end.layout, dx=8, color=color)
    limits = {
        "xticks": sorted(table["layers"].unique()),
        "xlim": (10, 150),
        "ylim": (0, None),
    }
    title = (
        "Hidden 8,192 on 2,048 A100: seed 000's (4, 128, 4) is faster than the "
        "devices can be"
    )
    axes = {"x": "layers; labels are (tp, dp, pp)", "y": "simulated step [s]", **limits}
    return finish(
        ax,
        table,
        title,
        **axes,
        key=[mark_key("seed 000")],
        where="upper left",
    )
