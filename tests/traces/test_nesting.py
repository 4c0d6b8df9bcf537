"""Nesting of spans equals the naive definition, also where spans of a thread do not
nest.
"""

import numpy as np
import pytest
from support import make_timeline

from madmax_lib.traces.read.nesting import Nest, thread_of


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_open_is_the_span_that_began_last_of_those_that_hold_the_time(closed):
    random = np.random.default_rng(0)
    for _ in range(30):
        start, dur = random.integers(0, 40, 25), random.integers(0, 20, 25)
        thread, time = -1 - random.integers(0, 2, 25), random.integers(0, 65, 50)
        rows = [
            (0, int(t), "cpu", "op", int(s), int(d))
            for t, s, d in zip(thread, start, dur, strict=True)
        ]
        spans = make_timeline(rows).spans
        nest = Nest(spans, np.arange(25), closed=closed)
        asked = thread_of(spans.iloc[[0]]).repeat(50)
        for t, place in zip(time, nest.at(asked, time), strict=True):
            inside = [
                (s, -d)
                for s, d, on in zip(start, dur, thread, strict=True)
                if on == thread[0] and s <= t and (t <= s + d if closed else t < s + d)
            ]
            assert (place == -1) == (not inside)
            row = nest.rows[place]
            assert place == -1 or (start[row], -dur[row]) == max(inside)


def test_nothing_is_open_where_nothing_is():
    nest = Nest(make_timeline([]).spans, np.zeros(0, dtype=np.int64))
    assert nest.at(np.array([1, 2]), np.array([0, 0])).tolist() == [-1, -1]
