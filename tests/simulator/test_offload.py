"""Offloaded steps: streams and volumes, closed forms, the engine beside the closed
form, the best share.
"""

from dataclasses import replace

import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.plan.case import Case
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.fits import gpt_shape, room_bytes, shares_that_fit
from madmax_lib.simulator.offload.hosts import ADAM_BYTES, rates
from madmax_lib.simulator.offload.placement import Policy
from madmax_lib.traces.critical_path import critical_path

V100 = replace(mm.cluster("dgx-2"), devices_per_node=1)
FOUR, A100, H100 = (
    mm.cluster("hetero-4xv100"),
    mm.cluster("dgx-a100"),
    mm.cluster("dgx-h100"),
)
GPT, BIG = gpt_shape(4096, 30), gpt_shape(8192, 50)


def step_s(timeline):
    spans = timeline.spans
    return float((spans["start_ns"] + spans["dur_ns"]).max()) * 1e-9


def simulated(model, cluster, plan, batch, **policy):
    plan, dtype = mm.Plan.parse(plan), cluster.device.nearest("bf16")
    return mm.simulate(
        model, cluster, plan, global_batch=batch, dtype=dtype, policy=Policy(**policy)
    )


def estimated(model, cluster, plan, batch, **policy):
    plan, dtype = mm.Plan.parse(plan), cluster.device.nearest("bf16")
    return mm.estimate(
        model, cluster, plan, global_batch=batch, dtype=dtype, policy=Policy(**policy)
    ).iloc[0]


def moved(timeline, stream, words):
    spans = timeline.select(ranks=[0]).spans
    chosen = (spans["stream"] == stream) & spans["name"].astype(str).str.contains(words)
    return spans.loc[chosen, "size_bytes"].sum()


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
    "plan",
    ["dp8.z3.full.offload-all", "dp8.full.offload-chunks", "dp8.z3.full.offload-nvme"],
)
def test_weights_come_for_every_pass(plan):
    """Twice per micro-batch, forward and backward; none return after the update, as the
    host keeps them.
    """
    step = simulated(BIG, H100, plan, 16, share=1.0, checkpoints=False)
    shard = 2 * BIG.parameters / 8
    assert moved(step, Stream.DOWN, "weights") == pytest.approx(2 * 2 * shard)
    assert moved(step, Stream.UP, "gradients") == pytest.approx(2 * shard)
    if (
        "nvme" in plan
        # gradients of two micro-batches are summed there; 16 + 2 bytes read and 16 + 2
        # written
    ):
        assert moved(step, Stream.DRIVES, "read weights") == pytest.approx(
            2 * 2 * shard
        )
        assert moved(step, Stream.DRIVES, "write gradients") == pytest.approx(
            2 * 2 * shard
        )
        assert moved(step, Stream.DRIVES, "states") == pytest.approx(36 / 2 * shard)


def test_checkpoints_go_and_return():
    step = simulated(
        BIG, H100, "dp8.z3.full.mb2.offload-all", 32, share=1.0, checkpoints=True
    )
    size = (
        2 * 2 * 1024 * 8192 * 50 * 2
    )  # bytes, samples, tokens, width, layers, micro-batches
    assert (
        moved(step, Stream.UP, "checkpoint")
        == moved(step, Stream.DOWN, "checkpoint")
        == size
    )


def test_streams_are_what_a_timeline_has():
    """Copies are copies, the host is a thread: device streams do not compute while only
    the host does.
    """
    step = simulated(BIG, H100, "dp8.z3.full.offload-nvme", 8, share=1.0)
    kinds = (
        step.spans.groupby("stream", observed=True)["kind"]
        .agg(lambda kind: set(kind))
        .to_dict()
    )
    assert kinds[Stream.DOWN] == kinds[Stream.UP] == {"memcpy"}
    assert kinds[Stream.HOST] == kinds[Stream.DRIVES] == {"cpu"}
    assert step.meta.provenance["offloaded"] == {"states": 1.0, "weights": 1.0}
    assert mm.breakdown(step)["compute_s"].iloc[0] < 0.2 * step_s(step)
    path = critical_path(step)
    assert path["dur_s"].sum() == pytest.approx(step_s(step))
    assert path.groupby("kind")["dur_s"].sum()["host"] > 0.9 * step_s(
        step
    )  # drives, of which a thread is told


@pytest.mark.parametrize(
    "plan", ["dp8.full.offload-chunks", "dp8.z3.full.offload-nvme"]
)
def test_exported_steps_come_back(plan, tmp_path):
    step = simulated(gpt_shape(4096, 6), H100, plan, 8, share=1.0)
    again = mm.read_trace(mm.export_trace(step, tmp_path))
    columns = ["total_s", "compute_s", "comm_s", "memory_s", "exposed_comm_s", "idle_s"]
    pd.testing.assert_frame_equal(
        mm.breakdown(step)[columns], mm.breakdown(again)[columns], rtol=1e-9
    )
    host = again.spans[
        (again.spans["stream"] == Stream.HOST) & (again.spans["kind"] == "cpu")
    ]
    assert host["name"].astype(str).str.contains("cpu adam").any()


def test_update_takes_the_hosts_memory_bandwidth_and_links_are_shared():
    """One tile after another: 28 bytes per parameter, at the rate that the four devices
    of a node share.
    """
    step = simulated(GPT, FOUR, "dp4.z2.full.offload-optimizer", 4, share=1.0)
    spans = step.select(ranks=[0]).spans
    adam_s = spans.loc[spans["name"] == "cpu adam", "dur_ns"].sum() * 1e-9
    assert adam_s == pytest.approx(
        ADAM_BYTES * GPT.parameters / 4 / rates(FOUR).adam, rel=1e-6
    )
    assert rates(FOUR).adam_s(1e9) == pytest.approx(
        4 * rates(replace(FOUR, devices_per_node=1)).adam_s(1e9)
    )

    # 16 GPUs of a DGX-2 have 3 GB/s each when all copy [arXiv 2104.07857, from memory],
    # one alone 12
    assert rates(mm.cluster("dgx-2")).link == pytest.approx(3e9) and rates(
        V100
    ).link == pytest.approx(12e9)
    slow = replace(FOUR, host=replace(FOUR.host, memory_bandwidth_bytes_per_s=20e9))
    assert rates(slow).link == pytest.approx(5e9)


CASES = [  # model, cluster, plan, batch, policy
    (gpt_shape(4096, 50), V100, "z2.full.mb4.offload-optimizer", 16, {}),
    (gpt_shape(4096, 50), V100, "z2.full.mb8.offload-optimizer", 32, {"delayed": True}),
    (gpt_shape(8192, 30), V100, "z3.full.mb8.offload-all", 16, {}),
    (gpt_shape(4096, 40), FOUR, "dp4.z2.full.mb4.offload-optimizer", 64, {}),
    (gpt_shape(4096, 50), FOUR, "dp4.full.mb4.offload-chunks", 16, {}),
    (gpt_shape(4096, 50), FOUR, "dp4.full.mb4.offload-chunks", 64, {"share": 1.0}),
    (BIG, H100, "dp8.full.mb8.offload-chunks", 128, {}),
    (
        BIG,
        H100,
        "dp8.z3.full.mb8.offload-all",
        128,
        {"share": 1.0, "checkpoints": True},
    ),
    (BIG, H100, "dp8.z3.full.mb8.offload-nvme", 128, {}),
    (BIG, H100, "dp8.z3.full.mb8.offload-nvme", 128, {"share": 1.0}),
    (mm.model("gpt2-large"), A100, "dp8.z2.mb8.offload-optimizer", 64, {}),
    (mm.model("gpt2-large"), A100, "dp8.z2.mb8.offload-optimizer", 256, {"share": 0.5}),
    (mm.model("llama-7b"), A100, "dp8.z3.mb1.full.offload-all", 8, {"share": 1.0}),
    (mm.model("llama-7b"), A100, "dp8.z3.mb1.full.offload-nvme", 8, {"share": 1.0}),
    (mm.model("llama-7b"), A100, "dp4.tp2.z3.mb1.full.offload-all", 16, {"share": 1.0}),
    (
        mm.model("llama-7b"),
        A100,
        "dp4.pp2.z1.mb1.full.offload-optimizer",
        32,
        {"share": 1.0},
    ),
    (
        mm.model("mixtral-8x7b"),
        A100,
        "dp8.ep4.z3.mb1.full.offload-all",
        8,
        {"share": 1.0},
    ),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case[0].name} {case[2]} {case[4]}"
)
def test_the_closed_form_agrees_with_the_engine(case):
    """Within 1 %, with drives 7 %, as their reads and writes wait for each other in the
    engine, and delayed 3 %, as
    the host's update waits for its sums of gradients."""
    model, cluster, plan, batch, policy = case
    row = estimated(model, cluster, plan, batch, **policy)
    bound = 0.07 if "nvme" in plan else 0.03 if "delayed" in policy else 0.01
    assert row["step_s"] == pytest.approx(
        step_s(simulated(model, cluster, plan, batch, **policy)), rel=bound
    )
    parts = row.drop(
        [
            "step_s",
            "low_s",
            "high_s",
            "mfu",
            "tokens_per_s",
            "offload_share",
            "memory_bytes",
            "fits",
        ]
    )
    assert parts.sum() == pytest.approx(row["step_s"]) and row["offload_s"] >= 0


@pytest.mark.parametrize("case", [CASES[3], CASES[4], CASES[6]], ids=str)
def test_no_other_share_is_faster(case):
    model, cluster, plan, batch, _ = case
    best = estimated(model, cluster, plan, batch)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        try:
            other = estimated(model, cluster, plan, batch, share=share)
        except ValueError:
            continue  # does not fit
        assert best["step_s"] <= other["step_s"] * (1 + 1e-9)


def test_the_best_share_fits_and_one_byte_less_does_not():
    model, plan = (
        gpt_shape(4096, 40),
        mm.Plan.parse("dp4.z2.full.mb4.offload-optimizer"),
    )
    case, room = Case(model, FOUR, plan, global_batch=64), room_bytes(FOUR, plan)
    shares = shares_that_fit(case, Policy(), room)
    assert (
        mm.estimate(model, FOUR, plan, global_batch=64, dtype="fp16")[
            "offload_share"
        ].item()
        in shares
    )
    assert not len(shares_that_fit(case, Policy(share=float(shares[0]) - 1e-6), room))


def test_hybrid_adam_balances_device_and_host():
    """Without a link to speak of, device and host end together: share U / (U + A),
    update U A / (U + A).
    """
    host = replace(
        A100.host, memory_bandwidth_bytes_per_s=4e12, link_bytes_per_s=1e15, uplinks=0
    )
    cluster = replace(
        A100, device=replace(A100.device, memory_bandwidth_bytes_per_s=100e9), host=host
    )
    model, plan = mm.model("gpt2-large"), "dp8.z2.mb8.offload-optimizer"
    device_s = estimated(model, cluster, plan, 64, share=0.0)["optimizer_s"]
    host_s = estimated(model, cluster, plan, 64, share=1.0)["offload_s"]
    best = estimated(model, cluster, plan, 64)
    assert best["offload_share"] == pytest.approx(
        device_s / (device_s + host_s), abs=0.01
    )
    together_s = device_s * host_s / (device_s + host_s)
    assert best["optimizer_s"] + best["offload_s"] == pytest.approx(
        together_s, rel=0.05
    )


def test_a_delayed_update_hides():
    """Of Adam and the copies that follow tile by tile only the copies are left [arXiv
    2101.06840, section 5.2].
    """
    plan, batch, model = "z2.full.mb8.offload-optimizer", 32, gpt_shape(4096, 50)
    plain, late = (
        estimated(model, V100, plan, batch, share=1.0, delayed=delayed)
        for delayed in (False, True)
    )
    copies_s = 2 * model.parameters / rates(V100).link
    hidden_s = rates(V100).adam_s(model.parameters) - copies_s * (1 - 1 / 52)
    assert plain["step_s"] - late["step_s"] == pytest.approx(hidden_s, rel=1e-3)
    short = simulated(
        model, V100, "z2.full.mb1.offload-optimizer", 1, share=1.0, delayed=True
    )
    assert step_s(short) < step_s(
        simulated(model, V100, "z2.full.mb1.offload-optimizer", 1, share=1.0)
    )


@pytest.mark.parametrize(
    "faster", ["memory_bandwidth", "link", "nvme_read", "nvme_write"]
)
@pytest.mark.parametrize(
    "plan", ["z3.full.offload-all", "z2.full.offload-optimizer", "z3.full.offload-nvme"]
)
def test_a_faster_host_never_slows_a_step(plan, faster):
    rate = f"{faster}_bytes_per_s"
    host = replace(H100.host, **{rate: 2 * getattr(H100.host, rate)})
    clusters, model = (H100, replace(H100, host=host)), gpt_shape(4096, 20)
    before, after = (
        step_s(simulated(model, cluster, f"dp8.{plan}", 8, share=1.0))
        for cluster in clusters
    )
    assert after <= before * (1 + 1e-9)


def test_nothing_offloaded_is_the_step_without_and_chunks_are_sharded_by_themselves():
    plan = mm.Plan.parse("dp8.z2.mb8.offload-optimizer")
    without = mm.estimate(
        mm.model("gpt2-large"), A100, replace(plan, offload=None), global_batch=64
    ).iloc[0]
    row = estimated(mm.model("gpt2-large"), A100, str(plan), 64, share=0.0)
    assert (
        row["step_s"] == pytest.approx(without["step_s"], rel=1e-12)
        and row["offload_s"] == 0
    )
    assert "offload_s" not in without
    case, sharded = (
        Case(GPT, FOUR, mm.Plan(dp=4, zero=zero, offload="chunks")) for zero in (0, 3)
    )
    assert normalised(case) == normalised(sharded) == sharded


def test_tables_hold_plans_of_both_kinds():
    rows = {
        "a": (8, 2, None),
        "b": (8, 2, "optimizer"),
        "c": (8, 3, "chunks"),
        "d": (4, 3, "all"),
    }
    table = pd.DataFrame.from_dict(
        rows, orient="index", columns=["dp", "zero", "offload"]
    )
    times = mm.estimate(
        GPT, H100, table.assign(micro_batch=4, recompute="full"), global_batch=32
    )
    assert times.index[times["offload_share"].notna()].tolist() == ["b", "c"]
    assert times.index[times["step_s"].isna()].tolist() == [
        "d"
    ]  # dp4 does not fill the node
    alone = estimated(GPT, H100, "dp8.z2.mb4.full.offload-optimizer", 32)
    assert times.loc["b", "step_s"] == pytest.approx(alone["step_s"], rel=1e-12)


@pytest.mark.parametrize("call", [simulated, estimated])
def test_what_cannot_be_simulated(call):
    with pytest.raises(ValueError, match="offload=all needs zero=3, but zero=0"):
        call(gpt_shape(25600, 128), H100, "dp8.offload-all", 8)
    with pytest.raises(
        ValueError,
        match=(
            r"25600x128 under dp8\.z2\.offload-optimizer does not fit dgx-h100: "
            r"see mm.fi"
        ),
    ):
        call(gpt_shape(25600, 128), H100, "dp8.z2.offload-optimizer", 8)
