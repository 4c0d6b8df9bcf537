"""Every op of a step as a table, an independent count of what the simulator computes
and moves.
"""

import math

import pandas as pd

from madmax_lib.catalog.models import Model
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.layers.ops import Block, Comm, Op, mirror, phases
from madmax_lib.simulator.layers.transformer import chunk_blocks

_COLUMNS = ["stage", "block", "op", "phase", "kind", "wide", "stream", "flops", "read_bytes", "written_bytes",
            "collective", "group", "size_bytes"]  # fmt: skip


def blocks(
    model: Model,
    plan: Plan,
    sequence: int | None = None,
    dtype: str = "bf16",
    *,
    imbalance: float = 1.0,
) -> list[list[Block]]:
    """Blocks of each pipeline stage, those of its chunks in a row."""
    chunks = chunk_blocks(
        Case(model, None, plan, sequence=sequence, dtype=dtype, imbalance=imbalance)
    )
    return [[block for chunk in stage for block in chunk] for stage in chunks]


def ops(
    model: Model,
    plan: Plan,
    sequence: int | None = None,
    dtype: str = "bf16",
    *,
    imbalance: float = 1.0,
) -> pd.DataFrame:
    """Every op of one micro-batch on one device of each stage, and the optimizer's: a
    row each.

    Columns: stage, block, op, phase (forward recompute backward optimizer), kind (gemm
    attention pointwise lookup comm), wide, stream (compute, or the group's), flops,
    read_bytes, written_bytes, and collective, group, size_bytes. Gradients and
    parameters of data parallelism move once per step or layer, not per micro-batch: not
    listed.
    """
    rows: list[tuple] = []
    for stage, stage_blocks in enumerate(
        blocks(model, plan, sequence, dtype, imbalance=imbalance)
    ):
        held = 0.0
        for block in stage_blocks:
            rows += _rows(stage, block, plan)
            held += 0.0 if block.table else block.parameters
        owned = held / (plan.shard or plan.dp * plan.cp) if plan.zero else held
        # fp32 parameter, two moments and gradient read; the first three and a 16-bit
        # copy written
        rows.append((stage, "optimizer", "adam", "optimizer", "pointwise", True, "compute", 0.0, 16 * owned,
                     14 * owned, "", "", math.nan))  # fmt: skip
    return pd.DataFrame(rows, columns=_COLUMNS)


def _rows(stage: int, block: Block, plan: Plan) -> list[tuple]:
    ranks = {
        "tp": plan.tp,
        "cp": plan.cp,
        "ep": plan.ep,
        "dp": plan.dp,
        "etp": plan.tp // plan.expert_spread,
    }

    def comm(phase: str, comms: tuple[Comm, ...]) -> list[tuple]:
        return [(stage, block.name, c.kind, phase, "comm", True, c.group, 0.0, 0.0, 0.0, c.kind, c.group,
                 float(c.size_bytes)) for c in comms if c.kind != "copy" and ranks[c.group] > 1]  # fmt: skip

    def ring(phase: str, passes: int) -> list[tuple]:
        sent = Comm("send_recv", "cp", block.ring_bytes)
        return comm(phase, (sent,) * passes) if block.ring_bytes else []

    result = []
    for phase, work in _phases(block, plan.recompute).items():
        named = "backward" if phase == "weight" else phase
        whole = phase == "forward" or (phase == "recompute" and work == block.ops)
        before, after = (block.before, block.after) if whole else ((), ())
        if phase == "backward":
            before, after = mirror(block.after), mirror(block.before)
        result += comm(named, before)
        result += [(stage, block.name, op.name, named, op.kind, op.wide, "compute", float(op.flops),
                    float(op.read_bytes), float(op.written_bytes), "", "", math.nan) for op in work]  # fmt: skip
        if work and phase != "weight":
            result += ring(
                named, 2 * plan.cp - 1 if phase == "backward" else plan.cp - 1
            )
        result += comm(named, after)
    return result


def _phases(block: Block, recompute: str) -> dict[str, tuple[Op, ...]]:
    """Ops of a block by phase, in the order in which they run."""
    work: dict[str, list[Op]] = {
        "forward": [],
        "recompute": [],
        "backward": [],
        "weight": [],
    }
    for phase, op in phases(block):
        work[phase].append(op)
    if block.recomputed and recompute != "none":
        work["recompute"] = [op for op in block.ops if op.core or recompute == "full"]
    return {phase: tuple(ops) for phase, ops in work.items()}
