"""Collectives: how long, how large and how fast each is, and which calls of the ranks
belong together.

`calls` has one row per communication span. Bandwidths follow the NCCL tests: algorithm
bandwidth is message size over time; bus bandwidth is that times 2(n-1)/n for
all-reduce, (n-1)/n for all-gather, reduce-scatter, all-to-all and gather, 1 for the
rest, so that it compares with the speed of a link (NVIDIA nccl-tests, doc/PERFORMANCE.md).

Calls of several ranks are the same call when group and sequence number agree; where the
trace has no numbers, as the k-th occurrence of the same group, collective and step;
sends and receives as the k-th between two ranks in a step. A call's time on a rank is
transfer plus waiting for the last rank to arrive. The shortest time among the ranks
approximates the transfer, and its rank arrived last: only durations are compared, so
clocks need not agree. On timelines with one clock (`alignment.align`, simulations) the
latest start counts instead. Traces that name no process groups are taken as one group,
which is wrong where several groups run the same collective.
"""

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S, pack, total
from madmax_lib.base.collectives import bus_factor
from madmax_lib.timeline import Timeline, cached_per_timeline, with_origin
from madmax_lib.timeline.accounting import exposed_ns, exposed_s
from madmax_lib.timeline.kinds import collectives_of
from madmax_lib.traces.comm.bounds import longest_transfer_s
from madmax_lib.traces.comm.call_metadata import call_metadata, members
from madmax_lib.traces.tables import ratio, unseen_ranks

_TELLS = (
    "collective",
    "group",
    "group_size",
    "dtype",
    "size_bytes",
    "sequence",
    "source_rank",
    "target_rank",
)
_TIMES = {"total_s": "sum", "mean_s": "mean", "min_s": "min", "max_s": "max"}


@cached_per_timeline
def calls(timeline: Timeline) -> pd.DataFrame:
    """One row per communication span, in order of the spans.

    row: its number in the spans. rank, stream, step. collective (as kinds.COLLECTIVES,
    and send, recv), group with its ranks ("" if unknown), group_size, dtype ("" if
    unknown), nodes (intra or inter: on one machine or several, "" if unknown; only of
    traces that name their machines), size_bytes (message by the field's convention, see
    `call_metadata`), sequence, source_rank, target_rank (-1 if unknown). start_s: from
    the first span of the timeline. duration_s, exposed_s (not under compute of its
    rank). longest_s: more than this the transfer cannot take, NaN where nothing bounds
    it, see `bounds`.
    algorithm_bytes_per_s and bus_bytes_per_s, NaN where the size is unknown or the
    duration 0. call: the same number for the same call on several ranks, -1 where there
    is only one. `.attrs["unmatched"]` has {name: spans} of calls that some ranks of a
    group made and others did not; `.attrs["one_group_assumed"]` is true for three or
    more ranks without named process groups; `.attrs["limits"]` says which ranks have no
    trace.
    """
    spans = timeline.spans
    is_call = spans["kind"] == "comm"
    # A simulated span of no bytes waits for what another call moves.
    if timeline.meta.source == "simulated":
        is_call &= spans["size_bytes"] != 0
    row = np.flatnonzero(is_call)
    comm = spans.iloc[row].reset_index(names="row")
    table = comm[["row", "rank", "stream", "step"]]
    table = table.join(call_metadata(timeline, row)[list(_TELLS)])
    duration_s = comm["dur_ns"] / NS_PER_S
    factor = bus_factor(table["collective"], table["group_size"])
    table["start_s"] = (comm["start_ns"] - spans["start_ns"].min()) / NS_PER_S
    table["duration_s"] = duration_s
    sized = table.assign(bus_bytes=table["size_bytes"] * factor)
    table["longest_s"] = longest_transfer_s(timeline, sized)
    table["exposed_s"] = _exposed_s(timeline, comm, comm["dur_ns"])
    table["algorithm_bytes_per_s"] = ratio(table["size_bytes"], duration_s)
    table["bus_bytes_per_s"] = table["algorithm_bytes_per_s"] * factor
    table["call"], lost = _match(table, comm["start_ns"])
    is_matched = (table["call"] >= 0).any()
    # With two ranks one group is no assumption: there is only one.
    several = len(timeline.ranks) > 2
    unnamed = bool(several and is_matched and (table["group"] == "").all())
    unmatched = comm.loc[lost, "name"].astype(str).value_counts().to_dict()
    if "hosts" in timeline.meta.provenance:
        table.insert(table.columns.get_loc("dtype"), "nodes", _nodes(timeline, table))
    about = {"unmatched": unmatched, "one_group_assumed": unnamed}
    return with_origin(table, timeline, **about, limits=unseen_ranks(timeline))


def _nodes(timeline, table):
    """Whether each call (n,) stays on one machine or not, "" where that is not known."""
    hosts = timeline.meta.provenance["hosts"]
    source = table["source_rank"]
    target = table["target_rank"]
    # a message is between two ranks, whatever the group
    pair = "[" + source.astype(str) + ", " + target.astype(str) + "]"
    who = table["group"].mask((source >= 0) & (target >= 0), pair)
    nodes = {}
    for name, part in table.groupby(who):
        # all ranks of the group, or those that have a trace
        in_group = members(name)
        ranks = in_group or part["rank"].unique()
        names = {hosts.get(str(rank), "") for rank in ranks}
        nodes[name] = ""
        if len(names - {""}) > 1:
            nodes[name] = "inter"
        elif in_group or len(ranks) >= part["group_size"].max():
            nodes[name] = "" if "" in names else "intra"
    return who.map(nodes)


@cached_per_timeline
def arrivals(timeline: Timeline) -> pd.DataFrame:
    """The calls that are matched across ranks, one row per call and rank, sorted by
    call and rank.

    Columns of `calls`, and last_rank (arrived last), wait_s (waited for it),
    exposed_wait_s (the part of the waiting that no compute hides) and skew_s (last
    arrival - first arrival of the call). `.attrs["by"]` says how arrivals are
    compared: by "start" on timelines with one clock, else by "duration".
    """
    several = timeline if len(timeline.ranks) > 1 else timeline.select(ranks=[])
    return _arrivals(timeline, calls(several))


def exposed_by_collective(timeline: Timeline) -> pd.DataFrame:
    """Communication by collective: rank, collective, count, comm_s, exposed_s (not
    under compute), size_bytes.

    Collectives that run side by side each count in full, so the exposed times of a rank
    can sum to more than its exposed_comm_s. size_bytes is NaN when a span of the
    collective does not tell its size.
    """
    spans = timeline.spans
    comm = spans[spans["kind"] == "comm"]
    compute = spans[spans["kind"] == "compute"]
    # in the words of `calls`: NCCL runs an all-to-all under the name of a send
    collective = calls(timeline).set_index("row")["collective"].reindex(comm.index)
    if collective.isna().any():  # simulated waits are no calls: by the names of all
        names = comm["name"].cat.remove_unused_categories()
        of_name = collectives_of(timeline, list(names.cat.categories))
        collective = of_name[names.cat.codes]
    rows = []
    for (rank, name), part in comm.groupby([comm["rank"], collective]):
        comm_ns = total(pack(part["start_ns"], part["dur_ns"]))
        row = (
            int(rank),
            name,
            len(part),
            comm_ns / NS_PER_S,
            exposed_s(part, compute),
            part["size_bytes"].sum(skipna=False),
        )
        rows.append(row)
    columns = [
        "rank",
        "collective",
        "count",
        "comm_s",
        "exposed_s",
        "size_bytes",
    ]
    return with_origin(pd.DataFrame(rows, columns=columns), timeline)


def unseen_waits(timeline: Timeline, table: pd.DataFrame) -> pd.DataFrame:
    """`calls` with unseen_s, exposed_unseen_s: how long, at least, a call that one rank
    alone shows waits for others.

    The waiting comes first in a call, the transfer last.
    """
    spans = timeline.spans.iloc[table["row"]].reset_index(drop=True)
    # More than the longest transfer must be waiting; matched calls show their waiting.
    beyond_s = (table["duration_s"] - table["longest_s"]).where(table["call"] < 0)
    beyond_s = beyond_s.fillna(0.0).clip(lower=0.0)
    beyond_ns = np.rint(beyond_s * NS_PER_S).astype("int64")
    # Waiting comes first in a call: from its start on.
    exposed_s = _exposed_s(timeline, spans, beyond_ns)
    return table.assign(unseen_s=beyond_s, exposed_unseen_s=exposed_s)


def _exposed_s(timeline, spans, dur_ns):
    """Seconds (n,) that no compute hides, of so much time from the start of spans on."""
    exposed = exposed_ns(timeline, spans["rank"], spans["start_ns"], dur_ns)
    return exposed / NS_PER_S


def waiting(timeline: Timeline) -> pd.DataFrame:
    """Waiting inside collectives: rank, waits_for, count, wait_s; one row per pair of
    ranks that occurs.

    Calls that cannot be matched are left out; for `.attrs` see `calls`. Empty for a
    single rank.
    """
    pairs = arrivals(timeline)
    pairs = pairs[pairs["rank"] != pairs["last_rank"]]
    pairs = pairs.rename(columns={"last_rank": "waits_for"})
    by_pair = pairs.groupby(["rank", "waits_for"])["wait_s"]
    table = by_pair.agg(count="count", wait_s="sum").reset_index()
    return with_origin(table, pairs)


def by_group(timeline: Timeline) -> pd.DataFrame:
    """One row per process group and collective, over all ranks, longest total first.

    group, collective, group_size, dtype and nodes (several joined by a comma), ranks (seen),
    count (spans), calls (what several ranks did together counts once), size_bytes (of
    all calls, NaN if one is unknown). total_s, mean_s, min_s, max_s of the spans,
    exposed_s in all. transfer_s: sum over the calls of the shortest time among the
    ranks; where only one is seen, it includes waiting up to the longest_s of `calls`,
    and what exceeds that is waiting. wait_s, exposed_wait_s: waiting of all ranks, and
    the part of it in exposed_s. skew_s, skew_max_s: last arrival - first arrival, mean
    and largest. NaN where no call is matched. algorithm_bytes_per_s, bus_bytes_per_s:
    size over transfer, of the calls that tell their size. `.attrs["limits"]`: what cannot
    be told.
    """
    every = calls(timeline)
    waits = _arrivals(timeline, every).set_index("row")
    waits = waits[["wait_s", "exposed_wait_s", "skew_s"]]
    table = _with_every_call(unseen_waits(timeline, every).join(waits, on="row"))
    has_unseen = table["unseen_s"] > 0
    for kind in ("", "exposed_"):
        unseen_s = table[f"{kind}unseen_s"].where(has_unseen)
        table[f"{kind}wait_s"] = table[f"{kind}wait_s"].fillna(unseen_s)
    spans = table.groupby(["group", "collective"], sort=False)
    each = _distinct_calls(table).groupby(["group", "collective"], sort=False)
    sums = each[["transfer_s", "sized_s", "sent_bytes", "bus_bytes"]].sum()
    texts = spans[[name for name in ("dtype", "nodes") if name in table]]
    result = pd.DataFrame(
        {
            "group_size": spans["group_size"].max(),
            **texts.agg(lambda values: ", ".join(sorted(set(values) - {""}))),
            "ranks": spans["rank"].nunique(),
            "count": spans.size(),
            "calls": each.size(),
            "size_bytes": each["size_bytes"].agg(lambda sizes: sizes.sum(skipna=False)),
            **{name: spans["duration_s"].agg(how) for name, how in _TIMES.items()},
            "exposed_s": spans["exposed_s"].sum(),
            "transfer_s": sums["transfer_s"],
            "wait_s": spans["wait_s"].sum(min_count=1),
            "exposed_wait_s": spans["exposed_wait_s"].sum(min_count=1),
            "skew_s": each["skew_s"].mean(),
            "skew_max_s": each["skew_s"].max(),
            "algorithm_bytes_per_s": ratio(sums["sent_bytes"], sums["sized_s"]),
            "bus_bytes_per_s": ratio(sums["bus_bytes"], sums["sized_s"]),
        }
    )
    result = result.sort_values("total_s", ascending=False, kind="stable")
    return with_origin(result.reset_index(), every, limits=unseen_ranks(timeline))


def bandwidths(table: pd.DataFrame) -> pd.DataFrame:
    """Bandwidth of the `calls` that tell their size, what several ranks did together
    counting once.

    collective, size_bytes (mean of the ranks), bus_bytes_per_s of the rank with the
    shortest time, which hardly waits, and slowest_bytes_per_s of the one with the
    longest.
    """
    # The shortest time of a call has the highest bandwidth.
    of_call = _with_every_call(table).groupby(["collective", "call"], sort=False)
    points = of_call.agg(
        size_bytes=("size_bytes", "mean"),
        bus_bytes_per_s=("bus_bytes_per_s", "max"),
        slowest_bytes_per_s=("bus_bytes_per_s", "min"),
    )
    sized = points[(points["size_bytes"] > 0) & (points["bus_bytes_per_s"] > 0)]
    return with_origin(sized.reset_index().drop(columns="call"), table)


def _with_every_call(table):
    """`calls` in which one that was not matched has a number of its own."""
    number = pd.Series(-1 - np.arange(len(table)), index=table.index)
    return table.assign(call=table["call"].where(table["call"] >= 0, number))


def _distinct_calls(table):
    """Bytes that each call of `by_group` moved in its shortest time; bytes and sized_s only
    where both are known.
    """
    of_call = table.groupby(["group", "collective", "call"], sort=False)
    shortest = {
        "group_size": "max",
        "size_bytes": "mean",
        "duration_s": "min",
        "longest_s": "max",
        "skew_s": "first",
    }
    each = of_call.agg(shortest).reset_index()
    # what one rank alone shows is transfer up to the longest, the rest is waiting
    longest_s = each["longest_s"].where(each["call"] < 0)
    each["transfer_s"] = each["duration_s"].clip(upper=longest_s.fillna(np.inf))
    # Bytes over time only of calls that tell both.
    timed = each["size_bytes"].notna() & (each["transfer_s"] > 0)
    each["sized_s"] = each["transfer_s"].where(timed)
    each["sent_bytes"] = each["size_bytes"].where(timed)
    factor = bus_factor(each["collective"], each["group_size"])
    each["bus_bytes"] = each["sent_bytes"] * factor
    return each


def _arrivals(timeline, table):
    """`arrivals` from the table of calls."""
    aligned = "clock_offsets_s" in timeline.meta.provenance
    one_clock = aligned or timeline.meta.source == "simulated"
    every = table
    table = table[table["call"] >= 0].sort_values(["call", "rank"], ignore_index=True)
    spans = timeline.spans.iloc[table["row"]].reset_index(drop=True)
    start_ns = spans["start_ns"]
    dur_ns = spans["dur_ns"]
    of_call = table["call"]
    # The rank that spends least time in a call came last: nobody waited for it less.
    lateness_ns = start_ns if one_clock else -dur_ns
    last = lateness_ns.groupby(of_call).transform("idxmax").astype("int64")
    behind_ns = lateness_ns.to_numpy()[last] - lateness_ns
    # Nobody waits longer than the call takes.
    wait_ns = behind_ns.clip(upper=dur_ns.clip(lower=0))
    table["last_rank"] = table["rank"].to_numpy()[last]
    table["wait_s"] = wait_ns / NS_PER_S
    table["exposed_wait_s"] = _exposed_s(timeline, spans, wait_ns)
    table["skew_s"] = behind_ns.groupby(of_call).transform("max") / NS_PER_S
    return with_origin(table, every, by="start" if one_clock else "duration")


def _match(table, start_ns):
    """Number of the matched call of each row, -1 without; and which rows lack a partner
    that their group has.
    """
    rank = table["rank"]
    peers = (table["source_rank"] >= 0) & (table["target_rank"] >= 0)
    # A message belongs to its pair of ranks, whatever the group is called.
    ends = table["source_rank"].astype(str) + " > " + table["target_rank"].astype(str)
    who = table["group"].where(~peers, ends)
    what = table["collective"].where(~peers, "send_recv")
    # Sequence numbers count per group, across steps and kinds of calls.
    numbered = (table["sequence"] >= 0) & ~peers
    step = table["step"].where(~numbered, -1)
    sequence = table["sequence"].where(numbered, -1)
    keys = [who, what.where(~numbered, ""), step, sequence]
    key = table.groupby(keys, sort=False).ngroup()
    # The k-th call of a key on one rank is the k-th on the others.
    turn = start_ns.groupby([key, rank]).rank(method="first").astype("int64")
    call = table.groupby([key, turn], sort=False).ngroup()
    size = key.groupby([key, rank]).transform("size")
    in_group = rank.groupby([who, what]).transform("nunique")
    complete = rank.groupby(key).transform("nunique") == in_group
    # A rank that made fewer calls would shift the ones after the lost one.
    complete &= size.groupby(key).transform("min") == size.groupby(key).transform("max")
    # to or from whom is not known
    one_sided = table["collective"].isin(("send", "recv")) & ~peers
    # A call of one rank alone has met nobody.
    met = rank.groupby(call).transform("nunique") > 1
    matched = met & (complete | numbered) & ~one_sided
    return call.where(matched, -1), ~matched & (in_group > 1)
