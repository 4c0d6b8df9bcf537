"""Meaning of the rows of a trace: EventColumns of one file in, its `Timeline` out.

Rows of the device are recognised by category, never by the presence of a stream. On
traces without a device (CPU with gloo) see `cpu_kinds`. The rules "hta" follow HTA
0.5.0 instead: rows by stream, its kernel kinds and rounding.
"""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.timeline.kinds import kernel_kinds, load_kinds, own_collectives
from madmax_lib.timeline.timeline import BUSY_KINDS, KINDS, Meta, Timeline
from madmax_lib.traces.read.cpu_kinds import Kind, begins, classify_cpu
from madmax_lib.traces.read.event_columns import read_columns
from madmax_lib.traces.read.events import SOURCE_KEY
from madmax_lib.traces.read.files import rank_in_name
from madmax_lib.traces.read.kernel_names import original_name
from madmax_lib.traces.read.steps import assign_steps

_COPY = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_DEVICE = ("kernel", "mtia_ccp_events", *_COPY)
_BUSY = [Kind[each] for each in BUSY_KINDS]
_ANNOTATION = ("user_annotation", "gpu_user_annotation")
# September 2001: a time beyond it is counted from 1970, also without
# baseTimeNanoseconds; one that counts from the start of a machine would need 31 years
_EPOCH_NS = 10**18
# overlap of two kernels of a stream that is left alone
_JITTER_NS = 100_000


def read_file(
    path: Path, sha256: str, *, hta: bool, user_kinds: str | Path | None
) -> Timeline:
    """Timeline of one file without side tables; warnings are kept in
    `meta.provenance["warnings"]` instead of shown.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spans, meta = _read(path, hta, user_kinds)
    (rank,) = map(str, meta.represents)
    more = {"files": {rank: {"name": path.name, "sha256": sha256}}}
    if caught:
        # without the path, which may be another when the cache gives the timeline
        texts = [str(each.message).removeprefix(f"{path}: ") for each in caught]
        more["warnings"] = {rank: texts}
    return Timeline(spans, replace(meta, provenance=meta.provenance | more))


def _read(path, hta, user_kinds):
    columns, trace = read_columns(path)
    table = load_kinds(user_kinds)
    rank = _rank(columns, trace)
    spans = _spans(columns, trace, rank, hta, table)
    threads = [f"pid {pid} tid {tid}" for pid, tid in columns.threads]
    provenance = {
        "rules": "hta" if hta else "exact",
        "threads": {str(rank): threads},
    }
    if host := trace.envelope.get("host_name"):
        provenance["hosts"] = {str(rank): str(host)}
    if trace.damage:
        provenance["damaged"] = {str(rank): trace.damage}
    if user_kinds:
        provenance["collectives"] = own_collectives(columns.names, table)
    info = trace.envelope.get("distributedInfo")
    world_size = info.get("world_size") if isinstance(info, dict) else None
    is_simulated = trace.envelope.get(SOURCE_KEY) == "simulated"
    is_unix = len(spans) and spans["start_ns"].min() > _EPOCH_NS
    meta = Meta(
        source="simulated" if is_simulated else "measured",
        world_size=world_size if _is_rank(world_size) else 1,
        represents={rank: [rank]},
        device=_device_name(trace),
        clock="unix" if is_unix else "relative",
        provenance=provenance,
    )
    del columns  # its arrays are spans now, and the steps need memory
    spans["step"] = assign_steps(spans)
    return spans, meta


def _rank(columns, trace):
    """Rank from distributedInfo, else from a collective's metadata, else from the file
    name, else 0 with a warning.
    """
    info = trace.envelope.get("distributedInfo")
    own_rank = info.get("rank") if isinstance(info, dict) else None
    for rank in (own_rank, columns.group_rank, rank_in_name(trace.path)):
        if _is_rank(rank):
            return rank
    trace.warn("no rank in distributedInfo, events or file name; taken as rank 0")
    return 0


def _is_rank(value):
    return isinstance(value, int) and 0 <= value < 2**31


def _spans(columns, trace, rank, hta, table):
    """Spans of one file, steps not yet known; the times of `columns` are changed in
    place.
    """
    if trace.events == 0:
        trace.warn("the trace holds no events")
    if hta:
        start_ns, dur_ns = _hta_times(columns)
        kind, stream = _hta_kinds(columns, table)
    else:
        start_ns = columns.start_ns
        dur_ns = columns.dur_ns
        kind, stream = _exact_kinds(columns, table)
        if trace.events:
            _warn_of_absence(columns, trace, kind, stream)
        if negative := int((dur_ns < 0).sum()):
            trace.warn(f"{negative} negative durations taken as 0")
            np.maximum(dur_ns, 0, out=dur_ns)
        if SOURCE_KEY not in trace.envelope:  # an export says what a Timeline held
            dur_ns = _cut_at_next(start_ns, dur_ns, stream, kind, trace)
    start_ns += trace.base_ns
    names = pd.Categorical([original_name(name) for name in columns.names])
    # group code 0 is none, which a Categorical writes as -1
    group = pd.Categorical.from_codes(columns.group - 1, columns.groups[1:])
    spans = {
        "rank": np.full(len(columns), rank, dtype="int32"),
        "stream": stream,
        "kind": pd.Categorical.from_codes(kind, KINDS),
        "name": names[columns.name],
        "start_ns": start_ns,
        "dur_ns": dur_ns,
        "step": np.full(len(columns), -1, dtype="int32"),
        "correlation": columns.correlation,
        "op": columns.op,
        "group": group,
        "size_bytes": columns.size_bytes,
    }
    return pd.DataFrame(spans, copy=False)


def _cut_at_next(
    start_ns,
    dur_ns,
    stream,
    kind,
    trace,
):
    """Durations (n,) without what some profilers add after a kernel's end.

    A stream runs one kernel after the other. One that overlaps the next by more than
    _JITTER_NS and all of that one's own time was recorded too long, by up to seconds,
    and ends where the next begins; shorter overlaps are real (programmatic dependent
    launch) or jitter (graph replays). [TraceLens issue 669, pytorch issue 168296]
    """
    busy = np.flatnonzero(np.isin(kind, _BUSY) & (stream >= 0))
    order = busy[np.lexsort((start_ns[busy], stream[busy]))]
    row, after = order[:-1], order[1:]
    overlap_ns = start_ns[row] + dur_ns[row] - start_ns[after]
    overlong = (stream[row] == stream[after]) & (
        overlap_ns > np.maximum(dur_ns[after], _JITTER_NS)
    )
    if not overlong.any():
        return dur_ns
    cut = dur_ns.copy()
    cut[row[overlong]] -= overlap_ns[overlong]
    lost_s = overlap_ns[overlong].sum() / 1e9
    trace.warn(
        f"{overlong.sum()} kernels overlap the next one on their stream: cut at its "
        f"start, {lost_s:.3g} s in all"
    )
    return cut


def _warn_of_absence(columns, trace, kind, stream):
    """Warn where a device was at work, or something was, and no row tells."""
    busy = np.isin(kind, _BUSY)
    annotated = kind == Kind.annotation
    left_out = ""
    if trace.nameless:
        left_out = f"; {trace.nameless} rows without a category are left out"
    # calls of the CUDA or HIP runtime launch work for a device
    categories = [columns.categories[code] for code in np.unique(columns.category)]
    launches = any(re.search("runtime|driver", category) for category in categories)
    device = _device_name(trace)
    if not ((busy | annotated).any() or launches or device):
        if len(columns) or left_out:
            trace.warn(f"no row of a known category: nothing to analyse{left_out}")
        elif SOURCE_KEY not in trace.envelope:  # an export may be empty
            trace.warn(f"none of its {trace.events} events is of a known kind")
    elif not (busy & (stream >= 0)).any() and (launches or device or left_out):
        times = "all times are the host's" if busy.any() else "nothing is at work"
        name = f", {device}," if device else ""
        trace.warn(f"no row of a device{name} is recorded: {times}{left_out}")


def _device_name(trace):
    properties = trace.envelope.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else None
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def _exact_kinds(columns, table):
    """Kind codes (n,) and streams (n,) by category; without any device row, from
    annotations and operators.
    """
    category = np.array(columns.categories, dtype=object)
    of_category = np.full(len(category), Kind.cpu, dtype="int8")
    of_category[np.isin(category, _ANNOTATION)] = Kind.annotation
    of_category[category == "cuda_sync"] = Kind.idle
    on_device = np.isin(category, _DEVICE)
    copies = np.isin(category, _COPY)
    has_stream = on_device | np.isin(category, ("cuda_sync", "gpu_user_annotation"))
    # categories have few values: (categories,) flags become (n,) by indexing
    kind = of_category[columns.category]
    # the category of steps is that of operators until 2021 and in torch_npu
    kind[begins(columns, "ProfilerStep")] = Kind.annotation
    stream = np.where(columns.stream >= 0, columns.stream, _stream_of_thread(columns))
    stream = np.where(has_stream[columns.category], stream, -1 - columns.thread)
    device = on_device[columns.category]
    if device.any():
        kind[device] = _kind_of_name(columns, device, "exact", table)
        # a copy whose name says nothing is told by its category
        is_copy = copies[columns.category]
        kind[is_copy & (kind == Kind.compute)] = Kind.memcpy
        # copy engines exchange where a copy has a group: NCCL's collectives without
        # kernels
        kind[is_copy & (columns.group > 0)] = Kind.comm
    else:
        comm = kind == Kind.annotation
        of_name = _kind_of_name(columns, comm, "annotation", table)
        comm[comm] = of_name == Kind.comm
        classify_cpu(columns, kind, comm)
    return kind, stream


def _hta_kinds(columns, table):
    """Kind codes and streams as HTA 0.5.0 sees them: whatever carries a stream runs on
    the device.
    """
    device = columns.stream >= 0
    kind = np.full(len(columns), Kind.cpu, dtype="int8")
    of_category = np.isin(np.array(columns.categories, dtype=object), _ANNOTATION)
    kind[of_category[columns.category]] = Kind.annotation
    if device.any():
        kind[device] = _kind_of_name(columns, device, "hta", table)
    return kind, np.where(device, columns.stream, -1 - columns.thread)


def _kind_of_name(columns, rows, rules, table):
    """Kind codes of some rows by their names, each name looked up once."""
    names = columns.name[rows]
    codes = np.flatnonzero(np.bincount(names, minlength=len(columns.names)))
    texts = [columns.names[code] for code in codes]
    kinds = kernel_kinds(texts, rules=rules, table=table)
    of_name = np.zeros(len(columns.names), dtype="int8")
    of_name[codes] = [Kind[kind] for kind in kinds]
    return of_name[names]


def _hta_times(columns):
    """Start rounded up and end rounded down to whole microseconds, in float64, once any
    start has decimals.
    """
    if not (columns.start_ns % 1000).any():
        return columns.start_ns, columns.dur_ns
    # the floats of the file's decimals, whose sum is rounded; ns would not fit into one
    whole_us, ns = np.divmod(columns.start_ns, 1000)
    start_us = whole_us + ns / 1000
    end_us = np.floor(start_us + columns.dur_ns / 1000).astype("int64")
    start_us = np.ceil(start_us).astype("int64")
    return start_us * 1000, (end_us - start_us) * 1000


def _stream_of_thread(columns):
    """Stream of device rows whose args have none: Kineto shows a stream as thread, as a
    number or as `stream 7`.
    """
    streams = np.zeros(len(columns.threads), dtype="int32")
    for thread, (_, tid) in enumerate(columns.threads):
        # up to nine digits fit into int32; -7 is no stream
        digits = re.search(r"(?<![-\d])\d{1,9}$", str(tid))
        streams[thread] = int(digits[0]) if digits else 0
    return streams[columns.thread]
