"""What had to happen before a slice of a step's work could start, or end? The graph of
a step, measured or simulated.

The work of a step is cut into slices: a device span is one; host threads, whose spans
nest, are cut where the innermost span changes, so that every instant of a thread
belongs to one slice. Each slice is two events, start and end. An edge says that an
event came after another one:

    order       start of a host slice after the end of the slice before it in its thread
    stream      start of a kernel after the end of the one before it in its stream
    launch      start of a kernel (or of a gloo transfer) after the start of the call that launches it
    event       start of a kernel after the end of the one that its stream was told to wait for
    backward    start of the backward pass after the forward thread came to it, and that thread's going on after it
    sync        end of a blocking call after the end of the kernels, copies or transfers it waits for
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

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.waits.slices import (
    IN_FLIGHT,
    cut_into_slices,
    one_slice_per_span,
)
from madmax_lib.traces.waits.transfers import messages, pauses, transfers

__all__ = ["Graph", "dependency_graph"]

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
)  # ties: first wins
_BLOCKS = r"^(?:cuda|hip|cu)(?:Device|Stream|Event|Ctx)Synchronize"
_COPIES = r"^(?:cuda|hip|cu)Memcpy"
_WAIT_EVENT = r"^(?:cuda|hip|cu)StreamWaitEvent"
_LONGEST_TIE = (
    1000  # events at one instant that follow from each other; more is a circle
)
_LAUNCH_NS = 10_000  # a launch on an idle device takes less
# more than a launch takes, even when busy; more than a stream takes to go on
_LATE_NS = 30_000
_SOON_NS = 20_000
_NONE = np.zeros(0, dtype=np.int64)


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
    given = timeline.edges[
        timeline.edges["source"].isin(spans.index)
        & timeline.edges["target"].isin(spans.index)
    ]
    simulated = len(timeline.edges) > 0
    slices = one_slice_per_span(spans) if simulated else cut_into_slices(spans)
    message = (
        pd.Series(dtype="int64")
        if simulated
        else messages(timeline, slices, slices["stream"] <= IN_FLIGHT)
    )
    slices.loc[message.index, "end_ns"] = (
        slices["end_ns"].groupby(message).transform("min").loc[message.index]
    )
    slice_of_row = np.full((2, len(timeline)), -1)  # first and last slice of each row
    slice_of_row[0, slices["row"].to_numpy()[::-1]] = np.arange(len(slices))[::-1]
    slice_of_row[1, slices["row"].to_numpy()] = np.arange(len(slices))
    zero_ns = slices["start_ns"].min() if len(slices) else 0
    time_ns = slices[["start_ns", "end_ns"]].to_numpy().reshape(-1) - zero_ns
    start = 2 * np.arange(len(slices))
    edges = [("work", start, start + 1), ("stream", *_streams(slices))]
    if simulated:
        edges.append(
            (
                "data",
                2 * slice_of_row[0, given["source"]] + 1,
                2 * slice_of_row[0, given["target"]],
            )
        )
    elif len(slices):
        edges += _measured(timeline, spans, slices, slice_of_row)
        edges.append(("event", *_unrecorded(slices, time_ns, edges)))
        arrive, leave, meetings_ns = _collectives(
            spans, slices, slice_of_row, message, zero_ns
        )
        edges += [("collective", *arrive), ("collective", *leave)]
        time_ns = np.concatenate([time_ns, meetings_ns])
    return _sorted(slices, time_ns, edges)


def _streams(slices: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Each device slice after those of its stream that started, and that ended, last
    before it.
    """
    sources = [_NONE]
    targets = [_NONE]
    device = slices[slices["stream"] >= 0].sort_values(
        ["start_ns", "end_ns"], kind="stable"
    )
    for _, lane in device.groupby(["rank", "stream"]):
        start = lane["start_ns"].to_numpy()
        end = lane["end_ns"].to_numpy()
        by_end = np.argsort(end, kind="stable")
        number = np.arange(len(lane))
        latest = np.r_[by_end, -1][
            np.searchsorted(end[by_end], start, side="right") - 1
        ]
        for before in (
            latest,
            number - 1,
        ):  # not the same where branches of a CUDA graph run side by side
            ended = (before >= 0) & (before < number) & (end[before] <= start)
            sources.append(2 * lane.index.to_numpy()[before[ended]] + 1)
            targets.append(2 * lane.index.to_numpy()[ended])
    return np.concatenate(sources), np.concatenate(targets)


def _unrecorded(
    slices: pd.DataFrame, time_ns: np.ndarray, edges: list[tuple]
) -> tuple[np.ndarray, np.ndarray]:
    """End of a device slice -> start of one in another stream right then, if all that
    is known is longer ago.
    """
    known_ns = np.full(len(time_ns), -_LATE_NS)
    for _, source, target in edges:
        forward = time_ns[source] <= time_ns[target]
        np.maximum.at(known_ns, target[forward], time_ns[source][forward])
    sources = [_NONE]
    targets = [_NONE]
    for _, device in slices[slices["stream"] >= 0].groupby("rank"):
        starts = 2 * device.index.to_numpy()
        ends = 2 * device.index.to_numpy() + 1
        ends = ends[np.argsort(time_ns[ends], kind="stable")]
        late = starts[time_ns[starts] - known_ns[starts] > _LATE_NS]
        at = np.searchsorted(time_ns[ends], time_ns[late], side="right") - 1
        soon = (
            (at >= 0)
            & (time_ns[late] - time_ns[ends[at]] <= _SOON_NS)
            & (ends[at] != late + 1)
        )
        sources.append(ends[at[soon]])
        targets.append(late[soon])
    return np.concatenate(sources), np.concatenate(targets)


def _measured(
    timeline: Timeline,
    spans: pd.DataFrame,
    slices: pd.DataFrame,
    slice_of_row: np.ndarray,
) -> Iterator[tuple]:
    thread = slices.loc[
        slices["stream"] < 0, ["rank", "stream"]
    ].to_numpy()  # host slices come first, in their order
    order = np.flatnonzero((thread[1:] == thread[:-1]).all(axis=1))
    yield "order", 2 * order + 1, 2 * order + 2
    calls = spans[
        (spans["stream"] < 0)
        & (spans["kind"] == "cpu")
        & (slice_of_row[0, spans.index] >= 0)
    ]
    first, last = slice_of_row[:, calls.index]
    start_ns = calls["start_ns"] - slices["start_ns"].min()
    calls = calls.assign(
        first=first, last=last, thread=calls["stream"], start_ns=start_ns
    )
    for column, pattern in (
        ("copies", _COPIES),
        ("blocks", _BLOCKS),
        ("tells", _WAIT_EVENT),
    ):
        calls[column] = calls["name"].str.contains(pattern)
    calls = calls.drop(columns=["stream", "name", "kind", "group"])
    launches = calls[calls["correlation"] >= 0].drop_duplicates(["rank", "correlation"])
    device = slices.loc[
        slices["stream"] >= 0, ["row", "rank", "stream", "start_ns"]
    ].reset_index(names="slice")
    device["start_ns"] -= slices[
        "start_ns"
    ].min()  # so that ns survive where a missing launch makes them floats
    device["correlation"] = spans.loc[device["row"], "correlation"].to_numpy()
    device = device.merge(
        launches, "left", on=["rank", "correlation"], suffixes=("", "_launch")
    )
    device["launch_ns"] = (
        device["start_ns_launch"].fillna(device["start_ns"]).astype("int64")
    )
    without_launch = {"thread": 0, "first": -1, "last": -1, "copies": 0}
    of_call = device[list(without_launch)].astype(float).fillna(without_launch)
    device = device.assign(**of_call.astype("int64")).sort_values("launch_ns")
    launched = device[device["first"] >= 0]
    copied = device[device["copies"] > 0]
    yield "launch", 2 * launched["first"].to_numpy(), 2 * launched["slice"].to_numpy()
    yield "sync", 2 * copied["slice"].to_numpy() + 1, 2 * copied["last"].to_numpy() + 1
    yield from _waits(calls, launches, _syncs(timeline, spans), device)
    yield from transfers(timeline, spans, slices, slice_of_row)
    yield from _backward(timeline, spans, slices)


def _syncs(timeline: Timeline, spans: pd.DataFrame) -> pd.DataFrame:
    """What cuda_sync rows know of a call: rank, correlation, on (stream that waits), of
    (stream waited for), record.
    """
    columns = ["rank", "correlation", "on", "of", "record"]
    if not (spans["kind"] == "idle").any():
        return pd.DataFrame(columns=columns, dtype="int64")
    syncs = timeline.side_tables["syncs"].rename(
        columns={"correlation": "record", "stream": "of", "name": "sync"}
    )
    syncs = syncs.join(
        spans[["rank", "stream", "correlation"]], on="row", how="inner"
    ).rename(columns={"stream": "on"})
    syncs["of"] = syncs["of"].mask(syncs["sync"] == "Stream Sync", syncs["on"])
    return syncs.loc[syncs["correlation"] >= 0, columns].drop_duplicates(
        ["rank", "correlation"]
    )


def _waits(
    calls: pd.DataFrame,
    launches: pd.DataFrame,
    syncs: pd.DataFrame,
    device: pd.DataFrame,
) -> Iterator[tuple]:
    """Host calls and streams that wait for what was launched before, on one stream or,
    where unknown, on any.
    """
    waits = calls[calls["blocks"] | calls["tells"]].merge(
        syncs, "left", on=["rank", "correlation"]
    )
    waits = waits.fillna({"on": -1, "of": -1, "record": -1}).astype(
        {"on": "int64", "of": "int64", "record": "int64"}
    )
    records = launches[["rank", "correlation", "start_ns"]].rename(
        columns={"correlation": "record"}
    )
    waits = waits.merge(
        records, "left", on=["rank", "record"], suffixes=("", "_record")
    ).sort_values("start_ns")
    waits["before_ns"] = (
        waits["start_ns_record"].fillna(waits["start_ns"]).astype("int64")
    )
    tells = waits["tells"]
    yield (
        "sync",
        *_last_launched(
            waits[~tells].assign(target=2 * waits.loc[~tells, "last"] + 1), device
        ),
    )
    waits = waits.rename(columns={"thread": "caller"})
    device = device.rename(columns={"stream": "own"})
    for chosen, lane, by in (
        (waits["on"] >= 0, "on", "own"),
        (waits["on"] < 0, "caller", "thread"),
    ):
        after = device.rename(columns={by: lane})[["rank", lane, "launch_ns", "slice"]]
        keys = {"left_on": "start_ns", "right_on": "launch_ns", "by": ["rank", lane]}
        held = pd.merge_asof(
            waits[tells & chosen], after, direction="forward", **keys
        ).dropna(subset="slice")
        held["target"] = 2 * held["slice"].astype("int64")
        yield "event", *_last_launched(held, device.rename(columns={"own": "stream"}))


def _last_launched(
    waits: pd.DataFrame, device: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray]:
    """End of the last slice that was launched before a wait -> the wait's target, on
    each stream it is about.
    """
    waits = waits[["rank", "target", "before_ns", "of"]].merge(
        device[["rank", "stream"]].drop_duplicates(), on="rank"
    )
    waits = waits[(waits["of"] < 0) | (waits["of"] == waits["stream"])].sort_values(
        "before_ns"
    )
    device = device[["rank", "stream", "launch_ns", "slice"]]
    last = pd.merge_asof(
        waits, device, left_on="before_ns", right_on="launch_ns", by=["rank", "stream"]
    )
    last = last.dropna(subset="slice").astype({"slice": "int64"})
    return 2 * last["slice"].to_numpy() + 1, last["target"].to_numpy()


def _backward(
    timeline: Timeline, spans: pd.DataFrame, slices: pd.DataFrame
) -> Iterator[tuple]:
    """The thread of the forward pass to autograd's thread and back, wherever the first
    rests while the second works.
    """
    operators = timeline.side_tables["operators"]
    operators = operators[
        (operators["sequence"] >= 0) & operators["row"].isin(spans.index)
    ]
    operators = operators.join(spans[["rank", "stream"]], on="row")
    later = operators["forward_thread"] > 0
    first = operators[~later].drop_duplicates(["rank", "sequence"])
    pairs = operators[later].merge(
        first, on=["rank", "sequence"], suffixes=("", "_forward")
    )
    pairs = pairs[pairs["stream"] != pairs["stream_forward"]].value_counts(
        ["rank", "stream", "stream_forward"]
    )
    for rank, backward, forward in pairs.index[
        ~pairs.index.droplevel(2).duplicated()
    ]:  # the most frequent pair
        lane, other = (
            slices[(slices["rank"] == rank) & (slices["stream"] == s)]
            for s in (forward, backward)
        )
        at = np.searchsorted(lane["start_ns"], other["start_ns"], side="right")
        change = np.flatnonzero(np.diff(at, prepend=-1, append=-1))
        begin = other.iloc[change[:-1]]
        end = other.iloc[change[1:] - 1]
        before, after = pauses(
            lane, spans, begin["start_ns"].to_numpy(), end["end_ns"].to_numpy()
        )
        yield "backward", before[before >= 0], 2 * begin.index.to_numpy()[before >= 0]
        yield "backward", 2 * end.index.to_numpy()[after >= 0] + 1, after[after >= 0]


def _collectives(
    spans: pd.DataFrame,
    slices: pd.DataFrame,
    slice_of_row: np.ndarray,
    message: pd.Series,
    zero_ns: int,
) -> tuple[tuple, tuple, np.ndarray]:
    """Edges into and out of the meetings of ranks, and their times; a call is the k-th
    of its name, group and step.
    """
    keys = ["group", "name", "step"]
    events = 2 * len(slices)
    comm = spans[
        (spans["kind"] == "comm") & (slice_of_row[0, spans.index] >= 0)
    ].sort_values("start_ns", kind="stable")
    comm = comm.assign(
        group=comm["group"].cat.codes, name=comm["name"].cat.codes, row=comm.index
    )
    comm["turn"] = comm.groupby([*keys, "rank"]).cumcount()
    comm["end_ns"] = comm["start_ns"] + comm["dur_ns"]
    call = comm.groupby([*keys, "turn"])
    ranks = comm.groupby(["group", "name"])["rank"].transform("nunique")
    meets = (ranks > 1) & (call["rank"].transform("size") == ranks)
    complete = meets.groupby([comm[key] for key in keys]).transform(
        "all"
    )  # a lost call would shift the later ones
    together = call["start_ns"].transform("max") <= call["end_ns"].transform("min")
    comm = comm[complete & together]
    meeting = comm.groupby([*keys, "turn"]).ngroup().to_numpy()
    row = comm["row"].to_numpy(dtype=np.int64)
    meeting = np.r_[meeting, message.to_numpy() + meeting.max(initial=-1) + 1]
    first, last = (np.r_[place[row], message.index] for place in slice_of_row)
    times_ns = (
        slices["start_ns"].iloc[first].groupby(meeting).max().to_numpy(dtype=np.int64)
        - zero_ns
    )
    return (2 * first, events + meeting), (events + meeting, 2 * last + 1), times_ns


def _sorted(slices: pd.DataFrame, time_ns: np.ndarray, edges: list[tuple]) -> Graph:
    """The graph without edges that go back in time, or in a circle at one instant."""
    source, target = (
        np.concatenate([np.asarray(e[i], dtype=np.int64) for e in edges])
        for i in (1, 2)
    )
    why = np.concatenate([np.full(len(e[1]), _WHY.index(e[0])) for e in edges])
    keep = (time_ns[source] <= time_ns[target]) & (source != target)
    source = source[keep]
    target = target[keep]
    why = why[keep]
    at_once = time_ns[source] == time_ns[target]
    level = np.zeros(len(time_ns), dtype=np.int64)
    (before, after) = (source[at_once], target[at_once])
    for _ in range(_LONGEST_TIE):
        late = level[after] <= level[before]
        if not late.any():
            break
        np.maximum.at(level, after[late], level[before[late]] + 1)
    keep = ~at_once | (level[source] < level[target])
    source = source[keep]
    target = target[keep]
    why = why[keep]
    turn = np.empty(len(time_ns), dtype=np.int64)
    turn[np.lexsort((level, time_ns))] = np.arange(len(time_ns))
    known_ns = time_ns[source].astype(float)
    order = np.lexsort((why, -known_ns, turn[target]))
    last = order[np.diff(target[order], prepend=-1) != 0]
    alone = last[why[last] == _WHY.index("launch")]
    if len(
        alone
    ):  # a launch decides, too, when something else ended while it was on its way
        usual_ns = np.quantile(time_ns[target[alone]] - time_ns[source[alone]], 0.1)
        known_ns[why == _WHY.index("launch")] += min(usual_ns, _LAUNCH_NS)
        order = np.lexsort((why, -known_ns, turn[target]))
    source = source[order]
    target = target[order]
    why = why[order]
    return Graph(
        slices,
        time_ns,
        source,
        target,
        np.array(_WHY, dtype=object)[why],
        np.diff(target, prepend=-1) != 0,
    )
