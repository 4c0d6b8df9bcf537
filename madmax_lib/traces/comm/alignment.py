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
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from madmax_lib.base import NS_PER_S
from madmax_lib.timeline import Timeline, ends_ns, with_origin
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.traces.comm.collectives import calls
from madmax_lib.traces.read.events import FAR_NS

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
    ranks = np.array(timeline.ranks, dtype="int64")
    # Medians of differences; spans have whole nanoseconds.
    exact_ns, reference = _solve(_pairs(shared), ranks)
    offset_ns = np.rint(exact_ns)
    rest_ns = shared["end_ns"] - offset_ns[np.searchsorted(ranks, shared["rank"])]
    middle_ns = rest_ns.groupby(shared["call"]).transform("median")
    apart_ns = (rest_ns - middle_ns).abs()
    of_rank = apart_ns.groupby(shared["rank"])
    columns = {
        "reference": reference,
        "offset_s": offset_ns / NS_PER_S,
        "spread_s": of_rank.median() / NS_PER_S,
        "calls": of_rank.size().reindex(ranks, fill_value=0),
    }
    table = pd.DataFrame(columns, index=ranks).rename_axis("rank").reset_index()
    return with_origin(table, timeline)


def align(timeline: Timeline) -> Timeline:
    """The timeline with one clock: each rank's times shifted by its offset, so that
    collectives end together.

    meta.provenance["clock_offsets_s"] has {rank: seconds taken off}. Ranks that share
    no call with the lowest rank, directly or through others, keep the clock of the
    lowest rank that they are connected with.
    """
    table = clock_offsets(timeline)
    shift_ns = np.rint(table.set_index("rank")["offset_s"] * NS_PER_S).astype("int64")
    before = timeline.meta.provenance.get("clock_offsets_s", {})
    taken_s = {
        str(rank): before.get(str(rank), 0.0) + ns / NS_PER_S
        for rank, ns in shift_ns.items()
    }
    provenance = timeline.meta.provenance | {"clock_offsets_s": taken_s}
    meta = replace(timeline.meta, provenance=provenance)

    def shifted(table, column):
        times_ns = table[column] - shift_ns.reindex(table["rank"]).to_numpy()
        return table.assign(**{column: times_ns})

    def side_tables():
        memory = shifted(timeline.side_tables["memory"], "time_ns")
        return {**timeline.side_tables, "memory": memory}

    spans = shifted(timeline.spans, "start_ns")
    return Timeline(spans, meta, timeline.edges, SideTables(side_tables))


def _shared_ends(timeline):
    """rank, call, together (all ranks end at once) and end_ns of the matched calls, in
    order of call and rank.
    """
    table = calls(timeline)
    end_ns = ends_ns(timeline.spans.iloc[table["row"]]).to_numpy()
    # from the first: float64 medians stay exact
    table["end_ns"] = end_ns - end_ns.min(initial=FAR_NS)
    is_exchange = (table["source_rank"] < 0) & (table["collective"] == "send_recv")
    table["together"] = ~table["collective"].isin(_APART) | is_exchange
    table = table.loc[table["call"] >= 0, ["rank", "call", "together", "end_ns"]]
    return table.sort_values(["call", "rank"], ignore_index=True)


def _pairs(shared):
    """One row per pair of ranks and `together`: rank, first (lowest rank of its calls),
    ahead_ns, count.
    """
    first = shared.groupby("call")[["rank", "end_ns"]].transform("first")
    ahead_ns = shared["end_ns"] - first["end_ns"]
    ahead = shared.assign(first=first["rank"], ahead_ns=ahead_ns)
    ahead = ahead[ahead["rank"] != ahead["first"]]
    by_pair = ahead.groupby(["first", "rank", "together"])["ahead_ns"]
    return by_pair.agg(ahead_ns="median", count="size").reset_index()


def _solve(pairs, ranks):
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
    lowest = components(a, b, len(ranks))
    weight = np.sqrt(pairs["count"][use].to_numpy(float))
    ahead_ns = pairs["ahead_ns"][use].to_numpy(float)
    system = np.zeros((len(weight), len(ranks)))
    edge = np.arange(len(weight))
    # One row per pair: weight (offset_b - offset_a) = weight ahead
    system[edge, b] = weight
    system[edge, a] = -weight
    offset_ns = np.linalg.lstsq(system, weight * ahead_ns, rcond=None)[0]
    return offset_ns - offset_ns[lowest], ranks[lowest]


def components(a: np.ndarray, b: np.ndarray, count: int) -> np.ndarray:
    """Lowest member (count,) of the connected set of each node, for edges a - b."""
    ones = np.ones(len(a))
    edges = coo_array((ones, (a, b)), shape=(count, count))
    _, which = connected_components(edges, directed=False)
    _, lowest = np.unique(which, return_index=True)
    return lowest[which]
