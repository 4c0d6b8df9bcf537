import math

import numpy as np
import pytest
from support import make_timeline

from madmax_lib.timeline.accounting import breakdown_between
from madmax_lib.view.drawing import COLORS
from madmax_lib.view.explore import widgets
from madmax_lib.view.explore.canvas import columns
from madmax_lib.view.explore.widgets import TimelineView, breakdown_html, view_timeline

MS = 1_000_000


@pytest.fixture
def step():
    """Compute 0-10 and 15-20 ms, communication 8-12 ms on rank 0; rank 1 computes 5-10
    ms.
    """
    rows = [
        (0, 0, "compute", "gemm", 100 * MS, 10 * MS),
        (0, 0, "compute", "adam", 115 * MS, 5 * MS),
    ]
    rows += [
        (0, 2, "comm", "all_reduce", 108 * MS, 4 * MS),
        (1, 0, "compute", "gemm", 105 * MS, 5 * MS),
    ]
    return make_timeline([*rows, (0, -1, "cpu", "aten::mm", 0, MS)])


def unpacked(about, data):
    n = about["count"]
    start, dur, name = np.frombuffer(data[: 12 * n], np.int32).reshape(3, n)
    return start, dur, name, np.frombuffer(data[12 * n :], np.uint8)


def test_columns_hold_every_busy_span_row_by_row(step):
    about, data = columns((step,), ("",))
    start, dur, name, kind = unpacked(about, data)
    assert len(data) == 13 * about["count"] == 13 * 4 and about["tick_s"] == 1e-9
    assert about["reach"] == 20 * MS
    rows = {row["label"]: slice(row["first"], row["end"]) for row in about["rows"]}
    assert list(rows) == ["rank 0 · stream 0", "rank 0 · stream 2", "rank 1 · stream 0"]
    assert start[rows["rank 0 · stream 0"]].tolist() == [0, 15 * MS]
    assert dur[rows["rank 0 · stream 2"]].tolist() == [4 * MS]
    assert [about["names"][code] for code in name] == [
        "gemm",
        "adam",
        "all_reduce",
        "gemm",
    ]
    labels = [about["kinds"][code] for code in kind]
    assert [label["color"] for label in labels] == [
        COLORS[k] for k in ("compute", "compute", "comm", "compute")
    ]


def test_long_timelines_get_coarser_ticks_that_still_fit():
    hour_ns = 3600 * 10**9
    timeline = make_timeline(
        [(0, 0, "compute", "a", 0, 10), (0, 0, "compute", "b", hour_ns - 7, 7)]
    )
    about, data = columns([timeline], ["long"])
    start, dur, *_ = unpacked(about, data)
    assert (start >= 0).all() and (start + dur <= 2**31 - 1).all()
    assert start[1] * about["tick_s"] == pytest.approx(3600, rel=1e-8)


def test_stacked_timelines_share_the_axis_and_say_what_is_simulated(step):
    simulated = make_timeline(
        [(0, 0, "compute", "block", 0, 30 * MS)], source="simulated", device="a100-80"
    )
    view = TimelineView(step, simulated)
    about, data = columns(view.timelines, view.titles)
    assert about["reach"] == 30 * MS
    assert [row["panel"] for row in about["rows"]] == [0, 0, 0, 1]
    assert [row["simulated"] for row in about["rows"]] == [False, False, False, True]
    assert [row["title"] for row in about["rows"]] == [
        "measured",
        "",
        "",
        "simulated · a100-80",
    ]
    assert about["names"][unpacked(about, data)[2][-1]] == "block"
    assert [ax.get_xlim()[1] for ax in view.static().axes] == pytest.approx([30, 30])


def test_titles_are_one_for_each_timeline(step):
    view = view_timeline(step, step, titles=("before", "after"))
    assert view.breakdown["timeline"].tolist() == ["before", "before", "after", "after"]
    with pytest.raises(ValueError, match="1 titles for 2 timelines"):
        view_timeline(step, step, titles=["one"])
    for timelines in ([], [make_timeline([(0, -1, "cpu", "a", 0, 1)])]):
        with pytest.raises(ValueError, match="nothing to show"):
            view_timeline(*timelines)


def test_the_brush_reports_its_breakdown(step):
    pytest.importorskip("anywidget")
    view = TimelineView(step, step)
    assert view.selection == [] and list(view.breakdown["timeline"]) == ["measured"] * 4
    view.widget.selection = [0.008, 0.012]
    assert view.breakdown["total_s"].tolist() == pytest.approx([0.004] * 4)
    assert (
        "4 ms" in view.widget._report and "exposed communication" in view.widget._report
    )
    other = make_timeline([(0, 0, "compute", "only", 0, MS)])
    view.show(other)
    assert (
        view.selection == []
        and view.widget._report == ""
        and view.widget._about["count"] == 1
    )
    assert view.breakdown["total_s"].tolist() == [0.001]


def test_a_picture_is_shown_and_in_a_browser_the_widget_beside_it(step, monkeypatch):
    pytest.importorskip("anywidget")
    view = TimelineView(step)
    assert not widgets.interactive()
    assert set(view._repr_mimebundle_()[0]) == {
        "text/plain",
        "image/png",
    } and "widget" not in vars(view)
    monkeypatch.setattr(widgets, "interactive", lambda: True)
    bundle, _ = view._repr_mimebundle_()
    assert (
        bundle.pop("application/vnd.jupyter.widget-view+json")["model_id"]
        == view.widget.model_id
    )
    assert set(bundle) == {"text/plain", "image/png"}


def test_many_ranks_are_reported_as_their_mean():
    rows = [(rank, 0, "compute", "a", 0, (rank + 1) * MS) for rank in range(31)]
    html = breakdown_html(breakdown_between(make_timeline(rows), 0, math.inf))
    assert html.count("<tr") == 2 and "mean" in html and "16 ms (52%)" in html
