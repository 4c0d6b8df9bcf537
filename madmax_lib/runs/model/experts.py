"""Mixture of experts on several ranks: top-k routing and an all-to-all of uneven parts,
and back.

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

from madmax_lib.catalog import Transformer


def _grouped(rows, weights, counts):
    """Rows (n, in), counts[e] of them in a row, by weights[e] (out, in): (n, out).

    One kernel, for which the host need not know the counts; it reads them only where a
    row is no multiple of 16 bytes.
    """
    kind = rows.device.type
    dtype = rows.dtype
    if torch.is_autocast_enabled(kind):  # it does not know grouped_mm
        dtype = torch.get_autocast_dtype(kind)
    rows = rows.to(dtype)
    weights = weights.to(dtype)
    if all(width * dtype.itemsize % 16 == 0 for width in weights.shape[1:]):
        ends = counts.cumsum(0).to(torch.int32)
        return functional.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
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
        bias = spec.mlp_bias

        def weight(*shape):
            return nn.Parameter(torch.empty(count, *shape))

        # in the order in which a checkpoint and a generator name them
        self.gate = weight(width, hidden) if spec.gated else None
        self.up = weight(width, hidden)
        self.down = weight(hidden, width)
        self.up_bias = weight(width) if bias else None
        self.gate_bias = weight(width) if bias and spec.gated else None
        self.down_bias = weight(hidden) if bias else None
        self.mesh: DeviceMesh | None = None  # the tp ranks, if more than one

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: (n, hidden) sorted by expert, counts[e] of them for local expert e."""
        if self.mesh:
            # every tp rank has all rows, and computes a part of their gradients' sum
            rows = _on_mesh(rows, self.mesh, Replicate())
            rows = rows.to_local(grad_placements=[Partial()])
        expert = torch.repeat_interleave(counts, output_size=len(rows))  # of each row

        def linear(x, weight, bias):
            product = _grouped(x, weight, counts)
            return product if bias is None else product + bias[expert].to(product.dtype)

        inner = linear(rows, self.up, self.up_bias)
        if self.gate is not None:
            inner = functional.silu(linear(rows, self.gate, self.gate_bias)) * inner
        else:
            inner = functional.gelu(inner, approximate="tanh")
        result = linear(inner, self.down, self.down_bias)
        if self.mesh:  # channels are split: each rank has a part of the sum
            return _on_mesh(result, self.mesh, Partial()).full_tensor()
        return result

    def keep(self, expert: tuple[int, int], channel: tuple[int, int]) -> None:
        """Keep part `expert[0]` of `expert[1]` of the experts, and likewise of their
        channels, in place.
        """
        # dimensions that are channels; down_bias is added once, whatever the channels
        channel_dim = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1}
        number, count = expert
        channel_number, channel_count = channel
        for name, weight in list(self.named_parameters(recurse=False)):
            part = weight.detach().chunk(count, 0)[number]
            if name in channel_dim:
                channels = part.chunk(channel_count, channel_dim[name])
                part = channels[channel_number]
            setattr(self, name, nn.Parameter(part.clone()))


def _on_mesh(tensor, mesh, placement):
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


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
        shares = self.router(tokens).float().softmax(-1)
        weights, chosen = shares.topk(self.active, dim=-1)  # (n, k) both
        weights = weights / weights.sum(-1, keepdim=True)
        # A token has k rows; row r is of token r // k. Experts take rows sorted by
        # expert, and a stable order keeps the tokens of each in theirs.
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        token = order // self.active
        # bincount would make the host wait for the largest value
        counts = order.new_zeros(self.router.out_features)
        counts.scatter_add_(0, expert, torch.ones_like(order))
        result = self._run(tokens[token], counts)
        weights = weights.flatten()[order].unsqueeze(-1)
        weighted = result * weights.to(result.dtype)
        summed = torch.zeros_like(tokens)
        return summed.index_add(0, token, weighted.to(tokens.dtype)).view_as(x)

    def _run(self, rows, counts):
        """Results of rows sorted by expert, counts[e] of them for expert e."""
        if self.group is None:
            return self.experts(rows, counts)
        ranks = self.group.size()
        # counts are (ranks, experts of a rank): rows for each rank's experts, and, after
        # the exchange, rows that each rank sends to the experts here
        arriving = torch.empty_like(counts)
        all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(ranks, -1)
        totals = torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1)))
        # the one wait of a layer: an all-to-all must be told the sizes of its parts
        sent, received = totals.tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        # rows come by sending rank, then expert; experts want them by expert
        local_experts = torch.arange(arriving.shape[1], device=rows.device)
        expert = local_experts.repeat(ranks).repeat_interleave(
            arriving.flatten(), output_size=sum(received)
        )
        order = expert.argsort(stable=True)
        result = self.experts(arrived[order], arriving.sum(0))
        back = torch.empty_like(result).index_copy(0, order, result)
        return all_to_all_single_autograd(back, sent, received, self.group)
