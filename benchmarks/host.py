"""What a host does for offload: CPU Adam by size, bandwidth of its memory, copies to a GPU where there is one.

Adam is torch's own, on fp32 states as a host holds them: a fused update reads and writes 28 bytes per parameter
(weight, gradient and two moments read, all but the gradient written), so its bytes per second beside those of a plain
copy say how far it is from the memory's limit. The other ways move more and come out slower.

python benchmarks/host.py host.csv [--quick]
"""

import argparse
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch

from madmax_lib.runs import device_name, kernel_seconds

ADAMS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
FUSED_BYTES = 28
TENSOR_ELEMENTS = 2**20
PARAMETERS = [2**power for power in range(20, 28)]  # 0.002 to 2 GB of states
BUFFER_BYTES = [2**power for power in range(16, 30, 2)]
QUICK = [2**16, 2**18]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="CSV to write")
    parser.add_argument("--quick", action="store_true", help="two small sizes of each")
    arguments = parser.parse_args()
    parameters, buffers = (QUICK, QUICK) if arguments.quick else (PARAMETERS, BUFFER_BYTES)
    rows = memory_rows(buffers) + adam_rows(parameters)
    if torch.cuda.is_available():
        rows += link_rows(buffers)
    table = pd.DataFrame(rows)
    table.to_csv(arguments.file, index=False, float_format="%.6g")
    print(table.to_string(index=False, float_format=lambda number: f"{number:.4g}"))


def memory_rows(sizes: list[int]) -> list[dict]:
    """Host memory by the bytes of a buffer: a copy, and the triad a = b + s c of STREAM."""
    rows = []
    for size in sizes:
        a, b, c = (torch.ones(size // 4) for _ in range(3))
        rows.append(row("host memory", "copy", size, 2 * size, partial(a.copy_, b)))
        rows.append(row("host memory", "triad", size, 3 * size, partial(torch.add, b, c, alpha=3.0, out=a)))
    return rows


def adam_rows(sizes: list[int]) -> list[dict]:
    """A step of AdamW on the CPU by way and number of parameters."""
    return [
        row("cpu adam", how, size, FUSED_BYTES * size, adam(size, **switches).step)
        for how, switches in ADAMS.items()
        for size in sizes
    ]


def link_rows(sizes: list[int]) -> list[dict]:
    """Copies between host and GPU by bytes, each way, pinned and not."""
    rows = []
    for size in sizes:
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        for how, pinned in (("pinned", True), ("pageable", False)):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            for what, target, source in (("to device", device, host), ("to host", host, device)):
                copy = partial(target.copy_, source, non_blocking=pinned)
                rows.append(row(what, how, size, size, copy, device="cuda"))
    return rows


def adam(parameters: int, **switches) -> torch.optim.AdamW:
    """An optimizer with its states in place, over tensors of at most 1 Mi elements."""
    whole, rest = divmod(parameters, TENSOR_ELEMENTS)
    tensors = [torch.nn.Parameter(torch.randn(size)) for size in [TENSOR_ELEMENTS] * whole + [rest] * (rest > 0)]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, **switches)
    optimizer.step()
    return optimizer


def row(what: str, how: str, size: int, moved: int, run: Callable, device: str = "cpu") -> dict:
    """Times one run. size: parameters or bytes; moved: bytes that must move."""
    timing = kernel_seconds(run, device, flush=device == "cpu")
    return {
        "what": what,
        "how": how,
        "machine": device_name(device),
        "threads": torch.get_num_threads(),
        "size": size,
        "moved_bytes": moved,
        **vars(timing),
        "bytes_per_s": moved / timing.median_s,
    }


if __name__ == "__main__":
    main()
