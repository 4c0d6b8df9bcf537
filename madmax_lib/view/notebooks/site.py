"""Site of the notebooks, for somebody with only a browser: a page for each, for each page
of docs/, and an index, no network, no scripts.
"""

import base64
import html
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from pygments.formatters import HtmlFormatter

from madmax_lib import __version__
from madmax_lib.base.atomic import write_text
from madmax_lib.catalog import PROJECT
from madmax_lib.view.notebooks.page import Result, page, paragraph

_GROUPS = {  # by the first digit of a notebook's name
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
    "cannot run, plan it, and redraw the paper: every step a notebook."
)
_STYLE = Path(__file__).with_name("site.css").read_text()
_STYLE += HtmlFormatter(style="default").get_style_defs(".highlight")
_DOCS = PROJECT / "docs"
# a link within the repository; those with a colon or a # lead elsewhere
_TARGET = re.compile(r'(href|src)="([^":#]+)(?=["#])')
_MEDIA_TYPES = {".svg": "svg+xml", ".png": "png"}
_WIDGET = "application/vnd.jupyter.widget-view+json"


def notebook_page(path: Path, links: str = "") -> str:
    """HTML of an executed notebook that needs no network: pictures stand for widgets,
    text links for remote badges.

    links: HTML of the links above and below. Folders of this machine are shortened.
    """
    notebook = _self_contained(nbformat.read(path, as_version=4))
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    body = exporter.from_notebook_node(notebook)[0]
    nav = f"<nav>{links}</nav>" if links else ""
    title = _title(notebook, path.stem)
    body = f"{nav}\n{body}\n{nav}"
    return _without_folders(page(title, body, _STYLE))


def write_site(results: Sequence[Result], folder: Path) -> Path:
    """Write a page per question of docs/ and per executed notebook and, last, the
    index, whose path is returned.

    Nothing is written if one fails.
    """
    names = [result.name for result in results]
    pages = {
        result.name: notebook_page(result.output, _links(names, number))
        for number, result in enumerate(results)
    }
    nav = '<nav><a href="index.html">All pages and notebooks</a></nav>'
    # outside of a checkout there are none
    for path in _DOCS.glob("[a-z]*.md"):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        pages[path.stem] = page(title, f"{nav}\n{_docs_html(path)}\n{nav}", _STYLE)
    # last: who sees the index finds every page
    pages["index"] = _index(results)
    for name, text in pages.items():
        write_text(folder / f"{name}.html", text)
    return folder / "index.html"


def _index(results):
    failed = sum(bool(result.error) for result in results)
    seconds = sum(result.seconds for result in results)
    about = f"{len(results)} notebooks in {seconds:.0f} s"
    about += f", {failed} failed" if failed else ""
    parts = [
        "<h1>MAD-Max Workbench</h1>",
        paragraph(_SENTENCE, "message"),
        paragraph(about, "about"),
    ]
    docs = _DOCS / "README.md"
    if docs.exists():
        parts.append(re.sub(r"<h1.*?</h1>", "", _docs_html(docs)))
    groups = {}
    for result in results:
        group = _GROUPS.get(result.name[0], "Others")
        groups.setdefault(group, []).append(_entry(result))
    for group, entries in groups.items():
        parts.append(f"<h2>{group}</h2>\n" + "\n".join(entries))
    parts.append(
        paragraph(
            f"MAD-Max Workbench {__version__}. The pictures were drawn by this run.",
            "about",
        )
    )
    return _without_folders(page("MAD-Max Workbench", "\n".join(parts), _STYLE))


def _entry(result):
    notebook = nbformat.read(result.output, as_version=4)
    title = html.escape(_title(notebook, result.name))
    question = notebook_question(notebook)
    question = paragraph(question) if question != title else ""
    about = f"{result.name}, {result.seconds:.0f} s"
    if result.error:
        about += f' <strong class="failed">failed</strong> {html.escape(result.error)}'
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    source = next(filter(None, map(_source, outputs)), "")
    figure = f'<img src="{source}" alt="First figure of {title}">' if source else ""
    heading = f'<h3><a href="{result.name}.html">{title}</a></h3>'
    text = f'{heading}{question}<p class="about">{about}</p>'
    return f'<div class="entry"><div>{figure}</div><div>{text}</div></div>'


def _links(names, number):
    """The index, the notebook before and the one after."""
    texts = {"index": "All notebooks"}
    # slices, because the first has none before it and the last none after
    texts |= {name: f"← {name}" for name in names[max(number - 1, 0) : number]}
    texts |= {name: f"{name} →" for name in names[number + 1 : number + 2]}
    return "".join(f'<a href="{name}.html">{text}</a>' for name, text in texts.items())


def _self_contained(notebook):
    """The notebook with pictures in the page, whose `alt` is the text above them."""
    notebook.metadata.pop("widgets", None)
    heading = ""
    text = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            # a badge, which is a picture of the network, becomes its words
            cell.source = re.sub(r"!\[([^\]]*)\]\(https?:[^)]*\)", r"\1", cell.source)
            if title := re.search(r"^#+ (.+)", cell.source, re.M):
                heading = _plain(title[1])
            text = _plain(re.sub(r"^#+ .+", "", cell.source, flags=re.M))
        for output in list(cell.get("outputs", [])):
            is_widget = output.get("data", {}).pop(_WIDGET, None)
            if is_widget and set(output.data) <= {"text/plain"}:
                # a progress bar, halted where the kernel last told of it
                cell.outputs.remove(output)
            elif figure := _source(output):
                # the first sentence of the text above says what is to be seen
                sentence = re.split(r"(?<=[.?])\s", text)[0]
                alt = html.escape(f"{sentence} ({heading})" if sentence else heading)
                output.data = {"text/html": f'<img src="{figure}" alt="{alt}">'}
    return notebook


def _source(output):
    """The picture of an output as the source of an <img>; empty where it has none."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return _embedded("svg+xml", data["image/svg+xml"].encode())
    if "image/png" in data:  # which notebooks hold in base64 already
        return f"data:image/png;base64,{data['image/png'].strip()}"
    return ""


def _embedded(kind, content):
    """A picture as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _docs_html(path):
    text = re.sub(r"<!--.*?-->", "", path.read_text())
    # pilcrows that nbconvert puts behind headings
    body = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(text))
    return _TARGET.sub(
        lambda link: f'{link[1]}="{_address(path.parent, link[2])}', body
    )


def _address(folder, link):
    """Address of a link of Markdown: a page of the site, a picture in the page, or a
    file of the repository.
    """
    target = Path(os.path.normpath(folder / link))
    if target.parent == _DOCS or target.suffix == ".ipynb":
        return f"{target.stem}.html"
    if target.suffix in _MEDIA_TYPES:
        return _embedded(_MEDIA_TYPES[target.suffix], target.read_bytes())
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    path = target.relative_to(PROJECT).as_posix()
    return f"{project['urls']['Repository']}/blob/main/{path}"


def _first_text(notebook):
    """The cell with the title; papermill puts one of its own before it where a notebook
    failed.
    """
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return next((text for text in texts if text.startswith("# ")), "")


def notebook_question(notebook: nbformat.NotebookNode) -> str:
    """Question that a notebook answers: the bold sentence of its first text, or its
    title.
    """
    question = re.search(r"\*\*(.+?)\*\*", _first_text(notebook), re.DOTALL)
    return _plain(question[1]) if question else _title(notebook, "")


def _title(notebook, otherwise):
    first_line = _first_text(notebook).partition("\n")[0]
    return _plain(first_line.removeprefix("# ")) or otherwise


def _plain(markdown):
    """Words of a piece of Markdown, on one line."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", markdown).split())


def _without_folders(text):
    """The text with "." for the checkout and "~" for the home folder: what a traceback
    or a printed path tells of a machine.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - never raises
    for folder, name in ((PROJECT, "."), (home, "~")):
        if len(folder.parts) > 1:  # "/" is no secret
            # only as a whole path, not inside of a longer word or of an address
            whole_path = rf"(?<![\w+/.-]){re.escape(str(folder))}(?![\w-])"
            text = re.sub(whole_path, name, text)
    return text
