"""Devices, days, dollars and megawatt-hours of a training, with the best plan at each
number of devices.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.stats import norm

from madmax_lib import catalog
from madmax_lib.base import (
    require_int,
    require_number,
    require_type,
    same_fields,
)
from madmax_lib.catalog import Cluster, Model, Software
from madmax_lib.catalog.tables import price_of
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.money.goodput import Goodput, practice
from madmax_lib.planner.search import check_case, search
from madmax_lib.planner.space import Space
from madmax_lib.simulator import estimate, usable_bytes
from madmax_lib.simulator.memory.stacks import stacks_of
from madmax_lib.simulator.power import ERROR, device_energy_j
from madmax_lib.simulator.rates.parameters import Parameters, constants_of, software_of

_LARGE = 1e24  # FLOPs of a training: beyond, steps are larger
_MOST = 1 << 17  # devices
_NEAR = 0.25  # a default batch is so near to its tokens
# Round numbers of nodes are these times powers of two: 8, 10, 12, 15, 16, ...
_ROUND = (1, 3, 5, 15)
_MFU = 0.6  # no training reaches more: fewer devices are not tried
AMOUNTS = ("days", "device_hours", "usd", "mwh")
_SECONDS_PER_DAY = 86400.0
_SIGMAS = norm.ppf(0.95)  # half-width of a 90 % interval in standard deviations
_MISS = (
    "mixtures are priced too high: DeepSeek-V3 at 1.4 times the published hours in fp8 "
    "with its batch of 63M tokens, at 1.7 with 17M, at 2.0 in bf16 too"
)
_MISS_DENSE = (
    "11 of 13 published trainings lie inside such intervals; Llama 3 8B took 1.8 and 2.0 "
    "times the predicted hours"
)
# what is said where no plan fits on so many devices, or a stack does not run one
_NO_PLAN = re.compile("fits|no layout|no plan|does not run|needs")


@dataclass(frozen=True, repr=False)
class Campaign:
    """Answer of a campaign.

        answer = mm.planner.campaign("llama2-7b", 2e12, "dgx-a100", days=20)
        answer.best["devices"], answer.table

    table: a row per number of devices tried: devices, plan, stacks (that it is timed
        as), global_batch, step_s (with low_s and high_s) and mfu of a step, days,
        device_hours, usd and mwh (each with _low and _high, 90 %), goodput, and
        in_time, the probability of the days asked for (NaN if none were).
    best: the row that answers: of the fewest devices that are in time, or of the
        devices asked for.
    notes: what the figures rest on, a line each: step (samples and tokens), software,
        space, interval, narrower (what would narrow it), mfu, goodput, price (of a
        device-hour in USD, with its source and date) and energy; hint, where another
        batch or number of devices would train a sample faster; miss, what
        is known to be off.
    """

    table: pd.DataFrame
    best: pd.Series
    notes: dict[str, str]

    __eq__ = same_fields

    def __repr__(self):
        row = self.best
        amounts = [
            "{:,.3f} ({:,.3f} to {:,.3f}) ".format(
                *row[[name, f"{name}_low", f"{name}_high"]]
            )
            + name
            for name in row[[*AMOUNTS]].dropna().index
        ]
        lines = [f"{row['devices']:,} devices: {', '.join(amounts)}; {row['plan']}"]
        lines += [f"{name}: {note}" for name, note in self.notes.items()]
        return "\n".join(lines)


def campaign(
    model: Model | str,
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
    plan: Plan | str | None = None,
    usd_per_hour: float | None = None,
    pue: float = 1.0,
    goodput: Goodput | None = None,
    parameters: Parameters | None = None,
) -> Campaign:
    """A training of a model on so many tokens, on as many devices as finish in so many
    days, or on devices given: then with the probability of those days, if any.

    cluster: whose nodes are multiplied; its number of nodes is not looked at. sure: the
    probability of the days asked for. global_batch: samples; if None 4 million tokens
    (16 for trainings above 1e24 FLOPs), within 25 % the roundest batch that divides
    over the devices. software: only what it launches, timed with its overlaps; if None the
    fastest of five (on the first number of devices that is tried). plan: that of your
    own, on as many devices as it needs; if None the best of `Space.quick()`. Days,
    money and energy are those of `training`, which knows failures and what trainings
    take over such predictions. For days alone, round numbers of nodes are tried. Raises
    ValueError without days and devices, where no plan fits, and where no number of
    devices is in time.

    >>> answer = campaign("llama2-7b", 2e12, "dgx-a100", devices=256)
    >>> card_days = 184_320 / 256 / 24  # device-hours of its model card
    >>> bool(answer.best["days_low"] < card_days < answer.best["days_high"])
    True
    """
    if days is None and devices is None:
        raise ValueError("give days=, devices= or both")
    if not require_number("sure", sure, positive=True) < 1:
        raise ValueError(f"sure={sure:g} is a probability, below 1")
    parameters = constants_of(cluster, parameters)
    case = Case.of_step(
        model,
        cluster,
        plan and Plan.parse(plan),
        1,
        sequence,
        dtype,
        software_of(software, parameters),
    )
    check_case(case)
    goodput = require_type("goodput", goodput, Goodput, Goodput)
    job = _Job(case, tokens, global_batch, stacks_of(case), parameters)
    costs = {"usd_per_hour": usd_per_hour, "model": case.model, "goodput": goodput}
    costs["pue"] = pue
    # of no plan: what is wrong with it is said before the searches
    node = _resized(case.cluster, case.cluster.devices_per_node)
    training(pd.DataFrame({"tokens_per_s": []}), tokens, node, **costs)
    if days is not None:
        require_number("days", days, positive=True)
    if plan and devices is None:
        devices = case.plan.world_size
    if devices is not None:
        rows = [_row(job, require_int("devices", devices, 1), costs)]
    else:
        rows = _first_in_time(job, days, sure, costs)
    table = pd.DataFrame(rows).drop(columns="hint_of")
    # days are log-normal around the prediction
    late = np.log((days or np.nan) / table["days"])
    table["in_time"] = norm.cdf(late / _sigma(table)).round(4)
    best = table.iloc[-1]
    notes = _notes(job, best, costs)
    if hint := getattr(rows[-1]["hint_of"], "hint", ""):
        notes["hint"] = f"use fewer devices or a larger batch: {hint}"
    return Campaign(table, best, notes)


def _sigma(rows):
    """Standard deviation of the logarithm of the days of a row, or of a table of them."""
    return np.log(rows["days_high"] / rows["days"]) / _SIGMAS


@dataclass(frozen=True)
class _Job:
    """A training, on nodes of which cluster, and by whom."""

    case: Case  # its batch and number of nodes are not looked at; plan None: the best
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
        """Devices in round numbers of whole nodes (or parts of large ones), from the
        fewest that may be in time.
        """
        device = self.case.device
        node = self.case.cluster.devices_per_node
        steps = [odd << power for power in range(15) for odd in _ROUND]
        parts = {8 * step for step in steps if 8 * step < node}
        counts = sorted(parts | {node * step for step in steps if node * step <= _MOST})
        device_flops = _MFU * device.peak(self.case.dtype) * days * _SECONDS_PER_DAY
        least = self.flops / device_flops
        return [count for count in counts if count >= least] or counts[-1:]

    def batch(self, devices):
        """Samples of a step; of those near a default the roundest that leaves no odd
        number of devices to tp, pp and cp.
        """
        if self.global_batch is not None:
            return self.global_batch
        # 4M as LLaMA and Llama 2, 16M as Llama 3 405B
        tokens = 2**22 if self.flops <= _LARGE else 2**24
        samples = max(tokens // self.case.sequence, 1)
        low, high = (1 - _NEAR) * samples, (1 + _NEAR) * samples
        plan = self.case.plan
        unit = plan.dp * plan.micro_batch if plan else 1
        near = unit * np.arange(np.ceil(low / unit), high / unit + 1e-9, dtype=np.int64)
        if not len(near):  # none that the plan divides is so near
            near = np.array([unit * max(round(samples / unit), 1)])
        # lexsort's last key counts most
        left = _odd(devices // np.gcd(devices, near))
        order = np.lexsort((abs(near - samples), _odd(near), left))
        return int(near[order[0]])


def _odd(number):
    """Odd part of whole numbers.

    >>> [int(_odd(number)) for number in (1792, 2048)]
    [7, 1]
    """
    # n & -n is the largest power of two that divides n
    return number // (number & -number)


def _row(job, devices, costs):
    """The best plan of any stack on so many devices and what the training takes. Raises
    ValueError where none fits.
    """
    cluster = _resized(job.case.cluster, devices)
    batch = job.batch(devices)
    case = job.case
    run = {"global_batch": batch, "sequence": case.sequence, "dtype": case.dtype}
    run["parameters"] = job.parameters
    answers = []
    reasons = []
    for stack in job.stacks:
        try:
            answers.append(_best(job, cluster, run | {"software": stack}))
        except ValueError as error:
            if not _NO_PLAN.search(str(error)):
                raise
            reasons.append(str(error))
    if not answers and case.plan:  # that no stack is known to run: as of its case
        answers.append(_best(job, cluster, run | {"software": case.software}))
    if not answers:
        raise ValueError(reasons[0])
    # each stack's best is timed as that stack runs it
    table, result = min(answers, key=lambda best: best[0]["step_s"][0])
    row = training(table, job.tokens, cluster, **costs).iloc[0].to_dict()
    ends = [f"{name}{end}" for name in AMOUNTS for end in ("", "_low", "_high")]
    names = ("plan", "stacks", "step_s", "low_s", "high_s", "mfu", *ends, "goodput")
    answer = {"devices": devices, "global_batch": batch, "hint_of": result}
    return answer | {name: row.get(name, np.nan) for name in names}


def _best(job, cluster, run):
    """The table of a search and its result; of the plan asked for its row, and None.
    Raises ValueError where nothing fits.
    """
    plan = job.case.plan
    if not plan:
        run = run | {"top": 1, "space": Space.quick(), "progress": False}
        result = search(job.case.model, cluster, **run)
        return result.table, result
    table = estimate(job.case.model, cluster, plan, **run)
    if not table["fits"][0]:
        raise ValueError(
            f"{plan} needs {table['memory_bytes'][0] / 1e9:,.0f} GB, "
            f"{cluster.device.name} has {usable_bytes(cluster.device) / 1e9:,.0f}"
        )
    stack = run["software"]
    table.insert(0, "plan", str(plan))
    table.insert(1, "stacks", stack.name if stack else "tuned Megatron-Core")
    if cluster.device.tdp_w > 0:
        step_j = device_energy_j(table, cluster.device)
        table["energy_j"] = cluster.world_size * step_j
    return table, None


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

    The stack is the fastest on the first number that one fits on.
    """
    counts = job.counts(days)
    rows = []
    reason = ""
    for count in counts:
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
    if rows:
        row = min(rows, key=lambda row: row["days"])
        reason = f"the fastest, {row['devices']:,}, take {row['days']:,.0f} days"
    raise ValueError(
        f"no number of devices up to {counts[-1]:,} is in time: {reason}; a larger "
        "batch may help"
    )


def _notes(job, best, costs):
    """Notes on what the figures rest on."""
    sequence = job.case.sequence
    batch = best["global_batch"]
    factor, width = practice()
    either = best["days_high"] / best["days"]
    stacks = ", ".join(stack.name for stack in job.stacks)
    device = job.case.device
    price = price_of(device, costs["usd_per_hour"])
    notes = {}
    if not device.is_measured:
        notes["device"] = (
            f"data sheet alone: no run on a {device.name} or its generation was measured"
        )
    notes |= {
        "step": (
            f"{batch:,} samples of {sequence:,} tokens, "
            f"{batch * sequence / 1e6:.3g}M tokens"
        ),
        "software": f"{best['stacks']}, timed with its overlaps; asked: {stacks}",
        "space": (
            "what people usually run (Space.quick()), of which the best plan was "
            "taken unless one was asked for"
        ),
        "interval": (
            f"90 %: from days / {either:.2f} to days x {either:.2f}: a step is known "
            f"to x {best['high_s'] / best['step_s']:.2f}, and published trainings "
            f"scatter beyond their steps by x {np.exp(width):.2f}"
        ),
        "narrower": (
            f"two measured steps narrow it to x {np.exp(width):.2f} (calibration.fit.update)"
        ),
        "days": (
            f"the predicted steps x {factor:.2f} (the median of published "
            "trainings over predictions) / goodput"
        ),
        "mfu": (
            f"of a predicted step; {best['mfu'] * best['goodput'] / factor:.1%} "
            "over the days of the training"
        ),
        "goodput": costs["goodput"].describe(
            int(best["devices"]), job.case.model.parameters
        ),
        "price": f"no price of {device.name} of this year: give --usd-per-hour"
        if np.isnan(price)
        else f"{price:g} USD/h",
        "energy": (
            "of the devices, idle and at work by shares of their TDP, without hosts and network, "
            f"x {costs['pue']:g} for cooling (PUE)"
        ),
    }
    notes["miss"] = _MISS if job.case.model.experts else _MISS_DENSE
    return notes


_JOULE_PER_MWH = 3.6e9


def training(
    table: pd.DataFrame,
    tokens: float,
    cluster: Cluster | str,
    usd_per_hour: float | None = None,
    *,
    model: Model | str | None = None,
    goodput: Goodput | None = None,
    pue: float = 1.0,
) -> pd.DataFrame:
    """Days, money and energy of training on a number of tokens with the plans of a
    search or co-design table.

    table: with tokens_per_s; also step_s, low_s and high_s for intervals, and energy_j
    (all devices) for energy.
    usd_per_hour: of a device; the catalog's if None, where that is of this year. model:
    whose states are checkpointed; without one checkpoints take no time. goodput: what
    stops the training, `Goodput()` if None. pue: energy of the site over that of the
    devices (power usage effectiveness). Adds goodput (share of the time that trains),
    days, device_hours, usd and mwh (of the devices x pue; usd is NaN without a price,
    mwh left out without energy_j), each also as _low and _high, 90 %: the interval of
    the step and what trainings scatter beyond it (`goodput.practice`), and a quarter
    more for energy. Of steps without an interval only the scatter is known.
    """
    cluster = catalog.cluster(cluster)
    tokens = require_number("tokens", tokens, positive=True)
    if "tokens_per_s" not in require_type("table", table, pd.DataFrame):
        raise ValueError("table of plans: column 'tokens_per_s' is missing")
    if not require_number("pue", pue) >= 1:
        raise ValueError(f"pue={pue:g} is energy over that of the devices, 1 or more")
    parameters = 0.0 if model is None else catalog.model(model).parameters
    share = require_type("goodput", goodput, Goodput, Goodput).share(
        cluster.world_size, parameters
    )
    factor, width = practice()
    step_width = np.log(table.get("high_s", np.nan) / table.get("step_s", 1.0))
    width = np.hypot(width, np.nan_to_num(step_width))
    seconds = factor * tokens / table["tokens_per_s"] / share
    hours = seconds / 3600 * cluster.world_size
    columns = {
        "days": seconds / _SECONDS_PER_DAY,
        "device_hours": hours,
        "usd": hours * price_of(cluster.device, usd_per_hour),
    }
    if "energy_j" in table:
        columns["mwh"] = pue * table["energy_j"] * seconds / table["step_s"]
        columns["mwh"] /= _JOULE_PER_MWH
    table = table.assign(goodput=share)
    for name, value in columns.items():
        log = width
        if name == "mwh":  # power errs independently of time: squares add up
            log = np.hypot(width, np.log1p(ERROR))
        table[name] = value
        table[f"{name}_low"] = value * np.exp(-log)
        table[f"{name}_high"] = value * np.exp(log)
    return table
