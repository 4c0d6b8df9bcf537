"""Logs of nccl-tests and rccl-tests as rows that `simulate(collectives=)` takes.

Logs are read as people have them: behind prefixes of mpirun and srun, between other
output, without headers or with lines cut out; what nccl-tests writes as JSON (`-J`) has
the same numbers with all their digits. Each row is checked against itself (size over
time, bus over algorithm bandwidth); one that fails is left out and named in a note.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from madmax_lib.base.collectives import ONE_WAY, TIMED, bus_factor
from madmax_lib.traces.read.values import dtype_bytes, recorded_dtype

COLUMNS = (
    "file",
    "collective",
    "redop",
    "dtype",
    "ranks",
    "nodes",
    "size_bytes",
    "seconds",
    "placement",
)
# of mpirun --tag-output, such as [1,0]<stdout>:, and of srun --label, such as 0:
_PREFIX = re.compile(r"^\s*(?:\[\d+(?:,\d+)?\](?:<\w+>:?)?|\d+:(?=\s))?\s*#?\s*")
_TEST = re.compile(r"(?:Collective test starting: |[\w./-]*/|\b)(\w+?)_perf(?:_\w+)?\b")
_DEVICE = re.compile(
    r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)"
)
_NODES = re.compile(r"^\W*(\d+)[- ]nodes?\b", re.IGNORECASE)
# what nccl-tests times, in the order in which texts are searched
_TESTED = (*TIMED, "reduce")
_FLOAT8 = re.compile(r"^f(?:p)?8_?(?=e)")  # of nccl-tests, float8_ elsewhere
# how results are called in logs, and in JSON
_PLACEMENTS = {"out-of-place": "out_of_place", "in-place": "in_place"}
# columns of a table whose header was cut out
_USUAL_HEADER = ["time", "algbw", "busbw", "#wrong"] * 2
# a count of wrong values, or the largest error of old logs: that of rounding is far
# below
_ERROR = 0.5
# half of the last printed digit, and what rounding of the time adds
_DIGITS = 0.006
_LOOSE = 0.01


class _Device(NamedTuple):
    """A line of the device list."""

    rank: int
    group: int
    host: str
    number: int  # on its host


@dataclass(eq=False)
class _Run:
    """A table of a log and what stands above it."""

    collective: str = ""  # its name in this library, "" if the log does not say
    devices: list[_Device] = field(default_factory=list)
    nodes: int = 0  # as a separator says, 0 where none does
    columns: list[str] = field(default_factory=list)  # header of the table
    placements: tuple[str, ...] = tuple(_PLACEMENTS)  # of its groups of columns
    # redop, dtype, size_bytes, seconds, placement, algorithm and bus bandwidth in GB/s,
    # and count, the elements per rank
    rows: list[dict] = field(default_factory=list)


def read_link_log(
    path: str | Path,
    *,
    collective: str = "",
    ranks: int | None = None,
    nodes: int | None = None,
) -> pd.DataFrame:
    """A row per result of a log: the columns of `COLUMNS`; what was left out or
    inferred stands in .attrs["notes"].

    collective, ranks, nodes: for logs that do not say. nodes is missing where neither
    says. size_bytes: the larger buffer of a rank, as `MeasuredCollectives` wants it.
    seconds: mean of one call. Raises ValueError for a file without results, of host
    times, or whose collective or number of ranks is unknown.
    """
    path = Path(path)
    notes = []
    tables = []
    text = path.read_text(errors="replace")
    is_json = text.lstrip().startswith("{")
    runs = [_run_of_json(path, text, notes)] if is_json else _runs(path, text, notes)
    for run in runs:
        if not run.rows:
            continue
        name = collective or run.collective or _name_in(path.stem)
        if not name:
            raise ValueError(
                f"{path}: which collective was measured? Give collective=, such as "
                "all_reduce"
            )
        table = pd.DataFrame(run.rows)
        table = table.query("size_bytes > 0 and seconds > 0")
        count = ranks or _ranks(run, name, table, path, notes)
        if count == 1:
            notes.append("one rank: no link was measured")
            continue
        about = {"file": path.name, "collective": name, "ranks": count}
        about["nodes"] = nodes or _nodes(run, count)
        tables.append(table[_consistent(table, name, count, notes)].assign(**about))
    if not tables:
        reason = notes[0] if notes else "no results of nccl-tests or rccl-tests"
        raise ValueError(f"{path}: {reason}")
    rows = pd.concat(tables, ignore_index=True)[[*COLUMNS]].astype({"nodes": "Int64"})
    # what was inferred travels with the rows
    rows.attrs["notes"] = notes
    return rows


def _run_of_json(path, text, notes):
    """The table of a file of `-J`."""
    try:
        content = json.loads(text)
        names = (_tested(word) for word in content["args"])
        run = _Run(next(filter(None, names), ""), _devices_of_json(content["config"]))
        for number, result in enumerate(content["results"], 1):
            for placement, key in _PLACEMENTS.items():
                if not (values := result.get(key)):
                    continue
                if "time" not in values:
                    raise ValueError(
                        f"{path}: host times (cpu_time), not collective times"
                    )
                if _is_wrong(values.get("nwrong", 0)):
                    notes.append(f"result {number} has {values['nwrong']} wrong values")
                    continue
                row = {
                    "size_bytes": int(result["size"]),
                    "count": int(result["count"]),
                    "dtype": result["type"],
                    "redop": result["redop"],
                    "placement": placement,
                    "seconds": 1e-6 * float(values["time"]),
                    "algorithm": float(values["alg_bw"]),
                    "bus": float(values["bus_bw"]),
                }
                run.rows.append(row)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not the JSON of nccl-tests ({type(error).__name__}: {error})"
        ) from None
    return run


def _devices_of_json(config):
    """Devices of a configuration that lists all of them, or the first of each process."""
    of_process = int(config["nthreads"]) * int(config["ngpus"])
    # the list may hold every device of a process; the first one numbers the others
    first = {}
    for device in config["devices"]:
        first.setdefault((device["hostname"], device["pid"]), device)
    return [
        _Device(
            int(device["rank"]) + more, int(device["group"]), device["hostname"], more
        )
        for device in sorted(first.values(), key=lambda device: int(device["rank"]))
        for more in range(of_process)
    ]


def _is_wrong(errors):
    """Whether so many values, or errors so large, spoil a result; N/A: not checked."""
    return float(str(errors).replace("N/A", "0")) >= _ERROR


def _runs(path, text, notes):
    """The tables of a log, in its order."""
    run = _Run()
    runs = [run]
    for number, line in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", line)
        words = line.split()
        is_header = line.startswith("size ")
        # a separator, a title or a header begins a table
        starts = is_header or bool(_NODES.match(line))
        starts |= "Using devices" in line or "Collective test starting" in line
        if run.rows and starts:
            # a further table; what is not said again holds on
            devices = run.devices if "size " in line else []
            run = _Run(run.collective, devices, 0, run.columns, run.placements)
            runs.append(run)
        # a result begins with size, count and a data type
        numbers = len(words) > 3 and words[0].isdigit() and words[1].isdigit()
        if numbers and _width(words[2]) > 0:
            try:
                run.rows += _results(words, run)
            except (ValueError, IndexError):
                notes.append(
                    f"line {number} is truncated or has wrong results: {line[:60]}"
                )
        elif device := _DEVICE.search(line):
            rank, group, host, index = device.groups()
            run.devices.append(_Device(int(rank), int(group or 0), host, int(index)))
        elif is_header and "count" in words:
            if "cputime" in words:
                raise ValueError(f"{path}: host times (cputime), not collective times")
            run.columns = words
        elif placements := tuple(word for word in words if word in _PLACEMENTS):
            run.placements = placements
        elif separated := _NODES.match(line):
            run.nodes = int(separated[1])
        elif name := _tested(line):
            run.collective = name
    return runs


def _results(words, run):
    """Results of a line, one per placement."""
    about = {"size_bytes": int(words[0]), "count": int(words[1]), "dtype": words[2]}
    measures = words[3:]
    # the operation is left out by tests that have none
    about["redop"] = measures.pop(0) if measures[0].isalpha() else "none"
    # logs without a header have the usual one
    header = _USUAL_HEADER
    if run.columns:
        header = run.columns[run.columns.index("time") :]
    # the root of a broadcast or a reduction stands before the times
    if len(measures) > len(header) and ("root" in run.columns or not run.columns):
        measures.pop(0)
    groups = header.count("time")
    width = len(header) // groups
    results = []
    # a group of columns per placement
    for group, placement in enumerate(run.placements[:groups]):
        time_us, algorithm, bus, wrong = measures[group * width :][:4]
        if _is_wrong(wrong):
            raise ValueError(f"{wrong} wrong results")
        rates = {"algorithm": float(algorithm), "bus": float(bus)}
        timed = {"seconds": float(time_us) * 1e-6, "placement": placement}
        results.append(about | rates | timed)
    return results


def _tested(text):
    """The library's name of the collective whose test a text names, else ""."""
    test = _TEST.search(text)
    return _name_in(test[1]) if test else ""


def _name_in(text):
    """The library's name of the collective that a test or a file is named after.

    Empty if there is none.
    """
    # its tests are called alltoall and sendrecv
    plain = re.sub("[-_]", "", text.lower())
    return next((name for name in _TESTED if name.replace("_", "") in plain), "")


def _width(dtype):
    """Bytes of an element, NaN for what is no type."""
    return dtype_bytes(recorded_dtype(_FLOAT8.sub("float8_", dtype)))


def _ranks(run, collective, table, path, notes):
    """Ranks of a group: of the device list, or from what the table says of them."""
    if run.devices:
        ranks = max(device.rank for device in run.devices) + 1
        return ranks // (max(device.group for device in run.devices) + 1)
    row = table.loc[table["bus"].idxmax()]
    if collective in ONE_WAY:  # its rows count a rank's share of their size
        return round(row["size_bytes"] / (row["count"] * _width(row["dtype"])))
    if row["bus"] == 0:
        return 1
    if collective != "all_reduce" or not row["bus"] < 2 * row["algorithm"]:
        raise ValueError(f"{path}: how many ranks were measured? Give ranks=")
    # bus / algorithm = 2 (p - 1) / p
    ranks = round(2 / (2 - row["bus"] / row["algorithm"]))
    notes.append(f"{ranks} ranks, from bus over algorithm bandwidth")
    return ranks


def _nodes(run, ranks):
    """Nodes of a group, None if the log does not say.

    A list that was shortened still numbers the devices of a node.
    """
    if run.nodes or not run.devices:
        return run.nodes or None
    if len(run.devices) >= ranks:
        return len({device.host for device in run.devices if device.group == 0})
    of_node = max(device.number for device in run.devices) + 1
    return -(-ranks // of_node)  # rounded up


def _consistent(table, collective, ranks, notes):
    """(n,) whether bandwidths follow from size, time and ranks, within the printed
    digits.
    """
    algorithm = table["size_bytes"] / table["seconds"] * 1e-9  # GB/s
    factor = bus_factor(collective, ranks)
    bus = table["algorithm"] * factor
    fits = (table["algorithm"] - algorithm).abs() <= _DIGITS + _LOOSE * algorithm
    # the bus bandwidth is rounded after the algorithm's, which the factor magnifies
    fits &= (table["bus"] - bus).abs() <= _DIGITS * (1 + factor) + _LOOSE * bus
    notes += [
        f"{size} bytes: bandwidth and time disagree"
        for size in table["size_bytes"][~fits]
    ]
    return fits.to_numpy()
