"""Seconds and labels of a step of this rank by phase, and a trace of a few steps.

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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from madmax_lib.base.atomic import replacing
from madmax_lib.runs.read import PHASES


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
    """Clock of the phases of a step.

    autocast: what forward passes are computed under.
    """

    def __init__(
        self, device: torch.device, autocast: AbstractContextManager | None = None
    ):
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._autocast = autocast or nullcontext()
        self._marks: dict[str, list[tuple]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time and label what is inside as one of PHASES."""
        inside = self._autocast if name == "forward" else nullcontext()
        with torch.profiler.record_function(name):
            start = mark(self._on_gpu)
            with inside:
                yield
            self._marks[name].append((start, mark(self._on_gpu)))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        marks = self._marks
        self._marks = defaultdict(list)
        return {name: sum(between_s(*pair) for pair in marks[name]) for name in PHASES}


def profiler(path: Path, device: str, memory: bool = False) -> profile:
    """Profiler of one rank that writes to `path` (.json.gz) without the machine's name;
    `step` it after each step.

    memory: with the allocator's events; of a GPU a snapshot too, beside the trace as
    memory_rank{r}.pickle.
    """
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    if memory and on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def write(done):
        if memory and on_gpu:
            name = path.name.replace("trace", "memory").replace(".json.gz", ".pickle")
            torch.cuda.memory._dump_snapshot(str(path.with_name(name)))
            torch.cuda.memory._record_memory_history(enabled=None)
        _write_trace(done, path)

    return profile(
        activities=activities,
        # the first step is unlike the others, and a recording profiler starts slowly
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=memory,
    )


def _write_trace(done, path):
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        done.export_chrome_trace(str(raw))
        text = raw.read_text(encoding="utf-8")
    # a trace may be published: it names neither the machine nor a folder of it
    text = re.sub(r'"host_name": "[^"]*",\s*', "", text)
    text = re.sub(r'("traceName": )"[^"]*"', rf'\1"{path.name}"', text)
    with replacing(path) as temporary:
        # no time in the header: equal traces are equal files
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))
