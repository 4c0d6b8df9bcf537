import numpy as np
import pytest
from hypothesis import given, strategies as st

from madmax_lib.base.intervals import (
    EMPTY,
    intersection,
    pack,
    subtraction,
    total,
    union,
)

SETS = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 12)), max_size=12).map(
    lambda pairs: pack([start for start, _ in pairs], [length for _, length in pairs])
)


def points(intervals):
    """Brute force: the unit cells that a set covers."""
    return {cell for start, end in intervals.tolist() for cell in range(start, end)}


def is_normal(intervals):
    starts, ends = intervals[:, 0], intervals[:, 1]
    return (ends > starts).all() and (starts[1:] > ends[:-1]).all()


@given(SETS)
def test_union_covers_the_same_cells(a):
    assert points(union(a)) == points(a)
    assert is_normal(union(a))
    assert total(a) == len(points(a))


@given(SETS, SETS)
def test_binary_operations_equal_set_operations(a, b):
    assert points(intersection(a, b)) == points(a) & points(b)
    assert points(subtraction(a, b)) == points(a) - points(b)
    assert is_normal(intersection(a, b)) and is_normal(subtraction(a, b))
    assert total(intersection(a, b)) + total(subtraction(a, b)) == total(a)


@pytest.mark.parametrize("operation", [intersection, subtraction])
def test_empty_sets(operation):
    one = np.array([[0, 5]])
    assert operation(EMPTY, EMPTY).shape == (0, 2)
    assert operation(EMPTY, one).shape == (0, 2)
    assert total(operation(one, EMPTY)) == (0 if operation is intersection else 5)
    assert total(EMPTY) == 0


def test_epoch_nanoseconds_stay_exact():
    start = 1_712_195_495_520_882_923
    assert total(np.array([[start, start + 1], [start + 2, start + 4]])) == 3


def test_an_interval_turned_around_by_rounding_counts_negative_when_alone():
    backward = np.array([[0, 10], [20, 19], [5, 4]])
    assert total(backward) == 10 - 1
    assert union(backward).tolist() == [[0, 10]]
