"""What is a plan made of, what does a launcher need of it, and what would its step look
like? The planner's answer.

In ms and MB for its readers. The timeline is one 1F1B step with the planner's own
prices, one rank per stage, laid out by `simulator.schedule.engine`. A third of a
stage's time is its forward pass. Every micro-batch is sent, there and back, beside
computing, of which the cost is an upper bound.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pandas as pd

from madmax_lib.base.atomic import write_text
from madmax_lib.plan.plan import Plan
from madmax_lib.planner.hetero.costs import PlanCost
from madmax_lib.planner.hetero.prices import MB_BYTES
from madmax_lib.planner.hetero.problem import HeteroProblem, given_or_made
from madmax_lib.planner.hetero.stage_plan import HeteroPlan
from madmax_lib.simulator.events.engine import Program, to_timeline
from madmax_lib.simulator.events.schedules import dependency, in_order, order
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.timeline.timeline import Meta, Timeline

__all__ = ["Planned", "as_json", "cost", "save_plan", "timeline"]

_STAGES = 8  # that are shown
_FORWARD = (
    1 / 3
)  # of forward and backward together: the backward pass multiplies twice as much


@dataclass(frozen=True, eq=False, repr=False)
class Planned:
    """A plan with its cost; nothing is proven of it by default.

    costs: the plan, its problem, and what it is charged for in seconds.
    bound_ms: no plan of the search space costs less.
    gap: share of the cost between the two.
    stopped: whether the search was interrupted.
    sweeps: effort of the search.
    """

    costs: PlanCost
    bound_ms: float = 0.0
    gap: float = 1.0
    stopped: bool = False
    sweeps: int = 0

    @classmethod
    def of(cls, plan: HeteroPlan | Mapping, given: HeteroProblem) -> "Planned":
        """A plan of one's own, repaired as in `cost`, with its cost, terms and tables."""
        return cls(PlanCost(HeteroPlan.read(plan).repaired(given.prices.layers), given))

    def __repr__(self) -> str:
        samples = self.problem.rules.global_batch
        stages = self.stages
        batches = self.plan.batches
        layers = self.problem.prices.layers
        lines = [
            f"{self.cost_ms:,.4g} ms for {samples:,} samples in {batches} "
            f"micro-batches, {layers} layers with ends"
        ]
        if self.bound_ms:
            lines[0] += (
                "; none is cheaper"
                if self.gap < 1e-6
                else f"; the cheapest is at most {self.gap:.2%} below"
            )
        lines[0] += "; interrupted, the best so far" if self.stopped else ""
        for row in stages.itertuples():
            ends = f"layers {row.first_layer} to {row.first_layer + row.layers - 1}"
            lines.append(
                f"stage {row.stage}: {row.gpus} x {row.types}, dp {row.dp} tp "
                f"{row.tp}, {ends}, {row.stage_ms:.3g} ms"
            )
        more = (
            [f"... and {len(stages) - _STAGES} stages more (.stages)"]
            if len(stages) > _STAGES
            else []
        )
        return "\n".join([*lines[: 1 + _STAGES], *more])

    def _repr_html_(self) -> str:
        headline = repr(self).splitlines()[0]
        return f"<p>{headline}</p>{self.stages.to_html(index=False, border=0, float_format='{:.4g}'.format)}"

    @property
    def plan(self) -> HeteroPlan:
        """The plan itself."""
        return self.costs.plan

    @property
    def problem(self) -> HeteroProblem:
        """What was searched."""
        return self.costs.problem

    @cached_property
    def cost_ms(self) -> float:
        """What `cost` says of the plan."""
        return 1e3 * self.costs.total_s()

    @cached_property
    def terms(self) -> dict[str, float]:
        """Terms of the cost in ms."""
        return {
            f"{name.removesuffix('_s')}_ms": 1e3 * float(value)
            for name, value in self.costs.terms().items()
        }

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per stage: ranks, GPU types, degrees, layers, samples of its
        replicas, its times.
        """
        costs = self.costs
        columns = (
            "stage first_rank gpus types dp tp recompute first_layer layers "
            "least_samples"
        )
        sends_s = [
            costs.send_s(*neighbours) for neighbours in pairwise(costs.stages)
        ] + [0.0]
        rows = []
        for number, (stage, send_s) in enumerate(
            zip(costs.stages, sends_s, strict=True)
        ):
            types = "+".join(costs.fleet.types[kind] for kind in stage.distinct_types)
            of_stage = (
                number,
                stage.start,
                stage.end - stage.start,
                types,
                stage.dp,
                stage.tp,
                stage.recompute,
            )
            held = (
                stage.layers.start,
                stage.layer_count,
                min(stage.samples),
                max(stage.samples),
            )
            times_s = (
                costs.stage_s(stage),
                send_s,
                costs.gradients_s(stage),
                costs.optimizer_s(stage),
            )
            rows.append((*of_stage, *held, *(1e3 * seconds for seconds in times_s)))
        return pd.DataFrame(
            rows,
            columns=f"{columns} most_samples stage_ms send_ms gradients_ms optimizer_ms".split(),
        )

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The fullest GPU of each type in each stage: stage, device, used_mb,
        capacity_mb.
        """
        table = self.costs.memory_table()
        used_mb = table["used_bytes"] / MB_BYTES
        capacity_mb = table["capacity_bytes"] / MB_BYTES
        return table[["stage", "device"]].assign(
            used_mb=used_mb, capacity_mb=capacity_mb
        )

    @property
    def provenance(self) -> dict:
        """What a picture or timeline of the plan was made from."""
        return {
            "plan": json.dumps(asdict(self.plan)),
            "global_batch": self.problem.rules.global_batch,
        }


def cost(
    plan: HeteroPlan | Mapping, given: HeteroProblem | None = None, **inputs
) -> float:
    """The correct cost of a plan in ms: the one that `hetero.plan` minimises, infinite
    where a GPU lacks memory.

    plan: a HeteroPlan, or a mapping or table row with its fields, such as those that
    Metis proposes; one that loses layers or has empty stages is repaired first
    (`HeteroPlan.repaired`). given: the problem; if None, inputs are those of `problem`.
    Raises ValueError for a plan that does not fit cluster or batch, and for a missing
    profile.
    """
    return Planned.of(plan, given_or_made(given, inputs)).cost_ms


def as_json(planned: Planned) -> dict:
    """The plan for a launcher, plain values.

    stages: ranks with the types of their GPUs, degrees, layers (first, end), samples of
    a micro-batch that each replica takes, and `plan`, the text of the stage's own
    `Plan`. plan: of the whole, for `Plan.parse` and `simulate`, where all stages are
    alike; else None. Ranks count GPUs in the order of node_sequence.
    """
    plan = planned.plan
    fleet = planned.costs.fleet
    stages = [
        {
            "stage": number,
            "ranks": (ranks := list(range(stage.start, stage.end))),
            "types": [fleet.types[kind] for kind in fleet.type_of(ranks)],
            "dp": stage.dp,
            "tp": stage.tp,
            "recompute": stage.recompute,
            "layers": [stage.layers.start, stage.layers.stop],
            "samples": stage.samples,
            "plan": str(
                Plan(
                    dp=stage.dp,
                    tp=stage.tp,
                    micro_batch=max(stage.samples),
                    recompute=stage.recompute,
                )
            ),
        }
        for number, stage in enumerate(planned.costs.stages)
    ]
    return {
        "global_batch": planned.problem.rules.global_batch,
        "micro_batches": plan.batches,
        "cost_ms": planned.cost_ms,
        "node_sequence": list(plan.node_sequence),
        "world_size": fleet.size,
        "plan": _plan_text(planned),
        "stages": stages,
    }


def save_plan(planned: Planned, path: str | Path) -> Path:
    """Write `as_json` to a file, whole or not at all."""
    write_text(path, json.dumps(as_json(planned), indent=1))
    return Path(path)


def timeline(planned: Planned) -> Timeline:
    """One simulated step: streams 0 compute, 2 gradients, 3 activations; a rank per
    stage, its first.
    """
    costs = planned.costs
    stages = planned.costs.stages
    pp = len(stages)
    batches = planned.plan.batches
    generator_s = costs.generator_s(stages[0])
    sync_s = costs.sync_s(stages[-1])
    times_s = [costs.stage_s(stage) for stage in stages]
    sends_s = [costs.send_s(*neighbours) for neighbours in pairwise(stages)]
    program = Program()
    sends = {}
    last = {}
    for number, slot in in_order(
        [order("1f1b", stage, pp, batches) for stage in range(pp)]
    ):
        direction, _, batch = slot
        forward = direction == "forward"
        rank = stages[number].start
        if forward and number == 0 and generator_s:
            program.op(
                Stream.COMPUTE, "other", "batch generator", generator_s, rank=rank
            )
        pass_s = times_s[number] * (_FORWARD if forward else 1 - _FORWARD)
        message = dependency(slot, number, pp, 1)
        after = [sends[message]] if message else []
        last[number] = program.op(
            Stream.COMPUTE, "compute", f"{direction} {batch}", pass_s, after, rank=rank
        )
        boundary = number if forward else number - 1
        if 0 <= boundary < pp - 1:
            send = "comm", f"send {direction}", sends_s[boundary], [last[number]]
            sends[number, slot] = program.op(
                Stream.PIPELINE, *send, rank=rank, group="pp"
            )
        if not forward and number == pp - 1 and sync_s:
            last[number] = program.op(
                Stream.COMPUTE, "other", "end of pass", sync_s, rank=rank
            )
    tied_s = costs.terms()["tied_s"]
    for number, stage in enumerate(stages):
        after = [last[number]]
        rank = stage.start
        if tied_s and number in (0, pp - 1):
            name = "all_reduce shared table"
            after = [
                program.op(
                    Stream.PIPELINE,
                    "comm",
                    name,
                    tied_s,
                    [last[0], last[pp - 1]],
                    rank=rank,
                    group="pp",
                )
            ]
        if stage.dp > 1:
            name = "all_reduce gradients"
            gradients_s = costs.gradients_s(stage)
            after.append(
                program.op(
                    Stream.DATA, "comm", name, gradients_s, after, rank=rank, group="dp"
                )
            )
        program.op(
            Stream.COMPUTE,
            "compute",
            "optimizer",
            costs.optimizer_s(stage),
            after,
            rank=rank,
        )
    meta = Meta(
        source="simulated",
        world_size=costs.fleet.size,
        represents={
            stage.start: list(range(stage.start, stage.end)) for stage in stages
        },
        device="+".join(planned.plan.node_sequence),
        provenance=planned.provenance,
    )
    return to_timeline(program, meta)


def _plan_text(planned: Planned) -> str | None:
    """Text of the one `Plan` that says the same, None if there is none.

    There is one for GPUs of one type, stages of the same degrees and recompute, equal
    shares of a micro-batch, and stages of as many layers, the first and last excepted.
    Embedding and head are no layers of a Plan.
    """
    stages = planned.costs.stages
    layers = [stage.layer_count for stage in stages]
    layers[0] -= 1
    layers[-1] -= 1
    inner = set(layers[1:-1]) or {max(layers)}
    kinds = {
        (*stage.distinct_types, stage.dp, stage.tp, stage.recompute) for stage in stages
    }
    samples = {held for stage in stages for held in stage.samples}
    if (
        max(len(kinds), len(samples), len(inner), len(stages[0].distinct_types)) > 1
        or min(layers) < 1
    ):
        return None
    first, last = (
        0 if len(stages) == 1 or end in inner else end
        for end in (layers[0], layers[-1])
    )
    degrees = {
        "dp": stages[0].dp,
        "tp": stages[0].tp,
        "pp": len(stages),
        "recompute": stages[0].recompute,
    }
    return str(
        Plan(**degrees, micro_batch=samples.pop(), first_layers=first, last_layers=last)
    )
