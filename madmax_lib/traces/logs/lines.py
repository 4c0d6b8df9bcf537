"""Step times of consoles by a regular expression, of tables by a column, and of
traceml's final summary, which has means by rank.

A pattern names what it finds: step, one of s, ms, us or per_s (a rate), and optionally
rank, host and phase; a single group without a name is seconds. Known writers are rows
of `data/log_lines.csv`. Summary: traceml-ai 0.5.0, reporting/SCHEMA.md, schema 1.9.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from madmax_lib.catalog import tables
from madmax_lib.traces.logs.log import PACE, Log, assembled
from madmax_lib.traces.logs.torchtitan import blocks
from madmax_lib.traces.read.files import rank_in_name

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_HEAD = 1 << 20  # letters that tell the writer
_STEP = re.compile(r"_?step|iter(ation)?|global_step")
_TIME = re.compile(
    r"(total|duration|time|(step|iter\w*)([_-]?tim\w+)?)([_ (].*|_?[mu]?s\)?)?"
)
# of its columns what is around their names, some names, and phases
_AROUND = r"^\w+\.|_ms$"
_NAMES = {"global_rank": "rank", "hostname": "host", "step_time": "step"}
_PHASES = "^(step|input_wait|h2d|compute|forward|backward|optimizer)$"
_SCHEMAS = r"1\.(7|8|9|\d\d)"  # of traceml; earlier ones have other names


def read_lines(paths: Sequence[Path], pattern: str | None = None) -> Log:
    """The log of a console, or of one per rank. Raises ValueError where nothing in it
    is a step.
    """
    try:
        has_groups = re.compile(pattern or "()").groups
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: {error}") from None
    writers = tables.table("log_lines").set_index("writer")
    patterns = {"pattern": pattern} if pattern else dict(writers["pattern"])
    parts = []
    for path in paths:
        text = b"\n".join(blocks(path)).decode(errors="replace")
        text = _COLOURS.sub("", text).replace("\r", "\n")
        # the writer with most lines at the head
        counts = {
            name: len(re.findall(one, text[:_HEAD])) for name, one in patterns.items()
        }
        writer = max(counts, key=counts.get)
        matches = re.finditer(patterns[writer], text)
        rows = [
            match.groupdict() or {"s": match[has_groups and 1]} for match in matches
        ]
        parts.append(pd.DataFrame(rows).assign(file=str(path)))
    table = pd.concat(parts, ignore_index=True)
    if table.empty or not has_groups:
        raise ValueError(
            f"{paths[0]}: no line has a step time in a known form; give a pattern with "
            r"groups, such as 'step (?P<step>\d+) .* (?P<ms>[\d.]+) ms'"
        )
    seconds = pd.Series(index=table.index, dtype=float)
    for name in table.columns.intersection([*_UNITS, "per_s"]):
        value = table[name].str.replace(",", "").astype(float)
        # of a rate the inverse
        value = value * _UNITS[name] if name in _UNITS else 1 / value
        seconds = seconds.fillna(value)
    note = "" if pattern else writers["note"][writer]
    return of_rows(table.assign(seconds=seconds), writer, note)


def read_columns(paths: Sequence[Path], column: str | None = None) -> Log:
    """The log of CSV tables by the names of their columns: step, the time, and where
    they have them rank, host and phase.

    column: that of the time; its unit is its ending, seconds without one. Raises
    ValueError where there is none.
    """
    table = pd.concat([pd.read_csv(path).assign(file=str(path)) for path in paths])
    step = next(filter(_STEP.fullmatch, table), None)
    times = [name for name in table if _TIME.fullmatch(name) and name != step]
    name = column or next(iter(times), None)
    if name not in table:
        names = ", ".join(table.columns.drop("file"))
        raise ValueError(f"{paths[0]}: no column of step times in {names}")
    unit = re.split(r"[_( ]", name.rstrip(")"))[-1]
    seconds = table[name] * _UNITS.get(unit, 1.0)
    table = table.rename(columns={step: "step"})
    return of_rows(table.assign(seconds=seconds), "table")


def of_rows(table: pd.DataFrame, source: str, note: str = "") -> Log:
    """The log of rows: seconds, file, and where they have them step, rank, host, phase."""
    ranks = table["file"].map(
        {f: rank_in_name(Path(f)) or 0 for f in set(table["file"])}
    )
    blank = {"rank": ranks, "host": "", "phase": "step"}
    blank["step"] = table.groupby("file").cumcount() + 1
    table = table.assign(
        **{name: value for name, value in blank.items() if name not in table}
    )
    table = table.dropna(subset=["seconds", "step"])
    if table.empty:
        raise ValueError(
            f"{ranks.index.size} rows of {source}, and none has a step time"
        )
    table = table.astype({"step": float, "rank": int}).astype({"step": int})
    processes = table.groupby(["rank", "host"])
    # in order of the file: a step that a restart repeats has its later time
    keys = [processes.ngroup(), "step", "phase"]
    wide = table.groupby(keys)["seconds"].last().unstack()
    pace_s = wide["step"] if "step" in wide else wide.sum(axis=1)
    wide.columns = [("", name) for name in wide]
    wide[PACE] = pace_s
    return assembled(
        wide,
        processes["file"].last().reset_index(),
        tags={table["step"].min(): "start"},
        source=source,
        notes=(note,) * bool(note),
    )


def read_traceml(paths: Sequence[Path]) -> Log:
    """The log of a summary. Raises ValueError for schemas before 1.7, and for one
    without times of steps.
    """
    path = paths[-1]
    summary = json.loads(path.read_text())
    version = str(summary.get("schema_version"))
    if not re.fullmatch(_SCHEMAS, version) or not summary.get("step_time"):
        raise ValueError(f"{path}: schema {version} of traceml, or no step_time in it")
    table = pd.json_normalize([*summary["step_time"]["groups"]["rows"].values()])
    table.columns = table.columns.str.replace(_AROUND, "", regex=True)
    table = table.rename(columns=_NAMES)
    phases = table.filter(regex=_PHASES).columns
    table = table.melt(["rank", "host"], phases, "phase", "ms").astype({"ms": float})
    table = table.assign(step=0, file=str(path), seconds=table["ms"] / 1e3)
    return of_rows(table, "traceml", "means by rank: the log does not say since when")
