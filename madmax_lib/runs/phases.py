"""How long did data, forward, backward and optimizer of a step take on this rank? Labels in the trace, and seconds.

The labels are profiler ranges of those names. On a GPU the seconds come from pairs of events that are read once per
step, so that nothing waits inside it; on a CPU from the clock. Passes of a pipeline add up by phase; what is left of a
step is waiting for other stages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["PHASES", "Phases"]

PHASES = ("data", "forward", "backward", "optimizer")


class Phases:
    """Clock of the phases of a step."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[tuple]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time and label what is inside as one of PHASES."""
        with torch.profiler.record_function(name):
            start = self._mark()
            yield
            self._marks[name].append((start, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        result = {name: sum(self._between(*pair) for pair in self._marks[name]) for name in PHASES}
        self._marks.clear()
        return result

    def _mark(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start, end) -> float:
        return start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
