"""How fast are single kernels here? Median and spread, bytes moved, GB/s and shares of the peak, as one tidy table.

Each repeat is timed alone, by device events on a GPU and the clock on a CPU, after warm-up and after a buffer larger
than the last-level cache was written, so that operands come from memory and not from a cache. All tables have the same
columns: the kernel, how it was computed, where, rows x inner x columns of its operands, seconds, moved_bytes (that must
move between memory and device), wire_bytes (that a rank sends), the rates, and peak_share (0..1, of the peak FLOP/s or
of the memory's bandwidth, the larger). `sweep` makes those of one device, on a GPU within five minutes:

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
from math import nan

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from madmax_lib.atomic import replacing
from madmax_lib.runs.measure.peak_rates import peak_rates
from madmax_lib.runs.model.kernels import HOWS, bias_gelu, moved_bytes, unavailable

__all__ = [
    "SHAPES",
    "Timing",
    "collective_table",
    "gelu_table",
    "gemm_table",
    "kernel_seconds",
    "mlp_table",
    "sweep",
]

SHAPES = ((2048, 1024), (4096, 2048), (8192, 5120))  # of makramab/hybrid-parallelism: 4x512, 8x512, 8x1024 tokens
_GEMMS = {
    "cuda": [(m, k, n) for m in (512, 2048, 8192) for k, n in ((1280, 5120), (5120, 1280), (4096, 4096), (8192, 8192))],
    "cpu": [(256, 256, 1024), (512, 512, 512), (512, 1024, 1024)],
}
_MLP = (8192, 1280, 5120)  # GPT-2 Large with 8 x 1,024 tokens
_MESSAGE_BYTES = tuple(4**power for power in range(6, 15))  # 4 KiB to 256 MiB
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as before torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FLUSH_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}  # larger than the L2 of an H200 (50 MB), the L3 of a CPU core


@dataclass(frozen=True)
class Timing:
    """Seconds of a kernel.

    median_s: of the repeats.
    low_s, high_s: their quartiles.
    repeats: how many.
    """

    median_s: float
    low_s: float
    high_s: float
    repeats: int


def kernel_seconds(
    run: Callable[[], object], device: str, *, repeats: int = 30, warmup: int = 5, flush: bool = True
) -> Timing:
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
    return Timing(float(median), float(low), float(high), repeats)


def gelu_table(
    device: str | None = None, *, shapes: Iterable[tuple[int, int]] = SHAPES, compiled: bool = True, **options
) -> pd.DataFrame:
    """bias + GELU forward and backward, by every way that works here: eager, compiled if asked for, Triton on a GPU.

    shapes: (rows, columns). bytes_per_s counts what a fused kernel must move, so peak_share is how close a way comes to
    the ideal one. options: dtype of torch, threads of a CPU, and those of `kernel_seconds`.
    """
    bench = _Bench(device, **options)
    # on a CPU Triton is interpreted, which only proves correctness
    left_out = {"triton"} if bench.device == "cpu" else set()
    left_out |= set() if compiled else {"compiled"}
    ways = [how for how in HOWS if how not in left_out and not unavailable(how, bench.device)]
    for rows, columns in shapes:
        x, bias = bench.random(rows, columns).requires_grad_(), bench.random(columns).requires_grad_()
        dy = bench.random(rows, columns)
        for how in ways:
            y, size = bias_gelu(x, bias, how), {"how": how, "rows": rows, "columns": columns}
            forward = partial(bias_gelu, x.detach(), bias.detach(), how)
            backward = partial(torch.autograd.grad, y, (x, bias), dy, retain_graph=True)
            bench.row("bias_gelu forward", forward, moved=moved_bytes(x, "forward"), **size)
            bench.row("bias_gelu backward", backward, moved=moved_bytes(x, "backward"), **size)
    return bench.table()


def mlp_table(
    device: str | None = None, *, sizes: tuple[int, int, int] = _MLP, compiled: bool = True, **options
) -> pd.DataFrame:
    """A feed-forward block in its parts and whole (forward): linear up, bias + GELU, linear down, dropout, all of it.

    sizes: tokens, hidden, ffn. compiled: the whole block once more with torch.compile. options: as in `gelu_table`.
    """
    bench, linear = _Bench(device, **options), torch.nn.functional.linear
    tokens, hidden, ffn = sizes
    x, inner = bench.random(tokens, hidden), bench.random(tokens, ffn)
    up, down = bench.random(ffn, hidden), bench.random(hidden, ffn)
    bias, bias_down = bench.random(ffn), bench.random(hidden)
    dropout = partial(torch.nn.functional.dropout, p=0.1, training=True)

    def block() -> torch.Tensor:
        return dropout(linear(bias_gelu(linear(x, up), bias), down, bias_down))

    width = x.element_size()
    product = {"flops": 2.0 * tokens * hidden * ffn, "moved": (x.numel() + inner.numel() + up.numel()) * width}
    whole = {"flops": 2 * product["flops"], "moved": 2 * (x.numel() + up.numel()) * width}
    widen, narrow = {"inner": hidden, "columns": ffn}, {"inner": ffn, "columns": hidden}
    gelu, gelu_bytes = partial(bias_gelu, inner, bias), moved_bytes(inner, "forward")
    bench.row("linear up", partial(linear, x, up), rows=tokens, **widen, **product)
    bench.row("bias_gelu forward", gelu, rows=tokens, columns=ffn, moved=gelu_bytes)
    bench.row("linear down", partial(linear, inner, down, bias_down), rows=tokens, **narrow, **product)
    bench.row("dropout", partial(dropout, x), rows=tokens, columns=hidden, moved=2 * x.numel() * width)
    bench.row("mlp", block, rows=tokens, **widen, **whole)
    if compiled:
        bench.row("mlp", torch.compile(block), how="compiled", rows=tokens, **widen, **whole)
    return bench.table()


def gemm_table(
    device: str | None = None, *, shapes: Iterable[tuple[int, int, int]] | None = None, **options
) -> pd.DataFrame:
    """Products of (m, k) by (k, n): FLOP/s and the share of the peak. shapes: (m, k, n)."""
    bench = _Bench(device, **options)
    for m, k, n in shapes or _GEMMS[bench.device]:
        a, b = bench.random(m, k), bench.random(k, n)
        cost = {"flops": 2.0 * m * k * n, "moved": (m * k + k * n + m * n) * a.element_size()}
        bench.row("gemm", partial(torch.matmul, a, b), rows=m, inner=k, columns=n, **cost)
    return bench.table()


def collective_table(device: str | None = None, *, sizes: Sequence[int] = _MESSAGE_BYTES, **options) -> pd.DataFrame:
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
        ring_bytes = (ranks - 1) / ranks * count * 4
        runs = {
            "all_reduce": (2 * ring_bytes, partial(dist.all_reduce, whole)),
            "all_gather": (ring_bytes, partial(_all_gather, whole, part)),
            "reduce_scatter": (ring_bytes, partial(_reduce_scatter, part, whole)),
            "all_to_all": (ring_bytes, partial(dist.all_to_all_single, torch.empty_like(whole), whole)),
        }
        for kind, (wire_bytes, run) in runs.items():
            dist.barrier()
            bench.row(kind, run, how=dist.get_backend(), columns=count, wire=wire_bytes, ranks=ranks)
    return bench.table()


def sweep(device: str | None = None, **options) -> pd.DataFrame:
    """GELU, MLP and GEMM tables in one; options: as in `gelu_table`."""
    return pd.concat([table(device, **options) for table in (gelu_table, mlp_table, gemm_table)], ignore_index=True)


class _Bench:
    """Times kernels on one device, in one dtype: by default bf16 on a GPU, fp16 on one without, fp32 on a CPU.

    threads: of a CPU, as they are if 0. options: of `kernel_seconds`.
    """

    def __init__(self, device: str | None, *, dtype: torch.dtype | None = None, threads: int = 0, **options):
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device not in _FLUSH_BYTES:
            raise ValueError(f"device={device!r} is not one of {', '.join(_FLUSH_BYTES)}")
        if threads:
            torch.set_num_threads(threads)
        self.dtype = dtype or _default_dtype(self.device)
        self.peak = peak_rates(self.device)
        self.options = options
        self.rows: list[dict] = []

    def random(self, *shape: int) -> torch.Tensor:
        """An operand."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def row(
        self,
        kernel: str,
        run: Callable[[], object],
        *,
        how: str = "eager",
        flops: float = 0.0,
        moved: float = nan,
        wire: float = nan,
        ranks: int = 1,
        **shape: int,
    ) -> None:
        """Time a kernel and note it. moved, wire: bytes. shape: rows, inner, columns."""
        timing, dtype = kernel_seconds(run, self.device, **self.options), str(self.dtype).removeprefix("torch.")
        flops_per_s, bytes_per_s = flops / timing.median_s, moved / timing.median_s
        flops_share = flops_per_s / self.peak.flops(dtype) if flops else 0.0
        row = {
            "kernel": kernel,
            "how": how,
            "machine": self.peak.machine,
            "threads": torch.get_num_threads(),
            "ranks": ranks,
            "dtype": dtype,
            **{name: float(shape.get(name, nan)) for name in ("rows", "inner", "columns")},
            **vars(timing),
            "flops": flops,
            "moved_bytes": moved,
            "wire_bytes": wire,
            "flops_per_s": flops_per_s,
            "bytes_per_s": bytes_per_s,
            "wire_bytes_per_s": wire / timing.median_s,
            "peak_share": float(np.maximum(flops_share, bytes_per_s / self.peak.memory_bytes_per_s)),
        }
        self.rows.append(row)

    def table(self) -> pd.DataFrame:
        """All rows."""
        return pd.DataFrame(self.rows).astype({"moved_bytes": float})


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


def _save(table: pd.DataFrame, path: str) -> None:
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.6g")
    print(path)


def _main(path: str) -> None:
    """Under torchrun the collectives, else the other tables; the first rank writes."""
    if "RANK" not in os.environ:
        _save(sweep(), path)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    table = collective_table(device)
    if dist.get_rank() == 0:
        _save(table, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the CSV file to write")
    _main(sys.argv[1])
