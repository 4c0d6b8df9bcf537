"""Report of a log: the pace over its steps, who is late, times of phases, as one page."""

import html
from pathlib import Path

import numpy as np

from madmax_lib.base.atomic import write_text
from madmax_lib.traces.logs.late import find_late
from madmax_lib.traces.logs.log import Log, step_table
from madmax_lib.view.notebooks.page import page, paragraph
from madmax_lib.view.report.marks import line, section, table

_STYLE = Path(__file__).parent / "report.css"


def write_log_report(log: Log, path: Path, title: str) -> Path:
    """Write the page; the file appears whole or not at all."""
    late = find_late(log)
    known = np.isfinite(log.pace_s) & log.counted
    text = "" if len(late) else "Nobody is late and the pace is steady."
    parts = [
        f"<header><h1>{html.escape(title)}</h1></header>",
        *map(paragraph, log.notes),
        section("Who is late", paragraph(text), table(late)),
    ]
    if known.any():
        curve = line(log.steps[known], log.pace_s[known], "seconds of a step")
        parts.append(section("Pace", curve))
    parts.append(section("Phases", table(step_table(log))))
    write_text(path, page(f"Log report: {title}", "\n".join(parts), _STYLE.read_text()))
    return path
