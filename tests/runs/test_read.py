"""Run directories: tables of steps that were cut short, bad files, runs side by side."""

from dataclasses import replace

import pytest

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.runs.launch import prepare
from madmax_lib.runs.read import (
    COLUMNS,
    read_run,
    read_runs,
    read_steps,
    runs_table,
    write_json,
)
from madmax_lib.runs.spec import RunSpec
from madmax_lib.runs.summary import write_summary

HEADER = ",".join(COLUMNS) + "\n"
ROW = "0,0.2,0.1,0.1,0.2,0.1,0.5,8,1024,5.5,0.1,,,0,,,,1e8,,,,\n"


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (HEADER, 0),
        (HEADER + ROW, 1),
        (HEADER + ROW + ROW.replace("0,", "1,", 1)[:20], 1),
    ],
)
def test_a_table_that_was_cut_short_is_readable(tmp_path, content, rows):
    (tmp_path / "steps.csv").write_text(content)
    assert len(read_steps(tmp_path)) == rows


BAD_SPECS = ("[", "[1]", '{"modle": "gpt-tiny"}', '{"speed": 5}', "\xff")
BAD_SPECS += ('{"resolved": {"x": 1}}', '{"resolved": [1]}')


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("steps.csv", "step,loss\n0,1\n", "not a table of steps"),
        ("steps.csv", "", "not a table of steps"),
        ("steps.csv", HEADER + "0,1\n", "column 'samples'"),
        ("steps.csv", HEADER + ROW.replace("5.5", "high"), "to float: 'high'"),
        *(("spec.json", content, "") for content in BAD_SPECS),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, says):
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        read_steps(tmp_path) if name == "steps.csv" else read_run(tmp_path)


def test_folders_without_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no run directories here"):
        read_runs(tmp_path / "nowhere")


def test_a_run_that_never_made_a_step_has_a_summary(tmp_path):
    prepare(RunSpec(device="cpu"), tmp_path)
    write_summary(tmp_path, "failed", "reason")
    run = read_run(tmp_path)
    assert run.summary["status"] == "failed"
    assert run.summary["samples_per_s"] is None and not len(run.steps)


def test_a_run_with_a_bad_file_does_not_hide_the_others(tmp_path):
    prepare(RunSpec(device="cpu"), tmp_path / "good")
    for name in ("bad", "worse"):
        prepare(RunSpec(device="cpu"), tmp_path / name)
    (tmp_path / "bad" / "spec.json").write_text("{")
    write_json(tmp_path / "worse" / "summary.json", {"step_s": 3})
    bad = r"left out: .*bad/spec.json: not JSON"
    worse = r"left out: .*worse/summary.json: step_s=3 must be of type dict"
    with pytest.warns(UserWarning, match=bad), pytest.warns(UserWarning, match=worse):
        assert list(read_runs(tmp_path)) == ["good"]


def test_an_mfu_above_1_is_not_read_without_a_word(tmp_path):
    prepare(RunSpec(device="cpu"), tmp_path)
    write_json(tmp_path / "env.json", {"peak_source": "measured"})
    write_json(tmp_path / "summary.json", {"mfu": 2.22})
    says = "MFU 222%: the peak is too low, measured"
    with pytest.warns(UserWarning, match=says):
        read_run(tmp_path)


def test_one_row_per_run_by_dimensions():
    recorded = read_runs(PROJECT / "traces" / "runs" / "llm")
    run = recorded["moe-tiny_dp2.tp2"]
    assert run.resolved.device == "cpu" and run.resolved.starts == (0,)
    cut = replace(recorded["moe-tiny_dp1"], summary={})
    table = runs_table({"moe-tiny_dp2.tp2": run, "moe-tiny_dp1": cut})
    assert table["strategy"].tolist() == ["dp1", "dp2.tp2"]
    assert table["dimensions"].tolist() == [0, 2]
    assert table["status"].tolist() == ["unfinished", "completed"]
    assert table["samples_per_s"].isna().tolist() == [True, False]
    assert table["step_s"].iloc[1] == run.summary["step_s"]["median"]


def test_scaling_and_bubbles_side_by_side():
    """Each rank of a perfect run is as fast as one alone; the phases of an equal
    pipeline leave its bubble.
    """
    recorded = read_runs(PROJECT / "traces" / "runs" / "llm")
    rates = {"dp1": 10.0, "dp2": 20.0, "pp2": 15.0, "dp2.tp2": None}
    times = {"step_s": {"median": 1.0}, "phases_s": {"forward": 0.2, "backward": 0.4}}
    runs = {}
    for strategy, rate in rates.items():
        name = f"moe-tiny_{strategy}"
        summary = times | {"samples_per_s": rate}
        runs[name] = replace(recorded[name], summary=summary)
    table = runs_table(runs).set_index("strategy")
    assert table["scaling"].dropna().to_dict() == {"dp1": 1.0, "dp2": 1.0, "pp2": 0.75}
    assert table["bubble"].dropna().to_dict() == {"pp2": pytest.approx(0.4)}
    del runs["moe-tiny_dp1"]  # the one that does not fit
    table = runs_table(runs).set_index("strategy")
    assert table["scaling"].dropna().to_dict() == {"dp2": 1.0, "pp2": 0.75}
    # each of these trains something else
    for other in ({"model": "gpt-tiny"}, {"dtype": "bf16"}, {"sequence": 64}):
        run = runs["moe-tiny_dp2"]
        faster = run.summary | {"samples_per_s": 100.0 * len(runs)}
        spec = replace(run.spec, **other)
        runs[f"mine-{min(other)}"] = replace(run, spec=spec, summary=faster)
    table = runs_table(runs).set_index("run")
    mine = table[table.index.str.startswith("mine")]
    assert len(mine) == 3 and (mine["scaling"] == 1).all()
    assert table["scaling"].max() == 1
    # the spec's, whatever the folder is called
    assert (mine["strategy"] == "dp2").all()
