"""When does each operation start? Ops on in-order streams with dependencies; the
longest path is the step.

An op starts when the op issued before it on the same stream of its rank has ended and
every op it waits for has ended: start = max(end of the stream's previous op, ends of
its dependencies). Streams never reorder, so a longer op never makes another one start
earlier, and more bandwidth never makes a step slower. Ops are issued after all they
wait for.

Which streams has a rank of a simulated step, and which threads its host? Their
numbers and their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import cache

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import KINDS, Meta, Timeline

_ABOUT = {"rank": 0, "group": "", "size_bytes": float("nan")}  # of an op unless said
_TURNS = 12  # in which durations and overlaps of ranks that share cores settle
_NEVER = 1e-300  # keeps a quotient of two zeros at zero


class Program:
    """Ops in the order in which they are issued; `op` appends one and returns its
    number.
    """

    __slots__ = (
        "after",
        "duration_s",
        "group",
        "kind",
        "name",
        "rank",
        "size_bytes",
        "stream",
    )

    def __init__(self):
        for name in self.__slots__:
            setattr(self, name, [])

    def __len__(self):
        return len(self.duration_s)

    def op(
        self,
        stream: int,
        kind: str,
        name: str,
        duration_s: float,
        after: Iterable[int] = (),
        **about,
    ) -> int:
        """Issue an op on a stream after the ops numbered in `after`, which are issued
        before it.

        about: its rank (default 0), group (none) and size_bytes (NaN).
        """
        self.stream.append(stream)
        self.kind.append(kind)
        self.name.append(name)
        self.duration_s.append(duration_s)
        self.after.append(tuple(after))
        for column, value in (_ABOUT | about).items():
            getattr(self, column).append(value)
        return len(self.duration_s) - 1

    def extend(
        self, part: Program, rank: int, waits: Iterable[tuple[int, int]] = ()
    ) -> int:
        """Issue all ops of another program on a rank and return the number of the
        first.

        waits: (op of the part, op of this program that it waits for).
        """
        base = len(self)
        self.rank += [rank] * len(part)
        for name in ("stream", "kind", "name", "duration_s", "group", "size_bytes"):
            getattr(self, name).extend(getattr(part, name))
        self.after += [tuple([base + other for other in after]) for after in part.after]
        for op, other in waits:
            self.after[base + op] += (other,)
        return base


def run(program: Program) -> tuple[list[float], list[float]]:
    """Start and end of each op in seconds, (n,) each, from 0.

    Raises ValueError for a negative duration, and for an op that waits for one that is
    not issued before it.
    """
    start_s = []
    end_s = []
    tail = {}
    ops = zip(
        program.rank, program.stream, program.duration_s, program.after, strict=True
    )
    for op, (rank, stream, duration_s, after) in enumerate(ops):
        begin = tail.get((rank, stream), 0.0)
        for other in after:
            if not 0 <= other < op:
                raise ValueError(
                    f"op {op} ({program.name[op]}) waits for op {other}, which is "
                    "not issued before it"
                )
            if end_s[other] > begin:
                begin = end_s[other]
        if not duration_s >= 0:
            raise ValueError(
                f"op {op} ({program.name[op]}) has duration {duration_s} s"
            )
        start_s.append(begin)
        end_s.append(begin + duration_s)
        tail[rank, stream] = end_s[op]
    return start_s, end_s


def apply_core_sharing(program: Program, solo_ratio: float) -> None:
    """Make compute shorter while other ranks do not compute: `solo_ratio` of its
    duration beside none of them, all of it beside all.

    Durations and overlaps follow from each other, so they are worked out in turns.
    """
    compute = np.flatnonzero(np.array(program.kind) == "compute")
    others = len(set(program.rank)) - 1
    full_s = np.array(program.duration_s)[compute]
    for _ in range(_TURNS):
        start_s, end_s = (np.array(times)[compute] for times in run(program))
        # busy seconds of all ranks so far: a line whose slope is the number of ranks that
        # compute, one more from each start and one less from each end on
        corners = np.concatenate([start_s, end_s])
        order = np.argsort(corners, kind="stable")
        slopes = np.cumsum(np.repeat([1, -1], len(compute))[order])
        corners = corners[order]
        busy_s = np.cumsum(np.diff(corners, prepend=0.0) * [0, *slopes[:-1]])
        # seconds for which other ranks compute while an op lasts, summed over them
        both_s = np.interp(end_s, corners, busy_s) - np.interp(start_s, corners, busy_s)
        overlap_s = np.maximum(both_s - (end_s - start_s), 0.0)
        share = overlap_s / np.maximum((end_s - start_s) * others, _NEVER)
        share = np.minimum(share, 1.0)
        wanted_s = full_s * (solo_ratio + (1 - solo_ratio) * share)
        # half a step each turn, so that durations and overlaps do not swing
        durations_s = np.array(program.duration_s)
        durations_s[compute] = (durations_s[compute] + wanted_s) / 2
        program.duration_s = durations_s.tolist()


def run_with_stragglers(
    program: Program,
    slower: np.ndarray,
    groups: Mapping[str, tuple[int, int]],
    devices: int,
) -> np.ndarray:
    """Start and end in seconds, (2, n, devices), on the first of the devices that ranks
    stand for where some are slower.

    slower: (ranks, devices), of compute. groups: (size, distance of neighbours) by
    name, of those among the devices of a rank: a collective begins on a device when it
    has come and ends a duration after the last one of its group has. What a rank sends
    to another goes from each device to its like.
    """
    times_s = np.empty((2, len(program), devices))
    # the last op that waits for each: its end can be forgotten then
    needed = {other: op for op, after in enumerate(program.after) for other in after}
    ends = dict[int, np.ndarray]()
    tail = dict[tuple[int, int], np.ndarray]()
    ops = zip(
        program.rank,
        program.stream,
        program.kind,
        program.duration_s,
        program.after,
        program.group,
        strict=True,
    )
    for op, (rank, stream, kind, duration_s, after, group) in enumerate(ops):
        begin = tail.get((rank, stream), np.zeros(slower.shape[1]))
        for other in after:
            begin = np.maximum(begin, ends[other])
        end = begin
        if kind == "comm" and group in groups:
            # (groups, members, stride): each ends when the last of its members begins
            members = begin.reshape(-1, *groups[group])
            latest = members.max(axis=1, keepdims=True)
            end = np.broadcast_to(latest, members.shape).reshape(-1)
        end = end + duration_s * (slower[rank] if kind == "compute" else 1.0)
        times_s[:, op] = begin[:devices], end[:devices]
        tail[rank, stream] = ends[op] = end
        for done in (op, *after):
            if needed.get(done, op) <= op:
                ends.pop(done, None)
    return times_s


def to_timeline(program: Program, meta: Meta) -> Timeline:
    """The program as a simulated Timeline; ends are rounded to whole ns, so neighbours
    stay neighbours.

    edges: target waits for source, why is "data" for a dependency and "stream" for the
    order on a stream.
    """
    start_s, end_s = run(program)
    start_ns = np.rint(np.array(start_s) * NS_PER_S).astype(np.int64)
    end_ns = np.rint(np.array(end_s) * NS_PER_S).astype(np.int64)
    count = len(program)
    spans = pd.DataFrame(
        {
            "rank": np.array(program.rank, dtype=np.int32),
            "stream": np.array(program.stream, dtype=np.int32),
            "kind": pd.Categorical(program.kind, KINDS),
            "name": text_column(program.name),
            "start_ns": start_ns,
            "dur_ns": end_ns - start_ns,
            "step": np.zeros(count, dtype=np.int32),
            "correlation": np.full(count, -1, dtype=np.int64),
            "op": np.arange(count, dtype=np.int64),
            "group": text_column(program.group),
            "size_bytes": np.array(program.size_bytes, dtype=np.float64),
        }
    )
    return Timeline(spans, meta, _edges(program))


def with_receive_kernels(timeline: Timeline) -> Timeline:
    """Add the spinning receive kernels a profiler records while a rank waits for a
    message.

    A rank whose step begins with a message waits for that of the next step when it is
    done.
    """
    spans = timeline.spans
    rank = spans["rank"].to_numpy()
    end_ns = (spans["start_ns"] + spans["dur_ns"]).to_numpy()
    source = timeline.edges["source"].to_numpy()
    target = timeline.edges["target"].to_numpy()
    crosses = rank[source] != rank[target]
    if not crosses.any():
        return timeline
    # when all that an op waits for is there, but messages: then it begins to spin
    free_ns = np.zeros(len(spans), np.int64)
    np.maximum.at(free_ns, target[~crosses], end_ns[source[~crosses]])
    source = source[crosses]
    target = target[crosses]
    waits = spans.take(source).assign(
        rank=rank[target],
        stream=int(Stream.RECEIVE),
        op=-1,
        size_bytes=0.0,
        start_ns=free_ns[target],
        end_ns=end_ns[source],
    )
    waits = waits.sort_values(["rank", "start_ns"])
    # the first wait of a rank comes again at the end, if no compute is before it
    computes = spans["kind"] == "compute"
    begun_ns = spans["start_ns"].where(computes).groupby(rank).min()
    first = waits.drop_duplicates("rank").set_index("rank", drop=False)
    done_ns = pd.Series(end_ns).groupby(rank).max()[first.index]
    is_first = first["end_ns"] <= begun_ns[first.index]
    again = first.assign(start_ns=done_ns, end_ns=end_ns.max())[is_first]
    waits = pd.concat([waits, again], ignore_index=True)
    waits = waits.sort_values(["rank", "start_ns"])
    # one kernel at a time on the stream: each begins when those before have ended
    before_ns = waits.groupby("rank")["end_ns"].transform(
        lambda ends: ends.cummax().shift(fill_value=0)
    )
    waits["start_ns"] = np.maximum(waits["start_ns"], before_ns)
    waits["dur_ns"] = waits["end_ns"] - waits["start_ns"]
    waits = waits.loc[waits["dur_ns"] > 0, spans.columns]
    return replace(timeline, spans=pd.concat([spans, waits], ignore_index=True))


def text_column(texts: list[str]) -> pd.Categorical:
    """Categories in order; empty text is missing."""
    return pd.Categorical(np.array([text or None for text in texts], object))


def _edges(program):
    """Edges of a program: dependencies, then neighbours on a stream of a rank."""
    counts = np.array([len(after) for after in program.after], dtype=np.int64)
    source = np.fromiter(
        (other for after in program.after for other in after),
        dtype=np.int64,
        count=int(counts.sum()),
    )
    target = np.repeat(np.arange(len(program)), counts)
    rank = np.array(program.rank, dtype=np.int64)
    stream = np.array(program.stream, dtype=np.int64)
    issued = np.lexsort((stream, rank))  # stable: the order of each stream of each rank
    same = (np.diff(rank[issued]) == 0) & (np.diff(stream[issued]) == 0)
    later = np.argsort(issued[1:][same], kind="stable")
    why = pd.Categorical.from_codes(
        np.repeat([0, 1], [len(source), len(later)]), ["data", "stream"]
    )
    return pd.DataFrame(
        {
            "source": np.concatenate([source, issued[:-1][same][later]]),
            "target": np.concatenate([target, issued[1:][same][later]]),
            "why": why,
        }
    )


class Stream(IntEnum):
    """Number of a device stream, or below 0 of a host thread, as in
    `Timeline.spans["stream"]`.

    label: what it does. group: of devices that communicate on it, as in
    `rates.topology.groups`; "" for several.

    >>> Stream.TENSOR.value, Stream.TENSOR.label, Stream.of("tp") is Stream.TENSOR, Stream.of("edp")
    (1, 'tensor parallel', True, <Stream.DATA: 2>)
    """

    COMPUTE = 0, "device computes"
    TENSOR = 1, "tensor parallel", "tp"
    DATA = 2, "gathers and reductions"
    PIPELINE = 3, "messages between stages", "pp"
    CONTEXT = 4, "context parallel", "cp"
    EXPERT = 5, "expert parallel", "ep"
    REPLICATE = 6, "copies of HSDP's shards", "replicate"
    DOWN = 7, "copies to the device"
    UP = 8, "copies to the host"
    RECEIVE = 9, "messages awaited"
    BACK = 10, "messages back to the stage before"
    HOST = -1, "host computes"
    DRIVES = -2, "drives"
    LAUNCH = -3, "host launches"

    def __new__(cls, number: int, label: str, group=""):
        """A number with its name and the group whose collectives run there."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.label = label
        member.group = group
        return member

    @classmethod
    @cache
    def of(cls, group: str) -> Stream:
        """The stream on which a group of devices communicates; those without one share
        that of data parallelism.
        """
        name = "tp" if group == "etp" else group.removeprefix("expert-")
        return next((stream for stream in cls if stream.group == name), cls.DATA)
