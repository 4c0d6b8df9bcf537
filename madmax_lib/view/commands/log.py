"""What `stragglers`, `steps`, `compare --gate` and `report` of `python -m madmax_lib`
answer about logs.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from madmax_lib import traces
from madmax_lib.base.atomic import write_text
from madmax_lib.view.commands.answers import Answer
from madmax_lib.view.notebooks.page import page

if TYPE_CHECKING:
    from madmax_lib.traces.logs.log import Log

_LEAST_STEPS = 12  # below it nobody can tell who is late


def stragglers(log: Log) -> Answer:
    """Who is late in a log."""
    table = traces.find_late(log)
    about = {"source": log.source, "ranks": len(log.units)}
    about["steps"] = int(log.counted.sum())
    if len(log.step_s):
        about["step_s"] = float(np.median(log.step_s))
    about |= {"hidden": table.attrs["hidden"], "notes": list(log.notes)}
    # means by rank have no steps
    enough = len(table) or about["steps"] >= _LEAST_STEPS or len(log.steps) == 1
    findings = table.drop(columns=["excess_s", "confidence"])
    return Answer(table, about, passed=bool(enough) or None, findings=findings)


def steps(log: Log) -> Answer:
    """Times of phases of a log, or bandwidth of its collectives."""
    return Answer(traces.step_table(log), stragglers(log).summary)


def gate(a: Log, b: Log, threshold: float) -> Answer:
    """Whether the steps of a log are slower than those of another."""
    table = traces.compare_logs(a, b, threshold)
    verdict = table["verdict"].item()
    passed = {"slower": False, "fine": True}.get(verdict)
    return Answer(table, {"verdict": verdict, "passed": passed is True}, passed=passed)


def report(log: Log, output: Path, title: str) -> Answer:
    """A page about a log: who is late, and times of phases."""
    answer = stragglers(log)
    parts = [f"<h1>{html.escape(title)}</h1>", *map(html.escape, log.notes)]
    parts += [
        table.to_html(index=False) for table in (answer.table, traces.step_table(log))
    ]
    write_text(output, page(f"Log report: {title}", "\n<p>".join(parts)))
    return Answer(answer.table, {"page": str(output)} | answer.summary)
