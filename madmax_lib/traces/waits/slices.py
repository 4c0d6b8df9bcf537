"""Slices of work: which one does each instant of a thread belong to?

Host spans nest; here they are cut where the innermost one changes. A device span is one
slice.
"""

import numpy as np
import pandas as pd

from madmax_lib.base import pack, union
from madmax_lib.timeline import BUSY_KINDS, ends_ns
from madmax_lib.traces.tables import reach

# Streams up to here hold one message each, which a host thread has sent or awaits.
IN_FLIGHT = -1_000_000
_COLUMNS = [
    "row",
    "rank",
    "stream",
    "kind",
    "name",
    "start_ns",
    "end_ns",
]


def one_slice_per_span(spans: pd.DataFrame) -> pd.DataFrame:
    """Simulated spans as slices, one each; what a host does has the kind host."""
    kind = spans["kind"].astype(object).replace({"cpu": "host", "idle": "host"})
    slices = spans.assign(
        row=spans.index,
        kind=kind,
        end_ns=ends_ns(spans),
    )
    return _by_lane(slices[_COLUMNS])


def cut_into_slices(spans: pd.DataFrame) -> pd.DataFrame:
    """Slices of measured spans, host threads first, in their order; annotations count
    where nothing is inside them.
    """
    spans = spans[(spans["stream"] >= 0) | _on_working_thread(spans)]
    on_host = spans["stream"] < 0
    # Durations may be negative where HTA's rounding was asked for.
    end_ns = spans["start_ns"] + spans["dur_ns"].clip(lower=0)
    work = spans["kind"].isin(BUSY_KINDS) | (spans["kind"].eq("cpu") & on_host)
    # An annotation may outlive the step that it starts in: it ends with the work.
    last_ns = end_ns[work].max()
    annotation = (
        spans["kind"].eq("annotation") & on_host & (spans["start_ns"] < last_ns)
    )
    # On the host only operators that do the work of a device stay compute.
    host = spans["kind"].isin(("cpu", "annotation"))
    spans = spans.assign(
        row=spans.index,
        kind=spans["kind"].astype(object).mask(host, "host"),
        end_ns=end_ns.where(work, end_ns.clip(upper=last_ns)),
    )
    spans = spans.loc[work | annotation, _COLUMNS]
    # Sends and receives last beside what their thread does: each gets a lane of its own.
    names_call = (spans["stream"] < 0) & spans["name"].str.startswith("c10d::")
    thread = [spans["rank"], spans["stream"]]
    calling = names_call.groupby(thread).transform("any")
    in_flight = (spans["kind"] == "comm") & calling
    spans.loc[in_flight, "stream"] = IN_FLIGHT - np.arange(in_flight.sum())
    threads = spans[spans["stream"] < 0].groupby(["rank", "stream"])
    cut = [_cut_thread(thread) for _, thread in threads]
    device = _by_lane(spans[spans["stream"] >= 0])
    return pd.concat([*cut, device], ignore_index=True)


def _by_lane(slices):
    """Slices whose neighbours follow each other on their stream."""
    return slices.sort_values(
        ["rank", "stream", "start_ns", "end_ns"], kind="stable", ignore_index=True
    )


def _on_working_thread(spans):
    """Spans of host threads that run operators or calls of the device; where a rank has
    such, others only wait.
    """
    rank = spans["rank"]
    stream = spans["stream"]
    kind = spans["kind"]
    works = kind.isin(BUSY_KINDS)
    works |= spans["correlation"] >= 0
    works |= spans["op"] >= 0
    works &= (stream < 0) & (kind != "annotation")
    rank_works = works.groupby(rank).transform("any")
    return works.groupby([rank, stream]).transform("any") | ~rank_works


def _cut_thread(thread):
    """A host thread cut where its innermost span changes; each span keeps a slice at
    its start, even an empty one.
    """
    # What runs inside of a transfer is part of it: a transfer is one slice.
    thread = thread[(thread["kind"] == "comm") | ~_inside(thread, thread, "comm")]
    thread = thread.sort_values("end_ns", ascending=False, kind="stable")
    thread = thread.sort_values("start_ns", kind="stable")
    start = thread["start_ns"].to_numpy()
    end = thread["end_ns"].to_numpy()
    number = np.arange(len(thread))
    empty = end <= start
    # The 2n events of the n spans, starts before ends, in order of time. At one instant
    # what is running ends first, inner before outer (-number); then spans start in their
    # order, and an empty one ends right after its own start (2 number, 2 number + 1).
    times = np.r_[start, end]
    is_end = np.repeat([False, True], len(thread))
    after_ends = np.r_[number >= 0, empty]
    turn = np.r_[2 * number, np.where(empty, 2 * number + 1, -number)]
    order = np.lexsort((turn, after_ends, times))
    depth = np.cumsum(np.where(is_end[order], -1, 1))
    parent = _parents(depth[~is_end[order]])
    # Between two events runs the span that has just started, or the parent of the one
    # that has just ended.
    inner = np.r_[number, parent][order][:-1]
    begin = times[order][:-1]
    until = times[order][1:]
    starts = ~is_end[order][:-1]
    keep = (until > begin) | starts
    keep &= (inner >= 0) & (until <= end[inner])
    cut = thread.iloc[inner[keep]]
    cut = cut.assign(
        start_ns=begin[keep],
        end_ns=until[keep],
    )
    computes = _inside(cut, thread, "compute")
    return cut.assign(kind=np.where(computes, "compute", cut["kind"]))


def _parents(depth):
    """Number (n,) of the span around each one, -1 without; depth (n,) of nested spans
    in the order of their starts, 1 for the outermost.

    The parent is the last earlier span that is one level up: with keys
    depth * (n + 1) + number in order, it is the one before (depth - 1, own number).
    """
    number = np.arange(len(depth))
    base = len(depth) + 1
    keys = np.sort(depth * base + number)
    before = keys[np.searchsorted(keys, (depth - 1) * base + number) - 1]
    level, span = np.divmod(before, base)
    return np.where((level == depth - 1) & (depth > 1), span, -1)


def _inside(rows, thread, kind):
    """Whether each row (n,) lies within the thread's spans of a kind."""
    thread = thread[thread["kind"] == kind]
    start_ns = thread["start_ns"]
    around = union(pack(start_ns, thread["end_ns"] - start_ns))
    return rows["end_ns"] <= reach(around, rows["start_ns"])
