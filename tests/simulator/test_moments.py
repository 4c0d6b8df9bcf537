"""Memory moment by moment: conservation, room, and the peak that `fits` knows."""

from dataclasses import replace

import pytest

import madmax_lib as mm
from madmax_lib.simulator.offload.fits import fits, gpt_shape, moments
from madmax_lib.simulator.offload.placement import Policy

STATIC = Policy(share=1.0)
FOUR, GPT = mm.cluster("hetero-4xv100"), gpt_shape(4096, 50)
CHUNKS = mm.Plan.parse("dp4.mb8.full.offload-chunks")


def test_dynamic_chunks_fill_the_device_and_no_more():
    table = moments(GPT, FOUR, CHUNKS, global_batch=32, dtype="fp16")
    assert (table["device_bytes"] <= table["room_bytes"] * (1 + 1e-9)).all()
    assert (table["host_bytes"] <= table["host_room_bytes"]).all()
    model = 4 * table["model_bytes"] + table["host_bytes"]
    assert model.to_numpy() == pytest.approx(model.iloc[0])
    assert model.iloc[0] == pytest.approx(
        14 * GPT.parameters, rel=0.02
    )  # chunk tails beside it
    assert table["host_bytes"].idxmax() == table["other_bytes"].idxmax()


@pytest.mark.parametrize(
    "plan",
    [
        "mb8.full.offload-chunks",
        "z2.mb2.full.offload-optimizer",
        "z3.mb4.full.offload-all",
    ],
)
def test_the_peak_is_that_of_fits(plan):
    model, plan = gpt_shape(3072, 30), mm.Plan.parse(f"dp4.{plan}")
    options = {"global_batch": 4 * plan.micro_batch, "policy": STATIC, "dtype": "fp16"}
    table = moments(model, FOUR, plan, **options)
    left = fits(model, FOUR, plan, **options).margins_bytes
    assert table["room_bytes"].iloc[0] - table["device_bytes"].max() == pytest.approx(
        left["device"], abs=1.0
    )
    assert table["host_room_bytes"].iloc[0] - table[
        "host_bytes"
    ].max() == pytest.approx(left["host"], abs=1.0)


def test_activations_come_and_go():
    table = moments(GPT, FOUR, CHUNKS, global_batch=32, dtype="fp16", policy=STATIC)
    forward, backward = (
        table[table["phase"] == phase] for phase in ("forward", "backward")
    )
    assert forward["layer"].tolist() == list(range(50)) and backward[
        "layer"
    ].tolist() == list(range(49, -1, -1))
    assert (forward["other_bytes"].diff().dropna() > 0).all() and (
        backward["other_bytes"].diff().dropna() < 0
    ).all()
    assert table["host_bytes"].nunique() == 1 and table["model_bytes"].nunique() == 1


def test_checkpoints_lie_on_the_host():
    model, plan = gpt_shape(3072, 30), mm.Plan.parse("dp4.z3.mb8.full.offload-all")
    policies = (STATIC, replace(STATIC, checkpoints=True))
    here, there = (
        moments(model, FOUR, plan, global_batch=32, dtype="fp16", policy=policy)
        for policy in policies
    )
    assert there["device_bytes"].max() < here["device_bytes"].max()
    assert there["host_bytes"].max() > here["host_bytes"].max()
    with pytest.raises(ValueError, match=r"dp4\.z3 offloads nothing"):
        moments(GPT, FOUR, mm.Plan(dp=4, zero=3), global_batch=4, dtype="fp16")
