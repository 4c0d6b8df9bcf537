"""What `stragglers`, `steps`, `compare --gate` and `report` of `python -m madmax_lib`
answer about logs.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

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
    about |= {"steps": int(log.counted.sum()), "hidden": table.attrs["hidden"]}
    about["notes"] = list(log.notes)
    # means by rank have no steps
    enough = len(table) or about["steps"] >= _LEAST_STEPS or len(log.steps) == 1
    findings = table.drop(columns=["excess_s", "confidence"])
    return Answer(table, about, passed=True if enough else None, findings=findings)


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
    tables = answer.table, traces.step_table(log)
    body = html.escape(title).join(["<h1>", "</h1>"])
    body += "<p>".join(table.to_html(index=False) for table in tables)
    write_text(output, page(title, body))
    return Answer(answer.table, {"page": str(output)} | answer.summary)
