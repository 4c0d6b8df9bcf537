"""Kinds of blocks that a layer is made of, and the check of a model that lists them.

A usual layer is "*-", a mixture of experts "*E". Nemotron-H has layers of one block
each, T5's decoder has "*x-".
"""

from enum import StrEnum
from string import ascii_letters, digits

from madmax_lib.catalog.refusals import refuse

# of mixers with heads
_HEADS = ("mixer_channels", "mixer_state", "mixer_heads")


class BlockKind(StrEnum):
    """A block of a layer, by its letter in Megatron-Core's hybrid patterns.

    w, c, s, r, x, m, K, F and L are ours: Megatron-Core has no letter for them. Further
    capitals are attention, further small letters and digits feed-forward parts, with
    sizes of their own (`Transformer.block_fields`).

    >>> [BlockKind(letter).name for letter in "*A-7"]
    ['ATTENTION', 'ATTENTION', 'FEED_FORWARD', 'FEED_FORWARD']
    """

    # letter, what it is, and the fields of a model that it needs
    ATTENTION = "*", "attention"
    WINDOWED = "w", "attention to a window", "window"
    COMPRESSED = "c", "attention to a window and compressed tokens", "window"
    CHOSEN = "s", "attention to a window and chosen compressed tokens", "window"
    REUSING = "r", "attention to a window, and to keys of another layer", "window"
    CROSS_ATTENTION = "x", "attention to the encoder", "decoder_sequence", "sequence"
    FEED_FORWARD = "-", "feed-forward part", "ffn"
    EXPERTS = "E", "experts", "experts"
    MAMBA_2 = (
        "M",
        "Mamba-2 [arXiv 2405.21060]",
        *_HEADS,
        "mixer_groups",
        "mixer_conv",
    )
    MAMBA_1 = (
        "m",
        "Mamba-1 [arXiv 2312.00752]",
        "mixer_channels",
        "mixer_state",
        "mixer_rank",
        "mixer_conv",
    )
    DELTA_NET = (
        "G",
        "gated delta net [arXiv 2412.06464]",
        *_HEADS,
        "mixer_groups",
        "mixer_conv",
    )
    KIMI_DELTA = (
        "K",
        "Kimi delta attention [arXiv 2510.26692]",
        *_HEADS,
        "mixer_conv",
    )
    FULL_KIMI_DELTA = (
        "F",
        "Kimi delta attention with gates of full rank [Ling 3]",
        *_HEADS,
        "mixer_conv",
    )
    LIGHTNING = (
        "L",
        "lightning attention [arXiv 2501.08313]",
        *_HEADS,
        "mixer_groups",
    )

    def __new__(cls, letter: str, label: str, *sizes: str):
        """The letter, which knows its label and the sizes that it needs."""
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.label = label
        kind.sizes = sizes
        return kind

    @classmethod
    def _missing_(cls, letter):
        if letter in FURTHER:
            return cls.ATTENTION if letter.isupper() else cls.FEED_FORWARD
        return None

    @property
    def usual(self) -> "BlockKind":
        """Attention in place of one that attends to a window; else the kind itself."""
        return BlockKind.ATTENTION if self in WINDOWED else self

    @property
    def is_mixer(self) -> bool:
        """Whether it carries a state from token to token."""
        return "mixer_channels" in self.sizes


class Blocks(str):
    """The blocks of a layer, or of a model, in order: a letter each.

    >>> layer = Blocks("*E")
    >>> layer.has_experts, layer.has_mixer
    (True, False)
    """

    __slots__ = ()

    @property
    def kinds(self) -> list[BlockKind]:
        """Each letter as a kind of block; blanks part layers."""
        return [BlockKind(letter) for letter in self.replace(" ", "")]

    @property
    def has_attention(self) -> bool:
        """Whether a block has attention of tokens to each other."""
        return any(kind.usual == BlockKind.ATTENTION for kind in self.kinds)

    @property
    def windowed(self) -> bool:
        """Whether a block attends to a window."""
        return any(letter in WINDOWED for letter in self)

    @property
    def has_cross_attention(self) -> bool:
        """Whether a block has attention to an encoder."""
        return BlockKind.CROSS_ATTENTION in self

    @property
    def has_experts(self) -> bool:
        """Whether a block is a mixture of experts."""
        return BlockKind.EXPERTS in self

    @property
    def has_mixer(self) -> bool:
        """Whether a block carries a state from token to token."""
        return any(kind.is_mixer for kind in self.kinds)


# attention to a window, and in c and s to compressed tokens [DeepSeek-V4], in r to keys
# of another layer [Gemma 4], which may have sizes of its own
WINDOWED = "wcsr"
# letters of attention and of feed-forward parts with sizes of their own
FURTHER = {*ascii_letters, *digits}.difference(BlockKind)
# fields that describe a stack of usual layers: blocks say it in their own way
OF_USUAL_STACKS = ("dense_layers", "moe_every", "full_every", "image")


def check_blocks(model) -> None:
    """Raises ValueError for blocks of a model that are none, or lack a size."""
    if (model.decoder_sequence > 0) != (BlockKind.CROSS_ATTENTION in model.blocks):
        refuse(model, "decoder_sequence", "and blocks with x belong together")
    stated = {*BlockKind}
    for part in model.block_fields.split():
        name, _, size = part.partition("=")
        block, _, field = name.partition(".")
        is_block = block in {*WINDOWED, *FURTHER}
        if not (is_block and hasattr(model, field) and size.isdecimal()):
            refuse(model, "block_fields", f"is not made of such as w.heads=8: {part}")
        stated.add(block)
    if not model.blocks:
        return
    words = model.blocks.split()
    if not words or model.layers % len(words):
        raise ValueError(
            f"{model.name}: blocks are {len(words)} words, which {model.layers} layers do "
            "not repeat evenly"
        )
    letters = dict.fromkeys("".join(words))
    for letter in letters:
        if letter not in stated:
            raise ValueError(
                f"{model.name}: blocks have {letter!r}, which is none of "
                f"{' '.join(BlockKind)}"
            )
        kind = BlockKind(letter)
        for size in kind.sizes:
            if not getattr(model, size):
                raise ValueError(
                    f"{model.name}: blocks have {kind.label}, but {size}=0"
                )
    _check_combinations(model)


def _check_combinations(model):
    """Raises ValueError for fields, mixers and orders that do not go together."""
    blocks = Blocks(model.blocks)
    uses = {"experts": blocks.has_experts, "window": blocks.windowed}
    for field in (*OF_USUAL_STACKS, *uses):
        if getattr(model, field) and not uses.get(field):
            refuse(model, field, f"does not go with blocks={model.blocks!r}")
    mixers = {kind.label for kind in blocks.kinds if kind.is_mixer}
    if len(mixers) > 1:
        raise ValueError(
            f"{model.name}: blocks have {' and '.join(sorted(mixers))}, whose sizes differ"
        )
    # a head has equal channels, a group equal heads
    heads = model.mixer_heads or 1
    if model.mixer_channels % heads or heads % (model.mixer_groups or heads):
        sizes = f"mixer_heads={heads} and mixer_groups={model.mixer_groups}"
        raise ValueError(
            f"{model.name}: {sizes} must divide mixer_channels={model.mixer_channels} "
            "and the heads"
        )
    is_decoder = [layer.has_cross_attention for layer in model.layer_kinds]
    if is_decoder != sorted(is_decoder):
        raise ValueError(
            f"{model.name}: blocks have layers of the encoder behind one of the decoder"
        )
