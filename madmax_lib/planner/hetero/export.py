"""What does a launcher need of a plan, and what would its step look like? JSON by stage and rank, and a Timeline.

The timeline is one 1F1B step with the planner's own prices, one rank per stage, laid out by
`simulator.schedule.engine`. A third of a stage's time is its forward pass. Every micro-batch is sent, there and back,
beside computing; the cost counts the send at each boundary once, so the two differ a little.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from madmax_lib.atomic import replacing
from madmax_lib.plan import Plan
from madmax_lib.planner.hetero.planned import Planned
from madmax_lib.simulator.schedule.engine import Program, to_timeline
from madmax_lib.simulator.schedule.schedules import dependency, in_order, order
from madmax_lib.simulator.schedule.streams import Stream
from madmax_lib.timeline import Meta, Timeline

__all__ = ["as_json", "plan_text", "save_plan", "timeline"]

_FORWARD = 1 / 3  # of forward and backward together: the backward pass multiplies twice as much


def as_json(planned: Planned) -> dict:
    """The plan for a launcher, plain values.

    stages: ranks with the types of their GPUs, degrees, layers (first, end), samples of a micro-batch that each replica
    takes, and `plan`, the text of the stage's own `Plan`. plan: of the whole, for `Plan.parse` and `simulate`, where
    all stages are alike; else None. Ranks count GPUs in the order of node_sequence.
    """
    plan, fleet = planned.plan, planned.costs.fleet
    stages = []
    for number, stage in enumerate(planned.costs.stages):
        ranks = list(range(stage.start, stage.end))
        own = Plan(dp=stage.dp, tp=stage.tp, micro_batch=max(stage.samples), recompute=stage.recompute)
        stages.append(
            {
                "stage": number,
                "ranks": ranks,
                "types": [fleet.types[kind] for kind in fleet.type_of(ranks)],
                "dp": stage.dp,
                "tp": stage.tp,
                "recompute": stage.recompute,
                "layers": [stage.layers.start, stage.layers.stop],
                "samples": stage.samples,
                "plan": str(own),
            }
        )
    return {
        "global_batch": planned.problem.rules.global_batch,
        "micro_batches": plan.batches,
        "cost_ms": planned.cost_ms,
        "node_sequence": list(plan.node_sequence),
        "world_size": fleet.size,
        "plan": plan_text(planned),
        "stages": stages,
    }


def plan_text(planned: Planned) -> str | None:
    """Text of the one `Plan` that says the same, None if there is none.

    There is one for GPUs of one type, stages of the same degrees and recompute, equal shares of a micro-batch, and
    stages of as many layers, the first and last excepted. Embedding and head are no layers of a Plan.
    """
    stages = planned.costs.stages
    layers = [stage.layer_count for stage in stages]
    layers[0] -= 1
    layers[-1] -= 1
    inner = set(layers[1:-1]) or {max(layers)}
    kinds = {(tuple(stage.distinct_types), stage.dp, stage.tp, stage.recompute) for stage in stages}
    samples = {held for stage in stages for held in stage.samples}
    if len(kinds) > 1 or len(samples) > 1 or len(inner) > 1 or min(layers) < 1 or len(stages[0].distinct_types) > 1:
        return None
    (middle,), uneven_ends = inner, len(layers) > 1
    plan = Plan(
        dp=stages[0].dp,
        tp=stages[0].tp,
        pp=len(layers),
        micro_batch=samples.pop(),
        recompute=stages[0].recompute,
        first_layers=layers[0] * (uneven_ends and layers[0] != middle),
        last_layers=layers[-1] * (uneven_ends and layers[-1] != middle),
    )
    return str(plan)


def save_plan(planned: Planned, path: str | Path) -> Path:
    """Write `as_json` to a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(as_json(planned), indent=1))
    return Path(path)


def timeline(planned: Planned) -> Timeline:
    """One simulated step: streams 0 compute, 2 gradients, 3 activations; a rank per stage, its first."""
    costs, stages = planned.costs, planned.costs.stages
    pp, batches = len(stages), planned.plan.batches
    generator_s, sync_s = costs.generator_s(stages[0]), costs.sync_s(stages[-1])
    times_s = [costs.stage_s(stage) for stage in stages]
    sends_s = [costs.send_s(*neighbours) for neighbours in pairwise(stages)]
    program, sends, last = Program(), {}, {}
    for number, slot in in_order([order("1f1b", stage, pp, batches) for stage in range(pp)]):
        direction, _, batch = slot
        forward, rank = direction == "forward", stages[number].start
        if forward and number == 0 and generator_s:
            program.op(Stream.COMPUTE, "other", "batch generator", generator_s, rank=rank)
        pass_s = times_s[number] * (_FORWARD if forward else 1 - _FORWARD)
        message = dependency(slot, number, pp, 1)
        after = [sends[message]] if message else []
        last[number] = program.op(Stream.COMPUTE, "compute", f"{direction} {batch}", pass_s, after, rank=rank)
        boundary = number if forward else number - 1
        if 0 <= boundary < pp - 1:
            name, send_s = f"send {direction}", sends_s[boundary]
            sends[number, slot] = program.op(
                Stream.PIPELINE, "comm", name, send_s, [last[number]], rank=rank, group="pp"
            )
        if not forward and number == pp - 1 and sync_s:
            last[number] = program.op(Stream.COMPUTE, "other", "end of pass", sync_s, rank=rank)
    for number, stage in enumerate(stages):
        after, rank = [last[number]], stage.start
        if stage.dp > 1:
            name, gradients_s = "all_reduce gradients", costs.gradients_s(stage)
            after.append(program.op(Stream.DATA, "comm", name, gradients_s, after, rank=rank, group="dp"))
        program.op(Stream.COMPUTE, "compute", "optimizer", costs.optimizer_s(stage), after, rank=rank)
    meta = Meta(
        source="simulated",
        world_size=costs.fleet.size,
        represents={stage.start: list(range(stage.start, stage.end)) for stage in stages},
        device="+".join(planned.plan.node_sequence),
        provenance=planned.provenance,
    )
    return to_timeline(program, meta)
