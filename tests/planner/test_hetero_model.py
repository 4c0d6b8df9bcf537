"""Plans for a model: prices from the simulator, JSON for a launcher, the step as a timeline, tables and pictures."""

import json
from dataclasses import replace

import numpy as np
import pytest

import madmax_lib as mm
from madmax_lib.papers.metis.generate import generate_profiles
from madmax_lib.planner import hetero
from madmax_lib.planner.hetero.costs import cost_terms, memory_table
from madmax_lib.planner.hetero.export import as_json, plan_text, save_plan, timeline
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.stage_plan import DEFECTS, HeteroPlan
from madmax_lib.planner.hetero.study import alone, defect_table
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots.hetero import plot_alone, plot_stage_memory, plot_stages

V100 = Node("10.0.0.1", "V100", 4, 16, 50, 10)
A100 = Node("10.0.0.4", "A100", 4, 80, 46, 10)
GPT2 = mm.model("gpt2")
KAGGLE = mm.cluster("kaggle-2xt4", nodes=2)


@pytest.fixture(scope="module")
def mixed():
    """A best plan over two types, with layers in between."""
    return hetero.plan(profiles=generate_profiles(6, 8), cluster=[V100, A100], global_batch=16, groups=[2, 4, 8],
                       progress=False)  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_plan_without_pipeline_costs_what_estimate_says(recompute):
    """One stage, one replica: micro-batches x (layers and head), and the optimizer."""
    cluster = mm.cluster("dgx-a100")
    model = mm.model("llama-7b")
    given = hetero.problem(model=model, cluster=cluster, global_batch=8)
    plan = HeteroPlan((cluster.device.name,), (8,), ((1, 8),), 4, (0, model.layers + 2), (recompute,))
    terms = cost_terms(plan, given.prices, given.fleets[0], given.rules)
    same = mm.Plan(tp=8, micro_batch=2, recompute=recompute)
    row = mm.estimate(model, cluster, same, global_batch=8).iloc[0]
    assert sum(terms.values()) / 1e3 == pytest.approx(row["step_s"] - row["overhead_s"], rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_that_of_the_memory_model(recompute):
    """Two stages of six layers: the fullest GPU of each as `memory` has it, activations in flight included."""
    given = hetero.problem(model=GPT2, cluster=KAGGLE, global_batch=16)
    plan = HeteroPlan((KAGGLE.device.name,), (2, 2), ((2, 1), (2, 1)), 4, (0, 7, 14), (recompute,) * 2)
    held = memory_table(plan, given.prices, given.fleets[0], given.rules)["used_mb"] * 2**20
    table = memory(GPT2, mm.Plan(dp=2, pp=2, micro_batch=2, recompute=recompute), stack="megatron", global_batch=16)
    peaks = [peak_bytes(table[table["stage"] == stage].assign(stage=0)) for stage in (0, 1)]
    assert held.tolist() == pytest.approx(peaks, rel=1e-6)


def test_constants_rate_the_links_too():
    """Parameters given are those of sends and all-reduces between the nodes, not of the layers alone."""
    rates = [hetero.problem(model=GPT2, cluster=KAGGLE, global_batch=8, parameters=Parameters(network_efficiency=share)
                            ).nodes[0].inter_gb_per_s for share in (1.0, 0.5)]  # fmt: skip
    assert rates[1] == pytest.approx(rates[0] / 2)


def test_recompute_is_chosen_where_memory_asks_for_it():
    tight = replace(KAGGLE, device=replace(KAGGLE.device, name="small", memory_bytes=2.8 * 2**30))
    given = {"cluster": tight, "model": GPT2, "global_batch": 8, "progress": False, "groups": [2, 4]}
    free, short = hetero.plan(**given | {"memory_factor": 0}), hetero.plan(**given)
    assert set(free.stages["recompute"]) == {"none"} and "full" in set(short.stages["recompute"])
    assert short.cost_ms > free.cost_ms
    with pytest.raises(ValueError, match="no feasible plan"):
        hetero.plan(**given, recompute=("none",))


@pytest.mark.parametrize("name", ["dlrm-a", "mixtral-8x7b", "vit-large"])
def test_models_without_prices(name):
    with pytest.raises(ValueError, match="prices dense language models only"):
        hetero.plan(model=mm.model(name), cluster=KAGGLE, global_batch=8, progress=False)


def test_gpu_types_of_a_host_file_come_from_the_catalog():
    found = hetero.plan(model=GPT2, cluster=[V100, A100], global_batch=8, groups=[4, 8], progress=False)
    assert set(found.plan.node_sequence) == {"V100", "A100"} and found.stages["tp"].max() <= 4
    with pytest.raises(ValueError, match="X1"):
        hetero.plan(model=GPT2, cluster=[replace(V100, device="X1")], global_batch=8, progress=False)


def test_a_homogeneous_plan_can_be_simulated():
    found = hetero.plan(model=GPT2, cluster=KAGGLE, global_batch=8, groups=[2, 4], progress=False)
    exported = as_json(found)
    plan = mm.Plan.parse(exported["plan"])
    step = mm.simulate(GPT2, KAGGLE, plan, global_batch=exported["global_batch"])
    assert step.meta.world_size == exported["world_size"] == 4
    assert plan.micro_batches(8) == exported["micro_batches"]


@pytest.mark.parametrize("groups, strategies, partition, text", [
    ((2, 2), ((2, 1), (2, 1)), (0, 7, 14), "dp2.pp2"),
    ((2, 2), ((1, 2), (1, 2)), (0, 7, 14), "tp2"),
    ((4,), ((4, 1),), (0, 14), "dp4"),
    ((2, 2), ((2, 1), (1, 2)), (0, 7, 14), None),
])  # fmt: skip
def test_text_of_a_plan(groups, strategies, partition, text):
    given = hetero.problem(model=GPT2, cluster=KAGGLE, global_batch=4)
    plan = HeteroPlan((KAGGLE.device.name,), groups, strategies, 1, partition)
    found = hetero.planned_of(plan, given)
    assert plan_text(found) is None if text is None else text in plan_text(found)
    if text:
        mm.simulate(GPT2, KAGGLE, mm.Plan.parse(plan_text(found)), global_batch=4)


def test_json_names_every_rank_once(mixed, tmp_path):
    found = json.loads(save_plan(mixed, tmp_path / "plan.json").read_text())
    ranks = [rank for stage in found["stages"] for rank in stage["ranks"]]
    assert ranks == list(range(8)) and found["world_size"] == 8
    assert [layer for stage in found["stages"] for layer in range(*stage["layers"])] == list(range(6))
    for stage in found["stages"]:
        assert stage["dp"] * stage["tp"] == len(stage["ranks"]) == len(stage["types"])
        assert sum(stage["samples"]) * found["micro_batches"] == found["global_batch"] == 16
        assert mm.Plan.parse(stage["plan"]).world_size == len(stage["ranks"])
    assert hetero.cost_of(mixed.plan.as_dict(), mixed.problem) == found["cost_ms"]


def test_timeline_does_the_work_of_the_plan(mixed):
    step = timeline(mixed)
    table = mm.breakdown(step).set_index("rank")
    for row in mixed.stages.itertuples():
        spans = step.spans[(step.spans["rank"] == row.first_rank) & step.spans["name"].str.contains("ward \\d")]
        assert spans["dur_ns"].sum() / 1e6 == pytest.approx(mixed.plan.batches * row.stage_ms, rel=1e-6)
        assert step.meta.represents[row.first_rank] == list(range(row.first_rank, row.first_rank + row.gpus))
    assert len(table) == len(mixed.stages) and step.meta.world_size == 8
    length_ms = (step.spans["start_ns"] + step.spans["dur_ns"]).max() / 1e6
    assert mixed.terms["execution_ms"] * 0.999 < length_ms < mixed.cost_ms * 1.1


def test_timeline_of_one_stage_lasts_as_long_as_it_costs():
    given = hetero.problem(profiles=generate_profiles(6, 8), cluster=[A100], global_batch=8)
    found = hetero.planned_of(HeteroPlan(("A100",), (4,), ((4, 1),), 2, (0, 6)), given)
    spans = timeline(found).spans
    assert (spans["start_ns"] + spans["dur_ns"]).max() / 1e6 == pytest.approx(found.cost_ms, rel=1e-6)


def test_each_defect_changes_the_cost_it_is_about():
    profiles = generate_profiles(10)
    given = hetero.problem(profiles=profiles, cluster=[V100] * 4 + [A100] * 4, global_batch=128)
    whole = HeteroPlan(("A100", "V100"), (32,), ((1, 32),), 1, (0, 10))
    halves = {"node_sequence": ("A100", "V100"), "device_groups": (16, 16), "strategies": ((16, 1), (16, 1)),
              "batches": 1, "layer_partition": (0, 7, 10), "num_stage_used_for_cost": 1}  # fmt: skip
    one, two = (defect_table(plan, given, profiles).set_index("defect") for plan in (whole, halves))
    assert list(one.index) == ["none", *DEFECTS]
    assert one.loc["E4", "cost_ms"] < one.loc["none", "cost_ms"] / 2  # V100s at the speed of A100s
    assert two.loc["E1", "cost_ms"] < two.loc["none", "cost_ms"]
    assert two.loc["E5", "cost_ms"] < two.loc["none", "cost_ms"] < np.inf
    assert one.loc["E7", "cost_ms"] < one.loc["E7", "highest_ms"]
    assert one.loc["E2", "cost_ms"] == one.loc["E3", "cost_ms"] == one.loc["none", "cost_ms"]
    short = {**halves, "layer_partition": (0, 7, 9)}
    empty = {**halves, "layer_partition": (0, 10, 10)}
    lost, hollow = (defect_table(plan, given, profiles).set_index("defect")["cost_ms"] for plan in (short, empty))
    assert lost["E2"] < lost["none"] == pytest.approx(two.loc["none", "cost_ms"])
    assert hollow["E3"] != hollow["none"]
    assert not one["fits"]["none"] and one["fits"]["E6"]


def test_each_type_alone(mixed):
    table = alone(mixed)
    assert table["types"].tolist() == ["A100", "V100", "A100+V100"] and table["gpus"].tolist() == [4, 4, 8]
    assert table["cost_ms"].iloc[-1] == mixed.cost_ms
    tight = [replace(V100, memory_gb=2), A100]
    given = hetero.problem(profiles=generate_profiles(6, 8), cluster=tight, global_batch=8, memory_factor=0)
    best = hetero.plan_of(given, groups=[4, 8], progress=False)
    table = alone(replace(best, problem=replace(given, rules=replace(given.rules, memory_factor=1.0))))
    assert np.isinf(table["cost_ms"].iloc[1]) and table["reason"].iloc[1].startswith("no feasible plan")
    assert "no feasible plan" in [text.get_text() for text in plot_alone(table).texts]


def test_pictures_show_the_plan(mixed):
    ax = plot_stages(mixed)
    assert len(figure_data(ax)) == len(mixed.stages) and f"{mixed.cost_ms:,.0f} ms" in ax.get_title()
    assert len(plot_stage_memory(mixed).texts) == len(mixed.memory)
    assert "All types together" in plot_alone(alone(mixed)).get_title()
