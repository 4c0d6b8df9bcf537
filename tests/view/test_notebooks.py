"""Every notebook runs headless, and its figures show the committed numbers."""

import ast
import json
import re
import shutil
import subprocess

import nbformat
import pandas as pd
import pytest

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.view.notebooks.runner import (
    _declared_parameters,
    notebooks,
    run_notebook,
)

NOTEBOOKS = notebooks()
SLOW = ["24", "30", "31", "50", "52", "53", "55", "60", "62"]  # of 15 s and more
REPOSITORY = re.search(
    r'^Repository = "https://github.com/(.+)"',
    (PROJECT / "pyproject.toml").read_text(),
    re.M,
)[1]
INSTALL = (
    nbformat.read(NOTEBOOKS["00_tour"], as_version=4).cells[1].source
)  # the same in every notebook


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name[:2] in SLOW))
        for name in NOTEBOOKS
    ],
)
def test_runs_and_redraws_the_committed_figures(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MADMAX_OFFLINE", "1")
    result = run_notebook(
        NOTEBOOKS[name],
        {"quick": True},
        build=tmp_path / "build",
        figures=tmp_path / "figures",
    )
    assert not result.error
    drawn = [figure for figure in result.figures if not figure.startswith("optional/")]
    assert drawn, "a notebook draws at least one figure"
    for figure in drawn:
        committed = PROJECT / "figures" / f"{figure}.csv"
        assert committed.exists(), f"{figure} is not committed: run make run"
        new = pd.read_csv(tmp_path / "figures" / f"{figure}.csv")
        tolerance = {"rtol": 1e-4, "atol": 1e-9}  # fits end alike
        pd.testing.assert_frame_equal(
            new, pd.read_csv(committed), check_dtype=False, **tolerance
        )


def test_the_calibration_of_a_single_rank_is_shown(tmp_path, monkeypatch):
    """It has no collectives, as on a machine with one GPU."""
    monkeypatch.chdir(tmp_path)
    machine = tmp_path / "machine"
    shutil.copytree(PROJECT / "traces" / "testbed", machine)
    (machine / "links.csv").unlink()
    where = {"build": tmp_path / "build", "figures": tmp_path / "figures"}
    given = {"quick": True, "machine": str(machine)}
    result = run_notebook(NOTEBOOKS["32_this_machine"], given, **where)
    assert not result.error


def test_every_committed_figure_is_drawn_by_a_notebook():
    source = "".join(path.read_text() for path in NOTEBOOKS.values())
    for csv in (PROJECT / "figures").rglob("*.csv"):
        name = csv.relative_to(PROJECT / "figures").with_suffix("").as_posix()
        if name.startswith("optional/"):  # not committed
            continue
        assert f'\\"{name}\\"' in source, f"no notebook draws {name}"
        assert (
            csv.with_suffix(".svg").exists()
            and json.loads(csv.with_suffix(".json").read_text())["inputs"]
        )


def test_every_figure_names_a_commit_of_this_history():
    def git(*arguments):
        done = subprocess.run(
            ["git", *arguments],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.strip()

    if not (PROJECT / ".git").exists() or git(
        "rev-parse", "--is-shallow-repository"
    ) != (0, "false"):
        pytest.skip("needs a checkout with its history")
    origins = [
        json.loads(path.read_text()) for path in (PROJECT / "figures").rglob("*.json")
    ]
    commits = {origin["commit"] for origin in origins if "commit" in origin}
    assert not [
        commit
        for commit in commits
        if git("merge-base", "--is-ancestor", commit, "HEAD")[0]
    ]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_has_the_shape_of_a_typed_documented_function(name):
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    nbformat.validate(notebook)
    first, *cells = notebook.cells
    assert (
        first.source.startswith("# ")
        and f"github/{REPOSITORY}/blob/main/notebooks/{name}.ipynb" in first.source
    )
    # GitHub shows code without pictures; the workflow of pages publishes both
    owner, project = REPOSITORY.split("/")
    assert f"(https://{owner}.github.io/{project}/{name}.html)" in first.source
    assert len(notebook.cells) <= 40
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "make strip"
    assert not re.search(
        r"^\s*(def|class|for|while) ", "\n".join(cell.source for cell in code), re.M
    )
    assert code[0].source == INSTALL and "mm.setup()" in code[1].source
    assert max(len(cell.source.splitlines()) for cell in [code[0], *code[3:]]) <= 8
    assert "PROJECT" not in code[1].source, (
        "traces are where SHIPPED says: an installation has no checkout"
    )
    parameters = _declared_parameters(NOTEBOOKS[name])
    assert list(parameters)[0] == "quick" and parameters["quick"]["default"] == "True"
    assert all(
        about["inferred_type_name"] != "None" and about["help"]
        for about in parameters.values()
    )
    tree = ast.parse("\n".join(cell.source for cell in code[3:]))
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert set(parameters) <= used, "a parameter that changes nothing"
    assert (
        first.source.count("**") == 2 and "You see" in first.source
    )  # the question, and what is shown


@pytest.mark.parametrize("name", ["10_profile_vit", "11_profile_llm"])
def test_what_only_an_if_binds_is_used_only_under_it(name):
    """What is drawn of runs that completed, where none has."""
    code = [
        cell.source
        for cell in nbformat.read(NOTEBOOKS[name], as_version=4).cells[2:]
        if cell.cell_type == "code"
    ]
    always, under = set(), {}
    for statement in ast.parse("\n".join(code)).body:
        test = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        assert {under.get(word, test) for word in used - always} <= {test}, (
            f"{name}: {ast.unparse(statement)}"
        )
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        under |= dict.fromkeys(bound - always, test) if test else {}
        always |= set() if test else bound
