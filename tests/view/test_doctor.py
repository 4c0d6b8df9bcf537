import subprocess
import sys

import nbformat
import pytest

from madmax_lib.__main__ import main
from madmax_lib.view.notebooks import doctor
from madmax_lib.view.notebooks.doctor import _verdict
from madmax_lib.view.notebooks.runner import notebooks


def notebook(path, *cells):
    v4 = nbformat.v4
    cells = [
        v4.new_markdown_cell(text[3:])
        if text.startswith("md ")
        else v4.new_code_cell(text)
        for text in cells
    ]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    ("cells", "packages", "rest"),
    [(["import madmax_lib as mm"], "", ""), (["from madmax_lib.runs.launch import sweep"], "torch", ""),
     (["from madmax_lib.traces import hta"], "", ""), (["hta.beside_hta(x)"], "holistictraceanalysis", ""),
     (["if gpu:\n    hta.analysis(x)"], "holistictraceanalysis", ""),
     (['if find_spec("hta"):\n    y = hta.beside_hta(x)\n    y\nelse:\n    no'], "", ""),
     (['gpu = optional_dataset("x", "y")', "if gpu:\n    hta.analysis(gpu)"], "", "input x"),
     (["from madmax_lib import traces as t", "t.hta.overlap(x)"], "holistictraceanalysis", ""),
     (["from madmax_lib import traces", "traces.idle(x)"], "", ""), (["mm.launch(spec, folder)"], "torch", ""),
     (["from madmax_lib import calibration, runs"], "torch", ""), (["md See runs and hta."], "", ""),
     (['t = mm.dataset("vit-ddp")', 'd = optional_dataset("x", "optional/y")'], "", "input x"),
     (["%matplotlib inline\n!ls\nx = mm.dataset(name)"], "", ""),
     (["md On GPUs, run this notebook with `quick=False`.", 'mm.dataset("x")'], "", "input x, a GPU")],
)  # fmt: skip
def test_needs_are_read_from_the_cells(monkeypatch, tmp_path, cells, packages, rest):
    path = notebook(tmp_path / "a.ipynb", *cells)
    for gpu, absent in ((False, rest), (True, rest.removesuffix(", a GPU"))):
        verdict = f"quick only, for the full size: {absent}" if absent else "full size"
        assert _verdict(path, has_gpu=gpu) == verdict
    monkeypatch.setattr(doctor, "version", lambda name: None)
    assert (
        _verdict(path, has_gpu=True) == f"does not run: package {packages} missing"
    ) == bool(packages)


@pytest.fixture(autouse=True)
def _no_selftest(monkeypatch):
    """What tests/runs/test_selftest.py asks is not asked here."""
    monkeypatch.setattr(doctor, "selftest", lambda: [("driver", "missing", "no")])


def test_every_notebook_and_package_has_a_line(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    verdicts = dict(
        line.strip().split(": ", 1)
        for line in text.split("\nnotebooks\n")[1].splitlines()
    )
    assert list(verdicts) == list(notebooks())
    assert all(
        verdict.startswith(("full size", "quick only", "does not run"))
        for verdict in verdicts.values()
    )
    assert verdicts["10_profile_vit"].endswith("a GPU")
    assert all(f" {name}: " in text for name in doctor._PACKAGES)
    assert "works   pandas: 2" in text and " resnet-ddp-a100: " in text


def test_the_place_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("MADMAX_FIGURES", str(tmp_path))
    assert f"place: kaggle, figures go to {tmp_path}" in doctor.report().splitlines()


def test_a_lean_installation_is_told_what_it_lacks(tmp_path):
    """Nothing but the standard library, pandas and NumPy can be imported."""
    lean = (
        "import sys; sys.modules.update(dict.fromkeys(['nbformat', 'papermill', "
        "'torch', 'IPython', 'matplotlib']))"
    )
    code = (
        f"{lean}; from madmax_lib.view.notebooks.doctor import report; print(report())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "fails   papermill: ModuleNotFoundError" in done.stdout
        and "\n  10_profile_vit: " in done.stdout
    )


def test_what_is_absent_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    assert (
        "missing holistictraceanalysis: is not installed: comparison with HTA [hta]"
        in doctor.report()
    )
    assert "10_profile_vit: does not run: package torch" in doctor.report()
    lacking = {
        line.split(":")[0].strip()
        for line in doctor.report().splitlines()
        if "not run: package hol" in line
    }
    assert not lacking & {"00_tour", "20_overlap", "40_simulate_step"}
    monkeypatch.setattr("madmax_lib.view.notebooks.runner.SHIPPED", tmp_path)
    assert (
        "notebooks: " in doctor.report().splitlines()[-1]
        and "no such directory" in doctor.report()
    )
