"""Energy of known powers, and meters without a device."""

import sys
from math import isnan, nan, pi, sin
from types import SimpleNamespace

import numpy as np
import pytest

from madmax_lib.runs.measure.meter import Meter, Reading, energy_j, meter

CONSTANT = [Reading(t, power_w=50.0) for t in np.linspace(0, 10, 41)]
RAMP = [Reading(t, power_w=10.0 * t) for t in np.linspace(0, 4, 81)]
TIMES = np.linspace(0, 10, 101)
BOTH = [Reading(t, power_w=1.0, energy_j=1000 + 30.0 * t) for t in TIMES]
COUNTER = [Reading(t, energy_j=7 + 30.0 * t) for t in TIMES]
ONE = [Reading(0.0, energy_j=7.0)]


@pytest.mark.parametrize(
    ("readings", "start_s", "end_s", "joule"),
    [
        pytest.param(CONSTANT, 1.0, 3.0, 100.0, id="constant power"),
        pytest.param(CONSTANT, 1.01, 1.02, 0.5, id="a window between two readings"),
        pytest.param(RAMP, 1.0, 3.0, 40.0, id="the integral of a ramp"),
        pytest.param(BOTH, 2.0, 4.0, 60.0, id="the counter over more than 1 s"),
        pytest.param(BOTH, 2.0, 2.5, 0.5, id="the power over less than 1 s"),
        pytest.param(COUNTER, 2.0, 2.5, 15.0, id="the counter where there is no power"),
        pytest.param(BOTH, 9.0, 12.0, 3.0, id="the power where the counter ends early"),
        pytest.param(BOTH, 8.0, 10.05, 60.05, id="the counter, then the power"),
        pytest.param(COUNTER, 9.0, 10.05, 31.5, id="a counter goes on as it went"),
        pytest.param(CONSTANT[:1], 0.0, 1.0, 50.0, id="one reading holds for all"),
        pytest.param(ONE, 0.0, 1.0, nan, id="one reading of a counter tells nothing"),
        pytest.param([], 0.0, 1.0, nan, id="no reading"),
        pytest.param(CONSTANT, 3.0, 3.0, nan, id="an empty window"),
    ],
)
def test_energy_of_a_window(readings, start_s, end_s, joule):
    assert energy_j(readings, start_s, end_s) == pytest.approx(joule, nan_ok=True)


def test_windows_add_up():
    waves = [(t, 100 + 20 * sin(2 * pi * t)) for t in np.linspace(0, 3, 601)]
    readings = [Reading(t, power_w=watts) for t, watts in waves]
    parts = [energy_j(readings, start, start + 0.3) for start in np.arange(10) * 0.3]
    total_j = energy_j(readings, 0.0, 3.0)
    assert sum(parts) == pytest.approx(total_j) == pytest.approx(300, rel=1e-4)


def test_a_window_asks_no_device():
    """Its readings are those of the thread: a query in a step would delay it."""
    asked = []

    def read():
        asked.append(
            Reading(
                float(len(asked)), power_w=10.0, utilization=0.5, temperature_c=60.0
            )
        )
        return asked[-1]

    power = Meter(read, "test")
    power.period_s = 60.0
    with power:
        same = {"power_w": 10.0, "utilization": 0.5, "temperature_c": 60.0}
        assert power.window(0.0, 1.0) == same | {"energy_j": 10.0}
        assert power.window(0.5, 2.5) == same | {"energy_j": 20.0}
        assert len(asked) == 1
    assert power.rows(origin_s=1.0)[0][:2] == (-1.0, 10.0)


def test_without_anything_to_read_all_is_unknown():
    with meter("none", "cpu", 2) as power:
        assert power.name == "none" and power.rows(0.0) == []
        assert all(map(isnan, power.window(0.0, 1.0).values()))


def test_a_machine_without_nvml_has_no_meter(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert meter("auto", "cuda", 1).name == meter("auto", "cpu", 1).name == "none"


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs of 100 and 50 W."""
    by_device = {
        "PowerUsage": [100_000, 50_000],
        "Temperature": [60, 70],
        "ClockInfo": [1980, 1500],
        "CurrentClocksThrottleReasons": [1, 4],
        "PowerManagementLimit": [300_000] * 2,
        "TotalEnergyConsumption": [2_000] * 2,
        "UtilizationRates": [SimpleNamespace(gpu=80), SimpleNamespace(gpu=40)],
        "HandleByIndex": [0, 1],
        "HandleByUUID": {"GPU-0": 0, "GPU-1": 1},
    }
    library = SimpleNamespace(NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0)
    library.nvmlInit = lambda: None
    for name, values in by_device.items():
        get = lambda handle, *_, values=values: values[handle]  # noqa: E731
        setattr(library, f"nvmlDeviceGet{name}", get)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_nvml_sums_devices(nvml):
    power = meter("auto", "cuda", 2)
    assert (power.name, power.cap_w) == ("nvml", 600.0)
    assert power.read()[1:] == (150.0, 4.0, 1.5e9, 70.0, 5, 0.6)


@pytest.mark.parametrize("visible", ["1", "GPU-1"])
def test_nvml_reads_the_visible_devices(nvml, visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert meter("auto", "cuda", 1).read().power_w == 50.0


def test_what_nvml_does_not_support_is_unknown(nvml):
    def refuse(*_):
        raise RuntimeError("Not Supported")

    for name in ("TotalEnergyConsumption", "CurrentClocksThrottleReasons"):
        setattr(nvml, f"nvmlDeviceGet{name}", refuse)
    # a version of the library that does not have it
    del nvml.nvmlDeviceGetUtilizationRates
    reading = meter("auto", "cuda", 1).read()
    assert isnan(reading.energy_j) and isnan(reading.utilization)
    assert reading.throttle == 0 and reading.power_w == 100.0
    nvml.nvmlInit = refuse
    assert meter("auto", "cuda", 1).name == "none"
