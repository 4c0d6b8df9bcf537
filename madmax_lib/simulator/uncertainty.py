"""How sure is a predicted step? The 90 % interval of log(measured / predicted), for
known stacks and for strangers.

Its variance is the sum of

    constants^2 * s' C s    what the rows leave open: C the covariance of the
                            constants, s what the step feels of each
    stranger^2              what every source has of its own
    mixture^2, rare^2,      more of it: mixtures of experts; images and stacks of
    lora^2                  several kinds, which few sources ran; LoRA
    _SCALE^2 * doublings    devices or tokens beyond those of nine in ten rows of the
                            device's family

and the half-width is `quantile` times its root. C holds the prior's width of what no
row has fixed, such as the rate of a software or a device that nobody has measured, so
strangers are wide where the step rests on what is strange about them. s follows from
the shares of the step's parts. `calibration.intervals` finds the components in sources
left out.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from madmax_lib.plan.columns import alike_rows
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.compute import Parts
from madmax_lib.simulator.rates.parameters import Parameters, bounds

COMPONENTS = ("constants", "stranger", "mixture", "rare", "lora")
# fits on at most 16, 32, 64, 128 devices: squared errors of the others grow by 0.04^2
# per doubling
_SCALE = 0.04


def log_width(steps: Steps, times: Parts, parameters: Parameters) -> np.ndarray:
    """Half-width of the 90 % interval of each step with these `step_time`, as a
    logarithm; NaN without residuals.
    """
    if "quantile" not in parameters.residuals:
        return np.full(np.shape(times["step_s"]), np.nan)
    return width_of(components(steps, times, parameters), parameters.residuals)


def width_of(parts: Parts, residuals: Mapping[str, float]) -> np.ndarray:
    """Half-widths from `components` and their sizes."""
    # constants saved before LoRA had a component of its own count it as rare
    sizes = {"lora": residuals["rare"], **residuals}
    variance = sum(sizes[name] ** 2 * np.asarray(parts[name]) for name in COMPONENTS)
    return residuals["quantile"] * np.sqrt(
        variance + _SCALE**2 * np.asarray(parts["doublings"])
    )


def components(
    steps: Steps, times: Parts, parameters: Parameters
) -> dict[str, np.ndarray]:
    """Factors of the components of the variance: `COMPONENTS`, and
    doublings.
    """
    shape = steps.shape
    plan = steps.plan
    lora = plan.lora_rank > 0
    rare = ((shape.image > 0) | (shape.model is not None)) & ~lora
    mixture = (shape.experts > 0) & ~rare & ~lora
    return {
        "constants": _open_variance(steps, times, parameters),
        "stranger": np.ones(()),
        "mixture": 1.0 * mixture,
        "rare": 1.0 * rare,
        "lora": 1.0 * lora,
        "doublings": _doublings(steps, parameters),
    }


def constant_index(
    steps: Steps, name: str, places: Mapping[str, int], field: str | None = None
) -> int | np.ndarray:
    """Row of each step's `name:class` in the covariance, by the field that says so.
    places: of each `name:group`.
    """
    field = _fields()[name] if field is None else field
    if not field:
        return places[name]
    coded = getattr(
        steps.machine if hasattr(steps.machine, field) else steps.traits, field
    )
    rows = [places[key] for key in coded.keys(name, places)]
    return rows[0] if len(rows) == 1 else np.array(rows)[coded.code]


@lru_cache(maxsize=1)
def _fields():
    """Field of `Hardware` or `SoftwareTraits` that says which constant of a name a step has;
    empty where there is one alone.
    """
    return dict(zip(bounds()["name"], bounds()["field"], strict=True))


def _open_variance(steps, times, parameters):
    """Variance of log step_s that the constants leave open, s' C s."""
    parts, slopes = parameters.slopes
    if not parts:
        return np.zeros(np.shape(times["step_s"]))
    places, covariance = parameters.uncertainty
    shares = np.array([times[part] for part in parts]) / times["step_s"]
    which = [constant_index(steps, name, places) for name in parameters.sensitivities]
    result = np.empty(shares.shape[1])
    # steps of the same constants, (n,)
    firsts, kind = alike_rows(which, result.shape)
    for number, first in enumerate(firsts):
        rows = slice(None) if len(firsts) == 1 else kind == number
        at = [index[first] if np.ndim(index) else index for index in which]
        of_parts = slopes.T @ covariance[np.ix_(at, at)] @ slopes
        result[rows] = np.einsum(
            "pn,pn->n", of_parts @ shares[:, rows], shares[:, rows]
        )
    return np.maximum(result, 0.0)


def pace(times: Parts, parameters: Parameters) -> np.ndarray:
    """Relative change of each step over that of the rate of its software, below 0."""
    of_parts = parameters.sensitivities.get("stack_rate", {})
    change_s = sum(slope * times[part] for part, slope in of_parts.items())
    return np.asarray(change_s / times["step_s"])


def shared_errors(steps: Steps, times: Parts, parameters: Parameters) -> np.ndarray:
    """Covariance (n, n) of log(measured / predicted) that the constants leave open;
    `log_width` has its diagonal.
    """
    parts, slopes = parameters.slopes
    places, covariance = parameters.uncertainty
    count = len(times["step_s"])
    # (parts, n), also where there are no parts
    shares = (
        np.array([times[part] for part in parts]).reshape(-1, count) / times["step_s"]
    )
    pulls = np.zeros((count, len(covariance)))
    for name, of_parts in zip(parameters.sensitivities, slopes, strict=True):
        np.add.at(
            pulls,
            (np.arange(count), constant_index(steps, name, places)),
            of_parts @ shares,
        )
    return parameters.residuals["constants"] ** 2 * (pulls @ covariance @ pulls.T)


def _doublings(steps, parameters):
    """Doublings of devices and tokens per sample beyond the rows of a device's family;
    unseen families have none.
    """
    scale = parameters.provenance.get("scale", {})
    plan = steps.plan
    family = steps.machine.family
    sizes = {
        "devices": plan.dp * plan.tp * plan.pp * plan.cp,
        "sequence": steps.work.sequence,
    }
    result = np.zeros(())
    for name, size in sizes.items():
        ends = [scale.get(one, {}).get(name, (1.0, np.inf)) for one in family.names]
        low, high = np.log2(ends)[family.code].T
        size = np.log2(size)
        result = result + np.maximum(size - high, 0.0) + np.maximum(low - size, 0.0)
    return result
