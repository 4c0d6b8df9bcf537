"""Pages of executed notebooks and their index: whole, offline, and without a trace of
the machine.
"""

import re
import runpy
from base64 import b64encode
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.view.notebooks.page import Result
from madmax_lib.view.notebooks.site import notebook_page

write_site = runpy.run_path(str(PROJECT / "docs" / "site.py"))["write_site"]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
SVG = "<svg></svg>"
DOCS = {path.stem for path in (PROJECT / "docs").glob("[a-z]*.md")}
FIRST = """# Which is faster, `a` < `b`?

[![Open in Colab](https://colab.research.google.com/badge.svg)](https://colab.research.google.com/github/x.ipynb)

**How much is
gained?** Some."""
LIVE = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
WIDGETS = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def shown(**data):
    return new_output(
        "display_data",
        data={name.replace("_", "/"): value for name, value in data.items()},
    )


def written(folder, name, *cells):
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=list(cells), metadata={"widgets": WIDGETS}), path)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Pages by name: a notebook with a widget, its picture and a progress bar, and one
    that failed.
    """
    folder = tmp_path_factory.mktemp("executed")
    canvas, bar = (
        shown(image_png=PNG, text_plain="a widget"),
        shown(text_plain="searching: 41%"),
    )
    for output in (canvas, bar):
        output.data.update(LIVE)
    drawn = new_output("display_data", data={"image/svg+xml": SVG})
    texts = [
        new_markdown_cell(FIRST),
        new_markdown_cell("## Steps\n\nOne by one. Then all."),
    ]
    plots = [
        new_code_cell("plot()", outputs=[bar, canvas]),
        new_code_cell("x", outputs=[drawn]),
    ]
    good = written(folder, "20_good", *texts, *plots)
    where = f"{PROJECT}/madmax_lib/plan.py and {Path.home()}/secret"
    failure = new_output(
        "error",
        ename="OSError",
        evalue="no",
        traceback=[f"File \x1b[32m{where}\x1b[0m, line 3"],
    )
    texts = [
        new_markdown_cell(text)
        for text in ("<span>papermill: an exception at In [1]</span>", "# Which plan?")
    ]
    bad = written(folder, "60_bad", *texts, new_code_cell("run()", outputs=[failure]))
    results = [
        Result("20_good", good, 12.4),
        Result("60_bad", bad, 3.2, error=f"OSError: {PROJECT}/no: <none>"),
    ]
    index = write_site(results, folder / "site")
    assert index == folder / "site" / "index.html"
    return {path.stem: path.read_text() for path in index.parent.iterdir()}


def test_index_tells_title_question_time_and_failure(site):
    index = site["index"]
    assert re.findall(r"<h2>(\w+)</h2>", index) == ["Traces", "Planner"]
    assert (
        '<a href="20_good.html">Which is faster, a &lt; b?</a></h3><p>How much is '
        "gained?</p>" in index
    )
    assert "2 notebooks in 16 s, 1 failed" in index and "20_good, 12 s<" in index
    assert (
        '<a href="60_bad.html">Which plan?</a></h3><p class="about">60_bad, 3 s <strong'
        in index
    )
    assert (
        '<strong class="failed">failed</strong> OSError: ./no: &lt;none&gt;</p>'
        in index
    )
    (figure,) = re.findall(
        r'<img src="data:image/png;base64,(\S+)" alt="([^"]+)">', index
    )
    assert figure == (PNG, "First figure of Which is faster, a &lt; b?")


def test_pages_lead_to_each_other(site):
    assert set(site) == {"index", "20_good", "60_bad"} | DOCS
    for name, others in (("20_good", {"60_bad"}), ("60_bad", {"20_good"})):
        links = {
            link
            for link in re.findall(r'href="([^"]+)"', site[name])
            if not link.startswith("https:")
        }
        assert links == {"index.html", *(f"{other}.html" for other in others)}


def test_pages_of_docs_lead_to_pages_that_there_are(site):
    """Notebooks are pages too, here not all of them; files of the repository have its
    address.
    """
    notebooks = {path.stem for path in (PROJECT / "notebooks").glob("*.ipynb")}
    for name in DOCS:
        links = {
            link
            for link in re.findall(r'href="([^"#]+)', site[name])
            if not link.startswith("https:")
        }
        assert {link.removesuffix(".html") for link in links} <= DOCS | notebooks | {
            "index"
        }, name
        assert f'href="{name}.html"' in site["index"] and "<!--" not in site[name]
    assert (
        "/blob/main/madmax_lib/data/kernel_kinds.csv" in site["what-does-my-trace-say"]
    )


def test_pages_need_no_network_and_no_script_and_name_no_place_of_this_machine(site):
    for page in site.values():
        assert (
            "<script" not in page
            and "<link" not in page
            and not re.search(r'(src="|url\(|@import)(?!data:)', page)
        )
        assert '<meta name="viewport"' in page
    assert (
        '<a href="https://colab.research.google.com/github/x.ipynb">Open in Colab</a>'
        in site["20_good"]
    )
    assert "./madmax_lib/plan.py" in site["60_bad"] and "~/secret" in site["60_bad"]
    assert not any(
        f"{place}/" in page
        for page in site.values()
        for place in (PROJECT, Path.home())
    )


def test_a_picture_stands_for_its_widget_and_nothing_for_a_bar(site):
    assert (
        f"data:image/png;base64,{PNG}" in site["20_good"]
        and 'alt="One by one. (Steps)"' in site["20_good"]
    )
    assert (
        f"data:image/svg+xml;base64,{b64encode(SVG.encode()).decode()}"
        in site["20_good"]
    )
    assert not re.search("a widget|widget-view|widget-state|searching", site["20_good"])


def test_a_page_alone_has_no_links(tmp_path):
    page = notebook_page(written(tmp_path, "untitled", new_markdown_cell("Words.")))
    assert "<title>untitled</title>" in page and "index.html" not in page


def test_nothing_is_written_where_one_page_fails(tmp_path):
    good = Result(
        "20_good", written(tmp_path, "20_good", new_markdown_cell("# A")), 1.0
    )
    with pytest.raises(FileNotFoundError):
        write_site(
            [good, Result("30_gone", tmp_path / "30_gone.ipynb", 1.0)],
            tmp_path / "site",
        )
    assert not (tmp_path / "site").exists()
