"""Layouts to try: what can run, on any number of devices."""

import pytest

from madmax_lib.planner import layouts
from madmax_lib.runs import RunSpec
from madmax_lib.runs.spec import check


@pytest.mark.parametrize("model", ["gpt-tiny", "moe-tiny", "vit-tiny"])
@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
def test_layouts_run_and_use_all_devices(model, devices):
    spec = RunSpec(model, global_batch=24)
    tried = layouts(spec, devices)
    specs = [RunSpec(model, text, global_batch=24) for text in tried]
    assert tried[0] == "dp1" and 2 < len(tried) <= 9 and len(set(tried)) == len(tried)
    assert {check(one, gpus=devices) for one in specs} == {"cuda"}
    assert {one.plan.world_size for one in specs} == {1, devices}


def test_no_devices_have_no_layouts():
    with pytest.raises(ValueError, match="devices=0"):
        layouts(RunSpec("gpt2-large", global_batch=32, dtype="bf16"), 0)
