"""Layers of a MAD-Max step on one GPU: what each computes and moves, and how long each
piece takes.

The layers of MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784] as its public release
counts them (behaviour recorded), under the strategies of `madmax.rules`; peaks and links
times constant utilisations give the times. Letters: N devices on q nodes, n = N/q; B
global batch, LB local dense batch; b bytes of a dense parameter; W bytes and f forward
FLOPs of a layer; T and S degrees of tp and fsdp.
"""

import math
from collections.abc import Mapping
from functools import cache
from numbers import Real
from typing import NamedTuple

from madmax_lib.papers.madmax.rules import (
    GLOBAL,
    INTRA,
    MadmaxRules,
    Strategy,
    parse_classes,
)
from madmax_lib.papers.origin import read_table

_TASKS = ("pretrain", "inference", "finetune")
# The dtype follows from the bytes of a parameter; 4 bytes run at the TF32 peak.
_PEAKS = {8: "f64_flops", 4: "f32_flops", 2: "f16_flops", 1: "i8_ops"}


@cache
def _fields_by_type():
    """Fields that a model of each type must have: those of the suite's models."""
    table = read_table("madmax/models").drop(columns=["name", "source"])
    return {
        kind: tuple(rows.drop(columns="type").dropna(axis=1))
        for kind, rows in table.groupby("type", sort=False)
    }


class GpuRates(NamedTuple):
    """Rates that a GPU reaches, peak times utilisation."""

    flops_per_s: float  # F
    memory_bytes_per_s: float  # H
    bandwidth_bytes_per_s: dict[tuple[str, str], float]  # by collective and level

    def collective(
        self,
        name: str,
        size_bytes: float,
        level: str,
        cargo: str,
        blocking: bool = False,
    ) -> "Collective":
        """Collective with its duration."""
        # T = bytes / bandwidth: no latency and no ring factor 2(p-1)/p, as released
        duration_s = size_bytes / self.bandwidth_bytes_per_s[name, level]
        return Collective(name, size_bytes, duration_s, level, cargo, blocking)


class Collective(NamedTuple):
    """Collective of one GPU."""

    name: str
    size_bytes: float
    duration_s: float
    level: str  # INTRA or GLOBAL
    cargo: str  # weights, activations, gradients or tokens
    blocking: bool  # the next layer waits for it


class DenseLayer(NamedTuple):
    """Dense layer of one GPU."""

    name: str
    elements: Strategy
    weight_bytes: float  # W, before it is sharded
    forward_s: float
    backward_s: float  # 0 without a backward pass
    gather: Collective | None  # fsdp: before each forward and each backward
    exchange: Collective | None  # experts: before and after each GEMM
    forward: tuple[Collective, ...]  # issued after the forward GEMM
    backward: tuple[Collective, ...]  # issued after the backward GEMM
    after_embedding: bool  # the layer reads what was looked up


class Embedding(NamedTuple):
    """Embedding of one GPU: a lookup of the same length forward and, if trained,
    backward.
    """

    weight_bytes: float  # on one GPU
    lookup_s: float
    forward: Collective | None
    backward: Collective
    trained: bool = True


class DeviceStep(NamedTuple):
    """Work of one GPU in a step, in forward order."""

    embedding: Embedding
    layers: list[DenseLayer]
    first_gather: Collective | None  # starts the optimised backward pass
    gathers_ahead: bool  # the optimised backward pass
    is_dlrm: bool
    devices: int  # N
    local_batch: float  # LB of the last class of layers
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
    # classes of dense layers, each of which may have a strategy of its own
    classes = ("bottom", "top") if is_dlrm else ()
    if "num_transformer_layers" in _fields_by_type()[model["type"]]:
        classes += ("attention", "fc")
    split = parse_classes(strategy, classes, devices, int(system["num_nodes"]))
    rates = _rates_of(system, model["bytes_per_nonemb_param"])
    # LB = B T / N: the tp peers of a group work on the same samples
    batches = {
        name: global_batch * _degree(elements, "tp") / devices
        for name, elements in split.items()
    }
    layers = _layers(model, rates, split, batches, rules)
    last = layers[-1]
    embed = _sharded_embedding if is_dlrm else _replicated_embedding
    embedding = embed(model, rates, global_batch / devices, devices)
    # weights per device = embedding + sum over layers of W / (T S)
    weight_bytes = embedding.weight_bytes + sum(map(_shard_bytes, layers))
    if task == "finetune":
        # Ours, no published number checks it. Only the head is trained: the top MLP, or
        # attention and FC of the last block.
        head = int(model["num_top_mlp_layers"]) if is_dlrm else 2
        frozen = [layer._replace(backward_s=0.0) for layer in layers[:-head]]
        layers = frozen + layers[-head:]
        embedding = embedding._replace(trained=False)
    gathers_ahead = rules.schedule == "optimised" or (
        rules.schedule == "released" and model["type"] == "ViT"
    )
    return DeviceStep(
        embedding=embedding,
        layers=layers,
        first_gather=_first_gather(last, rates, rules),
        gathers_ahead=gathers_ahead,
        is_dlrm=is_dlrm,
        devices=devices,
        local_batch=batches[last.name.partition(" ")[0]],
        weight_bytes=weight_bytes,
    )


def _shard_bytes(layer):
    """Weights of a layer on one GPU, W / (T S)."""
    return layer.weight_bytes / _degree(layer.elements, "tp", "fsdp")


def _degree(elements, *kinds):
    return math.prod(element.degree for element in elements if element.kind in kinds)


class _Shape(NamedTuple):
    """Dense layer before it is split."""

    weight_bytes: float  # W
    flops: float  # f, forward, of the local batch
    activation_bytes: float  # output of the local batch
    experts: int  # E, 0 in a layer that is no mixture


def _shape(model, layer_class, local_batch):
    """Weights and work of an MLP layer, of attention or of an FC pair."""
    # Parameters: MLP d x d; attention 4 h x h; FC pair 2 h x g. The release counts
    # neither attention scores (s^2) nor a gate of the FC nor the LM head.
    if layer_class in ("bottom", "top"):
        width = model["mlp_dim"]
        vectors = local_batch
        parameters = width**2
    else:
        width = model["attention_dim"]
        vectors = local_batch * _sequence(model)
        attention = layer_class == "attention"
        parameters = (
            4 * width**2 if attention else 2 * width * model["transformer_fc_dim"]
        )
    # A mixture holds E experts, of which each sample passes through K.
    is_mixture = "MoE" in model["type"] and layer_class in ("top", "fc")
    experts = model["num_experts"] if is_mixture else 0
    active = model["num_active_experts"] if is_mixture else 1
    param_bytes = model["bytes_per_nonemb_param"]
    return _Shape(
        weight_bytes=max(experts, 1) * parameters * param_bytes,
        flops=active * 2 * parameters * vectors,
        activation_bytes=vectors * width * param_bytes,
        experts=experts,
    )


def _sequence(model):
    """Tokens of a sample; a ViT has one per patch and no class token."""
    if model["type"] == "ViT":
        return (model["image_size"] // model["patch_dim"]) ** 2
    return model["transformer_seq_len"]


def _layers(
    model,
    rates,
    split,
    batches,
    rules,
):
    """Dense layers in forward order: bottom MLP, transformer blocks, top MLP, as the
    model type has them.
    """
    blank = {
        name: _layer(name, _shape(model, name, batches[name]), rates, elements, rules)
        for name, elements in split.items()
    }
    is_dlrm = "bottom" in blank
    if is_dlrm and "fc" in blank and not rules.blocking_fc:
        # As released for DLRM-Transformer alone: the AllReduce of an FC's input gradient
        # is issued, but the attention below does not wait for it.
        backward = tuple(c._replace(blocking=False) for c in blank["fc"].backward)
        blank["fc"] = blank["fc"]._replace(backward=backward)
    blocks = [
        blank[name]._replace(name=f"{name} {block}")
        for block in range(int(model["num_transformer_layers"]) if "fc" in blank else 0)
        for name in ("attention", "fc")
    ]
    if not is_dlrm:
        return blocks
    bottom = _mlp(blank["bottom"], model["num_bot_mlp_layers"])
    return bottom + blocks + _mlp(blank["top"], model["num_top_mlp_layers"])


def _mlp(blank, count):
    """Stack of MLP layers."""
    # Megatron's column-row pairs: tp sums activations after the second layer of each
    # pair forward, and their gradients after the first one (processed last) backward.
    unsummed = tuple(c for c in blank.backward if c.cargo != "activations")
    pair = (blank._replace(forward=()), blank._replace(backward=unsummed))
    return [pair[i % 2]._replace(name=f"{blank.name} {i}") for i in range(int(count))]


def _layer(name, shape, rates, elements, rules):
    """A layer under a strategy; each element acts on the layer as split by the elements
    after it.

    An element of degree 1 communicates nothing: ours, no recorded output has two
    elements in a single node. Ours too is "tp,fsdp", which the release lacks: tp has
    split the weights before fsdp gathers them.
    """
    gather = None
    exchange = None
    forward = ()
    backward = ()
    for k, (kind, degree, level) in enumerate(elements):
        if degree == 1:
            continue
        before = elements[:k]
        # T' = tp degree of later elements: this one moves W / T'
        size_bytes = shape.weight_bytes / _degree(elements[k + 1 :], "tp")
        if kind == "tp":
            summed = ("all_reduce", shape.activation_bytes, level, "activations")
            total = rates.collective(*summed, blocking=True)
            forward = (total,)
            backward += (total,)
            if shape.experts:
                # The release divides by E; only E = 16 with K = 2 was recorded, so that
                # K/(2E) and the like would give the same.
                expert_bytes = shape.activation_bytes / shape.experts
                exchange = rates.collective("all_to_all", expert_bytes, level, "tokens")
        elif kind == "fsdp":
            size_bytes /= _degree(before, "tp")
            gather = rates.collective("all_gather", size_bytes, level, "weights")
            backward += (
                rates.collective("reduce_scatter", size_bytes, level, "gradients"),
            )
        else:
            # Elements before this one lie inside the node and have split the gradients
            # too; the release sends the full W all the same.
            if rules.sharded_ddp:
                size_bytes /= _degree(before, "tp", "fsdp")
            backward += (
                rates.collective("all_reduce", size_bytes, level, "gradients"),
            )
    # GEMM time: f / (T F) forward, exactly twice that backward
    forward_s = shape.flops / _degree(elements, "tp") / rates.flops_per_s
    return DenseLayer(
        name=name,
        elements=elements,
        weight_bytes=shape.weight_bytes,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        gather=gather,
        exchange=exchange,
        forward=forward,
        backward=backward,
        after_embedding=name != "bottom",  # the bottom MLP reads dense features
    )


def _sharded_embedding(model, rates, samples, devices):
    """DLRM: tables are spread over all devices; an All2All hands out what was looked
    up, another the gradients.
    """
    # L = tables x pooling x emb_dim x bytes x B/N is looked up, 2 L / N is sent
    row_bytes = model["emb_dim"] * model["bytes_per_emb_param"]
    lookup_bytes = model["num_tables"] * model["pooling_size"] * row_bytes * samples
    sent_bytes = 2 * lookup_bytes / devices if devices > 1 else 0.0
    exchange = rates.collective(
        "all_to_all", sent_bytes, GLOBAL, "activations", blocking=True
    )
    table_bytes = model["num_tables"] * model["entries_per_table"] * row_bytes
    return Embedding(
        table_bytes / devices,
        lookup_bytes / rates.memory_bytes_per_s,
        forward=exchange,
        backward=exchange._replace(cargo="gradients"),
    )


def _replicated_embedding(model, rates, samples, devices):
    """LLM, ViT: token (patch) and position tables on every device."""
    # L = 2 x B/N x s x h x bytes: a token and a position row each. The AllReduce of the
    # gradient carries the rows looked up, not the tables.
    row_bytes = model["attention_dim"] * model["bytes_per_emb_param"]
    sequence = _sequence(model)
    lookup_bytes = 2 * samples * sequence * row_bytes
    is_vit = model["type"] == "ViT"
    # the projection of a ViT's patch: three colours of each pixel
    entries = 3 * model["patch_dim"] ** 2 if is_vit else model["entries_per_table"]
    reduced_bytes = lookup_bytes if devices > 1 else 0.0
    return Embedding(
        (entries + sequence) * row_bytes,
        lookup_bytes / rates.memory_bytes_per_s,
        forward=None,
        backward=rates.collective("all_reduce", reduced_bytes, GLOBAL, "gradients"),
    )


def _first_gather(last, rates, rules):
    """AllGather before the optimised backward pass."""
    # A defect of the release: it is issued without fsdp too, with W / (T S) times the
    # degree of the first element. For ddp that is W x N, 447 ms of ViT-10B on 128 GPUs.
    _, degree, level = last.elements[0]
    if last.gather or degree == 1 or not rules.stray_gather:
        return last.gather
    size_bytes = _shard_bytes(last) * degree
    return rates.collective("all_gather", size_bytes, level, "stray")


def _rates_of(system, param_bytes):
    """Effective rates of a system: peak times utilisation."""
    if param_bytes not in _PEAKS:
        raise ValueError(
            f"bytes_per_nonemb_param={param_bytes} is not one of 8, 4, 2, 1"
        )
    peak = _PEAKS[param_bytes]
    nodes = system["num_nodes"]
    compute = (peak, "flops_util", "mem_bw", "mem_bw_util")
    nvlink = ("num_nvlinks", "bw_per_nvlink", "nvlink_util")
    _check_fields("system", system, (*compute, *nvlink))
    # Bandwidths are stated for both ways: half of each counts.
    #   Wi = nvlinks x bandwidth/2 x utilisation, per GPU
    #   We = ports x bandwidth/2 x utilisation / n, per GPU
    #   AR = Wi inside a node, r Wi + (1-r) We globally, r = ar_perc_intra
    intra = system["num_nvlinks"] * system["bw_per_nvlink"] / 2 * system["nvlink_util"]
    inter = intra
    mixed = intra
    if nodes > 1:
        network = ("num_ibroce_ports", "ibroce_bw", "ibroce_util", "ar_perc_intra")
        _check_fields("system", system, network)
        ports = system["num_ibroce_ports"]
        per_node = ports * system["ibroce_bw"] / 2 * system["ibroce_util"]
        inter = per_node / (system["num_devices"] / nodes)
        share = system["ar_perc_intra"]
        mixed = share * intra + (1 - share) * inter
    bandwidths = {("all_to_all", INTRA): intra, ("all_to_all", GLOBAL): inter}
    for level, reduce in ((INTRA, intra), (GLOBAL, mixed)):
        bandwidths["all_reduce", level] = reduce
        # half of an AllReduce each, hence twice as fast
        bandwidths["all_gather", level] = 2 * reduce
        bandwidths["reduce_scatter", level] = 2 * reduce
    return GpuRates(
        system[peak] * system["flops_util"],
        system["mem_bw"] * system["mem_bw_util"],
        bandwidths,
    )


def _check_inputs(model, system, task, global_batch):
    if task not in _TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(_TASKS)}")
    types = _fields_by_type()
    if model["type"] not in types:
        raise ValueError(
            f"type={model['type']!r} of model {model.get('name', '')} is not one of "
            f"{', '.join(types)}"
        )
    _check_fields("model", model, types[model["type"]])
    _check_fields("system", system, ("num_devices", "num_nodes"))
    _check_fields("case of", {**model, "global_batch": global_batch}, ("global_batch",))


def _check_fields(what, row, fields):
    """Raise ValueError for a field of `row` that is missing, not positive, or out of
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
