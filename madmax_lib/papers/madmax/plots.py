"""Which strategy, system or scaling is best in MAD-Max? Figures 1 and 10 to 20."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from madmax_lib.papers.style import (
    GREY,
    HATCH,
    MARKS,
    PAPER,
    STRATEGY_COLORS,
    UNFIT,
    bars,
    done,
    legend,
    note,
    ours_and_paper,
    paper_marks,
    strategy_label,
)
from madmax_lib.view.drawing import COLORS, new_axes

__all__ = [
    "plot_best",
    "plot_classes",
    "plot_cloud",
    "plot_context",
    "plot_hardware",
    "plot_scaling",
    "plot_strategies",
]


def plot_cloud(table: pd.DataFrame, x: str, y: str, ax: Axes | None = None) -> Axes:
    """Figures 1 and 16: cloud instances as points, the Pareto line of all FSDP points and of the free choice.

    x, y: columns of `cloud_comparison`; less is better, except for mqps.
    """
    names = {"a100_hours": "A100-equivalent GPU-hours per 1B samples (by FP16 peak)", "mqps": "throughput [MQPS]",
             "hours": "time for 1B samples [h]", "cost_usd": "cost of 1B samples [USD]",
             "energy_mwh": "energy for 1B samples [MWh]"}  # fmt: skip
    ax = ax or new_axes(height=4.2)
    for strategy, part in table[~table["fits"]].groupby("dense_strategy"):
        ax.plot(part[x], part[y], MARKS[strategy], mfc="none", mec=GREY, ms=4, mew=0.7, ls="none")
    good, sign = table[table["fits"]], 1 if y != "mqps" else -1
    for strategy, part in good.groupby("dense_strategy", sort=False):
        ax.plot(part[x], part[y], MARKS[strategy], color=STRATEGY_COLORS[strategy], ms=4, ls="none", mew=0)
    fsdp, free = (_pareto(rows, x, y, sign) for rows in (good[good["dense_strategy"] == "fsdp"], good))
    for line, color, text in ((fsdp, STRATEGY_COLORS["fsdp"], "FSDP"), (free, PAPER, "best strategy")):
        ax.plot(line[x], line[y], color=color, lw=1.2, drawstyle="steps-post", zorder=1)
        end = line.iloc[-1]
        note(ax, end[x], end[y], f"{text}, {end['num_devices']} GPUs of {end['instance']}", dx=12, color=color)
    ax.set(xscale="log", yscale="log", xlabel=names[x], ylabel=names[y])
    published = table[table["published_mqps"].notna()] if y == "mqps" else table.iloc[:0]
    ax.plot(published[x], published["published_mqps"], "o", mfc="none", mec=PAPER, ms=8, mew=0.7, ls="none")
    handles = [Line2D([], [], marker=m, color=STRATEGY_COLORS[s], ls="none", ms=5, label=strategy_label(s))
               for s, m in MARKS.items()]  # fmt: skip
    handles.append(Line2D([], [], marker="o", mfc="none", mec=GREY, ls="none", ms=5, label="does not fit in memory"))
    if len(published):
        handles.append(Line2D([], [], marker="o", mfc="none", mec=PAPER, ls="none", ms=8, label="artifact sheet"))
    legend(ax, handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.grid(True, which="major", axis="both")
    ax.set_title(_cloud_message(fsdp, free, x, y))
    return done(ax, table)


def _pareto(rows: pd.DataFrame, x: str, y: str, sign: int) -> pd.DataFrame:
    """Rows that no other row beats in both x (less) and y (less, or more for sign -1)."""
    rows = rows.sort_values([x, y], ascending=[True, sign > 0])
    reach = (sign * rows[y]).cummin()
    return rows[(sign * rows[y] <= reach) & ~reach.duplicated()]


def _cloud_message(fsdp: pd.DataFrame, free: pd.DataFrame, x: str, y: str) -> str:
    if y == "mqps":
        gain = free["mqps"].max() / fsdp["mqps"].max()
        return f"The right strategy moves the front: {gain:.2f}x the fastest FSDP point"
    faster, less = (1 - free[column].min() / fsdp[column].min() for column in (y, x))
    return f"At best {less:.0%} less {'cost' if x == 'cost_usd' else 'energy'} and {faster:.0%} less time than FSDP"


def plot_best(
    table: pd.DataFrame, ax: Axes | None = None, *, by: str = "model", most: float | None = None, title: str = ""
) -> Axes:
    """Figures 10 and 14: throughput over FSDP of the best strategy, within memory (hatched) and without (dotted).

    table: every strategy (of `strategies_over_fsdp` or `task_dependence`). by: the column of a group. most: the largest
    gain within memory that the paper publishes.
    """
    groups = list(dict.fromkeys(table[by]))
    ax = ax or new_axes(height=0.9 + 0.42 * len(groups))
    free_any = False
    for place, group in enumerate(groups):
        rows = table[table[by] == group]
        fits = rows[rows["fits"]].sort_values("gain").iloc[-1]
        free = rows.sort_values("gain").iloc[-1]
        beyond = free["gain"] > fits["gain"] * 1.0005
        text = _gain_text(fits)
        if beyond:
            free_any = True
            bars(ax, place, free["gain"], color="none", fits=False)
            text += f"; with {_memory(free['memory_needed_gb'])}: {_gain_text(free)}"
        bars(ax, place, fits["gain"], color=STRATEGY_COLORS[fits["dense_strategy"]])
        there = rows[rows["published_gain"].notna()]
        paper_marks(ax, there["published_gain"], [place] * len(there))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        note(ax, max(fits["gain"], free["gain"]), place, text, dx=7, fontsize=6.5, bbox=box)
    if most:
        ax.axvline(most, color=PAPER, lw=0.8, ls="--")
        note(ax, most, -0.6, f"paper: up to {most:.2f}x", dx=0, dy=5, fontsize=6.5, ha="center")
    ax.axvline(1, color=STRATEGY_COLORS["fsdp"], lw=1)
    ax.set_yticks(range(len(groups)), groups)
    reach = 1.3 * table["gain"].max() + 0.3
    ax.set(ylim=(len(groups) - 0.4, -0.6), xlim=(0, reach), xlabel="throughput over FSDP [x]", title=title)
    ax.title.set_position((0, 1.02))
    legend(ax, [*ours_and_paper("recorded with the release"), *([UNFIT] if free_any else [])], loc="upper left",
            bbox_to_anchor=(0, -0.45 / ax.figure.get_figheight() - 0.02), ncols=3)  # fmt: skip
    return done(ax, table)


def _gain_text(row: pd.Series) -> str:
    error = f", error {row['gain'] / row['published_gain'] - 1:+.2%}" if row["published_gain"] > 0 else ""
    return f"{row['gain']:.2f}x {strategy_label(row['dense_strategy'])}{error}"


def _memory(size_gb: float) -> str:
    return f"{size_gb:.1f} GB" if size_gb < 100 else f"{size_gb:.0f} GB" if size_gb < 1e3 else f"{size_gb / 1e3:.1f} TB"


def plot_strategies(table: pd.DataFrame, *, title: str = "") -> Axes:
    """Figures 11 to 13 and the study of TP inside, FSDP across: per model the step under each strategy.

    A panel per model: compute and exposed communication in units of the FSDP step, memory as text.
    """
    models = list(dict.fromkeys(table["model"]))
    strategies = table.groupby("dense_strategy", sort=False)["iteration_ms"].size().index
    figure, axes = plt.subplots(1, len(models), figsize=(max(2.55 * len(models), 4.2), 0.9 + 0.3 * len(strategies)),
                                sharey=True, squeeze=False)  # fmt: skip
    for ax, model in zip(axes[0], models, strict=True):
        rows = table[table["model"] == model].set_index("dense_strategy").loc[strategies]
        base = rows.loc["fsdp", "iteration_ms"]
        limit = 2.0
        for place, row in enumerate(rows.itertuples()):
            comm = row.exposed_comm_ms / base
            compute = row.iteration_ms / base - comm
            shown = min(compute + comm, limit)
            faded = {} if row.fits else {"alpha": 0.3}
            for bar in (bars(ax, place, compute, color=COLORS["compute"]),
                        bars(ax, place, shown - compute, left=compute, color=COLORS["comm"])):  # fmt: skip
                bar.patches[0].set(**faded)
            cut = " ▸" if compute + comm > limit else ""
            memory = _memory(row.memory_needed_gb) + ("" if row.fits else ", too much")
            note(ax, shown, place, f"{compute + comm:.2f}{cut}\n{memory}", fontsize=6,
                  color="black" if row.fits else "#8a8a8a")  # fmt: skip
        first = rows.iloc[0]
        ax.set_title(f"{model}, {first['memory_gb']:.0f} GB per GPU", fontsize=8, fontweight="normal")
        ax.set(xlim=(0, limit * 1.42), ylim=(len(strategies) - 0.5, -0.5), xlabel="step over FSDP step [1]")
    axes[0][0].set_yticks(range(len(strategies)), [strategy_label(s) for s in strategies])
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    handles = [Patch(facecolor=COLORS["compute"], hatch=HATCH, edgecolor="white", label="compute"),
               Patch(facecolor=COLORS["comm"], hatch=HATCH, edgecolor="white", label="exposed communication"),
               Patch(facecolor=COLORS["compute"], alpha=0.3, label="pale: does not fit in memory")]  # fmt: skip
    figure.legend(handles=handles, ncols=3, loc="outside lower center", frameon=False, fontsize=8)
    return done(axes[0][0], table)


def plot_classes(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Gain over FSDP for each pair of strategies of two layer classes; what does not fit is grey, with its bytes."""
    import seaborn as sns  # late: it brings scipy.stats, a second of every start

    order = list(dict.fromkeys(table["mlp"]))
    grids = {c: table.pivot(index="mlp", columns="transformer", values=c).loc[order, order] for c in ("gain", "fits")}
    needed = table.pivot(index="mlp", columns="transformer", values="memory_needed_gb").loc[order, order]
    texts = grids["gain"].map(lambda gain: f"{gain:.2f}x")
    texts = texts.where(grids["fits"].astype(bool), texts + needed.map(lambda size_gb: f"\n{_memory(size_gb)}"))
    ax = ax or new_axes(height=3.2, width=5.6)
    ax.set_facecolor("#dddddd")
    style = {"cmap": "Greens", "cbar": False, "linewidths": 1.5, "vmin": 0.5, "annot_kws": {"fontsize": 8}}
    labels = [strategy_label(strategy) for strategy in order]
    unfit = ~grids["fits"].astype(bool)
    sns.heatmap(grids["gain"], ax=ax, mask=unfit, annot=texts, fmt="", xticklabels=labels, yticklabels=labels, **style)
    for row, column in np.argwhere(unfit.to_numpy()):
        ax.text(column + 0.5, row + 0.5, texts.iloc[row, column], ha="center", va="center", fontsize=8, color="#777777")
    most = table[table["fits"]].nlargest(1, "gain").iloc[0]
    split = f"MLP {strategy_label(most['mlp'])}, transformer {strategy_label(most['transformer'])}"
    ax.set(xlabel="transformer blocks", ylabel="MLPs", title=f"{split}: {most['gain']:.2f}x FSDP (trend only)")
    ax.grid(False)
    ax.tick_params(axis="y", rotation=0)
    return done(ax, table)


def plot_context(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Figure 15: throughput over FSDP against the context length, a line per strategy; hollow where it does not fit."""
    ax = ax or new_axes(height=3.2)
    shown = table[(table["gain"] > 0.5) & (table["dense_strategy"] != "fsdp")]
    for strategy, part in shown.groupby("dense_strategy", sort=False):
        color, fits = STRATEGY_COLORS[strategy], part["fits"].all()
        line, fill = ("o-", color) if fits else ("o:", "white")
        ax.plot(part["context"], part["gain"], line, color=color, mfc=fill, ms=5)
        end = part.iloc[-1]
        needs = "" if fits else f", needs {end['memory_needed_gb']:.0f} of {end['memory_gb']:.0f} GB"
        text = f"{strategy_label(strategy)}{needs}"
        note(ax, end["context"], end["gain"], text, dx=8, color=color)
        for row in part.dropna(subset="published_gain").itertuples():
            paper_marks(ax, [row.context], [row.published_gain])
            note(ax, row.context, row.gain, f"{row.gain:.3f} ({row.gain / row.published_gain - 1:+.2%})", dx=4, dy=10,
                  fontsize=6.5, ha="left", color="#444444")  # fmt: skip
    ax.axhline(1, color=STRATEGY_COLORS["fsdp"], lw=1)
    note(ax, table["context"].min(), 1.0, "FSDP", dx=8, dy=7, color=STRATEGY_COLORS["fsdp"])
    lengths = sorted(table["context"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    ax.minorticks_off()
    ax.set(
        xlabel="context length [tokens]", ylabel="throughput over FSDP [x]", xlim=(lengths[0] * 0.8, lengths[-1] * 2.0)
    )
    ax.set_ylim(0.86, shown["gain"].max() * 1.06)
    ax.grid(True, axis="y")
    ax.set_title("LLaMA2-70B: at 32K tokens no strategy gains much over FSDP")
    hollow = Line2D([], [], marker="o", ls=":", color="#555555", mfc="white", label="ours, does not fit in memory")
    filled = Line2D([], [], marker="o", ls="-", color="#555555", label="ours")
    legend(ax, [filled, hollow, ours_and_paper("recorded with the release")[1]], loc="upper right")
    return done(ax, table)


def plot_scaling(table: pd.DataFrame, *, title: str = "") -> Axes:
    """Figures 18 to 20: speedup against the factor by which compute, memory and links grow, alone and together."""
    models = list(dict.fromkeys(table["model"]))
    figure, axes = plt.subplots(1, len(models), figsize=(7.0, 3.2), sharey=True, squeeze=False)
    colors = {"compute": COLORS["compute"], "memory": COLORS["memcpy"], "interconnect": COLORS["comm"],
              "all three": PAPER}  # fmt: skip
    for ax, model in zip(axes[0], models, strict=True):
        for part, rows in table[(table["model"] == model) & (table["limit"] == "memory")].groupby("part", sort=False):
            ax.plot(rows["factor"], rows["speedup"], "o-", color=colors[part], ms=4)
            end = rows.iloc[-1]
            text = f"{part}\n{end['speedup']:.1f}x {strategy_label(end['dense_strategy'])}"
            note(ax, end["factor"], end["speedup"], text,
                  dx=6, color=colors[part], fontsize=6.5, dy=_apart(table, model, part))  # fmt: skip
        factors = sorted(table["factor"].unique())
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(factors, [f"{f:g}x" for f in factors])
        ax.set_yticks([1, 2, 4, 8, 16], ["1x", "2x", "4x", "8x", "16x"])
        ax.minorticks_off()
        ax.set(xlabel="faster by", xlim=(factors[0] * 0.9, factors[-1] * 2.6), ylim=(0.9, 16))
        ax.set_title(model, fontsize=8, fontweight="normal")
        ax.grid(True, axis="both")
    axes[0][0].set_ylabel("throughput over today [x]")
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    return done(axes[0][0], table)


def _apart(table: pd.DataFrame, model: str, part: str) -> float:
    """Points by which a direct label moves so that labels of near lines do not overlap."""
    rows = table[(table["model"] == model) & (table["limit"] == "memory")]
    ends = rows[rows["factor"] == rows["factor"].max()].sort_values("speedup").set_index("part")["speedup"]
    place, target = -np.inf, {}
    for name, value in ends.items():  # 40 points per factor 2 of the axis, 16 points a label
        place = max(40 * np.log2(value), place + 17)
        target[name] = place - 40 * np.log2(value)
    return target[part]


def plot_hardware(table: pd.DataFrame, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Figures 17 to 20: throughput of one device on each cluster, under FSDP and the best strategy that fits."""
    models = list(dict.fromkeys(table["model"]))
    systems = list(dict.fromkeys(table["system"]))
    figure, axes = plt.subplots(1, len(models), figsize=(7.0, 0.8 + 0.4 * len(systems)), sharey=True, squeeze=False)
    for ax, model in zip(axes[0], models, strict=True):
        rows = table[table["model"] == model]
        for row in rows.itertuples():
            fsdp = row.choice == "fsdp"
            place = systems.index(row.system) + (-0.2 if fsdp else 0.2)
            color = STRATEGY_COLORS[row.dense_strategy]
            text = f"{row.per_gpu:.2f}" + ("" if fsdp else f" {strategy_label(row.dense_strategy)}")
            if not row.fits:
                text += f", needs {row.memory_needed_gb:.0f} GB"
            bars(ax, place, row.per_gpu, color=color, fits=row.fits, height=0.36)
            note(ax, row.per_gpu, place, text, fontsize=6.5)
        for place, system in enumerate(systems):
            if system not in set(rows["system"]):
                ax.text(0.02, place, "no FP32 or TF32 peak published", fontsize=6.5, va="center", color="#777777")
        ax.set(xlim=(0, rows["per_gpu"].max() * 1.4), xlabel="samples/s per device, A100 FSDP = 1")
        devices = sorted(set(rows["devices"]))
        ax.set_title(f"{model}, {' or '.join(f'{d:,.0f}' for d in devices)} devices", fontsize=8, fontweight="normal")
    axes[0][0].set_yticks(range(len(systems)), systems)
    axes[0][0].set_ylim(len(systems) - 0.4, -0.6)
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    return done(axes[0][0], table)
