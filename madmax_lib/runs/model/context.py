"""One sequence on several ranks by Ulysses: all-to-all from a part of the sequence to a
part of the heads.

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
        # Each tensor becomes (B, S/cp, cp, H/cp, d); joined by head, one exchange takes
        # all of them. The rank to send to comes first: (cp, B, S/cp, all H/cp, d).
        by_rank = [part.unflatten(2, (self.ranks, -1)) for part in parts]
        sent = torch.cat(by_rank, dim=3).permute(2, 0, 1, 3, 4)
        # what arrives is ordered by its part of the sequence, (cp, B, S/cp, ...)
        joined = self._all_to_all(sent).transpose(0, 1).flatten(1, 2)
        return list(joined.split(counts, dim=2))

    def to_sequence(self, mixed: Tensor) -> Tensor:
        """(B, S, H/cp, d) to (B, S/cp, H, d)."""
        if self.ranks == 1:
            return mixed
        # (cp, B, S/cp, H/cp, d)
        sent = mixed.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        return self._all_to_all(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _all_to_all(self, sent):
        return all_to_all_single_autograd(sent.contiguous(), None, None, self.group)
