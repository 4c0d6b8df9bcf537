"""What do the commands of `python -m madmax_lib` answer about traces, snapshots of
memory and flight recorders?
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from madmax_lib.view.commands.answers import Answer, add_command

if TYPE_CHECKING:
    from madmax_lib.timeline.timeline import Timeline

__all__ = ["add"]

_BASELINES = Path(
    ".madmax"
)  # in the folder where the command runs: for the cache of a CI
_MOST = 4  # devices and failures in a summary
_LATE = """Which rank arrives last at collectives, over the steps that are neither warm-up nor cut: cost_s is what the
others waited for it, waited_s what it waited. slowdown: the kernels replayed without launch gaps as measured, over the
same with average times (replayed_s over without_s); left out where measured_over_replayed, the measured step over
replayed_s, exceeds 1.05. repaired_worst_ranks, repaired_last_stage: the share of replayed_s - without_s that average
times of the worst 3 %% of the ranks, or of the last stage, give back."""
_TRACES = {
    "nargs": "+",
    "metavar": "TRACE",
    "help": "traces, one per rank: files, directories, patterns",
}


def add(commands) -> None:
    """Add these commands."""
    breakdown = add_command(
        commands,
        "breakdown",
        _breakdown,
        help="compute, communication, idle time of each rank",
    )
    breakdown.add_argument("traces", **_TRACES)
    compare = add_command(
        commands,
        "compare",
        _compare,
        help="what differs between A and B; with --gate a verdict",
    )
    compare.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="A, then B: file, directory, pattern, or a baseline",
    )
    what = compare.add_mutually_exclusive_group()
    what.add_argument("--operations", action="store_true", help="a row per operation")
    what.add_argument(
        "--gate",
        type=_share,
        metavar="SHARE",
        help="status 1 if B is slower by this, such as 3%%; an "
        "operation only if it also costs a third of that of a step",
    )
    what.add_argument(
        "--save-baseline",
        metavar="NAME",
        help="keep the traces under this name in .madmax/",
    )
    stragglers = add_command(
        commands,
        "stragglers",
        _stragglers,
        help="which rank is late, and what it costs",
        description=_LATE,
    )
    stragglers.add_argument("traces", **_TRACES)
    flight = add_command(
        commands,
        "flight",
        _flight,
        help="which rank hangs a job, from flight-recorder dumps",
    )
    flight.add_argument(
        "dumps", help="directory with one dump per rank, such as nccl_trace_rank_0"
    )
    snapshot = add_command(
        commands,
        "snapshot",
        _snapshot,
        help="who holds a GPU's memory: CUDA memory snapshots",
    )
    snapshot.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="one per rank, or a directory with them",
    )
    snapshot.add_argument(
        "--by",
        default="site",
        choices=["site", "module", "phase", "metadata"],
        help="default: site",
    )
    snapshot.add_argument(
        "--at",
        default="peak",
        choices=["peak", "start", "end", "oom"],
        help="default: peak",
    )
    snapshot.add_argument(
        "--beside",
        metavar="FILE",
        help="an earlier one of the same rank: what has come since",
    )
    report = add_command(
        commands, "report", _report, help="one HTML page about a directory of traces"
    )
    report.add_argument("traces", **_TRACES)
    report.add_argument(
        "--beside", metavar="TRACES", help="another run to compare with"
    )
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        help="default: report.html",
    )


def read(paths: list[str]) -> Timeline:
    """The timeline of some paths. Raises ValueError where they hold no event."""
    from madmax_lib.traces.read.kineto import read_trace

    timeline = read_trace(paths if len(paths) > 1 else paths[0])
    if not len(timeline):
        raise ValueError(f"{paths[0]}: the trace holds no events")
    return timeline


def _ranks(timeline: Timeline) -> dict[str, int]:
    """How many ranks have a trace, and how many of the job have none."""
    missing = timeline.meta.world_size - sum(
        map(len, timeline.meta.represents.values())
    )
    return {"ranks": len(timeline.ranks)} | (
        {"ranks_without_trace": missing} if missing > 0 else {}
    )


def _breakdown(options: Namespace) -> Answer:
    from madmax_lib.timeline.accounting import breakdown
    from madmax_lib.traces.waits.step_times import lacks_step_marks

    timeline = read(options.traces)
    about = _ranks(timeline) | {
        "steps": len(timeline.steps),
        "device": timeline.meta.device,
    }
    if lacks_step_marks(timeline):
        about["note"] = "no step marks: the whole recording counts as one step"
    return Answer(breakdown(timeline), about)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if math.isnan(share) or (
        share >= 1 and not text.endswith("%")
    ):  # a forgotten % would let everything pass
        raise ArgumentTypeError(f"{text!r} is not a share such as 3% or 0.03")
    return share


def _recordings(paths: list[str]) -> list[Timeline]:
    """A recording per directory, pattern or baseline; several files are the ranks of
    one.
    """
    from madmax_lib.timeline.timeline import Timeline

    if len(paths) > 1 and not all(Path(path).is_file() for path in paths):
        return [recording for path in paths for recording in _recordings([path])]
    if not Path(paths[0]).exists() and (
        saved := sorted((_BASELINES / paths[0]).glob("*.parquet"))
    ):
        return [Timeline.load(path) for path in saved]
    try:
        return [read(paths)]
    except FileNotFoundError as error:
        known = ", ".join(sorted(path.name for path in _BASELINES.glob("*"))) or "none"
        raise FileNotFoundError(
            f"{error}, and no baseline of this name in {_BASELINES} ({known})"
        ) from None


def _save_baseline(options: Namespace) -> Answer:
    import pandas as pd

    name = options.save_baseline
    recordings = _recordings(options.traces)
    if not re.fullmatch(r"[\w.-]*\w", name):
        raise ValueError(
            f"--save-baseline {name!r}: a name has letters, digits, dots and dashes"
        )
    paths = [
        recording.save(_BASELINES / name / f"{n:03}.parquet")
        for n, recording in enumerate(recordings)
    ]
    for other in set((_BASELINES / name).glob("*.parquet")) - set(paths):
        other.unlink()
    rows = [
        (str(path), len(one.ranks), len(one.steps))
        for path, one in zip(paths, recordings, strict=True)
    ]
    return Answer(
        pd.DataFrame(rows, columns=["file", "ranks", "steps"]),
        {"baseline": name},
        options.traces,
    )


def _compare(options: Namespace) -> Answer:
    from madmax_lib.traces.diff import compare, compare_ops

    if options.save_baseline:
        return _save_baseline(options)
    first, *others = options.traces
    if not others:
        raise ValueError(
            "compare needs two: A and B, each a file, a directory, a pattern in "
            "quotes or a baseline"
        )
    a = _recordings([first])
    b = _recordings(others)
    if options.gate is not None:
        return _gate(a, b, options.gate)
    if len(b) > 1:
        raise ValueError(f"{others[1]}: only --gate takes several recordings of B")
    labels = f"a {first}", f"b {others[0]}"
    operations = compare_ops(a[0], b[0], labels=labels)
    most = operations.head(3)[["name", "kind", "difference_s"]].to_dict("records")
    return Answer(
        operations if options.operations else compare(a[0], b[0], labels=labels),
        {"most": most},
    )


def _gate(a: list[Timeline], b: list[Timeline], threshold: float) -> Answer:
    from madmax_lib.traces.gate import gate

    result = gate(a, b, threshold)
    table = result.table
    columns = ["operation", "kind", "rank", "difference_s", "ratio"]
    of_step = (table["verdict"] == "cannot tell") & (
        table["kind"] == ""
    )  # of operations the table says it
    unclear = table[of_step].set_index("quantity")["detectable"]
    about = {
        "passed": result.passed,
        "gate": threshold,
        "slower": list(table["quantity"][table["verdict"] == "slower"]),
    }
    explanation = result.explanation[columns]
    ranks = explanation["rank"].astype(object).where(explanation["rank"] >= 0, "all")
    about |= {
        "explanation": explanation.assign(rank=ranks).to_dict("records"),
        "cannot_tell_below": dict(unclear),
    }
    about |= {"alike": result.alike} if result.alike != 1 else {}
    return Answer(table, about, passed=result.passed)


def _stragglers(options: Namespace) -> Answer:
    from madmax_lib.traces.stragglers import stragglers, what_if_no_stragglers
    from madmax_lib.traces.waits.step_times import steady_state

    timeline, steps = steady_state(whole := read(options.traces))
    table = stragglers(timeline)
    about = _ranks(timeline) | {"steps": len(steps)}
    about["last_beyond_chance"] = (
        ", ".join(map(str, table.attrs["often_last"])) or "no rank"
    )
    about["not_counted"] = [f"step {step}" for step in whole.steps if step not in steps]
    if steps:
        without = what_if_no_stragglers(timeline)
        about |= {
            "replayed_s": without.T_replay,
            "measured_over_replayed": without.replay_gap,
        }
        if without.gaps_rule:
            rules = (
                "what a replay leaves out (launch gaps, work of other steps) "
                "rules this step"
            )
            about |= {
                "slowdown": None,
                "note": f"{rules}: no slowdown follows from it, go by cost_s",
            }
            return Answer(table, about)
        about |= {"slowdown": without.S, "without_s": without.T_ideal}
        if without.costs:
            about |= {
                "repaired_worst_ranks": without.M_W,
                "repaired_last_stage": without.M_S,
            }
        about["slowdown_by_kind"] = dict(without.by_kind)
        table.insert(1, "slowdown", table["rank"].map(without.by_rank))
    return Answer(table, about)


def _flight(options: Namespace) -> Answer:
    from madmax_lib.traces.forensics.flight_recorder import (
        flight_calls,
        flight_findings,
        lateness,
    )

    calls = flight_calls(options.dumps)
    findings = flight_findings(calls)
    late = lateness(calls).head(3)
    about = {
        "ranks": len(calls.attrs["dumped"]),
        "calls": len(calls),
        "latest": late.to_dict("records"),
    }
    if findings.empty:
        about["findings"] = (
            f"none, {about['ranks']} ranks agree in their {len(calls):,} calls and "
            "all are done"
        )
    return Answer(findings, about, passed=findings.empty)


def _snapshot(options: Namespace) -> Answer:
    from madmax_lib.traces.forensics import snapshots as of
    from madmax_lib.traces.forensics.read_snapshots import read_snapshot

    taken = read_snapshot(options.files)
    peaks = of.snapshot_peak(taken)
    free = of.fragmentation(taken)
    full = of.out_of_memory(taken)
    peaks = peaks.nlargest(_MOST, "peak_bytes")
    free = free.merge(peaks[["rank", "device"]][:1])  # of the fullest device
    about = {"peaks": peaks, "free": free, "out_of_memory": full[-_MOST:]}
    about = {name: table.to_dict("records") for name, table in about.items()}
    if options.beside:
        before = read_snapshot(options.beside)
        return Answer(
            of.snapshot_diff(before, taken, options.by, options.at),
            about,
            [options.beside],
        )
    return Answer(of.snapshot_held(taken, options.by, options.at, top=None), about)


def _report(options: Namespace) -> Answer:
    from madmax_lib.timeline.accounting import breakdown
    from madmax_lib.traces.advise import advise
    from madmax_lib.traces.waits.step_times import steady_state
    from madmax_lib.view.report.report import write_report

    if options.output.is_dir():
        raise IsADirectoryError(
            f"{options.output}: is a directory, give the name of a file for the report"
        )
    timeline = read(options.traces)
    (first, *more) = options.traces
    name = Path(first).resolve().name
    other = options.beside
    compared = (
        {"beside": read([other]), "other": Path(other).resolve().name} if other else {}
    )
    path = write_report(
        timeline,
        options.output,
        f"{name} and {len(more)} more" if more else name,
        **compared,
    )
    timeline, steps = steady_state(whole := timeline)
    first = (
        advise(timeline)[["cause", "where", "gain_s", "share"]]
        .head(_MOST)
        .to_dict("records")
    )
    about = {
        "page": str(path),
        "ranks": len(whole.ranks),
        "spans": len(whole),
        "steps": len(steps),
        "advice": first,
    }
    return Answer(breakdown(timeline), about)
