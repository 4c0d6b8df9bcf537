"""Who waits for whom? A collective's time on a rank is transfer plus waiting for the last rank to arrive.

Collectives are matched across ranks as the k-th occurrence of the same process group and name. The shortest duration
among the ranks approximates the transfer, and its rank arrived last; what the others spend above it is waiting. Only
durations are compared, so the clocks of the ranks need not agree.
"""

from __future__ import annotations

import pandas as pd

from madmax_lib.timeline import Timeline
from madmax_lib.units import NS_PER_S

__all__ = ["waiting"]


def waiting(timeline: Timeline) -> pd.DataFrame:
    """Waiting inside collectives: rank, waits_for, count, wait_s; one row per pair of ranks that occurs.

    Collectives whose number of occurrences differs between ranks cannot be matched and are left out; their names are
    in `.attrs["unmatched"]`. Empty for a single rank.
    """
    comm = timeline.spans[timeline.spans["kind"] == "comm"].sort_values("start_ns", kind="stable")
    comm = comm.assign(group=comm["group"].astype(object).fillna(""), name=comm["name"].astype(str))
    comm["turn"] = comm.groupby(["rank", "group", "name"]).cumcount()
    counts = comm.groupby(["group", "name", "rank"]).size().unstack()
    matched = counts.index[(counts.nunique(axis=1) == 1) & (counts.count(axis=1) > 1)]
    unmatched = sorted({name for _, name in counts.index.difference(matched)})
    comm = comm.set_index(["group", "name"])
    comm = comm[comm.index.isin(matched)].reset_index()
    turns = comm.groupby(["group", "name", "turn"])["dur_ns"]
    last = comm.loc[turns.idxmin(), ["group", "name", "turn", "rank", "dur_ns"]]
    pairs = comm.merge(last, on=["group", "name", "turn"], suffixes=("", "_last"))
    pairs = pairs[pairs["rank"] != pairs["rank_last"]]
    pairs = pairs.assign(wait_s=(pairs["dur_ns"] - pairs["dur_ns_last"]) / NS_PER_S)
    table = pairs.groupby(["rank", "rank_last"])["wait_s"].agg(["count", "sum"]).reset_index()
    table.columns = ["rank", "waits_for", "count", "wait_s"]
    table.attrs.update(provenance=timeline.meta.provenance, unmatched=unmatched)
    return table
