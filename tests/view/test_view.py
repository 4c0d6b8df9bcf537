import json
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from support import make_timeline

from madmax_lib.accounting import breakdown, exposed_by_collective
from madmax_lib.datasets import PROJECT
from madmax_lib.timeline import Timeline
from madmax_lib.traces.comm.collectives import waiting
from madmax_lib.view.drawing import COLORS, figure_data
from madmax_lib.view.notebooks.environment import Environment, environment
from madmax_lib.view.notebooks.report import write_report
from madmax_lib.view.notebooks.setup import optional_dataset, save_figure, setup
from madmax_lib.view.plots.breakdown import plot_breakdown, plot_exposed, plot_overlap, plot_timeline, plot_waiting

AR = "ncclDevKernel_AllReduce"


@pytest.fixture
def step():
    rows = []
    for rank, late in ((0, 0), (1, 2_000_000)):
        rows += [
            (rank, 7, "compute", "gemm", late, 10_000_000),
            (rank, 20, "comm", AR, 8_000_000 + late, 6_000_000 - late),
            (rank, 7, "compute", "adam <&>", 15_000_000 + late, 1_000),
            (rank, -1, "cpu", "aten::mm", 0, 1_000_000),
        ]
    return make_timeline(rows, provenance={"files": {"0": {"name": "a", "sha256": "b"}}, "rules": "exact"})


@pytest.fixture(autouse=True)
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv("MADMAX_FIGURES", str(tmp_path))
    with plt.rc_context():
        setup()
        yield tmp_path
    plt.close("all")


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A working folder in no known place."""
    for variable in ("CI", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "MADMAX_FIGURES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_timeline_draws_every_block_in_its_colour(step):
    ax = plot_timeline(step)
    assert [t.get_text() for t in ax.get_yticklabels()] == [f"rank {r} · stream {s}" for r in (0, 1) for s in (7, 20)]
    data = figure_data(ax)
    assert data.groupby("kind")["dur_s"].sum()["comm"] == pytest.approx(10e-3)
    thin = data[(data["kind"] == "compute") & (data["start_s"] > 14e-3)]
    assert (thin["dur_s"] > 1e-6).all()  # widened until it can be seen
    assert len(COLORS) == len(set(COLORS.values()))


def test_colours_of_kinds_differ_in_lightness_alone():
    lightness = sorted(np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)) for color in COLORS.values())
    assert min(np.diff(lightness)) > 0.04  # in grey, or for eyes that mix up colours


def test_timeline_refuses_an_unknown_step_and_nothing_to_draw(step):
    with pytest.raises(ValueError, match=r"step 5 is not in the timeline; it has \[0\]"):
        plot_timeline(step, step=5)
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_timeline(make_timeline([(0, -1, "cpu", "aten::mm", 0, 1)]))


def test_bars_add_up_to_the_total(step):
    table = breakdown(step)
    ax = plot_breakdown(table)
    drawn_ms = sum(patch.get_width() for patch in ax.patches)
    assert drawn_ms == pytest.approx(table["total_s"].sum() * 1e3)
    drawn_ms = sum(patch.get_width() for patch in plot_overlap(table).patches)
    assert drawn_ms == pytest.approx(table["comm_s"].sum() * 1e3)


def test_simulated_is_hatched(step):
    rows = [(0, 0, "compute", "a", 0, 10)]
    assert plot_timeline(make_timeline(rows, source="simulated")).collections[0].get_hatch()
    assert not plot_timeline(make_timeline(rows)).collections[0].get_hatch()


def test_exposed_and_waiting(step):
    ax = plot_exposed(exposed_by_collective(step))
    assert figure_data(ax)["collective"].tolist() == ["all_reduce"]
    assert ax.get_title(loc="left") == "Most exposed: all-reduce, 3 ms, 60% of its time"
    ax = plot_waiting(waiting(step))
    assert [text.get_text() for text in ax.texts if text.get_text()] == ["2"]
    assert ax.get_title(loc="left") == "Rank 1 causes 100% of the waiting [ms]"


def test_nothing_to_show_is_said(step):
    one = make_timeline([(0, 7, "compute", "a", 0, 10)])
    assert plot_exposed(exposed_by_collective(one)).get_title(loc="left") == "No communication"
    assert plot_waiting(waiting(one)).get_title(loc="left").startswith("Nobody waits")
    hidden = make_timeline([(0, 7, "compute", "a", 0, 10), (0, 20, "comm", AR, 2, 3)])
    assert plot_exposed(exposed_by_collective(hidden)).get_title(loc="left") == "No communication is exposed"


def test_timeline_starts_with_the_first_step_that_works_on_the_device(tmp_path):
    timeline = make_timeline([(0, -1, "cpu", "aten::mm", 0, 5), (0, 7, "compute", "a", 10, 5)])
    spans = timeline.spans.assign(step=[3, -1])
    assert plot_timeline(Timeline(spans, timeline.meta)).get_title(loc="left").startswith("One step")
    assert write_report(Timeline(spans, timeline.meta), tmp_path / "r.html", "t").exists()


def test_report_of_many_ranks_says_what_it_draws(tmp_path):
    rows = [(rank, 20, "comm", AR, 0, 10 + rank) for rank in range(20)]
    page = write_report(make_timeline(rows), tmp_path / "r.html", "many").read_text()
    assert "Drawn: the 16 of 20 ranks with the most exposed communication" in page
    assert "name no process groups" in page


def test_report_names_calls_it_cannot_match(tmp_path):
    rows = [(0, 20, "comm", AR, 0, 5), (0, 20, "comm", AR, 9, 5), (1, 20, "comm", AR, 0, 5)]
    page = write_report(make_timeline(rows), tmp_path / "r.html", "t").read_text()
    assert f"3 calls of {AR} are left out" in page


def test_report_over_a_folder_is_refused_and_leaves_nothing(step, tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory, give a file name"):
        write_report(step, tmp_path, "t")
    assert not list(tmp_path.iterdir())


def test_save_figure_without_git(step, figures, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    origin = save_figure(plot_overlap(breakdown(step)), "overlap/x").with_suffix(".json")
    assert "commit" not in json.loads(origin.read_text())


def test_save_figure_writes_picture_data_and_origin(step, figures):
    svg = save_figure(plot_overlap(breakdown(step)), "overlap/per_rank")
    assert svg == figures / "overlap" / "per_rank.svg" and svg.read_text().startswith("<?xml")
    pd.testing.assert_frame_equal(pd.read_csv(svg.with_suffix(".csv")), breakdown(step), check_dtype=False)
    origin = json.loads(svg.with_suffix(".json").read_text())
    assert origin["inputs"] == {"0": {"name": "a", "sha256": "b"}}
    assert {"parameters", "versions", "commit", "rules"} <= set(origin)


def test_an_unchanged_figure_is_left_alone(step, figures):
    svg = save_figure(plot_overlap(breakdown(step)), "overlap/per_rank")
    svg.with_suffix(".json").write_text("made by an earlier commit")
    save_figure(plot_overlap(breakdown(step)), "overlap/per_rank")
    assert svg.with_suffix(".json").read_text() == "made by an earlier commit"
    save_figure(plot_overlap(breakdown(step.select(ranks=[0]))), "overlap/per_rank")
    assert svg.with_suffix(".json").read_text().startswith("{")
    assert sorted(p.name for p in svg.parent.iterdir()) == ["per_rank.csv", "per_rank.json", "per_rank.svg"]


def test_a_notebook_shows_the_file_and_not_the_figure_again(step, figures, monkeypatch):
    shown = []
    monkeypatch.setattr("madmax_lib.view.notebooks.setup.shell", lambda: SimpleNamespace(kernel=1, user_ns={}))
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data["image/svg+xml"]))
    svg = save_figure(plot_overlap(breakdown(step)), "overlap/per_rank")
    (text,) = shown
    assert text.startswith("<svg") and svg.read_text().endswith(text)
    assert not plt.get_fignums()


@pytest.mark.parametrize("name", ["overlap", "a/b/c", "../x", "overlap/../x", "a/", "tour/²", 5])
def test_figure_names_are_topic_and_name(step, name):
    with pytest.raises(ValueError, match="is not of the form topic/name"):
        save_figure(plot_overlap(breakdown(step)), name)


def test_a_figure_without_data_is_refused():
    with pytest.raises(ValueError, match="pass the table it shows"):
        save_figure(plt.subplots()[1], "overlap/none")


@pytest.mark.parametrize(
    ("told", "name", "in_checkout"),
    [
        ({}, "local", True),
        ({"CI": "true"}, "ci", True),
        ({"COLAB_RELEASE_TAG": "release"}, "colab", False),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "CI": "true"}, "kaggle", False),
    ],
)
def test_output_goes_where_users_of_a_place_look(told, name, in_checkout, nowhere, monkeypatch):
    """Even where the workbench is a clone: on Colab and Kaggle nobody looks into its build folder."""
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    output = PROJECT / "build" if in_checkout else nowhere
    assert setup() == environment() == Environment(name, output, output / "figures")
    monkeypatch.setenv("MADMAX_FIGURES", str(nowhere / "asked"))
    assert environment() == Environment(name, output, nowhere / "asked")


def test_colab_is_known_by_its_module_and_an_installation_has_no_build_folder(nowhere, monkeypatch):
    monkeypatch.setattr("madmax_lib.view.notebooks.environment.PROJECT", nowhere / "site-packages")
    assert environment() == Environment("local", nowhere, nowhere / "figures")
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    assert environment().name == "colab"


def test_absent_input_skips_the_figure_by_name(monkeypatch, capsys):
    def absent(name, *, download):
        raise FileNotFoundError("dataset x is not on this machine")

    monkeypatch.setattr("madmax_lib.view.notebooks.setup.dataset", absent)
    assert optional_dataset("x", "optional/x") is None
    said = "skipped figure optional/x: dataset x is not on this machine"
    assert capsys.readouterr().out == f"{said}; quick=False downloads it\n"
    optional_dataset("x", "optional/x", download=True)
    assert capsys.readouterr().out == f"{said}\n"


def test_report_is_one_self_contained_page(step, tmp_path):
    page = write_report(step, tmp_path / "out" / "report.html", "a <run>").read_text()
    for heading in ("Where the time goes", "Overlap", "Exposed communication", "Who waits for whom", "Top kernels",
                    "What to fix first"):  # fmt: skip
        assert f"<h2>{heading}" in page
    assert page.count("<svg") == 6 and "a &lt;run&gt;" in page and "adam &lt;&amp;&gt;" in page
    assert "src=" not in page and "<link" not in page and "$" not in page
    assert "Rank 1 arrives last most: the others wait 2 ms for it" in page
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]


def test_report_of_one_rank_without_communication(tmp_path):
    timeline = make_timeline([(0, 7, "compute", "a", 0, 10)], world_size=8)
    page = write_report(timeline, tmp_path / "r.html", "one").read_text()
    assert "Who waits" not in page and "Exposed communication</h2>" not in page
    assert "7 of 8 ranks have no trace here" in page
