"""Parts of a recording: a window of time, and the breakdown of its steps and of what
ran before and after them.
"""

from dataclasses import replace

import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline import accounting, busy_spans, ends_ns
from madmax_lib.timeline.accounting import window_ns
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, with_origin
from madmax_lib.traces.read.steps import assign_steps, step_spans
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.traces.waits.step_times import step_note, step_periods


def breakdown(timeline: Timeline, *, steps: bool = False) -> pd.DataFrame:
    """Time of each rank in seconds, one row per rank; with `steps`, one per part of it.

    total_s: first start to last end of device work; of a measured timeline on the rank
    itself, as HTA counts, of a simulated one on all its ranks, so that a pipeline stage
    is idle before its first and after its last work.
    compute_s, comm_s, memory_s: union of those spans. non_compute_s: busy but not
    computing. exposed_comm_s: communication that no compute hides. idle_s: total -
    busy. overlap: share of communication under compute, 0..1, NaN without.

    steps: also part, and steps, the number of those in it. First the part steps of each
    rank: from the begin of the first step on the device to the end of the last, of the
    steps that all ranks have. Then before and after: what the device did outside, such
    as work launched before the recording. The parts of a rank add up to its row without
    `steps`.
    See also: mm.plot_timeline, mm.compare, mm.traces.steps, mm.traces.by_group,
    mm.traces.idle, mm.traces.advise.
    """
    table = accounting.breakdown(timeline)
    if not steps:
        return table
    periods = step_periods(timeline)
    ranks = periods.groupby("step")["rank"].transform("nunique")
    # of the steps that all ranks with work have
    shared = periods[ranks == periods["rank"].nunique()].groupby("rank")
    # in a simulation nothing is outside, else nothing may tell what is
    is_whole = timeline.steps == [0] and step_note(timeline)
    is_whole = is_whole or timeline.meta.source == "simulated"
    if is_whole or not len(shared):
        table = table.assign(part="steps", steps=len(timeline.steps))
    else:
        table = _parts(timeline, shared)
    return table.set_index(["rank", "part", "steps"]).reset_index()


def window(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """The part of a timeline from start_s to end_s after its first device work; spans
    that reach over an edge are cut there, and a step of which work is cut is none.

    Host rows begin with the first launch of what is kept, if that is earlier. Raises
    ValueError if nothing runs in between.
    """
    spans = timeline.spans
    low_ns, high_ns = window_ns(timeline, start_s, end_s)
    start_ns = spans["start_ns"]
    end_ns = ends_ns(spans)
    work = device_work(timeline)
    inside = (ends_ns(work) > low_ns) & (work["start_ns"] < high_ns)
    launched = work[inside & (work["launch_row"] >= 0)]
    # a host that runs ahead has launched the first work long before
    first_ns = launched.groupby("rank")["launch_ns"].min().clip(upper=low_ns)
    begins_ns = {rank: first_ns.get(rank, low_ns) for rank in timeline.ranks}
    edge_ns = spans["rank"].map(begins_ns)
    edge_ns = edge_ns.where(spans["stream"] < 0, low_ns)
    keep = (end_ns > edge_ns) & (start_ns < high_ns)
    is_cut = (start_ns < edge_ns) | (end_ns > high_ns) | ~keep
    is_work = spans["kind"].isin(BUSY_KINDS)
    marks = step_spans(spans)
    if marks is not None:
        # of a piece of a step no mark stays, which would make a step of it
        pieces = spans["step"][is_cut & is_work]
        is_mark = spans["kind"] == "annotation"
        is_mark &= start_ns.isin(marks[:, 0])
        is_mark &= end_ns.isin(marks[:, 1])
        keep &= ~(is_mark & spans["step"].isin(pieces))
    if not (keep & is_work).any():
        raise ValueError(f"nothing runs between {start_s} and {end_s} s")
    part = timeline.where(keep)
    begin_ns = start_ns.clip(lower=edge_ns)[keep].to_numpy()
    stop_ns = end_ns.clip(upper=high_ns)[keep].to_numpy()
    spans = part.spans.assign(start_ns=begin_ns, dur_ns=stop_ns - begin_ns)
    # steps that were found by their pattern stay: a window may hold too few
    source = timeline.meta.source
    if source == "measured" and "steps" not in timeline.meta.provenance:
        # what began before the window now begins in another step
        for _, of_rank in spans.groupby("rank"):
            spans.loc[of_rank.index, "step"] = assign_steps(of_rank)
    return replace(part, spans=spans)


def _parts(timeline, periods):
    """`breakdown` of each part of each rank; periods: of its steps, by rank."""
    spans = busy_spans(timeline.spans)
    rank = spans["rank"]
    last_ns = ends_ns(spans).groupby(rank).max().to_dict()
    # a rank without steps has everything before them
    begin_ns = last_ns | periods["begin_ns"].min().to_dict()
    stop_ns = last_ns | periods["end_ns"].max().to_dict()
    first_ns = spans["start_ns"].groupby(rank).min().to_dict()
    windows_ns = {
        "steps": (begin_ns, stop_ns),
        "before": (first_ns, begin_ns),
        "after": (stop_ns, last_ns),
    }
    tables = []
    for part, (low_ns, high_ns) in windows_ns.items():
        # spans that reach over a cut count on both sides up to it
        piece = accounting.clipped(spans, rank.map(low_ns), rank.map(high_ns))
        table = accounting.rank_breakdown(Timeline(piece, timeline.meta))
        table["part"] = part
        counts = periods.size() if part == "steps" else {}
        table["steps"] = table["rank"].map(counts).fillna(0).astype(int)
        lengths_ns = table["rank"].map(high_ns) - table["rank"].map(low_ns)
        window_s = lengths_ns.fillna(0) / NS_PER_S
        table["idle_s"] += window_s - table["total_s"]
        table["total_s"] = window_s
        tables.append(table[(window_s > 0) | (part == "steps")])
    return with_origin(pd.concat(tables, ignore_index=True), timeline)
