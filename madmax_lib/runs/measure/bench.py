"""Times of the parts of a transformer block, of copies and launches: seconds, bytes and
shares of the peak.

Each repeat is timed alone, by device events on a GPU and the clock on a CPU, after
warm-up and after a buffer larger than the last-level cache was written, so that
operands come from memory and not from a cache. Messages between ranks are timed by
`runs.measure.links`.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.nn import functional

from madmax_lib.catalog import data_file
from madmax_lib.runs.measure.peak_rates import (
    TORCH_DTYPES,
    device_name,
    memory_bytes_per_s,
    native_dtype,
    peak_flops,
)
from madmax_lib.runs.measure.phases import between_s, mark
from madmax_lib.runs.model.layers import bias_gelu


class _Size(NamedTuple):
    shapes: int  # how many of the lists below
    repeats_s: float  # time for repeats of one kernel


_SIZES = {
    "quick": _Size(2, 0.05),
    "normal": _Size(4, 0.4),
    "detailed": _Size(9, 1.0),
}
# Tokens, hidden, ffn: on a GPU GPT-2 Large with 8 x 1,024 tokens, then Llama 8B; a list
# begins with what is timed in any size and ends with the two smaller feed-forward
# widths of makramab/hybrid-parallelism.
_BLOCKS = {
    device: list(rows.drop(columns="device").itertuples(index=False, name=None))
    for device, rows in pd.read_csv(data_file("bench_blocks.csv")).groupby("device")
}
_COPY_BYTES = [2**28, 2**22, 2**25, 2**16, 2**19, 2**30]
_PARAMETERS = [2**20, 2**18, 2**22, 2**25, 2**27]  # of AdamW, 16 bytes of states each
# of a fused update: weight, gradient and two moments read, all but the gradient written,
# 4 bytes each
_ADAM_BYTES = 28
# larger than the L2 of an H200 (50 MB), and than the L3 of a CPU core
_FLUSH_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
_SEQUENCE = 1024
_HEAD = 64  # channels of an attention head
_LAUNCHES = 100
_TENSOR_ELEMENTS = 2**20  # a model's parameters come in tensors, not in one
_REPEATS = (3, 50)  # least for quartiles, most that say more


@dataclass(frozen=True)
class _Work:
    """A kernel to be timed, and what a row says of it."""

    kernel: str
    run: Callable[[], object]
    device: str
    shape: object = ""
    how: str = "eager"
    flops: float = 0.0
    moved_bytes: float = nan  # between memory and device, at least
    calls: int = 1  # of the kernel in a run


def bench(
    parts: Iterable[str] = (),
    size: str = "normal",
    *,
    device: str = "",
    threads: int = 0,
    path: Path | None = None,
) -> pd.DataFrame:
    """Time kernels (linear, attention, layer_norm, rms_norm, bias_gelu, dropout, mlp),
    copy, launch and adam.

    parts: of these, all by default, in bf16 on a GPU that computes in it, else in fp32.
    size: quick, normal or detailed. threads: of a CPU, as they are if 0. path: CSV that
    takes each row when it is timed. A part that fails here (no memory, no compiler)
    ends with a warning. Columns: kernel, how it was computed, machine, threads, dtype,
    shape, seconds with quartiles, repeats, flops, moved_bytes (that must move between
    memory and device), their rates, and peak_share (0..1, of the peak FLOP/s or of the
    memory's bandwidth, the larger). Raises ValueError for other parts, sizes and
    devices.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    parts = list(parts or _PARTS)
    table = []
    if path:
        path.unlink(missing_ok=True)
    wanted = [("device", device, _BLOCKS), ("size", size, _SIZES)]
    wanted += [("part", part, _PARTS) for part in parts]
    for name, value, choices in wanted:
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
    torch.set_num_threads(threads or torch.get_num_threads())
    for part in parts:
        try:
            for work in _PARTS[part](part, device, size):
                table.append(_timed_row(work, size))
                if path:
                    append_row(path, table[-1])
        # out of memory and failed compilation among them
        except (RuntimeError, ImportError) as error:
            reason = next(iter(str(error).splitlines()), "")
            warnings.warn(f"bench: {part} fails here: {reason}", stacklevel=2)
    return pd.DataFrame(table)


def append_row(path: Path, row: dict) -> None:
    """Add a row to a CSV, after a header where the file is new."""
    pd.DataFrame([row]).to_csv(
        path, mode="a", header=not path.exists(), index=False, float_format="%.6g"
    )


def timing(
    run: Callable,
    size: str,
    on_gpu: bool,
    flush: torch.Tensor | None = None,
    group=None,
) -> dict[str, float]:
    """Median and quartiles of the seconds of 3 to 50 repeats; of a process group's
    ranks, which repeat as often, the mean.

    flush: a buffer to write before each repeat.
    """
    for _ in range(3):  # the first compiles and allocates, the last tells how long
        start_s = time.perf_counter()
        _times_s(run, 1, on_gpu, flush)
    once_s = _of_ranks(time.perf_counter() - start_s, group).max()
    least, most = _REPEATS
    count = int(min(max(_SIZES[size].repeats_s / once_s, least), most))
    quartiles = np.quantile(_times_s(run, count, on_gpu, flush), [0.25, 0.5, 0.75])
    low_s, median_s, high_s = _of_ranks(quartiles, group).mean(axis=0)
    return {"median_s": median_s, "low_s": low_s, "high_s": high_s, "repeats": count}


def _of_ranks(value, group):
    """Values of the ranks of a group (ranks, ...); without a group of this one."""
    if not group:
        return np.array([value])
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return np.array(values)


def _times_s(run, count, on_gpu, flush):
    """Seconds of each repeat, by device events or the clock."""
    pairs = []
    for _ in range(count):
        if flush is not None:
            flush.zero_()
        start = mark(on_gpu)
        run()
        pairs.append((start, mark(on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
    return np.array([between_s(*pair) for pair in pairs])


def _timed_row(work, size):
    """Time a kernel; a row of the table."""
    device = work.device
    dtype = native_dtype("auto", device)
    threads = torch.get_num_threads()
    peaks, flush = _device_peaks(device, dtype, threads)
    row = {
        "kernel": work.kernel,
        "how": work.how,
        "machine": device_name(device),
        "threads": threads,
        "dtype": dtype,
        "shape": work.shape,
        "flops": float(work.flops),
        "moved_bytes": float(work.moved_bytes),
        **timing(work.run, size, device == "cuda", flush),
    }
    for name in ("median_s", "low_s", "high_s"):
        row[name] /= work.calls
    rates = np.array([work.flops, work.moved_bytes]) / row["median_s"]
    np.fmax(peaks, rates, out=peaks)  # a peak measured here while others ran is none
    row["flops_per_s"], row["bytes_per_s"] = rates
    return row | {"peak_share": np.fmax(*(rates / peaks))}


@lru_cache(maxsize=4)
def _device_peaks(device, dtype, threads):
    """Peak FLOP/s and bytes/s of a device, which a CPU has by its threads, and a buffer
    that no cache of it holds.
    """
    peaks = np.array([peak_flops(device, dtype)[0], memory_bytes_per_s(device)])
    return peaks, torch.empty(_FLUSH_BYTES[device] // 4, device=device)


def _mlp(x, up, bias, down):
    inner = bias_gelu(functional.linear(x, up), bias)
    return functional.dropout(functional.linear(inner, down), 0.1)


_attention = partial(functional.scaled_dot_product_attention, is_causal=True)


def _kernels(t, s, h, f):
    """Function, shapes of its operands and FLOPs by kernel, for t tokens, s of a
    sample, hidden h and ffn f.
    """
    linear = functional.linear
    heads = (t // s, h // _HEAD, s, _HEAD)

    def layer_norm(x, weight, bias):
        return functional.layer_norm(x, weight.shape, weight, bias)

    def rms_norm(x, weight):
        return functional.rms_norm(x, weight.shape, weight)

    return {
        # a product of (t, h) and (h, h) takes 2 t h h
        "linear": (linear, [(t, h), (h, h)], 2 * t * h * h),
        "linear up": (linear, [(t, h), (f, h)], 2 * t * h * f),
        "linear down": (linear, [(t, f), (h, f)], 2 * t * h * f),
        # QK and its product with V take 4 t s h, of which a causal mask leaves half
        "attention": (_attention, [heads] * 3, 2 * t * s * h),
        "layer_norm": (layer_norm, [(t, h), (h,), (h,)], 0),
        "rms_norm": (rms_norm, [(t, h), (h,)], 0),
        "bias_gelu": (bias_gelu, [(t, f), (f,)], 0),
        "dropout": (functional.dropout, [(t, h)], 0),
        "mlp": (_mlp, [(t, h), (f, h), (f,), (h, f)], 4 * t * h * f),
    }


def _kernel(name, device, size):
    """Forward and backward; shape: of the block. Moved are operands, result and what
    their gradients take.
    """
    dtype = TORCH_DTYPES[native_dtype("auto", device)]
    variants = {}
    for block in _BLOCKS[device][: _SIZES[size].shapes]:
        tokens, hidden, ffn = block
        kernels = _kernels(tokens, min(_SEQUENCE, tokens), hidden, ffn)
        function, shapes, flops = kernels[name]
        # compiled once for all blocks
        variants = variants or _variants(name, function, size)
        inputs = [
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            for shape in shapes
        ]
        read = sum(x.nbytes for x in inputs)
        for how, run in variants.items():
            y = run(*inputs)
            about = {"device": device, "shape": "x".join(map(str, block)), "how": how}
            yield _Work(
                f"{name} forward",
                torch.no_grad()(partial(run, *inputs)),
                flops=flops,
                moved_bytes=read + y.nbytes,
                **about,
            )
            # the gradients of x and of the weight are a product each
            yield _Work(
                f"{name} backward",
                partial(
                    torch.autograd.grad,
                    y,
                    inputs,
                    torch.randn_like(y),
                    retain_graph=True,
                ),
                flops=2 * flops,
                moved_bytes=2 * read + y.nbytes,
                **about,
            )


def _variants(name, function, size):
    """Functions that compute a kernel, by how they do it."""
    variants = {"eager": function}
    if name in ("bias_gelu", "mlp") and size != "quick":  # to compile takes seconds
        variants["compiled"] = torch.compile(function)
        # a backward pass that is repeated cannot give its buffers away; torch.compile
        # has loaded the module of this setting
        torch._functorch.config.donated_buffer = False
    return variants


def _copy(name, device, size):
    """Within the memory of the host and of the device, and between them; shape: bytes
    of the buffer.
    """
    for count in _COPY_BYTES[: _SIZES[size].shapes]:
        host = torch.zeros(count, dtype=torch.uint8)
        # within a memory every byte is read and written
        within = {"shape": count, "moved_bytes": 2 * count}
        yield _Work(name, _copied(host), "cpu", how="host", **within)
        if device != "cuda":
            continue
        near = host.to(device)
        yield _Work(name, _copied(near), device, how="device", **within)
        for how, far in {"pinned": host.pin_memory(), "pageable": host}.items():
            link = {"shape": count, "moved_bytes": count, "how": how, "device": device}
            yield _Work(
                "to device", partial(near.copy_, far, non_blocking=True), **link
            )
            yield _Work("to host", partial(far.copy_, near, non_blocking=True), **link)


def _copied(source):
    return partial(torch.empty_like(source).copy_, source)


def _launch(name, device, size):
    """Time that a kernel costs the host: enqueued behind others, and waited for. Where
    a CPU computes, it is both.
    """
    x = torch.zeros(1, device=device)

    def enqueue():
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    yield _Work(name, enqueue, "cpu", how="enqueued", calls=_LAUNCHES)
    if device == "cuda":
        yield _Work(name, lambda: x.add_(1.0).item(), "cpu", how="waited for")


def _adam(name, device, size):
    """AdamW on the host, on fp32 states; shape: parameters. Ways that are not fused
    move more and come out slower.
    """
    ways = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    ways["for-loop"] = {"foreach": False}
    for count in _PARAMETERS[: _SIZES[size].shapes]:
        for how, switches in ways.items():
            parts = torch.randn(count).split(_TENSOR_ELEMENTS)
            tensors = [torch.nn.Parameter(part) for part in parts]
            for tensor in tensors:
                tensor.grad = torch.randn_like(tensor)
            optimizer = torch.optim.AdamW(tensors, lr=1e-4, **switches)
            moved_bytes = _ADAM_BYTES * count
            yield _Work(
                name, optimizer.step, "cpu", count, how, moved_bytes=moved_bytes
            )


_PARTS = dict.fromkeys(_kernels(1, 1, 1, 1), _kernel)
_PARTS |= {"copy": _copy, "launch": _launch, "cpu adam": _adam}
