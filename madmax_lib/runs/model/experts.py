"""How are tokens sent to experts on other ranks? Top-k routing and an all-to-all of uneven parts, and back.

A mixture layer [arXiv 2101.03961, top-k of arXiv 2401.04088]: the router's softmax picks `active_experts` per token and
their weights are scaled to sum to one. With expert parallelism each rank of the ep group holds experts/ep of them: the
ranks first exchange how many rows go to which expert, then the rows, and the results come back the same way. No token
is dropped. Every expert runs, on no rows too, so that all ranks see the same collectives and gradients.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from madmax_lib.specs import Transformer

__all__ = ["Experts", "Mixture"]

Share = tuple[int, int, ProcessGroup | None]  # (part, parts, group of the ranks that hold them)


class _Enter(torch.autograd.Function):
    """Rows that every tp rank has: themselves forward, gradients summed backward."""

    @staticmethod
    def forward(context, rows, group):
        context.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=context.group)
        return total, None


class _Leave(torch.autograd.Function):
    """Partial results of the tp ranks: summed forward, gradients themselves backward."""

    @staticmethod
    def forward(context, rows, group):
        total = rows.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Experts(nn.Module):
    """Feed-forward blocks, one after another in (experts, ...) weights; split over ep by expert, over tp by channel."""

    def __init__(self, spec: Transformer):
        super().__init__()
        count, width = spec.experts, spec.expert_ffn
        hidden = spec.hidden
        self.gate = nn.Parameter(torch.empty(count, width, hidden)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        bias = spec.mlp_bias
        self.up_bias = nn.Parameter(torch.empty(count, width)) if bias else None
        self.gate_bias = nn.Parameter(torch.empty(count, width)) if bias and spec.gated else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if bias else None
        self.tensor_group: ProcessGroup | None = None

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows: (n, hidden) sorted by expert, counts[e] of them for local expert e."""
        rows = _Enter.apply(rows, self.tensor_group) if self.tensor_group else rows
        results = [self._expert(part, e) for e, part in enumerate(rows.split(counts))]
        result = torch.cat(results)
        return _Leave.apply(result, self.tensor_group) if self.tensor_group else result

    def _expert(self, x: Tensor, e: int) -> Tensor:
        up = functional.linear(x, self.up[e], None if self.up_bias is None else self.up_bias[e])
        if self.gate is not None:
            gate = functional.linear(x, self.gate[e], None if self.gate_bias is None else self.gate_bias[e])
            inner = functional.silu(gate) * up
        else:
            inner = functional.gelu(up, approximate="tanh")
        return functional.linear(inner, self.down[e], None if self.down_bias is None else self.down_bias[e])

    def slice_(self, expert: tuple[int, int], channel: tuple[int, int]) -> None:
        """Keep part `expert[0]` of `expert[1]` of the experts, and of their channels, in place."""
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

    def share(self, expert: Share, channel: Share) -> None:
        """Keep this rank's part of the experts and of their channels, in place."""
        self.experts.slice_(expert[:2], channel[:2])
        self.group, self.experts.tensor_group = expert[2], channel[2]

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden)."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.active, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        result = self._run(tokens[order // self.active], counts)
        weighted = result * weights.flatten()[order].unsqueeze(-1).to(result.dtype)
        return torch.zeros_like(tokens).index_add(0, order // self.active, weighted.to(tokens.dtype)).view_as(x)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results of rows sorted by expert, counts[e] of them for expert e."""
        if self.group is None:
            return self.experts(rows, counts.tolist())
        ranks = self.group.size()
        theirs = torch.empty_like(counts)
        all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        theirs = theirs.view(ranks, -1)
        got = theirs.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, got, sent, self.group)
        # rows come by sending rank, then expert; experts want them by expert
        expert = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks).repeat_interleave(theirs.flatten())
        order = expert.argsort(stable=True)
        result = self.experts(arrived[order], theirs.sum(0).tolist())
        back = torch.empty_like(result).index_copy(0, order, result)
        return all_to_all_single_autograd(back, sent, got, self.group)
