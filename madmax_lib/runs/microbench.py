"""How fast are single kernels here? Median and spread, bytes moved, GB/s and shares of the peak, as one tidy table.

Each repeat is timed alone, by device events on a GPU and the clock on a CPU, after warm-up and after a buffer larger
than the last-level cache was written, so that operands come from memory and not from a cache. Rows of all tables have
the same columns (`COLUMNS`) and name their machine; `sweep` runs them all, on a GPU within five minutes:

    python -m madmax_lib.runs.microbench kernels.csv
    torchrun --nproc-per-node 8 -m madmax_lib.runs.microbench collectives.csv
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from madmax_lib.atomic import replacing
from madmax_lib.runs.kernels import HOWS, available, bias_gelu, moved_bytes
from madmax_lib.runs.peaks import Peaks, peaks

__all__ = ["COLUMNS", "GEMMS", "SHAPES", "collective_table", "gelu_table", "gemm_table", "measure", "mlp_table",
           "save", "sweep"]  # fmt: skip

# rows and columns are those of the first operand; moved_bytes: that must move; wire_bytes: that a rank sends
COLUMNS = ("kernel", "how", "machine", "threads", "ranks", "dtype", "rows", "inner", "columns", "median_s", "low_s",
           "high_s", "repeats", "flops", "moved_bytes", "wire_bytes", "flops_per_s", "bytes_per_s", "wire_bytes_per_s",
           "peak_share")  # fmt: skip
SHAPES = ((2048, 1024), (4096, 2048), (8192, 5120))  # of makramab/hybrid-parallelism: 4x512, 8x512, 8x1024 tokens
GEMMS = tuple((m, k, n) for m in (512, 2048, 8192) for k, n in ((1280, 5120), (5120, 1280), (4096, 4096), (8192, 8192)))
_CPU_GEMMS = ((256, 256, 1024), (512, 512, 512), (512, 1024, 1024))
_SIZES = tuple(4**power for power in range(6, 15))  # 4 KiB to 256 MiB
_FLUSH_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}  # larger than the L2 of an H200 (50 MB), the L3 of a CPU core


@dataclass(frozen=True)
class Spread:
    """Seconds of the repeats: median and the quartiles."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int


def measure(
    run: Callable[[], object], device: str, *, repeats: int = 30, warmup: int = 5, flush: bool = True
) -> Spread:
    """Times `run`, each repeat alone, with the caches overwritten before each if `flush`.

    Raises ValueError for fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    for _ in range(warmup):
        run()
    buffer = torch.empty(_FLUSH_BYTES[device] // 4 if flush else 0, device=device)
    timed = _timed_cuda if device == "cuda" else _timed_cpu
    seconds = np.array(timed(run, buffer, repeats))
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high), repeats)


def gelu_table(
    device: str | None = None,
    *,
    shapes: Iterable[tuple[int, int]] = SHAPES,
    dtype: torch.dtype | None = None,
    compiled: bool = True,
    **options,
) -> pd.DataFrame:
    """bias + GELU forward and backward, by every way that works here: eager, compiled if asked for, Triton on a GPU.

    shapes: (rows, columns). bytes_per_s counts what a fused kernel must move, so peak_share is how close a way comes to
    the ideal one. options: of `measure`, and threads of a CPU.
    """
    place, dtype, options = _place(device, dtype, options)
    hows = [how for how in HOWS if (compiled or how != "compiled") and not available(how, place.device)]
    hows = [how for how in hows if how != "triton" or place.device == "cuda"]  # interpreted, it only proves correctness
    return _table([row for shape in shapes for how in hows for row in _gelu_rows(place, shape, how, dtype, options)])


def _gelu_rows(place: _Place, shape: tuple[int, int], how: str, dtype: torch.dtype, options: dict) -> list[dict]:
    """Forward and backward of one shape by one way."""
    made = {"device": place.device, "dtype": dtype}
    x, bias = torch.randn(shape, **made, requires_grad=True), torch.randn(shape[1], **made, requires_grad=True)
    fixed, fixed_bias, dy, y = x.detach(), bias.detach(), torch.randn(shape, **made), bias_gelu(x, bias, how)
    runs = {
        "forward": lambda: bias_gelu(fixed, fixed_bias, how),
        "backward": lambda: torch.autograd.grad(y, (x, bias), dy, retain_graph=True),
    }
    size = (shape[0], None, shape[1])
    return [place.row(f"bias_gelu {direction}", how, dtype, size, measure(run, place.device, **options),
                      moved=moved_bytes(x, direction)) for direction, run in runs.items()]  # fmt: skip


def mlp_table(device: str | None = None, *, tokens: int = 8192, hidden: int = 1280, ffn: int = 5120,
              dtype: torch.dtype | None = None, compiled: bool = False, **options) -> pd.DataFrame:  # fmt: skip
    """A feed-forward block in its parts and whole (forward): linear up, bias + GELU, linear down, dropout, all of it.

    compiled: the whole block once more with torch.compile. Sizes default to GPT-2 Large with 8 x 1,024 tokens.
    """
    place, dtype, options = _place(device, dtype, options)
    made = {"device": place.device, "dtype": dtype}
    x, inner = torch.randn(tokens, hidden, **made), torch.randn(tokens, ffn, **made)
    up, down, bias = torch.randn(ffn, hidden, **made), torch.randn(hidden, ffn, **made), torch.randn(ffn, **made)
    bias_down, width, linear = torch.randn(hidden, **made), x.element_size(), torch.nn.functional.linear

    def block() -> torch.Tensor:
        out = linear(bias_gelu(linear(x, up), bias), down, bias_down)
        return torch.nn.functional.dropout(out, 0.1, training=True)

    product, weights = 2.0 * tokens * hidden * ffn, hidden * ffn
    ends = (tokens * (hidden + ffn) + weights) * width
    parts = [
        ("linear up", "eager", lambda: linear(x, up), (tokens, hidden, ffn), product, ends),
        ("bias_gelu forward", "eager", lambda: bias_gelu(inner, bias), (tokens, None, ffn), 0.0,
         2 * inner.numel() * width),
        ("linear down", "eager", lambda: linear(inner, down, bias_down), (tokens, ffn, hidden), product, ends),
        ("dropout", "eager", lambda: torch.nn.functional.dropout(x, 0.1, training=True), (tokens, None, hidden), 0.0,
         2 * x.numel() * width),
        ("mlp", "eager", block, (tokens, hidden, ffn), 2 * product, 2 * (x.numel() + weights) * width),
    ]  # fmt: skip
    if compiled:
        parts.append(("mlp", "compiled", torch.compile(block), *parts[-1][3:]))
    return _table([place.row(kernel, how, dtype, shape, measure(run, place.device, **options), flops, moved)
                   for kernel, how, run, shape, flops, moved in parts])  # fmt: skip


def gemm_table(device: str | None = None, *, shapes: Iterable[tuple[int, int, int]] | None = None,
               dtype: torch.dtype | None = None, **options) -> pd.DataFrame:  # fmt: skip
    """Products of (m, k) by (k, n): FLOP/s and the share of the peak. shapes: (m, k, n)."""
    place, dtype, options = _place(device, dtype, options)
    rows = []
    for m, k, n in shapes or (GEMMS if place.device == "cuda" else _CPU_GEMMS):
        a = torch.randn(m, k, device=place.device, dtype=dtype)
        b = torch.randn(k, n, device=place.device, dtype=dtype)
        found = measure(lambda a=a, b=b: a @ b, place.device, **options)
        moved = (m * k + k * n + m * n) * a.element_size()
        rows.append(place.row("gemm", "eager", dtype, (m, k, n), found, 2.0 * m * k * n, moved))
    return _table(rows)


def collective_table(device: str | None = None, *, sizes: Sequence[int] = _SIZES, **options) -> pd.DataFrame:
    """Collectives of all ranks of the running process group, by message size; every rank must call it.

    sizes: bytes of a rank's whole buffer (all-reduce, all-to-all), of the gathered one (all-gather) or of the input
    (reduce-scatter). wire_bytes: sent by a rank in a ring. Raises RuntimeError without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("collectives need a process group: start with torchrun")
    place, dtype, options = _place(device, torch.float32, options)
    ranks = dist.get_world_size()
    rows = []
    for size in sizes:
        count = max(size // 4 // ranks, 1) * ranks
        whole = torch.zeros(count, device=place.device)
        part = torch.zeros(count // ranks, device=place.device)
        runs = {
            "all_reduce": (2, lambda whole=whole: dist.all_reduce(whole)),
            "all_gather": (1, lambda whole=whole, part=part: dist.all_gather_single(whole, part)),
            "reduce_scatter": (1, lambda whole=whole, part=part: dist.reduce_scatter_single(part, whole)),
            "all_to_all": (1, lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole)),
        }
        for kind, (passes, run) in runs.items():
            dist.barrier()
            found = measure(run, place.device, flush=False, **options)
            wire = passes * (ranks - 1) / ranks * count * 4
            rows.append(place.row(kind, dist.get_backend(), dtype, (None, None, count), found, wire=wire, ranks=ranks))
    return _table(rows)


def sweep(device: str | None = None, *, quick: bool = False, **options) -> pd.DataFrame:
    """GELU, MLP and GEMM tables in one. quick: small shapes, nothing compiled."""
    if quick:
        return pd.concat([gelu_table(device, shapes=((256, 512),), compiled=False, **options),
                          mlp_table(device, tokens=256, hidden=128, ffn=512, **options),
                          gemm_table(device, shapes=((128, 128, 128),), **options)], ignore_index=True)  # fmt: skip
    return pd.concat([gelu_table(device, **options), mlp_table(device, compiled=True, **options),
                      gemm_table(device, **options)], ignore_index=True)  # fmt: skip


def save(table: pd.DataFrame, path: str | Path) -> Path:
    """The table as CSV, complete or not at all; returns the path."""
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.6g")
    return Path(path)


@dataclass(frozen=True)
class _Place:
    """Where kernels run, and rows that say so."""

    device: str
    peaks: Peaks

    def row(self, kernel: str, how: str, dtype: torch.dtype, shape: tuple, found: Spread, flops: float = 0.0,
            moved: float = float("nan"), wire: float = float("nan"), ranks: int = 1) -> dict:  # fmt: skip
        name = str(dtype).removeprefix("torch.")
        peak_flops, peak_bytes_per_s = self.peaks.flops(name), self.peaks.memory_bytes_per_s
        shares = [flops / found.median_s / peak_flops if flops else 0.0, moved / found.median_s / peak_bytes_per_s]
        return {
            "kernel": kernel, "how": how, "machine": self.peaks.machine, "threads": torch.get_num_threads(),
            "ranks": ranks, "dtype": name, **dict(zip(("rows", "inner", "columns"), shape, strict=True)),
            **vars(found), "flops": flops, "moved_bytes": moved, "wire_bytes": wire,
            "flops_per_s": flops / found.median_s, "bytes_per_s": moved / found.median_s,
            "wire_bytes_per_s": wire / found.median_s, "peak_share": float(np.max(shares)),
        }  # fmt: skip


def _place(device: str | None, dtype: torch.dtype | None, options: dict) -> tuple[_Place, torch.dtype, dict]:
    """Place, dtype (bf16 on a GPU, fp32 on a CPU by default) and options of `measure`; sets the number of threads."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in _FLUSH_BYTES:
        raise ValueError(f"device={device!r} is not one of {', '.join(_FLUSH_BYTES)}")
    options = dict(options)
    if threads := options.pop("threads", 0):
        torch.set_num_threads(threads)
    return _Place(device, peaks(device)), dtype or (torch.bfloat16 if device == "cuda" else torch.float32), options


def _table(rows: list[dict]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.astype({name: float for name in COLUMNS[6:] if name != "repeats"})


def _timed_cuda(run: Callable, buffer: torch.Tensor, repeats: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        buffer.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _timed_cpu(run: Callable, buffer: torch.Tensor, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        buffer.zero_()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def _main(path: str) -> None:
    """Under torchrun the collectives, else the other tables; the first rank writes."""
    if "RANK" not in os.environ:
        print(save(sweep(), path))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    table = collective_table(device)
    if dist.get_rank() == 0:
        print(save(table, path))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the CSV file to write")
    _main(sys.argv[1])
