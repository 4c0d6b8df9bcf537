"""Workflows and the packaged action: their shell steps, run here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from madmax_lib.catalog.datasets import PROJECT

ACTION = yaml.safe_load((PROJECT / "action" / "action.yml").read_text())
REPOSITORY = re.search(
    r'^Repository = "https://github.com/(.+)"',
    (PROJECT / "pyproject.toml").read_text(),
    re.M,
)[1]
STEPS = {step.get("name"): step for step in ACTION["runs"]["steps"]}
WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))


def filled(text, inputs):
    """A text of the action with the expressions that GitHub fills in."""
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: inputs[match[1]], text)


@pytest.mark.parametrize(
    ("baseline", "traces", "gate", "status", "says"),
    [
        ("gpt-before", "gpt-after", "3%", 1, "- verdict: fail"),
        ("gpt-before", "gpt-before", "50%", 0, "- verdict: pass"),
        ("gpt-before", "gpt-before", "3%", 3, "- verdict: cannot tell"),
        ("gpt-before", "a;exit nowhere", "3%", 2, "a;exit: no such file"),
    ],
)
def test_the_action_judges_a_pair_and_writes_the_summary(
    tmp_path, baseline, traces, gate, status, says
):
    (tmp_path / "traces").symlink_to(PROJECT / "traces")
    command = tmp_path / "madmax"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m madmax_lib "$@"\n')
    command.chmod(0o755)
    folders = " ".join(f"traces/{name}" for name in traces.split())
    given = {"baseline": f"traces/{baseline}", "traces": folders, "gate": gate}
    assert set(given) == set(ACTION["inputs"]) - {"python"}
    step, summary = STEPS["compare"], tmp_path / "summary.md"
    env = {name: filled(text, given) for name, text in step["env"].items()}
    env |= {"GITHUB_STEP_SUMMARY": str(summary), "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env=os.environ | env | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    text = summary.read_text()
    assert says in text and ("| --- |" in text) == (status != 2)


def test_the_action_installs_the_version_it_lies_in():
    """Of the checkout that GitHub makes of the action, whose folder is below."""
    install = STEPS["install"]["run"].rsplit(maxsplit=1)[1].strip('"')
    folder = install.replace("$GITHUB_ACTION_PATH", str(PROJECT / "action"))
    assert Path(folder).samefile(PROJECT)
    uses = f"uses: {REPOSITORY}/action@main"
    for page in ("action/action.yml", "docs/did-my-change-make-it-slower.md"):
        assert uses in (PROJECT / page).read_text()
    # what a user writes reaches the shell through its environment only
    assert not any("${{" in step.get("run", "") for step in STEPS.values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_steps_that_are_here(path):
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert ("run" in step) != ("uses" in step)
        for script in re.findall(r"bash (\S+)", step.get("run", "")):
            assert (PROJECT / script).exists()
        for target in re.findall(r"make (\w+)", step.get("run", "")):
            assert f"\n{target}: " in (PROJECT / "Makefile").read_text()
    assert path.stem != "publish" or (
        workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
        and not re.search(r"password|token:", path.read_text().replace("id-token:", ""))
    )
