"""Bound of a call's transfer: what is longer is waiting for ranks whose traces are not
here.

transfer <= latency + bytes on the busiest link / rate of that link. The link is the
slowest that a cluster of the catalog has between devices of the kind: inside a node
where the group fits into one, else between nodes.
"""

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.timeline import Timeline
from madmax_lib.traces.comm.call_metadata import members

# several times the 3 to 6 us per hop that NCCL's tuning table has for networks
# (graph/tuning.cc)
_HOP_S = 15e-6
# of the link's rate, at least: point-to-point calls of few channels reach a third
_ACHIEVED = 0.25


def longest_transfer_s(timeline: Timeline, calls: pd.DataFrame) -> pd.Series:
    """Longest transfer (n,) of each call in s, NaN where device or size is not known;
    simulated calls wait for nobody.

    calls: group, group_size, bus_bytes (on the busiest link).
    """
    device = catalog.device_named(timeline.meta.device)
    table = catalog.table("clusters")
    clusters = []
    if device and timeline.meta.source == "measured":
        names = table["name"][table["device"] == device.name]
        clusters = [catalog.cluster(name) for name in names]
    if not clusters:
        return pd.Series(np.nan, index=calls.index)
    rates = {}
    for group in calls["group"].unique():
        links = []
        for cluster in clusters:
            nodes = {rank // cluster.devices_per_node for rank in members(group)}
            links.append(cluster.intra if len(nodes) == 1 else cluster.inter)
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        rates[group] = _ACHIEVED * slowest
    hops = 2 * (calls["group_size"] - 1)  # of a ring
    return hops * _HOP_S + calls["bus_bytes"] / calls["group"].map(rates).astype(float)
