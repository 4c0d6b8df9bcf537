"""Which machine is this, and what could it do? A GPU's data-sheet rates; of a CPU what products and copies reach."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from madmax_lib import catalog
from madmax_lib.runs.machine import peak_flops

__all__ = ["Peaks", "peaks"]

_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_COPY_BYTES, _COPIES = 128 * 2**20, 5


@dataclass(frozen=True)
class Peaks:
    """A machine by name. flops: FLOP/s of a dtype of torch by its name; memory_bytes_per_s: read and written."""

    machine: str
    flops: Callable[[str], float]
    memory_bytes_per_s: float


def peaks(device: str) -> Peaks:
    """Of the current GPU ("cuda") or of this CPU with the present number of threads ("cpu")."""
    flops = partial(_flops, device, torch.get_num_threads())
    if device != "cuda":
        return Peaks(_cpu_name(), flops, _copied_bytes_per_s(torch.get_num_threads()))
    name = torch.cuda.get_device_name()
    table = catalog.table("device_names")
    known = [row.name for row in table.itertuples(index=False) if re.search(row.pattern, name, re.IGNORECASE)]
    return Peaks(name, flops, catalog.device(known[-1]).memory_bandwidth_bytes_per_s if known else float("nan"))


@lru_cache(maxsize=16)
def _flops(device: str, threads: int, dtype: str) -> float:
    """Asked once per number of threads, which change what a CPU reaches."""
    return peak_flops(device, _NAMES[dtype])[0] if dtype in _NAMES else float("nan")


@lru_cache(maxsize=4)
def _copied_bytes_per_s(threads: int) -> float:
    """Best of a few copies of a tensor that no cache holds."""
    source = torch.zeros(_COPY_BYTES // 4)
    target, seconds = torch.empty_like(source), []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * _COPY_BYTES / min(seconds)


def _cpu_name() -> str:
    """Model of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {models[0] if models else platform.processor() or platform.machine()}"
