"""What `stragglers`, `steps`, `compare --gate` and `report` of `python -m madmax_lib`
answer about logs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from madmax_lib.view.commands.answers import Answer

if TYPE_CHECKING:
    from madmax_lib.traces.logs.log import Log

_CHECKED_BYTES = 1 << 26
_LEAST_STEPS = 12  # below it nobody can tell who is late


def log_of(options) -> Log | None:
    """The log that a command is about, None where its paths are of traces."""
    from madmax_lib.traces.logs.read import find_log

    return find_log(options.traces, options.pattern, options.column)


def stragglers(log: Log) -> Answer:
    """Who is late in a log."""
    from madmax_lib.traces.logs.late import find_late

    table = find_late(log)
    about = _about(log) | {"hidden": table.attrs["hidden"]}
    columns = table.columns.drop(["excess_s", "confidence"])
    steps = max((phase.seconds.shape[1] for phase in log.phases.values()), default=0)
    enough = len(table) or steps >= _LEAST_STEPS or log.source == "traceml"
    if not enough:
        about["note"] = f"{steps} steps that count, {_LEAST_STEPS} tell who is late"
    return Answer(
        table,
        about,
        _files(log),
        passed=True if enough else None,
        findings=table[columns],
    )


def steps(log: Log) -> Answer:
    """Times of phases of a log, or bandwidth of its collectives."""
    from madmax_lib.traces.logs.log import step_table

    return Answer(step_table(log), _about(log), _files(log))


def gate(a: Log, b: Log, threshold: float) -> Answer:
    """Whether the steps of a log are slower than those of another."""
    from madmax_lib.traces.logs.compare import compare_logs

    table = compare_logs(a, b, threshold)
    of_step = table["verdict"].iloc[0]
    verdict = {"slower": "fail", "fine": "pass"}.get(of_step, of_step)
    about = {"verdict": verdict, "passed": verdict == "pass", "gate": threshold}
    passed = None if of_step == "cannot tell" else about["passed"]
    return Answer(table, about, [*_files(a), *_files(b)], passed)


def report(log: Log, output: Path, title: str) -> Answer:
    """A page about a log."""
    from madmax_lib.view.report.log_report import write_log_report

    page = write_log_report(log, output, title)
    answer = stragglers(log)
    return Answer(answer.table, {"page": str(page)} | answer.summary, _files(log))


def _about(log):
    about = {"source": log.source, "ranks": len(log.units)}
    if len(log.step_s):
        about |= {"steps": len(log.step_s), "step_s": float(np.median(log.step_s))}
    return about | {"notes": list(log.notes)}


def _files(log):
    files = [Path(name) for name in dict.fromkeys(log.units["file"])]
    size_bytes = sum(file.stat().st_size for file in files if file.is_file())
    # a day of logs is too large for a checksum
    names = files if size_bytes < _CHECKED_BYTES else [file.parent for file in files]
    return [str(name) for name in dict.fromkeys(names)]
