"""Peak rates of this machine: of a GPU those of its data sheet, elsewhere the best that
products and copies reach.

The data sheet is the catalog's, by the name CUDA gives. The peak of an unknown device
is the best that a matrix product reaches here, and of a CPU that of the rank's threads,
less where the ranks outnumber the cores.
"""

import os
import platform
import re
import time
from math import nan
from pathlib import Path

import loky
import torch
import torch.distributed as dist

from madmax_lib import catalog
from madmax_lib.runs import testbed

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Side of the square product that is timed: large enough to fill the device
_SIDE = {"cpu": 512, "cuda": 8192}
_PRODUCTS = 20
_TF32_SINCE = (8, 0)  # compute capability: Ampere
# beyond the caches of a CPU, so that the memory is timed
_COPY_BYTES = 128 * 2**20
_COPIES = 5


def peak_flops(device: str, dtype: str) -> tuple[float, str]:
    """Peak FLOP/s of one device (cpu or cuda) in fp32, bf16 or fp16, and where the
    number comes from; collective.
    """
    on_gpu = device == "cuda"
    sheet = catalog.device_named(torch.cuda.get_device_name()) if on_gpu else None
    if sheet:
        peak = sheet.nearest(product_dtype(dtype, device))
        return sheet.peak(peak), f"data sheet of {sheet.name}, dense {peak}"
    side = _SIDE[device]
    factor = torch.randn(side, side, device=device, dtype=TORCH_DTYPES[dtype])
    best_s = _best_s(lambda: factor @ factor, _PRODUCTS, on_gpu=on_gpu)
    # a square product takes 2 n^3 FLOPs
    rate = torch.tensor([2 * side**3 / best_s], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(rate, dist.ReduceOp.MAX)
    source = f"measured: best {side} x {side} matrix product in {dtype}"
    if device == "cpu":
        share = min(1.0, cores_per_rank() / torch.get_num_threads())
        rate *= share
        if share < 1:
            source += f", x {share:.3g} since ranks share cores or are slowed"
        if dtype == "fp16":
            source += "; no peak: CPUs convert fp16, so MFU would mean nothing"
    return rate.item(), source


def native_dtype(dtype: str, device: str) -> str:
    """A dtype, or in place of auto bf16 on a GPU that computes in it and fp32
    elsewhere.
    """
    if dtype != "auto":
        return dtype
    on_gpu = device == "cuda"
    native = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp32"


def product_dtype(dtype: str, device: str) -> str:
    """Format that products of a dtype are computed in: TF32 in place of fp32 on a GPU
    that has it, where torch may use it.
    """
    may = torch.get_float32_matmul_precision() != "highest"
    if (device, dtype) != ("cuda", "fp32") or not may:
        return dtype
    return "tf32" if torch.cuda.get_device_capability() >= _TF32_SINCE else dtype


def device_name(device: str) -> str:
    """Name of the current GPU or of the processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def memory_bytes_per_s(device: str) -> float:
    """Bytes that the memory of a device (cpu or cuda) reads and writes per second, NaN
    for an unknown GPU.

    Of a CPU the best of a few copies of a tensor that no cache holds.
    """
    if device == "cuda":
        sheet = catalog.device_named(device_name(device))
        return sheet.memory_bandwidth_bytes_per_s if sheet else nan
    source = torch.zeros(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    # a copy reads every byte and writes it
    return 2 * _COPY_BYTES / _best_s(lambda: target.copy_(source), _COPIES)


def _best_s(run, repeats, on_gpu=False):
    """Seconds of the fastest of some repeats: others may use the machine too."""
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def cores_per_rank() -> float:
    """Cores of this machine that a rank may use: their number over that of its ranks,
    less where devices are slowed.

    A mean of the ranks, on all hosts that the testbed makes here.
    """
    hosts, speed = testbed.spread()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * hosts
    equal = loky.cpu_count() / ranks
    if not speed:
        return equal
    return sum(min(equal, share) for share in speed) / len(speed)
