"""What has to be computed and moved? A model cut by a plan, as blocks per pipeline stage.

A block is what is computed between two collectives: embedding, attention or feed-forward part of a layer, head.
Amounts are per device and micro-batch.
"""

from __future__ import annotations

from madmax_lib.case import Case
from madmax_lib.plan_layers import chunk_layers
from madmax_lib.simulator.layers.moe import dlrm_blocks
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.transformer import TransformerBlocks
from madmax_lib.specs import DLRM

__all__ = ["chunk_blocks"]


def chunk_blocks(case: Case, imbalance: float = 1.0) -> list[list[list[Block]]]:
    """Blocks of each chunk of each stage. imbalance: tokens of the busiest expert device over the mean.

    Raises ValueError for layers that the stages cannot share, and for a DLRM with more than dp.
    """
    if isinstance(case.model, DLRM):
        return [[dlrm_blocks(case)]]
    work = TransformerBlocks(case, imbalance)
    stages = [[work.layers(layers) for layers in stage] for stage in chunk_layers(case.model.layers, case.plan)]
    stages[0][0].insert(0, work.embedding())
    stages[-1][-1].append(work.head())
    return stages
