"""Causes of lost time, ranked by the seconds that a fix would gain, with the evidence.

Each gain is the time per rank and step that would go if this one cause went and nothing
else changed: an upper bound. Causes overlap (a late rank also exposes its collective),
so gains do not add up.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from madmax_lib.base.fields import require_type
from madmax_lib.base.units import format_bytes, format_s
from madmax_lib.timeline.accounting import breakdown, exposed_s
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.timeline.timeline import Timeline, with_origin
from madmax_lib.traces.comm.collectives import arrivals, calls, unseen_waits
from madmax_lib.traces.stragglers import stragglers
from madmax_lib.traces.waits.idle import idle, launch_bound
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.traces.waits.step_times import steady_state

__all__ = ["COLUMNS", "advise"]

COLUMNS = ["cause", "where", "gain_s", "share", "evidence", "remedy"]
_WORTH_SHARE = 0.001  # of the time on the device; less is not worth a line
# of the best bus bandwidth of the same group: below, a call is ruled by its latency
_SLOW = 0.5

_REMEDY = {
    "exposed communication": "overlap it with compute (prefetch, buckets, a stream of its "
    "own), send less, or use a faster link",
    "waiting for peers": "read the traces of all ranks: they tell who is late, and why",
    "straggler rank": "look at this rank: data loading, uneven work, a slow or throttled "
    "device",
    "small messages": "make buckets larger or fuse calls, so that the link and not the "
    "latency rules",
    "launch-bound": "fuse kernels, compile, or capture a CUDA graph",
    "late start": "look for a module that is loaded, a copy that blocks, another process, "
    "unrecorded streams",
    "host wait": "remove synchronisation (.item(), .cpu(), prints) and feed data ahead of "
    "the step",
    "short gaps": "fuse the small kernels of this stream or capture a CUDA graph",
    "pipeline bubble": "use more micro-batches, an interleaved or a zero-bubble schedule, "
    "stages of equal work",
    "other idle": "look for events, for streams that wait for each other, and for ranks "
    "that wait outside of calls",
    "exposed copies": "pin host memory, copy with non_blocking=True on a stream of its "
    "own, keep data on the device",
}


def advise(timeline: Timeline) -> pd.DataFrame:
    """Causes of lost time, the largest gain first; measured or simulated timelines.

    cause: exposed communication, waiting for peers, straggler rank, small messages,
    launch-bound, late start, host wait, pipeline bubble, other idle, short gaps or
    exposed copies. where: collective and group, ranks, stream. gain_s: per step, mean
    over the ranks. share: of the time on the device, 0..1. evidence, and remedy, the
    usual one. Causes below 0.1 % are left out; an empty table means that none was
    found, not that the run is fast. `.attrs["steps"]`: those that count, without
    warm-up and cut ones unless there are no others.
    """
    timeline, counted = steady_state(require_type("timeline", timeline, Timeline))
    parts_s = breakdown(timeline)
    ranks = max(len(parts_s), 1)
    steps = max(len(counted), 1)
    total_s = parts_s["total_s"].sum()
    rows = [
        (
            cause,
            where,
            gain_s / ranks / steps,
            gain_s / total_s if total_s > 0 else 0.0,
            evidence,
            _REMEDY[cause],
        )
        for causes in (_communication, _late_ranks, _host, _other_idle, _gaps, _copies)
        for cause, where, gain_s, evidence in causes(timeline)
    ]
    table = pd.DataFrame(rows, columns=COLUMNS).astype(
        {"gain_s": "float64", "share": "float64"}
    )
    table = table[table["share"] >= _WORTH_SHARE]
    table = table.sort_values(
        ["gain_s", "cause", "where"], ascending=[False, True, True], ignore_index=True
    )
    return with_origin(table, timeline, steps=counted)


class Finding(NamedTuple):
    """One cause of lost time."""

    cause: str
    where: str
    gain_s: float  # over all ranks and steps
    evidence: str


def _communication(timeline: Timeline) -> Iterator[Finding]:
    """Exposed transfers by group and collective, and what small messages cost of them;
    waiting is the late ranks'.
    """
    table = unseen_waits(timeline, calls(timeline))
    waits = arrivals(timeline).set_index("row")[["wait_s", "exposed_wait_s"]]
    table = table.join(waits, on="row").fillna({"wait_s": 0.0, "exposed_wait_s": 0.0})
    transfer_s = (table["duration_s"] - table["wait_s"]).mask(table["unseen_s"] > 0)
    rate = (
        table["bus_bytes_per_s"]
        * table["duration_s"]
        / transfer_s.where(transfer_s > 0)
    )
    table = table.assign(
        rate=rate,
        lost_s=table["exposed_s"] - table["exposed_wait_s"] - table["exposed_unseen_s"],
    )
    role = table["group"].str.replace(
        r"\s*\[.*", "", regex=True
    )  # groups of one name differ in their ranks
    compute = timeline.spans[timeline.spans["kind"] == "compute"]
    for (name, collective), part in table.groupby([role, "collective"]):
        groups = (
            f" ({part['group'].nunique()} groups)"
            if part["group"].nunique() > 1
            else ""
        )
        where = " · ".join(filter(None, (collective.replace("_", "-"), name))) + groups
        total_s = part["duration_s"].sum()
        waited_s = part["wait_s"].sum()
        alone_s = exposed_s(
            timeline.spans.loc[part["row"]], compute
        )  # calls side by side are exposed once
        evidence = f"{alone_s / max(total_s, 1e-12):.0%} of {format_s(total_s)} in {len(part)} calls exposed"
        evidence += (
            f"; {waited_s / total_s:.0%} is waiting for late ranks"
            if waited_s > 0
            else ""
        )
        gain_s = min(alone_s, part["lost_s"].sum())
        yield "exposed communication", where, gain_s, evidence
        late = part[part["unseen_s"] > 0]
        size, mean_s, most_s = late[["size_bytes", "duration_s", "longest_s"]].mean()
        evidence = f"{len(late)} calls of {format_bytes(size)} take {format_s(mean_s)}, a transfer {format_s(most_s)} at most"
        yield (
            "waiting for peers",
            where,
            min(alone_s, part["exposed_unseen_s"].sum()),
            evidence,
        )
        if (part["rate"] > 0).any():
            yield _small_messages(part[part["rate"] > 0], where, gain_s)


def _small_messages(part: pd.DataFrame, where: str, exposed_s: float) -> Finding:
    """Gain of the exposed calls of one group at the bus bandwidth of its best
    call.
    """
    best = part.loc[part["rate"].idxmax()]
    slow = part[
        (part["rate"] < _SLOW * best["rate"])
        & (part["size_bytes"] < best["size_bytes"])
    ]
    size, rate = slow[["size_bytes", "rate"]].median() if len(slow) else (0.0, 0.0)
    evidence = f"{len(slow)} calls of median {format_bytes(size)} at {format_bytes(rate)}/s bus bandwidth; "
    evidence += (
        f"{format_bytes(best['size_bytes'])} reach {format_bytes(best['rate'])}/s"
    )
    gain_s = (slow["lost_s"] * (1 - slow["rate"] / best["rate"])).sum()
    return Finding("small messages", where, min(gain_s, exposed_s), evidence)


def _late_ranks(timeline: Timeline) -> Iterator[Finding]:
    table = stragglers(timeline)
    for row in table.itertuples():
        often = (
            ""
            if row.rank in table.attrs["often_last"]
            else ", no more often than by chance"
        )
        evidence = f"last in {row.last} of {row.calls} calls{often}; the others wait {format_s(row.cost_s)} for it"
        yield "straggler rank", f"rank {row.rank}", row.exposed_cost_s, evidence


def _host(timeline: Timeline) -> Iterator[Finding]:
    """Device idle because the host is late: in launches themselves, or elsewhere."""
    table = launch_bound(timeline)
    by_rank = table.groupby("rank")[
        ["launching_s", "launch_bound_s", "late_start_s", "idle_s"]
    ].sum()
    of_idle = f"of {format_s(by_rank['idle_s'].sum())} idle"
    launching_s = by_rank["launching_s"]
    other_s = by_rank["launch_bound_s"] - by_rank["launching_s"]
    inside = f"{format_s(launching_s.sum())} {of_idle} lie inside launches"
    yield "launch-bound", _worst(launching_s), launching_s.sum(), inside
    late = f"during {format_s(other_s.sum())} {of_idle} the host is late for another reason than launches"
    yield "host wait", _worst(other_s), other_s.sum(), late
    for rank, name, late_s in table.attrs["late"]:
        count = table.attrs["late_count"]
        late_by_rank_s = by_rank["late_start_s"]
        where = (
            f"rank {rank}, before {name[:60]}" if count == 1 else _worst(late_by_rank_s)
        )
        evidence = f"{count} kernel(s) start long after the launch on an idle device, {name[:60]} by {format_s(late_s)}"
        yield "late start", where, late_by_rank_s.sum(), evidence


def _other_idle(timeline: Timeline) -> Iterator[Finding]:
    """Device idle that neither the host nor the pace of kernels explains."""
    if (timeline.spans["stream"] < 0).all():  # of CPU threads nobody is kept waiting
        return
    idle_s = breakdown(timeline).set_index("rank")["idle_s"]
    late_s = (
        launch_bound(timeline)
        .groupby("rank")[["launch_bound_s", "late_start_s"]]
        .sum()
        .sum(axis=1)
    )
    short_s = _short_gaps(timeline).groupby("rank")["idle_s"].sum()
    left_s = (idle_s.sub(late_s, fill_value=0.0).sub(short_s, fill_value=0.0)).clip(
        lower=0.0
    )
    table = calls(
        timeline
    )  # send_recv alone may be an all-to-all whose name NCCL does not tell
    named = (table["group"] != "") | (table["source_rank"] >= 0)
    passes_on = (table["collective"].isin(POINT_TO_POINT) & named).any()
    evidence = f"{format_s(left_s.sum())} of {format_s(idle_s.sum())} idle are no matter of the host"
    yield (
        "pipeline bubble" if passes_on else "other idle",
        _worst(left_s),
        left_s.sum(),
        evidence,
    )


def _gaps(timeline: Timeline) -> Iterator[Finding]:
    """Short gaps between kernels that were launched in time."""
    for stream, part in _short_gaps(timeline).groupby("stream"):
        idle_s = part["idle_s"].sum()
        count = part["count"].sum()
        evidence = f"{count} gaps of {format_s(idle_s / count)} between kernels launched in time"
        yield (
            "short gaps",
            f"stream {stream}, {_worst(part.groupby('rank')['idle_s'].sum())}",
            idle_s,
            evidence,
        )


def _short_gaps(timeline: Timeline) -> pd.DataFrame:
    """Rows of `idle` for short gaps; none where the host is not known, as in
    simulations.
    """
    table = idle(timeline)
    has_launches = bool((device_work(timeline)["launch_row"] >= 0).any())
    return table[
        (table["cause"] == "kernel_wait") & (table["count"] > 0) & has_launches
    ]


def _copies(timeline: Timeline) -> Iterator[Finding]:
    """Copies beside which the device does nothing else."""
    spans = timeline.spans
    copies = spans[spans["kind"] == "memcpy"]
    others = spans[spans["kind"].isin(("compute", "comm", "other"))]
    alone_s = pd.Series(
        {rank: exposed_s(part, others) for rank, part in copies.groupby("rank")},
        dtype=float,
    )
    longest = (
        copies.groupby("name", observed=True)["dur_ns"].sum().nlargest(1).index.tolist()
    )
    evidence = f"{len(copies)} copies, most time in {longest[0] if longest else ''}"
    yield "exposed copies", _worst(alone_s), alone_s.sum(), evidence


def _worst(by_rank: pd.Series) -> str:
    """The ranks of a cause in words: one by name, of several the one that loses most."""
    if not len(by_rank):
        return ""
    if len(by_rank) == 1:
        return f"rank {by_rank.index[0]}"
    return f"{len(by_rank)} ranks, most on rank {by_rank.idxmax()}"
