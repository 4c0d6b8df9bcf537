"""Pictures with a control for each value that they are drawn from."""

import io
from collections.abc import Callable, Sequence
from functools import cached_property

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from madmax_lib.view.explore.widgets import interactive, view_bundle


class Live:
    """A picture that is drawn again when a control beside it is turned.

        view.Live(lambda micro_batch: draw(micro_batch), micro_batch=[1, 2, 4])

    draw: makes the axes, of a value of each name. values: what each may be, in order;
    the first ones are drawn where no widget can be shown.
    """

    def __init__(self, draw: Callable[..., Axes], **values: Sequence):
        self.draw = draw
        self.values = values

    def static(self) -> plt.Figure:
        """The picture of the first values."""
        first = {name: options[0] for name, options in self.values.items()}
        return self.draw(**first).figure

    @cached_property
    def widget(self):
        """Controls above the picture; what cannot be drawn is said in its place."""
        import ipywidgets as w

        picture = w.Image(format="png")
        message = w.Label()
        controls = {
            name: w.SelectionSlider(
                options=list(options), description=name, continuous_update=False
            )
            for name, options in self.values.items()
        }

        def turn(_change=None):
            message.value = ""
            try:
                chosen = {name: control.value for name, control in controls.items()}
                figure = self.draw(**chosen).figure
            except ValueError as error:
                message.value = str(error)
                return
            with io.BytesIO() as file:
                figure.savefig(file, format="png", dpi=110)
                picture.value = file.getvalue()
            plt.close(figure)

        for control in controls.values():
            control.observe(turn, "value")
        turn()
        return w.VBox([*controls.values(), message, picture])

    def _repr_mimebundle_(self, **_):
        return view_bundle(self.widget if interactive() else None, self.static)
