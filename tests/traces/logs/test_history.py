"""Which run of a series turned slower, and what differs in its contract."""

import json

import numpy as np
import pandas as pd
import pytest

from madmax_lib.__main__ import main
from madmax_lib.traces import history


def series(folder, slow_from, fast_again_from=20):
    rng = np.random.default_rng(0)
    for number in range(20):
        run = folder / f"run{number:02}"
        run.mkdir()
        is_slow = number >= slow_from
        times = (1.05 if is_slow else 1.0) * rng.normal(1, 0.01, 60)
        times *= 0.7 if number >= fast_again_from else 1.0
        table = pd.DataFrame({"step": range(60), "total_s": times})
        table.to_csv(run / "steps.csv", index=False)
        env = {"device": "H100", "driver": "570" if is_slow else "560", "torch": "2.13"}
        (run / "env.json").write_text(json.dumps(env))
        (run / "spec.json").write_text(json.dumps({"strategy": "dp2", "seed": number}))
    return folder


def test_the_first_slow_run_and_what_differs(tmp_path, capsys):
    folder = series(tmp_path, 12)
    table = history(folder)
    assert len(table) == 20 and table.attrs["first_slow"] == "run12"
    assert abs(table.attrs["growth"] - 0.05) < 0.01
    differs = [
        {"name": "env.driver", "before": "560", "after": "570", "about": "machine"}
    ]
    assert table.attrs["differs"] == differs
    assert main(["history", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["differs"] == differs


def test_a_larger_gain_later_hides_no_slower_run(tmp_path):
    attrs = history(series(tmp_path, 6, 12)).attrs
    assert attrs["first_slow"] == "run06" and abs(attrs["growth"] - 0.05) < 0.01


def test_no_run_is_slower(tmp_path):
    attrs = history(series(tmp_path, 20)).attrs
    assert attrs["first_slow"] == "" and attrs["differs"] == []
    assert "3 runs or more on each side" in attrs["limits"]


def test_the_newest_run_alone(tmp_path):
    attrs = history(series(tmp_path, 19)).attrs
    # one slow run is no change of the series, and yet unlike those before it
    assert attrs["first_slow"] == ""
    assert abs(attrs["newest_growth"] - 0.05) < 0.01
    assert attrs["newest_confidence"] > 0.999


def test_the_newest_run_is_like_those_since_the_last_change(tmp_path):
    attrs = history(series(tmp_path, 12)).attrs
    assert abs(attrs["newest_growth"]) < 0.01
    assert 0.01 < attrs["newest_confidence"] < 0.99


def test_three_runs_before_the_newest_are_needed(tmp_path):
    folder = series(tmp_path, 3)
    for run in sorted(folder.iterdir())[4:]:
        for file in run.iterdir():
            file.unlink()
        run.rmdir()
    assert history(folder).attrs["newest_confidence"] > 0.99
    for file in (folder / "run00").iterdir():
        file.unlink()
    attrs = history(folder).attrs
    assert (
        np.isnan(attrs["newest_confidence"])
        and abs(attrs["newest_growth"] - 0.05) < 0.01
    )


@pytest.mark.parametrize(("last_s", "confidence"), [(1.0, 0.5), (1.05, 1.0)])
def test_runs_whose_times_are_rounded_to_the_same(tmp_path, last_s, confidence):
    for number, step_s in enumerate([1.0] * 5 + [last_s]):
        (tmp_path / f"run{number}").mkdir()
        table = pd.DataFrame({"step": range(9), "total_s": step_s})
        table.to_csv(tmp_path / f"run{number}" / "steps.csv", index=False)
    attrs = history(tmp_path).attrs
    assert attrs["newest_confidence"] == pytest.approx(confidence)
