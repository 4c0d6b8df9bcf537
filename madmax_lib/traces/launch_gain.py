"""What would a compiler or a CUDA graph gain? The launch graph of a measured step replayed with cheaper launches.

Three steps towards a host that costs nothing: launch calls take none of the host's time, but kernels start as long
after them as they did; kernels start at once too (a captured graph of kernels); and the host's work between launches
goes as well (a graph of the whole step, or a compiled one: the host is always ahead). What the device itself takes
stays, so that the last is what a graph can gain at most; that fused kernels also move fewer bytes is not in it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from madmax_lib.timeline import Timeline, with_origin
from madmax_lib.traces.critical_path import what_if
from madmax_lib.traces.waits.launch import launch_bound, launches

__all__ = ["launch_gain"]

_LAUNCH = r"^(cuda|cu|hip)\w*(Launch|MemcpyAsync|MemsetAsync)"


def launch_gain(timeline: Timeline) -> pd.DataFrame:
    """Time of the first step with device work under cheaper launches, one row per scenario.

    scenario (as measured, free launches, graph of kernels, graph of the step), step_s, saved_s, speedup; launches and
    bound_s: kernels launched, and device time that waited for a launch (`launch.launch_bound`), means over the ranks.
    On a timeline whose host launches nothing, as on a CPU, only the first and the last scenario exist: there the host's
    work between operators goes. Raises ValueError for a simulated timeline, whose host is not simulated.
    """
    if timeline.meta.source == "simulated":
        raise ValueError("the host of a simulated timeline is not simulated: there are no launches to be replayed")
    calls, bound = launches(timeline), launch_bound(timeline)
    step = min(set(calls["step"]) - {-1}, default=None)
    if step is not None:
        calls, bound = (table[table["step"] == step] for table in (calls, bound))
    scenarios: dict[str, dict[str, float]] = {"as measured": {"host": 1.0}}
    if len(calls):
        scenarios["free launches"] = {_LAUNCH: np.inf}
        scenarios["graph of kernels"] = {_LAUNCH: np.inf, "launch delay": np.inf}
    scenarios["graph of the step"] = {"host": np.inf, "launch delay": np.inf}
    ranks = max(len(timeline.ranks), 1)
    table = what_if(timeline, list(scenarios.values()), step).drop(columns=["faster", "factor"])
    table = table.assign(launches=len(calls) / ranks, bound_s=bound["launch_bound_s"].sum() / ranks)
    table.insert(0, "scenario", list(scenarios))
    return with_origin(table, timeline)
