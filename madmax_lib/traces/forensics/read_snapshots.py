"""Reader of memory snapshots, files of `torch.cuda.memory._dump_snapshot`: what the
CUDA caching allocator did and holds.

Events are turned into columns while the file is read, and their dictionaries emptied: a
million of them would need a gigabyte otherwise. Stacks are told apart by the identity
of their frames, which the file shares.
"""

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.traces.forensics.frames import Stacks
from madmax_lib.traces.forensics.history import ACTIONS, Replay, replay
from madmax_lib.traces.forensics.plain_pickles import load_plain
from madmax_lib.traces.read.cache import content_sha256
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.files import rank_in_name

_COLUMNS = json.loads(catalog.data_file("snapshot_columns.json").read_text())
# columns by the keys of an event, and what stands for a key that an old torch lacks
_KEYS = _COLUMNS["keys"]
_TYPES = _COLUMNS["types"]
_OTHER = len(ACTIONS) - 1
_CODES = defaultdict(
    lambda: _OTHER, {action: code for code, action in enumerate(ACTIONS)}
)
_SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz", ".pickle.xz", ".pkl.xz")
_BLOCKS = [
    "device",
    "segment",
    "segment_bytes",
    "pool",
    "stream",
    "expandable",
    "address",
    "size_bytes",
    "requested_bytes",
    "state",
    "stack",
]
_BLOCK_INTEGERS = [n for n in _BLOCKS if n not in ("pool", "expandable", "state")]


@dataclass(frozen=True)
class Snapshot:
    """Memory of the GPUs of one or more ranks.

        snapshot = mm.traces.read_snapshot("rank0.pickle")
        mm.traces.snapshot_held(snapshot, by="module", at="peak")

    events: rank, device, action (alloc, free_requested, segment_map, oom ... or other),
    address, size_bytes, stream, time_us (-1 where unknown), stack, metadata; oldest
    first by rank and device. The address of an oom is the bytes that the device had
    free.
    blocks: what the segments were divided into at the end: rank, device, segment,
    segment_bytes, pool (small, large), stream, expandable, address, size_bytes,
    requested_bytes (-1 where unknown), state, stack.
    stacks: site (the innermost lines), module, phase and frames of each number; -1 is
    none.
    metadata: the texts of its numbers: `_set_memory_metadata`, or what torch.compile
    was at.
    files: name and sha256 by rank.
    """

    events: pd.DataFrame
    blocks: pd.DataFrame
    stacks: pd.DataFrame
    metadata: tuple[str, ...]
    files: dict[str, dict]

    @cached_property
    def replays(self) -> dict[tuple[int, int], Replay]:
        """Allocations and levels of each (rank, device). ValueError where events and
        segments contradict.
        """
        keys = ["rank", "device"]
        result = {}
        devices = set()
        for table in (self.events, self.blocks):
            devices.update(table[keys].drop_duplicates().itertuples(index=False))
        for rank, device in sorted(devices):
            events = of_device(self.events, rank, device)
            blocks = of_device(self.blocks, rank, device)
            try:
                result[rank, device] = replay(events, blocks)
            except ValueError as reason:
                raise ValueError(f"rank {rank}, cuda:{device}: {reason}") from None
        return result


def of_device(table: pd.DataFrame, rank: int, device: int) -> pd.DataFrame:
    """Rows of one device; the table itself where it is the only one, as millions of
    rows are not copied for nothing.
    """
    rows = (table["rank"] == rank) & (table["device"] == device)
    return table if rows.all() else table[rows].reset_index(drop=True)


def read_snapshot(source: str | Path | Sequence[str | Path]) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`, a directory with one per rank,
    or a list of such files.

    Pickles of protocols 2 to 5, also packed by gzip or xz, of torch 1.13 or later.
    Nothing in them is executed: any that names a function or class is refused. The rank
    is told by the name, such as rank3_memory_snapshot.pickle or 000003_step_10.pickle,
    else it is the place in the list, with a TraceWarning. A file that fails costs its
    own rank, with a TraceWarning. Raises FileNotFoundError, and ValueError for what is
    no snapshot, two files of a rank, and a directory without any.
    """
    paths = _files(source)
    ranks = [_rank(path) for path in paths]
    if None in ranks:
        nameless = paths[ranks.index(None)]
        if len(paths) > 1:
            text = "no rank in the name: files are numbered in order, from 0"
            warnings.warn(f"{nameless}: {text}", TraceWarning, stacklevel=2)
        ranks = list(range(len(paths)))
    if twice := [rank for rank in ranks if ranks.count(rank) > 1]:
        raise ValueError(
            f"{paths[0].parent}: two snapshots of rank {twice[0]}; give those of one "
            "moment"
        )
    stacks = Stacks()
    parts = []
    files = {}
    failures = []
    for rank, path in zip(ranks, paths, strict=True):
        try:
            parts.append(_File(stacks).read(path, rank))
            files[str(rank)] = {"name": path.name, "sha256": content_sha256(path)}
        except (OSError, ValueError) as reason:
            failures.append(reason)
    if not parts:
        raise failures[0]
    for reason in failures:
        warnings.warn(
            f"{reason}; skipped, the others were read", TraceWarning, stacklevel=2
        )
    events, blocks = parts[0]
    if len(parts) > 1:  # a single one is not copied
        events = pd.concat([part[0] for part in parts], ignore_index=True)
        blocks = pd.concat([part[1] for part in parts], ignore_index=True)
    if events.empty and blocks.empty:
        raise ValueError(
            f"{paths[0]}: the snapshot holds no events and no segments; no GPU "
            "memory was in use"
        )
    return Snapshot(events, blocks, stacks.table(), tuple(stacks.texts), files)


class _File:
    """Columns of one file, and the lists of events that are emptied into them while it
    is read.
    """

    def __init__(self, stacks):
        self._stacks = stacks
        # by the identity of a list of events that is being read: the list, its columns
        self._open = {}
        self._searched = 0  # objects in the memo when it was last looked through
        stacks.forget()

    def read(self, path, rank):
        """Events and blocks, with rank and device."""
        try:
            return self._tables(path, rank)
        except (
            AttributeError,
            LookupError,
            OverflowError,
            RecursionError,
            TypeError,
        ) as reason:
            raise ValueError(
                f"{path}: not a memory snapshot, an entry is damaged ({reason!r})"
            ) from None

    def _tables(self, path, rank):
        top = load_plain(path, self._empty)
        # torch 1.13 writes the list of segments alone
        top = top if isinstance(top, dict) else {"segments": top}
        traces = top.get("device_traces", top.get("traces", []))
        segments = top.get("segments")
        are_lists = isinstance(segments, list) and isinstance(traces, list)
        if not are_lists or not all(isinstance(trace, list) for trace in traces):
            raise ValueError(
                f"{path}: not a memory snapshot, it has no lists of segments and "
                "device_traces"
            )
        for lists in (traces, [segment["blocks"] for segment in segments]):
            # else a few bytes could ask for any number of rows
            if len(set(map(id, lists))) < len(lists):
                raise ValueError(
                    f"{path}: not a memory snapshot, a list of events or blocks is in "
                    "two places"
                )
        blocks = self._blocks(segments).assign(rank=rank)
        devices = [self._trace(trace) for trace in traces or [[]]]
        del top, traces, segments
        events = {}
        for name, dtype in _TYPES.items():
            parts = [np.frombuffer(columns[name], dtype) for columns in devices]
            events[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        counts = [len(columns["action"]) for columns in devices]  # int8: bytes are rows
        events["device"] = np.repeat(np.arange(len(counts), dtype="int32"), counts)
        events["action"] = pd.Categorical.from_codes(events["action"], ACTIONS)
        events["rank"] = np.full(len(events["stack"]), rank, dtype="int32")
        return pd.DataFrame(events, copy=False), blocks

    def _empty(self, unpickler):
        """Turn the events that are there into columns. A list of events is looked for
        as long as none grows.
        """
        grown = [self._take(trace) for trace, _ in self._open.values() if trace]
        if any(grown):
            return
        # the unpickler's memo holds the lists it is filling; a search costs as much as
        # it is long, so it is only repeated once it has grown by a quarter
        memo = unpickler.memo.copy()
        if len(memo) <= 1.25 * self._searched:
            return
        self._searched = len(memo)
        for value in memo.values():
            first = value[0] if isinstance(value, list) and value else None
            if isinstance(first, dict) and "action" in first:
                self._take(value)

    def _take(self, trace):
        """Move the events of a list into its columns."""
        empty = {name: bytearray() for name in _TYPES}
        _, columns = self._open.setdefault(id(trace), (trace, empty))
        events = trace[:]
        trace.clear()
        for name, values in self._columns(events).items() if events else ():
            if not {*map(type, values)} <= {int}:  # numpy would turn others into some
                raise TypeError("no whole numbers")
            # bytes that grow: arrays of each part would keep its memory in use
            columns[name] += np.array(values, _TYPES[name]).tobytes()
        for event in events:
            event.clear()
        return len(events)

    def _columns(self, events):
        columns = {}
        for name, (key, default) in _KEYS.items():
            try:
                columns[name] = [*map(itemgetter(key), events)]
            except KeyError:
                columns[name] = [event.get(key, default) for event in events]
        columns["action"] = [*map(_CODES.__getitem__, columns["action"])]
        columns["stack"] = [*map(self._stacks.number, columns.pop("frames"))]
        texts = [None] * len(events)
        if max(map(len, events)) > len(_KEYS):  # more than the usual keys
            texts = [
                event.get("user_metadata") or event.get("compile_context")
                for event in events
            ]
        columns["metadata"] = [*map(self._stacks.text, texts)]
        if None in columns["address"]:
            columns["address"] = [
                event.get("addr", event.get("device_free", 0)) for event in events
            ]
        return columns

    def _trace(self, trace):
        """Columns of all events of a device."""
        self._take(trace)
        return self._open.pop(id(trace))[1]

    def _blocks(self, segments):
        rows = []
        for segment in segments:
            address = segment.get("address", 0)
            of_segment = (
                segment.get("device", 0),
                address,
                segment["total_size"],
                segment.get("segment_type", ""),
                segment.get("stream", 0),
                segment.get("is_expandable", False),
            )
            for block in segment["blocks"]:
                # old files have the frames in the history of the block
                history = block.get("history") or [{}]
                frames = block.get("frames") or history[0].get("frames")
                # told since torch 2.1; before it, blocks follow one another
                address = block.get("address", address)
                of_block = (
                    address,
                    block["size"],
                    block.get("requested_size", -1),
                    block["state"],
                    self._stacks.number(frames),
                )
                rows.append((*of_segment, *of_block))
                address += block["size"]
        table = pd.DataFrame(rows, columns=_BLOCKS)
        return table.astype(dict.fromkeys(_BLOCK_INTEGERS, "int64"))


def _files(source):
    if isinstance(source, list | tuple):
        if not source:
            raise ValueError("no snapshots in an empty list")
        return [path for item in source for path in _files(item)]
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        return [path]
    if not (paths := _in_folder(path)):
        inside = [
            folder.name
            for folder in sorted(path.iterdir())
            if folder.is_dir() and _in_folder(folder)
        ]
        hint = f"; its folders {', '.join(inside[:5])} have some" if inside else ""
        raise ValueError(
            f"{path}: no memory snapshots ({', '.join(_SUFFIXES[:2])}) in this "
            f"directory{hint}"
        )
    return paths


def _in_folder(folder):
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(_SUFFIXES) and path.name[0] != "."
    )


def _rank(path):
    """Rank in the name of a file, such as those of torchtitan, Megatron-LM and SGLang;
    None if it tells none.

    >>> names = ("000003_step_10", "snapshot_oom_rank_2", "snapshot_7", "dump")
    >>> [_rank(Path(f"{name}.pickle")) for name in names]
    [3, 2, 7, None]
    """
    number = rank_in_name(path)
    other = re.match(r"(\d+)_step_|snapshot_(\d+)\.", path.name)
    return int(other[1] or other[2]) if number is None and other else number
