"""Where did the time go? Timeline in, tidy tables out: compute, exposed communication,
overlap, idle.

A rank is busy while a span of kind compute, comm, memcpy or other runs on it. All
streams of a rank are merged, so two kernels side by side count once. Definitions as in
Holistic Trace Analysis' temporal breakdown and overlap.
"""

import math

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type
from madmax_lib.base.intervals import (
    EMPTY,
    covered_before,
    intersection,
    pack,
    subtraction,
    total,
    union,
)
from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.kinds import collectives_of
from madmax_lib.timeline.timeline import (
    BUSY_KINDS,
    Timeline,
    cached_per_timeline,
    with_origin,
)

__all__ = [
    "breakdown",
    "breakdown_between",
    "exposed_by_collective",
    "exposed_ns",
    "exposed_s",
    "rank_breakdown",
]
__all__ += ["top_kernels"]


@cached_per_timeline
def breakdown(timeline: Timeline) -> pd.DataFrame:
    """Time of each rank in seconds, one row per rank.

    total_s: first start to last end of device work; of a measured timeline on the rank
    itself, as HTA counts, of a simulated one on all its ranks, so that a pipeline stage
    is idle before its first and after its last work.
    compute_s, comm_s, memory_s: union of those spans. non_compute_s: busy but not
    computing. exposed_comm_s: communication that no compute hides. idle_s: total -
    busy.
    overlap: share of communication under compute, 0..1, NaN without communication.
    See also: mm.plot_timeline, mm.compare, mm.traces.by_group, mm.traces.idle,
    mm.traces.advise.

    >>> spans = pd.DataFrame({"kind": ["compute", "comm"], "start_ns": [0, 4 * 10**9], "dur_ns": 6 * 10**9})
    >>> spans = spans.assign(rank=0, stream=0, step=0, name="", group="", correlation=-1, op=-1, size_bytes=None)
    >>> breakdown(Timeline(spans))[["total_s", "compute_s", "comm_s", "exposed_comm_s", "overlap"]].round(2).values
    array([[10.  ,  6.  ,  6.  ,  4.  ,  0.33]])
    """
    table = rank_breakdown(require_type("timeline", timeline, Timeline))
    if (
        timeline.meta.source == "simulated"
        and timeline.meta.provenance.get("rules") != "hta"
    ):
        times = _intervals(timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)])
        window_s = (
            int(times[:, 1].max() - times[:, 0].min()) / NS_PER_S if len(times) else 0.0
        )
        table = table.assign(
            idle_s=table["idle_s"] + window_s - table["total_s"], total_s=window_s
        )
    return with_origin(table, timeline)


def rank_breakdown(timeline: Timeline) -> pd.DataFrame:
    """`breakdown` with the window of each rank alone, also of a simulated timeline."""
    spans = timeline.spans
    kind = spans["kind"].cat.codes.to_numpy()
    rank = spans["rank"].to_numpy()
    times = _intervals(spans)
    of_kind = {
        name: np.flatnonzero(kind == spans["kind"].cat.categories.get_indexer([name]))
        for name in BUSY_KINDS
    }
    rows = []
    for own in timeline.ranks:
        of_rank = {name: times[at[rank[at] == own]] for name, at in of_kind.items()}
        rows.append({"rank": own, **_rank_breakdown(of_rank)})
    nothing = _rank_breakdown(dict.fromkeys(BUSY_KINDS, EMPTY))
    return with_origin(pd.DataFrame(rows, columns=["rank", *nothing]), timeline)


def breakdown_between(timeline: Timeline, start_s: float, end_s: float) -> pd.DataFrame:
    """`breakdown` of a window in s after the first device work; the rest of the window
    is idle_s, on every rank.

    An end beyond the last device work means there. Raises ValueError if start_s is not
    before end_s.
    """
    if not start_s < end_s:
        raise ValueError(f"start_s={start_s} is not before end_s={end_s}")
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    start_ns = spans["start_ns"]
    end_ns = spans["start_ns"] + spans["dur_ns"]
    zero_ns = start_ns.min()
    last_ns = end_ns.max()
    first = zero_ns + round(max(start_s, 0.0) * NS_PER_S)
    last = (
        min(last_ns, zero_ns + round(end_s * NS_PER_S))
        if math.isfinite(end_s)
        else last_ns
    )
    inside = (end_ns > first) & (start_ns < last)
    begin = start_ns[inside].clip(lower=first)
    clipped = spans[inside].assign(
        start_ns=begin, dur_ns=end_ns[inside].clip(upper=last) - begin
    )
    table = breakdown(Timeline(clipped.reset_index(drop=True), timeline.meta))
    window_s = (last - first) / NS_PER_S
    return table.assign(
        idle_s=table["idle_s"] + window_s - table["total_s"], total_s=window_s
    )


def exposed_by_collective(
    timeline: Timeline, collective: np.ndarray | None = None
) -> pd.DataFrame:
    """Communication by collective: rank, collective, count, comm_s, exposed_s (not
    under compute), size_bytes.

    Collectives that run side by side each count in full, so the exposed times of a rank
    can sum to more than its exposed_comm_s. size_bytes is NaN when a span of the
    collective does not tell its size. collective: of each of the communication spans
    (n,); left out, what the names tell.
    """
    comm, compute = (
        timeline.spans[timeline.spans["kind"] == kind] for kind in ("comm", "compute")
    )
    names = comm["name"].cat.remove_unused_categories()
    if collective is None:
        collective = collectives_of(timeline, list(names.cat.categories))[
            names.cat.codes
        ]
    rows = []
    for (rank, name), part in comm.groupby([comm["rank"], collective]):
        comm_s = total(_intervals(part)) / NS_PER_S
        size_bytes = part["size_bytes"].sum(skipna=False)
        rows.append(
            (int(rank), name, len(part), comm_s, exposed_s(part, compute), size_bytes)
        )
    table = pd.DataFrame(
        rows,
        columns=["rank", "collective", "count", "comm_s", "exposed_s", "size_bytes"],
    )
    return with_origin(table, timeline)


def exposed_s(spans: pd.DataFrame, others: pd.DataFrame) -> float:
    """Seconds of some spans, each instant once per rank, beside which none of the
    others runs on the same rank.
    """
    of_rank = _by_rank(spans)
    besides = _by_rank(others)
    return (
        sum(
            total(subtraction(times, besides.get(rank, EMPTY)))
            for rank, times in of_rank.items()
        )
        / NS_PER_S
    )


def exposed_ns(
    timeline: Timeline, rank: pd.Series, start_ns: pd.Series, dur_ns: pd.Series
) -> np.ndarray:
    """How much (n,) of each interval lies under no compute of its rank; intervals side
    by side each count in full.
    """
    compute = timeline.spans[timeline.spans["kind"] == "compute"]
    computes = _by_rank(compute)
    exposed = dur_ns.to_numpy().copy()
    start = start_ns.to_numpy()
    end = (start_ns + dur_ns).to_numpy()
    for number, rows in rank.groupby(rank).indices.items():
        busy = union(computes.get(number, EMPTY))
        exposed[rows] -= covered_before(busy, end[rows]) - covered_before(
            busy, start[rows]
        )
    return exposed


def top_kernels(timeline: Timeline, count: int = 10) -> pd.DataFrame:
    """The kernels that take most device time over all ranks: name, kind, count,
    total_s, mean_s, share (0..1).
    """
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    table = (
        spans.groupby(["name", "kind"], observed=True)["dur_ns"]
        .agg(["count", "sum", "mean"])
        .reset_index()
    )
    table = table.sort_values(["sum", "name"], ascending=[False, True]).reset_index(
        drop=True
    )
    table["share"] = table["sum"] / max(table["sum"].sum(), 1)
    table = table.assign(
        total_s=table["sum"] / NS_PER_S, mean_s=table["mean"] / NS_PER_S
    )
    return with_origin(
        table[["name", "kind", "count", "total_s", "mean_s", "share"]].head(count),
        timeline,
    )


def _by_rank(spans: pd.DataFrame) -> dict[int, np.ndarray]:
    """Intervals of the spans of each rank."""
    times = _intervals(spans)
    return {rank: times[rows] for rank, rows in spans.groupby("rank").indices.items()}


def _intervals(spans: pd.DataFrame) -> np.ndarray:
    return pack(spans["start_ns"], spans["dur_ns"])


def _rank_breakdown(times: dict[str, np.ndarray]) -> dict[str, float]:
    """One row of `breakdown` from the intervals of each busy kind."""
    every = np.concatenate(list(times.values()))
    compute = times["compute"]
    comm = times["comm"]
    span_ns = int(every[:, 1].max() - every[:, 0].min()) if len(every) else 0
    busy_ns = total(every)
    compute_ns = total(compute)
    comm_ns = total(comm)
    hidden_ns = total(intersection(comm, compute))
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
