"""Sizes of state-space mixers: Mamba's weights, FLOPs, and what a backward pass needs.

The letters in the formulas: Q tokens of a chunk, N = mixer_state, G = mixer_groups,
D = mixer_channels, H = mixer_heads [Mamba-2, arXiv 2405.21060; Mamba-1, 2312.00752].
"""

from typing import NamedTuple

from madmax_lib.catalog.blocks import BlockKind, Blocks

# tokens that Mamba-2's kernels multiply at once [state-spaces/mamba, Mamba2: chunk_size]
_CHUNK = 256


class Matrix(NamedTuple):
    """A weight of a product: `outputs` = `inputs` times the matrix."""

    name: str
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        """Elements of the matrix; a token takes 2 FLOPs for each."""
        return self.inputs * self.outputs


def mixer_matrices(model, block: BlockKind) -> tuple[Matrix, ...]:
    """The weights of a mixer's products, the one into it first, the one out last."""
    inner = model.mixer_channels
    state = model.mixer_state
    rank = model.mixer_rank
    out = Matrix("mixer out", inner, model.hidden)
    if block == BlockKind.MAMBA_2:
        # gate and input (2 D), B and C of the groups (2 G N), dt of the heads (H)
        columns = 2 * inner + 2 * model.mixer_groups * state + model.mixer_heads
        return Matrix("mixer in", model.hidden, columns), out
    # B, C and dt, of low rank, come from what the convolution leaves
    x = Matrix("mixer x", inner, rank + 2 * state)
    dt = Matrix("mixer dt", rank, inner)
    matrices = (Matrix("mixer in", model.hidden, 2 * inner), x, dt, out)
    return matrices


def mixer_parameters(model, block: BlockKind) -> int:
    """Parameters of one mixer: weights, convolution, A, D, bias of dt, and Mamba-2's
    norm of what leaves it.
    """
    inner = model.mixer_channels
    state = model.mixer_state
    if block == BlockKind.MAMBA_2:
        convolved = inner + 2 * model.mixer_groups * state
        # A, D and the bias of dt are one number a head; the norm has D weights
        vectors = 3 * model.mixer_heads + inner
    else:
        convolved = inner
        vectors = (state + 2) * inner  # A is (D, N)
    products = sum(matrix.parameters for matrix in mixer_matrices(model, block))
    convolution = model.mixer_conv * convolved
    return products + convolution + vectors + model.other_mixer_parameters


def scan_flops(model, block: BlockKind, sequence: float) -> float:
    """FLOPs per token of the products in a scan, forward; Mamba-1's has none.

    In chunks of Q tokens: scores C B^T of the groups and their product with X,
    2 Q (G N + D); the states that a chunk leaves, and what it takes from the one
    before, 4 N D [arXiv 2405.21060, section 6].
    """
    if block == BlockKind.MAMBA_1:
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
    scores = model.mixer_groups * chunk
    states = 2 * model.mixer_channels * model.mixer_state / chunk
    return 2 * (scores + states)  # fp32 is two 16-bit elements


def mixer_elements(model, blocks: Blocks) -> int:
    """Elements per token that a mixer's scan keeps for its backward pass, and its
    result, which the norm needs.

    Mamba-2's kernels keep what enters the convolution and compute it again; Mamba-1's
    keep their operands [save_for_backward of mamba_split_conv1d_scan_combined and of
    selective_scan in state-spaces/mamba].
    """
    inner = model.mixer_channels
    state = model.mixer_state
    if blocks.has_mamba2:
        return 3 * inner + 2 * model.mixer_groups * state + model.mixer_heads
    return 4 * inner + model.mixer_rank + 2 * state if blocks.has_mixer else 0
