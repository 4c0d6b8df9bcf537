"""Where does a step of this rank spend its time? Seconds and labels by phase, and a
trace of a few steps.

The labels are profiler ranges named data, forward, backward and optimizer. On a GPU the
seconds come from pairs of events that are read once per step, so that nothing waits
inside it; on a CPU from the clock. Passes of a pipeline add up by phase; what is left
of a step is waiting for other stages. The profiler skips a step, warms up on one and
records three, once. The trace is written by `on_trace_ready`: exported after the loop
it would be empty.
"""

import gzip
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from madmax_lib.base.atomic import replacing
from madmax_lib.runs.read import PHASES

__all__ = ["Phases", "between_s", "mark", "profiler"]


def mark(on_gpu: bool):
    """Now: an event that the GPU passes, or a time of the clock."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_s(start, end) -> float:
    """Seconds between two marks; the GPU must have passed them."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class Phases:
    """Clock of the phases of a step."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[tuple]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time and label what is inside as one of PHASES."""
        with torch.profiler.record_function(name):
            start = mark(self._on_gpu)
            yield
            self._marks[name].append((start, mark(self._on_gpu)))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        result = {
            name: sum(between_s(*pair) for pair in self._marks[name]) for name in PHASES
        }
        self._marks.clear()
        return result


def profiler(path: Path, device: str, memory: bool = False) -> profile:
    """Profiler of one rank that writes to `path` (.json.gz) without the machine's name;
    `step` it after each step.

    memory: with the allocator's events; of a GPU a snapshot too, beside the trace as
    memory_rank{r}.pickle.
    """
    if memory and device == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    return profile(
        activities=[
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device == "cuda" else []),
        ],
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: _write(done, path, memory and device == "cuda"),
        record_shapes=True,
        profile_memory=memory,
    )


def _write(done: profile, path: Path, snapshot: bool) -> None:
    if snapshot:
        name = path.name.replace("trace", "memory").replace(".json.gz", ".pickle")
        torch.cuda.memory._dump_snapshot(str(path.with_name(name)))
        torch.cuda.memory._record_memory_history(enabled=None)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        done.export_chrome_trace(str(raw))
        text = raw.read_text(encoding="utf-8")
    text = re.sub(r'"host_name": "[^"]*",\s*', "", text)
    text = re.sub(r'("traceName": )"[^"]*"', rf'\1"{path.name}"', text)
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))
