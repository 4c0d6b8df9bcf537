"""How much does a device compute and move? FLOPs of attention, bytes of the optimizer,
heads that fit no tile.

All functions broadcast over NumPy arrays.
"""

import numpy as np

Number = float | np.ndarray
Parts = dict[str, Number]  # seconds by part of a step

# fp32 parameter, two moments and gradient read; the first three and a 16-bit copy
# written
_ADAM_BYTES = 30
# rows of a block in FlashAttention-2 and cuDNN: the diagonal blocks are computed whole
# [arXiv 2307.08691]
_TILE = 128
_MISALIGNED = 5.8  # time over that of an aligned product, see `misalignment`
# unfused softmax, mask and dropout: bytes written and read per score [arXiv 2205.05198,
# section 4.1]
SCORE_BYTES = 10


def optimizer_bytes(parameter_count):
    """Traffic of a mixed-precision Adam update of the parameters a device owns."""
    return parameter_count * _ADAM_BYTES


def attention_flops(tokens, sequence, width, *, causal=True, window=0.0):
    """Forward FLOPs of fused attention: scores and weighted values of `width` = heads x
    head_dim channels.

    Causal kernels compute the lower triangle in blocks, so half of the square and half
    a block per row; a window limits the keys per token. Twice a forward pass and a half
    for the backward one [arXiv 2307.08691].
    """
    keys = np.where(causal, (sequence + _TILE) / 2, sequence)
    keys = np.where(window > 0, np.minimum(keys, window + _TILE / 2), keys)
    return 4 * tokens * keys * width


def distinct_bins(bins: Number, throws: Number) -> Number:
    """Expected number of distinct bins hit by random throws: n (1 - (1 - 1/n)^k)."""
    return bins * (1 - (1 - 1 / np.maximum(bins, 1)) ** throws)


def misalignment(columns):
    """Factor on a 16-bit product whose result has rows of no multiple of 16 bytes.

    8,192 x 50,257 x 1,280 reaches 94 to 150 TFLOP/s on an H100, forward, dgrad and
    wgrad, where products of other sizes reach 720 (traces/h100/alone.csv).
    """
    return np.where(columns % 8 > 0, _MISALIGNED, 1.0)


def misfit(head_dim):
    """Factor on the products of unfused heads: 8 where their dimension is no multiple
    of 8 and misses the tensor cores,
    1.2 where it is no multiple of 16 and fills their tiles badly.

    >>> misfit(np.array([128, 104, 108])).tolist()
    [1.0, 1.2, 8.0]
    """
    return np.where(head_dim % 8 > 0, 8.0, np.where(head_dim % 16 > 0, 1.2, 1.0))
