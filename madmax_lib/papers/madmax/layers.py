"""How much does each layer compute and move in the MAD-Max model, and how long does
each piece take?

The layers of MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784] as its public release
counts them, under the strategies of `madmax.rules`; peaks and links times constant
utilisations give the times (behaviour recorded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import NamedTuple

from madmax_lib.papers.madmax.rules import (
    GLOBAL,
    INTRA,
    MadmaxRules,
    Strategy,
    parse_classes,
)

__all__ = [
    "Collective",
    "DenseLayer",
    "DeviceStep",
    "Embedding",
    "GpuRates",
    "workload",
]

TASKS = ("pretrain", "inference", "finetune")
_PEAKS = {
    8: "f64_flops",
    4: "f32_flops",
    2: "f16_flops",
    1: "i8_ops",
}  # by bytes of a parameter
_MLP_FIELDS = ("num_bot_mlp_layers", "num_top_mlp_layers", "mlp_dim")
_DLRM_FIELDS = (
    *_MLP_FIELDS,
    "num_tables",
    "entries_per_table",
    "emb_dim",
    "pooling_size",
)
_BLOCK_FIELDS = ("num_transformer_layers", "attention_dim", "transformer_fc_dim")
_MOE_FIELDS = ("num_experts", "num_active_experts")
TYPES = {  # the fields that a model of each type must have
    "DLRM": _DLRM_FIELDS,
    "DLRM_Transformer": (*_DLRM_FIELDS, *_BLOCK_FIELDS, "transformer_seq_len"),
    "DLRM_MoE": (*_DLRM_FIELDS, *_MOE_FIELDS),
    "LLM": (*_BLOCK_FIELDS, "transformer_seq_len", "entries_per_table"),
    "LLM_MoE": (
        *_BLOCK_FIELDS,
        "transformer_seq_len",
        "entries_per_table",
        *_MOE_FIELDS,
    ),
    "ViT": (*_BLOCK_FIELDS, "image_size", "patch_dim"),
}


class GpuRates(NamedTuple):
    """What a GPU reaches: FLOP/s, bytes/s of its memory, and bytes/s by collective and
    level.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    bandwidth_bytes_per_s: dict[tuple[str, str], float]

    def collective(
        self,
        name: str,
        size_bytes: float,
        level: str,
        what: str,
        blocking: bool = False,
    ) -> Collective:
        """A collective with its duration, bytes / bandwidth: no latency, no ring
        factor.
        """
        duration_s = size_bytes / self.bandwidth_bytes_per_s[name, level]
        return Collective(name, size_bytes, duration_s, level, what, blocking)


class Collective(NamedTuple):
    """A collective: `what` is the cargo (weights, activations, gradients); the next
    layer waits if it is blocking.
    """

    name: str
    size_bytes: float
    duration_s: float
    level: str
    what: str
    blocking: bool


class DenseLayer(NamedTuple):
    """A dense layer of one GPU; backward_s is 0 when it has no backward pass."""

    name: str
    weight_bytes: float  # of the whole layer, before sharding
    forward_s: float
    backward_s: float
    gather: Collective | None  # fsdp: before each forward and each backward
    exchange: Collective | None  # experts: before and after each GEMM
    forward: tuple[Collective, ...]  # issued after the forward GEMM
    backward: tuple[Collective, ...]  # issued after the backward GEMM
    after_embedding: bool


class Embedding(NamedTuple):
    """The embedding of one GPU: a lookup of the same length forward and, if trained,
    backward.
    """

    weight_bytes: float  # on one GPU
    lookup_s: float
    forward: Collective | None
    backward: Collective
    trained: bool


class DeviceStep(NamedTuple):
    """What one GPU does in a step, in forward order."""

    embedding: Embedding
    layers: list[DenseLayer]
    first_gather: Collective | None  # starts the optimised backward pass
    gathers_ahead: bool  # the optimised backward pass
    is_dlrm: bool
    devices: int
    local_batch: float  # of the last class of layers
    weight_bytes: float  # on one GPU


def workload(
    model: Mapping,
    system: Mapping,
    strategy: str,
    task: str,
    global_batch: float,
    rules: MadmaxRules,
) -> DeviceStep:
    """All layers of a model on one GPU of a system, with amounts and durations.

    Raises ValueError for fields that are missing or out of range, naming field, value
    and rule.
    """
    _check_inputs(model, system, task, global_batch)
    devices = int(system["num_devices"])
    is_dlrm = model["type"].startswith("DLRM")
    split = parse_classes(strategy, _classes(model), devices, int(system["num_nodes"]))
    rates = _rates_of(system, model["bytes_per_nonemb_param"])
    batches = {
        name: global_batch * _degree(elements, "tp") / devices
        for name, elements in split.items()
    }
    layers = _layers(model, rates, split, batches, rules)
    embed = _sharded_embedding if is_dlrm else _replicated_embedding
    embedding = embed(model, rates, global_batch / devices, devices)
    shards = {
        name: _degree(elements, "tp") * _degree(elements, "fsdp")
        for name, elements in split.items()
    }
    weight_bytes = embedding.weight_bytes + sum(
        layer.weight_bytes / shards[_class(layer)] for layer in layers
    )
    if (
        task == "finetune"
    ):  # ours, no published number checks it: only the head is trained
        head = (
            int(model["num_top_mlp_layers"]) if is_dlrm else 2
        )  # the top MLP, or attention and FC of the last block
        layers = [layer._replace(backward_s=0.0) for layer in layers[:-head]] + layers[
            -head:
        ]
        embedding = embedding._replace(trained=False)
    gathers_ahead = rules.schedule == "optimised" or (
        rules.schedule == "released" and model["type"] == "ViT"
    )
    last = _class(layers[-1])
    first = _first_gather(layers[-1], rates, split[last], shards[last], rules)
    return DeviceStep(
        embedding,
        layers,
        first,
        gathers_ahead,
        is_dlrm,
        devices,
        batches[last],
        weight_bytes,
    )


def _classes(model: Mapping) -> tuple[str, ...]:
    """Classes of dense layers that may be split in different ways."""
    mlp = ("bottom", "top") if "DLRM" in model["type"] else ()
    return (
        *mlp,
        *(
            ("attention", "fc")
            if "num_transformer_layers" in TYPES[model["type"]]
            else ()
        ),
    )


def _class(layer: DenseLayer) -> str:
    return layer.name.partition(" ")[0]


def _degree(elements: Strategy, kind: str) -> int:
    return math.prod(element.degree for element in elements if element.kind == kind)


class _Shape(NamedTuple):
    """A dense layer before it is split: parameter bytes, forward FLOPs and output bytes
    of the local batch.
    """

    weight_bytes: float
    flops: float
    activation_bytes: float
    experts: int = 0


def _shapes(model: Mapping, local_batch: float) -> dict[str, _Shape]:
    """Weights and work of an MLP layer, of attention (4 h x h) and of an FC pair (2 h x
    g); no scores, no gate.
    """
    size = model["bytes_per_nonemb_param"]
    shapes = {}
    experts, active = (
        (model["num_experts"], model["num_active_experts"])
        if "MoE" in model["type"]
        else (0, 1)
    )
    if "DLRM" in model["type"]:
        params = model["mlp_dim"] ** 2
        activations = local_batch * model["mlp_dim"] * size
        weight_bytes = params * size
        flops = 2 * params * local_batch
        shapes["bottom"] = _Shape(weight_bytes, flops, activations)
        shapes["top"] = _Shape(
            max(experts, 1) * weight_bytes, active * flops, activations, experts
        )
    if "num_transformer_layers" in TYPES[model["type"]]:
        hidden = model["attention_dim"]
        tokens = local_batch * _sequence(model)
        attention = 4 * hidden**2
        fc = 2 * hidden * model["transformer_fc_dim"]
        activations = tokens * hidden * size
        shapes["attention"] = _Shape(
            attention * size, 2 * attention * tokens, activations
        )
        shapes["fc"] = _Shape(
            max(experts, 1) * fc * size, active * 2 * fc * tokens, activations, experts
        )
    return shapes


def _sequence(model: Mapping) -> float:
    """Tokens of a sample; a ViT has one per patch and no class token."""
    return (
        (model["image_size"] // model["patch_dim"]) ** 2
        if model["type"] == "ViT"
        else model["transformer_seq_len"]
    )


def _layers(
    model: Mapping,
    rates: GpuRates,
    split: dict[str, Strategy],
    batches: dict[str, float],
    rules: MadmaxRules,
) -> list[DenseLayer]:
    """The dense layers in forward order: bottom MLP, transformer blocks, top MLP, as
    the model type has them.

    With tp, an MLP sums its activations after every second layer (Megatron's column-row
    pairs), attention and FC each after themselves. In the backward pass of
    DLRM-Transformer the sum after an FC does not block (as released).
    """
    shapes = {name: _shapes(model, batch)[name] for name, batch in batches.items()}
    blank = {
        name: _layer(name, shape, rates, split[name], rules)
        for name, shape in shapes.items()
    }
    is_dlrm = "bottom" in shapes
    if is_dlrm and "fc" in shapes and not rules.blocking_fc:
        backward = tuple(c._replace(blocking=False) for c in blank["fc"].backward)
        blank["fc"] = blank["fc"]._replace(backward=backward)
    layers = _mlp(blank["bottom"], model["num_bot_mlp_layers"]) if is_dlrm else []
    for i in range(int(model["num_transformer_layers"]) if "fc" in shapes else 0):
        layers += [
            blank[name]._replace(name=f"{name} {i}") for name in ("attention", "fc")
        ]
    return (
        layers + _mlp(blank["top"], model["num_top_mlp_layers"]) if is_dlrm else layers
    )


def _mlp(blank: DenseLayer, count: float) -> list[DenseLayer]:
    """A stack of MLP layers: activations are summed after odd layers forward, after
    even layers backward.
    """
    inner = tuple(c for c in blank.backward if c.what != "activations")
    kinds = (blank._replace(forward=()), blank._replace(backward=inner))
    return [kinds[i % 2]._replace(name=f"{blank.name} {i}") for i in range(int(count))]


def _layer(
    name: str, shape: _Shape, rates: GpuRates, elements: Strategy, rules: MadmaxRules
) -> DenseLayer:
    """One layer under a strategy; each element acts on the layer as split by the
    elements after it.

    An element of degree 1 communicates nothing: ours, no recorded output has two
    elements in a single node. Ours too is "tp,fsdp", which the release lacks: tp has
    split the weights before fsdp gathers them.
    """
    gather = exchange = None
    forward = ()
    backward = ()
    for k, (kind, degree, level) in enumerate(elements):
        size_bytes = shape.weight_bytes / _degree(elements[k + 1 :], "tp")
        if degree == 1:
            continue
        if kind == "tp":
            total = rates.collective(
                "all_reduce",
                shape.activation_bytes,
                level,
                "activations",
                blocking=True,
            )
            forward = (total,)
            backward = (*backward, total)
            if shape.experts:
                exchange = rates.collective(
                    "all_to_all",
                    shape.activation_bytes / shape.experts,
                    level,
                    "tokens",
                )
        elif kind == "fsdp":
            size_bytes /= _degree(elements[:k], "tp")
            gather = rates.collective("all_gather", size_bytes, level, "weights")
            backward = (
                *backward,
                rates.collective("reduce_scatter", size_bytes, level, "gradients"),
            )
        else:
            # elements before this one are inside the node and have split the gradients
            # too
            if rules.sharded_ddp:
                size_bytes /= _degree(elements[:k], "tp") * _degree(
                    elements[:k], "fsdp"
                )
            backward = (
                *backward,
                rates.collective("all_reduce", size_bytes, level, "gradients"),
            )
    forward_s = shape.flops / _degree(elements, "tp") / rates.flops_per_s
    passes = forward_s, 2 * forward_s, gather, exchange, forward, backward
    return DenseLayer(
        name, shape.weight_bytes, *passes, after_embedding=name != "bottom"
    )


def _sharded_embedding(
    model: Mapping, rates: GpuRates, samples: float, devices: int
) -> Embedding:
    """DLRM: tables are spread over all devices; an All2All hands out what was looked
    up, another the gradients.
    """
    row_bytes = model["emb_dim"] * model["bytes_per_emb_param"]
    lookup_bytes = model["num_tables"] * model["pooling_size"] * row_bytes * samples
    moved_bytes = 2 * lookup_bytes / devices if devices > 1 else 0.0
    exchange = rates.collective(
        "all_to_all", moved_bytes, GLOBAL, "activations", blocking=True
    )
    weight_bytes = (
        model["num_tables"] * model["entries_per_table"] * row_bytes / devices
    )
    backward = exchange._replace(what="gradients")
    return Embedding(
        weight_bytes, lookup_bytes / rates.memory_bytes_per_s, exchange, backward, True
    )


def _replicated_embedding(
    model: Mapping, rates: GpuRates, samples: float, devices: int
) -> Embedding:
    """LLM, ViT: token (patch) and position tables on every device; the AllReduce
    carries the rows looked up.
    """
    row_bytes = model["attention_dim"] * model["bytes_per_emb_param"]
    sequence = _sequence(model)
    lookup_bytes = 2 * samples * sequence * row_bytes
    entries = (
        3 * model["patch_dim"] ** 2
        if model["type"] == "ViT"
        else model["entries_per_table"]
    )
    backward = rates.collective(
        "all_reduce", lookup_bytes if devices > 1 else 0.0, GLOBAL, "gradients"
    )
    return Embedding(
        (entries + sequence) * row_bytes,
        lookup_bytes / rates.memory_bytes_per_s,
        None,
        backward,
        True,
    )


def _first_gather(
    last: DenseLayer,
    rates: GpuRates,
    elements: Strategy,
    sharding: int,
    rules: MadmaxRules,
):
    """The AllGather before the optimised backward pass; as released also without fsdp,
    sized by the first element.
    """
    _, degree, level = elements[0]
    if last.gather or degree == 1 or not rules.stray_gather:
        return last.gather
    return rates.collective(
        "all_gather", last.weight_bytes / sharding * degree, level, "stray"
    )


def _rates_of(system: Mapping, param_bytes: float) -> GpuRates:
    """Effective rates of a system: peak times utilisation; NVLink and NIC bandwidths
    are given for both ways.

    All2All runs at NVLink rate inside a node and at NIC rate globally; AllReduce mixes
    both by ar_perc_intra, AllGather and ReduceScatter are twice as fast as AllReduce.
    """
    if param_bytes not in _PEAKS:
        raise ValueError(
            f"bytes_per_nonemb_param={param_bytes} is not one of 8, 4, 2, 1"
        )
    peak = _PEAKS[param_bytes]
    nodes = system["num_nodes"]
    used = (
        peak,
        "flops_util",
        "mem_bw",
        "mem_bw_util",
        "num_nvlinks",
        "bw_per_nvlink",
        "nvlink_util",
    )
    _check_fields("system", system, used)
    intra = system["num_nvlinks"] * system["bw_per_nvlink"] / 2 * system["nvlink_util"]
    inter = mixed = intra
    if nodes > 1:
        _check_fields(
            "system",
            system,
            ("num_ibroce_ports", "ibroce_bw", "ibroce_util", "ar_perc_intra"),
        )
        per_node = (
            system["num_ibroce_ports"] * system["ibroce_bw"] / 2 * system["ibroce_util"]
        )
        inter = per_node / (system["num_devices"] / nodes)
        mixed = system["ar_perc_intra"] * intra + (1 - system["ar_perc_intra"]) * inter
    bandwidths = {("all_to_all", INTRA): intra, ("all_to_all", GLOBAL): inter}
    for level, reduce in ((INTRA, intra), (GLOBAL, mixed)):
        bandwidths["all_reduce", level] = reduce
        bandwidths["all_gather", level] = bandwidths["reduce_scatter", level] = (
            2 * reduce
        )
    return GpuRates(
        system[peak] * system["flops_util"],
        system["mem_bw"] * system["mem_bw_util"],
        bandwidths,
    )


def _check_inputs(
    model: Mapping, system: Mapping, task: str, global_batch: float
) -> None:
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    if model["type"] not in TYPES:
        raise ValueError(
            f"type={model['type']!r} of model {model.get('name', '')} is not one of "
            f"{', '.join(TYPES)}"
        )
    _check_fields(
        "model",
        model,
        ("bytes_per_nonemb_param", "bytes_per_emb_param", *TYPES[model["type"]]),
    )
    _check_fields("system", system, ("num_devices", "num_nodes"))
    _check_fields("case of", {**model, "global_batch": global_batch}, ("global_batch",))


def _check_fields(what: str, row: Mapping, fields: tuple[str, ...]) -> None:
    """Raises ValueError for a field of `row` that is missing, not positive, or out of
    the range its name tells.
    """
    for field in fields:
        value = row.get(field)
        where = f"of {what} {row.get('name', '')}"
        may_be_zero = field == "ar_perc_intra" and value == 0
        if not (isinstance(value, Real) and 0 < value < math.inf) and not may_be_zero:
            raise ValueError(f"{field}={value} {where} is not a positive number")
        if value > 1 and (field.endswith("_util") or field == "ar_perc_intra"):
            raise ValueError(f"{field}={value} {where} is a share and cannot exceed 1")
        if field.startswith("num_") and value != int(value):
            raise ValueError(f"{field}={value} {where} is not a whole number")
