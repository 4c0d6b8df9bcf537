"""Hardware counters of a device beside its kernels: power, clocks, active SMs, traffic.

Samples are `Timeline.side_tables["counters"]`, as Kineto and torch's cuspy record them.
"""

import numpy as np
import pandas as pd

from madmax_lib.timeline import Timeline
from madmax_lib.traces.tables import covered, reach, stacked

# kernels beside which samples are told apart; of two at once the first counts
_KINDS = (
    "compute",
    "comm",
    "memcpy",
)
_COLUMNS = [
    "rank",
    "step",
    "counter",
    "samples",
    "mean",
    *_KINDS,
    "idle",
    "energy_j",
]


def counters(timeline: Timeline) -> pd.DataFrame:
    """Means of each counter, a row per rank, step and counter with its samples.

    mean: of the step's samples, in the unit that the counter's name tells. compute,
    comm, memcpy, idle: of those taken while such a kernel ran, or nothing did. energy_j:
    of a power counter, mean power times the time from the step's first to its last
    kernel, in joules. Empty where no counter was recorded. See also: mm.steps.
    """
    samples = timeline.side_tables["counters"]
    spans = timeline.spans
    kernels = spans[spans["kind"].isin(_KINDS)]
    kernels = kernels[kernels["stream"] >= 0]
    kernels = kernels[kernels["step"] >= 0]
    parts = []
    for (rank, step), of_step in kernels.groupby(["rank", "step"]):
        table = _of_step(samples[samples["rank"] == rank], of_step)
        if len(table):
            parts.append(table.assign(rank=rank, step=step))
    table = stacked(parts or [pd.DataFrame(columns=_COLUMNS)])
    return table.reindex(columns=_COLUMNS)


def _of_step(samples, kernels):
    """Rows of the counters in the time of a step's kernels."""
    begin_ns = kernels["start_ns"].min()
    end_ns = (kernels["start_ns"] + kernels["dur_ns"]).max()
    inside = samples[samples["time_ns"].between(begin_ns, end_ns)]
    kind = _kinds(inside["time_ns"], kernels)
    by_name = inside.groupby("name", observed=True)["value"]
    by_kind = inside.groupby(["name", kind], observed=True)["value"]
    table = by_name.agg(samples="size", mean="mean")
    table = table.join(by_kind.mean().unstack())
    table = table.rename_axis("counter").reset_index()
    is_power = table["counter"].str.contains("Power")
    power_w = table["mean"].where(is_power)
    table["energy_j"] = power_w * (end_ns - begin_ns) / 1e9
    return table


def _kinds(times_ns, kernels):
    """Kind (n,) of what ran at each time, idle where nothing did."""
    kind = np.full(len(times_ns), "idle", dtype=object)
    for each in reversed(_KINDS):
        rows = kernels[kernels["kind"] == each]
        kind[times_ns < reach(covered(rows), times_ns)] = each
    return kind
