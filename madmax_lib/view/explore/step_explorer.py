"""Explorer of one step: model, cluster and plan to numbers, bars and a timeline.

Numbers follow a control at once; the timeline comes a moment after the last change.
"""

import math
from dataclasses import replace
from functools import cached_property, lru_cache

from matplotlib import pyplot as plt

from madmax_lib import catalog
from madmax_lib.catalog import Cluster, Transformer
from madmax_lib.plan import Plan
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
    plot_plan_card,
)
from madmax_lib.view.explore.widgets import TimelineView
from madmax_lib.view.plots.breakdown import plot_timeline

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
        """The static picture: parts of time and memory as bars above the timeline."""
        # inches and ratios grow with the rows of the timeline
        rows = self.view.rows
        figure, axes = plt.subplots(
            3,
            1,
            layout="constrained",
            figsize=(9, 4.2 + 0.22 * rows),
            height_ratios=[1.5, 1.5, 3 + rows],
        )
        plot_plan_card(self.card, axes[:2])
        plot_timeline(self.view.timelines[0], axes[2])
        axes[2].set_title(f"Simulated: {self._caption}")
        return figure

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
        changes = {**changes, "sequence_parallel": None}  # stays the default
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
