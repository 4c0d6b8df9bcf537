"""Seconds and labels of a step of this rank by phase.

The labels are profiler ranges named data, forward, backward and optimizer. On a GPU the
seconds come from pairs of events that are read once per step, so that nothing waits
inside it; on a CPU from the clock. Passes of a pipeline add up by phase; what is left
of a step is waiting for other stages.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

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
