"""Notebooks where nothing of ours is installed: the install cell in a kernel with the
packages that Colab has.

It installs them, so `.ci/run` asks for it behind all other tests.
"""

import hashlib
import json
import os
import re
import subprocess
import sys

import nbformat
import pytest

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.runs.launch import prepare
from madmax_lib.runs.spec import RunSpec
from madmax_lib.view.notebooks.runner import notebooks

OF_RUNS = (
    "datasets==",
    "torch==",
    "triton==",
)  # there too, but nothing that these notebooks need
LINES = (PROJECT / ".ci" / "colab.txt").read_text().splitlines()
PINS = [line for line in LINES if "==" in line and not line.startswith(OF_RUNS)]
REPOSITORY = re.search(
    r'^Repository = "(.+)"', (PROJECT / "pyproject.toml").read_text(), re.M
)[1]
WIDGET = "application/vnd.jupyter.widget-view+json"
OF_PLACE = {
    "colab": {"COLAB_RELEASE_TAG": "release"},
    "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
}
VERSIONS = """
import json
from importlib.metadata import distributions
names = [(d.metadata["Name"].lower().replace("_", "-"), d.version) for d in distributions()]
json.dumps(dict(reversed(names)))  # the first of a name is the one that is imported
"""
MORE = [
    "!python -m madmax_lib doctor",
    "mm.view_timeline(timeline)",
    VERSIONS,
]  # cells after those of the notebook


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """site-packages with the packages of Colab; installed where build/ has none of the
    same pins.
    """
    if sys.version_info >= (3, 13):
        pytest.skip("the versions of .ci/colab.txt have no wheels for this Python")
    key = hashlib.sha256(" ".join([*PINS, sys.version]).encode()).hexdigest()[:12]
    kept = PROJECT / "build" / "colab" / key
    if not kept.exists():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        probe = [*pip, "download", "--no-deps", "--retries=1", "--timeout=20", "pip"]
        if subprocess.run(
            probe, cwd=tmp_path_factory.mktemp("probe"), capture_output=True
        ).returncode:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(
                "no package index can be reached"
            )
        new = kept.with_name(f"{key}.{os.getpid()}")
        run(sys.executable, "-m", "venv", "--without-pip", new)
        run(*pip, "--python", new / "bin" / "python", "install", "--no-compile", *PINS)
        new.rename(kept)
    return next(kept.glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """git's settings that make the project's address lead to a repository of the
    present files, and nothing else.
    """
    repository = tmp_path_factory.mktemp("published") / "project.git"
    settings = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
    }
    settings |= {
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }
    git = [
        "git",
        f"--git-dir={repository}",
        f"--work-tree={PROJECT}",
        "-c",
        "user.name=test",
        "-c",
        "user.email=test",
    ]
    run("git", "init", "--quiet", "--bare", repository, env=settings)
    run(*git, "add", "--all", env=settings)
    run(*git, "commit", "--quiet", "--message=present files", env=settings)
    return settings


@pytest.fixture
def session(packages, published, tmp_path):
    """Runs a notebook in a new environment and an empty folder; gives the executed
    notebook and that folder.
    """
    environment, home = tmp_path / "environment", tmp_path / "home"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    own = next(environment.glob("lib/python*/site-packages"))
    (own / "colab.pth").write_text(f"{packages}\n")
    kernel = tmp_path / "jupyter" / "kernels" / "colab" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [
        str(environment / "bin" / "python"),
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
    ]
    kernel.write_text(
        json.dumps({"argv": argv, "display_name": "colab", "language": "python"})
    )
    home.mkdir()
    env = {
        **published,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "MADMAX_NO_CACHE": "1",
    }
    env |= {
        "JUPYTER_DATA_DIR": str(tmp_path / "jupyter"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }

    def execute(name, place):
        notebook = nbformat.read(notebooks()[name], as_version=4)
        notebook.cells += [
            nbformat.v4.new_code_cell(source, id=f"more{n}")
            for n, source in enumerate(MORE)
        ]
        given, executed = tmp_path / "given.ipynb", tmp_path / "executed.ipynb"
        nbformat.write(notebook, given)
        papermill = [
            sys.executable,
            "-m",
            "papermill",
            given,
            executed,
            "--kernel=colab",
            "--no-progress-bar",
        ]
        run(*papermill, cwd=home, env=env | OF_PLACE[place])
        return nbformat.read(executed, as_version=4), home

    return execute


def run(*command, env=None, **options):
    """A command that must succeed, without what the tests' own environment says of
    Python, Jupyter and us.
    """
    ours = re.compile(
        r"MADMAX_|PYTHON|JUPYTER|IPYTHON|VIRTUAL_ENV|GIT_|MPL|COLAB_|KAGGLE_"
    )
    outside = {
        name: value for name, value in os.environ.items() if not ours.match(name)
    }
    done = subprocess.run(
        list(map(str, command)),
        env=outside | (env or {}),
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def shown(cell, kind="text/plain"):
    """What a cell printed or displayed as `kind`."""
    parts = (
        out.get("text", "") or out.get("data", {}).get(kind, "") for out in cell.outputs
    )
    return "".join(map(str, parts)).replace("\r\n", "\n")


@pytest.mark.skipif(
    not os.environ.get("MADMAX_COLAB"),
    reason="MADMAX_COLAB=1 installs Colab's packages here",
)
@pytest.mark.parametrize(
    ("name", "place", "figure"),
    [
        ("00_tour", "colab", "tour/overlap"),
        ("20_overlap", "kaggle", "overlap/per_rank"),
    ],
)
def test_a_notebook_brings_what_it_needs_and_changes_nothing(
    session, name, place, figure
):
    executed, home = session(name, place)
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert not [
        out for cell in code for out in cell.outputs if out.output_type == "error"
    ]
    assert (home / "figures" / f"{figure}.svg").exists()
    doctor, widget, versions = code[-len(MORE) :]
    assert f"\nplace: {place}, figures go to {home / 'figures'}\n" in shown(doctor)
    assert shown(widget, WIDGET), "no live widget"
    beside = next(cell for cell in code if "beside_hta(" in cell.source)
    assert "<table" in shown(beside, "text/html")
    installed = json.loads(shown(versions).strip("'"))
    pins = dict(line.split("==") for line in PINS)
    assert {package: installed[package] for package in pins} == pins
    assert not {"torch", "jupyterlab"} & set(installed)
    assert {"madmax-workbench", "holistictraceanalysis", "anywidget"} <= set(installed)


def test_a_gpu_without_bf16_refuses_it_before_a_process_starts(tmp_path, monkeypatch):
    """As the T4 of Colab and Kaggle; with emulation torch says that any GPU supports
    it.
    """
    torch = pytest.importorskip("torch")
    native = {"including_emulation": False}
    monkeypatch.setattr(sys.modules[prepare.__module__], "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda **asked: asked != native
    )
    with pytest.raises(
        ValueError,
        match="dtype='bf16', but Tesla T4 does not compute in it; give dtype='fp16'",
    ):
        prepare(RunSpec(dtype="bf16"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for allowed in (RunSpec(dtype="fp16"), RunSpec(dtype="bf16", device="cpu")):
        assert prepare(allowed, tmp_path / allowed.dtype).is_dir()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **asked: True)
    assert prepare(RunSpec(dtype="bf16"), tmp_path / "a100").is_dir()
