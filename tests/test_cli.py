import json

import nbformat
import pytest

from madmax_lib.__main__ import main
from madmax_lib.datasets import dataset


def test_unknown_parameter_lists_the_known_ones(capsys):
    assert main(["run", "20_overlap", "-p", "trase=x"]) == 2
    error = capsys.readouterr().err
    assert "20_overlap has no parameter 'trase'" in error
    assert "quick: bool = True  only inputs that are on this machine" in error and "step: int = -1" in error


@pytest.mark.parametrize("pair", ["quick=maybe", "step=1.5", "step=one"])
def test_wrong_type_is_refused(capsys, pair):
    assert main(["run", "20_overlap", "-p", pair]) == 2
    error = capsys.readouterr().err
    assert "is not of type" in error and "parameters of 20_overlap" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "99_nothing"], "no notebook '99_nothing'; there are 00_tour, 20_overlap"),
        (["run", "-p", "quick=True"], "-p needs the name of one notebook"),
        (["run", "20_overlap", "-p", "quick"], "'quick' is not of the form name=value"),
        (["report", "/no/such/run"], "/no/such/run: no such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(arguments) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("madmax: ") and message in first


def test_parameters_reach_the_notebook_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(dataset("vit-fsdp"))
    assert main(["run", "20_overlap", "-p", "trace=mine", "-p", "quick=True", "-o", "out"]) == 0
    assert "ok" in capsys.readouterr().out
    origin = json.loads((tmp_path / "out" / "figures" / "overlap" / "temporal.json").read_text())
    assert origin["parameters"] == {"quick": True, "trace": "mine", "step": -1}
    assert (tmp_path / "out" / "20_overlap.html").stat().st_size > 10_000


def test_a_failing_cell_leaves_the_executed_notebook(tmp_path, capsys):
    assert main(["run", "20_overlap", "-p", "trace=/no/such/trace", "-o", str(tmp_path)]) == 1
    assert "failed: FileNotFoundError: /no/such/trace: no such file" in capsys.readouterr().out
    notebook = nbformat.read(tmp_path / "20_overlap.ipynb", as_version=4)
    assert any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", []))
    assert (tmp_path / "20_overlap.html").exists()


def test_report_of_a_directory(tmp_path, capsys):
    output = tmp_path / "report.html"
    assert main(["report", str(dataset("gpt-ddp")), "-o", str(output)]) == 0
    assert "2 ranks" in capsys.readouterr().out and "Who waits for whom" in output.read_text()


def test_doctor_names_versions_and_inputs(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "pandas 2" in text and "dlrm-8xv100:" in text
