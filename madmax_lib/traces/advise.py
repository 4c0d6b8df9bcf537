"""Causes of lost time, ranked by the seconds that a fix would gain, with the evidence.

Each gain is the time per rank and step that would go if this one cause went and nothing
else changed: an upper bound. Causes overlap (a late rank also exposes its collective),
so gains do not add up. Where a step replayed without any communication saves less than
such a gain, the evidence says so.
"""

import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import format_bytes, format_s
from madmax_lib.base.fields import require_type
from madmax_lib.timeline import Timeline, breakdown, exposed_s, with_origin
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.traces.comm.collectives import arrivals, calls, unseen_waits
from madmax_lib.traces.critical_path import what_if
from madmax_lib.traces.stragglers import stragglers
from madmax_lib.traces.tables import ratio
from madmax_lib.traces.waits.idle import idle, launch_bound
from madmax_lib.traces.waits.launch import device_work
from madmax_lib.traces.waits.step_times import steady_state, step_s

COLUMNS = ["cause", "where", "gain_s", "share", "evidence", "remedy"]
_WORTH_SHARE = 0.001  # of the step; less is not worth a line
# of the best bus bandwidth of the same group: below, a call is ruled by its latency
_SLOW = 0.5

_OF_COMMUNICATION = ("exposed communication", "small messages")
_NOTHING_S = 1e-12
_ALIKE = 0.03  # of a step: a replay that is farther off the measured one says nothing

_REMEDY = catalog.table("remedies").set_index("cause")["remedy"]


def advise(timeline: Timeline) -> pd.DataFrame:
    """Causes of lost time, the largest gain first; measured or simulated timelines.

    cause: exposed communication, waiting for peers, straggler rank, small messages,
    launch-bound, late start, host wait, pipeline bubble, other idle, short gaps or
    exposed copies. where: collective and group, ranks, stream. gain_s: per step, mean
    over the ranks. share: of the step (`traces.step_s`), 0..1. evidence, and remedy, the
    usual one. Causes below 0.1 % are left out; an empty table means that none was
    found, not that the run is fast. `.attrs["steps"]`: those that count, without
    warm-up and cut ones unless there are no others.
    """
    # Warm-up and cut steps would add causes that a run does not keep.
    recording = require_type("timeline", timeline, Timeline)
    timeline, counted = steady_state(recording)
    parts_s = breakdown(timeline)
    ranks = max(len(parts_s), 1)
    steps = max(len(counted), 1)
    rows = [
        finding
        for causes in (_communication, _late_ranks, _host, _other_idle, _gaps, _copies)
        for finding in causes(timeline)
    ]
    table = pd.DataFrame(rows, columns=Finding._fields)
    table["gain_s"] = table["gain_s"].astype(float) / ranks / steps
    if table["cause"].isin(_OF_COMMUNICATION).any():
        table = _beside_replay(table, recording)
    # of the step that recurs, else of the mean time of a rank and step
    whole_s = step_s(recording)
    if np.isnan(whole_s):
        whole_s = parts_s["total_s"].sum() / ranks / steps
    table["share"] = table["gain_s"] / max(whole_s, _NOTHING_S)
    table["remedy"] = table["cause"].map(_REMEDY)
    table = table[COLUMNS]
    table = table[table["share"] >= _WORTH_SHARE]
    table = table.sort_values(
        ["gain_s", "cause", "where"], ascending=[False, True, True], ignore_index=True
    )
    return with_origin(table, timeline, steps=counted)


def _beside_replay(table, recording):
    """The table, whose evidence says where a step replayed without any communication
    saves less than a gain: there something else, such as the host, decides.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on what a replay cannot know
        try:
            free = what_if(recording, {"comm": np.inf}).iloc[0]
        except ValueError:
            return table
    is_less = table["cause"].isin(_OF_COMMUNICATION)
    is_less &= table["gain_s"] > free["saved_s"]
    if not is_less.any() or not abs(free["replay_error"]) < _ALIKE:
        return table
    saved = format_s(max(free["saved_s"], 0.0))
    note = (
        f"; alone it gains less: a replay without communication saves {saved} per step"
    )
    return table.assign(evidence=table["evidence"] + np.where(is_less, note, ""))


class Finding(NamedTuple):
    """One cause of lost time."""

    cause: str
    where: str
    gain_s: float  # over all ranks and steps
    evidence: str


def _communication(timeline):
    """Exposed transfers by group and collective, and what small messages cost of them;
    waiting is the late ranks'.
    """
    table = unseen_waits(timeline, calls(timeline))
    waits = arrivals(timeline).set_index("row")[["wait_s", "exposed_wait_s"]]
    table = table.join(waits, on="row").fillna({"wait_s": 0.0, "exposed_wait_s": 0.0})
    # Bandwidth of the transfer alone, without what a call waits for others.
    transfer_s = (table["duration_s"] - table["wait_s"]).mask(table["unseen_s"] > 0)
    bus_bytes = table["bus_bytes_per_s"] * table["duration_s"]
    waiting_s = table["exposed_wait_s"] + table["exposed_unseen_s"]
    table["rate"] = ratio(bus_bytes, transfer_s)
    table["lost_s"] = table["exposed_s"] - waiting_s
    # Groups of one name differ in their ranks.
    role = table["group"].str.replace(r"\s*\[.*", "", regex=True)
    spans = timeline.spans
    compute = spans[spans["kind"] == "compute"]
    for (name, collective), part in table.groupby([role, "collective"]):
        where = " · ".join(filter(None, (collective.replace("_", "-"), name)))
        groups = part["group"].nunique()
        if groups > 1:
            where += f" ({groups} groups)"
        # Calls side by side are exposed once.
        alone_s = exposed_s(spans.loc[part["row"]], compute)
        gain_s = min(alone_s, part["lost_s"].sum())
        yield Finding("exposed communication", where, gain_s, _exposed(part, alone_s))
        late = part[part["unseen_s"] > 0]
        size, mean_s, most_s = late[["size_bytes", "duration_s", "longest_s"]].mean()
        evidence = (
            f"{len(late)} calls of {format_bytes(size)} take {format_s(mean_s)}, "
            f"a transfer {format_s(most_s)} at most"
        )
        unseen_s = min(alone_s, part["exposed_unseen_s"].sum())
        yield Finding("waiting for peers", where, unseen_s, evidence)
        sized = part[part["rate"] > 0]
        if len(sized):
            yield _small_messages(sized, where, gain_s)


def _exposed(part, alone_s):
    """Evidence of exposed calls, in words."""
    total_s = part["duration_s"].sum()
    waited_s = part["wait_s"].sum()
    share = alone_s / max(total_s, 1e-12)
    evidence = f"{len(part)} calls take {format_s(total_s)}: {share:.0%} exposed"
    if waited_s > 0:
        evidence += f", {waited_s / total_s:.0%} waiting for late ranks"
    return evidence


def _small_messages(part, where, exposed_s):
    """Gain of the exposed calls of one group at the bus bandwidth of its best call."""
    # The best call of the group shows what its link can do.
    best = part.loc[part["rate"].idxmax()]
    # Smaller and slower: latency rules, not the link.
    is_slow = part["rate"] < _SLOW * best["rate"]
    slow = part[is_slow & (part["size_bytes"] < best["size_bytes"])]
    size, rate = slow[["size_bytes", "rate"]].median() if len(slow) else (0.0, 0.0)
    evidence = (
        f"{len(slow)} calls of median {format_bytes(size)} at {format_bytes(rate)}/s "
        f"bus bandwidth; one of {format_bytes(best['size_bytes'])} reaches "
        f"{format_bytes(best['rate'])}/s"
    )
    gain_s = (slow["lost_s"] * (1 - slow["rate"] / best["rate"])).sum()
    return Finding("small messages", where, min(gain_s, exposed_s), evidence)


def _late_ranks(timeline):
    table = stragglers(timeline)
    # somebody is always last: by chance it is no cause
    table = table[table["rank"].isin(table.attrs["often_last"])]
    for row in table.itertuples():
        evidence = (
            f"last in {row.last} of {row.calls} calls; "
            f"the others wait {format_s(row.cost_s)} for it"
        )
        yield Finding(
            "straggler rank", f"rank {row.rank}", row.exposed_cost_s, evidence
        )


def _host(timeline):
    """Device idle because the host is late: in launches themselves, or elsewhere."""
    table = launch_bound(timeline)
    columns = ["launching_s", "launch_bound_s", "late_start_s", "idle_s"]
    by_rank = table.groupby("rank")[columns].sum()
    of_idle = f"of {format_s(by_rank['idle_s'].sum())} idle"
    launching_s = by_rank["launching_s"]
    gain_s = launching_s.sum()
    evidence = f"launches cause {format_s(gain_s)} {of_idle}"
    yield Finding("launch-bound", _worst(launching_s), gain_s, evidence)
    other_s = by_rank["launch_bound_s"] - launching_s
    gain_s = other_s.sum()
    evidence = (
        f"the host is late for {format_s(gain_s)} {of_idle}, not because of launches"
    )
    yield Finding("host wait", _worst(other_s), gain_s, evidence)
    late_start_s = by_rank["late_start_s"]
    for rank, name, late_s in table.attrs["late"]:
        count = table.attrs["late_count"]
        where = _worst(late_start_s)
        if count == 1:
            where = f"rank {rank}, before {name[:60]}"
        evidence = (
            f"{count} kernel(s) start long after the launch on an idle device, "
            f"{name[:60]} by {format_s(late_s)}"
        )
        yield Finding("late start", where, late_start_s.sum(), evidence)


def _other_idle(timeline):
    """Device idle that neither the host nor the pace of kernels explains."""
    if (timeline.spans["stream"] < 0).all():  # of CPU threads nobody is kept waiting
        return
    idle_s = breakdown(timeline).set_index("rank")["idle_s"]
    by_rank = launch_bound(timeline).groupby("rank")
    late_s = by_rank[["launch_bound_s", "late_start_s"]].sum().sum(axis=1)
    # What the host and the pace of kernels explain is told as causes of their own.
    short_s = _short_gaps(timeline).groupby("rank")["idle_s"].sum()
    left_s = idle_s.sub(late_s, fill_value=0.0).sub(short_s, fill_value=0.0)
    left_s = left_s.clip(lower=0.0)
    # send_recv alone may be an all-to-all whose name NCCL does not tell.
    table = calls(timeline)
    named = (table["group"] != "") | (table["source_rank"] >= 0)
    passes_on = (table["collective"].isin(POINT_TO_POINT) & named).any()
    cause = "pipeline bubble" if passes_on else "other idle"
    of_idle = f"{format_s(left_s.sum())} of {format_s(idle_s.sum())} idle"
    evidence = f"the host does not cause {of_idle}"
    yield Finding(cause, _worst(left_s), left_s.sum(), evidence)


def _gaps(timeline):
    """Short gaps between kernels that were launched in time."""
    for stream, part in _short_gaps(timeline).groupby("stream"):
        # One finding per stream, over all ranks.
        by_rank_s = part.groupby("rank")["idle_s"].sum()
        idle_s = part["idle_s"].sum()
        count = part["count"].sum()
        mean = format_s(idle_s / count)
        evidence = f"{count} gaps of {mean} between kernels launched in time"
        where = f"stream {stream}, {_worst(by_rank_s)}"
        yield Finding("short gaps", where, idle_s, evidence)


def _short_gaps(timeline):
    """Rows of `idle` for short gaps; none where the host is not known, as in
    simulations.
    """
    table = idle(timeline)
    has_launches = bool((device_work(timeline)["launch_row"] >= 0).any())
    return table[
        (table["cause"] == "kernel_wait") & (table["count"] > 0) & has_launches
    ]


def _copies(timeline):
    """Copies beside which the device does nothing else."""
    spans = timeline.spans
    copies = spans[spans["kind"] == "memcpy"]
    # Copies under other work cost nothing.
    others = spans[spans["kind"].isin(("compute", "comm", "other"))]
    alone_s = pd.Series(
        {rank: exposed_s(part, others) for rank, part in copies.groupby("rank")},
        dtype=float,
    )
    longest = (
        copies.groupby("name", observed=True)["dur_ns"].sum().nlargest(1).index.tolist()
    )
    evidence = (
        f"{len(copies)} copies, most of their time in {longest[0] if longest else ''}"
    )
    yield Finding("exposed copies", _worst(alone_s), alone_s.sum(), evidence)


def _worst(by_rank):
    """The ranks of a cause in words: one by name, of several the one that loses most."""
    if by_rank.empty:
        return ""
    if len(by_rank) == 1:
        return f"rank {by_rank.index[0]}"
    return f"{len(by_rank)} ranks, most on rank {by_rank.idxmax()}"
