"""Memory: who holds it, and since when. Allocator events become totals over time,
allocations and the peak's holders.

PyTorch's profiler with profile_memory=True records an event for every allocation and
every free, with the totals after it; they are `Timeline.side_tables["memory"]`, the
only source here, so a timeline without them gives empty tables. Times are the host's: a
caching allocator takes a block back when the host lets go of it, while kernels may
still read it. What was allocated before the recording began is known only as a sum,
"before the trace".
"""

import re

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import Timeline, cached_per_timeline, ends_ns, with_origin
from madmax_lib.traces.operators.ops import OUTSIDE
from madmax_lib.traces.read.nesting import Nest, thread_of
from madmax_lib.traces.tables import largest_first, stacked

# allocated there, or anywhere else that no event with an address tells
BEFORE = "before the trace"
_OTHERS = "other operators"
# of "<built-in method add_ of Tensor object at 0x7fc740c438d0>"
_OBJECT = r" object at 0x[0-9a-f]+"
_PHASES = (
    ("backward", r"^autograd::engine|\b(backward|bwd)\b"),
    ("optimizer", r"^Optimizer\.|\boptimi[sz]er\b"),
    ("forward", r"\b(forward|fwd)\b"),
)
_POOL = ["rank", "device"]


def memory_timeline(timeline: Timeline) -> pd.DataFrame:
    """Memory in use after every allocator event: rank, device, time_s, step,
    allocated_bytes, before_bytes,
    reserved_bytes.

    time_s counts from the first span or event. Where an event does not tell the total,
    it is the last one known plus the sizes since; a device that never tells one starts
    at the bytes it frees without having allocated them (without addresses, as in 2021:
    at what keeps the sum of the sizes from falling below 0).
    before_bytes: the part of it from before the trace. reserved_bytes: what the
    allocator took from the device, NaN where unknown (a CPU has no such pool).
    """
    table = _with_time_and_step(timeline, _events(timeline))
    columns = [
        *_POOL,
        "time_s",
        "step",
        "allocated_bytes",
        "before_bytes",
        "reserved_bytes",
    ]
    return with_origin(table[columns].reset_index(drop=True), timeline)


def allocations(timeline: Timeline) -> pd.DataFrame:
    """One row per allocation: rank, device, step, size_bytes, start_s, end_s,
    lifetime_s, operator, annotation,
    module, phase.

    An allocation ends with the next event at its address; end_s and lifetime_s are NaN
    when it outlives the trace.
    operator: the innermost operator open on the thread that asked, else the innermost
    Python function or label. annotation, module (nn.Module, in traces with stacks) and
    phase (forward, backward, optimizer) enclose it, "" where nothing tells them. Frees
    of older blocks and events without an address are no rows here.
    """
    events = _events(timeline)
    born = events[events["born"]]
    table = _with_time_and_step(timeline, born).rename(columns={"time_s": "start_s"})
    end_ns = events["time_ns"].to_numpy()[born["end"]]
    lifetime_s = ((end_ns - born["time_ns"]) / NS_PER_S).where(born["end"] >= 0)
    table = table.assign(end_s=table["start_s"] + lifetime_s, lifetime_s=lifetime_s)
    table["operator"] = _innermost_operator(timeline, born)
    table = table.join(_enclosing(timeline, born))
    columns = [
        "step",
        "size_bytes",
        "start_s",
        "end_s",
        "lifetime_s",
        "operator",
        "annotation",
        "module",
        "phase",
    ]
    return with_origin(table[[*_POOL, *columns]].reset_index(drop=True), timeline)


@cached_per_timeline
def peak(timeline: Timeline) -> pd.DataFrame:
    """The most memory in use on each device: rank, device, peak_bytes, time_s, step,
    before_bytes, reserved_bytes,
    unused_bytes.

    The first of equal peaks. before_bytes: the part from before the trace.
    unused_bytes: reserved at that moment but not allocated (fragmentation and cache),
    NaN where the reserve is unknown.
    """
    table = _with_time_and_step(timeline, _peaks(_events(timeline)))
    table["unused_bytes"] = table["reserved_bytes"] - table["peak_bytes"]
    columns = [
        "peak_bytes",
        "time_s",
        "step",
        "before_bytes",
        "reserved_bytes",
        "unused_bytes",
    ]
    return with_origin(table[[*_POOL, *columns]].reset_index(drop=True), timeline)


def held_at_peak(timeline: Timeline, top: int = 10) -> pd.DataFrame:
    """Allocations that the peak of each device is made of: rank, device, operator,
    size_bytes, count, share (0..1).

    The `top` operators by bytes, then "other operators" and "before the trace" (count
    NaN) where there are any; the bytes of a device sum to its peak. Raises ValueError
    for a top below 1.
    """
    if top < 1:
        raise ValueError(f"top={top} is not at least 1")
    events = _events(timeline)
    peaks = _peaks(events)
    # Alive at the peak of its device: allocated by then, and freed later or never.
    peak_row = peaks["row"].to_numpy(dtype="int64")[events["pool"]]
    is_live = events["born"] & (events.index <= peak_row)
    is_live &= (events["end"] == -1) | (events["end"] > peak_row)
    live = events[is_live]
    of_pool = peaks.set_index("pool")
    live = live.assign(operator=_innermost_operator(timeline, live))
    keys = ["pool", "operator"]
    holders = live.groupby(keys)["size_bytes"].agg(["sum", "count"]).reset_index()
    holders = largest_first(holders, "sum", "operator")
    rest = holders.groupby("pool").cumcount() >= top
    holders["operator"] = holders["operator"].mask(rest, _OTHERS)
    holders = holders.groupby(keys, sort=False).sum().reset_index()
    followed = holders.groupby("pool")["sum"].sum().reindex(of_pool.index, fill_value=0)
    before = (of_pool["peak_bytes"] - followed).rename("sum").reset_index()
    before = before[before["sum"] != 0].assign(operator=BEFORE, count=np.nan)
    table = stacked([holders, before]).rename(columns={"sum": "size_bytes"})
    table = table.sort_values("pool", kind="stable")
    table = table.join(of_pool[[*_POOL, "peak_bytes"]], on="pool")
    table["share"] = table["size_bytes"] / table["peak_bytes"].clip(lower=1)
    table = table.astype({"rank": "int32", "size_bytes": "int64", "count": "float64"})
    table = table[[*_POOL, "operator", "size_bytes", "count", "share"]]
    return with_origin(table.reset_index(drop=True), timeline)


def growth(timeline: Timeline) -> pd.DataFrame:
    """Does a step give back what it took? rank, device, steps, first_bytes, last_bytes,
    bytes_per_step.

    first_bytes, last_bytes: allocated at the end of the first and of the last step.
    bytes_per_step: median change from one step's end to the next, so that a single
    allocation kept for good is no leak; NaN with less than two steps.
    """
    events = _with_time_and_step(timeline, _events(timeline))
    ends = events[events["step"] >= 0].groupby(["pool", "step"]).tail(1)
    ends = ends.sort_values(["pool", "step"])
    grouped = ends.groupby("pool")
    level = grouped["allocated_bytes"]
    change = level.diff().groupby(ends["pool"])
    table = grouped[_POOL].first()
    table["steps"] = grouped.size()
    table["first_bytes"] = level.first()
    table["last_bytes"] = level.last()
    table["bytes_per_step"] = change.median()
    return with_origin(table.reset_index(drop=True), timeline)


def _events(timeline):
    """Allocator events by device and time, with what follows from their order.

    pool: number of the (rank, device). end: row of the next event at the same address,
    -1 without. born: it is an allocation that can be followed. allocated_bytes without
    gaps, before_bytes what of it cannot be followed, reserved_bytes NaN where unknown.
    """
    events = timeline.side_tables["memory"]
    events = events.assign(
        device=events["device"].astype(str),
        pool=events.groupby(_POOL, observed=True).ngroup(),
    )
    events = events.sort_values(["pool", "time_ns"], kind="stable", ignore_index=True)
    size = events["size_bytes"]
    pool = events["pool"]
    end = _next_at_address(events)
    nameless = events["address"] == -1
    born = (size > 0) & ~nameless
    # change of the bytes that can be followed
    followed = size.where(born | nameless, 0).to_numpy(copy=True)
    # The event that frees a block takes off what its allocation added, whatever size it
    # tells.
    has_end = born & (end >= 0)
    followed[end[has_end]] -= size[has_end]
    # Blocks that are freed without having been allocated here are from before the
    # trace.
    is_older = (size < 0) & (followed == 0) & ~nameless
    older = -size.where(is_older, 0).groupby(pool).transform("sum")
    # Without addresses only the sum of the sizes shows that something was there before.
    running = size.where(nameless, 0).groupby(pool).cumsum()
    older -= running.groupby(pool).transform("min").clip(upper=0)
    reserved = events["reserved_bytes"].astype("float64")
    reserved = reserved.where(reserved > 0)
    total = _without_gaps(events["allocated_bytes"], size, pool, older)
    before = total - pd.Series(followed).groupby(pool).cumsum()
    # What was there before can only be given back: it is never more than the least
    # total since.
    left = pd.Series(total).groupby(pool).cummin()  # of what was there before, at most
    before = before.mask(nameless & (before > left), left)
    return events.assign(
        end=end,
        born=born,
        allocated_bytes=total,
        before_bytes=before,
        reserved_bytes=reserved,
    )


def _without_gaps(total, size, pool, unknown):
    """Totals (n,), those below 0 integrated from the sizes: from the last known, else
    the next, else from `unknown`.
    """
    running = size.groupby(pool).cumsum().to_numpy()
    recorded = pd.Series(total.index, dtype="float64").where(total >= 0)
    recorded = recorded.groupby(pool).ffill().groupby(pool).bfill()
    level = unknown.to_numpy() + running
    is_near = recorded.notna()
    # integers all the way: floats lose bytes beyond 2**53
    near = recorded[is_near].to_numpy(dtype="int64")
    level[is_near] = (total.to_numpy() - running)[near] + running[is_near]
    return level


def _next_at_address(events):
    """Row (n,) of the next event with the same pool and address, -1 without; rows are
    in time order.
    """
    rows = events.index.to_series()
    rows = rows[(events["address"] != -1) & (events["size_bytes"] != 0)]
    by_address = rows.groupby([events["pool"], events["address"]])
    following = by_address.shift(-1, fill_value=-1)
    return following.reindex(events.index, fill_value=-1).to_numpy()


def _peaks(events):
    """The event of each pool that reaches the peak, with `row` and `peak_bytes`.

    Where no event reaches what the first one found, that is the peak, and its row is
    before all events of the pool.
    """
    top = events.loc[events.groupby("pool")["allocated_bytes"].idxmax()]
    first = events.groupby("pool").head(1)
    # What was in use before the first event.
    at_begin = (first["allocated_bytes"] - first["size_bytes"]).to_numpy()
    falls = at_begin > top["allocated_bytes"].to_numpy()
    rows = np.where(falls, first.index - 1, top.index)
    peaks = events.loc[np.where(falls, first.index, top.index)]
    peaks = peaks.assign(
        row=rows,
        peak_bytes=peaks["allocated_bytes"].mask(falls, at_begin),
        before_bytes=peaks["before_bytes"].mask(falls, at_begin),
    )
    return peaks.reset_index(drop=True)


def _with_time_and_step(timeline, events):
    """Events with time_s from the beginning of the timeline and the step they fall
    into.
    """
    spans = timeline.spans
    times_ns = timeline.side_tables["memory"]["time_ns"]
    zero_ns = pd.concat([spans["start_ns"], times_ns]).min()
    return events.assign(
        time_s=(events["time_ns"] - zero_ns) / NS_PER_S, step=_step(timeline, events)
    )


def _step(timeline, events):
    """Step (n,) of the host span of the same rank that began last, -1 when every span
    that began has ended.
    """
    host = _host_spans(timeline).sort_values("start_ns", kind="stable")
    # Latest end of the spans that began by then.
    latest_ns = ends_ns(host).groupby(host["rank"]).cummax()
    host = host[["rank", "start_ns", "step"]].assign(latest_ns=latest_ns)
    times = events[["rank", "time_ns"]].reset_index(names="event")
    times = times.sort_values("time_ns", kind="stable")
    near = pd.merge_asof(
        times, host, left_on="time_ns", right_on="start_ns", by="rank"
    ).set_index("event")
    step = near["step"].where(near["time_ns"] <= near["latest_ns"], -1)
    return step.reindex(events.index).astype("int32")


def _innermost_operator(timeline, events):
    """Name (n,) of the innermost operator that was open when each event happened; see
    `allocations`.
    """
    host = _host_spans(timeline)
    operators = host[host.index.isin(timeline.side_tables["operators"]["row"])]
    # no calls of the runtime
    called = host["kind"].isin(["cpu", "annotation"]) & (host["correlation"] < 0)
    operator = _innermost(operators, events)
    label = _innermost(host[called], events)
    names = operator.where(operator != "", label)
    names = names.where(names != "", OUTSIDE)
    return names.str.replace(_OBJECT, "", regex=True)


def _enclosing(timeline, events):
    """annotation, module and phase (n,) around each event."""
    host = _host_spans(timeline)
    name = host["name"]
    of_name = {"": ""}
    for each in name.cat.categories:
        phases = (phase for phase, pattern in _PHASES if re.search(pattern, each))
        of_name[each] = next(phases, "")
    is_step = name.str.contains(r"^ProfilerStep\s*#")
    rows_of = {
        "annotation": (host["kind"] == "annotation") & ~is_step,
        "module": name.str.startswith("nn.Module: "),
        "phase": name.map(of_name).astype(object) != "",
    }
    names_of = {
        column: _innermost(host[rows], events) for column, rows in rows_of.items()
    }
    names_of["module"] = names_of["module"].str.removeprefix("nn.Module: ")
    names_of["phase"] = names_of["phase"].map(of_name)
    return pd.DataFrame(names_of)


def _host_spans(timeline):
    return timeline.spans[timeline.spans["stream"] < 0]


def _innermost(spans, events):
    """Name (n,) of the span on the thread of each event that began last and is still
    open, "" without.
    """
    nest = Nest(spans, np.arange(len(spans)), closed=True)
    number = nest.at(thread_of(events), events["time_ns"].to_numpy())
    names = spans["name"].iloc[nest.rows].tolist()
    inside = [names[each] if each >= 0 else "" for each in number]
    return pd.Series(inside, events.index, dtype=object)
