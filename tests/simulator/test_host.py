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
GPT = Transformer(
    "gpt", layers=6, hidden=512, heads=8, ffn=2048, sequence=128, vocab=512
)


def ran(plan, network=1e8, batch=4, **options):
    """A step of processes, laid out and as estimated."""
    processes = Cluster(
        "processes",
        CPU,
        1,
        mm.Plan.parse(plan).world_size,
        Link("near", 5e9),
        Link("far", network),
    )
    options |= {"global_batch": batch, "dtype": "fp32"}
    return mm.simulate(GPT, processes, plan, **options), mm.estimate(
        GPT, processes, plan, **options
    ).iloc[0]


@pytest.mark.parametrize("software", [None, "fsdp2"])
def test_a_process_on_a_cpu_runs_its_kernels_one_after_another(software):
    timeline, row = ran("dp1", software=software)
    spans = timeline.spans.sort_values("start_ns")
    assert (
        spans["start_ns"].to_numpy()[1:]
        == (spans["start_ns"] + spans["dur_ns"]).to_numpy()[:-1]
    ).all()
    kind = catalog.software(
        software or "workbench"
    )  # which trains on processes where nobody is named
    launched_s = (
        4
        * 3
        * GPT.layers
        * kind.forward_kernels
        * shipped().constants[f"launch_s:{kind.kernels}"]
    )
    launches = spans["name"].astype(str).str.startswith("launch")
    assert spans.loc[launches, "dur_ns"].sum() / 1e9 == pytest.approx(
        launched_s, rel=1e-3
    )
    assert row[["step_s", "launch_s"]].tolist() == pytest.approx(
        [spans["dur_ns"].sum() / 1e9, launched_s]
    )


@pytest.mark.parametrize(
    "plan", ["dp4.z3.hs2", "dp4.z2.overlap-gather", "dp2.tp2.nosp"]
)
def test_neither_gathers_nor_copies_of_shards_run_beside_a_blocked_host(plan):
    """HSDP's copies, weights gathered for the next pass, and gradients where DDP cannot
    go.
    """
    timeline, row = ran(plan, software="workbench")
    assert (mm.breakdown(timeline)["overlap"] < 5e-3).all()
    ends = timeline.spans["start_ns"] + timeline.spans["dur_ns"]
    assert row["step_s"] == pytest.approx(ends.max() / 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("plan", "calls"),
    [("dp2", 0), ("dp2.z3", 2), ("dp2.z2", 2), ("cp2.ulysses", 2), ("tp2", 4)],
)
def test_calls_that_block_a_process_take_its_time(plan, calls):
    """So many per layer forward and twice as many backward, in units of those of tp;
    buckets of DDP cost nothing.
    """
    parameters = Parameters(constants={"comm_launch_s:eager": 1e-3})
    row = ran(plan, software="workbench", parameters=parameters)[1]
    passes = 3 * mm.Plan.parse(plan).micro_batches(4)
    assert row["launch_s"] == pytest.approx(calls * passes * GPT.layers * 1e-3)


@pytest.mark.parametrize("plan", ["tp2", "tp2.nosp"])
def test_tensor_parallel_mixtures_of_this_project_sum_rows(plan):
    """Beside the collectives of attention: forward and backward the rows of experts,
    and what sequences gather.
    """
    mixture = replace(GPT, name="mixture", layers=2, experts=4, active_experts=2)
    processes = Cluster("processes", CPU, 1, 2, Link("near", 5e9), Link("far", 1e8))
    run = {"global_batch": 4, "dtype": "fp32", "software": "workbench"}
    step = mm.simulate(mixture, processes, plan, **run).spans
    spans = step[(step["rank"] == 0) & (step["kind"] == "comm")]
    rows_bytes = GPT.sequence * 2 * GPT.hidden * 4
    names = spans["name"].astype(str).str.split().str[0]
    assert (
        spans.loc[names == "all_reduce", "size_bytes"] == rows_bytes
    ).sum() == 2 * 2 * 4  # layers, ways, samples
    of_head = spans[spans["name"].astype(str) == "all_gather head forward"]
    assert (of_head["size_bytes"] == GPT.sequence * GPT.vocab * 4).sum() >= 4
    row = mm.estimate(mixture, processes, plan, **run).iloc[0]
    assert row["step_s"] == pytest.approx(
        (step["start_ns"] + step["dur_ns"]).max() / 1e9, rel=0.05
    )


@pytest.mark.parametrize(
    "plan", ["tp2", "tp4.nosp", "dp2.z3", "dp4.z2", "dp2.one-bucket", "dp2.z3.mb2"]
)
def test_collectives_that_block_the_host_hide_nothing(plan):
    assert (
        mm.breakdown(ran(plan, software=catalog.software("none"))[0])["overlap"] < 1e-9
    ).all()
    asynchronous = replace(
        catalog.software("none"), name="own", cpu_async=("ddp", "fsdp")
    )
    assert (
        mm.breakdown(ran(plan, software=asynchronous)[0])["overlap"] > 0.1
    ).all() == ("z3" in plan)


@pytest.mark.parametrize("network", [1e7, 1e8, 1e10])
def test_buckets_of_ddp_run_beside_the_backward_pass(network):
    """One per layer, without latency: each begins when it is full and the one before is
    reduced.
    """
    parameters = Parameters(constants={"launch_s:fused": 1e-5})
    timeline, row = ran(
        mm.Plan(dp=2, bucket_bytes=4.0 * GPT.hidden**2),
        network,
        2,
        parameters=parameters,
    )
    spans = timeline.spans[timeline.spans["rank"] == 0]
    ends, reduced = (
        (spans["start_ns"] + spans["dur_ns"]) / 1e9,
        spans[spans["kind"] == "comm"].sort_values("start_ns"),
    )
    full_s = ends.groupby(spans["name"].astype(str)).max()
    units, done_s = (
        [*(f"attention {layer}" for layer in reversed(range(GPT.layers))), "embedding"],
        0.0,
    )
    for unit, size_bytes in zip(units, reduced["size_bytes"], strict=True):
        done_s = (
            max(done_s, full_s[f"{unit} backward"]) + size_bytes / network
        )  # 2 (p - 1) / p of the bytes
    assert ends[reduced.index[-1]] == pytest.approx(done_s, rel=1e-6)
    assert ends.max() == pytest.approx(row["step_s"], rel=0.03)


def test_launch_gaps_reappear_behind_the_counts_of_tokens():
    """Each mixture layer waits for three launches at least, and for a host that is
    slower in all of them.
    """
    run = "qwen3-30b-a3b", mm.cluster("dgx-h100"), "dp8.ep8.z1"
    batch, layers = (
        {"global_batch": 64, "sequence": 1024},
        8 * mm.model("qwen3-30b-a3b").layers,
    )
    stop_s = 3 * shipped().constants["launch_s:fused"]
    stops, free = (
        replace(catalog.software("megatron-core"), name="own", counts_on_host=on)
        for on in (True, False)
    )
    for seconds, least_s in ((1e-6, layers * stop_s), (5e-3, layers * 2.5e-3)):
        batch["parameters"] = replace(
            shipped(), constants={**shipped().constants, "moe_launch_s:early": seconds}
        )
        waits = [
            mm.estimate(*run, **batch, software=software)["launch_s"].item()
            for software in (stops, free)
        ]
        assert waits[0] >= max(least_s, waits[1])
    stopped, graph = (
        mm.simulate(*run, **batch, software=own).spans
        for own in (stops, "megatron-core-graph")
    )
    counts = stopped[
        stopped["name"].astype(str).str.startswith("counts layer")
        & (stopped["rank"] == 0)
    ]
    assert (
        len(counts) == layers and (counts["dur_ns"] - 1e9 * stop_s).abs().max() <= 1
    )  # from whole ns to whole ns
    assert not graph["name"].astype(str).str.startswith("counts").any()
