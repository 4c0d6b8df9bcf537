"""Plans side by side: the rows are those of estimate and fits."""

import pytest

import madmax_lib as mm
from madmax_lib.planner.money.compare import lever_table, variants
from madmax_lib.simulator.memory.memory import peak_bytes

GPT, NODE = mm.model("gpt2-xl"), mm.cluster("dgx-1-v100", nodes=1)


def test_rows_are_those_of_estimate_and_memory():
    table = variants(
        GPT, NODE, ["dp8.z1", mm.Plan.parse("dp8.mb2")], global_batch=16, dtype="fp16"
    )
    assert table.index.tolist() == ["dp8.z1", "dp8.mb2"]
    for text, row in table.iterrows():
        plan = mm.Plan.parse(text)
        single = mm.estimate(GPT, NODE, plan, global_batch=16, dtype="fp16").iloc[0]
        assert row["step_s"] == single["step_s"] and 0 <= row["exposed"] < 1
        held = peak_bytes(mm.memory(GPT, plan, global_batch=16, dtype="fp16"))
        assert row["memory_gb"] * 1e9 == pytest.approx(held)


def test_offload_takes_memory_and_time():
    table = variants(
        GPT,
        NODE,
        ["dp8.mb2", "dp8.mb2.offload-optimizer"],
        global_batch=16,
        dtype="fp16",
    )
    kept, moved = table.to_dict("records")
    assert moved["memory_gb"] < kept["memory_gb"] and moved["step_s"] > kept["step_s"]
    assert moved["fits"] and not kept["fits"]


def test_a_plan_that_cannot_be_laid_out():
    with pytest.raises(ValueError, match="has 8 devices"):
        variants(GPT, NODE, ["dp4"], global_batch=16, dtype="fp16")


def test_levers_change_one_thing_each():
    plan = mm.Plan.parse("dp8.z1.mb2")
    table = lever_table(
        mm.model("llama-7b"), mm.cluster("dgx-a100-40"), plan, global_batch=64
    )
    rows = table.set_index("lever")
    assert rows.loc["as given", "plan"] == str(plan) and rows["plan"].is_unique
    stages = rows.loc[["ZeRO-0", "as given", "ZeRO-2", "ZeRO-3"], "device_gb"]
    assert (stages.diff().dropna() < 0).all()
    assert (
        rows.loc["full, all to drives", "nvme_gb"] > 0
        and rows.loc["recompute full", "device_gb"] < stages["as given"]
    )
    assert (rows["step_s"].notna() == rows["fits"]).all()


def test_levers_begin_without_offload():
    plan = mm.Plan.parse("dp4.mb16.full.offload-chunks")
    with pytest.raises(ValueError, match="already offloads"):
        lever_table(
            mm.model("llama-7b"), mm.cluster("hetero-4xv100"), plan, global_batch=64
        )
