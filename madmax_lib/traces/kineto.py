"""What did every rank do, according to its PyTorch-profiler trace? Kineto/Chrome JSON in, one `Timeline` out.

Rows of the device are recognised by category, never by the presence of a stream. On traces without a device (CPU with
gloo) communication is the c10d annotations and compute the top-level operators, so the same analyses apply.
`hta_compatible=True` follows HTA 0.5.0 instead: rows by stream, its kernel kinds, rounding and last-step rule.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.kinds import collective_names, kernel_kinds, load_kinds
from madmax_lib.timeline import KINDS, Meta, Timeline, concat
from madmax_lib.traces.columns import Columns, read_columns
from madmax_lib.traces.detail_columns import details_of
from madmax_lib.traces.events import NotATrace, RawTrace, TraceWarning
from madmax_lib.traces.files import find_traces, iteration_folder, rank_in_name
from madmax_lib.traces.kernel_names import original_name
from madmax_lib.traces.steps import assign_steps, hta_rows

__all__ = ["TraceWarning", "read_trace"]

_COPY = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_DEVICE = ("kernel", "mtia_ccp_events", *_COPY)
_ANNOTATION = ("user_annotation", "gpu_user_annotation")
_EPOCH_NS = 10**18  # a time beyond this is counted from 1970 even without baseTimeNanoseconds (2001 and later)


def read_trace(
    source: str | Path | Sequence[str | Path],
    *,
    hta_compatible: bool = False,
    iteration: int | None = None,
    kinds: str | Path | None = None,
) -> Timeline:
    """Read traces of one or many ranks.

    source: a file (plain or gzip, whatever its name), a list of files, or a directory: all its traces, or those of the
    newest `iteration_N` folder in torchtitan's layout (`iteration` chooses another). kinds: CSV with rows to put before
    `data/kernel_kinds.csv`. Nothing is ever written beside the input.
    Raises FileNotFoundError, and ValueError with file and reason for what is no trace or has the rank of another file.
    """
    paths = find_traces(source, iteration)
    timelines, others = _read_files(paths, hta_compatible, kinds)
    in_folder = not isinstance(source, (list, tuple)) and Path(source).expanduser().is_dir()
    if not timelines and in_folder and (below := iteration_folder(Path(source).expanduser(), iteration)):
        timelines, _ = _read_files(find_traces(below), hta_compatible, kinds)
    if others and not (in_folder and timelines):  # a run directory may hold configurations and metrics too
        raise others[0]
    if hta_compatible:
        timelines = hta_rows(timelines)
    return concat(list(timelines.values()))


def _read_files(paths: list[Path], hta: bool, user_kinds) -> tuple[dict[int, Timeline], list[NotATrace]]:
    """Timeline of each rank, and what is wrong with the files that are no traces."""
    timelines: dict[int, Timeline] = {}
    files: dict[int, Path] = {}
    others: list[NotATrace] = []
    for path in paths:
        try:
            columns, trace = read_columns(path, hta=hta)
        except NotATrace as reason:
            others.append(reason)
            continue
        rank = _rank(columns, trace)
        if rank in files:
            raise ValueError(f"{files[rank]} and {path} are both rank {rank}; give one of them, or a list of files")
        files[rank] = path
        timelines[rank] = _timeline(columns, trace, rank, hta, user_kinds)
    return timelines, others


def _rank(columns: Columns, trace: RawTrace) -> int:
    """Rank from distributedInfo, else from a collective's metadata, else from the file name, else 0 with a warning."""
    info = trace.envelope.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int):
        return info["rank"]
    for rank in (columns.group_rank, rank_in_name(trace.path)):
        if rank is not None:
            return rank
    warnings.warn(f"{trace.path}: no rank in distributedInfo, events or file name; taken as rank 0", TraceWarning, 3)
    return 0


def _timeline(columns: Columns, trace: RawTrace, rank: int, hta: bool, user_kinds) -> Timeline:
    if trace.events == 0:
        warnings.warn(f"{trace.path}: the trace holds no events", TraceWarning, stacklevel=3)
    start_ns, dur_ns = _hta_times(columns) if hta else (columns.start_ns, columns.dur_ns)
    if (dur_ns < 0).any() and not hta:
        warnings.warn(f"{trace.path}: {(dur_ns < 0).sum()} negative durations taken as 0", TraceWarning, stacklevel=3)
    base_ns = trace.envelope.get("baseTimeNanoseconds", 0)
    base_ns = base_ns if isinstance(base_ns, int) and abs(base_ns) < 2**62 else 0
    table = load_kinds(user_kinds)
    kind, stream = _hta_kinds(columns, table) if hta else _exact_kinds(columns, table)
    spans = pd.DataFrame(
        {
            "rank": np.full(len(columns), rank, dtype=np.int32),
            "stream": np.where(stream < 2**31, stream, stream % 2**31).astype(np.int32),
            "kind": pd.Categorical.from_codes(kind, KINDS),
            "name": pd.Categorical([original_name(name) for name in columns.names])[columns.name],
            "start_ns": start_ns + base_ns,
            "dur_ns": dur_ns if hta else np.maximum(dur_ns, 0),
            "step": np.full(len(columns), -1, dtype=np.int32),
            "correlation": columns.correlation,
            "op": columns.op,
            "group": _groups(columns),
            "size_bytes": columns.size_bytes,
        },
        copy=False,
    )
    spans["step"] = assign_steps(spans)
    info = trace.envelope.get("distributedInfo")
    world_size = info.get("world_size", 1) if isinstance(info, dict) else 1
    meta = Meta(
        source="measured",
        world_size=world_size if isinstance(world_size, int) else 1,
        represents={rank: [rank]},
        device=_device_name(trace.envelope.get("deviceProperties")),
        clock="unix" if len(spans) and spans["start_ns"].min() > _EPOCH_NS else "relative",
        provenance={
            "files": {str(rank): {"name": trace.path.name, "sha256": _sha256(trace.path)}},
            "rules": "hta" if hta else "exact",
            "threads": {str(rank): [f"pid {pid} tid {tid}" for pid, tid in columns.threads]},
            **({"collectives": _user_collectives(columns, table)} if user_kinds else {}),
        },
    )
    return Timeline(spans, meta, details=details_of(trace.path, rank, base_ns))


def _user_collectives(columns: Columns, table: pd.DataFrame) -> dict[str, str]:
    """Collectives that a user's table names, for `exposed_by_collective`."""
    found = dict(zip(columns.names, collective_names(columns.names, table=table), strict=True))
    return {name: collective for name, collective in found.items() if collective}


def _device_name(properties) -> str:
    first = properties[0] if isinstance(properties, list) and properties else None
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def _exact_kinds(columns: Columns, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Kind codes (n,) and streams (n,) by category; without any device row, from annotations and operators."""
    category = np.array(columns.categories, dtype=object)
    device = np.isin(category, _DEVICE)[columns.category]
    kind = np.full(len(columns), KINDS.index("cpu"))
    kind[np.isin(category, _ANNOTATION)[columns.category]] = KINDS.index("annotation")
    kind[(category == "cuda_sync")[columns.category]] = KINDS.index("idle")
    stream = np.where(columns.stream >= 0, columns.stream, _stream_of_thread(columns))
    on_host = ~device & (kind != KINDS.index("idle")) & ~(category == "gpu_user_annotation")[columns.category]
    stream = np.where(on_host, -1 - columns.thread, stream)
    if device.any():
        kind[device] = _kind_of_name(columns, device, "exact", table)
        kind[np.isin(category, _COPY)[columns.category] & (kind == KINDS.index("compute"))] = KINDS.index("memcpy")
    else:
        _classify_cpu(columns, kind, category, table)
    return kind, stream


def _classify_cpu(columns: Columns, kind: np.ndarray, category: np.ndarray, table: pd.DataFrame) -> None:
    """On a trace without device: annotations of a backend are comm, top-level operators outside of them compute."""
    annotation = kind == KINDS.index("annotation")
    comm = annotation.copy()
    comm[annotation] = _kind_of_name(columns, annotation, "exact", table) == KINDS.index("comm")
    kind[comm] = KINDS.index("comm")
    operator = np.isin(category, ("cpu_op", "operator"))[columns.category]
    c10d = np.array([name.startswith("c10d::") for name in columns.names], dtype=bool)[columns.name]
    in_flight = np.isin(columns.thread, columns.thread[operator & c10d])  # the span of an asynchronous send or receive
    rows = np.flatnonzero(operator | (comm & ~in_flight))
    end = columns.start_ns + np.maximum(columns.dur_ns, 0)
    order = np.lexsort((~comm[rows], -end[rows], columns.start_ns[rows], columns.thread[rows]))
    rows = rows[order]
    for part in np.split(rows, np.flatnonzero(np.diff(columns.thread[rows])) + 1):
        reach = np.maximum.accumulate(end[part]) if len(part) else end[part]
        inside = np.r_[False, columns.start_ns[part[1:]] < reach[:-1]] if len(part) else np.zeros(0, bool)
        top = part[~inside]
        kind[top[~comm[top]]] = KINDS.index("compute")


def _hta_kinds(columns: Columns, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Kind codes and streams as HTA 0.5.0 sees them: whatever carries a stream runs on the device."""
    device = columns.stream >= 0
    annotation = np.isin(np.array(columns.categories, dtype=object), _ANNOTATION)[columns.category]
    kind = np.where(annotation, KINDS.index("annotation"), KINDS.index("cpu"))
    if device.any():
        kind[device] = _kind_of_name(columns, device, "hta", table)
    return kind, np.where(device, columns.stream, -1 - columns.thread)


def _kind_of_name(columns: Columns, rows: np.ndarray, rules: str, table: pd.DataFrame) -> np.ndarray:
    codes, inverse = np.unique(columns.name[rows], return_inverse=True)
    kinds = kernel_kinds([columns.names[code] for code in codes], rules=rules, table=table)
    return np.array([KINDS.index(kind) for kind in kinds], dtype=np.int64)[inverse]


def _hta_times(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Start rounded up and end rounded down to whole microseconds, in float64, once any start has decimals."""
    if columns.whole_us.all():
        return columns.start_ns, columns.dur_ns
    start_us = np.ceil(columns.ts_us).astype(np.int64)
    end_us = np.floor(columns.ts_us + columns.dur_us).astype(np.int64)
    return start_us * 1000, (end_us - start_us) * 1000


def _stream_of_thread(columns: Columns) -> np.ndarray:
    """Stream of device rows whose args have none: Kineto shows a stream as thread, as a number or as `stream 7`."""
    digits = [re.search(r"(?<![-\d])\d+$", str(tid)) for _, tid in columns.threads]
    streams = np.array([int(d[0]) if d and int(d[0]) < 2**31 else 0 for d in digits], dtype=np.int64)
    return streams[columns.thread] if len(columns) else np.zeros(0, dtype=np.int64)


def _groups(columns: Columns) -> pd.Categorical:
    codes = np.array([-1 if group == "" else i for i, group in enumerate(columns.groups)], dtype=np.int64)
    used = codes[codes >= 0]
    renumbered = np.full(len(codes), -1)
    renumbered[used] = np.arange(len(used))
    return pd.Categorical.from_codes(
        renumbered[columns.group] if len(columns) else [], [columns.groups[i] for i in used]
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
