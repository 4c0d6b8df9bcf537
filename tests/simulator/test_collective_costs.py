"""Costs of compute and of rings that share ports: closed forms and monotonicity."""

import numpy as np
import pytest

from madmax_lib.simulator.rates.collectives import shared_bandwidth
from madmax_lib.simulator.rates.compute import attention_flops, gemm_s, longer_of, unfused_attention_s


@pytest.mark.parametrize(
    ("ranks", "stride", "bandwidth"), [(8, 1, 300e9), (2, 4, 300e9), (16, 1, 200e9), (2, 8, 25e9), (8, 4, 50e9)]
)
def test_bandwidth_of_groups(ranks, stride, bandwidth):
    """Eight devices to a node, links of 300 GB/s, ports of 25 GB/s."""
    assert shared_bandwidth(ranks, stride, 8, 300e9, 25e9) == bandwidth


def test_more_bandwidth_is_never_less():
    ranks = np.arange(1, 100)
    slow, fast = shared_bandwidth(ranks, 2, 8, 300e9, 25e9), shared_bandwidth(ranks, 2, 8, 300e9, 50e9)
    assert (fast >= slow).all() and (slow <= 300e9).all()


def test_attention_flops():
    assert attention_flops(1000, 4096, 64, causal=False) == 4 * 1000 * 4096 * 64
    assert attention_flops(1000, 4096, 64) == 4 * 1000 * (4096 + 128) / 2 * 64  # half and the diagonal blocks
    assert attention_flops(1000, 4096, 64, window=128) == 4 * 1000 * (128 + 64) * 64
    assert attention_flops(1000, 128, 64, window=8192) == attention_flops(1000, 128, 64)


def test_unfused_attention_needs_aligned_heads():
    whole = unfused_attention_s(2048, 2048, 8, 128, 1e14, np.inf)
    assert whole == pytest.approx(4 * 2048**2 * 8 * 128 / 1e14)
    assert unfused_attention_s(2048, 2048, 8, 104, 1e14, np.inf) / (whole * 104 / 128) == pytest.approx(1.2)
    assert unfused_attention_s(2048, 2048, 8, 108, 1e14, np.inf) / (whole * 108 / 128) == pytest.approx(8)
    scores = unfused_attention_s(2048, 2048, 8, 128, np.inf, 1e12, 0.8)
    assert scores == pytest.approx(0.8 * 10 * 2048**2 * 8 / 1e12)


def test_products_add_bytes_to_flops():
    assert gemm_s(1e12, 1e9, 1e12, 1e9) == 2.0


def test_overlap_is_between_the_longer_and_the_sum():
    a, b = np.random.default_rng(0).random((2, 100))
    together = longer_of(a, b)
    assert (together >= np.maximum(a, b)).all() and (together <= a + b).all()
    assert np.allclose(longer_of(a, 0.0), a) and longer_of(0.0, 0.0) == 0
