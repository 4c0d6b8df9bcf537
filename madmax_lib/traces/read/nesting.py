"""Which span is inside of which, and what is open on a thread at a time?

Host spans of one thread nest like calls; a few from different clocks may not, then the
one that began last counts.
"""

import numpy as np
import pandas as pd

__all__ = ["Nest", "thread_of"]


class Nest:
    """Spans of host threads in order of thread and start, outer before inner, each with
    the one it is inside of.

    order: (n,) places of the spans, as they were given, in this order.
    rows: (n,) their rows in the timeline.
    thread: (n,) number of rank and stream, see `thread_of`.
    start, end: (n,) in ns; with `closed` one more, so that a span is open at the
        instant of its end too, as times in whole microseconds need.
    parent: (n,) position of the innermost earlier span of the thread that is open at
        the start, -1 without.
    """

    def __init__(self, spans: pd.DataFrame, rows: np.ndarray, *, closed: bool = False):
        rows = np.asarray(rows, dtype=np.int64)
        thread = thread_of(spans)[rows]
        start = spans["start_ns"].to_numpy()[rows]
        end = start + spans["dur_ns"].to_numpy()[rows] + int(closed)
        self.order = np.lexsort((-end, start, thread))
        self.rows, self.thread = rows[self.order], thread[self.order]
        self.start, self.end = start[self.order], end[self.order]
        self.parent = np.arange(-1, len(rows) - 1)
        self.parent[np.r_[True, self.thread[1:] != self.thread[:-1]][: len(rows)]] = -1
        self._up_to_open(self.parent, self.start)
        self._stop = np.maximum(
            self._spans_before(self.thread, self.end, "left"), np.arange(len(rows)) + 1
        )

    def at(self, thread: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """Position of the innermost span that is open on a thread at a time, -1
        without.
        """
        place = self._spans_before(thread, time_ns, "right") - 1
        if len(self.rows):
            place[self.thread[place] != thread] = -1
        return self._up_to_open(place, time_ns)

    def sums(self, place: np.ndarray, values) -> np.ndarray:
        """Values (m,) that belong to places (m,), -1 to none, added up by place."""
        inside = place >= 0
        values = np.asarray(values)
        total = np.bincount(
            place[inside], values[inside].astype(float), minlength=len(self.rows)
        )
        return total if values.dtype.kind == "f" else total.astype(np.int64)

    def inclusive(self, own: np.ndarray) -> np.ndarray:
        """Values (n,) of each span with those inside of it."""
        running = np.r_[0, np.cumsum(own)]
        return running[self._stop] - running[:-1]

    def within(self, outer: np.ndarray, names: np.ndarray | None = None) -> np.ndarray:
        """Which spans (n,) are inside of an outer one (mask), of their own name if
        names are given.
        """
        keys = [self.thread] if names is None else [self.thread, names]
        reach = (
            pd.Series(np.where(outer, self.end, np.iinfo(np.int64).min))
            .groupby(keys, sort=False)
            .cummax()
        )
        return (
            reach.groupby(keys, sort=False).shift(fill_value=np.iinfo(np.int64).min)
            > self.start
        ).to_numpy()

    def _spans_before(
        self, thread: np.ndarray, time_ns: np.ndarray, side: str
    ) -> np.ndarray:
        """How many spans come before each (thread, time): np.searchsorted on two keys."""
        is_query = np.repeat([False, True], [len(self.rows), len(thread)])
        last = is_query if side == "right" else ~is_query
        order = np.lexsort(
            (last, np.r_[self.start, time_ns], np.r_[self.thread, thread])
        )
        count = np.empty(len(order), dtype=np.int64)
        count[order] = np.cumsum(~is_query[order])
        return count[len(self.rows) :]

    def _up_to_open(self, place: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """From each place outwards to the first span that is still open at a time;
        works on parents in the making.
        """
        late = np.flatnonzero(place >= 0)
        while len(
            late := late[(place[late] >= 0) & (self.end[place[late]] <= time_ns[late])]
        ):
            place[late] = self.parent[place[late]]
        return place


def thread_of(spans: pd.DataFrame) -> np.ndarray:
    """One number (n,) for rank and stream of each span."""
    return (
        spans["rank"].to_numpy().astype(np.int64) * 2**32 + spans["stream"].to_numpy()
    )
