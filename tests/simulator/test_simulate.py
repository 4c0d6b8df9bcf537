"""Closed forms, conservation laws and counts of the simulated step."""

from dataclasses import replace

import numpy as np
import pytest
from oracles.op_table import blocks
from support import core_flops

import madmax_lib as mm
from madmax_lib.catalog.models import Cluster, Device, Link, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import owned
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.events.engine import run
from madmax_lib.simulator.events.layout import StepBuilder
from madmax_lib.simulator.events.passes import MicroBatch
from madmax_lib.simulator.layers.ops import Block, gemm, precision
from madmax_lib.simulator.rates.compute import optimizer_bytes
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.timeline.kinds import collective_names

DEVICE = Device("ideal", 1e12, 1e30, {"bf16": 1.0, "fp32": 1.0})
CLUSTER = Cluster("c", DEVICE, 8, 8, Link("in", 1e30), Link("out", 1e30))
TINY = Transformer(
    "tiny", layers=4, hidden=64, heads=4, ffn=256, sequence=128, vocab=512
)
NODE = mm.cluster("dgx-a100")


def step_s(model, cluster, plan, **options):
    spans = mm.simulate(model, cluster, mm.Plan.parse(plan), **options).spans
    return (spans["start_ns"] + spans["dur_ns"]).max() * 1e-9


def collectives(timeline, rank=0):
    """Count and bytes of a rank by (collective, group without its ranks)."""
    spans = timeline.select(ranks=[rank]).spans
    spans = spans[spans["kind"] == "comm"]
    groups = spans["group"].astype(str).str.split().str[0]
    named = spans.assign(
        collective=collective_names(spans["name"].astype(str)), group=groups
    )
    return named.groupby(["collective", "group"])["size_bytes"].agg(["count", "sum"])


def volumes(timeline, rank=0):
    """Bytes of a rank by (collective, group)."""
    return collectives(timeline, rank)["sum"].to_dict()


@pytest.mark.parametrize(
    ("pp", "micro_batches"), [(1, 1), (2, 4), (4, 4), (4, 16), (8, 3), (3, 10)]
)
@pytest.mark.parametrize("plan", ["gpipe", "1f1b", "v2", "v3", "zb"])
def test_bubble_of_equal_stages(plan, pp, micro_batches):
    """Idle share (pp-1)/(v m+pp-1), of ZB-H1 (pp-1)/(3 m+pp-1); forward takes 1,
    backward 2 halves of 1.
    """
    v = int(plan[1]) if plan in ("v2", "v3") else 1
    if (v > 1 or plan == "zb") and not 1 < pp <= micro_batches:
        return
    schedule = {"gpipe": "gpipe", "zb": "zero-bubble"}.get(plan, "1f1b")
    plan = mm.Plan(pp=pp, schedule=schedule, interleave=v)
    case = Case(TINY, CLUSTER, plan, micro_batches)
    product = gemm(
        "product", 0.5 / v, 1.0, 1.0, precision("bf16"), weights=True
    )  # 1/v FLOP at 1 FLOP/s
    batch = MicroBatch(
        [[[Block("attention", (product,))]] * v] * pp,
        Prices(Steps.of(case), Parameters()),
    )
    _, end_s = run(StepBuilder(case, batch).build(micro_batches))
    passes = 3 * v * micro_batches if schedule == "zero-bubble" else v * micro_batches
    assert 1 - 3 * micro_batches / max(end_s) == pytest.approx(
        (pp - 1) / (passes + pp - 1), abs=1e-12
    )


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        ("dp8.z3", {"all_gather": 2 * 2 * 6, "reduce_scatter": 2 * 6}),
        ("dp8", {"all_reduce": 1}),
        ("dp8.z1", {"reduce_scatter": 1, "all_gather": 1}),
        ("dp8.z2", {"reduce_scatter": 2, "all_gather": 1}),
        ("dp8.z1.overlap-gather", {"reduce_scatter": 1, "all_gather": 6}),
        ("dp4.tp2.nosp", {"all_reduce": 2 * 2 * 9 + 1}),
        (
            "dp4.tp2",
            {"all_gather": 2 * 2 * 9, "reduce_scatter": 2 * 2 * 9, "all_reduce": 1},
        ),
        ("cp8", {"send_recv": 2 * 4 * (7 + 15), "all_reduce": 1}),
    ],
)
def test_counts_of_collectives(plan, counts):
    """Two micro-batches of a model of six units (embedding, four layers, head); tp
    reduces at the ends of 9 blocks.
    """
    plan = mm.Plan.parse(plan)
    count = collectives(mm.simulate(TINY, NODE, plan, global_batch=2 * plan.dp))[
        "count"
    ]
    assert count.groupby("collective").sum().to_dict() == counts


P = 2.0 * TINY.parameters  # bytes


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("dp16", {("all_reduce", "dp"): P}),
        ("dp16.reduce-fp32", {("all_reduce", "dp"): 2 * P}),
        ("dp16.z1", {("reduce_scatter", "dp"): P, ("all_gather", "dp"): P}),
        ("dp16.z2", {("reduce_scatter", "dp"): 2 * P, ("all_gather", "dp"): P}),
        ("dp16.z3", {("reduce_scatter", "dp"): 2 * P, ("all_gather", "dp"): 4 * P}),
        ("dp16.z3.hs8", {("reduce_scatter", "shard"): 2 * P, ("all_gather", "shard"): 4 * P,
                         ("all_reduce", "replicate"): P / 8}),
        ("dp8.cp2.z3.ulysses", {("reduce_scatter", "dp"): 2 * P, ("all_gather", "dp"): 4 * P}),
        ("dp16.z3.qwz", {("reduce_scatter", "dp"): 2 * P, ("all_gather", "dp"): 2 * P}),
        ("dp16.z3.zpp", {("all_gather", "dp"): P, ("all_gather", "node"): 2 * P, ("all_to_all", "node"): P / 2,
                         ("all_to_all", "across"): P / 16}),
    ],
)  # fmt: skip
def test_volumes_of_data_parallelism(plan, expected):
    """Two micro-batches on two nodes. ZeRO++ sends a quarter of ZeRO-3's gathers and
    gradients [arXiv 2306.10209].
    """
    plan = mm.Plan.parse(plan)
    sent = volumes(
        mm.simulate(TINY, replace(NODE, nodes=2), plan, global_batch=2 * plan.dp)
    )
    data = {key: size for key, size in sent.items() if key[1] != "cp"}
    assert data == pytest.approx(expected, rel=1e-12)


MIXTURE = replace(TINY, experts=8, active_experts=2, gated=True)
OF_EXPERTS = 4 * MIXTURE.experts * MIXTURE.mlp_parameters(MIXTURE.ffn)  # parameters


def test_experts_are_reduced_over_their_own_group():
    sent = volumes(mm.simulate(MIXTURE, NODE, mm.Plan(dp=8, ep=4), global_batch=8))
    assert sent["all_reduce", "edp"] == pytest.approx(2 * OF_EXPERTS / 4)
    assert sent["all_reduce", "dp"] == pytest.approx(
        2 * (MIXTURE.parameters - OF_EXPERTS)
    )
    assert sent["all_to_all", "ep"] == pytest.approx(
        4 * 4 * 2 * 128 * 2 * 64
    )  # 4 layers x there and back x 2 passes


@pytest.mark.parametrize(
    ("shard", "expected"),  # of the experts a device holds, a quarter of all
    [
        (8, {("all_gather", "expert-shard"): 2, ("reduce_scatter", "expert-shard"): 1,
             ("all_reduce", "expert-replicate"): 1 / 2}),
        # ep alone splits them further than the shard would
        (2, {("all_reduce", "expert-replicate"): 1}),
    ],
)  # fmt: skip
def test_hsdp_shards_experts_inside_the_shard(shard, expected):
    plan = mm.Plan(dp=16, ep=4, zero=3, shard=shard)
    timeline = mm.simulate(
        MIXTURE, replace(NODE, nodes=2), plan, global_batch=16, parameters=Parameters()
    )
    sent, dense = volumes(timeline), MIXTURE.parameters - OF_EXPERTS
    of_experts = {
        key: size for key, size in sent.items() if key[1].startswith("expert-")
    }
    assert of_experts == pytest.approx(
        {key: 2 * OF_EXPERTS / 4 * share for key, share in expected.items()}
    )
    assert sent["all_reduce", "replicate"] == pytest.approx(2 * dense / shard)
    adam_s = timeline.spans.query("name == 'adam'")["dur_ns"].max() / 1e9
    expected_s = (
        optimizer_bytes(owned(dense, OF_EXPERTS / 4, shard, 4))
        / NODE.device.memory_bandwidth_bytes_per_s
    )
    assert adam_s == pytest.approx(float(expected_s), abs=1e-9)


@pytest.mark.parametrize("v", [1, 2])
def test_a_pipeline_sends_every_activation_once(v):
    timeline = mm.simulate(
        TINY,
        NODE,
        mm.Plan(pp=2, dp=4, interleave=v),
        global_batch=16,
        parameters=Parameters(),
    )
    sent = [volumes(timeline, rank)["send_recv", "pp"] for rank in (0, 4)]
    assert sum(sent) == 2 * (2 * v - 1) * 4 * 2 * 128 * 64
    assert (
        mm.breakdown(timeline)["total_s"].nunique() == 1
    )  # who is done waits for the next step's first message


@pytest.mark.parametrize(("once", "share"), [(0.0, 1.0), (1.0, 0.75)])
def test_a_token_crosses_once_to_a_node(once, share):
    """Of two experts on two nodes 1.5 are expected on different ones."""
    steps = Steps.of(
        Case(
            MIXTURE,
            replace(CLUSTER, nodes=2, inter=Link("out", 1.0)),
            mm.Plan(dp=16, ep=16),
            16,
        )
    )
    prices = Prices(
        replace(steps, traits=replace(steps.traits, send_once=once)), Parameters()
    )
    assert prices.comm_s("all_to_all", 16.0, prices.groups["ep"]) == pytest.approx(
        8 * share
    )


def test_a_short_last_micro_batch():
    """Seven samples in micro-batches of 3, 3 and 1: work and messages as with seven
    micro-batches of one.
    """
    cluster = replace(
        NODE,
        devices_per_node=2,
        device=replace(DEVICE, memory_bandwidth_bytes_per_s=1e30),
    )
    plans = [mm.Plan(pp=2, micro_batch=size) for size in (3, 1)]
    short, ones = (
        mm.simulate(TINY, cluster, plan, global_batch=7, dtype="fp32") for plan in plans
    )
    np.testing.assert_allclose(
        mm.breakdown(short)["compute_s"], mm.breakdown(ones)["compute_s"], rtol=1e-9
    )
    assert volumes(short) == pytest.approx(volumes(ones))
    assert volumes(short)["send_recv", "pp"] == 7 * 4 * 128 * 64


def test_what_recompute_repeats():
    """Seconds of recompute over forward, without the head: none, the attention core,
    everything.
    """
    one = replace(
        NODE,
        devices_per_node=1,
        device=replace(NODE.device, memory_bandwidth_bytes_per_s=1e30),
    )
    shares = []
    for recompute in ("none", "selective", "full"):
        spans = mm.simulate(
            TINY,
            one,
            mm.Plan(recompute=recompute),
            global_batch=1,
            parameters=Parameters(),
        ).spans
        phase = spans["name"].astype(str).str.split().str[-1]
        layers = spans["name"].astype(str).str.match("attention|feed-forward")
        seconds = spans[layers].groupby(phase)["dur_ns"].sum()
        shares.append(seconds.get("recompute", 0) / seconds["forward"])
    flat = blocks(TINY, mm.Plan())[0][1:-1]
    core = sum(core_flops(block) for block in flat) / sum(
        op.flops for block in flat for op in block.ops
    )
    assert shares == pytest.approx(
        [0.0, core, 1.0], rel=2e-2
    )  # spans are rounded to ns


def test_a_ring_hides_its_exchange_and_ulysses_does_not():
    model = replace(mm.model("gpt2-large"), layers=2)
    overlap = {}
    for context in ("ring", "ulysses"):
        plan = mm.Plan(cp=4, dp=2, context=context)
        rank = mm.simulate(model, NODE, plan, global_batch=2, sequence=65536).select(
            ranks=[0]
        )
        without_gradients = rank.where(
            ~rank.spans["group"].astype(str).str.startswith("dp")
        )
        overlap[context] = mm.breakdown(without_gradients)["overlap"].iloc[0]
    assert overlap["ring"] > 0.8 and overlap["ulysses"] == pytest.approx(0, abs=1e-3)


def test_what_is_laid_out_is_exported_and_read_back(tmp_path):
    plan = mm.Plan.parse("pp2.cp2.dp2.ep4.z1.v2")
    model = replace(TINY, experts=4, active_experts=2)
    step = mm.simulate(model, NODE, plan, global_batch=8)
    again = mm.read_trace(mm.export_trace(step, tmp_path))
    mine, theirs = (
        mm.breakdown(timeline).set_index("rank") for timeline in (step, again)
    )
    np.testing.assert_allclose(
        mine[["compute_s", "comm_s"]], theirs[["compute_s", "comm_s"]], rtol=1e-12
    )
    of_groups = [
        timeline.spans.groupby("group", observed=True)["dur_ns"].sum().to_dict()
        for timeline in (step, again)
    ]
    assert of_groups[0] == of_groups[1]
    assert {"cp [0, 1]", "ep [0, 1, 2, 3]", "dp [4, 5, 6, 7]", "pp [0, 4]"} <= set(
        of_groups[0]
    )


def test_all_ranks_up_to_64_then_one_per_stage():
    small = mm.simulate(TINY, NODE, mm.Plan(dp=2, tp=2, pp=2), global_batch=4)
    assert small.ranks == list(range(8)) and small.meta.represents[5] == [5]
    large = mm.simulate(
        TINY, mm.cluster("dgx-a100", nodes=16), mm.Plan(dp=64, pp=2), global_batch=64
    )
    assert large.ranks == [0, 64] and large.meta.represents[64] == list(range(64, 128))
    assert len(small.edges) and small.edges[
        ["source", "target"]
    ].to_numpy().max() < len(small)


def test_dlrm_step_has_its_exchanges_and_hides_bottom_layers():
    timeline = mm.simulate(mm.model("dlrm-a"), mm.cluster("zionex"), mm.Plan(dp=128, micro_batch=512),
                           global_batch=65536, dtype="tf32")  # fmt: skip
    spans = timeline.spans
    assert spans["name"].astype(str).str.startswith("all_to_all").sum() == 2
    exchange = spans[spans["name"] == "all_to_all embedding forward"].iloc[0]
    bottom, top = (
        spans[spans["name"] == f"{name} forward"].iloc[0]["start_ns"]
        for name in ("bottom 9", "top 0")
    )
    assert (
        exchange["start_ns"]
        <= bottom
        < exchange["start_ns"] + exchange["dur_ns"]
        <= top
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"plan": mm.Plan(pp=2, dp=4, interleave=2, schedule="gpipe")},
            "interleave=2 needs schedule='1f1b'",
        ),
        (
            {"plan": mm.Plan(pp=2, dp=4, first_layers=4)},
            "do not leave 4 layers for pp x interleave = 2 x 1",
        ),
        (
            {"model": replace(TINY, sequence=0)},
            "has no sequence of its own; give sequence=",
        ),
        ({"plan": ["dp8"]}, "must be a Plan or its text, such as dp2.tp2.z3"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(change, message):
    arguments = {
        "model": TINY,
        "cluster": NODE,
        "plan": mm.Plan(dp=8),
        "global_batch": 8,
    } | change
    with pytest.raises(ValueError, match=message):
        mm.simulate(**arguments)
