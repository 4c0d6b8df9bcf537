"""What does a performance engineer want to know first? One HTML file about a timeline,
which needs no network.
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
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.operators.memory import peak
from madmax_lib.traces.waits.step_times import steady_state
from madmax_lib.view.explore.canvas import busy_spans, columns
from madmax_lib.view.notebooks.page import page
from madmax_lib.view.report import views
from madmax_lib.view.report.marks import section, text

__all__ = ["Report", "report", "write_report"]

_HERE = Path(__file__).parent
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
    """A page about a timeline; in a notebook it shows itself.

    title: what was recorded. html: the whole page.
    """

    title: str
    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" '
            'style="width:100%;height:85vh;border:0"></iframe>'
        )


def report(
    timeline: Timeline,
    title: str = "trace",
    beside: Timeline | None = None,
    other: str = "other",
) -> Report:
    """The views of a timeline as one page: overview, steps, operators, kernels,
    modules, memory, ranks, the trace.

    beside: another run to compare with, called `other`. Raises ValueError for a
    timeline without a span.
    """
    if not len(require_type("timeline", timeline, Timeline)):
        raise ValueError("nothing to report: the timeline has no spans")
    whole = timeline
    (timeline, _) = steady_state(timeline)
    detail = timeline.select(ranks=views.detail_ranks(timeline))
    parts = [
        views.overview(timeline, detail, peak(whole)),
        views.comparison(whole, beside, (title, other)) if beside is not None else "",
        views.advice(timeline),
        views.step_view(whole),
        views.distributed(timeline, whole),
        _trace(whole),
        views.operator_view(detail, timeline),
        views.kernel_view(timeline),
        views.module_view(detail, timeline),
        views.memory(whole.select(ranks=detail.ranks), whole),
    ]
    links = "".join(
        f'<a href="#{anchor}">{name}</a>'
        for part in parts
        for anchor, name in re.findall(
            r'<section id="([^"]+)"><h2>(.*?)</h2>', part[:200]
        )
    )
    head = f"<header><h1>{html.escape(title)}</h1><nav>{links}</nav></header>"
    body = "\n".join(
        [head, text(views.told(timeline, whole)), *parts, text(_DEFINITIONS), _script()]
    )
    style = (_HERE / "report.css").read_text() + (
        _HERE.parent / "explore" / "widgets.css"
    ).read_text()
    return Report(title, page(f"Trace report: {title}", body, style))


def write_report(
    timeline: Timeline,
    path: str | Path,
    title: str,
    beside: Timeline | None = None,
    other: str = "other",
) -> Path:
    """Write the `report` of a timeline; the file appears whole or not at all."""
    write_text(Path(path), report(timeline, title, beside, other).html)
    return Path(path)


def _script() -> str:
    """The canvas of the explorers, and what fills it from the page."""
    canvas = (_HERE.parent / "explore" / "widgets.js").read_text()
    return (
        "<script "
        f'type="module">\n{canvas}\n{(_HERE / "report.js").read_text()}</script>'
    )


def _trace(timeline: Timeline) -> str:
    """The canvas with its spans: device and host, of as many ranks and steps as a page
    can hold.
    """
    if not len(busy_spans(timeline)):
        return ""
    drawn, said = _drawn(timeline)
    about, data = columns([drawn], [""], hosts=True)
    about["names"] = [name[:_LONGEST] for name in about["names"]]
    blobs = (
        _packed(json.dumps(about).encode()),
        _packed(_planes(data, about["count"])),
    )
    spans = f'<div id="canvas" data-about="{blobs[0]}" data-spans="{blobs[1]}"></div>'
    return section("Trace", text(said), spans)


def _drawn(timeline: Timeline) -> tuple[Timeline, str]:
    """The part that the canvas draws, and a line that says what it is."""
    loses = views.detail_ranks(timeline)
    ranks = sorted(
        [*loses, *[rank for rank in timeline.ranks if rank not in loses]][:_RANKS]
    )
    part = timeline.select(ranks=ranks)
    steps = part.steps
    while (
        len(part) > _SPANS and len(steps) > 1
    ):  # the steps around the middle one are like most
        steps = steps[(len(steps) + 1) // 4 :][: max(len(steps) // 2, 1)]
        part = part.select(steps=steps)
    while len(part) > _SPANS and len(ranks) > 1:
        ranks = (
            sorted(loses)[:1]
            if len(ranks) <= 2
            else sorted([*loses, *ranks])[: max(len(ranks) // 2, 1)]
        )
        part = part.select(ranks=sorted(set(ranks)))
    if len(part) > _SPANS:
        first = np.zeros(len(part), dtype=bool)
        first[np.argsort(part.spans["start_ns"].to_numpy(), kind="stable")[:_SPANS]] = (
            True
        )
        part = part.where(first)
    if len(part) == len(timeline):
        return part, ""
    ranks, steps = (
        ", ".join(map(str, numbers)) for numbers in (part.ranks, part.steps)
    )
    return (
        part,
        f"Drawn: ranks {ranks} of {len(timeline.ranks)}, steps {steps} of "
        f"{len(timeline.steps)}.",
    )


def _planes(data: bytes, count: int) -> bytes:
    """The columns so that they pack well: start and launch as differences, then all
    first bytes, all second, ...
    """
    numbers = np.frombuffer(data[: 16 * count], np.int32).reshape(4, count).copy()
    for column in (0, 3):
        numbers[column] = np.diff(numbers[column], prepend=np.int32(0))
    planes = numbers.view(np.uint8).reshape(4, count, 4).transpose(0, 2, 1)
    return planes.tobytes() + data[16 * count :]


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
