"""Report of a timeline: what a performance engineer wants to know first, as one HTML
file that needs no network.
"""

import base64
import gzip
import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from madmax_lib import __version__
from madmax_lib.base.atomic import write_text
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import Timeline, busy_spans
from madmax_lib.traces import peak, steady_state
from madmax_lib.view.notebooks.page import page, paragraph
from madmax_lib.view.report import views
from madmax_lib.view.report.marks import section

_HERE = Path(__file__).parent
_EXPLORE = _HERE.parent / "explore"
_SPANS = 600_000  # that the canvas holds; one takes some 4 bytes of the page
_RANKS = 8  # on the canvas
_LONGEST = 300  # letters of a name
_DEFINITIONS = (
    f"MAD-Max Workbench {__version__}. Compute, communication and idle time are "
    "unions over all streams of a rank; "
    "communication is exposed while no compute runs on the same rank."
)


@dataclass(frozen=True)
class Report:
    """Page about a timeline; in a notebook it shows itself.

    >>> page = report(timeline, "my run")                           # doctest: +SKIP
    >>> page.html[:15]                                              # doctest: +SKIP
    '<!DOCTYPE html>'
    """

    title: str  # names what was recorded
    html: str = field(repr=False)  # the complete page

    def _repr_html_(self):
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" '
            'style="width:100%;height:85vh;border:0"></iframe>'
        )


def report(
    timeline: Timeline,
    title: str = "trace",
    other_run: Timeline | None = None,
    other: str = "other",
) -> Report:
    """The views of a timeline as one page: overview, steps, operators, kernels,
    modules, memory, ranks, the trace.

    other_run: another run to compare with, called `other`. Raises ValueError for a
    timeline without a span.
    """
    if not len(require_type("timeline", timeline, Timeline)):
        raise ValueError("nothing to report: the timeline has no spans")
    recording = timeline
    timeline, _ = steady_state(recording)
    # of few ranks the calls are looked at one by one: all of them would fill the page
    detail = timeline.select(ranks=views.detail_ranks(timeline))
    parts = [
        views.overview(timeline, detail, peak(recording)),
        views.comparison(recording, other_run, (title, other)) if other_run else "",
        views.advice(timeline),
        views.step_view(recording),
        views.distributed(timeline),
        _trace(recording),
        views.operator_view(detail, timeline),
        views.kernel_view(timeline),
        views.module_view(detail, timeline),
        views.memory(recording.select(ranks=detail.ranks), recording),
    ]
    links = "".join(map(_link, parts))
    head = f"<header><h1>{html.escape(title)}</h1><nav>{links}</nav></header>"
    summary = paragraph(views.recording_summary(timeline, recording))
    # the canvas of the explorers, and what fills it from the page
    canvas = (_EXPLORE / "widgets.js").read_text()
    script = f"{canvas}\n{(_HERE / 'report.js').read_text()}"
    script = f'<script type="module">\n{script}</script>'
    body = "\n".join([head, summary, *parts, paragraph(_DEFINITIONS), script])
    style = (_HERE / "report.css").read_text()
    style += (_EXPLORE / "widgets.css").read_text()
    return Report(title, page(f"Trace report: {title}", body, style))


def _link(part):
    """A link to a section, which begins with its anchor and its heading."""
    heading = re.match(r'<section id="([^"]+)"><h2>(.*?)</h2>', part)
    return f'<a href="#{heading[1]}">{heading[2]}</a>' if heading else ""


def write_report(
    timeline: Timeline,
    path: str | Path,
    title: str,
    other_run: Timeline | None = None,
    other: str = "other",
) -> Path:
    """Write the `report` of a timeline; the file appears whole or not at all."""
    write_text(Path(path), report(timeline, title, other_run, other).html)
    return Path(path)


def _trace(timeline):
    """The canvas with its spans: device and host, of as many ranks and steps as a page
    can hold.
    """
    from madmax_lib.view.explore.canvas import columns  # late: a wing

    if busy_spans(timeline.spans).empty:
        return ""
    drawn = _part(timeline)
    about, data = columns([drawn], [""], hosts=True)
    about["names"] = [name[:_LONGEST] for name in about["names"]]
    packed_about = _packed(json.dumps(about).encode())
    packed_spans = _packed(_planes(data, about["count"]))
    attributes = f'data-about="{packed_about}" data-spans="{packed_spans}"'
    return section(
        "Trace",
        paragraph(_drawn_text(drawn, timeline)),
        f'<div id="canvas" {attributes}></div>',
    )


def _part(timeline):
    """The part that the canvas draws: a page can hold 600,000 spans of eight ranks."""
    loses = views.detail_ranks(timeline)
    others = [rank for rank in timeline.ranks if rank not in loses]
    ranks = [*loses, *others][:_RANKS]
    part = timeline.select(ranks=ranks)
    steps = part.steps
    while len(part) > _SPANS and len(steps) > 1:
        # half of the steps, around the middle one: they are like most
        steps = steps[(len(steps) + 1) // 4 :][: max(len(steps) // 2, 1)]
        part = part.select(steps=steps)
    while len(part) > _SPANS and len(ranks) > 1:
        ranks = ranks[: len(ranks) // 2]
        part = part.select(ranks=ranks)
    # where one rank and one step are still too many: those that start first
    order = part.spans["start_ns"].rank(method="first")
    return part.where(order <= _SPANS)


def _drawn_text(part, timeline):
    """A line that says which part is drawn; empty for all of it."""
    if len(part) == len(timeline):
        return ""
    ranks = ", ".join(map(str, part.ranks))
    steps = ", ".join(map(str, part.steps))
    return (
        f"Drawn: ranks {ranks} of {len(timeline.ranks)}, steps {steps} of "
        f"{len(timeline.steps)}."
    )


def _planes(data, count):
    """The columns so that they pack well: start and launch as differences, then all
    first bytes, all second, ...
    """
    # four int32 columns: start, duration, name, launch; what follows is kinds, bytes
    numbers = np.frombuffer(data[: 16 * count], "int32").reshape(4, count).copy()
    for column in (0, 3):
        numbers[column] = np.diff(numbers[column], prepend=np.int32(0))
    # (4 columns, count, 4 bytes) to (4 columns, 4 bytes, count): the high bytes of
    # neighbours are alike, and gzip finds runs of them
    planes = numbers.view("uint8").reshape(4, count, 4).transpose(0, 2, 1)
    return planes.tobytes() + data[16 * count :]


def _packed(data):
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
