"""How many devices, days, dollars and megawatt-hours does a training take? The best plan at each number of devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.stats import norm

from madmax_lib import catalog
from madmax_lib.fields import number, whole
from madmax_lib.planner.codesign import training
from madmax_lib.planner.goodput import Goodput, practice
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.software import Software
from madmax_lib.specs import DLRM, Cluster, Transformer

__all__ = ["AMOUNTS", "Campaign", "campaign"]

_BATCH_TOKENS = {1e24: 2**22, np.inf: 2**24}  # by FLOPs of the training: 4M as LLaMA and Llama 2, 16M as Llama 3 405B
_MOST = 1 << 17  # devices
_MFU = 0.6  # no training reaches more: fewer devices are not tried
AMOUNTS = ("days", "device_hours", "usd", "mwh")
_SECONDS_PER_DAY = 86400.0
_Z = norm.ppf(0.95)


@dataclass(frozen=True, repr=False)
class Campaign:
    """What a training takes.

    table: a row per number of devices tried: devices, plan, global_batch, mfu, days, device_hours, usd and mwh (each
        with _low and _high, 90 %), goodput, and in_time, the probability of the days asked for (NaN if none were).
    best: the row that answers: of the fewest devices that are in time, or of the devices asked for.
    notes: what the figures rest on, a line each: step (samples and tokens), software, interval, goodput, price (of a
        device-hour in USD, with its source and date) and energy.
    """

    table: pd.DataFrame
    best: pd.Series
    notes: dict[str, str]

    def __repr__(self) -> str:
        row = self.best

        ends = {name: [_words(row[f"{name}{end}"]) for end in ("", "_low", "_high")] for name in AMOUNTS}
        ends = {name: f"{middle} ({low} to {high})" for name, (middle, low, high) in ends.items()}
        usd = "USD unknown" if np.isnan(row["usd"]) else f"{ends['usd']} USD"
        answer = (
            f"{row['devices']:,} devices: {ends['days']} days, {ends['device_hours']} device-hours, {usd}, "
            f"{ends['mwh']} MWh; goodput {row['goodput']:.1%}, {row['plan']}"
        )
        return "\n".join([answer, *(f"{name}: {words}" for name, words in self.notes.items())])


def _words(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def campaign(
    model: Transformer | str,
    tokens: float,
    cluster: Cluster | str,
    *,
    days: float | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    usd_per_hour: float | None = None,
    goodput: Goodput | None = None,
    parameters: Parameters | None = None,
) -> Campaign:
    """A training of a model on so many tokens, on as many devices as finish in so many days, or on devices given.

    cluster: whose nodes are multiplied; its number of nodes is not looked at. global_batch: samples; about 4 million
    tokens (16 for trainings above 1e24 FLOPs) that divide well if None. software: only what it launches, priced as it
    overlaps; None as in `search`. The plan is the best of `Space.quick()`; days, money and energy are those of
    `training`, which knows failures and what trainings take over such predictions.
    Raises ValueError unless either days or devices are given, where no plan fits, and where no number of devices is in
    time.

    >>> answer = campaign("llama2-7b", 2e12, "dgx-a100", devices=256)
    >>> bool(answer.best["days_low"] < 184_320 / 256 / 24 < answer.best["days_high"])  # hours of its model card
    True
    """
    model, cluster = catalog.model(model), catalog.cluster(cluster)
    if isinstance(model, DLRM):
        raise ValueError(f"{model.name}: recommendation models have no search")
    if (days is None) == (devices is None):
        raise ValueError("either days or devices says what is asked for")
    sequence = model.sequence if sequence is None else whole("sequence", sequence, 1)
    options = {"sequence": sequence, "dtype": dtype, "software": software, "parameters": parameters}
    job = _Job(model, cluster, number("tokens", tokens, positive=True), global_batch, options)
    costs = {"usd_per_hour": usd_per_hour, "model": model, "goodput": goodput}
    if devices is not None:
        rows = [_row(job, whole("devices", devices, 1), costs)]
    else:
        rows = _first_in_time(job, number("days", days, positive=True), costs)
    table = pd.DataFrame(rows)
    sigma = np.log(table["days_high"] / table["days"]) / _Z
    table["in_time"] = norm.cdf(np.log((days or np.nan) / table["days"]) / sigma)
    best = table.iloc[-1]
    return Campaign(table, best, _notes(job, best, costs))


@dataclass(frozen=True)
class _Job:
    """What is trained, on nodes of which cluster, and what a search is told beside."""

    model: Transformer
    cluster: Cluster
    tokens: float
    global_batch: int | None
    options: dict

    @property
    def flops(self) -> float:
        """Of the training: three forward passes for every token."""
        sequence = self.options["sequence"]
        return 3 * self.model.forward_flops(1, sequence) / sequence * self.tokens

    def counts(self, days: float) -> list[int]:
        """Numbers of devices, whole nodes and three in each octave, from the fewest that may be in time."""
        node = self.cluster.devices_per_node
        nodes = sorted({step * 2**power // 4 for power in range(18) for step in (4, 5, 6)} - {0})
        counts = [node * count for count in nodes if node * count <= _MOST]
        least = self.flops / (_MFU * self.cluster.device.peak(self.options["dtype"]) * days * _SECONDS_PER_DAY)
        return [count for count in counts if count >= least] or counts[-1:]

    def batch(self, devices: int) -> int:
        """Samples of a step; a default is a multiple of what odd numbers of nodes leave."""
        if self.global_batch is not None:
            return self.global_batch
        tokens = next(size for most, size in _BATCH_TOKENS.items() if self.flops <= most)
        samples = max(tokens // self.options["sequence"], 1)
        unit = min(64, samples) * devices // (devices & -devices)
        return max(round(samples / unit), 1) * unit


def _row(job: _Job, devices: int, costs: dict) -> dict:
    """The best plan on so many devices and what the training then takes. Raises ValueError where none fits."""
    cluster, batch = _resized(job, devices), job.batch(devices)
    found = search(job.model, cluster, batch, top=1, space=Space.quick(), progress=False, **job.options)
    row = training(found.table, job.tokens, cluster, **costs).iloc[0].to_dict()
    ends = [f"{name}{end}" for name in AMOUNTS for end in ("", "_low", "_high")]
    kept = {name: row.get(name, np.nan) for name in ("plan", "stacks", "mfu", *ends, "goodput")}
    return {"devices": devices, "global_batch": batch, **kept}


def _resized(job: _Job, devices: int) -> Cluster:
    """So many devices in whole nodes, or in a part of one."""
    node = min(devices, job.cluster.devices_per_node)
    if devices % node:
        near = f"nearest: {devices // node * node}, {(devices // node + 1) * node}"
        raise ValueError(f"devices={devices} are not whole nodes of {node} of {job.cluster.name}; {near}")
    return replace(job.cluster, devices_per_node=node, nodes=devices // node)


def _first_in_time(job: _Job, days: float, costs: dict) -> list[dict]:
    """Rows of the numbers of devices that were tried; the last is the fewest in time.

    More devices are no more efficient, so that a number which takes so many times the days needs as many times more.
    """
    counts, rows, least, reason = job.counts(days), [], 0.0, ""
    for count in counts:
        if count < least:
            continue
        try:
            rows.append(_row(job, count, costs))
        except ValueError as error:
            if not re.search("fits|no layout|no plan", str(error)):
                raise
            reason = str(error)
            continue
        if rows[-1]["days"] <= days:
            return rows
        least = count * rows[-1]["days"] / days
    best = min(rows, key=lambda row: row["days"], default=None)
    said = (
        f"{best['devices']:,} take {best['days']:.3g} days of {best['global_batch']:,} samples a step"
        if best
        else reason
    )
    raise ValueError(f"no number of devices up to {counts[-1]:,} is in time: {said}; a larger batch may be")


def _notes(job: _Job, best: pd.Series, costs: dict) -> dict[str, str]:
    """What the figures rest on."""
    device, software, sequence = job.cluster.device, job.options["software"], job.options["sequence"]
    factor, goodput = practice()[0], costs["goodput"] or Goodput()
    either, batch = best["days_high"] / best["days"], best["global_batch"]
    stack = f"{getattr(software, 'name', software)}: only what it launches, timed as it overlaps"
    stacks = f"none named: timed as by tuned Megatron-Core; {' or '.join(best['stacks'].split())} launches the plan"
    interval = (
        f"90 %, a factor of {either:.2g} either way, as far as published GPU-hours of trainings lie from such "
        f"predictions at most; the middle is {factor:.2f} x the time of the plan, as their median"
    )
    return {
        "step": f"{batch:,} samples of {sequence:,} tokens, {batch * sequence / 1e6:.3g}M tokens",
        "software": stack if software else stacks,
        "interval": interval,
        "goodput": goodput.describe(int(best["devices"]), job.model.parameters),
        "price": _price(job.cluster, costs["usd_per_hour"]),
        "energy": f"of the devices alone (TDP {device.tdp_w:g} W), without hosts, network and cooling",
    }


def _price(cluster: Cluster, usd_per_hour: float | None) -> str:
    """USD of a device-hour, with its source and date."""
    if usd_per_hour is not None:
        return f"{usd_per_hour:g} USD/h as given"
    table = catalog.table("devices")
    row = table[(table["name"] == cluster.device.name) & (table["quantity"] == "price")]
    if row.empty:
        return f"no price of {cluster.device.name} is known; give usd_per_hour (--usd-per-hour)"
    price = row.iloc[-1]
    return f"{price['value']} USD/h of a device, {price['source']}, {price['date']}; other terms: usd_per_hour"
