"""DeepSpeed's configuration of a plan, and where it is installed its losses beside
those of one process.
"""

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from madmax_lib.plan.plan import Plan
from madmax_lib.runs import RunSpec, launch, read_run
from madmax_lib.runs.parallel import deepspeed
from madmax_lib.runs.settings import Settings


def test_configuration():
    plan = Plan.parse("dp2.z3.mb2.zpp.offload-all")
    content = deepspeed.config(
        plan, Settings(dtype="fp16", learning_rate=0.1, clip_norm=0.5)
    )
    assert (
        content["train_batch_size"] == 8 and content["gradient_accumulation_steps"] == 2
    )
    assert content["fp16"] == {"enabled": True} and "bf16" not in content
    zero = content["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 25 * 2**20 / 2
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["zero_quantized_weights"] and zero["zero_quantized_gradients"]
    assert content["optimizer"]["params"]["lr"] == 0.1 and json.dumps(content)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_stages(stage):
    zero = deepspeed.config(Plan(dp=2, zero=stage), Settings())["zero_optimization"]
    assert zero["stage"] == stage and not [
        key for key in zero if "offload" in key or "quantized" in key
    ]
    assert deepspeed.config(Plan(dp=2, bucket_bytes=math.inf), Settings())


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Losses of three steps of a strategy."""
    pytest.importorskip(
        "deepspeed", reason="deepspeed is not installed: pip install deepspeed"
    )
    folder, options = (
        tmp_path_factory.mktemp("runs"),
        {"device": "cpu", "profile": False, "learning_rate": 3e-3},
    )
    spec = RunSpec(steps=3, sizes={"layers": 2}, **options)
    run = cache(
        lambda strategy: read_run(
            launch(replace(spec, strategy=strategy), folder / strategy)
        )
    )
    return lambda strategy: run(strategy).steps["loss"].tolist()


@pytest.mark.parametrize(
    "strategy", ["dp1", "dp1.z2.offload-optimizer", "dp2.mb2", "dp2.z3"]
)
def test_losses_are_those_of_one_process(losses, strategy):
    assert losses(f"{strategy}@deepspeed") == pytest.approx(losses("dp1"), abs=1e-4)
    assert max(losses("dp1")) - min(losses("dp1")) > 0.1


@pytest.mark.parametrize(
    "text",
    ["dp4.mb2", "dp4.z1", "dp4.z2.offload-optimizer", "dp4.z3.mb2", "dp4.z3.offload-all",
     "dp4.z3.zpp", "dp4.z3.qwz", "dp4.z3.qgz", "dp4.z3.hpz"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_deepspeed_reads_its_configuration(monkeypatch, text, dtype):
    """Its parser knows every key, ZeRO++'s too, and has the plan's numbers."""
    theirs = pytest.importorskip(
        "deepspeed.runtime.config", reason="deepspeed is not installed"
    )
    plan = Plan.parse(text)
    ranks = type(
        "Ranks", (), {"get_rank": lambda: 0, "get_world_size": lambda: plan.dp}
    )
    monkeypatch.setattr(theirs, "dist", ranks)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = Settings(dtype=dtype, global_batch=16)
    read = theirs.DeepSpeedConfig(deepspeed.config(plan, settings))
    zero = read.zero_config
    assert read.train_batch_size == 16 and zero.stage == plan.zero
    assert read.train_micro_batch_size_per_gpu == plan.micro_batch
    assert zero.zero_quantized_weights == plan.qwz
    assert zero.zero_quantized_gradients == plan.qgz
    assert zero.zero_hpz_partition_size == (2 if plan.hpz else 1)
    assert bool(zero.offload_optimizer) == bool(plan.offload)
    assert bool(zero.offload_param) == (plan.offload == "all")
