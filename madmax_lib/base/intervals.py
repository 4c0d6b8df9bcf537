"""Interval algebra on int64 arrays: what is covered, shared or left over.

A set of intervals is an array of shape (n, 2): columns start and end, half open, in any
order, overlaps allowed. Results are normal form: sorted, disjoint, not touching, none
empty. Everything is O(n log n) NumPy, no loops.
"""

import numpy as np

Intervals = np.ndarray  # (n, 2) int64
EMPTY = np.empty((0, 2), dtype=np.int64)


def pack(start: np.ndarray, duration: np.ndarray) -> Intervals:
    """Intervals (n, 2) from starts (n,) and durations (n,).

    >>> pack([0, 5], [2, 3]).tolist()
    [[0, 2], [5, 8]]
    """
    start = np.asarray(start, dtype=np.int64)
    end = start + np.asarray(duration, dtype=np.int64)
    return _pairs(start, end)


def union(intervals: Intervals) -> Intervals:
    """Normal form of a set: what at least one interval covers. Empty and backward
    intervals cover nothing.

    >>> union(np.array([[4, 6], [0, 2], [1, 3]])).tolist()
    [[0, 3], [4, 6]]
    """
    merged = _merge(intervals)
    start, end = merged.T
    return merged[end > start]


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Intersection of two sets: what both cover.

    >>> intersection(np.array([[0, 4]]), np.array([[1, 2], [3, 9]])).tolist()
    [[1, 2], [3, 4]]
    """
    # A sweep over all ends (-1) and starts (+1) in order of time: both sets cover what
    # lies after a point where the running sum is 2. Ends stand first and the sort is
    # stable, so that sets which only touch do not overlap.
    start, end = np.concatenate([union(a), union(b)]).T
    times = np.concatenate([end, start])
    change = np.repeat([-1, 1], len(start))
    order = np.argsort(times, kind="stable")
    times = times[order]
    depth = np.cumsum(change[order])
    both = np.flatnonzero(depth[:-1] == 2)
    return union(_pairs(times[both], times[both + 1]))


def subtraction(a: Intervals, b: Intervals) -> Intervals:
    """Difference of two sets: what `a` covers and `b` does not.

    >>> subtraction(np.array([[0, 4]]), np.array([[1, 2], [3, 9]])).tolist()
    [[0, 1], [2, 3]]
    """
    # a - b = a & not b; `not b` runs from each end of b to its next start, and from and
    # to the ends of int64, (k + 1, 2) for k intervals
    start, end = union(b).T
    int64 = np.iinfo(np.int64)
    gap_starts = np.r_[int64.min, end]
    gap_ends = np.r_[start, int64.max]
    return intersection(a, _pairs(gap_starts, gap_ends))


def covered_before(intervals: Intervals, times: np.ndarray) -> np.ndarray:
    """Length (n,) of a set in normal form that lies before each of the times (n,).

    >>> covered_before(np.array([[0, 2], [5, 9]]), np.array([1, 4, 6])).tolist()
    [1, 2, 3]
    """
    if not len(intervals):
        return np.zeros(len(times), dtype=np.int64)
    # length of the first k intervals, k = 0, 1, ...: all that have begun by a time count
    # in full, less what of the last of them lies after it
    start, end = intervals.T
    lengths = np.r_[0, np.cumsum(end - start)]
    begun = np.searchsorted(start, times)
    last_end = end[np.maximum(begun - 1, 0)]
    after = np.maximum(last_end - times, 0)
    return lengths[begun] - np.where(begun > 0, after, 0)


def total(intervals: Intervals) -> int:
    """Length covered by at least one interval.

    One that ends before it starts and touches no other counts negative: so HTA sums
    what its rounding turned around.

    >>> total(np.array([[0, 2], [1, 3], [10, 11]]))
    4
    """
    start, end = _merge(intervals).T
    lengths = end - start
    return int(lengths.sum())


def _pairs(start, end):
    """Intervals (n, 2) from their ends."""
    return np.stack([start, end], axis=1)


def _merge(intervals):
    """Start and end of each group of intervals that overlap or touch, in order."""
    # (n, 2) also where an empty list comes in as (0,)
    start, end = np.asarray(intervals, dtype=np.int64).reshape(-1, 2).T
    if not len(start):
        return EMPTY
    # by start alone, as HTA: where one of two that begin together ends before it starts,
    # their order decides, and numpy's sort decides that by their order in the file
    order = np.argsort(start)
    start = start[order]
    # a group begins where an interval starts after the latest end of all before it, and
    # ends with the latest end before the next group
    latest_end = np.maximum.accumulate(end[order])
    begins = np.r_[True, start[1:] > latest_end[:-1]]
    first = np.flatnonzero(begins)
    last = np.r_[first[1:] - 1, len(start) - 1]
    return _pairs(start[first], latest_end[last])
