"""Devices, days, dollars and megawatt-hours of a training, with the best plan at each
number of devices.
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.stats import norm

from madmax_lib import catalog
from madmax_lib.base.fields import require_int, require_number, require_type
from madmax_lib.catalog import Cluster, Software, Transformer
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.money.codesign import training
from madmax_lib.planner.money.goodput import Goodput, practice
from madmax_lib.planner.search import check_case, search, stacks_of
from madmax_lib.planner.space import Space
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
    the devices. software: only what it launches, timed as it overlaps; if None the
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
