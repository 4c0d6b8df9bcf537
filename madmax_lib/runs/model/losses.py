"""What is the loss of a micro-batch, as a part of the global mean? Sums of token
losses, and how many were right.

Everything is a sum over the targets of the *global* batch, so that micro-batches, dp,
cp and ep ranks only add up. Targets that are MASKED do not count; how many are left is
known once the ranks have summed theirs, with the losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from madmax_lib.catalog.models import Transformer
from madmax_lib.runs.data.text import MASKED

__all__ = ["Part", "correct", "means", "split", "sums", "total"]


Share = tuple[int, int]  # a rank's number in a dimension, and how many they are


@dataclass(frozen=True)
class Part:
    """A rank's part of a global batch."""

    inputs: Tensor  # of this rank, as are the targets
    targets: Tensor
    samples: int  # of the global batch
    positions: int  # targets of the global batch, masked ones too


def split(
    batch: Mapping[str, Tensor],
    spec: Transformer,
    device: torch.device,
    dp: int,
    cp: Share = (0, 1),
) -> Part:
    """What a rank of dp x cp trains on: of the samples of its dp rank the tokens of its
    cp rank, on the device.

    batch: tokens and targets (B/dp, S), or images (B/dp, 3, H, W) and labels (B/dp,).
    """
    own = [
        batch[name]
        for name in (("images", "labels") if spec.image else ("tokens", "targets"))
    ]
    samples = dp * len(own[1])
    positions = dp * own[1].numel()
    if cp[1] > 1:  # of a sequence, tokens in a row
        own = [part.chunk(cp[1], dim=1)[cp[0]] for part in own]
    inputs, targets = (part.to(device, non_blocking=True) for part in own)
    return Part(inputs, targets, samples, positions)


def sums(
    loss: Tensor | None, right: Tensor | None, part: Part, copies: int = 1
) -> Tensor:
    """Sum of losses, right targets and targets that count (3,) of the global batch, on
    the device.

    loss, right: of this rank, None where it has none. copies: how many ranks hold the
    same.
    """
    result = torch.zeros(3, dtype=torch.float64, device=part.inputs.device)
    if loss is not None:
        result = torch.stack(
            [own.double() for own in (loss, right, (part.targets != MASKED).sum())]
        )
    dist.all_reduce(result)
    return result / copies


def means(sums: Tensor, part: Part) -> dict[str, object]:
    """Mean loss and accuracy over the global batch, its samples, and its targets that
    count as tokens.
    """
    loss, right, count = sums.tolist()
    tokens = max(int(count), 1)
    return {
        "loss": loss / tokens,
        "accuracy": right / tokens,
        "samples": part.samples,
        "tokens": tokens,
    }


def total(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross-entropies: logits (..., classes), targets (...). In fp32."""
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(
        flat, targets.flatten(), ignore_index=MASKED, reduction="sum"
    )


@torch.no_grad()
def correct(logits: Tensor, targets: Tensor) -> Tensor:
    """How many targets have the largest logit; the classes may be split over ranks."""
    if not isinstance(logits, DTensor):
        return (logits.argmax(-1) == targets).sum()
    group = logits.device_mesh.get_group()
    classes = logits.shape[-1]
    part = logits.to_local()
    value, place = part.max(-1)
    best = value.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group)
    first = (
        -(-classes // group.size()) * group.rank()
    )  # DTensor gives all but the last ranks as many
    right = ((value == best) & (place + first == targets)).sum()
    dist.all_reduce(right, group=group)
    return right
