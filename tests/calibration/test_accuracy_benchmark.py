"""The yardstick of predictions, which is a script: a source does not predict itself,
all are compared alike.
"""

import runpy

import numpy as np
import pandas as pd
import pytest

from madmax_lib.catalog.datasets import PROJECT

SETS = ("fitted sources, each left out", "sources never fitted", "layouts of one stack")


@pytest.fixture(scope="module")
def accuracy():
    return runpy.run_path(str(PROJECT / "benchmarks" / "accuracy.py"))


@pytest.fixture
def rows():
    """Two fitted sources at 2 and 4 times the peak's seconds, a third at 3 on another
    device, and a stranger.
    """
    return pd.DataFrame({
        "repository": ["a", "a", "b", "c", "new"], "gpu": ["h100", "h100", "h100", "a100", "h100"], "dtype": "bf16",
        "set": [SETS[0]] * 4 + [SETS[1]], "measured_s": [2.0, 2.0, 4.0, 3.0, 10.0],
    }, index=[f"rows:{line}" for line in range(5)])  # fmt: skip


def test_a_rate_is_the_other_fitted_sources(accuracy, rows):
    seconds = accuracy["rated"](rows, pd.Series(1.0, rows.index))
    # a: only b has its device; b: only a; c: no other a100, so the median of all
    # others; new: a and b
    assert seconds.tolist() == [4, 4, 2, 2, 2]


def test_tools_are_compared_on_rows_that_all_predict(accuracy, rows):
    seconds = pd.DataFrame(
        {
            "ours": rows["measured_s"] * 1.1,
            "theirs": [2.4, np.nan, 6.0, np.nan, np.nan],
        },
        rows.index,
    )
    table = accuracy["side_by_side"](rows, seconds, rows["repository"])
    assert table.loc["a"].tolist() == [2, 1, "10.0 / 10.0", "20.0 / 20.0", "2.0"]
    assert table.loc["new"].tolist() == [
        1,
        1,
        "10.0 / 10.0",
        "",
        "",
    ]  # theirs predicts none, and takes none away


def test_absent_tables_are_said_in_a_line(accuracy, monkeypatch, capsys):
    monkeypatch.setitem(
        accuracy["tables"].__globals__, "FILES", {"more": "nowhere/more.csv"}
    )
    assert list(accuracy["tables"]()) == ["published_train"]
    assert capsys.readouterr().out.startswith(
        "without more: nowhere/more.csv is in none of"
    )
