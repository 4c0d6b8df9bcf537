import json
import os
import subprocess
import sys

import nbformat
import pytest

from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT, dataset
from madmax_lib.view.notebooks.page import Result
from madmax_lib.view.notebooks.runner import _locked_copy, notebooks, run_notebook


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("trase=x", "20_overlap has no parameter 'trase'"),
        *((pair, "is not of type") for pair in ("quick=maybe", "step=1.5", "step=one")),
    ],
)
def test_bad_parameters_list_the_known_ones(capsys, pair, message):
    assert main(["run", "20_overlap", "-p", pair]) == 2
    error = capsys.readouterr().err
    assert message in error and "parameters of 20_overlap" in error
    assert (
        "quick: bool = True  only inputs that are on this machine" in error
        and "step: int = -1" in error
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "quick"], "'quick' is not of the form name=value"),
        (["-p", "step=1", "-p", "step=2"], "parameter step is given twice"),
    ],
)
def test_parameters_that_are_not_pairs(capsys, arguments, message):
    assert main(["run", "20_overlap", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[0]


def test_parameters_reach_the_notebook_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(dataset("vit-fsdp"))
    assert (
        main(["run", "20_overlap", "-p", "trace=mine", "-p", "quick=True", "-o", "out"])
        == 0
    )
    assert "ok" in capsys.readouterr().out
    origin = json.loads(
        (tmp_path / "out" / "figures" / "overlap" / "temporal.json").read_text()
    )
    assert origin["parameters"] == {"quick": True, "trace": "mine", "step": -1}
    assert (tmp_path / "out" / "20_overlap.html").stat().st_size > 10_000


def test_a_failing_cell_leaves_the_executed_notebook(tmp_path, capsys):
    assert (
        main(["run", "20_overlap", "-p", "trace=/no/such/trace", "-o", str(tmp_path)])
        == 1
    )
    assert (
        "failed: FileNotFoundError: /no/such/trace: no such file"
        in capsys.readouterr().out
    )
    notebook = nbformat.read(tmp_path / "20_overlap.ipynb", as_version=4)
    assert any(
        output.output_type == "error"
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert (tmp_path / "20_overlap.html").exists()


@pytest.mark.parametrize(("error", "status"), [("", 0), ("KeyError: 'a'", 1)])
def test_site_runs_every_notebook_and_leaves_the_committed_figures(
    tmp_path, monkeypatch, capsys, error, status
):
    folders = set()

    def executed(path, parameters, *, build, figures, progress):
        folders.add(figures)
        nbformat.write(nbformat.v4.new_notebook(), tmp_path / path.name)
        return Result(path.stem, tmp_path / path.name, 1.0, error=error)

    two = {
        name: PROJECT / "notebooks" / f"{name}.ipynb"
        for name in ("00_tour", "20_overlap")
    }
    monkeypatch.setattr("madmax_lib.view.notebooks.runner.notebooks", lambda: two)
    monkeypatch.setattr("madmax_lib.view.notebooks.runner.run_notebook", executed)
    assert main(["site", "-o", str(tmp_path / "site")]) == status
    pages = {page.stem for page in (tmp_path / "site").iterdir()}
    docs = {page.stem for page in (PROJECT / "docs").glob("[a-z]*.md")}
    assert pages == {"index", *two} | docs and folders == {
        PROJECT / "build" / "figures"
    }
    assert capsys.readouterr().out.splitlines()[-1] == str(
        tmp_path / "site" / "index.html"
    )


def test_runs_side_by_side_have_names_of_their_own(tmp_path):
    with (
        _locked_copy(tmp_path, "00_tour") as first,
        _locked_copy(tmp_path, "00_tour") as second,
        _locked_copy(tmp_path, "01_explore") as other,
    ):
        assert first == (tmp_path / "00_tour.ipynb", 1) and second == (
            tmp_path / "00_tour-2.ipynb",
            2,
        )
        assert other[1] == 1
    with _locked_copy(tmp_path, "00_tour") as again:
        assert again == first


def test_notebooks_are_listed_with_their_questions_and_parameters(capsys):
    assert main(["run", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert (
        len(listed) == len(notebooks())
        and listed[0].startswith("00_tour  ")
        and all("?" in line for line in listed)
    )
    with pytest.raises(SystemExit) as left:
        main(["run", "20", "--help"])
    told = capsys.readouterr().out
    assert (
        left.value.code == 0
        and "parameters of 20_overlap:" in told
        and "step: int = -1" in told
    )


def test_a_dead_kernel_is_a_failed_notebook(tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("import os; os._exit(1)")]
    )
    nbformat.write(notebook, tmp_path / "dies.ipynb")
    result = run_notebook(tmp_path / "dies.ipynb", {}, build=tmp_path / "build")
    assert (
        result.error.startswith("DeadKernelError")
        and (tmp_path / "build" / "dies.html").exists()
    )


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 0, "dur": '
        '1, "tid": 7}]}'
    )
    assert main(["report", str(trace), "-o", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().err == (
        f"madmax: warning: {trace}: no rank in distributedInfo, events or file name; "
        "taken as rank 0\n"
    )


def test_an_interruption_is_one_line_and_status_130(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("madmax_lib.__main__._site", interrupted)
    assert main(["site"]) == 130 and capsys.readouterr().err == "madmax: interrupted\n"


def test_report_of_a_directory(tmp_path, capsys):
    output = tmp_path / "report.html"
    assert main(["report", str(dataset("gpt-ddp")), "-o", str(output)]) == 0
    assert (
        "ranks: 2" in capsys.readouterr().out
        and "<h2>Distributed" in output.read_text()
    )
    files = sorted(map(str, dataset("gpt-ddp").glob("rank*.json.gz")))
    for traces in (files, [str(dataset("gpt-ddp") / "rank*.gz")]):
        assert (
            main(["report", *traces, "-o", str(output)]) == 0
            and "ranks: 2" in capsys.readouterr().out
        )


@pytest.mark.filterwarnings("default")
def test_an_empty_trace_is_bad_input(tmp_path, capsys):
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert (
        "the trace holds no events" in capsys.readouterr().err
        and not (tmp_path / "r.html").exists()
    )


def test_a_pipe_that_is_closed_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "madmax_lib", "breakdown", str(dataset("gpt-ddp"))]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
