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

from madmax_lib.traces.logs.log import Log, Phase
from madmax_lib.traces.logs.torchtitan import blocks, decoded

_US = 1e-6
_NO_STEPS = (
    "collectives have no steps: since_step counts calls of a kind, and cost_share is of "
    "the time in all collectives"
)
_COLUMNS = ["host", "pid", "comm", "rank", "name", "ranks", "nodes"]
_COLUMNS += ["collective", "call", "size_bytes", "seconds"]


class _Record(msgspec.Struct, gc=False):
    """A line; after a marker only the payload is there."""

    header: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    coll_perf: dict[str, Any] | None = None
    dump_stats: dict[str, Any] | None = None


def read_inspector(paths: Sequence[Path]) -> Log:
    """The log of a job: a phase per collective and size, calls in place of steps.

    Raises ValueError where no collective has a context.
    """
    lost: Counter = Counter()
    rows = [row for path in paths for row in _records(path, lost)]
    if not rows:
        raise ValueError(f"{paths[0]}: no record of a collective in this log")
    records = pd.DataFrame(rows, columns=_COLUMNS)
    units, records = _processes(records)
    phases = {}
    for (collective, size), part in records.groupby(["collective", "size_bytes"]):
        calls = np.sort(part["call"].unique())
        # one process may be in several communicators of a size: a row for each
        members = part[["unit", "comm"]].drop_duplicates()
        for number, of_round in members.groupby(members.groupby("unit").cumcount()):
            seconds = np.full((len(units), len(calls)), np.nan, np.float32)
            group = np.full(len(units), -1)
            group[of_round["unit"]] = of_round["comm"]
            own = part[part["comm"].to_numpy() == group[part["unit"]]]
            at = np.searchsorted(calls, own["call"])
            seconds[own["unit"], at] = own["seconds"]
            # a call that a ring lost on some ranks is not compared on the others
            name = f"{collective} {size}" + f" #{number}" * (number > 0)
            phases[name] = Phase(seconds, calls, group, waits=True)
    return Log(
        source="NCCL Inspector",
        units=units,
        steps=np.empty(0, np.int64),
        pace_s=np.empty(0),
        tags=np.empty(0, object),
        phases=phases,
        together=True,
        sizes=bus_bandwidth(records),
        notes=(_NO_STEPS, *(f"{n} {what}" for what, n in lost.items() if n)),
    )


def bus_bandwidth(records: pd.DataFrame) -> pd.DataFrame:
    """Bandwidth of collectives by size: comm, collective, size_bytes, ranks, nodes,
    records, median_s, algorithm_bytes_per_s and bus_bytes_per_s (means over records).

    records: a row per call and rank, with name, collective, size_bytes, ranks, nodes,
    seconds. NaN for kinds without a factor.
    """
    # Bytes per time, by Inspector's convention, which is that of nccl-tests:
    #   all-reduce                  S / t,    bus = 2 (n - 1) / n of it
    #   all-gather, reduce-scatter  n S / t,  bus =   (n - 1) / n of it (S: one share)
    ranks = records["ranks"].astype(float)
    is_shared = records["collective"].isin(["AllGather", "ReduceScatter"])
    algorithm = records["size_bytes"] / records["seconds"]
    algorithm = algorithm.where(~is_shared, algorithm * ranks)
    factor = pd.Series(1.0, index=records.index)
    factor = factor.where(~is_shared, (ranks - 1) / ranks)
    is_reduced = records["collective"] == "AllReduce"
    factor = factor.where(~is_reduced, 2 * (ranks - 1) / ranks)
    factor = factor.where(records["collective"] != "AlltoAll")
    rates = records.assign(algorithm=algorithm, bus=algorithm * factor)
    keys = ["name", "collective", "size_bytes", "ranks", "nodes"]
    table = rates.groupby(keys).agg(
        records=("seconds", "size"),
        median_s=("seconds", "median"),
        algorithm_bytes_per_s=("algorithm", "mean"),
        bus_bytes_per_s=("bus", "mean"),
    )
    return table.reset_index().rename(columns={"name": "comm"})


def _records(path, lost):
    """Rows of a file; what is left out is counted in `lost`."""
    decoder = msgspec.json.Decoder(_Record)
    header = metadata = {}
    due = 0  # records that the last marker has announced
    for block in blocks(path):
        records, bad = decoded(block, decoder)
        lost["lines are cut or no JSON"] += bad
        for record in records:
            header = record.header or header
            metadata = record.metadata or metadata
            if stats := record.dump_stats:
                lost["records that a marker announced are not there"] += due
                lost["records were dropped by Inspector"] += stats.get(
                    "coll_dropped_since_last_dump", 0
                )
                # only a marker without payload announces lines without context
                due = 0 if record.coll_perf else stats.get("coll_records", 0)
            perf = record.coll_perf
            if not perf or not header:
                continue
            due -= due > 0
            seconds = float(perf.get("coll_exec_time_us") or 0) * _US
            if seconds <= 0:
                continue
            yield (
                metadata.get("hostname", ""),
                metadata.get("pid", 0),
                header.get("id", ""),
                header.get("rank", -1),
                header.get("comm_name", "unknown"),
                header.get("n_ranks", 0),
                header.get("nnodes", 0),
                perf["coll"],
                perf["coll_sn"],
                perf["coll_msg_size_bytes"],
                seconds,
            )
    lost["records that a marker announced are not there"] += due


def _processes(records):
    """A row per GPU, and the records with its number and that of the communicator.

    GPUs of one process are told apart by the order of their ranks.
    """
    process = ["host", "pid"]
    members = records[[*process, "comm", "rank", "ranks"]].drop_duplicates()
    members["place"] = members.groupby([*process, "comm"])["rank"].rank().astype(int)
    units = members[[*process, "place"]].drop_duplicates().sort_values(process)
    units = units.reset_index(drop=True).assign(unit=range(len(units)))
    members = members.merge(units, on=[*process, "place"])
    # a communicator of all of them tells their ranks; else each of its own
    whole = members[members["ranks"] == len(units)].drop_duplicates("unit")
    rank = whole if len(whole) == len(units) else members.drop_duplicates("unit")
    units["rank"] = units["unit"].map(rank.set_index("unit")["rank"])
    units = units.assign(
        group="", file=units["host"] + "-pid" + units["pid"].astype(str)
    )
    records = records.merge(members[[*process, "comm", "rank", "unit"]])
    records["comm"] = pd.factorize(records["comm"])[0]
    return units[["rank", "host", "group", "file"]], records
