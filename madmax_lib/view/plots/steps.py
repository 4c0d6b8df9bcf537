"""What does a predicted step consist of? Its seconds by cause, plans side by side, and memory by component."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from madmax_lib.simulator.memory.memory import PHASES
from madmax_lib.view.drawing import fill_of, keep_data, new_axes

__all__ = ["COMPONENTS", "OTHER", "plot_components", "plot_parts", "plot_predicted_steps"]

_PARTS = {
    "matrix products": (["gemm_s", "head_s"], "compute"), "attention": (["attention_s"], "compute"),
    "norms and activations": (["pointwise_s"], "compute"), "optimizer": (["optimizer_s"], "compute"),
    "tensor parallelism": (["tp_s"], "comm"), "context parallelism": (["cp_s"], "comm"),
    "experts' all-to-all": (["ep_s"], "comm"), "sharded weights": (["fsdp_s"], "comm"), "gradients": (["dp_s"], "comm"),
    "messages of the pipeline": (["pp_s"], "comm"), "pipeline bubble": (["bubble_s"], "idle"),
    "launches and host": (["launch_s", "overhead_s"], "idle"),
}  # fmt: skip
COMPONENTS = {  # of memory, the same colour everywhere; neighbours differ in lightness
    "weights": "#3b75af", "gathered weights": "#7ba3cf", "gradients": "#b9cfe6", "gradients on their way": "#9fc0c8",
    "optimizer": "#17615c", "optimizer temporaries": "#4fa8a1", "buckets": "#c7b3e0", "activations": "#e1812c",
    "checkpoints on their way": "#f0b27a", "logits": "#f8d9bd", "block at work": "#b5433f", "context": "#d9d9d9",
    "fragmentation": "#a6a6a6", "chunk tails": "#dcc27a", "staging": "#9a7d1f",
}  # fmt: skip
OTHER = "#6b6b6b"


def plot_parts(row: pd.Series, ax: Axes | None = None) -> Axes:
    """Seconds of a step by cause; communication counts where nothing hides it. row: of `estimate`."""
    ax = ax or new_axes(height=3.6)
    parts = {name: (sum(row[c] for c in columns), kind) for name, (columns, kind) in _PARTS.items()}
    shown = {name: part for name, part in parts.items() if part[0] > 5e-4 * row["step_s"]}
    for place, (seconds, kind) in enumerate(shown.values()):
        ax.barh(place, seconds, height=0.7, **fill_of(kind, "simulated"))
        ax.annotate(f"{seconds / row['step_s']:.1%}", (seconds, place), (3, 0), textcoords="offset points", va="center",
                    fontsize=7)  # fmt: skip
    ax.set_yticks(range(len(shown)), list(shown))
    ax.set(
        ylim=(len(shown) - 0.4, -0.6), xlabel="simulated time that nothing hides [s]; beside it the share of the step"
    )
    comm = sum(seconds for seconds, kind in parts.values() if kind == "comm") / row["step_s"]
    wait = sum(seconds for seconds, kind in parts.values() if kind == "idle") / row["step_s"]
    ax.set_title(f"{1 - comm - wait:.0%} of the step computes, {comm:.0%} is communication, {wait:.0%} waits")
    data = pd.DataFrame([(name, kind, seconds) for name, (seconds, kind) in parts.items()],
                        columns=["part", "kind", "seconds"])  # fmt: skip
    return keep_data(ax, data)


def plot_predicted_steps(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plans side by side, the first as reference, with 90 % intervals; what does not fit is grey. table: `variants`."""
    ax = ax or new_axes(height=1.3 + 0.36 * len(table))
    for place, row in enumerate(table.itertuples()):
        fill = fill_of("compute" if row.fits else "idle", "simulated")
        ax.barh(place, row.step_s, height=0.6, xerr=[[row.step_s - row.low_s], [row.high_s - row.step_s]],
                error_kw={"lw": 0.8, "capsize": 2}, **fill)  # fmt: skip
        text = f"{row.step_s:.2f} s, MFU {row.mfu:.0%}" + ("" if row.fits else f", needs {row.memory_gb:.0f} GB")
        ax.annotate(text, (max(row.high_s, row.step_s), place), (4, 0), textcoords="offset points", va="center",
                    fontsize=7)  # fmt: skip
    ax.set_yticks(range(len(table)), list(table.index), fontsize=7)
    ax.set(ylim=(len(table) - 0.4, -0.6), xlabel="simulated step, 90 % interval [s]")
    ax.set_xlim(0, 1.45 * table["high_s"].max())
    fitting = table[table["fits"]]
    if len(fitting):
        gain = table["step_s"].iloc[0] / fitting["step_s"].min() - 1
        best = fitting["step_s"].idxmin()
        ax.set_title(f"{best} is {gain:.0%} faster than the first" if gain > 0.005 else "No plan that fits is faster")
    return keep_data(ax, table.rename_axis("plan").reset_index(), table)


def plot_components(table: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """Bytes of each pipeline stage by component, and the memory of a device. table: of `mm.memory`."""
    stages = table["stage"].unique()
    ax = ax or new_axes(height=max(1.6 + 0.3 * min(len(stages), 12), 2.4))  # the legend needs some room
    shown = stages if len(stages) <= 12 else stages[:: -(-len(stages) // 12)]
    sizes = table.pivot_table(index="stage", columns="component", values="size_bytes", sort=False)
    sizes = sizes[[name for name in PHASES if name in sizes and sizes[name].max() > 0]] / 1e9
    left = pd.Series(0.0, index=shown)
    colors = [COMPONENTS.get(name, OTHER) for name in sizes.columns]
    for name, color in zip(sizes.columns, colors, strict=True):
        ax.barh(range(len(shown)), sizes.loc[shown, name], left=left, height=0.7, color=color, hatch="////",
                edgecolor="white", linewidth=0)  # fmt: skip
        left += sizes.loc[shown, name]
    ax.axvline(room_bytes / 1e9, color="#4a4a4a", lw=0.9, ls="--")
    ax.set_yticks(range(len(shown)), [f"stage {stage}" for stage in shown])
    ax.set(ylim=(len(shown) - 0.4, -0.6), xlabel="simulated memory [GB], all moments of a step")
    handles = [Patch(color=color, label=name) for name, color in zip(sizes.columns, colors, strict=True)]
    handles.append(Line2D([], [], color="#4a4a4a", lw=0.9, ls="--", label=f"room: {room_bytes / 1e9:.0f} GB"))
    ax.legend(handles=handles, ncols=1, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7, frameon=False)
    largest = sizes.max().idxmax()
    ax.set_title(f"Largest component: {largest}, {sizes[largest].max():.1f} GB on a device")
    return keep_data(ax, table)
