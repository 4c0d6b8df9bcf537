"""What is refused before a process starts, by each of the three doors: plans that this
room cannot run, fields of a spec, and runs that this machine cannot have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from madmax_lib.plan.plan import Plan
from madmax_lib.runs import checks
from madmax_lib.runs.launch import launch
from madmax_lib.runs.model import models
from madmax_lib.runs.settings import Settings
from madmax_lib.runs.spec import RunSpec, check

# door, fields, GPUs here, what the one line says; beside what test_plan has
TABLE = Path(__file__).with_name("refusals.jsonl")
REFUSED = [json.loads(line) for line in TABLE.read_text().splitlines()]
REFUSED.append(["spec", {"sizes": {1: 2}}, 0, "sizes: name=1 must be text"])


def check_plan(model, plan, engine="torch", **settings):
    checks.check(Plan.parse(plan), models.spec(model), Settings(**settings), engine)


@pytest.mark.parametrize(("door", "fields", "gpus", "says"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line(
    door, fields, gpus, says, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules[launch.__module__], "gpu_count", lambda: gpus)
    monkeypatch.setattr(subprocess, "Popen", None)
    doors = {
        "check": check_plan,
        "spec": RunSpec,
        "launch": lambda **fields: launch(RunSpec(**fields), tmp_path / "run"),
    }
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        doors[door](**fields)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_latent_attention_is_not_built():
    with pytest.raises(ValueError, match="kv_lora_rank=16 is simulated only"):
        checks.check(Plan(), models.spec("gpt-tiny", kv_lora_rank=16), Settings())


def test_several_machines_have_their_gpus_together():
    spec = RunSpec(strategy="dp16", global_batch=16, device="cuda")
    assert check(spec, 8, nodes=2) == check(spec, 0, nodes=2) == "cuda"
    with pytest.raises(ValueError, match="dp16 needs 16 GPUs, 14 present"):
        check(spec, 7, nodes=2)
    with pytest.raises(ValueError, match="2 nodes, and no GPU here: give device="):
        check(RunSpec(), 0, nodes=2)


@pytest.mark.parametrize("package", ["torch", "wandb", "torchao", "deepspeed"])
def test_a_missing_package_is_one_line(package, monkeypatch):
    for module in ("spec", "checks"):
        monkeypatch.setattr(
            f"madmax_lib.runs.{module}.find_spec", lambda name: name != package or None
        )
    deepspeed = package == "deepspeed"
    spec = RunSpec(strategy="dp1@deepspeed" if deepspeed else "dp1", wandb=True)
    with pytest.raises(ModuleNotFoundError, match=f"{package}.* is not installed"):
        check(spec if deepspeed else RunSpec(wandb=True, adam_8bit=True), gpus=0)


def test_a_key_is_asked_for_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("madmax_lib.runs.spec.find_spec", lambda name: object())
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    spec = RunSpec(wandb=True)
    with pytest.raises(ValueError, match="set WANDB_API_KEY, run `wandb login`"):
        check(spec, gpus=0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check(spec, gpus=0) == "cpu"
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key")
    assert check(spec, gpus=0) == "cpu"


def test_stale_locks_are_found_and_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    assert checks.deepspeed_locks() == []
    assert checks.check_deepspeed() is None
    for name, age_s in (("fresh", 60), ("old", 7200), ("older", 9000)):
        (tmp_path / name).mkdir()
        (lock := tmp_path / name / "lock").touch()
        os.utime(lock, (lock.stat().st_mtime - age_s,) * 2)
    stale = [tmp_path / name / "lock" for name in ("older", "old")]
    assert checks.deepspeed_locks() == stale
    says = r"lock: 2\.5 h old, left by a build that was killed"
    with pytest.raises(FileExistsError, match=says):
        checks.check_deepspeed()
