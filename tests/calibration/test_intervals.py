"""Intervals: closed forms of the weighted quantile, few groups widen, classes apart, rows out of sight."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm, t

from madmax_lib.calibration import intervals
from madmax_lib.calibration.intervals import coverage_by_class, interval_quantiles, quantiles_of


def table(errors, groups=None, **fields):
    """Rows of `folds` with these errors, of one kind unless told otherwise."""
    rows = np.arange(len(errors))
    plain = {"experts": 0, "unfused": 0, "zero": 1, "tp": 1, "pp": 1, "family": "hopper", "calibrated": True}
    group = rows if groups is None else groups
    return pd.DataFrame({"log_error": np.asarray(errors, float), "group": group, "fold": rows % 5, **plain, **fields})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "hopper data parallel"),
        ({"tp": 8}, "hopper model parallel"),
        ({"pp": 2, "unfused": 1, "family": "ampere"}, "ampere old model parallel"),
        ({"zero": 3, "tp": 8}, "hopper sharded"),
        ({"experts": 8, "zero": 3}, "hopper mixture"),
    ],
)
def test_kinds(fields, kind):
    rows = table([0.0, 0.0], **fields)
    assert (intervals.kind_of(rows) == kind).all()
    assert (intervals.class_of(rows) == ("mixture" if "experts" in fields else "dense")).all()


def test_many_even_errors_give_their_90_percent():
    """Scores 0..1 in equal steps, each its own group: the quantile is 0.9, whatever the signs."""
    errors = np.linspace(0, 1, 2001) * np.where(np.arange(2001) % 2, 1, -1)
    found = interval_quantiles(table(errors))
    assert set(found) == {"all", "dense", "hopper data parallel"}
    for low, high in found.values():
        assert high == pytest.approx(0.9, abs=2e-3) and low == -high


def test_a_large_group_does_not_drown_the_others():
    """900 rows of one group without error, 30 groups of one row off by 0.5: weights 30 and 30."""
    errors, groups = np.r_[np.zeros(900), np.full(30, 0.5)], np.r_[np.zeros(900), np.arange(1, 31)]
    assert interval_quantiles(table(errors, groups))["all"][1] == pytest.approx(0.5, rel=0.05)
    assert interval_quantiles(table(errors, np.arange(930)))["all"][1] == 0.0


@pytest.mark.parametrize(("groups", "freedom"), [(1, 2), (3, 2), (6, 5), (300, 299)])
def test_few_groups_widen_as_student(groups, freedom):
    found = interval_quantiles(table(np.full(600, 0.1), np.arange(600) % groups))
    assert found["all"][1] == pytest.approx(0.1 * t.ppf(0.95, freedom) / norm.ppf(0.95))


def test_a_small_kind_leans_on_its_class_and_not_on_the_other():
    dense, mixture = table(np.full(400, 0.1)), table(np.full(400, 0.4), experts=8)
    few = table(np.full(15, 0.2), tp=8)
    rows = pd.concat([dense, mixture, few], ignore_index=True)
    found = interval_quantiles(rows.assign(group=np.arange(len(rows))))
    widening = t.ppf(0.95, 14) / norm.ppf(0.95)
    assert found["hopper model parallel"][1] == pytest.approx(widening * (0.2 + 0.1) / 2, rel=1e-3)
    assert found["hopper mixture"][1] == pytest.approx(0.4, rel=0.01)
    assert found["dense"][1] == pytest.approx(0.1, rel=0.01)


def test_quantiles_of_rows():
    rows = table([0.0] * 3).assign(experts=[0, 0, 8], family=["hopper", "other", "hopper"])
    known = {"dense": [-1.0, 1.0], "mixture": [-0.4, 0.4], "hopper data parallel": [-0.1, 0.1]}
    assert quantiles_of(rows, known).tolist() == [[-0.1, 0.1], [-2.5, 2.5], [-0.4, 0.4]]
    assert quantiles_of(rows, {"all": [-9.0, 9.0]})[:, 1].tolist() == [9.0, 22.5, 9.0]
    assert np.isnan(quantiles_of(rows, {})).all()


def test_coverage_uses_the_other_folds_only():
    """One fold is off by 1, the others by up to 0.1: it lies outside of what they say, and makes theirs wide."""
    made = table(np.random.default_rng(0).uniform(-0.1, 0.1, 500)).assign(fold=np.arange(500) % 5)
    made.loc[made["fold"] == 0, "log_error"] = 1.0
    found = intervals.coverage(made)
    assert not found.loc[made["fold"] == 0, "inside"].any() and found.loc[made["fold"] > 0, "inside"].all()
    assert found.loc[made["fold"] == 0, "half_width"].max() < 0.11 < 1 < found.loc[made["fold"] > 0, "half_width"].min()


def test_exchangeable_rows_are_covered_as_promised():
    random = np.random.default_rng(1)
    made = table(random.normal(0, 0.1, 4000)).assign(experts=np.arange(4000) % 2 * 8, source=np.arange(4000) % 20)
    sure = coverage_by_class(made)
    assert sure.index.tolist() == ["dense", "mixture", "all"] and sure["rows"].tolist() == [2000, 2000, 4000]
    assert sure["inside"].between(0.88, 0.92).all()
    assert sure["half_width"].to_numpy() == pytest.approx(np.sinh(0.1645), rel=0.05)
    assert coverage_by_class(made, made, by="source")["inside"].between(0.88, 0.92).all()


def test_comparisons_forget_what_a_group_shares():
    """Two groups far off, each with layouts that differ by 0.1: the comparison knows 0.1, widened for two groups."""
    made = table([1.0, 1.1, 1.0, 1.1, -2.0, -2.1], ["a", "a", "a", "a", "b", "b"])
    width = intervals.comparison_quantiles(made)["layouts dense"][1]
    assert width == pytest.approx(0.1 * t.ppf(0.95, 2) / norm.ppf(0.95), rel=1e-6)
    assert intervals.comparison_quantiles(table([1.0, 2.0])) == {}
