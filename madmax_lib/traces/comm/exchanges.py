"""Bytes from rank to rank in uneven all-to-alls, and how unevenly the ranks receive.

Traces record the rows that a rank sends to each member of the group and gets from each
(`In split size` and `Out split size` of all_to_allv, which experts and embedding tables
use); all rows of a message are as long.
"""

import numpy as np
import pandas as pd

from madmax_lib.base.fields import require_type
from madmax_lib.timeline import Timeline, with_origin
from madmax_lib.traces.comm.call_metadata import call_metadata, members


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
    is_uneven = (records["in_splits"] + records["out_splits"] != "").to_numpy()
    records = records[is_uneven & (records["collective"] == "all_to_all")]
    # Calls without a sequence number are counted.
    numbered = records["sequence"] >= 0
    count = records.groupby(["group", "rank"]).cumcount()
    records["turn"] = records["sequence"].where(numbered, count)
    # A pair is told twice where both ranks are in the timeline: the sender counts.
    seen = set(timeline.ranks)
    rows = []
    for call in records.itertuples():
        ranks = members(call.group)
        sent = [int(text) for text in call.in_splits.split(",") if text]
        got = [int(text) for text in call.out_splits.split(",") if text]
        if not ranks or not {len(sent), len(got)} <= {0, len(ranks)}:
            continue
        pairs = [(call.rank, to, n) for to, n in zip(ranks, sent, strict=False)]
        for source, n in zip(ranks, got, strict=False):
            if source not in seen:
                pairs.append((source, call.rank, n))
        row_bytes = call.size_bytes / max(sum(sent), sum(got), 1)
        for source, target, n in pairs:
            rows.append((call.group, call.turn, source, target, n * row_bytes))
    columns = ["group", "turn", "source_rank", "target_rank", "size_bytes"]
    table = pd.DataFrame(rows, columns=columns)
    by_pair = table.groupby(["group", "source_rank", "target_rank"])["size_bytes"]
    pairs = by_pair.agg(calls="size", size_bytes="sum").reset_index()
    by_group = table[table["source_rank"].isin(seen)].groupby("group")
    imbalance = {group: _imbalance(part) for group, part in by_group}
    return with_origin(pairs, timeline, imbalance=imbalance)


def _imbalance(table):
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
