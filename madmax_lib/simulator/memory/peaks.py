"""How much does the fullest device of each plan hold, for millions of plans? The peak of `memory`, over products.

Only stages that can be the fullest are looked at: the first of those with equal layers, and the last.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.plans import Plans
from madmax_lib.simulator.memory.memory import by_phase, held_layers, moment_peak, stage_bytes
from madmax_lib.simulator.memory.states import default_software
from madmax_lib.specs import Transformer

__all__ = ["plans_peak_bytes"]


def plans_peak_bytes(case: Case) -> np.ndarray:
    """Peak bytes (a, b) of a product of plans, each with the software it is usually run with.

    case: with single degrees, ZeRO stages of shape (1, b), and other choices (a, 1) or (1, b). Equal to
    `peak_bytes(memory(model, plan, ...))` plan by plan.
    """
    plans, zero = case.plan, case.plan.zero[0]
    usual = {z: default_software(Plans(tp=plans.tp, pp=plans.pp, zero=z)) for z in np.unique(zero)}
    stages = _candidates(case.model, plans.pp)
    result = np.empty(plans.shape)
    for software in dict.fromkeys(usual.values()):
        columns = np.flatnonzero([usual[z] == software for z in zero])
        part = replace(case, plan=_with_columns(plans, columns), software=software)
        result[:, columns] = np.max(moment_peak(by_phase(stage_bytes(part, *stages).items())), axis=0)
    return result


def _with_columns(plans: Plans, columns: np.ndarray) -> Plans:
    """Some columns of a product."""
    choices = {name: value for name, value in vars(plans).items() if np.ndim(value) == 2 and value.shape[1] > 1}
    return replace(plans, **{name: choice[:, columns] for name, choice in choices.items()})


def _candidates(model: Transformer, pp: int) -> np.ndarray:
    """Stage, layers and mixtures of the stages that differ, each (k, 1, 1)."""
    kinds: dict[tuple, int] = {}
    for stage, held in enumerate(zip(*held_layers(model, Plan(pp=pp)), strict=True)):
        kinds.setdefault((*held, stage == 0, stage == pp - 1), stage)
    return np.array([(stage, *key[:2]) for key, stage in kinds.items()]).T[:, :, None, None]
