"""The four shapes that pictures are made of: bars, lines, blocks of time, grids.

Each draws on given Axes; rows count from the top.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base import NS_PER_S, pack, union
from madmax_lib.view.drawing.axes import finish, new_axes, note
from madmax_lib.view.drawing.style import PLAIN, SHADES, Fill, fill_of, ink_on

_FEW_CELLS = 12  # rows of a grid up to which there is room for lines between them
_LETTER = 0.014  # of the width of the axes, which a letter beside a bar takes
_STRETCHES = 300  # of the time axis, of which each keeps four points
# of the time axis: gaps below are not drawn, so that pictures of any trace stay small
_SMALLEST = 1 / 3000
_LANE = 0.8  # of the distance of two rows, which the bars of a row share


@dataclass(frozen=True)
class BarStyle:
    """Paint, position and texts of `bars`.

    fill: kind, colour or patch options: one ("compute"), one per row, or for a table
    one per column by name; by default grey, and columns that are named by kinds need
    none.
    """

    fill: Fill | Sequence[Fill] | Mapping[str, Fill] | None = None
    source: str | None = None  # "simulated" hatches
    places: Sequence[float] | None = None  # rows to draw on, by default 0, 1, ...
    slot: tuple[int, int] = (0, 1)  # (k, n): the k-th of n bars that share a row
    left: float = 0.0  # where the bars begin
    height: float | None = None  # of a bar, in rows; by default by the slots
    error: tuple[Sequence[float], Sequence[float]] | None = None  # ends of an interval
    notes: Sequence[str] | None = None  # behind the ends; the axis is made long enough
    inside: pd.DataFrame | None = None  # texts on the bars of a table


def bar_chart(
    ax: Axes | None,
    table: pd.DataFrame,
    lengths: pd.DataFrame | pd.Series,
    title: str,
    **options,
) -> Axes:
    """A whole picture of a bar per row: `bars`, hatched as the table or its origin
    tells, and `finish`. options: fields of `BarStyle` and of `Frame`.
    """
    ax = ax or new_axes(height=1.2 + 0.29 * len(lengths))
    fields = options.keys() & BarStyle.__dataclass_fields__
    style = {name: options.pop(name) for name in fields}
    about = table.attrs | getattr(options.get("origin"), "attrs", {})
    bars(ax, lengths, **{"source": about.get("source")} | style)
    return finish(ax, table, title, **options)


def bars(ax: Axes, lengths: pd.DataFrame | Sequence[float], **options) -> np.ndarray:
    """A bar per row, or for a table a bar per row of its columns end to end; returns
    where the bars end. options: fields of `BarStyle`.

    >>> ax = new_axes(height=1.5)
    >>> step_ms = pd.DataFrame({"compute": [3.0, 4.0], "comm": [1.0, 2.0]})
    >>> bars(ax, step_ms, notes=["a", "b"])
    array([4., 6.])
    """
    style = BarStyle(**options)
    slot, slots = style.slot
    height = style.height or (0.7 if slots == 1 else 0.72 / slots)
    fills = style.fill
    if isinstance(lengths, pd.DataFrame):
        parts = lengths
        fills = dict(zip(parts, parts, strict=True)) if fills is None else fills
    else:
        parts = pd.DataFrame({"": np.asarray(lengths, float)})
        fills = {"": PLAIN if fills is None else fills}
    places = np.arange(len(parts)) if style.places is None else style.places
    # n bars of a row stand side by side around its middle
    rows = np.asarray(places, float) + (slot - (slots - 1) / 2) * _LANE / slots
    ends = np.full(len(parts), float(style.left))
    for column, fill in fills.items():
        length = parts[column].to_numpy(float)
        shapes = ax.barh(rows, length, height, ends)
        one_fill = isinstance(fill, str | dict)
        row_fills = [fill] * len(parts) if one_fill else fill
        paints = [fill_of(each, style.source) for each in row_fills]
        for shape, paint in zip(shapes, paints, strict=True):
            shape.set(**paint)
        if style.inside is not None:
            labels = ax.bar_label(
                shapes, style.inside[column], label_type="center", fontsize=7
            )
            for label, paint in zip(labels, paints, strict=True):
                label.set_color(ink_on(paint["facecolor"]))
        ends = ends + np.nan_to_num(length)
    reach = ends
    if style.error is not None:
        low, high = (np.asarray(end, float) for end in style.error)
        line = {"ecolor": "black", "elinewidth": 0.8, "capsize": 2}
        ax.errorbar(ends, rows, xerr=[ends - low, high - ends], fmt="none", **line)
        reach = np.fmax(ends, high)  # notes stand behind the intervals
    if style.notes is not None:
        _write_notes(ax, rows, reach, style, small=height <= 0.3)
    return ends


def _write_notes(ax, rows, reach, style, *, small):
    """Texts behind the ends of bars."""
    look = {"fontsize": 6 if small else 7}
    if style.slot[1] > 1:  # the white would cover the bar of the next slot
        look["bbox"] = None
    for row, end, text in zip(rows, reach, style.notes, strict=True):
        note(ax, end, row, text, **look)
        # data limits that leave the room of the text: end / (1 - share of the letters)
        share = min(_LETTER * len(text), 0.6)
        ax.update_datalim([(end / (1 - share), row)])


def lines(ax: Axes, table: pd.DataFrame, x: str, y: str, **look) -> None:
    """A line of y over x, or one for each value of `hue`, a column: the rows in their
    order, without any average. look: of `seaborn.lineplot`.

    >>> table = pd.DataFrame({"gpus": [1, 2, 1, 2], "step_s": [4, 2, 4, 3]})
    >>> table["network"] = ["a", "a", "b", "b"]
    >>> lines(new_axes(height=2), table, "gpus", "step_s", hue="network", lw=1)
    """
    import seaborn  # late: it brings scipy.stats, a second of every start

    look = {"estimator": None, "sort": False, "legend": "full"} | look
    if len(table):  # which seaborn takes for granted
        seaborn.lineplot(table, x=x, y=y, ax=ax, **look)


def thinned(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """First, lowest, highest and last row of each of 300 stretches of time_s, so that
    pictures of any trace stay small.

    >>> series = pd.DataFrame({"time_s": np.linspace(0, 1, 5000)})
    >>> len(thinned(series.assign(length=np.arange(5000) % 7), "length")) <= 4 * 301
    True
    """
    time_s = table["time_s"].to_numpy()
    width_s = max(time_s.max() - time_s.min(), 1e-12) / _STRETCHES
    stretch = ((time_s - time_s.min()) / width_s).astype("int64")
    values = table[column].reset_index(drop=True).groupby(stretch)
    numbers = pd.Series(np.arange(len(table))).groupby(stretch)
    ends = [values.idxmin(), values.idxmax(), numbers.min(), numbers.max()]
    # a row that is two of the four, say first and lowest, stays once
    rows = np.unique(np.concatenate(ends))
    return table.iloc[rows].reset_index(drop=True)


def blocks(
    ax: Axes,
    spans: pd.DataFrame,
    fills: Mapping[str, Fill],
    reach_ns: int | Mapping[str, int],
    *,
    height: float = 0.8,
) -> pd.DataFrame:
    """Blocks of time on rows: what touches is one block, what is too thin to see is
    widened.

    spans: place (row), kind, start_ns, dur_ns. fills: by kind, in the order of drawing.
    reach_ns: length of the time axis, whose 3000th part is the least width; by kind
    where some need to be wider. Returns the blocks that are drawn: place, kind, start_s,
    dur_s.
    """
    drawn = []
    for row, of_row in spans.groupby("place"):
        for kind, fill in fills.items():
            part = of_row[of_row["kind"] == kind]
            if not len(part):
                continue
            reach = reach_ns[kind] if isinstance(reach_ns, Mapping) else reach_ns
            visible_ns = _visible_blocks(pack(part["start_ns"], part["dur_ns"]), reach)
            start_s = visible_ns[:, 0] / NS_PER_S
            dur_s = (visible_ns[:, 1] - visible_ns[:, 0]) / NS_PER_S
            # broken_barh takes (start, width) pairs; the axis is in ms
            pairs = np.stack([start_s, dur_s], axis=1) * 1e3
            ax.broken_barh(pairs, (row - height / 2, height), **fill_of(fill))
            columns = {"place": row, "kind": kind, "start_s": start_s, "dur_s": dur_s}
            drawn.append(pd.DataFrame(columns))
    return pd.concat(drawn, ignore_index=True)


def _visible_blocks(intervals, reach_ns):
    """Union of intervals in which gaps too small to see are closed and blocks too thin
    to see are widened.
    """
    gap = max(int(reach_ns * _SMALLEST), 1)
    # with their ends a gap later, intervals that are less than a gap apart overlap
    later = np.array([0, gap])
    visible = union(intervals + later) - later
    visible[:, 1] = np.maximum(visible[:, 1], visible[:, 0] + gap)
    return visible


def rank_labels(ranks: Iterable[int]) -> list[str]:
    """Texts for a row per rank."""
    return [f"rank {rank}" for rank in ranks]


def grid(
    ax: Axes,
    values: pd.DataFrame,
    *,
    texts: pd.DataFrame,
    limits: tuple[float | None, float | None],
) -> None:
    """A matrix as coloured cells, with its index and columns as ticks; cells without a
    value stay grey.

    texts: written on the cells. limits: values of the first and the last colour.
    """
    import seaborn  # late: it brings scipy.stats, a second of every start

    ax.set_facecolor("#dddddd")
    seaborn.heatmap(
        values.astype(float),
        ax=ax,
        cmap=SHADES,
        vmin=limits[0],
        vmax=limits[1],
        linewidths=len(values) <= _FEW_CELLS,
        annot=texts,
        fmt="",
        annot_kws={"fontsize": 8},
        xticklabels=True,
        yticklabels=True,
        cbar=False,
    )
    # seaborn writes no text on a cell without a value
    style = {"ha": "center", "va": "center", "fontsize": 8, "color": "#777777"}
    for row, column in np.argwhere(values.isna()):
        ax.text(column + 0.5, row + 0.5, texts.iloc[row, column], **style)
    ax.set(xlabel="", ylabel="")
    ax.grid(False)
    ax.tick_params(length=0)
    ax.tick_params(axis="y", rotation=0)
