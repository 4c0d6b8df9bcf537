"""What has to be computed and moved? A model cut by a plan, as blocks per pipeline stage.

A block is what is computed between two collectives: embedding, attention or feed-forward part of a layer, head.
Amounts are per device and micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from madmax_lib.case import Case
from madmax_lib.plan_layers import chunk_layers
from madmax_lib.simulator.layers.moe import dlrm_blocks
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.transformer import embedding_block, head_block, layer_blocks
from madmax_lib.simulator.layers.work import Work
from madmax_lib.specs import DLRM, Transformer

__all__ = ["chunk_blocks", "ends_by_flops"]


def chunk_blocks(case: Case) -> list[list[list[Block]]]:
    """Blocks of each chunk of each stage.

    Raises ValueError for layers that the stages cannot share, and for a DLRM with more than dp.
    """
    if isinstance(case.model, DLRM):
        return [[dlrm_blocks(case)]]
    work, kinds = Work.of(case), {}

    def blocks(layer: int) -> list[Block]:
        mixture = bool(case.model.experts) and layer >= case.model.dense_layers
        kind = mixture, case.model.layer_window(layer) > 0
        if kind not in kinds:
            kinds[kind] = layer_blocks(work, layer, mixture=mixture, windowed=kind[1], exchanged=case.plan.ep > 1)
        return [replace(block, name=f"{block.name.split()[0]} {layer}", unit=f"layer {layer}") for block in kinds[kind]]

    stages = chunk_layers(case.model.layers, case.plan)
    if case.software.stages_by_flops and case.plan.pp > 1:
        if case.plan.interleave > 1:
            raise ValueError(f"interleave={case.plan.interleave}: {case.software.name} has one chunk per stage")
        ends = pairwise([0, *ends_by_flops(case.model, case.plan.pp).tolist()])
        stages = [[range(first, end)] for first, end in ends]
    result = [[[block for layer in layers for block in blocks(layer)] for layers in stage] for stage in stages]
    result[0][0].insert(0, embedding_block(work))
    result[-1][-1].append(head_block(work))
    return result


def ends_by_flops(model: Transformer, pp: int) -> np.ndarray:
    """Layers up to the end of each stage, (pp,): it ends with the layer that exceeds its even share of the FLOPs.

    The head counts, so that the last stages have fewer layers or none [nanotron, models/base.py, build_model].
    """
    layer = model.attention_parameters + model.mlp_parameters(model.ffn)
    share = (model.layers + model.vocab * model.hidden / layer) / pp
    number = np.arange(pp)
    ends = np.maximum.accumulate(np.floor(share * (number + 1)).astype(int) + 1 - number) + number
    return np.append(np.minimum(ends[:-1], model.layers), model.layers)
