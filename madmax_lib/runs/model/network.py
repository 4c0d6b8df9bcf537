"""A whole transformer, or one stage of it: embedding, layers, norm and head, for text
(decoder) or images (ViT).

A stage keeps the names of the whole, and every parameter is drawn from a generator
seeded by its name: the numbers depend on neither the layout nor the order. Weights N(0,
0.02), those that end a residual branch smaller by sqrt(2 layers) [Radford et al. 2019].
"""

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.types import Device

from madmax_lib.catalog.models import Transformer
from madmax_lib.runs.model.layers import TransformerLayer, norm
from madmax_lib.runs.model.weights import Weights

__all__ = ["Network", "PatchEmbedding", "TokenEmbedding", "draw", "named_generator"]

_BRANCH_ENDS = ("projection.weight", "down.weight", "experts.down")
_SPREAD = 0.02


class TokenEmbedding(nn.Module):
    """Tokens (B, S) to (B, S, hidden), with learned positions where the model has them.

    `offset` is the position of this rank's first token where ranks share a sequence,
    `table` makes the rows at hand plain tensors where the parameter is distributed.
    """

    def __init__(self, spec: Transformer):
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab, spec.hidden)
        learned = spec.positions == "learned"
        self.positions = (
            nn.Parameter(torch.empty(spec.sequence, spec.hidden)) if learned else None
        )
        self.offset = 0
        self.table: Callable[[Tensor], Tensor] = lambda positions: positions

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, S)."""
        x = self.tokens(tokens)
        if self.positions is None:
            return x
        return x + self.table(self.positions)[self.offset : self.offset + x.shape[1]]


class PatchEmbedding(nn.Module):
    """Images (B, 3, H, W) to a class token and one token per patch (B, 1 + patches,
    hidden), with positions.
    """

    def __init__(self, spec: Transformer):
        super().__init__()
        self.patches = nn.Conv2d(3, spec.hidden, spec.patch, spec.patch)
        self.first = nn.Parameter(torch.empty(spec.hidden))
        self.positions = nn.Parameter(torch.empty(spec.sequence, spec.hidden))

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, 3, H, W)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.expand(len(images), 1, -1).to(patches.dtype)
        return torch.cat((first, patches), dim=1) + self.positions


class Network(nn.Module):
    """Layers `part` of a model; the first part has the embedding, the last the norm and
    the head.

    Built without storage; `materialise` fills it. part: None for all layers.
    """

    def __init__(
        self, spec: Transformer, *, attention: str = "flash", part: range | None = None
    ):
        super().__init__()
        part = range(spec.layers) if part is None else part
        first = part.start == 0
        last = part.stop == spec.layers
        self.spec = spec
        with torch.device("meta"):
            self.embedding = (
                (PatchEmbedding if spec.image else TokenEmbedding)(spec)
                if first
                else None
            )
            self.layers = nn.ModuleDict(
                {str(i): TransformerLayer(spec, attention) for i in part}
            )
            self.norm = norm(spec) if last else None
            rows = spec.classes or spec.vocab
            self.head = (
                nn.Linear(spec.hidden, rows, bias=bool(spec.image)) if last else None
            )
        self.tie()

    def tie(self) -> None:
        """Make head and token table one parameter, where both are here."""
        if self.spec.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens or images at the first part, (B, S, hidden) at others."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None:
            return x
        return self.head(self.norm(x[:, 0] if self.spec.image else x))

    def units(self) -> Iterable[tuple[str, nn.Module]]:
        """The layers by their full name."""
        return ((f"layers.{name}", layer) for name, layer in self.layers.items())

    def ends(self) -> Iterable[tuple[str, nn.Module]]:
        """What is not in a layer, by name."""
        children = (
            (name, getattr(self, name)) for name in ("embedding", "norm", "head")
        )
        return ((name, child) for name, child in children if child is not None)

    def materialise(
        self, seed: int, device: Device, weights: Weights | None = None
    ) -> "Network":
        """Allocate and draw all parameters, or read them from published weights."""
        for name, part in (*self.units(), *self.ends()):
            draw(part, name, self.spec, seed, device, weights)
        self.tie()
        return self


def draw(
    module: nn.Module,
    prefix: str,
    spec: Transformer,
    seed: int,
    device: Device,
    weights: Weights | None = None,
) -> None:
    """Allocate a module on the device and draw its parameters, each from a generator
    seeded by its full name.

    weights: published ones that overwrite what was drawn.
    """
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        full = f"{prefix}.{name}"
        with torch.no_grad():
            _draw(parameter, full, spec, seed)
    if weights is not None:
        weights.fill(module, prefix)


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator seeded by a number and a name; 32 bits, as the CPU's takes no more."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _draw(parameter: Tensor, name: str, spec: Transformer, seed: int) -> None:
    if "norm" in name:
        parameter.fill_(float(name.endswith("weight")))
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        # the head of a tied model is the token table, also on a stage that has only one
        # of them
        name = (
            "embedding.tokens.weight" if name == "head.weight" and spec.tied else name
        )
        generator = named_generator(seed, name, parameter.device)
        spread = (
            _SPREAD / (2 * spec.layers) ** 0.5
            if name.endswith(_BRANCH_ENDS)
            else _SPREAD
        )
        parameter.normal_(0.0, spread, generator=generator)
