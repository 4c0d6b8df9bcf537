"""Specs of runs: their JSON form, names, and the plan they mean."""

import json
from dataclasses import asdict

import pytest

from madmax_lib.plan.plan import Plan
from madmax_lib.runs.data.batches import DataWarning
from madmax_lib.runs.launch import prepare
from madmax_lib.runs.spec import RunSpec


def test_json_round_trip():
    options = {"steps": 9, "sizes": {"layers": 2}, "wandb": True}
    spec = RunSpec(model="ViT_tiny", strategy="dp2.z3@deepspeed", **options)
    again = RunSpec.from_dict(json.loads(json.dumps(asdict(spec))))
    assert again == spec != RunSpec() and hash(spec) == hash(again)
    older = asdict(spec) | {"loss_parallel": False}  # as records of 0.1 have it
    assert RunSpec.from_dict(older) == spec
    assert (spec.model, spec.kind) == ("vit-tiny", "images")
    assert (spec.data, spec.engine) == ("synthetic-images", "deepspeed")
    assert spec.name == "vit-tiny_dp2.z3_deepspeed"


@pytest.mark.parametrize(
    ("strategy", "hosts", "network", "name"),
    [
        ("", 1, "", "gpt-tiny_dp1"),
        ("DP2 @torch", 1, "", "gpt-tiny_dp2"),
        ("dp2@", 2, "1.5 Gbit/s", "gpt-tiny_dp2_2x1.5gbit"),
        ("dp2", 2, "300mbit/s", "gpt-tiny_dp2_2x300mbit"),
    ],
)
def test_a_run_has_one_name_that_is_a_folders(strategy, hosts, network, name):
    assert RunSpec(strategy=strategy, hosts=hosts, network=network).name == name


@pytest.mark.parametrize(
    ("strategy", "batch", "plan"),
    [
        ("dp1", 8, "dp1.mb8"),
        ("dp2.z3", 8, "dp2.z3.mb4"),
        ("dp2.tp2.pp2", 8, "dp2.tp2.pp2.mb2"),
        ("dp2.mb1", 8, "dp2"),
        ("pp2.gpipe", 1, "dp1.pp2.gpipe"),
        ("pp2", 9, "pp2.mb3"),
        ("dp2.pp4", 14, "dp2.pp4"),
    ],
)
def test_a_rank_takes_its_share_at_once_unless_mb_says_otherwise(strategy, batch, plan):
    assert RunSpec(strategy=strategy, global_batch=batch).plan == Plan.parse(plan)


def test_generated_data_has_as_many_classes_as_the_model(tmp_path):
    spec = RunSpec("vit-tiny", data="cifar-100", sizes={"classes": 10}, device="cpu")
    with pytest.warns(DataWarning, match="synthetic-images in place of cifar-100"):
        prepare(spec, tmp_path)
    resolved = json.loads((tmp_path / "spec.json").read_text())["resolved"]
    assert resolved["data"] == "synthetic-images"
    assert "cifar-100" in resolved["data_note"]
