"""What rows say about constants: no data, perfect data, bounds, correlation."""

from dataclasses import replace

import numpy as np
import pytest

from madmax_lib import catalog
from madmax_lib.calibration.fit import fit, usable
from madmax_lib.calibration.judge.intervals import (
    STATES,
    constants_of,
    determined_by,
)
from madmax_lib.calibration.published.rows import read_rows
from madmax_lib.calibration.scale import scaled
from madmax_lib.simulator.rates.parameters import Parameters, bounds, shipped, start

NAMES = ("gemm_efficiency:ampere-16", "network_share:ib", "contention")
SIGMA = bounds().loc[list(NAMES), "sigma"].to_numpy(float)


def fitted(values=None, widths=(0.1, 0.95, 0.3), correlation=0.0):
    """Parameters with this posterior: standard deviations over the prior widths, in the
    scale of the fit.
    """
    values = values or {}
    constants, deviations = (
        start().constants | values,
        np.diag(np.array(widths) * SIGMA),
    )
    covariance = deviations @ (np.eye(3) + correlation * (1 - np.eye(3))) @ deviations
    ends = {name: (0.9 * constants[name], 1.1 * constants[name]) for name in NAMES}
    return Parameters(
        constants=constants,
        intervals=ends,
        fitted=NAMES,
        covariance=tuple(map(tuple, covariance)),
    )


def test_learned_is_the_share_of_the_prior_variance():
    found = constants_of(fitted())
    assert found["learned"].to_numpy() == pytest.approx(
        1 - np.array([0.1, 0.95, 0.3]) ** 2
    )
    assert found["moved"].to_numpy() == pytest.approx(0, abs=1e-12)
    assert found["state"].tolist() == ["fixed by rows", "prior alone", "fixed by rows"]
    first, second, linear = bounds().loc[list(NAMES), "start"]
    assert scaled(bounds().loc[list(NAMES)], "start") == pytest.approx(
        [np.log(first), np.log(second), linear]
    )


def test_states():
    at_bound = constants_of(fitted({NAMES[1]: bounds().at[NAMES[1], "high"]}))
    assert at_bound.loc[NAMES[1], "state"] == "at a bound"
    far = fitted(
        {NAMES[1]: start().constants[NAMES[1]] * np.exp(-1.5 * SIGMA[1])},
        widths=(0.1, 2, 0.3),
    )
    found = constants_of(far)
    assert (
        found.loc[NAMES[1], "state"] == "pulled off its prior"
        and found.loc[NAMES[1], "learned"] == 0
    )
    assert found.loc[NAMES[1], "moved"] == pytest.approx(-1.5)
    some = constants_of(fitted(widths=(0.7, 0.1, 0.7)))
    assert some["state"].tolist() == [
        "rows and prior",
        "fixed by rows",
        "rows and prior",
    ]


def test_rows_determine_the_constants_of_their_own_devices():
    """A100s those of Ampere, one row at a time; none that of Hopper."""
    rows = read_rows(catalog.table("published_train"))
    rows = rows[usable(rows) & (rows["gpu"] == "a100-80")]
    names = ("gemm_efficiency:ampere-16", "gemm_efficiency:hopper-16")
    parameters = replace(shipped(), fitted=names, intervals={}, covariance=())
    found = determined_by(parameters, rows)
    assert len(rows) / 2 < found.loc[names[0], "rows"] <= len(rows)
    assert 1 < found.loc[names[0], "sources"] <= rows["repository"].nunique()
    assert found.loc[names[1]].tolist() == [0, 0, ""]
    alone = determined_by(parameters, rows.head(1))
    assert alone.loc[names[0], "most of"] == rows["repository"].iloc[0]


def test_a_fit_of_few_rows_leaves_the_prior():
    rows = read_rows(catalog.table("published_train"))
    few = fit(rows[usable(rows)].head(3), starts=1, only=list(NAMES))
    found = constants_of(few)
    assert found.loc["network_share:ib", "learned"] < 0.5 and set(
        found["state"]
    ) <= set(STATES)
    assert (found["interval_low"] <= found["fitted"]).all() and (
        found["fitted"] <= found["interval_high"]
    ).all()


def test_the_shipped_fit():
    found = constants_of(shipped())
    assert len(found) == len(shipped().fitted) and found["learned"].between(0, 1).all()
    assert (found["state"] == "fixed by rows").sum() >= 15 and (
        found["state"] == "at a bound"
    ).sum() <= 8
    with pytest.raises(ValueError, match="nothing was fitted"):
        constants_of(Parameters())
