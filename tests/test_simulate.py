"""Closed forms, conservation laws and counts of the simulated step."""

from dataclasses import replace

import numpy as np
import pytest

import madmax_lib as mm
from madmax_lib.simulator.collectives import all_gather_s, all_reduce_s, all_to_all_s, group_bandwidth, reduce_scatter_s
from madmax_lib.simulator.compute import Parameters, compute_s
from madmax_lib.simulator.engine import run
from madmax_lib.simulator.schedule import Step, stage_order
from madmax_lib.simulator.workload import Block, blocks, stage_layers
from madmax_lib.specs import Cluster, Device, Link, Transformer

DEVICE = Device("ideal", 1e12, 1e30, {"bf16": 1.0, "fp32": 1.0})
CLUSTER = Cluster("c", DEVICE, 8, 8, Link("in", 1e30), Link("out", 1e30))
TINY = Transformer("tiny", layers=4, hidden=64, heads=4, ffn=256, sequence=128, vocab=512)
NODE = mm.cluster("dgx-a100")


def step_s(model, cluster, plan, **options):
    spans = mm.simulate(model, cluster, mm.Plan.parse(plan), **options).spans
    return (spans["start_ns"] + spans["dur_ns"]).max() * 1e-9


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (2, 4), (4, 4), (4, 16), (8, 3)])
def test_bubble_of_equal_stages(schedule, pp, micro_batches):
    """Idle share (pp-1)/(m+pp-1) for both schedules; forward takes 1, backward 2."""
    plan = mm.Plan(pp=pp, schedule=schedule)
    step = Step([[Block("attention", 1.0, 0.0, 0.0)]] * pp, plan, CLUSTER, Parameters(), "bf16")
    _, end_s = run(step.build(micro_batches, 0.0))
    busy = 3 * micro_batches
    assert 1 - busy / max(end_s) == pytest.approx((pp - 1) / (micro_batches + pp - 1))


@pytest.mark.parametrize(("stage", "forwards"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_1f1b_holds_at_most_pp_activations(stage, forwards):
    order = list(stage_order("1f1b", stage, 4, 8))
    assert [kind for kind, _ in order[:forwards]] == ["forward"] * forwards
    held = np.cumsum([1 if kind == "forward" else -1 for kind, _ in order])
    assert held.max() == forwards + 1 and held[-1] == 0


def test_stages_are_even_and_the_ends_are_not_longer():
    assert [len(layers) for layers in stage_layers(10, 4)] == [2, 3, 3, 2]
    assert [i for layers in stage_layers(105, 35) for i in layers] == list(range(105))


def test_blocks_add_up_to_the_model():
    for model in (TINY, mm.model("gpt2-large"), mm.model("qwen2.5-3b"), mm.model("vit-huge"), mm.model("mixtral-8x7b")):
        for plan in (mm.Plan(), mm.Plan(tp=2), mm.Plan(pp=2)):
            flat = [block for stage in blocks(model, plan) for block in stage]
            assert sum(block.flops for block in flat) * plan.tp == pytest.approx(model.forward_flops(1))
        whole = sum(block.parameters for stage in blocks(model, mm.Plan()) for block in stage)
        assert whole == pytest.approx(model.parameters, rel=1e-12)


def test_one_device_does_not_communicate():
    timeline = mm.simulate(TINY, replace(NODE, devices_per_node=1), mm.Plan(), global_batch=1)
    assert set(timeline.spans["kind"]) == {"compute"} and timeline.ranks == [0]


def test_ideal_step_time_is_flops_over_peak():
    model = mm.model("gpt3-175b")
    plan, cluster = mm.Plan(tp=8, pp=8, dp=2, recompute="full"), mm.cluster("dgx-a100", nodes=16)
    table = mm.breakdown(mm.simulate(model, cluster, plan, global_batch=128))
    work = 4 * model.forward_flops(128) / 128 / 312e12
    assert table["compute_s"].mean() == pytest.approx(work, rel=0.01)
    assert table["rank"].tolist() == list(range(0, 128, 16))


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        ("dp8.z3", {"all_gather": 2 * 2 * 10, "reduce_scatter": 10}),
        ("dp8", {"all_reduce": 1}),
        ("dp8.z1", {"reduce_scatter": 1, "all_gather": 1}),
        ("dp4.tp2.nosp", {"all_reduce": 2 * 2 * 9 + 1}),
        ("dp4.tp2", {"all_gather": 2 * 2 * 9, "reduce_scatter": 2 * 2 * 9, "all_reduce": 1}),
    ],
)
def test_counts_of_collectives(plan, counts):
    """Two micro-batches of ten blocks: embedding, 4 x (attention, feed-forward), head; tp reduces all but the head."""
    plan = mm.Plan.parse(plan)
    spans = mm.simulate(TINY, NODE, plan, global_batch=2 * plan.dp).select(ranks=[0]).spans
    comm = spans.loc[spans["kind"] == "comm", "name"].astype(str).str.split().str[0]
    assert comm.value_counts().to_dict() == counts


@pytest.mark.parametrize("plan", ["dp8", "dp8.z1", "dp8.z3", "dp2.tp4", "dp2.tp2.pp2", "dp2.tp2.pp2.gpipe.full.z3"])
def test_faster_parts_never_make_a_slower_step(plan):
    options = {"global_batch": 16}
    model, base = mm.model("gpt2-large"), step_s(mm.model("gpt2-large"), NODE, plan, global_batch=16)
    device = NODE.device
    for better in (
        replace(NODE, intra=Link("x", 2 * NODE.intra.bandwidth_bytes_per_s)),
        replace(NODE, device=replace(device, memory_bandwidth_bytes_per_s=2 * device.memory_bandwidth_bytes_per_s)),
        replace(NODE, device=replace(device, peak_flops={k: 2 * v for k, v in device.peak_flops.items()})),
    ):
        assert step_s(model, better, plan, **options) <= base


def test_prefetch_hides_gathers_and_recompute_costs_a_third():
    cluster = mm.cluster("dgx-a100", nodes=4)
    ahead, late = (mm.simulate(mm.model("gpt2-large"), cluster, mm.Plan(dp=32, zero=3, prefetch=n, micro_batch=4),
                               global_batch=128) for n in (1, 0))  # fmt: skip
    assert mm.breakdown(ahead)["exposed_comm_s"].iloc[0] < mm.breakdown(late)["exposed_comm_s"].iloc[0]
    one, batch = replace(NODE, devices_per_node=1), 16
    none, full = (
        mm.breakdown(mm.simulate(mm.model("gpt2-large"), one, plan, global_batch=batch))["compute_s"].iloc[0]
        for plan in (mm.Plan(micro_batch=batch), mm.Plan(micro_batch=batch, recompute="full"))
    )
    assert full / none == pytest.approx(4 / 3, rel=0.03)


def test_small_buckets_overlap_and_one_bucket_does_not():
    """The two-T4 finding: with a bucket larger than half the model the first all-reduce starts too late to hide."""
    model, cluster = mm.model("vit-huge"), mm.cluster("kaggle-2xt4")
    shares = []
    for bucket_bytes in (25e6, 5e8 * 2):
        plan = mm.Plan(dp=2, zero=2, micro_batch=16, bucket_bytes=bucket_bytes)
        timeline = mm.simulate(model, cluster, plan, global_batch=32, dtype="fp16")
        shares.append(mm.breakdown(timeline)["overlap"].iloc[0])
    assert shares[0] > shares[1] + 0.1


def test_all_ranks_up_to_64_then_one_per_stage():
    small = mm.simulate(TINY, NODE, mm.Plan(dp=2, tp=2, pp=2), global_batch=4)
    assert small.ranks == list(range(8)) and small.meta.represents[5] == [5]
    large = mm.simulate(TINY, mm.cluster("dgx-a100", nodes=16), mm.Plan(dp=64, pp=2), global_batch=64)
    assert large.ranks == [0, 64] and large.meta.represents[64] == list(range(64, 128))
    assert len(small.edges) and small.edges[["source", "target"]].to_numpy().max() < len(small)


def test_dlrm_step_has_its_exchanges_and_hides_bottom_layers():
    timeline = mm.simulate(mm.model("dlrm-a"), mm.cluster("zionex"), mm.Plan(dp=128, micro_batch=512),
                           global_batch=65536, dtype="tf32")  # fmt: skip
    spans = timeline.spans
    assert spans["name"].astype(str).str.startswith("all_to_all").sum() == 2
    exchange = spans[spans["name"] == "all_to_all embedding forward"].iloc[0]
    bottom, top = (spans[spans["name"] == f"{name} forward"].iloc[0]["start_ns"] for name in ("bottom 9", "top 0"))
    assert exchange["start_ns"] <= bottom < exchange["start_ns"] + exchange["dur_ns"] <= top


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": mm.Plan(dp=4)}, "= 4, but dgx-a100 has 8 devices"),
        ({"plan": mm.Plan(dp=4, cp=2)}, "cp=2: the simulator lays out cp=1 only"),
        ({"plan": mm.Plan(pp=2, dp=4, interleave=2)}, "interleave=2: the simulator lays out"),
        ({"plan": mm.Plan(pp=2, dp=4, schedule="zero-bubble")}, "lays out gpipe and 1f1b only"),
        ({"global_batch": 12}, "global_batch=12 is not a multiple of dp x micro_batch = 8 x 1"),
        ({"model": mm.model("dlrm-a"), "plan": mm.Plan(dp=4, tp=2)}, "split by dp only"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(change, message):
    arguments = {"model": TINY, "cluster": NODE, "plan": mm.Plan(dp=8), "global_batch": 8} | change
    with pytest.raises(ValueError, match=message):
        mm.simulate(**arguments)


@pytest.mark.parametrize("efficiency", [0, 1.5, float("nan")])
def test_efficiencies_are_shares(efficiency):
    with pytest.raises(ValueError, match=r"is not in .0, 1."):
        Parameters(compute_efficiency=efficiency)


def test_collectives_in_closed_form():
    assert all_reduce_s(1e9, 1, 1e9) == all_gather_s(1e9, 1, 1e9) == 0
    assert all_reduce_s(8e9, 4, 1e9, 1e-3) == pytest.approx(12 + 6e-3)
    assert reduce_scatter_s(8e9, 4, 1e9) == all_gather_s(8e9, 4, 1e9) == pytest.approx(6)
    assert all_to_all_s(8e9, 8, 8, 1e9, 1e9) == pytest.approx(7)
    assert all_to_all_s(8e9, 16, 8, 1e9, 1e8) == pytest.approx(40)
    np.testing.assert_allclose(all_reduce_s(np.array([1e9, 2e9]), np.array([2, 4]), 1e9), [1, 3])


@pytest.mark.parametrize(
    ("ranks", "stride", "bandwidth"), [(8, 1, 300e9), (2, 4, 300e9), (16, 1, 200e9), (2, 8, 25e9), (8, 4, 50e9)]
)
def test_bandwidth_of_groups(ranks, stride, bandwidth):
    assert group_bandwidth(mm.cluster("dgx-a100", nodes=8), ranks, stride)[0] == bandwidth


def test_roofline_takes_the_slower_bound():
    device = Device("d", 1, 10.0, {"bf16": 100.0})
    assert compute_s(200.0, 10.0, device, "bf16", Parameters()) == 2
    assert compute_s(200.0, 100.0, device, "bf16", Parameters(memory_efficiency=0.5)) == 20
