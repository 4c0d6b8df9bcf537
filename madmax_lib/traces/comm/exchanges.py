"""Bytes from rank to rank in uneven all-to-alls, and how unevenly the ranks receive.

Traces record the rows that a rank sends to each member of the group and gets from each
(`In split size` and `Out split size` of all_to_allv, which experts and embedding tables
use); all rows of a message are as long.
"""

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type
from madmax_lib.timeline.timeline import Timeline, with_origin
from madmax_lib.traces.comm.call_metadata import call_metadata, members

__all__ = ["exchanges"]


def exchanges(timeline: Timeline) -> pd.DataFrame:
    """Bytes between each pair of ranks in uneven all-to-alls: group, source_rank,
    target_rank, calls, size_bytes.

    What a rank keeps for itself is in it. A pair is told by its sender, by its receiver
    where the timeline lacks the sender. `.attrs["imbalance"]` has for each group how
    much the rank that gets most has of the mean, from the ranks of the timeline: "mean"
    of the calls, weighted by their bytes, and the "worst". Empty without recorded
    splits.
    """
    records = require_type("timeline", timeline, Timeline).side_tables["calls"]
    recorded = ((records["in_splits"] != "") | (records["out_splits"] != "")).any()
    row = np.flatnonzero((timeline.spans["kind"] == "comm") & recorded)
    records = call_metadata(timeline, row).assign(
        rank=timeline.spans["rank"].to_numpy()[row]
    )
    records = records[
        (records["collective"] == "all_to_all")
        & (records["in_splits"] + records["out_splits"] != "")
    ]
    turn = (
        records.groupby(["group", "rank"])["sequence"]
        .cumcount()
        .where(records["sequence"] < 0, records["sequence"])
    )
    # A pair is told twice where both ranks are in the timeline: the sender counts.
    seen = set(timeline.ranks)
    rows = []
    for call in records.assign(turn=turn).itertuples():
        ranks = members(call.group)
        sent, got = (
            list(map(int, filter(None, text.split(","))))
            for text in (call.in_splits, call.out_splits)
        )
        row_bytes = call.size_bytes / max(sum(sent), sum(got), 1)
        if not ranks or not {len(sent), len(got)} <= {0, len(ranks)}:
            continue
        rows += [
            (call.group, call.turn, call.rank, to, n * row_bytes)
            for to, n in zip(ranks, sent, strict=False)
        ]
        others = ((n, at) for at, n in zip(ranks, got, strict=False) if at not in seen)
        rows += [
            (call.group, call.turn, at, call.rank, n * row_bytes) for n, at in others
        ]
    table = pd.DataFrame(
        rows, columns=["group", "turn", "source_rank", "target_rank", "size_bytes"]
    )
    by_pair = table.groupby(["group", "source_rank", "target_rank"])["size_bytes"]
    pairs = by_pair.agg(calls="size", size_bytes="sum").reset_index()
    by_group = table[table["source_rank"].isin(seen)].groupby("group")
    return with_origin(
        pairs, timeline, imbalance={group: _imbalance(part) for group, part in by_group}
    )


def _imbalance(table: pd.DataFrame):
    got = table.pivot_table(
        index="turn",
        columns="target_rank",
        values="size_bytes",
        aggfunc="sum",
        fill_value=0.0,
    )
    got = got[got.sum(axis=1) > 0].to_numpy()
    if not len(got):
        return {"mean": float("nan"), "worst": float("nan")}
    largest = got.max(axis=1)
    mean = got.mean(axis=1)
    return {
        "mean": float(largest.sum() / mean.sum()),
        "worst": float((largest / mean).max()),
    }
