"""Nesting of host spans: which is inside of which, and what is open at a time.

Host spans of one thread nest like calls; a few from different clocks may not, then the
one that began last counts.
"""

import numpy as np
import pandas as pd


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

    def __init__(self, spans: pd.DataFrame, rows: np.ndarray, *, closed=False):
        rows = np.asarray(rows, dtype="int64")
        thread = thread_of(spans)[rows]
        start = spans["start_ns"].to_numpy()[rows]
        duration = spans["dur_ns"].to_numpy()[rows]
        end = start + duration + int(closed)
        # by thread, then start; of those that start together the longest is outside
        self.order = np.lexsort((-end, start, thread))
        self.rows = rows[self.order]
        self.thread = thread[self.order]
        self.start = start[self.order]
        self.end = end[self.order]
        # a span is inside of the one before it, or of one that that is inside of: begin
        # with the one before, none for the first of a thread, and walk outwards
        self.parent = np.arange(-1, len(rows) - 1)
        changes = np.flatnonzero(np.diff(self.thread)) + 1
        self.parent[changes] = -1
        self._up_to_open(self.parent, self.start)
        # position after the last span that starts before the end: those inside of
        # position i are i + 1 ... stop - 1
        before_end = self._spans_before(self.thread, self.end, "left")
        itself = np.arange(len(rows)) + 1
        self._stop = np.maximum(before_end, itself)

    def at(self, thread: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
        """Position of the innermost span that is open on a thread at a time, -1
        without.
        """
        position = self._spans_before(thread, time_ns, "right") - 1
        if len(self.rows):
            position[self.thread[position] != thread] = -1
        return self._up_to_open(position, time_ns)

    def sums(self, position: np.ndarray, values) -> np.ndarray:
        """Values (m,) that belong to positions (m,), -1 to none, added up by position."""
        inside = position >= 0
        values = np.asarray(values)
        total = np.bincount(
            position[inside],
            weights=values[inside].astype(float),
            minlength=len(self.rows),
        )
        if values.dtype.kind == "f":
            return total
        return total.astype("int64")

    def inclusive(self, values: np.ndarray) -> np.ndarray:
        """Values (n,) of each span with those inside of it."""
        # a span and all inside of it stand together: a difference of running sums
        running = np.r_[0, np.cumsum(values)]
        until_stop = running[self._stop]
        return until_stop - running[:-1]

    def within(
        self, outer: np.ndarray | bool, names: np.ndarray | None = None
    ) -> np.ndarray:
        """Mask (n,) of the spans inside of an outer one (a mask, or True for any), of
        their own name if names are given.
        """
        keys = [self.thread] if names is None else [self.thread, names]
        # a span is inside if an outer one of the same keys that begins earlier ends
        # after it has begun: the running maximum of their ends, without the span itself
        never = np.iinfo("int64").min
        ends = pd.Series(np.where(outer, self.end, never))
        of_keys = ends.groupby(keys, sort=False)
        latest_end = of_keys.cummax().groupby(keys, sort=False)
        before = latest_end.shift(fill_value=never)
        is_inside = before > self.start
        return is_inside.to_numpy()

    def _spans_before(self, thread, time_ns, side):
        """Number of spans before each (thread, time): np.searchsorted on two keys."""
        # spans and queries are sorted together; a query then counts the spans before it
        spans = len(self.rows)
        is_query = np.repeat([False, True], [spans, len(thread)])
        last = is_query if side == "right" else ~is_query
        times = np.r_[self.start, time_ns]
        threads = np.r_[self.thread, thread]
        order = np.lexsort((last, times, threads))
        count = np.empty(len(order), dtype="int64")
        count[order] = np.cumsum(~is_query[order])
        return count[spans:]

    def _up_to_open(self, position, time_ns):
        """Move each position outwards to the first span that is still open at a time."""
        # All at once, one level a round: rounds are as many as the deepest nesting. Also
        # for the parents themselves: those of earlier positions are right first.
        late = np.flatnonzero(position >= 0)
        while len(late):
            at = position[late]
            has_ended = self.end[at] <= time_ns[late]
            late = late[(at >= 0) & has_ended]
            position[late] = self.parent[position[late]]
        return position


def thread_of(spans: pd.DataFrame) -> np.ndarray:
    """One number (n,) for rank and stream of each span."""
    # both are int32: the rank takes the upper half of 64 bits
    rank = spans["rank"].to_numpy().astype("int64")
    stream = spans["stream"].to_numpy()
    return rank * 2**32 + stream
