"""Reader of memory snapshots, files of `torch.cuda.memory._dump_snapshot`: what the
CUDA caching allocator did and holds.

Stacks are told apart by the identity of their frames, which the file shares.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from madmax_lib.traces.forensics.block_sizes import ACTIONS, Replay, replay
from madmax_lib.traces.forensics.frames import Stacks
from madmax_lib.traces.forensics.plain_pickles import load_plain
from madmax_lib.traces.read.cache import content_sha256
from madmax_lib.traces.read.events import TraceWarning
from madmax_lib.traces.read.files import rank_in_name

# columns by the keys of an event, and what stands for a key that an old torch lacks
_KEYS = {
    "action": ("action", ""),
    "address": ("addr", None),
    "size_bytes": ("size", 0),
    "stream": ("stream", 0),
    "time_us": ("time_us", -1),
    "frames": ("frames", None),
}
_OTHER = len(ACTIONS) - 1
_CODES = defaultdict(
    lambda: _OTHER, {action: code for code, action in enumerate(ACTIONS)}
)
_SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz", ".pickle.xz", ".pkl.xz")
_TYPES = {
    "action": "int8",
    "address": "int64",
    "size_bytes": "int64",
    "stream": "int64",
    "time_us": "int64",
    "stack": "int32",
    "metadata": "int32",
}
_BLOCKS = ["device", "segment", "segment_bytes", "pool", "stream", "expandable"]
_BLOCKS += ["address", "size_bytes", "requested_bytes", "state", "stack"]
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
            text = "no rank in the name: all files are numbered in their order, from 0"
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
            parts.append(_tables(path, rank, stacks))
            files[str(rank)] = {"name": path.name, "sha256": content_sha256(path)}
        except (OSError, ValueError) as reason:
            failures.append(reason)
    if not parts:
        raise failures[0]
    for reason in failures:
        warnings.warn(
            f"{reason}; left out, the others were read", TraceWarning, stacklevel=2
        )
    events, blocks = parts[0]
    if len(parts) > 1:  # a single one is not copied
        events = pd.concat([part[0] for part in parts], ignore_index=True)
        blocks = pd.concat([part[1] for part in parts], ignore_index=True)
    if not len(events) and not len(blocks):
        raise ValueError(
            f"{paths[0]}: the snapshot holds no events and no segments; no GPU "
            "memory was in use"
        )
    return Snapshot(events, blocks, stacks.table(), tuple(stacks.texts), files)


def _tables(path: Path, rank: int, stacks: Stacks):
    """Events and blocks of one file, with rank and device."""
    top = load_plain(path)
    # torch 1.13 writes the list of segments alone
    top = top if isinstance(top, dict) else {"segments": top}
    traces = top.get("device_traces", top.get("traces", []))
    segments = top.get("segments")
    are_lists = isinstance(segments, list) and isinstance(traces, list)
    if not are_lists or not all(isinstance(trace, list) for trace in traces):
        raise ValueError(
            f"{path}: no memory snapshot, it has no lists of segments and device_traces"
        )
    try:
        for lists in (traces, [segment["blocks"] for segment in segments]):
            # else a few bytes could ask for any number of rows
            if len(set(map(id, lists))) < len(lists):
                raise KeyError("a list of events or blocks is in two places")
        stacks.forget()
        blocks = _blocks(segments, stacks).assign(rank=rank)
        devices = [
            _events(trace, stacks).assign(device=device)
            for device, trace in enumerate(traces or [[]])
        ]
    except (
        AttributeError,
        LookupError,
        OverflowError,
        RecursionError,
        TypeError,
    ) as reason:
        raise ValueError(
            f"{path}: no memory snapshot, an entry is damaged ({reason!r})"
        ) from None
    events = pd.concat(devices, ignore_index=True).assign(rank=rank)
    events["action"] = pd.Categorical.from_codes(events["action"], ACTIONS)
    return events.astype({"rank": "int32", "device": "int32"}), blocks


def _events(trace: list[dict], stacks: Stacks):
    """Columns of the events of a device."""
    columns = {
        name: [event.get(key, default) for event in trace]
        for name, (key, default) in _KEYS.items()
    }
    columns["action"] = [_CODES[action] for action in columns["action"]]
    columns["stack"] = [stacks.number(frames) for frames in columns.pop("frames")]
    columns["metadata"] = [
        stacks.text(event.get("user_metadata") or event.get("compile_context"))
        for event in trace
    ]
    # an oom has no address: the bytes that the device had free stand there
    columns["address"] = [
        event.get("device_free", 0) if address is None else address
        for event, address in zip(trace, columns["address"], strict=True)
    ]
    for values in columns.values():
        if not set(map(type, values)) <= {int}:  # numpy would turn others into some
            raise TypeError("no whole numbers")
    return pd.DataFrame(columns).astype(_TYPES)[list(_TYPES)]


def _blocks(segments: list[dict], stacks: Stacks):
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
                stacks.number(frames),
            )
            rows.append((*of_segment, *of_block))
            address += block["size"]
    table = pd.DataFrame(rows, columns=_BLOCKS)
    return table.astype(dict.fromkeys(_BLOCK_INTEGERS, "int64"))


def _files(source: str | Path | Sequence[str | Path]):
    if isinstance(source, (list, tuple)):
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


def _in_folder(folder: Path):
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(_SUFFIXES) and path.name[0] != "."
    )


def _rank(path: Path):
    """Rank in the name of a file, such as those of torchtitan, Megatron-LM and SGLang;
    None if it tells none.

    >>> [_rank(Path(f"{name}.pickle")) for name in ("000003_step_10", "snapshot_oom_rank_2", "snapshot_7", "dump")]
    [3, 2, 7, None]
    """  # noqa: E501
    number = rank_in_name(path)
    other = re.match(r"(\d+)_step_|snapshot_(\d+)\.", path.name)
    return int(other[1] or other[2]) if number is None and other else number
