"""Metadata of each communication call: collective, bytes, type, process group, peers.

From the richest source that the timeline has: metadata that Kineto writes on the call's
own row, else on the host row with the same operator id (record_param_comms), else the
c10d operator and annotation in which the call was launched (traces of 2021 to 2023; on
CPU traces the annotation is the call), else the name. Simulated calls carry size and
group themselves; the members of a group follow from the plan, peers from the
dependencies.
"""

import json
import math
import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.timeline import Timeline
from madmax_lib.timeline.kinds import collective_names, collectives_of
from madmax_lib.timeline.side_tables import SideTables
from madmax_lib.traces.read.values import dtype_bytes, recorded_dtype

_TEXTS = ("collective", "dtype", "group", "ranks", "in_splits", "out_splits")
_NUMBERS = (
    "in_elements",
    "out_elements",
    "group_size",
    "sequence",
    "source_rank",
    "target_rank",
)
_LABEL = re.compile(r"(?:c10d|nccl|rccl|gloo|mpi|ucc|hccl|xccl):+(\w+)")


def call_metadata(timeline: Timeline, row: np.ndarray) -> pd.DataFrame:
    """One row per communication span; `row` (n,) are row numbers of the timeline's
    spans.

    collective, dtype, group (with its ranks, where they are known): text, "" where
    unknown. size_bytes: the message by the field's convention, NaN where unknown: the
    buffer of an all-reduce, the larger side of an all-gather, reduce-scatter,
    all-to-all or gather. group_size. sequence, source_rank, target_rank: -1 where
    unknown. in_splits and out_splits: rows to and from each member of an uneven
    all-to-all, as text.
    """
    spans = timeline.spans.iloc[row].reset_index(drop=True)
    table = _recorded(timeline, row, spans)
    annotation, operator = _labels_around_launch(timeline, row, spans)
    annotated = _messages(timeline, annotation)
    moved = _messages(timeline, operator)
    labels = _collectives_of_labels(
        timeline, np.where(annotation >= 0, annotation, operator)
    )
    name = spans["name"].cat.remove_unused_categories()
    of_name = collectives_of(timeline, list(name.cat.categories))[name.cat.codes]
    of_name = pd.Series(of_name, dtype=object)
    table["collective"] = _first_text(table["collective"], labels, of_name)
    table["group"] = _first_text(
        table["group"], _simulated_groups(timeline, spans), spans["group"]
    )
    table["dtype"] = _first_text(table["dtype"], moved["dtype"], annotated["dtype"])
    table["group_size"] = _group_sizes(timeline, table, spans["rank"], moved["ratio"])
    # Of an all-gather the annotation has one rank's part, the message is all of them.
    parts = np.where(
        table["collective"].isin(("all_gather", "gather")), table["group_size"], 1
    )
    # From the richest source to the poorest: metadata (its larger side), the span, the
    # operator, the annotation.
    elements = table[["in_elements", "out_elements"]].max(axis=1)
    dtypes = table["dtype"]
    bytes_of = {dtype: dtype_bytes(dtype) for dtype in dtypes.unique()}
    recorded_bytes = elements * dtypes.map(bytes_of).astype("float64")
    size_bytes = recorded_bytes.where(elements >= 0).fillna(spans["size_bytes"])
    table["size_bytes"] = size_bytes.fillna(moved["larger_bytes"]).fillna(
        annotated["sum_bytes"] * parts
    )
    _set_peers(timeline, table, row, spans["rank"])
    return table.drop(columns=["ranks", "in_elements", "out_elements"])


def _recorded(timeline, row, spans):
    """Metadata on the row of a call, else on the host row with its operator id."""
    # reads nothing for no call
    tables = timeline.side_tables if len(row) else SideTables()
    records = tables["calls"].join(timeline.spans[["rank", "op", "group"]], on="row")
    records = records.astype(dict.fromkeys(_TEXTS, object))
    on_call = records["row"].isin(row)
    columns = [*_TEXTS, *_NUMBERS]
    by_row = _of_rows(records[on_call], row)[columns]
    host = records[~on_call & (records["op"] >= 0)].drop_duplicates(["rank", "op"])
    by_op = spans[["rank", "op"]].merge(host, on=["rank", "op"], how="left")[columns]
    # The row of the call itself, else the host row with its operator id.
    table = by_row.where(by_row["collective"].notna(), by_op)
    texts = table[list(_TEXTS)].fillna("")
    numbers = table[list(_NUMBERS)].astype("float64").fillna(-1).astype("int64")
    # Groups of one name differ in their ranks: they belong to the name.
    listed = texts["group"] + " [" + texts["ranks"].str.replace(",", ", ") + "]"
    is_bare = (texts["ranks"] != "") & ~texts["group"].str.contains("[", regex=False)
    texts["group"] = texts["group"].mask(is_bare, listed)
    return texts.join(numbers)


def _of_rows(table, row):
    """The first record of each row (n,), NaN without."""
    first = table.drop_duplicates("row").set_index("row")
    return first.reindex(row).reset_index(drop=True)


def _labels_around_launch(timeline, row, calls):
    """Row numbers (n,) of annotation (nccl:all_reduce) and c10d operator around the
    launch of each call, -1 without.
    """
    spans = timeline.spans
    names = timeline.spans["name"].cat
    prefixes = [
        name.split(":")[0] if _LABEL.match(name) else "" for name in names.categories
    ]
    prefix = np.array([*prefixes, ""], dtype=object)[names.codes]
    on_host = (spans["stream"] < 0).to_numpy()
    # On CPU traces the annotation is the call itself.
    annotation = np.where(on_host[row] & (prefix[row] != ""), row, -1)
    # Calls on a device, and the host calls that launched them.
    keys = ["rank", "correlation"]
    launched = calls.loc[(calls["stream"] >= 0) & (calls["correlation"] >= 0), keys]
    launch = spans[on_host & spans["correlation"].isin(launched["correlation"])]
    launch = launch.drop_duplicates(keys)[[*keys, "stream", "start_ns"]]
    launch = launched.reset_index(names="call").merge(launch, on=keys)
    launch = launch.sort_values("start_ns")
    operator = np.full(len(row), -1)
    for rows, chosen in (
        (annotation, ~np.isin(prefix, ("", "c10d"))),
        (operator, prefix == "c10d"),
    ):
        at = np.flatnonzero(on_host & chosen)
        label = spans[["rank", "stream", "start_ns"]].iloc[at].assign(row=at)
        label["end_ns"] = label["start_ns"] + spans["dur_ns"].to_numpy()[at]
        # The last label of the thread that began before the launch, if it has not
        # ended.
        around = pd.merge_asof(
            launch, label.sort_values("start_ns"), on="start_ns", by=["rank", "stream"]
        )
        around = around[around["start_ns"] < around["end_ns"]]
        rows[around["call"]] = around["row"]
    return annotation, operator


def _collectives_of_labels(timeline, label):
    """Collective named by the annotation or operator in each row of `label`; send and
    recv are kept apart.
    """
    texts = timeline.spans["name"].iloc[label].astype(object).where(label >= 0, "")
    collective_of = {"": ""}
    for text in set(texts) - {""}:
        call = _LABEL.match(text)[1]
        # c10d names calls alike for every backend; the table of kinds lists the prefixes
        # of those without kernels
        (named,) = collective_names([f"xccl:{call}"])
        side = re.match("send|recv", call)
        collective_of[text] = side[0] if side else named
    collectives = texts.map(collective_of).replace("generic", "")
    return collectives.reset_index(drop=True)


def _messages(timeline, row):
    """Tensors of the operators in each row of `row` (-1: none): sum_bytes,
    larger_bytes, ratio of two sides, dtype.
    """
    tables = timeline.side_tables if (row >= 0).any() else SideTables()
    operators = tables["operators"]
    operators = _of_rows(operators[operators["row"].isin(row)], row)
    operators = operators[["shapes", "types"]].astype(object).fillna("")
    pairs = list(zip(operators["shapes"], operators["types"], strict=True))
    # Distinct inputs are few: each is read once.
    message_of = {pair: _message(*pair) for pair in set(pairs)}
    messages = [message_of[pair] for pair in pairs]
    table = pd.DataFrame(messages, columns=_Message._fields)
    types = dict.fromkeys(_Message._fields, "float64") | {"dtype": object}
    return table.astype(types)


class _Message(NamedTuple):
    """Tensors of one call, as its recorded inputs tell them."""

    sum_bytes: float = math.nan
    larger_bytes: float = math.nan
    ratio: float = math.nan  # of the larger to the smaller, where there are two
    dtype: str = ""


def _message(shapes, types):
    """Bytes and type of a call's tensors from recorded inputs.

    >>> _message("[[65536,64],[8192,64],[]]", '["float","float","Scalar"]')
    _Message(sum_bytes=18874368.0, larger_bytes=16777216.0, ratio=8.0, dtype='float')
    """
    try:
        pairs = list(zip(json.loads(shapes), json.loads(types), strict=False))
        named = [
            (dims, dtype) for dims, kind in pairs if (dtype := recorded_dtype(kind))
        ]
        sizes = [math.prod(dims) * dtype_bytes(dtype) for dims, dtype in named]
    except (ValueError, TypeError, AttributeError):
        sizes = []
    if not sizes:
        return _Message()
    smaller = min(sizes)
    larger = max(sizes)
    ratio = larger / smaller if len(sizes) == 2 and smaller > 0 else math.nan
    return _Message(float(sum(sizes)), float(larger), ratio, named[0][1])


def _group_sizes(timeline, table, rank, ratio):
    """Recorded, else ranks listed, else by the two sides of a gather, else ranks seen
    in the group, else the world.
    """
    group = table["group"]
    counts = {name: len(members(name)) for name in group.unique()}
    listed = group.map(counts).astype("float64")
    # The larger side of a gather is as many times the smaller as there are ranks.
    is_gather = table["collective"].isin(("all_gather", "reduce_scatter"))
    sides = ratio.where(is_gather & (ratio > 1) & (ratio % 1 == 0))
    seen = rank.groupby(group).transform("nunique").where(group != "")
    sizes = table["group_size"].astype("float64")
    sizes = sizes.where(sizes > 0)
    for other in (listed.where(listed > 0), sides, seen.where(seen > 1)):
        sizes = sizes.fillna(other)
    world_size = max(timeline.meta.world_size, len(timeline.ranks))
    return sizes.fillna(world_size).astype("int64")


def members(group: str) -> list[int]:
    """Ranks that the name of a group lists, none where the list is shortened.

    >>> members("default [0, 1]"), members("tp"), members("0 [0, 1, ..., 63]")
    ([0, 1], [], [])
    """
    inside = re.search(r"\[([^\]]*)\]", group)
    if inside is None or "..." in inside[1]:
        return []
    return [int(number) for number in re.findall(r"\d+", inside[1])]


def _simulated_groups(timeline, spans):
    """Groups of a simulated step with their ranks, as the simulator lays them: tp
    innermost, then dp, then pp.
    """
    named = pd.Series("", index=spans.index, dtype=object)
    if timeline.meta.source != "simulated":
        return named
    try:
        plan = Plan.parse(timeline.meta.provenance.get("plan", ""))
    except ValueError:  # a plan in the words of a paper
        return named
    if plan.world_size != timeline.meta.world_size:
        return named
    stride = 1
    for name in ("tp", "dp", "pp"):
        degree = getattr(plan, name)
        of_group = spans.loc[spans["group"] == name, "rank"]
        # Lowest rank of the group: the rank without its digit of this dimension.
        first = of_group - of_group // stride % degree * stride
        texts = {
            f: f"{name} {[*range(f, f + degree * stride, stride)]}"
            for f in first.unique()
        }
        named[of_group.index] = first.map(texts)
        stride *= degree
    return named


def _set_peers(timeline, table, row, rank):
    """Complete source_rank and target_rank of point-to-point calls: each side records
    the other one at most.
    """
    edges = timeline.edges
    ranks = timeline.spans["rank"].to_numpy()
    # Simulated messages: an edge between two ranks leads from sender to receiver.
    crosses = ranks[edges["source"]] != ranks[edges["target"]]
    edges = edges[crosses].drop_duplicates("source").set_index("source")
    target = edges["target"].reindex(row, fill_value=-1).to_numpy()
    # one more, which -1 (no edge) finds at the end
    reached = np.append(ranks, -1)[target]
    # In a group of two the other one is what its ranks sum to, less the own.
    pairs = {}
    for name in table["group"].unique():
        listed = members(name) if name else timeline.ranks
        pairs[name] = sum(listed) if len(listed) == 2 else np.nan
    pair = table["group"].map(pairs).where(table["group_size"] == 2)
    other = (pair - rank).fillna(-1).astype("int64")
    other = pd.Series(np.where(reached >= 0, reached, other), table.index)
    # A simulated message is recorded on the sender's side.
    collective = table["collective"]
    sends = (collective == "send") | ((collective == "send_recv") & (reached >= 0))
    sides = (
        (sends, "source_rank", "target_rank"),
        (collective == "recv", "target_rank", "source_rank"),
    )
    for side, mine, theirs in sides:
        table[mine] = table[mine].mask(side & (table[mine] < 0), rank)
        table[theirs] = table[theirs].mask(side & (table[theirs] < 0), other)


def _first_text(*columns):
    """The first of the columns that is not empty, row by row."""
    result = columns[0].astype(object)
    for column in columns[1:]:
        result = result.where(result != "", column.astype(object)).fillna("")
    return result
