"""Pictures of kernels, operators and modules, and how far they are from their roofs:
the tables of `traces.operators`.
"""

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.traces.diff import op_names
from madmax_lib.traces.operators.ops import OUTSIDE
from madmax_lib.traces.operators.roofline import products
from madmax_lib.view.drawing import (
    SERIES,
    bar_chart,
    empty,
    finish,
    kinds_key,
    new_axes,
    note,
    percent,
    plural,
    short_name,
)

_DTYPES = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp64", "int8")
_DTYPE_COLORS = dict(zip(_DTYPES, SERIES, strict=False))
# names of operators that communicate, of the frameworks and of the simulator
_TALKS = re.compile(
    r"^(c10d|nccl|gloo|hccl):|^record_param_comms"
    r"|^(all_|reduce_scatter|broadcast|send_recv)"
)
_MOST_NAMES = 12
_LEAST_SHARE = 0.0005  # of the time; below, a bar cannot be seen


def plot_kernels(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The kernels that take most device time over all ranks, coloured by kind, of
    `kernels`.
    """
    names = pd.Series(op_names(table["name"].astype(str)), table.index, dtype=object)
    names = names.replace("generic", "collective")
    rows = table.assign(name=names, kind=table["kind"].astype(str))
    columns = ["name", "kind", "total_s", "count"]
    return _longest(ax, rows[columns], "total_s", "time, all ranks [ms]")


def plot_operators(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The operators that take most device time of their own (without operators inside),
    of `operators`.
    """
    names = table["name"].astype(object)
    if table.attrs.get("source") == "simulated":
        names = pd.Series(op_names(names), table.index, dtype=object)
    talks = np.array([bool(_TALKS.search(name)) for name in names], dtype=bool)
    kinds = np.where(talks, "comm", "compute")
    rows = table.assign(name=names, kind=np.where(names == OUTSIDE, "other", kinds))
    columns = ["name", "self_device_s", "count", "kind"]
    return _longest(
        ax,
        rows[columns],
        "self_device_s",
        "time without operators inside, all ranks [ms]",
    )


def _longest(ax, rows, seconds, x):
    """Bars of the twelve names with the largest sums of a time, each with its share of
    all and its calls. seconds: column of the time.
    """
    sums = rows.groupby(["name", "kind"]).sum().reset_index()[list(rows)]
    data = sums.assign(share=sums[seconds] / max(sums[seconds].sum(), 1e-12))
    data = data.sort_values([seconds, "name"], ascending=[False, True])
    top = data.head(_MOST_NAMES)
    top = top[top["share"] >= _LEAST_SHARE].reset_index(drop=True)
    if top.empty:
        return empty(ax, top, "No device time is recorded", rows)
    counts = [plural(count, "call") for count in top["count"]]
    names = [short_name(name) for name in top["name"]]
    kinds = list(top["kind"])
    return bar_chart(
        ax,
        top,
        top[seconds] * 1e3,
        f"{names[0]} takes {percent(top['share'][0])} of the time",
        x=x,
        rows=names,
        key=kinds_key(kinds) if len(set(kinds)) > 1 else None,
        fill=kinds,
        notes=top["share"].map("{:.1%}, ".format) + counts,
    )


def plot_roofline(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Achieved FLOP/s over FLOPs per byte of each operator and shape of `roofline`,
    under the roofs of its device.

    Ranks together. Area: device time; colour: dtype. Only operators with FLOPs.
    """
    rows = products(table)
    if rows.empty:
        return empty(ax, rows, "No operator has FLOPs: shapes were not recorded", table)
    ax = ax or new_axes(height=3.6, width=7.4)
    with_peak = rows.dropna(subset="peak_flops").drop_duplicates("dtype")
    peaks = with_peak.set_index("dtype")["peak_flops"]
    # one device: the ranks of a trace are alike
    bandwidth = rows["peak_bytes_per_s"].iloc[0]
    intensity = rows["flops_per_byte"]
    low = intensity.min() / 2
    high = max([intensity.max() * 2, *(peaks / bandwidth * 4)])
    _draw_roofs(ax, peaks, bandwidth, (low, high))
    tflop_per_s = rows["flops_per_s"] / 1e12
    ax.scatter(
        intensity,
        tflop_per_s,
        s=12 + 400 * rows["device_s"] / rows["device_s"].sum(),
        c=rows["dtype"].map(_DTYPE_COLORS).fillna("black"),
        alpha=0.6,
        edgecolor="white",
        linewidth=0.4,
        zorder=2,
    )
    top_tflop_per_s = max([tflop_per_s.max(), *(peaks / 1e12)]) * 2.5
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(tflop_per_s.min() / 2, top_tflop_per_s),
    )
    ax.grid(True, axis="both")
    top = rows.iloc[0]
    device = table.attrs.get("device") or "its device"
    return finish(
        ax,
        rows,
        f"{short_name(top['name'])} runs at {percent(top['roof'])} of "
        f"its {top['bound']} roof on {device}",
        x="FLOPs per byte",
        y="TFLOP/s",
        origin=table,
    )


def _draw_roofs(ax, peaks, bandwidth, limits):
    """A roof for each dtype: rate = min(peak, intensity * bandwidth) [Williams 2009]."""
    low, high = limits
    for dtype, peak in peaks.items():
        ridge = max(peak / bandwidth, low)  # FLOPs per byte where both bind
        color = _DTYPE_COLORS.get(dtype, "black")
        intensity = np.array([low, ridge, high])
        roof = np.minimum(intensity * bandwidth, peak) / 1e12
        ax.plot(intensity, roof, color=color, linewidth=1, zorder=1)
        text = f"{dtype}: {peak / 1e12:,.4g} TFLOP/s"
        above = {"dx": 0, "dy": 3, "va": "baseline", "ha": "right"}
        note(ax, high, peak / 1e12, text, **above, color=color)
