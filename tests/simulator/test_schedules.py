"""Orders of pipeline stages: bubbles in closed form, activations held, no deadlock for
any shape.
"""

import pytest
from hypothesis import given, settings, strategies as st
from support import passes_held, refused

from madmax_lib.simulator.events.engine import Program, run
from madmax_lib.simulator.events.schedules import dependency, in_order, order


def issued(schedule, pp, micro_batches, chunks=1):
    """(stage, slot) of a step in the order of issue."""
    stages = range(pp)
    orders = [order(schedule, stage, pp, micro_batches, chunks) for stage in stages]
    return list(in_order(orders, chunks))


def step_s(schedule, pp, micro_batches, chunks=1, backward=2.0):
    """Length of a step whose passes take so long on a whole stage, all others 1 s;
    messages take no time.
    """
    seconds = {"forward": 1.0, "backward": backward, "weight": 1.0}
    program, numbers = Program(), {}
    for stage, slot in issued(schedule, pp, micro_batches, chunks):
        needed = dependency(slot, stage, pp, chunks)
        after = [numbers[needed]] if needed else []
        duration_s = seconds[slot[0]] / chunks
        op = program.op(0, "compute", slot[0], duration_s, after, rank=stage)
        numbers[stage, slot] = op
    return max(run(program)[1])


SHAPES = [(1, 1), (1, 5), (2, 4), (4, 4), (4, 16), (4, 17), (8, 8), (8, 30), (3, 7)]


@pytest.mark.parametrize(("pp", "m"), SHAPES)
@pytest.mark.parametrize(
    ("schedule", "v"),
    [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("1f1b", 5)],
)
def test_bubble(schedule, v, pp, m):
    """(pp-1)/(v m+pp-1) of the step is idle, also where pp does not divide m."""
    v = v if pp > 1 else 1
    bubble = 1 - 3 * m / step_s(schedule, pp, m, v)
    assert bubble == pytest.approx((pp - 1) / (v * m + pp - 1), abs=1e-12)


@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_bubble_of_zero_bubble_is_a_third(pp, m):
    """ZB-H1, forward = backward = weight: (pp-1)(F+B-W) idle [Qi et al. 2024, table 1],
    memory as 1F1B.
    """
    step = step_s("zero-bubble", pp, m, backward=1.0)
    assert step == pytest.approx(3 * m + (pp - 1), abs=1e-12)
    held = [passes_held("zero-bubble", stage, pp, m) for stage in range(pp)]
    assert max(held) == min(pp, m)


PASSES = ("forward", "backward", "weight")
SCHEDULES = st.sampled_from(["gpipe", "1f1b", "zero-bubble"])


@settings(max_examples=40, deadline=None)
@given(SCHEDULES, st.integers(1, 9), st.integers(1, 25), st.integers(1, 4))
def test_every_pass_runs_once_and_nothing_waits_for_ever(schedule, pp, m, chunks):
    chunks = chunks if schedule == "1f1b" and pp > 1 else 1
    slots = issued(schedule, pp, m, chunks)
    passes = 3 if schedule == "zero-bubble" else 2
    assert len(slots) == len(set(slots)) == passes * pp * m * chunks
    place = {slot: number for number, slot in enumerate(slots)}
    for stage, (_, *which) in slots:
        first = place[stage, ("forward", *which)]
        assert first <= min(place.get((stage, (p, *which)), first) for p in PASSES)


def test_the_order_of_megatron():
    """Narayanan et al. 2021, figure 4 below: device 1 of 4, two chunks, 8
    micro-batches.
    """
    slots = order("1f1b", 0, 4, 8, 2)[:13]
    words = [f"{way[0]}{chunk}.{number + 1}" for way, chunk, number in slots]
    first = "f0.1 f0.2 f0.3 f0.4 f1.1 f1.2 f1.3 f1.4 f0.5 f0.6 f0.7 b1.1 f0.8"
    assert words == first.split()


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_schedules_that_have_no_chunks_refuse_some(schedule):
    with refused("interleave=2 & schedule='1f1b'"):
        order(schedule, 0, 4, 8, 2)


def test_orders_that_cannot_run_are_refused():
    passes = [("backward", 0, 0), ("forward", 0, 0)]
    with refused("stage 0 before & 'backward', 0, 0"):
        list(in_order([passes, passes[::-1]]))
