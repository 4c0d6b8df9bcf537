"""Experts with more tokens than others, and ranks behind others: memory, search, waits,
laid out and in closed form.
"""

from dataclasses import replace

import numpy as np
import pytest
from oracles.random_cases import drawn_cases

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.planner.space import Space
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.simulator.rates.parameters import shipped
from madmax_lib.simulator.steady.step_time import step_s as closed_s

pytestmark = pytest.mark.slow

MODEL, CLUSTER, PLAN = (
    "mixtral-8x7b",
    mm.cluster("dgx-h100", nodes=4),
    "dp32.ep8.z1.full",
)


def step_s(plan=PLAN, **more):
    return mm.estimate(MODEL, CLUSTER, plan, global_batch=64, **more)["step_s"].item()


def test_experts_out_of_balance_hold_more():
    sizes = [
        peak_bytes(memory(MODEL, "dp32.ep8.z1", imbalance=imbalance))
        for imbalance in (1, 1.5, 4)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    room = [
        mm.fits(MODEL, CLUSTER, PLAN, global_batch=32, imbalance=i).margins_bytes[
            "device"
        ]
        for i in (1, 1.5)
    ]
    assert room[1] < room[0]


@pytest.mark.parametrize(
    ("plan", "most"), [("dp32.z1", 1.0), ("dp32.ep2.z1", 2.0), ("dp32.ep8.z1", 4.0)]
)
def test_a_device_has_at_most_all_tokens_on_its_experts(plan, most):
    """Nothing is uneven without ep; with it a device may have all tokens, each once for
    each of its two experts.
    """
    assert step_s(plan, imbalance=50.0) == step_s(plan, imbalance=most)


def test_a_capacity_limits_the_busiest_device_and_measured_spreads_have_names():
    limited = [
        step_s("dp32.ep8.cap150", imbalance=imbalance) for imbalance in (1.5, 4.0)
    ]
    assert limited[0] == pytest.approx(limited[1], rel=1e-12)
    for name, value in (
        catalog.table("spreads", numbers=True).set_index("quantity")["value"].items()
    ):
        assert step_s(**{name: "measured"}) == step_s(**{name: value}) > step_s()


def test_a_search_knows_the_spreads():
    some, spreads = (
        {"space": Space.quick(), "shard": 1, "shards": 8},
        {"imbalance": 3.0, "jitter": 0.02},
    )
    found = mm.search(MODEL, CLUSTER, 64, progress=False, **some, **spreads).table.iloc[
        0
    ]
    assert found["step_s"] == pytest.approx(step_s(found["plan"], **spreads), rel=1e-9)


def test_ranks_wait_in_collectives_for_those_that_are_behind():
    """Each rank computes by its delay longer; all leave a collective together; the draw
    is that of the seed.
    """
    run = {
        "model": "gpt2",
        "cluster": mm.cluster("dgx-a100", devices=4),
        "plan": "dp4",
        "global_batch": 4,
    }
    draws = (0.0, 0), (0.1, 3), (0.1, 3), (0.1, 4)
    alike, delayed, again, other = (
        mm.simulate(**run, jitter=jitter, seed=seed) for jitter, seed in draws
    )
    assert alike.spans.equals(mm.simulate(**run).spans)
    assert delayed.spans.equals(again.spans) and not delayed.spans.equals(other.spans)
    before, after = (mm.breakdown(timeline) for timeline in (alike, delayed))
    delays = np.random.default_rng(3).exponential(0.1, 4)
    np.testing.assert_allclose(
        after["compute_s"] / before["compute_s"], 1 + delays - delays.min(), rtol=1e-4
    )
    assert (
        after["exposed_comm_s"].rank() + after["compute_s"].rank() == 5
    ).all()  # who is behind waits least
    reduced = delayed.spans[delayed.spans["kind"] == "comm"]
    assert (
        (reduced["start_ns"] + reduced["dur_ns"])
        .groupby(reduced["name"], observed=True)
        .nunique()
        == 1
    ).all()


def laid_out_s(case, jitter, seed):
    spans = mm.simulate(case.model, case.cluster, case.plan, global_batch=case.global_batch, dtype=case.dtype,
                        jitter=jitter, seed=seed).spans  # fmt: skip
    return (spans["start_ns"] + spans["dur_ns"]).max() / 1e9


def test_laid_out_and_expected_waits_agree_in_the_mean():
    """Random plans on up to 64 devices; laid out none gets faster by more jitter,
    whatever the draw.
    """
    drawn = [
        case
        for case in drawn_cases("random", 24, seed=11, most_passes=150)
        if case.plan.world_size <= 64
    ]
    ratios = []
    for case in drawn[:8]:
        alike, some, more = (
            [laid_out_s(case, jitter, seed) for seed in range(5)]
            for jitter in (0.0, 0.01, 0.03)
        )
        assert (np.diff([alike, some, more], axis=0) >= 0).all(), case
        expected_s, alike_s = (
            closed_s(Steps.of(one), shipped()).item()
            for one in (replace(case, jitter=0.03), case)
        )
        ratios.append(np.mean(more) / alike[0] / (expected_s / alike_s))
    assert np.abs(np.log(ratios)).max() < 0.05 and abs(np.log(np.median(ratios))) < 0.01
