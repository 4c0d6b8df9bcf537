"""Peaks of devices: of the data sheet where one is known, else measured and shared by
the ranks.
"""

import os

import pytest
import torch

from madmax_lib.runs.measure import peak_rates


def test_the_peak_of_a_known_device_is_the_data_sheets(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert peak_rates.peak_flops("cuda", "bf16") == (
        989.4e12,
        "data sheet of h100-80, dense bf16",
    )
    assert peak_rates.peak_flops("cuda", "fp32")[0] == 67e12


@pytest.mark.parametrize(
    "capability, allowed, dtype, computed",
    [
        ((9, 0), "high", "fp32", "tf32"),
        ((9, 0), "highest", "fp32", "fp32"),
        ((9, 0), "high", "bf16", "bf16"),
        ((7, 5), "high", "fp32", "fp32"),
    ],
)
def test_products_of_fp32_are_computed_in_tf32_where_a_gpu_has_it(
    monkeypatch, capability, allowed, dtype, computed
):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert peak_rates.product_dtype(dtype, "cuda") == computed
    assert peak_rates.product_dtype(dtype, "cpu") == dtype


def test_ranks_that_outnumber_the_cores_share_their_peak(monkeypatch):
    product_s = 2 * 512**3 / 8e9
    monkeypatch.setattr(peak_rates, "_best_s", lambda *_, **__: product_s)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rates = {}
    for ranks, hosts, speed in (
        (1, 1, ""),
        (2, 1, ""),
        (8, 1, ""),
        (4, 2, ""),
        (2, 1, "0.5,1"),
        (4, 1, "0.3,1,1,1"),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("MADMAX_TESTBED_HOSTS", str(hosts))
        monkeypatch.setenv("MADMAX_TESTBED_SPEED", speed)
        rates[ranks, hosts, speed], source = peak_rates.peak_flops("cpu", "fp32")
        assert source.startswith("measured: best 512 x 512 matrix product in fp32")
    # each mean over all ranks
    expected = [8e9, 8e9, 2e9, 2e9, 6e9, 3.6e9]
    assert list(rates.values()) == pytest.approx(expected)
