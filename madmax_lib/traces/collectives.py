"""Who waits for whom? A collective's time on a rank is transfer plus waiting for the last rank to arrive.

Collectives are matched across ranks as the k-th occurrence of the same process group, name and step. The shortest
duration among the ranks approximates the transfer, and its rank arrived last; what the others spend above it is
waiting. Only durations are compared, so the clocks of the ranks need not agree. Traces that do not name process
groups are taken as one group, which is wrong where several groups run the same collective.
"""

from __future__ import annotations

import pandas as pd

from madmax_lib.timeline import Timeline
from madmax_lib.units import NS_PER_S

__all__ = ["waiting"]


def waiting(timeline: Timeline) -> pd.DataFrame:
    """Waiting inside collectives: rank, waits_for, count, wait_s; one row per pair of ranks that occurs.

    Steps in which the number of occurrences of a collective differs between its ranks cannot be matched and are left
    out; `.attrs["unmatched"]` has {name: spans left out}. `.attrs["one_group_assumed"]` is true for three or more ranks
    without named process groups. Empty for a single rank.
    """
    keys = ["group", "name", "step"]
    comm = timeline.spans[timeline.spans["kind"] == "comm"].sort_values("start_ns", kind="stable")
    comm = comm.assign(group=comm["group"].astype(object).fillna(""), name=comm["name"].astype(str))
    ranks_of = comm.groupby(["group", "name"])["rank"].transform("nunique")
    calls = comm.groupby([*keys, "rank"])["dur_ns"].transform("size")
    grouped = calls.groupby([comm[key] for key in keys])
    same = (grouped.transform("min") == grouped.transform("max")) & (
        comm.groupby(keys)["rank"].transform("nunique") == ranks_of
    )
    unmatched = comm.loc[~same & (ranks_of > 1), "name"].value_counts().to_dict()
    comm = comm[same & (ranks_of > 1)].reset_index(drop=True)
    comm["turn"] = comm.groupby([*keys, "rank"]).cumcount()
    last = comm.loc[comm.groupby([*keys, "turn"])["dur_ns"].idxmin(), [*keys, "turn", "rank", "dur_ns"]]
    pairs = comm.merge(last, on=[*keys, "turn"], suffixes=("", "_last"))
    pairs = pairs[pairs["rank"] != pairs["rank_last"]]
    pairs = pairs.assign(wait_s=(pairs["dur_ns"] - pairs["dur_ns_last"]) / NS_PER_S)
    table = pairs.groupby(["rank", "rank_last"])["wait_s"].agg(["count", "sum"]).reset_index()
    table.columns = ["rank", "waits_for", "count", "wait_s"]
    assumed = len(timeline.ranks) > 2 and bool(len(comm)) and bool((comm["group"] == "").all())
    table.attrs.update(provenance=timeline.meta.provenance, unmatched=unmatched, one_group_assumed=assumed)
    return table
