"""Why is a stream idle? Host wait, kernel wait or something else, as Holistic Trace Analysis 0.5.0 defines them.

The gap before a kernel is host_wait when its launch started after the work before it had ended, kernel_wait when it is
shorter than a usual delay between consecutive kernels, and other (an event, another stream, a collective) else.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from madmax_lib.timeline import Timeline, with_origin
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.units import NS_PER_S

__all__ = ["CAUSES", "idle"]

CAUSES = ("host_wait", "kernel_wait", "other")


def idle(timeline: Timeline, consecutive_kernel_delay_s: float = 30e-6) -> pd.DataFrame:
    """Idle time of each device stream between its first and last work: rank, stream, cause, count, idle_s, share.

    One row per cause of CAUSES, with 0 where it does not occur. share is of the stream's idle time, NaN without any.
    count: gaps. A kernel without a launch cannot be host_wait. Work that overlaps on a stream (graphs) leaves no gap,
    where HTA subtracts the overlap from the idle time. Streams idle side by side each count.
    Raises ValueError for a negative delay.
    """
    if not consecutive_kernel_delay_s >= 0:
        raise ValueError(f"consecutive_kernel_delay_s={consecutive_kernel_delay_s} is negative")
    work = device_work(timeline)
    end_ns = work["start_ns"] + work["dur_ns"]
    keys = [work["rank"], work["stream"]]
    reach_ns = end_ns.groupby(keys).cummax().groupby(keys).shift(fill_value=np.iinfo(np.int64).max).to_numpy()
    gap_ns = np.where(work["start_ns"] > reach_ns, work["start_ns"] - reach_ns, 0)
    late, short = work["launch_ns"] > reach_ns, gap_ns < consecutive_kernel_delay_s * NS_PER_S
    cause = pd.Categorical.from_codes(np.where(late, 0, np.where(short, 1, 2)), CAUSES)
    gaps = work[["rank", "stream"]].assign(cause=cause, count=gap_ns > 0, idle_s=gap_ns / NS_PER_S)
    streams = gaps[["rank", "stream"]].drop_duplicates()
    table = streams.merge(pd.DataFrame({"cause": CAUSES}), how="cross")
    sums = gaps.groupby(["rank", "stream", "cause"], observed=True)[["count", "idle_s"]].sum().reset_index()
    table = table.merge(sums.astype({"cause": object}), on=["rank", "stream", "cause"], how="left")
    table = table.fillna({"count": 0, "idle_s": 0.0}).astype({"count": "int64", "idle_s": "float64"})
    whole_s = table.groupby(["rank", "stream"])["idle_s"].transform("sum")
    table["share"] = table["idle_s"] / whole_s.where(whole_s > 0)
    return with_origin(table, timeline)
