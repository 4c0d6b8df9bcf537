"""Explorer of one step: model, cluster and plan to numbers, bars and a timeline.

Numbers follow a control at once; the timeline comes a moment after the last change.

Explorer of the space of plans: the front of time and memory, filtered and clicked.

Every filter is a search of the smaller space, so the front is exact under it; a click
shows the plan's numbers and timeline as the explorer of one step does.
"""

import json
import math
from dataclasses import replace
from functools import cached_property, lru_cache

import pandas as pd
from matplotlib import pyplot as plt

from madmax_lib import catalog
from madmax_lib.catalog import Cluster, Transformer, data_file
from madmax_lib.plan import Plan
from madmax_lib.planner import Space, search
from madmax_lib.simulator import simulate
from madmax_lib.view.explore.explorer import (
    Explorer,
    Later,
    command_html,
    doublings,
    message_html,
)
from madmax_lib.view.explore.plan_card import (
    plan_card,
    plan_card_html,
)
from madmax_lib.view.explore.widgets import TimelineView, widget_class
from madmax_lib.view.plots.breakdown import plot_timeline
from madmax_lib.view.plots.plans import plot_front

_DELAY_S = 0.01  # after the last change, before a timeline is laid out
# micro-batches of a drawn step, or one per stage where there are more stages
_DRAWN = 8
# fields of a plan that are turned by doubling
_DEGREES = ("tp", "pp", "cp", "ep", "micro_batch")
_CHOICES = {
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "gpipe", "zero-bubble"),
}


class WorkloadExplorer(Explorer):
    """An explorer of a workload, by a notebook's parameters; sequence=0 is the model's
    own, software="none" any.
    """

    def __init__(
        self,
        *,
        model: str,
        cluster: str,
        nodes: int,
        global_batch: int,
        sequence=0,
        software="none",
    ):
        self.parameters = {
            "model": model,
            "cluster": cluster,
            "nodes": nodes,
            "global_batch": global_batch,
            "sequence": sequence,
            "software": software,
        }

    @property
    def model(self) -> Transformer:
        """The model as it stands."""
        return catalog.model(self.parameters["model"])

    @property
    def cluster(self) -> Cluster:
        """The cluster as it stands."""
        return catalog.cluster(
            self.parameters["cluster"], nodes=self.parameters["nodes"]
        )

    @property
    def batch(self) -> dict:
        """global_batch, software, sequence (None for the model's own) and dtype: bf16,
        or fp16 on devices before it.
        """
        batch = {name: self.parameters[name] for name in ("global_batch", "software")}
        return batch | {
            "sequence": self.parameters["sequence"] or None,
            "dtype": self.cluster.device.nearest("bf16"),
        }


class StepExplorer(WorkloadExplorer):
    """One step of a model on a cluster under a plan: numbers, parts of time and memory,
    and its timeline.

    plan: its text, beside the parameters of every `WorkloadExplorer`. dp follows from
    the other degrees. `card` and `view` are what is shown, `error` is why a plan has no
    numbers, else empty. The timeline is that of a step with at most 8 micro-batches, or
    one per stage, on a rank of each stage; the numbers are for the whole batch. Raises
    ValueError when the first plan cannot be laid out.
    """

    def __init__(self, *, plan: str, **workload):
        super().__init__(**workload)
        self.parameters["plan"] = plan
        # the first plan has to have numbers: later ones may fail
        self.set()
        if self.error:
            raise ValueError(self.error)
        self.view = TimelineView(self._timeline())

    def set(self, **changes) -> None:
        """Change parameters, or fields of the plan by their names, and work the numbers
        out again.

        dp becomes what the other degrees leave, unless the plan is given as a whole. A
        plan that cannot be laid out leaves its reason in `error`.
        """
        fields = {name: changes[name] for name in changes.keys() - self.parameters}
        try:
            # checked first: a model that is none is not taken over
            model = catalog.model(changes.get("model", self.parameters["model"]))
            if not isinstance(model, Transformer):
                why = "recommendation models have no closed form; use mm.simulate"
                raise ValueError(f"{model.name}: {why}")
            names = changes.keys() - fields
            self.parameters |= {name: changes[name] for name in names}
            self.plan = Plan.parse(self.parameters["plan"])
            # a plan given as text is taken as it is
            if changes and "plan" not in changes:
                self.plan = _filling(self.plan, self.cluster.world_size, fields)
                self.parameters["plan"] = str(self.plan)
            self.card = plan_card(self.model, self.cluster, self.plan, **self.batch)
            self.error = ""
        except (OSError, ValueError) as error:
            self.error = str(error)

    def draw(self) -> None:
        """Lay the timeline out for the parameters as they stand."""
        # the last timeline stays where a plan cannot be laid out
        if not self.error:
            self.view.show(self._timeline())

    def _timeline(self):
        plan = self.plan
        batch = self.batch
        few_samples = self._drawn[0] * plan.dp * plan.micro_batch
        batch["global_batch"] = min(batch["global_batch"], few_samples)
        return _stages(self.model, self.cluster, plan, **batch)

    @property
    def _drawn(self):
        """Micro-batches of the timeline, a multiple of the stages as interleaved
        schedules want it, and of the step.
        """
        stages = self.plan.pp
        micro_batches = self.plan.micro_batches(self.parameters["global_batch"])
        few = stages * math.ceil(_DRAWN / stages)
        return min(micro_batches, few), micro_batches

    @property
    def _caption(self):
        return "{} of {} micro-batches, one rank per stage".format(*self._drawn)

    @property
    def html(self) -> str:
        """Numbers and bars, or the reason why there are none."""
        if self.error:
            return message_html(self.error)
        return (
            plan_card_html(self.card)
            + f"<div>below: {self._caption}</div>"
            + command_html(self.command)
        )

    @property
    def command(self) -> list[str]:
        """The command line that prints these numbers, word by word."""
        p = self.parameters
        options = {
            "--nodes": p["nodes"],
            "--global-batch": p["global_batch"],
            "--dtype": self.batch["dtype"],
            "--sequence": p["sequence"],
            "--software": "" if p["software"] == "none" else p["software"],
        }
        words = ["madmax", "estimate", p["model"], p["cluster"], p["plan"]]
        for name, value in options.items():
            words += [name, value] if value else []  # 0 and "" stand for the default
        return words

    def figure(self) -> plt.Figure:
        """The static picture: the timeline."""
        ax = plot_timeline(self.view.timelines[0])
        ax.set_title(f"Simulated: {self._caption}")
        return ax.figure

    @property
    def offers(self) -> dict:
        """The parameters, and the fields of the plan that can be turned one by one."""
        return {
            "model": tuple(transformers()),
            "own model": "path of a config.json",
            "cluster": tuple(catalog.names("clusters")),
            "nodes": doublings(1, 1024),
            "global_batch": doublings(1, 8192),
            "sequence": doublings(512, 131072),
            "software": tuple(catalog.table("software")["name"].unique()),
            **dict.fromkeys(_DEGREES, doublings(1, 64)),
            **_CHOICES,
            "plan": "degrees and choices",
        }

    @property
    def values(self) -> dict:
        """The parameters and the fields of the plan; the sequence is a number."""
        sequence = self.parameters["sequence"] or self.model.sequence
        fields = {name: getattr(self.plan, name) for name in (*_DEGREES, *_CHOICES)}
        return self.parameters | {"sequence": sequence} | fields

    @cached_property
    def widget(self):
        """Controls above numbers above the timeline."""
        self._draw_later = Later(
            _DELAY_S, lambda: self.error or self.attempt(self.draw)
        )
        return self.stacked(self.numbers, self.view.widget)

    def turn(self, name: str, value) -> None:
        """Change one parameter, or field of the plan. Raises ValueError for a plan that
        cannot be laid out.
        """
        if name == "sequence" and value == self.model.sequence:
            value = 0  # so that it follows the model
        self.set(**{name: value})
        if self.error:
            raise ValueError(self.error)

    def follow(self) -> None:
        """Bring the controls to the plan, and the timeline a moment later."""
        super().follow()
        self._draw_later()


@lru_cache(maxsize=1)
def transformers() -> list[str]:
    """Names of the models that have a closed form: all but recommendation models."""
    return [
        name
        for name in catalog.names("models")
        if isinstance(catalog.model(name), Transformer)
    ]


@lru_cache(maxsize=32)
def _stages(model, cluster, plan, **batch):
    """The simulated step on a rank of each stage; what was seen before is there at
    once.
    """
    timeline = simulate(model, cluster, plan, **batch)
    # ranks are numbered stage by stage: the first of each
    return timeline.select(ranks=timeline.ranks[:: len(timeline.ranks) // plan.pp])


def _filling(plan, world_size, changes):
    """The plan with changed fields and the dp that fills the cluster. Raises ValueError
    where none does.
    """
    if "tp" in changes and plan.sequence_parallel == (plan.tp > 1):
        changes = changes | {"sequence_parallel": None}  # stays the default
    # the devices of one replica, of which dp fill the cluster
    degrees = {
        name: changes.get(name, getattr(plan, name)) for name in ("tp", "pp", "cp")
    }
    model_parallel = math.prod(degrees.values())
    # dp has to be a whole number of replicas
    if world_size % model_parallel:
        text = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        raise ValueError(f"{text} does not divide {world_size} devices")
    return replace(plan, **changes, dp=world_size // model_parallel)


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
        # as the fastest stack that holds it, where none was asked for
        rows = pd.concat([self.result.table, self.result.pareto])
        stacks = rows.loc[rows["plan"] == plan, "stacks"]
        software = self.parameters["software"]
        if software == "none" and len(stacks):
            software = stacks.iloc[0].split(" ")[0]
        # the numbers at once, then the timeline
        self.step.set(plan=plan, software=software)
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
        seconds = both.get("launched_s", both["step_s"])
        both = both.assign(step_s=seconds, memory_gib=both["memory_bytes"] / 2**30)
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
        chosen = int((points["plan"] == self.step.parameters["plan"]).argmax())
        # the choice is an index into the points: both go out together
        with self.front.hold_sync():
            self.front.points = points.to_dict("records")
            self.front.chosen = chosen

    def _clicked(self, at):
        plan = self.front.points[at]["plan"]
        # setting the chosen dot from here comes back as a click
        if plan != self.step.parameters["plan"]:
            self.attempt(lambda: self.choose(plan))
