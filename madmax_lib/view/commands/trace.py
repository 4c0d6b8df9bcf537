"""Commands of `python -m madmax_lib` about traces, snapshots of memory and flight
recorders.
"""

import math
import re
import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from madmax_lib import traces
from madmax_lib.base.atomic import write_text
from madmax_lib.runs.ready import summary_line
from madmax_lib.view.commands.answers import Answer, add_command
from madmax_lib.view.notebooks.page import page

if TYPE_CHECKING:
    from madmax_lib.timeline.timeline import Timeline

# in the folder where the command runs: for the cache of a CI
_BASELINES = Path(".madmax")
_MOST = 4  # devices and failures in a summary
_MOST_OPERATIONS = 3  # that differ most
_LEAST_STEPS = 12  # of a log, below which nobody can tell who is late
_LOOK_S = 0.2  # for ranks whose trace is not there yet, a minute long
_LOOKS = 300
_MOST_UNEXPLAINED = 0.2  # of the step: a replay that leaves more tells no slowdown
_LEAST_COST = 0.01  # of the step: stragglers that cost less say nothing


def add(commands) -> None:
    """Add these commands."""

    def breakdown(options):
        timeline = read(options.traces)
        return _parts(timeline, {"device": timeline.meta.device})

    def history(options):
        table = traces.history(options.runs)
        return Answer(table, table.attrs)

    answers = (breakdown, _cut, _compare, _stragglers, _steps, history, _flight)
    for answer in (*answers, _snapshot, _report):
        add_command(commands, answer, share=_share, steps=_span)


def read(paths: list[str]) -> "Timeline":
    """The timeline of some paths. Raises ValueError where they hold no event."""
    timeline = traces.read_trace(paths if len(paths) > 1 else paths[0])
    if not len(timeline):
        raise ValueError(f"{paths[0]}: the trace holds no events")
    return timeline


def _ranks(timeline):
    """Number of ranks that have a trace, of those of the job that have none, and a word
    on steps that nothing marks.
    """
    from madmax_lib.traces.tables import unseen_ranks
    from madmax_lib.traces.waits.step_times import step_note

    about = {"ranks": len(timeline.ranks)}
    if unseen := unseen_ranks(timeline):
        about["missing"] = unseen[0]
    if note := step_note(timeline):
        about["note"] = note
    return about


def _others(recording, steps):
    """Names of the steps that are not among those that count."""
    return [f"step {step}" for step in recording.steps if step not in steps]


def _span(text):
    try:
        numbers = list(map(int, text.split(":")))
        return range(numbers[0], numbers[-1] + 1)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a range such as 3:5") from None


def _cut(options):
    timeline = read(options.traces)
    if options.steps is None:
        part = traces.window(timeline, vars(options)["from"], options.to)
    else:
        steps = [step for step in timeline.steps if step in options.steps]
        if not steps:
            raise ValueError(f"none of these steps; the trace has {timeline.steps}")
        part = traces.only_steps(timeline, steps)
    paths = traces.export_trace(part, options.output)
    about = _ranks(part) | {"files": list(map(str, paths))}
    return Answer(traces.breakdown(part), about)


def _parts(recording, about):
    """Answer of a breakdown by parts, of the steps that count and of what lies outside
    of all; its headline, after what is known about it: a step, the shares of the steps'
    time, and the work outside in s per rank.
    """
    import pandas as pd

    # of warm-up no other step has its share
    steady, counted = traces.steady_state(recording)
    rows = traces.breakdown(steady, steps=True).query("part == 'steps'")
    times_s = rows.sum(numeric_only=True)
    names = ["compute_s", "exposed_comm_s", "idle_s"]
    shares = times_s[names] / (times_s["total_s"] or math.nan)
    outside = traces.breakdown(recording, steps=True).query("part != 'steps'")
    work_s = (outside["total_s"] - outside["idle_s"]).groupby(outside["part"]).sum()
    outside_s = work_s / len(recording.ranks)
    table = pd.concat([rows, outside]).sort_values("rank", kind="stable")
    summary = _ranks(recording) | {
        "steps": len(recording.steps),
        "not_counted": _others(recording, counted),
        "step_s": traces.step_s(recording),
        "share_of_device_time": dict(
            shares.rename(lambda name: name.removesuffix("_s"))
        ),
        "work_outside_steps_s": dict(outside_s),
    }
    return Answer(table, about | summary)


def _share(text):
    is_percent = text.endswith("%")
    try:
        share = float(text.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        share = math.nan
    # 3 for 3%, a forgotten %, would let everything pass
    if not 0 < share < 1:
        raise ArgumentTypeError(f"{text!r} is not a share such as 3% or 0.03")
    return share


def _recordings(paths):
    """A recording per directory, pattern or baseline; several files are the ranks of
    one.
    """
    from madmax_lib.timeline.timeline import Timeline

    if len(paths) > 1 and not all(Path(path).is_file() for path in paths):
        return [recording for path in paths for recording in _recordings([path])]
    path = Path(paths[0])
    if path.suffix == ".parquet" and path.is_file():
        return [Timeline.load(path)]
    if not path.exists():
        baseline = sorted((_BASELINES / path).glob("*.parquet"))
        if baseline:
            return [Timeline.load(path) for path in baseline]
    try:
        return [read(paths)]
    except FileNotFoundError as error:
        names = ", ".join(sorted(path.name for path in _BASELINES.glob("*"))) or "none"
        there = f"no baseline of this name in {_BASELINES} ({names})"
        raise FileNotFoundError(f"{error}, and {there}") from None


def _save_baseline(options):
    import pandas as pd

    name = options.save_baseline
    recordings = _recordings(options.traces)
    if not re.fullmatch(r"[\w.-]*\w", name):
        rule = "a name has letters, digits, dots and dashes"
        raise ValueError(f"--save-baseline {name!r}: {rule}")
    folder = _BASELINES / name
    files = []
    rows = []
    # numbered in the order of the paths
    for number, recording in enumerate(recordings):
        files.append(recording.save(folder / f"{number:03}.parquet"))
        rows.append((str(files[-1]), len(recording.ranks), len(recording.steps)))
    # recordings of an earlier baseline of this name
    for other in set(folder.glob("*.parquet")) - set(files):
        other.unlink()
    table = pd.DataFrame(rows, columns=["file", "ranks", "steps"])
    return Answer(table, {"baseline": name}, options.traces)


def _compare(options):
    if options.save_baseline:
        return _save_baseline(options)
    first, *others = options.traces
    if not others:
        raise ValueError(
            "compare needs two: A and B, each a file, a directory, a pattern in "
            "quotes or a baseline"
        )
    if options.gate is not None:
        pair = [traces.find_log([path]) for path in options.traces]
        if None not in pair and len(pair) == 2:
            table = traces.compare_logs(*pair, options.gate)
            verdict = table["verdict"].item()
            passed = {"slower": False, "fine": True}.get(verdict)
            words = {False: "fail", True: "pass", None: verdict}
            about = {"verdict": words[passed], "passed": passed is True}
            return Answer(table, about, passed=passed)
    a = _recordings([first])
    b = _recordings(others)
    # a gate has repeats on both sides, a comparison one recording each
    if options.gate is not None:
        return _gate(a, b, options.gate)
    if len(b) > 1:
        raise ValueError(f"{others[1]}: only --gate takes several recordings of B")
    labels = f"a {first}", f"b {others[0]}"
    # the headline names operations, whichever table is asked for
    table = operations = traces.compare_ops(a[0], b[0], labels=labels)
    if not options.operations:
        table = traces.compare(a[0], b[0], labels=labels)
    most = operations.head(_MOST_OPERATIONS)[["name", "kind", "difference_s"]]
    # of the ranks that both sides have, as the rows are
    ranks = sorted({*a[0].ranks} & {*b[0].ranks})
    common = (one.where(one.spans["rank"].isin(ranks)) for one in (a[0], b[0]))
    about = {
        "ranks": len(ranks),
        "step_s": dict(zip("ab", map(traces.step_s, common), strict=True)),
    }
    return Answer(table, about | {"most": most.to_dict("records")})


def _gate(a, b, threshold):
    result = traces.gate(a, b, threshold)
    table = result.table
    slower = table["quantity"][table["verdict"] == "slower"]
    about = {"verdict": result.verdict, "slower": list(slower), "note": result.too_few}
    about |= {"passed": result.passed, "gate": threshold}
    columns = ["operation", "kind", "rank", "difference_s", "ratio"]
    explanation = result.explanation[columns]
    ranks = explanation["rank"].astype(object).where(explanation["rank"] >= 0, "all")
    about["explanation"] = explanation.assign(rank=ranks).to_dict("records")
    # quantities of the step alone, which have no kind; of operations the table says it
    unclear = (table["verdict"] == "cannot tell") & (table["kind"] == "")
    unclear = table[unclear].set_index("quantity")
    about["measured_ratio"] = dict(unclear["ratio"])
    about["cannot_tell_below"] = dict(unclear["detectable"])
    # all operations changed alike: the machine rather than the program
    if result.host_factor != 1:
        about["all_operations"] = result.host_factor
    passed = {"pass": True, "fail": False}.get(result.verdict)
    return Answer(table, about, passed=passed)


def _steps(options):
    if log := _log(options):
        about = {
            "source": log.source,
            "ranks": len(log.units),
            "notes": list(log.notes),
        }
        return Answer(traces.step_table(log), about)
    timeline = read(options.traces)
    return Answer(traces.step_summary(timeline), _ranks(timeline))


def _late(log):
    table = traces.find_late(log)
    steps = int(log.counted.sum())
    about = {"source": log.source, "ranks": len(log.units), "steps": steps}
    about |= {"hidden": table.attrs["hidden"], "notes": list(log.notes)}
    # means by rank are of one step
    enough = len(table) or steps >= _LEAST_STEPS or len(log.steps) == 1
    findings = table.drop(columns=["excess_s", "confidence"])
    return Answer(table, about, passed=True if enough else None, findings=findings)


def _log(options):
    """The log that a command is about, None where its paths are of traces."""
    return traces.find_log(options.traces, options.pattern, options.column)


def _late_ranks(table, timeline, steps):
    """Ranks of a trace that are last beyond chance, as findings of logs have them."""
    # the others wait at once: their mean is what the step would be shorter
    waiting_s = (len(table) - 1) * traces.breakdown(timeline)["total_s"].median()
    share = table["exposed_cost_s"] / waiting_s
    late = table[["rank"]].assign(
        host=None, phase=None, since_step=min(steps, default=None)
    )
    is_late = table["rank"].isin(table.attrs["often_last"]) & (share >= _LEAST_COST)
    return late.assign(cost_share=share, kind="late")[is_late]


def _stragglers(options):
    if log := _log(options):
        return _late(log)
    recording = read(options.traces)
    timeline, steps = traces.steady_state(recording)
    table = traces.stragglers(timeline)
    about = _ranks(timeline) | {"steps": len(steps)}
    often_last = ", ".join(map(str, table.attrs["often_last"]))
    about["last_beyond_chance"] = often_last or "no rank"
    about["not_counted"] = _others(recording, steps)
    late = _late_ranks(table, timeline, steps)
    if not steps:
        return Answer(table, about, findings=late)
    replay = traces.what_if_no_stragglers(timeline)
    about["replayed_s"] = replay.T_replay
    about["measured_over_replayed"] = replay.replay_gap
    # the replay has no launch gaps: where these rule, it says nothing
    missing = 1 - 1 / replay.replay_gap
    is_told = missing < _MOST_UNEXPLAINED
    if replay.gaps_rule:
        note = f"the replay leaves {missing:.0%} of the step to launch gaps and idling"
        note += "" if is_told else ": use cost_s, not a slowdown"
        about["note"] = "; ".join(filter(None, [about.get("note"), note]))
    if not is_told:
        about["slowdown"] = None
        return Answer(table, about, findings=late)
    about |= {"slowdown": replay.S, "without_s": replay.T_ideal}
    # a repair of nothing has no share
    if replay.costs:
        about["repaired_worst_ranks"] = replay.M_W
        about["repaired_last_stage"] = replay.M_S
    about["slowdown_by_kind"] = dict(replay.by_kind)
    # beside the rank: the column to look at
    table.insert(1, "slowdown", table["rank"].map(replay.by_rank))
    return Answer(table, about, findings=late)


def _flight(options):
    calls = traces.flight_calls(options.dumps)
    findings = traces.flight_findings(calls)
    # who calls last on average, also where no rule is broken
    late = traces.lateness(calls).head(3)
    ranks = len(calls.attrs["dumped"])
    about = {"ranks": ranks, "calls": len(calls), "latest": late.to_dict("records")}
    if findings.empty:
        who = f"{ranks} ranks agree" if ranks > 1 else "one rank agrees with itself"
        agree = f"{who} on their {len(calls):,} calls, all completed"
        about["findings"] = f"none, {agree}"
    return Answer(findings, about, passed=findings.empty)


def _snapshot(options):
    snapshot = traces.read_snapshot(options.files)
    peaks = traces.snapshot_peak(snapshot).nlargest(_MOST, "peak_bytes")
    free = traces.fragmentation(snapshot)
    failures = traces.out_of_memory(snapshot)
    tables = {
        "peaks": peaks,
        "free": free.merge(peaks[["rank", "device"]][:1]),  # of the fullest device
        "out_of_memory": failures[-_MOST:],
    }
    about = {name: table.to_dict("records") for name, table in tables.items()}
    how = (options.by, options.at)
    # what has come since: allocations of this one that the earlier one lacks
    if options.beside:
        table = traces.snapshot_diff(
            traces.read_snapshot(options.beside), snapshot, *how
        )
        return Answer(table, about, [options.beside])
    return Answer(traces.snapshot_held(snapshot, *how, top=None), about)


def _report(options):
    from madmax_lib.view.report.report import write_report

    output = options.output
    # before the traces are read, which takes a while
    if output.is_dir():
        need = "give the name of a file for the report"
        raise IsADirectoryError(f"{output}: is a directory, {need}")
    folder = Path(options.traces[0])
    for _ in range(_LOOKS):
        if len([*folder.glob("trace_rank*")]) >= options.ranks:
            break
        time.sleep(_LOOK_S)
    if log := _log(options):
        tables = (traces.find_late(log), traces.step_table(log))
        text = "<p>".join(table.to_html(index=False) for table in tables)
        write_text(output, page(Path(options.traces[0]).resolve().name, text))
        return Answer(tables[0], {"page": str(output)})
    recording = read(options.traces)
    first, *more = options.traces
    title = Path(first).resolve().name
    if more:
        title += f" and {len(more)} more"
    other = {}
    if options.beside:
        name = Path(options.beside).resolve().name
        other = {"other_run": read([options.beside]), "other": name}
    path = write_report(recording, output, title, **other)
    causes = traces.advise(recording)[["cause", "where", "gain_s", "share"]].head(_MOST)
    about = {"page": str(path)}
    if options.baseline:
        about["baseline"] = str(recording.save(options.baseline))
        about["overlap"] = summary_line(recording)
    about |= {"spans": len(recording), "advice": causes.to_dict("records")}
    return _parts(recording, about)
