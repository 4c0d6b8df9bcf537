"""Which five shapes are pictures made of? Bars, lines, areas, blocks of time, grids.

Each draws on given Axes; rows count from the top.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from madmax_lib.base.intervals import pack, union
from madmax_lib.base.units import NS_PER_S
from madmax_lib.view.drawing.axes import finish, new_axes, note
from madmax_lib.view.drawing.style import Fill, fill_of, ink_on

__all__ = [
    "areas",
    "bar_chart",
    "bars",
    "blocks",
    "grid",
    "lines",
    "rank_labels",
    "thinned",
]

_FEW_CELLS = 12  # rows of a grid up to which there is room for lines between them
_LETTER = 0.014  # of the width of the axes, which a letter beside a bar takes
_STRETCHES = 300  # of the time axis, of which each keeps four points
_SMALLEST = (
    1 / 3000
    # of the time axis: gaps below are not drawn, so that pictures of any trace stay small
)


def bar_chart(
    ax: Axes | None,
    table: pd.DataFrame,
    lengths: pd.DataFrame | pd.Series,
    title: str,
    fill: Fill | Sequence[Fill] | Mapping[str, Fill] | None = None,
    *,
    source: str | None = None,
    error: tuple[Sequence[float], Sequence[float]] | None = None,
    notes: Sequence[str] | None = None,
    inside: pd.DataFrame | None = None,
    **ending,
) -> Axes:
    """A whole picture of a bar per row: `bars`, hatched as the table or its origin
    tells, and `finish`.
    """
    ax = ax or new_axes(height=1.2 + 0.29 * len(lengths))
    told = {**table.attrs, **getattr(ending.get("origin"), "attrs", {})}
    bars(
        ax,
        lengths,
        fill,
        source=source or told.get("source"),
        error=error,
        notes=notes,
        inside=inside,
    )
    return finish(ax, table, title, **ending)


def bars(
    ax: Axes,
    lengths: pd.DataFrame | Sequence[float],
    fill: Fill | Sequence[Fill] | Mapping[str, Fill] | None = None,
    *,
    source: str | None = None,
    places: Sequence[float] | None = None,
    slot: tuple[int, int] = (0, 1),
    left: float | Sequence[float] = 0.0,
    height: float | None = None,
    error: tuple[Sequence[float], Sequence[float]] | None = None,
    notes: Sequence[str] | None = None,
    inside: pd.DataFrame | Sequence[str] | None = None,
    upright: bool = False,
) -> np.ndarray:
    """A bar per row, or for a table a bar per row of its columns end to end; returns
    where the bars end.

    fill: kind, colour or patch options: one ("compute"), one per row, or for a table
    one per column by name; columns that are named by kinds need none.
    source: "simulated" hatches. places: rows to draw on, by default 0, 1, ... slot: (k,
    n) is the k-th of n bars that share a row. error: low and high ends of an interval.
    notes: texts behind the ends, for which the axis is made long
    enough, inside: texts on the bars.

    >>> from madmax_lib.view.drawing import new_axes
    >>> ax = new_axes(height=1.5)
    >>> step_ms = pd.DataFrame({"compute": [3.0, 4.0], "comm": [1.0, 2.0]})
    >>> bars(ax, step_ms, notes=["a", "b"])
    array([4., 6.])
    """
    number, of = slot
    height = height or (0.7 if of == 1 else 0.72 / of)
    stacked = isinstance(lengths, pd.DataFrame)
    parts = lengths if stacked else pd.DataFrame({"": np.asarray(lengths, float)})
    if fill is None:
        fill = dict(zip(parts, parts, strict=True)) if stacked else "compute"
    texts = inside if stacked or inside is None else pd.DataFrame({"": list(inside)})
    rows = np.arange(len(parts)) if places is None else np.asarray(places, float)
    rows = rows + (number - (of - 1) / 2) * 0.8 / of
    end = np.broadcast_to(np.asarray(left, float), len(parts))
    across = ax.bar if upright else ax.barh
    for column, of_column in (fill if stacked else {"": fill}).items():
        length = parts[column].to_numpy(float)
        shapes = across(rows, length, height, end)
        paints = _paints(of_column, len(parts), source)
        for shape, paint in zip(shapes, paints, strict=True):
            shape.set(**paint)
        if texts is not None:
            labels = ax.bar_label(
                shapes, texts[column], label_type="center", fontsize=7
            )
            for label, paint in zip(labels, paints, strict=True):
                label.set_color(ink_on(paint["facecolor"]))
        end = end + np.nan_to_num(length)
    reach = end if error is None else _draw_error(ax, rows, end, error, upright=upright)
    for row, at, text in (
        zip(rows, reach, notes, strict=True) if notes is not None else ()
    ):
        place, shift = (
            ((row, at), {"dx": 0, "dy": 5, "ha": "center"})
            if upright
            else ((at, row), {})
        )
        note(ax, *place, text, fontsize=7 if height > 0.3 else 6, box=of == 1, **shift)
        if not upright:
            ax.update_datalim([(at / max(1 - _LETTER * len(text), 0.4), row)])
    return end


def _paints(fill: Fill | Sequence[Fill], count: int, source: str | None) -> list[dict]:
    one = isinstance(fill, (str, dict))
    return (
        [fill_of(fill, source)] * count
        if one
        else [fill_of(each, source) for each in fill]
    )


def _draw_error(ax: Axes, rows, middle, error, *, upright: bool) -> np.ndarray:
    """Intervals as thin lines; returns the farther of their ends and the bars'."""
    low, high = (np.asarray(end, float) for end in error)
    x, y = (rows, middle) if upright else (middle, rows)
    spread = {"yerr" if upright else "xerr": [middle - low, high - middle]}
    ax.errorbar(x, y, **spread, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    return np.fmax(middle, high)


def lines(
    ax: Axes,
    table: pd.DataFrame,
    x: str,
    y: str,
    *,
    by: str | list[str] | None = None,
    styles: Mapping | None = None,
    labels: Mapping | Callable[[pd.DataFrame], str] | None = None,
    ends: Mapping | Callable[[pd.DataFrame], str] | None = None,
    units: tuple[float, float] = (1.0, 1.0),
    **style,
) -> None:
    """A line of y over x for each value of `by`, in the order of the table.

    styles: by value, a colour or options of `Axes.plot`; **style: options of all.
    labels: for the legend, ends: written at the last point, both by value or as a
    function of the group's rows. units: what 1 is on each axis, such as 1e-3 for ms.

    >>> from madmax_lib.view.drawing import new_axes
    >>> ax = new_axes(height=2)
    >>> table = pd.DataFrame({"gpus": [1, 2, 1, 2], "step_s": [4, 2, 4, 3], "network": ["a", "a", "b", "b"]})
    >>> lines(ax, table, "gpus", "step_s", by="network", styles={"a": "black", "b": {"ls": ":"}}, units=(1, 1e-3))
    """
    groups = table.groupby(by, sort=False) if by is not None else [(None, table)]
    for value, part in groups:
        own = (styles or {}).get(value, {})
        own = {"color": own} if isinstance(own, str) else own
        (line,) = ax.plot(part[x] / units[0], part[y] / units[1], **{**style, **own})
        if label := _text(labels, value, part):
            line.set_label(label)
        if text := _text(ends, value, part):
            at = part[x].iloc[-1] / units[0], part[y].iloc[-1] / units[1]
            note(ax, *at, text, dx=6, color=line.get_color())


def _text(texts: Mapping | Callable | None, value, part: pd.DataFrame) -> str | None:
    return texts(part) if callable(texts) else (texts or {}).get(value)


def thinned(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """First, lowest, highest and last row of each of 300 stretches of time_s, so that
    pictures of any trace stay small.

    >>> series = pd.DataFrame({"time_s": np.linspace(0, 1, 5000), "length": np.arange(5000) % 7})
    >>> len(thinned(series, "length")) <= 4 * 301
    True
    """
    time_s = table["time_s"].to_numpy()
    width_s = max(time_s.max() - time_s.min(), 1e-12) / _STRETCHES
    stretch = ((time_s - time_s.min()) / width_s).astype(np.int64)
    values = table[column].reset_index(drop=True).groupby(stretch)
    places = pd.Series(np.arange(len(table))).groupby(stretch)
    rows = np.concatenate(
        [values.idxmin(), values.idxmax(), places.min(), places.max()]
    )
    return table.iloc[np.unique(rows)].reset_index(drop=True)


def areas(
    ax: Axes,
    x: Sequence[float],
    parts: pd.DataFrame,
    fills: Mapping[str, Fill],
    *,
    source: str | None = None,
    step: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> np.ndarray:
    """Columns of a table as areas one upon another, in the order of `fills`; returns
    the top.

    step: "post" or "mid" for values that hold until the next one, or around each.
    """
    below = np.zeros(len(parts))
    for name, fill in fills.items():
        above = below + parts[name].to_numpy(float)
        label = (labels or {}).get(name, name)
        ax.fill_between(
            x, below, above, step=step, label=label, **fill_of(fill, source)
        )
        below = above
    return below


def blocks(
    ax: Axes,
    spans: pd.DataFrame,
    kinds: Sequence[str] | Mapping[str, Fill],
    *,
    reach_ns: int,
    source: str | None = None,
    height: float = 0.8,
    wider: Mapping[str, int] | None = None,
    unit_s: float = 1e-3,
) -> pd.DataFrame:
    """Blocks of time on rows: what touches is one block, what is too thin to see is
    widened.

    spans: place (row), kind, start_ns, dur_ns. kinds: in the order of drawing, with a
    fill where the kind's own colour is not meant. reach_ns: length of the time axis.
    wider: kinds whose least width is a multiple of the usual one. Returns the blocks
    that are drawn: place, kind, start_s, dur_s.
    """
    fills = (
        kinds if isinstance(kinds, Mapping) else dict(zip(kinds, kinds, strict=True))
    )
    drawn = []
    for place, row in spans.groupby("place"):
        for kind, fill in fills.items():
            of_kind = row[row["kind"] == kind]
            if not len(of_kind):
                continue
            least = (wider or {}).get(kind, 1) * reach_ns
            seen = _visible_blocks(pack(of_kind["start_ns"], of_kind["dur_ns"]), least)
            start_s = seen[:, 0] / NS_PER_S
            dur_s = (seen[:, 1] - seen[:, 0]) / NS_PER_S
            where = np.stack([start_s, dur_s], axis=1) / unit_s
            ax.broken_barh(where, (place - height / 2, height), **fill_of(fill, source))
            drawn.append(
                pd.DataFrame(
                    {"place": place, "kind": kind, "start_s": start_s, "dur_s": dur_s}
                )
            )
    return pd.concat(drawn, ignore_index=True)


def _visible_blocks(intervals: np.ndarray, reach_ns: int) -> np.ndarray:
    """Union of intervals in which gaps too small to see are closed and blocks too thin
    to see are widened.
    """
    gap = max(int(reach_ns * _SMALLEST), 1)
    visible = union(intervals + np.array([0, gap])) - np.array([0, gap])
    visible[:, 1] = np.maximum(visible[:, 1], visible[:, 0] + gap)
    return visible


def rank_labels(ranks: Iterable[int]) -> list[str]:
    """Texts for a row per rank."""
    return [f"rank {rank}" for rank in ranks]


def grid(
    ax: Axes,
    values: pd.DataFrame,
    *,
    texts: pd.DataFrame | None = None,
    colors: str = "Blues",
    limits: tuple[float | None, float | None] = (None, None),
    label: str = "",
) -> None:
    """A matrix as coloured cells, with its index and columns as ticks; cells without a
    value stay grey.

    texts: written on the cells. limits: values of the first and the last colour. label:
    of a colour bar, if any.
    """
    import seaborn  # late: it brings scipy.stats, a second of every start

    ax.set_facecolor("#dddddd")
    style = {
        "cmap": colors,
        "vmin": limits[0],
        "vmax": limits[1],
        "linewidths": len(values) <= _FEW_CELLS,
    }
    text = {
        "annot": texts,
        "fmt": "",
        "annot_kws": {"fontsize": 8},
        "xticklabels": True,
        "yticklabels": True,
    }
    bar = {"cbar": bool(label), "cbar_kws": {"label": label, "shrink": 0.7}}
    seaborn.heatmap(values.astype(float), ax=ax, **style, **text, **bar)
    for row, column in np.argwhere(values.isna()) if texts is not None else ():
        ax.text(
            column + 0.5,
            row + 0.5,
            texts.iloc[row, column],
            ha="center",
            va="center",
            fontsize=8,
            color="#777777",
        )
    ax.set(xlabel="", ylabel="")
    ax.grid(False)
    ax.tick_params(length=0)
    ax.tick_params(axis="y", rotation=0)
