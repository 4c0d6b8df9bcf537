"""Dumps of PyTorch's flight recorder of collectives: which rank does not come, calls
something else, or comes late.

c10d keeps the last calls of each process and writes them when a collective times out
(TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT) or when asked: one pickle or JSON
file per rank, whose rank only its name tells. Calls are joined by group and sequence
number; what most ranks of a group call is taken as right.
"""

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.traces.forensics.plain_pickles import load_plain

# what ranks have in common when they make one call
_CALL = ["group", "ranks", "sequence"]
# collectives whose sizes may differ from rank to rank
_UNEVEN = {"all_to_all", "alltoall", "alltoall_base", "scatter", "gather"}
_WAITING = ("scheduled", "started")


def flight_calls(folder: str | Path) -> pd.DataFrame:
    """Calls in the dumps of a folder, one row per rank and call in the order of the
    rank.

    rank; group: name and description; ranks: its members as text, "0,1"; sequence: of
    the call in its group, counted from 0 or 1; p2p: whether between two ranks; backend,
    collective; input_sizes, output_sizes, dtypes: as text; done: completed, or retired
    where the backend (gloo) does not tell; created_s, completed_s: since 1970 on the
    clock of its host, completed when the watchdog saw it, NaN where unknown;
    duration_s: of the device; frame: where in the user's code it was called. Raises
    ValueError naming a file that is no dump, and FileNotFoundError and ValueError for
    no folder and no dumps.
    """
    dumps = _dumps(Path(folder).expanduser())
    try:
        rows = [
            _row(rank, entry, groups)
            for rank, (entries, groups) in dumps.items()
            for entry in entries
        ]
    except (
        AttributeError,
        LookupError,
        OverflowError,
        TypeError,
        ValueError,
    ) as reason:
        raise ValueError(
            f"{folder}: not flight-recorder dumps, an entry is damaged ({reason!r})"
        ) from None
    if not rows:
        raise ValueError(
            f"{folder}: the dumps hold no calls; set TORCH_FR_BUFFER_SIZE=2000 "
            "before the run"
        )
    calls = pd.DataFrame(rows)
    seen = calls.groupby("group")["rank"].agg(lambda ranks: _text(sorted(set(ranks))))
    # gloo's groups tell none
    untold = calls["ranks"] == ""
    calls["ranks"] = calls["ranks"].mask(untold, calls["group"].map(seen))
    calls.attrs["dumped"] = sorted(dumps)
    return calls


def _dumps(folder):
    """Calls and groups of each rank that has a dump."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such directory of dumps, one per rank")
    dumps = {}
    for path in sorted(folder.iterdir()):
        number = re.search(r"(\d+)(?:\.json)?$", path.name)
        if not number or path.name.startswith(".") or not path.is_file():
            continue
        rank = int(number[1])
        if rank in dumps:
            raise ValueError(
                f"{folder}: two dumps of rank {rank}; keep those of one moment in a "
                "folder"
            )
        dumps[rank] = _entries(path)
    if not dumps:
        raise ValueError(
            f"{folder}: no dumps; their names end in the rank, such as "
            "nccl_trace_rank_0"
        )
    return dumps


def flight_findings(calls: pd.DataFrame) -> pd.DataFrame:
    """Findings that keep a job from going on, causes first; empty where the ranks agree
    and all is done.

    finding: no dump, missing (did not make the call), other call, other sizes, other
    dtype, other order, not done, unpaired (a send without its receive, or the other
    way). ranks: whom it blames, the fewer ones; both sides where they are as many.
    group, sequence: the first call concerned. cause: whether the blamed wait for nobody
    else.
    text: the sentence for people. frame: where the blamed are, or were last.
    """
    dumped = calls.attrs["dumped"]
    findings = []
    members = set().union(*map(_members, calls["ranks"].unique()))
    if silent := sorted(members - set(dumped)):
        text = f"no dump of {_ranks(silent)}: it may have died"
        findings.append(_Finding("no dump", silent, "", -1, text))
    for _, group in calls[~calls["p2p"]].groupby(["group", "ranks"], sort=False):
        findings += _of_group(group, set(dumped))
    for _, group in calls[calls["p2p"]].groupby("group", sort=False):
        findings += _unpaired(group)
    table = pd.DataFrame(findings, columns=_Finding._fields)
    with_frame = calls[calls["frame"] != ""]
    last_frame = with_frame.groupby("rank")["frame"].last()
    table["frame"] = [
        "; ".join(sorted(set(last_frame.reindex(ranks).dropna())))
        for ranks in table["ranks"]
    ]
    # who has a call open in another group waits there; its absence here is a consequence
    open_calls = calls[~calls["done"]]
    waits = []
    for ranks, group in zip(table["ranks"], table["group"], strict=True):
        stuck = set(open_calls.loc[open_calls["group"] != group, "rank"])
        waits.append(bool(group) and set(ranks) <= stuck)
    table["ranks"] = table["ranks"].map(_text)
    table.insert(4, "cause", ~np.array(waits, dtype=bool))
    return table.sort_values("cause", ascending=False, kind="stable", ignore_index=True)


def lateness(calls: pd.DataFrame) -> pd.DataFrame:
    """Delay of each rank behind the first of its group to call, the latest on average
    first.

    rank, group; calls: made by all ranks of the group; mean_s, median_s, max_s. Clocks
    of hosts are shifted by the median difference of the ends of collectives, where the
    dumps tell them; else they are taken as they are.
    """
    shared = calls[~calls["p2p"]].drop_duplicates(["rank", *_CALL])
    size = shared["ranks"].str.count(",") + 1
    is_whole = size == shared.groupby(_CALL)["rank"].transform("size")
    shared = shared.assign(size=size)[is_whole & (size > 1)]
    # A collective ends on all ranks at once, so the difference of its ends is that of
    # the clocks. Of the largest groups alone: smaller ones may lie on one host.
    world = shared[shared["size"] == shared["size"].max()]
    median_s = world.groupby(_CALL)["completed_s"].transform("median")
    ends_s = world["completed_s"] - median_s
    clock_s = ends_s.groupby(world["rank"]).median()
    shared["late_s"] = shared["created_s"] - shared["rank"].map(clock_s).fillna(0.0)
    shared["late_s"] -= shared.groupby(_CALL)["late_s"].transform("min")
    how = {"calls": "size", "mean_s": "mean", "median_s": "median", "max_s": "max"}
    table = shared.groupby(["rank", "group"])["late_s"].agg(**how).reset_index()
    return table.sort_values("mean_s", ascending=False, ignore_index=True)


class _Finding(NamedTuple):
    """Obstacle that keeps a job from going on: a row of `flight_findings`."""

    finding: str
    ranks: list[int]
    group: str
    sequence: int
    text: str


def _of_group(group, dumped):
    """Findings of one group, at its first call that is not as it should be."""
    ranks = sorted({*_members(group["ranks"].iloc[0])} & dumped)
    sequences = group.groupby("rank")["sequence"]
    # older calls have left the buffer of some rank
    begin = sequences.min().max()
    name = group["group"].iloc[0]
    last = sequences.max()
    for sequence, call in group[group["sequence"] >= begin].groupby("sequence"):
        absent = [rank for rank in ranks if last.get(rank, -1) < sequence]
        open_ = sorted(call.loc[~call["done"], "rank"])
        what = f"{_most(call['collective'])}, number {sequence} of {name}"
        if absent and open_:
            text = f"{_ranks(absent)} did not call {what}; waiting: {_ranks(open_)}"
            return [_Finding("missing", absent, name, sequence, text)]
        for finding, column in (
            ("other call", "collective"),
            ("other dtype", "dtypes"),
            ("other sizes", "input_sizes"),
        ):
            if column == "input_sizes" and _most(call["collective"]) in _UNEVEN:
                continue
            if call[column].nunique() > 1:
                return [_mismatch(finding, column, call, group)]
        is_last = sequence == last.max()
        if open_ and len(open_) < len(call) and is_last and not absent:
            text = f"{_ranks(open_)} has not finished {what}; the other ranks have"
            return [_Finding("not done", open_, name, sequence, text)]
    return []


def _mismatch(finding, column, call, group):
    """One call on which ranks differ: the fewer are blamed, or all where there is no
    majority.
    """
    name = call["group"].iloc[0]
    sequence = int(call["sequence"].iloc[0])
    counts = Counter(call[column]).most_common()
    tie = counts[0][1] == counts[1][1]
    odd = sorted(call.loc[tie | (call[column] != counts[0][0]), "rank"])
    sides = [
        f"{_ranks(sorted(call.loc[call[column] == value, 'rank']))} {value}"
        for value, _ in counts
    ]
    if finding == "other call" and not tie:
        after = group[group["sequence"] == sequence + 1].set_index("rank")["collective"]
        called = call.set_index("rank")["collective"]
        swapped = (after == called[odd[0]]).any()
        if swapped and (after.reindex(odd) == counts[0][0]).all():
            finding = "other order"
    where = call["collective"].iloc[0] if column != "collective" else "call"
    text = f"{where} number {sequence} of {name}: {', '.join(sides)}"
    return _Finding(finding, odd, name, sequence, text)


def _unpaired(group):
    """Sends and receives that are still open and lack the other side, by pair in order."""
    pairs = group["collective"].str.extract(r"^(send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")
    caller = pairs[1].astype(float)
    peer = pairs[2].astype(float)
    sends = pairs[0] == "send"
    source = caller.where(sends, peer)
    target = peer.where(sends, caller)
    findings = []
    for (start, end), rows in group.groupby([source, target]):
        count = int(sends[rows.index].sum()) * 2 - len(rows)
        late = rows[(sends[rows.index] == (count > 0)) & ~rows["done"]]
        if count and len(late):
            what = "a receive without its send"
            blamed = start
            if count > 0:
                what = "a send without its receive"
                blamed = end
            name = group["group"].iloc[0]
            text = f"{what} from {start:.0f} to {end:.0f} of {name}"
            blamed = [_members(rows["ranks"].iloc[0])[int(blamed)]]
            sequence = int(late["sequence"].iloc[0])
            findings.append(_Finding("unpaired", blamed, name, sequence, text))
    return findings


def _members(ranks):
    return [int(rank) for rank in ranks.split(",")]


def _text(ranks):
    return ",".join(map(str, ranks))


def _ranks(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _most(values):
    return Counter(values).most_common(1)[0][0]


def _entries(path):
    """Calls of a dump and its groups by name."""
    if path.suffix == ".json":
        try:
            dump = json.loads(path.read_bytes())
        except ValueError as reason:
            raise ValueError(f"{path}: not flight-recorder JSON ({reason})") from None
    else:
        dump = load_plain(path)
    # a bare list of entries has no groups
    if not isinstance(dump, dict):
        dump = {"entries": dump}
    entries = dump.get("entries")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "profiling_name" in entry for entry in entries
    ):
        raise ValueError(f"{path}: not a flight-recorder dump (no list of entries)")
    groups = dump.get("pg_config")
    return entries, groups if isinstance(groups, dict) else {}


def _row(rank, entry, groups):
    group = entry.get("process_group") or ("", "")
    config = groups.get(group[0])
    members = config.get("ranks", "") if isinstance(config, dict) else ""
    try:
        members = _text(list(map(int, ast.literal_eval(members or "[]"))))
    except (ValueError, SyntaxError, TypeError):
        members = ""
    backend, _, collective = entry["profiling_name"].partition(":")
    frames = entry.get("frames") or []
    of_user = [frame for frame in frames if not frame["filename"].startswith("torch/")]
    frames = of_user or frames
    is_p2p = bool(entry.get("is_p2p"))
    sequence = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    duration_ms = entry.get("duration_ms")
    return {
        "rank": rank,
        "group": " ".join(part for part in map(str, group) if part),
        "ranks": members,
        "sequence": int(sequence or 0),
        "p2p": is_p2p,
        "backend": backend,
        "collective": collective.removeprefix("_"),
        "input_sizes": str(entry.get("input_sizes", "")),
        "output_sizes": str(entry.get("output_sizes", "")),
        "dtypes": str(entry.get("input_dtypes", "")),
        "done": entry.get("state") not in _WAITING or bool(entry.get("retired")),
        "created_s": _seconds(entry.get("time_created_ns")),
        "completed_s": _seconds(entry.get("time_discovered_completed_ns")),
        "duration_s": np.nan if duration_ms is None else duration_ms / 1e3,
        "frame": "{filename}:{line} {name}".format(**frames[0]) if frames else "",
    }


def _seconds(time_ns):
    return time_ns / NS_PER_S if time_ns else np.nan
