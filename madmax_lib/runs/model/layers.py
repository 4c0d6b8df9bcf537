"""Parts of a transformer layer: norms, attention and feed-forward blocks in plain torch,
sized by a spec.

Pre-norm layers as in GPT-2 [Radford et al. 2019] and LLaMA [arXiv 2302.13971]: layer or
rms norms, learned or rotary positions [arXiv 2104.09864], grouped heads [arXiv
2305.13245], GELU (tanh) or gated SiLU. Heads are counted from the weights' own shapes,
so that a tensor-parallel shard runs the same code.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from madmax_lib.catalog import Transformer
from madmax_lib.runs.model.experts import Mixture

_EPSILON = {"layer": 1e-5, "rms": 1e-6}  # of GPT-2 and of Qwen2.5
_VIT_EPSILON = 1e-12  # of ViT [arXiv 2010.11929, released code]
_ROPE_BASE = 1e6  # Qwen2.5 [arXiv 2412.15115]
_AMPERE = (8, 0)  # first compute capability with flash attention in torch
_rerun = partial(checkpoint, use_reentrant=False)


def norm(spec: Transformer) -> nn.Module:
    """A layer norm or an rms norm over the hidden channels."""
    kind = nn.LayerNorm if spec.norm == "layer" else nn.RMSNorm
    epsilon = _VIT_EPSILON if spec.image else _EPSILON[spec.norm]
    return kind(spec.hidden, eps=epsilon)


@lru_cache(maxsize=8)
def _turns(length, width, device, dtype):
    """Cosine and sine (length, width/2) of position x base^(-2i/width); the same in all
    layers and steps.
    """
    options = {"device": device, "dtype": torch.float32}
    frequency = _ROPE_BASE ** (-torch.arange(0, width, 2, **options) / width)
    angle = torch.outer(torch.arange(length, **options), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(heads, turns):
    """Rotary positions: channel pairs (i, i + d/2) of heads (B, H, S, d) turned by
    their position.
    """
    cosine, sine = turns
    first, second = heads.chunk(2, dim=-1)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    return torch.cat((turned_first, turned_second), dim=-1)


class Attention(nn.Module):
    """Self-attention (B, S, hidden) -> (B, S, hidden). `exchange` swaps sequence for
    heads under Ulysses.

    Separate projections, so that each can be split by columns whatever the number of
    key-value heads.
    """

    def __init__(self, spec: Transformer, kind="flash"):
        super().__init__()
        inner = spec.heads * spec.head_dim
        shared = spec.kv_heads * spec.head_dim
        bias = spec.attention_bias != "none"
        self.head_dim = spec.head_dim
        self.kind = kind
        self.causal = not spec.image
        self.rope = spec.positions == "rope" and not spec.image
        self.query = nn.Linear(spec.hidden, inner, bias=bias)
        self.key = nn.Linear(spec.hidden, shared, bias=bias)
        self.value = nn.Linear(spec.hidden, shared, bias=bias)
        # Qwen2.5 has biases of queries, keys and values only
        all_biases = spec.attention_bias == "all"
        self.projection = nn.Linear(inner, spec.hidden, bias=all_biases)
        self.exchange = Exchange()
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden), S being this rank's part of the sequence."""
        projected = [project(x) for project in (self.query, self.key, self.value)]
        # (B, S, heads, d): as many heads as the weights of this tp rank have
        heads = [part.unflatten(-1, (-1, self.head_dim)) for part in projected]
        parts = [part.transpose(1, 2) for part in self.exchange.to_heads(heads)]
        if self.rope:  # after the exchange, where positions are in order
            turns = _turns(*parts[0].shape[-2:], x.device, parts[0].dtype)
            parts[:2] = (_rotate(part, turns) for part in parts[:2])
        mixed = _rerun(self._core, *parts) if self.recompute else self._core(*parts)
        mixed = self.exchange.to_sequence(mixed.transpose(1, 2))
        return self.projection(mixed.flatten(-2))

    def _core(self, query, key, value):
        groups = query.shape[1] // key.shape[1]
        unfused = self.kind == "unfused"
        # Flash attention itself reads one key head for several query heads: on CPUs, and
        # in 16 bits from Ampere on. On other GPUs torch would put the scores in memory.
        shares_heads = not query.is_cuda or (
            query.itemsize == 2
            and torch.cuda.get_device_capability(query.device) >= _AMPERE
        )
        if groups > 1 and (unfused or not shares_heads):
            key = key.repeat_interleave(groups, 1)
            value = value.repeat_interleave(groups, 1)
            groups = 1
        if unfused:
            # softmax(Q K^T / sqrt(d)) V [arXiv 1706.03762] with the scores in memory:
            # (B, H, S, S), the S^2 numbers that flash attention never writes
            scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
            if self.causal:
                later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, float("-inf"))
            return scores.softmax(-1) @ value
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=self.causal, enable_gqa=groups > 1)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of u = x + bias, y = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))) [arXiv
    1606.08415].

    It is bound by memory: eager PyTorch writes u and reads it again, a kernel of
    torch.compile reads x and writes y, and backward reads x and dy and writes dx.
    """
    return functional.gelu(x + bias, approximate="tanh")


class FeedForward(nn.Module):
    """(B, S, hidden) -> (B, S, hidden): GELU (tanh), or SiLU times a gate. `fused`:
    `bias_gelu` in one kernel, if it is there.
    """

    def __init__(self, spec: Transformer):
        super().__init__()
        bias = spec.mlp_bias
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=bias)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=bias)
        self.fused: Callable | None = None
        # ViT has the exact GELU, GPT-2 its tanh form
        self.approximate = "none" if spec.image else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden)."""
        if self.gate is not None:
            return self.down(functional.silu(self.gate(x)) * self.up(x))
        if not self.fused:
            inner = functional.gelu(self.up(x), approximate=self.approximate)
            return self.down(inner)
        # in plain tensors; split by columns both are this rank's channels
        inner = functional.linear(x, self.up.weight)
        bias = self.up.bias
        if isinstance(inner, DTensor):
            inner = inner.to_local()
            bias = bias.to_local()
        return self.down(self.fused(inner, bias.to(inner.dtype)))


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then + feed-forward(norm(x)).

    recompute: none, full (all of the layer runs again in the backward pass), or
    selective (attention's core does, which is cheap to run and large to keep [arXiv
    2205.05198]).
    """

    def __init__(self, spec: Transformer, attention="flash"):
        super().__init__()
        self.attention_norm = norm(spec)
        self.attention = Attention(spec, attention)
        self.feed_forward_norm = norm(spec)
        self.feed_forward = Mixture(spec) if spec.experts else FeedForward(spec)
        self.recompute = False

    def checkpoint(self, recompute: str) -> None:
        """Choose what runs again in the backward pass: none, selective or full."""
        self.recompute = recompute == "full"
        self.attention.recompute = recompute == "selective"

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, S, hidden)."""
        return _rerun(self._forward, x) if self.recompute else self._forward(x)

    def _forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Exchange:
    """Swaps sequence for heads and back; does nothing without a group.

    One sequence on several ranks by DeepSpeed-Ulysses [arXiv 2309.14509]: every rank
    holds S/cp tokens of all heads; before attention it swaps them for all tokens of
    heads/cp, afterwards back. Queries, keys and values travel in one exchange, so a
    layer takes two all-to-alls forward and two backward. Positions are turned after the
    exchange, where the sequence is whole.
    """

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
