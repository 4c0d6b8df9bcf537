"""Which uniform plan is best on GPUs of one type by Metis' cost?

Homogeneous planning in the manner of Metis [Um et al., USENIX ATC 2024]: equal stages with equal degrees, priced by
the same cost as heterogeneous plans (`papers.metis.stages`), every stage counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pandas as pd

from madmax_lib.papers.metis.job import Job, load_job
from madmax_lib.papers.metis.space import divisors
from madmax_lib.papers.metis.stages import Layout, cost_ms
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.profiles import Profiles

__all__ = ["uniform_plans"]


def uniform_plans(
    profiles: str | Path | Profiles,
    nodes: Sequence[Node],
    *,
    layers: int,
    global_batch: int,
    model_profile: str | tuple[str, int, int] | None,
    max_tp: int,
    max_bs: int,
) -> pd.DataFrame:
    """All plans dp x tp x pp = GPUs whose degree and micro-batch have a profile, by cost; arguments as for `search`.

    Columns: cost_ms, dp, tp, pp, micro_batch, batches (micro-batches per step), layer_partition (as even as possible,
    earlier stages larger), memory_mb (of a GPU of the fullest stage, as profiled) and fits. Raises ValueError for
    several GPU types or where no plan has a profile.
    """
    job, nodes = load_job(profiles, nodes, None, model_profile=model_profile, layers=layers, global_batch=global_batch,
                          max_tp=max_tp, max_bs=max_bs)  # fmt: skip
    types = sorted({node.device for node in nodes})
    if len(types) > 1:
        raise ValueError(f"uniform plans are for one GPU type, the cluster has {', '.join(types)}")
    rows = list(_rows(job, nodes, types[0]))
    if not rows:
        raise ValueError(f"no plan of {types[0]} GPUs with a profile splits a batch of {global_batch}")
    return pd.DataFrame(rows).sort_values("cost_ms", kind="stable", ignore_index=True)


def _rows(job: Job, nodes: tuple[Node, ...], device: str) -> Iterator[dict]:
    layout = Layout(nodes, [device], job)
    gpus = len(layout.types)
    for pp in (degree for degree in divisors(gpus)[::-1] if degree <= job.layers):
        partition = list(accumulate(((job.layers - stage - 1) // pp + 1 for stage in range(pp)), initial=0))
        for tp in (tp for tp in job.profiles.degrees(device) if gpus % (pp * tp) == 0 and tp <= job.max_tp):
            dp = gpus // pp // tp
            for micro_batch in job.profiles.batches(device, tp):
                if micro_batch > job.max_bs or job.global_batch % (dp * micro_batch):
                    continue
                batches = job.global_batch // dp // micro_batch
                stages = [layout.stage(stage * dp * tp, dp * tp, dp, batches) for stage in range(pp)]
                held = job.slices("memory_mb", device, tp, micro_batch)
                memory_mb = max(held[x][y - x] for x, y in pairwise(partition))
                degrees = {"dp": dp, "tp": tp, "pp": pp, "micro_batch": micro_batch, "batches": batches}
                yield {"cost_ms": cost_ms(stages, partition, pp), **degrees, "layer_partition": partition,
                       "memory_mb": memory_mb, "fits": memory_mb <= layout.memory_mb(0, 1)}  # fmt: skip
