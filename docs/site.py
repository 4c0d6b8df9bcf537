"""Site of the project, for somebody with only a browser: a page for each notebook, for
each page of docs/, and an index, no network, no scripts. `madmax site` calls it.
"""

import html
import os
import re
import tomllib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbconvert.filters import markdown2html

from madmax_lib import __version__
from madmax_lib.base.atomic import write_text
from madmax_lib.view.notebooks.page import Result, paragraph
from madmax_lib.view.notebooks.site import notebook_page, notebook_question, site_page

DOCS = Path(__file__).resolve().parent
PROJECT = DOCS.parent
GROUPS = {  # by the first digit of a notebook's name
    "0": "Tour",
    "1": "Runs",
    "2": "Traces",
    "3": "Calibration",
    "4": "Simulator",
    "5": "Papers",
    "6": "Planner",
}
SENTENCE = (
    "Run it, trace it, understand it, calibrate a model on it, predict what you "
    "cannot run, plan it, and redraw the paper: every step a notebook."
)
# a link within the repository; those with a colon or a # lead elsewhere
TARGET = re.compile(r'(href|src)="([^":#]+)(?=["#])')
MEDIA_TYPES = {".svg": "svg+xml", ".png": "png"}


def write_site(results: Sequence[Result], folder: Path) -> Path:
    """Write a page per question of docs/ and per executed notebook and, last, the
    index, whose path is returned.

    Nothing is written if one fails.
    """
    names = [result.name for result in results]
    pages = {
        result.name: notebook_page(result.output, links(names, number))
        for number, result in enumerate(results)
    }
    entries = {}
    for result in results:
        group = GROUPS.get(result.name[0], "Others")
        entries.setdefault(group, []).append(entry(result, pages[result.name]))
    nav = '<nav><a href="index.html">All pages and notebooks</a></nav>'
    for path in DOCS.glob("[a-z]*.md"):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        pages[path.stem] = site_page(title, f"{nav}\n{docs_html(path)}\n{nav}")
    # last: who sees the index finds every page
    pages["index"] = index(results, entries)
    for name, text in pages.items():
        write_text(folder / f"{name}.html", text)
    return folder / "index.html"


def index(results, entries):
    """The page that leads to all others."""
    failed = sum(bool(result.error) for result in results)
    seconds = sum(result.seconds for result in results)
    about = f"{len(results)} notebooks in {seconds:.0f} s"
    about += f", {failed} failed" if failed else ""
    parts = [
        "<h1>MAD-Max Workbench</h1>",
        paragraph(SENTENCE, "message"),
        paragraph(about, "about"),
        re.sub(r"<h1.*?</h1>", "", docs_html(DOCS / "README.md")),
    ]
    for group, of_group in entries.items():
        parts.append(f"<h2>{group}</h2>\n" + "\n".join(of_group))
    closing = f"MAD-Max Workbench {__version__}. The pictures were drawn by this run."
    parts.append(paragraph(closing, "about"))
    return site_page("MAD-Max Workbench", "\n".join(parts))


def entry(result, page):
    """A notebook in the index: its title, its question, its first picture."""
    title = re.search("<title>(.*)</title>", page)[1]
    question = notebook_question(nbformat.read(result.output, as_version=4))
    question = paragraph(question) if question != html.unescape(title) else ""
    about = f"{result.name}, {result.seconds:.0f} s"
    if result.error:
        about += f' <strong class="failed">failed</strong> {html.escape(result.error)}'
    source = re.search(r'<img [^>]*src="(data:[^"]+)"', page)
    figure = f'<img src="{source[1]}" alt="First figure of {title}">' if source else ""
    heading = f'<h3><a href="{result.name}.html">{title}</a></h3>'
    text = f'{heading}{question}<p class="about">{about}</p>'
    return f'<div class="entry"><div>{figure}</div><div>{text}</div></div>'


def links(names, number):
    """The index, the notebook before and the one after."""
    texts = {"index": "All notebooks"}
    # slices, because the first has none before it and the last none after
    texts |= {name: f"← {name}" for name in names[max(number - 1, 0) : number]}
    texts |= {name: f"{name} →" for name in names[number + 1 : number + 2]}
    return "".join(f'<a href="{name}.html">{text}</a>' for name, text in texts.items())


def docs_html(path):
    """A page of Markdown as HTML whose links lead to pages of the site."""
    text = re.sub(r"<!--.*?-->", "", path.read_text())
    # pilcrows that nbconvert puts behind headings
    body = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(text))
    return TARGET.sub(lambda link: f'{link[1]}="{address(path.parent, link[2])}', body)


def address(folder, link):
    """Address of a link of Markdown: a page of the site, a picture in the page, or a
    file of the repository.
    """
    target = Path(os.path.normpath(folder / link))
    if target.parent == DOCS or target.suffix == ".ipynb":
        return f"{target.stem}.html"
    if target.suffix in MEDIA_TYPES:
        content = b64encode(target.read_bytes()).decode()
        return f"data:image/{MEDIA_TYPES[target.suffix]};base64,{content}"
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    path = target.relative_to(PROJECT).as_posix()
    return f"{project['urls']['Repository']}/blob/main/{path}"
