"""What the core can do without comes off: delete its folder, and the rest imports and
runs a notebook.
"""

import os
import shutil
import subprocess
import sys

import pytest
from core.test_layers import MODULES, PACKAGE, WINGS, is_wing

from madmax_lib.catalog.datasets import PROJECT

pytestmark = pytest.mark.slow

NIGHTLY = pytest.mark.skipif(
    not os.environ.get("MADMAX_NIGHTLY"), reason="MADMAX_NIGHTLY=1 takes off each wing"
)
NOTEBOOK = "00_tour"
# torch and Triton need not be there; each is imported in runs/ alone
IMPORT_ALL = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] == "madmax_lib":
            sys.exit(f"{name}: {error}")
"""


def without(wings, folder):
    """A copy of the package without some wings, and a function that runs Python in it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "madmax_lib", ignore=ignored)
    for name in ("notebooks", "traces", "pyproject.toml"):
        (folder / name).symlink_to(PROJECT / name)
    for wing in wings:
        path = folder / "madmax_lib" / wing
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def python(*arguments):
        environment = os.environ | {"PYTHONPATH": str(folder), "MADMAX_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    return python


def dotted(path):
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["madmax_lib", *(part for part in parts if part != "__init__")])


def rest_of(wings):
    """Modules that remain: papers may stand on any wing."""
    gone = [path for path in MODULES if any(_inside(path, wing) for wing in wings)]
    kept = [path for path in MODULES if path not in gone and path != "__main__.py"]
    if len(wings) == len(WINGS):
        kept = [path for path in kept if not path.startswith("papers/")]
    return [dotted(path) for path in kept if is_wing(path) or "papers" not in path]


def _inside(path, wing):
    return path == wing or path.startswith(f"{wing}/")


def test_the_core_imports_and_runs_without_any_wing(tmp_path):
    python = without(WINGS, tmp_path)
    result = python("-c", IMPORT_ALL, *rest_of(WINGS))
    assert result.returncode == 0, result.stderr
    result = python("-m", "madmax_lib", "run", NOTEBOOK)
    assert result.returncode == 0, result.stdout + result.stderr


@NIGHTLY
@pytest.mark.parametrize("wing", WINGS)
def test_the_rest_imports_without_a_wing(wing, tmp_path):
    # what stands on a wing goes with it
    with_it = {
        "planner/tuner": "planner/tune.py",
        "planner/changes.py": "planner/beats.py",
    }
    wings = [wing, *filter(None, [with_it.get(wing)])]
    result = without(wings, tmp_path)("-c", IMPORT_ALL, *rest_of(wings))
    assert result.returncode == 0, result.stderr
