"""The scripts of examples/ run, short enough to be read at once."""

import runpy

import pytest

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT, dataset

SCRIPTS = sorted((PROJECT / "examples").glob("*.py"))


def main_of(name):
    return runpy.run_path(str(PROJECT / "examples" / f"{name}.py"))["main"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_read_at_once(path):
    assert (
        len(path.read_text().splitlines()) <= 40
        and path.stem in (PROJECT / "docs" / "README.md").read_text()
    )


def test_own_model_on_own_cluster(capsys):
    found = main_of("own_model_own_cluster")()
    table = found.table
    assert (table["low_s"] < table["step_s"]).all() and (
        table["step_s"] < table["high_s"]
    ).all()
    assert table["launched_s"].is_monotonic_increasing and str(found).startswith(
        "my-3b on 32 x L40S"
    )
    assert "step_s" in capsys.readouterr().out


def test_gate_in_ci_fails_what_is_slower_and_cannot_pass_noise(capsys):
    before, after = str(dataset("gpt-before")), str(dataset("gpt-after"))
    assert main_of("gate_in_ci")(before, before) == 3
    assert (
        main_of("gate_in_ci")(before, after) == 1
        and "linear" in capsys.readouterr().out
    )


def test_a_job_of_slurm_is_waited_for(tmp_path, monkeypatch):
    """sbatch and srun are scripts that run at once; a plan with cp is one that train.py
    fails on.
    """
    scripts = {
        "sbatch": (
            "for word; do case $word in --wrap=*) exec sh -c "
            '"${word#--wrap=}";; esac; done'
        )
    }
    scripts["srun"] = (
        "for word; do last=$word; done; case $last in *cp*) exit 1;; *) echo 1.5 > "
        "$last;; esac"
    )
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    measure = runpy.run_path(str(PROJECT / "examples" / "tune_on_slurm.py"))["measure"]
    assert (
        measure(mm.Plan.parse("dp8.tp2")) == 1.5
        and measure(mm.Plan.parse("dp8.cp2")) is None
    )


def test_tuning_on_slurm_asks_for_jobs_until_it_knows(tmp_path, monkeypatch, capsys):
    """In the place of a job: the fewer parts a plan has, the faster; one fails."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def launch(plan):
        asked.append(str(plan))
        return None if plan.zero == 3 else 1.0 + plan.tp * plan.pp

    tuner = main_of("tune_on_slurm")(launch, trials=6)
    assert len(asked) == len(set(asked)) == 6 and (tmp_path / "tuning.json").exists()
    parts = {text: mm.Plan.parse(text) for text in asked if "z3" not in text}
    assert tuner.best.tp * tuner.best.pp == min(
        plan.tp * plan.pp for plan in parts.values()
    )
    assert f"fastest: {tuner.best}" in capsys.readouterr().out
