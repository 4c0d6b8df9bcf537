"""How much time is covered, shared or left over? Interval algebra on int64 arrays.

A set of intervals is an array of shape (n, 2): columns start and end, half open, in any
order, overlaps allowed. Results are normal form: sorted, disjoint, not touching, none
empty. Everything is O(n log n) NumPy, no loops.
"""

import numpy as np

__all__ = [
    "EMPTY",
    "covered_before",
    "intersection",
    "pack",
    "subtraction",
    "total",
    "union",
]

EMPTY = np.empty((0, 2), dtype=np.int64)


def pack(start: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """Intervals (n, 2) from starts (n,) and durations (n,).

    >>> pack([0, 5], [2, 3]).tolist()
    [[0, 2], [5, 8]]
    """
    start = np.asarray(start, dtype=np.int64)
    return np.stack([start, start + np.asarray(duration, dtype=np.int64)], axis=1)


def union(intervals: np.ndarray) -> np.ndarray:
    """Normal form of a set: what at least one interval covers. Empty and backward
    intervals cover nothing.

    >>> union(np.array([[4, 6], [0, 2], [1, 3]])).tolist()
    [[0, 3], [4, 6]]
    """
    merged = _merge(intervals)
    return merged[merged[:, 1] > merged[:, 0]]


def intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What both sets cover.

    >>> intersection(np.array([[0, 4]]), np.array([[1, 2], [3, 9]])).tolist()
    [[1, 2], [3, 4]]
    """
    a = union(a)
    b = union(b)
    times = np.concatenate(
        [a[:, 1], b[:, 1], a[:, 0], b[:, 0]]
    )  # ends sort before starts at the same instant
    order = np.argsort(times, kind="stable")
    times, depth = times[order], np.cumsum(np.repeat([-1, 1], len(times) // 2)[order])
    both = np.flatnonzero(depth[:-1] == 2)
    return union(np.stack([times[both], times[both + 1]], axis=1))


def subtraction(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What `a` covers and `b` does not.

    >>> subtraction(np.array([[0, 4]]), np.array([[1, 2], [3, 9]])).tolist()
    [[0, 1], [2, 3]]
    """
    b = union(b)
    ever = np.iinfo(np.int64)
    return intersection(
        a, np.stack([np.r_[ever.min, b[:, 1]], np.r_[b[:, 0], ever.max]], axis=1)
    )


def covered_before(intervals: np.ndarray, times: np.ndarray) -> np.ndarray:
    """How much (n,) of a set in normal form lies before each of the times (n,).

    >>> covered_before(np.array([[0, 2], [5, 9]]), np.array([1, 4, 6])).tolist()
    [1, 2, 3]
    """
    if not len(intervals):
        return np.zeros(len(times), dtype=np.int64)
    before = np.r_[0, np.cumsum(intervals[:, 1] - intervals[:, 0])]
    begun = np.searchsorted(intervals[:, 0], times)
    rest = np.maximum(
        intervals[np.maximum(begun - 1, 0), 1] - times, 0
    )  # of the last one that has begun
    return before[begun] - np.where(begun > 0, rest, 0)


def total(intervals: np.ndarray) -> int:
    """Length covered by at least one interval.

    One that ends before it starts and touches no other counts negative: so HTA sums
    what its rounding turned around.

    >>> total(np.array([[0, 2], [1, 3], [10, 11]]))
    4
    """
    merged = _merge(intervals)
    return int((merged[:, 1] - merged[:, 0]).sum())


def _merge(intervals: np.ndarray) -> np.ndarray:
    """Sorted groups of intervals that overlap or touch: first start and last end of
    each.
    """
    intervals = np.asarray(intervals, dtype=np.int64).reshape(-1, 2)
    if not len(intervals):
        return EMPTY
    intervals = intervals[np.lexsort((intervals[:, 1], intervals[:, 0]))]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.r_[True, intervals[1:, 0] > reach[:-1]])
    return np.stack(
        [intervals[first, 0], reach[np.r_[first[1:] - 1, len(reach) - 1]]], axis=1
    )
