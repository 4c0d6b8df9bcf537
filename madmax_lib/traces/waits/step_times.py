"""Steps: how long each is, what is in it, and which should not be counted.

The first steps of a run allocate, compile and fill caches. A leading step is warm-up
when it is slower than the median of the steps after it by more than 5 times their
median absolute deviation and by more than 10 %; the first step that is not ends the
warm-up. The wall time of a step is its median over the ranks, so that all ranks agree.
At least two steps have to follow, and the rule holds while fewer than half of the steps
are warm-up.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import (
    Timeline,
    busy_spans,
    cached_per_timeline,
    ends_ns,
    rank_breakdown,
    with_origin,
)
from madmax_lib.traces.read.nesting import Nest
from madmax_lib.traces.read.steps import step_spans
from madmax_lib.traces.waits.launch import device_work

_PARTS = (
    "total_s",
    "compute_s",
    "comm_s",
    "memory_s",
    "non_compute_s",
    "exposed_comm_s",
    "idle_s",
    "overlap",
)
_QUANTITIES = ("step_s", "wall_s", "period_s", *_PARTS)
_DEVIATIONS = 5.0
_SLOWER = 0.1
_NEXT_BATCH = r"DataLoader.*__next__|dataloader\.py\(\d+\): __next__"


@cached_per_timeline
def steps(timeline: Timeline) -> pd.DataFrame:
    """Every step of every rank: rank, step, step_s, wall_s, period_s, the columns of
    `breakdown`, annotated, cut, warmup.

    step_s: what a further step takes: period_s on a device, or where no step that
    counts has one the longer of wall_s and total_s; wall_s where the host is the device.
    wall_s: the step's annotation on the host, or its first to its last span where it
    has none (annotated is false).
    period_s: as in `step_periods`; a host that runs ahead does not show it. The others
    are `breakdown` of the work that belongs to the step, so total_s = compute_s +
    non_compute_s + idle_s. total_s is shorter than step_s by the idle time between
    steps, and longer where steps overlap on a device.
    cut: a step without work or annotation where others of its rank have some, or the
    first or last of at least three with less than half as many spans as the median of
    the others.
    """
    spans = timeline.spans
    inside = spans[spans["step"] >= 0]
    end_ns = ends_ns(inside)
    grouped = inside.assign(end_ns=end_ns).groupby(["rank", "step"])
    table = grouped.agg(
        first_ns=("start_ns", "min"),
        last_ns=("end_ns", "max"),
        spans=("start_ns", "size"),
    )
    table = table.reset_index().merge(
        _annotated(timeline), on=["rank", "step"], how="left"
    )
    table["annotated"] = table["annotated_ns"].notna()
    # A step without annotation lasts from its first to its last span.
    wall_ns = table["annotated_ns"].where(
        table["annotated"], table["last_ns"] - table["first_ns"]
    )
    table["wall_s"] = wall_ns.astype("float64") / NS_PER_S
    cells = pd.MultiIndex.from_frame(table[["rank", "step"]])
    busy = busy_spans(inside)
    table[list(_PARTS)] = breakdown_of_cells(timeline, busy, cells)[list(_PARTS)]
    periods = step_periods(timeline)[["rank", "step", "period_s"]]
    table = table.merge(periods, on=["rank", "step"], how="left")
    table["cut"] = _cut(table)
    table["warmup"] = table["step"].isin(_warmup(table[~table["cut"]]))
    table["step_s"] = table["wall_s"]
    # a host may run ahead of its device, whose pace then is the step
    if (busy["stream"] >= 0).any():
        counted = table[~(table["cut"] | table["warmup"])]
        has_pace = counted["period_s"].notna().any()
        longer_s = table[["wall_s", "total_s"]].max(axis=1)
        table["step_s"] = table["period_s"] if has_pace else longer_s
    table = table[["rank", "step", *_QUANTITIES, "annotated", "cut", "warmup"]]
    return with_origin(table, timeline)


def breakdown_of_cells(
    timeline: Timeline, spans: pd.DataFrame, cells: pd.MultiIndex
) -> pd.DataFrame:
    """A row of `rank_breakdown` for each (rank, step): each becomes a rank of one
    breakdown, so there is no loop over steps.
    """
    cell = cells.get_indexer(pd.MultiIndex.from_frame(spans[["rank", "step"]]))
    every = {number: [number] for number in range(len(cells))} or {0: [0]}
    meta = replace(timeline.meta, represents=every)
    as_ranks = Timeline(spans.assign(rank=cell.astype("int32")), meta)
    return rank_breakdown(as_ranks).head(len(cells))


def steady_state(timeline: Timeline) -> tuple[Timeline, list[int]]:
    """The steps that are neither warm-up nor cut, all where none is left, and their
    numbers, as `only_steps` gives them.
    """
    counted = counted_steps(timeline)
    return only_steps(timeline, counted), counted


def counted_steps(timeline: Timeline) -> list[int]:
    """Numbers of the steps that are neither warm-up nor cut on any rank, all where none
    is left.
    """
    table = steps(timeline)
    left_out = set(table.loc[table["warmup"] | table["cut"], "step"])
    return sorted(set(timeline.steps) - left_out) or timeline.steps


def step_s(timeline: Timeline) -> float:
    """Seconds of the recurring step: step_s of `steps`, the median of those that count,
    mean over their ranks; NaN where there is none.
    """
    by_step = steps(timeline).groupby("step")["step_s"].mean()
    return float(by_step.reindex(counted_steps(timeline)).median())


def only_steps(timeline: Timeline, counted: list[int]) -> Timeline:
    """Steps of a timeline with what runs between the first and the last of them on the
    host or the device of a rank, as step -1: it is no idle time.
    """
    spans = timeline.spans
    counts = spans["step"].isin(counted)
    if counts.all() or not counted:
        return timeline
    start_ns = spans["start_ns"]
    end_ns = ends_ns(spans)
    # Host and device apart: the host may be steps ahead.
    side = [spans["rank"], spans["stream"] >= 0]
    first_ns = start_ns.where(counts, end_ns.max()).groupby(side).transform("min")
    last_ns = end_ns.where(counts, start_ns.min()).groupby(side).transform("max")
    keep = counts | ((start_ns >= first_ns) & (end_ns <= last_ns))
    if keep.all() and counted == timeline.steps:
        return timeline
    part = timeline.where(keep)
    step = part.spans["step"]
    return replace(
        part, spans=part.spans.assign(step=step.where(step.isin(counted), -1))
    )


def step_note(timeline: Timeline) -> str:
    """Words on the steps of a recording in which nothing marks them, else ""."""
    if timeline.meta.source != "measured":
        return ""
    if timeline.steps == [0] and not steps(timeline)["annotated"].any():
        return "no step marks: the whole recording counts as one step"
    return timeline.meta.provenance.get("steps", "")


def step_periods(timeline: Timeline) -> pd.DataFrame:
    """Pace of the device: rank, step, begin_ns, end_ns, period_s; one row for each step
    of a rank with work.

    period_s: from the begin of a step to that of the rank's next step, NaN for the
    last. begin_ns: start of the first work that the step has launched, else of its
    first work. end_ns: end of its last work.
    """
    spans = timeline.spans
    work = device_work(timeline)
    busy = busy_spans(spans[spans["step"] >= 0])
    of_step = busy.assign(end_ns=ends_ns(busy)).groupby(["rank", "step"])
    table = of_step.agg(begin_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    # Work that the step itself has launched; other work may be of a step before.
    launched = work[(work["launch_row"] >= 0) & (work["step"] >= 0)]
    launched_ns = launched.groupby(["rank", "step"])["start_ns"].min()
    table.loc[launched_ns.index, "begin_ns"] = launched_ns
    table = table.sort_values("begin_ns", kind="stable").reset_index()
    # so that ns survive where NaN makes them floats
    since_first_ns = table["begin_ns"] - table["begin_ns"].min()
    period_ns = since_first_ns.groupby(table["rank"]).shift(-1) - since_first_ns
    return table.assign(period_s=period_ns / NS_PER_S)


def step_summary(table: pd.DataFrame | Timeline) -> pd.DataFrame:
    """Spread of `steps`, or of those of a timeline, over the steps of each rank,
    without warm-up and cut ones.

    rank, quantity (step_s to overlap), steps (that count), mean, median, std (n - 1;
    NaN for one step), p10, p90; the unit is that of the quantity.
    """
    if isinstance(table, Timeline):
        table = steps(table)
    require_type("table", table, pd.DataFrame)
    if not {"warmup", "cut"} <= set(table):
        raise ValueError(
            "not a table of traces.steps: it has no columns warmup and cut"
        )
    counted = table[~(table["warmup"] | table["cut"]).astype(bool)]
    long = counted.melt(
        id_vars="rank", value_vars=list(_QUANTITIES), var_name="quantity"
    ).astype({"value": "float64"})
    long["quantity"] = pd.Categorical(long["quantity"], _QUANTITIES)
    values = long.groupby(["rank", "quantity"], observed=True)["value"]
    summary = values.agg(steps="size", mean="mean", median="median", std="std")
    summary = summary.assign(p10=values.quantile(0.1), p90=values.quantile(0.9))
    return with_origin(summary.reset_index().astype({"quantity": object}), table)


def _annotated(timeline):
    """rank, step, annotated_ns: duration of the annotation that marks a step, from the
    first if there are several.
    """
    tables = []
    annotations = timeline.spans[timeline.spans["kind"] == "annotation"]
    for rank, spans in annotations.groupby("rank"):
        marks = step_spans(spans)
        if marks is not None:
            tables.append(
                pd.DataFrame(marks, columns=["start", "end", "step"]).assign(rank=rank)
            )
    empty = pd.DataFrame(columns=["start", "end", "step", "rank"])
    of_step = pd.concat(tables or [empty]).groupby(["rank", "step"])
    annotated_ns = of_step["end"].max() - of_step["start"].min()
    marks = annotated_ns.rename("annotated_ns").reset_index()
    return marks.astype({"rank": "int32", "step": "int32"})


def _cut(table):
    """(n,) steps at the edge of a recording that it does not hold whole."""
    cut = np.zeros(len(table), dtype=bool)
    for _, part in table.groupby("rank"):
        rows = part.index
        order = np.argsort(part["first_ns"].to_numpy())
        for edge in {order[0], order[-1]} if len(part) > 2 else ():
            # A cut step has less than half as many spans as the others have in the
            # median.
            others = np.delete(part["spans"].to_numpy(), edge)
            cut[rows[edge]] = part["spans"].iloc[edge] < np.median(others) / 2
        for present in (part["annotated"], part["total_s"] > 0):
            cut[rows] |= ~present.to_numpy() & present.any()
    return cut


def _warmup(table):
    """The leading steps that are slow."""
    walls = table.groupby("step")["wall_s"].median()
    slow = []
    for number in range(len(walls) - 2):
        rest = walls.to_numpy()[number + 1 :]
        median = np.median(rest)
        # Median absolute deviation: one slow later step does not hide a slow first one.
        deviation = np.median(np.abs(rest - median))
        if walls.iloc[number] <= median + max(
            _DEVIATIONS * deviation, _SLOWER * median
        ):
            break
        slow.append(walls.index[number])
    return slow


def input_wait(timeline: Timeline) -> pd.DataFrame:
    """Time that the host waits for input: rank, step, calls, wait_s; one row per rank
    and step with such calls.

    Calls are those in which PyTorch's DataLoader hands out the next batch, as its label
    or its Python function.
    """
    spans = timeline.spans
    # Names are few and spans many: the pattern is matched once per name.
    codes = np.flatnonzero(spans["name"].cat.categories.str.contains(_NEXT_BATCH))
    rows = np.flatnonzero(
        np.isin(spans["name"].cat.codes, codes) & (spans["stream"] < 0)
    )
    # A label and the Python function inside of it are one wait.
    nest = Nest(spans, rows)
    outermost = spans.iloc[nest.rows[nest.parent < 0]]
    waits = outermost.groupby(["rank", "step"])["dur_ns"]
    table = waits.agg(calls="size", wait_s="sum").reset_index()
    return with_origin(table.assign(wait_s=table["wait_s"] / NS_PER_S), timeline)
