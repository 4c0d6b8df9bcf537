"""requirements.txt, pyproject.toml, environment.yml and the constraints say the same."""

import re
import tomllib

import yaml

from madmax_lib import __version__
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
CONSTRAINTS = names((PROJECT / ".ci" / "constraints.txt").read_text().splitlines())


def test_everything_required_is_pinned():
    assert not set(names(REQUIREMENTS)) - set(CONSTRAINTS)
    assert all(
        rule.startswith("==") and "+" not in rule for rule in CONSTRAINTS.values()
    )
    assert CONSTRAINTS["torch"] == "==2.13.0"


def test_requirements_are_the_project_with_all_extras():
    extras = {
        name: lines
        for name, lines in PYPROJECT["project"]["optional-dependencies"].items()
        if name not in ("colab", "study")
    }
    extras = [line for lines in extras.values() for line in lines]
    declared = set(names(PYPROJECT["project"]["dependencies"])) | set(names(extras))
    assert declared == set(names(REQUIREMENTS))
    assert REQUIREMENTS[-1] == "-e ."


def test_the_page_tells_what_extras_a_user_may_want():
    table = re.findall(
        r"^\| `(\w+)` \|",
        (PROJECT / "docs" / "how-do-i-install-it.md").read_text(),
        re.M,
    )
    assert set(table) == set(PYPROJECT["project"]["optional-dependencies"]) - {
        "browser",
        "colab",
        "test",
    }


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
    assert (
        colab["torch"]
        == PYPROJECT["project"]["optional-dependencies"]["run"][0].replace(
            "torch>", "="
        )
        + ".0"
    )
    assert "-c .ci/colab.txt torch" in (PROJECT / ".ci" / "nightly").read_text()
