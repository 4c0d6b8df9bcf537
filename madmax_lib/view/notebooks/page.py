"""What do all pages of the workbench look like? One frame and one style: no network, no
scripts.
"""

import html
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

__all__ = ["Result", "page", "paragraph"]

_HERE = Path(__file__).parent


@dataclass
class Result:
    """One executed notebook: its copy in build/, seconds it ran, figures written, the
    error of a failed cell.
    """

    name: str
    output: Path
    seconds: float
    figures: list[str] = field(default_factory=list)
    error: str = ""


def page(title: str, body: str, style: str = "") -> str:
    """A whole HTML document. title is text, body HTML; style: CSS beside that of all
    pages.
    """
    style = (_HERE / "page.css").read_text() + style
    return Template((_HERE / "page.html").read_text()).substitute(
        title=html.escape(title), style=style, body=body
    )


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text. kind: its class in the style, such as about or message."""
    return (
        f'<p class="{kind}">{html.escape(text)}</p>'
        if kind
        else f"<p>{html.escape(text)}</p>"
    )
