"""A step without a pipeline: micro-batches one after another, gradients adding up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses
from madmax_lib.runs.parallel.sharding import Sharding

__all__ = ["Accumulation"]


class Accumulation:
    """Runs a whole model on micro-batches of `samples`. split_logits: they are split over tp ranks."""

    def __init__(self, module: nn.Module, sharding: Sharding, samples: int, split_logits: bool, *, phases: Phases,
                 autocast: AbstractContextManager):  # fmt: skip
        self.module, self.sharding, self.samples = module, sharding, samples
        self.phases, self.autocast, self.split_logits = phases, autocast, split_logits

    def run(self, inputs: Tensor, targets: Tensor, scale: float, train: bool) -> tuple[Tensor, Tensor]:
        """Forward, and with `train` backward, of all micro-batches; (sum of losses, right targets).

        scale: what each loss is multiplied by before the backward pass.
        """
        found, right = [], []
        parts = list(zip(inputs.split(self.samples), targets.split(self.samples), strict=True))
        with loss_parallel() if self.split_logits else nullcontext(), torch.set_grad_enabled(train):
            for place, (x, y) in enumerate(parts):
                if train:
                    self.sharding.before_micro_batch(self.module, last=place == len(parts) - 1)
                with self.phases("forward"), self.autocast:
                    logits = self.module(x)
                    loss = losses.total(logits, y)
                if train:
                    with self.phases("backward"):
                        (loss * scale).backward()
                found.append(loss.detach())
                right.append(losses.correct(logits, y))
        total = torch.stack([loss.full_tensor() if self.split_logits else loss for loss in found]).sum()
        return total, torch.stack(right).sum()
