"""Energy of known powers, meters without a device, and summaries of tables whose answer is known."""

from __future__ import annotations

import time
from math import isnan, nan, pi, sin
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from madmax_lib.runs.measure import meter as meters
from madmax_lib.runs.measure.meter import Meter, Reading, energy_j, meter, nvml_reader, rapl_reader, replay
from madmax_lib.runs.read import known
from madmax_lib.runs.summary import counted_steps, flops_per_sample, summarise
from madmax_lib.specs import Transformer

CONSTANT = [Reading(t, power_w=50.0) for t in np.linspace(0, 10, 41)]
RAMP = [Reading(t, power_w=10.0 * t) for t in np.linspace(0, 4, 81)]
COUNTER = [Reading(t, power_w=1.0, energy_j=1000 + 30.0 * t) for t in np.linspace(0, 10, 101)]
COUNTER_ONLY = [Reading(t, energy_j=7 + 30.0 * t) for t in np.linspace(0, 10, 101)]


@pytest.mark.parametrize(
    ("readings", "start_s", "end_s", "joule"),
    [
        pytest.param(CONSTANT, 1.0, 3.0, 100.0, id="constant power"),
        pytest.param(CONSTANT, 1.01, 1.02, 0.5, id="a window between two readings"),
        pytest.param(RAMP, 1.0, 3.0, 40.0, id="the integral of a ramp"),
        pytest.param(COUNTER, 2.0, 4.0, 60.0, id="the counter over more than 1 s"),
        pytest.param(COUNTER, 2.0, 2.5, 0.5, id="the power over less than 1 s"),
        pytest.param(COUNTER_ONLY, 2.0, 2.5, 15.0, id="the counter where there is no power"),
        pytest.param(COUNTER, 9.0, 12.0, 3.0, id="the power where the counter ends early"),
        pytest.param(CONSTANT[:1], 0.0, 1.0, nan, id="one reading tells nothing"),
        pytest.param([], 0.0, 1.0, nan, id="no reading"),
        pytest.param(CONSTANT, 3.0, 3.0, nan, id="an empty window"),
    ],
)
def test_energy_of_a_window(readings, start_s, end_s, joule):
    assert energy_j(readings, start_s, end_s) == pytest.approx(joule, nan_ok=True)


def test_windows_add_up():
    readings = [Reading(t, power_w=100 + 20 * sin(2 * pi * t)) for t in np.linspace(0, 3, 601)]
    parts = [energy_j(readings, start, start + 0.3) for start in np.arange(10) * 0.3]
    assert sum(parts) == pytest.approx(energy_j(readings, 0.0, 3.0)) == pytest.approx(300, rel=1e-4)


def test_a_meter_reads_at_both_ends_of_a_window():
    clock = iter(range(100))
    with Meter(lambda: Reading(float(next(clock)), power_w=10.0), "test", period_s=60.0) as power:
        assert power.window(0.0, 1.0) == (10.0, 10.0)
        assert power.window(0.5, 1.5) == (10.0, 10.0)
    assert power.rows(origin_s=1.0)[0][:2] == (-1.0, 10.0)


def test_without_anything_to_read_all_is_unknown():
    with meter("none", "cpu", 2) as power:
        assert power.name == "none" and all(map(isnan, power.window(0.0, 1.0))) and power.rows(0.0) == []


def test_a_machine_without_nvml_or_rapl_has_no_meter(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr(meters, "rapl_reader", lambda: None)
    assert meter("auto", "cuda", 1).name == meter("auto", "cpu", 1).name == "none"


class Nvml(SimpleNamespace):
    """Two GPUs of 100 and 50 W; the second does not tell its clock."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self):
        super().__init__(
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetHandleByUUID=["GPU-0", "GPU-1"].index,
            nvmlDeviceGetPowerManagementLimit=lambda handle: 300_000,
            nvmlDeviceGetPowerUsage=lambda handle: [100_000, 50_000][handle],
            nvmlDeviceGetTotalEnergyConsumption=lambda handle: 2_000,
            nvmlDeviceGetClockInfo=lambda handle, kind: [1980, 1500][handle],
            nvmlDeviceGetTemperature=lambda handle, kind: [60, 70][handle],
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: [1, 4][handle],
        )


def test_nvml_sums_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    read, name, cap_w = nvml_reader(2, Nvml())
    assert (name, cap_w) == ("nvml", 600.0)
    assert read()[1:] == (150.0, 4.0, 1.5e9, 70.0, 5)


@pytest.mark.parametrize("visible", ["1", "GPU-1"])
def test_nvml_reads_the_visible_devices(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml_reader(1, Nvml())[0]().power_w == 50.0


def test_what_nvml_does_not_support_is_unknown():
    def refuse(*_):
        raise RuntimeError("Not Supported")

    nvml = Nvml()
    nvml.nvmlDeviceGetTotalEnergyConsumption = nvml.nvmlDeviceGetCurrentClocksThrottleReasons = refuse
    reading = nvml_reader(1, nvml)[0]()
    assert isnan(reading.energy_j) and reading.throttle == 0 and reading.power_w == 100.0
    nvml.nvmlInit = refuse
    assert nvml_reader(1, nvml) is None


def test_rapl_counts_on_when_the_counter_wraps(tmp_path):
    package = tmp_path / "intel-rapl:0"
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the package, counted in it
    package.mkdir()
    texts = {"energy_uj": "9000000", "max_energy_range_uj": "10000000", "constraint_0_power_limit_uw": "125000000"}
    for name, content in texts.items():
        (package / name).write_text(content)
    read, name, cap_w = rapl_reader(tmp_path)
    (package / "energy_uj").write_text("2000000")
    reading = read()
    assert (name, cap_w) == ("rapl", 125.0) and reading.energy_j == pytest.approx(3.0) and reading.power_w > 0
    assert rapl_reader(tmp_path / "nowhere") is None


def test_replay_repeats_a_table(tmp_path, monkeypatch):
    path = tmp_path / "power.csv"
    path.write_text("t_s,power_w,energy_j,cap_w\n5,10,0,70\n6,20,15,70\n7,30,40,70\n")
    read, name, cap_w = replay(path)
    times = iter([100.0, 100.5, 102.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    assert (name, cap_w) == ("replay", 70.0)
    assert [reading[:3] for reading in (read(), read(), read())] == [
        (100.0, 10, 0),
        (100.5, 15, 7.5),
        (102.5, 15, 47.5),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "column.s. power_w, t_s missing, or no rows"),
        ("t_s,watts\n0,1\n", "column.s. power_w missing"),
        ("t_s,power_w\n0,1\n", "t_s must grow"),
        ("t_s,power_w\n1,1\n0,1\n", "t_s must grow"),
        ("t_s,power_w\n0,one\n1,2\n", "could not convert string to float: 'one'"),
    ],
)
def test_bad_tables_of_power_name_the_file(tmp_path, content, message):
    path = tmp_path / "power.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"power.csv: .*{message}"):
        replay(path)


FLOPS = {"forward": 1e9, "model": 3e9, "hardware": 4e9}


def steps(total_s, samples=8, **columns) -> pd.DataFrame:
    """Steps of the given times; loss falls by one each."""
    count = len(total_s)
    table = pd.DataFrame({"step": range(count), "total_s": total_s, "samples": samples, "overflow": False})
    return table.assign(tokens=table["samples"] * 10, loss=np.arange(count, 0.0, -1), **columns)


def test_throughput_is_samples_over_wall_time():
    found = summarise(steps([0.5, 1.0, 1.5, 1.0]), flops=FLOPS, devices=2, peak_flops=1e11)
    assert found["samples_per_s"] == pytest.approx(32 / 4) and found["tokens_per_s"] == pytest.approx(320 / 4)
    assert found["mfu"] == pytest.approx(8 * 3e9 / 2e11) and found["hfu"] == pytest.approx(4 / 3 * found["mfu"])
    assert found["step_s"] == {"median": 1.0, "p25": 0.875, "p75": 1.125, "mean": 1.0}
    assert (found["loss_first"], found["loss_last"]) == (4.0, 1.0)


def test_warm_up_short_batches_and_overflow_do_not_count():
    table = steps([9.0, 9.0, 1.0, 0.1, 1.0, 0.2, 1.0], samples=[8, 8, 8, 8, 8, 3, 8])
    table.loc[3, "overflow"] = True
    found = summarise(table, flops=FLOPS, devices=1, warmup=2)
    assert found["steps_dropped"] == {"warm-up": 2, "short": 1, "overflow": 1, "profiled": 0}
    assert found["samples_per_s"] == pytest.approx(8.0) and found["steps_counted"] == 3
    assert isnan(found["mfu"])  # no peak, no share of it


@pytest.mark.parametrize(("count", "counted", "included"), [(20, 15, False), (8, 3, False), (6, 4, True), (3, 1, True)])
def test_profiled_steps_count_only_where_few_others_remain(count, counted, included):
    table, warmup = steps([1.0] * count), 2
    kept, dropped = counted_steps(table, warmup, range(1, 5))
    assert len(kept) == counted and (kept["step"].isin(range(1, 5))).any() == included
    assert len(kept) + sum(dropped.values()) == count


def test_each_start_of_a_run_warms_up():
    kept, dropped = counted_steps(steps([1.0] * 12), 2, starts=(0, 6))
    assert kept["step"].tolist() == [2, 3, 4, 5, 8, 9, 10, 11] and dropped["warm-up"] == 4


def test_nothing_left_is_unknown_not_an_error():
    for table in (steps([]), steps([1.0])):
        found = summarise(table, flops=FLOPS, devices=1, peak_flops=1e9, warmup=2)
        assert found["steps_counted"] == 0 and isnan(found["samples_per_s"]) and isnan(found["mfu"])


def test_energy_per_step_sample_and_token():
    table = steps([2.0] * 5, energy_j=[100.0, 60, 60, 60, 60])
    found = summarise(table, flops=FLOPS, devices=1, warmup=1, power_cap_w=70.0)
    assert found["power_w"] == pytest.approx(30) and found["power_share"] == pytest.approx(3 / 7)
    assert found["energy_per_step_j"] == pytest.approx(60)
    assert found["energy_per_sample_j"] == pytest.approx(7.5) and found["energy_per_token_j"] == pytest.approx(0.75)


def test_a_table_without_the_columns_needed_is_refused():
    with pytest.raises(ValueError, match=r"steps lack the column\(s\) samples, overflow$"):
        summarise(steps([1.0]).drop(columns=["samples", "overflow"]), flops=FLOPS, devices=1)


GPT = Transformer("gpt", layers=2, hidden=8, heads=2, ffn=32, sequence=16, vocab=100)
VIT = Transformer("vit", layers=2, hidden=8, heads=2, ffn=32, image=16, patch=4, classes=10)


@pytest.mark.parametrize(("model", "ends"), [(GPT, 2 * 16 * 8 * 100), (VIT, 2 * 16 * 3 * 16 * 8 + 2 * 8 * 10)])
def test_flops_by_recomputation(model, ends):
    none, some, full = (flops_per_sample(model, recompute=how) for how in ("none", "selective", "full"))
    assert none["model"] == none["hardware"] == 3 * none["forward"] == 3 * model.forward_flops(1)
    assert full["hardware"] == pytest.approx(4 * none["forward"] - ends) and full["model"] == none["model"]
    assert some["hardware"] - some["model"] == 4 * model.sequence**2 * 8 * 2  # scores and values, two layers
    assert flops_per_sample(model, frozen=True)["model"] == 2 * none["forward"]


def test_flops_at_another_sequence():
    assert flops_per_sample(GPT, 4)["forward"] == GPT.forward_flops(1, 4)


def test_unknown_becomes_null():
    assert known({"a": nan, "b": [1.0, nan], "c": "x", "d": True}) == {"a": None, "b": [1.0, None], "c": "x", "d": True}
