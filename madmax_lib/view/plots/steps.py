"""What does a predicted step consist of? Its seconds by cause, plans side by side, and memory by component."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.simulator.memory.memory import PHASES
from madmax_lib.view import drawing as draw

__all__ = ["plot_components", "plot_parts", "plot_predicted_steps"]

_PARTS = {  # name: columns of `estimate`, kind
    "matrix products": (["gemm_s", "head_s"], "compute"),
    "attention": (["attention_s"], "compute"),
    "norms and activations": (["pointwise_s"], "compute"),
    "optimizer": (["optimizer_s"], "compute"),
    "tensor parallelism": (["tp_s"], "comm"),
    "context parallelism": (["cp_s"], "comm"),
    "experts' all-to-all": (["ep_s"], "comm"),
    "sharded weights": (["fsdp_s"], "comm"),
    "gradients": (["dp_s"], "comm"),
    "messages of the pipeline": (["pp_s"], "comm"),
    "pipeline bubble": (["bubble_s"], "idle"),
    "launches and host": (["launch_s", "overhead_s"], "idle"),
}
_MOST_STAGES = 12


def plot_parts(row: pd.Series, ax: Axes | None = None) -> Axes:
    """Seconds of a step by cause; communication counts where nothing hides it. row: of `estimate`."""
    parts = [(part, kind, row[columns].sum()) for part, (columns, kind) in _PARTS.items()]
    table = pd.DataFrame(parts, columns=["part", "kind", "seconds"])
    share = table["seconds"] / row["step_s"]
    shown = table[share > 5e-4]
    of_kind = share.groupby(table["kind"]).sum()
    computes = 1 - of_kind["comm"] - of_kind["idle"]
    title = f"{computes:.0%} of the step computes, {of_kind['comm']:.0%} is communication, {of_kind['idle']:.0%} waits"
    ending = {"x": "simulated time that nothing hides [s]; beside it the share of the step", "rows": shown["part"]}
    ending |= {"notes": share[shown.index].map("{:.1%}".format), "source": "simulated"}
    return draw.bar_chart(ax, table, shown["seconds"], title, shown["kind"], **ending)


def plot_predicted_steps(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Plans side by side, the first as reference, with 90 % intervals; what does not fit is grey. table: `variants`."""
    kinds = table["fits"].map({True: "compute", False: "idle"})
    notes = table["step_s"].map("{:.2f} s, ".format) + table["mfu"].map("MFU {:.0%}".format)
    notes += table["memory_gb"].map(", needs {:.0f} GB".format).where(~table["fits"], "")
    title, fitting_s = "No plan fits", table.loc[table["fits"], "step_s"]
    if len(fitting_s):
        gain = table["step_s"].iloc[0] / fitting_s.min() - 1
        title = f"Fastest that fits: {fitting_s.idxmin()}, {gain:.0%} faster than the first"
    ending = {"x": "simulated step, 90 % interval [s]", "rows": table.index, "origin": table, "source": "simulated"}
    ending |= {"notes": notes, "error": (table["low_s"], table["high_s"])}
    return draw.bar_chart(ax, table.rename_axis("plan").reset_index(), table["step_s"], title, kinds, **ending)


def plot_components(table: pd.DataFrame, room_bytes: float, ax: Axes | None = None) -> Axes:
    """Bytes of each pipeline stage by component, and the memory of a device. table: of `mm.memory`."""
    stages = table["stage"].unique()
    shown = stages[:: -(-len(stages) // _MOST_STAGES)]
    size_gb = table.pivot_table(index="stage", columns="component", values="size_bytes", sort=False) / 1e9
    fills = draw.components_key(name for name in PHASES if name in size_gb and size_gb[name].max() > 0)
    largest = size_gb[list(fills)].max()
    title = f"Largest component: {largest.idxmax()}, {largest.max():.1f} GB on a device"
    key = [draw.patch_key(name, color) for name, color in fills.items()]
    key.append(draw.line_key(f"room: {room_bytes / 1e9:.0f} GB", **draw.DASHED))
    ending = {"x": "simulated memory [GB], all moments of a step", "key": key, "where": "beside"}
    ending |= {"rows": [f"stage {stage}" for stage in shown], "source": "simulated"}
    ax = ax or draw.new_axes(height=max(1.6 + 0.3 * len(shown), 2.4))  # the legend needs some room
    ax = draw.bar_chart(ax, table, size_gb.loc[shown], title, fills, **ending)
    ax.axvline(room_bytes / 1e9, **draw.DASHED)
    return ax
