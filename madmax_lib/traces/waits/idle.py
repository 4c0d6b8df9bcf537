"""Idle time of the device: causes of the gaps of each stream, and what the host's
launches cost the device as a whole.

The causes are those of Holistic Trace Analysis 0.5.0. The gap before a kernel is
host_wait when its launch started after the work before it had ended, kernel_wait when
it is shorter than a usual delay between consecutive kernels, and other (an event,
another stream, a collective) else.
"""

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S, covered_before
from madmax_lib.timeline import Timeline, cached_per_timeline, ends_ns, with_origin
from madmax_lib.traces.tables import covered, ratio
from madmax_lib.traces.waits.launch import device_work

_CAUSES = ("host_wait", "kernel_wait", "other")
# times the usual time from launch to start, and at least: beyond, a start is late
_LATE = 10
_LATE_NS = 100_000
_GAP_TIMES = ["idle_ns", "launch_bound_ns", "launching_ns", "late_start_ns"]


def idle(timeline: Timeline, consecutive_kernel_delay_s: float = 30e-6) -> pd.DataFrame:
    """Idle time of each device stream between its first and last work: rank, stream,
    cause, count, idle_s, share.

    One row per cause of _CAUSES, with 0 where it does not occur. share is of the
    stream's idle time, NaN without any.
    count: gaps. A kernel without a launch cannot be host_wait. Work that overlaps on a
    stream (graphs) leaves no gap, where HTA subtracts the overlap from the idle time.
    Streams idle side by side each count. Raises ValueError for a negative delay.
    """
    if not consecutive_kernel_delay_s >= 0:
        raise ValueError(
            f"consecutive_kernel_delay_s={consecutive_kernel_delay_s} is negative"
        )
    work = device_work(timeline)
    start_ns = work["start_ns"]
    lane = [work["rank"], work["stream"]]
    # End of all work before, on the same stream; before the first there is no gap.
    reach_ns = ends_ns(work).groupby(lane).cummax()
    reach_ns = reach_ns.groupby(lane).shift(fill_value=np.iinfo("int64").max)
    gap_ns = (start_ns - reach_ns).where(start_ns > reach_ns, 0)
    short = gap_ns < consecutive_kernel_delay_s * NS_PER_S
    late = work["launch_ns"] > reach_ns
    code = np.where(late, 0, np.where(short, 1, 2))
    gaps = work[["rank", "stream"]].assign(
        cause=np.array(_CAUSES, dtype=object)[code],
        count=(gap_ns > 0).astype("int64"),
        idle_s=gap_ns / NS_PER_S,
    )
    keys = ["rank", "stream", "cause"]
    streams = gaps[keys[:2]].drop_duplicates()
    table = streams.merge(pd.DataFrame({"cause": _CAUSES}), how="cross")
    sums = gaps.groupby(keys)[["count", "idle_s"]].sum().reset_index()
    table = table.merge(sums, on=keys, how="left").fillna({"count": 0, "idle_s": 0.0})
    table = table.astype(
        {
            "count": "int64",
            "idle_s": "float64",
        }
    )
    stream_idle_s = table.groupby(["rank", "stream"])["idle_s"].transform("sum")
    table["share"] = ratio(table["idle_s"], stream_idle_s)
    return with_origin(table, timeline)


@cached_per_timeline
def launch_bound(timeline: Timeline) -> pd.DataFrame:
    """Device time that would be gained if launches, or all host work, were free; one
    row per rank and step.

    rank, step, total_s, idle_s (no stream of the rank works), launch_bound_s: idle
    stretches whose next kernel the host launched only after the device had run dry,
    less late_start_s: what of them lies beyond the usual time from launch to start
    where that is exceeded tenfold, for loading a module, another process or a stream
    that is not recorded; `.attrs["late"]` has rank, name and seconds of the latest.
    launching_s: the part inside a launch call or between the launch of that next kernel
    and its start; share = launch_bound_s / total_s; launching_share. Free launches gain
    up to launching_s, a host that is always ahead (a graph of the whole step) up to
    launch_bound_s. A step lasts on the device from the end of the work before its first
    launched kernel to the same of the next step, so total_s and idle_s sum to those of
    `accounting.breakdown`; step -1 is what precedes the first. Upper bounds: a host
    that first waits for the device (a sync, .item()) or for data counts too, and a
    profiler makes launches slower than they are. A gap on one stream under work on
    another costs nothing here; `idle` counts it.
    """
    parts = []
    late_starts = []
    for rank, work in device_work(timeline).groupby("rank"):
        work = work.sort_values(["start_ns", "launch_ns"], kind="stable")
        gaps = _gaps(timeline, work)
        late = gaps[gaps["late_start_ns"] > 0]
        late_starts.append(late.assign(rank=rank))
        begins_ns = _step_begins_ns(work, gaps)
        # HTA's times may run backwards, to before the first step.
        step = np.searchsorted(begins_ns, gaps["start"], side="right") - 1
        of_step = gaps.groupby(np.maximum(step, 0))
        sums = of_step[_GAP_TIMES].sum().reindex(range(len(begins_ns)), fill_value=0)
        total_ns = np.diff(begins_ns, append=ends_ns(work).max())
        times_s = sums.assign(total_ns=total_ns) / NS_PER_S
        step_number = begins_ns.index.astype("int64")
        parts.append(times_s.assign(rank=rank, step=step_number))
    columns = ["rank", "step", "total_ns", *_GAP_TIMES]
    table = pd.concat(parts) if parts else pd.DataFrame(columns=columns)
    table = table[columns].reset_index(drop=True)
    table = table.rename(columns=lambda name: name.replace("_ns", "_s"))
    table["share"] = ratio(table["launch_bound_s"], table["total_s"])
    table["launching_share"] = ratio(table["launching_s"], table["total_s"])
    late = pd.concat(late_starts) if late_starts else pd.DataFrame()
    latest = []
    if len(late):
        worst = late.iloc[late["late_start_ns"].argmax()]
        name = timeline.spans["name"].iloc[int(worst["row"])]
        late_s = float(worst["late_start_ns"] / NS_PER_S)
        latest.append((int(worst["rank"]), str(name), late_s))
    return with_origin(table, timeline, late=latest, late_count=len(late))


def _gaps(timeline, work):
    """Stretches without work between the first and the last span of a rank: start, end,
    row and launch_ns of the span that ends it, and the _GAP_TIMES in ns.
    """
    start = work["start_ns"].to_numpy()
    reach = np.maximum.accumulate(ends_ns(work).to_numpy())
    first = np.flatnonzero(start[1:] > reach[:-1]) + 1
    gaps = work[["row", "launch_ns"]].iloc[first].reset_index(drop=True)
    gaps = gaps.assign(start=reach[first - 1], end=start[first])
    bound = gaps["launch_ns"] > gaps["start"]
    # From the launch on the next kernel is under way; before it, only what lies inside
    # of other launch calls is launching.
    under_way = gaps["launch_ns"].clip(gaps["start"], gaps["end"])
    launch_rows = work.loc[work["launch_row"] >= 0, "launch_row"].unique()
    launch_calls = covered(timeline.spans.iloc[launch_rows])
    start_ns = gaps["start"]
    launching_ns = covered_before(launch_calls, under_way)
    launching_ns -= covered_before(launch_calls, start_ns)
    delay_ns = gaps["end"] - under_way
    launching_ns += delay_ns
    # Beyond ten times the usual delay the start is late: no matter of the host.
    usual_ns = _usual_ns(work, delay_ns[bound])
    is_late = bound & (delay_ns > max(_LATE * usual_ns, _LATE_NS))
    late_start_ns = (delay_ns - usual_ns).where(is_late, 0)
    idle_ns = gaps["end"] - gaps["start"]
    return gaps.assign(
        idle_ns=idle_ns,
        launch_bound_ns=idle_ns * bound - late_start_ns,
        launching_ns=launching_ns * bound - late_start_ns,
        late_start_ns=late_start_ns,
    )


def _usual_ns(work, on_idle_ns):
    """Median time from launch to start, the smaller of that on an idle device and that
    of all launches.
    """
    launched = work[work["launch_row"] >= 0]
    every_ns = (launched["start_ns"] - launched["launch_ns"]).clip(lower=0)
    delays = [ns for ns in (on_idle_ns, every_ns) if len(ns)]
    medians = (int(np.quantile(ns, 0.5, method="lower")) for ns in delays)
    return min(medians, default=0)


def _step_begins_ns(work, gaps):
    """Begin of each step on the device, in order, by step; a gap before a step belongs
    to it. Step -1 is what precedes the first.
    """
    inside = work[work["step"] >= 0]
    # Work without a launch has the step of its time, which may be a later one.
    launched = inside[inside["launch_row"] >= 0]
    by_step = (launched if len(launched) else inside).groupby("step")["start_ns"]
    begins_ns = by_step.min().sort_values(kind="stable")
    gap_before = dict(zip(gaps["end"], gaps["start"], strict=True))
    begins_ns = begins_ns.map(lambda ns: gap_before.get(ns, ns))
    first_ns = work["start_ns"].min()
    if begins_ns.empty or begins_ns.iloc[0] > first_ns:
        before = pd.Series({-1: first_ns}, dtype="int64")
        begins_ns = pd.concat([before, begins_ns])
    return begins_ns
