"""How do kernels, operators and modules look, and how far are they from their roofs?
Pictures of `traces.operators`.
"""

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from madmax_lib.traces.diff import op_names
from madmax_lib.traces.operators.ops import OUTSIDE
from madmax_lib.traces.operators.roofline import products
from madmax_lib.view import drawing as draw

__all__ = [
    "plot_kernel_types",
    "plot_kernels",
    "plot_mfu",
    "plot_modules",
    "plot_operators",
    "plot_roofline",
]

_DTYPES = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp64", "int8")
_DTYPE_COLORS = dict(zip(_DTYPES, draw.SERIES, strict=False))
_TALKS = re.compile(
    r"^(c10d|nccl|gloo|hccl):|^record_param_comms|^(all_|reduce_scatter|broadcast|send_recv)"
)


def plot_kernels(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The kernels that take most device time over all ranks, coloured by kind, of
    `kernels` or `top_kernels`.
    """
    names = pd.Series(
        op_names(table["name"].astype(str)), index=table.index, dtype=object
    )
    rows = table.assign(
        name=names.replace("generic", "collective"), kind=table["kind"].astype(str)
    )
    return _longest(
        ax, rows, ["name", "kind", "total_s", "count"], table, "time, all ranks [ms]"
    )


def plot_operators(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The operators that take most device time of their own (without operators inside),
    of `operators`.
    """
    names = table["name"].astype(object)
    if table.attrs.get("source") == "simulated":
        names = pd.Series(op_names(names), index=table.index, dtype=object)
    kinds = np.where(
        names.map(lambda name: bool(_TALKS.search(name))).astype(bool),
        "comm",
        "compute",
    )
    rows = table.assign(name=names, kind=np.where(names == OUTSIDE, "other", kinds))
    columns = ["name", "self_device_s", "count", "kind"]
    return _longest(
        ax, rows, columns, table, "time without operators inside, all ranks [ms]"
    )


def plot_modules(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The types of modules that take most device time of their own (without modules
    inside), of `modules`.
    """
    rows = table.assign(name=table["type"], modules=1, kind="compute")
    columns = ["name", "self_device_s", "count", "modules", "kind"]
    return _longest(
        ax,
        rows,
        columns,
        table,
        "device time without modules inside, with backward [ms]",
    )


def _longest(
    ax: Axes | None, rows: pd.DataFrame, columns: list[str], table: pd.DataFrame, x: str
) -> Axes:
    """Bars of the twelve names with the largest sums of a time, each with its share of
    all and how many it counts.

    columns: of the data of the picture: name and kind, and among them the time first
    and what is counted last.
    """
    seconds, *_, number = sums = [
        column for column in columns if column not in ("name", "kind")
    ]
    rows = rows.groupby(["name", "kind"])[sums].sum().reset_index()[columns]
    rows["share"] = rows[seconds] / max(rows[seconds].sum(), 1e-12)
    most = rows.sort_values([seconds, "name"], ascending=[False, True]).head(12)
    most = most[most["share"] >= 0.0005].reset_index(drop=True)
    if not len(most):
        return draw.empty(ax, most, "No device time is recorded", table)
    counts = [
        draw.plural(n, {"count": "call", "modules": "module"}[number])
        for n in most[number]
    ]
    notes = most["share"].map("{:.1%}, ".format) + counts
    rows = [draw.short_name(name) for name in most["name"]]
    kinds = list(most["kind"])
    key = draw.kinds_key(kinds) if len(set(kinds)) > 1 else None
    title = f"{rows[0]} takes {draw.percent(most['share'][0])} of the time"
    ending = {"notes": notes, "rows": rows, "key": key, "origin": table}
    return draw.bar_chart(ax, most, most[seconds] * 1e3, title, kinds, x=x, **ending)


def plot_roofline(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Achieved FLOP/s over FLOPs per byte of each operator and shape of `roofline`,
    under the roofs of its device.

    Ranks together. Area: device time; colour: dtype; the eight longest are numbered.
    Only operators with FLOPs.
    """
    rows = products(table)
    if not len(rows):
        return draw.empty(
            ax, rows, "No operator has FLOPs: shapes were not recorded", table
        )
    ax = ax or draw.new_axes(height=3.6, width=7.4)
    peaks = (
        rows.dropna(subset="peak_flops")
        .drop_duplicates("dtype")
        .set_index("dtype")["peak_flops"]
    )
    bandwidth = rows["peak_bytes_per_s"].iloc[0]
    intensity = rows["flops_per_byte"]
    low = intensity.min() / 2
    high = max([intensity.max() * 2, *(peaks / bandwidth * 4)])
    for dtype, peak in peaks.items():
        ridge = max(peak / bandwidth, low)
        color = _DTYPE_COLORS.get(dtype, "black")
        roof = np.array([low, ridge, high])
        ax.plot(
            roof,
            np.minimum(roof * bandwidth, peak) / 1e12,
            color=color,
            linewidth=1,
            zorder=1,
        )
        side = "right" if ridge > 3 * low else "left"
        text = f"{dtype}: {peak / 1e12:,.4g} TFLOP/s"
        draw.note(
            ax,
            ridge,
            peak / 1e12,
            text,
            dx=0,
            dy=3,
            va="baseline",
            ha=side,
            color=color,
        )
    area = 12 + 400 * rows["device_s"] / rows["device_s"].sum()
    colors = rows["dtype"].map(_DTYPE_COLORS).fillna("black")
    rate = rows["flops_per_s"] / 1e12
    ax.scatter(
        intensity,
        rate,
        s=area,
        c=colors,
        alpha=0.6,
        edgecolor="white",
        linewidth=0.4,
        zorder=2,
    )
    limits = {
        "xlim": (low, high),
        "ylim": (rate.min() / 2, max([rate.max(), *(peaks / 1e12)]) * 2.5),
    }
    ax.set(xscale="log", yscale="log", **limits)
    ax.grid(True, axis="both")
    _number(ax, intensity.head(8), rate)
    key = [
        f"{number}  {draw.short_name(row.name)}  {draw.percent(row.roof)} of its "
        f"roof\n    {_shapes(row.shapes)}"
        for number, row in enumerate(rows.head(8).itertuples(), start=1)
    ]
    ax.text(
        1.02,
        1.0,
        "\n".join(key),
        transform=ax.transAxes,
        va="top",
        fontsize=6.5,
        linespacing=1.25,
    )
    top = rows.iloc[0]
    device = table.attrs.get("device") or "its device"
    title = (
        f"{draw.short_name(top['name'])} runs at {draw.percent(top['roof'])} of "
        f"its {top['bound']} roof on {device}"
    )
    return draw.finish(ax, rows, title, x="FLOPs per byte", y="TFLOP/s", origin=table)


def plot_kernel_types(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Busy time of each rank by the kinds that run side by side, of `kernel_types`."""
    if not len(table):
        return draw.empty(ax, table, "Nothing ran")
    busy_s = table.pivot_table(
        index="rank", columns="kinds", values="total_s", aggfunc="sum", observed=False
    )
    busy_s = busy_s[busy_s.sum().sort_values(ascending=False).index].fillna(0.0)
    sets = [kinds.split(" + ") for kinds in busy_s]
    labels = [" + ".join(draw.LABELS[kind] for kind in kinds) for kinds in sets]
    key = {label: _blend(kinds) for label, kinds in zip(labels, sets, strict=True)}
    share = busy_s.iloc[:, 0].sum() / busy_s.to_numpy().sum()
    title = (
        f"{share:.0%} of the busy time is {labels[0]} "
        f"{'alone' if len(sets[0]) == 1 else 'side by side'}"
    )
    ending = {
        "x": "busy time [ms]",
        "rows": draw.rank_labels(busy_s.index),
        "key": key,
        "columns": 3,
    }
    return draw.bar_chart(
        ax, table, busy_s.set_axis(labels, axis=1) * 1e3, title, key, **ending
    )


def plot_mfu(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Model FLOPs utilisation of each rank, of `mfu`: the median of its steps as a bar,
    each step as a point.
    """
    steps = table.dropna(subset="mfu")
    if not len(steps):
        return draw.empty(ax, table, "No utilisation: no FLOPs are known")
    by_rank = steps.groupby("rank")["mfu"]
    median = by_rank.median()
    reach = steps["mfu"].max() * 112
    title = f"{draw.percent(steps['mfu'].median())} of the peak in the median step"
    ending = {
        "x": "model FLOPs utilisation [%]",
        "rows": draw.rank_labels(median.index),
        "reach": reach,
    }
    ax = draw.bar_chart(ax, table, median * 100, title, **ending)
    ax.plot(
        steps["mfu"] * 100,
        steps["rank"].map(list(median.index).index),
        "o",
        color="black",
        markersize=2.5,
    )
    for place, (value, most) in enumerate(zip(median, by_rank.max(), strict=True)):
        draw.note(ax, most * 100, place, draw.percent(value), dx=5)
    return ax


def _blend(kinds: list[str]) -> str:
    """Colour of kinds side by side: of hidden communication as elsewhere, else between
    the colours of all.
    """
    if kinds == ["compute", "comm"]:
        return draw.COLORS["hidden"]
    return to_hex(np.mean([to_rgb(draw.COLORS[kind]) for kind in kinds], axis=0))


def _number(ax: Axes, x: pd.Series, y: pd.Series) -> None:
    """Numbers from 1 beside points, each at the nearest place that no number before it
    has.
    """
    taken: list[np.ndarray] = []
    turns = [
        (radius, angle)
        for radius in (9, 14, 19, 24)
        for angle in np.deg2rad(range(45, 405, 45))
    ]
    for number, point in enumerate(zip(x, y, strict=False), start=1):
        center = ax.transData.transform(point) * 72 / ax.figure.dpi
        places = [
            radius * np.array([np.cos(angle), np.sin(angle)]) for radius, angle in turns
        ]
        free = [
            place
            for place in places
            if all(np.abs(center + place - other).max() > 8 for other in taken)
        ]
        dx, dy = (free or places)[0]
        taken.append(np.add(center, (dx, dy)))
        draw.note(ax, *point, str(number), dx=dx, dy=dy, weight="bold", ha="center")


def _shapes(text: str) -> str:
    """Shapes of the tensors in short.

    >>> _shapes("[[16,5185,64],[16,64,5185],[]]")
    '16x5185x64, 16x64x5185'
    """
    return draw.shorten(
        ", ".join(
            part.replace(",", "x") for part in re.findall(r"\[(\d[\d,]*)\]", text)
        )
    )
