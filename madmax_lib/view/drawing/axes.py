"""How does a picture begin and end? New axes and panels, small texts, legends, and
`finish`, which keeps the table.
"""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from madmax_lib.timeline.timeline import Timeline
from madmax_lib.view.drawing.style import PAPER, Fill, patch_key

__all__ = [
    "empty",
    "figure_data",
    "finish",
    "legend",
    "log_axis",
    "new_axes",
    "note",
    "panels",
    "published",
]

_LONG = 40  # characters of a row's label, beyond which all are small
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}


def new_axes(*, height: float, width: float = 7.0) -> Axes:
    """Axes of a new figure, in inches."""
    _, ax = plt.subplots(figsize=(width, height))
    return ax


def panels(
    titles: Sequence[str],
    *,
    width: float = 7.0,
    height: float,
    title: str,
    down: bool = False,
) -> list[Axes]:
    """Axes side by side, or one below another, which share the axis between them;
    `title` stands above all.
    """
    shape = (
        {"nrows": len(titles), "sharex": True}
        if down
        else {"ncols": len(titles), "sharey": True}
    )
    figure, axes = plt.subplots(figsize=(width, height), squeeze=False, **shape)
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    for ax, name in zip(axes.flat, titles, strict=True):
        ax.set_title(name, fontsize=8, fontweight="normal")
    return list(axes.flat)


def note(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    *,
    dx: float = 4,
    dy: float = 0,
    box: bool = False,
    **style,
) -> None:
    """A small text dx and dy points beside a point; box: on white, where lines pass."""
    style = {"fontsize": 7, "va": "center", **({"bbox": _BOX} if box else {}), **style}
    ax.annotate(text, (x, y), (dx, dy), textcoords="offset points", **style)


def published(ax: Axes, x, y, **style) -> None:
    """Hollow diamonds where a number is published."""
    style = {"mec": PAPER, "ms": 6, "mew": 1.1, "zorder": 4, "clip_on": False, **style}
    ax.plot(x, y, "D", mfc="none", ls="none", **style)


def log_axis(
    ax: Axes, which: str, low: float, high: float, text: Callable[[float], str]
) -> None:
    """Logarithmic from low to high with some room, ticks as text: at 1, 2 and 5 of a
    decade where there are few.
    """
    ax.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.8, high * 1.8)})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())


def legend(
    ax: Axes,
    entries: Mapping[str, Fill] | Sequence | None = None,
    where: str = "below",
    columns: int | None = None,
) -> None:
    """A legend below the axes, beside them, or at a place that matplotlib knows.

    entries: labels with their fills, or entries of `patch_key`, `mark_key`, `line_key`;
    None: what was drawn with a label.
    """
    if isinstance(entries, Mapping):
        entries = [patch_key(label, fill) for label, fill in entries.items()]
    entries = ax.get_legend_handles_labels()[0] if entries is None else list(entries)
    if not entries:
        return
    if where == "below":
        corner = ax.transAxes + ScaledTranslation(
            0, -0.42, ax.figure.dpi_scale_trans
        )  # inches, whatever the height
        place = {
            "loc": "upper right",
            "bbox_to_anchor": (1.0, 0.0),
            "bbox_transform": corner,
        }
        columns = columns or min(len(entries), 5)
    else:
        place = (
            {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
            if where == "beside"
            else {"loc": where}
        )
    ax.legend(handles=entries, ncols=columns or 1, **place)


def finish(
    ax: Axes,
    table: pd.DataFrame,
    title: str | None,
    *,
    x: str = "",
    y: str = "",
    rows: Sequence[str] | None = None,
    reach: float | None = None,
    key: Mapping[str, Fill] | Sequence | None = None,
    where: str = "below",
    columns: int | None = None,
    origin: Timeline | pd.DataFrame | dict | None = None,
    **settings,
) -> Axes:
    """Title, axes and legend of a picture; its table is kept for `save_figure`.

    rows: labels of rows 0, 1, ..., the first on top. reach: right end of the x axis,
    from 0. key: legend entries, and `where` and `columns` as of `legend`. origin: what
    tells where the numbers come from (by default the table), or that provenance itself.
    settings: of `Axes.set`, such as xscale="log".
    """
    if title is not None:
        ax.set_title(title)
    if rows is not None:
        small = {"fontsize": 7} if max(map(len, rows), default=0) > _LONG else {}
        ax.set_yticks(range(len(rows)), rows, **small)
        ax.set_ylim(len(rows) - 0.4, -0.6)
    if reach is not None:
        ax.set_xlim(0, max(reach, 1e-9))
    ax.set(
        **{name: text for name, text in (("xlabel", x), ("ylabel", y)) if text},
        **settings,
    )
    if key is not None:
        legend(ax, key, where, columns)
    told = table if origin is None else origin
    if isinstance(told, pd.DataFrame):
        table.attrs.update(told.attrs)
    else:
        table.attrs["provenance"] = (
            told.meta.provenance if isinstance(told, Timeline) else told
        )
    ax._madmax_data = table
    return ax


def empty(
    ax: Axes | None,
    table: pd.DataFrame,
    title: str,
    origin: Timeline | pd.DataFrame | dict | None = None,
) -> Axes:
    """An empty picture that says why in its title."""
    ax = ax or new_axes(height=0.6)
    ax.spines[:].set_visible(False)
    return finish(ax, table, title, origin=origin, xticks=[], yticks=[])


def figure_data(ax: Axes) -> pd.DataFrame | None:
    """The table a picture shows."""
    return getattr(ax, "_madmax_data", None)
