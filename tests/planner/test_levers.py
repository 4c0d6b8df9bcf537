"""Levers change one thing each, and say what it costs."""

import pytest

import madmax_lib as mm
from madmax_lib.planner.levers import lever_table


def test_levers_change_one_thing_each():
    plan = mm.Plan.parse("dp8.z1.mb2")
    table = lever_table(mm.model("llama-7b"), mm.cluster("dgx-a100-40"), plan, global_batch=64)
    rows = table.set_index("lever")
    assert rows.loc["as given", "plan"] == str(plan) and rows["plan"].is_unique
    stages = rows.loc[["ZeRO-0", "as given", "ZeRO-2", "ZeRO-3"], "device_gb"]
    assert (stages.diff().dropna() < 0).all()
    assert rows.loc["all to drives", "nvme_gb"] > 0 and rows.loc["recompute full", "device_gb"] < stages["as given"]
    assert (rows["step_s"].notna() == rows["fits"]).all()


def test_levers_begin_without_offload():
    plan = mm.Plan.parse("dp4.mb16.full.offload-chunks")
    with pytest.raises(ValueError, match="offloads already"):
        lever_table(mm.model("llama-7b"), mm.cluster("hetero-4xv100"), plan, global_batch=64)
