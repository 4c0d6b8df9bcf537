"""The best plan again with more of each resource, and what training then costs.

Each row is a search of its own: a resource is worth what it saves when the plan may
change with it [arXiv 2310.02784].
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base.fields import require_number, require_type
from madmax_lib.catalog import Cluster, Transformer
from madmax_lib.planner.money.goodput import Goodput, practice
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space
from madmax_lib.simulator.power import ERROR

_RESOURCES = ("compute", "memory_bandwidth", "memory", "intra", "inter")
_SECONDS_PER_DAY = 86400.0
_JOULE_PER_MWH = 3.6e9


def scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """The cluster with some of its `_RESOURCES` multiplied. Raises ValueError for an
    unknown one or a factor <= 0.
    """
    for name, factor in factors.items():
        if name not in _RESOURCES:
            raise ValueError(f"resource {name!r} is not one of {', '.join(_RESOURCES)}")
        require_number(f"{name}: factor", factor, positive=True)
    factor = dict.fromkeys(_RESOURCES, 1.0) | factors
    device = cluster.device
    peaks = {kind: factor["compute"] * peak for kind, peak in device.peak_flops.items()}
    bandwidth = factor["memory_bandwidth"] * device.memory_bandwidth_bytes_per_s
    device = replace(
        device,
        peak_flops=peaks,
        memory_bandwidth_bytes_per_s=bandwidth,
        memory_bytes=factor["memory"] * device.memory_bytes,
    )
    links = {
        name: replace(
            link, bandwidth_bytes_per_s=factor[name] * link.bandwidth_bytes_per_s
        )
        for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    return replace(cluster, device=device, **links)


def codesign(
    model: Transformer | str,
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
    factors = require_type("factors", factors, Iterable)
    rows = [
        {
            "resource": "as it is",
            "factor": 1.0,
            **_best(model, cluster, global_batch, options),
        }
    ]
    for name, factor in product(_RESOURCES, factors):
        best = _best(model, scaled(cluster, {name: factor}), global_batch, options)
        rows.append({"resource": name, "factor": factor, **best})
    table = pd.DataFrame(rows)
    table["speedup"] = table["step_s"].iloc[0] / table["step_s"]
    # "as it is" has factor 1, of which the logarithm is 0
    with np.errstate(divide="ignore", invalid="ignore"):
        table["value"] = np.log(table["speedup"]) / np.log(table["factor"])
    return table


def _best(model, cluster, global_batch, options):
    options = {"space": Space.quick(), "top": 1, "progress": False} | options
    try:
        result = search(model, cluster, global_batch, **options)
    except ValueError as error:
        if "fits" not in str(error):
            raise
        return {"plan": "", "step_s": np.nan, "memory_bytes": np.nan}
    return result.table.iloc[0][["plan", "step_s", "memory_bytes"]].to_dict()


def training(
    table: pd.DataFrame,
    tokens: float,
    cluster: Cluster | str,
    usd_per_hour: float | None = None,
    *,
    model: Transformer | str | None = None,
    goodput: Goodput | None = None,
) -> pd.DataFrame:
    """Days, money and energy of training on a number of tokens with the plans of a
    search or co-design table.

    table: with tokens_per_s; also step_s, low_s and high_s for intervals, and energy_j
    (all devices) for energy.
    usd_per_hour: of a device; the catalog's, with its date in `data/devices.csv`, if
    None. model: whose states are checkpointed; without one checkpoints take no time.
    goodput: what stops the training, `Goodput()` if None. Adds goodput (share of the
    time that trains), days, device_hours, usd and mwh (of the devices; usd is NaN
    without a price, mwh left out without energy_j), each also as _low and _high: 90 %,
    from what owners published over such predictions (`goodput.practice`), or from the
    step where that is less sure, and a quarter more for energy.
    """
    cluster = catalog.cluster(cluster)
    tokens = require_number("tokens", tokens, positive=True)
    if "tokens_per_s" not in require_type("table", table, pd.DataFrame):
        raise ValueError("table of plans: column 'tokens_per_s' is missing")
    price = cluster.device.usd_per_hour
    if usd_per_hour is not None:
        price = require_number("usd_per_hour", usd_per_hour)
    parameters = 0.0 if model is None else catalog.model(model).parameters
    share = require_type("goodput", goodput, Goodput, Goodput).share(
        cluster.world_size, parameters
    )
    factor, width = practice()
    if {"step_s", "high_s"} <= {*table.columns}:
        # fmax: NaN, an unknown interval, does not count
        width = np.fmax(width, np.log(table["high_s"] / table["step_s"]))
    seconds = factor * tokens / table["tokens_per_s"] / share
    hours = seconds / 3600 * cluster.world_size
    columns = {
        "days": seconds / _SECONDS_PER_DAY,
        "device_hours": hours,
        "usd": hours * price,
    }
    if {"energy_j", "step_s"} <= {*table.columns}:
        columns["mwh"] = table["energy_j"] * seconds / table["step_s"] / _JOULE_PER_MWH
    table = table.assign(goodput=share)
    for name, value in columns.items():
        log = width
        if name == "mwh":  # power errs independently of time: squares add up
            log = np.hypot(width, np.log1p(ERROR))
        table[name] = value
        table[f"{name}_low"] = value * np.exp(-log)
        table[f"{name}_high"] = value * np.exp(log)
    return table
