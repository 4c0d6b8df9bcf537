"""What is simulated? A training step of a model on a cluster under a plan: the value
that travels through the rooms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from madmax_lib import catalog
from madmax_lib.base.fields import is_number, require_int, short_repr
from madmax_lib.catalog.hardware import dtype_named
from madmax_lib.catalog.models import Cluster, Model
from madmax_lib.catalog.software import Software

if TYPE_CHECKING:
    from madmax_lib.plan.columns import Plans

__all__ = ["Case"]

_NUMBERS = {  # field: (least, what it is)
    "jitter": (
        0,
        "0 to 1,000, the mean delay of a rank over the time it computes, or 'measured'",
    ),
    "imbalance": (1, "1 to 1,000, the busiest device over the mean, or 'measured'"),
}


@dataclass(frozen=True)
class Case:
    """A training step, or with `Plans` one step per plan.

    model: what is trained; a text names one of the catalog or a `config.json`.
    cluster: where, or the name of one in the catalog or of a `machine.json`; None where
        only memory is asked for.
    plan: how the model is split, a `Plan` or the columns of many.
    global_batch: samples per step over all devices (default None: as many as the
        pipeline wants).
    sequence: tokens per sample (default None: the model's own).
    dtype: of the matrix products, a name of `hardware.DTYPES`, or torch's (default
        bf16).
    software: that trains, a `Software` or the name of one in the catalog (default None:
        `none`, which is false; on CPUs this project's own trainer, `workbench`).
    imbalance: tokens of the busiest expert device over the mean, `measured` for that in
        `data/spreads.csv` (default 1: routing was even, mostly by force, in the runs
        that constants are fitted to).
    jitter: mean delay of a rank behind the fastest one over the time that it computes,
        `measured` as for imbalance; delays are exponential and last for the step
        (default 0: the fitted rates are those of ranks that wait).
    """

    model: Model | str
    cluster: Cluster | str | None
    plan: Plans
    global_batch: int | None = None
    sequence: int | None = None
    dtype: str = "bf16"
    software: Software | str | None = None
    imbalance: float | str = 1.0
    jitter: float | str = 0.0

    def __post_init__(self):
        for name in ("imbalance", "jitter"):
            if isinstance(value := getattr(self, name), str) and value == "measured":
                object.__setattr__(
                    self,
                    name,
                    float(
                        catalog.table("spreads").set_index("quantity")["value"][name]
                    ),
                )
        for name, (least, what) in _NUMBERS.items():
            if not is_number(value := getattr(self, name), least) or value > 1000:
                raise ValueError(f"{name}={short_repr(value)} must be {what}")
        put = partial(object.__setattr__, self)
        put("model", catalog.model(self.model))
        if self.cluster is not None:
            put("cluster", catalog.cluster(self.cluster))
        if self.global_batch is not None and not isinstance(
            self.global_batch, np.ndarray
        ):
            put("global_batch", require_int("global_batch", self.global_batch, 1))
        own = getattr(self.model, "sequence", 0)
        put(
            "sequence",
            own
            if self.sequence is None
            else require_int("sequence", self.sequence, 1 if own else 0),
        )
        put("dtype", dtype_named(self.dtype))
        on_cpu = (
            self.software is None
            and self.cluster is not None
            and self.cluster.device.family == "cpu"
        )
        put("software", catalog.software("workbench" if on_cpu else self.software))

    @classmethod
    def of_step(cls, model, cluster, plan: Plans, global_batch, *further) -> Case:
        """The step that a call is about; arguments in the order of the fields.

        Raises ValueError without cluster or batch, and for a dtype in which the devices
        do not compute.
        """
        for name, value in (("cluster", cluster), ("global_batch", global_batch)):
            if value is None:
                raise ValueError(f"{name}=None: a step needs a {name}")
        case = cls(model, cluster, plan, global_batch, *further)
        case.cluster.device.peak(case.dtype)
        return case

    @property
    def tokens(self) -> float | np.ndarray:
        """Tokens of one micro-batch on one device."""
        return self.plan.micro_batch * self.sequence / self.plan.cp

    @property
    def micro_batches(self) -> float | np.ndarray:
        """Micro-batches per step and pipeline, the last one perhaps short; infinite
        without a global batch.
        """
        global_batch = np.inf if self.global_batch is None else self.global_batch
        return np.ceil(global_batch / (self.plan.dp * self.plan.micro_batch))
