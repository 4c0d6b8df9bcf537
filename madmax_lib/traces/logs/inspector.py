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
    dump_stats: dict[str, Any] | None = None


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
    members = records[[*_PROCESS, "id", "rank", "ranks"]].drop_duplicates()
    # GPUs of one process are told apart by the order of their ranks
    place = members.groupby([*_PROCESS, "id"])["rank"].rank().astype(int)
    members["gpu"] = members.assign(place=place).groupby([*_PROCESS, "place"]).ngroup()
    of_gpu = members.sort_values("ranks").drop_duplicates("gpu", keep="last")
    records = records.merge(members)
    size = records["collective"] + " " + records["size_bytes"].astype(str)
    records["phase"] = list(zip(records["id"], size, strict=True))
    of_gpu = of_gpu.sort_values("gpu").assign(file=str(paths[0].parent))
    return assembled(
        records.pivot_table("seconds", ["gpu", "call"], "phase", "last"),
        of_gpu[["rank", "host", "file"]].reset_index(drop=True),
        source="NCCL Inspector",
        together=True,
        waits=True,
        sizes=bus_bandwidth(records),
        notes=(_NO_STEPS, *(f"{n} {what}" for what, n in lost.items() if n)),
    )


def bus_bandwidth(records: pd.DataFrame) -> pd.DataFrame:
    """Bandwidth of collectives by size: comm, collective, size_bytes, ranks, nodes,
    records, median_s and bus_bytes_per_s (mean over records).

    records: a row per call and rank, with comm, collective, size_bytes, ranks, nodes,
    seconds. NaN for kinds without a factor.
    """
    # Bytes per time, by Inspector's convention, which is that of nccl-tests:
    #   all-reduce                  S / t,    bus = 2 (n - 1) / n of it
    #   all-gather, reduce-scatter  n S / t,  bus =   (n - 1) / n of it (S: one share)
    ranks = records["ranks"].astype(float)
    kind = records["collective"]
    shares = kind.isin(["AllGather", "ReduceScatter"])
    factor = {"AllReduce": 2.0, "AllGather": 1.0, "ReduceScatter": 1.0}
    factor = kind.map(factor) * (ranks - 1) / ranks
    factor = factor.fillna(1.0).where(kind != "AlltoAll")
    algorithm = (
        records["size_bytes"] * np.where(shares, ranks, 1.0) / records["seconds"]
    )
    rates = records.assign(bus=algorithm * factor)
    keys = ["comm", "collective", "size_bytes", "ranks", "nodes"]
    table = rates.groupby(keys).agg(
        records=("seconds", "size"),
        median_s=("seconds", "median"),
        bus_bytes_per_s=("bus", "mean"),
    )
    return table.reset_index()


def _records(path, lost):
    """Rows of a file; what is left out is counted in `lost`."""
    header = metadata = {}
    due = 0  # records that the last marker has announced
    for records in decoded(path, _Record, lost):
        for record in records:
            header = record.header or header
            metadata = record.metadata or metadata
            perf = record.coll_perf
            if record.dump_stats:
                lost["announced records are not there"] += due
                due = 0 if perf else record.dump_stats.get("coll_records", 0)
            if perf and header and perf.get("coll_exec_time_us"):
                due -= due > 0
                yield metadata | header | perf
    lost["announced records are not there"] += due
