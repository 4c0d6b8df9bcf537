"""Bytes in use after each event of the allocator: its history replayed, and compared
with its end.

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

_UNIT = 512  # bytes to which the allocator rounds up (kMinBlockSize)
_MIB = 1 << 20  # largest block of the small pool (kSmallSize)
_CHUNK = 1 << 16  # events that are objects of Python at once
_NEVER = np.iinfo(np.int64).max
ACTIONS = [
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "other",
]  # of an event, by its code
_EVENTS = {"begin": "alloc", "let_go": "free_requested", "freed": "free_completed"}


@dataclass(frozen=True)
class Replay:
    """History of one device.

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
    older = lives[lives["begin"] < 0]
    count = len(events)
    allocated = _sums(lives, "begin", "let_go", "block_bytes", count).astype(float)
    if sizes is None:
        allocated[:] = np.nan
    levels = {
        "reserved_bytes": _reserved(events, action, blocks),
        "allocated_bytes": allocated,
        "before_bytes": _sums(older, "begin", "let_go", "block_bytes", count),
        "requested_bytes": _sums(lives, "begin", "let_go", "size_bytes", count),
        "pending_bytes": _sums(lives, "let_go", "freed", "size_bytes", count),
    }
    if levels["reserved_bytes"].min() < 0:
        raise _left_out("reserved bytes fall below 0")
    return Replay(lives, pd.DataFrame(levels), largest, sizes is not None)


def _is(action, *names):
    return np.isin(action, [ACTIONS.index(name) for name in names])


def _left_out(what):
    return ValueError(
        f"{what}: the history lacks actions (skip_actions), or it is of another "
        "moment than the segments"
    )


def _sums(lives, begin, end, size, count):
    """Bytes (count + 1,) of what lives from one event until another, columns of lives."""
    size_bytes = lives[size].to_numpy()
    change = np.zeros(count + 1, dtype=np.int64)
    for event, sign in ((begin, 1), (end, -1)):
        at = lives[event].to_numpy()
        inside = at < count  # _NEVER is not
        # row 0 is before the first event, so event i changes row i + 1; add.at because
        # a row may change more than once
        np.add.at(change, at[inside] + 1, sign * size_bytes[inside])
    return np.cumsum(change)


def _reserved(events, action, blocks):
    """Reserved bytes (n + 1,) before the first event and after each."""
    grows = _is(action, "segment_alloc", "segment_map").astype(np.int64)
    shrinks = _is(action, "segment_free", "segment_unmap")
    change = events["size_bytes"].to_numpy() * (grows - shrinks)
    running = np.r_[0, np.cumsum(change)]
    # the end is known, the start is not: reserved(i) = end - running(n) + running(i)
    at_end = blocks.groupby("segment")["segment_bytes"].first().sum()
    return at_end - running[-1] + running


def _lives(events, action):
    """A row per allocation of which there are events: the use of an address from one
    alloc to the next.
    """
    # events in order of address, then of time: a life begins with each address, which
    # may have been in use before the first event, and with each alloc
    rows = np.flatnonzero(_is(action, *_EVENTS.values()))
    address = events["address"].to_numpy()
    rows = rows[np.lexsort((rows, address[rows]))]
    is_first_of_address = np.diff(address[rows], prepend=np.nan) != 0
    starts = is_first_of_address | _is(action[rows], "alloc")
    life = np.cumsum(starts) - 1
    first = rows[starts]
    columns = ["address", "stream", "size_bytes", "stack", "metadata"]
    table = events[columns].iloc[first].reset_index(drop=True)
    for name, kind in _EVENTS.items():
        at = np.full(len(first), -1 if kind == "alloc" else _NEVER)
        is_kind = _is(action[rows], kind)
        at[life[is_kind]] = rows[is_kind]
        if (np.diff(life[is_kind]) == 0).any():
            raise _left_out(f"an address is freed twice ({kind})")
        table[name] = at
    # freed without a request: the request was before the first event, or is the same
    let_go = table["let_go"].to_numpy()
    freed = table["freed"].to_numpy()
    is_older = (table["begin"] < 0).to_numpy()
    without_request = (let_go == _NEVER) & (freed != _NEVER)
    request = np.where(is_older, -1, freed)
    table["let_go"] = np.where(without_request, request, let_go)
    # only the last life of an address may still go on
    table["last"] = np.r_[is_first_of_address[starts][1:], True][: len(table)]
    goes_on = table["freed"] == _NEVER
    if (table["freed"] < table["let_go"]).any() or (~table["last"] & goes_on).any():
        raise _left_out("an address is used again before it is free")
    # the stack of a free is that of who freed it, not of who asked for it
    table.loc[is_older, ["stack", "metadata"]] = -1
    return table


def _with_older(table, live):
    """Lives with those of blocks that lived all along; each block of the end is one that
    was not freed, of the same size.
    """
    last_use = table[table["last"]].set_index("address")
    # (blocks of the end,) when the last use of its address ended; NaN without events
    freed = last_use["freed"].reindex(live["address"]).to_numpy()
    names = {"size_bytes": "block_bytes", "requested_bytes": "size_bytes"}
    older = live[np.isnan(freed)].rename(columns=names)
    is_told = older["size_bytes"] >= 0
    older["size_bytes"] = older["size_bytes"].where(is_told, older["block_bytes"])
    pending = older["state"] != "active_allocated"
    let_go = np.where(pending, -1, _NEVER)
    older = older.assign(begin=-1, let_go=let_go, freed=_NEVER, metadata=-1)
    not_freed = (last_use["freed"] == _NEVER).sum()
    if (freed < _NEVER).any() or not_freed != np.sum(~np.isnan(freed)):
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

    def join(self, start, end, borders):
        """Add a range; it grows together with its neighbours, but not over a border."""
        if end in self.starts and end not in borders:
            end = self.starts.pop(end)
        if start in self.ends and start not in borders:
            start = self.ends.pop(start)
        self.starts[start] = end
        self.ends[end] = start

    def cut(self, start, end):
        """Take a range away, which has to be there."""
        # nearly always from the start of one; else from the one that begins before it
        first = start
        if start not in self.starts:
            first = max((s for s in self.starts if s < start), default=start)
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

    def __init__(self, events, action, blocks, lives):
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

    def _fill(self, start, end, inside):
        """A segment before the first event: its blocks, and free ones between them."""
        next_addresses = [*inside["address"], end][1:]
        for block, next_address in zip(
            inside.itertuples(), next_addresses, strict=True
        ):
            if start < block.address:
                self._free.join(start, block.address, self._borders)
            size_bytes = block.block_bytes
            if size_bytes < 0:  # not told: as the allocator would have made it
                room_bytes = next_address - block.address
                size_bytes = self._size(block.size_bytes, room_bytes)
            self.sizes[block.Index] = size_bytes
            start = block.address + size_bytes
        if start < end:
            self._free.join(start, end, self._borders)

    def _size(self, size_bytes, room_bytes):
        """Size of a block made in a free one: all of it where the rest is not worth
        splitting off.
        """
        # round_size and should_split of c10/cuda/CUDACachingAllocator.cpp
        need = max(_UNIT, -(-size_bytes // _UNIT) * _UNIT)
        if room_bytes < need:
            raise _Misfit
        unsplit = _UNIT - 1 if need <= _MIB or self._expandable else _MIB
        return room_bytes if room_bytes - need <= unsplit else need

    def follow(self, action, row, address, size_bytes, life):
        """Change the free blocks as one event does."""
        free = self._free
        borders = self._borders
        if action == "alloc":
            room_bytes = free.starts.get(address, address) - address
            self.sizes[life] = self._size(size_bytes, room_bytes)
            free.cut(address, address + self.sizes[life])
        elif action == "free_completed":
            free.join(address, address + self.sizes[life], borders)
        elif action == "segment_alloc":
            borders.update((address, address + size_bytes))
            free.join(address, address + size_bytes, borders)
        elif action == "segment_map":
            free.join(address, address + size_bytes, borders)
        elif action == "oom":
            sizes = (end - start for start, end in free.starts.items())
            self.largest[row] = max(sizes, default=0)
        else:
            free.cut(address, address + size_bytes)


def _segments_at_start(events, action, blocks):
    """Segments before the first event: those of the end, with what the events did
    undone; and borders of blocks.
    """
    ranges = _Ranges()
    borders = set()
    # blocks do not join over the border of a cudaMalloc; expandable segments have none
    columns = ["segment", "segment_bytes", "expandable"]
    for start, size, expandable in blocks[columns].drop_duplicates().to_numpy():
        if not expandable:
            borders |= {start, start + size}
        ranges.join(start, start + size, borders)
    # backwards in time: what was taken from the device was not there, and the other way
    of_segments = [name for name in ACTIONS if name.startswith("segment_")]
    for event in events[_is(action, *of_segments)][::-1].itertuples():
        end = event.address + event.size_bytes
        if event.action in ("segment_alloc", "segment_map"):
            ranges.cut(event.address, end)
            continue
        if event.action == "segment_free":
            borders |= {event.address, end}
        ranges.join(event.address, end, borders)
    return ranges, borders


def _block_sizes(events, action, blocks, lives):
    """Bytes of the block of each allocation, None where they do not come out; the
    largest free block at each oom.
    """
    # (events,) the life that an event begins or ends
    life = np.full(len(events), -1)
    for name in ("begin", "freed"):
        at = lives[name].to_numpy()
        inside = (at >= 0) & (at < len(events))
        life[at[inside]] = np.flatnonzero(inside)
    rows = np.flatnonzero(~_is(action, "free_requested", "other"))
    address = events["address"].to_numpy()
    size_bytes = events["size_bytes"].to_numpy()
    columns = [action, np.arange(len(events)), address, size_bytes, life]
    try:
        free = _FreeBlocks(events, action, blocks, lives)
        # in chunks: as objects of Python, all events would take gigabytes
        for first in range(0, len(rows), _CHUNK):
            chunk = rows[first : first + _CHUNK]
            lists = [column[chunk].tolist() for column in columns]
            for code, *event in zip(*lists, strict=True):
                free.follow(ACTIONS[code], *event)
    except _Misfit:
        return None, {}
    sizes = np.array(free.sizes, dtype=np.int64)
    # the proof: what was not freed must have the sizes that the end shows
    not_freed = lives["freed"] == _NEVER
    in_use = blocks[blocks["state"] != "inactive"].set_index("address")["size_bytes"]
    expected = in_use.reindex(lives["address"][not_freed]).to_numpy()
    is_exact = (expected == sizes[not_freed]).all()
    return (sizes if is_exact else None), free.largest
