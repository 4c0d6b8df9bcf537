"""What is a step made of? Times of one layer of each kind and of the ends of the model, and the traffic of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from madmax_lib.plans import Plans, owned
from madmax_lib.simulator.layers.transformer import embedding_block, head_block, layer_blocks
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.step.inputs import Steps
from madmax_lib.simulator.step.layer_time import LayerTime, layer_time, mean
from madmax_lib.simulator.step.prices import Prices
from madmax_lib.simulator.step.traffic import Held, Sharded, held, sharded

__all__ = ["Pieces", "distinct", "pieces_of"]

# what a pass over a layer depends on; plans of many rows share these
_PASS = ("tp", "pp", "cp", "ep", "etp", "micro_batch", "recompute", "sequence_parallel", "context", "attention",
         "capacity", "lora_rank", "overlap_tp", "overlap_ep", "schedule")  # fmt: skip
_MANY = 256


@dataclass(frozen=True)
class Pieces:
    """What a step is made of, with its prices.

    layer: a layer, of a mixture one behind its first dense ones; dense: one of these.
    embedding, head: the ends.
    layers: parameters of the mean layer; first, last: of embedding and head.
    layer_traffic, first_traffic, last_traffic: of their weights under ZeRO-3.
    """

    prices: Prices
    layer: LayerTime
    dense: LayerTime
    embedding: LayerTime
    head: LayerTime
    layers: Held
    first: Number
    last: Number
    layer_traffic: Sharded
    first_traffic: Sharded
    last_traffic: Sharded

    @property
    def owned(self) -> Number:
        """Parameters whose optimizer state a device of the mean stage owns."""
        p, layers = self.prices.plan, np.asarray(self.prices.steps.work.shape.layers)
        sharing = np.where(np.asarray(p.zero) >= 1, p.sharing, 1)
        dense = (layers * self.layers.dense + self.first + self.last) / p.pp
        return self.prices.trained * owned(dense, layers * self.layers.experts / p.pp, sharing, p.ep, p.expert_spread)


def pieces_of(steps: Steps, parameters: Parameters) -> Pieces:
    """Times of the layers and ends of steps, and the traffic of their weights."""
    prices, plan = Prices(steps, parameters), steps.work.plan
    index = None
    few = prices
    if plan.shape and plan.shape[-1] > _MANY and len(plan.shape) == 1 and not np.ndim(steps.work.shape.layers):
        rows, index = distinct(plan, _PASS)
        few = Prices(steps[rows], parameters)
    *times, layers, first, last = _passes(few)
    if index is not None:
        times = [_taken(time, index) for time in times]
        layers, first, last = (_taken(part, index) for part in (layers, first, last))
    traffic = (sharded(count, prices) for count in (layers, Held(first, 0.0), Held(last, 0.0)))
    return Pieces(prices, *times, layers, first, last, *traffic)


def _passes(prices: Prices) -> tuple:
    """Times of layer, dense layer, embedding and head, parameters of the mean layer and of the ends."""
    work = prices.steps.work
    first, last = embedding_block(work), head_block(work)
    dense, layers = _mean_layer(prices, mixture=False)
    layer = dense
    if np.any(np.asarray(work.shape.experts) > 0):
        layer, mixed = _mixture_layer(prices)
        layer = mean(dense, layer, np.asarray(work.shape.experts) > 0)  # dense models may stand beside mixtures
        share = work.shape.mixture_share
        layers = Held(share * mixed.dense + (1 - share) * layers.dense, share * mixed.experts)
    ends = layer_time([first], prices), layer_time([last], prices)
    return layer, dense, *ends, layers, held([first]).dense, held([last]).dense


def _mixture_layer(prices: Prices) -> tuple[LayerTime, Held]:
    """A layer with experts; steps with and without exchanges of tokens may stand beside each other."""
    spread = np.asarray(prices.plan.ep) > 1
    kinds = [_mean_layer(prices, mixture=True, exchanged=kind) for kind in (False, True) if np.any(spread == kind)]
    if len(kinds) == 1:
        return kinds[0]
    (together, whole), (apart, cut) = kinds
    return mean(together, apart, spread), Held(np.where(spread, cut.dense, whole.dense), spread * cut.experts)


def _mean_layer(prices: Prices, *, mixture: bool, exchanged: bool = True) -> tuple[LayerTime, Held]:
    """A layer; where some attend to a window, the mean of both kinds."""
    work, share = prices.steps.work, prices.steps.work.shape.windowed_share
    blocks = layer_blocks(work, 0, mixture=mixture, windowed=False, exchanged=exchanged)
    layer = layer_time(blocks, prices)
    if np.any(share > 0):
        blocks_near = layer_blocks(work, 0, mixture=mixture, windowed=True, exchanged=exchanged)
        near = layer_time(blocks_near, prices)
        layer = mean(layer, near, share)
    return layer, held(blocks)


def distinct(plan: Plans, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a table that differ in some of these fields, and for each row which of them it is like."""
    code = np.zeros(plan.shape, np.int64)
    for name in names:
        column = getattr(plan, name)
        if np.ndim(column):
            codes, kinds = pd.factorize(column, use_na_sentinel=False)
            code = code * len(kinds) + codes
            code = pd.factorize(code)[0] if len(kinds) > 1 else code
    codes, kinds = pd.factorize(code)
    rows = np.empty(len(kinds), np.int64)
    rows[codes[::-1]] = np.arange(len(codes))[::-1]
    return rows, codes


def _taken(item, index: np.ndarray):
    """The same with entries of all arrays in it for each index."""
    if isinstance(item, dict):
        return {name: _taken(part, index) for name, part in item.items()}
    if isinstance(item, (LayerTime, Held)):
        return type(item)(*(_taken(getattr(item, field.name), index) for field in fields(item)))
    return item[index] if np.ndim(item) and np.shape(item)[-1] > 1 else item
