"""Offloaded steps: streams and volumes, closed forms, the engine beside the closed
form, the best share.
"""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from support import cells, refused

import madmax_lib as mm
from madmax_lib.plan.case import Case
from madmax_lib.simulator.events.engine import Stream
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.fits import gpt_shape, room_bytes, shares_that_fit
from madmax_lib.simulator.offload.placement import Policy, rates
from madmax_lib.traces.critical_path import critical_path

V100 = replace(mm.cluster("dgx-2"), devices_per_node=1)
FOUR = mm.cluster("hetero-4xv100")
A100 = mm.cluster("dgx-a100")
H100 = mm.cluster("dgx-h100")
GPT, BIG = gpt_shape(4096, 30), gpt_shape(8192, 50)
SMALL = mm.model("gpt2-large")


def step_s(timeline):
    spans = timeline.spans
    return float((spans["start_ns"] + spans["dur_ns"]).max()) * 1e-9


def asked(door, model, cluster, plan, batch, **policy):
    dtype = cluster.device.nearest("bf16")
    run = {"global_batch": batch, "dtype": dtype, "policy": Policy(**policy)}
    return door(model, cluster, mm.Plan.parse(plan), **run)


def simulated(*arguments, **policy):
    return asked(mm.simulate, *arguments, **policy)


def estimated(*arguments, **policy):
    return asked(mm.estimate, *arguments, **policy).iloc[0]


def moved(timeline, stream, words):
    spans = timeline.select(ranks=[0]).spans
    chosen = (spans["stream"] == stream) & spans["name"].astype(str).str.contains(words)
    return spans.loc[chosen, "size_bytes"].sum()


@cache
def step_of_big(plan, batch, checkpoints):
    return simulated(BIG, H100, plan, batch, share=1.0, checkpoints=checkpoints)


@pytest.mark.parametrize("batches", [1, 3])
def test_zero_offload_moves_four_bytes_per_parameter(batches):
    """2 down with every micro-batch and 2 up with the step, shared by the devices
    [arXiv 2101.06840, section 4.1].
    """
    step = simulated(GPT, FOUR, "dp4.z2.full.offload-optimizer", 4 * batches, share=1.0)
    shard = 2 * GPT.parameters / 4
    assert moved(step, Stream.UP, "gradients") == pytest.approx(batches * shard)
    assert moved(step, Stream.DOWN, "weights") == pytest.approx(shard)
    assert not (step.spans["stream"] == Stream.DRIVES).any()


@pytest.mark.parametrize(
    ("plan", "stream", "words", "shards"),
    cells("""
    dp8.z3.full.offload-all | DOWN | weights | 4
    dp8.z3.full.offload-all | UP | gradients | 2
    dp8.full.offload-chunks | DOWN | weights | 4
    dp8.full.offload-chunks | UP | gradients | 2
    dp8.z3.full.offload-nvme | DOWN | weights | 4
    dp8.z3.full.offload-nvme | UP | gradients | 2
    dp8.z3.full.offload-nvme | DRIVES | read weights | 4
    dp8.z3.full.offload-nvme | DRIVES | write gradients | 4
    dp8.z3.full.offload-nvme | DRIVES | states | 18
    """),
)
def test_weights_come_for_every_pass(plan, stream, words, shards):
    """Twice per micro-batch, forward and backward; none return after the update, as the
    host keeps them. On drives gradients of two micro-batches are summed, and 16 + 2
    bytes read and 16 + 2 written; a shard has 2 of each parameter.
    """
    sent = moved(step_of_big(plan, 16, False), Stream[stream], words)
    assert sent == pytest.approx(shards * 2 * BIG.parameters / 8)


@pytest.mark.parametrize("stream", [Stream.UP, Stream.DOWN])
def test_checkpoints_go_and_return(stream):
    step = step_of_big("dp8.z3.full.mb2.offload-all", 32, True)
    # micro-batches, samples, tokens, width, layers, bytes
    assert moved(step, stream, "checkpoint") == 2 * 2 * 1024 * 8192 * 50 * 2


def test_streams_are_what_a_timeline_has():
    """Copies are copies, the host is a thread: device streams do not compute while only
    the host does, or drives, of which a thread is told.
    """
    step = simulated(BIG, H100, "dp8.z3.full.offload-nvme", 8, share=1.0)
    kinds = step.spans.groupby("stream", observed=True)["kind"].agg(set)
    assert kinds[Stream.DOWN] == kinds[Stream.UP] == {"memcpy"}
    assert kinds[Stream.HOST] == kinds[Stream.DRIVES] == {"cpu"}
    assert step.meta.provenance["offloaded"] == {"states": 1.0, "weights": 1.0}
    assert mm.breakdown(step)["compute_s"].iloc[0] < 0.2 * step_s(step)
    path = critical_path(step)
    assert path["dur_s"].sum() == pytest.approx(step_s(step))
    assert path.groupby("kind")["dur_s"].sum()["host"] > 0.9 * step_s(step)


@pytest.mark.parametrize(
    "plan", ["dp8.full.offload-chunks", "dp8.z3.full.offload-nvme"]
)
def test_exported_steps_come_back(plan, tmp_path):
    step = simulated(gpt_shape(4096, 6), H100, plan, 8, share=1.0)
    again = mm.read_trace(mm.export_trace(step, tmp_path))
    parts = ("total", "compute", "comm", "memory", "exposed_comm", "idle")
    columns = [f"{part}_s" for part in parts]
    mine, theirs = (mm.breakdown(one)[columns] for one in (step, again))
    pd.testing.assert_frame_equal(mine, theirs, rtol=1e-9)
    host = again.spans.query(f"stream == {Stream.HOST.value} and kind == 'cpu'")
    assert host["name"].astype(str).str.contains("cpu adam").any()


def test_update_takes_the_hosts_memory_bandwidth():
    """One tile after another: 28 bytes per parameter, at the rate that the four devices
    of a node share.
    """
    step = simulated(GPT, FOUR, "dp4.z2.full.offload-optimizer", 4, share=1.0)
    spans = step.select(ranks=[0]).spans
    adam_s = spans.loc[spans["name"] == "cpu adam", "dur_ns"].sum() * 1e-9
    shared_s = 28 * GPT.parameters / 4 / rates(FOUR).adam
    assert adam_s == pytest.approx(shared_s, rel=1e-6)
    one = replace(FOUR, devices_per_node=1)
    assert rates(FOUR).adam_s(1e9) == pytest.approx(4 * rates(one).adam_s(1e9))


SLOW = replace(FOUR, host=replace(FOUR.host, memory_bandwidth_bytes_per_s=20e9))


@pytest.mark.parametrize(
    ("cluster", "rate"), [(mm.cluster("dgx-2"), 3e9), (V100, 12e9), (SLOW, 5e9)]
)
def test_links_to_the_host_are_shared(cluster, rate):
    """16 GPUs of a DGX-2 have 3 GB/s each when all copy [arXiv 2104.07857, from memory],
    one alone 12.
    """
    assert rates(cluster).link == pytest.approx(rate)


SHAPES = {"one": V100, "four": FOUR, "h100": H100, "a100": A100}
CASES = cells("""
    (4096, 50) | one | z2.full.mb4.offload-optimizer | 16 | {}
    (4096, 50) | one | z2.full.mb8.offload-optimizer | 32 | {"delayed": True}
    (8192, 30) | one | z3.full.mb8.offload-all | 16 | {}
    (4096, 40) | four | dp4.z2.full.mb4.offload-optimizer | 64 | {}
    (4096, 50) | four | dp4.full.mb4.offload-chunks | 16 | {}
    (4096, 50) | four | dp4.full.mb4.offload-chunks | 64 | {"share": 1.0}
    (8192, 50) | h100 | dp8.full.mb8.offload-chunks | 128 | {}
    (8192, 50) | h100 | dp8.z3.full.mb8.offload-all | 128 | {"checkpoints": True}
    (8192, 50) | h100 | dp8.z3.full.mb8.offload-nvme | 128 | {}
    (8192, 50) | h100 | dp8.z3.full.mb8.offload-nvme | 128 | {"share": 1.0}
    gpt2-large | a100 | dp8.z2.mb8.offload-optimizer | 64 | {}
    gpt2-large | a100 | dp8.z2.mb8.offload-optimizer | 256 | {"share": 0.5}
    llama-7b | a100 | dp8.z3.mb1.full.offload-all | 8 | {"share": 1.0}
    llama-7b | a100 | dp8.z3.mb1.full.offload-nvme | 8 | {"share": 1.0}
    llama-7b | a100 | dp4.tp2.z3.mb1.full.offload-all | 16 | {"share": 1.0}
    llama-7b | a100 | dp4.pp2.z1.mb1.full.offload-optimizer | 32 | {"share": 1.0}
    mixtral-8x7b | a100 | dp8.ep4.z3.mb1.full.offload-all | 8 | {"share": 1.0}
""")


def of_case(case):
    """Arguments of `asked` for a row of CASES, and its policy."""
    model, cluster, plan, batch, policy = case
    model = mm.model(model) if isinstance(model, str) else gpt_shape(*model)
    if "checkpoints" in policy:
        policy = policy | {"share": 1.0}
    return (model, SHAPES[cluster], plan, batch), policy


# What is in no part of the step's time.
BESIDE = "step_s low_s high_s mfu tokens_per_s offload_share memory_bytes fits"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_closed_form_agrees_with_the_engine(case):
    """Within 1 %, with drives 7 %, as their reads and writes wait for each other in the
    engine, and delayed 3 %, as the host's update waits for its sums of gradients.
    """
    asked, policy = of_case(case)
    row = estimated(*asked, **policy)
    bound = 0.07 if "nvme" in asked[2] else 0.03 if "delayed" in policy else 0.01
    engine_s = step_s(simulated(*asked, **policy))
    assert row["step_s"] == pytest.approx(engine_s, rel=bound)
    assert row.drop(BESIDE.split()).sum() == pytest.approx(row["step_s"])
    assert row["offload_s"] >= 0


@pytest.mark.parametrize("case", [CASES[3], CASES[4], CASES[6]], ids=str)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_no_other_share_is_faster(case, share):
    asked, _ = of_case(case)
    try:
        other = estimated(*asked, share=share)
    except ValueError:
        return  # does not fit
    assert estimated(*asked)["step_s"] <= other["step_s"] * (1 + 1e-9)


def test_the_best_share_fits_and_one_byte_less_does_not():
    model, plan = gpt_shape(4096, 40), "dp4.z2.full.mb4.offload-optimizer"
    case = Case(model, FOUR, mm.Plan.parse(plan), global_batch=64)
    room = room_bytes(FOUR, case.plan)
    shares = shares_that_fit(case, Policy(), room)
    assert estimated(model, FOUR, plan, 64)["offload_share"] in shares
    assert not len(shares_that_fit(case, Policy(share=float(shares[0]) - 1e-6), room))


def test_hybrid_adam_balances_device_and_host():
    """Without a link to speak of, device and host end together: share U / (U + A),
    update U A / (U + A).
    """
    link = {"link_bytes_per_s": 1e15, "uplinks": 0}
    host = replace(A100.host, memory_bandwidth_bytes_per_s=4e12, **link)
    device = replace(A100.device, memory_bandwidth_bytes_per_s=100e9)
    asked = SMALL, replace(A100, device=device, host=host)
    asked += "dp8.z2.mb8.offload-optimizer", 64
    device_s = estimated(*asked, share=0.0)["optimizer_s"]
    host_s = estimated(*asked, share=1.0)["offload_s"]
    best = estimated(*asked)
    balanced = device_s / (device_s + host_s)
    assert best["offload_share"] == pytest.approx(balanced, abs=0.01)
    update_s = best["optimizer_s"] + best["offload_s"]
    assert update_s == pytest.approx(host_s * balanced, rel=0.05)


def test_a_delayed_update_hides():
    """Of Adam and the copies that follow tile by tile only the copies are left [arXiv
    2101.06840, section 5.2].
    """
    model, plan = gpt_shape(4096, 50), "z2.full.mb8.offload-optimizer"
    plain, late = (
        estimated(model, V100, plan, 32, share=1.0, delayed=delayed)["step_s"]
        for delayed in (False, True)
    )
    copies_s = 2 * model.parameters / rates(V100).link
    hidden_s = rates(V100).adam_s(model.parameters) - copies_s * (1 - 1 / 52)
    assert plain - late == pytest.approx(hidden_s, rel=1e-3)


def test_a_delayed_update_is_faster_in_the_engine_too():
    asked = gpt_shape(4096, 50), V100, "z2.full.mb1.offload-optimizer", 1
    plain, late = (
        step_s(simulated(*asked, share=1.0, delayed=delayed))
        for delayed in (False, True)
    )
    assert late < plain


@pytest.mark.parametrize(
    "faster", ["memory_bandwidth", "link", "nvme_read", "nvme_write"]
)
@pytest.mark.parametrize(
    "plan", ["z3.full.offload-all", "z2.full.offload-optimizer", "z3.full.offload-nvme"]
)
def test_a_faster_host_never_slows_a_step(plan, faster):
    rate = f"{faster}_bytes_per_s"
    host = replace(H100.host, **{rate: 2 * getattr(H100.host, rate)})
    before, after = (
        step_s(simulated(gpt_shape(4096, 20), cluster, f"dp8.{plan}", 8, share=1.0))
        for cluster in (H100, replace(H100, host=host))
    )
    assert after <= before * (1 + 1e-9)


def test_nothing_offloaded_is_the_step_without():
    plan = "dp8.z2.mb8"
    without = mm.estimate(SMALL, A100, plan, global_batch=64).iloc[0]
    row = estimated(SMALL, A100, f"{plan}.offload-optimizer", 64, share=0.0)
    assert row["step_s"] == pytest.approx(without["step_s"], rel=1e-12)
    assert row["offload_s"] == 0 and "offload_s" not in without


def test_chunks_are_sharded_by_themselves():
    case, sharded = (
        Case(GPT, FOUR, mm.Plan(dp=4, zero=zero, offload="chunks")) for zero in (0, 3)
    )
    assert normalised(case) == normalised(sharded) == sharded


def test_tables_hold_plans_of_both_kinds():
    """dp4 does not fill the node."""
    rows = cells("""
    8 | 2 | None
    8 | 2 | optimizer
    8 | 3 | chunks
    4 | 3 | all
    """)
    table = pd.DataFrame(rows, list("abcd"), ["dp", "zero", "offload"])
    table = table.assign(micro_batch=4, recompute="full")
    times = mm.estimate(GPT, H100, table, global_batch=32)
    assert times.index[times["offload_share"].notna()].tolist() == ["b", "c"]
    assert times.index[times["step_s"].isna()].tolist() == ["d"]
    alone = estimated(GPT, H100, "dp8.z2.mb4.full.offload-optimizer", 32)
    assert times.loc["b", "step_s"] == pytest.approx(alone["step_s"], rel=1e-12)


@pytest.mark.parametrize("call", [simulated, estimated])
@pytest.mark.parametrize(
    ("plan", "rule"),
    cells("""
    dp8.offload-all | offload=all & needs zero=3 & zero=0
    dp8.z2.offload-optimizer | 25600x128 & does not fit dgx-h100 & mm.fits
    """),
)
def test_what_cannot_be_simulated(call, plan, rule):
    with refused(plan if "fit" in rule else "", rule):
        call(gpt_shape(25600, 128), H100, plan, 8)
