"""First code cell of every notebook, where nothing of ours is installed: by name, else
from the repository, else it stops with a sentence.

A folder of wheels stands for the package index, a git repository here for the one that
the cell names; Colab's own packages are in test_colab.py.
"""

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import IPython
import nbformat
import pytest

from madmax_lib import __version__
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.view.notebooks.runner import notebooks

CELL = nbformat.read(notebooks()["00_tour"], as_version=4).cells[1].source
REPOSITORY = re.search(
    r'^Repository = "(.+)"', (PROJECT / "pyproject.toml").read_text(), re.M
)[1]
# runs the cell as Jupyter does, beside IPython's folder, which pip does not look into
SCRIPT = """
import sys
sys.path.append(sys.argv[1])
from IPython.core.interactiveshell import InteractiveShell
result = InteractiveShell.instance().run_cell(open(sys.argv[2]).read())
if result.success:
    import madmax_lib
    print("installed", madmax_lib.WAY)
sys.exit(not result.success)
"""
# a build backend without requirements, for a repository that pip installs offline
BACKEND = """
import pathlib, shutil
def build_wheel(folder, config_settings=None, metadata_directory=None):
    wheel = next(pathlib.Path().glob("*.whl"))
    return pathlib.Path(shutil.copy(wheel, folder)).name
"""


def wheel(folder, way, version="9.0"):
    """A wheel of our name with nothing but the way it came."""
    path = Path(folder) / f"madmax_workbench-{version}-py3-none-any.whl"
    about = f"madmax_workbench-{version}.dist-info"
    files = {
        "madmax_lib/__init__.py": f"WAY = {way!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: madmax-workbench\nVersion: {version}\nProvides-Extra: colab\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {f"{about}/RECORD": record}).items():
            archive.writestr(name, text)


@pytest.fixture
def place(tmp_path):
    """Runs the cell in an environment of its own, which has pip and nothing else."""
    site = Path(IPython.__file__).parents[1]
    if (site / "madmax_lib").exists():
        pytest.skip("the workbench lies in the folder of IPython, which the cell sees")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True
    )
    own = next(tmp_path.glob("env/lib/python*/site-packages"))
    # not imported: setuptools, which torch compiles with, refuses a process that has pip
    (own / "pip").symlink_to(distribution("pip").locate_file("pip"))
    for folder in ("index", "home"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cell.py").write_text(CELL)
    repository = tmp_path / "repository"
    env = {
        **{k: v for k, v in os.environ.items() if not re.match("PYTHON|PIP_|GIT_|MADMAX", k)},
        "PATH": f"{tmp_path / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        **{"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")},
        **{"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"},
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }  # fmt: skip

    def run():
        python = tmp_path / "env" / "bin" / "python"
        done = subprocess.run(
            [python, "-c", SCRIPT, site, tmp_path / "cell.py"],
            cwd=tmp_path / "home", env=env, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run, tmp_path


def publish(folder):
    """A repository that pip can build without an index."""
    folder.mkdir()
    wheel(folder, "from the repository")
    (folder / "backend.py").write_text(BACKEND)
    build = 'requires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(f"[build-system]\n{build}")
    for line in ("init -q", "add -A", "-c user.name=a -c user.email=a commit -qm a"):
        subprocess.run(["git", *line.split()], cwd=folder, check=True)


@pytest.mark.parametrize(
    ("version", "is_published", "says"),
    [
        ("9.0", True, "installed by name"),
        ("0.1", True, "installed from the repository"),  # older than the notebooks
        (None, True, "installed from the repository"),
        (None, False, "No workbench: switch the network on"),
    ],
)
def test_the_first_cell_installs_or_stops(place, version, is_published, says):
    run, folder = place
    if version:
        wheel(folder / "index", "by name", version)
    if is_published:
        publish(folder / "repository")
    status, output = run()
    assert says in output, output[-2000:]
    assert status == int(says.startswith("No"))


def test_the_cell_asks_for_the_version_of_its_notebooks():
    assert f'[colab]>={__version__.rpartition(".")[0]}"' in CELL
    assert f'git+{REPOSITORY}"' in CELL
    assert len(CELL.splitlines()) <= 8
