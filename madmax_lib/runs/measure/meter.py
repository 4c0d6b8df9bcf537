"""How much power and energy does a run take? NVML on GPUs, RAPL on CPUs, a CSV to
replay, or nothing.

A thread reads every 50 ms. NVML's energy counter is refreshed only every 20 to 100 ms
[Zeus, NSDI 2023], so that the energy of a window is the difference of the counter where
that covers more than 1 s, else the integral of the power.
"""

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from csv import DictReader
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["COLUMNS", "Meter", "Reading", "energy_j", "meter"]

_PERIOD_S = 0.05
_COUNTER_WINDOW_S = 1.0
_RAPL = Path("/sys/class/powercap")
_RAPL_LIMIT = "constraint_0_power_limit_uw"


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

    read: gives a Reading, None for nothing to measure. cap_w: power limit of all
    devices. name: of the source.
    """

    def __init__(
        self,
        read: Callable[[], Reading] | None,
        name: str,
        cap_w: float = nan,
        period_s: float = _PERIOD_S,
    ):
        self.read = read
        self.name = name
        self.cap_w = cap_w
        self.period_s = period_s
        self.readings: list[Reading] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Meter":
        if self.read:
            self.readings.append(self.read())
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(self.period_s):
            self.readings.append(self.read())

    def window(self, start_s: float, end_s: float) -> dict[str, float]:
        """Mean power, energy and utilization between two times of `time.perf_counter`,
        NaN without readings.
        """
        first = bisect_left(self.readings, start_s, key=lambda reading: reading.t_s)
        inside = self.readings[max(first - 1, 0) :]
        joule = energy_j(inside, start_s, end_s)
        busy = [reading.utilization for reading in inside]
        watts = joule / (end_s - start_s) if end_s > start_s else nan
        return {
            "power_w": watts,
            "energy_j": joule,
            "utilization": float(np.mean(busy)) if busy else nan,
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
    t_s, power_w, counter_j = np.array(
        [reading[:3] for reading in readings], dtype=float
    ).T
    known_s = min(
        end_s, t_s[-1]
    )  # the counter's last reading is often just before the end
    if t_s[0] <= start_s and known_s - start_s > (
        0.0 if np.isnan(power_w).any() else _COUNTER_WINDOW_S
    ):
        counted_j = float(np.diff(np.interp([start_s, known_s], t_s, counter_j))[0])
        last_w = (
            counted_j / (known_s - start_s) if np.isnan(power_w[-1]) else power_w[-1]
        )
        if not np.isnan(counter_j).any():
            return float(counted_j + last_w * (end_s - known_s))
    times_s = np.unique(np.clip([start_s, *t_s, end_s], start_s, end_s))
    watts = np.interp(times_s, t_s, power_w)
    return float(np.sum((watts[1:] + watts[:-1]) / 2 * np.diff(times_s)))


def meter(source: str, device: str, devices: int) -> Meter:
    """The meter of a run on `devices` of kind cpu or cuda; one that reads nothing where
    there is nothing to read.

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
            nvml.nvmlDeviceGetHandleByUUID(which)
            if isinstance(which, str)
            else nvml.nvmlDeviceGetHandleByIndex(which)
            for which in _visible(devices)
        ]
        cap_w = (
            sum(nvml.nvmlDeviceGetPowerManagementLimit(handle) for handle in handles)
            / 1e3
        )
    # no package, no driver, no permission: each has a kind of its own, and none stops a
    # run
    except Exception:
        return None

    def query(name: str, *arguments: str) -> np.ndarray:
        """What each device says, NaN where it or this version of the library does not
        support it.
        """
        values = []
        for handle in handles:
            try:
                value = getattr(nvml, f"nvmlDeviceGet{name}")(
                    handle, *(getattr(nvml, text) for text in arguments)
                )
                values.append(float(getattr(value, "gpu", value)))
            # AttributeError, and pynvml.NVMLError, which cannot be named without the
            # package
            except Exception:
                values.append(nan)
        return np.array(values)

    def read() -> Reading:
        return Reading(
            time.perf_counter(),
            power_w=query("PowerUsage").sum() / 1e3,
            energy_j=query("TotalEnergyConsumption").sum() / 1e3,
            clock_hz=query("ClockInfo", "NVML_CLOCK_SM").min() * 1e6,
            temperature_c=query("Temperature", "NVML_TEMPERATURE_GPU").max(),
            throttle=int(
                np.bitwise_or.reduce(
                    np.nan_to_num(query("CurrentClocksThrottleReasons")).astype(int)
                )
            ),
            utilization=query("UtilizationRates").mean() / 100,
        )

    return Meter(read, "nvml", cap_w)


def _visible(devices: int) -> list[int | str]:
    """The first `devices` GPUs that CUDA_VISIBLE_DEVICES leaves, each by its number or
    by its UUID.
    """
    listed = [
        text.strip()
        for text in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if text.strip()
    ]
    return [int(text) if text.isdigit() else text for text in listed][:devices] or list(
        range(devices)
    )


def _rapl_meter(folder: Path) -> Meter | None:
    """Meter of the CPU packages of Linux's powercap; None where they cannot be read.

    The counters wrap at max_energy_range_uj; power is the difference of two readings
    over their time.
    """
    packages = [
        path
        for path in sorted(folder.glob("intel-rapl:*"))
        if path.name.count(":") == 1
    ]

    def sizes(name: str) -> np.ndarray:
        return np.array([float((path / name).read_text()) for path in packages])

    try:
        before_uj = sizes("energy_uj")
        wraps_uj = sizes("max_energy_range_uj")
        t_s = time.perf_counter()
        total_j = 0.0
        limits = all((path / _RAPL_LIMIT).exists() for path in packages)
        cap_w = float(sizes(_RAPL_LIMIT).sum()) * 1e-6 if limits else nan
    except (OSError, ValueError):  # often readable by root alone
        return None

    def read() -> Reading:
        nonlocal before_uj, t_s, total_j
        since_s = t_s
        now_uj = sizes("energy_uj")
        t_s = time.perf_counter()
        joule = float(((now_uj - before_uj) % wraps_uj).sum()) * 1e-6
        before_uj = now_uj
        total_j += joule
        return Reading(t_s, joule / (t_s - since_s), total_j)

    return Meter(read, "rapl", cap_w) if packages else None


def _replay_meter(path: Path) -> Meter:
    """Meter that replays a CSV with columns of `Reading` (t_s and power_w at least) and
    perhaps cap_w.

    Time 0 of the table is the first reading; after the last row the table begins again,
    its counter going on. Raises ValueError naming file and column for a table that is
    not of this kind.
    """
    with path.open(newline="", errors="replace") as file:
        rows = list(DictReader(file))
    if missing := {"t_s", "power_w"} - set(rows[0] if rows else ()):
        raise ValueError(
            f"{path}: column(s) {', '.join(sorted(missing))} missing, or no rows"
        )
    try:
        kept = [name for name in (*COLUMNS, "cap_w") if name in rows[0]]
        table = {
            name: np.array([float(row[name] or "nan") for row in rows]) for name in kept
        }
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    cap_w = float(table.pop("cap_w", [nan])[0])
    t_s = table.pop("t_s")
    if len(t_s) < 2 or not (np.diff(t_s) > 0).all():
        raise ValueError(
            f"{path}: t_s must grow from row to row, over at least two rows"
        )
    first_s = None

    def read() -> Reading:
        nonlocal first_s
        now_s = time.perf_counter()
        first_s = now_s if first_s is None else first_s
        rounds, at_s = divmod(now_s - first_s, t_s[-1] - t_s[0])
        values = {
            name: float(np.interp(t_s[0] + at_s, t_s, column))
            for name, column in table.items()
        }
        if "energy_j" in values:
            values["energy_j"] += rounds * float(np.ptp(table["energy_j"]))
        return Reading(now_s, **values | {"throttle": int(values.get("throttle", 0))})

    return Meter(read, "replay", cap_w)
