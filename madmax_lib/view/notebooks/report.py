"""What does a performance engineer want to know first? One self-contained HTML page from a directory of traces."""

import io
import re
from html import escape
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from madmax_lib import __version__
from madmax_lib.accounting import breakdown, top_kernels
from madmax_lib.atomic import write_text
from madmax_lib.timeline import Timeline
from madmax_lib.traces.advise import advise
from madmax_lib.traces.comm.collectives import exposed_by_collective, waiting
from madmax_lib.units import format_s
from madmax_lib.view.drawing import plural, shorten
from madmax_lib.view.notebooks.page import page, paragraph
from madmax_lib.view.plots.breakdown import (
    plot_advice,
    plot_breakdown,
    plot_exposed,
    plot_overlap,
    plot_timeline,
    plot_waiting,
)

__all__ = ["write_report"]

_MOST_RANKS_DRAWN = 16
_DEFINITIONS = (
    f"MAD-Max Workbench {__version__}. Compute, communication and idle time are unions over all streams of a rank; "
    "communication is exposed while no compute runs on the same rank."
)


def write_report(timeline: Timeline, path: str | Path, title: str) -> Path:
    """Write the report of a timeline; the file appears whole or not at all."""
    whole, timeline = timeline, timeline.select(steps=timeline.steps) if timeline.steps else timeline
    table = breakdown(timeline)
    with plt.style.context(Path(__file__).parents[1] / "paper.mplstyle"):
        sections = _sections(timeline, table)
    head = [f"<h1>{escape(title)}</h1>", paragraph(_about(whole), "about"), paragraph(_message(table), "message")]
    body = "\n".join([*head, *sections, paragraph(_DEFINITIONS, "about")])
    write_text(Path(path), page(f"Trace report: {title}", body))
    return Path(path)


def _sections(timeline: Timeline, table: pd.DataFrame) -> list[str]:
    by_collective, waits = exposed_by_collective(timeline), waiting(timeline)
    part = table.nlargest(_MOST_RANKS_DRAWN, "exposed_comm_s").sort_values("rank").reset_index(drop=True)
    drawn = timeline.select(ranks=list(part["rank"]))
    note = ""
    if len(part) < len(table):
        note = paragraph(f"Drawn: the {len(part)} of {len(table)} ranks with the most exposed communication.")
    sections = [_section("Where the time goes", note, _svg(plot_breakdown(part)), _table(table))]
    advice = advise(timeline)
    if len(advice):
        about = paragraph("What each fix would gain at most, per step and mean over the ranks; causes overlap.")
        sections.append(_section("What to fix first", about, _svg(plot_advice(advice)), _table(advice.head(12))))
    if table["comm_s"].sum() > 0:
        sections.append(_section("Overlap of communication and compute", note, _svg(plot_overlap(part))))
        per_rank = _table(by_collective) if len(table) <= _MOST_RANKS_DRAWN else ""
        sections.append(_section("Exposed communication", _svg(plot_exposed(by_collective)), per_rank))
    if len(waits) or waits.attrs["unmatched"]:
        text = "".join(map(paragraph, _about_waiting(waits)))
        few = len(waits) and len(timeline.ranks) <= _MOST_RANKS_DRAWN
        picture = _svg(plot_waiting(waits, ranks=timeline.ranks)) if few else ""
        sections.append(_section("Who waits for whom", text, picture, _table(waits.nlargest(10, "wait_s"))))
    what = "Top kernels" if (timeline.spans["stream"] >= 0).any() else "Top operators"
    sections.append(_section(what, _table(top_kernels(timeline, 20))))
    if part["total_s"].sum() > 0:
        sections.append(_section("Timeline of one step", note, _svg(plot_timeline(drawn))))
    return sections


def _about(timeline: Timeline) -> str:
    steps = f"{len(timeline.steps)} steps" if timeline.steps != [0] else "no step marks"
    device = timeline.meta.device or "no device named"
    missing = timeline.meta.world_size - len(timeline.ranks)
    absent = f" ({missing} of {timeline.meta.world_size} ranks have no trace here)" if missing > 0 else ""
    outside = breakdown(timeline.where(timeline.spans["step"] == -1))
    outside_s = (outside["total_s"] - outside["idle_s"]).mean() if timeline.steps else 0.0
    left = f". {format_s(outside_s)} of work per rank belong to no step and are not in the numbers" if outside_s else ""
    return f"{plural(len(timeline.ranks), 'rank')}{absent}, {steps}, {len(timeline):,} spans, {device}{left}"


def _message(table: pd.DataFrame) -> str:
    worst = table.loc[table["exposed_comm_s"].idxmax()]
    total_s = max(table["total_s"].sum(), 1e-12)
    return (
        f"{table['exposed_comm_s'].sum() / total_s:.1%} of the device time is exposed communication, "
        f"{table['idle_s'].sum() / total_s:.1%} is idle; rank {int(worst['rank'])} exposes most "
        f"({format_s(worst['exposed_comm_s'])} of {format_s(worst['total_s'])})."
    )


def _about_waiting(waits: pd.DataFrame) -> list[str]:
    lines = []
    if len(waits):
        by_last = waits.groupby("waits_for")["wait_s"].sum()
        rank, wait_s = by_last.idxmax(), by_last.max()
        of_all = f"of {format_s(by_last.sum())} in all"
        lines.append(f"Rank {rank} arrives last most: the others wait {format_s(wait_s)} for it, {of_all}.")
    if waits.attrs["one_group_assumed"]:
        lines.append("The traces name no process groups: all ranks are taken as one group.")
    for name, count in waits.attrs["unmatched"].items():
        lines.append(f"{count} calls of {name[:80]} are left out: the ranks made different numbers of them in a step.")
    return lines


def _section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(f'<div class="scroll">{part}</div>' for part in parts if part)


def _table(table: pd.DataFrame) -> str:
    """HTML of a table with times as text and text cells aligned left."""
    table = table.dropna(axis="columns", how="all")
    formats = {name: format_s for name in table if name.endswith("_s")}
    formats |= {"overlap": "{:.1%}".format, "share": "{:.1%}".format, "size_bytes": "{:,.0f}".format}
    formats |= {"name": lambda name: shorten(name, 90)}
    heads = {name: name.removesuffix("_s").replace("_", " ") for name in table}
    formatters = {heads[name]: formats[name] for name in heads.keys() & formats.keys()}
    layout = {"index": False, "border": 0, "justify": "right", "na_rep": ""}
    text = table.rename(columns=heads).to_html(formatters=formatters, **layout)
    return re.sub(r"<td>(?=[A-Za-z_(])", '<td class="text">', text)


def _svg(ax: Axes) -> str:
    buffer = io.StringIO()
    ax.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(ax.figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
