import json
import os
import subprocess
import sys

import nbformat
import pytest
from support import cells

from madmax_lib.__main__ import main
from madmax_lib.catalog.datasets import PROJECT, dataset
from madmax_lib.view.notebooks.page import Result
from madmax_lib.view.notebooks.runner import _locked_copy, notebooks, run_notebook

OF_OVERLAP = (
    "parameters of 20_overlap",
    "quick: bool = True  draw two of the eight V100s",
    "step: int = -1",
)


@pytest.mark.parametrize(
    ("pair", "message"),
    cells("""
    trase=x | 20_overlap has no parameter 'trase'
    quick=maybe | is not of type
    step=1.5 | is not of type
    step=one | is not of type
    """),
)
def test_bad_parameters_list_the_known_ones(capsys, pair, message):
    assert main(["run", "20_overlap", "-p", pair]) == 2
    said = capsys.readouterr().err
    assert all(words in said for words in (message, *OF_OVERLAP))


@pytest.mark.parametrize(
    ("arguments", "message"),
    cells("""
    -p quick | 'quick' is not of the form name=value
    -p step=1 -p step=2 | parameter step is given twice
    """),
)
def test_parameters_that_are_not_pairs(capsys, arguments, message):
    assert main(["run", "20_overlap", *arguments.split()]) == 2
    assert message in capsys.readouterr().err.splitlines()[0]


def test_parameters_reach_the_notebook_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(dataset("vit-fsdp"))
    line = "run 20_overlap -p trace=mine -p quick=True -o out"
    assert main(line.split()) == 0
    assert "ok" in capsys.readouterr().out
    out = tmp_path / "out"
    origin = json.loads((out / "figures" / "overlap" / "temporal.json").read_text())
    assert origin["parameters"] == {"quick": True, "trace": "mine", "step": -1}
    assert (out / "20_overlap.html").stat().st_size > 10_000


def test_a_failing_cell_leaves_the_executed_notebook(tmp_path, capsys):
    line = f"run 20_overlap -p trace=/no/such/trace -o {tmp_path}"
    assert main(line.split()) == 1
    says = "failed: FileNotFoundError: /no/such/trace: no such file"
    assert says in capsys.readouterr().out
    notebook = nbformat.read(tmp_path / "20_overlap.ipynb", as_version=4)
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    assert "error" in {one.output_type for one in outputs}
    assert (tmp_path / "20_overlap.html").exists()


@pytest.mark.parametrize(("error", "status"), [("", 0), ("KeyError: 'a'", 1)])
def test_site_runs_every_notebook_and_leaves_the_committed_figures(
    tmp_path, monkeypatch, capsys, error, status
):
    folders = set()
    site = tmp_path / "site"

    def executed(path, parameters, *, build, figures, progress):
        folders.add(figures)
        nbformat.write(nbformat.v4.new_notebook(), tmp_path / path.name)
        return Result(path.stem, tmp_path / path.name, 1.0, error=error)

    names = ("00_tour", "20_overlap")
    two = {name: PROJECT / "notebooks" / f"{name}.ipynb" for name in names}
    monkeypatch.setattr(f"{run_notebook.__module__}.notebooks", lambda: two)
    monkeypatch.setattr(f"{run_notebook.__module__}.run_notebook", executed)
    assert main(["site", "-o", str(site)]) == status
    pages = {page.stem for page in site.iterdir()}
    docs = {page.stem for page in (PROJECT / "docs").glob("[a-z]*.md")}
    assert pages == {"index", *two} | docs
    assert folders == {PROJECT / "build" / "figures"}
    assert capsys.readouterr().out.splitlines()[-1] == str(site / "index.html")


def test_runs_side_by_side_have_names_of_their_own(tmp_path):
    with (
        _locked_copy(tmp_path, "00_tour") as first,
        _locked_copy(tmp_path, "00_tour") as second,
        _locked_copy(tmp_path, "01_explore") as other,
    ):
        assert first == (tmp_path / "00_tour.ipynb", 1)
        assert second == (tmp_path / "00_tour-2.ipynb", 2) and other[1] == 1
    with _locked_copy(tmp_path, "00_tour") as again:
        assert again == first


def test_notebooks_are_listed_with_their_questions(capsys):
    assert main(["run", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(notebooks()) and listed[0].startswith("00_tour  ")
    assert all("?" in line for line in listed)


def test_help_of_a_notebook_has_its_parameters(capsys):
    with pytest.raises(SystemExit) as left:
        main(["run", "20", "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and "parameters of 20_overlap:" in said
    assert "step: int = -1" in said


def test_a_dead_kernel_is_a_failed_notebook(tmp_path):
    cell = nbformat.v4.new_code_cell("import os; os._exit(1)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "dies.ipynb")
    result = run_notebook(tmp_path / "dies.ipynb", {}, build=tmp_path / "build")
    assert result.error.startswith("DeadKernelError")
    assert (tmp_path / "build" / "dies.html").exists()


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


@pytest.mark.parametrize("files", ["", "rank0.json.gz rank1.json.gz", "rank*.gz"])
def test_report_of_a_directory_of_files_and_of_a_pattern(tmp_path, capsys, files):
    output, folder = tmp_path / "report.html", dataset("gpt-ddp")
    traces = [str(folder / name) for name in files.split() or [""]]
    assert main(["report", *traces, "-o", str(output)]) == 0
    assert "ranks: 2" in capsys.readouterr().out
    assert "<h2>Distributed" in output.read_text()


@pytest.mark.filterwarnings("default")
def test_an_empty_trace_is_bad_input(tmp_path, capsys):
    (tmp_path / "rank0.json").write_text('{"traceEvents": []}')
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "the trace holds no events" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_pipe_that_is_closed_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "madmax_lib", "breakdown", str(dataset("gpt-ddp"))]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
