"""What is trained? Models, with parameter counts and FLOPs in closed form; clusters and
their parts beside them.

FLOPs count matrix products only (2 per multiply-add, causal attention counted dense),
as torch's FlopCounterMode does with MATH attention. What a model trains on is in
`hardware`, and named here too.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from madmax_lib.base.fields import check_fields, dataclass_repr
from madmax_lib.catalog.hardware import Cluster, Device, Host, Link
from madmax_lib.catalog.mixers import (
    check_blocks,
    mixer_matrices,
    mixer_parameters,
    scan_flops,
)

__all__ = ["DLRM", "Cluster", "Device", "Host", "Link", "Model", "Transformer"]

_CHOICES = {
    "norm": ("layer", "rms"),
    "positions": ("learned", "rope", "none"),
    "attention_bias": ("all", "qkv", "none"),
}


@dataclass(frozen=True)
class Transformer:
    """A decoder language model; with `image` a vision transformer, `experts` a mixture,
    `blocks` a stack of any.
    """

    name: str
    layers: int
    hidden: int  # channels
    heads: int
    ffn: int  # inner channels of a dense feed-forward part
    sequence: int = 0  # tokens per sample; of images their patches and the class token
    vocab: int = 0  # rows of the token table, padding included
    kv_heads: int = 0  # heads of keys and values; 0: heads
    head_dim: int = 0  # channels of a head; 0: hidden / heads
    gated: bool = False  # the feed-forward part has a gate
    norm: str = "layer"  # layer (weight and bias) or rms
    positions: str = "learned"  # learned, rope, or none of a size: relative ones too
    attention_bias: str = "all"  # of all products, of qkv, or none
    qk_norm: bool = False  # rms norms of queries and keys per head
    mlp_bias: bool = True  # of the feed-forward products
    tied: bool = True  # the head is the token table; never for images
    experts: int = 0  # of a mixture layer
    active_experts: int = 0  # of them, used by a token
    shared_experts: int = 0  # beside them, used by all tokens
    expert_ffn: int = 0  # inner channels of an expert; 0: ffn
    dense_layers: int = 0  # first layers that are no mixtures
    moe_every: int = (
        0  # behind them only every layer of this number is a mixture; 0: all
    )
    routed_nodes: int = 0  # nodes that a token is sent to at most; 0: any
    router_bias: bool = False
    q_lora_rank: int = 0  # of the latent that queries come from; 0: directly
    # of that of keys and values: multi-head latent attention [DeepSeek-V2, arXiv
    # 2405.04434]
    kv_lora_rank: int = 0
    rope_head_dim: int = 0  # further channels per head that carry positions
    v_head_dim: int = 0  # channels of values per head; 0: head_dim
    window: int = 0  # tokens that a layer attends to; 0: all
    full_every: int = 0  # every layer of this number attends to all; 0: none
    sinks: bool = False  # one learned score per head beside those of the keys
    image: int = 0  # edge in pixels; 0: no image
    patch: int = 0  # edge in pixels
    classes: int = 0  # outputs of the vision transformer's head
    # of a layer, beside products, biases and two norms: further norms, layer scales
    other_layer_parameters: int = 0
    other_parameters: int = 0  # beside layers and tables: types of tokens, a pooler
    # a word per layer, repeated: a letter per block (`blocks.py`), such as "M- *-";
    # empty: *- or *E
    blocks: str = ""
    decoder_sequence: int = (
        0  # tokens of the decoder behind an encoder, whose layers have a block x
    )
    mixer_channels: int = 0  # inner ones of state-space mixers
    mixer_state: int = 0  # numbers per channel
    mixer_heads: int = 0  # of Mamba-2
    mixer_groups: int = 0  # of its heads, that share B and C
    mixer_conv: int = 0  # tokens that the convolution sees
    mixer_rank: int = 0  # of dt in Mamba-1
    # of a mixer, beside products, convolution, A, D and dt: biases, further norms
    other_mixer_parameters: int = 0

    __repr__ = dataclass_repr

    def __post_init__(self):
        check_fields(self, "layers", "hidden", "heads")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{self.name}: {name}={getattr(self, name)!r} is not one of "
                    f"{', '.join(known)}"
                )

        parts = [
            name
            for name in ("q_lora_rank", "rope_head_dim")
            if getattr(self, name) and not self.kv_lora_rank
        ]
        if parts:
            raise ValueError(
                f"{self.name}: {parts[0]}={getattr(self, parts[0])} belongs to a "
                "kv_lora_rank above zero"
            )
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                f"{self.name}: hidden={self.hidden} is not a multiple of "
                f"heads={self.heads}"
            )
        defaults = {
            "kv_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "expert_ffn": self.ffn,
        }
        if self.image:
            if self.patch <= 0 or self.image % self.patch:
                raise ValueError(
                    f"{self.name}: patch={self.patch} does not divide "
                    f"image={self.image}"
                )
            defaults["sequence"] = (
                self.image // self.patch
            ) ** 2 + 1  # patches and the class token
            object.__setattr__(self, "tied", False)  # there is no token table
        for name, value in [
            *defaults.items(),
            ("v_head_dim", self.head_dim or defaults["head_dim"]),
        ]:
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: kv_heads={self.kv_heads} does not divide "
                f"heads={self.heads}"
            )
        if self.experts and not 0 < self.active_experts <= self.experts:
            raise ValueError(
                f"{self.name}: active_experts={self.active_experts} is not in "
                f"1..{self.experts}"
            )
        if self.dense_layers > self.layers:
            raise ValueError(
                f"{self.name}: dense_layers={self.dense_layers} are more than "
                f"layers={self.layers}"
            )
        check_blocks(self)

    @cached_property
    def words(self) -> list[str]:
        """Blocks of each layer, a letter per block as in `blocks`."""
        if words := self.blocks.split():
            return words * (self.layers // len(words))
        every = max(self.moe_every, 1)
        first = self.dense_layers if self.experts else self.layers
        return [
            "*E" if layer >= first and (layer + 1) % every == 0 else "*-"
            for layer in range(self.layers)
        ]

    @property
    def kinds(self) -> list[str]:
        """Words of the layers that differ."""
        return list(dict.fromkeys(self.words))

    @property
    def attends(self) -> bool:
        """Whether any layer has attention."""
        return not self.blocks or "*" in self.blocks

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return sum("E" in word for word in self.words)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is a mixture of experts."""
        return "E" in self.words[layer]

    @property
    def attention_matrices(self) -> tuple[tuple[str, int, int], ...]:
        """(name, inputs, outputs) of one layer's weights; all but "projection" are
        split by columns under tp.
        """
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        scored = self.head_dim + self.rope_head_dim
        projection = ("projection", self.heads * self.v_head_dim, self.hidden)
        if not self.kv_lora_rank:
            return ("qkv", self.hidden, q + 2 * kv), projection
        rank = self.q_lora_rank
        out = self.heads * scored
        query = (
            (("q_down", self.hidden, rank), ("q_up", rank, out))
            if rank
            else (("q", self.hidden, out),)
        )
        down = ("kv_down", self.hidden, self.kv_lora_rank + self.rope_head_dim)
        return (
            *query,
            down,
            (
                "kv_up",
                self.kv_lora_rank,
                self.heads * (self.head_dim + self.v_head_dim),
            ),
            projection,
        )

    @property
    def core_width(self) -> float:
        """Channels of all heads, mean of scores and values: attention takes 4 x
        core_width FLOPs per query and key.
        """
        return self.heads * (self.head_dim + self.rope_head_dim + self.v_head_dim) / 2

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        bias = {"all": q + 2 * kv + self.hidden, "qkv": q + 2 * kv, "none": 0}[
            self.attention_bias
        ]
        norms = (
            (2 * self.head_dim if self.qk_norm else 0)
            + self.q_lora_rank
            + self.kv_lora_rank
        )
        sinks = self.heads if self.sinks else 0
        products = sum(
            inputs * outputs for _, inputs, outputs in self.attention_matrices
        )
        return products + bias + norms + sinks + self.other_layer_parameters

    def layer_window(self, layer: int) -> int:
        """Tokens that a layer attends to, 0 for all."""
        return (
            0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window
        )

    def mlp_parameters(self, width: int) -> int:
        """Of one feed-forward block of that width."""
        matrices = 3 if self.gated else 2
        bias = (matrices - 1) * width + self.hidden if self.mlp_bias else 0
        return matrices * self.hidden * width + bias

    @property
    def norm_parameters(self) -> int:
        """Of one normalisation."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def moe_parameters(self) -> int:
        """Of the router and all experts of one MoE layer."""
        experts = self.experts + self.shared_experts
        return (
            self.hidden + self.router_bias
        ) * self.experts + experts * self.mlp_parameters(self.expert_ffn)

    @property
    def embedding_parameters(self) -> int:
        """Token table or patch projection with class token, learned positions, and what
        stands beside.
        """
        positions = self.sequence * self.hidden if self.positions == "learned" else 0
        if self.image:
            return (
                3 * self.patch**2 * self.hidden
                + self.hidden
                + self.hidden
                + positions
                + self.other_parameters
            )
        return self.vocab * self.hidden + positions + self.other_parameters

    @property
    def head_parameters(self) -> int:
        """Output projection, 0 when it is the token table."""
        if self.image:
            return (self.hidden + 1) * self.classes
        return 0 if self.tied else self.vocab * self.hidden

    def block_parameters(self, letter: str) -> int:
        """Of a block without its norm."""
        if letter in "Mm":
            return mixer_parameters(self, letter)
        return {"-": self.mlp_parameters(self.ffn), "E": self.moe_parameters}.get(
            letter, self.attention_parameters
        )

    @property
    def parameters(self) -> int:
        """All parameters, exactly."""
        count = Counter("".join(self.words))
        layers = sum(
            count[letter] * (self.block_parameters(letter) + self.norm_parameters)
            for letter in count
        )
        return (
            self.embedding_parameters
            + layers
            + self.norm_parameters
            + self.head_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: of the experts only the active and shared
        ones.
        """
        idle = (self.experts - self.active_experts) * self.mlp_parameters(
            self.expert_ffn
        )
        return self.parameters - self.moe_layers * idle

    def decoder_tokens(self, sequence: float) -> float:
        """Tokens that the head sees where a sample has so many: of a decoder behind an
        encoder as many as its share.
        """
        return (
            sequence * self.decoder_sequence / self.sequence
            if self.decoder_sequence
            else sequence
        )

    def forward_flops(self, samples: float = 1, sequence: int | None = None) -> float:
        """FLOPs of the forward pass, attention to all tokens or a window; the backward
        pass takes twice as many.
        """
        s = sequence or self.sequence
        layers = 0.0
        for number, word in enumerate(self.words):
            tokens = self.decoder_tokens(s) if "x" in word else s
            seen = min(self.layer_window(number) or tokens, tokens)
            layers += sum(
                self._block_flops(letter, tokens, s if letter == "x" else seen, s)
                for letter in word
            )
        of_image = (
            2 * (s - 1) * 3 * self.patch**2 * self.hidden
            + 2 * self.hidden * self.classes
        )
        ends = (
            of_image
            if self.image
            else 2 * self.decoder_tokens(s) * self.hidden * self.vocab
        )
        return samples * (layers + ends)

    def _block_flops(
        self, letter: str, tokens: float, seen: float, sequence: float
    ) -> float:
        """Of a block with so many tokens that attend to those `seen`."""
        matrices = 3 if self.gated else 2
        if letter == "-":
            return 2 * tokens * matrices * self.hidden * self.ffn
        if letter == "E":
            used = self.active_experts + self.shared_experts
            return (
                2
                * tokens
                * (
                    used * matrices * self.hidden * self.expert_ffn
                    + self.hidden * self.experts
                )
            )
        own = (
            mixer_matrices(self, letter) if letter in "Mm" else self.attention_matrices
        )
        flops = 2 * tokens * sum(inputs * outputs for _, inputs, outputs in own)
        if letter in "Mm":
            return flops + tokens * scan_flops(self, letter, tokens)
        if letter == "x":  # keys and values come from the encoder's tokens
            flops += (
                2
                * (sequence - tokens)
                * self.hidden
                * self.kv_heads
                * (self.head_dim + self.v_head_dim)
            )
        return flops + 4 * tokens * seen * self.core_width


@dataclass(frozen=True)
class DLRM:
    """A recommendation model: embedding tables, a bottom and a top stack of square
    layers, as MAD-Max describes it.

    pooling: lookups per table and sample. transformer_layers of width attention_dim and
    transformer_ffn on transformer_sequence tokens may stand between the stacks; with
    experts every top layer is a mixture.
    """

    name: str
    tables: int
    entries: int
    embedding_dim: int
    pooling: int
    bottom_layers: int
    top_layers: int
    mlp_dim: int
    transformer_layers: int = 0
    attention_dim: int = 0
    transformer_ffn: int = 0
    transformer_sequence: int = 0
    experts: int = 0
    active_experts: int = 0

    __repr__ = dataclass_repr

    def __post_init__(self):
        check_fields(self, "tables", "entries", "embedding_dim", "pooling", "mlp_dim")

    @property
    def embedding_parameters(self) -> int:
        """Of all tables."""
        return self.tables * self.entries * self.embedding_dim

    @property
    def parameters(self) -> int:
        """All parameters of the model as the paper counts them (no biases)."""
        top = self.top_layers * max(self.experts, 1)
        block = (
            4 * self.attention_dim**2 + 2 * self.attention_dim * self.transformer_ffn
        )
        dense = (
            self.bottom_layers + top
        ) * self.mlp_dim**2 + self.transformer_layers * block
        return self.embedding_parameters + dense

    def forward_flops(self, samples: float = 1) -> float:
        """FLOPs of the forward pass, matrix products only (no attention scores, as in
        the paper).
        """
        top = self.top_layers * max(self.active_experts, 1)
        block = (
            8 * self.attention_dim**2 + 4 * self.attention_dim * self.transformer_ffn
        )
        tokens = self.transformer_layers * self.transformer_sequence
        return samples * (
            2 * (self.bottom_layers + top) * self.mlp_dim**2 + tokens * block
        )


Model = Transformer | DLRM
