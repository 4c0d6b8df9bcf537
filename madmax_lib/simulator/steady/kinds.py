"""What do several kinds of layers change? Stages of a pipeline that are not alike, and
gathers beside other layers.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.layers import chunk_layers
from madmax_lib.plan.plan import Plan
from madmax_lib.simulator.costs.traffic import slowed_s
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.pieces import Pieces

__all__ = ["farther_s", "gathered_s"]

_CUTS = (
    "pp",
    "interleave",
    "first_layers",
    "last_layers",
    "embedding_as_layer",
    "head_as_layer",
)


def gathered_s(
    model: Transformer, pieces: Pieces, *mean_s: Number
) -> tuple[Number, Number]:
    """Forward and backward pass of the mean layer under ZeRO-3, each beside the gather
    of the next one in its pass.

    Gradients are reduced beside the layer that follows. mean_s: passes as of mean
    layers, for what gathers late or reduces in buckets.
    """
    prices = pieces.prices
    words = model.layer_kinds
    number = {word: place for place, word in enumerate(model.kinds)}
    near = Counter(
        (number[words[i - 1]], number[word], number[words[(i + 1) % len(words)]])
        for i, word in enumerate(words)
    )
    buckets = np.where(prices.buckets, 0.0, 1.0)
    passes_s = [0.0, 0.0]
    for (before, own, behind), count in near.items():
        before, own, behind = (pieces.kinds[place] for place in (before, own, behind))
        ways = (
            (behind.traffic.forward_s, own.traffic.forward_s),
            (
                before.traffic.backward_s + buckets * behind.traffic.reduce_s,
                own.traffic.backward_s + buckets * own.traffic.reduce_s,
            ),
        )
        for way, (moved_s, own_s) in enumerate(ways):
            busy_s = own.time.passes_s[way]
            one_s = np.maximum(busy_s + slowed_s(busy_s, own_s, prices), moved_s)
            passes_s[way] = passes_s[way] + count / len(words) * one_s
    late = prices.gathers_late
    return tuple(
        np.where(late, whole_s, one_s)
        for whole_s, one_s in zip(mean_s, passes_s, strict=True)
    )


def farther_s(model: Transformer, pieces: Pieces, middle: Number) -> tuple[Number, ...]:
    """Seconds of the first, slowest middle and last stage, and of the longest chunk,
    beyond those of their mean layers.

    middle: layers of the fullest middle stage.
    """
    plan = pieces.prices.plan
    mean_s = sum(pieces.layer.passes_s)
    farther = [sum(kind.time.passes_s) - mean_s for kind in pieces.kinds]
    shape = np.broadcast_shapes(
        plan.shape or (1,), *(np.shape(part) for part in (mean_s, *farther))
    )
    farther = np.stack([np.broadcast_to(part, shape) for part in farther])
    mean_s, middle = (np.broadcast_to(part, shape) for part in (mean_s, middle))
    columns = [
        np.broadcast_to(np.asarray(getattr(plan, name)), shape) for name in _CUTS
    ]
    cuts, index = np.unique(
        np.stack(columns).reshape(len(_CUTS), -1), axis=1, return_inverse=True
    )
    result = np.zeros((4, *shape))
    index = index.reshape(shape)
    for number, cut in enumerate(cuts.T.tolist()):
        chunks = _counts(model, cut)
        rows = index == number
        count = chunks.sum(axis=1)
        more_s = count @ farther[:, rows]
        result[0][rows] = more_s[0]
        result[2][rows] = more_s[-1]
        if len(count) > 2:
            whole_s = count.sum(axis=1, keepdims=True) * mean_s[rows] + more_s
            result[1][rows] = whole_s[1:-1].max(axis=0) - middle[rows] * mean_s[rows]
        each = chunks.reshape(-1, len(pieces.kinds))
        chunks_s = (
            each.sum(axis=1, keepdims=True) * mean_s[rows] + each @ farther[:, rows]
        )
        result[3][rows] = (
            chunks_s.max(axis=0) - np.ceil(model.layers / len(each)) * mean_s[rows]
        )
    return tuple(result)


def _counts(model: Transformer, cut: list[int]) -> np.ndarray:
    """Layers of each kind in each chunk, (stages, chunks, kinds)."""
    pp, interleave, first, last, ahead, behind = cut
    ends = {"embedding_as_layer": bool(ahead), "head_as_layer": bool(behind)}
    plan = Plan(
        pp=pp, interleave=interleave, first_layers=first, last_layers=last, **ends
    )
    words = np.array(model.layer_kinds)
    stages = chunk_layers(model.layers, plan)
    return np.array(
        [
            [[np.sum(words[list(of)] == kind) for kind in model.kinds] for of in held]
            for held in stages
        ]
    )
