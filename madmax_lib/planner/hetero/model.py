"""What does a layer cost on a GPU type by the workbench's own simulator? Prices for a
model in place of profiles.

A model is an embedding, its layers and a head. Times are those of
`simulator.steady.layer_costs` with the shipped constants, a layer's no less than its kernels
take the host to launch. Memory is that of `simulator.memory.memory.stage_bytes` with
Megatron's habits (18 bytes per parameter, nothing sharded) in a pipeline: what a stage
of two layers needs beyond one of one is a layer's. A single stage is so charged twice
for the memory of a table that embedding and head share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from madmax_lib import catalog
from madmax_lib.catalog.blocks import Blocks
from madmax_lib.catalog.models import Cluster, Link, Model, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.prices import Price, PriceList
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.memory.memory import by_phase, stage_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.steady.layer_costs import LayerCosts, layer_costs

__all__ = [
    "clusters_of",
    "gradients_of",
    "nodes_of",
    "passes_s",
    "per_layer",
    "simulated_prices",
]


def simulated_prices(
    model: Model,
    clusters: Mapping[str, Cluster],
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    recompute: Sequence[str] = ("none", "full"),
    parameters: Parameters | None = None,
) -> PriceList:
    """Prices of a model on clusters, one per GPU type: tp within a node, pieces of
    powers of two up to the batch.

    dtype: of the matrix products; a GPU type that lacks it runs the nearest, such as
    fp16 for bf16. Raises ValueError for a recommendation or vision model, experts, and
    a recompute that is no choice of Plan.
    """
    if (
        not isinstance(model, Transformer)
        or model.image
        or model.experts
        or model.blocks
    ):
        raise ValueError(
            f"{model.name}: heterogeneous planning prices dense language models only"
        )
    parameters = parameters or shipped()
    table = {}
    optimizer_s = {}
    for name, cluster in clusters.items():
        degrees = [
            tp
            for tp in _powers(cluster.devices_per_node)
            if model.heads % tp == 0 and model.kv_heads % tp == 0
        ]
        rows = [
            (tp, way, batch)
            for way in recompute
            for tp in degrees
            for batch in _powers(global_batch)
        ]
        tp, way, batch = map(np.array, zip(*rows, strict=True))
        plans = Plans(tp=tp, recompute=way, micro_batch=batch)
        case = Case(model, cluster, plans, 1, sequence, cluster.device.nearest(dtype))
        pieces = layer_costs(Steps.of(case), parameters)
        seconds = passes_s(pieces)
        base_bytes, held, live = _memory_bytes(model, plans, sequence, dtype)
        for i, (degree, recomputed, samples) in enumerate(rows):
            table[name, degree, recomputed, samples] = Price(
                layer_s=per_layer(model, *seconds[i]),
                memory_bytes=per_layer(model, *held[:, i]),
                live_bytes=per_layer(model, *live[:, i]),
                base_bytes=float(base_bytes[i]),
            )
        optimizer_s[name] = float(
            pieces.prices.update_s(pieces.stage.owned(pieces.prices))[0]
        )
    return PriceList(table, *gradients_of(model, pieces.prices), optimizer_s)


def passes_s(pieces: LayerCosts) -> np.ndarray:
    """(n, 3) forward and backward of embedding, layer and head; a layer takes no less
    than the host to launch it.
    """
    embedding_s, layer_s, head_s = (
        sum(part.passes_s) for part in (pieces.embedding, pieces.layer, pieces.head)
    )
    layer_s = np.maximum(layer_s, (3 + pieces.prices.repeats) * pieces.prices.launch_s)
    return np.stack(np.broadcast_arrays(embedding_s, layer_s, head_s), axis=-1).reshape(
        -1, 3
    )


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
        byte_s, message_s = zip(
            *(prices.links.rate("send_recv", pair) for pair in pairs), strict=True
        )
        gpus = cluster.devices_per_node
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


def clusters_of(nodes: Sequence[Node]) -> dict[str, Cluster]:
    """One cluster per GPU type of a host file, its devices from the catalog. Raises
    ValueError for an unknown type.
    """
    clusters = {}
    for node in nodes:
        alike = [other for other in nodes if other.device == node.device]
        gpus = min(other.gpus for other in alike)
        links = (
            Link("intra", node.intra_bytes_per_s),
            Link("inter", node.inter_bytes_per_s),
        )
        clusters[node.device] = Cluster(
            node.device, catalog.device(node.device), gpus, len(alike), *links
        )
    return clusters


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(int(most).bit_length())]


def per_layer(
    model: Transformer, embedding: float, layer: float, head: float
) -> np.ndarray:
    """(layers + 2,) embedding, layers, head."""
    return np.array([embedding, *[layer] * model.layers, head], float)


def _memory_bytes(
    model: Transformer, plans: Plans, sequence: int | None, dtype: str
) -> tuple:
    """Of one GPU by plan: base of any stage (n,); held, and live per micro-batch, by
    embedding, layer and head (3, n).

    Differences of stages of a pipeline with two replicas, with one micro-batch in
    flight.
    """
    in_pipeline = replace(plans, dp=2, pp=3)
    case = Case(
        model,
        None,
        in_pipeline,
        2 * plans.micro_batch,
        sequence,
        dtype,
        software="megatron",
    )

    def stage(number: int, layers: int) -> np.ndarray:
        parts = stage_bytes(case, number, {Blocks("*-"): layers})
        sums = by_phase(parts.items())
        peak = (
            sums["always"] + sums["pass"] + np.maximum(sums["loss"], sums["backward"])
        )
        share = parts["fragmentation"] / (
            peak - parts["fragmentation"] - parts["context"]
        )
        live = parts["activations"] * (1 + share)
        return np.array([peak - live, live])

    one = stage(1, 1)
    two = stage(1, 2)
    first = stage(0, 1)
    last = stage(2, 1)
    held, live = np.stack([first - one, two - one, last - one], axis=1)
    return (2 * one - two)[0], held, live
