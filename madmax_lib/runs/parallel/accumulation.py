"""A step without a pipeline: micro-batches one after another, gradients adding up."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from madmax_lib.runs.measure.phases import Phases
from madmax_lib.runs.model import losses
from madmax_lib.runs.parallel.data_parallel import DataParallel

__all__ = ["Accumulation"]


@dataclass(frozen=True)
class Accumulation:
    """Runs a whole model on micro-batches.

    module: what to call.
    data_parallel: how its gradients are reduced.
    samples: of a micro-batch.
    split_logits: whether logits are split over tp ranks.
    phases, autocast: what times the passes, and what casts in them.
    """

    module: nn.Module
    data_parallel: DataParallel
    samples: int
    split_logits: bool
    phases: Phases
    autocast: AbstractContextManager

    def run(self, inputs: Tensor, targets: Tensor, scale: float, train: bool) -> tuple[Tensor, Tensor]:
        """Forward, and with `train` backward, of all micro-batches; (sum of losses, right targets).

        scale: what each loss is multiplied by before the backward pass.
        """
        sums, rights = [], []
        micro_batches = list(zip(inputs.split(self.samples), targets.split(self.samples), strict=True))
        with loss_parallel() if self.split_logits else nullcontext(), torch.set_grad_enabled(train):
            for number, (x, y) in enumerate(micro_batches, 1):
                if train:
                    self.data_parallel.before_micro_batch(self.module, last=number == len(micro_batches))
                with self.phases("forward"), self.autocast:
                    logits = self.module(x)
                    loss = losses.total(logits, y)
                if train:
                    with self.phases("backward"):
                        (loss * scale).backward()
                sums.append(loss.detach())
                rights.append(losses.correct(logits, y))
        total = torch.stack([loss.full_tensor() if self.split_logits else loss for loss in sums]).sum()
        return total, torch.stack(rights).sum()
