"""Where does a run take place? Versions, devices, memory and the peak that MFU is measured against.

The peak of a device is the catalog's, by the name CUDA gives; of an unknown device it is the best that a matrix product
reaches here, and of a CPU that of the rank's threads, less where the ranks outnumber the cores.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from madmax_lib import catalog

__all__ = ["environment", "host_rss_bytes", "memory_bytes", "peak_flops"]

_PACKAGES = ("madmax-workbench", "torch", "numpy", "deepspeed", "transformers", "datasets", "nvidia-ml-py")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDE, _REPEATS = {"cpu": 512, "cuda": 8192}, 20


def environment(device: str, dtype: str) -> dict:
    """What env.json tells; a collective call where there is a process group. device: cpu or cuda."""
    peak, source = peak_flops(device, dtype)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "device_memory_bytes": torch.cuda.get_device_properties().total_memory if device == "cuda" else None,
        "peak_flops": peak,
        "peak_source": source,
    }


def peak_flops(device: str, dtype: str) -> tuple[float, str]:
    """Peak FLOP/s of one device in a dtype, and where the number comes from; a collective call."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        table = catalog.table("device_names")
        known = [row.name for row in table.itertuples(index=False) if re.search(row.pattern, name, re.IGNORECASE)]
        if known:
            peak = "tf32" if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest" else dtype
            return catalog.device(known[-1]).peak(peak), f"data sheet of {known[-1]}, dense {peak}"
    side = _SIDE[device]
    rate = torch.tensor([_product_rate(device, _DTYPES[dtype], side)], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(rate, dist.ReduceOp.MAX)
    share = _core_share() if device == "cpu" else 1.0
    shared = f", x {share:.3g} since ranks share cores" if share < 1 else ""
    return float(rate) * share, f"measured: best {side} x {side} matrix product in {dtype}{shared}"


def memory_bytes(device: str) -> tuple[float | None, float | None, float | None]:
    """Allocated, reserved and peak bytes of this rank's device since `torch.cuda.reset_peak_memory_stats`."""
    if device != "cuda":
        return None, None, None
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()


def host_rss_bytes() -> int:
    """Memory of this process that is resident now; its largest so far where the system does not tell."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _product_rate(device: str, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of a square matrix product, the best of twenty: others may use the machine too."""
    factor, times_s = torch.randn(side, side, device=device, dtype=dtype), []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        factor @ factor
        if device == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return 2 * side**3 / min(times_s)


def _core_share() -> float:
    """Part of its cores that a rank has when all ranks of this machine compute: 1 unless they outnumber the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * torch.get_num_threads()
    return min(1.0, cores / wanted)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
