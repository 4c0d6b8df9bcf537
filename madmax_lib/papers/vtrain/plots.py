"""What do vTrain's tables and case studies show? Pictures of `51_vtrain`; published numbers are hollow diamonds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from madmax_lib.papers.style import PAPER, bars, done, note, ours_and_paper, paper_marks
from madmax_lib.view.drawing import COLORS, new_axes

__all__ = ["plot_compute_optimal", "plot_costs", "plot_layouts", "plot_measured", "plot_pairs",
           "plot_rules", "plot_scheduling", "plot_seed", "plot_space"]  # fmt: skip

_TP_COLORS = {4: "#529d3f", 8: COLORS["compute"], 16: COLORS["comm"], 32: "#8d6bb8"}
_TP_MARKS = {4: "o", 8: "s", 16: "^", 32: "D"}
_DARK = "#4a4a4a"


def plot_pairs(pairs: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Differences of rows that differ in data parallelism, over the differences of two all-reduces.

    pairs: of `vtrain.data_parallel_pairs`.
    """
    ax = ax or new_axes(height=4.2, width=5.0)
    kinds = ((False, "o", COLORS["compute"], "inside the tables"), (True, "s", COLORS["comm"], "beyond them"))
    for beyond, mark, color, text in kinds:
        part = pairs[pairs["beyond"] == beyond]
        ax.plot(part["table_ms"], part["given_ms"], mark, ms=4, mfc="none", mec=color, label=f"{text} ({len(part)})")
    ends = np.array([pairs["table_ms"].min(), pairs["table_ms"].max()])
    ax.plot(ends, ends, color=_DARK, lw=0.8, zorder=0)
    ax.set(xlabel="difference of two gradient all-reduces [ms]", ylabel='difference of two "measured" steps [ms]')
    ax.legend(loc="upper left")
    worst_ns = 1e6 * (pairs["given_ms"] - pairs["table_ms"]).abs().max()
    ax.set_title(f"{len(pairs)} pairs agree to {worst_ns:.1f} ns: this is no measurement")
    return done(ax, pairs)


def plot_measured(table: pd.DataFrame, published: float, ax: Axes | None = None) -> Axes:
    """Ours against measured steps, both logarithmic, a colour and mark per model; published: vTrain's own mean error.

    table: model, measured_s, predicted_s.
    """
    ax = ax or new_axes(height=4.4, width=5.2)
    colors = [COLORS["compute"], COLORS["comm"], "#529d3f", "#8d6bb8"]
    models = sorted(table["model"].unique(), key=lambda name: float(name.split()[1][:-1]))
    for name, color, mark in zip(models, colors, "os^D", strict=False):
        part = table[table["model"] == name]
        error = (part["predicted_s"] / part["measured_s"] - 1).abs().mean()
        ax.plot(part["measured_s"], part["predicted_s"], mark, ms=4, mfc="none", mec=color,
                label=f"{name}: {error:.1%} off, {len(part)} runs")  # fmt: skip
    ends = np.array([table["measured_s"].min() / 1.2, table["measured_s"].max() * 1.2])
    ax.plot(ends, ends, color=_DARK, lw=0.8)
    ax.fill_between(ends, ends * (1 - published), ends * (1 + published), color="#e8e8e8", zorder=0,
                    label=f"vTrain's mean error, {published:.1%}")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured [s per step]")
    ax.set_ylabel("simulated, its model not seen by the fit [s per step]")
    ax.legend(loc="upper left")
    _ticks(ax, (5, 10, 20, 50))
    error = (table["predicted_s"] / table["measured_s"] - 1).abs().mean()
    ax.set_title(f"Our simulator misses measured steps by {error:.1%}, vTrain by {published:.1%}")
    return done(ax, table[["model", "measured_s", "predicted_s"]])


def plot_space(space: pd.DataFrame, quoted: float, ax: Axes | None = None) -> Axes:
    """Utilisation over the number of GPUs, a colour and mark per tp, larger marks for more stages.

    space: of `vtrain.studies.design_space`. quoted: the published utilisation of (16, 16, 105).
    """
    ax = ax or new_axes(height=3.8)
    for tp, part in space.groupby("tp"):
        ax.scatter(part["gpus"], 100 * part["utilisation"], s=4 + 0.6 * part["pp"], facecolors="none",
                   marker=_TP_MARKS[tp], edgecolors=_TP_COLORS[tp], linewidths=0.8, label=f"tp {tp}")  # fmt: skip
    for plan, dx, dy in (((8, 8, 35), -130, -70), ((8, 12, 21), 12, 26), ((16, 16, 105), -80, -16)):
        row = _row(space, plan)
        ax.plot(row["gpus"], 100 * row["utilisation"], "o", ms=4, color=PAPER)
        note(ax, row["gpus"], 100 * row["utilisation"], str(plan), dx=dx, dy=dy,
             arrowprops={"arrowstyle": "-", "lw": 0.6, "color": PAPER})  # fmt: skip
    row = _row(space, (16, 16, 105))
    paper_marks(ax, row["gpus"], 100 * quoted, label="published, (16, 16, 105)")
    ax.set(xscale="log", xlabel="GPUs (A100)", ylabel="model FLOPs over peak [%]", ylim=(0, None))
    ax.legend(loc="upper right", ncols=2)
    ax.set_title("MT-NLG: more GPUs cost utilisation (larger marks: more stages)")
    return done(ax, space[["tp", "dp", "pp", "gpus", "step_s", "utilisation"]])


def plot_costs(space: pd.DataFrame, plans: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Cost over days of the training by plans that fit in 80 GB, two of them beside what was published.

    space: of `vtrain.studies.design_space`. plans: of `vtrain.studies.plan_table`.
    """
    ax = ax or new_axes(height=3.8)
    near = space[space["days"].between(30, 60) & (space["memory_bytes"] < 80e9)]
    for tp, part in near.groupby("tp"):
        style = {"mfc": "none", "mec": _TP_COLORS[tp], "label": f"tp {tp}"}
        ax.plot(part["days"], part["cost_usd"] / 1e6, _TP_MARKS[tp], ms=4, **style)
    told = plans.set_index("key")
    for name, plan in (("given", (8, 8, 35)), ("found", (8, 12, 21))):
        days, cost = (told.loc[f"plan_{name}_{what}", ["ours", "theirs"]] for what in ("days", "cost"))
        ax.plot(days["ours"], cost["ours"] / 1e6, "o", ms=4, color=PAPER)
        ax.plot(days, cost / 1e6, color=PAPER, lw=0.7, ls=":")
        note(ax, days["ours"], cost["ours"] / 1e6, f"{name} {plan}", dx=7, dy=4)
        paper_marks(ax, days["theirs"], cost["theirs"] / 1e6, label="published" if name == "given" else None)
    ax.set(xlabel="days for 270 B tokens", ylabel="cost [M USD]")
    ax.legend(loc="upper left", ncols=4)
    ax.margins(y=0.12)
    change = -told.loc["plan_cost_change", ["ours", "theirs"]].astype(float)
    ax.set_title(f"MT-NLG: the plan found saves {change['ours']:.1%} (published {change['theirs']:.1%})")
    return done(ax, near[["tp", "dp", "pp", "gpus", "days", "cost_usd"]])


def _ticks(ax: Axes, x: Sequence[float], y: Sequence[float] = ()) -> None:
    """Ticks at these values of logarithmic axes, on both at those of x if y is empty."""
    for axis, values in ((ax.xaxis, x), (ax.yaxis, y or x)):
        axis.set_ticks(values, [f"{value:g}" for value in values])
        axis.set_minor_formatter(NullFormatter())


def _row(space: pd.DataFrame, plan: tuple[int, int, int]) -> pd.Series:
    return space[(space[["tp", "dp", "pp"]] == plan).all(axis=1)].iloc[0]


def plot_compute_optimal(table: pd.DataFrame, quoted: pd.DataFrame, budget_days: float, ax: Axes | None = None) -> Axes:
    """Days that compute-optimal models take, over their size; those within the budget are filled.

    table: of `vtrain.studies.compute_optimal`. quoted: parameters, days of published models.
    """
    ax = ax or new_axes(height=3.6)
    sizes, days = table["parameters"] / 1e9, table["days"]
    ax.plot(sizes, days, color=COLORS["compute"], lw=0.8)
    ok = table["feasible"]
    ax.plot(sizes[ok], days[ok], "o", ms=5, color=COLORS["compute"], label=f"within {budget_days:g} days")
    ax.plot(sizes[~ok], days[~ok], "o", ms=5, mfc="white", mec=COLORS["compute"], label="too long")
    ax.axhline(budget_days, color=_DARK, lw=0.8, ls=":")
    paper_marks(ax, quoted["parameters"] / 1e9, quoted["days"], label="published (at most, for the smaller one)")
    largest, naive = table[ok].iloc[-1], table[table["naive"]].iloc[-1]
    for row, text in ((largest, "largest within the budget"), (naive, "at full utilisation")):
        note(ax, row["parameters"] / 1e9, row["days"], f"{row['parameters'] / 1e9:.2f} B, {text}", dx=10, dy=-8)
    ax.set(xlabel="parameters [B], 20 tokens for each", ylabel="days on 3,360 A100", xscale="log", yscale="log")
    _ticks(ax, (20, 50, 100, 200), (2, 5, 10, 30, 100, 200))
    ax.legend(loc="upper left")
    share = largest["parameters"] / naive["parameters"]
    ax.set_title(f"In {budget_days:g} days one trains {share:.0%} of the size that peak FLOP/s promise")
    return done(ax, table)


def plot_layouts(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Step time over depth for each layout (tp, dp, pp), seed 000's quoted times beside.

    table: of `vtrain.studies.layouts`.
    """
    ax = ax or new_axes(height=4.0)
    colors = [*_TP_COLORS.values(), "#c44e52", "#937860", "#7f7f7f"]
    ends = table.sort_values("layers").groupby("layout", sort=False).tail(1).sort_values("step_s")
    places, gap = [], ends["step_s"].max() / 24
    for end_s in ends["step_s"]:  # labels keep their distance
        places.append(max(end_s, places[-1] + gap) if places else end_s)
    for place, layout, color in zip(places, ends["layout"], colors, strict=True):
        part = table[table["layout"] == layout].sort_values("layers")
        ax.plot(part["layers"], part["step_s"], "o-", ms=3, lw=1, color=color, label=layout)
        quoted = part.dropna(subset="published_s")
        ax.plot(quoted["layers"], quoted["published_s"], "D", mfc="none", mec=color, ms=7, mew=1.3)
        note(ax, part["layers"].iloc[-1], place, layout, dx=8, color=color)
    ax.plot([], [], "D", mfc="none", mec=PAPER, label="seed 000")
    ax.legend(handles=ax.get_legend_handles_labels()[0][-1:], loc="upper left")
    ax.set(
        xlabel="layers; labels are (tp, dp, pp)",
        ylabel="simulated step [s]",
        xticks=sorted(table["layers"].unique()),
        xlim=(10, 150),
        ylim=(0, None),
    )
    ax.set_title("Hidden 8,192 on 2,048 A100: seed 000's (4, 128, 4) is faster than the devices can be")
    return done(ax, table)


def plot_rules(effects: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """What correcting each deviation of the release does to a step; effects: of `vtrain.studies.rule_effects`."""
    shown = effects.iloc[1:]
    ax = ax or new_axes(height=0.9 + 0.35 * len(shown))
    bars(ax, range(len(shown)), 100 * shown["change"], color=COLORS["compute"])
    for place, change in enumerate(shown["change"]):
        note(ax, 100 * change, place, f"{change:+.1%}")
    ax.set_yticks(range(len(shown)), shown["what"])
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="longer step than as released [%]")
    ax.margins(x=0.12)
    ax.set_title(f"As released a step of MT-NLG takes {effects['step_s'].iloc[0]:.1f} s, "
                 f"corrected {effects['step_s'].iloc[-1]:.1f} s")  # fmt: skip
    return done(ax, effects)


def plot_seed(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Our step on formulas over seed 000's prediction, a colour and mark per tp; table: theirs_s, ours_s, tp."""
    ax = ax or new_axes(height=4.2, width=5.2)
    for tp, part in table.groupby("tp"):
        ax.plot(part["theirs_s"], part["ours_s"], _TP_MARKS[tp], ms=4, mfc="none", mec=_TP_COLORS[tp], label=f"tp {tp}")
    ends = np.array([table["theirs_s"].min() / 1.3, table["theirs_s"].max() * 1.3])
    ax.plot(ends, ends, color=_DARK, lw=0.8)
    ax.set(xscale="log", yscale="log", xlim=ends, xlabel="seed 000's prediction [s]", ylabel="ours on formulas [s]")
    _ticks(ax, (0.5, 1, 2, 5, 10, 20))
    ax.set(xlim=ends, ylim=ends)
    ax.legend(loc="upper left")
    rest = table[table["tp"] != 4]
    error = (rest["ours_s"] / rest["theirs_s"] - 1).abs().mean()
    ax.set_title(f"Without tp 4 our formulas are {error:.0%} from seed 000's profiles")
    return done(ax, table)


def plot_scheduling(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Best over heuristic plans on generated jobs: each trace a point, means as bars, the paper hollow.

    table: trace, what, change (relative), published (relative, NaN if there is none).
    """
    groups = list(dict.fromkeys(table["what"]))
    ax = ax or new_axes(height=0.9 + 0.45 * len(groups))
    for place, what in enumerate(groups):
        part = table[table["what"] == what]
        bars(ax, place, 100 * part["change"].mean(), color=COLORS["compute"])
        ax.plot(100 * part["change"], np.full(len(part), place), "o", ms=3, color=PAPER, zorder=3)
        paper_marks(ax, 100 * part["published"].iloc[0], place)
    ax.axvline(0, color=_DARK, lw=0.8)
    ax.set_yticks(range(len(groups)), groups)
    ax.set(ylim=(len(groups) - 0.4, -0.6), xlabel="best plans over heuristic plans [%]; points are traces")
    ax.legend(handles=ours_and_paper("published, other jobs"), loc="lower right")
    ax.set_title("Best plans serve more jobs in time (our jobs, trend only)")
    return done(ax, table)
