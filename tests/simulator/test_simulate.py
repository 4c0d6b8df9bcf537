"""Closed forms, conservation laws and counts of the simulated step."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from oracles.op_table import blocks
from support import cells, core_flops, refused

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

DEVICE = Device("ideal", 1e12, 1e30, {"bf16": 1e9, "fp32": 1e9})
CLUSTER = Cluster("c", DEVICE, 8, 8, Link("in", 1e30), Link("out", 1e30))
TINY = Transformer("tiny", 4, 64, 4, 256, sequence=128, vocab=512)
NODE = mm.cluster("dgx-a100")


def step_s(model, cluster, plan, **options):
    spans = mm.simulate(model, cluster, mm.Plan.parse(plan), **options).spans
    return (spans["start_ns"] + spans["dur_ns"]).max() * 1e-9


def collectives(timeline, rank=0):
    """Count and bytes of a rank by (collective, group without its ranks)."""
    spans = timeline.select(ranks=[rank]).spans.query("kind == 'comm'")
    groups = spans["group"].astype(str).str.split().str[0].rename("group")
    names = pd.Series(collective_names(spans["name"].astype(str)), spans.index)
    return spans["size_bytes"].groupby([names, groups]).agg(["count", "sum"])


def volumes(timeline, rank=0):
    """Bytes of a rank by (collective, group)."""
    return collectives(timeline, rank)["sum"].to_dict()


def laid_out(plan, batch=None, model=TINY, nodes=1, **options):
    plan = mm.Plan.parse(plan)
    cluster = replace(NODE, nodes=nodes)
    batch = batch or 2 * plan.dp
    return mm.simulate(model, cluster, plan, global_batch=batch, **options)


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
    # 1/v GFLOP at 1 GFLOP/s
    product = gemm("product", 0.5e9 / v, 1.0, 1.0, precision("bf16"), weights=True)
    stages = [[[Block("attention", (product,))]] * v] * pp
    batch = MicroBatch(stages, Prices(Steps.of(case), Parameters()))
    _, end_s = run(StepBuilder(case, batch).build(micro_batches))
    passes = 3 * v * micro_batches if schedule == "zero-bubble" else v * micro_batches
    bubble = 1 - 3 * micro_batches / max(end_s)
    assert bubble == pytest.approx((pp - 1) / (passes + pp - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("plan", "counts"),
    cells("""
    dp8.z3 | {"all_gather": 24, "reduce_scatter": 12}
    dp8 | {"all_reduce": 1}
    dp8.z1 | {"reduce_scatter": 1, "all_gather": 1}
    dp8.z2 | {"reduce_scatter": 2, "all_gather": 1}
    dp8.z1.overlap-gather | {"reduce_scatter": 1, "all_gather": 6}
    dp4.tp2.nosp | {"all_reduce": 37}
    dp4.tp2 | {"all_gather": 36, "reduce_scatter": 36, "all_reduce": 1}
    cp8 | {"send_recv": 176, "all_reduce": 1}
    """),
)
def test_counts_of_collectives(plan, counts):
    """Two micro-batches of a model of six units (embedding, four layers, head): gathers
    2 x 2 x 6, tp reduces 2 x 2 x 9 at the ends of 9 blocks, a ring 2 x 4 x (7 + 15).
    """
    count = collectives(laid_out(plan))["count"]
    assert count.groupby(level=0).sum().to_dict() == counts


@pytest.mark.parametrize(
    ("plan", "expected"),
    cells("""
    dp16 | {"all_reduce dp": 1}
    dp16.reduce-fp32 | {"all_reduce dp": 2}
    dp16.z1 | {"reduce_scatter dp": 1, "all_gather dp": 1}
    dp16.z2 | {"reduce_scatter dp": 2, "all_gather dp": 1}
    dp16.z3 | {"reduce_scatter dp": 2, "all_gather dp": 4}
    dp16.z3.hs8 | {"reduce_scatter shard": 2, "all_gather shard": 4, "all_reduce replicate": 0.125}
    dp8.cp2.z3.ulysses | {"reduce_scatter dp": 2, "all_gather dp": 4}
    dp16.z3.qwz | {"reduce_scatter dp": 2, "all_gather dp": 2}
    dp16.z3.zpp | {"all_gather dp": 1, "all_gather node": 2, "all_to_all node": 0.5, "all_to_all across": 0.0625}
    """),
)
def test_volumes_of_data_parallelism(plan, expected):
    """In parameters of 16 bits, two micro-batches on two nodes. ZeRO++ sends a quarter
    of ZeRO-3's gathers and gradients [arXiv 2306.10209].
    """
    sent = volumes(laid_out(plan, nodes=2))
    unit = 2.0 * TINY.parameters
    data = {" ".join(key): s / unit for key, s in sent.items() if key[1] != "cp"}
    assert data == pytest.approx(expected, rel=1e-12)


MIXTURE = replace(TINY, experts=8, active_experts=2, gated=True)
OF_EXPERTS = 4 * MIXTURE.experts * MIXTURE.mlp_parameters(MIXTURE.ffn)  # parameters


DENSE = MIXTURE.parameters - OF_EXPERTS


@pytest.mark.parametrize(
    ("kind", "group", "size"),
    [
        ("all_reduce", "edp", 2 * OF_EXPERTS / 4),
        ("all_reduce", "dp", 2 * DENSE),
        # layers, there and back, passes
        ("all_to_all", "ep", 4 * 2 * 2 * 2 * 128 * 2 * 64),
    ],
)
def test_experts_are_reduced_over_their_own_group(kind, group, size):
    sent = volumes(laid_out("dp8.ep4", 8, MIXTURE))
    assert sent[kind, group] == pytest.approx(size)


# Of the experts a device holds, a quarter of all; ep alone splits them further than a
# shard of two would.
@pytest.mark.parametrize(
    ("shard", "expected"),
    cells("""
    8 | {"all_gather expert-shard": 2, "reduce_scatter expert-shard": 1, "all_reduce expert-replicate": 0.5}
    2 | {"all_reduce expert-replicate": 1}
    """),
)
def test_hsdp_shards_experts_inside_the_shard(shard, expected):
    plan = f"dp16.ep4.z3.hs{shard}"
    timeline = laid_out(plan, 16, MIXTURE, nodes=2, parameters=Parameters())
    sent = volumes(timeline)
    own = {" ".join(key): size for key, size in sent.items() if "expert-" in key[1]}
    unit = 2 * OF_EXPERTS / 4
    assert {key: size / unit for key, size in own.items()} == pytest.approx(expected)
    assert sent["all_reduce", "replicate"] == pytest.approx(2 * DENSE / shard)
    adam_s = timeline.spans.query("name == 'adam'")["dur_ns"].max() / 1e9
    moved = optimizer_bytes(owned(DENSE, OF_EXPERTS / 4, shard, 4))
    expected_s = float(moved / NODE.device.memory_bandwidth_bytes_per_s)
    assert adam_s == pytest.approx(expected_s, abs=1e-9)


@pytest.mark.parametrize(("plan", "v"), [("pp2.dp4", 1), ("pp2.dp4.v2", 2)])
def test_a_pipeline_sends_every_activation_once(plan, v):
    """Who is done waits for the next step's first message."""
    timeline = laid_out(plan, 16, parameters=Parameters())
    sent = [volumes(timeline, rank)["send_recv", "pp"] for rank in (0, 4)]
    assert sum(sent) == 2 * (2 * v - 1) * 4 * 2 * 128 * 64
    assert mm.breakdown(timeline)["total_s"].nunique() == 1


@pytest.mark.parametrize(("once", "share"), [(0.0, 1.0), (1.0, 0.75)])
def test_a_token_crosses_once_to_a_node(once, share):
    """Of two experts on two nodes 1.5 are expected on different ones."""
    cluster = replace(CLUSTER, nodes=2, inter=Link("out", 1e6))
    steps = Steps.of(Case(MIXTURE, cluster, mm.Plan(dp=16, ep=16), 16))
    steps = replace(steps, traits=replace(steps.traits, send_once=once))
    prices = Prices(steps, Parameters())
    seconds = prices.comm_s("all_to_all", 16.0, prices.groups["ep"])
    assert seconds == pytest.approx(8e-6 * share)


def test_a_short_last_micro_batch():
    """Seven samples in micro-batches of 3, 3 and 1: work and messages as with seven
    micro-batches of one.
    """
    device = replace(DEVICE, memory_bandwidth_bytes_per_s=1e30)
    cluster = replace(NODE, devices_per_node=2, device=device)
    short, ones = (
        mm.simulate(TINY, cluster, plan, global_batch=7, dtype="fp32")
        for plan in ("pp2.mb3", "pp2")
    )
    busy = [mm.breakdown(one)["compute_s"] for one in (short, ones)]
    np.testing.assert_allclose(*busy, rtol=1e-9)
    assert volumes(short) == pytest.approx(volumes(ones))
    assert volumes(short)["send_recv", "pp"] == 7 * 4 * 128 * 64


@pytest.mark.parametrize(
    ("recompute", "repeats"), [("none", 0), ("selective", "core"), ("full", 1)]
)
def test_what_recompute_repeats(recompute, repeats):
    """Seconds of recompute over forward, without the head: none, the attention core,
    everything; spans are rounded to ns.
    """
    device = replace(NODE.device, memory_bandwidth_bytes_per_s=1e30)
    one = replace(NODE, devices_per_node=1, device=device)
    run = {"global_batch": 1, "parameters": Parameters()}
    spans = mm.simulate(TINY, one, mm.Plan(recompute=recompute), **run).spans
    names = spans["name"].astype(str)
    layers = spans[names.str.match("attention|feed-forward")]
    seconds = layers.groupby(names.str.split().str[-1])["dur_ns"].sum()
    flat = blocks(TINY, mm.Plan())[0][1:-1]
    whole = sum(op.flops for block in flat for op in block.ops)
    core = sum(core_flops(block) for block in flat) / whole
    share = seconds.get("recompute", 0) / seconds["forward"]
    expected = core if repeats == "core" else repeats
    assert share == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    ("context", "low", "high"), [("ring", 0.8, 1), ("ulysses", -1e-3, 1e-3)]
)
def test_a_ring_hides_its_exchange_and_ulysses_does_not(context, low, high):
    model = replace(mm.model("gpt2-large"), layers=2)
    plan = mm.Plan(cp=4, dp=2, context=context)
    timeline = mm.simulate(model, NODE, plan, global_batch=2, sequence=65536)
    rank = timeline.select(ranks=[0])
    of_data = rank.spans["group"].astype(str).str.startswith("dp")
    assert low <= mm.breakdown(rank.where(~of_data))["overlap"].iloc[0] <= high


def test_what_is_laid_out_is_exported_and_read_back(tmp_path):
    model = replace(TINY, experts=4, active_experts=2)
    step = laid_out("pp2.cp2.dp2.ep4.z1.v2", 8, model)
    again = mm.read_trace(mm.export_trace(step, tmp_path))
    columns = ["rank", "compute_s", "comm_s"]
    mine, theirs = (mm.breakdown(one)[columns] for one in (step, again))
    np.testing.assert_allclose(mine, theirs, rtol=1e-12)
    mine, theirs = (
        timeline.spans.groupby("group", observed=True)["dur_ns"].sum().to_dict()
        for timeline in (step, again)
    )
    assert mine == theirs
    groups = {"cp [0, 1]", "ep [0, 1, 2, 3]", "dp [4, 5, 6, 7]", "pp [0, 4]"}
    assert groups <= set(mine)


def test_all_ranks_up_to_64_then_one_per_stage():
    small = laid_out("dp2.tp2.pp2", 4)
    assert small.ranks == list(range(8)) and small.meta.represents[5] == [5]
    large = laid_out("dp64.pp2", 64, nodes=16)
    assert large.ranks == [0, 64] and large.meta.represents[64] == list(range(64, 128))
    edges = small.edges[["source", "target"]].to_numpy()
    assert len(edges) and edges.max() < len(small)


def test_dlrm_step_has_its_exchanges_and_hides_bottom_layers():
    plan, run = "dp128.mb512", {"global_batch": 65536, "dtype": "tf32"}
    spans = mm.simulate("dlrm-a", "zionex", plan, **run).spans
    names = spans["name"].astype(str)
    assert names.str.startswith("all_to_all").sum() == 2

    def first(name):
        return spans[names == f"{name} forward"].iloc[0]

    exchange = first("all_to_all embedding")
    begin, end = exchange["start_ns"], exchange["start_ns"] + exchange["dur_ns"]
    assert begin <= first("bottom 9")["start_ns"] < end <= first("top 0")["start_ns"]


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("pp2.dp4.v2.gpipe", "interleave=2 & schedule='1f1b'"),
        ("pp2.dp4.first4", "4 layers & pp x interleave = 2 x 1"),
        (["dp8"], "a Plan or its text, such as dp2.tp2.z3"),
    ],
    ids=str,
)
def test_what_cannot_be_laid_out_is_refused(plan, rule):
    with refused(rule):
        mm.simulate(TINY, NODE, plan, global_batch=8)


def test_a_model_without_a_sequence_is_refused():
    with refused("no sequence of its own & sequence="):
        laid_out("dp8", 8, replace(TINY, sequence=0))


@pytest.mark.skipif(pd.__version__ >= "3", reason="pandas 3 always copies on write")
def test_frames_are_not_written_to_through_what_they_show():
    """As in pandas 3: groups of cp have names of their own, which once were written."""
    with pd.option_context("mode.copy_on_write", True):
        step = mm.simulate("gpt2", "dgx-a100", "dp2.tp2.cp2", global_batch=4)
    assert step.spans["group"].notna().any()
