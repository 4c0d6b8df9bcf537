"""Pictures of strategies in MAD-Max: figures 1, 10 to 14 and 16.

Published values are hollow, what does not fit in memory is grey or pale.
"""

import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes

from madmax_lib.base import format_bytes
from madmax_lib.view.drawing import (
    GREY,
    PAPER,
    UNFIT,
    bars,
    faded,
    finish,
    line_key,
    mark_key,
    new_axes,
    note,
    panels,
    patch_key,
    published,
)

_COLORS = {  # by strategy, the same in every figure
    "fsdp": "#6b6b6b",
    "ddp": "#b5485d",
    "tp,ddp": "#2a9d8f",
    "ddp,tp": "#7a5195",
    "fsdp,tp": "#c9a227",
    "fsdp,ddp": "#d387b0",
    "tp": "#a0785a",
    "tp,fsdp": "#1d3557",
}
_AXES = {
    "a100_hours": "A100-equivalent GPU-hours per 1B samples (by FP16 peak)",
    "mqps": "throughput [MQPS]",
    "hours": "time for 1B samples [h]",
    "cost_usd": "cost of 1B samples [USD]",
    "energy_mwh": "energy for 1B samples [MWh]",
}
_OURS = patch_key("ours", "#9a9a9a", "simulated")
_RECORDED = mark_key("recorded with the release")


def _label(strategy):
    """Strategy as the paper writes it: "tp,ddp" is (TP, DDP)."""
    return f"({strategy.upper().replace(',', ', ')})"


def plot_cloud(table: pd.DataFrame, x: str, y: str) -> Axes:
    """Figures 1 and 16: cloud instances as points, the Pareto line of all FSDP points
    and of the free choice.

    x, y: columns of `cloud_comparison`; less is better, except for mqps.
    """
    ax = new_axes(height=4.2)
    points = table.assign(strategy=table["dense_strategy"].map(_label))
    fitting = points[points["fits"]]
    # a colour and a mark for each strategy
    look = {"hue": "strategy", "style": "strategy", "s": 20, "linewidth": 0, "ax": ax}
    look["palette"] = {_label(name): color for name, color in _COLORS.items()}
    seaborn.scatterplot(fitting, x=x, y=y, **look)
    hollow = {"mfc": "none", "mew": 0.7, "ls": "none", "marker": "o"}
    small = {"mec": GREY, "ms": 4, "label": "does not fit in memory"}
    ax.plot(x, y, data=points[~points["fits"]], **hollow | small)
    free = _pareto(fitting, x, y)
    fsdp = _pareto(fitting[fitting["dense_strategy"] == "fsdp"], x, y)
    fronts = (("FSDP", fsdp, _COLORS["fsdp"]), ("best strategy", free, PAPER))
    for name, front, color in fronts:
        style = {"lw": 1.2, "drawstyle": "steps-post", "zorder": 1}
        ax.plot(front[x], front[y], color=color, **style)
        last = front.iloc[-1]
        text = f"{name}, {last['num_devices']} GPUs of {last['instance']}"
        note(ax, last[x], last[y], text, dx=12, color=color)
    if y == "mqps":
        sheet = {"mec": PAPER, "ms": 8, "label": "artifact sheet"}
        ax.plot(table[x], table["published_mqps"], **hollow | sheet)
        gain = free["mqps"].max() / fsdp["mqps"].max()
        title = (
            f"The right strategy moves the front: {gain:.2f}x the fastest FSDP point"
        )
    else:
        faster = 1 - free[y].min() / fsdp[y].min()
        less = 1 - free[x].min() / fsdp[x].min()
        saved = "cost" if x == "cost_usd" else "energy"
        title = f"At best {less:.0%} less {saved} and {faster:.0%} less time than FSDP"
    ax.grid(True, which="major", axis="both")
    axes = {"x": _AXES[x], "y": _AXES[y], "xscale": "log", "yscale": "log"}
    return finish(ax, table, title, **axes, where="beside")


def _pareto(rows, x, y):
    """Rows that no other row beats in both x (less) and y (less, of mqps more)."""
    sign = 1 if y != "mqps" else -1
    rows = rows.sort_values([x, y], ascending=[True, sign > 0])
    # best y up to each x; the front steps where a row reaches a new one
    best = (sign * rows[y]).cummin()
    return rows[(sign * rows[y] <= best) & ~best.duplicated()]


def plot_best(
    table: pd.DataFrame, *, by: str = "model", most: float, title: str
) -> Axes:
    """Figures 10 and 14: throughput over FSDP of the best strategy, within memory
    (hatched) and without (dotted).

    table: every strategy (of `strategies_over_fsdp` or `task_dependence`). by: the
    column of a group. most: the largest gain within memory that the paper publishes.
    """
    groups = list(dict.fromkeys(table[by]))
    ax = new_axes(height=0.9 + 0.34 * len(groups), width=9.0)
    # the last row of a group is its best, of all strategies and of those that fit
    ranked = table.sort_values("gain")
    free = ranked.groupby(by).tail(1).set_index(by).loc[groups]
    fits = ranked[ranked["fits"]].groupby(by).tail(1).set_index(by).loc[groups]
    # where memory is what limits the gain; 0.05 % is below what the texts show
    beyond = (free["gain"] > fits["gain"] * 1.0005).to_numpy()
    bars(ax, free.loc[beyond, "gain"], fill=UNFIT, places=np.flatnonzero(beyond))
    fills = [_COLORS[name] for name in fits["dense_strategy"]]
    bars(ax, fits["gain"], fill=fills, source="simulated")
    published(ax, table["published_gain"], table[by].map(groups.index))
    for row, group in enumerate(groups):
        text = _gain(fits.loc[group])
        if beyond[row]:
            needed = format_bytes(1e9 * free.at[group, "memory_needed_gb"])
            text += f"; with {needed}: {_gain(free.loc[group])}"
        # a column beside the line, which no text crosses
        note(ax, max(most, table["gain"].max()), row, text, dx=9)
    ax.axvline(most, color=PAPER, lw=0.8, ls="--")
    ax.axvline(1, color=_COLORS["fsdp"], lw=1)
    key = [_OURS, _RECORDED, line_key(f"paper: up to {most:.2f}x", PAPER, ls="--")]
    if beyond.any():
        key.append(patch_key("does not fit in memory", UNFIT))
    reach = 2.1 * max(most, table["gain"].max())
    x = "throughput over FSDP [x]"
    return finish(ax, table, title, x=x, rows=groups, reach=reach, key=key)


def _gain(row):
    text = f"{row['gain']:.2f}x {_label(row['dense_strategy'])}"
    if row["published_gain"] > 0:
        text += f", error {row['gain'] / row['published_gain'] - 1:+.2%}"
    return text


def plot_strategies(table: pd.DataFrame, *, title: str) -> Axes:
    """Figures 11 to 13 and the study of TP inside, FSDP across: per model the step
    under each strategy.

    A panel per model: compute and exposed communication in units of the FSDP step,
    memory as text.
    """
    limit = 2.0  # steps beyond are cut: TP across nodes takes up to 30 FSDP steps
    strategies = list(dict.fromkeys(table["dense_strategy"]))
    models = table.groupby("model", sort=False)
    names = [
        f"{model}, {size_gb:.0f} GB per GPU"
        for model, size_gb in models["memory_gb"].first().items()
    ]
    width = max(2.55 * len(names), 4.2)
    height = 0.9 + 0.3 * len(strategies)
    axes = panels(names, width=width, height=height, title=title)
    for ax, (_, rows) in zip(axes, models, strict=True):
        rows = rows.set_index("dense_strategy").loc[strategies]
        fsdp_ms = rows.at["fsdp", "iteration_ms"]
        step = rows["iteration_ms"] / fsdp_ms
        compute = step - rows["exposed_comm_ms"] / fsdp_ms
        comm = step.clip(upper=limit) - compute
        parts = pd.DataFrame({"compute": compute, "comm": comm})
        # opacity: plans that do not fit are pale
        pale = [1 if fits else 0.3 for fits in rows["fits"]]
        fills = {
            kind: [faded(kind, "simulated", alpha=alpha) for alpha in pale]
            for kind in parts
        }
        ends = bars(ax, parts, fill=fills)
        for row, case in enumerate(rows.itertuples()):
            cut = " ▸" if step.iloc[row] > limit else ""
            text = f"{step.iloc[row]:.2f}{cut}\n{format_bytes(1e9 * case.memory_needed_gb)}"
            text += "" if case.fits else ", too much"
            ink = "black" if case.fits else "#8a8a8a"
            note(ax, ends[row], row, text, fontsize=6, color=ink)
        rows = list(map(_label, strategies))
        x = "simulated step over FSDP's"
        finish(ax, table, None, x=x, rows=rows, reach=1.42 * limit)
    pale_compute = faded("compute", alpha=0.3)
    key = [
        patch_key("compute", "compute", "simulated"),
        patch_key("exposed communication", "comm", "simulated"),
        patch_key("pale: does not fit in memory", pale_compute),
    ]
    look = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
    axes[0].figure.legend(handles=key, ncols=3, **look)
    return axes[0]
