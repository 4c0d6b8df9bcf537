"""How much power and energy does a run take? NVML on GPUs, RAPL on CPUs, a CSV to replay, or nothing.

A sampler reads every 50 ms: time, power, energy counter, clock, temperature and throttle reasons, summed or extreme
over the devices. NVML's counter is refreshed only every 20 to 100 ms [Zeus, NSDI 2023], so that the energy of a window
is the difference of the counter where the window is longer than 1 s, else the integral of the power (trapezoid).
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from csv import DictReader
from functools import reduce
from math import isnan, nan
from operator import or_
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["COLUMNS", "Meter", "Reading", "energy_j", "meter"]

_PERIOD_S = 0.05
_COUNTER_WINDOW_S = 1.0
_RAPL = Path("/sys/class/powercap")


class Reading(NamedTuple):
    """All devices at one moment; what is unknown is NaN.

    t_s: of `time.perf_counter`.
    power_w: sum.
    energy_j: sum, counted from any origin.
    clock_hz: the lowest.
    temperature_c: the highest.
    throttle: NVML's reasons of all devices, as bits (0).
    """

    t_s: float
    power_w: float = nan
    energy_j: float = nan
    clock_hz: float = nan
    temperature_c: float = nan
    throttle: int = 0


COLUMNS = Reading._fields


class Meter:
    """Readings of a source, taken by a thread between `start` and `stop`.

    read: gives a Reading, None for nothing to measure. cap_w: power limit of all devices. name: of the source.
    """

    def __init__(self, read: Callable[[], Reading] | None, name: str, cap_w: float = nan, period_s: float = _PERIOD_S):
        self.name = name
        self.cap_w = cap_w
        self.period_s = period_s
        self.readings: list[Reading] = []
        self.read = read
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Meter:
        if self.read:
            self._take()
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(self.period_s):
            self._take()

    def _take(self) -> None:
        with self._lock:  # the sampler and the end of a window may ask at once
            self.readings.append(self.read())

    def window(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Mean power (W) and energy (J) between two times of `time.perf_counter`, NaN without readings."""
        if self.read and self.readings[-1].t_s < end_s:
            self._take()
        first = bisect_left(self.readings, start_s, key=lambda reading: reading.t_s)
        joule = energy_j(self.readings[max(first - 1, 0) :], start_s, end_s)
        return joule / (end_s - start_s) if end_s > start_s else nan, joule

    def rows(self, origin_s: float) -> list[tuple]:
        """All readings, their times counted from `origin_s`."""
        return [(reading.t_s - origin_s, *reading[1:]) for reading in self.readings]


def energy_j(readings: list[Reading], start_s: float, end_s: float) -> float:
    """Energy of a window: the counter's difference if it is longer than 1 s, else the integral of the power.

    Between readings both are taken as linear, before the first and after the last as constant power. Whichever of the
    two a source does not tell is worked out from the other; NaN if it tells neither, or has no two readings.

    >>> energy_j([Reading(t, power_w=100.0) for t in (0.0, 0.5, 1.0)], 0.2, 0.4)
    20.0
    """
    table = np.array([reading[:3] for reading in readings], dtype=float).reshape(-1, 3)
    t_s, power_w, counter_j = table.T
    if len(t_s) < 2 or not end_s > start_s:
        return nan
    has_counter, has_power = not np.isnan(counter_j).any(), not np.isnan(power_w).any()
    inside = t_s[0] <= start_s and end_s <= t_s[-1]
    if has_counter and inside and (end_s - start_s > _COUNTER_WINDOW_S or not has_power):
        first_j, last_j = np.interp([start_s, end_s], t_s, counter_j)
        return float(last_j - first_j)
    if not has_power:
        return nan
    times_s = np.unique([start_s, *t_s[(t_s > start_s) & (t_s < end_s)], end_s])
    watts = np.interp(times_s, t_s, power_w)
    return float(np.sum((watts[1:] + watts[:-1]) / 2 * np.diff(times_s)))


def meter(source: str, device: str, devices: int) -> Meter:
    """The meter of a run on `devices` of kind cpu or cuda; one that reads nothing where there is nothing to read.

    source: auto, none, or a CSV with the columns of `Reading` to replay.
    """
    if source not in ("auto", "none"):
        return _replay_meter(Path(source))
    local = None
    if source == "auto":
        local = _nvml_meter(devices) if device == "cuda" else _rapl_meter(_RAPL)
    return local or Meter(None, "none")


def _nvml_meter(devices: int) -> Meter | None:
    """Meter of the first GPUs, by nvidia-ml-py; None where it or a driver is missing."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handles = [
            nvml.nvmlDeviceGetHandleByUUID(which) if isinstance(which, str) else nvml.nvmlDeviceGetHandleByIndex(which)
            for which in _visible(devices)
        ]
        cap_w = sum(nvml.nvmlDeviceGetPowerManagementLimit(handle) for handle in handles) / 1e3
    except Exception:  # no package, no driver, no permission: each has a kind of its own, and none stops a run
        return None

    def query(name: str, *arguments) -> list[float]:
        return [_query(getattr(nvml, f"nvmlDeviceGet{name}"), handle, *arguments) for handle in handles]

    def read() -> Reading:
        reasons = [0 if isnan(bits) else int(bits) for bits in query("CurrentClocksThrottleReasons")]
        return Reading(
            time.perf_counter(),
            power_w=sum(query("PowerUsage")) / 1e3,
            energy_j=sum(query("TotalEnergyConsumption")) / 1e3,
            clock_hz=min(query("ClockInfo", nvml.NVML_CLOCK_SM)) * 1e6,
            temperature_c=max(query("Temperature", nvml.NVML_TEMPERATURE_GPU)),
            throttle=reduce(or_, reasons),
        )

    return Meter(read, "nvml", cap_w)


def _visible(devices: int) -> list[int | str]:
    """The first `devices` GPUs that CUDA_VISIBLE_DEVICES leaves, each by its number or by its UUID."""
    listed = [text.strip() for text in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if text.strip()]
    return [int(text) if text.isdigit() else text for text in listed][:devices] or list(range(devices))


def _query(ask: Callable, *arguments) -> float:
    """What a query says, NaN where the device does not support it."""
    try:
        return float(ask(*arguments))
    except Exception:  # pynvml.NVMLError, which cannot be named without the package
        return nan


def _rapl_meter(folder: Path) -> Meter | None:
    """Meter of the CPU packages of Linux's powercap; None where they cannot be read.

    The counters wrap at max_energy_range_uj; power is the difference of two readings over their time.
    """
    packages = [path for path in sorted(folder.glob("intel-rapl:*")) if path.name.count(":") == 1]
    try:
        last = {path: _number(path / "energy_uj") for path in packages}
        ranges = {path: _number(path / "max_energy_range_uj") for path in packages}
    except (OSError, ValueError):  # often readable by root alone
        return None
    if not packages:
        return None
    caps_w = [_cap_w(path) for path in packages]
    state = {"t_s": time.perf_counter(), "energy_j": 0.0}

    def read() -> Reading:
        t_s, used_uj = time.perf_counter(), 0.0
        for path in packages:
            now = _number(path / "energy_uj")
            used_uj += (now - last[path]) % ranges[path]
            last[path] = now
        elapsed_s, state["t_s"] = t_s - state["t_s"], t_s
        state["energy_j"] += used_uj * 1e-6
        return Reading(t_s, used_uj * 1e-6 / elapsed_s if elapsed_s > 0 else nan, state["energy_j"])

    return Meter(read, "rapl", sum(caps_w))


def _cap_w(package: Path) -> float:
    try:
        return _number(package / "constraint_0_power_limit_uw") * 1e-6
    except (OSError, ValueError):
        return nan


def _number(path: Path) -> float:
    return float(path.read_text())


def _replay_meter(path: Path) -> Meter:
    """Meter that replays a CSV with columns of `Reading` (t_s and power_w at least) and perhaps cap_w.

    Time 0 of the table is the first reading; after the last row the table begins again, its counter going on.
    Raises ValueError naming file and column for a table that is not of this kind.
    """
    with path.open(newline="") as file:
        rows = list(DictReader(file))
    if missing := {"t_s", "power_w"} - set(rows[0] if rows else ()):
        raise ValueError(f"{path}: column(s) {', '.join(sorted(missing))} missing, or no rows")
    try:
        table = {name: np.array([float(row[name] or "nan") for row in rows]) for name in COLUMNS if name in rows[0]}
        cap_w = float(rows[0].get("cap_w") or nan)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    t_s = table.pop("t_s")
    t_s = t_s - t_s[0]
    if len(t_s) < 2 or not (np.diff(t_s) > 0).all():
        raise ValueError(f"{path}: t_s must grow from row to row, over at least two rows")
    state: dict[str, float] = {}

    def read() -> Reading:
        now_s = time.perf_counter()
        rounds, at_s = divmod(now_s - state.setdefault("start_s", now_s), t_s[-1])
        values = {name: float(np.interp(at_s, t_s, column)) for name, column in table.items()}
        if "energy_j" in values:
            values["energy_j"] += rounds * float(table["energy_j"][-1] - table["energy_j"][0])
        return Reading(now_s, **{**values, "throttle": int(values.get("throttle", 0))})

    return Meter(read, "replay", cap_w)
