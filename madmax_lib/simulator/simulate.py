"""What would this step look like? Model, cluster and plan in, a simulated `Timeline` out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.plan import Plan
from madmax_lib.simulator.compute import Parameters
from madmax_lib.simulator.engine import to_timeline
from madmax_lib.simulator.schedule import Step
from madmax_lib.simulator.workload import BYTES, blocks
from madmax_lib.specs import DLRM, Cluster, Model
from madmax_lib.timeline import Meta, Timeline

__all__ = ["simulate"]

_ALL_RANKS_UP_TO = 64
_LATER = {"cp": 1, "ep": 1, "interleave": 1, "offload": None}  # what the schedule lays out only with this value


def simulate(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    parameters: Parameters | None = None,
) -> Timeline:
    """One training step of a model on a cluster under a plan.

    global_batch: samples over all devices. sequence: tokens per sample, the model's own if None. parameters: achieved
    shares of the data-sheet rates, ideal if None. Ranks: one per pipeline stage, standing for all devices of the stage
    (meta.represents); all ranks of up to 64 devices. Streams: 0 compute, 1 tensor, 2 data, 3 pipeline parallel.
    Raises ValueError, in the field's words, for a plan that cannot be laid over model and cluster.
    """
    plan.check(model, cluster)
    for name, only in _LATER.items():
        if getattr(plan, name) != only:
            raise ValueError(f"{name}={getattr(plan, name)}: the simulator lays out {name}={only} only")
    if plan.schedule == "zero-bubble":
        raise ValueError("schedule='zero-bubble': the simulator lays out gpipe and 1f1b only")
    micro_batches = plan.micro_batches(global_batch)
    stages = blocks(model, plan, sequence, dtype=dtype)
    step = Step(stages, plan, cluster, parameters or Parameters(), dtype)
    activation_bytes = 0.0
    if not isinstance(model, DLRM):
        tokens = plan.micro_batch * (sequence or model.sequence)
        shards = plan.tp if plan.sequence_parallel else 1
        activation_bytes = tokens * model.hidden * BYTES[dtype] / shards
    program = step.build(micro_batches, activation_bytes)
    width = plan.world_size // plan.pp
    meta = Meta(
        source="simulated",
        world_size=plan.world_size,
        represents={stage: list(range(stage * width, (stage + 1) * width)) for stage in range(plan.pp)},
        device=cluster.device.name,
        provenance={
            "model": model.name,
            "cluster": cluster.name,
            "nodes": cluster.nodes,
            "plan": str(plan),
            "global_batch": global_batch,
        },
    )
    return _with_device_ranks(to_timeline(program, meta))


def _with_device_ranks(timeline: Timeline) -> Timeline:
    """Stage numbers become device ranks: the first of each stage, or every one in a small world."""
    groups = timeline.meta.represents
    every = timeline.meta.world_size <= _ALL_RANKS_UP_TO
    spans, edges, stage_of = timeline.spans, timeline.edges, timeline.spans["rank"].to_numpy()
    first = np.array([groups[stage][0] for stage in sorted(groups)], dtype=np.int32)
    copies = len(groups[0]) if every else 1
    parts = [spans.assign(rank=first[stage_of] + np.int32(copy)) for copy in range(copies)]
    shifted = [edges.assign(source=edges["source"] + i * len(spans), target=edges["target"] + i * len(spans))
               for i in range(copies)]  # fmt: skip
    represents = {rank: [rank] if every else ranks for ranks in groups.values() for rank in ranks[:copies]}
    return Timeline(
        pd.concat(parts, ignore_index=True),
        replace(timeline.meta, represents=represents),
        pd.concat(shifted, ignore_index=True),
    )
