"""Bytes in use after each event of the allocator: its history replayed, and compared
with its end.

A snapshot tells what there is at the end; what was there at the start is that, less
what the events did. Events tell the size that was asked for, `memory_allocated()`
counts blocks: the size rounded up to 512 B, with the rest of the free block where that
is too small to split off (c10/cuda/CUDACachingAllocator.cpp). Blocks that are there at
the end count with their size, others as rounded: the rests, at most 1 MiB each, are
left out, 0.001 and 0.4 % of the peaks of two real steps.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

_UNIT = 512  # bytes to which the allocator rounds up (kMinBlockSize)
_NEVER = np.iinfo("int64").max
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

    allocations: address, stream, size_bytes (requested), block_bytes (of the block),
    stack, metadata, and the events begin (-1: before the first), let_go and freed
    (2**63 - 1: never).
    levels: before the first event (row 0) and after each: reserved_bytes,
    allocated_bytes (of blocks), before_bytes (of it, from before the first event),
    requested_bytes, and pending_bytes: let go, but not yet free for others.
    """

    allocations: pd.DataFrame
    levels: pd.DataFrame


def replay(events: pd.DataFrame, blocks: pd.DataFrame) -> Replay:
    """Allocations and levels of the events and of the blocks at the end of one device.

    Raises ValueError where they contradict, as when actions were left out of the
    recording.
    """
    action = events["action"].cat.codes.to_numpy()
    lives = _with_older(_lives(events, action), blocks[blocks["state"] != "inactive"])
    older = lives[lives["begin"] < 0]
    count = len(events)
    levels = {
        "reserved_bytes": _reserved(events, action, blocks),
        "allocated_bytes": _sums(lives, "begin", "let_go", "block_bytes", count),
        "before_bytes": _sums(older, "begin", "let_go", "block_bytes", count),
        "requested_bytes": _sums(lives, "begin", "let_go", "size_bytes", count),
        "pending_bytes": _sums(lives, "let_go", "freed", "size_bytes", count),
    }
    if levels["reserved_bytes"].min() < 0:
        raise _left_out("reserved bytes fall below 0")
    return Replay(lives, pd.DataFrame(levels))


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
    change = np.zeros(count + 1, dtype="int64")
    for event, sign in ((begin, 1), (end, -1)):
        at = lives[event].to_numpy()
        inside = at < count  # _NEVER is not
        # row 0 is before the first event, so event i changes row i + 1; add.at because
        # a row may change more than once
        np.add.at(change, at[inside] + 1, sign * size_bytes[inside])
    return np.cumsum(change)


def _reserved(events, action, blocks):
    """Reserved bytes (n + 1,) before the first event and after each."""
    grows = _is(action, "segment_alloc", "segment_map").astype("int64")
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
    table = pd.concat([table, older[table.columns]], ignore_index=True)
    in_use = live.set_index("address")["size_bytes"]
    at_end = table["address"].map(in_use).where(table["freed"] == _NEVER)
    # round_size of c10/cuda/CUDACachingAllocator.cpp
    rounded = -(-table["size_bytes"].clip(lower=1) // _UNIT) * _UNIT
    return table.assign(block_bytes=at_end.fillna(rounded).astype("int64"))
