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
_PROCESS = ["hostname", "pid"]


class _Record(msgspec.Struct, gc=False):
    """A line; after a marker only the payload is there."""

    header: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    coll_perf: dict[str, Any] | None = None


def read_inspector(paths: Sequence[Path]) -> Log:
    """The log of a job: a phase per communicator, collective and size, calls in place
    of steps. Raises ValueError where no collective has a context.
    """
    lost = Counter()
    rows = [row for path in paths for row in _records(path, lost)]
    if not rows:
        raise ValueError(f"{paths[0]}: no record of a collective in this log")
    records = pd.DataFrame(rows).query("coll_exec_time_us > 0")
    records["seconds"] = records["coll_exec_time_us"].astype(float) / 1e6
    size = records["coll"] + " " + records["coll_msg_size_bytes"].astype(str)
    records["phase"] = list(zip(records["id"], size, strict=True))
    # GPUs of one process are told apart by the order of their ranks
    ranks = records.groupby([*_PROCESS, "id"])["rank"]
    records["gpu"] = (
        records.assign(place=ranks.rank("dense")).groupby([*_PROCESS, "place"]).ngroup()
    )
    # a GPU has the rank of its largest communicator
    largest = records.sort_values("n_ranks").groupby("gpu").last()
    largest = largest.assign(host=largest["hostname"], file=str(paths[0].parent))
    return assembled(
        records.pivot_table("seconds", ["gpu", "coll_sn"], "phase", "last"),
        largest[["rank", "host", "file"]],
        source="NCCL Inspector",
        together=True,
        waits=True,
        sizes=_bus_bandwidth(records),
        notes=(_NO_STEPS, *(f"{n} {what}" for what, n in lost.items())),
    )


def _bus_bandwidth(records):
    """Bandwidth by size, in Inspector's words: comm_name, coll, coll_msg_size_bytes,
    n_ranks, nnodes, records, median_s, bus_bytes_per_s (mean; NaN without a factor).
    """
    # Bytes per time on the bus, by the convention of nccl-tests, which Inspector has:
    #   all-reduce 2 (n - 1) / n x S / t;  all-gather, reduce-scatter of n shares S:
    #   (n - 1) / n x n S / t
    ranks = records["n_ranks"]
    kind = records["coll"]
    factors = [2 * (ranks - 1) / ranks, ranks - 1, np.nan]
    is_shared = kind.isin(["AllGather", "ReduceScatter"])
    kinds = [kind == "AllReduce", is_shared, kind == "AlltoAll"]
    bytes_per_s = records["coll_msg_size_bytes"] / records["seconds"]
    table = records.assign(bus=np.select(kinds, factors, 1.0) * bytes_per_s)
    keys = ["comm_name", "coll", "coll_msg_size_bytes", "n_ranks", "nnodes"]
    of_size = table.groupby(keys)
    columns = {"records": of_size.size(), "median_s": of_size["seconds"].median()}
    columns["bus_bytes_per_s"] = of_size["bus"].mean()
    return pd.DataFrame(columns).reset_index()


def _records(path, lost):
    """Rows of a file; lines that are none are counted in `lost`."""
    context = {}
    for records in decoded(path, _Record, lost):
        for record in records:
            if record.header:
                context = record.header | (record.metadata or {})
            if context and record.coll_perf:
                # names of communicators came with NCCL 2.30
                yield {"comm_name": "unknown"} | context | record.coll_perf
