"""Sizes of mixers, which carry a state from token to token: weights, FLOPs, and what a
backward pass needs, by the rows of `data/mixers.csv`.

Each row is a sum of quantities of a model with the factors in its columns, so that
another mixer is rows. The letters in the formulas: Q tokens of a chunk,
N = mixer_state, G = mixer_groups, D = mixer_channels, H = mixer_heads.
"""

from functools import cache
from typing import NamedTuple

import pandas as pd

from madmax_lib.catalog.blocks import BlockKind, Blocks
from madmax_lib.catalog.data_files import data_file


class Matrix(NamedTuple):
    """A weight of a product: `outputs` = `inputs` times the matrix."""

    name: str
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        """Elements of the matrix; a token takes 2 FLOPs for each."""
        return self.inputs * self.outputs


@cache
def _rows(block):
    """Rows of a mixer by part."""
    table = pd.read_csv(data_file("mixers.csv"))
    factors = table.select_dtypes("number").fillna(0)
    rows = table.assign(**factors).query("block == @block")
    return {
        part: part_rows.to_dict("records") for part, part_rows in rows.groupby("part")
    }


def _quantities(model):
    channels = model.mixer_channels
    heads = model.mixer_heads
    return {
        "hidden": model.hidden,
        "channels": channels,
        "groups": model.mixer_groups,
        "group_state": model.mixer_groups * model.mixer_state,
        "heads": heads,
        "state": model.mixer_state,
        "rank": model.mixer_rank,
        "head": channels // max(heads, 1),
        "channel_state": channels * model.mixer_state,
    }


def _sum(model, row):
    """The quantities of a model, each times its factor in a row."""
    return sum(int(row[name]) * size for name, size in _quantities(model).items())


def _part(model, block, part):
    return sum(_sum(model, row) for row in _rows(block).get(part, ()))


def _chunk(block, sequence):
    """Tokens that the kernels of a mixer multiply at once; 0: of no chunks."""
    chunks = [row["chunk"] for row in _rows(block).get("scores", ())]
    return min(max(chunks, default=0), sequence)


def mixer_matrices(model, block: BlockKind) -> tuple[Matrix, ...]:
    """The weights of a mixer's products, the one into it first, the one out last."""
    sizes = _quantities(model)
    return tuple(
        Matrix(row["name"], sizes[row["inputs"]], _sum(model, row))
        for row in _rows(block)["product"]
    )


def convolved_channels(model, block: BlockKind) -> int:
    """Channels that the convolution of a mixer sees."""
    return _part(model, block, "convolved")


def mixer_parameters(model, block: BlockKind) -> int:
    """Parameters of one mixer: weights, convolution, and vectors, such as A and norms."""
    products = sum(matrix.parameters for matrix in mixer_matrices(model, block))
    convolution = model.mixer_conv * convolved_channels(model, block)
    vectors = _part(model, block, "vectors") + model.other_mixer_parameters
    without_norm = block == BlockKind.MAMBA_2 and not model.mixer_norm
    return products + convolution + vectors - without_norm * model.mixer_channels


def scan_flops(model, block: BlockKind, sequence: float) -> float:
    """FLOPs per token of the products in a scan, forward; Mamba-1's has none.

    In chunks of Q tokens those inside a chunk, and those with the states between; of
    Mamba-2 2 Q (G N + D) + 4 N D [arXiv 2405.21060, section 6].
    """
    inside = _chunk(block, sequence) * _part(model, block, "scores")
    return float(inside + _part(model, block, "states"))


def chunk_elements(model, block: BlockKind, sequence: float) -> float:
    """16-bit elements per token of what kernels keep of chunks: scores, and states of
    each chunk.
    """
    chunk = _chunk(block, sequence)
    scores = chunk * _part(model, block, "kept_scores")
    return scores + _part(model, block, "kept_states") / max(chunk, 1)


def mixer_elements(model, blocks: Blocks) -> int:
    """Elements per token that a mixer's scan keeps for its backward pass, and its
    result, which the norm needs.

    Mamba-2's kernels keep what enters the convolution and compute it again; Mamba-1's
    keep their operands.
    """
    kinds = [kind for kind in blocks.kinds if kind.is_mixer]
    return _part(model, kinds[0], "kept") if kinds else 0
