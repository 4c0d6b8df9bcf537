"""What do the notebooks show, to somebody with only a browser? A page for each and an
index: no network, no scripts.
"""

import base64
import html
import os
import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from madmax_lib import __version__
from madmax_lib.base.atomic import write_text
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.view.notebooks.docs import docs_index, docs_pages
from madmax_lib.view.notebooks.page import Result, page, paragraph

__all__ = ["notebook_page", "notebook_question", "write_site"]

_GROUPS = {
    "0": "Tour",
    "1": "Runs",
    "2": "Traces",
    "3": "Calibration",
    "4": "Simulator",
    "5": "Papers",
    "6": "Planner",
}
_SENTENCE = (
    "Run it, trace it, understand it, calibrate a model on it, predict what you "
    "cannot run, plan it, "
    "and redraw the paper: every step a notebook."
)
_STYLE = Path(__file__).with_name("site.css")
_WIDGET = "application/vnd.jupyter.widget-view+json"


def notebook_page(path: Path, links: str = "") -> str:
    """HTML of an executed notebook that needs no network: pictures stand for widgets,
    text links for remote badges.

    links: HTML of the links above and below. Folders of this machine are shortened.
    """
    notebook = _self_contained(nbformat.read(path, as_version=4))
    left_out = dict.fromkeys(
        ("exclude_input_prompt", "exclude_output_prompt", "exclude_anchor_links"), True
    )
    exporter = HTMLExporter(template_name="basic", **left_out)
    body = exporter.from_notebook_node(notebook)[0]
    style = _STYLE.read_text() + HtmlFormatter(style="default").get_style_defs(
        ".highlight"
    )
    nav = f"<nav>{links}</nav>" if links else ""
    return _without_places(
        page(_title(notebook, path.stem), f"{nav}\n{body}\n{nav}", style)
    )


def write_site(results: Sequence[Result], folder: Path) -> Path:
    """Write a page per question of docs/ and per executed notebook and, last, the
    index, whose path is returned.

    Nothing is written if one fails.
    """
    names = [result.name for result in results]
    pages = {
        r.name: notebook_page(r.output, _links(names, place))
        for place, r in enumerate(results)
    }
    pages |= docs_pages(_STYLE.read_text())
    pages["index"] = _index(results)
    for name, text in pages.items():
        write_text(folder / f"{name}.html", text)
    return folder / "index.html"


def _index(results: Sequence[Result]) -> str:
    failed = [result for result in results if result.error]
    about = (
        f"{len(results)} notebooks in {sum(result.seconds for result in results):.0f} s"
    )
    about += f", {len(failed)} failed" if failed else ""
    parts = [
        "<h1>MAD-Max Workbench</h1>",
        paragraph(_SENTENCE, "message"),
        paragraph(about, "about"),
    ]
    parts += [docs_index()]
    groups: dict[str, list[str]] = {}
    for result in results:
        groups.setdefault(_GROUPS.get(result.name[0], "Others"), []).append(
            _entry(result)
        )
    parts += [
        f"<h2>{group}</h2>\n" + "\n".join(entries) for group, entries in groups.items()
    ]
    parts.append(
        paragraph(
            f"MAD-Max Workbench {__version__}. The pictures were drawn by this run.",
            "about",
        )
    )
    return _without_places(
        page("MAD-Max Workbench", "\n".join(parts), _STYLE.read_text())
    )


def _entry(result: Result) -> str:
    notebook = nbformat.read(result.output, as_version=4)
    title = html.escape(_title(notebook, result.name))
    question = notebook_question(notebook)
    question = paragraph(question) if question != title else ""
    about = f"{result.name}, {result.seconds:.0f} s"
    if result.error:
        about += f' <strong class="failed">failed</strong> {html.escape(result.error)}'
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    sources = [source for source in map(_source, outputs) if source]
    figure = (
        f'<img src="{sources[0]}" alt="First figure of {title}">' if sources else ""
    )
    text = (
        f'<h3><a href="{result.name}.html">{title}</a></h3>{question}<p '
        f'class="about">{about}</p>'
    )
    return f'<div class="entry"><div>{figure}</div><div>{text}</div></div>'


def _links(names: list[str], place: int) -> str:
    """The index, the notebook before and the one after."""
    texts = {"index": "All notebooks"}
    texts |= {name: f"← {name}" for name in names[max(place - 1, 0) : place]}
    texts |= {name: f"{name} →" for name in names[place + 1 : place + 2]}
    return "".join(f'<a href="{name}.html">{text}</a>' for name, text in texts.items())


def _self_contained(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    notebook.metadata.pop("widgets", None)
    heading = text = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(
                r"!\[([^\]]*)\]\(https?:[^)]*\)", r"\1", cell.source
            )  # a badge becomes its words
            if title := re.search(r"^#+ (.+)", cell.source, re.M):
                heading = _plain(title[1])
            text = _plain(re.sub(r"^#+ .+", "", cell.source, flags=re.M))
        for output in list(cell.get("outputs", [])):
            if output.get("data", {}).pop(_WIDGET, None) and set(output.data) <= {
                "text/plain"
            }:
                cell.outputs.remove(
                    output
                )  # a progress bar, halted where the kernel last told of it
            elif figure := _source(output):
                sentence = re.split(r"(?<=[.?])\s", text)[0]
                alt = html.escape(f"{sentence} ({heading})" if sentence else heading)
                output.data = {"text/html": f'<img src="{figure}" alt="{alt}">'}
    return notebook


def _source(output: nbformat.NotebookNode) -> str:
    """The picture of an output as the source of an <img>; empty where it has none."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f"data:image/svg+xml;base64,{base64.b64encode(data['image/svg+xml'].encode()).decode()}"
    return (
        f"data:image/png;base64,{data['image/png'].strip()}"
        if "image/png" in data
        else ""
    )


def _first_text(notebook: nbformat.NotebookNode) -> str:
    """The cell with the title; papermill puts one of its own before it where a notebook
    failed.
    """
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return next((text for text in texts if text.startswith("# ")), "")


def notebook_question(notebook: nbformat.NotebookNode) -> str:
    """What a notebook answers: the bold sentence of its first text, or its title."""
    question = re.search(r"\*\*(.+?)\*\*", _first_text(notebook), re.DOTALL)
    return _plain(question[1]) if question else _title(notebook, "")


def _title(notebook: nbformat.NotebookNode, otherwise: str) -> str:
    return (
        _plain(_first_text(notebook).partition("\n")[0].removeprefix("# ")) or otherwise
    )


def _plain(markdown: str) -> str:
    """Words of a piece of Markdown, on one line."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", markdown).split())


def _without_places(text: str) -> str:
    """The checkout is "." and the home folder "~": what a traceback or a printed path
    tells of a machine.
    """
    for place, name in ((PROJECT, "."), (Path(os.path.expanduser("~")), "~")):  # noqa: PTH111 - never raises
        if len(place.parts) > 1:
            text = re.sub(rf"(?<![\w+/.-]){re.escape(str(place))}(?![\w-])", name, text)
    return text
