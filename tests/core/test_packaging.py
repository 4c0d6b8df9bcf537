"""requirements.txt, pyproject.toml, environment.yml and the constraints say the same."""

import csv
import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest
import yaml

from madmax_lib import __version__
from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT

WORD = re.compile(r"^([A-Za-z0-9._-]+)\s*(.*)$")


def names(lines):
    """{normalised name: version rule} of requirement lines."""
    wanted = (line.split("#")[0].strip() for line in lines if not line.startswith("-"))
    found = (WORD.match(line) for line in wanted if line)
    return {
        re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match
    }


PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())
REQUIREMENTS = (PROJECT / "requirements.txt").read_text().splitlines()
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# what comes with jupyterlab, nbconvert or ipykernel
FROM_OTHERS = {"IPython", "nbclient", "nbformat", "traitlets"}
CONSTRAINTS = names((PROJECT / ".ci" / "constraints.txt").read_text().splitlines())


def test_everything_required_is_pinned():
    assert not set(names(REQUIREMENTS)) - set(CONSTRAINTS)
    assert all(
        rule.startswith("==") and "+" not in rule for rule in CONSTRAINTS.values()
    )
    assert CONSTRAINTS["torch"] == "==2.13.0"


def test_requirements_are_the_project_with_all_extras():
    lines = [
        line
        for name, extra in EXTRAS.items()
        if name not in ("colab", "study")
        for line in extra
        if not line.startswith("madmax-workbench[")
    ]
    declared = set(names(PYPROJECT["project"]["dependencies"])) | set(names(lines))
    assert declared == set(names(REQUIREMENTS))
    assert REQUIREMENTS[-1] == "-e ."
    is_brought = {*EXTRAS} - {"all", "colab", "plot", "test"}  # notebook brings plot
    assert EXTRAS["all"] == [f"madmax-workbench[{','.join(sorted(is_brought))}]"]


def test_what_a_missing_package_names_brings_it():
    """The extra in each line of base/extras.json, and in the doctor's list."""
    data = PROJECT / "madmax_lib"
    lines = json.loads((data / "base" / "extras.json").read_text())
    for line in lines.values():
        package, extra = re.fullmatch(
            r"(\S+) is not installed: pip install (?:'madmax-workbench\[(.+)\]'|\1)",
            line,
        ).groups()
        if extra and package not in FROM_OTHERS:
            assert package.lower() in names(EXTRAS[extra]), line
    for row in csv.DictReader(
        (data / "view/data/packages.csv").read_text().splitlines()
    ):
        bracket = re.search(r"\[.+\]$", row["purpose"])
        if row["module"] in lines and "pip install '" in lines[row["module"]]:
            assert bracket and bracket[0] in lines[row["module"]], row


def test_without_a_package_calls_and_commands_name_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "papermill", None)
    assert main(["run", "00_tour", "-p", "step=1"]) == 2
    line = "papermill is not installed: pip install 'madmax-workbench[notebook]'"
    assert capsys.readouterr().err == f"madmax: {line}\n"
    script = "import sys; sys.modules['matplotlib'] = None; import madmax_lib as mm; mm.setup"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stderr.endswith(
        f"{line}\n".replace("papermill", "matplotlib").replace("notebook", "plot")
    )


def test_the_page_tells_what_extras_a_user_may_want():
    table = re.findall(
        r"^\| `(\w+)` \|",
        (PROJECT / "docs" / "how-do-i-install-it.md").read_text(),
        re.M,
    )
    assert set(table) == {*EXTRAS} - {"colab", "test"}


def test_pandas_is_held_back_only_where_hta_needs_it():
    assert names(REQUIREMENTS)["pandas"] == ">=2.2,<3"
    assert names(PYPROJECT["project"]["dependencies"])["pandas"] == ">=2.2"
    assert not {"torch", "jupyterlab"} & set(
        names(PYPROJECT["project"]["dependencies"])
    )


def test_environment_installs_the_requirements_with_the_pins():
    """As separate lines: pip takes one option per line of the file that conda makes of
    them.
    """
    python, _, pip = yaml.safe_load((PROJECT / "environment.yml").read_text())[
        "dependencies"
    ]
    assert pip["pip"] == ["-r requirements.txt", "-c .ci/constraints.txt"]
    assert python == "python" + PYPROJECT["project"]["requires-python"]


def test_one_version_everywhere():
    """The topmost heading of CHANGELOG is what is installed and cited."""
    assert f"version: {__version__}\n" in (PROJECT / "CITATION.cff").read_text()
    assert (
        re.search(r"^## (\S+)", (PROJECT / "CHANGELOG.md").read_text(), re.M)[1]
        == __version__
    )


def test_ci_is_one_script():
    workflow = (PROJECT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"run: (.*)", workflow) == ["bash .ci/run"]
    script = (PROJECT / ".ci" / "run").read_text()
    for part in ("make lint", "make test", "house.py", ".ci/nightly"):
        assert part in script


def test_runs_take_the_torch_of_colab():
    colab = names((PROJECT / ".ci" / "colab.txt").read_text().splitlines())
    assert colab["torch"] == EXTRAS["run"][0].replace("torch>", "=") + ".0"
    assert "-c .ci/colab.txt torch" in (PROJECT / ".ci" / "nightly").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["", "mm.search(1, slower, 64)"])
def test_type_checkers_accept_the_calls_of_the_docs(tmp_path, wrong):
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    script = tmp_path / "use.py"
    script.write_text((PROJECT / "tests" / "core" / "typed_use.py").read_text() + wrong)
    text, _, status = api.run(["--strict", "--follow-imports=silent", str(script)])
    assert (status, "arg-type" in text) == (int(bool(wrong)), bool(wrong)), text


def test_a_build_leaves_the_folder_of_executed_notebooks_alone():
    """`madmax run` writes build/NAME.ipynb, `pip install .` all of its own below."""
    if not find_spec("setuptools"):
        pytest.skip("no setuptools")
    # in a process of its own: setuptools must come before distutils
    code = """
import setuptools
from distutils.core import run_setup
build = run_setup("setup.py", stop_after="init").get_command_obj("build")
build.ensure_finalized()
print(build.build_base, build.build_lib)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, check=True
    )
    base, lib = done.stdout.split()
    assert base == "build/package" and lib.startswith("build/package/")
