"""What keeps a plan from running here, in one line."""

import os

import pytest

from madmax_lib.plan.plan import Plan
from madmax_lib.runs import checks
from madmax_lib.runs.model import models
from madmax_lib.runs.settings import Settings

REFUSED = [  # beside what test_plan and test_spec have: all doors give the same verdict
    ("gpt-tiny", "tp8", {}, "tp=8 does not divide 4 key-value heads of gpt-tiny"),
    ("gpt-tiny", "tp2.cp4", {}, "cp=4 does not divide 2 key-value heads of a tp rank"),
    ("gpt-tiny", "cp2", {"sequence": 15}, "cp=2 does not divide 15 tokens"),
    (
        "gpt-tiny",
        "tp2",
        {"sequence": 15},
        "tp=2 does not divide 15 tokens of a cp rank (.nosp leaves them whole)",
    ),
    (
        "gpt2-large",
        "dp1",
        {"sequence": 2048},
        "sequence=2048 exceeds the 1024 learned positions of gpt2-large",
    ),
    ("moe-tiny", "dp8.ep8", {}, "ep=8 does not divide 4 experts of moe-tiny"),
    (
        "gpt-tiny",
        "dp3",
        {},
        "global_batch=8 is not a multiple of dp x micro_batch = 3 x 1",
    ),
    (
        "gpt-tiny",
        "dp2.pp2.mb3",
        {},
        "micro-batches must be equal here, but dp x micro_batch = 2 x 3",
    ),
    (
        "gpt-tiny",
        "pp2.mb8",
        {},
        "1f1b needs a micro-batch per stage, but there are 1 for pp=2",
    ),
    (
        "gpt-tiny",
        "pp2.v2.mb1",
        {"global_batch": 5},
        "5 micro-batches do not make 2 equal rounds over pp=2",
    ),
    (
        "gpt-tiny",
        "pp4.embedding-layer.head-layer",
        {},
        "head-layer would have no layer of gpt-tiny",
    ),
    (
        "gpt-tiny",
        "dp2.pp2.zb.z3",
        {},
        "a zero-bubble pipeline gives wrong gradients with zero=3",
    ),
    (
        "gpt-tiny",
        "dp2.hs2.z1",
        {},
        "shard=2 is FSDP2's here and needs zero of 2 or 3, but zero=1",
    ),
    (
        "gpt-tiny",
        "dp2.z1.offload-all",
        {},
        "offload='all' is FSDP2's here and needs zero of 2 or 3, but zero=1",
    ),
    ("gpt-tiny", "dp2.z2.offload-nvme", {}, "offload='nvme' does not run here"),
    (
        "gpt-tiny",
        "dp2.z3.qwz",
        {},
        "qwz (8-bit gathers) is ZeRO++, which only DeepSpeed runs",
    ),
    ("moe-tiny", "dp2.ep2.cap125", {}, "cap (dropped tokens) are simulated only"),
    (
        "vit-tiny",
        "tp2",
        {},
        "patches and class token are not split over ranks; write tp2.nosp",
    ),
    ("vit-tiny", "cp2", {}, "cp=2 does not divide 65 tokens of vit-tiny"),
    (
        "gpt-tiny",
        "dp1",
        {"weights_16bit": True},
        "weights_16bit=True needs dtype='bf16', but dtype='fp32'",
    ),
    (
        "gpt-tiny",
        "dp1",
        {"fused_gelu": True},
        "fused_gelu joins a bias and the tanh form of GELU, which gpt-tiny has not",
    ),
    (
        "gpt-tiny",
        "dp2",
        {"loss_parallel": True},
        "loss_parallel needs tp of at least 2 and pp=1, but tp=1 and pp=1",
    ),
    ("gpt-tiny", "tp2", {"lora_rank": 4}, "lora_rank=4 needs tp=1, but tp=2"),
    (
        "gpt-tiny",
        "tp2",
        {"compile": True},
        "compile=True fails for layers that are split over tp ranks, and tp=2",
    ),
    (
        "gpt-tiny",
        "pp2.zb",
        {"compile": True},
        "compile=True cannot split the backward pass",
    ),
    (
        "gpt-tiny",
        "tp2.nosp",
        {"engine": "deepspeed"},
        "only dp, z, mb, zpp, recompute and offload run on DeepSpeed",
    ),
    (
        "gpt-tiny",
        "dp2.z2",
        {"engine": "deepspeed", "compile": True},
        "compile does not run on DeepSpeed",
    ),
    (
        "gpt-tiny",
        "dp2.z2.offload-all",
        {"engine": "deepspeed"},
        "offload='all' on DeepSpeed needs zero of at least 3",
    ),
    (
        "gpt-tiny",
        "dp2.z3.mb3",
        {"engine": "deepspeed"},
        "micro-batches must be equal here",
    ),
]


@pytest.mark.parametrize(("model", "text", "options", "message"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line(model, text, options, message):
    engine = options.get("engine", "torch")
    with pytest.raises(ValueError) as refusal:
        settings = Settings(
            **{key: value for key, value in options.items() if key != "engine"}
        )
        checks.check(Plan.parse(text), models.spec(model), settings, engine)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_latent_attention_is_not_built():
    with pytest.raises(ValueError, match="kv_lora_rank=16 is simulated only"):
        checks.check(Plan(), models.spec("gpt-tiny", kv_lora_rank=16), Settings())


def test_stale_locks_are_found_and_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    assert checks.deepspeed_locks() == [] and checks.check_deepspeed() is None
    for name, age_s in (("fresh", 60), ("old", 7200), ("older", 9000)):
        (tmp_path / name).mkdir()
        (lock := tmp_path / name / "lock").touch()
        os.utime(lock, (lock.stat().st_mtime - age_s,) * 2)
    assert checks.deepspeed_locks() == [
        tmp_path / "older" / "lock",
        tmp_path / "old" / "lock",
    ]
    with pytest.raises(
        FileExistsError, match=r"lock: 2\.5 h old, left by a build that was killed"
    ):
        checks.check_deepspeed()


def test_absence_is_said(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match="deepspeed is not installed; pip install deepspeed"
    ):
        checks.check_deepspeed()
