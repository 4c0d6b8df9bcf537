"""Pages of docs/ in the site: HTML that needs no network, with links to the pages of
notebooks.
"""

import base64
import os
import re
import tomllib
from pathlib import Path

from nbconvert.filters import markdown2html
from pygments.formatters import HtmlFormatter

from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.view.notebooks.page import page

__all__ = ["docs_index", "docs_pages"]

_DOCS = PROJECT / "docs"
# a link within the repository; those with a colon or a # lead elsewhere
_TARGET = re.compile(r'(href|src)="([^":#]+)')
_MEDIA_TYPES = {".svg": "svg+xml", ".png": "png"}


def docs_pages(style: str) -> dict[str, str]:
    """HTML by name of every page but the index; none outside of a checkout. style: CSS
    beside that of all pages.
    """
    style += HtmlFormatter(style="default").get_style_defs(".highlight")
    nav = '<nav><a href="index.html">All pages and notebooks</a></nav>'
    pages = {}
    for path in sorted(_DOCS.glob("[a-z]*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        pages[path.stem] = page(title, f"{nav}\n{_html(path)}\n{nav}", style)
    return pages


def docs_index() -> str:
    """HTML of the list of pages; empty outside of a checkout."""
    path = _DOCS / "README.md"
    return re.sub(r"<h1.*?</h1>", "", _html(path)) if path.exists() else ""


def _html(path: Path):
    text = re.sub(r"<!--.*?-->", "", path.read_text())
    # pilcrows that nbconvert puts behind headings
    body = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(text))
    return _TARGET.sub(
        lambda link: f'{link[1]}="{_address(path.parent, link[2])}', body
    )


def _address(folder: Path, link: str):
    """Address of a link of Markdown: a page of the site, a picture in the page, or a
    file of the repository.
    """
    target = Path(os.path.normpath(folder / link))
    if target.parent == _DOCS or target.suffix == ".ipynb":
        return f"{target.stem}.html"
    if target.suffix in _MEDIA_TYPES:
        content = base64.b64encode(target.read_bytes()).decode()
        return f"data:image/{_MEDIA_TYPES[target.suffix]};base64,{content}"
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    path = target.relative_to(PROJECT).as_posix()
    return f"{project['urls']['Repository']}/blob/main/{path}"
