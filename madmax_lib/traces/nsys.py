"""Recordings of Nsight Systems: SQLite exports (`nsys export --type sqlite`) of one or
many processes, one Timeline.

Kernels, copies, memsets and waits of streams are device rows; CUDA calls and NVTX
ranges are host rows. Ranges of `torch.autograd.profiler.emit_nvtx`, which carry an
op_id, are operators, others annotations. No table tells ranks: they are the processes
with their devices, by file and process id, or what the name of a file with one of them
says.
Schema: Nsight Systems User Guide, "SQLite Schema Reference" (3.x).
"""

import re
import sqlite3
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.timeline import SPANS, Meta, Timeline, concat
from madmax_lib.timeline.kinds import kernel_kinds, load_kinds, own_collectives
from madmax_lib.timeline.side_tables import SideTables, conform
from madmax_lib.traces.read.cache import cached, content_sha256
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.files import rank_in_name
from madmax_lib.traces.read.steps import assign_steps
from madmax_lib.traces.read.values import recorded_codes

# of a globalTid: the thread; above it the process with as many, and the host
_BITS = 24
_MASK = 0xFFFFFF
_NO_STREAM = 2**31  # and above: the whole context waits
_LATEST = 2**62  # ns of a time: a start and a duration fit into int64
_CHUNK = 1_000_000  # rows read at once
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RANGES = "eventType IN (59, 60, 70)"  # pushed and popped, started and ended
# our names of columns, and those of the export
_NUMBERS = {
    "start": "start",
    "end": "end",
    "device": "deviceId",
    "stream": "streamId",
    "process": "globalPid",
    "thread": "globalTid",
    "correlation": "correlationId",
    "bytes": "bytes",
}
_OPERATOR = re.compile(
    r"^(.*?)(?:, seq = (\d+))?, op_id = \d+(?:, sizes = (\[.*\])(?=, |$))?"
)


def read_exports(paths: list[Path], kinds: str | Path | None = None) -> Timeline:
    """Timeline of the exports of one run, one per process or node; times are those of
    each node's clock.

    kinds: CSV with rows to put before `data/kernel_kinds.csv`.
    Raises ValueError with file and reason for what is no export, or holds no work of a
    GPU.
    """
    timelines = []
    kinds_sha256 = content_sha256(Path(kinds)) if kinds else ""
    next_rank = 0  # ranks are numbered over the files, in order of their names
    for path in sorted(paths):
        sha256 = content_sha256(path)
        named = rank_in_name(path)
        options = f"nsys from {next_rank} name {named} kinds {kinds_sha256}"
        make = partial(_read, path, sha256, next_rank, named, load_kinds(kinds))
        timeline = cached(sha256, options, make)
        timelines.append(timeline)
        next_rank += len(timeline.ranks)
        for text in timeline.meta.provenance["warnings"][str(timeline.ranks[0])]:
            warnings.warn(f"{path}: {text}", TraceWarning, stacklevel=4)
    return concat(timelines)


def _read(path, sha256, next_rank, named, table):
    # immutable: no lock and no journal beside the file, which may be read-only
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as base:
            if not _columns(base, "StringIds"):
                raise ValueError(
                    f"{path}: not an Nsight Systems export (no table StringIds)"
                )
            texts = dict(base.execute("SELECT id, CAST(value AS TEXT) FROM StringIds"))
            device = _device_rows(base, texts)
            host = _host_rows(base, texts)
            facts = _facts(base)
    except (
        sqlite3.Error,
        pd.errors.DatabaseError,
        ValueError,
        TypeError,
        OverflowError,
    ) as reason:
        if str(path) in str(reason):
            raise
        raise ValueError(
            f"{path}: not an SQLite export of Nsight Systems "
            f"({' '.join(str(reason).split())[:200]})"
        ) from None
    if pd.concat([device["end"], host["end"]]).max() + facts["epoch_ns"] > _LATEST:
        raise ValueError(f"{path}: times beyond the year 2116, so not in nanoseconds")
    if (device["kind"] == "idle").all():
        raise ValueError(
            f"{path}: no work of a GPU; record with nsys profile --trace=cuda,nvtx"
        )
    # each of thousands of kernel names is looked up once
    codes, names = pd.factorize(device["name"])
    by_name = kernel_kinds(list(names), table=table)[codes]
    facts["collectives"] = own_collectives(list(names), table)
    device["kind"] = device["kind"].where(device["kind"] != "", by_name)
    busy = device[device["kind"] != "idle"]
    rows = pd.concat([device, _with_device(host, busy)], ignore_index=True)
    rows = rows.sort_values("start", kind="stable")
    rows[["start", "end"]] += facts["epoch_ns"]
    # a rank is a process with one of its devices
    workers = sorted(set(zip(busy["process"], busy["device"], strict=True)))
    ranks = range(next_rank, next_rank + len(workers))
    if named is not None and len(workers) == 1:
        ranks = [named]
    if len(workers) > 1:
        facts["warnings"].append(
            "it names no ranks: its processes and devices count as ranks, in order"
        )
    rank_of = dict(zip(workers, ranks, strict=True))
    pairs = zip(rows["process"], rows["device"], strict=True)
    rows["rank"] = [rank_of.get(pair, -1) for pair in pairs]
    files = {"name": path.name, "sha256": sha256}
    parts = [(rank, rows[rows["rank"] == rank]) for rank in ranks]
    return concat([_of_rank(rank, part, facts, files) for rank, part in parts])


def _of_rank(rank, rows, facts, files):
    """Timeline of one rank from its rows in order of time."""
    # device rows have thread -1, for which factorize gives code -1
    thread, threads = pd.factorize(rows["thread"].where(rows["thread"] >= 0))
    # of emit_nvtx: name, sequence number, sizes of inputs
    texts = rows["name"].where(rows["kind"] == "annotation", "")
    forward = texts.str.extract(_OPERATOR)
    operator = forward[0].notna().to_numpy()
    spans = pd.DataFrame(
        {
            "rank": np.int32(rank),
            "stream": np.where(thread >= 0, -1 - thread, rows["stream"]),
            "kind": pd.Categorical(rows["kind"].where(~operator, "cpu")),
            "name": pd.Categorical(rows["name"].where(~operator, forward[0])),
            "start_ns": rows["start"],
            "dur_ns": rows["end"] - rows["start"],
            "step": np.int32(-1),
            "correlation": rows["correlation"],
            "op": -1,
            "group": pd.Categorical([None] * len(rows)),
            "size_bytes": rows["bytes"].where(rows["bytes"] >= 0).astype(float),
        }
    ).reset_index(drop=True)[list(SPANS)]
    spans["step"] = assign_steps(spans)
    columns = {
        "row": np.flatnonzero(operator),
        "shapes": forward[2][operator].fillna("").to_numpy(),
        "types": "",
        "inputs": "",
        "strides": "",
        "sequence": pd.to_numeric(forward[1][operator]).fillna(-1).to_numpy(),
        "forward_thread": -1,
    }
    # one value for all rows where the ranges do not tell
    count = operator.sum()
    columns = {name: np.broadcast_to(each, count) for name, each in columns.items()}
    names = [f"pid {t >> _BITS & _MASK} tid {t & _MASK}" for t in threads.astype(int)]
    provenance = {
        "rules": "exact",
        "threads": {str(rank): names},
        "files": {str(rank): files | facts["export"]},
        "warnings": {str(rank): facts["warnings"]},
        "collectives": facts["collectives"],
    }
    meta = Meta(
        represents={rank: [rank]},
        device=facts["device"],
        clock="unix" if facts["epoch_ns"] else "relative",
        provenance=provenance,
    )
    return Timeline(
        spans,
        meta,
        side_tables=SideTables(
            partial(dict, {"operators": conform("operators", columns)})
        ),
    )


def _columns(base, table):
    """Columns of a table; empty where the export lacks it, as it does for what was not
    recorded.
    """
    return [column[1] for column in base.execute(f'PRAGMA table_info("{table}")')]


def _rows(base, table, name, where="1"):
    """Rows of a table: numbers (-1 where unknown), and the column `name` as it is."""
    columns = _columns(base, table)
    dtypes = dict.fromkeys(_NUMBERS, "int64")
    if name not in columns:
        empty = {column: pd.Series([], dtype="int64") for column in (*_NUMBERS, "name")}
        return pd.DataFrame(empty).assign(kind="")
    selected = [f'"{name}" AS "name"']
    for number, column in _NUMBERS.items():
        # exports lack columns of what a version did not record
        value = f'COALESCE("{column}", -1)' if column in columns else "-1"
        selected.append(f'{value} AS "{number}"')
    query = f'SELECT {", ".join(selected)} FROM "{table}" WHERE {where}'
    # in chunks: rows as objects of Python take many times the memory of their columns
    pieces = pd.read_sql_query(query, base, chunksize=_CHUNK, dtype=dtypes)
    return pd.concat(list(pieces), ignore_index=True).assign(kind="")


def _device_rows(base, texts):
    """Kernels, copies, memsets, graphs and waits of streams; kind is empty where the
    name tells it.
    """
    kernels = _rows(base, "CUPTI_ACTIVITY_KIND_KERNEL", "demangledName")
    copies = _rows(base, "CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind")
    sets = _rows(base, "CUPTI_ACTIVITY_KIND_MEMSET", "bytes").assign(
        name="Memset (Device)"
    )
    graphs = _rows(base, _GRAPHS, "graphId").assign(kind="compute")
    waits = _rows(base, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "syncType").assign(
        kind="idle"
    )
    kernels["name"] = kernels["name"].map(texts).fillna("unknown kernel")
    copies["name"] = "Memcpy " + copies["name"].map(recorded_codes("copy")).fillna(
        "Unknown"
    )
    graphs["name"] = "CUDA graph " + graphs["name"].astype(str)
    waits["name"] = waits["name"].map(recorded_codes("wait")).fillna("Sync")
    parts = [kernels, copies, sets, graphs, waits[waits["stream"] < _NO_STREAM]]
    rows = pd.concat(
        [part for part in parts if len(part)] or [kernels], ignore_index=True
    )
    return rows[(rows["start"] >= 0) & (rows["end"] >= rows["start"])].assign(thread=-1)


def _host_rows(base, texts):
    """CUDA calls and NVTX ranges; a range that is still open ends with the last row."""
    calls = _rows(base, "CUPTI_ACTIVITY_KIND_RUNTIME", "nameId").assign(kind="cpu")
    calls["name"] = (
        calls["name"].map(texts).astype(object).str.replace(r"_v\d+$", "", regex=True)
    )
    ranges = [
        _rows(base, "NVTX_EVENTS", column, _RANGES).assign(kind="annotation")
        for column in ("text", "textId")
    ]
    # a range has its text, or the id of a registered one
    named, by_id = ranges if len(ranges[0]) else ranges[::-1]
    if len(by_id) == len(named):
        registered = by_id["name"].map(texts)
        named["name"] = named["name"].where(named["name"].notna(), registered)
    parts = [part for part in (calls, named) if len(part)]
    rows = pd.concat(parts or [calls], ignore_index=True)
    rows = rows[rows["start"] >= 0]
    has_ended = rows["end"] >= rows["start"]
    last = rows[["start", "end"]].max().max()
    rows["end"] = rows["end"].where(has_ended, last)
    return rows[rows["name"].notna()].assign(process=rows["thread"] & ~_MASK, stream=-1)


def _with_device(host, device):
    """Host rows with the device that their thread launches most on, else the first of
    their process.
    """
    key = ["process", "correlation"]
    # a launch and its kernel have the same correlation within a process
    launches = host.loc[host["correlation"] >= 0, [*key, "thread"]]
    launched = launches.merge(device[[*key, "device"]], on=key)
    by_thread = launched.groupby("thread")["device"]
    most = by_thread.agg(lambda devices: devices.mode()[0])
    first = device.groupby("process")["device"].min()
    number = host["thread"].map(most).fillna(host["process"].map(first))
    return host.assign(device=number.fillna(-1).astype("int64"))


def _facts(base):
    """Epoch of time 0 (0: unknown), device, versions of the export, and what it hides."""

    def first(table, column, where="1"):
        if column not in _columns(base, table):
            return None
        query = f'SELECT "{column}" FROM "{table}" WHERE {where} LIMIT 1'
        row = base.execute(query).fetchone()
        return row[0] if row else None

    versions = {"schema": "EXPORT_SCHEMA_VERSION", "product": "EXPORT_PRODUCT_VERSION"}
    hidden = (
        "kernels of CUDA graphs are one row per graph; nsys profile "
        "--cuda-graph-trace=node records them apart"
    )
    return {
        "epoch_ns": int(first("TARGET_INFO_SESSION_START_TIME", "utcEpochNs") or 0),
        "device": first("TARGET_INFO_GPU", "name") or "",
        "export": {
            name: first("META_DATA_EXPORT", "value", f"name = '{key}'") or ""
            for name, key in versions.items()
        },
        "warnings": [hidden] if first(_GRAPHS, "start") is not None else [],
    }
