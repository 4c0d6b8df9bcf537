"""Why is the device idle? Causes of the gaps of each stream, and what the host's
launches cost the device as a whole.

The causes are those of Holistic Trace Analysis 0.5.0. The gap before a kernel is
host_wait when its launch started after the work before it had ended, kernel_wait when
it is shorter than a usual delay between consecutive kernels, and other (an event,
another stream, a collective) else.
"""

import numpy as np
import pandas as pd

from madmax_lib.base.intervals import covered_before, pack, union
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.timeline import Timeline, cached_per_timeline, with_origin
from madmax_lib.traces.waits.launch import device_work

__all__ = ["idle", "launch_bound"]

_CAUSES = ("host_wait", "kernel_wait", "other")
# times the usual time from launch to start, and at least: beyond, a start is late
_LATE = 10
_LATE_NS = 100_000


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
    end_ns = work["start_ns"] + work["dur_ns"]
    keys = [work["rank"], work["stream"]]
    reach_ns = (
        end_ns.groupby(keys)
        .cummax()
        .groupby(keys)
        .shift(fill_value=np.iinfo(np.int64).max)
        .to_numpy()
    )
    gap_ns = np.where(work["start_ns"] > reach_ns, work["start_ns"] - reach_ns, 0)
    late = work["launch_ns"] > reach_ns
    short = gap_ns < consecutive_kernel_delay_s * NS_PER_S
    cause = pd.Categorical.from_codes(np.where(late, 0, np.where(short, 1, 2)), _CAUSES)
    gaps = work[["rank", "stream"]].assign(
        cause=cause, count=gap_ns > 0, idle_s=gap_ns / NS_PER_S
    )
    streams = gaps[["rank", "stream"]].drop_duplicates()
    table = streams.merge(pd.DataFrame({"cause": _CAUSES}), how="cross")
    sums = (
        gaps.groupby(["rank", "stream", "cause"], observed=True)[["count", "idle_s"]]
        .sum()
        .reset_index()
    )
    table = table.merge(
        sums.astype({"cause": object}), on=["rank", "stream", "cause"], how="left"
    )
    table = table.fillna({"count": 0, "idle_s": 0.0}).astype(
        {"count": "int64", "idle_s": "float64"}
    )
    whole_s = table.groupby(["rank", "stream"])["idle_s"].transform("sum")
    table["share"] = table["idle_s"] / whole_s.where(whole_s > 0)
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
    rows = []
    starts = []
    for rank, work in device_work(timeline).groupby("rank"):
        work = work.sort_values(["start_ns", "launch_ns"], kind="stable")
        gaps = _gaps(work)
        launching = timeline.spans.iloc[
            work.loc[work["launch_row"] >= 0, "launch_row"].unique()
        ]
        calls = union(pack(launching["start_ns"], launching["dur_ns"]))
        edges, steps = _device_steps(work, gaps)
        place = np.maximum(
            np.searchsorted(edges, gaps["start"], side="right") - 1, 0
        )  # HTA's times may run backwards
        bound = gaps["launch_ns"] > gaps["start"]
        whole = gaps["end"] - gaps["start"]
        late = np.clip(
            gaps["launch_ns"], gaps["start"], gaps["end"]
        )  # from here on the next kernel is under way
        calling = (
            covered_before(calls, late)
            - covered_before(calls, gaps["start"])
            + gaps["end"]
            - late
        )
        usual = _usual_ns(work, (gaps["end"] - late)[bound])
        beyond = np.where(
            bound & (gaps["end"] - late > max(_LATE * usual, _LATE_NS)),
            gaps["end"] - late - usual,
            0,
        )
        starts += [
            (rank, gaps["row"][at], beyond[at] / NS_PER_S)
            for at in np.flatnonzero(beyond)
        ]
        lost_ns = {"idle_s": whole, "launch_bound_s": whole * bound - beyond}
        lost_ns |= {"launching_s": calling * bound - beyond, "late_start_s": beyond}
        sums = {
            key: np.bincount(place, ns, minlength=len(steps)) / NS_PER_S
            for key, ns in lost_ns.items()
        }
        total_s = (
            np.diff(edges, append=(work["start_ns"] + work["dur_ns"]).max()) / NS_PER_S
        )
        rows.append(
            pd.DataFrame({"rank": rank, "step": steps, "total_s": total_s, **sums})
        )
    columns = [
        "rank",
        "step",
        "total_s",
        "idle_s",
        "launch_bound_s",
        "launching_s",
        "late_start_s",
    ]
    table = (
        pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)
    )
    total_s = table["total_s"].where(table["total_s"] > 0)
    table = table.assign(
        share=table["launch_bound_s"] / total_s,
        launching_share=table["launching_s"] / total_s,
    )
    starts = sorted(starts, key=lambda start: -start[2])
    latest = [
        (int(rank), str(timeline.spans["name"].iloc[row]), float(late_s))
        for rank, row, late_s in starts[:1]
    ]
    return with_origin(table, timeline, late=latest, late_count=len(starts))


def _usual_ns(work: pd.DataFrame, on_idle_ns: np.ndarray) -> int:
    """Median time from launch to start, the smaller of that on an idle device and that
    of all launches.
    """
    launched = work["launch_row"] >= 0
    every_ns = (work["start_ns"] - work["launch_ns"])[launched].clip(lower=0).to_numpy()
    return min(
        (
            int(np.quantile(ns, 0.5, method="lower"))
            for ns in (on_idle_ns, every_ns)
            if len(ns)
        ),
        default=0,
    )


def _gaps(work: pd.DataFrame) -> dict[str, np.ndarray]:
    """Stretches without work between the first and the last span of a rank, with row
    and launch of the next one.
    """
    start = work["start_ns"].to_numpy()
    reach = np.maximum.accumulate(start + work["dur_ns"].to_numpy())
    first = np.flatnonzero(start[1:] > reach[:-1]) + 1
    after = {column: work[column].to_numpy()[first] for column in ("row", "launch_ns")}
    return {"start": reach[first - 1], "end": start[first], **after}


def _device_steps(
    work: pd.DataFrame, gaps: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Where each step begins on the device, (k,) ns in order, and its number; a gap
    before a step belongs to it.
    """
    inside = work[work["step"] >= 0]
    launched = inside[
        inside["launch_row"] >= 0
    ]  # the step of others is that of their time, which may be a later one
    begins = (
        (launched if len(launched) else inside)
        .groupby("step")["start_ns"]
        .min()
        .sort_values(kind="stable")
    )
    edges = begins.to_numpy()
    steps = begins.index.to_numpy()
    if len(gaps["end"]) and len(edges):
        place = np.minimum(np.searchsorted(gaps["end"], edges), len(gaps["end"]) - 1)
        edges = np.where(gaps["end"][place] == edges, gaps["start"][place], edges)
    first = work["start_ns"].min()
    if not len(edges) or edges[0] > first:
        edges = np.r_[first, edges]
        steps = np.r_[-1, steps]
    return edges, steps.astype(np.int64)
