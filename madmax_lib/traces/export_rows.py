"""Rows of a trace file: the spans of a rank, and what a host would have recorded beside
them.

The reader knows a row's kind by category and name, its thread by order of appearance
and its step by annotations and launches; here spans are ordered, categorised and
completed so that it finds what the Timeline says, or refused.
"""

import re

import numpy as np
import pandas as pd

from madmax_lib.timeline import BUSY_KINDS, KINDS, Timeline
from madmax_lib.traces.read.events import FAR_NS
from madmax_lib.traces.read.kernel_names import collective_of, written_names
from madmax_lib.traces.read.side_tables import recorded_args
from madmax_lib.traces.read.steps import assign_steps

_US = 1000
# what rows that a file gets beside its spans do not tell
_UNSAID = {
    "group": "",
    "size_bytes": np.nan,
    "recorded": "",
    "collective": "",
}
_NO_LANE = -(2**40)  # of allocator events, which are no spans to the reader
_RUNTIME = re.compile(r"cuda[A-Z]|cu[A-Z]|hip[A-Z]")


def rank_table(timeline: Timeline, rank: int) -> pd.DataFrame:
    """Rows of one rank in file order: spans with text in place of categories, and `cat`
    and `label` as written.
    """
    spans = timeline.spans[timeline.spans["rank"] == rank].drop(columns="rank")
    stream = spans["stream"].to_numpy()
    kind = np.asarray(spans["kind"])
    on_device = bool(((stream >= 0) & np.isin(kind, BUSY_KINDS)).any())
    _check_threads(spans, rank, on_device)
    lanes = np.where(kind == "memory", _NO_LANE, stream.astype("int64"))
    spans = spans.iloc[_file_order(lanes)]
    table = spans.astype({"kind": object, "name": object})
    table["group"] = spans["group"].astype(object).where(spans["group"].notna(), "")
    table["label"] = written_names(spans, on_device)
    table["cat"] = _categories(table)
    recorded = recorded_args(timeline.side_tables)
    table["recorded"] = recorded.reindex(table.index).fillna("")
    table["collective"] = _collectives(table)
    if not on_device:
        table["cat"] = _host_categories(table, rank)
    read_back = spans[table["kind"] != "memory"]
    bare = timeline.meta.source == "simulated" and not (spans["stream"] < 0).any()
    if len(table) and (bare or (assign_steps(read_back) != read_back["step"]).any()):
        table = _with_host_rows(table, timeline.steps)
        _check_steps(table, rank)
    return table


def _collectives(table):
    """Collective to be written beside each row, (n,) of str, "" without one: that which
    its name tells, unless its own metadata does.
    """
    is_told = table["recorded"].str.contains("Collective name", regex=False)
    names = table["name"].where((table["kind"] == "comm") & ~is_told, "")
    by_name = {name: collective_of(name) if name else "" for name in names.unique()}
    collective = names.map(by_name)
    # a kernel of sends and receives may be of any exchange: the annotation around its
    # launch tells which
    own_name = table["label"] == table["name"]
    return collective.mask(own_name & (collective == "send_recv"), "")


def _check_threads(spans, rank, on_device):
    """Whether the reader, which knows a kind by row category and name, can give every
    span its kind.
    """
    host = spans["stream"] < 0
    kind = np.asarray(spans["kind"])
    for wrong, rule in (
        (host & np.isin(kind, BUSY_KINDS) & on_device, "beside work on device streams"),
        (host & np.isin(kind, ("memcpy", "other", "idle")), "on a host thread"),
        (~host & np.isin(kind, ("cpu",)), "on a device stream"),
    ):
        if wrong.any():
            span = spans.iloc[int(wrong.argmax())]
            raise ValueError(
                f"rank {rank}: {span['kind']} span {span['name']!r} has stream "
                f"{span['stream']}; a trace file cannot tell {span['kind']} {rule}"
            )


def _file_order(stream):
    """Row order that lets the reader, which counts threads as they first occur, number
    host threads as they are.
    """
    streams, first = np.unique(stream, return_index=True)
    by_row = [s for s in streams[np.argsort(first)].tolist() if s != _NO_LANE]
    if all(s >= 0 or s == -1 - turn for turn, s in enumerate(by_row)):
        return np.arange(len(stream))
    host = {s for s in by_row if s < 0}
    device = iter([s for s in by_row if s >= 0])
    # The reader numbers host threads -1, -2, ... as they first occur: one row of each
    # thread goes first, in that order; where a number is missing a device stream takes
    # the turn.
    lanes = []
    while host:
        lane = -1 - len(lanes)
        lane = lane if lane in host else next(device, max(host))
        host.discard(lane)
        lanes.append(lane)
    first_row = dict(zip(streams.tolist(), first.tolist(), strict=True))
    lead = np.array([first_row[s] for s in lanes], dtype="int64")
    return np.r_[lead, np.setdiff1d(np.arange(len(stream)), lead)]


def _categories(table):
    """Kineto's category of each row, (n,) of str."""
    kind = table["kind"].to_numpy()
    device = table["stream"].to_numpy() >= 0
    runtime = _per_name(table["label"], _RUNTIME.match)
    memset = _per_name(table["label"], lambda name: name.startswith("Memset"))
    is_comm = kind == "comm"
    is_copy = kind == "memcpy"
    is_label = kind == "annotation"
    is_other = kind == "other"
    rules = {
        "cpu_instant_event": kind == "memory",
        "cuda_sync": kind == "idle",
        "gpu_user_annotation": device & is_label,
        "user_annotation": is_label | (~device & is_comm),
        "gpu_memset": device & (is_other | is_copy & memset),
        "gpu_memcpy": device & is_copy,
        "kernel": device,
        "cuda_runtime": runtime & (kind == "cpu"),
    }
    return np.select(list(rules.values()), list(rules), "cpu_op").astype(object)


def _host_categories(table, rank):
    """Without a device the reader takes the outermost operators of a thread for
    compute: other rows must not be one.
    """
    category = table["cat"].to_numpy().copy()
    kind = table["kind"].to_numpy()
    start = table["start_ns"].to_numpy()
    end = (table["start_ns"] + table["dur_ns"]).to_numpy()
    lane = table["stream"].to_numpy()
    is_work = np.isin(kind, ("compute", "comm")) | (category == "cpu_op")
    work = np.flatnonzero(is_work)
    # as the reader sorts
    keys = (kind[work] != "comm", -end[work], start[work], -lane[work])
    work = work[np.lexsort(keys)]
    changes = np.flatnonzero(np.diff(lane[work])) + 1
    for part in np.split(work, changes):
        is_cpu = kind[part] == "cpu"
        # Latest end of compute so far: what starts before it is inside.
        ends = np.where(is_cpu, -FAR_NS, end[part])
        reach = np.maximum.accumulate(ends)
        reach = np.r_[-FAR_NS, reach[:-1]][: len(part)]
        inside = start[part] < reach
        lost = part[inside & (kind[part] == "compute")]
        if lost.size:
            name = table["name"].iloc[lost[0]]
            raise ValueError(
                f"rank {rank}: compute span {name!r} on a host thread starts inside "
                "of another one"
            )
        is_outer = ~(inside & (end[part] <= reach))
        category[part[is_cpu & is_outer]] = "python_function"
    return category


def _with_host_rows(table, steps):
    """The rows and what a host would add: steps, and a launch for every span on a
    device stream that has none.
    """
    table = table.copy()
    windows = _windows(table)
    correlation = table["correlation"].to_numpy().copy()
    device = table["stream"].to_numpy() >= 0
    launched = np.isin(correlation, correlation[~device & (correlation >= 0)])
    need = device & (table["kind"] != "annotation") & ~launched
    new = need & (correlation < 0)
    # Numbers that no launch of the timeline has.
    free = np.setdiff1d(np.arange(1, 1 + len(table) + new.sum()), correlation)
    correlation[new] = free[: new.sum()]
    table["correlation"] = correlation
    launches = _launch_rows(table[need].drop_duplicates("correlation"), windows)
    added = [_step_rows(windows, steps), *launches]
    lowest = min(int(table["stream"].min()), 0) - 1
    # their lanes: steps on the first new one, launches of stream s on the s-th of the
    # others
    for rows in added:
        rows["stream"] = lowest - rows["lane"]
    return pd.concat([table, *added], ignore_index=True).drop(columns="lane")


def _windows(table):
    """Start and end of each step on the host: from its first span to the first of the
    next, at least 1 us long.
    """
    start = table["start_ns"].to_numpy()
    first = table[table["step"] >= 0].groupby("step")["start_ns"].min()
    first = first.sort_values(kind="stable")
    end = max(int((start + table["dur_ns"]).max()), int(start.max()) + 1)
    windows = {}
    for step, begin in reversed(list(first.items())):
        windows[step] = (min(begin, end - (_US if windows else 1)), end)
        end = windows[step][0]
    return dict(sorted(windows.items(), key=lambda item: item[1])) or {-1: (end, end)}


def _step_rows(windows, steps):
    rows = [
        (f"ProfilerStep#{step}", begin, end - begin, step)
        for step, (begin, end) in windows.items()
        if step >= 0
    ]
    if len(steps) > 1 or not rows:
        # After the end, rounded up to a microsecond, and one more.
        after = -(-max(end for _, end in windows.values()) // _US) * _US + _US
        rows.append((f"ProfilerStep#{max(steps, default=-1) + 1}", after, 0, -1))
    table = pd.DataFrame(rows, columns=["name", "start_ns", "dur_ns", "step"])
    table = table.assign(
        kind="annotation", cat="user_annotation", label=table["name"], lane=0
    )
    return table.assign(correlation=-1, op=-1, **_UNSAID)


def _launch_rows(spans, windows):
    """An operator and a launch for each span, at its start or, if the host is in a
    later step by then, just before.
    """
    start = spans["start_ns"].to_numpy()
    step = spans["step"].to_numpy()
    # A launch belongs to the step in whose window it lies.
    before = min(begin for begin, _ in windows.values())
    last = {s: end - 1 for s, (_, end) in windows.items() if s >= 0}
    latest = np.array([last.get(s, before - _US) for s in step.tolist()], dtype="int64")
    launch = np.where((step < 0) & (start < before), start, np.minimum(start, latest))
    dur = np.where(launch == start, np.minimum(spans["dur_ns"], _US), 0)
    # Number of each span's stream among all streams; lane 0 holds the steps.
    lane = 1 + np.unique(spans["stream"], return_inverse=True)[1]
    rows = spans.assign(start_ns=launch, dur_ns=dur, kind="cpu", lane=lane, **_UNSAID)
    calls = {"idle": "cudaStreamWaitEvent", "memcpy": "cudaMemcpyAsync"}
    call = spans["kind"].map(calls).fillna("cudaLaunchKernel")
    operator = rows.assign(correlation=-1, cat="cpu_op", label=spans["name"])
    return [operator, rows.assign(name=call, label=call, cat="cuda_runtime")]


def _check_steps(table, rank):
    rows = table[table["kind"] != "memory"]
    kind = pd.Categorical(rows["kind"], categories=KINDS)
    as_read = rows.assign(kind=kind, name=pd.Categorical(rows["label"]))
    wrong = assign_steps(as_read) != rows["step"]
    if wrong.any():
        span = rows.iloc[int(wrong.argmax())]
        raise ValueError(
            f"rank {rank}: span {span['name']!r} at {span['start_ns']} ns is of step "
            f"{span['step']}, but starts on the host during another one; a trace file "
            "cannot tell"
        )


def _per_name(names, rule):
    codes, values = pd.factorize(names)
    return np.array([bool(rule(value)) for value in values], dtype=bool)[codes]
