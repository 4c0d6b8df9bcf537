"""Widths of intervals: strangers are wider than known stacks, the wider the farther
they are from what was fitted.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.simulator.rates.parameters import Parameters, bounds, shipped

H100 = mm.cluster("dgx-h100", nodes=8)


def half_width(plan="dp64.z1", model="llama2-7b", cluster=H100, batch=512, **options):
    row = mm.estimate(
        mm.model(model), cluster, plan, global_batch=batch, **options
    ).iloc[0]
    return float(np.log(row["high_s"] / row["step_s"]))


def with_device(**fields):
    return replace(H100, device=replace(H100.device, **fields))


@pytest.mark.parametrize(
    ("known", "stranger"),
    [
        ({"software": "nemo"}, {}),  # software that nobody named
        ({}, {"cluster": with_device(family="other")}),
        (
            {"software": "megatron-core"},
            {"software": "primus"},
        ),  # of which few rows are known
        ({}, {"model": "mixtral-8x7b"}),
        (
            {},
            {
                "cluster": mm.cluster("dgx-h100", nodes=2048),
                "plan": "dp16384.z1",
                "batch": 16384,
            },
        ),
        ({}, {"sequence": 524288}),
    ],
    ids=["software", "family", "few rows", "mixture", "devices", "sequence"],
)
def test_strangers_are_wider(known, stranger):
    assert half_width(**known) < 0.98 * half_width(**stranger)


def test_a_plan_has_the_same_interval_alone_and_in_a_table():
    plans = pd.DataFrame(
        {"dp": [64, 8, 16], "tp": [1, 8, 2], "pp": [1, 1, 2], "zero": [3, 1, 1]}
    )
    widths = mm.estimate("llama2-7b", H100, plans, global_batch=512)["high_s"]
    for index, row in plans.iterrows():
        alone = mm.estimate(
            "llama2-7b", H100, mm.Plan(**row.to_dict()), global_batch=512
        )["high_s"].item()
        assert widths[index] == pytest.approx(alone, rel=1e-9)


def test_parameters_without_residuals_know_no_width():
    assert np.isnan(half_width(parameters=Parameters()))
    assert shipped().residuals["layouts dense"] < shipped().residuals["layouts mixture"]


def test_unfitted_constants_are_as_uncertain_as_their_priors():
    places, covariance = Parameters().uncertainty
    width = np.sqrt(np.diag(covariance))
    assert (
        width[places["gemm_efficiency:other-16"]]
        == bounds().at["gemm_efficiency:other-16", "sigma"]
    )
    assert (
        width[places["device_rate:other"]] == 0
    )  # devices at the power of their family
    assert width[places["stack_rate:other"]] > 0.05
    places, covariance = shipped().uncertainty
    own = [places[name] for name in shipped().fitted]
    np.testing.assert_array_equal(
        covariance[np.ix_(own, own)], np.array(shipped().covariance)
    )
    assert ((bounds()["group"] != "") == (bounds()["field"] != "")).all()
