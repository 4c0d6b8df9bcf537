"""Experts with more tokens than others: what the busiest device means for memory and search."""

import pytest

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.planner.space import Space
from madmax_lib.simulator.memory.memory import memory, peak_bytes

MODEL, CLUSTER, PLAN = "mixtral-8x7b", mm.cluster("dgx-h100", nodes=4), "dp32.ep8.z1.full"


def step_s(plan=PLAN, **more):
    return mm.estimate(MODEL, CLUSTER, plan, global_batch=64, **more)["step_s"].item()


def test_experts_out_of_balance_hold_more():
    sizes = [peak_bytes(memory(MODEL, "dp32.ep8.z1", imbalance=imbalance)) for imbalance in (1, 1.5, 4)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    room = [mm.fits(MODEL, CLUSTER, PLAN, global_batch=32, imbalance=i).margins_bytes["device"] for i in (1, 1.5)]
    assert room[1] < room[0]


def test_a_capacity_limits_the_busiest_device_and_the_measured_imbalance_has_a_name():
    assert step_s("dp32.ep8.cap150", imbalance=4.0) == pytest.approx(
        step_s("dp32.ep8.cap150", imbalance=1.5), rel=1e-12
    )
    value = catalog.table("spreads", numbers=True).set_index("quantity")["value"]["imbalance"]
    assert step_s(imbalance="measured") == step_s(imbalance=value) > step_s()


def test_a_search_knows_the_imbalance():
    some = {"space": Space.quick(), "shard": 1, "shards": 8, "progress": False}
    found = mm.search(MODEL, CLUSTER, 64, imbalance=3.0, **some).table.iloc[0]
    assert found["step_s"] == pytest.approx(step_s(found["plan"], imbalance=3.0), rel=1e-9)
