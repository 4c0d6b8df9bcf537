"""Frame and style of all pages of the workbench: no network, no scripts."""

import html
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

_HERE = Path(__file__).parent


@dataclass
class Result:
    """Executed notebook."""

    name: str
    output: Path  # its copy in build/
    seconds: float  # that it ran
    figures: list[str] = field(default_factory=list)  # written
    error: str = ""  # of a failed cell


def page(title: str, body: str, style: str = "") -> str:
    """A whole HTML document. title is text, body HTML; style: CSS beside that of all
    pages.
    """
    style = (_HERE / "page.css").read_text() + style
    return Template((_HERE / "page.html").read_text()).substitute(
        title=html.escape(title), style=style, body=body
    )


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text, none of an empty one. kind: its class in the style, such as
    about or message.
    """
    if not text:
        return ""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{html.escape(text)}</p>"
