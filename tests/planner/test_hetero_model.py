"""Plans for a model: prices from the simulator, JSON for a launcher, the step as a
timeline, tables.
"""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import madmax_lib as mm
from madmax_lib.catalog.models import Cluster, Device, Link
from madmax_lib.papers.metis import generate_profiles
from madmax_lib.planner import hetero
from madmax_lib.planner.hetero import HeteroPlan, Node
from madmax_lib.simulator import Parameters, memory, peak_bytes

V100 = Node.of_file("10.0.0.1", "V100", 4, 16, 50, 10)
A100 = Node.of_file("10.0.0.4", "A100", 4, 80, 46, 10)
GPT2 = mm.model("gpt2")
KAGGLE = mm.cluster("kaggle-2xt4", nodes=2)
PROFILES = generate_profiles(6, 8)


@pytest.fixture(scope="module")
def mixed():
    """A best plan over two types, with layers in between."""
    return hetero.plan(
        profiles=PROFILES,
        cluster=[V100, A100],
        global_batch=16,
        groups=[2, 4, 8],
        progress=False,
    )


def on_kaggle(groups, strategies, cuts, *, batches=1, recompute="none", **problem):
    """A plan of one's own for GPT-2 on two nodes of two T4."""
    given = hetero.problem(model=GPT2, cluster=KAGGLE, **problem)
    device = (KAGGLE.device.name,)
    return hetero.Planned.of(
        HeteroPlan(
            device, groups, strategies, batches, cuts, (recompute,) * len(groups)
        ),
        given,
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_plan_without_pipeline_costs_what_estimate_says(recompute):
    """One stage, one replica: micro-batches x layers and ends, and the optimizer, of
    weights that tp all splits.
    """
    cluster, model = mm.cluster("dgx-a100"), mm.model("llama-7b")
    given = hetero.problem(model=model, cluster=cluster, global_batch=8)
    plan = HeteroPlan(
        (cluster.device.name,), (8,), ((1, 8),), 4, (0, model.layers + 2), (recompute,)
    )
    same = mm.Plan(tp=8, micro_batch=2, recompute=recompute)
    row = mm.estimate(model, cluster, same, global_batch=8).iloc[0]
    terms_ms = hetero.Planned.of(plan, given).terms
    assert sum(terms_ms.values()) / 1e3 == pytest.approx(
        row["step_s"] - row["overhead_s"], rel=1e-4
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_that_of_the_memory_model(recompute):
    """Two stages of six layers: the fullest GPU of each as `memory` has it, activations
    in flight included.
    """
    halves = ((2, 2), ((2, 1), (2, 1)), (0, 7, 14))
    planned = on_kaggle(*halves, batches=4, recompute=recompute, global_batch=16)
    plan = mm.Plan(dp=2, pp=2, micro_batch=2, recompute=recompute)
    table = memory(GPT2, plan, software="megatron-core", global_batch=16)
    peaks = [
        peak_bytes(table[table["stage"] == stage].assign(stage=0)) for stage in (0, 1)
    ]
    assert (planned.memory["used_mb"] * 2**20).tolist() == pytest.approx(
        peaks, rel=1e-6
    )


def test_constants_rate_the_links_too():
    """Parameters given are those of sends and all-reduces between the nodes, not of the
    layers alone.
    """
    fast, slow = (
        hetero.problem(
            model=GPT2,
            cluster=KAGGLE,
            global_batch=8,
            parameters=Parameters(network_efficiency=share),
        )
        for share in (1.0, 0.5)
    )
    assert slow.nodes[0].inter_bytes_per_s == pytest.approx(
        fast.nodes[0].inter_bytes_per_s / 2
    )


def test_recompute_is_chosen_where_memory_asks_for_it():
    tight = replace(
        KAGGLE, device=replace(KAGGLE.device, name="small", memory_bytes=2.7 * 2**30)
    )
    given = {
        "cluster": tight,
        "model": GPT2,
        "global_batch": 8,
        "progress": False,
        "groups": [2, 4],
    }
    free, short = hetero.plan(**given, memory_factor=0), hetero.plan(**given)
    assert set(free.stages["recompute"]) == {"none"} and "full" in set(
        short.stages["recompute"]
    )
    assert short.cost_ms > free.cost_ms
    with pytest.raises(ValueError, match="no feasible plan"):
        hetero.plan(**given, recompute=("none",))


@pytest.mark.parametrize("name", ["dlrm-a", "mixtral-8x7b", "vit-large"])
def test_models_without_prices(name):
    with pytest.raises(ValueError, match="prices dense language models only"):
        hetero.plan(
            model=mm.model(name), cluster=KAGGLE, global_batch=8, progress=False
        )


def test_a_model_needs_clusters():
    with pytest.raises(ValueError, match="model goes with clusters"):
        hetero.plan(model=GPT2, cluster=[V100, A100], global_batch=8, progress=False)


def test_json_names_every_rank_once(mixed, tmp_path):
    exported = json.loads(hetero.save_plan(mixed, tmp_path / "plan.json").read_text())
    ranks = [rank for stage in exported["stages"] for rank in stage["ranks"]]
    assert ranks == list(range(8)) and exported["world_size"] == 8
    assert [
        layer for stage in exported["stages"] for layer in range(*stage["layers"])
    ] == list(range(6))
    for stage in exported["stages"]:
        assert stage["dp"] * stage["tp"] == len(stage["ranks"]) == len(stage["types"])
        assert (
            sum(stage["samples"]) * exported["micro_batches"]
            == exported["global_batch"]
            == 16
        )
    assert hetero.cost(asdict(mixed.plan), mixed.problem) == exported["cost_ms"]


def test_timeline_does_the_work_of_the_plan(mixed):
    step = hetero.timeline(mixed)
    spans = step.spans
    for row in mixed.stages.itertuples():
        passes = spans[
            (spans["rank"] == row.first_rank) & spans["name"].str.contains("ward \\d")
        ]
        is_last = row.stage == len(mixed.stages) - 1
        assert passes["dur_ns"].sum() / 1e6 == pytest.approx(
            mixed.plan.batches * row.stage_ms + is_last * mixed.terms["sync_ms"],
            rel=1e-6,
        )
        assert step.meta.represents[row.first_rank] == list(
            range(row.first_rank, row.first_rank + row.gpus)
        )
    assert len(mm.breakdown(step)) == len(mixed.stages) and step.meta.world_size == 8
    length_ms = (spans["start_ns"] + spans["dur_ns"]).max() / 1e6
    assert mixed.terms["execution_ms"] * 0.999 < length_ms < mixed.cost_ms * 1.1


def test_timeline_of_a_pipeline_reduces_a_shared_table():
    planned = on_kaggle((2, 2), ((2, 1), (1, 2)), (0, 7, 14), batches=4, global_batch=8)
    spans = hetero.timeline(planned).spans
    reduced = spans[spans["name"] == "all_reduce shared table"]
    assert reduced["rank"].tolist() == [0, 2]
    assert reduced["dur_ns"].to_numpy() / 1e6 == pytest.approx(
        planned.terms["tied_ms"], rel=1e-6
    )
    length_ms = (spans["start_ns"] + spans["dur_ns"]).max() / 1e6
    assert 0.8 < length_ms / planned.cost_ms <= 1 + 1e-6


def test_timeline_of_one_stage_lasts_as_long_as_it_costs():
    given = hetero.problem(profiles=PROFILES, cluster=[A100], global_batch=8)
    planned = hetero.Planned.of(
        HeteroPlan(("A100",), (4,), ((4, 1),), 2, (0, 6)), given
    )
    spans = hetero.timeline(planned).spans
    assert (spans["start_ns"] + spans["dur_ns"]).max() / 1e6 == pytest.approx(
        planned.cost_ms, rel=1e-6
    )


def test_each_type_alone(mixed):
    table = hetero.alone(mixed)
    assert table["types"].tolist() == ["A100", "V100", "A100+V100"] and table[
        "gpus"
    ].tolist() == [4, 4, 8]
    assert table["cost_ms"].iloc[-1] == mixed.cost_ms


def test_a_type_alone_may_have_no_plan():
    nodes = [replace(V100, memory_bytes=2e9), A100]
    given = hetero.problem(
        profiles=PROFILES, cluster=nodes, global_batch=8, memory_factor=1.0
    )
    both = HeteroPlan(("A100", "V100"), (4, 4), ((1, 4), (1, 4)), 1, (0, 5, 6))
    table = hetero.alone(hetero.Planned.of(both, given))
    assert np.isinf(table["cost_ms"].iloc[1]) and table["reason"].iloc[1].startswith(
        "no feasible plan"
    )


@pytest.mark.parametrize("first, slow", [(6, False), (8, False), (6, True)])
def test_processes_on_cpus_share_cores_and_wait_for_each_others_messages(first, slow):
    """A pipeline of two equal processes costs what estimate says, but for the way in
    which stages meet; with one of half the rates it costs more, and no plan is cheaper
    than proven.
    """
    core = Device("core", 64e9, 2e10, {"fp32": 1e11, "bf16": 1e11}, family="cpu")
    half = replace(core, name="half", memory_bandwidth_bytes_per_s=1e10,
                   peak_flops={name: peak / 2 for name, peak in core.peak_flops.items()})  # fmt: skip
    links = (Link("loopback", 1e10), Link("ethernet", 4e7))
    both = Cluster("both", core, 1, 2, *links)
    nodes = [
        Cluster(one.name, one, 1, 1, *links) for one in (core, half if slow else core)
    ]
    small = replace(GPT2, vocab=512, tied=False)
    run = {"model": small, "global_batch": 8, "dtype": "fp32", "sequence": 128}
    run |= {"parameters": Parameters(constants={"alone": 0.7}), "recompute": ("none",)}
    given = hetero.problem(cluster=nodes, **run)
    names = tuple(given.fleets[0].types)
    plan = HeteroPlan(names, (1, 1), ((1, 1), (1, 1)), 8, (0, first + 1, 14))
    cost_s = hetero.cost(plan, given) / 1e3
    del run["recompute"]
    equal = mm.estimate(cluster=both, plan_or_table=f"pp2.first{first}", **run).iloc[0]
    step_s = equal["step_s"] - equal["overhead_s"]
    if not slow:
        assert cost_s == pytest.approx(step_s, rel=0.06)
        return
    assert 1.5 * step_s < cost_s < 2.0 * step_s
    best = hetero.plan(given, progress=False)
    assert best.bound_ms <= best.cost_ms <= 1e3 * cost_s
