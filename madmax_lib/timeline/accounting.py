"""Accounting of time: Timeline in, tidy tables of compute, exposed communication,
overlap and idle time out.

A rank is busy while a span of kind compute, comm, memcpy or other runs on it. All
streams of a rank are merged, so two kernels side by side count once. Definitions as in
Holistic Trace Analysis' temporal breakdown and overlap.
"""

import math

import numpy as np
import pandas as pd

from madmax_lib.base import (
    EMPTY,
    NS_PER_S,
    covered_before,
    intersection,
    pack,
    subtraction,
    total,
    union,
)
from madmax_lib.base.fields import require_type
from madmax_lib.timeline.timeline import (
    BUSY_KINDS,
    Timeline,
    busy_spans,
    cached_per_timeline,
    ends_ns,
    with_origin,
)


@cached_per_timeline
def breakdown(timeline: Timeline) -> pd.DataFrame:
    """Time of each rank in seconds, one row per rank.

    total_s: first start to last end of device work; of a measured timeline on the rank
    itself, as HTA counts, of a simulated one on all its ranks and to the end of the
    step, so that a pipeline stage is idle before its first and after its last work.
    compute_s, comm_s, memory_s: union of those spans. non_compute_s: busy but not
    computing. exposed_comm_s: communication that no compute hides. idle_s: total -
    busy.
    overlap: share of communication under compute, 0..1, NaN without communication.
    See also: mm.plot_timeline, mm.compare, mm.traces.by_group, mm.traces.idle,
    mm.traces.advise.

    >>> spans = pd.DataFrame({"kind": ["compute", "comm"], "dur_ns": 6 * 10**9})
    >>> spans = spans.assign(start_ns=[0, 4 * 10**9], rank=0, stream=0, step=0)
    >>> spans = spans.assign(name="", group="", correlation=-1, op=-1, size_bytes=None)
    >>> columns = ["total_s", "compute_s", "comm_s", "exposed_comm_s", "overlap"]
    >>> breakdown(Timeline(spans))[columns].round(2).values
    array([[10.  ,  6.  ,  6.  ,  4.  ,  0.33]])
    """
    table = rank_breakdown(require_type("timeline", timeline, Timeline))
    by_hta = timeline.meta.provenance.get("rules") == "hta"
    busy = busy_spans(timeline.spans)
    if timeline.meta.source == "simulated" and not by_hta and len(busy):
        # one window for all ranks: from the first device work anywhere to the end of the
        # step, which is the host's where it updates offloaded states
        work = timeline.spans[timeline.spans["kind"] != "annotation"]
        window_ns = ends_ns(work).max() - busy["start_ns"].min()
        table = _in_window(table, window_ns / NS_PER_S)
    return with_origin(table, timeline)


def rank_breakdown(timeline: Timeline) -> pd.DataFrame:
    """`breakdown` with the window of each rank alone, also of a simulated timeline."""
    spans = timeline.spans
    rank = spans["rank"].to_numpy()
    times = _intervals(spans)
    kind = spans["kind"].to_numpy()
    # few of millions of spans are busy, and each rank then looks through those alone
    busy = np.flatnonzero(spans["kind"].isin(BUSY_KINDS))
    rows = []
    for number in timeline.ranks:
        at = busy[rank[busy] == number]
        # HTA takes all in the order of the file, and then each kind by start
        by_start = at[np.argsort(times[at, 0])]
        of_kind = {name: times[by_start[kind[by_start] == name]] for name in BUSY_KINDS}
        rows.append({"rank": number, **_rank_breakdown(times[at], of_kind)})
    # the columns also where there are no ranks
    nothing = _rank_breakdown(EMPTY, dict.fromkeys(BUSY_KINDS, EMPTY))
    return with_origin(pd.DataFrame(rows, columns=["rank", *nothing]), timeline)


def breakdown_between(timeline: Timeline, start_s: float, end_s: float) -> pd.DataFrame:
    """`breakdown` of a window in s after the first device work; the rest of the window
    is idle_s, on every rank.

    An end beyond the last device work means there. Raises ValueError if start_s is not
    before end_s.
    """
    low_ns, high_ns = window_ns(timeline, start_s, end_s)
    inside = clipped(busy_spans(timeline.spans), low_ns, high_ns)
    table = breakdown(Timeline(inside, timeline.meta))
    return _in_window(table, (high_ns - low_ns) / NS_PER_S)


def clipped(spans: pd.DataFrame, low_ns, high_ns) -> pd.DataFrame:
    """Spans inside of a window, which count up to its edges; these may be one for all
    or one for each span (n,).
    """
    start_ns = spans["start_ns"].clip(low_ns, high_ns)
    dur_ns = ends_ns(spans).clip(low_ns, high_ns) - start_ns
    part = spans.assign(start_ns=start_ns, dur_ns=dur_ns)
    return part[dur_ns > 0].reset_index(drop=True)


def window_ns(timeline: Timeline, start_s: float, end_s: float) -> tuple[int, int]:
    """Start and end of a window in s after the first device work, an end beyond the
    last of it being there. Raises ValueError if start_s is not before end_s.
    """
    if not start_s < end_s:
        raise ValueError(f"start_s={start_s} is not before end_s={end_s}")
    spans = busy_spans(timeline.spans)
    zero_ns = spans["start_ns"].min()
    last_ns = ends_ns(spans).max()
    low_ns = zero_ns + round(max(start_s, 0.0) * NS_PER_S)
    if math.isfinite(end_s):
        last_ns = min(last_ns, zero_ns + round(end_s * NS_PER_S))
    return low_ns, last_ns


def exposed_s(spans: pd.DataFrame, others: pd.DataFrame) -> float:
    """Seconds of some spans, each instant once per rank, beside which none of the
    others runs on the same rank.
    """
    hiding = _by_rank(others)
    exposed_ns = sum(
        total(subtraction(times, hiding.get(rank, EMPTY)))
        for rank, times in _by_rank(spans).items()
    )
    return exposed_ns / NS_PER_S


def exposed_ns(
    timeline: Timeline, rank: pd.Series, start_ns: pd.Series, dur_ns: pd.Series
) -> np.ndarray:
    """Part (n,) of each interval under no compute of its rank, in ns; intervals side by
    side each count in full.
    """
    compute = _by_rank(timeline.spans[timeline.spans["kind"] == "compute"])
    exposed = dur_ns.to_numpy().copy()
    start = start_ns.to_numpy()
    end = (start_ns + dur_ns).to_numpy()
    for number, rows in rank.groupby(rank).indices.items():
        # exposed = duration - compute inside = duration - (C(end) - C(start)), where
        # C(t) is the compute before t
        busy = union(compute.get(number, EMPTY))
        before_end = covered_before(busy, end[rows])
        before_start = covered_before(busy, start[rows])
        exposed[rows] -= before_end - before_start
    return exposed


def _by_rank(spans):
    """Intervals of the spans of each rank."""
    times = _intervals(spans)
    return {rank: times[rows] for rank, rows in spans.groupby("rank").indices.items()}


def _intervals(spans):
    return pack(spans["start_ns"], spans["dur_ns"])


def _in_window(table, window_s):
    """`breakdown` in a window that is wider than that of each rank: the rest is idle."""
    idle_s = table["idle_s"] + window_s - table["total_s"]
    return table.assign(idle_s=idle_s, total_s=window_s)


def _rank_breakdown(all_kinds, times):
    """One row of `breakdown` from the intervals of all that is busy, and of each kind."""
    span_ns = int(all_kinds.max() - all_kinds.min()) if len(all_kinds) else 0
    busy_ns = total(all_kinds)
    compute_ns = total(times["compute"])
    comm_ns = total(times["comm"])
    # Of unions of intervals, as Holistic Trace Analysis' breakdown:
    #   overlap = |comm & compute| / |comm|,  exposed = |comm| - |comm & compute|
    #   idle = window - |all kinds|,  non_compute = |all kinds| - |compute|
    hidden_ns = total(intersection(times["comm"], times["compute"]))
    return {
        "total_s": span_ns / NS_PER_S,
        "compute_s": compute_ns / NS_PER_S,
        "comm_s": comm_ns / NS_PER_S,
        "memory_s": total(times["memcpy"]) / NS_PER_S,
        "non_compute_s": (busy_ns - compute_ns) / NS_PER_S,
        "exposed_comm_s": (comm_ns - hidden_ns) / NS_PER_S,
        "idle_s": (span_ns - busy_ns) / NS_PER_S,
        "overlap": hidden_ns / comm_ns if comm_ns else float("nan"),
    }
