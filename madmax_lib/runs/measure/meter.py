"""Power and energy of a run: NVML on GPUs, elsewhere nothing.

A thread reads every 50 ms. NVML's energy counter is refreshed only every 20 to 100 ms
[Zeus, NSDI 2023], so that the energy of a window is the difference of the counter where
that covers more than 1 s, else the integral of the power.
"""

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from math import nan
from typing import NamedTuple

import numpy as np
from scipy.integrate import trapezoid

_PERIOD_S = 0.05
_COUNTER_WINDOW_S = 1.0


class Reading(NamedTuple):
    """All devices at one moment; what is unknown is NaN."""

    t_s: float  # of `time.perf_counter`
    power_w: float = nan  # sum
    energy_j: float = nan  # sum, counted from any origin
    clock_hz: float = nan  # the lowest
    temperature_c: float = nan  # the highest
    throttle: int = 0  # NVML's reasons of all devices, as bits
    # mean share 0..1 of the time that a kernel was running, by NVML over up to a second
    utilization: float = nan


COLUMNS = Reading._fields


class Meter:
    """Readings of a source, taken by a thread while it is entered.

        with meter("auto", "cuda", 8) as power:
            begin_s = time.perf_counter()
            train()
            power.window(begin_s, time.perf_counter())["energy_j"]

    read: gives a Reading, None for nothing to measure. cap_w: power limit of all
    devices. name: of the source.
    """

    period_s = _PERIOD_S

    def __init__(
        self, read: Callable[[], Reading] | None, name: str, cap_w: float = nan
    ):
        self.read = read
        self.name = name
        self.cap_w = cap_w
        self.readings: list[Reading] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Meter":
        if self.read:
            self.readings.append(self.read())
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self):
        while not self._over.wait(self.period_s):
            self.readings.append(self.read())

    def window(self, start_s: float, end_s: float) -> dict[str, float]:
        """Mean power, energy, utilization and temperature between two times of
        `time.perf_counter`, NaN without readings.
        """
        # from the last reading before the window on
        first = bisect_left(self.readings, start_s, key=lambda reading: reading.t_s)
        inside = self.readings[max(first - 1, 0) :]
        joule = energy_j(inside, start_s, end_s)
        busy = [reading.utilization for reading in inside]
        heat = [reading.temperature_c for reading in inside]
        return {
            "power_w": joule / (end_s - start_s) if end_s > start_s else nan,
            "energy_j": joule,
            "utilization": float(np.mean(busy)) if busy else nan,
            "temperature_c": float(np.mean(heat)) if heat else nan,
        }

    def rows(self, origin_s: float) -> list[tuple]:
        """All readings, their times counted from `origin_s`."""
        return [(reading.t_s - origin_s, *reading[1:]) for reading in self.readings]


def energy_j(readings: list[Reading], start_s: float, end_s: float) -> float:
    """Energy of a window: the counter's difference where it covers more than 1 s, else
    the integral of the power.

    Between readings both are taken as linear, before the first and after the last as
    constant power. A source without power is told by its counter. NaN if it has
    neither, or for no reading.

    >>> energy_j([Reading(t, power_w=100.0) for t in (0.0, 0.5, 1.0)], 0.2, 0.4)
    20.0
    """
    if not readings or not end_s > start_s:
        return nan
    # three columns of the readings, each (n,)
    t_s, power_w, counter_j = np.array([reading[:3] for reading in readings]).T
    last_s = min(end_s, t_s[-1])  # the counter's last reading is often before the end
    counted_s = last_s - start_s
    least_s = 0.0 if np.isnan(power_w).any() else _COUNTER_WINDOW_S
    if t_s[0] <= start_s and counted_s > least_s and not np.isnan(counter_j).any():
        begin_j, last_j = np.interp([start_s, last_s], t_s, counter_j)
        counted_j = last_j - begin_j
        # E = counter + P x (what is left of the window)
        last_w = counted_j / counted_s if np.isnan(power_w[-1]) else power_w[-1]
        return float(counted_j + last_w * (end_s - last_s))
    # trapezoids between the readings inside, and the ends of the window
    times_s = np.unique(np.clip([start_s, *t_s, end_s], start_s, end_s))
    watts = np.interp(times_s, t_s, power_w)
    return float(trapezoid(watts, times_s))


def meter(source: str, device: str, devices: int) -> Meter:
    """The meter of a run on `devices` of kind cpu or cuda; one that reads nothing where
    there is nothing to read. source: auto or none.
    """
    local = None
    if source == "auto" and device == "cuda":
        local = _nvml_meter(devices)
    return local or Meter(None, "none")


def _nvml_meter(devices):
    """Meter of the first GPUs, by nvidia-ml-py; None where it or a driver is missing."""
    # numbers or UUIDs that CUDA leaves, all where the variable is not set
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    visible = [int(text) if text.isdigit() else text for text in listed if text]
    # no package, no driver, no permission: each has an exception of its own, and none
    # stops a run
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        by_number = nvml.nvmlDeviceGetHandleByIndex
        by_uuid = nvml.nvmlDeviceGetHandleByUUID
        handles = [
            by_uuid(which) if isinstance(which, str) else by_number(which)
            for which in visible[:devices] or range(devices)
        ]
        limits_mw = [nvml.nvmlDeviceGetPowerManagementLimit(one) for one in handles]
    except Exception:
        return None

    def query(name, *arguments):
        """A quantity of each device, NaN where it or this version of the library does
        not support it.
        """
        values = []
        for handle in handles:
            # AttributeError, and NVMLError, which cannot be named without the package
            try:
                numbers = [getattr(nvml, argument) for argument in arguments]
                value = getattr(nvml, f"nvmlDeviceGet{name}")(handle, *numbers)
                values.append(float(getattr(value, "gpu", value)))
            except Exception:
                values.append(nan)
        return np.array(values)

    def read():
        reasons = np.nan_to_num(query("CurrentClocksThrottleReasons")).astype(int)
        return Reading(  # NVML counts in mW, mJ, MHz and percent
            time.perf_counter(),
            power_w=query("PowerUsage").sum() / 1e3,
            energy_j=query("TotalEnergyConsumption").sum() / 1e3,
            clock_hz=query("ClockInfo", "NVML_CLOCK_SM").min() * 1e6,
            temperature_c=query("Temperature", "NVML_TEMPERATURE_GPU").max(),
            throttle=int(np.bitwise_or.reduce(reasons)),
            utilization=query("UtilizationRates").mean() / 100,
        )

    return Meter(read, "nvml", sum(limits_mw) / 1e3)
