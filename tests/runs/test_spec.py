"""Specs of runs: their JSON form, the plan they mean, and what is refused before a
process starts.
"""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from madmax_lib.plan.plan import Plan
from madmax_lib.runs.data.batches import DataWarning
from madmax_lib.runs.launch import launch, prepare
from madmax_lib.runs.spec import RunSpec, check


def test_json_round_trip():
    spec = RunSpec(
        model="ViT_tiny",
        strategy="dp2.z3@deepspeed",
        steps=9,
        sizes={"layers": 2},
        wandb=True,
    )
    again = RunSpec.from_dict(json.loads(json.dumps(asdict(spec))))
    assert (
        again == spec and hash(spec) and spec.digest == again.digest != RunSpec().digest
    )
    assert (spec.model, spec.kind, spec.data, spec.engine) == (
        "vit-tiny",
        "images",
        "synthetic-images",
        "deepspeed",
    )
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt-tiney"}, "no model 'gpt-tiney' to run; nearest: gpt-tiny"),
        (
            {"data": "wikitext103x"},
            "unknown data 'wikitext103x'; nearest: wikitext-103",
        ),
        ({"strategy": "dp2.q3"}, "'q3' in plan 'dp2.q3' is not one of"),
        (
            {"strategy": "dp2@megatron"},
            "engine 'megatron' in strategy 'dp2@megatron' is not one of torch, "
            "deepspeed",
        ),
        (
            {"strategy": "dp2.tp2", "ranks": 8},
            "dp x tp x pp x cp = 2 x 2 x 1 x 1 = 4, but ranks=8",
        ),
        ({"strategy": "dp2.ep4"}, "ep=4 does not divide dp x cp = 2 x 1"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"global_batch": 2.0}, "global_batch=2.0 must be a whole number"),
        (
            {"learning_rate": float("nan")},
            "learning_rate=nan must be a positive number",
        ),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 must be a non-negative number"),
        (
            {"checkpoint_every": True},
            "checkpoint_every=True must be a whole number of at least 0",
        ),
        ({"timeout_s": "60"}, "timeout_s='60' must be a positive number"),
        ({"dtype": "fp8"}, "dtype='fp8' is not one of auto, fp32, bf16, fp16"),
        ({"device": "tpu"}, "device='tpu' is not one of auto, cpu, cuda"),
        ({"sizes": {"depth": 2}}, "'depth' is not a size of gpt-tiny; nearest: patch"),
        ({"sizes": {"layers": "2"}}, "layers='2' must be a whole number of at least 0"),
        ({"sizes": {"layers": 2.5}}, "layers=2.5 must be a whole number"),
        ({"sizes": {"hidden": None}}, "hidden=None must be a whole number"),
        ({"sizes": {"gated": "yes"}}, "gated='yes' must be of type bool"),
        ({"sizes": {1: 2}}, "sizes={1: 2} must be of type dict"),
        (
            {"model": "vit-tiny", "sizes": {"sequence": 3}},
            "sequence of vit-tiny follows from image and patch",
        ),
        *(
            ({"speed": value}, f"speed={value!r} must be of type tuple")
            for value in (0.5, None, "x", {"a": 1})
        ),
        ({"speed": ["1"]}, "speed='1' must be a positive number"),
        ({"ranks": True}, "ranks=True must be a whole number"),
        *(
            ({name: 10**30}, f"{name}={10**30} must be a whole number")
            for name in ("steps", "global_batch", "seed")
        ),
        (
            {"learning_rate": 1e300},
            "learning_rate=1e+300 must be a positive number below 2^40",
        ),
    ],
)
def test_bad_fields_are_refused_in_one_line(fields, message):
    with pytest.raises(ValueError) as error:
        RunSpec(**fields)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "gpus", "message"),
    [
        (
            {"strategy": "tp3"},
            0,
            "tp=3 does not divide 8 attention heads of gpt-tiny",
        ),  # and all of test_checks
        ({"strategy": "dp4"}, 2, "dp4 needs 4 GPUs, 2 present"),
        ({"device": "cuda"}, 0, "dp1 needs 1 GPUs, 0 present"),
        (
            {"data": "cifar-100"},
            0,
            "data cifar-100 is images, but gpt-tiny is trained on text",
        ),
        (
            {"model": "vit-tiny", "sequence": 64},
            0,
            "sequence=64 is for text; vit-tiny has 65 tokens per image",
        ),
        (
            {"sizes": {"vocab": 128}},
            0,
            "data arithmetic has 259 tokens, gpt-tiny knows 128",
        ),
        (
            {"power": "nowhere.csv"},
            0,
            "power='nowhere.csv' is neither auto, none nor a CSV file",
        ),
        (
            {"weights": "nowhere"},
            0,
            "weights='nowhere' has no .safetensors file with weights of gpt-tiny",
        ),
        ({"power": __file__}, 0, "test_spec.py: column(s) power_w, t_s missing"),
        (
            {"profile": False, "profile_memory": True},
            0,
            "profile_memory=True needs profile=True",
        ),
        ({"lora_rank": 65}, 0, "lora_rank=65 exceeds hidden=64 of gpt-tiny"),
        (
            {"sizes": {"head_dim": 10, "v_head_dim": 12}},
            0,
            "v_head_dim=12 is simulated only, where head_dim=10",
        ),
        (
            {"sizes": {"head_dim": 7}},
            0,
            "rotary positions turn pairs of channels, but head_dim=7",
        ),
    ],
)
def test_what_cannot_run_here_is_refused_before_a_process_starts(
    fields, gpus, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules[launch.__module__], "gpu_count", lambda: gpus)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        launch(RunSpec(**fields), tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_several_machines_have_their_gpus_together():
    spec = RunSpec(strategy="dp16", global_batch=16, device="cuda")
    assert check(spec, 8, nodes=2) == check(spec, 0, nodes=2) == "cuda"
    with pytest.raises(ValueError, match="dp16 needs 16 GPUs, 14 present"):
        check(spec, 7, nodes=2)
    with pytest.raises(
        ValueError, match="2 nodes, and no GPU here: say device='cuda' or 'cpu'"
    ):
        check(RunSpec(), 0, nodes=2)


def test_data_that_is_not_here_is_replaced_by_as_many_classes_as_the_model_has(
    tmp_path,
):
    spec = RunSpec("vit-tiny", data="cifar-100", sizes={"classes": 10}, device="cpu")
    with pytest.warns(DataWarning, match="synthetic-images in place of cifar-100"):
        prepare(spec, tmp_path)
    resolved = json.loads((tmp_path / "spec.json").read_text())["resolved"]
    assert (
        resolved["data"] == "synthetic-images" and "cifar-100" in resolved["data_note"]
    )


@pytest.mark.parametrize("package", ["torch", "wandb", "torchao"])
def test_a_missing_package_is_one_line(package, monkeypatch):
    monkeypatch.setattr("madmax_lib.runs.spec.find_spec", lambda name: name != package)
    with pytest.raises(
        ModuleNotFoundError,
        match=f"this run needs the package {package}, which is not installed",
    ):
        check(RunSpec(wandb=True, adam_8bit=True), gpus=0)
