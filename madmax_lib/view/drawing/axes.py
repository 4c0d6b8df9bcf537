"""How a picture begins and ends: new axes and panels, small texts, and `finish`, which
draws the legend and keeps the table.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from madmax_lib.timeline import Timeline
from madmax_lib.view.drawing.style import PAPER, Fill, patch_key

_LONG = 40  # characters of a row's label, beyond which all are small
_LONG_MS = 10_000  # beyond which an axis is in seconds
_BELOW_INCHES = 0.42  # between the axes and a legend: room for ticks and a label
# behind a note, so that no line crosses its text
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


@dataclass(frozen=True)
class Frame:
    """Axes, legend and origin of a picture: the options of `finish`, all that it adds to
    what was drawn.

    >>> about = {"rows": ["rank 0", "rank 1"], "reach": 12.5}
    >>> ax = new_axes(height=1)
    >>> ax = finish(ax, pd.DataFrame(), "Rank 1 is late", x="time [ms]", **about)
    """

    x: str = ""  # label of the axis, with its unit
    y: str = ""
    rows: Sequence[str] | None = None  # labels of rows 0, 1, ..., the first on top
    reach: float | None = None  # right end of the x axis, which then begins at 0
    xlim: Sequence[float | None] | None = None  # these five as `Axes.set` takes them
    ylim: Sequence[float | None] | None = None
    xticks: Sequence[float] | None = None
    xscale: str | None = None
    yscale: str | None = None
    # entries of the legend: where only `where` is given, what was drawn with a label
    key: Mapping[str, Fill] | Sequence | None = None
    where: str = ""  # below, beside, or a location of matplotlib's
    columns: int | None = None  # of the legend
    # what tells where the numbers come from (by default the table that is drawn), or
    # that provenance itself
    origin: Timeline | pd.DataFrame | dict | None = None


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
    shape = {"ncols": len(titles), "sharey": True}
    if down:
        shape = {"nrows": len(titles), "sharex": True}
    figure, axes = plt.subplots(figsize=(width, height), squeeze=False, **shape)
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
    for ax, name in zip(axes.flat, titles, strict=True):
        ax.set_title(name, fontsize=8, fontweight="normal")
    return list(axes.flat)


def note(
    ax: Axes, x: float, y: float, text: str, *, dx: float = 4, dy: float = 0, **style
) -> None:
    """A small text dx and dy points beside a point; no line behind it shows."""
    style = {"fontsize": 7, "va": "center", "bbox": _WHITE} | style
    ax.annotate(text, (x, y), (dx, dy), textcoords="offset points", **style)


def published(ax: Axes, x, y, **style) -> None:
    """Hollow diamonds where a number is published."""
    style = {"mec": PAPER, "ms": 6, "mew": 1.1, "zorder": 4, "clip_on": False} | style
    ax.plot(x, y, "D", mfc="none", ls="none", **style)


def log_axis(
    ax: Axes, which: str, low: float, high: float, text: Callable[[float], str]
) -> None:
    """A logarithmic axis from low to high with some room, its ticks as text."""
    ax.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.8, high * 1.8)})
    axis = ax.xaxis if which == "x" else ax.yaxis
    # over few decades there is room for ticks at 1, 2 and 5 of each
    few_decades = high / low < 1e3
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())


def _legend(ax, entries, where, columns):
    """A legend below the axes, beside them, or at a location that matplotlib knows.

    entries: labels with their fills, or entries of `patch_key`, `mark_key`, `line_key`;
    None: what was drawn with a label.
    """
    if isinstance(entries, Mapping):
        entries = [patch_key(label, fill) for label, fill in entries.items()]
    entries = ax.get_legend_handles_labels()[0] if entries is None else list(entries)
    if not entries:
        return
    anchor = {"loc": where}
    if where == "beside":
        anchor = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    elif where == "below":
        # a distance in inches, so that it is the same whatever the height of the axes
        shift = ScaledTranslation(0, -_BELOW_INCHES, ax.figure.dpi_scale_trans)
        anchor = {"loc": "upper right", "bbox_to_anchor": (1.0, 0.0)}
        anchor["bbox_transform"] = ax.transAxes + shift
        columns = columns or min(len(entries), 5)
    ax.legend(handles=entries, ncols=columns or 1, **anchor)


def finish(ax: Axes, table: pd.DataFrame, title: str | None, **options) -> Axes:
    """Title, axes and legend of a picture; its table is kept for `save_figure`.

    options: fields of `Frame`.
    """
    frame = Frame(**options)
    if title is not None:
        ax.set_title(title)
    if frame.x.endswith("[ms]") and (frame.reach or 0) > _LONG_MS:
        # the bars stay where they are, in ms
        frame = replace(frame, x=frame.x.replace("[ms]", "[s]"))
        ax.xaxis.set_major_formatter(lambda ms, _: f"{ms / 1e3:g}")
    if frame.rows is not None:
        longest = max(map(len, frame.rows), default=0)
        small = {"fontsize": 7} if longest > _LONG else {}
        ax.set_yticks(range(len(frame.rows)), frame.rows, **small)
        ax.set_ylim(len(frame.rows) - 0.4, -0.6)  # row 0 on top
    if frame.reach is not None:
        ax.set_xlim(0, max(frame.reach, 1e-9))  # matplotlib warns of an empty range
    # scales before the limits on them
    settings = {
        "xlabel": frame.x or None,
        "ylabel": frame.y or None,
        "xscale": frame.xscale,
        "yscale": frame.yscale,
        "xticks": frame.xticks,
        "xlim": frame.xlim,
        "ylim": frame.ylim,
    }
    ax.set(**{name: value for name, value in settings.items() if value is not None})
    if frame.key is not None or frame.where:
        _legend(ax, frame.key, frame.where or "below", frame.columns)
    # a hatch says what it means, unless the label or the legend does
    hatched = any(shape.get_hatch() for shape in (*ax.patches, *ax.collections))
    texts = ax.legend_.texts if ax.legend_ else []
    words = " ".join([frame.x, *(text.get_text() for text in texts)])
    if frame.x and hatched and not re.search("simulated|predicted", words):
        ax.set_xlabel(f"{frame.x}; hatched: predicted")
    origin = table if frame.origin is None else frame.origin
    if isinstance(origin, pd.DataFrame):
        table.attrs.update(origin.attrs)
    elif isinstance(origin, Timeline):
        table.attrs["provenance"] = origin.meta.provenance
    else:
        table.attrs["provenance"] = origin
    ax._madmax_data = table  # read back by `figure_data`
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
    ax.set(xticks=[], yticks=[])
    return finish(ax, table, title, origin=origin)


def figure_data(ax: Axes) -> pd.DataFrame | None:
    """The table a picture shows."""
    return getattr(ax, "_madmax_data", None)
