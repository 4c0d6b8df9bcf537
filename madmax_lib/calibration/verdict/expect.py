"""Verdicts on measured steps, beside their predicted distribution.

log(measured / predicted) follows Student's t with the 90 % interval of
`simulator.uncertainty`, whose width sources left out have set. Outside of it a run is
slow or suspiciously fast, faster than its matrix products take at the data sheet's rate
always; inside it is fine, unless the interval reaches farther than a factor of 1.5 from
the prediction to either side, so that its ends are more than a factor of 2.25 apart:
then nobody can tell.

Published runs most like a given one: by model, device, count, precision, sequence and
how it is split.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pandas as pd
from scipy.stats import t as student

from madmax_lib import catalog
from madmax_lib.base import require_number, require_type, same_fields
from madmax_lib.calibration.fit import usable
from madmax_lib.calibration.published.rows import (
    facts_of,
    flops_and_peaks,
    model_flops,
    read_rows,
    to_steps,
)
from madmax_lib.calibration.verdict.explain import (
    Outlook,
    causes,
    parts_of,
    timed_s,
)
from madmax_lib.catalog import Cluster, Model, Software, flops
from madmax_lib.plan import Case, Plan
from madmax_lib.simulator import usable_bytes
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    constants_of,
    shipped,
    software_of,
)
from madmax_lib.simulator.steady.step_time import step_s
from madmax_lib.timeline import Timeline

VERDICTS = ("fine", "slow", "suspiciously fast", "cannot tell")
# factor from the prediction to an end of the interval, beyond which a run inside is not
# called fine: too much may hide there
_WIDE = 1.5
_ABSURD = 1e6  # times the prediction, or a share of it: no measurement
# conventions of `catalog.flops` in which stacks print FLOP/s
_CONVENTIONS = {"megatron-core": "megatron-lm", "megatron-bridge": "megatron-bridge"}
_FREEDOM = 4.0  # of Student's t, as the components are fitted with
_INSIDE = 0.9


@dataclass(frozen=True, repr=False)
class Expectation:
    """A measured step beside what was to be expected of it.

        run = mm.expect("llama3-8b", "dgx-h100", "dp8.z3", global_batch=16, step_s=4.1)
        print(run)  # the verdict, and what it could be

    verdict: one of `VERDICTS`; reason: why, in a sentence.
    step_s: seconds of a step as measured; predicted_s, low_s, high_s: and as predicted,
        with the 90 % interval.
    percentile: 0..100, share of runs such as this that would be as fast or faster.
    floor_s: seconds of the matrix products at the data sheet's rate; no run is faster.
    parts: table of part, predicted_s, measured_s (NaN without a trace), excess_s and
        factor, by which this part alone would have to grow to explain the step (0 where
        it could vanish and not explain it).
    explanations: table of part, cause, step_s if so, and explains (of the gap in log
        time, 1 is all), with a trace also the part's predicted_s and measured_s; those
        come first whose part is off.
    case: the run.
    """

    verdict: str
    reason: str
    step_s: float
    predicted_s: float
    low_s: float
    high_s: float
    percentile: float
    floor_s: float
    parts: pd.DataFrame
    explanations: pd.DataFrame
    case: Case

    __eq__ = same_fields

    @cached_property
    def nearest(self) -> pd.DataFrame:
        """The three published runs most like this one, with their step, MFU, and
        measured over predicted.
        """
        return nearest(self.case)

    def __repr__(self):
        lines = [f"{self.verdict}: {self.reason}"]
        if self.verdict != "fine" and len(self.explanations):
            first = self.explanations.iloc[0]
            lines.append(
                f"could be: {first['cause']} ({first['part']}), then "
                f"{first['step_s']:.4g} s"
            )
        return "\n".join(lines)


def verdicts(
    measured_s: np.ndarray,
    predicted_s: np.ndarray,
    high_s: np.ndarray,
    floor_s: np.ndarray | float = 0.0,
) -> np.ndarray:
    """One of `VERDICTS` for each measured step: the rule of the module.

    predicted_s, high_s: of its distribution, whose low end is predicted_s^2 / high_s;
    NaN where nothing is known.

    >>> verdicts(np.array([1.0, 2.0, 0.5, 1.3]), 1.0, np.array([1.2, 1.2, 1.2, 1.6])).tolist()
    ['fine', 'slow', 'suspiciously fast', 'cannot tell']
    """
    measured_s = np.asarray(measured_s)
    ratio = measured_s / predicted_s
    factor = np.asarray(high_s) / predicted_s
    # the first condition that holds
    conditions = {
        "suspiciously fast": (measured_s < floor_s) | (ratio < 1 / factor),
        "slow": ratio > factor,
        "cannot tell": ~(factor <= _WIDE),  # NaN is unknown too
    }
    return np.select([*conditions.values()], [*conditions], "fine")


def expect(
    model: Model | str,
    cluster: Cluster | str,
    plan: Plan | str,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    software: str | Software | None = None,
    step_s: float | None = None,
    tokens_per_s: float | None = None,
    tokens_per_s_per_device: float | None = None,
    tflops: float | None = None,
    timeline: Timeline | None = None,
    parameters: Parameters | None = None,
) -> Expectation:
    """Whether a run is as fast as such runs are, and what to look at if not.

    model to software, parameters: the run, as in `estimate`. What was measured is one
    of step_s (seconds of a whole step, all micro-batches), tokens_per_s (of all devices
    together), tokens_per_s_per_device and tflops (1e12 model FLOP/s per device, as the
    software prints them: 6 per parameter and token, and attention, which megatron-core
    and megatron-bridge count half, as it is causal); or a timeline,
    which tells the step if none of them does, and in any case which part is off; where its
    device, ranks or work are of another run, the verdict is "cannot tell". Raises
    ValueError for a plan that cannot be laid out, for no or two measurements, for one a
    million times off, and for a recommendation model. See also: mm.estimate,
    mm.compare, mm.traces.advise.

    >>> step = {"global_batch": 16, "software": "torchtitan"}
    >>> run = expect("llama3-8b", "dgx-h100", "dp8.z3", **step, tokens_per_s=25_000)
    >>> run.verdict, round(run.percentile)
    ('slow', 100)
    """
    require_type("timeline", timeline, Timeline | None)
    parameters = constants_of(cluster, parameters)
    software = software_of(software, parameters)
    plan = Plan.parse(plan)
    case = Case.of_step(model, cluster, plan, global_batch, sequence, dtype, software)
    # which refuses what cannot be laid out
    outlook = Outlook.of(
        case, require_type("parameters", parameters, Parameters, shipped)
    )
    arguments = {
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s_per_device,
        "tflops": tflops,
    }
    source, measured_s = _measured_s(case, arguments, timeline)
    predicted_s = outlook.predicted_s
    if not 1 / _ABSURD < measured_s / predicted_s < _ABSURD:
        stated = f"{source}={arguments[source]:.4g}" if source in arguments else source
        raise ValueError(
            f"{stated}: {measured_s:.3g} s a step, but {predicted_s:.3g} s are "
            "expected; is the unit right?"
        )
    high_s = predicted_s * outlook.factor
    # ideal constants: every product at the data sheet's rate
    floor_s = Outlook.of(case, Parameters()).row["gemm_s"]
    verdict = str(verdicts(measured_s, predicted_s, high_s, floor_s))
    # of Student's t whose 90 % interval is that of the prediction
    scale = np.log(outlook.factor) / student.ppf((1 + _INSIDE) / 2, _FREEDOM)
    deviation = np.log(measured_s / predicted_s) / scale
    reason = _reason(verdict, measured_s, outlook, floor_s)
    explanations = causes(outlook, measured_s, source, timeline)
    other = explanations[explanations["part"] == "trace"]["cause"]
    if source == "timeline" and len(other):  # of another run says nothing of this one
        verdict = "cannot tell"
        reason = f"{other.iloc[0]}; {reason}"
    return Expectation(
        verdict=verdict,
        reason=reason,
        step_s=measured_s,
        predicted_s=predicted_s,
        low_s=predicted_s / outlook.factor,
        high_s=high_s,
        percentile=float(100 * student.cdf(deviation, _FREEDOM)),
        floor_s=floor_s,
        parts=parts_of(outlook, measured_s, timeline),
        explanations=explanations,
        case=case,
    )


def _measured_s(case, arguments, timeline):
    """The argument that tells the step, and its seconds. Raises ValueError unless it is
    exactly one.
    """
    stated = {
        name: require_number(name, value, positive=True)
        for name, value in arguments.items()
        if value is not None
    }
    if len(stated) > 1 or not (stated or timeline is not None):
        got = f"got {' and '.join(stated)}" if stated else "got none"
        raise ValueError(
            f"give one measurement, {', '.join(arguments)} or a timeline; {got}"
        )
    # a number beats the trace, which then only tells the parts
    if not stated:
        return "timeline", timed_s(timeline)
    ((name, value),) = stated.items()
    tokens = case.global_batch * case.sequence
    world = case.plan.world_size
    match name:
        case "step_s":
            seconds = value
        case "tokens_per_s":
            seconds = tokens / value
        case "tokens_per_s_per_device":
            seconds = tokens / (value * world)
        # 1e12 model FLOP/s of a device
        case "tflops":
            seconds = _printed_flops(case) / (value * 1e12 * world)
    return name, float(seconds)


def _printed_flops(case):
    """FLOPs of a step as the stack that trains prints them: Megatron's count the scores
    that causal attention needs, others all.
    """
    convention = _CONVENTIONS.get(case.software.name)
    if convention is None or case.plan.lora_rank:
        return model_flops(case, {})
    counted = flops(case.model, sequence=case.sequence, convention=convention)
    return case.global_batch * counted.total


def _reason(verdict, measured_s, outlook, floor_s):
    """The verdict's sentence."""
    predicted_s = outlook.predicted_s
    factor = outlook.factor
    text = (
        f"{measured_s:.4g} s a step, {measured_s / predicted_s:.2f} x the "
        f"predicted {predicted_s:.4g} s "
        f"({predicted_s / factor:.4g} to {predicted_s * factor:.4g} s)"
    )
    # faster than the hardware allows: the number or the plan is wrong
    if measured_s < floor_s:
        text += (
            f"; its matrix products alone take {floor_s:.4g} s at the data sheet's rate"
        )
    elif verdict == "cannot tell":
        text += (
            ", which is inside, but the prediction is only good to a factor of "
            f"{factor:.2f} either way"
        )
    device = outlook.case.device
    # torch's switch for it is easily forgotten
    if outlook.case.dtype == "fp32" and "tf32" in device.peak_flops:
        text += "; if torch was allowed to use TF32, name dtype tf32"
    if not outlook.row["fits"] and outlook.case.plan.offload is None:
        device_gb = usable_bytes(device) / 1e9
        needed_gb = outlook.row["memory_bytes"] / 1e9
        text += f"; the plan should not fit: {needed_gb:.0f} GB of {device_gb:.0f} GB"
    return text


_ABOUT = ["source", "model", "gpu", "n_gpus", "dtype", "software", "plan"]
_COLUMNS = [*_ABOUT, "step_s", "mfu", "over_predicted"]
_SAME_RUN = ["model", "gpu", "n_gpus", "dtype", "plan"]
_SHOWN = 3
# distance of runs a factor of two apart in a size or degree
_SIZES = {"parameters": 1.0, "devices": 0.3, "sequence": 0.5}
_DEGREES = {"tp": 0.2, "pp": 0.2, "cp": 0.2, "micro_batch": 0.05}
# and of runs that differ in one of these
_CHOICES = {
    "gpu": 1.5,
    "family": 2.0,
    "bits": 1.0,
    "kind": 3.0,
    "software": 0.5,
    "recompute": 0.3,
    "zero": 0.3,
}


def nearest(case: Case) -> pd.DataFrame:
    """The most similar rows of `data/published_train.csv`, the nearest first, of
    different models, counts or plans.

    mfu: 6 FLOPs per parameter and token, and attention, over the peak of the dtype;
    over_predicted: measured step over that of the shipped constants, which have seen
    these rows.
    """
    rows, facts = _published()
    asked = _facts(case)
    distance = np.zeros(len(rows))
    for name, weight in (_SIZES | _DEGREES).items():
        doublings = np.abs(np.log2(facts[name].to_numpy(float) / asked[name]))
        distance += weight * doublings
    for name, weight in _CHOICES.items():
        distance += weight * (facts[name] != asked[name]).to_numpy(float)
    table = rows.assign(distance=distance).sort_values("distance", kind="stable")
    table = table.drop_duplicates(_SAME_RUN).head(_SHOWN)
    return table[_COLUMNS].reset_index(drop=True)


def _facts(case):
    return facts_of(case) | {
        "parameters": case.model.active_parameters,
        "devices": case.plan.world_size,
        "sequence": case.sequence,
        "bits": case.dtype[-1],  # the last digit tells 16, 8, 4 and 32 bits apart
    }


@lru_cache(maxsize=1)
def _published():
    """Usable published rows with columns of `nearest`, and what they are compared by."""
    rows = read_rows(catalog.table("published_train"))
    rows = rows[usable(rows)].reset_index(drop=True)
    flops, peaks = flops_and_peaks(rows)
    measured_s = rows["measured_s"].to_numpy(float)
    rows = rows.assign(
        plan=[str(case.plan) for case in rows["case"]],
        step_s=measured_s,
        mfu=flops / measured_s / peaks,
        over_predicted=measured_s / step_s(to_steps(rows), shipped()),
    )
    return rows, pd.DataFrame([_facts(case) for case in rows["case"]])
