"""Where does a run take place? Versions, device and memory, and the peak that MFU is
measured against.
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


def environment(device: str, dtype: str) -> dict:
    """What env.json tells; collective over the process group. device: cpu or cuda."""
    peak, source = peak_flops(device, dtype)
    on_gpu = device == "cuda"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {
            found.name: found.version
            for found in distributions()
            if found.name in _PACKAGES
        },
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "device_memory_bytes": torch.cuda.get_device_properties().total_memory
        if on_gpu
        else None,
        "peak_flops": peak,
        "peak_source": source,
    }


def memory_bytes(device: str) -> dict[str, int | None]:
    """Bytes of this rank by column of steps.csv: of its device (None on a CPU) and of
    its process.
    """
    names = {
        "allocated": "memory_allocated",
        "reserved": "memory_reserved",
        "peak": "max_memory_allocated",
    }
    on_gpu = device == "cuda"
    used = {
        f"memory_{name}_bytes": getattr(torch.cuda, call)() if on_gpu else None
        for name, call in names.items()
    }
    return used | {"host_rss_bytes": _host_rss_bytes()}


def begin_memory() -> None:
    """Give what earlier runs or a trace have left back to the system, and count the
    process's memory anew (Linux).
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the high-water mark of the resident set [man 5 proc]


def _host_rss_bytes() -> int:
    """The most memory of this process that was resident at once since `begin_memory`,
    or, beyond Linux, ever.
    """
    with suppress(OSError, TypeError):
        return 1024 * int(
            re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
        )
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
