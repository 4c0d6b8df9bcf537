"""What is the loss of a micro-batch, as a part of the global mean? Sums of token losses, and how many were right.

Everything is a sum over targets divided by the *global* number of targets, so that micro-batches, dp, cp and ep ranks
only add up. Targets that are MASKED do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from madmax_lib.runs.data.text import MASKED
from madmax_lib.specs import Transformer

__all__ = ["Part", "correct", "means", "split", "total"]


Share = tuple[int, int]  # a rank's number among the ranks of a dimension, and how many they are


@dataclass(frozen=True)
class Part:
    """A rank's part of a global batch.

    inputs, targets: of this rank.
    samples: of the global batch.
    count: targets of the global batch that are not masked.
    """

    inputs: Tensor
    targets: Tensor
    samples: int
    count: int


def split(
    batch: Mapping[str, Tensor], spec: Transformer, device: torch.device, dp: Share = (0, 1), cp: Share = (0, 1)
) -> Part:
    """The samples of a dp rank, and of them the tokens of a cp rank, on the device.

    batch: tokens and targets (B, S), or images (B, 3, H, W) and labels (B,). Raises ValueError if dp does not divide B.
    """
    inputs, targets = (batch[name] for name in (("images", "labels") if spec.image else ("tokens", "targets")))
    samples, count = len(inputs), int((targets != MASKED).sum())
    if samples % dp[1]:
        raise ValueError(f"dp={dp[1]} does not divide a batch of {samples} samples")
    own = [part.chunk(dp[1])[dp[0]] for part in (inputs, targets)]
    if cp[1] > 1:  # of a sequence, tokens in a row
        own = [part.chunk(cp[1], dim=1)[cp[0]] for part in own]
    inputs, targets = (part.to(device, non_blocking=True) for part in own)
    return Part(inputs, targets, samples, max(count, 1))


def means(
    loss: Tensor | None, right: Tensor | None, part: Part, group: dist.ProcessGroup, copies: int = 1
) -> dict[str, object]:
    """Mean loss and accuracy over the global batch, from the sums of each rank; None on ranks that have none.

    copies: how many ranks hold the same sums.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=part.inputs.device)
    if loss is not None:
        sums = torch.stack((loss.double(), right.double()))
    dist.all_reduce(sums, group=group)
    mean_loss, accuracy = (sums / (part.count * copies)).tolist()
    return {"loss": mean_loss, "accuracy": accuracy, "samples": part.samples, "tokens": part.count}


def total(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross-entropies: logits (..., classes), targets (...). In fp32."""
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(flat, targets.flatten(), ignore_index=MASKED, reduction="sum")


@torch.no_grad()
def correct(logits: Tensor, targets: Tensor) -> Tensor:
    """How many targets have the largest logit; the classes may be split over ranks."""
    if not isinstance(logits, DTensor):
        return (logits.argmax(-1) == targets).sum()
    group, classes = logits.device_mesh.get_group(), logits.shape[-1]
    part = logits.to_local()
    value, place = part.max(-1)
    best = value.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group)
    first = -(-classes // group.size()) * group.rank()  # DTensor gives all but the last ranks as many
    right = ((value == best) & (place + first == targets)).sum()
    dist.all_reduce(right, group=group)
    return right
