"""What each kind of work of a step waits for and hides under: told once, for both forms.

The event engine issues work by these rules, op by op; the steady form evaluates them
for arrays of plans. Compute itself runs in order on its stream; all that is listed here
runs beside it, as far as `hidden_share` says:

    exposed = T_work - min(hidden_share T_work, T_compute under which it hides)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import numpy as np

from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters

__all__ = ["RULES", "Issued", "Overlap", "OverlapRule", "Under", "WorkKind", "work_of"]


class WorkKind(Enum):
    """Kinds of work beside compute."""

    TENSOR = auto()  # collectives of tensor parallelism
    EXPERT = auto()  # exchanges of tokens with experts
    EXPERT_TENSOR = auto()  # collectives inside an expert that tp splits
    CONTEXT = auto()  # keys and values on their way round a ring
    GATHER = auto()  # weights that ZeRO-3 has sharded
    BUCKET = auto()  # reductions of gradients
    MESSAGE = auto()  # activations and gradients between pipeline stages
    LAUNCH = auto()  # kernels that the host issues
    OFFLOAD = auto()  # copies between device, host and drives


class Issued(Enum):
    """Moment at which work is issued, which is what it waits for."""

    AT_BLOCK = auto()  # once the input of its block is there, or its result
    AT_STEP_OF_RING = auto()  # once the keys before have arrived
    UNITS_AHEAD = auto()  # when the compute `prefetch` units before begins
    AT_FULL_BUCKET = auto()  # when the gradients that fill a bucket exist
    AT_END_OF_PASS = auto()  # when a pass of a stage has computed
    AT_ONCE = auto()  # as soon as its own stream is free


class Under(Enum):
    """Compute under which work hides."""

    BLOCK = auto()  # other tiles of the products of its own block
    LAYER = auto()  # all of its layer, of another micro-batch
    RING_STEP = auto()  # attention to the keys that are there
    UNITS_BEFORE = auto()  # the layers before the one that needs the weights
    BACKWARD = auto()  # the rest of the backward pass
    OTHER_PASSES = auto()  # passes of other micro-batches
    QUEUE = auto()  # all that is queued on the device


@dataclass(frozen=True)
class OverlapRule:
    """Overlap of one kind of work with compute."""

    issued: Issued
    under: Under
    hidden_share: Callable[[Overlap], Number]  # of its seconds that may hide, 0 to 1
    groups: tuple[str, ...] = ()  # whose collectives are work of this kind


RULES: dict[WorkKind, OverlapRule] = {
    WorkKind.TENSOR: OverlapRule(
        Issued.AT_BLOCK, Under.BLOCK, lambda o: o.tensor_share, ("tp",)
    ),
    WorkKind.EXPERT: OverlapRule(
        Issued.AT_BLOCK, Under.LAYER, lambda o: o.expert_share, ("ep",)
    ),
    # its products need all tokens at once
    WorkKind.EXPERT_TENSOR: OverlapRule(
        Issued.AT_BLOCK, Under.BLOCK, lambda o: 0.0, ("etp",)
    ),
    WorkKind.CONTEXT: OverlapRule(
        Issued.AT_STEP_OF_RING, Under.RING_STEP, lambda o: 1.0, ("cp",)
    ),
    WorkKind.GATHER: OverlapRule(
        Issued.UNITS_AHEAD, Under.UNITS_BEFORE, lambda o: 1 - o.gathers_late
    ),
    WorkKind.BUCKET: OverlapRule(
        Issued.AT_FULL_BUCKET, Under.BACKWARD, lambda o: o.hides_reductions
    ),
    WorkKind.MESSAGE: OverlapRule(
        Issued.AT_END_OF_PASS, Under.OTHER_PASSES, lambda o: o.hides_messages, ("pp",)
    ),
    WorkKind.LAUNCH: OverlapRule(
        Issued.AT_ONCE, Under.QUEUE, lambda o: 1 - o.traits.on_host
    ),
    WorkKind.OFFLOAD: OverlapRule(
        Issued.UNITS_AHEAD, Under.UNITS_BEFORE, lambda o: 1.0
    ),
}


_WORK = {group: work for work, rule in RULES.items() for group in rule.groups}


def work_of(group: str) -> WorkKind | None:
    """Kind of work that a collective of a block is, by its group; None: nothing hides
    it (exchanges of looked-up rows).
    """
    return _WORK.get(group)


class Overlap:
    """Answers of `RULES` for steps of a plan and a software; arrays where they are
    many.
    """

    def __init__(self, steps: Steps, parameters: Parameters):
        self.plan = steps.work.plan
        self.traits = steps.traits
        self.parameters = parameters
        self._shares: dict[WorkKind, Number] = {}

    def hidden_share(self, work: WorkKind) -> Number:
        """Share of the seconds of work that may run under compute."""
        if work not in self._shares:
            self._shares[work] = RULES[work].hidden_share(self)
        return self._shares[work]

    @cached_property
    def tensor_share(self) -> Number:
        """Tiles of a product whose collective runs beside the other tiles."""
        hidden = self.traits.hides_tp.constant(self.parameters, "tp_hidden")
        return self.traits.overlap_tp * hidden

    @cached_property
    def expert_share(self) -> Number:
        """Exchanges of tokens that run beside another micro-batch."""
        hidden = self.traits.stack.constant(self.parameters, "ep_hidden")
        return self.traits.hides_ep * hidden

    @cached_property
    def gathers_late(self) -> bool | np.ndarray:
        """Plans whose ZeRO-3 gathers nothing ahead."""
        traits = self.traits
        waits = (traits.tensorwise > 0) | (traits.fsdp_blocks > 0)
        return (self.plan.prefetch == 0) | waits

    @cached_property
    def reduces_each(self) -> bool | np.ndarray:
        """Plans whose micro-batches each reduce their gradients: by ZeRO-2 without pipeline, by
        some pipelines without ZeRO.
        """
        zero = self.plan.zero
        pp = self.plan.pp
        by_software = (zero == 0) & (pp > 1) & (self.traits.reduces_each > 0)
        return ((zero == 2) & (pp == 1)) | by_software

    @cached_property
    def sharded_buckets(self) -> bool | np.ndarray:
        """Plans whose ZeRO-3 reduces gradients in buckets, as DeepSpeed does; after late
        gathers, or in a pipeline, by layer.
        """
        p = self.plan
        is_engine = (self.traits.buckets > 0) & (p.zero == 3) & (p.pp == 1)
        return is_engine & np.logical_not(self.gathers_late)

    @cached_property
    def hides_reductions(self) -> bool | np.ndarray:
        """Plans whose reductions run beside the backward pass: as the plan or its software
        says, those of ZeRO-3 on a GPU always.
        """
        sharded = np.asarray(self.plan.zero) >= 3
        on_gpu = np.equal(self.traits.on_host, 0)
        return (self.traits.hides_dp > 0) | (sharded & on_gpu)

    @cached_property
    def hides_messages(self) -> bool | np.ndarray:
        """Plans whose stages go on while their messages travel."""
        stops = (self.traits.blocking_sends > 0) | (self.traits.rendezvous_sends > 0)
        return np.logical_not(stops)

    @cached_property
    def splits_backward(self) -> Number:
        """1 where wgrad is computed later than dgrad (zero-bubble)."""
        return (self.plan.schedule == "zero-bubble") + 0.0
