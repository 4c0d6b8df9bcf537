"""Edges of gloo's transfers in the graph of a step: who waits for them, on a trace
without a device?

A c10d operator hands a transfer to a thread of gloo and returns; where the caller waits
is no event of a trace. It is seen where the calling thread pauses until the transfer
ends. A wait that found its transfer done left no pause, but it is one as soon as links
are slower: what backward starts and does not wait for at once, as DDP's buckets, is
awaited when backward ends. Sends and receives are annotations on the calling thread,
from the call until its wait is over: they are in flight beside what the thread does, a
message needs both ends, and has arrived when the first of them goes on. All transfers
of a rank share its link: a message or collective leaves it when those before it have
left.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from madmax_lib.timeline import ends_ns
from madmax_lib.traces.comm.call_metadata import call_metadata
from madmax_lib.traces.tables import covered, reach
from madmax_lib.traces.waits.work import StepWork, end_of, joined_edges, start_of

_PAUSES = r"wait|run_backward|: backward"
_AUTOGRAD = "autograd::engine::evaluate_function"
# of the calls of a kind must show that their thread waits for them at once
_MOSTLY = 0.5
_NEVER = np.iinfo("int64").max


def transfers(work: StepWork) -> Iterator[tuple]:
    """Edges launch, sync and link of gloo's transfers."""
    host = work.spans[work.spans["stream"] < 0].sort_values("start_ns", kind="stable")
    operators = host[host["name"].str.startswith("c10d::")]
    gloo = host[(host["kind"] == "comm") & work.has_slice(host.index)]
    for rank, calls in operators.groupby("rank"):
        ours = gloo[gloo["rank"] == rank]
        in_flight = ours["stream"].isin(calls["stream"])
        is_message = calls["name"].str.contains(r"::(?:send|recv)")
        threads = host[host["rank"] == rank]
        # Collectives run on gloo's own threads, messages on the thread that calls.
        yield from _queue(work, ours[~in_flight], calls[~is_message], threads)
        yield from _queue(work, ours[in_flight], calls[is_message], threads)
    yield from _links(work, gloo)


def _queue(
    work,
    transfers,
    calls,
    host,
):
    """Edges from calls to their transfers, which queue one after the other, and from
    the transfers to where their callers go on.
    """
    turn = np.arange(len(transfers))
    if len(transfers) != len(calls):
        # Some are missing: each belongs to the last call before it.
        starts = transfers["start_ns"]
        turn = np.searchsorted(calls["start_ns"], starts, side="right") - 1
    transfers = transfers[turn >= 0]
    calls = calls.iloc[turn[turn >= 0]]
    first = start_of(work.first[calls.index])
    yield "launch", first, start_of(work.first[transfers.index])
    yield "sync", *_waits(work, transfers, calls, host)


def _waits(
    work,
    transfers,
    calls,
    host,
):
    """End of a transfer -> where the thread that called goes on."""
    parts = []
    end_ns = ends_ns(transfers).to_numpy()
    ended = end_of(work.last[transfers.index])
    for thread in calls["stream"].unique():
        at = np.flatnonzero(calls["stream"] == thread)
        lane = work.lane(calls["rank"].iloc[0], thread)
        pause_ns = end_ns[at]
        _, after = pauses(lane, host, pause_ns, pause_ns)
        on_thread = host[host["stream"] == thread]
        after = _end_of_backward(after, calls.iloc[at], lane, on_thread)
        resumes = after >= 0
        source = ended[at]
        parts.append((source[resumes], after[resumes]))
    return joined_edges(parts)


def _end_of_backward(
    after,
    calls,
    lane,
    host,
):
    """Events (n,) at which a thread goes on after its calls; those calls of backward
    that it does not wait for at once are awaited when backward has ended.
    """
    nodes = host[host["name"].str.startswith(_AUTOGRAD)]
    if nodes.empty or lane.empty:
        return after
    call_ns = calls["start_ns"]
    in_backward = _within(call_ns, nodes)
    # StepWork outside of backward, and the first of it after each call.
    is_annotation = host["kind"].reindex(lane["row"]).eq("annotation").to_numpy()
    is_work = lane["kind"].isin(("compute", "host"))
    works = lane[is_work & ~is_annotation]
    works = works[~_within(works["start_ns"], nodes)]
    work_ns = works["start_ns"]
    following = np.searchsorted(work_ns, call_ns, side="right")
    resume = np.r_[start_of(works.index.to_numpy()), -1][following]
    # Start of the last node of that backward pass. A thread that pauses later than that
    # waits when backward has ended.
    resume_ns = np.r_[work_ns, np.inf][following]
    node_ns = nodes["start_ns"].to_numpy()
    last_node = np.searchsorted(node_ns, resume_ns) - 1
    last_ns = np.r_[node_ns, 0][last_node]
    end_ns = lane["end_ns"].reindex(after // 2).to_numpy()
    pauses_late = (after >= 0) & (end_ns > last_ns)
    kind_of_call = [calls["name"].to_numpy(), in_backward]
    pauses_at_once = pd.Series(after >= 0).groupby(kind_of_call)
    share = pauses_at_once.transform("mean").to_numpy()
    late = (share <= _MOSTLY) | pauses_late
    late &= in_backward & (resume >= 0)
    # Calls of one backward pass without a pause of their own: the first pause of it.
    late_pause = pd.Series(np.where(pauses_late & late, after, _NEVER))
    first = late_pause.groupby(resume).transform("min").to_numpy()
    awaited = np.where(pauses_late, after, np.minimum(first, resume))
    return np.where(late, awaited, after)


def _within(start_ns, spans):
    """Whether each time (n,) lies inside of spans of a thread."""
    return np.asarray(start_ns) < reach(covered(spans), start_ns)


def _links(work, gloo):
    """End of a transfer -> end of the next one over the link of its rank; messages one
    way do not hold up others.
    """
    last = work.last[gloo.index]
    ends = work.slices.loc[last, ["end_ns"]].assign(event=end_of(last))
    way = gloo["name"].astype(str).str.extract(r":(send|recv)")[0].fillna("")
    link = [gloo["rank"].to_numpy(), way.to_numpy()]
    for _, lane in ends.groupby(link):
        event = lane.sort_values("end_ns", kind="stable")["event"].to_numpy()
        yield "link", event[:-1], event[1:]


def messages(timeline, slices: pd.DataFrame, in_flight: np.ndarray) -> pd.Series:
    """Number (n,) of the message of each slice in flight (mask), that both ends share;
    only complete ones.
    """
    sides = slices[in_flight]
    if sides.empty:
        return pd.Series(dtype="int64")
    columns = ["collective", "source_rank", "target_rank"]
    about = call_metadata(timeline, sides["row"].to_numpy())[columns]
    sides = sides.join(about.set_index(sides.index))
    pair = ["source_rank", "target_rank"]
    sides = sides[(sides[pair] >= 0).all(axis=1)]
    sides = sides.sort_values("start_ns", kind="stable")
    turn = sides.groupby([*pair, "collective"]).cumcount()
    is_send = sides["collective"].eq("send").astype(float)
    sends = is_send.groupby([sides[end] for end in pair]).transform("mean")
    message = sides.assign(turn=turn).groupby([*pair, "turn"])
    number = message.ngroup()
    return number[sends == 0.5]  # as many sent as received


def pauses(
    lane: pd.DataFrame,
    spans: pd.DataFrame,
    from_ns: np.ndarray,
    until_ns: np.ndarray,
) -> np.ndarray:
    """(2, n) events before and after the pause of a thread around each stretch of time,
    -1 if it does not pause.

    A thread pauses between two slices, and in an annotation or a call that waits.
    """
    if lane.empty:
        return np.full((2, len(from_ns)), -1)
    waits = lane["name"].str.contains(_PAUSES).to_numpy()
    waits = waits | spans.loc[lane["row"], "kind"].eq("annotation").to_numpy()
    end = lane["end_ns"].to_numpy()
    at = np.searchsorted(lane["start_ns"], from_ns) - 1
    # The last slice that began covers the stretch, or ended before it began.
    inside = end[at] >= until_ns
    running = (end[at] >= from_ns) & ~(inside & waits[at])
    before = start_of(lane.index.to_numpy()[at]) + ~inside
    has_next = inside | (at + 1 < len(lane))
    after = np.where(has_next, before + 1, -1)
    return np.where(running | (at < 0), -1, np.stack([before, after]))
