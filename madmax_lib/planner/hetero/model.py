"""Prices for a model by the workbench's own simulator, in place of profiles.

A model is an embedding, its layers and a head. Times are those of
`simulator.steady.layer_costs` with the shipped constants, a layer's no less than its kernels
take the host to launch. Memory is that of `simulator.memory.memory.stage_bytes` with
Megatron's habits (18 bytes per parameter, nothing sharded) in a pipeline: what a stage
of two layers needs beyond one of one is a layer's. A single stage is so charged twice
for the memory of a table that embedding and head share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from madmax_lib import catalog
from madmax_lib.catalog import Cluster, Transformer
from madmax_lib.catalog.blocks import Blocks
from madmax_lib.plan import Case, Plans
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.prices import Price, PriceList
from madmax_lib.simulator import Parameters, shipped
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.memory.memory import by_phase, stage_bytes, usable_bytes
from madmax_lib.simulator.steady.layer_costs import LayerCosts, layer_costs


def simulated_prices(
    case: Case,
    clusters: Mapping[str, Cluster],
    *,
    recompute: Sequence[str] = ("none", "full"),
    parameters: Parameters | None = None,
) -> PriceList:
    """Prices of the model of a case on clusters, one per GPU type: tp within a node,
    pieces of powers of two up to the batch.

    case: its plan and cluster are not looked at. A GPU type that lacks its dtype runs
    the nearest, such as fp16 for bf16. Raises ValueError for a recommendation or vision
    model, experts, and a recompute that is no choice of Plan.
    """
    model = case.model
    if (
        not isinstance(model, Transformer)
        or model.image
        or model.experts
        or model.blocks
        or model.tower
    ):
        raise ValueError(
            f"{model.name}: heterogeneous planning prices dense language models only"
        )
    parameters = parameters or shipped()
    table = {}
    optimizer_s = {}
    for name, cluster in clusters.items():
        heads = math.gcd(model.heads, model.kv_heads)
        degrees = [tp for tp in _powers(cluster.devices_per_node) if heads % tp == 0]
        # one evaluation for all: the keys are columns of plans
        keys = list(product(recompute, degrees, _powers(case.global_batch)))
        way, tp, batch = map(np.array, zip(*keys, strict=True))
        plans = Plans(tp=tp, recompute=way, micro_batch=batch)
        dtype = cluster.device.nearest(case.dtype)
        here = replace(
            case,
            cluster=cluster,
            software=parameters.software,
            plan=plans,
            global_batch=1,
            dtype=dtype,
        )
        pieces = layer_costs(Steps.of(here), parameters)
        seconds = passes_s(pieces)
        memory = _memory_bytes(replace(case, plan=plans))
        for i, (recomputed, degree, samples) in enumerate(keys):
            table[name, degree, recomputed, samples] = Price(
                layer_s=per_layer(model, *seconds[i]),
                memory_bytes=per_layer(model, *memory.states[:, i]),
                live_bytes=per_layer(model, *memory.live[:, i]),
                base_bytes=float(memory.base[i]),
            )
        # the first plan has tp 1, so it owns the whole model
        owned = pieces.stage.owned(pieces.prices)
        optimizer_s[name] = float(pieces.prices.update_s(owned)[0])
    return PriceList(
        table,
        *gradients_of(model, pieces.prices),
        optimizer_s,
        meets=any(one.device.family == "cpu" for one in clusters.values()),
        # layers are priced for a process alone
        crowding=1 / parameters.constants["alone"] - 1,
    )


def passes_s(pieces: LayerCosts) -> np.ndarray:
    """(n, 3) forward and backward of embedding, layer and head; a layer takes no less
    than the host to launch it.
    """
    embedding_s = sum(pieces.embedding.passes_s)
    layer_s = sum(pieces.layer.passes_s)
    head_s = sum(pieces.head.passes_s)
    # forward, dgrad and wgrad are launched, and the forward pass again where repeated
    launches = 3 + pieces.prices.repeats
    layer_s = np.maximum(layer_s, launches * pieces.prices.launch_s)
    # some may be numbers, for all plans: (n, 3), also of a single plan
    together = np.broadcast_arrays(embedding_s, layer_s, head_s)
    return np.stack(together, axis=-1).reshape(-1, 3)


def gradients_of(model: Transformer, prices: Prices) -> tuple[np.ndarray, float]:
    """(layers + 2,) bytes of gradients as replicas reduce them, and of a table that
    embedding and head share.

    DeepSpeed reduces the gradients of that table as they are computed, whatever
    replicas do.
    """
    layer = (
        model.attention_parameters
        + 2 * model.norm_parameters
        + model.mlp_parameters(model.ffn)
    )
    table = model.vocab * model.hidden
    # without parameters of its own the head uses the embedding's
    head = (model.head_parameters or table) + model.norm_parameters
    gradient_bytes = float(prices.gradient_bytes)
    tied_bytes = (
        prices.steps.work.width.storage_bytes
        if np.any(prices.traits.buckets)
        else gradient_bytes
    )
    counts = per_layer(model, model.embedding_parameters, layer, head)
    return counts * gradient_bytes, 0.0 if model.head_parameters else table * tied_bytes


def nodes_of(
    clusters: Sequence[Cluster], parameters: Parameters | None = None
) -> tuple[Node, ...]:
    """The nodes of some clusters, with the memory a process can have and the bandwidth
    that collectives achieve.
    """
    nodes = []
    for cluster in clusters:
        case = Case(
            catalog.model("gpt2"),
            cluster,
            Plans(),
            1,
            dtype=cluster.device.nearest("bf16"),
        )
        prices = Prices(Steps.of(case), parameters or shipped())
        pairs = [prices.groups[name] for name in ("same node", "other node")]
        # seconds of a byte and of a message, inside the node and beyond it
        byte_s, message_s = zip(
            *(prices.rate("send_recv", pair) for pair in pairs), strict=True
        )
        gpus = cluster.devices_per_node
        # GPUs of a network port; one each where the cluster does not say
        sharing = max(gpus // (cluster.nics_per_node or gpus), 1)
        about = (
            usable_bytes(cluster.device),
            *(1 / float(one) for one in byte_s),
            sharing,
            *map(float, message_s),
        )
        nodes += [
            Node(f"{cluster.name}-{number}", cluster.device.name, gpus, *about)
            for number in range(cluster.nodes)
        ]
    return tuple(nodes)


def _powers(most):
    return [1 << k for k in range(int(most).bit_length())]


def per_layer(
    model: Transformer, embedding: float, layer: float, head: float
) -> np.ndarray:
    """(layers + 2,) embedding, layers, head."""
    return np.array([embedding, *[layer] * model.layers, head], float)


class _Memory(NamedTuple):
    """Memory of one GPU by plan."""

    base: np.ndarray  # (n,) of any stage, whatever its layers
    states: np.ndarray  # (3, n) held all the time by embedding, layer and head
    live: np.ndarray  # (3, n) of a micro-batch in flight, by the same


def _memory_bytes(case):
    """Differences of stages of a pipeline with two replicas, with one micro-batch in
    flight.
    """
    plans = case.plan
    case = replace(
        case,
        plan=replace(plans, dp=2, pp=3),
        global_batch=2 * plans.micro_batch,
        software="megatron",
    )

    def stage(number, layers):
        """(2, n) bytes of a stage of so many layers: held all the time, live."""
        parts = stage_bytes(case, number, {Blocks("*-"): layers})
        sums = by_phase(parts.items())
        # loss and backward pass do not overlap
        transient = np.maximum(sums["loss"], sums["backward"])
        peak = sums["always"] + sums["pass"] + transient
        # fragmentation is a share of all but itself and the context
        fragmentation = parts["fragmentation"]
        share = fragmentation / (peak - fragmentation - parts["context"])
        live = parts["activations"] * (1 + share)
        return np.array([peak - live, live])

    one = stage(1, 1)
    two = stage(1, 2)
    layer = two - one
    embedding = stage(0, 1) - one
    head = stage(2, 1) - one
    states, live = np.stack([embedding, layer, head], axis=1)
    return _Memory((2 * one - two)[0], states, live)
