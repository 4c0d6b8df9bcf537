"""Pages of executed notebooks, for somebody with only a browser: no network, no scripts.
`docs/site.py` makes a site of them.
"""

import base64
import html
import os
import re
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from madmax_lib.catalog import PROJECT
from madmax_lib.view.notebooks.page import page

_STYLE = Path(__file__).with_name("site.css").read_text()
_STYLE += HtmlFormatter(style="default").get_style_defs(".highlight")
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
    return site_page(_title(notebook, path.stem), f"{nav}\n{body}\n{nav}")


def site_page(title: str, body: str) -> str:
    """A page in the style of notebooks, with "." for the checkout and "~" for the home
    folder: what a traceback or a printed path tells of a machine.
    """
    text = page(title, body, _STYLE)
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - never raises
    for folder, name in ((PROJECT, "."), (home, "~")):
        if len(folder.parts) > 1:  # "/" is no secret
            # only as a whole path, not inside of a longer word or of an address
            whole_path = rf"(?<![\w+/.-]){re.escape(str(folder))}(?![\w-])"
            text = re.sub(whole_path, name, text)
    return text


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
            elif "text/html" in output.get("data", {}):
                continue  # an explorer's numbers, which hold the picture
            elif figure := _picture(output):
                # the first sentence of the text above says what is to be seen
                sentence = re.split(r"(?<=[.?])\s", text)[0]
                alt = html.escape(f"{sentence} ({heading})" if sentence else heading)
                output.data = {"text/html": f'<img src="{figure}" alt="{alt}">'}
    return notebook


def _picture(output):
    """The picture of an output as an address that holds it; empty where it has none."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        content = base64.b64encode(data["image/svg+xml"].encode()).decode()
        return f"data:image/svg+xml;base64,{content}"
    if "image/png" in data:  # which notebooks hold in base64 already
        return f"data:image/png;base64,{data['image/png'].strip()}"
    return ""


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
