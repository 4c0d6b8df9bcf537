"""What has a search found? The front of time and memory, the best plans side by side, the worth of each resource."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.view.drawing import COLORS, fill_of, keep_data, new_axes

__all__ = ["plot_front", "plot_parallel", "plot_shortlist", "plot_value"]

_AXES = ("tp", "pp", "dp", "cp", "zero", "micro_batch", "interleave")
_RECOMPUTE = {"none": (COLORS["compute"], "-"), "selective": (COLORS["memcpy"], "--"), "full": (COLORS["comm"], ":")}
_NAMES = {"compute": "FLOP/s", "memory_bandwidth": "memory bandwidth", "memory": "memory size",
          "intra": "bandwidth in node", "inter": "bandwidth across nodes"}  # fmt: skip


def plot_front(pareto: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """The plans that no other one beats in time and memory. room_bytes: memory of a device."""
    ax = ax or new_axes(height=4.0)
    step_s, memory = pareto["step_s"].to_numpy(float), pareto["memory_bytes"].to_numpy(float) / 1e9
    ax.step(memory, step_s, where="post", color=COLORS["compute"], lw=0.8)
    ax.plot(memory, step_s, "o", ms=4, mfc="white", mec=COLORS["compute"])
    ax.axvline(room_bytes / 1e9, color="#4a4a4a", lw=0.8, ls="--")
    ax.annotate("memory of a device", (room_bytes / 1e9, ax.get_ylim()[1]), (-3, -3), textcoords="offset points",
                ha="right", va="top", rotation=90, fontsize=7)  # fmt: skip
    for place in sorted({0, len(pareto) // 2, len(pareto) - 1}) if len(pareto) else ():
        right = memory[place] > 0.6 * room_bytes / 1e9
        ax.annotate(pareto["plan"].iloc[place], (memory[place], step_s[place]), (0, -14) if right else (6, 5),
                    textcoords="offset points", fontsize=7, ha="right" if right else "left")  # fmt: skip
    ax.set(xlabel="memory of the fullest device [GB]", ylabel="simulated step [s]", xlim=(0, room_bytes / 1e9 * 1.05))
    if len(pareto):
        ax.set_ylim(0.85 * step_s.min(), 1.08 * step_s.max())
        ax.set_title(f"{memory.max() - memory.min():.0f} GB of memory buy {step_s.max() / step_s.min():.1f}x the speed")
    return keep_data(ax, pareto[["plan", "step_s", "memory_bytes"]].reset_index(drop=True), pareto)


def plot_parallel(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The choices of the best plans as lines from axis to axis, the best thick; colour and dashes: recompute."""
    ax = ax or new_axes(height=4.0, width=8.0)
    shown = table[[*_AXES, "recompute", "step_s"]].reset_index(drop=True)
    scales = {name: sorted(shown[name].unique()) for name in _AXES}
    for place, row in list(shown.iterrows())[::-1]:
        at = [scales[name].index(row[name]) / max(len(scales[name]) - 1, 1) for name in _AXES]
        shift = 0.03 * (place / max(len(shown) - 1, 1) - 0.5)
        color, dashes = _RECOMPUTE[row["recompute"]]
        ax.plot(range(len(_AXES)), np.array(at) + shift, color=color, ls=dashes, lw=3 if place == 0 else 0.9,
                alpha=1 if place == 0 else 0.6)  # fmt: skip
    for i, name in enumerate(_AXES):
        for k, value in enumerate(scales[name]):
            y = k / max(len(scales[name]) - 1, 1)
            ax.annotate(str(value), (i, y), (5, 0), textcoords="offset points", va="center", fontsize=8,
                        bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8})  # fmt: skip
    ax.set_xticks(range(len(_AXES)), [name.replace("_", "-") for name in _AXES])
    ax.set(yticks=[], xlim=(-0.2, len(_AXES) - 0.5), ylim=(-0.15, 1.15))
    for kind, (color, dashes) in _RECOMPUTE.items():
        if kind in set(shown["recompute"]):
            ax.plot([], [], color=color, ls=dashes, label=f"recompute {kind}")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    within = shown["step_s"].max() / shown["step_s"].min() - 1
    ax.set_title(f"The best {len(shown)} plans are within {within:.1%} of each other", loc="left")
    return keep_data(ax, shown, table)


def plot_shortlist(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How each way to split the model compares with the best; bars are the spread of published runs of one model.

    table: the output of `shortlist.shortlist`.
    """
    ax = ax or new_axes(height=1.2 + 0.28 * len(table))
    for place, row in enumerate(table.itertuples()):
        color = COLORS["compute"] if row.worth_measuring else COLORS["idle"]
        ax.hlines(place, row.ratio_low, row.ratio_high, color=color, lw=2)
        ax.plot(row.ratio, place, "o", ms=4, mfc="white", mec=color)
    ax.axvline(1.0, color="#4a4a4a", lw=0.8)
    ax.set_yticks(range(len(table)), list(table["plan"]), fontsize=7)
    ax.set(ylim=(len(table) - 0.4, -0.6), xlabel="step over that of the first plan, 90 % interval")
    ax.set_title(f"{int(table['worth_measuring'].sum())} of {len(table)} layouts cannot be told from the best")
    return keep_data(ax, table.reset_index(drop=True), table)


def plot_value(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """How much faster a step is with twice of each resource. table: the output of `codesign`."""
    shown = table[table["factor"] == 2.0].sort_values("speedup", ascending=False).reset_index(drop=True)
    ax = ax or new_axes(height=1.0 + 0.4 * len(shown))
    for place, row in shown.iterrows():
        ax.barh(place, 100 * (row["speedup"] - 1), height=0.6, **fill_of("compute", "simulated"))
        ax.annotate(row["plan"], (100 * (row["speedup"] - 1), place), (4, 0), textcoords="offset points", va="center",
                    fontsize=7)  # fmt: skip
    ax.set_yticks(range(len(shown)), [f"2x {_NAMES[name]}" for name in shown["resource"]])
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="faster step, with the plan that is then best [%]")
    ax.set_xlim(0, 180 * max(shown["speedup"].max() - 1, 0.01))
    if len(shown):
        ax.set_title(f"Worth most: {_NAMES[shown['resource'].iloc[0]]}")
    return keep_data(ax, shown, table)
