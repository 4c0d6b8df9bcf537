"""The case: a training step of a model on a cluster under a plan, the value that travels
through the rooms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from madmax_lib import catalog
from madmax_lib.base import is_number, require_int, short_repr
from madmax_lib.catalog import DLRM, Cluster, Model, Software
from madmax_lib.catalog.hardware import Device, dtype_named
from madmax_lib.plan.columns import Plans, distinct
from madmax_lib.plan.layout import predictions

_OPTIMIZERS = catalog.table("optimizers")["optimizer"].tolist()
_MOST = 1000  # of jitter and imbalance: beyond it a unit was mistaken
_RULES = {  # field: (least, what it is)
    "jitter": (
        0,
        "0 to 1,000, the mean delay of a rank over the time it computes, or 'measured'",
    ),
    "imbalance": (1, "1 to 1,000, the busiest device over the mean, or 'measured'"),
}


@dataclass(frozen=True)
class Case:
    """A training step, or with `Plans` one step per plan.

    >>> from madmax_lib.plan.plan import Plan
    >>> case = Case("gpt2", "dgx-a100", Plan.parse("dp8.mb4"), global_batch=64)
    >>> case.model.layers, case.tokens, float(case.micro_batches)
    (12, 4096.0, 2.0)

    model: what is trained; a text names one of the catalog or a `config.json`. MTP
        layers that the plan's layout has are further layers of it.
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
    optimizer: a name of `data/optimizers.csv` (default adam).
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
    optimizer: str = "adam"

    def __post_init__(self):
        put = partial(object.__setattr__, self)  # the fields of a frozen class
        for name, (least, what) in _RULES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value == "measured":
                spreads = catalog.table("spreads").set_index("quantity")["value"]
                put(name, value := float(spreads[name]))
            if not is_number(value, least) or value > _MOST:
                raise ValueError(f"{name}={short_repr(value)} must be {what}")
        put("model", _with_predictions(catalog.model(self.model), self.plan))
        if self.cluster is not None:
            put("cluster", catalog.cluster(self.cluster))
        # many steps have an array of batches
        if not isinstance(self.global_batch, np.ndarray | None):
            put("global_batch", require_int("global_batch", self.global_batch, 1))
        usual = getattr(self.model, "sequence", 0)  # a recommendation model has none
        if self.sequence is None:
            put("sequence", usual)
        else:
            put("sequence", require_int("sequence", self.sequence, 1 if usual else 0))
        put("dtype", dtype_named(self.dtype))
        if self.optimizer not in _OPTIMIZERS:
            names = ", ".join(_OPTIMIZERS)
            raise ValueError(f"optimizer={self.optimizer!r} is not one of {names}")
        software = self.software
        if software is None and self.cluster and self.cluster.device.family == "cpu":
            software = "workbench"
        put("software", catalog.software(software))

    @classmethod
    def of_step(cls, model, cluster, plan: Plans, global_batch, *options) -> Case:
        """The step that a call is about; arguments in the order of the fields.

        Raises ValueError without cluster or batch, and for a dtype in which the devices
        do not compute.
        """
        for name, value in (("cluster", cluster), ("global_batch", global_batch)):
            if value is None:
                raise ValueError(f"{name}=None: a step needs a {name}")
        case = cls(model, cluster, plan, global_batch, *options)
        case.device.peak(case.dtype)
        return case

    def with_plan(self, **changes) -> Case:
        """The step under a changed plan."""
        return replace(self, plan=replace(self.plan, **changes))

    def answer(self, call: Callable, **options):
        """Table or timeline that `estimate`, `simulate` or another call makes of the step.
        options: further arguments, or some in place of its own.
        """
        step = vars(self) | options
        names = ("model", "cluster", "plan")
        return call(*[step.pop(name) for name in names], **step)

    @property
    def device(self) -> Device:
        """Each of the cluster."""
        return self.cluster.device

    @property
    def flops(self) -> float:
        """Model FLOPs of the step: a backward pass has twice those of a forward one."""
        return 3 * self.model.forward_flops(self.global_batch, self.sequence)

    def mfu(self, step_s: float | np.ndarray) -> float | np.ndarray:
        """FLOPs of the step over what all devices compute in its seconds at their peak
        [PaLM, arXiv 2204.02311, appendix B].
        """
        peak_flops = self.cluster.world_size * self.device.peak(self.dtype)
        return self.flops / (step_s * peak_flops)

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


def _with_predictions(model, plan):
    """The model with the MTP layers of layouts, unless it has them: each is one more
    layer like the last, and the head's work once more.

    Left out is the product of 2 hidden^2 weights before each.
    """
    layouts = distinct(getattr(plan, "layout", ""))  # a search's case has no plan yet
    counts = {predictions(layout) for layout in layouts}
    count = max(counts, default=0)
    if not count or isinstance(model, DLRM) or model.predicted_share > 1:
        return model
    if len(counts) > 1:
        raise ValueError(
            "layouts with and without MTP layers m need tables of their own"
        )
    words = [*model.layer_kinds, *model.layer_kinds[-1:] * count]
    return replace(
        model,
        layers=len(words),
        blocks=" ".join(words) if model.blocks else "",
        predicted_share=(1 + count) * model.predicted_share,
    )
