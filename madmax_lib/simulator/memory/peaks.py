"""How much does the fullest device of each plan hold, for millions of plans? The peak of `memory`, over products.

Only stages that can be the fullest are looked at: the first of those with equal layers, and the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from madmax_lib.plan import DEFAULTS, Plan
from madmax_lib.simulator.memory.memory import by_phase, held_layers, moment_peak, stage_bytes
from madmax_lib.simulator.memory.states import default_stack
from madmax_lib.specs import Transformer

__all__ = ["plans_peak_bytes"]


def plans_peak_bytes(
    model: Transformer,
    degrees: Mapping[str, int],
    rows: Mapping[str, np.ndarray],
    columns: Mapping[str, np.ndarray],
    *,
    global_batch: int,
    sequence: int,
    dtype: str,
) -> np.ndarray:
    """Peak bytes (a, b) of the product of rows and columns, each with the software it is usually run with.

    degrees: dp, tp, pp, cp, ep. rows: choices of shape (a, 1); columns: zero and other choices of shape (1, b). Equal
    to `peak_bytes(memory(model, plan, ...))` plan by plan.
    """
    stage, layers, mixtures = _candidates(model, degrees["pp"])
    batches = np.ceil(global_batch / (degrees["dp"] * rows["micro_batch"]))
    zero = columns["zero"][0]
    stacks = {z: default_stack(Plan(**degrees, zero=int(z))) for z in np.unique(zero)}
    result = np.empty((len(rows["micro_batch"]), len(zero)))
    for stack in dict.fromkeys(stacks.values()):
        at = np.flatnonzero([stacks[z] == stack for z in zero])
        plans = DEFAULTS | degrees | rows | {name: choice[:, at] for name, choice in columns.items()}
        parts = stage_bytes(model, SimpleNamespace(**plans), stage, layers, mixtures, stack=stack, sequence=sequence,
                            dtype=dtype, micro_batches=batches)  # fmt: skip
        result[:, at] = np.max(moment_peak(by_phase(parts.items())), axis=0)
    return result


def _candidates(model: Transformer, pp: int) -> np.ndarray:
    """Stage, layers and mixtures of the stages that differ, each (k, 1, 1)."""
    kinds: dict[tuple, int] = {}
    for stage, held in enumerate(zip(*held_layers(model, Plan(pp=pp)), strict=True)):
        kinds.setdefault((*held, stage == 0, stage == pp - 1), stage)
    return np.array([(stage, *key[:2]) for key, stage in kinds.items()]).T[:, :, None, None]
