"""Graph of a step, measured or simulated: what had to happen before a slice of its work
could start, or end.

The work of a step is cut into slices: a device span is one; host threads, whose spans
nest, are cut where the innermost span changes, so that every instant of a thread
belongs to one slice. Each slice is two events, start and end. An edge says that an
event came after another one:

    order       start of a host slice after the end of the slice before it in its thread
    stream      start of a kernel after the end of the one before it in its stream
    launch      start of a kernel (or of a gloo transfer) after the start of its launch
    event       start of a kernel after the end of the one its stream was told to await
    backward    start of the backward pass after the forward thread came to it, and that
                thread's going on after it
    sync        end of a blocking call after the end of what it waits for: kernels, copies
                or transfers
    collective  end of a collective, or of a message, after the start of its last rank
    link        end of a gloo transfer after the end of the one that left the rank before it
    data        simulated timelines: start after the end of what is needed

A trace records only some of these. Kernels find their launch by correlation (a graph
launch has many). Waits are taken from cuda_sync rows where a trace has them, otherwise
from the names of the host's calls, and from kernels that start late, but right after
one of another stream. What the measured times contradict is left out, and so are waits
that never took place, because what they were for had ended. Clocks of the ranks must
agree, or collectives do not match.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from madmax_lib.timeline import Timeline, ends_ns
from madmax_lib.traces.waits.slices import (
    IN_FLIGHT,
    cut_into_slices,
    one_slice_per_span,
)
from madmax_lib.traces.waits.transfers import messages, pauses, transfers
from madmax_lib.traces.waits.work import StepWork, end_of, joined_edges, start_of

# Kinds of edges; of equally late sources the first kind decides.
_WHY = (
    "work",
    "order",
    "stream",
    "data",
    "event",
    "launch",
    "backward",
    "sync",
    "link",
    "collective",
)
_BLOCKS = r"^(?:cuda|hip|cu)(?:Device|Stream|Event|Ctx)Synchronize"
_COPIES = r"^(?:cuda|hip|cu)Memcpy"
_WAIT_EVENT = r"^(?:cuda|hip|cu)StreamWaitEvent"
# events at one instant that follow from each other; more is a circle
_LONGEST_TIE = 1000
LAUNCH_NS = 10_000  # a launch on an idle device takes less
_LATE_NS = 30_000  # more than a launch takes, even when busy
_SOON_NS = 20_000  # more than a stream takes to go on after the event it waits for
HELD_BACK_NS = 300_000  # more than a launch ever takes
_SKEW_NS = 1_000_000  # clocks of host and device may differ by as much


@dataclass(frozen=True)
class Graph:
    """Slices, events and edges of a step. Event 2i is the start of slice i, 2i+1 its
    end; further events have no slice:
    at one of them the last rank arrived at a collective.

    slices: one row each: row (of the timeline's spans), rank, stream, kind, name,
        start_ns, end_ns; host work has the kind host.
    """

    slices: pd.DataFrame
    time_ns: np.ndarray  # (events,) int64, from the start of the step
    # (edges,) event that came first. Edges are sorted: all into an event come before
    # any out of it
    source: np.ndarray
    target: np.ndarray  # (edges,) event that came after it
    why: np.ndarray  # (edges,) text, the kind of the edge as listed above
    # (edges,) true for the one edge into each event whose source was last and so
    # decided its time
    binding: np.ndarray


def dependency_graph(timeline: Timeline, keep: np.ndarray | None = None) -> Graph:
    """The graph of the spans that a mask (n,) keeps, all if none is given."""
    spans = timeline.spans if keep is None else timeline.spans[keep]
    spans = spans.astype({"rank": "int64", "stream": "int64"})
    if len(timeline.edges):
        return _simulated_graph(timeline, spans)
    slices = cut_into_slices(spans)
    message = messages(timeline, slices, slices["stream"] <= IN_FLIGHT)
    # A message has arrived when the first of its two ends goes on.
    first_end_ns = slices["end_ns"].groupby(message).transform("min")
    slices.loc[message.index, "end_ns"] = first_end_ns.loc[message.index]
    work = StepWork.of(timeline, spans, slices)
    time_ns = _times_ns(work)
    edges = _edges_inside(work)
    if len(slices):
        edges += _measured(work)
        edges.append(("event", *_unrecorded(slices, time_ns, edges)))
        meetings = _meetings(work, message)
        meeting = len(time_ns) + meetings.number
        edges.append(("collective", start_of(meetings.first), meeting))
        edges.append(("collective", meeting, end_of(meetings.last)))
        time_ns = np.r_[time_ns, meetings.time_ns]
    return _sorted(slices, time_ns, edges)


def _simulated_graph(timeline, spans):
    """The graph of a simulated step, whose dependencies the timeline has as edges."""
    work = StepWork.of(timeline, spans, one_slice_per_span(spans))
    pairs = timeline.edges[["source", "target"]]
    pairs = pairs[pairs.isin(spans.index).all(axis=1)]
    source = end_of(work.first[pairs["source"]])
    target = start_of(work.first[pairs["target"]])
    edges = [*_edges_inside(work), ("data", source, target)]
    return _sorted(work.slices, _times_ns(work), edges)


def _times_ns(work):
    times_ns = work.slices[["start_ns", "end_ns"]].to_numpy() - work.zero_ns
    # (slices, 2) row by row: start and end of slice i are the events 2i and 2i + 1
    return times_ns.reshape(-1)


def _edges_inside(work):
    """Edges from the start of each slice to its end, and along the device streams."""
    number = np.arange(len(work.slices))
    inside = ("work", start_of(number), end_of(number))
    return [inside, ("stream", *_streams(work.slices))]


def _streams(slices):
    """Each device slice after those of its stream that started, and that ended, last
    before it.
    """
    parts = []
    device = slices[slices["stream"] >= 0]
    device = device.sort_values(["start_ns", "end_ns"], kind="stable")
    for _, lane in device.groupby(["rank", "stream"]):
        slice_number = lane.index.to_numpy()
        start = lane["start_ns"].to_numpy()
        end = lane["end_ns"].to_numpy()
        by_end = np.argsort(end, kind="stable")
        ended = np.searchsorted(end[by_end], start, side="right")
        number = np.arange(len(lane))
        last_ended = np.r_[by_end, -1][ended - 1]
        last_started = number - 1
        # These differ where branches of a CUDA graph run side by side.
        for before in (last_ended, last_started):
            is_before = (before >= 0) & (before < number) & (end[before] <= start)
            source = slice_number[before[is_before]]
            parts.append((end_of(source), start_of(slice_number[is_before])))
    return joined_edges(parts)


def _unrecorded(slices, time_ns, edges):
    """End of a device slice -> start of one in another stream right then, if all that
    is known is longer ago.
    """
    reason_ns = np.full(len(time_ns), -_LATE_NS)
    for _, source, target in edges:
        forward = time_ns[source] <= time_ns[target]
        np.maximum.at(reason_ns, target[forward], time_ns[source][forward])
    parts = []
    for _, device in slices[slices["stream"] >= 0].groupby("rank"):
        number = device.index.to_numpy()
        start = start_of(number)
        end = end_of(number)
        end = end[np.argsort(time_ns[end], kind="stable")]
        late = start[time_ns[start] - reason_ns[start] > _LATE_NS]
        at = np.searchsorted(time_ns[end], time_ns[late], side="right") - 1
        # A kernel that starts long after all that is known of it was held back by the
        # device, not by its launch.
        held_back = time_ns[late] - reason_ns[late] > HELD_BACK_NS
        soon = held_back | (time_ns[late] - time_ns[end[at]] <= _SOON_NS)
        soon &= (at >= 0) & (end[at] != late + 1)  # not its own end
        parts.append((end[at[soon]], late[soon]))
    return joined_edges(parts)


def _measured(work):
    """Edges that follow from the names, correlations and threads of measured spans."""
    slices = work.slices
    # Host slices come first, thread by thread: neighbours of one thread are in order.
    thread = slices.loc[slices["stream"] < 0, ["rank", "stream"]].to_numpy()
    before = np.flatnonzero((thread[1:] == thread[:-1]).all(axis=1))
    yield "order", end_of(before), start_of(before + 1)
    calls = _host_calls(work)
    linked = calls[calls["correlation"] >= 0]
    launches = linked.drop_duplicates(["rank", "correlation"])
    device = _launched_work(work, launches)
    launched = device[device["first"] >= 0]
    copied = device[device["copies"] > 0]  # a copy may block the thread that calls
    number = launched["slice"].to_numpy()
    yield "launch", _launch_events(work, launched), start_of(number)
    number = copied["slice"].to_numpy()
    yield "sync", end_of(number), end_of(copied["last"].to_numpy())
    yield from _waits(_waiting_calls(calls, launches, _syncs(work)), device)
    yield from transfers(work)
    yield from _backward(work)


def _host_calls(work):
    """Host spans with a slice: rank, correlation, thread, start_ns (from the start of
    the step), first and last slice, and whether they copy, block, or tell a stream to
    wait.
    """
    calls = work.spans
    calls = calls[(calls["stream"] < 0) & (calls["kind"] == "cpu")]
    calls = calls[work.has_slice(calls.index)]
    name = calls["name"]
    table = calls[["rank", "correlation", "op", "step", "dur_ns"]]
    return table.assign(
        thread=calls["stream"],
        start_ns=calls["start_ns"] - work.zero_ns,
        first=work.first[calls.index],
        last=work.last[calls.index],
        copies=name.str.contains(_COPIES),
        blocks=name.str.contains(_BLOCKS),
        tells=name.str.contains(_WAIT_EVENT),
    )


def _launched_work(work, launches):
    """Device slices in order of their launch: rank, stream, slice, launch_ns (its own
    start without a launch), and thread, first, last (-1 without) and copies of the call.
    """
    slices = work.slices
    device = slices[slices["stream"] >= 0]
    device = device[["row", "rank", "stream", "start_ns"]].reset_index(names="slice")
    device["correlation"] = work.spans.loc[device["row"], "correlation"].to_numpy()
    # From the start of the step, so that ns survive where a missing launch makes them
    # floats.
    device["own_start_ns"] = device.pop("start_ns") - work.zero_ns
    device = device.merge(launches, "left", on=["rank", "correlation"])
    launch_ns = device["start_ns"].fillna(device["own_start_ns"]).astype("int64")
    without_launch = {"thread": 0, "first": -1, "last": -1, "copies": 0}
    of_call = device[list(without_launch)].astype(float).fillna(without_launch)
    device = device.assign(launch_ns=launch_ns, **of_call.astype("int64"))
    return device.sort_values("launch_ns")


def _launch_events(work, launched):
    """Events (n,) at which work was launched: the start of its call.

    Where clocks say that the work starts a little earlier: what its thread did then.
    """
    start_ns = work.slices["start_ns"].to_numpy() - work.zero_ns
    thread = work.slices["stream"].to_numpy()
    number = launched["first"].to_numpy(copy=True)
    kernel_ns = launched["own_start_ns"].to_numpy()
    ahead_ns = start_ns[number] - kernel_ns
    early = (ahead_ns > 0) & (ahead_ns < _SKEW_NS)
    while early.any():
        # Slices of a thread follow each other.
        early &= (number > 0) & (thread[number - 1] == thread[number])
        number[early] -= 1
        early &= start_ns[number] > kernel_ns
    return start_of(number)


def _syncs(work):
    """Calls that cuda_sync rows explain: rank, correlation, on (stream that waits), of
    (stream waited for), record (correlation of the event's record).
    """
    columns = ["rank", "correlation", "on", "of", "record"]
    spans = work.spans
    if not (spans["kind"] == "idle").any():
        return pd.DataFrame(columns=columns, dtype="int64")
    syncs = work.timeline.side_tables["syncs"]
    syncs = syncs.rename(
        columns={"correlation": "record", "stream": "of", "name": "sync"}
    )
    where = spans[["rank", "stream", "correlation"]].rename(columns={"stream": "on"})
    syncs = syncs.join(where, on="row", how="inner")
    syncs["of"] = syncs["of"].mask(syncs["sync"] == "Stream Sync", syncs["on"])
    syncs = syncs.loc[syncs["correlation"] >= 0, columns]
    return syncs.drop_duplicates(["rank", "correlation"])


def _waiting_calls(calls, launches, syncs):
    """Calls that block or tell a stream to wait, in order of time, with what `_syncs`
    knows of them (-1: unknown) and before_ns: what was launched later does not count.
    """
    waits = calls[calls["blocks"] | calls["tells"]]
    waits = waits.merge(syncs, "left", on=["rank", "correlation"])
    unknown = {"on": -1, "of": -1, "record": -1}
    waits = waits.fillna(unknown).astype(dict.fromkeys(unknown, "int64"))
    records = launches[["rank", "correlation", "start_ns"]]
    records = records.rename(columns={"correlation": "record", "start_ns": "before_ns"})
    waits = waits.merge(records, "left", on=["rank", "record"])
    before_ns = waits["before_ns"].fillna(waits["start_ns"]).astype("int64")
    return waits.assign(before_ns=before_ns).sort_values("start_ns")


def _waits(waits, device):
    """Host calls and streams that wait for what was launched before, on one stream or,
    where unknown, on any.
    """
    tells = waits["tells"]
    blocking = waits[~tells]
    blocking = blocking.assign(target=end_of(blocking["last"]))
    yield "sync", *_last_launched(blocking, device)
    # A stream that was told to wait does so at the next work that is launched on it, or,
    # where the stream is unknown, by the thread that told it.
    on_stream = waits["on"] >= 0
    waits = waits.assign(lane=waits["on"].where(on_stream, waits["thread"]))
    for column, telling in (
        ("stream", waits[tells & on_stream]),
        ("thread", waits[tells & ~on_stream]),
    ):
        following = device[["rank", "launch_ns", "slice"]].assign(lane=device[column])
        held_back = pd.merge_asof(
            telling,
            following,
            left_on="start_ns",
            right_on="launch_ns",
            by=["rank", "lane"],
            direction="forward",
        ).dropna(subset="slice")
        held_back["target"] = start_of(held_back["slice"].astype("int64"))
        yield "event", *_last_launched(held_back, device)


def _last_launched(waits, device):
    """End of the last slice that was launched before a wait -> the wait's target, on
    each stream it is about.
    """
    streams = device[["rank", "stream"]].drop_duplicates()
    waits = waits[["rank", "target", "before_ns", "of"]].merge(streams, on="rank")
    waits = waits[(waits["of"] < 0) | (waits["of"] == waits["stream"])]
    last = pd.merge_asof(
        waits.sort_values("before_ns"),
        device[["rank", "stream", "launch_ns", "slice"]],
        left_on="before_ns",
        right_on="launch_ns",
        by=["rank", "stream"],
    ).dropna(subset="slice")
    source = last["slice"].to_numpy(dtype="int64")
    return end_of(source), last["target"].to_numpy()


def _backward(work):
    """The thread of the forward pass to autograd's thread and back, wherever the first
    rests while the second works.
    """
    spans = work.spans
    operators = work.timeline.side_tables["operators"]
    operators = operators[operators["sequence"] >= 0]
    operators = operators.join(spans[["rank", "stream"]], on="row", how="inner")
    is_backward = operators["forward_thread"] > 0
    forward = operators[~is_backward].drop_duplicates(["rank", "sequence"])
    pairs = operators[is_backward].merge(
        forward, on=["rank", "sequence"], suffixes=("", "_forward")
    )
    threads = ["rank", "stream", "stream_forward"]
    pairs = pairs[pairs["stream"] != pairs["stream_forward"]].value_counts(threads)
    # The most frequent forward thread of each backward thread comes first.
    main_pairs = pairs.index[~pairs.index.droplevel(2).duplicated()]
    for rank, backward_thread, forward_thread in main_pairs:
        lane = work.lane(rank, forward_thread)
        other = work.lane(rank, backward_thread)
        # Stretches of the backward thread in which no forward slice starts.
        at = np.searchsorted(lane["start_ns"], other["start_ns"], side="right")
        change = np.flatnonzero(np.diff(at, prepend=-1, append=-1))
        begin = other.iloc[change[:-1]]
        end = other.iloc[change[1:] - 1]
        from_ns = begin["start_ns"].to_numpy()
        before, after = pauses(lane, spans, from_ns, end["end_ns"].to_numpy())
        rests = before >= 0
        yield "backward", before[rests], start_of(begin.index.to_numpy()[rests])
        resumes = after >= 0
        yield "backward", end_of(end.index.to_numpy()[resumes]), after[resumes]


@dataclass(frozen=True)
class _Meetings:
    """Collectives and messages that the ranks made together, one entry per rank."""

    number: np.ndarray  # (n,) of the meeting, 0, 1, ...
    first: np.ndarray  # (n,) first slice of the rank's call
    last: np.ndarray  # (n,) its last slice
    time_ns: np.ndarray  # (meetings,) when the last rank came


def _meetings(work, message):
    """Meetings of ranks; a call is the k-th of its name, group and step."""
    comm = work.spans[work.spans["kind"] == "comm"]
    comm = comm[work.has_slice(comm.index)].sort_values("start_ns", kind="stable")
    comm = comm.assign(
        group=comm["group"].cat.codes,
        name=comm["name"].cat.codes,
        end_ns=ends_ns(comm),
    )
    keys = ["group", "name", "step"]
    turn = comm.groupby([*keys, "rank"]).cumcount()
    call = comm.assign(turn=turn).groupby([*keys, "turn"])
    ranks = comm.groupby(["group", "name"])["rank"].transform("nunique")
    meets = (ranks > 1) & (call["rank"].transform("size") == ranks)
    # A lost call would shift the later ones of its name: then none of them count.
    complete = meets.groupby([comm[key] for key in keys]).transform("all")
    last_start_ns = call["start_ns"].transform("max")
    overlaps = last_start_ns <= call["end_ns"].transform("min")
    counts = complete & overlaps
    # Number 0, 1, ... of the meeting of each rank's call.
    _, number = np.unique(call.ngroup()[counts], return_inverse=True)
    row = comm.index[counts].to_numpy()
    number = np.r_[number, message.to_numpy() + number.max(initial=-1) + 1]
    first = np.r_[work.first[row], message.index]
    last = np.r_[work.last[row], message.index]
    start_ns = work.slices["start_ns"].iloc[first]
    time_ns = start_ns.groupby(number).max().to_numpy(dtype="int64") - work.zero_ns
    return _Meetings(number, first, last, time_ns)


def _sorted(slices, time_ns, edges):
    """The graph without edges that go back in time, or in a circle at one instant."""
    source, target = joined_edges([edge[1:] for edge in edges])
    lengths = [len(edge[1]) for edge in edges]
    why = np.repeat([_WHY.index(edge[0]) for edge in edges], lengths)
    forward = (time_ns[source] <= time_ns[target]) & (source != target)
    level = _levels(time_ns, source[forward], target[forward])
    forward &= (time_ns[source] < time_ns[target]) | (level[source] < level[target])
    source = source[forward]
    target = target[forward]
    why = why[forward]
    # Edges in the order of their targets, the latest source first: that one decides.
    turn = np.empty(len(time_ns), dtype="int64")
    turn[np.lexsort((level, time_ns))] = np.arange(len(time_ns))
    from_ns = time_ns[source].astype(float)
    order = np.lexsort((why, -from_ns, turn[target]))
    deciding = order[np.diff(target[order], prepend=-1) != 0]
    launch = why == _WHY.index("launch")
    alone = deciding[launch[deciding]]
    if len(alone):
        # A launch decides, too, when something else ended while it was on its way.
        on_the_way_ns = time_ns[target[alone]] - time_ns[source[alone]]
        from_ns[launch] += min(np.quantile(on_the_way_ns, 0.1), LAUNCH_NS)
        order = np.lexsort((why, -from_ns, turn[target]))
    return Graph(
        slices=slices,
        time_ns=time_ns,
        source=source[order],
        target=target[order],
        why=np.array(_WHY, dtype=object)[why[order]],
        binding=np.diff(target[order], prepend=-1) != 0,
    )


def _levels(time_ns, source, target):
    """Longest chain (events,) of edges at the same instant that leads to each event; in
    a circle it is cut, and the edge that closes it does not rise.
    """
    level = np.zeros(len(time_ns), dtype="int64")
    at_once = time_ns[source] == time_ns[target]
    before = source[at_once]
    after = target[at_once]
    for _ in range(_LONGEST_TIE):
        late = level[after] <= level[before]
        if not late.any():
            break
        np.maximum.at(level, after[late], level[before[late]] + 1)
    return level
