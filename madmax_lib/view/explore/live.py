"""Pictures with a control for each value that they are drawn from."""

from collections.abc import Callable, Sequence
from functools import cached_property

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from madmax_lib.view.explore.explorer import Explorer, message_html
from madmax_lib.view.explore.widgets import png_of


class Live(Explorer):
    """A picture that is drawn again when a control beside it is turned.

        view.Live(lambda micro_batch: draw(micro_batch), micro_batch=[1, 2, 4])

    draw: makes the axes, of a value of each name. values: what each may be; the first
    ones are drawn where no widget can be shown.
    """

    def __init__(self, draw: Callable[..., Axes], **values: Sequence):
        self.draw = draw
        self.offers = {name: list(options) for name, options in values.items()}
        self.values = {name: options[0] for name, options in values.items()}

    @property
    def html(self) -> str:
        """Reason why the last values cannot be drawn."""
        return self.error and message_html(self.error)

    def figure(self) -> plt.Figure:
        """The picture of the values as they stand."""
        return self.draw(**self.values).figure

    @cached_property
    def picture(self):
        """The picture as a widget."""
        import ipywidgets

        return ipywidgets.Image(value=png_of(self.figure()), format="png")

    @cached_property
    def widget(self):
        """Controls above the picture; what cannot be drawn is said between them."""
        for control in self.controls.values():
            control.continuous_update = False  # a picture takes a while
        return self.stacked(self.numbers, self.picture)

    def turn(self, name: str, value) -> None:
        """Draw anew with another value."""
        values = self.values | {name: value}
        self.picture.value = png_of(self.draw(**values).figure)
        self.values = values
