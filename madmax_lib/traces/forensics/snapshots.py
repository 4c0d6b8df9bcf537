"""Tables of a memory snapshot (`read_snapshot`): what fills a GPU, since when, and whose
it is.

The allocated bytes are those of blocks, as `torch.cuda.memory_allocated()` counts, but
for what `history` says; reserved, requested and pending bytes are exact.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.traces.forensics.history import Replay
from madmax_lib.traces.forensics.read_snapshots import Snapshot, of_device
from madmax_lib.traces.operators.memory import BEFORE

_BY = ("site", "module", "phase", "metadata")
_AT = ("peak", "start", "end", "oom")
_NO_STACK = "no stack was recorded"
_OTHERS = "others"


class _Device(NamedTuple):
    """Events of one device, and their times since the first of all."""

    names: dict  # its rank and device
    replay: Replay
    events: pd.DataFrame
    time_s: pd.Series  # NaN where times are not told

    @property
    def ooms(self):
        """Events at which it had not enough memory."""
        return np.flatnonzero(self.events["action"] == "oom").tolist()


def _devices(snapshot):
    time_us = snapshot.events["time_us"]
    zero_us = time_us.where(time_us >= 0).min()
    for (rank, device), replay in snapshot.replays.items():
        events = of_device(snapshot.events, rank, device)
        time_us = events["time_us"]
        time_s = (time_us.where(time_us >= 0) - zero_us) / 1e6
        names = {"rank": rank, "device": f"cuda:{device}"}
        yield _Device(names, replay, events, time_s)


def snapshot_timeline(snapshot: Snapshot) -> pd.DataFrame:
    """Memory after each event: rank, device, time_s, action, reserved_bytes,
    allocated_bytes, before_bytes,
    requested_bytes, pending_bytes.

    time_s counts from the first event of all, NaN before torch 2.2. pending_bytes: let
    go, but another stream may still use them.
    """
    parts = []
    for device in _devices(snapshot):
        about = {"time_s": device.time_s, "action": device.events["action"]}
        levels = device.replay.levels[1:].reset_index(drop=True)
        parts.append(pd.DataFrame(device.names | about).join(levels))
    return _with_origin(pd.concat(parts, ignore_index=True), snapshot)


def snapshot_peak(snapshot: Snapshot) -> pd.DataFrame:
    """Peak of the memory allocated on each device: rank, device, peak_bytes, time_s,
    event, before_bytes, reserved_bytes,
    unused_bytes, requested_bytes, pending_bytes.

    The first of equal peaks; event -1 is before the first one. before_bytes: of it,
    from before the recording.
    unused_bytes: reserved, but neither allocated nor pending.
    """
    rows = []
    for device in _devices(snapshot):
        replay = device.replay
        event = _moment(device, "peak")
        level = replay.levels.iloc[event + 1]  # row 0 is before the first event
        alive = _alive(replay, event)
        is_older = alive["begin"] < 0
        row = {
            **device.names,
            "peak_bytes": alive["block_bytes"].sum(),
            "time_s": device.time_s.get(event, np.nan),
            "event": event,
            "before_bytes": alive.loc[is_older, "block_bytes"].sum(),
            "reserved_bytes": level["reserved_bytes"],
            "unused_bytes": level["reserved_bytes"] - _active_bytes(replay, event),
            "requested_bytes": level["requested_bytes"],
            "pending_bytes": level["pending_bytes"],
        }
        rows.append(row)
    table = pd.DataFrame(rows)
    sizes = [name for name in table.columns if name.endswith("_bytes")]
    return _with_origin(table.astype(dict.fromkeys(sizes, "int64")), snapshot)


def snapshot_held(
    snapshot: Snapshot, by: str = "site", at: str = "peak", top: int | None = 10
) -> pd.DataFrame:
    """Allocations that fill each device, by who asked for them: rank, device, the column
    of `by`, size_bytes, count, share (0..1).

    by: "site" (the innermost lines that asked), "module" (where the innermost forward()
    stands), "phase" (forward, backward, optimizer, initialization, other, as far as
    frames tell) or "metadata" (`_set_memory_metadata`). at: "peak", "start" or "end" of
    the history, "oom" (the last one). The `top` of them, the rest as "others"; the
    bytes of a device sum to what is allocated then. Raises ValueError for another by,
    at or top, and a device without oom.
    """
    for name, value, words in (("by", by, _BY), ("at", at, _AT)):
        if value not in words:
            raise ValueError(f"{name}={value!r} is none of {', '.join(words)}")
    if top is not None and top < 1:
        raise ValueError(f"top={top} is not at least 1")
    parts = []
    for device in _devices(snapshot):
        alive = _alive(device.replay, _moment(device, at))
        groups = alive["block_bytes"].groupby(_names(snapshot, alive, by))
        shares = groups.agg(["sum", "count"])
        # stable: of equal sizes the first by name
        shares = shares.sort_values("sum", ascending=False, kind="stable")
        shares = shares.rename_axis(by).reset_index()
        if top is not None and len(shares) > top:
            rest = shares[top:][["sum", "count"]].sum()
            others = pd.DataFrame([{by: _OTHERS, **rest}])
            shares = pd.concat([shares[:top], others], ignore_index=True)
        shares["share"] = shares["sum"] / max(shares["sum"].sum(), 1)
        parts.append(pd.DataFrame(device.names, shares.index).join(shares))
    table = pd.concat(parts, ignore_index=True).rename(columns={"sum": "size_bytes"})
    return _with_origin(table, snapshot)


def snapshot_diff(
    a: Snapshot, b: Snapshot, by: str = "site", at: str = "peak"
) -> pd.DataFrame:
    """Difference between the fullest device of b and that of a: the column of `by`,
    a_bytes, b_bytes, difference_bytes, a_count, b_count; the largest first.

    by and at as in `snapshot_held`. Give snapshots of one rank to compare two moments
    of it.
    """
    sides = []
    for side, snapshot in (("a", a), ("b", b)):
        table = snapshot_held(snapshot, by, at, top=None)
        of_device = table.groupby(["rank", "device"], sort=False)["size_bytes"]
        device_bytes = of_device.transform("sum")
        is_fullest = device_bytes == device_bytes.max()
        # of devices that are equally full, the first
        fullest = table[is_fullest].drop_duplicates(by).set_index(by)
        columns = {"size_bytes": f"{side}_bytes", "count": f"{side}_count"}
        sides.append(fullest[list(columns)].rename(columns=columns))
    table = sides[0].join(sides[1], how="outer").fillna(0).astype("int64").reset_index()
    table["difference_bytes"] = table["b_bytes"] - table["a_bytes"]
    columns = [by, "a_bytes", "b_bytes", "difference_bytes", "a_count", "b_count"]
    # stable: of equal differences the first by name
    order = (-table["difference_bytes"].abs()).argsort(kind="stable")
    return _with_origin(table.loc[order, columns].reset_index(drop=True), b)


def fragmentation(snapshot: Snapshot) -> pd.DataFrame:
    """Reserved memory that is free at the end, and whether it could be used: rank,
    device, pool (small: up to 1 MiB, large), segments, reserved_bytes, active_bytes,
    rounding_bytes, free_bytes, largest_free_bytes, releasable_bytes, fragmentation
    (0..1).

    rounding_bytes: of active blocks, beyond what was asked for. releasable_bytes: free
    in segments that `empty_cache()` gives back. fragmentation: the other free bytes, as
    a share of what is reserved.
    """
    blocks = snapshot.blocks
    keys = ["rank", "device", "pool"]
    free = blocks["state"] == "inactive"
    size = blocks["size_bytes"]
    requested = blocks["requested_bytes"]
    active = size.mask(free, 0)
    of_segment = ["rank", "device", "segment"]
    # empty_cache() gives back segments without any active block
    in_segment = active.groupby([blocks[name] for name in of_segment]).transform("sum")
    # a row per block, in which each column is what the block adds to it
    table = blocks[keys].assign(
        segments=blocks["segment"].mask(blocks.duplicated(of_segment)),
        reserved_bytes=size,
        active_bytes=active,
        rounding_bytes=(size - requested).mask(free | (requested < 0), 0),
        free_bytes=size - active,
        largest_free_bytes=size - active,
        releasable_bytes=size.where(in_segment == 0, 0),
    )
    how = dict.fromkeys(table.columns.drop(keys), "sum")
    how |= {"segments": "count", "largest_free_bytes": "max"}
    table = table.groupby(keys).agg(how).reset_index()
    table["device"] = "cuda:" + table["device"].astype(str)
    # fragmentation = (free - releasable) / reserved
    stuck = table["free_bytes"] - table["releasable_bytes"]
    table["fragmentation"] = stuck / table["reserved_bytes"].clip(lower=1)
    return _with_origin(table, snapshot)


def out_of_memory(snapshot: Snapshot) -> pd.DataFrame:
    """Times at which a device had not enough: rank, device, event, time_s, asked_bytes,
    device_free_bytes,
    reserved_bytes, active_bytes, free_bytes, cause, site; empty where that did not happen.

    free_bytes: in reserved segments. cause: "full", or "fragmented" where they and
    those of the device would do but lie in pieces. `snapshot_held(at="oom")` tells who
    held the memory then.
    """
    rows = []
    for device in _devices(snapshot):
        replay = device.replay
        for event in device.ooms:
            oom = device.events.iloc[event]
            reserved = int(replay.levels["reserved_bytes"][event + 1])
            active = int(_active_bytes(replay, event))
            # the event's address is the bytes that the device had free
            enough = reserved - active + oom["address"] >= oom["size_bytes"]
            row = (
                *device.names.values(),
                event,
                device.time_s[event],
                oom["size_bytes"],
                oom["address"],
                reserved,
                active,
                reserved - active,
                "fragmented" if enough else "full",
                snapshot.stacks["site"].get(oom["stack"], _NO_STACK),
            )
            rows.append(row)
    columns = [
        "rank",
        "device",
        "event",
        "time_s",
        "asked_bytes",
        "device_free_bytes",
        "reserved_bytes",
        "active_bytes",
        "free_bytes",
        "cause",
        "site",
    ]
    return _with_origin(pd.DataFrame(rows, columns=columns), snapshot)


def _moment(device, at):
    """Event of a moment, -1 before the first."""
    levels = device.replay.levels["allocated_bytes"]
    if at == "oom":
        if not device.ooms:
            where = "rank {rank}, {device}".format(**device.names)
            raise ValueError(f"{where} did not run out of memory while it was recorded")
        return device.ooms[-1]
    return {"peak": int(levels.argmax()) - 1, "start": -1, "end": len(levels) - 2}[at]


def _alive(replay, event):
    """Allocations that their owners use after an event."""
    table = replay.allocations
    return table[(table["begin"] <= event) & (table["let_go"] > event)]


def _active_bytes(replay, event):
    """Bytes of blocks that are not free after an event: in use, or pending."""
    table = replay.allocations
    is_active = (table["begin"] <= event) & (table["freed"] > event)
    return table.loc[is_active, "block_bytes"].sum()


def _names(snapshot, alive, by):
    """Name under which each allocation is counted."""
    if by == "metadata":
        texts = pd.Series(snapshot.metadata, dtype=object)
        number = alive["metadata"]
    else:
        texts = snapshot.stacks[by].replace("", "no module")
        number = alive["stack"]
    name = number.map(texts).astype(object)
    # without a stack: from before the recording, or recorded without stacks
    fallback = np.where(alive["begin"] < 0, BEFORE, _NO_STACK)
    return name.fillna(pd.Series(fallback, alive.index))


def _with_origin(table, snapshot):
    table.attrs.update(
        provenance={"files": snapshot.files, "rules": "memory snapshot"},
        source="measured",
    )
    return table
