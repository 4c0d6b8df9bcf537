"""Pictures of a breakdown, figures that are saved with data and origin, where output
goes, and the report.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from support import make_timeline

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces import exposed_by_collective
from madmax_lib.traces.comm.collectives import waiting
from madmax_lib.view.drawing import COLORS, figure_data
from madmax_lib.view.notebooks import setup as notebook_setup
from madmax_lib.view.notebooks.environment import Environment, environment
from madmax_lib.view.notebooks.setup import optional_dataset, save_figure, setup
from madmax_lib.view.plots.breakdown import (
    plot_breakdown,
    plot_exposed,
    plot_overlap,
    plot_timeline,
    plot_waiting,
)
from madmax_lib.view.report.report import write_report


@pytest.fixture(autouse=True)
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv("MADMAX_FIGURES", str(tmp_path))
    with plt.rc_context():
        setup()
        yield tmp_path


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A working folder in no known place."""
    for variable in (
        "CI",
        "COLAB_RELEASE_TAG",
        "KAGGLE_KERNEL_RUN_TYPE",
        "MADMAX_FIGURES",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_timeline_draws_every_block_in_its_colour(step):
    for source in ("measured", "simulated"):
        ax = plot_timeline(
            make_timeline([(0, 0, "compute", "a", 0, 10)], source=source)
        )
        assert bool(ax.collections[0].get_hatch()) == (source == "simulated")
    ax = plot_timeline(step)
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        f"rank {r} · stream {s}" for r in (0, 1) for s in (7, 20)
    ]
    data = figure_data(ax)
    assert data.groupby("kind")["dur_s"].sum()["comm"] == pytest.approx(10e-3)
    thin = data[(data["kind"] == "compute") & (data["start_s"] > 14e-3)]
    assert (thin["dur_s"] > 1e-6).all()  # widened until it can be seen


def test_colours_of_kinds_differ_in_lightness_alone():
    lightness = sorted(
        np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)) for color in COLORS.values()
    )
    assert min(np.diff(lightness)) > 0.04  # in grey, or for eyes that mix up colours


def test_what_cannot_be_drawn_is_refused(step):
    with pytest.raises(
        ValueError, match=r"step 5 is not in the timeline; it has \[0\]"
    ):
        plot_timeline(step, step=5)
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_timeline(make_timeline([(0, -1, "cpu", "aten::mm", 0, 1)]))
    with pytest.raises(ValueError, match="pass the table it shows"):
        save_figure(plt.subplots()[1], "overlap/none")


def test_timeline_starts_with_the_first_step_that_works_on_the_device(tmp_path):
    timeline = make_timeline(
        [(0, -1, "cpu", "aten::mm", 0, 5), (0, 7, "compute", "a", 10, 5)]
    )
    timeline = Timeline(timeline.spans.assign(step=[3, -1]), timeline.meta)
    assert figure_data(plot_timeline(timeline))["stream"].tolist() == [7]
    assert write_report(timeline, tmp_path / "r.html", "t").exists()


def test_bars_add_up_to_the_total(step):
    table = breakdown(step)
    for plot, column in ((plot_breakdown, "total_s"), (plot_overlap, "comm_s")):
        assert sum(patch.get_width() for patch in plot(table).patches) == pytest.approx(
            table[column].sum() * 1e3
        )


def test_exposed_and_waiting(step):
    (row,) = figure_data(plot_exposed(exposed_by_collective(step))).itertuples()
    assert (row.collective, row.exposed_s) == ("all_reduce", pytest.approx(3e-3))
    ax = plot_waiting(waiting(step))
    assert [text.get_text() for text in ax.texts if text.get_text()] == ["2"]
    nothing = make_timeline([(0, 7, "compute", "a", 0, 10)])
    for ax in (
        plot_exposed(exposed_by_collective(nothing)),
        plot_waiting(waiting(nothing)),
    ):
        assert not len(figure_data(ax)) and not ax.patches


def test_save_figure_writes_picture_data_and_origin(step, figures):
    svg = save_figure(plot_overlap(breakdown(step)), "overlap/per_rank")
    assert svg == figures / "overlap" / "per_rank.svg" and svg.read_text().startswith(
        "<?xml"
    )
    pd.testing.assert_frame_equal(
        pd.read_csv(svg.with_suffix(".csv")),
        breakdown(step),
        check_dtype=False,
        rtol=1e-5,
    )
    origin = json.loads(svg.with_suffix(".json").read_text())
    assert origin["inputs"] == {"0": {"name": "a", "sha256": "b"}}
    assert {"parameters", "versions", "rules"} <= set(origin)


@pytest.mark.parametrize(
    ("factor", "variable", "redrawn"),
    [(1.0, "", False), (1 + 4e-6, "", False), (1 + 1e-4, "", True), (1.0, "1", True)],
)
def test_a_figure_with_the_same_six_digits_is_left_alone(
    step, figures, monkeypatch, factor, variable, redrawn
):
    table = breakdown(step)
    svg = save_figure(plot_overlap(table), "overlap/per_rank")
    files = [svg.with_suffix(suffix) for suffix in (".svg", ".csv", ".json")]
    before = [path.read_text() for path in files]
    files[2].write_text("of an earlier commit")
    monkeypatch.setenv("MADMAX_REDRAW", variable)
    save_figure(
        plot_overlap(table.assign(comm_s=table["comm_s"] * factor)), "overlap/per_rank"
    )
    assert (files[2].read_text() == before[2]) == redrawn
    assert (files[1].read_text() == before[1]) == (factor < 1 + 1e-5)
    assert sorted(path.name for path in svg.parent.iterdir()) == sorted(
        path.name for path in files
    )


def test_the_origin_names_a_commit_that_a_rebase_cannot_lose(
    step, figures, tmp_path, monkeypatch
):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    def origin():
        return json.loads(
            save_figure(plot_overlap(breakdown(step)), "overlap/x")
            .with_suffix(".json")
            .read_text()
        )

    monkeypatch.setattr(notebook_setup, "PROJECT", tmp_path)
    monkeypatch.setenv("MADMAX_REDRAW", "1")
    assert "commit" not in origin()
    git("init", "--quiet", "--initial-branch=main")
    (tmp_path / ".gitignore").write_text("overlap\n")
    git("add", ".gitignore")
    git("commit", "--quiet", "--message=one")
    main = git("rev-parse", "HEAD")
    assert (origin()["commit"], origin()["clean"]) == (main, True)
    git("checkout", "--quiet", "-b", "work")
    git("commit", "--quiet", "--allow-empty", "--message=two")
    assert (origin()["commit"], origin()["clean"]) == (main, False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "commit" not in origin()


def test_a_notebook_shows_the_file_and_not_the_figure_again(step, figures, monkeypatch):
    shown = []
    monkeypatch.setattr(
        notebook_setup, "shell", lambda: SimpleNamespace(kernel=1, user_ns={})
    )
    monkeypatch.setattr(
        "IPython.display.display", lambda data, raw: shown.append(data["image/svg+xml"])
    )
    svg = save_figure(plot_overlap(breakdown(step)), "overlap/per_rank")
    (text,) = shown
    assert text.startswith("<svg") and svg.read_text().endswith(text)
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    "name", ["overlap", "a/b/c", "../x", "overlap/../x", "a/", "tour/²", 5]
)
def test_figure_names_are_topic_and_name(step, name):
    with pytest.raises(ValueError, match="is not of the form topic/name"):
        save_figure(plot_overlap(breakdown(step)), name)


PLACES = [
    ("", "local"),
    ("CI", "ci"),
    ("COLAB_RELEASE_TAG", "colab"),
    ("CI KAGGLE_KERNEL_RUN_TYPE", "kaggle"),
]


@pytest.mark.parametrize(("variables", "name"), PLACES)
def test_output_goes_where_users_of_a_place_look(variables, name, nowhere, monkeypatch):
    """Even where the workbench is a clone: on Colab and Kaggle nobody looks into its
    build folder, and papermill elsewhere keeps figures beside its output.
    """
    for variable in variables.split():
        monkeypatch.setenv(variable, "true")
    assert environment().output == nowhere
    monkeypatch.chdir(PROJECT / "notebooks")
    output = PROJECT / "build" if name in ("local", "ci") else Path.cwd()
    assert setup() == environment() == Environment(name, output, output / "figures")
    monkeypatch.setenv("MADMAX_FIGURES", str(nowhere / "asked"))
    assert environment() == Environment(name, output, nowhere / "asked")


def test_colab_is_known_by_its_module_and_an_installation_has_no_build_folder(
    nowhere, monkeypatch
):
    monkeypatch.setattr(
        "madmax_lib.view.notebooks.environment.PROJECT", nowhere / "site-packages"
    )
    assert environment() == Environment("local", nowhere, nowhere / "figures")
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    assert environment().name == "colab"


def test_absent_input_skips_the_figure_by_name(monkeypatch, capsys):
    def absent(name, *, download):
        raise FileNotFoundError("dataset x is not on this machine")

    monkeypatch.setattr(notebook_setup, "dataset", absent)
    for download, hint in ((False, "; quick=False downloads it"), (True, "")):
        assert optional_dataset("x", "optional/x", download=download) is None
        assert (
            capsys.readouterr().out
            == f"skipped figure optional/x: dataset x is not on this machine{hint}\n"
        )
