"""StepWork of a step that the edges of its graph are found in: spans, their slices and the
numbers of events.

Slice i has two events: 2i is its start, 2i + 1 its end.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from madmax_lib.timeline import Timeline


def start_of(number: np.ndarray) -> np.ndarray:
    """Events at which slices start."""
    return 2 * number


def end_of(number: np.ndarray) -> np.ndarray:
    """Events at which slices end."""
    return 2 * number + 1


def joined_edges(parts: list[tuple]) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of edges from several pairs of them."""
    none = np.zeros(0, dtype="int64")
    sources, targets = zip((none, none), *parts, strict=True)
    return np.concatenate(sources), np.concatenate(targets)


@dataclass(frozen=True)
class StepWork:
    """Spans of a step, cut into slices."""

    timeline: Timeline
    spans: pd.DataFrame  # of the step; the index is the row of the timeline
    slices: pd.DataFrame  # as `Graph.slices`, one row each, numbered
    first: np.ndarray  # (rows of the timeline,) first slice of each span, -1 without
    last: np.ndarray  # (rows of the timeline,) last slice of each span

    @classmethod
    def of(
        cls, timeline: Timeline, spans: pd.DataFrame, slices: pd.DataFrame
    ) -> "StepWork":
        """The work of spans whose slices are known."""
        number = np.arange(len(slices))
        row = slices["row"].to_numpy()
        first = np.full(len(timeline), -1)
        last = first.copy()
        # Of several values for one row numpy keeps the last: backwards, the first.
        first[row[::-1]] = number[::-1]
        last[row] = number
        return cls(timeline, spans, slices, first, last)

    @property
    def zero_ns(self) -> int:
        """Start of the first slice."""
        return self.slices["start_ns"].min() if len(self.slices) else 0

    def has_slice(self, rows) -> np.ndarray:
        """Whether spans (n,) have any slice."""
        return self.first[rows] >= 0

    def lane(self, rank: int, stream: int) -> pd.DataFrame:
        """Slices of one stream or thread, in order of time."""
        slices = self.slices
        return slices[(slices["rank"] == rank) & (slices["stream"] == stream)]
