"""The host: it is the device on a CPU, and on a GPU stops where it must wait for the
device.
"""

from dataclasses import replace

import pytest

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.catalog.models import Cluster, Device, Link, Transformer
from madmax_lib.simulator.rates.parameters import Parameters, shipped

CPU = Device("core", 64e9, 2e10, {"fp32": 1e11, "bf16": 1e11}, family="cpu")
GPT = Transformer("gpt", 6, 512, 8, 2048, sequence=128, vocab=512)


def plan_of(plan):
    return mm.Plan.parse(plan) if isinstance(plan, str) else plan


def asked(plan, network=1e8, batch=4, model=GPT, **options):
    """Arguments of a step of processes, and its options."""
    ranks = plan_of(plan).world_size
    links = Link("near", 5e9), Link("far", network)
    processes = Cluster("processes", CPU, 1, ranks, *links)
    return (model, processes, plan), {"global_batch": batch, "dtype": "fp32"} | options


def estimated(plan, *arguments, **options):
    arguments, options = asked(plan, *arguments, **options)
    return mm.estimate(*arguments, **options).iloc[0]


def ran(plan, *arguments, **options):
    """The step laid out, and as estimated."""
    of, how = asked(plan, *arguments, **options)
    return mm.simulate(*of, **how), estimated(plan, *arguments, **options)


def ends_s(spans):
    return (spans["start_ns"] + spans["dur_ns"]) / 1e9


@pytest.mark.parametrize("software", [None, "fsdp2"])
def test_a_process_on_a_cpu_runs_its_kernels_one_after_another(software):
    timeline, row = ran("dp1", software=software)
    spans = timeline.spans.sort_values("start_ns")
    ends = spans["start_ns"] + spans["dur_ns"]
    assert spans["start_ns"].tolist()[1:] == ends.tolist()[:-1]
    # the workbench trains on processes where nobody is named
    kind = catalog.software(software or "workbench")
    each_s = shipped().constants[f"launch_s:{kind.kernels}"]
    launched_s = 4 * 3 * GPT.layers * kind.forward_kernels * each_s
    launches = spans[spans["name"].astype(str).str.startswith("launch")]
    assert launches["dur_ns"].sum() / 1e9 == pytest.approx(launched_s, rel=1e-3)
    expected = [spans["dur_ns"].sum() / 1e9, launched_s]
    assert row[["step_s", "launch_s"]].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "plan", ["dp4.z3.hs2", "dp4.z2.overlap-gather", "dp2.tp2.nosp"]
)
def test_neither_gathers_nor_copies_of_shards_run_beside_a_blocked_host(plan):
    """HSDP's copies, weights gathered for the next pass, and gradients where DDP cannot
    go.
    """
    timeline, row = ran(plan, software="workbench")
    assert (mm.breakdown(timeline)["overlap"] < 5e-3).all()
    assert row["step_s"] == pytest.approx(ends_s(timeline.spans).max(), rel=0.03)


@pytest.mark.parametrize(
    ("plan", "calls"),
    [("dp2", 0), ("dp2.z3", 2), ("dp2.z2", 2), ("cp2.ulysses", 2), ("tp2", 4)],
)
def test_calls_that_block_a_process_take_its_time(plan, calls):
    """So many per layer forward and twice as many backward, in units of those of tp;
    buckets of DDP cost nothing.
    """
    parameters = Parameters(constants={"comm_launch_s:eager": 1e-3})
    row = estimated(plan, software="workbench", parameters=parameters)
    passes = 3 * mm.Plan.parse(plan).micro_batches(4)
    assert row["launch_s"] == pytest.approx(calls * passes * GPT.layers * 1e-3)


@pytest.mark.parametrize("plan", ["tp2", "tp2.nosp"])
def test_tensor_parallel_mixtures_of_this_project_sum_rows(plan):
    """Beside the collectives of attention: forward and backward the rows of experts,
    and what sequences gather.
    """
    mixture = replace(GPT, name="mixture", layers=2, experts=4, active_experts=2)
    step, row = ran(plan, model=mixture, software="workbench")
    spans = step.spans.query("rank == 0 and kind == 'comm'")
    names = spans["name"].astype(str)
    sums = spans.loc[names.str.startswith("all_reduce "), "size_bytes"]
    # layers, ways, samples
    assert (sums == GPT.sequence * 2 * GPT.hidden * 4).sum() == 2 * 2 * 4
    logits = spans.loc[names == "all_gather head forward", "size_bytes"]
    assert (logits == GPT.sequence * GPT.vocab * 4).sum() >= 4
    assert row["step_s"] == pytest.approx(ends_s(step.spans).max(), rel=0.05)


PLANS = ["tp2", "tp4.nosp", "dp2.z3", "dp4.z2", "dp2.one-bucket", "dp2.z3.mb2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cpu_async", [(), ("ddp", "fsdp")])
def test_collectives_that_block_the_host_hide_nothing(plan, cpu_async):
    own = replace(catalog.software("none"), name="own", cpu_async=cpu_async)
    overlap = mm.breakdown(ran(plan, software=own)[0])["overlap"]
    if not cpu_async:
        assert (overlap < 1e-9).all()
    else:
        assert (overlap > 0.1).all() == ("z3" in plan)


@pytest.mark.parametrize("network", [1e7, 1e8, 1e10])
def test_buckets_of_ddp_run_beside_the_backward_pass(network):
    """One per layer, without latency: each begins when it is full and the one before is
    reduced.
    """
    parameters = Parameters(constants={"launch_s:fused": 1e-5})
    plan = mm.Plan(dp=2, bucket_bytes=4.0 * GPT.hidden**2)
    timeline, row = ran(plan, network, 2, parameters=parameters)
    spans = timeline.spans[timeline.spans["rank"] == 0]
    ends = ends_s(spans)
    reduced = spans[spans["kind"] == "comm"].sort_values("start_ns")
    full_s = ends.groupby(spans["name"].astype(str)).max()
    layers = [f"attention {layer}" for layer in reversed(range(GPT.layers))]
    done_s = 0.0
    for unit, size in zip([*layers, "embedding"], reduced["size_bytes"], strict=True):
        # 2 (p - 1) / p of the bytes
        done_s = max(done_s, full_s[f"{unit} backward"]) + size / network
    assert ends[reduced.index[-1]] == pytest.approx(done_s, rel=1e-6)
    assert ends.max() == pytest.approx(row["step_s"], rel=0.03)


STOPS, FREE = (
    replace(catalog.software("megatron-core"), name="own", counts_on_host=on)
    for on in (True, False)
)
QWEN = mm.model("qwen3-30b-a3b")
LAYERS = 8 * QWEN.layers
STOP_S = 3 * shipped().constants["launch_s:fused"]


def launches(call, software, launch_s):
    constants = shipped().constants | {"moe_launch_s:early": launch_s}
    run = {"global_batch": 64, "sequence": 1024, "software": software}
    run["parameters"] = replace(shipped(), constants=constants)
    return call(QWEN, mm.cluster("dgx-h100"), "dp8.ep8.z1", **run)


@pytest.mark.parametrize(
    ("launch_s", "least_s"), [(1e-6, LAYERS * STOP_S), (5e-3, LAYERS * 2.5e-3)]
)
def test_launch_gaps_reappear_behind_the_counts_of_tokens(launch_s, least_s):
    """Each mixture layer waits for three launches at least, and for a host that is
    slower in all of them.
    """
    stopped_s, free_s = (
        launches(mm.estimate, software, launch_s)["launch_s"].item()
        for software in (STOPS, FREE)
    )
    assert stopped_s >= max(least_s, free_s)


def test_stops_for_the_counts_of_tokens_are_laid_out():
    """From whole ns to whole ns; a graph of kernels has none."""
    stopped, graph = (
        launches(mm.simulate, software, 5e-3).spans
        for software in (STOPS, "megatron-core-graph")
    )
    first = stopped[stopped["rank"] == 0]
    counts = first[first["name"].astype(str).str.startswith("counts layer")]
    assert len(counts) == LAYERS
    assert (counts["dur_ns"] - 1e9 * STOP_S).abs().max() <= 1
    assert not graph["name"].astype(str).str.startswith("counts").any()
