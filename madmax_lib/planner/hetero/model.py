"""What does a layer cost on a GPU type by the workbench's own simulator? Prices for a model in place of profiles.

A model is an embedding, its layers and a head. Times are those of `simulator.step.step_time.pieces` with the shipped
constants, memory that of `simulator.memory.memory.stage_bytes` with Megatron's habits (18 bytes per parameter, nothing
sharded) in a pipeline: what a stage of two layers needs beyond one of one is a layer's. A single stage is so charged
for a table that embedding and head share twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from madmax_lib import catalog
from madmax_lib.plan import DEFAULTS
from madmax_lib.planner.hetero.nodes import Node
from madmax_lib.planner.hetero.prices import BYTES_PER_GBPS_MS, Price, Prices
from madmax_lib.simulator.estimate import work_of
from madmax_lib.simulator.memory.memory import by_phase, stage_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.step_time import achieved_rates, pieces
from madmax_lib.specs import Cluster, Link, Model, Transformer

__all__ = ["RECOMPUTE", "clusters_of", "nodes_of", "simulated_prices"]

RECOMPUTE = ("none", "full")
_MB, _MS = 2.0**20, 1e3


def simulated_prices(
    model: Model,
    clusters: Mapping[str, Cluster],
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    recompute: Sequence[str] = RECOMPUTE,
    parameters: Parameters | None = None,
) -> Prices:
    """Prices of a model on clusters, one per GPU type: tp within a node, pieces of powers of two up to the batch.

    Raises ValueError for a recommendation or vision model, experts, and a recompute that is no choice of Plan.
    """
    if not isinstance(model, Transformer) or model.image or model.experts:
        raise ValueError(f"{model.name}: heterogeneous planning prices dense language models only")
    parameters = parameters or shipped()
    table, optimizer_ms = {}, {}
    for name, cluster in clusters.items():
        degrees = [tp for tp in _powers(cluster.devices_per_node) if model.heads % tp == 0 and model.kv_heads % tp == 0]
        rows = [(tp, way, batch) for way in recompute for tp in degrees for batch in _powers(global_batch)]
        tp, way, batch = map(np.array, zip(*rows, strict=True))
        plan = _plans(tp=tp, recompute=way, micro_batch=batch)
        piece, wire_bytes = _pieces(model, cluster, plan, sequence, dtype, parameters)
        memory = _memory_mb(model, plan, sequence, dtype)
        for i, (degree, recomputed, samples) in enumerate(rows):
            layer_ms = _ends(model, 0.0, piece["layer_s"][i], piece["head_s"][i]) * _MS
            static, live = (_ends(model, *(part[i] for part in memory[kind])) for kind in ("static", "live"))
            table[name, degree, recomputed, samples] = Price(layer_ms, static, live, base_mb=float(memory["base"][i]))
        optimizer_ms[name] = float(piece["optimizer_s"][0]) * _MS
    layer = model.attention_parameters + 2 * model.norm_parameters + model.mlp_parameters(model.ffn)
    head = model.head_parameters or model.vocab * model.hidden
    counts = _ends(model, model.embedding_parameters, layer, head + model.norm_parameters)
    return Prices(table, counts * wire_bytes / 2, optimizer_ms)


def nodes_of(clusters: Sequence[Cluster], parameters: Parameters | None = None) -> tuple[Node, ...]:
    """The nodes of some clusters, with the memory a process can have and the bandwidth that collectives achieve."""
    nodes = []
    for cluster in clusters:
        work = work_of(catalog.model("gpt2"), cluster, _plans(), 1, None, "bf16")
        rates, unit = achieved_rates(work, parameters or shipped()), _MS * BYTES_PER_GBPS_MS
        intra, inter = (float(np.ravel(rates[name])[0]) / unit for name in ("link", "nic"))
        memory_gb = usable_bytes(cluster.device) / 2**30
        about = (cluster.device.name, cluster.devices_per_node, memory_gb, intra, inter)
        nodes += [Node(f"{cluster.name}-{number}", *about) for number in range(cluster.nodes)]
    return tuple(nodes)


def clusters_of(nodes: Sequence[Node]) -> dict[str, Cluster]:
    """One cluster per GPU type of a host file, its devices from the catalog. Raises ValueError for an unknown type."""
    clusters = {}
    for node in nodes:
        same = [other for other in nodes if other.device == node.device]
        links = [Link(name, getattr(node, name) * _MS * BYTES_PER_GBPS_MS) for name in
                 ("intra_gb_per_s", "inter_gb_per_s")]  # fmt: skip
        gpus = min(other.gpus for other in same)
        clusters[node.device] = Cluster(node.device, catalog.device(node.device), gpus, len(same), *links)
    return clusters


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(int(most).bit_length())]


def _ends(model: Transformer, first: float, middle: float, last: float) -> np.ndarray:
    """(layers + 2,) embedding, layers, head."""
    return np.array([first, *[middle] * model.layers, last], float)


def _plans(**columns) -> SimpleNamespace:
    """Plans as arrays, Megatron's: sequence parallel with tp, at least two replicas and three stages in memory."""
    return SimpleNamespace(**DEFAULTS | columns | {"sequence_parallel": np.asarray(columns.get("tp", 1)) > 1})


def _pieces(model, cluster, plan, sequence, dtype, parameters) -> tuple[dict[str, np.ndarray], float]:
    """Seconds of a layer, the head and the optimizer by plan, and the bytes per weight of gradient traffic."""
    work = work_of(model, cluster, plan, 1, sequence, dtype)
    found = pieces(work, parameters)
    names = ("layer_s", "head_s", "optimizer_s")
    return {name: np.broadcast_to(found[name], work.shape) for name in names}, float(work.gradient_wire_bytes[0])


def _memory_mb(model: Transformer, plan: SimpleNamespace, sequence: int | None, dtype: str) -> dict:
    """static and live: MB of embedding, one layer and head on a GPU; base: of any stage. One micro-batch in flight."""
    shape = SimpleNamespace(**vars(plan) | {"dp": 2, "pp": 3})

    def of(stage: int, layers: int) -> tuple[np.ndarray, np.ndarray]:
        parts = stage_bytes(model, shape, stage, layers, stack="megatron", sequence=sequence, dtype=dtype,
                            micro_batches=1)  # fmt: skip
        sums = by_phase(parts.items())
        peak = sums["always"] + sums["pass"] + np.maximum(sums["loss"], sums["backward"])
        share = parts["fragmentation"] / (peak - parts["fragmentation"] - parts["context"])
        live = parts["activations"] * (1 + share)
        return (peak - live) / _MB, live / _MB

    one, two, first, last = of(1, 1), of(1, 2), of(0, 1), of(2, 1)
    split = [(f - o, t - o, e - o) for o, t, f, e in zip(one, two, first, last, strict=True)]
    return {"static": split[0], "live": split[1], "base": 2 * one[0] - two[0]}
