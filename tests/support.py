"""What tests share: inputs by name that skip with the reason when absent, and small
timelines.
"""

import ast
import json
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from madmax_lib.calibration.judge.intervals import class_of
from madmax_lib.calibration.verdict.accuracy import coverage
from madmax_lib.catalog.datasets import dataset, local_data
from madmax_lib.catalog.software import STACKS
from madmax_lib.plan.case import Case
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.rules import STATED
from madmax_lib.planner.space import (
    legal_degrees,
    pass_choices,
    plan_of,
    sharding_choices,
)
from madmax_lib.runs import testbed
from madmax_lib.simulator.costs.schedules import order
from madmax_lib.timeline.side_tables import SIDE_TABLES, SideTables, conform
from madmax_lib.timeline.timeline import Meta, Timeline


def _without_namespaces() -> str:
    """Why hosts cannot be made here, "" where they can."""
    try:
        testbed.check_hosts(2, "", (), 2)
    except OSError as error:
        return str(error)
    return ""


needs_namespaces = pytest.mark.skipif(
    bool(reason := _without_namespaces()), reason=reason
)
EPOCH_NS = 1_700_000_000_000_000_000
CPU_CONSTANTS = {
    "gemm_efficiency:other-16": 0.6,
    "attention_efficiency:other": 0.25,
    "pointwise_factor:eager": 3.0,
}
CPU_CONSTANTS |= {
    "launch_s:eager": 2e-5,
    "step_s:eager": 6e-3,
    "comm_launch_s:eager": 2e-3,
    "optimizer_factor": 1.5,
}
CPU_CONSTANTS |= {"alone": 0.7}  # of a known machine, for calibrations to find


def local_or_skip(relative: str) -> Path:
    """A file of the data directories, or a skip that names it."""
    try:
        return local_data(relative)
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


def dataset_or_skip(name: str) -> Path:
    """A registered dataset on this machine, or a skip that names it; tests never
    download.
    """
    try:
        return dataset(name, download=False)
    except FileNotFoundError as reason:
        pytest.skip(str(reason))


def rows_beside(test_file: str, name: str) -> list:
    """Rows of the table `name`.json in the folder of a test."""
    return json.loads((Path(test_file).parent / f"{name}.json").read_text())


def cells(text: str, literal: bool = True) -> list[tuple]:
    """Rows of a table in a text: one a line, `|` between cells, each a literal (8, None,
    [0, 1], {"tp": 2}) or else, or without literals, the text it is.
    """

    def value(cell):
        try:
            return ast.literal_eval(cell) if literal else cell
        except (SyntaxError, ValueError):
            return cell

    lines = filter(None, map(str.strip, text.splitlines()))
    return [tuple(value(cell.strip()) for cell in line.split("|")) for line in lines]


def coverage_by_class(table, reference=None) -> pd.DataFrame:
    """Rows, share inside and median half-width of `coverage`: by class, and of all."""
    rows = coverage(table, reference).assign(part=class_of(table))
    parts = pd.concat([rows, rows.assign(part="all")]).groupby("part")
    return parts.agg(
        rows=("inside", "size"),
        inside=("inside", "mean"),
        half_width=("half_width", "median"),
    )


@contextmanager
def refused(*words, error=ValueError):
    """What is done here is refused by a message that holds these words; " & " parts
    words that stand in one text.
    """
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    del caught  # frees what the error holds, such as a socket
    missing = [w for text in words for w in str(text).split(" & ") if w not in said]
    assert not missing, f"{missing} is not in: {said}"


def make_timeline(rows: list[tuple], **meta) -> Timeline:
    """Timeline of (rank, stream, kind, name, start_ns, dur_ns[, correlation[, step]])
    rows.
    """
    columns = [
        "rank",
        "stream",
        "kind",
        "name",
        "start_ns",
        "dur_ns",
        "correlation",
        "step",
    ]
    spans = pd.DataFrame(
        [(*row, -1, 0)[:8] if len(row) < 7 else (*row, 0)[:8] for row in rows],
        columns=columns,
    )
    return Timeline(
        spans.assign(op=-1, group=None, size_bytes=float("nan")), Meta(**meta)
    )


def lanes(drawn: str) -> list[tuple]:
    """Rows for `make_timeline` from lines of
    `rank/stream kind: name start+duration #correlation, name ...` in ns.

    The rank is 0 and the correlation -1 where they are left out.
    """
    result = []
    for line in filter(None, map(str.strip, drawn.splitlines())):
        lane, kind, spans = re.fullmatch(r"(\S+) (\w+): (.*)", line).groups()
        rank, _, stream = lane.rpartition("/")
        for span in spans.split(", "):
            name, start, dur, correlation = re.fullmatch(
                r"(.+) (-?\d+)\+(\d+)(?: #(\d+))?", span
            ).groups()
            result.append(
                (
                    int(rank or 0),
                    int(stream),
                    kind,
                    name,
                    int(start),
                    int(dur),
                    int(correlation or -1),
                )
            )
    return result


def drawn_table(drawn: str) -> list[list]:
    """Cells of a drawn table, two spaces apart; numbers and terms of them as numbers, -
    as None.
    """
    result = []
    for line in filter(None, map(str.strip, drawn.splitlines())):
        row = re.split(r" {2,}", line)
        terms = [re.fullmatch(r"[-\d.(][\d.e*/+() -]*", cell) for cell in row]
        result.append(
            [
                None if cell == "-" else eval(cell) if term else cell
                for cell, term in zip(row, terms, strict=True)
            ]
        )
    return result


def shows(table: pd.DataFrame, drawn: str, rel: float = 1e-9) -> None:
    """Compares columns with a drawn table: names first, those of times with their unit
    (`idle_s us`). Cells are compared as numbers where they are some, exactly if whole,
    and - is what is unknown or empty.
    """
    names, *expected = drawn_table(drawn)
    table = table if table.index.name is None else table.reset_index()
    wrong = []
    for number, name in enumerate(names):
        column, _, unit = name.partition(" ")
        scale = {"": 1, "ns": 1e9, "us": 1e6}[unit]
        values = [v * scale if isinstance(v, float) else v for v in table[column]]
        assert len(values) == len(expected), f"rows: {values}"
        for value, row in zip(values, expected, strict=True):
            cell = row[number]
            if cell is None:
                equal = value == "" or pd.isna(value)
            elif isinstance(value, float) and not isinstance(cell, str):
                near = 1e-6 if unit else 1e-12
                equal = value == pytest.approx(cell, rel=rel, abs=near)
            elif isinstance(cell, str) or isinstance(value, str | bool):
                equal = str(value) == str(cell)
            else:
                equal = value == cell
            wrong += [] if equal else [f"{name}: {value!r}, not {cell!r}"]
    assert not wrong, wrong


def drawn_cases(drawn: str) -> list:
    """Parameters of cases: lanes and the table that shows them, under a title after #."""
    result = []
    for case in re.split(r"^ *# ", drawn, flags=re.M)[1:]:
        title, *lines = case.splitlines()
        is_lane = [bool(re.match(r" *\S+ \w+: ", line)) for line in lines]
        lane, table = (
            "\n".join(
                line for line, lane in zip(lines, is_lane, strict=True) if lane == of
            )
            for of in (True, False)
        )
        result.append(pytest.param(lane, table, id=title))
    return result


@contextmanager
def refused_line(words: str, error: type[Exception] = ValueError):
    """What is done here is refused in one line that holds each of these words."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words.split() if word not in message], message


def with_columns(timeline: Timeline, **columns) -> Timeline:
    """The timeline with other values in some columns of its spans."""
    return replace(timeline, spans=timeline.spans.assign(**columns))


def with_tables(timeline: Timeline, **tables: list[dict | tuple]) -> Timeline:
    """The timeline with side tables of these rows; what a row does not say is unknown,
    -1 or empty.
    """
    side_tables = {}
    for name, rows in tables.items():
        schema = SIDE_TABLES[name]
        unknown = {
            column: "" if dtype == "category" else -1
            for column, dtype in schema.items()
        }
        full = [
            unknown
            | (row if isinstance(row, dict) else dict(zip(schema, row, strict=False)))
            for row in rows
        ]
        side_tables[name] = conform(name, pd.DataFrame(full, columns=list(schema)))
    return replace(timeline, side_tables=SideTables(lambda: side_tables))


def meetings(starts: list[dict[int, int]], ahead_ns: dict[int, int]) -> list[tuple]:
    """Rows of all-reduces: each is {rank: true start} and ends 10 ns after the last
    start, on clocks that are ahead.
    """
    rows = []
    for start in starts:
        end = max(start.values()) + 10
        for rank, begin in start.items():
            begin_ns = EPOCH_NS + begin + ahead_ns.get(rank, 0)
            rows.append(
                (
                    rank,
                    20,
                    "comm",
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                    begin_ns,
                    end - begin,
                )
            )
    return rows


def passes_held(
    schedule: str, stage: int, pp: int, micro_batches: int, chunks: int = 1, sizes=None
) -> int:
    """Passes whose activations a stage holds at once, at most, or the layers of these,
    where sizes has those of each chunk; freed by the last pass that needs them.
    """
    slots = order(schedule, stage, pp, micro_batches, chunks)
    last = {slot[1:]: place for place, slot in enumerate(slots)}
    frees = [last[slot[1:]] == place for place, slot in enumerate(slots)]
    begins = [direction == "forward" for direction, *_ in slots]
    weights = [1 if sizes is None else sizes[chunk] for _, chunk, _ in slots]
    return np.cumsum(np.subtract(begins, frees, dtype=int) * weights).max()


def core_flops(block) -> float:
    """Forward FLOPs of a block's attention scores."""
    return sum(op.flops for op in block.ops if op.core)


def launched(plan, model, cluster, batch):
    """Whether one of the stacks whose configuration can be written launches a plan, and
    can say so.
    """
    cases = (Case(model, cluster, plan, batch, software=stack) for stack in STACKS)
    return any(legal(case, STATED).mask for case in cases)


def plans_of_space(space, model, cluster, batch):
    """The plans of a space one by one, launched or not."""
    result = []
    case = Case(model, cluster, Plan(), batch)
    for at in legal_degrees(space, case)[0]:
        rows, columns = pass_choices(space, case, at), sharding_choices(space, at, case)
        if rows and columns:
            for i, j in product(
                range(len(rows["micro_batch"])), range(columns["zero"].shape[1])
            ):
                row = (
                    at._asdict()
                    | {k: v[i, 0] for k, v in rows.items()}
                    | {k: v[0, j] for k, v in columns.items()}
                )
                result.append(plan_of(row))
    return result
