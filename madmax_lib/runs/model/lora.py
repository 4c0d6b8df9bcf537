"""Fine-tuning with few parameters: low-rank updates of queries and values [arXiv
2106.09685].

All weights are frozen but a head that is not tied; query and value projections gain B A
x, with A (rank, in) drawn and B (out, rank) zero, so that training starts at the model
itself.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from madmax_lib.runs.model.layers import TransformerLayer
from madmax_lib.runs.model.network import Network, named_generator

__all__ = ["LowRank", "adapt", "freeze_ends"]


class LowRank(nn.Linear):
    """A frozen linear layer plus a trained update of low rank, scaled by 1. Keeps the
    names of the linear layer.
    """

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.weight = base.weight
        self.bias = base.bias
        device = base.weight.device
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        with torch.no_grad():  # x of unit length gives A x of unit length
            self.down.normal_(0.0, base.in_features**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) to (..., out)."""
        update = functional.linear(functional.linear(x, self.down), self.up)
        return super().forward(x) + update


def adapt(layer: TransformerLayer, name: str, rank: int, seed: int) -> None:
    """Freeze a layer and add low-rank updates to its queries and values, in place."""
    layer.requires_grad_(False)
    for part in ("query", "value"):
        base = getattr(layer.attention, part)
        full_name = f"{name}.attention.{part}.down"
        generator = named_generator(seed, full_name, base.weight.device)
        setattr(layer.attention, part, LowRank(base, rank, generator))


def freeze_ends(network: Network) -> None:
    """Freeze embedding and last norm; the head is trained, unless it is the token
    table.
    """
    for name, end in network.ends():
        if name != "head" or network.spec.tied:
            end.requires_grad_(False)
