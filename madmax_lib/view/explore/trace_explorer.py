"""Explorer of trace sets: ranks and steps chosen, their timeline and breakdown."""

from functools import cached_property, lru_cache

from matplotlib import pyplot as plt

from madmax_lib.catalog.datasets import dataset, names
from madmax_lib.timeline import Timeline
from madmax_lib.traces.read.kineto import read_trace
from madmax_lib.view.explore.explorer import Explorer, control, message_html, offer
from madmax_lib.view.explore.widgets import TimelineView, breakdown_html
from madmax_lib.view.notebooks.environment import is_here


class TraceExplorer(Explorer):
    """A set of traces of which ranks and steps are chosen.

    trace: the name of a dataset, a file or a directory. ranks: empty for all. step: -1
    for all. `view` is the timeline, `view.breakdown` the account of the brushed window.
    Raises ValueError for ranks or a step that the trace lacks.
    """

    def __init__(self, *, trace: str, ranks: list[int] | None = None, step: int = -1):
        self.parameters = {"trace": trace, "ranks": list(ranks or []), "step": step}
        self.view = TimelineView(_part(**self.parameters))

    def set(self, **changes) -> None:
        """Change parameters; another trace begins with all its ranks and steps."""
        before = self.parameters
        if changes.get("trace", before["trace"]) != before["trace"]:
            changes = {"ranks": [], "step": -1} | changes
        # a trace that cannot be read leaves the one before
        parameters = before | changes
        self.view.show(_part(**parameters))
        self.parameters = parameters

    @property
    def recording(self) -> Timeline:
        """The trace with all ranks and steps."""
        return _read(self.parameters["trace"])

    @property
    def html(self) -> str:
        """Breakdown of what is chosen, as a table."""
        if self.error:
            return message_html(self.error)
        return breakdown_html(self.view.breakdown)

    def figure(self) -> plt.Figure:
        """The static picture: one step of what is chosen."""
        return self.view.static()

    @cached_property
    def controls(self) -> dict:
        """The controls by the parameters' names."""
        import ipywidgets as w

        here = self.parameters["trace"]
        # data sets that would be downloaded first are not offered
        local = [name for name in names() if is_here(name)]
        traces = list(dict.fromkeys([here, *local]))  # each once, this one first
        return {
            "trace": w.Dropdown(options=traces, value=here),
            "own trace": control("path of a file or folder", ""),
            "ranks": w.SelectMultiple(rows=4),
            "step": w.Dropdown(),
        }

    @cached_property
    def widget(self):
        """Controls above the breakdown above the timeline."""
        self.follow()
        return self.stacked(self.numbers, self.view.widget)

    def turn(self, name: str, value) -> None:
        """Change one parameter."""
        self.set(**{name: list(value) if name == "ranks" else value})

    def follow(self) -> None:
        """Offer the ranks and steps of the trace that is chosen."""
        offer(self.controls["trace"], self.parameters["trace"])
        ranks = self.controls["ranks"]
        step = self.controls["step"]
        # options before values: a value has to be one of them
        ranks.options = self.recording.ranks
        ranks.value = tuple(self.parameters["ranks"])
        steps = [(str(number), number) for number in self.recording.steps]
        step.options = [("all", -1), *steps]
        step.value = self.parameters["step"]


@lru_cache(maxsize=4)
def _read(trace):
    return read_trace(dataset(trace) if trace in names() else trace)


def _part(trace, ranks, step):
    """The chosen ranks and steps of a trace; no ranks and step -1 are all of them."""
    recording = _read(trace)
    steps = None if step < 0 else recording.one_step(step)
    return recording.select(ranks=ranks or None, steps=steps)
