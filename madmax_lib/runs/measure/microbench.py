"""How fast are single kernels here? Median and spread, bytes moved, GB/s and shares of the peak, as one tidy table.

Each repeat is timed alone, by device events on a GPU and the clock on a CPU, after warm-up and after a buffer larger
than the last-level cache was written, so that operands come from memory and not from a cache. Rows of all tables have
the same columns (`COLUMNS`) and name their machine; `sweep` runs them all, on a GPU within five minutes:

    python -m madmax_lib.runs.measure.microbench kernels.csv
    torchrun --nproc-per-node 8 -m madmax_lib.runs.measure.microbench collectives.csv
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from madmax_lib.atomic import replacing
from madmax_lib.runs.measure.peaks import peaks
from madmax_lib.runs.model.kernels import HOWS, bias_gelu, moved_bytes, unavailable

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


def measure(run: Callable[[], object], device: str, *, repeats: int = 30, warmup: int = 5, flush: bool = True
            ) -> Spread:  # fmt: skip
    """Times `run`, each repeat alone, with the caches overwritten before each if `flush`.

    Raises ValueError for fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    for _ in range(warmup):
        run()
    buffer = torch.empty(_FLUSH_BYTES[device] // 4 if flush else 0, device=device)
    timed = _timed_cuda if device == "cuda" else _timed_cpu
    low, median, high = np.quantile(timed(run, buffer, repeats), [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high), repeats)


def gelu_table(device: str | None = None, *, shapes: Iterable[tuple[int, int]] = SHAPES, compiled: bool = True,
               **options) -> pd.DataFrame:  # fmt: skip
    """bias + GELU forward and backward, by every way that works here: eager, compiled if asked for, Triton on a GPU.

    shapes: (rows, columns). bytes_per_s counts what a fused kernel must move, so peak_share is how close a way comes to
    the ideal one. options: dtype of torch, threads of a CPU, and those of `measure`.
    """
    bench = _Bench(device, **options)
    for shape in shapes:
        x, bias = bench.random(*shape).requires_grad_(), bench.random(shape[1]).requires_grad_()
        fixed, fixed_bias, dy = x.detach(), bias.detach(), bench.random(*shape)
        for how in HOWS:
            if (how == "compiled" and not compiled) or unavailable(how, bench.device):
                continue
            if how == "triton" and bench.device == "cpu":
                continue  # interpreted, it only proves correctness
            y, size = bias_gelu(x, bias, how), (shape[0], None, shape[1])
            bench.row("bias_gelu forward", how, size, partial(bias_gelu, fixed, fixed_bias, how),
                      moved=moved_bytes(x, "forward"))  # fmt: skip
            bench.row("bias_gelu backward", how, size,
                      partial(torch.autograd.grad, y, (x, bias), dy, retain_graph=True),
                      moved=moved_bytes(x, "backward"))  # fmt: skip
    return bench.table()


def mlp_table(device: str | None = None, *, tokens: int = 8192, hidden: int = 1280, ffn: int = 5120,
              compiled: bool = False, **options) -> pd.DataFrame:  # fmt: skip
    """A feed-forward block in its parts and whole (forward): linear up, bias + GELU, linear down, dropout, all of it.

    compiled: the whole block once more with torch.compile. Sizes default to GPT-2 Large with 8 x 1,024 tokens; options
    as in `gelu_table`.
    """
    bench, linear = _Bench(device, **options), torch.nn.functional.linear
    x, inner, up, down = (bench.random(*size) for size in ((tokens, hidden), (tokens, ffn), (ffn, hidden),
                                                           (hidden, ffn)))  # fmt: skip
    bias, bias_down, width = bench.random(ffn), bench.random(hidden), x.element_size()
    dropout = partial(torch.nn.functional.dropout, p=0.1, training=True)

    def block() -> torch.Tensor:
        return dropout(linear(bias_gelu(linear(x, up), bias), down, bias_down))

    product, ends = 2.0 * tokens * hidden * ffn, (x.numel() + inner.numel() + up.numel()) * width
    whole = {"flops": 2 * product, "moved": 2 * (x.numel() + up.numel()) * width}
    bench.row("linear up", "eager", (tokens, hidden, ffn), lambda: linear(x, up), product, ends)
    bench.row("bias_gelu forward", "eager", (tokens, None, ffn), lambda: bias_gelu(inner, bias),
              moved=moved_bytes(inner, "forward"))  # fmt: skip
    bench.row("linear down", "eager", (tokens, ffn, hidden), lambda: linear(inner, down, bias_down), product, ends)
    bench.row("dropout", "eager", (tokens, None, hidden), lambda: dropout(x), moved=2 * x.numel() * width)
    bench.row("mlp", "eager", (tokens, hidden, ffn), block, **whole)
    if compiled:
        bench.row("mlp", "compiled", (tokens, hidden, ffn), torch.compile(block), **whole)
    return bench.table()


def gemm_table(device: str | None = None, *, shapes: Iterable[tuple[int, int, int]] | None = None, **options
               ) -> pd.DataFrame:  # fmt: skip
    """Products of (m, k) by (k, n): FLOP/s and the share of the peak. shapes: (m, k, n)."""
    bench = _Bench(device, **options)
    for m, k, n in shapes or (GEMMS if bench.device == "cuda" else _CPU_GEMMS):
        a, b = bench.random(m, k), bench.random(k, n)
        moved = (m * k + k * n + m * n) * a.element_size()
        bench.row("gemm", "eager", (m, k, n), partial(torch.matmul, a, b), 2.0 * m * k * n, moved)
    return bench.table()


def collective_table(device: str | None = None, *, sizes: Sequence[int] = _SIZES, **options) -> pd.DataFrame:
    """Collectives of all ranks of the running process group, by message size; every rank must call it.

    sizes: bytes of a rank's whole buffer (all-reduce, all-to-all), of the gathered one (all-gather) or of the input
    (reduce-scatter). wire_bytes: sent by a rank in a ring. Raises RuntimeError without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("collectives need a process group: start with torchrun")
    bench, ranks = _Bench(device, dtype=torch.float32, flush=False, **options), dist.get_world_size()
    for size in sizes:
        count = max(size // 4 // ranks, 1) * ranks
        whole, part = bench.random(count).zero_(), bench.random(count // ranks).zero_()
        runs = {
            "all_reduce": (2, partial(dist.all_reduce, whole)),
            "all_gather": (1, partial(dist.all_gather_single, whole, part)),
            "reduce_scatter": (1, partial(dist.reduce_scatter_single, part, whole)),
            "all_to_all": (1, partial(dist.all_to_all_single, torch.empty_like(whole), whole)),
        }
        for kind, (passes, run) in runs.items():
            dist.barrier()
            wire = passes * (ranks - 1) / ranks * count * 4
            bench.row(kind, dist.get_backend(), (None, None, count), run, wire=wire, ranks=ranks)
    return bench.table()


def sweep(device: str | None = None, *, quick: bool = False, **options) -> pd.DataFrame:
    """GELU, MLP and GEMM tables in one. quick: small shapes, nothing compiled."""
    gelu, mlp, gemm = {}, {"compiled": True}, {}
    if quick:
        gelu, gemm = {"shapes": ((256, 512),), "compiled": False}, {"shapes": ((128, 128, 128),)}
        mlp = {"tokens": 256, "hidden": 128, "ffn": 512}
    tables = [gelu_table(device, **gelu, **options), mlp_table(device, **mlp, **options),
              gemm_table(device, **gemm, **options)]  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def save(table: pd.DataFrame, path: str | Path) -> Path:
    """The table as CSV, complete or not at all; returns the path."""
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.6g")
    return Path(path)


class _Bench:
    """Measures on one device, in one dtype: by default bf16 on a GPU, fp16 on one without, fp32 on a CPU; a row each.

    threads: of a CPU, as they are if 0. options: of `measure`.
    """

    def __init__(self, device: str | None, *, dtype: torch.dtype | None = None, threads: int = 0, **options):
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device not in _FLUSH_BYTES:
            raise ValueError(f"device={device!r} is not one of {', '.join(_FLUSH_BYTES)}")
        if threads:
            torch.set_num_threads(threads)
        self.dtype = dtype or _default_dtype(self.device)
        self.peaks, self.options, self.rows = peaks(self.device), options, []

    def random(self, *shape: int) -> torch.Tensor:
        """An operand."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def row(self, kernel: str, how: str, shape: tuple, run: Callable[[], object], flops: float = 0.0,
            moved: float = float("nan"), wire: float = float("nan"), ranks: int = 1) -> None:  # fmt: skip
        """Time a kernel and note it. shape: rows, inner, columns."""
        found, name = measure(run, self.device, **self.options), str(self.dtype).removeprefix("torch.")
        per_s = {"flops_per_s": flops / found.median_s, "bytes_per_s": moved / found.median_s,
                 "wire_bytes_per_s": wire / found.median_s}  # fmt: skip
        shares = [per_s["flops_per_s"] / self.peaks.flops(name) if flops else 0.0,
                  per_s["bytes_per_s"] / self.peaks.memory_bytes_per_s]  # fmt: skip
        self.rows.append({
            "kernel": kernel, "how": how, "machine": self.peaks.machine, "threads": torch.get_num_threads(),
            "ranks": ranks, "dtype": name, **dict(zip(("rows", "inner", "columns"), shape, strict=True)),
            **vars(found), "flops": flops, "moved_bytes": moved, "wire_bytes": wire, **per_s,
            "peak_share": float(np.max(shares)),
        })  # fmt: skip

    def table(self) -> pd.DataFrame:
        """All rows."""
        table = pd.DataFrame(self.rows, columns=list(COLUMNS))
        return table.astype({name: float for name in COLUMNS[6:] if name != "repeats"})


def _default_dtype(device: str) -> torch.dtype:
    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


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
