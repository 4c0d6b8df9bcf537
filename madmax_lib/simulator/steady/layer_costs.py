"""Costs of one layer of each kind and of the ends of a model: compute, parameters, and
the traffic of their weights.
"""

import operator
from dataclasses import dataclass, replace

import numpy as np

from madmax_lib.catalog.blocks import Blocks
from madmax_lib.plan.columns import alike_rows
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import LayerTime, layer_time, mean
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.rows import map_leaves, take_rows
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
    """Cost of a kind of layer, or of an end of the model."""

    time: LayerTime
    count: ParameterCount
    traffic: Gathers | Number = 0.0  # of its weights under ZeRO-3, once it is known
    # by which a layer that attends to all takes longer than one with a window
    full_attention_excess_s: Number = 0.0

    @property
    def passes_s(self) -> tuple[Number, Number]:
        """Forward and backward pass."""
        return self.time.passes_s


@dataclass(frozen=True)
class _Passes:
    """Passes over a layer and the ends, for a micro-batch."""

    layer: (
        KindCost  # mean one; of a mixture its time is that after its first dense ones
    )
    dense: KindCost  # layer without experts
    embedding: KindCost  # at the first stage
    head: KindCost  # with the loss, at the last stage
    kinds: tuple[KindCost, ...]  # of a stack of several kinds, `layer` is their mean


@dataclass(frozen=True)
class LayerCosts(_Passes):
    """Costs of the layers and ends of a step, with its prices."""

    prices: Prices

    @property
    def stage(self) -> ParameterCount:
        """Parameters of the mean stage."""
        pp = self.prices.plan.pp
        count = self.layer.count
        layers = self.prices.steps.shape.layers
        ends = self.embedding.count.dense + self.head.count.dense
        dense = (layers * count.dense + ends) / pp
        return ParameterCount(dense, layers * count.experts / pp)


def layer_costs(steps: Steps, parameters: Parameters) -> LayerCosts:
    """Costs of the layers and ends of steps."""
    prices = Prices(steps, parameters)
    has_rows = len(steps.plan.shape) == 1
    passes = _passes_of_rows(steps, parameters) if has_rows else _passes(prices)

    def with_traffic(kind):
        return replace(kind, traffic=gathers_of(kind.count, prices))

    return LayerCosts(
        with_traffic(passes.layer),
        passes.dense,
        with_traffic(passes.embedding),
        with_traffic(passes.head),
        tuple(map(with_traffic, passes.kinds)),
        prices,
    )


def _passes_of_rows(steps, parameters):
    """Passes of rows: of a table once for those alike, and in groups of rows that are
    made of the same blocks (with experts, exchanged or not, and with cp).
    """
    plan = steps.plan
    rows = index = np.arange(*plan.shape)
    exchanges = 1 + (plan.ep > 1)
    blocks = (steps.shape.experts > 0) * exchanges
    blocks = np.broadcast_to(blocks, plan.shape)
    if not np.ndim(steps.shape.layers):  # plans of one case
        # on a CPU, collectives of weights block the host that launches a layer
        names = ("dp", "zero") if any_nonzero(steps.traits.on_host) else ()
        columns = [getattr(plan, name) for name in (*_PASS, *names)]
        rows, index = alike_rows(columns, plan.shape)
        blocks = blocks + 3 * (plan.cp > 1)
    codes = blocks[rows]
    groups = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    passes = [_passes(Prices(steps[rows[group]], parameters)) for group in groups]

    def joined(*parts):
        """Numbers of all groups in the order of rows; earlier axes are machines."""
        machines = np.broadcast_shapes(*(np.shape(part)[:-1] for part in parts))
        result = np.empty((*machines, len(rows)))
        for group, part in zip(groups, parts, strict=True):
            result[..., group] = part
        return result

    joint = map_leaves(joined, *passes) if len(groups) > 1 else passes[0]
    return take_rows(joint, index)


def _passes(prices):
    """Passes of steps that are made of the same blocks."""
    work = prices.steps.work
    shape = work.shape
    model = shape.model
    kinds = ()
    if model:  # a stack of several kinds
        kinds = tuple(_kind(prices, word) for word in model.kinds)
        shares = [model.layer_kinds.count(word) / model.layers for word in model.kinds]
        layer = dense = map_leaves(
            lambda *parts: sum(map(operator.mul, shares, parts)), *kinds
        )
    else:
        layer = dense = _kind(prices, Blocks("*-"))
        if np.any(shape.experts > 0):
            mixture = _kind(prices, Blocks("*E"))
            # dense models may stand beside mixtures: their share is 0
            layer = KindCost(
                mean(dense.time, mixture.time, shape.moe_share_after_dense),
                mean(dense.count, mixture.count, shape.mixture_share),
            )
    ends = (
        KindCost(layer_time([block], prices), parameter_count([block]))
        for block in (embedding_block(work), head_block(work))
    )
    return _Passes(layer, dense, *ends, kinds)


def _kind(prices, word):
    """A layer of a kind; steps with and without exchanges of tokens may stand beside
    each other.
    """
    exchanged = prices.plan.ep > 1
    ways = [False]
    if word.has_experts:
        ways = [way for way in (False, True) if np.any(exchanged == way)]
    costs = [_mean_layer(prices, word, exchanged=way) for way in ways]
    return mean(*costs, exchanged) if len(costs) > 1 else costs[0]


def _mean_layer(prices, word, *, exchanged):
    """A layer; where some attend to a window, the mean of both kinds."""
    work = prices.steps.work
    blocks = layer_blocks(work, 0, word, exchanged=exchanged)
    time = layer_time(blocks, prices)
    count = parameter_count(blocks)
    share = work.shape.windowed_share
    if not np.any(share > 0):
        return KindCost(time, count)
    windowed = layer_blocks(work, 0, word, True, exchanged=exchanged)
    near = layer_time(windowed, prices)
    excess_s = sum(time.passes_s) - sum(near.passes_s)
    return KindCost(mean(time, near, share), count, 0.0, excess_s)
