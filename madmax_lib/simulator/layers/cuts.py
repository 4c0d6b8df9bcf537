"""Cuts of a model into the stages of a pipeline and their chunks: of one plan, and of the
plans of a table or a product.
"""

from itertools import pairwise

import numpy as np

from madmax_lib.catalog import Software, Transformer
from madmax_lib.plan import Plan, Plans
from madmax_lib.plan.columns import alike_rows
from madmax_lib.plan.layers import chunk_layers

# fields of a plan that say where a model is cut
_CUT = (
    "pp",
    "interleave",
    "first_layers",
    "last_layers",
    "embedding_as_layer",
    "head_as_layer",
    "layout",
    "folds",
)


def cut_model(
    model: Transformer, plan: Plan, software: Software | None = None
) -> list[list[range]]:
    """Layers of each chunk of each stage; some software cuts at equal FLOPs.

    There a stage ends with the layer that exceeds its even share of them. The head
    counts, so that the last stages have fewer layers or none [nanotron,
    models/base.py, build_model]. There a stage is one chunk.

    Raises ValueError for layers that the stages cannot share.
    """
    pp = plan.pp
    if pp == 1 or not software or not software.stages_by_flops:
        return chunk_layers(model.layers, plan)
    layer = model.attention_parameters + model.mlp_parameters(model.ffn)
    share = (model.layers + model.vocab * model.hidden / layer) / pp
    stage = np.arange(pp)
    ends = np.floor(share * (stage + 1)).astype(int) + 1
    # each stage takes a layer at least: ends - stage must not fall
    ends = np.maximum.accumulate(ends - stage) + stage
    ends = np.minimum(ends[:-1], model.layers).tolist()
    return [[range(*pair)] for pair in pairwise([0, *ends, model.layers])]


def kinds_of_chunks(
    model: Transformer, plan: Plan, software: Software | None = None
) -> np.ndarray:
    """Layers of each kind (`Transformer.kinds`) in each chunk, (stages, chunks, kinds)."""
    words = np.array(model.layer_kinds)
    is_kind = [words == kind for kind in model.kinds]
    return np.array(
        [
            [
                [np.sum(layers[chunk]) for layers in is_kind]
                for chunk in map(list, stage)
            ]
            for stage in cut_model(model, plan, software)
        ]
    )


def cuts_of(plans: Plans, *counts: int | np.ndarray) -> tuple[list, np.ndarray]:
    """Cuts that plans, and counts such as that of layers, make: the values of each once,
    for `plan_of_cut` and the counts last, and the index of the cut of each plan.
    """
    columns = [*(getattr(plans, name) for name in _CUT), *counts]
    shape = np.broadcast_shapes(*map(np.shape, columns))
    rows, index = alike_rows(columns, shape)
    firsts = (np.broadcast_to(column, shape).flat[rows] for column in columns)
    cuts = zip(*(first.tolist() for first in firsts), strict=True)
    # one number for each plan of the table or product
    return list(cuts), index.reshape(shape)


def plan_of_cut(cut: tuple) -> Plan:
    """Plan of a cut of `cuts_of`, all other fields at their defaults."""
    fields = dict(zip(_CUT, cut, strict=False))
    schedule = "zbv" if fields.pop("folds") else "1f1b"
    return Plan(**fields, schedule=schedule)
