"""Marks of a page of numbers: tables, bars and lines as HTML and SVG, in the colours of
the browser.

All of it stands in the page as text, so it is read, searched and printed where no
script runs.
"""

import math
import re
from collections.abc import Sequence
from html import escape

import numpy as np
import pandas as pd

from madmax_lib.base import format_bytes, format_s
from madmax_lib.view.words import COLORS, LABELS, percent, shorten

_FILLS = {
    "compute": "compute",
    "hidden": "communication under compute",
    "comm": "exposed communication",
}
_FILLS |= {kind: LABELS[kind] for kind in ("memcpy", "other", "idle")}
_COLORS = COLORS | {"idle": "var(--idle)"}  # grey on either paper
_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SHARES = ("share", "overlap", "mfu", "coverage", "roof")
_LONGEST = 400  # letters that a cell keeps
_VISIBLE = {"name": 90, "shapes": 60}  # letters that it shows, by column
_WRAPS = 24  # letters of a text that may go on in another line, after a comma or colons
_POINTS = 1200  # of a line
_SEEN = 1e-3  # of the longest bar: what is shorter is less than a pixel
_SEARCHED = 10  # rows up to which a table needs no filter
_LONG = 20  # rows from which a table scrolls on its own


def section(title: str, *parts: str) -> str:
    """A part of the page with an anchor; nothing at all where every part is empty."""
    if not any(parts):
        return ""
    anchor = title.lower().replace(" ", "-")
    body = f"<h2>{escape(title)}</h2>\n{''.join(parts)}"
    return f'<section id="{anchor}">{body}</section>'


def cards(values: dict[str, str]) -> str:
    """The numbers to see first, by label."""
    cells = (
        f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for label, value in values.items()
    )
    return f'<div class="cards">{"".join(cells)}</div>'


def bars(rows: Sequence[tuple[str, dict[str, float], str]]) -> str:
    """A bar for each row (label, value by fill, text), all to one scale, with a legend
    of the fills that occur.
    """
    reach = max((sum(parts.values()) for _, parts, _ in rows), default=0.0)
    if not reach > 0:
        return ""
    lines = []
    for label, parts, note in rows:
        pieces = "".join(
            f'<i style="width:{value / reach:.3%};background:{_COLORS[fill]}" '
            f'title="{_FILLS[fill]}"></i>'
            for fill, value in parts.items()
            if value > 0
        )
        cells = f"<th>{escape(label)}</th><td>{pieces}</td><td>{escape(note)}</td>"
        lines.append(f"<tr>{cells}</tr>")
    legend = ""
    for fill, name in _FILLS.items():
        # a fill that is nowhere as wide as a pixel has no entry
        if any(parts.get(fill, 0) > _SEEN * reach for _, parts, _ in rows):
            legend += f'<i style="background:{_COLORS[fill]}"></i>{name} '
    return f'<p class="legend">{legend}</p><table class="bars">{"".join(lines)}</table>'


def line(x: np.ndarray, y: np.ndarray, title: str = "") -> str:
    """A stepped line of bytes over seconds; of many points the largest of each stretch
    is kept.
    """
    if not len(x) or not np.nanmax(y) > 0 or x[-1] <= x[0]:
        return ""
    top = float(np.nanmax(y))
    share = (x - x[0]) / (x[-1] - x[0])  # of the time, 0 to 1
    if len(x) > _POINTS:
        highest = pd.Series(y).groupby((share * _POINTS).astype(int)).idxmax()
        share = share[highest]
        y = y[highest]
    # in a box of 1000 by 200 whose y axis points down, with some room above the top
    across = share * 1000
    down = 200 - y / top * 190
    steps = [f"H{a:.1f}V{b:.1f}" for a, b in zip(across, down, strict=True)]
    # the first point is not drawn to: "H0.0V10.0" becomes "M0.0,10.0"
    steps[0] = steps[0].replace("H", "M").replace("V", ",")
    caption = f"{escape(title)}: peak {size_text(top)} in {format_s(x[-1] - x[0])}"
    path = (
        f'<path d="{"".join(steps)}" fill="none" stroke="{COLORS["memory"]}" '
        'vector-effect="non-scaling-stroke"/>'
    )
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        '<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{path}</svg></figure>'
    )


def table(frame: pd.DataFrame, *, most: int = 200, search: bool = False) -> str:
    """A table whose columns are sorted by a click; columns without any value are left
    out. most: rows that are shown.

    Units follow from the names: _s seconds, _bytes, _per_s, shares.
    """
    if frame.empty:
        return ""
    left_out = len(frame) - most
    frame = frame.head(most)
    head = ""
    columns = []
    for name, values in frame.items():
        if values.isna().all() or (values.astype(str) == "").all():
            continue
        kind = "" if _numeric(values) else " class=text"
        head += f"<th{kind}>{escape(_label(name))}</th>"
        columns.append(_cells(name, values))
    rows = [f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True)]
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    find = ""
    if search and len(frame) > _SEARCHED:
        find = '<input type="search" placeholder="filter rows">'
    rest = ""
    if left_out > 0:
        rest = f"<p class=about>{left_out:,} more rows are not shown.</p>"
    scroll = "scroll long" if len(frame) > _LONG else "scroll"
    table_html = f'<table class="data">{body}</table>'
    return f'{find}<div class="{scroll}">{table_html}</div>{rest}'


def _label(name):
    # without the unit, which the cells have: idle_s is idle, flops_per_s is flops
    name = re.sub(
        r"^(flops|bytes)_per_s$|_(?:bytes|flops)(?:_per_s)?$|(?<!_per)_s$", r"\1", name
    )
    return name.replace("_", " ")


def _cells(name, values):
    if not _numeric(values):
        return [_text_cell(name, str(value)) for value in values]
    say = next((of for unit, of in _BY_UNIT.items() if name.endswith(unit)), _plain)
    say = percent if name in _SHARES else say
    cells = []
    for value in values.tolist():
        if math.isnan(value):
            cells.append("<td></td>")
            continue
        bar = ""
        if name in _SHARES:  # its background is a bar
            width = min(max(value, 0), 1)
            bar = f' class="share" style="--w:{width:.2%}"'
        # data-v is what a click sorts by
        cells.append(f'<td data-v="{value:.6g}"{bar}>{say(value) if value else 0}</td>')
    return cells


def _numeric(values):
    return pd.api.types.is_numeric_dtype(values) and values.dtype != bool


def _text_cell(name, value):
    """A cell whose text is shortened and may go on in another line."""
    most = _VISIBLE.get(name, _LONGEST)
    visible = escape(shorten(value, most))
    if len(value) > _WRAPS:
        visible = re.sub(r"(,|::)(?=\S)", r"\1<wbr>", visible)
    # of a shortened text the rest is there for the mouse
    title = f' title="{escape(value[:_LONGEST])}"' if len(value) > most else ""
    return f'<td class="text"{title}>{visible}</td>'


def _plain(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def size_text(size_bytes: float) -> str:
    """Bytes in KiB, MiB or GiB, as memory is counted, with their sign."""
    return ("-" if size_bytes < 0 else "") + format_bytes(abs(size_bytes), binary=True)


def _flops(value):
    factor, prefix = next((pair for pair in _SI if abs(value) >= pair[0]), _SI[-1])
    return f"{value / factor:.3g} {prefix}FLOP"


_BY_UNIT = {  # the longer ends first
    "bytes_per_s": lambda value: f"{format_bytes(value)}/s",
    "flops_per_s": lambda value: f"{_flops(value)}/s",
    "_per_s": _plain,
    "flops": _flops,
    "_s": format_s,
    "message_bytes": format_bytes,
    "bytes": size_text,
}
