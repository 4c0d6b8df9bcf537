"""What beats a recipe, in how many changes, and how surely."""

import json

import numpy as np
import pytest

import madmax_lib as mm
from madmax_lib.__main__ import main
from madmax_lib.plan.plan import Plan
from madmax_lib.planner.changes import changes, in_words

CLUSTER = mm.cluster("dgx-h100", nodes=4)
RUN = {"software": "megatron-core", "progress": False}
RECIPE = "dp2.tp8.pp2.z1.full"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("dp2.tp8.pp2.z1.full", ""),
        ("dp4.tp4.pp2.z1.full", "tp 8 -> 4"),
        # dp, chunks and sequence parallelism come with the degrees
        ("dp4.tp8.z1.full", "pp 2 -> 1"),
        ("dp2.tp8.pp2.z1.full.v4", "interleave 1 -> 4"),
        ("dp4.tp8.z1.nosp", "pp 2 -> 1, recompute full -> none, sequence_parallel"),
        ("dp16.pp2.z3.full", "tp 8 -> 1, zero 1 -> 3"),
    ],
)
def test_changes_are_what_a_person_edits(plan, words):
    plan = Plan.parse(plan)
    recipe = Plan.parse(RECIPE)
    said = in_words(plan, recipe)
    assert said.startswith(words)
    assert changes(plan, recipe) == len(said.split(", ")) * bool(said)


@pytest.fixture(scope="module")
def answer():
    return mm.search("llama2-13b", CLUSTER, 256, like=RECIPE, **RUN)


def test_what_beats_a_recipe(answer):
    """The recipe first, then what is faster; as `estimate` prices them, and no better
    plan of one change is left out.
    """
    recipe = answer.beats.iloc[0]
    rivals = answer.beats[1:]
    assert recipe["plan"] == RECIPE and np.isnan(recipe["probability"])
    assert (
        rivals["step_s"].is_monotonic_increasing and rivals["count"].between(1, 3).all()
    )
    plans = list(answer.beats["plan"])
    table = mm.estimate(
        "llama2-13b", CLUSTER, plans, global_batch=256, software="megatron-core"
    )
    np.testing.assert_allclose(answer.beats["step_s"], table["step_s"], rtol=1e-9)
    np.testing.assert_allclose(rivals["saves"], 1 - rivals["step_s"] / recipe["step_s"])
    assert (rivals["saves_low"] < rivals["saves"]).all()
    assert rivals["probability"].between(0.5, 1).all()
    # what saves more is at least as sure among plans of one change of recompute
    assert "recompute full -> none" in set(rivals["changes"])
    assert str(answer.best) == rivals["plan"].iloc[0]
    assert rivals["changes"].iloc[0] in repr(answer)


@pytest.mark.parametrize(
    ("model", "like", "slower"),
    [
        ("llama2-70b", "dp4.tp8.z1", False),
        ("llama3-8b", "dp32.z2.mb2", True),
    ],
)
def test_recipe_that_does_not_fit_was_run(model, like, slower, capsys):
    """By our count it needs more than there is; that is said, and what fits comes
    first, even where nothing is faster.
    """
    run = RUN | {"software": "deepspeed" if slower else "megatron-core"}
    answer = mm.search(model, CLUSTER, 256, like=like, **run)
    usable = mm.simulator.usable_bytes(CLUSTER.device)
    recipe, *rivals = answer.beats.to_dict("records")
    assert recipe["memory_bytes"] > usable >= rivals[0]["memory_bytes"]
    assert answer.table["memory_bytes"].max() <= usable
    assert (rivals[0]["saves"] < 0) == slower
    for row in rivals:
        assert row["saves"] > 0 or row["memory_bytes"] <= usable
    words = f"{recipe['memory_bytes'] / 1e9:.1f} GB the recipe does not fit: h100-80"
    assert words in repr(answer)
    asked = ["search", model, "dgx-h100", "--nodes", "4", "--global-batch", "256"]
    assert main([*asked, "--like", like, "--software", run["software"]]) == 0
    assert words in capsys.readouterr().out


def test_recipe_of_another_model_is_said():
    flags = "--num-layers 40 --hidden-size 4096 --bf16 --global-batch-size 32"
    words = "another model than llama3-8b: num-layers 40 for 32;"
    with (
        pytest.warns(UserWarning, match=words),
        pytest.warns(UserWarning, match="global_batch=32, priced is 256"),
    ):
        mm.search("llama3-8b", CLUSTER, 256, like=flags, **RUN)


@pytest.mark.parametrize("ends", ["first9.last9", "layout-9+11x2+9"])
def test_stages_of_a_recipe_stay_or_become_even(ends):
    """Llama 2 13B has 40 layers; of the recipe recompute alone is one change."""
    like = f"dp2.tp4.pp4.z1.full.{ends}"
    asked = {"like": like, "software": "megatron-core", "progress": False}
    plans = mm.search("llama2-13b", CLUSTER, 256, **asked, top=200).table["plan"]
    kept = plans.str.contains("first9|layout-9")
    assert 0 < kept.sum() < len(plans)


def test_eight_bits_of_a_recipe_and_of_a_configuration_are_said():
    flags = "--tensor-model-parallel-size 4 --bf16 --fp8-format hybrid"
    with pytest.warns(UserWarning, match="of the recipe, --fp8-format=hybrid"):
        mm.search("llama2-13b", CLUSTER, 256, like=flags, progress=False)
    answer = mm.search("llama2-13b", CLUSTER, 256, like=RECIPE, dtype="fp8", **RUN)
    with pytest.warns(UserWarning, match="the configuration is in bf16: say dtype=fp8"):
        assert "--bf16" in answer.configuration()


def test_recipe_in_the_words_of_a_framework():
    """Its plan, its stack, and what no search sets stays as it is."""
    flags = "--tensor-model-parallel-size 4 --use-distributed-optimizer --bf16"
    answer = mm.search("llama2-13b", CLUSTER, 256, like=flags, progress=False)
    assert answer.problem.case.software.name == "megatron-core"
    assert answer.problem.case.plan.tp == 4
    buckets = {Plan.parse(text).bucket_bytes for text in answer.beats["plan"]}
    assert buckets == {answer.problem.case.plan.bucket_bytes}


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ("dp8.tp2", "= 16, but dgx-h100 has 32 devices"),
        ("tp3", "= 3, but dgx-h100 has 32 devices"),
        ("tp16", "tp=16 does not divide 40 attention heads of llama2-13b"),
        ("no-such-plan", "no-such-plan"),
        (3, "plan=3 must be a Plan or its text"),
    ],
)
def test_wrong_recipes(like, words):
    with pytest.raises(ValueError, match=words):
        mm.search("llama2-13b", CLUSTER, 256, like=like, **RUN)


def test_recommendation_models_have_no_recipes():
    with pytest.raises(ValueError, match="no search is needed"):
        mm.search("dlrm-a", CLUSTER, 256, like="dp32", **RUN)


def test_dp_may_be_left_out():
    answer = mm.search("llama2-13b", CLUSTER, 256, like="tp4.pp2", **RUN)
    assert answer.problem.case.plan == Plan(dp=4, tp=4, pp=2)


def test_nothing_beats_the_best_plan_of_its_neighbours():
    """From answer to answer the recipe becomes faster, and in the end nothing beats it;
    what is farther away is not said to be launched by no stack.
    """
    like = RECIPE
    for _ in range(9):
        answer = mm.search("llama2-13b", CLUSTER, 256, like=like, **RUN)
        assert "launched by no stack" not in repr(answer)
        if len(answer.beats) == 1:
            break
        like = answer.beats["plan"].iloc[1]
    assert "nothing so near is faster" in repr(answer)


def test_a_recipe_is_beaten_in_time_whatever_is_searched():
    asked = {"like": RECIPE, "objective": "memory", **RUN}
    beats = mm.search("llama2-13b", CLUSTER, 256, **asked).beats
    timed = mm.search("llama2-13b", CLUSTER, 256, like=RECIPE, **RUN).beats
    assert list(beats["plan"]) == list(timed["plan"])


def test_command(capsys):
    """A known stack is still the one that one's own is built on."""
    words = ["search", "llama2-13b", "dgx-h100", "--nodes", "4", "--global-batch"]
    asked = [*words, "256", "--software", "megatron-core", "--json"]
    assert main([*asked, "--like", RECIPE]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["plan"] == RECIPE and rows[1]["saves"] > 0
    assert main([*asked, "--like", "torchtitan", "--top", "2"]) == 0
    assert "changes" not in json.loads(capsys.readouterr().out)["rows"][0]


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"job\.yaml"):
        mm.search("llama2-13b", CLUSTER, 256, like=tmp_path / "job.yaml", **RUN)


def test_offload_of_a_recipe_is_left_out():
    """A search prices plans that keep all on the device, and lists no others."""
    run = {"software": "deepspeed", "sequence": 4096, "progress": False}
    with pytest.warns(UserWarning, match="offload=optimizer is left out"):
        found = mm.search(
            "llama3-8b", "dgx-h100", 64, like="dp8.z3.full.offload-optimizer", **run
        )
    plans = [Plan.parse(text) for text in (*found.table["plan"], *found.beats["plan"])]
    assert {plan.offload for plan in plans} == {None}
    assert found.beats["plan"][0] == "dp8.z3.full"


def test_what_megatron_does_not_overlap_alone_is_not_searched():
    """Overlapped gathers need overlapped reductions there."""
    run = {"software": "megatron-bridge", "progress": False}
    like = "dp1.tp4.pp2.z1.v20.lora16.one-bucket"
    found = mm.search("llama3-70b", "dgx-h100", 32, like=like, sequence=4096, **run)
    plans = [Plan.parse(text) for text in found.beats["plan"]]
    alone = [p for p in plans if p.overlap_gather and np.isinf(p.bucket_bytes)]
    assert len(plans) > 1 and not alone
