"""Models, with parameter counts and FLOPs in closed form; clusters and their parts are
named here too.

FLOPs count matrix products only (2 per multiply-add, causal attention counted dense),
as torch's FlopCounterMode does with MATH attention. What a model trains on is in
`hardware`.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from madmax_lib.base.fields import check_fields, dataclass_repr
from madmax_lib.catalog.blocks import WINDOWED, BlockKind, Blocks, check_blocks
from madmax_lib.catalog.dlrm import DLRM
from madmax_lib.catalog.hardware import Cluster, Device, Host, Link
from madmax_lib.catalog.layer_formulas import LayerFormulas
from madmax_lib.catalog.mixers import (
    Matrix,
    mixer_matrices,
    mixer_parameters,
    scan_flops,
)
from madmax_lib.catalog.refusals import refuse

__all__ = ["DLRM", "Cluster", "Device", "Host", "Link", "Model", "Transformer"]

_CHOICES = {
    "norm": ("layer", "rms"),
    "positions": ("learned", "rope", "none"),
    "attention_bias": ("all", "qkv", "none"),
}


@dataclass(frozen=True)
class Transformer(LayerFormulas):
    """A decoder language model; with `image` a vision transformer, with
    `predicted_share` an encoder, `experts` a mixture, `blocks` a stack of any.

    >>> tiny = Transformer("tiny", layers=2, hidden=64, heads=4, ffn=256, vocab=1000)
    >>> tiny.parameters, tiny.forward_flops(samples=1, sequence=128)
    (164096, 49938432.0)
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
    # attention side by side with the feed-forward part, or with a mixer, behind one
    # norm; under tp each has collectives of its own, as in transformers' plans
    shared_norm: bool = False
    tied: bool = True  # the head is the token table; never for images
    # of the tokens, those that the head predicts; below 1 an encoder with masked tokens,
    # which attend both ways [BERT, arXiv 1810.04805]; 2: of each the next two
    predicted_share: float = 1.0
    experts: int = 0  # of a mixture layer
    active_experts: int = 0  # of them, used by a token
    shared_experts: int = 0  # beside them, used by all tokens
    expert_ffn: int = 0  # inner channels of an expert; 0: ffn
    # channels of the latent that routed experts work in [Nemotron 3]; 0: hidden
    expert_latent: int = 0
    dense_layers: int = 0  # first layers that are no mixtures
    moe_every: int = 0  # after them every layer of this number is a mixture; 0: all
    routed_nodes: int = 0  # nodes that a token is sent to at most; 0: any
    router_bias: bool = False
    q_lora_rank: int = 0  # of the latent that queries come from; 0: directly
    # of the latent of keys and values: multi-head latent attention [DeepSeek-V2, arXiv
    # 2405.04434]
    kv_lora_rank: int = 0
    rope_head_dim: int = 0  # further channels per head that carry positions
    v_head_dim: int = 0  # channels of values per head; 0: head_dim
    attention_gate: bool = False  # queries bring a gate of attention's output
    head_gate: bool = False  # or a number per head [Step-3.5-Flash]
    shared_values: bool = False  # keys are values too
    reused_keys: bool = False  # and values are those of an earlier layer
    # of groups of heads, whose outputs enter a latent of this rank [DeepSeek-V4]
    output_groups: int = 0
    output_rank: int = 0
    # of an indexer that chooses the `window` tokens that a layer attends to
    # [DeepSeek-V3.2, arXiv 2512.02556]
    index_heads: int = 0
    index_dim: int = 0  # channels of its head
    window: int = 0  # tokens that a layer attends to; 0: all
    full_every: int = 0  # every layer of this number attends to all; 0: none
    sinks: bool = False  # one learned score per head beside those of the keys
    # of a block w, c or s, or of a further letter, in place of the model's, such as
    # "w.kv_heads=16 w.head_dim=256"
    block_fields: str = ""
    # tokens that become one, and how many of these an indexer chooses, 0 for all
    compression: int = 0
    index_top: int = 0
    # of the residual, mixed at each block: hyper-connections [arXiv 2512.24880]
    streams: int = 1
    image: int = 0  # edge in pixels; 0: no image
    patch: int = 0  # edge in pixels
    classes: int = 0  # outputs of the vision transformer's head
    # of a layer, beside products, biases and two norms: further norms, layer scales
    other_layer_parameters: int = 0
    other_parameters: int = 0  # beside layers and tables: types of tokens, a pooler
    # a word per layer, repeated: a letter per block (`BlockKind`), such as "M- *-";
    # empty: *- or *E
    blocks: str = ""
    # tokens of the decoder behind an encoder, whose layers have a block x
    decoder_sequence: int = 0
    # what sees, and the parameters between it and the decoder, whose `sequence` holds
    # a token for each merged patch of each image
    tower: "Transformer | None" = None
    images: float = 1.0  # of a sample, where there is a tower
    merged_patches: int = 1  # that become one token
    projector_parameters: int = 0
    mixer_channels: int = 0  # inner ones of state-space mixers
    mixer_state: int = 0  # numbers per channel
    mixer_heads: int = 0  # of Mamba-2
    mixer_groups: int = 0  # of its heads, that share B and C
    mixer_conv: int = 0  # tokens that the convolution sees
    mixer_rank: int = 0  # of dt in Mamba-1
    mixer_norm: bool = True  # of what leaves a mixer of Mamba-2
    # of a mixer, beside products, convolution, A, D and dt: biases, further norms
    other_mixer_parameters: int = 0

    __repr__ = dataclass_repr

    def __post_init__(self):
        check_fields(self, "layers", "hidden", "heads")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                refuse(self, name, f"is not one of {', '.join(choices)}")
        for name in ("q_lora_rank", "rope_head_dim"):
            if getattr(self, name) and not (self.kv_lora_rank or self.output_rank):
                refuse(self, name, "belongs to a kv_lora_rank above zero")
        if self.index_heads and not (self.index_dim and self.window):
            refuse(
                self, "index_heads", "belong to an index_dim and a window above zero"
            )
        if not self.head_dim and self.hidden % self.heads:
            refuse(self, "hidden", f"is not a multiple of heads={self.heads}")
        self._set_if_zero("kv_heads", self.heads)
        self._set_if_zero("head_dim", self.hidden // self.heads)
        self._set_if_zero("v_head_dim", self.head_dim)
        self._set_if_zero("expert_ffn", self.ffn)
        if self.image:
            if self.patch <= 0 or self.image % self.patch:
                refuse(self, "patch", f"does not divide image={self.image}")
            patches = (self.image // self.patch) ** 2
            self._set_if_zero("sequence", patches + 1)  # and the class token
            object.__setattr__(self, "tied", False)  # there is no token table
        if self.heads % self.kv_heads:
            refuse(self, "kv_heads", f"does not divide heads={self.heads}")
        if self.experts and not 0 < self.active_experts <= self.experts:
            refuse(self, "active_experts", f"is not in 1..{self.experts}")
        if self.dense_layers > self.layers:
            refuse(self, "dense_layers", f"are more than layers={self.layers}")
        check_blocks(self)

    def _set_if_zero(self, name, value):
        if not getattr(self, name):
            object.__setattr__(self, name, value)

    @cached_property
    def layer_kinds(self) -> list[Blocks]:
        """The blocks of each layer."""
        if self.blocks:
            period = [Blocks(word) for word in self.blocks.split()]
            return period * (self.layers // len(period))
        every = max(self.moe_every, 1)
        first = self.dense_layers if self.experts else self.layers
        return [
            Blocks("*E" if layer >= first and (layer + 1) % every == 0 else "*-")
            for layer in range(self.layers)
        ]

    @property
    def kinds(self) -> list[Blocks]:
        """The layers that differ, each once."""
        return list(dict.fromkeys(self.layer_kinds))

    @cached_property
    def variants(self) -> dict[str, "Transformer"]:
        """By block, w, c, s or further letter, the model with its sizes in place of its
        own.
        """
        fields = {letter: {} for letter in WINDOWED if letter in self.blocks}
        for part in self.block_fields.split():
            name, size = part.split("=")
            fields.setdefault(name[0], {})[name[2:]] = int(size)
        return {letter: replace(self, **sizes) for letter, sizes in fields.items()}

    @cached_property
    def all_blocks(self) -> Blocks:
        """The blocks of the layers that differ, one after another."""
        return Blocks("".join(self.kinds))

    @property
    def tp_heads(self) -> int:
        """Heads that the tp ranks share out, in layers of any attention."""
        heads = (model.heads for model in self.variants.values())
        return gcd(self.output_groups, self.heads, *heads)

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return sum(layer.has_experts for layer in self.layer_kinds)

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is a mixture of experts."""
        return self.layer_kinds[layer].has_experts

    @property
    def mixture_share(self) -> float:
        """Share of layers that are mixtures of experts."""
        return self.moe_layers / self.layers

    @property
    def windowed_share(self) -> float:
        """Share of layers that attend to a window only; `blocks` say themselves which."""
        full = self.layers // self.full_every if self.full_every else 0
        return 1 - full / self.layers if self.window and not self.blocks else 0.0

    @property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """The weights of one layer's attention; all but "projection", the last, are
        split by columns under tp.
        """
        queries = self.heads * self.score_dim
        projection = Matrix("projection", self.heads * self.v_head_dim, self.hidden)
        keys_values = self.kv_heads * self.key_value_outputs
        if not (self.kv_lora_rank or self.output_rank):
            queries += self.attention_gate * projection.inputs
            queries += self.head_gate * self.heads
            return Matrix("qkv", self.hidden, queries + keys_values), projection
        # Latent attention: queries may, keys and values do come from a latent
        # [DeepSeek-V2, arXiv 2405.04434, section 2.1].
        if rank := self.q_lora_rank:
            matrices = [
                Matrix("q_down", self.hidden, rank),
                Matrix("q_up", rank, queries),
            ]
        else:
            matrices = [Matrix("q", self.hidden, queries)]
        matrices.append(Matrix("gate", self.hidden, self.head_gate * self.heads))
        if latent := self.kv_lora_rank:
            keys_values = self.heads * (self.head_dim + self.v_head_dim)
            matrices += [
                Matrix("kv_down", self.hidden, latent + self.rope_head_dim),
                Matrix("kv_up", latent, keys_values),
            ]
        else:
            width = self.output_groups * self.output_rank
            matrices += [
                Matrix("kv", self.hidden, keys_values),
                Matrix("compressor", self.hidden, self.compressor_outputs),
                Matrix("output", projection.inputs // self.output_groups, width),
            ]
            projection = Matrix("projection", width, self.hidden)
        if self.index_heads:  # weights of heads too, and keys if none are compressed
            index = self.index_heads * self.index_dim
            keys = self.index_heads + self.index_dim * (self.compression == 0)
            matrices += [
                Matrix("index_q", rank or self.hidden, index),
                Matrix("index", self.hidden, keys),
            ]
        return *(matrix for matrix in matrices if matrix.outputs), projection

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        qkv = (1 + self.attention_gate) * self.heads * self.head_dim
        qkv += self.kv_heads * self.key_value_outputs
        bias = {"all": qkv + self.hidden, "qkv": qkv, "none": 0}[self.attention_bias]
        norms = self.qk_norm * (2 - self.reused_keys) * self.head_dim
        norms += self.q_lora_rank + self.kv_lora_rank
        # of the indexer's keys, with a bias but for compressed ones
        norms += self.index_dim * (1 + (self.compression == 0))
        if self.output_rank:  # of keys and of compressed ones, with biases of positions
            norms += self.head_dim * (1 + (self.compression > 0))
            norms += self.compression * self.compressor_outputs // 2
        sinks = self.sinks * self.heads
        products = sum(matrix.parameters for matrix in self.attention_matrices)
        more = self.other_layer_parameters - self.shared_norm * self.norm_parameters
        return products + bias + norms + sinks + more

    @property
    def compressor_outputs(self) -> int:
        """Channels per token of keys that are compressed, and of their weights: of two
        series, which overlap, where an indexer chooses.
        """
        series = (self.compression > 0) * (1 + (self.index_heads > 0))
        return 2 * series * (self.head_dim + self.index_dim)

    def layer_window(self, layer: int) -> int:
        """Tokens that a layer attends to, 0 for all."""
        is_full = self.full_every and (layer + 1) % self.full_every == 0
        if self.blocks:
            is_full = not self.layer_kinds[layer].windowed
        return 0 if is_full else self.window

    @property
    def norm_parameters(self) -> int:
        """Parameters of one normalisation."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def moe_parameters(self) -> int:
        """Parameters of the router and all experts of one MoE layer."""
        experts = self.experts * self.expert_parameters
        always = self.router_parameters + self.latent_parameters
        return always + self.shared_parameters + experts

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token table, or of patch projection and class token, of
        learned positions, of what stands beside, and of a tower.
        """
        table = self.vocab * self.hidden
        if self.image:
            projection = 3 * self.patch**2 * self.hidden + self.hidden  # three colours
            table = projection + self.hidden  # the class token
        positions = self.sequence * self.hidden if self.positions == "learned" else 0
        seen = self.tower.parameters if self.tower else 0
        seen += self.projector_parameters
        return table + positions + self.other_parameters + seen

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, 0 when it is the token table."""
        if self.image:
            return (self.hidden + 1) * self.classes
        return 0 if self.tied else self.vocab * self.hidden

    def block_parameters(self, block: BlockKind) -> int:
        """Parameters of a block without its norm."""
        model = self.variants.get(block, self)
        kind = BlockKind(block)
        if kind.is_mixer:
            return mixer_parameters(self, kind)
        if kind == BlockKind.FEED_FORWARD:
            return model.mlp_parameters(model.ffn)
        if kind == BlockKind.EXPERTS:
            return self.moe_parameters
        return model.attention_parameters

    @property
    def parameters(self) -> int:
        """All parameters, exactly."""
        blocks = Counter(block for layer in self.layer_kinds for block in layer)
        layers = sum(
            count * (self.block_parameters(block) + self.norm_parameters)
            for block, count in blocks.items()
        )
        ends = self.embedding_parameters + self.norm_parameters + self.head_parameters
        return layers + ends

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: of the experts only the active and shared
        ones.
        """
        experts = self.experts - self.active_experts
        return self.parameters - self.moe_layers * experts * self.expert_parameters

    def decoder_tokens(self, sequence: float) -> float:
        """Tokens that the head sees in a sample of `sequence` tokens: behind an encoder
        the decoder's share.
        """
        if not self.decoder_sequence:
            return sequence
        return sequence * self.decoder_sequence / self.sequence

    def forward_flops(self, samples: float = 1, sequence: int | None = None) -> float:
        """FLOPs of the forward pass, attention to all tokens or a window; the backward
        pass takes twice as many.
        """
        return samples * sum(self.flops_by_term(sequence).values())

    def flops_by_term(
        self, sequence: int | None = None, *, windows: bool = True
    ) -> dict[str, float]:
        """FLOPs of the forward pass of a sample by what takes them.

        windows: layers with a window attend to no more.
        """
        s = sequence or self.sequence
        terms = Counter()
        # n streams of the residual: at each block n^2 + 2 n weights from all of them mix
        # them, an n x n product, and at the head n
        n = self.streams
        mixed = (n > 1) * n * self.hidden
        # 2 FLOPs per multiply-add: (T, k) by (k, n) takes 2 T k n
        if self.image:
            terms["patches"] += 2 * (s - 1) * 3 * self.patch**2 * self.hidden
            terms["head"] += 2 * self.hidden * self.classes
        else:
            predicted = self.predicted_share * self.decoder_tokens(s)
            terms["head"] += 2 * predicted * (self.hidden * self.vocab + n * mixed)
        for layer, blocks in enumerate(self.layer_kinds):
            is_decoder = blocks.has_cross_attention
            tokens = self.decoder_tokens(s) if is_decoder else s
            window = self.layer_window(layer) if windows else 0
            keys = min(window or tokens, tokens)
            for block in blocks:
                terms["streams"] += 2 * tokens * (n**2 + 3 * n) * mixed
                self._add_block(terms, block, tokens, s if block == "x" else keys)
        if tower := self.tower:
            tokens = tower.sequence / self.merged_patches
            projected = 2 * tokens * self.projector_parameters
            terms["tower"] += self.images * (tower.forward_flops() + projected)
        return dict(terms)

    def _add_block(self, terms, letter, tokens, keys):
        """Add the FLOPs of a block for tokens that each attend to `keys`."""
        block = BlockKind(letter)
        if model := self.variants.get(letter):
            if ratio := model.compression:
                keys += min(tokens / ratio, model.index_top or tokens)
            model._add_block(terms, block.usual, tokens, keys)
            return
        if block in (BlockKind.ATTENTION, BlockKind.CROSS_ATTENTION):
            products = sum(matrix.parameters for matrix in self.attention_matrices)
            terms["projections"] += 2 * tokens * products
            terms["scores"] += 4 * tokens * keys * self.core_width
            # the indexer scores all keys, once
            index = 2 * self.index_heads * self.index_dim
            terms["index"] += tokens * tokens * index / max(self.compression, 1)
        if block == BlockKind.CROSS_ATTENTION:
            # keys and values come from the encoder's tokens: project these instead
            keys_values = self.kv_heads * (self.head_dim + self.v_head_dim)
            terms["projections"] += 2 * (keys - tokens) * self.hidden * keys_values
        if block.is_mixer:
            weights = sum(matrix.parameters for matrix in mixer_matrices(self, block))
            terms["mixers"] += 2 * tokens * weights
            terms["scan"] += tokens * scan_flops(self, block, tokens)
        twice = 2 * tokens * (2 + self.gated)  # two matrices, and that of a gate
        if block == BlockKind.FEED_FORWARD:
            terms["feed-forward"] += twice * self.hidden * self.ffn
        if block == BlockKind.EXPERTS:
            routed = self.active_experts * self.expert_inputs
            shared = self.shared_experts * self.hidden
            terms["experts"] += twice * routed * self.expert_ffn
            terms["shared experts"] += twice * shared * self.expert_ffn
            terms["router"] += 2 * tokens * self.hidden * self.experts  # scores all
            terms["latent"] += 2 * tokens * self.latent_parameters


Model = Transformer | DLRM
