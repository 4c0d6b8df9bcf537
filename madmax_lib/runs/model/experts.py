"""How are tokens sent to experts on other ranks? Top-k routing and an all-to-all of
uneven parts, and back.

A mixture layer [arXiv 2101.03961, top-k of arXiv 2401.04088]: the router's softmax
picks `active_experts` per token and their weights are scaled to sum to one. With expert
parallelism each rank of the ep group holds experts/ep of them: the ranks first exchange
how many rows go to which expert, then the rows, and the results come back the same way.
No token is dropped. Every expert runs, on no rows too, so that all ranks see the same
collectives and gradients.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_to_all_single
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from madmax_lib.catalog.models import Transformer

__all__ = ["Experts", "Mixture"]


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows (n, in), counts[e] of them in a row, by weights[e] (out, in): (n, out).

    One kernel, for which the host need not know the counts; it reads them only where a
    row is no multiple of 16 bytes.
    """
    kind = rows.device.type
    dtype = (
        torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else rows.dtype
    )
    rows = rows.to(dtype)
    weights = weights.to(dtype)
    if all(width * dtype.itemsize % 16 == 0 for width in weights.shape[1:]):
        return functional.grouped_mm(
            rows, weights.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32)
        )
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])


class Experts(nn.Module):
    """Feed-forward blocks, one after another in (experts, ...) weights; split over ep
    by expert, over tp by channel.
    """

    def __init__(self, spec: Transformer):
        super().__init__()
        count = spec.experts
        width = spec.expert_ffn
        hidden = spec.hidden
        self.gate = (
            nn.Parameter(torch.empty(count, width, hidden)) if spec.gated else None
        )
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        bias = spec.mlp_bias
        self.up_bias = nn.Parameter(torch.empty(count, width)) if bias else None
        self.gate_bias = (
            nn.Parameter(torch.empty(count, width)) if bias and spec.gated else None
        )
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if bias else None
        self.mesh: DeviceMesh | None = None  # the tp ranks, if more than one

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: (n, hidden) sorted by expert, counts[e] of them for local expert e."""
        if (
            self.mesh
        ):  # every tp rank has the rows and computes a part of their gradients
            whole = DTensor.from_local(rows, self.mesh, [Replicate()], run_check=False)
            rows = whole.to_local(grad_placements=[Partial()])
        expert = torch.repeat_interleave(counts, output_size=len(rows))  # of each row

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            product = _grouped(x, weight, counts)
            return product if bias is None else product + bias[expert].to(product.dtype)

        inner = linear(rows, self.up, self.up_bias)
        if self.gate is not None:
            inner = functional.silu(linear(rows, self.gate, self.gate_bias)) * inner
        else:
            inner = functional.gelu(inner, approximate="tanh")
        result = linear(inner, self.down, self.down_bias)
        if self.mesh:
            result = DTensor.from_local(
                result, self.mesh, [Partial()], run_check=False
            ).full_tensor()
        return result

    def keep(self, expert: tuple[int, int], channel: tuple[int, int]) -> None:
        """Keep part `expert[0]` of `expert[1]` of the experts, and likewise of their
        channels, in place.
        """
        channel_dim = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}
        for name, weight in list(self.named_parameters(recurse=False)):
            part = weight.detach().chunk(expert[1], 0)[expert[0]]
            if name in channel_dim:
                part = part.chunk(channel[1], channel_dim[name])[channel[0]]
            setattr(self, name, nn.Parameter(part.clone()))


class Mixture(nn.Module):
    """Router and experts: (B, S, hidden) -> (B, S, hidden)."""

    def __init__(self, spec: Transformer):
        super().__init__()
        self.router = nn.Linear(spec.hidden, spec.experts, bias=False)
        self.experts = Experts(spec)
        self.active = spec.active_experts
        self.group: ProcessGroup | None = None  # the ep ranks, if more than one

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden)."""
        tokens = x.flatten(0, 1)
        weights, chosen = (
            self.router(tokens).float().softmax(-1).topk(self.active, dim=-1)
        )
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = order.new_zeros(self.router.out_features).scatter_add_(
            0, chosen.flatten(), torch.ones_like(order)
        )
        result = self._run(tokens[order // self.active], counts)
        weighted = result * weights.flatten()[order].unsqueeze(-1).to(result.dtype)
        return (
            torch.zeros_like(tokens)
            .index_add(0, order // self.active, weighted.to(tokens.dtype))
            .view_as(x)
        )

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results of rows sorted by expert, counts[e] of them for expert e."""
        if self.group is None:
            return self.experts(rows, counts)
        ranks = self.group.size()
        theirs = torch.empty_like(counts)
        all_to_all_single(theirs, counts, group=self.group)
        theirs = theirs.view(ranks, -1)
        # the one wait of a layer: an all-to-all must be told the sizes of its parts
        sent, got = torch.stack((counts.view(ranks, -1).sum(1), theirs.sum(1))).tolist()
        arrived = all_to_all_single_autograd(rows, got, sent, self.group)
        # rows come by sending rank, then expert; experts want them by expert
        expert = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(
            theirs.flatten(), output_size=sum(got)
        ).argsort(stable=True)
        result = self.experts(arrived[order], theirs.sum(0))
        back = torch.empty_like(result).index_copy(0, order, result)
        return all_to_all_single_autograd(back, sent, got, self.group)
