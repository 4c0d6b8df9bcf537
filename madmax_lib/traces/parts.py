"""Parts of a recording: a window of time, and the breakdown of its steps and of what
ran before and after them.
"""

from dataclasses import replace

import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline import accounting
from madmax_lib.timeline.accounting import window_ns
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, with_origin
from madmax_lib.traces.read.steps import assign_steps
from madmax_lib.traces.tables import busy_spans, ends_ns
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.traces.waits.step_times import lacks_step_marks, step_periods

_PARTS = ["steps", "before", "after"]


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
    edges = _edges(timeline)
    simulated = timeline.meta.source == "simulated"
    if simulated or lacks_step_marks(timeline) or not len(edges):
        # nothing tells what is outside of a step
        table = table.assign(part="steps", steps=len(timeline.steps))
    else:
        table = _parts(timeline, edges)
    names = ["rank", "part", "steps"]
    return table[[*names, *table.columns.difference(names, sort=False)]]


def window(timeline: Timeline, start_s: float, end_s: float) -> Timeline:
    """The part of a timeline from start_s to end_s after its first device work; spans
    that reach over an edge are cut there.

    Host rows begin with the first launch of what is kept, if that is earlier. Raises
    ValueError if nothing runs in between.
    """
    spans = timeline.spans
    low_ns, high_ns = window_ns(timeline, start_s, end_s)
    start_ns = spans["start_ns"]
    end_ns = ends_ns(spans)
    inside = (end_ns > low_ns) & (start_ns < high_ns)
    work = device_work(timeline)
    work = work[inside.to_numpy()[work["row"]] & (work["launch_row"] >= 0)]
    # a host that runs ahead has launched the first work long before
    first_ns = work.groupby("rank")["launch_ns"].min().clip(upper=low_ns)
    begins_ns = {rank: first_ns.get(rank, low_ns) for rank in timeline.ranks}
    edge_ns = spans["rank"].map(begins_ns).where(spans["stream"] < 0, low_ns)
    keep = (end_ns > edge_ns) & (start_ns < high_ns)
    if not (keep & spans["kind"].isin(BUSY_KINDS)).any():
        raise ValueError(f"nothing runs between {start_s} and {end_s} s")
    part = timeline.where(keep.to_numpy())
    begin_ns = start_ns.clip(lower=edge_ns)[keep]
    times = {
        "start_ns": begin_ns,
        "dur_ns": end_ns[keep].clip(upper=high_ns) - begin_ns,
    }
    cut = {name: each.to_numpy() for name, each in times.items()}
    spans = part.spans.assign(**cut)
    if timeline.meta.source == "measured":
        # what began before the window now begins in another step
        for _, of_rank in spans.groupby("rank"):
            spans.loc[of_rank.index, "step"] = assign_steps(of_rank)
    return replace(part, spans=spans)


def _edges(timeline: Timeline):
    """begin_ns, end_ns and steps by rank, of the steps that all ranks with work have."""
    periods = step_periods(timeline)
    ranks = periods.groupby("step")["rank"].transform("nunique")
    shared = periods[ranks == periods["rank"].nunique()]
    # of ranks that share no step each is as it was recorded
    by_rank = (shared if len(shared) else periods).groupby("rank")
    return by_rank.agg(
        begin_ns=("begin_ns", "min"),
        end_ns=("end_ns", "max"),
        steps=("step", "size"),
    )


def _parts(timeline: Timeline, edges: pd.DataFrame):
    """`breakdown` of each part of each rank."""
    pieces = []
    rows = []
    for rank, spans in busy_spans(timeline.spans).groupby("rank"):
        start_ns = spans["start_ns"]
        end_ns = ends_ns(spans)
        # a rank without steps has everything before them
        count = 0
        first_ns = start_ns.min()
        begin_ns = last_ns = stop_ns = end_ns.max()
        if rank in edges.index:
            begin_ns, stop_ns, count = edges.loc[rank].tolist()
        windows_ns = {
            "before": (first_ns, begin_ns),
            "steps": (begin_ns, stop_ns),
            "after": (stop_ns, last_ns),
        }
        for part, (low_ns, high_ns) in windows_ns.items():
            # spans that reach over a cut count on both sides up to it
            cut_ns = start_ns.clip(low_ns, high_ns)
            dur_ns = end_ns.clip(low_ns, high_ns) - cut_ns
            # each part becomes a rank of one breakdown
            piece = spans.assign(start_ns=cut_ns, dur_ns=dur_ns, rank=len(rows))
            pieces.append(piece[dur_ns > 0])
            row = {"rank": rank, "part": part}
            row["steps"] = count if part == "steps" else 0
            row["total_s"] = (high_ns - low_ns) / NS_PER_S
            rows.append(row)
    spans = pd.concat(pieces, ignore_index=True).astype({"rank": "int32"})
    numbers = {number: [number] for number in range(len(rows))}
    meta = replace(timeline.meta, represents=numbers)
    table = accounting.rank_breakdown(Timeline(spans, meta))
    of_part = pd.DataFrame(rows)
    table["idle_s"] += of_part["total_s"] - table["total_s"]
    table[list(of_part)] = of_part
    table = table[(table["part"] == "steps") | (table["total_s"] > 0)]
    order = table["part"].map(_PARTS.index).sort_values(kind="stable")
    return with_origin(table.loc[order.index].reset_index(drop=True), timeline)
