"""What do explorers share? How they are shown, and how controls behave: sliders, lists, work that waits for the last.

An explorer takes a notebook's papermill parameters by their names; its controls carry the same names, and `parameters`
gives them back as they stand, for `python -m madmax_lib run NAME -p name=value`. Where no widget can be shown it is a
picture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from html import escape

from matplotlib import pyplot as plt

from madmax_lib.view.explore.widgets import interactive, view_bundle

__all__ = ["Explorer", "Later", "Turning", "doublings", "message_html", "offer", "slider"]


class Explorer:
    """What a notebook shows: `widget` where one can be shown, else `figure`. `html` are the numbers above a view."""

    html: str
    widget: object

    def figure(self) -> plt.Figure:
        """The static picture."""
        raise NotImplementedError

    @cached_property
    def numbers(self):
        """`html` as a widget."""
        import ipywidgets

        return ipywidgets.HTML(self.html)

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        return view_bundle(self.widget if interactive() else None, self.figure)


class Later:
    """Calls a function some seconds after the last request, at once where no event loop runs.

    An error of the field (ValueError, OSError) goes to `failed`, as text.
    """

    def __init__(self, delay_s: float, function: Callable[[], None], failed: Callable[[str], None]):
        self.delay_s, self.function, self.failed, self.waiting = delay_s, function, failed, None

    def __call__(self) -> None:
        """Ask for a call; one that still waits is dropped."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._call()
        if self.waiting is not None:
            self.waiting.cancel()
        self.waiting = loop.call_later(self.delay_s, self._call)

    def _call(self) -> None:
        try:
            self.function()
        except (OSError, ValueError) as error:
            self.failed(str(error))


class Turning:
    """Tells a control that is turned by hand from one that follows another.

    Within `with turning:` changes of controls are not passed on to the function.
    """

    def __init__(self, controls: dict, function: Callable[[str, object], None]):
        self.quiet, self.function = False, function
        for name, control in controls.items():
            control.description, control.style = name, {"description_width": "6.5em"}
            control.observe(lambda change, name=name: self._turned(name, change["new"]), "value")

    def _turned(self, name: str, value) -> None:
        if not self.quiet:
            self.function(name, value)

    def __enter__(self) -> None:
        self.quiet = True

    def __exit__(self, *_) -> None:
        self.quiet = False


def doublings(first: int, last: int, *also: int) -> list[int]:
    """Powers of two from first to last, and other values in between, in order.

    >>> doublings(1, 8, 6)
    [1, 2, 4, 6, 8]
    """
    return sorted({*also, *(first << k for k in range((last // first).bit_length()))})


def slider(values: list, value):
    """A slider over the values of a list."""
    import ipywidgets

    return ipywidgets.SelectionSlider(options=values, value=value)


def offer(control, options: list, value) -> None:
    """Give a control other options and a value, which joins them if it is none of them."""
    if value not in options:
        options = sorted([*options, value]) if isinstance(value, int) else [value, *options]
    if list(control.options) != list(options):
        control.options = options
    control.value = value


def message_html(text: str) -> str:
    """One line that says what is wrong."""
    return f'<div role="alert" style="color:#c0392b">{escape(text)}</div>'
