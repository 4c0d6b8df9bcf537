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
from torch.nn import functional
from torch.types import Device

from madmax_lib.catalog import Transformer
from madmax_lib.runs.model.layers import TransformerLayer, norm
from madmax_lib.runs.model.weights import Weights

# last weights of the residual branches
_BRANCH_ENDS = ("projection.weight", "down.weight", "experts.down")
_SPREAD = 0.02  # standard deviation of all others


class TokenEmbedding(nn.Module):
    """Tokens (B, S) to (B, S, hidden), with learned positions where the model has them.

    `offset` is the position of this rank's first token where ranks share a sequence,
    `table` makes the rows at hand plain tensors where the parameter is distributed.
    """

    def __init__(self, spec: Transformer):
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.positions: nn.Parameter | None = None
        if spec.positions == "learned":
            self.positions = nn.Parameter(torch.empty(spec.sequence, spec.hidden))
        self.offset = 0
        self.table: Callable[[Tensor], Tensor] = lambda positions: positions

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, S)."""
        x = self.tokens(tokens)
        if self.positions is None:
            return x
        last = self.offset + x.shape[1]
        return x + self.table(self.positions)[self.offset : last]


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
        # (B, hidden, H/patch, W/patch) to (B, patches, hidden)
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.first.expand(len(images), 1, -1).to(patches.dtype)
        return torch.cat((first, patches), dim=1) + self.positions


class Network(nn.Module):
    """Layers `part` of a model; the first part has the embedding, the last the norm and
    the head.

    Built without storage; `materialise` fills it. part: None for all layers.
    """

    def __init__(
        self, spec: Transformer, *, attention="flash", part: range | None = None
    ):
        super().__init__()
        part = range(spec.layers) if part is None else part
        self.spec = spec
        self.embedding = self.norm = self.head = None
        with torch.device("meta"):
            if part.start == 0:
                embedding = PatchEmbedding if spec.image else TokenEmbedding
                self.embedding = embedding(spec)
            self.layers = nn.ModuleDict(
                {str(number): TransformerLayer(spec, attention) for number in part}
            )
            if part.stop == spec.layers:
                self.norm = norm(spec)
                rows = spec.classes or spec.vocab
                self.head = nn.Linear(spec.hidden, rows, bias=spec.image > 0)
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
        if self.spec.image:
            x = x[:, 0]  # the class token
        return self.head(self.norm(x))

    def units(self) -> Iterable[tuple[str, nn.Module]]:
        """The layers by their full name."""
        return ((f"layers.{name}", layer) for name, layer in self.layers.items())

    def ends(self) -> Iterable[tuple[str, nn.Module]]:
        """Modules of this part that are in no layer, by name."""
        ends = {"embedding": self.embedding, "norm": self.norm, "head": self.head}
        return ((name, end) for name, end in ends.items() if end is not None)

    def freeze_ends(self) -> None:
        """Freeze embedding and last norm; the head is trained, unless it is the token
        table.
        """
        for name, end in self.ends():
            if name != "head" or self.spec.tied:
                end.requires_grad_(False)

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
        with torch.no_grad():
            _draw(parameter, f"{prefix}.{name}", spec, seed)
    if weights is not None:
        weights.fill(module, prefix)


def _named_generator(seed, name, device):
    """A generator seeded by a number and a name; 32 bits, as the CPU's takes no more."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _draw(parameter, name, spec, seed):
    if "norm" in name:
        parameter.fill_(float(name.endswith("weight")))
        return
    if name.endswith("bias"):
        parameter.zero_()
        return
    # the head of a tied model is the token table, also on a stage that has one of them
    if name == "head.weight" and spec.tied:
        name = "embedding.tokens.weight"
    spread = _SPREAD
    if name.endswith(_BRANCH_ENDS):  # two branches a layer add up in the residual
        spread /= (2 * spec.layers) ** 0.5
    generator = _named_generator(seed, name, parameter.device)
    parameter.normal_(0.0, spread, generator=generator)


class LowRank(nn.Linear):
    """A frozen linear layer plus a trained update of low rank [arXiv 2106.09685],
    scaled by 1. Keeps the names of the linear layer.

    It gains B A x, with A (rank, in) drawn and B (out, rank) zero, so that training
    starts at the model itself.
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
        generator = _named_generator(seed, full_name, base.weight.device)
        setattr(layer.attention, part, LowRank(base, rank, generator))
