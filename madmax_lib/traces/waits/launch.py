"""Launches beside their kernels, and the queue between them: does the host keep the
device fed?

A launch is a host call (cudaLaunchKernel, hipMemcpyAsync, cudaGraphLaunch, ...) that
shares its correlation with work on a device stream of its rank. One graph launch starts
many kernels under one correlation: it counts once, and its delay is that of the first
kernel. Delays and queue length are those of Holistic Trace Analysis 0.5.0, but for
every call on every stream, where HTA knows only some names. The host of a simulated
timeline is not simulated: no launches.
"""

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import BUSY_KINDS, Timeline, cached_per_timeline, with_origin
from madmax_lib.traces.read.values import recorded_codes

# launch time of work without a launch: before everything
_NO_LAUNCH_NS = np.iinfo("int64").min


@cached_per_timeline
def device_work(timeline: Timeline) -> pd.DataFrame:
    """Spans of work on device streams, by rank, stream and start, with the row of their
    launch.

    rank, stream, step, correlation, row, start_ns, dur_ns, launch_row (-1 without),
    launch_ns (its start; the smallest int64 without). Where several host calls share a
    correlation the earliest is the launch.
    """
    spans = timeline.spans
    keys = ["rank", "correlation"]
    linked = spans["correlation"] >= 0
    on_device = (
        (spans["stream"] >= 0)
        & spans["kind"].isin(BUSY_KINDS)
        # HTA's reading takes them for kernels
        & ~spans["name"].isin(recorded_codes("wait").values())
    )
    calls = np.flatnonzero(linked & (spans["stream"] < 0) & (spans["kind"] == "cpu"))
    # Of host calls with one correlation the earliest is the launch.
    calls = calls[np.argsort(spans["start_ns"].to_numpy()[calls], kind="stable")]
    host = spans[keys].iloc[calls].assign(launch_row=calls).drop_duplicates(keys)
    rows = np.flatnonzero(on_device)
    work = (
        spans[["rank", "stream", "step", "correlation", "start_ns", "dur_ns"]]
        .iloc[rows]
        .assign(row=rows)
    )
    work = work.merge(host, on=keys, how="left")
    launched = work["launch_row"].fillna(-1).to_numpy(dtype="int64")
    start_ns = np.append(spans["start_ns"], _NO_LAUNCH_NS)  # place -1 is no launch
    work = work.assign(launch_row=launched, launch_ns=start_ns[launched])
    return work.sort_values(
        ["rank", "stream", "start_ns", "row"], kind="stable", ignore_index=True
    )


def launches(timeline: Timeline) -> pd.DataFrame:
    """Every launch with the device work it starts, by rank and launch time.

    rank, step, stream, correlation, name (of the kernel; the first in a graph), launch
    (host call), cpu_s (the call), gpu_s (device time, summed over a graph), delay_s
    (first kernel start - end of the call, 0 where the kernel starts during the call:
    HTA's launch_delay), since_launch_s (first kernel start - start of the call, 0 where
    clocks disagree), kernels (more than 1 in graphs), row and launch_row (of the spans).
    Empty without device work. HTA lists only
    cudaLaunchKernel, cudaLaunchKernelExC, cudaMemcpyAsync, cudaMemsetAsync and MTIA's
    job submission.
    """
    spans = timeline.spans
    work = device_work(timeline)
    work = work[work["launch_row"] >= 0].sort_values(
        ["launch_row", "start_ns", "row"], kind="stable"
    )
    by_launch = work.groupby("launch_row")["dur_ns"]
    table = work.drop_duplicates("launch_row").reset_index(drop=True)
    table["kernels"] = by_launch.size().to_numpy(dtype="int64")
    table["gpu_s"] = by_launch.sum().to_numpy() / NS_PER_S
    call = spans[["name", "dur_ns"]].iloc[table["launch_row"]].reset_index(drop=True)
    # From the start of the call; from its end it may be negative, when the kernel
    # starts during the call.
    since_ns = table["start_ns"] - table["launch_ns"]
    table = table.assign(
        name=spans["name"].iloc[table["row"]].astype(object).to_numpy(),
        launch=call["name"].astype(object),
        cpu_s=call["dur_ns"] / NS_PER_S,
        delay_s=(since_ns - call["dur_ns"]).clip(lower=0) / NS_PER_S,
        since_launch_s=since_ns.clip(lower=0) / NS_PER_S,
    )
    table = table.sort_values(["rank", "launch_ns", "launch_row"], ignore_index=True)
    columns = [
        "rank",
        "step",
        "stream",
        "correlation",
        "name",
        "launch",
        "cpu_s",
        "gpu_s",
        "delay_s",
    ]
    return with_origin(
        table[[*columns, "since_launch_s", "kernels", "row", "launch_row"]],
        timeline,
    )


def queue_series(timeline: Timeline) -> pd.DataFrame:
    """Launches that wait for the device, each time their number changes: rank, stream,
    time_s, length.

    time_s counts from the first span of the timeline. A launch enters the queue of its
    stream when its host call starts and leaves it when its first kernel starts; the
    kernel that runs is not in the queue. At equal times launches come first, so no
    length is negative (HTA leaves the order of ties to the sorting).
    """
    queue = _queue(timeline)
    zero_ns = timeline.spans["start_ns"].min() if len(queue) else 0
    table = queue.assign(time_s=(queue["time_ns"] - zero_ns) / NS_PER_S)
    return with_origin(table[["rank", "stream", "time_s", "length"]], timeline)


def queue_length(timeline: Timeline, capacity: int = 1022) -> pd.DataFrame:
    """Queue of each rank and stream, over its changes as HTA counts it, and how often
    the host ran into its end.

    rank, stream, count (changes), mean, std, min, p25, p50, p75, max; full_s: time with
    at least `capacity` launches waiting; full_share: of the time from the rank's first
    to its last span start; blocked_s: host time of launches into a full queue beyond
    their median duration. On NVIDIA launches get slow once 1,022 wait behind the
    running kernel, so HTA's limit of 1,024 is not reached; on AMD more are waiting and
    no call gets slower. Raises ValueError for a capacity below 1.
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity} is not at least 1")
    spans = timeline.spans
    queue = _queue(timeline)
    rows = []
    for (rank, stream), part in queue.groupby(["rank", "stream"]):
        full = part["length"] >= capacity
        time_ns = part["time_ns"].to_numpy()
        # A length lasts until the next change; the last one has no duration.
        full_ns = np.diff(time_ns, append=time_ns[-1:])[full].sum()
        begins_ns = spans.loc[spans["rank"] == rank, "start_ns"]
        # A launch into a full queue blocks: what it takes beyond the usual is waiting.
        beyond_ns = part["cpu_ns"] - part.loc[part["enters"], "cpu_ns"].median()
        blocked_ns = beyond_ns[full & part["enters"]].clip(lower=0).sum()
        share = full_ns / max(begins_ns.max() - begins_ns.min(), 1)
        rows.append(
            (
                rank,
                stream,
                *part["length"].describe(),
                full_ns / NS_PER_S,
                share,
                blocked_ns / NS_PER_S,
            )
        )
    lengths = ["count", "mean", "std", "min", "p25", "p50", "p75", "max"]
    columns = ["rank", "stream", *lengths, "full_s", "full_share", "blocked_s"]
    table = pd.DataFrame(rows, columns=columns).astype(
        dict.fromkeys(("count", "min", "max"), "int64")
    )
    return with_origin(table, timeline)


def _queue(timeline):
    """rank, stream, time_ns, length, enters and cpu_ns (of a launch that enters), by
    rank, stream and time.
    """
    work = device_work(timeline)
    work = work[work["launch_row"] >= 0].sort_values(
        ["launch_row", "start_ns"], kind="stable"
    )
    work = work.drop_duplicates("launch_row")
    cpu_ns = timeline.spans["dur_ns"].to_numpy()[work["launch_row"]]
    keys = work[["rank", "stream"]]
    enter = keys.assign(time_ns=work["launch_ns"], enters=True, cpu_ns=cpu_ns)
    # A launch cannot leave the queue before it enters; clocks may disagree.
    leave_ns = np.maximum(work["start_ns"], work["launch_ns"])
    queue = pd.concat([enter, keys.assign(time_ns=leave_ns, enters=False, cpu_ns=0)])
    # At equal times launches come first, so that no length is negative.
    queue["change"] = np.where(queue["enters"], 1, -1)
    queue = queue.sort_values(
        ["rank", "stream", "time_ns", "change"],
        ascending=[True, True, True, False],
        ignore_index=True,
    )
    return queue.assign(length=queue.groupby(["rank", "stream"])["change"].cumsum())
