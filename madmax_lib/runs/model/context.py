"""How is one sequence shared by several ranks? Ulysses: all-to-all from a part of the
sequence to a part of the heads.

DeepSpeed-Ulysses [arXiv 2309.14509]: every rank holds S/cp tokens of all heads; before
attention it swaps them for all tokens of heads/cp, afterwards back. Queries, keys and
values travel in one exchange, so a layer takes two all-to-alls forward and two
backward. Positions are turned after the exchange, where the sequence is whole.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

__all__ = ["Exchange"]


class Exchange:
    """Swaps sequence for heads and back; does nothing without a group."""

    def __init__(self, group: ProcessGroup | None = None):
        self.group = group
        self.ranks = group.size() if group else 1

    def to_heads(self, parts: list[Tensor]) -> list[Tensor]:
        """Tensors (B, S/cp, H, d), with one H each, to (B, S, H/cp, d)."""
        if self.ranks == 1:
            return parts
        counts = [part.shape[2] // self.ranks for part in parts]
        by_rank = [
            part.unflatten(2, (self.ranks, count))
            for part, count in zip(parts, counts, strict=True)
        ]
        sent = torch.cat(by_rank, dim=3).permute(
            2, 0, 1, 3, 4
        )  # (cp, B, S/cp, all heads / cp, d)
        got = self._all_to_all(sent).transpose(0, 1).flatten(1, 2)
        return list(got.split(counts, dim=2))

    def to_sequence(self, mixed: Tensor) -> Tensor:
        """(B, S, H/cp, d) to (B, S/cp, H, d)."""
        if self.ranks == 1:
            return mixed
        sent = mixed.unflatten(1, (self.ranks, -1)).transpose(
            0, 1
        )  # (cp, B, S/cp, H/cp, d)
        return self._all_to_all(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _all_to_all(self, sent: Tensor) -> Tensor:
        return all_to_all_single_autograd(sent.contiguous(), None, None, self.group)
