"""How long does a device compute? Matrix products, attention, the optimizer, and two things that overlap.

All functions broadcast over NumPy arrays. `gemm_s` adds the bytes to the FLOPs, which gives small products the lower
efficiency they have on real devices.
"""

from __future__ import annotations

import numpy as np

from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.specs import Device

Number = float | np.ndarray

__all__ = [
    "SCORE_BYTES",
    "Number",
    "attention_flops",
    "gemm_s",
    "longer_of",
    "misfit",
    "optimizer_bytes",
    "optimizer_s",
    "unfused_attention_s",
]

_ADAM_BYTES = 30  # fp32 parameter, two moments and gradient read; the first three and a 16-bit copy written
_TILE = 128  # rows of a block in FlashAttention-2 and cuDNN: the diagonal blocks are computed whole [arXiv 2307.08691]
SCORE_BYTES = 10  # unfused softmax, mask and dropout: bytes written and read per score [arXiv 2205.05198, section 4.1]


def optimizer_bytes(parameter_count):
    """Traffic of a mixed-precision Adam update of the parameters a device owns."""
    return parameter_count * _ADAM_BYTES


def optimizer_s(parameter_count, device: Device, parameters: Parameters):
    """Seconds of a mixed-precision Adam update of the parameters a device owns: memory traffic only."""
    return optimizer_bytes(parameter_count) / (device.memory_bandwidth_bytes_per_s * parameters.memory_efficiency)


def gemm_s(flops, traffic_bytes, flops_per_s, bytes_per_s):
    """Matrix products at a rate that size erodes: operands are fetched before a wave of tiles can start.

    >>> float(gemm_s(2e12, 0.0, 1e15, 1e12))
    0.002
    """
    return flops / flops_per_s + traffic_bytes / bytes_per_s


def attention_flops(tokens, sequence, width, *, causal=True, window=0.0):
    """Forward FLOPs of fused attention: scores and weighted values of `width` = heads x head_dim channels.

    Causal kernels compute the lower triangle in blocks, so half of the square and half a block per row; a window
    limits the keys per token. Twice a forward pass and a half for the backward one [arXiv 2307.08691].
    """
    keys = np.where(causal, (sequence + _TILE) / 2, sequence)
    keys = np.where(np.asarray(window) > 0, np.minimum(keys, window + _TILE / 2), keys)
    return 4 * tokens * keys * width


def misfit(head_dim):
    """Factor on the products of unfused heads: 8 where their dimension is no multiple of 8 and misses the tensor cores,
    1.2 where it is no multiple of 16 and fills their tiles badly.

    >>> misfit(np.array([128, 104, 108])).tolist()
    [1.0, 1.2, 8.0]
    """
    return np.where(head_dim % 8 > 0, 8.0, np.where(head_dim % 16 > 0, 1.2, 1.0))


def unfused_attention_s(tokens, sequence, heads, head_dim, flops_per_s, bytes_per_s, softmax_factor=1.0):
    """Forward seconds of attention with the score matrix in memory, as Megatron had it until 2022: the full square."""
    products = 4 * tokens * sequence * heads * head_dim * misfit(head_dim) / flops_per_s
    return products + softmax_factor * SCORE_BYTES * tokens * sequence * heads / bytes_per_s


def longer_of(first_s, second_s):
    """Duration of two things that overlap, smooth where they are alike: their norm of order 6.

    >>> float(longer_of(2.0, 0.0)), round(float(longer_of(1.0, 1.0)), 4)
    (2.0, 1.1225)
    """
    longest, shortest = np.maximum(first_s, second_s), np.minimum(first_s, second_s)
    ratio = shortest / np.maximum(longest, 1e-300)
    ratio_3 = ratio * ratio * ratio
    return longest * np.cbrt(np.sqrt(1 + ratio_3 * ratio_3))
