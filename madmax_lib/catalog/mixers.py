"""Which blocks can a layer have, and what is a state-space mixer? Letters of blocks,
and sizes of Mamba's.

A usual layer is "*-", a mixture of experts "*E". Nemotron-H has layers of one block
each, T5's decoder has "*x-".
"""

__all__ = [
    "check_blocks",
    "chunk_elements",
    "mixer_elements",
    "mixer_matrices",
    "mixer_parameters",
    "scan_flops",
]

# tokens that Mamba-2's kernels multiply at once [state-spaces/mamba, Mamba2:
# chunk_size]
_CHUNK = 256
_LETTERS = {  # of Megatron-Core's hybrid patterns, but for x and m
    "*": ("attention", ()),
    "x": ("attention to the encoder", ("decoder_sequence", "sequence")),
    "-": ("feed-forward part", ("ffn",)),
    "E": ("experts", ("experts",)),
    "M": (
        "Mamba-2 [arXiv 2405.21060]",
        ("mixer_channels", "mixer_state", "mixer_heads", "mixer_groups", "mixer_conv"),
    ),
    "m": (
        "Mamba-1 [arXiv 2312.00752]",
        ("mixer_channels", "mixer_state", "mixer_rank", "mixer_conv"),
    ),
}
_OTHERWISE = (
    "dense_layers",
    "moe_every",
    "window",
    "image",
    "kv_lora_rank",
)  # what a usual stack says


def check_blocks(model) -> None:
    """Raises ValueError for blocks of a model that are none, or lack a size."""
    name = model.name
    words = model.blocks.split()
    if (model.decoder_sequence > 0) != ("x" in model.blocks):
        raise ValueError(
            f"{name}: decoder_sequence={model.decoder_sequence} and blocks with x "
            "belong together"
        )
    if not model.blocks:
        return
    if not words or model.layers % len(words):
        raise ValueError(
            f"{name}: blocks are {len(words)} words, which {model.layers} layers do "
            "not repeat evenly"
        )
    letters = dict.fromkeys("".join(words))
    if unknown := [letter for letter in letters if letter not in _LETTERS]:
        raise ValueError(
            f"{name}: blocks have {unknown[0]!r}, which is none of {' '.join(_LETTERS)}"
        )
    missing = [
        (size, letter)
        for letter in letters
        for size in _LETTERS[letter][1]
        if not getattr(model, size)
    ]
    if missing:
        raise ValueError(
            f"{name}: blocks have {_LETTERS[missing[0][1]][0]}, but {missing[0][0]}=0"
        )
    other = next(
        (field for field in _OTHERWISE if getattr(model, field)),
        "" if "E" in letters else "experts",
    )
    if other and getattr(model, other):
        raise ValueError(
            f"{name}: {other}={getattr(model, other)} does not go with "
            f"blocks={model.blocks!r}"
        )
    if {"M", "m"} <= set(letters):
        raise ValueError(f"{name}: blocks have Mamba-1 and Mamba-2, whose sizes differ")
    groups = model.mixer_groups or 1
    if "M" in letters and (
        model.mixer_channels % model.mixer_heads or model.mixer_heads % groups
    ):
        sizes = f"mixer_heads={model.mixer_heads} and mixer_groups={groups}"
        raise ValueError(
            f"{name}: {sizes} must divide mixer_channels={model.mixer_channels} and "
            "the heads"
        )
    if "x" in letters and ["x" in word for word in model.words] != sorted(
        "x" in word for word in model.words
    ):
        raise ValueError(
            f"{name}: blocks have layers of the encoder behind one of the decoder"
        )


def mixer_matrices(model, letter: str) -> tuple[tuple[str, int, int], ...]:
    """(name, inputs, outputs) of the weights of a mixer."""
    inner = model.mixer_channels
    state = model.mixer_state
    rank = model.mixer_rank
    out = ("mixer out", inner, model.hidden)
    if letter == "M":  # gate, input, B and C of the groups, dt of the heads
        return (
            "mixer in",
            model.hidden,
            2 * inner + 2 * model.mixer_groups * state + model.mixer_heads,
        ), out
    x = ("mixer x", inner, rank + 2 * state)
    dt = ("mixer dt", rank, inner)
    return ("mixer in", model.hidden, 2 * inner), x, dt, out


def mixer_parameters(model, letter: str) -> int:
    """Of one mixer: weights, convolution, A, D, bias of dt, and Mamba-2's norm of what
    leaves it.
    """
    inner = model.mixer_channels
    state = model.mixer_state
    heads = model.mixer_heads
    products = sum(
        inputs * outputs for _, inputs, outputs in mixer_matrices(model, letter)
    )
    if letter == "M":
        own = (
            model.mixer_conv * (inner + 2 * model.mixer_groups * state)
            + 3 * heads
            + inner
        )
    else:
        own = model.mixer_conv * inner + (state + 2) * inner
    return products + own + model.other_mixer_parameters


def scan_flops(model, letter: str, sequence: float) -> float:
    """FLOPs per token of the products in a scan, forward; Mamba-1's has none.

    In chunks of Q tokens, N = mixer_state: scores C B^T of the groups and their product
    with X, the states that a chunk leaves, and what it takes from the one before [arXiv
    2405.21060, section 6].
    """
    if letter == "m":
        return 0.0
    chunk = min(_CHUNK, sequence)
    inner = model.mixer_channels
    state = model.mixer_state
    return 2 * chunk * (model.mixer_groups * state + inner) + 4 * state * inner


def chunk_elements(model, sequence: float) -> float:
    """16-bit elements per token of what Mamba-2's kernels keep of chunks in fp32:
    scores, and states twice.
    """
    chunk = min(_CHUNK, sequence)
    return 2 * (
        model.mixer_groups * chunk
        + 2 * model.mixer_channels * model.mixer_state / chunk
    )


def mixer_elements(model, letters: str) -> int:
    """Elements per token that a mixer's scan keeps for its backward pass, and its
    result, which the norm needs.

    Mamba-2's kernels keep what enters the convolution and compute it again; Mamba-1's
    keep their operands [save_for_backward of mamba_split_conv1d_scan_combined and of
    selective_scan in state-spaces/mamba].
    """
    inner = model.mixer_channels
    state = model.mixer_state
    if "M" in letters:
        return 3 * inner + 2 * model.mixer_groups * state + model.mixer_heads
    return 4 * inner + model.mixer_rank + 2 * state if "m" in letters else 0
