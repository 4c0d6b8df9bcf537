"""What do the logs of nccl-tests and rccl-tests say about the links? Rows that
`simulate(collectives=)` takes.

Logs are read as people have them: behind prefixes of mpirun and srun, between other
output, without headers or with lines cut out; what nccl-tests writes as JSON (`-J`) has
the same numbers with all their digits. Each row is checked against itself (size over
time, bus over algorithm bandwidth); one that fails is left out and named in a note.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.traces.comm.collectives import bus_factor
from madmax_lib.traces.read.values import dtype_bytes, recorded_dtype

__all__ = ["COLUMNS", "read_link_log"]

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
_PREFIX = re.compile(
    r"^\s*(?:\[\d+(?:,\d+)?\](?:<\w+>:?)?|\d+:(?=\s))?\s*#?\s*"
)  # of mpirun --tag-output, srun --label
_TEST = re.compile(r"(?:Collective test starting: |[\w./-]*/|\b)(\w+?)_perf(?:_\w+)?\b")
_DEVICE = re.compile(
    r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)"
)
_NODES = re.compile(r"^\W*(\d+)[- ]nodes?\b", re.IGNORECASE)
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*([\d.e+]+)")
_NAMES = {
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "sendrecv": "send_recv",
}  # ours for nccl-tests' names
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "sendrecv",
    "broadcast",
    "reduce",
)
_SHARED = (
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)  # a row's count is a rank's share of its size
_FLOAT8 = re.compile(r"^f(?:p)?8_?(?=e)")  # of nccl-tests, float8_ elsewhere
_PLACEMENTS = ("out-of-place", "in-place")
# a count of wrong values, or the largest error of old logs: that of rounding is far
# below
_ERROR = 0.5
# half of the last printed digit, and what rounding of the time adds
_DIGITS = 0.006
_LOOSE = 0.01


@dataclass(eq=False)
class _Run:
    """A table of a log and what stands above it.

    collective: its name in this library, "" if the log does not say.
    devices: (rank, group, host, number) of the list.
    nodes: as a separator says (default 0: none does).
    columns: header of the table (default none).
    placements: of its groups of columns, in order.
    rows: redop, dtype, size_bytes, seconds, placement, algorithm and bus bandwidth,
    elements per rank.
    average: bus bandwidth that the log prints at the end.
    """

    collective: str = ""
    devices: list[tuple[int, int, str, int]] = field(default_factory=list)
    nodes: int = 0
    columns: list[str] = field(default_factory=list)
    placements: tuple[str, ...] = _PLACEMENTS
    rows: list[dict] = field(default_factory=list)
    average: float | None = None


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
    runs = (
        [_run_of_json(path, text, notes)]
        if text.lstrip().startswith("{")
        else _runs(path, text, notes)
    )
    for run in (run for run in runs if run.rows):
        name = collective or run.collective or _name_in(path.stem)
        if not name:
            raise ValueError(
                f"{path}: which collective was measured? Give collective=, such as "
                "all_reduce"
            )
        table = pd.DataFrame(run.rows)
        average = run.average
        if average and abs(table["bus"].mean() - average) > _DIGITS + _LOOSE * average:
            notes.append(
                f"mean bus bandwidth {table['bus'].mean():.4g} GB/s is not the "
                f"{average:g} printed: cut log"
            )
        table = table.query("size_bytes > 0 and seconds > 0")
        count = ranks or _ranks(run, name, table, path, notes)
        if count == 1:
            notes.append("one rank: no link was measured")
            continue
        table = table[_consistent(table, name, count, notes)]
        tables.append(
            table.assign(
                file=path.name,
                collective=name,
                ranks=count,
                nodes=nodes or _nodes(run, count),
            )
        )
    if not tables:
        raise ValueError(
            f"{path}: {notes[0] if notes else 'no results of nccl-tests or rccl-tests'}"
        )
    rows = pd.concat(tables, ignore_index=True)[[*COLUMNS]].astype({"nodes": "Int64"})
    rows.attrs["notes"] = notes
    return rows


def _run_of_json(path: Path, text: str, notes: list[str]) -> _Run:
    """The table of a file of `-J`, which lists all devices or the first of each
    process.
    """
    try:
        content = json.loads(text)
        config = content["config"]
        results = content["results"]
        of_process = int(config["nthreads"]) * int(config["ngpus"])
        first = {
            (device["hostname"], device["pid"]): device
            for device in reversed(config["devices"])
        }
        run = _Run(
            next((name for word in content["args"] if (name := _tested(word))), "")
        )
        for device in sorted(first.values(), key=lambda device: int(device["rank"])):
            place = int(device["group"]), device["hostname"]
            run.devices += [
                (int(device["rank"]) + more, *place, more) for more in range(of_process)
            ]
        for number, result in enumerate(results, 1):
            for key, placement in (
                ("out_of_place", _PLACEMENTS[0]),
                ("in_place", _PLACEMENTS[1]),
            ):
                if not (values := result.get(key)):
                    continue
                if "time" not in values:
                    raise ValueError(
                        f"{path}: times of the host (cpu_time), not of the collective"
                    )
                if float(str(values.get("nwrong", 0)).replace("N/A", "0")) >= _ERROR:
                    notes.append(f"result {number} has {values['nwrong']} wrong values")
                    continue
                row = {
                    "size_bytes": int(result["size"]),
                    "count": int(result["count"]),
                    "dtype": result["type"],
                }
                row |= {
                    "redop": result["redop"],
                    "placement": placement,
                    "seconds": 1e-6 * float(values["time"]),
                }
                run.rows.append(
                    row
                    | {
                        "algorithm": float(values["alg_bw"]),
                        "bus": float(values["bus_bw"]),
                    }
                )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not the JSON of nccl-tests ({type(error).__name__}: {error})"
        ) from None
    return run


def _runs(path: Path, text: str, notes: list[str]) -> list[_Run]:
    """The tables of a log, in its order."""
    runs = []
    run = _Run()
    for number, line in enumerate(text.splitlines(), 1):
        text = _PREFIX.sub("", line)
        words = text.split()
        starts = (
            "Using devices" in text
            or "Collective test starting" in text
            or text.startswith("size ")
        )
        if run.rows and (
            starts or _NODES.match(text)
        ):  # a further table; what is not said again holds on
            run = _Run(
                run.collective,
                [] if "size " not in text else run.devices,
                0,
                run.columns,
                run.placements,
            )
        if (
            len(words) > 3
            and words[0].isdigit()
            and words[1].isdigit()
            and _width(words[2]) > 0
        ):
            if run not in runs:
                runs.append(run)
            try:
                run.rows += _results(words, run)
            except (ValueError, IndexError):
                notes.append(f"line {number} is cut or has wrong results: {text[:60]}")
        elif device := _DEVICE.search(text):
            rank, group, host, index = device.groups()
            run.devices.append((int(rank), int(group or 0), host, int(index)))
        elif text.startswith("size ") and "count" in words:
            if "cputime" in words:
                raise ValueError(
                    f"{path}: times of the host (cputime), not of the collective"
                )
            run.columns = words
        elif placements := tuple(word for word in words if word in _PLACEMENTS):
            run.placements = placements
        elif average := _AVERAGE.search(text):
            run.average = float(average[1])
        elif separated := _NODES.match(text):
            run.nodes = int(separated[1])
        elif name := _tested(text):
            run.collective = name
    return runs


def _results(words: list[str], run: _Run) -> list[dict]:
    """Results of a line, one per placement."""
    values = {
        "size_bytes": int(words[0]),
        "count": int(words[1]),
        "dtype": words[2],
        "redop": "none",
    }
    measures = words[3:]
    if measures[0].isalpha():
        values["redop"] = measures.pop(0)
    header = (
        run.columns[run.columns.index("time") :]
        if run.columns
        else ["time", "algbw", "busbw", "#wrong"] * 2
    )
    if len(measures) > len(header) and ("root" in run.columns or not run.columns):
        measures.pop(0)
    width = len(header) // header.count("time")
    results = []
    for group, placement in enumerate(run.placements[: header.count("time")]):
        time_us, algorithm, bus, wrong = measures[group * width : group * width + 4]
        if float(wrong.replace("N/A", "0")) >= _ERROR:
            raise ValueError(f"{wrong} wrong results")
        rates = {"algorithm": float(algorithm), "bus": float(bus)}
        results.append(
            values | rates | {"seconds": float(time_us) * 1e-6, "placement": placement}
        )
    return results


def _tested(text: str) -> str:
    """The library's name of the collective of a test that is named in a text, "" if
    there is none.
    """
    test = _TEST.search(text)
    return _name_in(test[1]) if test else ""


def _name_in(text: str) -> str:
    """The library's name of the collective that a test or a file is named after, "" if
    there is none.
    """
    plain = text.lower().replace("-", "_")
    for name in _COLLECTIVES:
        if name in plain or name.replace("_", "") in plain.replace("_", ""):
            return _NAMES.get(name, name)
    return ""


def _width(dtype: str) -> float:
    """Bytes of an element, NaN for what is no type."""
    return dtype_bytes(recorded_dtype(_FLOAT8.sub("float8_", dtype)))


def _ranks(
    run: _Run, collective: str, table: pd.DataFrame, path: Path, notes: list[str]
) -> int:
    """Ranks of a group: of the device list, or from what the table says of them."""
    if run.devices:
        return (max(device[0] for device in run.devices) + 1) // (
            max(device[1] for device in run.devices) + 1
        )
    row = table.loc[table["bus"].idxmax()]
    if collective in _SHARED:
        return round(row["size_bytes"] / (row["count"] * _width(row["dtype"])))
    if row["bus"] == 0:
        return 1
    if collective != "all_reduce" or not row["bus"] < 2 * row["algorithm"]:
        raise ValueError(f"{path}: how many ranks were measured? Give ranks=")
    ranks = round(2 / (2 - row["bus"] / row["algorithm"]))
    notes.append(f"{ranks} ranks, from bus over algorithm bandwidth")
    return ranks


def _nodes(run: _Run, ranks: int) -> int | None:
    """Nodes of a group, None if the log does not say; a list that was shortened still
    numbers the devices of a node.
    """
    if run.nodes or not run.devices:
        return run.nodes or None
    if len(run.devices) >= ranks:
        return len({device[2] for device in run.devices if device[1] == 0})
    return -(-ranks // (max(device[3] for device in run.devices) + 1))


def _consistent(
    table: pd.DataFrame, collective: str, ranks: int, notes: list[str]
) -> np.ndarray:
    """Rows whose bandwidths follow from size, time and ranks, within the printed
    digits.
    """
    algorithm = table["size_bytes"] / table["seconds"] * 1e-9
    factor = bus_factor(collective, ranks)
    bus = table["algorithm"] * factor
    rounding = _DIGITS * (1 + factor)
    fits = (table["algorithm"] - algorithm).abs() <= _DIGITS + _LOOSE * algorithm
    fits &= (table["bus"] - bus).abs() <= rounding + _LOOSE * bus
    notes += [
        f"{size} bytes: bandwidth and time disagree"
        for size in table["size_bytes"][~fits]
    ]
    return fits.to_numpy()
