"""How many bytes were in use after each event of the allocator? Its history replayed,
and held against its end.

A snapshot tells what there is at the end; what was there at the start is that, less
what the events did. Events tell the size that was asked for, `memory_allocated()`
counts blocks: the size rounded up to 512 B, with the rest of the free block where that
is too small to split off (below 512 B in the pool of blocks up to 1 MiB and in
expandable segments, else up to 1 MiB; c10/cuda/CUDACachingAllocator.cpp). So free
blocks are followed as well. Where they do not come out as they are in the end, as under
settings that round otherwise, requested bytes are all that is known.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

__all__ = ["ACTIONS", "Replay", "replay"]

_UNIT = 512
_MIB = 1 << 20
_CHUNK = 1 << 16  # events
_NEVER = np.iinfo(np.int64).max
ACTIONS = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"]
ACTIONS += ["segment_map", "segment_unmap", "oom", "other"]  # of an event, by its code
_EVENTS = {"begin": "alloc", "let_go": "free_requested", "freed": "free_completed"}


@dataclass(frozen=True)
class Replay:
    """What happened on one device.

    allocations: address, stream, size_bytes (requested), block_bytes (of the block; as
    requested where not exact), stack, metadata, and the events begin (-1: before the
    first), let_go and freed (2**63 - 1: never).
    levels: before the first event (row 0) and after each: reserved_bytes,
    allocated_bytes (as `memory_allocated()`; NaN where not exact), before_bytes (of it,
    from before the first event), requested_bytes, and pending_bytes: let go, but not
    yet free for others.
    largest_free_bytes: the largest free block, by the event of an oom.
    exact: whether the blocks of the end came out as they are.
    """

    allocations: pd.DataFrame
    levels: pd.DataFrame
    largest_free_bytes: dict[int, int]
    exact: bool


def replay(events: pd.DataFrame, blocks: pd.DataFrame) -> Replay:
    """Allocations and levels of the events and of the blocks at the end of one device.

    Raises ValueError where they contradict, as when actions were left out of the
    recording.
    """
    action = events["action"].cat.codes.to_numpy()
    lives = _with_older(_lives(events, action), blocks[blocks["state"] != "inactive"])
    sizes, largest = _block_sizes(events, action, blocks, lives)
    lives["block_bytes"] = lives["size_bytes"] if sizes is None else sizes
    names = [*_EVENTS, "size_bytes", "block_bytes"]
    of, old = (
        {name: part[name].to_numpy() for name in names}
        for part in (lives, lives[lives["begin"] < 0])
    )
    let_go = _sums(of["begin"], of["let_go"], of["block_bytes"], len(events))
    levels = {
        "reserved_bytes": _reserved(events, action, blocks),
        "allocated_bytes": np.full(len(let_go), np.nan)
        if sizes is None
        else let_go.astype(float),
        "before_bytes": _sums(
            old["begin"], old["let_go"], old["block_bytes"], len(events)
        ),
        "requested_bytes": _sums(
            of["begin"], of["let_go"], of["size_bytes"], len(events)
        ),
        "pending_bytes": _sums(
            of["let_go"], of["freed"], of["size_bytes"], len(events)
        ),
    }
    if levels["reserved_bytes"].min() < 0:
        raise _left_out("reserved bytes fall below 0")
    return Replay(lives, pd.DataFrame(levels), largest, sizes is not None)


def _is(action: np.ndarray, *names: str) -> np.ndarray:
    return np.isin(action, [ACTIONS.index(name) for name in names])


def _left_out(what: str) -> ValueError:
    return ValueError(
        f"{what}: the history lacks actions (skip_actions), or it is of another "
        "moment than the segments"
    )


def _sums(
    begin: np.ndarray, end: np.ndarray, size: np.ndarray, count: int
) -> np.ndarray:
    """Bytes (count + 1,) of what lives from an event until another."""
    total = np.zeros(count + 1, dtype=np.int64)
    for at, change in ((begin, size), (end, -size)):
        np.add.at(total, at[at < count] + 1, change[at < count])
    return np.cumsum(total)


def _reserved(
    events: pd.DataFrame, action: np.ndarray, blocks: pd.DataFrame
) -> np.ndarray:
    taken, given = (
        _is(action, f"segment_{a}", f"segment_{b}")
        for a, b in (("alloc", "map"), ("free", "unmap"))
    )
    change = np.r_[
        0, np.cumsum(events["size_bytes"].to_numpy() * (taken.astype(np.int64) - given))
    ]
    return (
        blocks.groupby("segment")["segment_bytes"].first().sum() - change[-1] + change
    )


def _lives(events: pd.DataFrame, action: np.ndarray) -> pd.DataFrame:
    """A row per allocation of which there are events: what an address was used for from
    one alloc to the next.
    """
    rows = np.flatnonzero(_is(action, *_EVENTS.values()))
    address = events["address"].to_numpy()
    rows = rows[np.lexsort((rows, address[rows]))]
    of_address = np.diff(address[rows], prepend=np.nan) != 0
    starts = of_address | _is(action[rows], "alloc")
    life = np.cumsum(starts) - 1
    first = rows[starts]
    table = (
        events[["address", "stream", "size_bytes", "stack", "metadata"]]
        .iloc[first]
        .reset_index(drop=True)
    )
    for name, kind in _EVENTS.items():
        at = np.full(len(first), -1 if kind == "alloc" else _NEVER)
        of = _is(action[rows], kind)
        at[life[of]] = rows[of]
        if (np.diff(life[of]) == 0).any():
            raise _left_out(f"an address is freed twice ({kind})")
        table[name] = at
    begin, let_go, freed = (table[name].to_numpy() for name in _EVENTS)
    table["let_go"] = np.where(
        (let_go == _NEVER) & (freed != _NEVER), np.where(begin < 0, -1, freed), let_go
    )
    table["last"] = np.r_[of_address[starts][1:], True][: len(table)]
    if (table["freed"] < table["let_go"]).any() or (
        ~table["last"] & (table["freed"] == _NEVER)
    ).any():
        raise _left_out("an address is used again before it is free")
    table.loc[
        begin < 0, ["stack", "metadata"]
    ] = -1  # of a free, they are not of who asked for it
    return table


def _with_older(table: pd.DataFrame, live: pd.DataFrame) -> pd.DataFrame:
    """With the blocks that lived all along; each block of the end is one that was not
    freed, of the same size.
    """
    known = table[table["last"]].set_index("address")
    alive = known["freed"].reindex(live["address"]).to_numpy()
    older = live[np.isnan(alive)].rename(
        columns={"size_bytes": "block_bytes", "requested_bytes": "size_bytes"}
    )
    older["size_bytes"] = older["size_bytes"].where(
        older["size_bytes"] >= 0, older["block_bytes"]
    )
    pending = older["state"] != "active_allocated"
    older = older.assign(
        begin=-1, let_go=np.where(pending, -1, _NEVER), freed=_NEVER, metadata=-1
    )
    if (alive < _NEVER).any() or (known["freed"] == _NEVER).sum() != np.sum(
        ~np.isnan(alive)
    ):
        raise _left_out("the blocks of the end are not those that were not freed")
    table = table.drop(columns="last").assign(block_bytes=-1)
    return pd.concat([table, older[table.columns]], ignore_index=True)


class _Misfit(Exception):
    """An event that is impossible with the free blocks as they were followed."""


class _Ranges:
    """Ranges of addresses, by their start and by their end."""

    def __init__(self):
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}

    def join(self, start: int, end: int, borders: set[int]) -> None:
        """Add a range; it grows together with its neighbours, but not over a border."""
        if end in self.starts and end not in borders:
            end = self.starts.pop(end)
        if start in self.ends and start not in borders:
            start = self.ends.pop(start)
        self.starts[start] = end
        self.ends[end] = start

    def cut(self, start: int, end: int) -> None:
        """Take a range away, which has to be there."""
        first = (
            start
            if start in self.starts
            else max((s for s in self.starts if s < start), default=start)
        )
        last = self.starts.get(first, first)
        if last < end:
            raise _Misfit
        del self.starts[first], self.ends[last]
        if first < start:
            self.starts[first] = start
            self.ends[start] = first
        if end < last:
            self.starts[end] = last
            self.ends[last] = end


class _FreeBlocks:
    """The free blocks of a device, from what was there before the first event on;
    _Misfit where they cannot be.
    """

    def __init__(
        self,
        events: pd.DataFrame,
        action: np.ndarray,
        blocks: pd.DataFrame,
        lives: pd.DataFrame,
    ):
        self._free = _Ranges()
        self._expandable = bool(
            blocks["expandable"].any() or (action == "segment_map").any()
        )
        self.sizes = [0] * len(lives)
        self.largest = {}
        segments, self._borders = _segments_at_start(events, action, blocks)
        older = lives[lives["begin"] == -1].sort_values("address")
        addresses = older["address"].to_numpy()
        for start, end in segments.starts.items():
            inside = older.iloc[slice(*np.searchsorted(addresses, [start, end]))]
            self._fill(start, end, inside)

    def _fill(self, start: int, end: int, inside: pd.DataFrame) -> None:
        """A segment before the first event: its blocks, and free ones between them."""
        following = [*inside["address"], end][1:]
        of = zip(
            inside.index,
            inside["address"],
            inside["size_bytes"],
            inside["block_bytes"],
            following,
            strict=True,
        )
        for life, address, size_bytes, block_bytes, after in of:
            if start < address:
                self._free.join(start, address, self._borders)
            self.sizes[life] = (
                block_bytes
                if block_bytes >= 0
                else self._size(size_bytes, after - address)
            )
            start = address + self.sizes[life]
        if start < end:
            self._free.join(start, end, self._borders)

    def _size(self, size_bytes: int, room_bytes: int) -> int:
        """Size of a block made in a free one: all of it where the rest is not worth
        splitting off.
        """
        need = max(_UNIT, -(-size_bytes // _UNIT) * _UNIT)
        if room_bytes < need:
            raise _Misfit
        unsplit = _UNIT - 1 if need <= _MIB or self._expandable else _MIB
        return room_bytes if room_bytes - need <= unsplit else need

    def follow(
        self, action: str, row: int, address: int, size_bytes: int, life: int
    ) -> None:
        """One event."""
        free = self._free
        borders = self._borders
        if action == "alloc":
            self.sizes[life] = self._size(
                size_bytes, free.starts.get(address, address) - address
            )
            free.cut(address, address + self.sizes[life])
        elif action == "free_completed":
            free.join(address, address + self.sizes[life], borders)
        elif action == "segment_alloc":
            borders.update((address, address + size_bytes))
            free.join(address, address + size_bytes, borders)
        elif action == "segment_map":
            free.join(address, address + size_bytes, borders)
        elif action == "oom":
            self.largest[row] = max(
                (end - start for start, end in free.starts.items()), default=0
            )
        else:
            free.cut(address, address + size_bytes)


def _segments_at_start(
    events: pd.DataFrame, action: np.ndarray, blocks: pd.DataFrame
) -> tuple[_Ranges, set[int]]:
    """Segments before the first event: those of the end, with what the events did
    undone; and borders of blocks.
    """
    ranges = _Ranges()
    borders = set()
    for start, size, expandable in (
        blocks[["segment", "segment_bytes", "expandable"]].drop_duplicates().to_numpy()
    ):
        borders |= set() if expandable else {start, start + size}
        ranges.join(start, start + size, borders)
    part = events[
        _is(action, *(name for name in ACTIONS if name.startswith("segment_")))
    ][::-1]
    for kind, start, size in zip(
        part["action"], part["address"], part["size_bytes"], strict=True
    ):
        if kind in ("segment_alloc", "segment_map"):
            ranges.cut(start, start + size)
        else:
            borders |= {start, start + size} if kind == "segment_free" else set()
            ranges.join(start, start + size, borders)
    return ranges, borders


def _block_sizes(
    events: pd.DataFrame, action: np.ndarray, blocks: pd.DataFrame, lives: pd.DataFrame
) -> tuple[np.ndarray | None, dict[int, int]]:
    """Bytes of the block of each allocation, None where they do not come out; the
    largest free block at each oom.
    """
    life = np.full(len(events), -1)
    for name in ("begin", "freed"):
        at = lives[name].to_numpy()
        inside = (at >= 0) & (at < len(events))
        life[at[inside]] = np.flatnonzero(inside)
    rows = np.flatnonzero(~_is(action, "free_requested", "other"))
    columns = [
        action,
        np.arange(len(events)),
        *(events[name].to_numpy() for name in ("address", "size_bytes")),
        life,
    ]
    try:
        free = _FreeBlocks(events, action, blocks, lives)
        for first in range(
            0, len(rows), _CHUNK
        ):  # as objects of Python, all would take gigabytes
            part = (column[rows[first : first + _CHUNK]].tolist() for column in columns)
            for code, *event in zip(*part, strict=True):
                free.follow(ACTIONS[code], *event)
    except _Misfit:
        return None, {}
    sizes = np.array(free.sizes, dtype=np.int64)
    open_ = lives["freed"] == _NEVER
    live = blocks[blocks["state"] != "inactive"].set_index("address")["size_bytes"]
    right = (live.reindex(lives["address"][open_]).to_numpy() == sizes[open_]).all()
    return (sizes if right else None), free.largest
