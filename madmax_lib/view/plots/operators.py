"""How do kernels, operators and modules look, and how far are they from their roofs? Pictures of `traces.operators`."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from madmax_lib.traces.diff import op_names
from madmax_lib.traces.operators.ops import OUTSIDE
from madmax_lib.view.drawing import COLORS, LABELS, fill_of, keep_data, kind_legend, new_axes, rank_axis

__all__ = ["plot_kernel_types", "plot_kernels", "plot_mfu", "plot_modules", "plot_operators", "plot_roofline"]

_DTYPE_COLORS = {"fp64": "#8c564b", "fp32": "#529d3f", "tf32": "#8d6bb8", "fp16": "#e1812c", "bf16": "#3b75af",
                 "fp8": "#c44e52", "int8": "#7f7f7f"}  # fmt: skip
_TALKS = re.compile(r"^(c10d|nccl|gloo|hccl):|^record_param_comms|^(all_|reduce_scatter|broadcast|send_recv)")
_LONGEST = 38  # characters of a label


def plot_kernels(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The kernels that take most device time over all ranks, coloured by kind, of `kernels` or `top_kernels`."""
    names = pd.Series(op_names(table["name"].astype(str)), index=table.index, dtype=object)
    rows = table.assign(name=names.replace("generic", "collective"), kind=table["kind"].astype(str))
    rows = rows.groupby(["name", "kind"])[["total_s", "count"]].sum().reset_index()
    return _bars(rows, "total_s", ax, count, table, "time, all ranks [ms]", "the work")


def plot_operators(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The operators that take most device time of their own (without operators inside), of `operators`."""
    names = table["name"].astype(object)
    if table.attrs.get("source") == "simulated":
        names = pd.Series(op_names(names), index=table.index, dtype=object)
    rows = table.assign(name=names).groupby("name")[["self_device_s", "count"]].sum().reset_index()
    talks = rows["name"].map(lambda name: bool(_TALKS.search(name))).to_numpy(dtype=bool)
    rows["kind"] = np.where(rows["name"] == OUTSIDE, "other", np.where(talks, "comm", "compute"))
    return _bars(rows, "self_device_s", ax, count, table, "time without operators inside, all ranks [ms]",
                 "the time")  # fmt: skip


def plot_modules(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The types of modules that take most device time of their own (without modules inside), of `modules`."""
    rows = table.assign(modules=1).groupby("type")[["self_device_s", "count", "modules"]].sum().reset_index()
    rows = rows.rename(columns={"type": "name"}).assign(kind="compute")
    return _bars(rows, "self_device_s", ax, count, table, "device time without modules inside, with backward [ms]",
                 "the modules' time")  # fmt: skip


def plot_roofline(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 8) -> Axes:
    """Achieved FLOP/s over FLOPs per byte of each operator and shape of `roofline`, under the roofs of its device.

    Ranks together. Area: device time; colour: dtype; the `count` longest are numbered. Only operators with FLOPs.
    """
    ax = ax or new_axes(height=3.6, width=7.4)
    rows = _products(table)
    if not len(rows):
        ax.set(title="No operator has FLOPs: shapes were not recorded", xticks=[], yticks=[])
        return keep_data(ax, rows, table)
    peaks = rows.dropna(subset="peak_flops").drop_duplicates("dtype").set_index("dtype")["peak_flops"]
    bandwidth = rows["peak_bytes_per_s"].iloc[0]
    low, high = rows["flops_per_byte"].min() / 2, max([rows["flops_per_byte"].max() * 2, *(peaks / bandwidth * 4)])
    for dtype, peak in peaks.items():
        ridge, color = max(peak / bandwidth, low), _DTYPE_COLORS.get(dtype, "black")
        x = np.array([low, ridge, high])
        ax.plot(x, np.minimum(x * bandwidth, peak) / 1e12, color=color, linewidth=1, zorder=1)
        ax.annotate(f"{dtype}: {peak / 1e12:,.4g} TFLOP/s", (ridge, peak / 1e12), (0, 3), textcoords="offset points",
                    ha="right" if ridge > 3 * low else "left", fontsize=7, color=color)  # fmt: skip
    area = 12 + 400 * rows["device_s"] / rows["device_s"].sum()
    colors, y = rows["dtype"].map(_DTYPE_COLORS).fillna("black"), rows["flops_per_s"] / 1e12
    ax.scatter(rows["flops_per_byte"], y, s=area, c=colors, alpha=0.6, edgecolor="white", linewidth=0.4, zorder=2)
    ax.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOPs per byte", ylabel="TFLOP/s")
    ax.set_ylim(y.min() / 2, max([y.max(), *(peaks / 1e12)]) * 2.5)
    ax.grid(True, axis="both")
    _number(ax, rows["flops_per_byte"].head(count), y)
    key = [f"{number}  {_short(row.name)}  {_percent(row.roof)} of its roof\n    {_shapes(row.shapes)}"
           for number, row in enumerate(rows.head(count).itertuples(), start=1)]  # fmt: skip
    ax.annotate("\n".join(key), (1.02, 1.0), xycoords="axes fraction", va="top", fontsize=6.5, linespacing=1.25)
    top = rows.iloc[0]
    ax.set_title(f"{_short(top['name'])} runs at {_percent(top['roof'])} of its {top['bound']} roof "
                 f"on {table.attrs.get('device') or 'its device'}")  # fmt: skip
    return keep_data(ax, rows, table)


def plot_kernel_types(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Busy time of each rank by the kinds that run side by side, of `kernel_types`."""
    grid = table.pivot_table(index="rank", columns="kinds", values="total_s", aggfunc="sum", observed=False)
    ax = ax or new_axes(height=1.2 + 0.28 * len(grid))
    if not len(grid):
        ax.set(title="Nothing ran", xticks=[], yticks=[])
        return keep_data(ax, table)
    grid = grid[grid.sum().sort_values(ascending=False).index].fillna(0.0) * 1e3
    left = np.zeros(len(grid))
    labels = {kinds: " + ".join(LABELS[kind] for kind in kinds.split(" + ")) for kinds in grid}
    for kinds, name in labels.items():
        fill = fill_of(kinds.split(" + ")[0], table.attrs.get("source"))
        if "+" in kinds:  # side by side: hidden communication as elsewhere, else between the colours of both
            mixed = np.mean([to_rgb(COLORS[kind]) for kind in kinds.split(" + ")], axis=0)
            fill["facecolor"] = COLORS["hidden"] if kinds == "compute + comm" else tuple(mixed)
        ax.barh(range(len(grid)), grid[kinds], left=left, height=0.75, label=name, **fill)
        left = left + grid[kinds].to_numpy()
    rank_axis(ax, grid.index.to_series())
    ax.set_xlabel("busy time [ms]")
    ax.legend(ncols=3, loc="upper right", bbox_to_anchor=(1.0, -0.75 / ax.figure.get_figheight()))
    first = grid.sum().idxmax()
    how = "side by side" if "+" in first else "alone"
    ax.set_title(f"{grid[first].sum() / grid.to_numpy().sum():.0%} of the busy time is {labels[first]} {how}")
    return keep_data(ax, table)


def plot_mfu(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Model FLOPs utilisation of each rank, of `mfu`: the median of its steps as a bar, each step as a point."""
    known = table.dropna(subset="mfu")
    ranks = sorted(known["rank"].unique())
    ax = ax or new_axes(height=1.1 + 0.28 * max(len(ranks), 1))
    if not len(known):
        ax.set(title="No utilisation: no FLOPs are known", xticks=[], yticks=[])
        return keep_data(ax, table)
    median = known.groupby("rank")["mfu"].median()
    ax.barh(range(len(ranks)), median * 100, height=0.75, **fill_of("compute", table.attrs.get("source")))
    ax.plot(known["mfu"] * 100, known["rank"].map(ranks.index), "o", color="black", markersize=2.5)
    for place, value in enumerate(median):
        right = known.loc[known["rank"] == ranks[place], "mfu"].max() * 100
        ax.annotate(_percent(value), (right, place), (5, 0), textcoords="offset points", va="center", fontsize=7)
    rank_axis(ax, pd.Series(ranks))
    ax.set(xlabel="model FLOPs utilisation [%]", xlim=(0, known["mfu"].max() * 112))
    ax.set_title(f"{_percent(known['mfu'].median())} of the peak in the median step")
    return keep_data(ax, table)


def _bars(rows: pd.DataFrame, column: str, ax: Axes | None, count: int, table: pd.DataFrame, label: str,
          whole: str) -> Axes:  # fmt: skip
    """Bars of the largest values in ms, coloured by kind, each with its share of all and its number of calls."""
    rows = rows.assign(share=rows[column] / max(rows[column].sum(), 1e-12))
    most = rows.sort_values([column, "name"], ascending=[False, True]).head(count)
    most = most[most["share"] >= 0.0005].reset_index(drop=True)
    ax = ax or new_axes(height=1.1 + 0.25 * max(len(most), 1))
    if not len(most):
        ax.set(title=f"Nothing is recorded of {whole}", xticks=[], yticks=[])
        return keep_data(ax, most, table)
    for place, row in most.iterrows():
        ax.barh(place, row[column] * 1e3, height=0.75, **fill_of(row["kind"], table.attrs.get("source")))
        number, what = (row["modules"], "module") if "modules" in row else (row["count"], "call")
        text = f"{row['share']:.1%}, {number:,} {what}{'s' if number != 1 else ''}"
        ax.annotate(text, (row[column] * 1e3, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_yticks(range(len(most)), [_short(name) for name in most["name"]])
    ax.set(ylim=(len(most) - 0.4, -0.6), xlim=(0, most[column].max() * 1e3 * 1.25), xlabel=label)
    if most["kind"].nunique() > 1:
        kind_legend(ax, [kind for kind in LABELS if kind in set(most["kind"])])
    ax.set_title(f"{_short(most['name'][0])} takes {_percent(most['share'][0])} of {whole}")
    return keep_data(ax, most, table)


def _number(ax: Axes, x: pd.Series, y: pd.Series) -> None:
    """Numbers from 1 beside points, each at the nearest place that no number before it has."""
    taken: list[np.ndarray] = []
    turns = [(radius, angle) for radius in (9, 14, 19, 24) for angle in np.deg2rad(range(45, 405, 45))]
    for number, point in enumerate(zip(x, y, strict=False), start=1):
        center = ax.transData.transform(point) * 72 / ax.figure.dpi
        places = [radius * np.array([np.cos(angle), np.sin(angle)]) for radius, angle in turns]
        free = [place for place in places if all(np.abs(center + place - other).max() > 8 for other in taken)]
        taken.append(center + (free or places)[0])
        ax.annotate(str(number), point, (free or places)[0], textcoords="offset points", fontsize=7, weight="bold",
                    ha="center", va="center")  # fmt: skip


def _products(table: pd.DataFrame) -> pd.DataFrame:
    """Operators with FLOPs, ranks together, longest first."""
    rows = table[(table["flops_per_byte"] > 0) & (table["flops_per_s"] > 0)]
    rows = rows.assign(flops=rows["flops_per_s"] * rows["device_s"], roof=rows["roof"] * rows["device_s"])
    same = ["name", "shapes", "dtype", "flops_per_byte", "peak_flops", "peak_bytes_per_s", "bound"]
    rows = rows.groupby(same, dropna=False)[["count", "device_s", "flops", "roof"]].sum().reset_index()
    rows = rows.assign(flops_per_s=rows["flops"] / rows["device_s"], roof=rows["roof"] / rows["device_s"])
    return rows.sort_values(["device_s", "name", "shapes"], ascending=[False, True, True], ignore_index=True)


def _shapes(text: str) -> str:
    """Shapes of the tensors in short.

    >>> _shapes("[[16,5185,64],[16,64,5185],[]]")
    '16x5185x64, 16x64x5185'
    """
    short = ", ".join(part.replace(",", "x") for part in re.findall(r"\[(\d[\d,]*)\]", text))
    return short if len(short) <= _LONGEST else short[: _LONGEST - 1] + "…"


def _percent(share: float) -> str:
    """Share as text, with more digits where it is small.

    >>> _percent(0.46), _percent(0.027), _percent(0.00031)
    ('46%', '2.7%', '0.031%')
    """
    return f"{share:.0%}" if share >= 0.1 else f"{share * 100:.2g}%"


def _short(name: str) -> str:
    """A name that fits beside a bar.

    >>> _short("autograd::engine::evaluate_function: MmBackward0"), _short("aten::mm")
    ('MmBackward0', 'mm')
    """
    name = name.rpartition(": ")[2].removeprefix("torch::autograd::").removeprefix("aten::")
    name = name.replace("_scaled_dot_product_", "sdpa_")
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
