"""Step times of console logs by a regular expression, and of tables by a column.

A pattern names what it finds: step, one of s, ms, us or per_s (a rate), and optionally
rank, host and phase; a single group without a name is seconds. Known writers are rows
of `data/log_lines.csv`.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.catalog import tables
from madmax_lib.traces.logs.log import Log, Phase
from madmax_lib.traces.logs.torchtitan import blocks
from madmax_lib.traces.read.files import rank_in_name

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\s*(?:\[(?:rank|default)(\d+)\]:?|(\d+): )", re.M)
# `--timing-log-option all` of Megatron: a timer, then a line per rank
_TIMER = re.compile(r"^ *([\w-]+) ?\.*:\n((?: +rank +\d+: [\d.]+\n?)+)", re.M)
_RANK_TIME = re.compile(r"rank +(\d+): ([\d.]+)")
_HEAD = 1 << 20  # letters that tell the writer
_STEPS = ("step", "iteration", "iter", "global_step", "_step", "train/global_step")
_TIMES = ("step_s", "total_s", "duration_s", "step_time", "iteration-time", "time_s")
_TIMES += ("iteration_time", "iter_time", "train_step_timing", "time", "duration")
_CLOCKS = ("_runtime", "_timestamp", "wall_time")  # of which differences are steps


def read_lines(paths: Sequence[Path], pattern: str | None = None) -> Log:
    """The log of a console, or of one per rank. Raises ValueError where nothing in it
    is a step.
    """
    parts = []
    source = "console"
    for path in paths:
        text = b"\n".join(blocks(path)).decode(errors="replace")
        text = _COLOURS.sub("", text).replace("\r", "\n")
        source, found = ("pattern", re.compile(pattern)) if pattern else _writer(text)
        if found:
            rows = pd.DataFrame(_rows(text, found))
            parts.append(rows.assign(file=str(path)))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if table.empty:
        raise ValueError(
            f"{paths[0]}: no line has a step time that is known; give a pattern with "
            r"groups, such as 'step (?P<step>\d+) .* (?P<ms>[\d.]+) ms'"
        )
    # a rate per step without the batch: relative times
    notes = ("times are of a sample or token: only their changes count",)
    is_rate = source in ("DeepSpeed", "torchtitan")
    return of_rows(table, source, notes if is_rate else ())


def read_columns(paths: Sequence[Path], column: str | None = None) -> Log:
    """The log of tables, CSV or a JSON object per line, by the names of their columns.

    column: that of the time; its unit is its ending, seconds without one. Raises
    ValueError where there is none.
    """
    parts = []
    for path in paths:
        kind = pd.read_json if ".json" in path.suffixes else pd.read_csv
        how = {"lines": True} if ".json" in "".join(path.suffixes) else {}
        parts.append(kind(path, **how).assign(file=str(path)))
    return of_columns(pd.concat(parts, ignore_index=True), column)


def of_columns(table: pd.DataFrame, column: str | None = None) -> Log:
    """The log of a table that has a column of times, or a clock, and one of steps."""
    name = column or next((name for name in map(_named(table), _TIMES) if name), None)
    step = next((name for name in _STEPS if name in table), None)
    number = table[step] if step else table.groupby("file").cumcount() + 1
    table = table.assign(step=number).dropna(subset=["step"])
    if name is None or name not in table:
        clock = next((name for name in _CLOCKS if name in table), None)
        if clock is None or column:
            names = ", ".join(map(str, table.columns))
            raise ValueError(
                f"{table['file'].iloc[0]}: no column of step times in {names}"
            )
        of_file = table.groupby("file")
        seconds = of_file[clock].diff() / of_file["step"].diff()
    else:
        unit = re.split(r"[_(/. ]", name.rstrip(")"))[-1]
        seconds = table[name] * _UNITS.get(unit, 1.0)
    return of_rows(table.assign(seconds=seconds), "table", ())


def of_rows(table: pd.DataFrame, source: str, notes: tuple[str, ...]) -> Log:
    """The log of rows: step, seconds, file, and where they have them rank, host, phase."""
    table = table[np.isfinite(table["seconds"])]
    if "rank" not in table:
        by_file = {name: rank_in_name(Path(name)) for name in table["file"].unique()}
        ranks = dict.fromkeys(by_file.values())
        # files of one process are its starts; with a rank in each name they are ranks
        told = len(ranks) == len(by_file) and None not in ranks
        table = table.assign(rank=table["file"].map(by_file) if told else 0)
    blank = {name: "" for name in ("host", "phase") if name not in table}
    table = table.assign(**blank)
    keys = pd.MultiIndex.from_frame(table[["rank", "host"]])
    unit, units = pd.factorize(keys, sort=True)
    units = units.to_frame(index=False, name=keys.names)
    file = table["file"].groupby(unit).last()
    units = units.assign(group="", file=file.to_numpy())
    at, steps = pd.factorize(table["step"].to_numpy().astype(np.int64), sort=True)
    phases = {}
    for name, rows in table.groupby(table["phase"].replace("", "step")).indices.items():
        seconds = np.full((len(units), len(steps)), np.nan, np.float32)
        # in order of the file: a step that a restart repeats has its later time
        seconds[unit[rows], at[rows]] = table["seconds"].to_numpy()[rows]
        phases[name] = Phase(seconds, steps, np.zeros(len(units), int))
    tags = np.full(len(steps), "", dtype=object)
    first = at[np.diff(table["step"], prepend=np.inf) < 0]
    if len(units) == 1:
        tags[first] = "start"
    tags[0] = "start"
    return Log(
        source=source,
        units=units,
        steps=steps,
        pace_s=_pace_s(phases),
        tags=tags,
        phases=phases,
        together=len(units) > 1,
        notes=notes,
    )


def _pace_s(phases):
    """(steps,) the slowest rank's step, or that of all where steps are timed whole."""
    parts = [phase.seconds for name, phase in phases.items() if name != "step"]
    seconds = (
        phases["step"].seconds if "step" in phases else sum(map(np.nan_to_num, parts))
    )
    some = np.isfinite(seconds).any(axis=0)
    pace_s = np.full(seconds.shape[1], np.nan)
    pace_s[some] = np.nanmax(seconds[:, some], axis=0)
    return pace_s


def _named(table):
    """What finds a column by the beginning of its name."""
    names = [str(name) for name in table.columns]
    return lambda begin: next((name for name in names if name.startswith(begin)), None)


@lru_cache
def _patterns():
    rows = tables.table("log_lines").itertuples()
    return [(row.writer, re.compile(row.pattern)) for row in rows]


def _writer(text):
    """Name and pattern of the writer with most lines at the head of a text."""
    counts = [sum(1 for _ in one.finditer(text[:_HEAD])) for _, one in _patterns()]
    best = int(np.argmax(counts))
    return _patterns()[best] if counts[best] else ("console", None)


def _rows(text: str, pattern: re.Pattern) -> Iterator[dict]:
    """A row per step that a pattern finds, and per rank of a timer of Megatron."""
    has_ranks = bool(_PREFIX.search(text[:_HEAD]))
    steps = []
    for number, match in enumerate(pattern.finditer(text), 1):
        groups = match.groupdict() or {"s": match[1]}
        numbers = {
            name: float(groups[name].replace(",", ""))
            for name in ("step", *_UNITS, "per_s")
            if groups.get(name)
        }
        step = int(numbers.pop("step", number))
        steps.append((match.start(), step))
        (unit, value), *_ = numbers.items()
        seconds = value * _UNITS.get(unit, 1.0)
        if unit == "per_s":
            seconds = 1 / value if value else np.nan
        row = {"step": step, "seconds": seconds}
        row |= {name: groups[name] for name in ("host", "phase") if groups.get(name)}
        rank = groups.get("rank")
        if rank is None and has_ranks:
            line = text.rfind("\n", 0, match.start()) + 1
            prefix = _PREFIX.match(text, line)
            rank = prefix and (prefix[1] or prefix[2])
        yield row | ({"rank": int(rank)} if rank is not None else {})
    for match in _TIMER.finditer(text):
        # the iteration's own line stands before those of its timers
        before = [step for at, step in steps if at < match.start()]
        for rank, value in _RANK_TIME.findall(match[2]):
            row = {"rank": int(rank), "phase": match[1], "seconds": float(value) / 1e3}
            yield row | {"step": before[-1] if before else 0}
