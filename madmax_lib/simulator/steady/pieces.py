"""What is a step made of? Times of one layer of each kind and of the ends of the model,
and the traffic of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from madmax_lib.catalog.models import Transformer
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import LayerTime, layer_time, mean
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import Held, Sharded, held, sharded
from madmax_lib.simulator.layers.transformer import (
    embedding_block,
    head_block,
    layer_blocks,
)
from madmax_lib.simulator.layers.work import has
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.alike import kinds_of, mapped, spread

__all__ = ["Kind", "Pieces", "pieces_of"]

# what a pass over a layer depends on; rows of a table share these
_PASS = (
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "micro_batch",
    "recompute",
    "sequence_parallel",
    "context",
    "attention",
    "capacity",
    "lora_rank",
    "overlap_tp",
    "overlap_ep",
    "schedule",
)


@dataclass(frozen=True)
class Kind:
    """One of several kinds of layers."""

    time: LayerTime
    held: Held
    traffic: Sharded


@dataclass(frozen=True)
class Pieces:
    """What a step is made of, with its prices."""

    prices: Prices
    layer: LayerTime  # of a mixture the mean one behind its first dense ones
    dense: LayerTime
    embedding: LayerTime
    head: LayerTime
    layers: Held  # parameters of the mean layer
    first: Number  # of the embedding
    last: Number  # of the head
    # by which a layer that attends to all takes longer than one that attends to a
    # window
    farther_s: Number
    kinds: tuple[
        Kind, ...
    ]  # layers of a stack of several kinds, of which `layer` is the mean
    layer_traffic: Sharded  # of their weights under ZeRO-3
    first_traffic: Sharded
    last_traffic: Sharded

    @property
    def stage(self) -> Held:
        """Parameters of the mean stage."""
        p = self.prices.plan
        layers = np.asarray(self.prices.steps.work.shape.layers)
        dense = (layers * self.layers.dense + self.first + self.last) / p.pp
        return Held(dense, layers * self.layers.experts / p.pp)


def pieces_of(steps: Steps, parameters: Parameters) -> Pieces:
    """Times of the layers and ends of steps, and the traffic of their weights."""
    prices = Prices(steps, parameters)
    passes = (
        _passes_of_rows(steps, parameters)
        if len(steps.work.plan.shape) == 1
        else _passes(prices)
    )
    *times, layers, first, last, farther_s, kinds = passes
    traffic = (
        sharded(count, prices) for count in (layers, Held(first, 0.0), Held(last, 0.0))
    )
    kinds = tuple(Kind(time, count, sharded(count, prices)) for time, count in kinds)
    return Pieces(prices, *times, layers, first, last, farther_s, kinds, *traffic)


def _passes_of_rows(steps: Steps, parameters: Parameters) -> tuple:
    """Passes of rows, in a table once for those alike; apart those with other blocks:
    with experts, and with cp.
    """
    plan = steps.work.plan
    index = np.arange(*steps.work.plan.shape)
    rows = index
    exchanged = (np.asarray(steps.work.shape.experts) > 0) * (
        1 + (np.asarray(plan.ep) > 1)
    )
    blocks = np.broadcast_to(exchanged, plan.shape)
    if steps.is_table:
        further = (
            ("dp", "zero") if has(steps.habits.on_host) else ()
        )  # where collectives of weights block its host
        rows, index = kinds_of(plan, _PASS, further) or (rows, index)
        blocks = blocks + 3 * (np.asarray(plan.cp) > 1)
    groups = [np.flatnonzero(blocks[rows] == of) for of in np.unique(blocks[rows])]
    passes = [_passes(Prices(steps[rows[group]], parameters)) for group in groups]

    def joined(*parts: Number) -> np.ndarray:
        result = np.empty(
            (*np.broadcast_shapes(*(np.shape(part)[:-1] for part in parts)), len(rows))
        )
        for group, part in zip(groups, parts, strict=True):
            result[..., group] = part
        return result

    return spread(mapped(joined, *passes) if len(groups) > 1 else passes[0], index)


def _passes(prices: Prices) -> tuple:
    """Times of layer, dense layer, embedding and head, parameters of mean layer and
    ends, `farther_s` and kinds.
    """
    work = prices.steps.work
    first = embedding_block(work)
    last = head_block(work)
    if work.shape.model:
        kinds = _kinds(prices, work.shape.model)
        layer, layers = _mean_of(kinds, work.shape.model)
        ends = layer_time([first], prices), layer_time([last], prices)
        return (
            layer,
            layer,
            *ends,
            layers,
            held([first]).dense,
            held([last]).dense,
            0.0,
            kinds,
        )
    dense, layers, farther_s = _mean_layer(prices, "*-")
    layer = dense
    if np.any(np.asarray(work.shape.experts) > 0):
        layer, mixed = _mixture_layer(prices)
        layer = mean(
            dense, layer, work.shape.mixture_share_behind
        )  # dense models may stand beside mixtures
        share = work.shape.mixture_share
        layers = Held(
            share * mixed.dense + (1 - share) * layers.dense, share * mixed.experts
        )
    ends = layer_time([first], prices), layer_time([last], prices)
    return (
        layer,
        dense,
        *ends,
        layers,
        held([first]).dense,
        held([last]).dense,
        farther_s,
        (),
    )


def _mixture_layer(prices: Prices) -> tuple[LayerTime, Held]:
    """A layer with experts; steps with and without exchanges of tokens may stand beside
    each other.
    """
    spread = np.asarray(prices.plan.ep) > 1
    kinds = [
        _mean_layer(prices, "*E", exchanged=kind)[:2]
        for kind in (False, True)
        if np.any(spread == kind)
    ]
    if len(kinds) == 1:
        return kinds[0]
    (together, whole), (apart, cut) = kinds
    return mean(together, apart, spread), Held(
        np.where(spread, cut.dense, whole.dense), spread * cut.experts
    )


def _kinds(prices: Prices, model: Transformer) -> tuple[tuple[LayerTime, Held], ...]:
    """A layer of each kind of a stack; steps with and without exchanges of tokens may
    stand beside each other.
    """
    apart = np.asarray(prices.plan.ep) > 1
    kinds = []
    for word in model.kinds:
        ways = (
            [way for way in (False, True) if np.any(apart == way)]
            if word.has_experts
            else [False]
        )
        blocks = [
            layer_blocks(prices.steps.work, 0, word, exchanged=way) for way in ways
        ]
        pairs = [(layer_time(of, prices), held(of)) for of in blocks]
        kinds.append(
            tuple(mean(*of, apart) for of in zip(*pairs, strict=True))
            if len(ways) > 1
            else pairs[0]
        )
    return tuple(kinds)


def _mean_of(kinds: tuple, model: Transformer) -> tuple[LayerTime, Held]:
    """The mean layer of a stack."""
    shares = [model.layer_kinds.count(word) / model.layers for word in model.kinds]
    return mapped(
        lambda *parts: sum(s * part for s, part in zip(shares, parts, strict=True)),
        *kinds,
    )


def _mean_layer(prices: Prices, word: str, *, exchanged: bool = True) -> tuple:
    """A layer; where some attend to a window, the mean of both kinds, and by how many
    seconds they differ.
    """
    farther_s = 0.0
    work = prices.steps.work
    share = prices.steps.work.shape.windowed_share
    blocks = layer_blocks(work, 0, word, exchanged=exchanged)
    layer = layer_time(blocks, prices)
    if np.any(share > 0):
        near = layer_time(
            layer_blocks(work, 0, word, True, exchanged=exchanged), prices
        )
        farther_s = sum(layer.passes_s) - sum(near.passes_s)
        layer = mean(layer, near, share)
    return layer, held(blocks), farther_s
