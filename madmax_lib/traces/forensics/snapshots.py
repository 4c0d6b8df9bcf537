"""What fills a GPU, since when, and whose is it? Tables of a memory snapshot
(`read_snapshot`), exact to the byte.

The allocated bytes are those of `torch.cuda.memory_allocated()`, whole blocks. Where
their sizes cannot be told, the requested bytes stand for them, and `exact` is false;
reserved, requested and pending bytes are always exact.
"""

import numpy as np
import pandas as pd

from madmax_lib.traces.forensics.block_sizes import Replay
from madmax_lib.traces.forensics.read_snapshots import Snapshot, of_device
from madmax_lib.traces.operators.memory import BEFORE

__all__ = [
    "fragmentation",
    "out_of_memory",
    "snapshot_diff",
    "snapshot_held",
    "snapshot_peak",
    "snapshot_timeline",
]

_BY = ("site", "module", "phase", "metadata")
_AT = ("peak", "start", "end", "oom")
_NO_STACK = "no stack was recorded"
_OTHERS = "others"


def snapshot_timeline(snapshot: Snapshot) -> pd.DataFrame:
    """Memory after each event: rank, device, time_s, action, reserved_bytes,
    allocated_bytes, before_bytes,
    requested_bytes, pending_bytes.

    time_s counts from the first event of all, NaN before torch 2.2. allocated_bytes is
    NaN where the sizes of blocks cannot be told. pending_bytes: let go, but another
    stream may still use them.
    """
    zero_us = snapshot.events["time_us"].where(lambda time: time >= 0).min()
    parts = []
    for (rank, device), replay in snapshot.replays.items():
        events = of_device(snapshot.events, rank, device)
        time_s = (events["time_us"].where(lambda time: time >= 0) - zero_us) / 1e6
        about = {
            "rank": rank,
            "device": f"cuda:{device}",
            "time_s": time_s,
            "action": events["action"],
        }
        parts.append(pd.DataFrame(about).join(replay.levels[1:].reset_index(drop=True)))
    return _with_origin(pd.concat(parts, ignore_index=True), snapshot)


def snapshot_peak(snapshot: Snapshot) -> pd.DataFrame:
    """The most memory allocated on each device: rank, device, peak_bytes, time_s,
    event, before_bytes, reserved_bytes,
    unused_bytes, requested_bytes, pending_bytes, exact.

    The first of equal peaks; event -1 is before the first one. before_bytes: of it,
    from before the recording.
    unused_bytes: reserved, but neither allocated nor pending.
    """
    rows = []
    for (rank, device), replay in snapshot.replays.items():
        event = _moment(replay, "peak", snapshot, rank, device)
        at = replay.levels.iloc[event + 1]
        held = _held(replay, event)
        active = replay.allocations.query("begin <= @event < freed")[
            "block_bytes"
        ].sum()
        row = {
            "rank": rank,
            "device": f"cuda:{device}",
            "peak_bytes": held["block_bytes"].sum(),
        }
        row |= {"time_s": _time_s(snapshot, rank, device, event), "event": event}
        row |= {
            "before_bytes": held.loc[held["begin"] < 0, "block_bytes"].sum(),
            "reserved_bytes": at["reserved_bytes"],
        }
        row |= {
            "unused_bytes": at["reserved_bytes"] - active,
            "requested_bytes": at["requested_bytes"],
        }
        rows.append(row | {"pending_bytes": at["pending_bytes"], "exact": replay.exact})
    table = pd.DataFrame(rows)
    whole = [name for name in table.columns if name.endswith("_bytes")]
    return _with_origin(table.astype(dict.fromkeys(whole, "int64")), snapshot)


def snapshot_held(
    snapshot: Snapshot, by: str = "site", at: str = "peak", top: int | None = 10
) -> pd.DataFrame:
    """Whose allocations fill each device: rank, device, the column of `by`, size_bytes,
    count, share (0..1).

    by: "site" (the innermost lines that asked), "module" (where the innermost forward()
    stands), "phase" (forward, backward, optimizer, initialization, other, as far as
    frames tell) or "metadata" (`_set_memory_metadata`). at: "peak", "start" or "end" of
    the history, "oom" (the last one). The `top` of them, the rest as "others"; the
    bytes of a device sum to what is allocated then. Raises ValueError for another by,
    at or top, and a device without oom.
    """
    for name, value, known in (("by", by, _BY), ("at", at, _AT)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
    if top is not None and top < 1:
        raise ValueError(f"top={top} is not at least 1")
    parts = []
    for (rank, device), replay in snapshot.replays.items():
        held = _held(replay, _moment(replay, at, snapshot, rank, device))
        held = (
            held["block_bytes"]
            .groupby(_names(snapshot, held, by))
            .agg(["sum", "count"])
        )
        held = (
            held.sort_values("sum", ascending=False, kind="stable")
            .rename_axis(by)
            .reset_index()
        )
        if top is not None and len(held) > top:
            rest = held[top:][["sum", "count"]].sum()
            held = pd.concat(
                [held[:top], pd.DataFrame([{by: _OTHERS, **rest}])], ignore_index=True
            )
        held.insert(0, "rank", rank)
        held.insert(1, "device", f"cuda:{device}")
        parts.append(held.assign(share=held["sum"] / max(held["sum"].sum(), 1)))
    table = pd.concat(parts, ignore_index=True).rename(columns={"sum": "size_bytes"})
    return _with_origin(table, snapshot)


def snapshot_diff(
    a: Snapshot, b: Snapshot, by: str = "site", at: str = "peak"
) -> pd.DataFrame:
    """What the fullest device of b holds and that of a does not: the column of `by`,
    a_bytes, b_bytes,
    difference_bytes, a_count, b_count; the largest difference first.

    by and at as in `snapshot_held`. Give snapshots of one rank to compare two moments
    of it.
    """
    sides = []
    for side, snapshot in (("a", a), ("b", b)):
        held = snapshot_held(snapshot, by, at, top=None)
        pool = held.groupby(["rank", "device"], sort=False)["size_bytes"].transform(
            "sum"
        )
        held = held[pool == pool.max()].drop_duplicates(by).set_index(by)
        sides.append(
            held[["size_bytes", "count"]].set_axis(
                [f"{side}_bytes", f"{side}_count"], axis=1
            )
        )
    table = sides[0].join(sides[1], how="outer").fillna(0).astype("int64").reset_index()
    table.insert(3, "difference_bytes", table["b_bytes"] - table["a_bytes"])
    order = (
        table["difference_bytes"]
        .abs()
        .sort_values(ascending=False, kind="stable")
        .index
    )
    columns = [by, "a_bytes", "b_bytes", "difference_bytes", "a_count", "b_count"]
    return _with_origin(table.loc[order, columns].reset_index(drop=True), b)


def fragmentation(snapshot: Snapshot) -> pd.DataFrame:
    """What is reserved but free at the end, and could it be used? rank, device, pool
    (small: up to 1 MiB, large),
    segments, reserved_bytes, active_bytes, rounding_bytes, free_bytes,
    largest_free_bytes, releasable_bytes, fragmentation (0..1).

    rounding_bytes: of active blocks, beyond what was asked for. releasable_bytes: free
    in segments that `empty_cache()` gives back. fragmentation: the other free bytes, as
    a share of what is reserved.
    """
    blocks = snapshot.blocks
    keys = ["rank", "device", "pool"]
    free = blocks["state"] == "inactive"
    size = blocks["size_bytes"]
    used = (
        size.mask(free, 0)
        .groupby([blocks["rank"], blocks["device"], blocks["segment"]])
        .transform("sum")
    )
    table = blocks[keys].assign(
        segments=blocks["segment"].mask(
            blocks.duplicated(["rank", "device", "segment"])
        ),
        reserved_bytes=size,
        active_bytes=size.mask(free, 0),
        rounding_bytes=(size - blocks["requested_bytes"]).mask(
            free | (blocks["requested_bytes"] < 0), 0
        ),
        free_bytes=size.where(free, 0),
        largest_free_bytes=size.where(free, 0),
        releasable_bytes=size.where(used == 0, 0),
    )
    how = dict.fromkeys(table.columns.drop(keys), "sum") | {
        "segments": "count",
        "largest_free_bytes": "max",
    }
    table = table.groupby(keys).agg(how).reset_index()
    table["device"] = "cuda:" + table["device"].astype(str)
    stuck = table["free_bytes"] - table["releasable_bytes"]
    return _with_origin(
        table.assign(fragmentation=stuck / table["reserved_bytes"].clip(lower=1)),
        snapshot,
    )


def out_of_memory(snapshot: Snapshot) -> pd.DataFrame:
    """Each time that a device had not enough: rank, device, event, time_s, asked_bytes,
    device_free_bytes,
    reserved_bytes, active_bytes, free_bytes, largest_free_bytes, cause, site; empty
    where that did not happen.

    free_bytes: in reserved segments. cause: "full", or "fragmented" where they and
    those of the device would do but lie in pieces. largest_free_bytes is NaN where the
    sizes of blocks cannot be told. `snapshot_held(at="oom")` tells who held the memory
    then.
    """
    rows = []
    for (rank, device), replay in snapshot.replays.items():
        events = of_device(snapshot.events, rank, device)
        for event in np.flatnonzero(events["action"] == "oom").tolist():
            oom = events.iloc[event]
            reserved = int(replay.levels["reserved_bytes"][event + 1])
            active = int(
                replay.allocations.query("begin <= @event < freed")["block_bytes"].sum()
            )
            enough = reserved - active + oom["address"] >= oom["size_bytes"]
            row = {"rank": rank, "device": f"cuda:{device}", "event": event}
            row |= {
                "time_s": _time_s(snapshot, rank, device, event),
                "asked_bytes": oom["size_bytes"],
            }
            row |= {
                "device_free_bytes": oom["address"],
                "reserved_bytes": reserved,
                "active_bytes": active,
            }
            row |= {
                "free_bytes": reserved - active,
                "largest_free_bytes": replay.largest_free_bytes.get(event, np.nan),
            }
            site = snapshot.stacks["site"].get(oom["stack"], _NO_STACK)
            rows.append(
                row | {"cause": "fragmented" if enough else "full", "site": site}
            )
    columns = [
        "rank",
        "device",
        "event",
        "time_s",
        "asked_bytes",
        "device_free_bytes",
        "reserved_bytes",
        "active_bytes",
    ]
    columns += ["free_bytes", "largest_free_bytes", "cause", "site"]
    return _with_origin(pd.DataFrame(rows, columns=columns), snapshot)


def _time_s(snapshot: Snapshot, rank: int, device: int, event: int) -> float:
    """Seconds of an event since the first of all, NaN for the time before it or where
    times are not told.
    """
    time_us = snapshot.events["time_us"].where(lambda time: time >= 0)
    return (
        float(
            of_device(snapshot.events, rank, device)["time_us"][event] - time_us.min()
        )
        / 1e6
        if event >= 0
        else np.nan
    )


def _moment(replay: Replay, at: str, snapshot: Snapshot, rank: int, device: int) -> int:
    """Event of a moment, -1 before the first."""
    levels = replay.levels["allocated_bytes" if replay.exact else "requested_bytes"]
    if at == "oom":
        ooms = np.flatnonzero(
            of_device(snapshot.events, rank, device)["action"] == "oom"
        )
        if not len(ooms):
            raise ValueError(
                f"rank {rank}, cuda:{device} did not run out of memory while it was "
                "recorded"
            )
        return int(ooms[-1])
    return {"peak": int(levels.argmax()) - 1, "start": -1, "end": len(levels) - 2}[at]


def _held(replay: Replay, event: int) -> pd.DataFrame:
    """Allocations that are alive after an event."""
    of = replay.allocations
    return of[(of["begin"] <= event) & (of["let_go"] > event)]


def _names(snapshot: Snapshot, held: pd.DataFrame, by: str) -> pd.Series:
    if by == "metadata":
        texts = pd.Series(snapshot.metadata, dtype=object)
        number = held["metadata"]
    else:
        texts = snapshot.stacks[by].replace("", "no module")
        number = held["stack"]
    named = number.map(texts).astype(object)
    return named.fillna(
        pd.Series(np.where(held["begin"] < 0, BEFORE, _NO_STACK), held.index)
    )


def _with_origin(table: pd.DataFrame, snapshot: Snapshot) -> pd.DataFrame:
    table.attrs.update(
        provenance={"files": snapshot.files, "rules": "memory snapshot"},
        source="measured",
    )
    return table
