"""Intervals: known spreads are found, sources count alike and judge each other, shares
stand for slopes.
"""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm, t
from shipped import comparison_widths, spread_of_both
from support import coverage_by_class

from madmax_lib.calibration.fit import gradient
from madmax_lib.calibration.judge import intervals
from madmax_lib.calibration.published.rows import to_steps
from madmax_lib.calibration.scale import FittingScale
from madmax_lib.calibration.verdict import accuracy
from madmax_lib.simulator.rates.parameters import bounds, shipped
from madmax_lib.simulator.steady.step_time import step_time
from madmax_lib.simulator.uncertainty import COMPONENTS, components


def table(errors, sources, **fields):
    """Rows of `folds` with these errors, dense ones of known constants unless told
    otherwise.
    """
    plain = {
        "kind": "dense",
        "n_gpus": 8,
        "global_batch": 8,
        "dtype": "bf16",
        "measured_s": 1.0,
        "group": sources,
    }
    parts = {
        "constants": 0.0,
        "stranger": 1.0,
        "mixture": 0.0,
        "rare": 0.0,
        "lora": 0.0,
        "doublings": 0.0,
    }
    rows = {"log_error": np.asarray(errors, float), "repository": sources}
    return pd.DataFrame(plain | parts | rows | fields)


def strangers(sources=60, each=20, **spread):
    """Rows whose source and constants err with known widths; half of the sources ran
    mixtures.
    """
    random, source = np.random.default_rng(0), np.repeat(np.arange(sources), each)
    mixture, open_ = 1.0 * (source % 2), random.uniform(0, 0.1, len(source))
    variance = (
        spread["stranger"] ** 2
        + mixture * spread["mixture"] ** 2
        + spread["constants"] ** 2 * open_
    )
    errors = random.standard_normal(sources)[source] * np.sqrt(variance)
    kind = np.where(mixture > 0, "mixture", "dense")
    return table(errors, source, kind=kind, mixture=mixture, constants=open_)


def test_known_spreads_are_found():
    sizes = intervals.spread(
        strangers(400, 5, stranger=0.05, mixture=0.2, constants=1.5)
    )
    ratio = {name: sizes[name] / 1.5 for name in ("constants",)} | {
        "mixture": sizes["mixture"] / 0.2
    }
    assert all(
        0.6 < value * sizes["quantile"] / 1.645 < 1.4 for value in ratio.values()
    ), sizes


def test_strangers_lie_inside_as_promised():
    rows = strangers(stranger=0.1, mixture=0.25, constants=0.5)
    sure = coverage_by_class(rows)
    assert sure.index.tolist() == ["all", "dense", "mixture"] and sure[
        "rows"
    ].tolist() == [1200, 600, 600]
    assert sure["inside"].between(0.82, 0.98).all()
    assert sure.at["mixture", "half_width"] > 1.5 * sure.at["dense", "half_width"]


def unknown_stacks(slower, spread, stacks=300, each=8):
    """Rows of stacks whose rate is slower than its kind by a factor and scatters by
    another, of steps that feel half to all of it.
    """
    random = np.random.default_rng(1)
    stack = np.repeat(np.arange(stacks), each)
    pace = -random.uniform(0.5, 1.0, len(stack))
    rate = slower + spread * random.standard_normal(stacks)[stack]
    noise = 0.06 * random.standard_normal(stacks)[stack]
    return table(noise - pace * rate, [f"s{i}" for i in stack], pace=pace)


def test_the_prior_of_strangers_is_found():
    known = strangers(300, 8, stranger=0.06, mixture=0.1, constants=0.5)
    unknown = unknown_stacks(slower=0.15, spread=0.2)
    sizes = spread_of_both(known, unknown)
    alone = intervals.spread(known)
    assert sizes["slower"] == pytest.approx(0.15, abs=0.03)
    # in sigmas of the quantile, which is that of normal errors here
    assert sizes["pace"] * sizes["quantile"] == pytest.approx(1.645 * 0.2, rel=0.15)
    # what strangers scatter more widens no known stack by much
    assert sizes["quantile"] * sizes["stranger"] == pytest.approx(
        alone["quantile"] * alone["stranger"], rel=0.15
    )


def test_strangers_like_known_stacks_have_no_spread_of_their_own():
    known = strangers(300, 8, stranger=0.1, mixture=0.1, constants=0.5)
    alike = unknown_stacks(slower=0.0, spread=0.0)
    sizes = spread_of_both(known, alike)
    assert sizes["pace"] == 0 and abs(sizes["slower"]) < 0.02


def test_a_large_source_does_not_drown_the_others():
    """900 rows of one source without error, 30 sources of one row off by 0.5: the
    interval reaches 0.5.
    """
    errors, sources = (
        np.r_[np.zeros(900), np.full(30, 0.5)],
        np.r_[np.zeros(900), np.arange(1, 31)],
    )
    rows = table(errors, sources)
    assert intervals.width_of(rows, intervals.spread(rows))[0] > 0.5 - 1e-9


def test_coverage_uses_the_other_sources_only():
    """One source is off by 1, the others by up to 0.1: it lies outside of what they
    say, and makes theirs wide.
    """
    rows = table(np.random.default_rng(0).uniform(-0.1, 0.1, 500), np.arange(500) % 5)
    rows.loc[rows["repository"] == 0, "log_error"] = 1.0
    sure = accuracy.coverage(rows)
    assert not sure.loc[rows["repository"] == 0, "inside"].any()
    assert (
        sure.loc[rows["repository"] == 0, "half_width"].max()
        < 0.2
        < sure["half_width"].median()
    )


@pytest.mark.parametrize(("groups", "freedom"), [(1, 2), (3, 2), (6, 5)])
def test_few_groups_widen_comparisons_as_student(groups, freedom):
    rows = table(0.1 * (np.arange(240) // groups % 2), np.arange(240) % groups)
    width = comparison_widths(rows)["layouts dense"]
    assert width == pytest.approx(0.1 * t.ppf(0.95, freedom) / norm.ppf(0.95), rel=0.05)


def test_comparisons_forget_what_a_group_shares():
    """Two groups far off, each with layouts that differ by 0.1: the comparison knows
    0.1, widened for two groups.
    """
    rows = table([1.0, 1.1, 1.0, 1.1, -2.0, -2.1], ["a", "a", "a", "a", "b", "b"])
    width = comparison_widths(rows)["layouts dense"]
    assert width == pytest.approx(0.1 * t.ppf(0.95, 2) / norm.ppf(0.95), rel=1e-6)
    assert comparison_widths(table([1.0, 2.0], ["a", "b"])) == {}


def test_shares_of_parts_stand_for_slopes(rows):
    """The width that constants leave a stranger, from shares, beside that from the
    slopes of each row.
    """
    strange = shipped().__class__(
        constants=shipped().constants, sensitivities=shipped().sensitivities
    )  # priors alone
    steps, names = (
        to_steps(rows),
        bounds().index[bounds()["low"] < bounds()["high"]].tolist(),
    )
    scale = FittingScale.of(names)
    slopes = gradient(steps, scale, scale.point(strange.constants), strange)
    exact = np.sqrt((slopes**2) @ bounds().loc[names, "sigma"].to_numpy(float) ** 2)
    ratio = (
        np.sqrt(components(steps, step_time(steps, strange), strange)["constants"])
        / exact
    )
    assert (
        np.median(ratio) == pytest.approx(1, abs=0.15)
        and ((ratio > 0.5) & (ratio < 2)).mean() > 0.9
    )


def test_components_are_the_sizes_shipped():
    sizes = shipped().residuals
    assert {*COMPONENTS, "quantile", "layouts dense", "layouts mixture"} == set(sizes)
    assert 0.03 < sizes["stranger"] < 0.2 and 1.4 < sizes["quantile"] < 2.6
