"""How do kernels, operators and modules look, and how far are they from their roofs? Pictures of `traces.operators`."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from madmax_lib.traces.diff import op_names
from madmax_lib.traces.operators.ops import OUTSIDE
from madmax_lib.view.drawing import (
    COLORS,
    LABELS,
    bars,
    empty,
    finish,
    kinds_key,
    new_axes,
    note,
    patch_key,
    percent,
    plural,
    rank_labels,
    shorten,
)

__all__ = ["plot_kernel_types", "plot_kernels", "plot_mfu", "plot_modules", "plot_operators", "plot_roofline"]

_DTYPE_COLORS = {
    "fp64": "#8c564b", "fp32": "#529d3f", "tf32": "#8d6bb8", "fp16": "#e1812c", "bf16": "#3b75af", "fp8": "#c44e52",
    "int8": "#7f7f7f",
}  # fmt: skip
_TALKS = re.compile(r"^(c10d|nccl|gloo|hccl):|^record_param_comms|^(all_|reduce_scatter|broadcast|send_recv)")


def plot_kernels(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The kernels that take most device time over all ranks, coloured by kind, of `kernels` or `top_kernels`."""
    names = pd.Series(op_names(table["name"].astype(str)), index=table.index, dtype=object)
    rows = table.assign(name=names.replace("generic", "collective"), kind=table["kind"].astype(str))
    rows = rows.groupby(["name", "kind"])[["total_s", "count"]].sum().reset_index()
    return _longest(ax, rows, "total_s", table, count, x="time, all ranks [ms]", whole="the work")


def plot_operators(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The operators that take most device time of their own (without operators inside), of `operators`."""
    names = table["name"].astype(object)
    if table.attrs.get("source") == "simulated":
        names = pd.Series(op_names(names), index=table.index, dtype=object)
    rows = table.assign(name=names).groupby("name")[["self_device_s", "count"]].sum().reset_index()
    talks = rows["name"].map(lambda name: bool(_TALKS.search(name))).to_numpy(dtype=bool)
    rows["kind"] = np.where(rows["name"] == OUTSIDE, "other", np.where(talks, "comm", "compute"))
    x = "time without operators inside, all ranks [ms]"
    return _longest(ax, rows, "self_device_s", table, count, x=x, whole="the time")


def plot_modules(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 12) -> Axes:
    """The types of modules that take most device time of their own (without modules inside), of `modules`."""
    rows = table.assign(modules=1).groupby("type")[["self_device_s", "count", "modules"]].sum().reset_index()
    rows = rows.rename(columns={"type": "name"}).assign(kind="compute")
    x = "device time without modules inside, with backward [ms]"
    return _longest(ax, rows, "self_device_s", table, count, x=x, whole="the modules' time")


def plot_roofline(table: pd.DataFrame, ax: Axes | None = None, *, count: int = 8) -> Axes:
    """Achieved FLOP/s over FLOPs per byte of each operator and shape of `roofline`, under the roofs of its device.

    Ranks together. Area: device time; colour: dtype; the `count` longest are numbered. Only operators with FLOPs.
    """
    rows = _products(table)
    if not len(rows):
        return empty(ax, rows, "No operator has FLOPs: shapes were not recorded", table)
    ax = ax or new_axes(height=3.6, width=7.4)
    peaks = rows.dropna(subset="peak_flops").drop_duplicates("dtype").set_index("dtype")["peak_flops"]
    bandwidth, intensity = rows["peak_bytes_per_s"].iloc[0], rows["flops_per_byte"]
    low, high = intensity.min() / 2, max([intensity.max() * 2, *(peaks / bandwidth * 4)])
    for dtype, peak in peaks.items():
        ridge, color = max(peak / bandwidth, low), _DTYPE_COLORS.get(dtype, "black")
        roof = np.array([low, ridge, high])
        ax.plot(roof, np.minimum(roof * bandwidth, peak) / 1e12, color=color, linewidth=1, zorder=1)
        side = "right" if ridge > 3 * low else "left"
        text = f"{dtype}: {peak / 1e12:,.4g} TFLOP/s"
        note(ax, ridge, peak / 1e12, text, dx=0, dy=3, va="baseline", ha=side, color=color)
    area = 12 + 400 * rows["device_s"] / rows["device_s"].sum()
    colors, rate = rows["dtype"].map(_DTYPE_COLORS).fillna("black"), rows["flops_per_s"] / 1e12
    ax.scatter(intensity, rate, s=area, c=colors, alpha=0.6, edgecolor="white", linewidth=0.4, zorder=2)
    limits = {"xlim": (low, high), "ylim": (rate.min() / 2, max([rate.max(), *(peaks / 1e12)]) * 2.5)}
    ax.set(xscale="log", yscale="log", **limits)
    ax.grid(True, axis="both")
    _number(ax, intensity.head(count), rate)
    key = [
        f"{number}  {_short(row.name)}  {percent(row.roof)} of its roof\n    {_shapes(row.shapes)}"
        for number, row in enumerate(rows.head(count).itertuples(), start=1)
    ]
    ax.text(1.02, 1.0, "\n".join(key), transform=ax.transAxes, va="top", fontsize=6.5, linespacing=1.25)
    top, device = rows.iloc[0], table.attrs.get("device") or "its device"
    title = f"{_short(top['name'])} runs at {percent(top['roof'])} of its {top['bound']} roof on {device}"
    return finish(ax, rows, title, x="FLOPs per byte", y="TFLOP/s", origin=table)


def plot_kernel_types(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Busy time of each rank by the kinds that run side by side, of `kernel_types`."""
    if not len(table):
        return empty(ax, table, "Nothing ran")
    busy_s = table.pivot_table(index="rank", columns="kinds", values="total_s", aggfunc="sum", observed=False)
    busy_s = busy_s[busy_s.sum().sort_values(ascending=False).index].fillna(0.0)
    ax = ax or new_axes(height=1.2 + 0.28 * len(busy_s))
    fills = {kinds: _blend(kinds.split(" + ")) for kinds in busy_s}
    bars(ax, busy_s * 1e3, fills, source=table.attrs.get("source"))
    names = {kinds: " + ".join(LABELS[kind] for kind in kinds.split(" + ")) for kinds in busy_s}
    first = busy_s.sum().idxmax()
    share = busy_s[first].sum() / busy_s.to_numpy().sum()
    title = f"{share:.0%} of the busy time is {names[first]} {'side by side' if '+' in first else 'alone'}"
    key = [patch_key(names[kinds], fill) for kinds, fill in fills.items()]
    rows = rank_labels(busy_s.index)
    return finish(ax, table, title, x="busy time [ms]", rows=rows, key=key, columns=3)


def plot_mfu(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Model FLOPs utilisation of each rank, of `mfu`: the median of its steps as a bar, each step as a point."""
    steps = table.dropna(subset="mfu")
    if not len(steps):
        return empty(ax, table, "No utilisation: no FLOPs are known")
    by_rank = steps.groupby("rank")["mfu"]
    median, most = by_rank.median(), by_rank.max()
    ax = ax or new_axes(height=1.1 + 0.28 * len(median))
    bars(ax, median * 100, source=table.attrs.get("source"))
    ax.plot(steps["mfu"] * 100, steps["rank"].map(list(median.index).index), "o", color="black", markersize=2.5)
    for place, (value, right) in enumerate(zip(median, most, strict=True)):
        note(ax, right * 100, place, percent(value), dx=5)
    title = f"{percent(steps['mfu'].median())} of the peak in the median step"
    rows, x = rank_labels(median.index), "model FLOPs utilisation [%]"
    return finish(ax, table, title, x=x, rows=rows, reach=most.max() * 112)


def _longest(
    ax: Axes | None, rows: pd.DataFrame, column: str, table: pd.DataFrame, count: int, *, x: str, whole: str
) -> Axes:
    """Bars of the largest values in ms, coloured by kind, each with its share of all and its number of calls."""
    rows = rows.assign(share=rows[column] / max(rows[column].sum(), 1e-12))
    most = rows.sort_values([column, "name"], ascending=[False, True]).head(count)
    most = most[most["share"] >= 0.0005].reset_index(drop=True)
    if not len(most):
        return empty(ax, most, f"Nothing is recorded of {whole}", table)
    ax = ax or new_axes(height=1.1 + 0.25 * len(most))
    number, noun = ("modules", "module") if "modules" in most else ("count", "call")
    notes = [f"{share:.1%}, {plural(n, noun)}" for share, n in zip(most["share"], most[number], strict=True)]
    value_ms, kinds = most[column] * 1e3, list(most["kind"])
    bars(ax, value_ms, kinds, source=table.attrs.get("source"), notes=notes)
    title = f"{_short(most['name'][0])} takes {percent(most['share'][0])} of {whole}"
    key = kinds_key(kind for kind in LABELS if kind in kinds) if len(set(kinds)) > 1 else None
    labels = [_short(name) for name in most["name"]]
    return finish(ax, most, title, x=x, rows=labels, reach=value_ms.max() * 1.25, key=key, origin=table)


def _blend(kinds: list[str]) -> str:
    """Colour of kinds side by side: of hidden communication as elsewhere, else between the colours of all."""
    if kinds == ["compute", "comm"]:
        return COLORS["hidden"]
    return to_hex(np.mean([to_rgb(COLORS[kind]) for kind in kinds], axis=0))


def _number(ax: Axes, x: pd.Series, y: pd.Series) -> None:
    """Numbers from 1 beside points, each at the nearest place that no number before it has."""
    taken: list[np.ndarray] = []
    turns = [(radius, angle) for radius in (9, 14, 19, 24) for angle in np.deg2rad(range(45, 405, 45))]
    for number, point in enumerate(zip(x, y, strict=False), start=1):
        center = ax.transData.transform(point) * 72 / ax.figure.dpi
        places = [radius * np.array([np.cos(angle), np.sin(angle)]) for radius, angle in turns]
        free = [place for place in places if all(np.abs(center + place - other).max() > 8 for other in taken)]
        dx, dy = (free or places)[0]
        taken.append(np.add(center, (dx, dy)))
        note(ax, *point, str(number), dx=dx, dy=dy, weight="bold", ha="center")


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
    return shorten(", ".join(part.replace(",", "x") for part in re.findall(r"\[(\d[\d,]*)\]", text)))


def _short(name: str) -> str:
    """A name that fits beside a bar.

    >>> _short("autograd::engine::evaluate_function: MmBackward0"), _short("aten::mm")
    ('MmBackward0', 'mm')
    """
    name = name.rpartition(": ")[2].removeprefix("torch::autograd::").removeprefix("aten::")
    return shorten(name.replace("_scaled_dot_product_", "sdpa_"))
