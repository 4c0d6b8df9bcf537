"""What does a launcher need of a plan, and what would its step look like? JSON by stage and rank, and a Timeline.

The timeline is one 1F1B step with the planner's own prices, one rank per stage, laid out by
`simulator.schedule.engine`. A third of a stage's time is its forward pass. Every micro-batch is sent, there and back,
beside computing; the cost counts the send at each boundary once, so the two differ a little.
"""

from __future__ import annotations

import json
from pathlib import Path

from madmax_lib.atomic import replacing
from madmax_lib.plan import Plan
from madmax_lib.planner.hetero.solve import Planned
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
    found, fleet = planned.plan, planned.problem.fleet(planned.plan.node_sequence)
    stages = []
    for row, samples in zip(planned.stages.itertuples(), planned.samples, strict=True):
        ranks = list(range(row.first_rank, row.first_rank + row.gpus))
        text = str(Plan(dp=row.dp, tp=row.tp, micro_batch=max(samples), recompute=row.recompute))
        types = [fleet.types[kind] for kind in fleet.type_of(ranks)]
        stages.append({"stage": row.stage, "ranks": ranks, "types": types, "dp": row.dp, "tp": row.tp,
                       "recompute": row.recompute, "layers": [row.first_layer, row.first_layer + row.layers],
                       "samples": samples, "plan": text})  # fmt: skip
    return {
        "global_batch": planned.problem.rules.global_batch, "micro_batches": found.batches, "cost_ms": planned.cost_ms,
        "node_sequence": list(found.node_sequence), "world_size": fleet.size, "plan": plan_text(planned),
        "stages": stages,
    }  # fmt: skip


def plan_text(planned: Planned) -> str | None:
    """Text of the one `Plan` that says the same, None if there is none.

    There is one for GPUs of one type, stages of the same degrees and recompute, equal shares of a micro-batch, and
    stages of as many layers, the first and last excepted. Embedding and head are no layers of a Plan.
    """
    table = planned.stages
    layers = table["layers"].to_list()
    layers[0] -= 1
    layers[-1] -= 1
    inner = set(layers[1:-1]) or {max(layers)}
    alike = all(table[name].nunique() == 1 for name in ("types", "dp", "tp", "recompute"))
    even = len({h for samples in planned.samples for h in samples}) == 1
    if not alike or not even or len(inner) > 1 or min(layers) < 1 or "+" in table["types"].iloc[0]:
        return None
    (middle,), one, last = inner, table.iloc[0], len(layers) > 1
    return str(Plan(dp=int(one["dp"]), tp=int(one["tp"]), pp=len(layers), micro_batch=planned.samples[0][0],
                    recompute=one["recompute"], first_layers=layers[0] * (last and layers[0] != middle),
                    last_layers=layers[-1] * (last and layers[-1] != middle)))  # fmt: skip


def save_plan(planned: Planned, path: str | Path) -> Path:
    """Write `as_json` to a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(as_json(planned), indent=1))
    return Path(path)


def timeline(planned: Planned) -> Timeline:
    """One simulated step: streams 0 compute, 2 gradients, 3 activations; a rank per stage, its first."""
    table, count = planned.stages, planned.plan.batches
    first_ms, last_ms = (planned.terms[name] / count for name in ("generator_ms", "sync_ms"))
    pp, ranks = len(table), table["first_rank"].tolist()
    stage_s, send_s = table["stage_ms"].to_numpy() / 1e3, table["send_ms"].to_numpy() / 1e3
    program, sent, ended = Program(), {}, {}
    for stage, slot in in_order([order("1f1b", stage, pp, count) for stage in range(pp)]):
        direction, _, number = slot
        forward, rank = direction == "forward", ranks[stage]
        if forward and stage == 0 and first_ms:
            program.op(Stream.COMPUTE, "other", "batch generator", first_ms / 1e3, rank=rank)
        length_s = stage_s[stage] * (_FORWARD if forward else 1 - _FORWARD)
        message = dependency(slot, stage, pp, 1)
        after = [sent[message]] if message else []
        ended[stage] = program.op(Stream.COMPUTE, "compute", f"{direction} {number}", length_s, after, rank=rank)
        if stage < pp - 1 if forward else stage:
            over_s, name = send_s[stage if forward else stage - 1], f"send {direction}"
            sent[stage, slot] = program.op(Stream.PIPELINE, "comm", name, over_s, [ended[stage]], rank=rank, group="pp")
        if not forward and stage == pp - 1 and last_ms:
            ended[stage] = program.op(Stream.COMPUTE, "other", "end of pass", last_ms / 1e3, rank=rank)
    for row in table.itertuples():
        over = ended[row.stage]
        reduced = [program.op(Stream.DATA, "comm", "all_reduce gradients", row.gradients_ms / 1e3, [over],
                              rank=row.first_rank, group="dp")] if row.dp > 1 else []  # fmt: skip
        waits = [over, *reduced]
        program.op(Stream.COMPUTE, "compute", "optimizer", row.optimizer_ms / 1e3, waits, rank=row.first_rank)
    represents = {row.first_rank: list(range(row.first_rank, row.first_rank + row.gpus)) for row in table.itertuples()}
    meta = Meta(source="simulated", world_size=int(table["gpus"].sum()), represents=represents,
                device="+".join(planned.plan.node_sequence), provenance=planned.provenance)  # fmt: skip
    return to_timeline(program, meta)
