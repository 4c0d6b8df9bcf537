"""Costs of one layer of each kind and of the ends of a model: compute, parameters, and
the traffic of their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from madmax_lib.catalog.models import Transformer
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import LayerTime, layer_time, mean
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.rows import map_leaves, take_rows, unique_rows
from madmax_lib.simulator.costs.traffic import (
    Gathers,
    ParameterCount,
    gathers_of,
    parameter_count,
)
from madmax_lib.simulator.layers.transformer import (
    embedding_block,
    head_block,
    layer_blocks,
)
from madmax_lib.simulator.layers.work import any_nonzero
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters

__all__ = ["KindCost", "LayerCosts", "layer_costs"]

# fields of a plan that a pass over a layer depends on; rows of a table share these
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
class KindCost:
    """Cost of one of several kinds of layers."""

    time: LayerTime
    count: ParameterCount
    traffic: Gathers | Number = 0.0  # of its weights under ZeRO-3, once it is known


@dataclass(frozen=True)
class _Passes:
    """Passes over a layer and the ends, for a micro-batch."""

    layer: LayerTime  # of a mixture the mean one after its first dense ones
    dense: LayerTime
    embedding: LayerTime
    head: LayerTime
    count: ParameterCount  # parameters of the mean layer
    embedding_parameters: Number
    head_parameters: Number
    # by which a layer that attends to all takes longer than one with a window
    full_attention_excess_s: Number
    kinds: tuple[KindCost, ...]  # of a stack of several kinds, `layer` is their mean


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the layers and ends of a step, with its prices."""

    prices: Prices
    passes: _Passes
    kinds: tuple[KindCost, ...]  # with their traffic
    layer_traffic: Gathers  # of weights under ZeRO-3, as the next two
    embedding_traffic: Gathers
    head_traffic: Gathers

    @property
    def layer(self) -> LayerTime:
        """Mean layer; of a mixture the mean one after its first dense ones."""
        return self.passes.layer

    @property
    def dense(self) -> LayerTime:
        """Layer without experts."""
        return self.passes.dense

    @property
    def embedding(self) -> LayerTime:
        """Embedding, at the first stage."""
        return self.passes.embedding

    @property
    def head(self) -> LayerTime:
        """Head and loss, at the last stage."""
        return self.passes.head

    @property
    def stage(self) -> ParameterCount:
        """Parameters of the mean stage."""
        passes = self.passes
        pp = self.prices.plan.pp
        layers = np.asarray(self.prices.steps.work.shape.layers)
        ends = passes.embedding_parameters + passes.head_parameters
        dense = (layers * passes.count.dense + ends) / pp
        return ParameterCount(dense, layers * passes.count.experts / pp)


def layer_costs(steps: Steps, parameters: Parameters) -> LayerCosts:
    """Costs of the layers and ends of steps."""
    prices = Prices(steps, parameters)
    if len(steps.work.plan.shape) == 1:
        passes = _passes_of_rows(steps, parameters)
    else:
        passes = _passes(prices)
    ends = (passes.embedding_parameters, passes.head_parameters)
    return LayerCosts(
        prices,
        passes,
        tuple(
            KindCost(kind.time, kind.count, gathers_of(kind.count, prices))
            for kind in passes.kinds
        ),
        gathers_of(passes.count, prices),
        *(gathers_of(ParameterCount(count, 0.0), prices) for count in ends),
    )


def _passes_of_rows(steps: Steps, parameters: Parameters):
    """Passes of rows: of a table once for those alike, and in groups of rows that are
    made of the same blocks (with experts, exchanged or not, and with cp).
    """
    plan = steps.work.plan
    rows = index = np.arange(*plan.shape)
    exchanges = 1 + (np.asarray(plan.ep) > 1)
    blocks = (np.asarray(steps.work.shape.experts) > 0) * exchanges
    blocks = np.broadcast_to(blocks, plan.shape)
    if steps.is_table:
        # on a CPU, collectives of weights block the host that launches a layer
        names = ("dp", "zero") if any_nonzero(steps.traits.on_host) else ()
        kinds = unique_rows(plan, _PASS, names)
        if kinds is not None:
            rows, index = kinds.rows, kinds.inverse
        blocks = blocks + 3 * (np.asarray(plan.cp) > 1)
    codes = blocks[rows]
    groups = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    passes = [_passes(Prices(steps[rows[group]], parameters)) for group in groups]

    def joined(*parts: Number):
        """Numbers of all groups in the order of rows; earlier axes are machines."""
        machines = np.broadcast_shapes(*(np.shape(part)[:-1] for part in parts))
        result = np.empty((*machines, len(rows)))
        for group, part in zip(groups, parts, strict=True):
            result[..., group] = part
        return result

    joint = map_leaves(joined, *passes) if len(groups) > 1 else passes[0]
    return take_rows(joint, index)


def _passes(prices: Prices):
    """Passes of steps that are made of the same blocks."""
    work = prices.steps.work
    embedding = embedding_block(work)
    head = head_block(work)
    excess_s = 0.0
    kinds = ()
    if work.shape.model:  # a stack of several kinds
        kinds = _kinds(prices, work.shape.model)
        mean_kind = _mean_of(kinds, work.shape.model)
        layer = dense = mean_kind.time
        count = mean_kind.count
    else:
        usual = _mean_layer(prices, "*-")
        layer = dense = usual.time
        count = usual.count
        excess_s = usual.excess_s
        if np.any(np.asarray(work.shape.experts) > 0):
            mixture = _mixture_layer(prices)
            # dense models may stand beside mixtures: their share is 0
            layer = mean(dense, mixture.time, work.shape.moe_share_after_dense)
            share = work.shape.mixture_share
            dense_count = share * mixture.count.dense + (1 - share) * count.dense
            count = ParameterCount(dense_count, share * mixture.count.experts)
    return _Passes(
        layer=layer,
        dense=dense,
        embedding=layer_time([embedding], prices),
        head=layer_time([head], prices),
        count=count,
        embedding_parameters=parameter_count([embedding]).dense,
        head_parameters=parameter_count([head]).dense,
        full_attention_excess_s=excess_s,
        kinds=kinds,
    )


def _mixture_layer(prices: Prices):
    """A layer with experts; steps with and without exchanges of tokens may stand beside
    each other.
    """
    exchanged = np.asarray(prices.plan.ep) > 1
    ways = []
    for way in (False, True):
        if np.any(exchanged == way):
            layer = _mean_layer(prices, "*E", exchanged=way)
            ways.append(KindCost(layer.time, layer.count))
    if len(ways) == 1:
        return ways[0]
    together, exchanged_way = ways
    dense = np.where(exchanged, exchanged_way.count.dense, together.count.dense)
    count = ParameterCount(dense, exchanged * exchanged_way.count.experts)
    return KindCost(mean(together.time, exchanged_way.time, exchanged), count)


def _kinds(prices: Prices, model: Transformer):
    """A layer of each kind of a stack; steps with and without exchanges of tokens may
    stand beside each other.
    """
    exchanged = np.asarray(prices.plan.ep) > 1
    kinds = []
    for word in model.kinds:
        ways = [False]
        if word.has_experts:
            ways = [way for way in (False, True) if np.any(exchanged == way)]
        costs = []
        for way in ways:
            blocks = layer_blocks(prices.steps.work, 0, word, exchanged=way)
            time = layer_time(blocks, prices)
            costs.append(KindCost(time, parameter_count(blocks)))
        kinds.append(mean(*costs, exchanged) if len(costs) > 1 else costs[0])
    return tuple(kinds)


def _mean_of(kinds: tuple[KindCost, ...], model: Transformer):
    """Mean layer of a stack."""
    shares = [model.layer_kinds.count(word) / model.layers for word in model.kinds]

    def weighted(*parts: Number):
        return sum(share * part for share, part in zip(shares, parts, strict=True))

    return map_leaves(weighted, *kinds)


@dataclass(frozen=True)
class _MeanLayer:
    time: LayerTime
    count: ParameterCount
    excess_s: Number  # of a layer that attends to all beyond one with a window


def _mean_layer(prices: Prices, word: str, *, exchanged: bool = True):
    """A layer; where some attend to a window, the mean of both kinds."""
    work = prices.steps.work
    blocks = layer_blocks(work, 0, word, exchanged=exchanged)
    time = layer_time(blocks, prices)
    count = parameter_count(blocks)
    share = work.shape.windowed_share
    if not np.any(share > 0):
        return _MeanLayer(time, count, 0.0)
    windowed = layer_blocks(work, 0, word, True, exchanged=exchanged)
    near = layer_time(windowed, prices)
    excess_s = sum(time.passes_s) - sum(near.passes_s)
    return _MeanLayer(mean(time, near, share), count, excess_s)
