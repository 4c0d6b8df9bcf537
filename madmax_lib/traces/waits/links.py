"""Times of a step's collectives and messages over other links, or among more ranks.

What a transfer takes begins when the last of its ranks has come. Where others have not
left the link by then, each has its share of it, so that the times over which a link is
busy add up. The new time replaces the old one; a rank whose partners are not in the
trace waits as long as it did: what its call took beyond the shortest of its kind and
size.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from madmax_lib.base import NS_PER_S
from madmax_lib.base.collectives import bus_factor
from madmax_lib.catalog.measured_collectives import MeasuredCollectives
from madmax_lib.timeline import Timeline
from madmax_lib.traces.comm.call_metadata import members
from madmax_lib.traces.comm.collectives import calls
from madmax_lib.traces.waits.dependencies import Graph

Price = Callable[[str, int, int, float], float | None]
# groups of data parallelism, where they have names
_PARALLEL = r"\b(?:dp|fsdp|ddp|replicate|shard)\b|mesh_(?:dp|fsdp)"
_KEY = ["collective", "group_size", "size_bytes"]


def transfer_times(
    timeline: Timeline,
    graph: Graph,
    own_ns: np.ndarray,
    collectives: pd.DataFrame | Price | None,
    ranks: int | None,
    devices_per_node: int | None,
) -> np.ndarray:
    """The work (events,) before each event, with new times of transfers. Arguments and
    errors as in `what_if`.
    """
    # bytes on the busiest link grow as bus_factor(p), the message staying as it is
    table = _transfers(timeline, graph)
    more = table["group_size"] * _growth(timeline, table, ranks)
    if collectives is None:
        old = bus_factor(table["collective"], table["group_size"])
        new = bus_factor(table["collective"], more)
        grown = np.divide(new, old, out=np.ones(len(old)), where=old > 0)
        seconds = table["alone_s"] * grown
    else:
        seconds = _priced_s(table, more, collectives, devices_per_node)
        seconds = seconds.fillna(table["alone_s"])
    # Transfers that share a link stretch and shrink together: what a run of them takes
    # is scaled by the sum of their new times over that of the old ones.
    after, before = (
        (each_s + table["wait_s"]).groupby(table["run"]).transform("sum").to_numpy()
        for each_s in (seconds, table["alone_s"])
    )
    result = own_ns.copy()
    at = table["event"]
    # A transfer that took no time on any link takes the new price.
    scaled_ns = own_ns[at] * np.divide(
        after, before, out=np.ones(len(at)), where=before > 0
    )
    result[at] = np.where(before > 0, scaled_ns, seconds * NS_PER_S)
    return result


def _priced_s(table, ranks, collectives, devices_per_node):
    """Seconds (n,) of transfers by a price or a table of measured collectives, NaN
    where nobody knows.
    """
    if devices_per_node is not None and devices_per_node < 1:
        raise ValueError(f"devices_per_node={devices_per_node} must be at least 1")
    nodes = partial(_nodes, collectives, devices_per_node)
    price = (
        collectives
        if callable(collectives)
        else MeasuredCollectives(collectives).seconds
    )
    # Calls repeat: each distinct one is priced once.
    keys = pd.DataFrame(
        {
            "kind": table["price"],
            "ranks": ranks,
            "size": table["size_bytes"].fillna(0.0),
            "group": table["group"],
        }
    )
    priced = lru_cache(None)(partial(_price, price, nodes))
    seconds = [priced(*key) for key in keys.itertuples(index=False)]
    seconds = pd.Series(seconds, table.index, dtype=float)
    if len(table) and seconds.isna().all() and not callable(collectives):
        kind, size = keys[["kind", "ranks"]].iloc[0]
        raise ValueError(
            f"collectives: no row matches a call of the step, such as {kind} of "
            f"{size} ranks"
        )
    return seconds


def _transfers(timeline, graph):
    """Columns of `calls` of each transfer of the graph, its event (its end), and
    seconds: alone_s over a link of its
    own, wait_s for ranks that are not seen. run: number of those that follow each other
    without a rest of the link.
    """
    ends = 2 * np.flatnonzero(graph.slices["kind"] == "comm") + 1
    about = calls(timeline).set_index("row")
    table = about.reindex(graph.slices["row"].to_numpy()[ends // 2])[
        [*_KEY, "group"]
    ].assign(event=ends)
    table = table.dropna(subset="collective").reset_index(drop=True)
    # Tables of measured collectives have a message once, and no reduce.
    table["price"] = table["collective"].replace(
        {"send": "send_recv", "recv": "send_recv", "reduce": "broadcast"}
    )
    ready = np.zeros(len(graph.time_ns), dtype="int64")
    met = np.zeros(len(graph.time_ns), dtype=bool)
    of_ranks = np.isin(graph.why, ("work", "collective"))
    # A transfer can begin when the last of its ranks has come.
    np.maximum.at(ready, graph.target[of_ranks], graph.time_ns[graph.source[of_ranks]])
    met[graph.target[graph.why == "collective"]] = True
    at = table["event"]
    alone_ns, table["run"] = _alone(
        graph.slices.iloc[at // 2], ready[at], graph.time_ns[at]
    )
    table["alone_s"] = alone_ns / NS_PER_S
    # A rank whose partners are not seen waits for what its call takes beyond the
    # shortest call of the same kind, size and group.
    least = table.groupby([*_KEY, "group"], dropna=False)["alone_s"].transform("min")
    table["wait_s"] = np.where(met[at], 0.0, table["alone_s"] - least)
    table["alone_s"] -= table["wait_s"]
    return table


def _alone(spans, start_ns, end_ns):
    """Time that each transfer would take alone on the link of its rank, and its run; those
    in gloo's threads share it.
    """
    alone_ns = (end_ns - start_ns).astype(float)
    run = np.arange(len(spans))
    for _, places in spans.assign(place=run)[spans["stream"] < 0].groupby("rank")[
        "place"
    ]:
        places = places.to_numpy()[np.argsort(start_ns[places], kind="stable")]
        start = start_ns[places]
        end = end_ns[places]
        cuts = np.unique(np.r_[start, end])
        # (transfers, stretches between cuts): those that run side by side share a stretch
        running = (start[:, None] <= cuts[:-1]) & (end[:, None] >= cuts[1:])
        # Each of k transfers at a time has 1 / k of the link.
        alone_ns[places] = (
            running * (np.diff(cuts) / np.maximum(running.sum(axis=0), 1))
        ).sum(axis=1)
        # A new run begins where the link was free: after all earlier ends.
        rests = np.r_[True, start[1:] >= np.maximum.accumulate(end)[:-1]]
        run[places] = places[rests][np.cumsum(rests) - 1]
    return alone_ns, run


def _growth(timeline, table, ranks):
    """By what each group (n,) grows where there are so many ranks: that of all ranks,
    or of data parallelism.
    """
    world = max(timeline.meta.world_size, len(timeline.ranks))
    if ranks is None or ranks == world:
        return np.ones(len(table), dtype="int64")
    if ranks < world or ranks % world:
        raise ValueError(
            f"ranks={ranks} is not a multiple of the {world} ranks of the timeline"
        )
    # Groups of tensor or pipeline parallelism stay as they are.
    grows = (table["group_size"] == world) | table["group"].str.contains(_PARALLEL)
    if not grows.any():
        raise ValueError(
            f"ranks={ranks}: no collective of the step spans all ranks, or a "
            "group named dp"
        )
    return np.where(grows, ranks // world, 1)


def _nodes(table, per_node, kind, ranks, group):
    """On how many nodes is a group? Of so many devices each, or those of the table's
    rows; else one.
    """
    if per_node:
        # Without a list of members ranks are dealt out node by node.
        listed = members(group)
        in_group = listed if len(listed) == ranks else range(ranks)
        return len({rank // per_node for rank in in_group})
    if callable(table):
        return 1
    # A group is on as many nodes as it was measured on.
    nodes = sorted(
        table.loc[(table["collective"] == kind) & (table["ranks"] == ranks), "nodes"]
        .unique()
        .tolist()
    )
    if len(nodes) > 1:
        text = " and ".join(map(str, nodes))
        raise ValueError(
            f"devices_per_node: {kind} of {ranks} ranks was measured on {text} "
            "nodes; which is it?"
        )
    return nodes[0] if nodes else 1


def _price(price, nodes, kind, ranks, size_bytes, group):
    """Seconds of a call, NaN where nobody knows."""
    if not size_bytes > 0:
        return np.nan
    seconds = price(kind, int(ranks), nodes(kind, ranks, group), float(size_bytes))
    if seconds is not None and not seconds >= 0:
        raise ValueError(
            f"collectives: {seconds} s for {kind} of {ranks} ranks is not a time"
        )
    return np.nan if seconds is None else seconds
