"""What is in this trace? The explorer of trace sets: ranks and steps chosen, their timeline and breakdown."""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

from madmax_lib.datasets import dataset, names
from madmax_lib.timeline import Timeline
from madmax_lib.traces.read.kineto import read_trace
from madmax_lib.view.explore.controls import Turning, message_html
from madmax_lib.view.explore.widgets import TimelineView, breakdown_html, interactive, view_bundle

__all__ = ["TraceExplorer"]


class TraceExplorer:
    """A set of traces of which ranks and steps are chosen.

    trace: the name of a dataset, a file or a directory. ranks: empty for all. step: -1 for all. `view` is the timeline,
    `view.breakdown` the account of the brushed window. Raises ValueError for ranks or a step that the trace lacks.
    """

    def __init__(self, *, trace: str, ranks: list[int] | None = None, step: int = -1):
        self.parameters = {"trace": trace, "ranks": list(ranks or []), "step": step}
        self.view = TimelineView(self._chosen())

    def set(self, **changes) -> None:
        """Change parameters; another trace begins with all its ranks and steps."""
        before = self.parameters
        fresh = {"ranks": [], "step": -1} if changes.get("trace", before["trace"]) != before["trace"] else {}
        self.parameters = before | fresh | changes
        try:
            self.view.show(self._chosen())
        except (OSError, ValueError):
            self.parameters = before
            raise

    @property
    def whole(self) -> Timeline:
        """The trace with all ranks and steps."""
        return _read(self.parameters["trace"])

    def _chosen(self) -> Timeline:
        ranks, step = self.parameters["ranks"], self.parameters["step"]
        if step >= 0 and step not in self.whole.steps:
            raise ValueError(f"step {step} is not in the timeline; it has {self.whole.steps or 'no steps'}")
        return self.whole.select(ranks=ranks or None, steps=None if step < 0 else [step])

    @property
    def html(self) -> str:
        """Breakdown of what is chosen, as a table."""
        return breakdown_html(self.view.breakdown)

    @cached_property
    def controls(self) -> dict:
        """The controls by the parameters' names."""
        import ipywidgets as w

        here = self.parameters["trace"]
        made = {"trace": w.Dropdown(options=list(dict.fromkeys([here, *_local()])), value=here),
                "ranks": w.SelectMultiple(rows=4), "step": w.Dropdown()}  # fmt: skip
        self._offer(made)
        return made

    def _offer(self, controls: dict) -> None:
        """Ranks and steps of the trace that is chosen."""
        controls["ranks"].options = self.whole.ranks
        controls["ranks"].value = tuple(self.parameters["ranks"])
        steps = [("all", -1), *((str(step), step) for step in self.whole.steps)]
        controls["step"].options, controls["step"].value = steps, self.parameters["step"]

    @cached_property
    def numbers(self):
        """The breakdown as a widget."""
        import ipywidgets as w

        return w.HTML(self.html)

    @cached_property
    def widget(self):
        """Controls above the breakdown above the timeline."""
        import ipywidgets as w

        self._turning = Turning(self.controls, self._turned)
        return w.VBox([w.HBox(list(self.controls.values())), self.numbers, self.view.widget])

    def _turned(self, name: str, value) -> None:
        try:
            self.set(**{name: list(value) if name == "ranks" else value})
        except (OSError, ValueError) as error:
            self.numbers.value = message_html(str(error))
            return
        with self._turning:
            self._offer(self.controls)
        self.numbers.value = self.html

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        return view_bundle(self.widget if interactive() else None, self.view.static)


@lru_cache(maxsize=4)
def _read(trace: str) -> Timeline:
    return read_trace(dataset(trace) if trace in names() else trace)


def _local() -> list[str]:
    """Datasets of traces that are on this machine."""
    return [name for name in names() if _is_here(name)]


def _is_here(name: str) -> bool:
    try:
        return Path(dataset(name, download=False)).exists()
    except (OSError, ValueError):
        return False
