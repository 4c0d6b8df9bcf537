"""Explorer of the space of plans: the front of time and memory, filtered and clicked.

Every filter is a search of the smaller space, so the front is exact under it; a click
shows the plan's numbers and timeline as the explorer of one step does.
"""

import json
from dataclasses import replace
from functools import cached_property

import pandas as pd
from matplotlib import pyplot as plt

from madmax_lib.catalog import data_file
from madmax_lib.planner import Space, search
from madmax_lib.view.explore.explorer import message_html
from madmax_lib.view.explore.step_explorer import StepExplorer, WorkloadExplorer
from madmax_lib.view.explore.widgets import widget_class
from madmax_lib.view.plots.breakdown import plot_timeline
from madmax_lib.view.plots.plans import plot_front

_ANY = "any"
# fields of a plan that can be held, with the values that are offered
_FILTERS = json.loads(data_file("view/filters.json").read_text())
_MOST_PLANS = 200  # of the fastest plans, beside the front


class SpaceExplorer(WorkloadExplorer):
    """The plans of a model on a cluster: the front of time and memory, and one chosen
    plan in detail.

    space: what is searched before filters, `Space.quick()` if None. `filters` are the
    choices that are held, `result` is the search under them, `step` the explorer of the
    chosen plan. Raises ValueError, as `search`, where none fits.
    """

    def __init__(self, *, space: Space | None = None, **workload):
        super().__init__(**workload)
        self.space = space or Space.quick()
        self.filters = {}
        self._results = {}
        self.step = StepExplorer(**self.parameters, plan=str(self._search({}).best))
        self.filter()

    def filter(self, **choices) -> None:
        """Hold fields of the plan to one value, "any" lets them go; the fastest plan
        becomes the chosen one.

        Raises ValueError where no plan is left.
        """
        choices = self.filters | choices
        filters = {name: value for name, value in choices.items() if value != _ANY}
        self.result = self._search(filters)  # where it fails, the filters stay
        self.filters = filters
        self.choose(str(self.result.best))

    def choose(self, plan: str) -> None:
        """Show this plan in detail."""
        # the numbers at once, then the timeline
        self.step.set(plan=plan)
        self.step.draw()

    def _search(self, filters):
        # a filter that comes back shows at once what it showed
        key = tuple(sorted(filters.items()))
        if key not in self._results:
            single = {name: (value,) for name, value in filters.items()}
            space = replace(self.space, **single)
            options = {"top": _MOST_PLANS, "space": space, "progress": False}
            options |= self.batch
            self._results[key] = search(self.model, self.cluster, **options)
        return self._results[key]

    @property
    def points(self) -> pd.DataFrame:
        """The plans that are shown: plan, step_s, memory_gib and whether they are on
        the front.
        """
        front = self.result.pareto.assign(front=True)
        table = self.result.table
        others = table[~table["plan"].isin(front["plan"])].assign(front=False)
        both = pd.concat([front, others], ignore_index=True)
        both = both.assign(memory_gib=both["memory_bytes"] / 2**30)
        return both[["plan", "step_s", "memory_gib", "front"]]

    def figure(self) -> plt.Figure:
        """The static picture: the front above the timeline of the chosen plan."""
        # inches and ratios grow with the rows of the timeline
        rows = self.step.view.rows
        figure, axes = plt.subplots(
            2,
            1,
            layout="constrained",
            figsize=(9, 5.5 + 0.22 * rows),
            height_ratios=[14, 3 + rows],
        )
        plot_front(self.result.pareto, self.step.card.room_bytes, axes[0])
        plot_timeline(self.step.view.timelines[0], axes[1])
        axes[1].set_title(
            f"{self.step.parameters['plan']}, simulated, one rank per stage"
        )
        return figure

    @cached_property
    def front(self):
        """The plans as dots that can be clicked."""
        dots = widget_class("front.js", points=[], chosen=-1, room_gib=0.0)
        front = dots(room_gib=self.step.card.room_bytes / 2**30)
        front.observe(lambda change: self._clicked(change["new"]), "chosen")
        return front

    @property
    def offers(self) -> dict:
        """Values of some fields of the plan, and that any will do."""
        return {name: (_ANY, *values) for name, values in _FILTERS.items()}

    @property
    def values(self) -> dict:
        """The filters, any where there is none."""
        return dict.fromkeys(_FILTERS, _ANY) | self.filters

    @cached_property
    def widget(self):
        """Filters above the dots above the chosen plan's numbers and timeline."""
        self.follow()
        return self.stacked(self.front, self.numbers, self.step.view.widget)

    @property
    def html(self) -> str:
        """Number of plans that fit, and the numbers of the chosen one."""
        count = (
            f"{self.result.feasible:,} of {self.result.evaluated:,} plans fit, "
            f"{self.result.seconds:.2f} s"
        )
        chosen = f"<div>{count} · chosen: <b>{self.step.parameters['plan']}</b></div>"
        return (message_html(self.error) if self.error else chosen) + self.step.html

    def turn(self, name: str, value) -> None:
        """Hold a field of the plan to a value."""
        self.filter(**{name: value})

    def follow(self) -> None:
        """Bring the dots to the result."""
        points = self.points
        chosen = int(
            (points["plan"] == self.step.parameters["plan"]).to_numpy().argmax()
        )
        # the choice is an index into the points: both go out together
        with self.front.hold_sync():
            self.front.points = points.to_dict("records")
            self.front.chosen = chosen

    def _clicked(self, at):
        plan = self.front.points[at]["plan"]
        # setting the chosen dot from here comes back as a click
        if plan != self.step.parameters["plan"]:
            self.attempt(lambda: self.choose(plan))
