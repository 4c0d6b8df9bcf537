"""Devices, days, dollars and megawatt-hours of a training, with the best plan at each
number of devices.

The best plan again with more of each resource, and what training then costs.

Each row is a search of its own: a resource is worth what it saves when the plan may
change with it [arXiv 2310.02784].
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd
from scipy.stats import norm

from madmax_lib import catalog
from madmax_lib.base.fields import require_int, require_number, require_type
from madmax_lib.catalog import Cluster, Software, Transformer
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.money.goodput import Goodput, practice
from madmax_lib.planner.search import check_case, search, stacks_of
from madmax_lib.planner.space import Space
from madmax_lib.simulator.power import ERROR
from madmax_lib.simulator.rates.parameters import Parameters, constants_of, software_of

# tokens of a step by FLOPs of the training: 4M as LLaMA and Llama 2, 16M as Llama 3 405B
_BATCH_TOKENS = {1e24: 2**22, np.inf: 2**24}
_MOST = 1 << 17  # devices
_NEAR = 0.2  # a default batch is so near to its tokens
# Samples of a replica are best divided by powers of two up to this, into micro-batches.
_ROUND = 64
# below which is the odd number that a batch may leave to tp, pp and cp: nodes have
# powers of two, layers and heads seldom a larger odd factor
_LEFT = 8
_MFU = 0.6  # no training reaches more: fewer devices are not tried
AMOUNTS = ("days", "device_hours", "usd", "mwh")
_SECONDS_PER_DAY = 86400.0
_SIGMAS = norm.ppf(0.95)  # half-width of a 90 % interval in standard deviations
# what a search says where no plan fits on so many devices
_NO_PLAN = re.compile("fits|no layout|no plan")


@dataclass(frozen=True, repr=False)
class Campaign:
    """Answer of a campaign.

        answer = mm.planner.campaign("llama2-7b", 2e12, "dgx-a100", days=20)
        answer.best["devices"], answer.table

    table: a row per number of devices tried: devices, plan, stacks (that it is timed
        as), global_batch, step_s and mfu of a step, days, device_hours, usd and mwh
        (each with _low and _high, 90 %), goodput, and in_time, the probability of the
        days asked for (NaN if none were).
    best: the row that answers: of the fewest devices that are in time, or of the
        devices asked for.
    notes: what the figures rest on, a line each: step (samples and tokens), software,
        space, interval, mfu, goodput, price (of a device-hour in USD, with its source
        and date) and energy.
    """

    table: pd.DataFrame
    best: pd.Series
    notes: dict[str, str]

    def __repr__(self):
        row = self.best

        def rounded(value):
            return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

        def interval(name):
            low = rounded(row[f"{name}_low"])
            high = rounded(row[f"{name}_high"])
            return f"{rounded(row[name])} ({low} to {high})"

        usd = "USD unknown" if np.isnan(row["usd"]) else f"{interval('usd')} USD"
        answer = (
            f"{row['devices']:,} devices: {interval('days')} days, "
            f"{interval('device_hours')} device-hours, {usd}, "
            f"{interval('mwh')} MWh; goodput {row['goodput']:.1%}, {row['plan']}"
        )
        notes = [f"{name}: {words}" for name, words in self.notes.items()]
        return "\n".join([answer, *notes])


def campaign(
    model: Transformer | str,
    tokens: float,
    cluster: Cluster | str,
    *,
    days: float | None = None,
    devices: int | None = None,
    sure: float = 0.5,
    global_batch: int | None = None,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    usd_per_hour: float | None = None,
    goodput: Goodput | None = None,
    parameters: Parameters | None = None,
) -> Campaign:
    """A training of a model on so many tokens, on as many devices as finish in so many
    days, or on devices given.

    cluster: whose nodes are multiplied; its number of nodes is not looked at. sure: the
    probability of the days asked for. global_batch: samples; if None 4 million tokens
    (16 for trainings above 1e24 FLOPs), within 20 % the batch that divides best over
    the devices. software: only what it launches, timed with its overlaps; if None the
    fastest of five (on the first number of devices that is tried). The plan is the best
    of `Space.quick()`; days, money and energy are those of `training`, which knows
    failures and what trainings take over such predictions. For days, numbers of nodes
    are tried in steps of 1 to 2 %, but none that leaves an odd number above 7 to tp, pp
    and cp. Raises ValueError unless either days or devices are given, where no plan
    fits, and where no number of devices is in time.

    >>> answer = campaign("llama2-7b", 2e12, "dgx-a100", devices=256)
    >>> card_days = 184_320 / 256 / 24  # device-hours of its model card
    >>> bool(answer.best["days_low"] < card_days < answer.best["days_high"])
    True
    """
    if (days is None) == (devices is None):
        raise ValueError("give either days or devices")
    if not require_number("sure", sure, positive=True) < 1:
        raise ValueError(f"sure={sure:g} is a probability, below 1")
    parameters = constants_of(cluster, parameters)
    case = Case.of_step(
        model, cluster, Plan(), 1, sequence, dtype, software_of(software, parameters)
    )
    check_case(case)
    if goodput is not None:  # before the searches that it waits for
        require_type("goodput", goodput, Goodput)
    job = _Job(
        case,
        require_number("tokens", tokens, positive=True),
        global_batch,
        stacks_of(case),
        parameters,
    )
    costs = {"usd_per_hour": usd_per_hour, "model": case.model, "goodput": goodput}
    if devices is not None:
        rows = [_row(job, require_int("devices", devices, 1), costs)]
    else:
        rows = _first_in_time(
            job, require_number("days", days, positive=True), sure, costs
        )
    table = pd.DataFrame(rows)
    # days are log-normal around the prediction
    late = np.log((days or np.nan) / table["days"])
    table["in_time"] = norm.cdf(late / _sigma(table))
    best = table.iloc[-1]
    return Campaign(table, best, _notes(job, best, costs))


def _sigma(rows):
    """Standard deviation of the logarithm of the days of a row, or of a table of them."""
    return np.log(rows["days_high"] / rows["days"]) / _SIGMAS


@dataclass(frozen=True)
class _Job:
    """A training, on nodes of which cluster, and by whom."""

    case: Case  # its plan, batch and number of nodes are not looked at
    tokens: float  # of the training
    global_batch: int | None  # samples of a step; None: by the devices
    stacks: tuple[Software, ...]  # which may train
    parameters: Parameters | None  # constants of the step

    @property
    def flops(self):
        """FLOPs of the training: three forward passes for every token."""
        sample_flops = 3 * self.case.model.forward_flops(1, self.case.sequence)
        return sample_flops / self.case.sequence * self.tokens

    def counts(self, days):
        """Devices in whole nodes (or parts of large ones), 64 numbers in each octave, from the
        fewest that may be in time.
        """
        device = self.case.cluster.device
        node = self.case.cluster.devices_per_node
        # 1 to 127 times powers of two: from 64 on in steps of 1/64 to 1/128
        steps = sorted({step << power for power in range(12) for step in range(1, 128)})
        parts = [8 * step for step in steps if 8 * step < node]
        counts = [
            count for count in parts + [node * step for step in steps] if count <= _MOST
        ]
        device_flops = _MFU * device.peak(self.case.dtype) * days * _SECONDS_PER_DAY
        least = self.flops / device_flops
        promising = [
            count
            for count in counts
            if count >= least and _left(count, self.batch(count)) < _LEFT
        ]
        return promising or counts[-1:]

    def batch(self, devices):
        """Samples of a step; of those near a default the one that divides best over the
        devices.
        """
        if self.global_batch is not None:
            return self.global_batch
        tokens = next(
            size for most, size in _BATCH_TOKENS.items() if self.flops <= most
        )
        samples = max(tokens // self.case.sequence, 1)
        low = math.ceil((1 - _NEAR) * samples)
        near = np.arange(low, int((1 + _NEAR) * samples) + 1)
        # lexsort's last key counts most: little left to other degrees, then many
        # divisors, then near
        divisors = np.gcd(near, _ROUND * devices)
        order = np.lexsort((abs(near - samples), -divisors, _left(devices, near)))
        return int(near[order[0]])


def _left(devices, batch):
    """Odd part of what tp, pp and cp have to take where as many replicas as divide
    a batch take the rest.

    >>> [int(_left(3072, batch)) for batch in (2048, 2304)]
    [3, 1]
    """
    rest = devices // np.gcd(devices, batch)
    # n & -n is the largest power of two that divides n
    return rest // (rest & -rest)


def _row(job, devices, costs):
    """The best plan of any stack on so many devices and what the training takes. Raises
    ValueError where none fits.
    """
    cluster = _resized(job.case.cluster, devices)
    batch = job.batch(devices)
    case = job.case
    tables = []
    reasons = []
    for stack in job.stacks:
        try:
            result = search(
                case.model,
                cluster,
                batch,
                top=1,
                space=Space.quick(),
                software=stack,
                sequence=case.sequence,
                dtype=case.dtype,
                parameters=job.parameters,
                progress=False,
            )
            tables.append(result.table)
        except ValueError as error:
            if not _NO_PLAN.search(str(error)):
                raise
            reasons.append(str(error))
    if not tables:
        raise ValueError(reasons[0])
    # each stack's best is timed as that stack runs it
    table = min(tables, key=lambda table: table["step_s"][0])
    row = training(table, job.tokens, cluster, **costs).iloc[0].to_dict()
    ends = [f"{name}{end}" for name in AMOUNTS for end in ("", "_low", "_high")]
    names = ("plan", "stacks", "step_s", "mfu", *ends, "goodput")
    answer = {"devices": devices, "global_batch": batch}
    return answer | {name: row.get(name, np.nan) for name in names}


def _resized(cluster, devices):
    """Cluster of so many devices in whole nodes, or in a part of one."""
    node = min(devices, cluster.devices_per_node)
    if devices % node:
        near = f"nearest: {devices // node * node}, {(devices // node + 1) * node}"
        raise ValueError(
            f"devices={devices} are not whole nodes of {node} of {cluster.name}; {near}"
        )
    return replace(cluster, devices_per_node=node, nodes=devices // node)


def _first_in_time(job, days, sure, costs):
    """Rows of the numbers of devices that were tried; the last is the fewest in time.

    More devices are no more efficient, so that a number which takes so many times the
    days needs as many times more. The stack is the fastest on the first number that one
    fits on.
    """
    counts = job.counts(days)
    rows = []
    least = 0.0
    reason = ""
    for count in counts:
        if count < least:
            continue
        try:
            rows.append(row := _row(job, count, costs))
        except ValueError as error:
            if not _NO_PLAN.search(str(error)):
                raise
            reason = str(error)
            continue
        # the days that are not exceeded with the probability `sure`, over those asked
        # for
        late = row["days"] * np.exp(norm.ppf(sure) * _sigma(row)) / days
        if late <= 1:
            return rows
        fastest = tuple(stack for stack in job.stacks if stack.name == row["stacks"])
        job = replace(job, stacks=fastest)
        least = count * late
    if rows:
        best = min(rows, key=lambda row: row["days"])
        reason = (
            f"{best['devices']:,} take {best['days']:.3g} days of "
            f"{best['global_batch']:,} samples a step"
        )
    raise ValueError(
        f"no number of devices up to {counts[-1]:,} is in time: {reason}; a larger "
        "batch may help"
    )


def _notes(job, best, costs):
    """Notes on what the figures rest on."""
    device = job.case.cluster.device
    sequence = job.case.sequence
    batch = best["global_batch"]
    factor = practice()[0]
    goodput = costs["goodput"] or Goodput()
    either = best["days_high"] / best["days"]
    fastest = "only plans it launches"
    if len(job.stacks) > 1:
        stacks = ", ".join(stack.name for stack in job.stacks)
        fastest = f"the fastest of {stacks}"
    energy = f"the TDP of {device.name} is unknown"
    if device.tdp_w > 0:
        energy = (
            f"devices only (TDP {device.tdp_w:g} W), without hosts, network and cooling"
        )
    return {
        "step": (
            f"{batch:,} samples of {sequence:,} tokens, "
            f"{batch * sequence / 1e6:.3g}M tokens"
        ),
        "software": f"{best['stacks']}: {fastest}, timed with its overlaps",
        "space": (
            "what people usually run (Space.quick()); a search of the whole "
            "space may find a faster plan"
        ),
        "interval": (
            f"90 %: from days / {either:.2g} to days x {either:.2g}; all "
            "published trainings lie that near"
        ),
        "days": (
            f"the predicted steps x {factor:.2f} (the median of published "
            "trainings over predictions) / goodput"
        ),
        "mfu": (
            f"of a predicted step; {best['mfu'] * best['goodput'] / factor:.1%} "
            "over the days of the training"
        ),
        "goodput": goodput.describe(int(best["devices"]), job.case.model.parameters),
        "price": _price(job.case.cluster, costs["usd_per_hour"]),
        "energy": energy,
    }


def _price(cluster, usd_per_hour):
    """USD of a device-hour, with its source and date."""
    if usd_per_hour is not None:
        return f"{usd_per_hour:g} USD/h as given"
    table = catalog.table("devices")
    row = table[(table["name"] == cluster.device.name) & (table["quantity"] == "price")]
    if row.empty:
        return (
            f"no known price for {cluster.device.name}; give usd_per_hour "
            "(--usd-per-hour)"
        )
    price = row.iloc[-1]  # the latest
    return (
        f"{price['value']} USD/h of a device, {price['source']}, {price['date']}; "
        "other terms: usd_per_hour"
    )


_RESOURCES = ("compute", "memory_bandwidth", "memory", "intra", "inter")
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
