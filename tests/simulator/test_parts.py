"""Seconds of parts alone: limits that have a closed form, and devices without rows."""

from dataclasses import replace

import numpy as np
import pytest

from madmax_lib import catalog
from madmax_lib.simulator import (
    attention_s,
    collective_s,
    kernel_rates,
    kernel_s,
    product_s,
)

SHAPE = {"batch": 1, "sequence": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}
DEVICES = sorted(catalog.table("devices")["name"].unique())
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_of_the_catalog_has_prices(name):
    prices = [product_s(name, 4096, 4096, 4096, dtype) for dtype in ("bf16", "fp8")]
    prices += [attention_s(name, **SHAPE), kernel_s(name, "moe", 1e12, 1e9)]
    prices += [
        kernel_s(name, "convolution", 0, 1e9),
        kernel_s(name, "delta_rule", **SHAPE),
    ]
    prices += [collective_s(kind, 1e8, name, 8) for kind in (*COLLECTIVES, "dispatch")]
    assert np.isfinite(prices).all() and min(prices) > 0
    device = catalog.device(name)
    peak = device.peak_flops[device.nearest("bf16")]
    assert prices[0] > 2 * 4096**3 / peak, "nothing is faster than its data sheet"
    assert prices[2] > 4 * 8192 * 4096 * 32 * 128 / peak


@pytest.mark.parametrize("name", ["h100-80", "a100-40", "rtx-4090"])
def test_a_device_with_twice_the_data_sheet_halves_what_is_no_launch(name):
    device = catalog.device(name)
    twice = replace(
        device,
        memory_bandwidth_bytes_per_s=2 * device.memory_bandwidth_bytes_per_s,
        peak_flops={dtype: 2 * peak for dtype, peak in device.peak_flops.items()},
    )
    large = (16384, 16384, 16384)
    assert product_s(device, *large) / product_s(twice, *large) == pytest.approx(
        2, rel=0.01
    )
    assert attention_s(device, **SHAPE) > 1.6 * attention_s(twice, **SHAPE)


def test_a_device_of_your_own_is_priced_by_its_family():
    ours = replace(catalog.device("h100-80"), name="mine")
    measured = kernel_rates("h100-80", "gemm"), kernel_rates("h200", "gemm")
    mine = kernel_rates(ours, "gemm")
    assert not mine.is_measured and mine.spread > max(each.spread for each in measured)
    own_s, other_s = (product_s(d, 8192, 8192, 8192) for d in ("h100-80", ours))
    assert other_s == pytest.approx(own_s, rel=0.1)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_of_nothing_take_nothing_and_grow_with_ranks(kind):
    sizes = np.array([0.0, 1e3, 1e6, 1e8, 1e9])
    table = collective_s(kind, sizes[:, None], "b200", np.arange(1, 17))
    assert (table[:, 0] == 0).all() and (table[0] == 0).all()
    assert (table[1:, 1:] > 0).all()
    # above 8 ranks, where none was measured, the wires carry more of the buffer
    assert (np.diff(table[-1, 7:]) > 0).all()
    # at most 900 GB/s each way, with sums in the switches half of the wires' bytes
    assert table[-1, 7] > 1e9 / 900e9 * 7 / 8


def test_chains_of_a_delta_rule_run_in_waves_over_the_multiprocessors():
    """A sequence's head stays on one: 2 and 132 of them take as long, 133 twice."""
    shape = SHAPE | {"heads": np.array([2, 132, 133]), "kv_heads": 1}
    seconds = kernel_s("h100", "delta_rule", **shape)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.2)  # more bytes
    assert seconds[2] == pytest.approx(2 * seconds[1], rel=0.15)
    shorter_s = kernel_s("h100", "delta_rule", **(shape | {"sequence": 4096}))
    assert (shorter_s / seconds < 0.55).all()


def test_arrays_broadcast_as_single_calls():
    m, n = np.array([512, 4096])[:, None], np.array([300, 1024, 9000])
    table = product_s("l40s", m, n, 2048)
    assert table.shape == (2, 3)
    assert table[1, 2] == product_s("l40s", 4096, 9000, 2048)
    causal, full = (attention_s("b200", **SHAPE, causal=c) for c in (True, False))
    assert 1.8 < full / causal < 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: product_s("h1000", 1, 1, 1), "unknown device 'h1000'"),
        (lambda: product_s("h100", 1, 1, 1, "fp7"), "dtype='fp7' is not one of"),
        (lambda: product_s(100, 1, 1, 1), "device=100 must be a Device"),
        (lambda: collective_s("gossip", 1, "h100", 2), "operation='gossip' is not one"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_users_rows_take_the_place_of_ours(monkeypatch, tmp_path):
    ours = catalog.table("kernel_rates")
    row = ours[(ours["operation"] == "gemm") & (ours["device"] == "h100-80")].iloc[:1]
    row.assign(latency_s="1.0").to_csv(tmp_path / "kernel_rates.csv", index=False)
    before_s = product_s("h100", 4096, 4096, 4096)
    monkeypatch.setenv("MADMAX_CATALOG", str(tmp_path))
    assert product_s("h100", 4096, 4096, 4096) == pytest.approx(1 + before_s, rel=1e-4)
