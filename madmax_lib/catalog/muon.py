"""Work of Muon, which makes the update of each matrix nearly orthogonal: five steps of
Newton and Schulz [Jordan et al., 2024; Moonlight, arXiv 2502.16982].
"""

from collections import Counter

from madmax_lib.catalog.blocks import BlockKind
from madmax_lib.catalog.mixers import mixer_matrices
from madmax_lib.catalog.models import Transformer

_STEPS = 5


def muon_flops(model: Transformer) -> float:
    """FLOPs of one update of all matrices of the layers; Adam updates tables, head and
    vectors.

    A step makes A = X X^T, B = b A + c A A and a X + B X: of a matrix of m rows and n
    columns, m <= n, 4 m^2 n + 2 m^3 FLOPs.
    """
    flops = 0.0
    for word, layers in Counter(model.layer_kinds).items():
        for letter in word:
            part = model.variants.get(letter, model)
            for inputs, outputs, count in _matrices(part, BlockKind(letter).usual):
                low, high = sorted((inputs, outputs))
                step = 4 * low**2 * high + 2 * low**3
                flops += layers * count * _STEPS * step
    return flops


def _matrices(model, block):
    """Inputs, outputs and number of the matrices of a block."""
    matrices = ()
    if block in (BlockKind.ATTENTION, BlockKind.CROSS_ATTENTION):
        matrices = model.attention_matrices
    elif block.is_mixer:
        matrices = mixer_matrices(model, block)
    for matrix in matrices:
        yield matrix.inputs, matrix.outputs, 1
    parts = 2 + model.gated
    if block == BlockKind.FEED_FORWARD:
        yield model.hidden, model.ffn, parts
    if block == BlockKind.EXPERTS:
        yield model.expert_inputs, model.expert_ffn, parts * model.experts
        yield model.hidden, model.expert_ffn, parts * model.shared_experts
