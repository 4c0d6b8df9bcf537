"""Pictures of kernels and collectives alone: rates by size, under the data sheet."""

import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import format_bytes
from madmax_lib.view.drawing import (
    SERIES,
    finish,
    line_key,
    lines,
    log_axis,
    new_axes,
)


def plot_kernel_rates(
    table: pd.DataFrame, x: str, y: str, ax: Axes | None = None
) -> Axes:
    """Rates over sizes, both logarithmic: lines as priced, points as measured, dotted
    the roof of the data sheet.

    table: device, size or size_bytes, rate, measured_rate (NaN: not measured) and roof,
    all rates in one unit. x, y: labels of the axes with their units.
    """
    size = "size_bytes" if "size_bytes" in table else "size"
    text = format_bytes if size == "size_bytes" else "{:,.0f}".format
    ax = ax or new_axes(height=3.6)
    colors = dict(zip(table["device"].unique(), SERIES, strict=False))
    look = {"hue": "device", "palette": colors}
    lines(ax, table, size, "rate", **look)
    lines(ax, table, size, "roof", ls=":", lw=0.8, **look | {"legend": False})
    points = table.dropna(subset="measured_rate")
    ax.scatter(
        points[size],
        points["measured_rate"],
        c=points["device"].map(colors),
        s=14,
        zorder=3,
        linewidth=0,
    )
    lowest = table[["rate", "measured_rate"]].min().min()
    log_axis(ax, "x", table[size].min(), table[size].max(), text)
    log_axis(ax, "y", lowest, table["roof"].max(), "{:g}".format)
    ax.grid(axis="y")
    share = (table["rate"] / table["roof"]).groupby(table["device"]).max()
    title = f"{share.idxmax()} comes nearest to its data sheet, {share.max():.0%} of it"
    key = [*ax.get_legend_handles_labels()[0], line_key("data sheet", ls=":", lw=0.8)]
    return finish(ax, table, title, x=x, y=y, key=key, where="beside")
