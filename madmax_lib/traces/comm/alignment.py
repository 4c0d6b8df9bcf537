"""Clocks of the ranks, compared by the ends of their collectives, which end together.

For every pair of ranks that share calls the offset is the median difference of the
ends; offsets of all ranks follow by least squares over these pairs, each weighted by
its number of calls, so that groups which share no call directly are joined through
others. Calls that need not end together (sends, and those with a root) only join ranks
that nothing else joins. One offset per rank: a drift within the trace is not seen. Ends
agree to the time a rank needs to notice; an offset below its spread is noise.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.base.units import NS_PER_S
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.timeline.timeline import Timeline, with_origin
from madmax_lib.traces.comm.collectives import calls

_APART = (*POINT_TO_POINT, "broadcast", "reduce", "gather", "scatter")


def clock_offsets(timeline: Timeline) -> pd.DataFrame:
    """Offset by which the clock of each rank is ahead, one row per rank.

    rank. reference: the lowest rank that calls connect with it, whose clock it is
    compared with; its own number for a rank that shares no call. offset_s: its clock -
    the reference's, exact to the nanosecond. spread_s: median distance of its ends from
    those of the same calls on the other ranks once clocks agree, NaN without calls.
    calls: how many.
    """
    shared = _shared_ends(timeline)
    ranks = np.array(timeline.ranks, dtype=np.int64)
    # Medians of differences; spans have whole nanoseconds.
    exact_ns, reference = _solve(_pairs(shared), ranks)
    offset_ns = np.rint(exact_ns)
    rest_ns = (
        shared["end_ns"]
        - pd.Series(offset_ns, index=ranks).reindex(shared["rank"]).to_numpy()
    )
    apart_ns = (rest_ns - rest_ns.groupby(shared["call"]).transform("median")).abs()
    of_rank = apart_ns.groupby(shared["rank"])
    table = pd.DataFrame(
        {
            "rank": ranks,
            "reference": reference,
            "offset_s": offset_ns / NS_PER_S,
            "spread_s": of_rank.median().reindex(ranks).to_numpy() / NS_PER_S,
            "calls": of_rank.size()
            .reindex(ranks)
            .fillna(0)
            .astype(np.int64)
            .to_numpy(),
        }
    )
    return with_origin(table, timeline)


def align(timeline: Timeline) -> Timeline:
    """The timeline with one clock: each rank's times shifted by its offset, so that
    collectives end together.

    meta.provenance["clock_offsets_s"] has {rank: seconds taken off}. Ranks that share
    no call with the lowest rank, directly or through others, keep the clock of the
    lowest rank that they are connected with.
    """
    table = clock_offsets(timeline)
    shift_ns = (
        np.rint(table["offset_s"] * NS_PER_S).astype(np.int64).set_axis(table["rank"])
    )
    before = timeline.meta.provenance.get("clock_offsets_s", {})
    taken_s = {
        str(rank): before.get(str(rank), 0.0) + ns / NS_PER_S
        for rank, ns in shift_ns.items()
    }
    start_ns = (
        timeline.spans["start_ns"] - shift_ns.reindex(timeline.spans["rank"]).to_numpy()
    )
    meta = replace(
        timeline.meta,
        provenance=timeline.meta.provenance | {"clock_offsets_s": taken_s},
    )

    def shifted():
        memory = timeline.side_tables["memory"]
        time_ns = memory["time_ns"] - shift_ns.reindex(memory["rank"]).to_numpy()
        return {**timeline.side_tables, "memory": memory.assign(time_ns=time_ns)}

    return Timeline(
        timeline.spans.assign(start_ns=start_ns),
        meta,
        timeline.edges,
        SideTables(shifted),
    )


def _shared_ends(timeline: Timeline):
    """rank, call, together (all ranks end at once) and end_ns of the matched calls, in
    order of call and rank.
    """
    table = calls(timeline)
    spans = timeline.spans.iloc[table["row"]]
    end_ns = (spans["start_ns"] + spans["dur_ns"]).to_numpy()
    table = table.assign(
        end_ns=end_ns - (end_ns.min() if len(end_ns) else 0)
    )  # float64 medians stay exact
    table["together"] = ~table["collective"].isin(_APART) | (
        table["source_rank"] < 0
    ) & (table["collective"] == "send_recv")
    table = table.loc[table["call"] >= 0, ["rank", "call", "together", "end_ns"]]
    return table.sort_values(["call", "rank"]).reset_index(drop=True)


def _pairs(shared: pd.DataFrame):
    """One row per pair of ranks and `together`: rank, first (lowest rank of its calls),
    ahead_ns, count.
    """
    first = shared.groupby("call")[["rank", "end_ns"]].transform("first")
    ahead = shared.assign(
        first=first["rank"], ahead_ns=shared["end_ns"] - first["end_ns"]
    )
    ahead = ahead[ahead["rank"] != ahead["first"]]
    return (
        ahead.groupby(["first", "rank", "together"])["ahead_ns"]
        .agg(ahead_ns="median", count="size")
        .reset_index()
    )


def _solve(pairs: pd.DataFrame, ranks: np.ndarray):
    """Offset (n,) in ns of each rank from the lowest rank it is connected with, and
    that rank (n,).
    """
    a = np.searchsorted(ranks, pairs["first"])
    b = np.searchsorted(ranks, pairs["rank"])
    together = pairs["together"].to_numpy(dtype=bool)
    # Calls that need not end together join only ranks that nothing else joins.
    strongly = components(a[together], b[together], len(ranks))
    use = together | (strongly[a] != strongly[b])
    a = a[use]
    b = b[use]
    pairs = pairs[use]
    lowest = components(a, b, len(ranks))
    weight = np.sqrt(pairs["count"].to_numpy(dtype=np.float64))
    system = np.zeros((len(pairs), len(ranks)))
    edge = np.arange(len(pairs))
    # One row per pair: weight (offset_b - offset_a) = weight ahead
    system[edge, b] = weight
    system[edge, a] = -weight
    offset_ns = np.linalg.lstsq(
        system, weight * pairs["ahead_ns"].to_numpy(dtype=np.float64), rcond=None
    )[0]
    return offset_ns - offset_ns[lowest], ranks[lowest]


def components(a: np.ndarray, b: np.ndarray, count: int) -> np.ndarray:
    """Lowest member (count,) of the connected set of each node, for edges a - b."""
    lowest = np.arange(count)
    while len(a):
        # Labels spread along the edges until none falls any more.
        low = np.minimum(lowest[a], lowest[b])
        before = lowest.copy()
        np.minimum.at(lowest, a, low)
        np.minimum.at(lowest, b, low)
        if (lowest == before).all():
            break
    return lowest
