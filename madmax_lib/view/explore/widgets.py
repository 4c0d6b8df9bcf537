"""Canvas of timelines in the notebook, to look closely at what happened when, and the
brush's breakdown.

The browser gets the spans as binary columns (13 bytes each) and draws them by columns
of pixels (`widgets.js`), so a million are as quick as a thousand. Where no widget can
be shown (headless runs, nbconvert, GitHub, anywidget not installed) the static picture
of `plots` stands in its place.
"""

import base64
import io
import math
import os
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt

from madmax_lib.base import format_s
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import Timeline, breakdown_between, busy_spans
from madmax_lib.view.drawing import lanes
from madmax_lib.view.explore.canvas import columns
from madmax_lib.view.notebooks.environment import shell
from madmax_lib.view.plots.breakdown import plot_timeline

# spans; beyond, a live canvas comes without its static picture, which would take
# seconds
_PICTURE_UP_TO = 200_000
_VIEW = "application/vnd.jupyter.widget-view+json"
_TIMES = {
    "total_s": "window",
    "compute_s": "compute",
    "exposed_comm_s": "exposed communication",
    "idle_s": "idle",
}
# rows beyond which a table would push the canvas out of sight
_MANY_RANKS = 16


def view_timeline(*timelines: Timeline, titles: Sequence[str] = ()) -> "TimelineView":
    """One timeline, or several stacked over one time axis (measured above simulated),
    to zoom, search and select in.

    Each starts at its own first device work. titles: one for each, by default their
    source, device and plan. Raises ValueError for none, for one without device work,
    and for titles that are not as many. See also: mm.plot_timeline.
    """
    return TimelineView(*timelines, titles=titles)


class TimelineView:
    """A canvas of timelines. `selection` is the brushed window in seconds (empty:
    everything), `breakdown` its account.

    `widget` is the live canvas, made when it is first shown; `show` puts other
    timelines into it.

    >>> view = TimelineView(measured, simulated)                    # doctest: +SKIP
    >>> view.breakdown                                              # doctest: +SKIP
    """

    def __init__(self, *timelines: Timeline, titles: Sequence[str] = ()):
        self.show(*timelines, titles=titles)

    def show(self, *timelines: Timeline, titles: Sequence[str] = ()) -> None:
        """Put other timelines into the same canvas; the selection is dropped."""
        for timeline in timelines:
            require_type("timeline", timeline, Timeline)
        titles = tuple(titles) or tuple(map(_title, timelines))
        about, data = columns(timelines, titles)
        self.timelines = timelines
        self.titles = titles
        self.rows = len(about["rows"])  # by rank and stream, of all timelines together
        if "widget" in vars(self):  # it was made already
            # both in one message: a canvas never has the rows of one, the spans of another
            with self.widget.hold_sync():
                self.widget.selection = []
                self.widget.set_trait("_about", about)
                self.widget.set_trait("_data", data)
        else:
            self._columns = about, data

    @cached_property
    def widget(self):
        """The live canvas, an anywidget. Raises ModuleNotFoundError where anywidget is
        not installed.
        """
        make = widget_class(
            "widgets.js", "widgets.css", _about={}, _data=b"", _report="", selection=[]
        )
        about, data = self._columns
        canvas = make(_about=about, _data=data)
        del self._columns  # the widget holds them now
        canvas.observe(self._report, "selection")
        return canvas

    @property
    def selection(self) -> list[float]:
        """Start and end of the brushed window, s after the first device work; empty
        without one.
        """
        return list(self.widget.selection) if "widget" in vars(self) else []

    @property
    def breakdown(self) -> pd.DataFrame:
        """`mm.breakdown` of the brushed window; with several timelines a first column
        says which.
        """
        # seconds after the first device work of each timeline
        window = self.selection or [0.0, math.inf]
        tables = [breakdown_between(timeline, *window) for timeline in self.timelines]
        if len(tables) == 1:
            return tables[0]
        titles = zip(tables, self.titles, strict=True)
        with_title = [table.assign(timeline=title) for table, title in titles]
        return pd.concat(with_title, ignore_index=True)[["timeline", *tables[0]]]

    def _report(self, _change):
        text = breakdown_html(self.breakdown) if self.selection else ""
        self.widget.set_trait("_report", text)

    def static(self) -> plt.Figure:
        """The static picture: one step of each timeline, one above the other over one
        axis.
        """
        rows = [len(lanes(busy_spans(timeline.spans))) for timeline in self.timelines]
        shape = {
            "figsize": (9, 1.2 * len(rows) + 0.22 * sum(rows)),
            "height_ratios": rows,
            "layout": "constrained",
        }
        figure, axes = plt.subplots(len(rows), 1, sharex=True, squeeze=False, **shape)
        panels = zip(axes[:, 0], self.timelines, self.titles, strict=True)
        for ax, timeline, title in panels:
            plot_timeline(timeline, ax)
            step = ax.get_title(loc="left") or ax.get_title()
            ax.set_title(f"{title}: {step[0].lower()}{step[1:]}")
        # the lowest panel has the axis and the legend of all
        for ax in axes[:-1, 0]:
            ax.set_xlabel("")
            ax.get_legend().remove()
        axes[0, 0].set_xlim(0, max(ax.dataLim.x1 for ax in axes[:, 0]))
        return figure

    def _repr_mimebundle_(self, **_):
        # of a large one the static picture would take longer than the canvas
        small = sum(map(len, self.timelines)) <= _PICTURE_UP_TO
        live = self.widget if interactive() else None
        return view_bundle(live, self.static if small or not live else None)


def interactive() -> bool:
    """Whether widgets can be shown: anywidget is there, in a kernel, and nobody runs
    the notebook headless.
    """
    return (
        shell() is not None
        and "MADMAX_FIGURE_LOG" not in os.environ
        and find_spec("anywidget") is not None
    )


def view_bundle(widget, draw, about: str = "") -> tuple[dict, dict]:
    """MIME bundle of a notebook's output: the live widget (None: none), and the static
    picture of draw() (None: none) beside it, below HTML about it.
    """
    bundle = {"text/plain": "a widget; run the notebook to see it"}
    if draw is not None:
        png = base64.b64encode(png_of(draw())).decode()
        bundle["image/png"] = png
        if about:
            picture = f'<img src="data:image/png;base64,{png}" alt="as it stands">'
            bundle["text/html"] = about + picture
    if widget is not None:
        version = {"version_major": 2, "version_minor": 0}
        bundle[_VIEW] = version | {"model_id": widget.model_id}
    return bundle, {}


def png_of(figure: plt.Figure) -> bytes:
    """A figure as PNG; it is closed."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=110)
        plt.close(figure)
        return file.getvalue()


def widget_class(script: str, style: str = "", **values):
    """A widget of a script beside this module, with values that are the same on both
    sides, each with its default.

    Made on first use: anywidget comes with the extra `notebook`, static pictures
    without.
    """
    import anywidget
    import traitlets

    # as of any kind: what the two sides send each other is not checked
    traits = {
        name: traitlets.Any(value).tag(sync=True) for name, value in values.items()
    }
    folder = Path(__file__).parent
    files = {"_esm": folder / script} | ({"_css": folder / style} if style else {})
    return type("Widget", (anywidget.AnyWidget,), files | traits)


def _title(timeline):
    meta = timeline.meta
    names = [meta.source, meta.device, meta.provenance.get("plan", "")]
    return " · ".join(filter(None, names))


def breakdown_html(table: pd.DataFrame) -> str:
    """A breakdown as a table for the browser: ranks one by one, or their mean where
    they are many.
    """
    keys = [name for name in ("timeline", "rank") if name in table]
    # one row for each timeline
    if len(table) > _MANY_RANKS:
        by = table.assign(rank="mean").groupby(keys, sort=False)
        table = by[[*_TIMES, "overlap"]].mean().reset_index()
    texts = table[keys].copy()
    for name, label in _TIMES.items():
        shares = (table[name] / table["total_s"]).map(" ({:.0%})".format)
        texts[label] = table[name].map(format_s) + shares
    texts["window"] = table["total_s"].map(format_s)  # of which it has all
    overlap = table["overlap"]
    texts["overlap"] = overlap.map("{:.0%}".format).where(overlap.notna(), "")
    return texts.to_html(index=False, border=0, justify="left", col_space=70)
