"""Ranks that arrive last at collectives, how often, and what that costs the others; and
the step without them.

Skew is the last arrival minus the first at the same call. Arrivals are compared by
start on timelines with one clock (after `alignment.align`, and simulated), else by
duration: the rank that spends least time in a call came last. `what_if_no_stragglers`
replays the `operations` of steps without slow ranks, stages and kinds of work.
"""

import pandas as pd

from madmax_lib.timeline.timeline import Timeline, with_origin
from madmax_lib.traces.comm.collectives import arrivals
from madmax_lib.traces.tables import largest_first, unseen_ranks
from madmax_lib.traces.waits.operations import operations
from madmax_lib.traces.waits.without_stragglers import what_if_no_stragglers

__all__ = ["operations", "skew", "stragglers", "what_if_no_stragglers"]

_LEVEL = 0.05  # chance that any rank is taken for a straggler where all are alike


def skew(timeline: Timeline) -> pd.DataFrame:
    """One row per call that several ranks made together, in order of time.

    call, step, group, collective, ranks (how many), size_bytes (mean over ranks),
    first_s (earliest start, from the first span of the timeline), transfer_s (shortest
    duration), skew_s, last_rank (lowest of those that are equally late), wait_s and
    exposed_wait_s (of all other ranks), bus_bytes_per_s (of the shortest duration).
    """
    table = arrivals(timeline)
    how = {
        "step": "min",
        "group": "first",
        "collective": "first",
        "rank": "size",
        "size_bytes": "mean",
        "start_s": "min",
        "duration_s": "min",
        "skew_s": "first",
        "last_rank": "first",
        "wait_s": "sum",
        "exposed_wait_s": "sum",
        "bus_bytes_per_s": "max",
    }
    names = {"rank": "ranks", "start_s": "first_s", "duration_s": "transfer_s"}
    result = table.groupby("call").agg(how).rename(columns=names).reset_index()
    result = result.sort_values(["first_s", "call"], ignore_index=True)
    return with_origin(result, table)


def stragglers(timeline: Timeline) -> pd.DataFrame:
    """One row per rank that shares calls with another, the costliest first.

    rank. calls: shared with other ranks. last: in how many of them it arrived last and
    someone waited, share: last over calls, 0..1. cost_s: what the others waited for it,
    exposed_cost_s: not under their compute. waited_s,
    exposed_waited_s: what it waited for others. `.attrs["by"]` as in `arrivals`;
    `.attrs["often_last"]` has the ranks that are last more often than chance makes any
    of equal ones, `.attrs["limits"]` what cannot be told.
    """
    table = arrivals(timeline)
    by_rank = table.groupby("rank")
    late = table[table["skew_s"] > 0].groupby("last_rank")
    calls = by_rank.size()
    # ranks that are never last have no row
    last = late["call"].nunique().reindex(calls.index, fill_value=0)
    columns = {
        "calls": calls,
        "last": last,
        "share": last / calls,
        "cost_s": late["wait_s"].sum(),
        "exposed_cost_s": late["exposed_wait_s"].sum(),
        "waited_s": by_rank["wait_s"].sum(),
        "exposed_waited_s": by_rank["exposed_wait_s"].sum(),
    }
    result = pd.DataFrame(columns, index=calls.index).fillna(0.0).reset_index()
    result = largest_first(result, "cost_s", "rank")
    often_last = _often_last(table, result)
    limits = unseen_ranks(timeline)
    return with_origin(result, table, often_last=often_last, limits=limits)


def _often_last(table, result):
    """Ranks that arrive last more often than chance explains: a binomial test with
    Bonferroni's correction.
    """
    from scipy.stats import binom

    late = table[table["skew_s"] > 0]
    chance = 1 / late.groupby("call")["rank"].transform("size")
    by_rank = chance.groupby(late["rank"]).agg(["size", "mean"]).reindex(result["rank"])
    # P(last at least so often | each call has a random last rank), for each of the
    # ranks
    odds = binom.sf(result["last"] - 1, *by_rank.to_numpy().T) * len(result)
    return result["rank"][(result["last"] > 0) & (odds < _LEVEL)].tolist()
