"""What is simulated? A training step of a model on a cluster under a plan: the value that travels through the rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from madmax_lib import catalog
from madmax_lib.software import Software
from madmax_lib.specs import Cluster, Model

if TYPE_CHECKING:
    from madmax_lib.plans import Plans

__all__ = ["Case"]

_NUMBERS = {  # field: (least, what it is)
    "global_batch": (-np.inf, "a number of samples"),
    "sequence": (0, "a number of tokens, or 0 for the model's own"),
    "jitter": (0, "at least 0, the mean delay of a rank over the time it computes, or 'measured'"),
    "imbalance": (1, "at least 1, the busiest device over the mean, or 'measured'"),
}


@dataclass(frozen=True)
class Case:
    """A training step, or with `Plans` one step per plan.

    model: what is trained; a text names one of the catalog or a `config.json`.
    cluster: where, or the name of one in the catalog, with its nodes; None where only memory is asked for.
    plan: how the model is split, a `Plan` or the columns of many.
    global_batch: samples per step over all devices (default None: as many as the pipeline wants).
    sequence: tokens per sample (default 0: the model's own).
    dtype: of the matrix products, a key of `ops.BYTES` (default bf16).
    software: that trains, a `Software` or the name of one in the catalog (default None: `none`, which is false).
    imbalance: tokens of the busiest expert device over the mean, `measured` for that in `data/spreads.csv` (default 1:
        routing was even, mostly by force, in the runs that constants are fitted to).
    jitter: mean delay of a rank behind the fastest one over the time that it computes, `measured` as for imbalance;
        delays are exponential and last for the step (default 0: the fitted rates are those of ranks that wait).
    """

    model: Model | str
    cluster: Cluster | str | None
    plan: Plans
    global_batch: int | None = None
    sequence: int = 0
    dtype: str = "bf16"
    software: Software | str | None = None
    imbalance: float | str = 1.0
    jitter: float | str = 0.0

    def __post_init__(self):
        for name in ("imbalance", "jitter"):
            if isinstance(value := getattr(self, name), str) and value == "measured":
                object.__setattr__(self, name, float(catalog.table("spreads").set_index("quantity")["value"][name]))
        for name, (least, what) in _NUMBERS.items():
            value = getattr(self, name)
            if not np.all(np.isreal(value)) or (value is not None and not np.all(value >= least)):
                raise ValueError(f"{name}={value!r} must be {what}")
        for name, named in (("model", catalog.model), ("cluster", catalog.cluster)):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, named(text))
        object.__setattr__(self, "software", catalog.software(self.software))
        object.__setattr__(self, "sequence", self.sequence or getattr(self.model, "sequence", 0))

    @property
    def tokens(self) -> float | np.ndarray:
        """Tokens of one micro-batch on one device."""
        return self.plan.micro_batch * self.sequence / self.plan.cp

    @property
    def micro_batches(self) -> float | np.ndarray:
        """Micro-batches per step and pipeline, the last one perhaps short; infinite without a global batch."""
        global_batch = np.inf if self.global_batch is None else self.global_batch
        return np.ceil(global_batch / (self.plan.dp * self.plan.micro_batch))
