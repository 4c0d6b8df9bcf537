"""Pictures of vTrain's tables and case studies; published numbers are hollow diamonds."""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import (
    DASHED,
    PAPER,
    SERIES,
    finish,
    log_axis,
    new_axes,
    note,
    published,
)

_TP = {  # colour and mark by tensor parallelism
    4: (SERIES[0], "o"),
    8: (SERIES[1], "s"),
    16: (SERIES[2], "^"),
    32: (SERIES[3], "D"),
}


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
        "x": "GPUs (A100); larger marks: more stages",
        "y": "model FLOPs over peak [%]",
        "xscale": "log",
        "ylim": (0, None),
    }
    title = (
        f"MT-NLG: more GPUs cost utilisation; (16, 16, 105) reaches {share:.0%}, "
        f"published {quoted:.0%}"
    )
    return finish(ax, space, title, **axes, where="upper right", columns=2)


def plot_compute_optimal(
    table: pd.DataFrame, quoted: pd.DataFrame, budget_days: float
) -> Axes:
    """Days that compute-optimal models take, over their size, beside the budget.

    table: of `compute_optimal`. quoted: parameters, days of published models.
    """
    ax = new_axes(height=3.6)
    feasible = table["feasible"]
    ax.plot(table["parameters"] / 1e9, table["days"], "o-", color=SERIES[0], lw=0.8)
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
