"""The best plan again with more of each resource.

Each row is a search of its own: a resource is worth what it saves when the plan may
change with it [arXiv 2310.02784].
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import require_number, require_type
from madmax_lib.catalog import Cluster, Model
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space

# a part of the cluster, and the field of it that a resource is
_RESOURCES = {
    "compute": ("device", "peak_flops"),
    "memory_bandwidth": ("device", "memory_bandwidth_bytes_per_s"),
    "memory": ("device", "memory_bytes"),
    "intra": ("intra", "bandwidth_bytes_per_s"),
    "inter": ("inter", "bandwidth_bytes_per_s"),
}


def codesign(
    model: Model | str,
    cluster: Cluster | str,
    global_batch: int,
    factors: Sequence[float] = (0.5, 2.0, 4.0),
    **options,
) -> pd.DataFrame:
    """The best plan as the cluster is and with each of `_RESOURCES` multiplied by each
    factor.

    Columns resource ("as it is" first), factor, plan, step_s, memory_bytes, speedup and
    value: d log(speed) / d log(resource), 1 where twice the resource halves the step.
    Where no plan fits, they are NaN. options: as in `search`; the space is
    `Space.quick()` if none is given.
    """
    cluster = catalog.cluster(cluster)
    options = {"space": Space.quick(), "top": 1, "progress": False} | options
    factors = require_type("factors", factors, Iterable)
    rows = []
    for name, factor in [("as it is", 1.0), *product(_RESOURCES, factors)]:
        machine = _scaled(cluster, name, factor) if rows else cluster
        best = {"plan": "", "step_s": np.nan, "memory_bytes": np.nan}
        try:
            result = search(model, machine, global_batch, **options)
            first = result.table.iloc[0]
            # of no stack in particular, the order is that of the launched step
            best = first[[*best]].to_dict()
            best["step_s"] = first.get("launched_s", best["step_s"])
        except ValueError as error:
            if "fits" not in str(error):
                raise
        rows.append({"resource": name, "factor": factor, **best})
    table = pd.DataFrame(rows)
    table["speedup"] = table["step_s"].iloc[0] / table["step_s"]
    # "as it is" has factor 1, of which the logarithm is 0
    with np.errstate(divide="ignore", invalid="ignore"):
        table["value"] = np.log(table["speedup"]) / np.log(table["factor"])
    return table


def _scaled(cluster, resource, factor):
    """The cluster with a resource multiplied."""
    require_number(f"{resource}: factor", factor, positive=True)
    owner, field = _RESOURCES[resource]
    part = getattr(cluster, owner)
    amount = getattr(part, field)
    if resource == "compute":  # a peak for each dtype
        amount = {dtype: factor * peak for dtype, peak in amount.items()}
    else:
        amount = factor * amount
    return replace(cluster, **{owner: replace(part, **{field: amount})})
