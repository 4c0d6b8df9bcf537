"""Measured overlap is what a row says, ours what its simulated step does."""

import re

import pytest

import madmax_lib as mm
from madmax_lib.calibration.verdict.overlap import overlap_facts
from madmax_lib.catalog.datasets import PROJECT


@pytest.fixture(scope="module")
def facts():
    return overlap_facts()


def test_every_fact_is_predicted(facts):
    assert facts["predicted"].notna().all()
    shares = facts[facts["what"].isin(["overlap", "exposed_share", "comm_share"])]
    assert shares[["measured", "predicted"]].stack().between(0, 1).all()


def test_predicted_is_of_the_simulated_step(facts):
    row = facts[
        (facts["what"] == "overlap") & facts["run"].str.startswith("vit-huge dp2.z3")
    ].iloc[0]
    plan, run = (
        "dp2.z3.mb16.full.bucket1000000000",
        {"global_batch": 32, "dtype": "fp16", "software": "deepspeed"},
    )
    step = mm.simulate("vit-huge", "kaggle-2xt4", plan, **run)
    assert row["predicted"] == pytest.approx(
        mm.breakdown(step)["overlap"].mean(), rel=0.01
    )


def test_overlap_is_nearer_than_a_constant_guess(facts):
    median = facts.groupby("what")["measured"].transform("median")
    away = (facts["measured"] - median).abs()
    errors = facts.assign(error=facts["error"].abs(), constant=away)
    table = errors.groupby("what")[["error", "constant"]].mean()
    assert table.at["overlap", "constant"] > 3 * table.at["overlap", "error"]
    assert (
        table.loc[["overlap", "exposed_share", "speed_ratio"], "error"].max() < 0.1
    )  # asked for
    page = " ".join((PROJECT / "docs" / "how-accurate-is-it.md").read_text().split())
    for what in ("overlap", "exposed_share"):
        error, constant = 100 * table.loc[what, ["error", "constant"]]
        assert re.search(
            rf"by {error:.0f}( points on average)? \(a constant guess: {constant:.0f}\)",
            page,
        ), what
    assert f"by {100 * table.at['speed_ratio', 'error']:.0f} % of the ratio" in page
