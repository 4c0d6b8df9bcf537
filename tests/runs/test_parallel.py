"""Every layout against one process: losses and gradient norms of three steps, collectives, checkpoints."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from madmax_lib.plan import Plan
from madmax_lib.runs import checks
from madmax_lib.runs.model import models
from madmax_lib.runs.settings import Settings

BATCH, SEQUENCE, LAYERS = 8, 16, 4  # as in runs_worker
GPT2 = {"layers": LAYERS, "hidden": 64, "heads": 8, "ffn": 128, "vocab": 264, "sequence": 32}
# label: (model, sizes); 263 rows of a token table are divided by no tp
MODELS = {
    "gpt2": ("gpt2-large", GPT2),
    "gpt2-odd": ("gpt2-large", GPT2 | {"vocab": 263}),
    "gpt": ("gpt-tiny", {}),
    "moe": ("moe-tiny", {}),
    "vit": ("vit-tiny", {}),
}
# (model, plan, options): one start runs them all, each on the ranks it needs
MATRIX = [
    ("gpt2", "dp2.mb4", {"check": "counts"}),
    ("gpt2", "dp2.z1.mb4", {"check": "counts"}),
    ("gpt2", "dp2.z2.mb2", {"check": "counts"}),
    ("gpt2", "dp2.z3.mb2", {"check": "counts"}),
    ("gpt2", "dp2.z3.mb3", {}),  # a short last micro-batch
    ("gpt2", "dp4.z3.hs2.mb1", {"check": "counts"}),
    ("gpt2", "dp2.z3.offload-all.mb4", {}),
    ("gpt2", "tp2.nosp.mb8", {"check": "counts"}),
    ("gpt2", "tp2.mb4", {"check": "counts"}),
    ("gpt2-odd", "tp2.mb8", {"loss_parallel": True}),
    ("gpt2", "pp2.gpipe.mb2", {}),
    ("gpt2", "pp2.mb2", {}),
    ("gpt2", "pp2.v2.mb2", {}),
    ("gpt2", "pp2.zb.mb2", {}),
    ("gpt2", "dp2.pp2.zb.mb2", {}),
    ("gpt2", "dp2.pp2.z3.mb2", {}),
    ("gpt2", "cp2.mb8", {"check": "counts"}),
    ("gpt2", "dp2.tp2.mb4", {}),
    ("gpt2-odd", "dp2.tp2.z3.mb4", {}),
    ("gpt2-odd", "tp2.nosp.pp2.mb4", {}),
    ("gpt2", "dp2.tp2.pp2.mb2", {}),
    ("gpt", "dp2.z3.mb4.full.unfused", {}),
    ("gpt", "cp2.tp2.mb8", {}),
    ("gpt", "dp2.z3.mb4", {"check": "dp2.z3.mb4"}),  # a checkpoint after two steps, taken up by the same plan
    ("gpt", "dp2.z1.mb4", {"check": "dp2.z1.mb4"}),
    ("gpt", "tp2.mb8", {"check": "dp2.z2.mb4"}),  # and by others
    ("gpt2", "dp2.z3.mb4", {"check": "pp2.mb4"}),
    ("gpt2", "pp2.mb4", {"check": "tp2.nosp.mb8"}),
    ("moe", "dp2.ep2.mb4", {"check": "counts"}),
    ("moe", "dp2.cp2.ep4.mb4", {}),
    ("moe", "dp4.ep2.mb2", {}),  # two ranks share each expert, outside of DDP
    ("moe", "dp2.tp2.ep2.z1.mb4", {}),
    ("moe", "dp4.ep2.z3.mb2", {"check": "dp4.ep2.z3.mb2"}),
    ("moe", "dp2.tp2.pp2.cp1.ep2.mb2", {}),  # 5D
    ("moe", "dp2.tp2.pp2.cp1.ep2.z3.mb2", {}),
    ("vit", "dp2.z2.mb2.selective", {}),
    ("vit", "tp2.nosp.mb8", {}),
    ("vit", "dp2.pp2.mb2", {}),
    ("vit", "dp2.mb4", {"lora_rank": 4}),
    ("vit", "dp2.z3.mb4", {"lora_rank": 4}),
]
MIXED = [
    ("gpt2", "dp2.mb4", {"dtype": "bf16"}),
    ("gpt2", "dp2.z2.mb4", {"dtype": "fp16"}),
    ("gpt", "dp2.pp2.z3.mb2", {"dtype": "bf16"}),
    ("gpt2", "tp2.mb8", {"dtype": "bf16"}),
]


OVERFLOW = ("gpt2", "dp2.z2.mb4", {"dtype": "fp16", "first_scale": 2.0**60})


def case_name(model, plan, options):
    return " ".join([model, plan, *(f"{key}={value}" for key, value in options.items())])


def reference_name(model, options):
    return case_name(model, "one process", {k: v for k, v in options.items() if k == "lora_rank"})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What rank 0 saw of every case, by its name; one start for all."""
    pytest.importorskip("torch")
    cases, known = [], set()
    for model, plan, options in [*MATRIX, *MIXED, OVERFLOW]:
        real, sizes = MODELS[model]
        if (name := reference_name(model, options)) not in known:
            known.add(name)
            alone = {key: value for key, value in options.items() if key == "lora_rank"}
            cases.append([name, real, f"dp1.mb{BATCH}", alone | {"sizes": sizes}])
        cases.append([case_name(model, plan, options), real, plan, options | {"sizes": sizes}])
    folder = tmp_path_factory.mktemp("parallel")
    worker = Path(__file__).with_name("runs_worker.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", str(worker), str(folder / "rows.json"), json.dumps(cases)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=Path.cwd())
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads((folder / "rows.json").read_text())


@pytest.mark.parametrize(("model", "plan", "options"), MATRIX, ids=lambda value: str(value))
def test_losses_and_gradients_are_those_of_one_process(rows, model, plan, options):
    row, alone = rows[case_name(model, plan, options)], rows[reference_name(model, options)]
    assert row["loss"] == pytest.approx(alone["loss"], abs=1e-4)
    assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert row["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-4)
    assert row["accuracy"] == pytest.approx(alone["accuracy"], abs=1.01 / row["tokens"])
    assert row["steps_done"] == 3 and not any(row["overflow"])


def test_the_reference_learns_something_at_each_step(rows):
    """Were the updates small, any layout would agree."""
    for name, row in rows.items():
        if "one process" in name:
            assert len({round(norm, 3) for norm in row["grad_norm"]}) == 3 and min(row["grad_norm"]) > 0.5
            assert max(row["loss"]) - min(row["loss"]) > 1e-3


@pytest.mark.parametrize(("model", "plan", "options"), MIXED, ids=lambda value: str(value))
def test_mixed_precision_is_near(rows, model, plan, options):
    row, alone = rows[case_name(model, plan, options)], rows[reference_name(model, options)]
    assert row["loss"] == pytest.approx(alone["loss"], abs=5e-3)
    assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=3e-2)
    assert row["loss"] != alone["loss"]


def test_steps_whose_gradient_overflows_change_nothing(rows):
    row, alone = rows[case_name(*OVERFLOW)], rows["gpt2 one process"]
    assert row["overflow"] == [True] * 3 and row["grad_norm"] == [math.inf] * 3
    assert row["loss_scale"] == [2.0**60, 2.0**59, 2.0**58]
    assert row["loss"][0] == pytest.approx(alone["loss"][0], abs=5e-3)
    assert abs(row["loss"][2] - alone["loss"][2]) > 0.01  # nothing was learned


def table(plan_text):
    """Collectives of a step in closed form: ({kind: calls}, {kind: bytes}) of the GPT-2 case, fp32.

    Two scalar all-reduces (norm; loss and accuracy) belong to every step.
    """
    plan, spec = Plan.parse(plan_text), models.spec("gpt2-large", **GPT2)
    m = plan.micro_batches(BATCH)
    tensors = 16 * LAYERS + 4  # tied: token table, positions, last norm
    whole = 4 * spec.parameters
    layers = whole - 4 * (spec.embedding_parameters + spec.norm_parameters)
    between = plan.micro_batch * SEQUENCE // plan.cp * spec.hidden * 4  # an activation, bytes
    logits = plan.micro_batch * SEQUENCE * spec.vocab * 4
    scalars = 24
    passes = 4 * LAYERS + 2
    if plan.cp > 1:
        qkv_and_back = 4 * between
        return {"all_to_all": 4 * m * LAYERS, "all_reduce": 3}, {
            "all_to_all": 2 * m * LAYERS * qkv_and_back,
            "all_reduce": whole + scalars,
        }
    if plan.tp > 1 and not plan.sequence_parallel:
        return {"all_reduce": m * passes + 2, "all_gather": m}, {
            "all_reduce": m * passes * between + scalars,
            "all_gather": m * logits,
        }
    if plan.tp > 1:
        own = 2 * (2 * LAYERS + 1)  # gradients of weights and biases of the norms
        position = 4 * spec.sequence * spec.hidden
        return {"reduce_scatter": m * passes, "all_gather": m * (passes + 1), "all_reduce": own + 1 + 2}, {
            "reduce_scatter": m * passes * between,
            "all_gather": m * (passes * between + logits),
            "all_reduce": own * spec.hidden * 4 + position + scalars,
        }
    if plan.zero == 0:
        return {"all_reduce": 3}, {"all_reduce": whole + scalars}
    if plan.zero == 1:
        return {"all_reduce": 3, "broadcast": tensors}, {"all_reduce": whole + scalars, "broadcast": whole}
    units, gathers = LAYERS + 1, LAYERS + 1 if plan.zero == 2 else m * (2 * LAYERS + 1)
    gathered = whole if plan.zero == 2 else m * (whole + layers)
    copies = plan.dp // plan.shard if plan.shard else 1
    calls = {"all_gather": gathers, "reduce_scatter": m * units, "all_reduce": 2 + (units if copies > 1 else 0)}
    sizes = {
        "all_gather": gathered,
        "reduce_scatter": m * whole,
        "all_reduce": scalars + (whole // plan.shard if copies > 1 else 0),
    }
    return calls, sizes


@pytest.mark.parametrize(
    "plan", [plan for model, plan, options in MATRIX if options.get("check") == "counts" and model == "gpt2"]
)
def test_collectives_are_those_of_the_formulas(rows, plan):
    row = rows[case_name("gpt2", plan, {"check": "counts"})]
    calls, sizes = table(plan)
    assert row["calls"] == calls
    assert row["sizes"] == sizes


def test_experts_exchange_counts_rows_and_results(rows):
    row = rows["moe dp2.ep2.mb4 check=counts"]
    assert row["calls"]["all_to_all"] == 4 * LAYERS + LAYERS


def test_a_job_describes_itself(rows):
    said = rows["moe dp2.tp2.pp2.cp1.ep2.z3.mb2"]["describe"]
    assert said["world_size"] == 8 and said["plan"] == "dp2.tp2.pp2.ep2.z3.mb2" and said["data_parallel"] == "fsdp2"
    kinds = {plan: rows[case_name(model, plan, options)]["describe"] for model, plan, options in MATRIX}
    expected = {"dp2.mb4": "ddp", "dp2.tp2.mb4": "replicate", "dp4.z3.hs2.mb1": "hsdp", "pp2.mb2": "none"}
    assert {plan: kinds[plan]["data_parallel"] for plan in expected} == expected
    assert kinds["dp2.z1.mb4"]["optimizer"] == "ZeroRedundancyOptimizer" and kinds["cp2.mb8"]["context"] == "ulysses"
    schedules = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
    plans = ("pp2.gpipe.mb2", "pp2.mb2", "pp2.v2.mb2", "pp2.zb.mb2")
    assert tuple(kinds[plan]["schedule"] for plan in plans) == schedules


@pytest.mark.parametrize(("plan", "shards"), [("dp2.z3.mb2", 2), ("dp4.z3.hs2.mb1", 2), ("dp2.z1.mb4", 1)])
def test_shards_hold_their_share(rows, plan, shards):
    said = rows[case_name("gpt2", plan, {"check": "counts"})]["describe"]
    assert said["local_parameters"] == pytest.approx(said["parameters"] / shards, rel=0.01)


def test_low_rank_training_leaves_most_frozen(rows):
    said = rows["vit dp2.mb4 lora_rank=4"]["describe"]
    assert said["trained_local_parameters"] == 65 * 100 + LAYERS * 2 * 4 * (64 + 64)


def test_phases_take_time(rows):
    for row in rows.values():
        assert all(row["seconds"][phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))


REFUSED = [
    ("gpt-tiny", "tp16", {}, "tp=16 does not divide 8 attention heads of gpt-tiny"),
    ("gpt-tiny", "tp8", {}, "tp=8 does not divide 4 key-value heads of gpt-tiny"),
    ("gpt-tiny", "tp2.cp4", {}, "cp=4 does not divide 2 key-value heads of a tp rank"),
    ("gpt-tiny", "cp2", {"sequence": 15}, "cp=2 does not divide 15 tokens"),
    ("gpt-tiny", "tp2", {"sequence": 15}, "tp=2 does not divide 15 tokens of a cp rank (.nosp leaves them whole)"),
    ("gpt2-large", "dp1", {"sequence": 2048}, "sequence=2048 exceeds the 1024 learned positions of gpt2-large"),
    ("gpt-tiny", "dp2.ep2", {}, "ep=2, but gpt-tiny has no experts"),
    ("moe-tiny", "dp8.ep8", {}, "ep=8 does not divide 4 experts of moe-tiny"),
    ("gpt-tiny", "dp3", {}, "dp=3 does not divide global_batch=8"),
    ("gpt-tiny", "dp2.pp2.mb3", {}, "micro-batches must be equal here, but dp x micro_batch = 2 x 3"),
    ("gpt-tiny", "pp2.mb8", {}, "1f1b needs a micro-batch per stage, but there are 1 for pp=2"),
    ("gpt-tiny", "pp2.v2.mb1", {"global_batch": 5}, "5 micro-batches do not make 2 equal rounds over pp=2"),
    ("gpt-tiny", "pp8", {}, "pp x interleave = 8 x 1 exceeds 4 layers of gpt-tiny"),
    ("gpt-tiny", "pp4.embedding-layer.head-layer", {}, "head-layer would have no layer of gpt-tiny"),
    ("gpt-tiny", "dp2.pp2.zb.z3", {}, "a zero-bubble pipeline gives wrong gradients with zero=3"),
    ("gpt-tiny", "dp2.hs2.z1", {}, "shard=2 is FSDP2's here and needs zero of 2 or 3, but zero=1"),
    ("gpt-tiny", "dp2.z1.offload-all", {}, "offload='all' is FSDP2's here and needs zero of 2 or 3, but zero=1"),
    ("gpt-tiny", "dp2.z2.offload-nvme", {}, "offload='nvme' does not run here"),
    ("gpt-tiny", "dp2.z3.qwz", {}, "qwz (8-bit gathers) is ZeRO++, which only DeepSpeed runs"),
    ("moe-tiny", "dp2.ep2.cap125", {}, "cap (dropped tokens) are simulated only"),
    ("vit-tiny", "tp2", {}, "vit-tiny: patches and class token are not split over ranks"),
    ("vit-tiny", "cp2", {}, "vit-tiny: patches and class token are not split over ranks"),
    ("gpt-tiny", "dp1", {"dtype": "fp64"}, "dtype='fp64' is not one of fp32, bf16, fp16"),
    ("gpt-tiny", "dp2", {"loss_parallel": True}, "loss_parallel needs tp of at least 2 and pp=1, but tp=1 and pp=1"),
    ("gpt-tiny", "tp2", {"lora_rank": 4}, "lora_rank=4 needs tp=1, but tp=2"),
    ("gpt-tiny", "tp2", {"compile": True}, "compile=True fails for layers that are split over tp ranks, and tp=2"),
    ("gpt-tiny", "pp2.zb", {"compile": True}, "compile=True cannot split the backward pass"),
    ("gpt-tiny", "tp2.nosp", {"engine": "deepspeed"}, "only dp, z, mb, zpp, recompute and offload run on DeepSpeed"),
    ("gpt-tiny", "dp2.z2", {"engine": "deepspeed", "compile": True}, "compile, loss_parallel and lora_rank do not run"),
    ("gpt-tiny", "dp2.z2.offload-all", {"engine": "deepspeed"}, "offload='all' on DeepSpeed needs zero of at least 3"),
    ("gpt-tiny", "dp2.z3.mb3", {"engine": "deepspeed"}, "micro-batches must be equal here"),
]


@pytest.mark.parametrize(("model", "text", "options", "message"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line(model, text, options, message):
    engine = options.get("engine", "torch")
    with pytest.raises(ValueError) as refusal:
        settings = Settings(**{key: value for key, value in options.items() if key != "engine"})
        checks.check(Plan.parse(text), models.spec(model), settings, engine)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(("model", "plan", "options"), [*MATRIX, *MIXED], ids=lambda value: str(value))
def test_what_runs_is_not_refused(model, plan, options):
    spec, given = models.spec(MODELS[model][0], **MODELS[model][1]), Plan.parse(plan)
    checks.check(given, spec, Settings(global_batch=BATCH, sequence=0 if spec.image else SEQUENCE))


def test_latent_attention_is_not_built():
    with pytest.raises(ValueError, match="kv_lora_rank=16 is simulated only"):
        checks.check(Plan(), models.spec("gpt-tiny", kv_lora_rank=16), Settings())


def test_a_plan_needs_its_ranks():
    pytest.importorskip("torch")
    from madmax_lib.runs.parallel import mesh

    with pytest.raises(ValueError, match="dp2 needs 2 ranks, but 1 were started"):
        mesh.build(Plan(dp=2), "cpu")


def test_checks_need_no_torch():
    code = (
        "import sys; from madmax_lib.runs import checks, models; models.spec('gpt2_large'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_loss_scale_falls_at_once_and_rises_slowly():
    pytest.importorskip("torch")
    from madmax_lib.runs.parallel.gradients import LossScale

    scale = LossScale(8.0, dynamic=True, growth_interval=3)
    values = []
    for overflow in (True, False, False, True, False, False, False, False):
        scale.update(overflow)
        values.append(scale.value)
    assert values == [4, 4, 4, 2, 2, 2, 4, 4]
    constant = LossScale()
    constant.update(True)
    assert constant.value == 1.0


class TestDeepSpeed:
    def test_configuration(self):
        pytest.importorskip("torch")
        from madmax_lib.runs.parallel import deepspeed

        plan = Plan.parse("dp2.z3.mb2.zpp.offload-all")
        found = deepspeed.config(plan, Settings(dtype="fp16", learning_rate=0.1, clip_norm=0.5))
        assert found["train_batch_size"] == 8 and found["gradient_accumulation_steps"] == 2
        assert found["fp16"] == {"enabled": True} and "bf16" not in found
        zero = found["zero_optimization"]
        assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 25 * 2**20 / 2
        assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu"}
        assert zero["zero_quantized_weights"] and zero["zero_quantized_gradients"]
        assert found["optimizer"]["params"]["lr"] == 0.1 and json.dumps(found)

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_plain_stages(self, stage):
        pytest.importorskip("torch")
        from madmax_lib.runs.parallel import deepspeed

        zero = deepspeed.config(Plan(dp=2, zero=stage), Settings())["zero_optimization"]
        assert zero["stage"] == stage and not [key for key in zero if "offload" in key or "quantized" in key]
        assert deepspeed.config(Plan(dp=2, bucket_bytes=math.inf), Settings())

    def test_stale_locks_are_found_and_explained(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        monkeypatch.setattr(checks, "find_spec", lambda name: object())
        assert checks.deepspeed_locks() == [] and checks.check_deepspeed() is None
        for name, age_s in (("fresh", 60), ("old", 7200), ("older", 9000)):
            (tmp_path / name).mkdir()
            (lock := tmp_path / name / "lock").touch()
            os.utime(lock, (lock.stat().st_mtime - age_s,) * 2)
        assert checks.deepspeed_locks() == [tmp_path / "older" / "lock", tmp_path / "old" / "lock"]
        with pytest.raises(FileExistsError, match=r"lock: 2\.5 h old, left by a build that was killed"):
            checks.check_deepspeed()

    def test_absence_is_said(self, monkeypatch):
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="deepspeed is not installed; pip install deepspeed"):
            checks.check_deepspeed()
