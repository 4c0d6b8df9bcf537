"""What does offload cost on this machine? CPU Adam by size, host memory bandwidth, copies to a device, FSDP2's offload.

Adam is torch's own, on fp32 states as a host holds them: 28 bytes per parameter are read and written however it is
done, so bytes_per_s beside a plain copy says how far it is from the memory's limit. `offload_check` runs the same steps
with states on the device and on the host: losses must be the same, and the difference in time is what offload costs.

    python -m madmax_lib.runs.measure.host_bench host.csv
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from madmax_lib.runs.launch import launch
from madmax_lib.runs.measure.microbench import Spread, measure, save
from madmax_lib.runs.measure.peaks import peaks
from madmax_lib.runs.read import read_steps
from madmax_lib.runs.spec import RunSpec

__all__ = ["ADAMS", "COLUMNS", "adam_table", "bandwidth_table", "host_table", "link_table", "offload_check"]

COLUMNS = ("what", "how", "machine", "threads", "size", "moved_bytes", "median_s", "low_s", "high_s", "repeats",
           "bytes_per_s")  # fmt: skip
ADAMS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
_FUSED_BYTES = 28  # weight, gradient and two moments read, all but the gradient written, fp32
_TENSOR = 2**20  # elements of one parameter tensor
_SIZES = tuple(2**power for power in range(20, 28))  # 1 Mi to 128 Mi parameters: 0.002 to 2 GB of states
_BYTES = tuple(2**power for power in range(16, 30, 2))  # 64 KiB to 256 MiB


def adam_table(sizes: Iterable[int] = _SIZES, **options) -> pd.DataFrame:
    """Seconds of a step of AdamW on the CPU by way (`ADAMS`) and model size; columns as `COLUMNS`, size in parameters.

    options: of `measure`. bytes_per_s counts the 28 bytes that a fused update must move, so the others come out slower.
    """
    rows = [_row("cpu adam", how, size, _FUSED_BYTES * size, measure(_adam(size, **switches).step, "cpu", **options))
            for how, switches in ADAMS.items() for size in sizes]  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def bandwidth_table(sizes: Iterable[int] = _BYTES, **options) -> pd.DataFrame:
    """Bytes/s of host memory by the bytes of a buffer: a copy, and the triad a = b + s c of STREAM."""
    rows = []
    for size in sizes:
        b, c = torch.ones(size // 4), torch.ones(size // 4)
        a = torch.empty_like(b)
        runs = {"copy": (lambda a=a, b=b: a.copy_(b), 2), "triad": (lambda a=a, b=b, c=c: torch.add(b, c, alpha=3.0,
                out=a), 3)}  # fmt: skip
        rows += [_row("host memory", how, size, arrays * size, measure(run, "cpu", **options))
                 for how, (run, arrays) in runs.items()]  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def link_table(sizes: Iterable[int] = _BYTES, **options) -> pd.DataFrame:
    """Bytes/s between host and GPU by size, each way, pinned and not. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("copies to a device need a GPU, and CUDA sees none")
    rows = []
    for size in sizes:
        there = torch.empty(size, dtype=torch.uint8, device="cuda")
        for how, pinned in (("pinned", True), ("pageable", False)):
            here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            runs: dict[str, Callable] = {
                "to device": lambda here=here, there=there, p=pinned: there.copy_(here, non_blocking=p),
                "to host": lambda here=here, there=there, p=pinned: here.copy_(there, non_blocking=p),
            }
            rows += [_row(what, how, size, size, measure(run, "cuda", flush=False, **options))
                     for what, run in runs.items()]  # fmt: skip
    return pd.DataFrame(rows, columns=list(COLUMNS))


def offload_check(spec: RunSpec, directory: str | Path) -> pd.DataFrame:
    """The steps of a spec without and with FSDP2's offload: step, loss, offloaded_loss, step_s, offloaded_s.

    spec: of a strategy with zero 2 or 3 and no offload. On a CPU both lie in the same memory: that proves the losses,
    not a cost. Raises ValueError for a strategy with offload, and as `launch` does.
    """
    if "offload" in spec.strategy:
        raise ValueError(f"strategy={spec.strategy!r} must be without offload, the check adds it")
    specs = {"plain": spec, "offloaded": replace(spec, strategy=f"{spec.strategy}.offload-all")}
    steps = {name: read_steps(launch(one, Path(directory) / name)) for name, one in specs.items()}
    plain, offloaded = steps["plain"], steps["offloaded"]
    return pd.DataFrame({"step": plain["step"], "loss": plain["loss"], "offloaded_loss": offloaded["loss"],
                         "step_s": plain["total_s"], "offloaded_s": offloaded["total_s"]})  # fmt: skip


def host_table(*, quick: bool = False, **options) -> pd.DataFrame:
    """All tables of this machine in one; copies to a GPU where there is one. quick: two small sizes of each."""
    few = {"sizes": (2**16, 2**18)} if quick else {}
    tables = [bandwidth_table(**few, **options), adam_table(**few, **options)]
    if torch.cuda.is_available():
        tables.append(link_table(**few, **options))
    return pd.concat(tables, ignore_index=True)


def _adam(parameters: int, **how) -> torch.optim.AdamW:
    """An optimizer with its states in place, over tensors of at most 1 Mi elements."""
    whole, rest = divmod(parameters, _TENSOR)
    tensors = [torch.nn.Parameter(torch.randn(size)) for size in [_TENSOR] * whole + [rest] * (rest > 0)]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, **how)
    optimizer.step()
    return optimizer


def _row(what: str, how: str, size: int, moved: int, found: Spread) -> dict:
    machine = peaks("cuda" if what.startswith("to ") else "cpu").machine
    return {"what": what, "how": how, "machine": machine, "threads": torch.get_num_threads(), "size": size,
            "moved_bytes": moved, **vars(found), "bytes_per_s": moved / found.median_s}  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the CSV file to write")
    print(save(host_table(), sys.argv[1]))
