"""Who waits for the transfers of gloo, on a trace without a device? Their edges in the
graph of a step.

A c10d operator hands a transfer to a thread of gloo and returns; where the caller waits
is no event of a trace. It is seen where the calling thread pauses until the transfer
ends. A wait that found its transfer done left no pause, but it is one as soon as links
are slower: what backward starts and does not wait for at once, as DDP's buckets, is
awaited when backward ends. Sends and receives are annotations on the calling thread,
from the call until its wait is over: they are in flight beside what the thread does, a
message needs both ends, and has arrived when the first of them goes on. All transfers
of a rank share its link: a message or collective leaves it when those before it have
left.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from madmax_lib.base.intervals import pack, union
from madmax_lib.traces.comm.call_metadata import call_metadata

__all__ = ["pauses", "transfers"]

_PAUSES = r"wait|run_backward|: backward"
_AUTOGRAD = "autograd::engine::evaluate_function"
_MOSTLY = (
    0.5  # of the calls of a kind must show that their thread waits for them at once
)


def transfers(
    timeline, spans: pd.DataFrame, slices: pd.DataFrame, slice_of_row: np.ndarray
) -> Iterator[tuple]:
    """Edges launch, sync and link of gloo's transfers; spans: of the step, slices: its
    work.
    """
    host = spans[spans["stream"] < 0]
    operators = host[host["name"].str.startswith("c10d::")].sort_values(
        "start_ns", kind="stable"
    )
    gloo = host[(host["kind"] == "comm") & (slice_of_row[0, host.index] >= 0)]
    for rank, calls in operators.groupby("rank"):
        mine = gloo[gloo["rank"] == rank].sort_values("start_ns", kind="stable")
        in_flight = mine["stream"].isin(calls["stream"])
        messages = calls["name"].str.contains(r"::(?:send|recv)")
        for own, made in (
            (mine[~in_flight], calls[~messages]),
            (mine[in_flight], calls[messages]),
        ):
            own, made = _started(own, made)
            yield (
                "launch",
                2 * slice_of_row[0, made.index],
                2 * slice_of_row[0, own.index],
            )
            yield (
                "sync",
                *_waits(own, made, host[host["rank"] == rank], slices, slice_of_row),
            )
    yield from _link(gloo, slice_of_row, slices)


def _started(
    transfers: pd.DataFrame, calls: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Transfers, and the call of each: they queue one after the other; if some are
    missing, the last call before.
    """
    turn = np.arange(len(transfers))
    if len(transfers) != len(calls):
        turn = (
            np.searchsorted(calls["start_ns"], transfers["start_ns"], side="right") - 1
        )
    return transfers[turn >= 0], calls.iloc[turn[turn >= 0]]


def _waits(
    own: pd.DataFrame,
    calls: pd.DataFrame,
    host: pd.DataFrame,
    slices: pd.DataFrame,
    slice_of_row: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """End of a transfer -> where the thread that called goes on."""
    sources = [np.zeros(0, np.int64)]
    targets = [np.zeros(0, np.int64)]
    end_ns = (own["start_ns"] + own["dur_ns"]).to_numpy()
    ended = 2 * slice_of_row[1, own.index] + 1
    for thread in calls["stream"].unique():
        mine = np.flatnonzero(calls["stream"] == thread)
        lane = slices[
            (slices["rank"] == calls["rank"].iloc[0]) & (slices["stream"] == thread)
        ]
        _, after = pauses(lane, host, end_ns[mine], end_ns[mine])
        after = _at_the_end_of_backward(
            after, calls.iloc[mine], lane, host[host["stream"] == thread]
        )
        sources.append(ended[mine][after >= 0])
        targets.append(after[after >= 0])
    return np.concatenate(sources), np.concatenate(targets)


def _at_the_end_of_backward(
    after: np.ndarray, calls: pd.DataFrame, lane: pd.DataFrame, host: pd.DataFrame
) -> np.ndarray:
    """Events (n,) at which a thread goes on after its calls, with those of calls that
    backward does not wait for.
    """
    nodes = host[host["name"].str.startswith(_AUTOGRAD)]
    if nodes.empty or not len(lane):
        return after
    inside = _within(calls["start_ns"], nodes)
    works = lane[
        lane["kind"].isin(("compute", "host"))
        & (host["kind"].reindex(lane["row"]) != "annotation").to_numpy()
    ]
    works = works[~_within(works["start_ns"], nodes)]
    next_work = np.searchsorted(works["start_ns"], calls["start_ns"], side="right")
    at = np.r_[2 * works.index.to_numpy(), -1][
        next_work
    ]  # the first work after backward
    last = np.r_[nodes["start_ns"].to_numpy(), 0][
        np.searchsorted(nodes["start_ns"], np.r_[works["start_ns"], np.inf][next_work])
        - 1
    ]
    seen = (after >= 0) & (
        lane["end_ns"].reindex(after // 2).to_numpy() > last
    )  # it waits when backward has ended
    of_kind = (
        pd.Series(after >= 0)
        .groupby([calls["name"].to_numpy(), inside])
        .transform("mean")
        .to_numpy()
    )
    late = inside & ((of_kind <= _MOSTLY) | seen) & (at >= 0)
    first = (
        pd.Series(np.where(seen & late, after, np.iinfo(np.int64).max))
        .groupby(at)
        .transform("min")
        .to_numpy()
    )
    return np.where(late, np.where(seen, after, np.minimum(first, at)), after)


def _within(start_ns: pd.Series, spans: pd.DataFrame) -> np.ndarray:
    """Which times (n,) lie inside of spans of a thread."""
    covered = union(pack(spans["start_ns"], spans["dur_ns"]))
    at = np.searchsorted(covered[:, 0], start_ns, side="right") - 1
    return (at >= 0) & (np.asarray(start_ns) < np.r_[covered[:, 1], 0][at])


def _link(
    gloo: pd.DataFrame, slice_of_row: np.ndarray, slices: pd.DataFrame
) -> Iterator[tuple]:
    """End of a transfer -> end of the next one over the link of its rank; messages one
    way do not hold up others.
    """
    ends = slices.loc[slice_of_row[1, gloo.index], ["end_ns"]].assign(
        at=2 * slice_of_row[1, gloo.index] + 1
    )
    way = gloo["name"].astype(str).str.extract(r":(send|recv)")[0].fillna("").to_numpy()
    for _, lane in ends.groupby([gloo["rank"].to_numpy(), way]):
        at = lane.sort_values("end_ns", kind="stable")["at"].to_numpy()
        yield "link", at[:-1], at[1:]


def messages(timeline, slices: pd.DataFrame, flying: np.ndarray) -> pd.Series:
    """Number (n,) of the message of each slice in flight (mask), that both ends share;
    only complete ones.
    """
    sides = slices[flying]
    about = call_metadata(timeline, sides["row"].to_numpy()).set_index(sides.index)
    known = (about["source_rank"] >= 0) & (about["target_rank"] >= 0)
    sides = (
        sides[known]
        .join(about[["collective", "source_rank", "target_rank"]])
        .sort_values("start_ns", kind="stable")
    )
    ends = ["source_rank", "target_rank"]
    sides["turn"] = sides.groupby([*ends, "collective"]).cumcount()
    sent = (
        (sides["collective"] == "send")
        .astype(float)
        .groupby([sides[end] for end in ends])
        .transform("mean")
    )
    return sides.groupby([*ends, "turn"]).ngroup()[
        sent == 0.5
    ]  # as many sent as received


def pauses(
    lane: pd.DataFrame, spans: pd.DataFrame, from_ns: np.ndarray, until_ns: np.ndarray
) -> np.ndarray:
    """(2, n) events before and after the pause of a thread around each stretch of time,
    -1 if it does not pause.

    A thread pauses between two slices, and in an annotation or a call that waits.
    """
    if not len(lane):
        return np.full((2, len(from_ns)), -1)
    waits = (
        lane["name"].str.contains(_PAUSES).to_numpy()
        | (spans.loc[lane["row"], "kind"] == "annotation").to_numpy()
    )
    start = lane["start_ns"].to_numpy()
    end = lane["end_ns"].to_numpy()
    at = np.searchsorted(start, from_ns, side="left") - 1
    inside = end[at] >= until_ns
    before = np.where(
        at < 0, -1, 2 * lane.index.to_numpy()[at] + np.where(inside, 0, 1)
    )
    after = np.where(inside, before + 1, np.where(at + 1 < len(lane), before + 1, -1))
    running = (end[at] >= from_ns) & ~(inside & waits[at])
    return np.where(running | (at < 0), -1, np.stack([before, after]))
