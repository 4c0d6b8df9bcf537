"""DeepSpeed's configuration of a plan; the package itself is not needed."""

import json
import math

import pytest

from madmax_lib.plan import Plan
from madmax_lib.runs.parallel import deepspeed
from madmax_lib.runs.settings import Settings


def test_configuration():
    plan = Plan.parse("dp2.z3.mb2.zpp.offload-all")
    content = deepspeed.config(plan, Settings(dtype="fp16", learning_rate=0.1, clip_norm=0.5))
    assert content["train_batch_size"] == 8 and content["gradient_accumulation_steps"] == 2
    assert content["fp16"] == {"enabled": True} and "bf16" not in content
    zero = content["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 25 * 2**20 / 2
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["zero_quantized_weights"] and zero["zero_quantized_gradients"]
    assert content["optimizer"]["params"]["lr"] == 0.1 and json.dumps(content)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_stages(stage):
    zero = deepspeed.config(Plan(dp=2, zero=stage), Settings())["zero_optimization"]
    assert zero["stage"] == stage and not [key for key in zero if "offload" in key or "quantized" in key]
    assert deepspeed.config(Plan(dp=2, bucket_bytes=math.inf), Settings())
