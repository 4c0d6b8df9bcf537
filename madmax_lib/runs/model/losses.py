"""Loss of a micro-batch as a part of the global mean: sums of token losses, and how many
targets were right.

Everything is a sum over the targets of the *global* batch, so that micro-batches, dp,
cp and ep ranks only add up. Targets that are MASKED do not count; how many are left is
known once the ranks have summed theirs, with the losses.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from madmax_lib.catalog import Transformer
from madmax_lib.runs.data.text import MASKED

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
    """The part of a batch that a rank of dp x cp trains on: of the samples of its dp
    rank the tokens of its cp rank, on the device.

    batch: tokens and targets (B/dp, S), or images (B/dp, 3, H, W) and labels (B/dp,).
    """
    names = ("images", "labels") if spec.image else ("tokens", "targets")
    inputs, targets = (batch[name] for name in names)
    samples = dp * len(targets)
    positions = dp * targets.numel()
    number, count = cp
    if count > 1:  # of a sequence, tokens in a row
        inputs = inputs.chunk(count, dim=1)[number]
        targets = targets.chunk(count, dim=1)[number]
    return Part(
        inputs.to(device, non_blocking=True),
        targets.to(device, non_blocking=True),
        samples,
        positions,
    )


def accumulate(
    part: Part,
    samples: int,
    phases: Callable[[str], AbstractContextManager],
    forward: Callable[[Tensor, bool], Tensor],
    backward: Callable[[Tensor], None] | None,
) -> tuple[Tensor, Tensor]:
    """Sum of losses, and right targets, of micro-batches of so many samples, one after
    another.

    phases: clock of forward passes. forward: gives logits of inputs, and is told the
    last ones. backward: takes a loss; None for no gradients.
    """
    losses = []
    rights = []
    pairs = zip(part.inputs.split(samples), part.targets.split(samples), strict=True)
    micro_batches = list(pairs)
    with torch.set_grad_enabled(backward is not None):
        for number, (x, y) in enumerate(micro_batches, 1):
            with phases("forward"):
                logits = forward(x, number == len(micro_batches))
                loss = total(logits, y)
            if backward:
                backward(loss)
            losses.append(loss.detach())
            rights.append(correct(logits, y))
    return torch.stack(losses).sum(), torch.stack(rights).sum()


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
        counted = (part.targets != MASKED).sum()
        result = torch.stack([loss.double(), right.double(), counted.double()])
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
    """Number of targets that have the largest logit."""
    return (logits.argmax(-1) == targets).sum()
