"""The machine of a run: versions, device and memory, and the peak that MFU is measured
against.
"""

import ctypes
import gc
import os
import platform
import re
import resource
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import torch
import torch.distributed as dist

from madmax_lib.runs.measure.peak_rates import device_name, peak_flops

__all__ = ["begin_memory", "environment", "memory_bytes"]

_PACKAGES = (
    "madmax-workbench",
    "torch",
    "numpy",
    "deepspeed",
    "transformers",
    "datasets",
    "nvidia-ml-py",
)
_STATUS = Path("/proc/self/status")


def environment(device: str, dtype: str) -> dict:
    """Content of env.json; collective over the process group. device: cpu or cuda."""
    peak, source = peak_flops(device, dtype)
    versions = {package.name: package.version for package in distributions()}
    content = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: versions[name] for name in _PACKAGES if name in versions},
        "cuda": torch.version.cuda,
        "nccl": None,
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "device_memory_bytes": None,
        "peak_flops": peak,
        "peak_source": source,
    }
    if device == "cuda":
        content["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        memory_bytes = torch.cuda.get_device_properties().total_memory
        content["device_memory_bytes"] = memory_bytes
    return content


def memory_bytes(device: str) -> dict[str, int | None]:
    """Bytes of this rank by column of steps.csv: of its device (None on a CPU) and of
    its process.
    """
    cuda = torch.cuda
    calls = {
        "memory_allocated_bytes": cuda.memory_allocated,
        "memory_reserved_bytes": cuda.memory_reserved,
        "memory_peak_bytes": cuda.max_memory_allocated,
    }
    used = {name: call() if device == "cuda" else None for name, call in calls.items()}
    # the most that was resident at once since `begin_memory`, or, beyond Linux, ever
    try:
        resident_kib = int(re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text())[1])
        resident_bytes = 1024 * resident_kib
    except (OSError, TypeError):
        unit = (
            1 if sys.platform == "darwin" else 1024
        )  # bytes, or KiB [man 2 getrusage]
        resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return used | {"host_rss_bytes": resident_bytes}


def begin_memory() -> None:
    """Give what earlier runs or a trace have left back to the system, and count the
    process's memory anew (Linux).
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's; others lack it
        # 5 resets the high-water mark of the resident set [man 5 proc]
        Path("/proc/self/clear_refs").write_text("5")
