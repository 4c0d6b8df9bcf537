"""The report: what its views say, what they leave out, and the canvas in a real
browser.
"""

import gzip
import json
import re
from base64 import b64decode

import numpy as np
import pandas as pd
import pytest
from support import make_timeline, with_columns

from madmax_lib import view
from madmax_lib.catalog.datasets import dataset
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import Timeline
from madmax_lib.traces.read.kineto import read_trace
from madmax_lib.view.explore.canvas import columns
from madmax_lib.view.report import report as pages
from madmax_lib.view.report.marks import bars, line, section, table
from madmax_lib.view.report.report import report, write_report

AR = "ncclDevKernel_AllReduce"


@pytest.fixture(scope="module")
def run():
    return read_trace(dataset("gpt-fsdp"))


def titles(html):
    return re.findall(r"<h2>(.*?)</h2>", html)


def test_report_is_one_self_contained_page(step, tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory, give a file name"):
        write_report(step, tmp_path, "t")
    assert not list(tmp_path.iterdir())
    page = write_report(step, tmp_path / "out" / "report.html", "a <run>").read_text()
    assert titles(page) == [
        "Overview",
        "What to fix first",
        "Distributed",
        "Trace",
        "Kernels",
    ]
    assert "a &lt;run&gt;" in page and "adam &lt;&amp;&gt;" in page
    assert not re.search(r"src=|<link|https?://", page)
    assert (
        "No rank arrives last more often than by chance; the ranks wait 2 ms in total"
        in page
    )
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]


def test_a_recorded_run_has_every_view(run):
    page = report(run, "new", other_run=run, other="old").html
    names = [
        "Overview",
        "Compared with old",
        "What to fix first",
        "Steps",
        "Distributed",
        "Trace",
        "Operators",
    ]
    assert titles(page) == [*names, "Work on the host"]
    (median,) = re.findall("<b>([^<]+)</b><span>a step, median", page)
    assert f"The median step takes {median}, and {median} in old: +0.0%." in page
    assert all(
        f'<a href="#{name.lower().replace(" ", "-")}">' in page for name in names
    )
    assert "Memory" in titles(report(read_trace(dataset("gpt-memory"))).html)


def test_a_notebook_shows_the_page_and_a_cell_is_no_page_of_its_own(step):
    shown = view.report(step, "t")
    html = shown._repr_html_()
    assert (
        html.startswith("<iframe srcdoc=")
        and html.count("<") == 2
        and "&lt;h1&gt;t" in html
    )
    assert len(repr(shown)) < 100


@pytest.mark.parametrize(
    ("spans", "world_size", "words", "absent"),  # spans: rank, start_ns, dur_ns
    [
        ([(0, 0, 10)], 8, "7 of 8 ranks have no trace here", "arrives last"),
        (
            [(rank, 0, 10 + rank) for rank in range(20)],
            20,
            "7 of 20 ranks, in order of the time lost",
            "nan",
        ),
        (
            [(0, 0, 5), (0, 9, 5), (1, 0, 5)],
            2,
            f"3 calls of {AR} are left out",
            "in order of",
        ),
    ],
)
def test_report_says_what_it_has_and_what_it_leaves_out(
    spans, world_size, words, absent
):
    rows = [(rank, 20, "comm", AR, start, duration) for rank, start, duration in spans]
    page = re.sub(
        r"<script.*",
        "",
        report(make_timeline(rows, world_size=world_size)).html,
        flags=re.DOTALL,
    )
    assert words in page and absent not in page


def test_work_between_steps_is_not_idle_time():
    rows = [(0, 7, "compute", "k", start, 100) for start in (0, 100, 200)]
    page = report(with_columns(make_timeline(rows), step=[1, -1, 2])).html
    assert "0% is idle" in page and "outside all steps" not in page


def test_a_report_is_about_the_steps():
    """300 ns of compute of before the first step are told apart."""
    rows = [(0, 7, "compute", "k", start, dur) for start, dur in ((0, 300), (500, 100))]
    timeline = with_columns(make_timeline(rows), step=[-1, 3])
    page = report(timeline).html
    assert (
        "300 ns of work per rank is outside all steps" in page
        and ">100 ns<" in page
        and ">600 ns<" not in page
    )
    assert "outside all steps" not in report(timeline.select(steps=[3])).html
    with pytest.raises(ValueError, match="nothing to report"):
        report(Timeline(timeline.spans[:0]))
    with pytest.raises(ValueError, match="timeline"):
        report("DIR")


def test_bars_of_the_overview_add_up_to_the_total_of_each_rank(run):
    """Some rank's bar fills the width, and every bar is as long as its rank's time."""
    each = breakdown(run.select(steps=run.steps))
    page = report(run).html
    first = page[page.index('class="bars"') :]
    widths = [
        sum(map(float, re.findall(r"width:([\d.]+)%", row)))
        for row in first.split("</tr>")[: len(each)]
    ]
    assert widths == pytest.approx(
        (each["total_s"] / each["total_s"].max() * 100).tolist(), abs=0.01
    )


def test_marks_of_nothing_are_empty():
    assert (
        bars([])
        == line(np.empty(0), np.empty(0))
        == table(pd.DataFrame({"a": []}))
        == section("A", "", "")
        == ""
    )
    shown = table(
        pd.DataFrame(
            {
                "name": ["b", "a"],
                "total_s": [2e-3, np.nan],
                "none": [np.nan] * 2,
                "share": 0.5,
            }
        )
    )
    assert (
        "none" not in shown
        and ">2 ms<" in shown
        and "<td></td>" in shown
        and "50%" in shown
    )


def test_what_the_canvas_holds_is_in_the_page(run, monkeypatch):
    """Every span comes back from the page's bytes, and of a larger trace as many as are
    allowed, in whole steps.
    """

    def unpacked(page):
        about, spans = (
            gzip.decompress(b64decode(re.search(f'data-{n}="(.*?)"', page)[1]))
            for n in ("about", "spans")
        )
        about = json.loads(about)
        planes = np.frombuffer(spans, np.uint8)[: 16 * about["count"]].reshape(4, 4, -1)
        numbers = np.ascontiguousarray(planes.transpose(0, 2, 1)).view(np.int32)[
            :, :, 0
        ]
        return about, [
            np.cumsum(numbers[0], dtype=np.int32),
            *numbers[1:3],
            np.cumsum(numbers[3], dtype=np.int32),
        ]

    inside = run.select(steps=run.steps)
    about, numbers = unpacked(report(run).html)
    _, data = columns([inside], [""], hosts=True)
    assert np.array_equal(
        numbers, np.frombuffer(data[: 16 * about["count"]], np.int32).reshape(4, -1)
    )
    monkeypatch.setattr(pages, "_SPANS", len(inside) // 2)
    page = report(run).html
    assert (
        0 < unpacked(page)[0]["count"] <= len(inside) // 2
        and "Drawn: ranks 0, 1 of 2, steps" in page
    )


def test_the_canvas_in_a_browser(chromium, tmp_path):
    """Search, the call stack and the launch of a kernel, a selected window, a sorted
    table; no error, no request.
    """
    rows = [
        (0, -1, "annotation", "ProfilerStep#1", 0, 900_000),
        (0, -1, "cpu", "aten::mm", 10_000, 200_000),
    ]
    rows += [
        (0, -1, "cpu", "cudaLaunchKernel", 50_000, 20_000),
        (0, 7, "compute", "gemm", 300_000, 400_000),
    ]
    rows += [(0, 20, "comm", AR, 600_000, 300_000)]
    timeline = with_columns(make_timeline(rows), correlation=[-1, -1, 5, 5, -1], step=1)
    path = write_report(timeline, tmp_path / "r.html", "t")
    page, problems = chromium.new_page(viewport={"width": 1280, "height": 2000}), []
    page.on(
        "console",
        lambda message: (
            problems.append(message.text)
            if message.type in ("error", "warning")
            else None
        ),
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if request.url.startswith("http") else None
        ),
    )
    page.goto(path.as_uri())
    page.wait_for_selector("#canvas[data-ready]")
    page.fill("#canvas input", "gemm")
    page.press("#canvas input", "Enter")
    said = page.inner_text("#canvas .detail")
    assert (
        "compute, 400 µs at 300 µs" in said
        and "launched by cudaLaunchKernel, 250 µs before it starts" in said
    )
    assert re.search(r"ProfilerStep#1\n\s+aten::mm", said)
    page.click("#canvas button")
    box = page.locator("#canvas canvas").bounding_box()
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 200, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 30)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert re.search(
        r"rank 0\s+400 µs \(\d+ %\)\s+19\d.* µs", page.inner_text("#canvas .report")
    )
    cells = "#kernels tbody tr td:first-child"
    page.click("#kernels th:has-text('total')")
    page.click("#kernels th:has-text('total')")
    assert page.locator(cells).all_inner_texts() == [AR, "gemm"]
    assert (
        page.evaluate("document.documentElement.scrollWidth") <= 1280 and problems == []
    )
    page.close()
