"""Energy by phase, predicted and measured: closed forms, bounds of published machines, logs whose answer is known."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.simulator.step.power import ERROR, device_energy_j, power_phases, step_energy

A100 = mm.cluster("dgx-a100-40")
ROW = mm.estimate(mm.model("gpt2-large"), A100, mm.Plan.parse("dp8.mb8.full"), global_batch=64).iloc[0]


def test_phases_sum_to_the_step():
    table = power_phases(ROW, A100.device)
    assert table["seconds"].sum() == pytest.approx(ROW["step_s"])
    assert table["energy_j"].sum() == pytest.approx(device_energy_j(ROW, A100.device))
    assert (table["low_w"] <= table["power_w"]).all() and (table["power_w"] <= table["high_w"]).all()
    assert table["high_w"].max() <= A100.device.tdp_w


def test_energy_is_between_idle_and_limit():
    energy = step_energy(ROW, A100, 64 * 1024)
    limit = A100.world_size * A100.device.tdp_w * ROW["step_s"]
    assert 0.15 * limit < energy["devices_j"] <= limit
    assert energy["host_j"] == pytest.approx(0.4 * A100.host.tdp_w * ROW["step_s"])
    assert energy["token_j"] == pytest.approx((energy["devices_j"] + energy["host_j"]) / (64 * 1024))
    assert energy["token_low_j"] == pytest.approx((1 - ERROR) * energy["token_j"])


def test_gpt2_large_on_a100():
    """At most 21 mJ per token of the devices at the reported 75,130 tokens/s on four of 400 W; ours is faster."""
    reported = 4 * 400 / 75_130
    assert reported == pytest.approx(21e-3, rel=0.02)
    devices_j = step_energy(ROW, A100, 64 * 1024)["devices_j"] / (64 * 1024)
    assert 0.3 * reported < devices_j < reported


def test_a_busy_host_draws_more():
    idle, busy, longer = (step_energy(ROW, A100, 1, seconds)["host_j"] for seconds in (0, ROW["step_s"], 1e9))
    assert busy == longer == pytest.approx(idle / 0.4)


def test_what_is_not_known():
    without = replace(A100, host=None)
    energy = step_energy(ROW, without, 1.0)
    assert np.isnan(energy["host_j"]) and energy["token_j"] == pytest.approx(energy["devices_j"])
    with pytest.raises(ValueError, match="x has no TDP in the catalog"):
        power_phases(ROW, replace(A100.device, name="x", tdp_w=float("nan")))


# a run's log


def written(directory, watts, steps):
    """A run of equal steps (data 1 s, forward 2 s, backward 3 s, optimizer 1 s, 1 s of rest) at a power over time."""
    from madmax_lib.runs.measure.meter import COLUMNS as METER
    from madmax_lib.runs.read import COLUMNS

    values = {"data_s": 1, "forward_s": 2, "backward_s": 3, "optimizer_s": 1, "total_s": 8, "samples": 4, "tokens": 40,
              "overflow": 0, "loss": 1.0}  # fmt: skip
    rows = [values | {"step": step, "energy_j": 100.0 * (step + 1), "power_w": 50.0} for step in range(steps)]
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(directory / "steps.csv", index=False)
    if watts is not None:
        t_s = np.linspace(-0.5, 8 * steps + 0.5, 2000)
        log = pd.DataFrame({"t_s": t_s, "power_w": watts(t_s), "throttle": 0}, columns=list(METER))
        log.to_csv(directory / "power.csv", index=False)
    return directory


def test_a_log_is_joined_to_phases(tmp_path):
    """100 W, but 300 W from second 3 to 6 of each step, where the backward pass is."""
    pytest.importorskip("torch")
    from madmax_lib.runs.measure.phase_energy import phase_energy

    table = phase_energy(written(tmp_path, lambda t: np.where((t % 8 >= 3) & (t % 8 < 6), 300.0, 100.0), 3))
    assert table["step"].tolist() == np.repeat([0, 1, 2], 5).tolist()
    power = table.groupby("phase", sort=False)["power_w"].mean()
    assert power.to_dict() == pytest.approx({"data": 100, "forward": 100, "backward": 300, "optimizer": 100,
                                             "rest": 100}, rel=0.01)  # fmt: skip
    assert table["energy_j"].sum() == pytest.approx(3 * (5 * 100 + 3 * 300), rel=0.01)


def test_energy_by_method_leaves_out_the_first_step(tmp_path):
    pytest.importorskip("torch")
    from madmax_lib.runs.measure.phase_energy import energy_by_method, phase_energy

    table = energy_by_method({"ours": written(tmp_path, None, 3)})
    assert table.loc[0, "token_j"] == pytest.approx((200 + 300) / 80)
    with pytest.raises(FileNotFoundError, match="the run has no power log"):
        phase_energy(tmp_path)
