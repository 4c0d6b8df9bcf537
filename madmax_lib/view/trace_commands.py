"""What do `breakdown`, `compare`, `stragglers`, `flight` and `report` of `python -m madmax_lib` answer about traces?"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from madmax_lib.view.answers import Answer, add_command

if TYPE_CHECKING:
    from madmax_lib.timeline import Timeline

__all__ = ["add"]

_TRACES = {"nargs": "+", "metavar": "TRACE", "help": "traces, one per rank: files, directories, patterns"}


def add(commands) -> None:
    """Add these commands."""
    breakdown = add_command(commands, "breakdown", _breakdown, help="compute, communication, idle time of each rank")
    breakdown.add_argument("traces", **_TRACES)
    compare = add_command(commands, "compare", _compare, help="what differs between A and B, per rank and step")
    compare.add_argument("traces", nargs="+", metavar="TRACE", help="A, then B: a file, directory or pattern each")
    compare.add_argument("--operations", action="store_true", help="a row per operation")
    stragglers = add_command(commands, "stragglers", _stragglers, help="who arrives last, and what it costs the others")
    stragglers.add_argument("traces", **_TRACES)
    flight = add_command(commands, "flight", _flight, help="who hangs a job: dumps of PyTorch's flight recorder")
    flight.add_argument("dumps", help="directory with one dump per rank, such as nccl_trace_rank_0")
    report = add_command(commands, "report", _report, help="one HTML page about a directory of traces")
    report.add_argument("traces", **_TRACES)
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")


def read(paths: list[str]) -> Timeline:
    """The timeline of some paths. Raises ValueError where they hold no event."""
    from madmax_lib.traces.read.kineto import read_trace

    timeline = read_trace(paths if len(paths) > 1 else paths[0])
    if not len(timeline):
        raise ValueError(f"{paths[0]}: the trace holds no events")
    return timeline


def _breakdown(options: Namespace) -> Answer:
    from madmax_lib.accounting import breakdown

    timeline = read(options.traces)
    about = {"ranks": len(timeline.ranks), "steps": len(timeline.steps), "device": timeline.meta.device}
    return Answer(breakdown(timeline), about)


def _compare(options: Namespace) -> Answer:
    from madmax_lib.traces.diff import compare, compare_ops

    first, *others = options.traces
    if not others:
        raise ValueError("compare needs two: A and B, each a file, a directory or a pattern in quotes")
    sides = read([first]), read(others)
    labels = f"a {first}", f"b {others[0]}"
    operations = compare_ops(*sides, labels=labels)
    most = operations.head(3)[["name", "kind", "difference_s"]].to_dict("records")
    return Answer(operations if options.operations else compare(*sides, labels=labels), {"most": most})


def _stragglers(options: Namespace) -> Answer:
    from madmax_lib.traces.stragglers import stragglers, what_if_no_stragglers

    timeline = read(options.traces)
    table, about = stragglers(timeline), {"ranks": len(timeline.ranks)}
    if timeline.steps:
        without = what_if_no_stragglers(timeline)
        about |= {"slowdown": without.S, "step_s": without.T_replay, "without_s": without.T_ideal}
        about |= {"repaired_worst_ranks": without.M_W, "repaired_last_stage": without.M_S}
        about["slowdown_by_kind"] = dict(without.by_kind)
        table.insert(1, "slowdown", table["rank"].map(without.by_rank))
    return Answer(table, about)


def _flight(options: Namespace) -> Answer:
    from madmax_lib.traces.flight_recorder import flight_calls, flight_findings, lateness

    calls = flight_calls(options.dumps)
    findings, late = flight_findings(calls), lateness(calls).head(3)
    about = {"ranks": len(calls.attrs["dumped"]), "calls": len(calls), "latest": late.to_dict("records")}
    return Answer(findings, about, passed=findings.empty)


def _report(options: Namespace) -> Answer:
    import matplotlib

    matplotlib.use("agg")
    from madmax_lib.accounting import breakdown
    from madmax_lib.view.notebooks.report import write_report

    if options.output.is_dir():
        raise IsADirectoryError(f"{options.output}: is a directory, give the name of a file for the report")
    timeline, (first, *more) = read(options.traces), options.traces
    name = Path(first).resolve().name
    path = write_report(timeline, options.output, title=f"{name} and {len(more)} more" if more else name)
    about = {"page": str(path), "ranks": len(timeline.ranks), "spans": len(timeline)}
    return Answer(breakdown(timeline), about)
