"""How fast are the parts of a transformer block, copies and launches here? Seconds,
bytes and shares of the peak.

Each repeat is timed alone, by device events on a GPU and the clock on a CPU, after
warm-up and after a buffer larger than the last-level cache was written, so that
operands come from memory and not from a cache. What ranks send to each other is timed
by `runs.measure.links`.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.nn import functional

from madmax_lib.runs.measure.peak_rates import (
    TORCH_DTYPES,
    device_name,
    memory_bytes_per_s,
    native_dtype,
    peak_flops,
)
from madmax_lib.runs.measure.phases import between_s, mark
from madmax_lib.runs.model.kernels import bias_gelu, unavailable

__all__ = ["append_row", "bench", "timing"]

_SIZES = {
    "quick": (2, 0.05),
    "normal": (4, 0.4),
    "detailed": (9, 1.0),
}  # how many of those below, seconds for repeats
_BLOCKS = {  # tokens, hidden, ffn: GPT-2 Large with 8 x 1,024 tokens, Llama 8B, ...
    "cuda": [
        (8192, 1280, 5120),
        (8192, 4096, 14336),
        (2048, 1024, 4096),
        (512, 8192, 28672),
        (32768, 1280, 5120),
    ],
    "cpu": [
        (256, 256, 1024),
        (512, 512, 2048),
        (256, 1024, 4096),
        (2048, 1024, 4096),
        (8192, 1280, 5120),
    ],
}
_BYTES = [2**28, 2**22, 2**25, 2**16, 2**19, 2**30]  # of copies
_PARAMETERS = [2**20, 2**18, 2**22, 2**25, 2**27]  # of AdamW, 16 bytes of states each
# of a fused update: weight, gradient and two moments read, all but the gradient written
_ADAM_BYTES = 28
_FLUSH_BYTES = {
    "cuda": 256 * 2**20,
    "cpu": 64 * 2**20,
}  # larger than the L2 of an H200 (50 MB), the L3 of a CPU core
_SEQUENCE = 1024
_HEAD = 64
_LAUNCHES = 100
_TENSOR_ELEMENTS = 2**20
_Work = Iterator[
    tuple[str, Callable, dict]
]  # kernels, how to run them, and arguments of `_row`


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
    asked = [
        ("device", device, _BLOCKS),
        ("size", size, _SIZES),
        *(("part", part, _PARTS) for part in parts),
    ]
    for name, value, choices in asked:
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
    torch.set_num_threads(threads or torch.get_num_threads())
    for part in parts:
        try:
            for kernel, run, about in _PARTS[part](part, device, size):
                table.append(_row(kernel, run, size, **{"device": device} | about))
                if path:
                    append_row(path, table[-1])
        except (
            RuntimeError,
            ImportError,
        ) as error:  # out of memory and failed compilation among them
            warnings.warn(
                f"bench: {part} fails here: {next(iter(str(error).splitlines()), '')}",
                stacklevel=2,
            )
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
    ranks, which repeat alike, the mean.

    flush: a buffer to write before each repeat.
    """
    for _ in range(3):
        start_s = time.perf_counter()
        _times_s(run, 1, on_gpu, flush)
    once_s = _of_ranks(time.perf_counter() - start_s, group).max()
    count = int(min(max(_SIZES[size][1] / once_s, 3), 50))
    quartiles = np.quantile(_times_s(run, count, on_gpu, flush), [0.25, 0.5, 0.75])
    low_s, median_s, high_s = _of_ranks(quartiles, group).mean(axis=0)
    return {"median_s": median_s, "low_s": low_s, "high_s": high_s, "repeats": count}


def _of_ranks(value: object, group) -> np.ndarray:
    """What each rank of a group has; without a group what this one has."""
    values = [value] * (dist.get_world_size(group) if group else 1)
    if group:
        dist.all_gather_object(values, value, group=group)
    return np.array(values)


def _times_s(
    run: Callable, count: int, on_gpu: bool, flush: torch.Tensor | None
) -> np.ndarray:
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


def _row(
    kernel: str,
    run: Callable,
    size: str,
    *,
    device,
    shape="",
    how="eager",
    flops=0.0,
    moved=nan,
    calls=1,
) -> dict:
    """Time a kernel. moved: bytes. calls: of it in a run."""
    dtype = native_dtype("auto", device)
    threads = torch.get_num_threads()
    row = {
        "kernel": kernel,
        "how": how,
        "machine": device_name(device),
        "threads": threads,
        "dtype": dtype,
    }
    row |= {"shape": shape, "flops": float(flops), "moved_bytes": float(moved)}
    peaks, flush = _ready(device, dtype, threads)
    row |= timing(run, size, device == "cuda", flush)
    row |= {name: row[name] / calls for name in ("median_s", "low_s", "high_s")}
    rates = np.array([flops, moved]) / row["median_s"]
    np.fmax(peaks, rates, out=peaks)  # a peak measured here while others ran is none
    return row | {
        "flops_per_s": rates[0],
        "bytes_per_s": rates[1],
        "peak_share": np.fmax(*(rates / peaks)),
    }


@lru_cache(maxsize=4)
def _ready(device: str, dtype: str, threads: int) -> tuple[np.ndarray, torch.Tensor]:
    """Peak FLOP/s and bytes/s of a device, which a CPU has by its threads, and a buffer
    that no cache of it holds.
    """
    peaks = np.array([peak_flops(device, dtype)[0], memory_bytes_per_s(device)])
    return peaks, torch.empty(_FLUSH_BYTES[device] // 4, device=device)


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def _mlp(
    x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return functional.dropout(
        functional.linear(bias_gelu(functional.linear(x, up), bias), down), 0.1
    )


_attention = partial(functional.scaled_dot_product_attention, is_causal=True)
# function, shapes of its operands and FLOPs for t tokens, s of a sample, hidden h and
# ffn f
_KERNELS = {
    "linear": (functional.linear, lambda t, s, h, f: ([(t, h), (h, h)], 2 * t * h * h)),
    "linear up": (
        functional.linear,
        lambda t, s, h, f: ([(t, h), (f, h)], 2 * t * h * f),
    ),
    "linear down": (
        functional.linear,
        lambda t, s, h, f: ([(t, f), (h, f)], 2 * t * h * f),
    ),
    "attention": (
        _attention,
        lambda t, s, h, f: ([(t // s, h // _HEAD, s, _HEAD)] * 3, 2 * t * s * h),
    ),
    "layer_norm": (_norm, lambda t, s, h, f: ([(t, h), (h,), (h,)], 0)),
    "rms_norm": (
        lambda x, w: functional.rms_norm(x, w.shape, w),
        lambda t, s, h, f: ([(t, h), (h,)], 0),
    ),
    "bias_gelu": (bias_gelu, lambda t, s, h, f: ([(t, f), (f,)], 0)),
    "dropout": (functional.dropout, lambda t, s, h, f: ([(t, h)], 0)),
    "mlp": (_mlp, lambda t, s, h, f: ([(t, h), (f, h), (f,), (h, f)], 4 * t * h * f)),
}


def _kernel(name: str, device: str, size: str) -> _Work:
    """Forward and backward; shape: of the block. What must move is operands, result and
    what their gradients take.
    """
    function, layout = _KERNELS[name]
    ways = {"eager": function}
    dtype = TORCH_DTYPES[native_dtype("auto", device)]
    if name in ("bias_gelu", "mlp") and size != "quick":  # to compile takes seconds
        torch._functorch.config.donated_buffer = (
            False  # what a backward pass that is repeated cannot give away
        )
        ways["compiled"] = torch.compile(function)
    if name == "bias_gelu" and device != "cpu" and not unavailable("triton", device):
        ways["triton"] = partial(bias_gelu, how="triton")
    for block in _BLOCKS[device][: _SIZES[size][0]]:
        shapes, flops = layout(block[0], min(_SEQUENCE, block[0]), *block[1:])
        inputs = [
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            for shape in shapes
        ]
        for how, run in ways.items():
            y = run(*inputs)
            about = {"how": how, "shape": "x".join(map(str, block))}
            backward = partial(
                torch.autograd.grad, y, inputs, torch.randn_like(y), retain_graph=True
            )
            read = sum(x.nbytes for x in inputs)
            written = y.nbytes
            forward = torch.no_grad()(partial(run, *inputs))
            yield (
                f"{name} forward",
                forward,
                about | {"flops": flops, "moved": read + written},
            )
            yield (
                f"{name} backward",
                backward,
                about | {"flops": 2 * flops, "moved": 2 * read + written},
            )


def _copy(name: str, device: str, size: str) -> _Work:
    """Within the memory of the host and of the device, and between them; shape: bytes
    of the buffer.
    """
    for count in _BYTES[: _SIZES[size][0]]:
        host, near = (
            torch.zeros(count, dtype=torch.uint8, device=place)
            for place in ("cpu", device)
        )
        about = {"shape": count, "moved": 2 * count}
        yield (
            name,
            partial(torch.empty_like(host).copy_, host),
            about | {"how": "host", "device": "cpu"},
        )
        if device == "cuda":
            yield (
                name,
                partial(torch.empty_like(near).copy_, near),
                about | {"how": "device"},
            )
            for how, far in {"pinned": host.pin_memory(), "pageable": host}.items():
                link = {"shape": count, "moved": count, "how": how}
                yield "to device", partial(near.copy_, far, non_blocking=True), link
                yield "to host", partial(far.copy_, near, non_blocking=True), link


def _launch(name: str, device: str, size: str) -> _Work:
    """What a kernel costs the host: enqueued behind others, and waited for. Where a CPU
    computes, it is both.
    """
    x = torch.zeros(1, device=device)

    def enqueue() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    yield name, enqueue, {"how": "enqueued", "calls": _LAUNCHES, "device": "cpu"}
    if device == "cuda":
        yield name, lambda: x.add_(1.0).item(), {"how": "waited for", "device": "cpu"}


def _adam(name: str, device: str, size: str) -> _Work:
    """AdamW on the host, on fp32 states; shape: parameters. Ways that are not fused
    move more and come out slower.
    """
    for count in _PARAMETERS[: _SIZES[size][0]]:
        for how in ("fused", "foreach", "for-loop"):
            switches = (
                {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
            )
            tensors = [
                torch.nn.Parameter(part)
                for part in torch.randn(count).split(_TENSOR_ELEMENTS)
            ]
            for tensor in tensors:
                tensor.grad = torch.randn_like(tensor)
            optimizer = torch.optim.AdamW(tensors, lr=1e-4, **switches)
            yield (
                name,
                optimizer.step,
                {
                    "how": how,
                    "shape": count,
                    "moved": _ADAM_BYTES * count,
                    "device": "cpu",
                },
            )


_PARTS = dict.fromkeys(_KERNELS, _kernel) | {
    "copy": _copy,
    "launch": _launch,
    "cpu adam": _adam,
}
