"""Stacks that nobody has met: what is laid aside, and what the shipped prior promises
of those that no fit has seen.
"""

import numpy as np
import pytest
from shipped import new_rows, with_prior
from support import local_or_skip

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.calibration import predict, read_rows
from madmax_lib.calibration.fit import usable
from madmax_lib.calibration.judge.intervals import folds
from madmax_lib.simulator.rates.parameters import shipped

PRIOR = "stack_rate:stranger"


@pytest.fixture(scope="module")
def met():
    """Visible rows of strangers that can be judged, with predictions."""
    local_or_skip("published_strangers/rows.csv")
    table = new_rows()
    read = read_rows(table)
    read = read[usable(read)]
    read = read[[not case.software for case in read["case"]]]
    step = predict(table.loc[read.index])
    measured = read["measured_s"].astype(float)
    return read.assign(
        error=np.abs(step["predicted_s"] / measured - 1),
        inside=measured.between(step["low_s"], step["high_s"]),
        half_width=(step["high_s"] - step["low_s"]) / step["predicted_s"] / 2,
    )


def test_a_third_is_laid_aside():
    local_or_skip("published_strangers/rows.csv")
    visible, aside = new_rows(), new_rows(aside=True)
    assert not set(visible.index) & set(aside.index)
    assert 0.25 < len(aside) / (len(visible) + len(aside)) < 0.42


def test_strangers_lie_inside_as_promised(met):
    assert 0.85 <= met["inside"].mean() < 1
    assert met.groupby("software")["inside"].mean().min() >= 0.6
    dense = met[met["kind"] == "dense"]
    assert dense["half_width"].median() < 0.35


@pytest.mark.parametrize(("kind", "most"), [("dense", 0.12), ("encoder", 0.15)])
def test_first_contact_errs_by_little(met, kind, most):
    assert met.loc[met["kind"] == kind, "error"].median() < most


def test_the_prior_is_what_the_sizes_say():
    sizes = shipped().residuals
    own = with_prior(shipped(), {**sizes, "slower": 0.1, "pace": 0.2})
    assert own.residuals == sizes
    low, high = own.intervals[PRIOR]
    assert np.log(high / low) == pytest.approx(2 * 1.645 * 0.2 / sizes["constants"])
    case = ("llama3-8b", "dgx-h100", "dp8.z3")
    options = {"global_batch": 64, "software": "my-own"}
    with pytest.warns(UserWarning, match="my-own"):
        steps = [
            mm.estimate(*case, **options, parameters=each).iloc[0]
            for each in (own, with_prior(own, {**sizes, "slower": 0.2, "pace": 0.4}))
        ]
    near, far = steps
    assert near["step_s"] < far["step_s"]
    assert near["high_s"] / near["low_s"] < far["high_s"] / far["low_s"]


def test_a_stack_left_out_is_priced_as_nobody_knows_it():
    """Of few stacks each is fitted without the other, whose rows have the rate of
    strangers; rows keep their index and their measured time.
    """
    table = catalog.table("published_train")
    table = table[table["source"].str.contains("fms-fsdp|torchtitan")]
    rows = read_rows(table)
    unknown = {"software": "unknown", "like": "stranger"}
    strange = read_rows(table.assign(**unknown))
    table = folds(rows, by=rows["software"], priced=strange)
    assert table.index.equals(rows.index)
    assert (table["software"] == "unknown").all() and table["fold"].nunique() > 1
    assert (table["measured_s"].astype(float) == rows["measured_s"].astype(float)).all()
    assert (table["pace"] < 0).all()
