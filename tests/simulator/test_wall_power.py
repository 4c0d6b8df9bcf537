"""Energy by phase, predicted: closed forms and bounds of published machines."""

from dataclasses import replace

import numpy as np
import pytest

import madmax_lib as mm
from madmax_lib.simulator.power import ERROR, device_energy_j, step_energy

A100 = mm.cluster("dgx-a100-40")
ROW = mm.estimate(
    mm.model("gpt2-large"), A100, mm.Plan.parse("dp8.mb8.full"), global_batch=64
).iloc[0]


def test_energy_is_between_idle_and_limit():
    energy = step_energy(ROW, A100, 64 * 1024)
    limit = A100.world_size * A100.device.tdp_w * ROW["step_s"]
    assert 0.15 * limit < energy["devices_j"] <= limit
    assert energy["host_j"] == pytest.approx(0.4 * A100.host.tdp_w * ROW["step_s"])
    assert energy["token_j"] == pytest.approx(
        (energy["devices_j"] + energy["host_j"]) / (64 * 1024)
    )
    assert energy["token_low_j"] == pytest.approx((1 - ERROR) * energy["token_j"])
    idle, busy, longer = (
        step_energy(ROW, A100, 1, seconds)["host_j"]
        for seconds in (0, ROW["step_s"], 1e9)
    )
    assert busy == longer == pytest.approx(idle / 0.4)
    reported_j = (
        4 * 400 / 75_130
    )  # per token: 75,130 tokens/s are reported on four of 400 W; ours is faster
    assert 0.3 * reported_j < energy["devices_j"] / (64 * 1024) < reported_j


def test_what_is_not_known():
    without = replace(A100, host=None)
    energy = step_energy(ROW, without, 1.0)
    assert np.isnan(energy["host_j"]) and energy["token_j"] == pytest.approx(
        energy["devices_j"]
    )
    with pytest.raises(ValueError, match="x has no TDP in the catalog"):
        device_energy_j(ROW, replace(A100.device, name="x", tdp_w=float("nan")))
