"""NCCL Inspector's logs: how long each collective took on each rank, a JSON object per
line.

A time holds the waiting for the last member, so the late rank's is the shortest; it is
a rank of the communicator, and a process may have several. Keys decide, not the version:
v4.0 to v4.4 and its forks (NCCL plugins/profiler/inspector; v4.3 is NCCL PR 2359).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from madmax_lib.traces.logs.log import Log, assembled
from madmax_lib.traces.logs.torchtitan import decoded

_NO_STEPS = (
    "collectives have no steps: since_step counts calls of a kind, and cost_share is of "
    "the time in all collectives"
)
_COLUMNS = {
    "hostname": "host",
    "pid": "pid",
    "id": "id",
    "comm_name": "comm",
    "rank": "rank",
    "n_ranks": "ranks",
    "nnodes": "nodes",
    "coll": "collective",
    "coll_sn": "call",
    "coll_msg_size_bytes": "size_bytes",
    "coll_exec_time_us": "us",
}
_PROCESS = ["host", "pid"]


class _Record(msgspec.Struct, gc=False):
    """A line; after a marker only the payload is there."""

    header: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    coll_perf: dict[str, Any] | None = None


def read_inspector(paths: Sequence[Path]) -> Log:
    """The log of a job: a phase per communicator, collective and size, calls in place
    of steps. Raises ValueError where no collective has a context.
    """
    lost: Counter = Counter()
    rows = [row for path in paths for row in _records(path, lost)]
    if not rows:
        raise ValueError(f"{paths[0]}: no record of a collective in this log")
    records = pd.DataFrame(rows, columns=_COLUMNS).rename(columns=_COLUMNS)
    records["seconds"] = records["us"].astype(float) / 1e6
    size = records["collective"] + " " + records["size_bytes"].astype(str)
    records["phase"] = list(zip(records["id"], size, strict=True))
    # GPUs of one process are told apart by the order of their ranks
    ranks = records.groupby([*_PROCESS, "id"])["rank"]
    records["gpu"] = (
        records.assign(place=ranks.rank("dense")).groupby([*_PROCESS, "place"]).ngroup()
    )
    # a GPU has the rank of its largest communicator
    largest = records.sort_values("ranks").groupby("gpu").last()
    largest["file"] = str(paths[0].parent)
    return assembled(
        records.pivot_table("seconds", ["gpu", "call"], "phase", "last"),
        largest[["rank", "host", "file"]],
        source="NCCL Inspector",
        together=True,
        waits=True,
        sizes=_bus_bandwidth(records),
        notes=(_NO_STEPS, *(f"{n} {what}" for what, n in lost.items())),
    )


def _bus_bandwidth(records: pd.DataFrame) -> pd.DataFrame:
    """Bandwidth of collectives by size: comm, collective, size_bytes, ranks, nodes,
    records, median_s and bus_bytes_per_s (mean over records).

    records: a row per call and rank, with comm, collective, size_bytes, ranks, nodes,
    seconds. NaN for kinds without a factor.
    """
    # Bytes per time on the bus, by the convention of nccl-tests, which Inspector has:
    #   all-reduce 2 (n - 1) / n x S / t;  all-gather, reduce-scatter of n shares S:
    #   (n - 1) / n x n S / t
    ranks = records["ranks"]
    kind = records["collective"]
    is_shared = kind.isin(["AllGather", "ReduceScatter"])
    factors = [2 * (ranks - 1) / ranks, ranks - 1, np.nan]
    kinds = [kind == "AllReduce", is_shared, kind == "AlltoAll"]
    bus = records["size_bytes"] * np.select(kinds, factors, 1.0) / records["seconds"]
    keys = ["comm", "collective", "size_bytes", "ranks", "nodes"]
    table = (
        records.assign(bus=bus)
        .groupby(keys)
        .agg(
            records=("seconds", "size"),
            median_s=("seconds", "median"),
            bus_bytes_per_s=("bus", "mean"),
        )
    )
    return table.reset_index()


def _records(path, lost):
    """Rows of a file; lines that are none are counted in `lost`."""
    context = {}
    for records in decoded(path, _Record, lost):
        for record in records:
            if record.header:
                context = record.header | (record.metadata or {})
            if context and record.coll_perf:
                yield context | record.coll_perf
