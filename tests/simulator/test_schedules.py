"""Orders of pipeline stages: bubbles in closed form, activations held, no deadlock for
any shape.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import passes_held, refused

from madmax_lib.simulator.costs import schedules
from madmax_lib.simulator.costs.schedules import order, turns
from madmax_lib.simulator.events.engine import Program, run
from madmax_lib.simulator.steady import walk

FOLDED = ("zbv", "dualpipev")


def step_s(schedule, pp, micro_batches, chunks=1, backward=2.0, weight=1.0):
    """Length of a step whose backward passes, and gradients of weights where they are
    apart, take so long on a whole stage, forward passes 1 s; messages take no time.
    """
    seconds = {"forward": 1.0, "backward": backward, "weight": weight}
    program, numbers = Program(), {}
    for stage, slot, awaits, whole in turns(schedule, pp, micro_batches, chunks):
        after = [numbers[awaits]] if awaits else []
        duration_s = seconds[slot[0]]
        if schedule == "dualpipev" and slot[0] == "backward":
            duration_s += whole * weight
        op = program.op(0, "compute", slot[0], duration_s / chunks, after, rank=stage)
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
@pytest.mark.parametrize("v", [1, 2, 3])
def test_bubble_of_zero_bubble_is_a_third(v, pp, m):
    """ZB-H1, forward = backward = weight: (pp-1)(F+B-W)/v idle [Qi et al. 2024, table
    1], memory as 1F1B.
    """
    v = v if pp > 1 and m % pp == 0 else 1
    step = step_s("zero-bubble", pp, m, v, backward=1.0)
    assert step == pytest.approx(3 * m + (pp - 1) / v, abs=1e-12)
    held = [passes_held("zero-bubble", stage, pp, m, v) for stage in range(pp)]
    assert max(held) == v * min(pp, m)


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 17), (8, 32)])
@pytest.mark.parametrize(("b", "w"), [(1.0, 1.0), (1.0, 0.5), (1.0, 2.0), (0.8, 1.2)])
def test_bubble_of_a_v(pp, m, b, w):
    """ZB-V idles for a longest pass of a chunk per other stage [Qi et al. 2024, section
    6], half as long as ZB-H1 with equal passes; DualPipeV (pp-1)(F+B-min(F, B, W)).
    """
    work = m * (1 + b + w)
    zbv = 2 * (step_s("zbv", pp, m, 2, backward=b, weight=w) - work)
    assert zbv == pytest.approx(1 + (pp - 2) * max(1, w), abs=1e-9)
    dual = 2 * (step_s("dualpipev", pp, m, 2, backward=b, weight=w) - work)
    assert dual == pytest.approx((pp - 1) * (1 + b - min(1, b, w)), abs=1e-9)


@pytest.mark.parametrize(("pp", "m"), [(2, 5), (4, 8), (4, 11), (8, 17)])
@pytest.mark.parametrize(
    ("number", "v"),
    [(0, 1), (0, 2), (1, 2), (2, 2), (3, 1), (3, 3), (4, 1)],
    ids=["zb", "zb2", "zbv", "dual", "1f1b", "1f1b3", "gpipe"],
)
def test_the_longest_paths_end_when_the_last_pass_does(number, v, pp, m):
    """One layer a chunk, without ends: seconds that the paths were not drawn with."""
    schedule = walk._SCHEDULES[number]
    folds = schedule in FOLDED
    m += -m % pp if v > 1 and not folds else 0
    cut = (pp, v, 0, 0, 0, 0, "", folds, number, m, pp * v, 0)
    counts, work = walk._paths(cut)
    for b, w in [(1.0, 1.0), (2.0, 1.0), (1.0, 0.1), (2.9, 0.4), (0.7, 1.5)]:
        seconds = np.r_[[1, b, w], np.zeros(11)] / v
        whole = b + w * (schedule in ("1f1b", "gpipe"))
        whole_s = step_s(schedule, pp, m, v, backward=whole, weight=w)
        assert (counts @ seconds).max() == pytest.approx(whole_s, rel=0.01)
        assert (work @ seconds).max() == pytest.approx(1 + b + w)


TORCH = {
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "v"),
    [("zero-bubble", 1), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)],
)
def test_orders_are_those_of_torch(schedule, v, pp):
    """Its passes I, B and W of stages numbered along the V, empty slots left out."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    words = {"F": "forward", "I": "backward", "B": "backward", "W": "weight"}
    for m in (1, 3, 4, 8, 16, 17, 24):
        rounds = max(m // pp, 1)
        if m % rounds or (schedule == "dualpipev" and m < 2 * pp):
            continue
        sizes = {"num_stages": v * pp, "n_local_stages": v, "number_of_rounds": rounds}
        sizes |= {"pp_group_size": pp, "microbatches_per_round": m // rounds}
        its = SimpleNamespace(_n_microbatches=m, **sizes)
        kind = getattr(torch, TORCH[schedule])
        for stage in range(pp):
            actions = kind._calculate_single_rank_operations(its, stage)
            actions = filter(None, actions)
            parts = [p for action in actions for p in action.sub_actions or [action]]
            passes = [(str(p[1].value), p[0] // pp, p[2]) for p in parts]
            slots = order(schedule, stage, pp, m, v)
            assert slots == [(words[way], *which) for way, *which in passes]
            whole = {tuple(which) for way, *which in passes if way == "B"}
            apart = {tuple(which) for way, *which in slots if way == "weight"}
            assert whole == {tuple(which) for _, *which in slots} - apart


PASSES = ("forward", "backward", "weight")
SCHEDULES = st.sampled_from(["gpipe", "1f1b", "zero-bubble", *FOLDED])


@settings(max_examples=60, deadline=None)
@given(SCHEDULES, st.integers(1, 9), st.integers(1, 25), st.integers(1, 4))
def test_every_pass_runs_once_and_nothing_waits_for_ever(schedule, pp, m, chunks):
    chunks = chunks if schedule in ("1f1b", "zero-bubble") and pp > 1 else 1
    if schedule in FOLDED:
        chunks = 2
        m = max(m, 2 * pp * (schedule == "dualpipev"))
    slots = [turn[:2] for turn in turns(schedule, pp, m, chunks)]
    assert len(slots) == len(set(slots))
    for direction in PASSES[: 2 + (schedule in ("zero-bubble", "zbv"))]:
        count = sum(slot[0] == direction for _, slot in slots)
        assert count == pp * m * chunks
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


def test_orders_that_cannot_run_are_refused(monkeypatch):
    passes = [("backward", 0, 0), ("forward", 0, 0)]
    orders = [passes, passes[::-1]]
    monkeypatch.setattr(schedules, "order", lambda _, stage, *sizes: orders[stage])
    with refused("stages of 1f1b wait for each other"):
        list(turns("1f1b", 2, 1))
