"""Base of all explorers: controls that are turned, numbers that follow, and a picture
where no widget can be shown.

An explorer takes a notebook's papermill parameters by their names; its controls carry
the same names, and `parameters` gives them back as they stand, for
`python -m madmax_lib run NAME -p name=value`.
"""

import asyncio
import shlex
from collections.abc import Callable, Sequence
from functools import cached_property
from html import escape
from pathlib import Path

from matplotlib import pyplot as plt

from madmax_lib.view.explore.widgets import interactive, view_bundle


class Explorer:
    """Controls above numbers above a view, live in a browser, else a static picture."""

    # values that the controls offer, by the parameters' names: as `control` has them
    offers: dict
    values: dict  # of the controls, as they stand
    html: str  # the numbers, as a line of HTML or a table
    error: str = ""  # why the last change was not possible, empty where it was
    figure: Callable[[], plt.Figure]  # draws the static picture
    # takes over the value of a control, by its name, that was turned by hand
    turn: Callable[[str, object], None]
    # while controls are brought to the parameters, their changes are not requests
    _following = False

    def attempt(self, action: Callable[[], None]) -> None:
        """Do something and show the numbers after it; a failure becomes `error`."""
        try:
            self.error = ""
            action()
        except (OSError, ValueError) as error:
            self.error = str(error)
        self.numbers.value = self.html

    def follow(self) -> None:
        """Bring the controls to the values as they stand."""
        for name, value in self.values.items():
            offer(self.controls[name], value)

    @cached_property
    def controls(self) -> dict:
        """The controls by the parameters' names."""
        values = self.values
        return {name: control(of, values.get(name)) for name, of in self.offers.items()}

    @cached_property
    def numbers(self):
        """`html` as a widget."""
        import ipywidgets

        return ipywidgets.HTML(self.html)

    def stacked(self, *views):
        """One widget: the controls in as many columns as fit, the numbers, and views
        below them.
        """
        import ipywidgets as w

        for name, control in self.controls.items():
            control.description = name
            control.style = {"description_width": "6.5em"}
            # the name is bound as a default, or all would have the last one
            on_change = lambda change, name=name: self._turned(name, change["new"])  # noqa: E731
            control.observe(on_change, "value")
        explorer = w.VBox([w.GridBox(list(self.controls.values())), *views])
        return explorer.add_class("madmax-explorer")

    def _turned(self, name, value):
        if self._following:
            return
        if name.startswith("own "):  # a box for the path of one's own model or trace
            if not value.strip():
                return
            name = name.removeprefix("own ")
            value = str(Path(value.strip()).expanduser())
        self.attempt(lambda: self.turn(name, value))
        if not self.error:
            self._following = True
            try:
                self.follow()
            finally:
                self._following = False

    def _repr_mimebundle_(self, **_):
        live = self.widget if interactive() else None
        return view_bundle(live, self.figure, self.html)


class Later:
    """Calls a function some seconds after the last request, at once where no event loop
    runs.
    """

    def __init__(self, delay_s: float, function: Callable[[], None]):
        self.delay_s = delay_s
        self.function = function
        self.waiting = None

    def __call__(self):
        """Ask for a call; one that still waits is dropped."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self.function()
        if self.waiting is not None:  # of several requests in a row the last counts
            self.waiting.cancel()
        self.waiting = loop.call_later(self.delay_s, self.function)


def doublings(first: int, last: int) -> list[int]:
    """Powers of two from first to last.

    >>> doublings(1, 8)
    [1, 2, 4, 8]
    """
    return [first << power for power in range((last // first).bit_length())]


def slider(values: list[int], value: int):
    """A slider over some values; the first one joins them."""
    import ipywidgets

    return ipywidgets.SelectionSlider(options=sorted({*values, value}), value=value)


def control(offers: Sequence | str, value):
    """A slider over the values of a list, a menu of those of a tuple, or for a text a
    box with this hint.
    """
    import ipywidgets

    if isinstance(offers, list):
        return slider(offers, value)
    if isinstance(offers, str):
        return ipywidgets.Text(value or "", placeholder=offers, continuous_update=False)
    menu = ipywidgets.Dropdown(options=offers)
    offer(menu, value)
    return menu


def offer(control, value) -> None:
    """Set a control to a value, which joins its options if it is none of them."""
    # a box of text has no options: it takes any value
    if value not in getattr(control, "options", [value]):
        options = [value, *control.options]
        control.options = sorted(options) if isinstance(value, int) else options
    control.value = value


def command_html(words: list) -> str:
    """A command that gives the same numbers; a click selects it whole."""
    line = escape(shlex.join(map(str, words)))
    return f'<pre title="the same numbers; a click selects the line">{line}</pre>'


def message_html(text: str) -> str:
    """One line that says what is wrong."""
    return f'<div role="alert" style="color:#c0392b">{escape(text)}</div>'
