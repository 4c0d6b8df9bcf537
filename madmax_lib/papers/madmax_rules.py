"""How much does each layer compute and move in the MAD-Max model, and how long does each piece take?

Rates, strategies and layers of MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784] as its public release applies them
(behaviour recorded). Where the release differs from what one would expect, `Rules` has a switch. The order in which
the pieces are issued is in `papers.madmax`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

__all__ = [
    "CORRECTED", "GLOBAL", "INTRA", "RELEASED", "STRATEGIES", "TASKS", "TYPES", "Collective", "Element", "Embedding",
    "Layer", "Rates", "Rules", "Work", "parse_rules", "parse_strategy", "rates_of", "row_of", "workload",
]  # fmt: skip

INTRA, GLOBAL = "intra-node", "global"
STRATEGIES = ("ddp", "tp", "fsdp", "tp,ddp", "ddp,tp", "fsdp,tp", "fsdp,ddp")
TASKS = ("pretrain", "inference", "finetune")
PARTS = ("embedding", "bottom", "transformer", "head")
_MLP_FIELDS = ("num_bot_mlp_layers", "num_top_mlp_layers", "mlp_dim", "num_tables", "entries_per_table", "emb_dim",
               "pooling_size")  # fmt: skip
_BLOCK_FIELDS = ("num_transformer_layers", "attention_dim", "transformer_fc_dim")
_MOE_FIELDS = ("num_experts", "num_active_experts")
TYPES = {  # the fields that a model of each type must have
    "DLRM": _MLP_FIELDS,
    "DLRM_Transformer": (*_MLP_FIELDS, *_BLOCK_FIELDS, "transformer_seq_len"),
    "DLRM_MoE": (*_MLP_FIELDS, *_MOE_FIELDS),
    "LLM": (*_BLOCK_FIELDS, "transformer_seq_len", "entries_per_table"),
    "LLM_MoE": (*_BLOCK_FIELDS, "transformer_seq_len", "entries_per_table", *_MOE_FIELDS),
    "ViT": (*_BLOCK_FIELDS, "image_size", "patch_dim"),
}
_PEAKS = {8: "f64_flops", 4: "f32_flops", 2: "f16_flops", 1: "i8_ops"}  # by bytes of a parameter
_SHARES = ("flops_util", "mem_bw_util", "nvlink_util")


@dataclass(frozen=True)
class Rules:
    """Switches where the public release has a defect or a choice; the defaults are the release.

    schedule: of the backward pass of LLM and ViT: "pre-optimised" gathers weights just in time, "optimised" one layer
    ahead, "released" is pre-optimised for LLM and optimised for ViT. DLRM has one schedule.
    stray_gather: the optimised backward pass starts with an AllGather also without fsdp.
    sharded_ddp: in "tp,ddp" and "fsdp,ddp" the gradient AllReduce carries the shard W/n instead of the full W.
    blocking_fc: in DLRM-Transformer the AllReduce of an FC's input gradient blocks the attention below.
    frozen: parts that task "finetune" does not train, of embedding, bottom (MLP), transformer, head. The head is the
    top MLP of a DLRM and the last block of an LLM or ViT. Ours: no published number checks fine-tuning.
    """

    schedule: str = "released"
    stray_gather: bool = True
    sharded_ddp: bool = False
    blocking_fc: bool = False
    frozen: tuple[str, ...] = ("embedding", "bottom", "transformer")

    def __post_init__(self):
        if self.schedule not in ("released", "pre-optimised", "optimised"):
            raise ValueError(f"schedule={self.schedule!r} is not released, pre-optimised or optimised")
        if isinstance(self.frozen, str) or not set(self.frozen) <= set(PARTS):
            raise ValueError(f"frozen={self.frozen!r} is not a tuple of {', '.join(PARTS)}")


RELEASED = Rules()
CORRECTED = Rules(stray_gather=False, sharded_ddp=True, blocking_fc=True)


class Element(NamedTuple):
    """One level of a strategy: ddp, tp or fsdp over `degree` ranks inside a node or across nodes."""

    kind: str
    degree: int
    level: str


class Rates(NamedTuple):
    """What a GPU reaches: FLOP/s, bytes/s of its memory, and bytes/s by collective and level."""

    flops_per_s: float
    memory_bytes_per_s: float
    bandwidth_bytes_per_s: dict[tuple[str, str], float]

    def collective(self, name: str, size_bytes: float, level: str, what: str, blocking: bool = False) -> Collective:
        """A collective with its duration, bytes / bandwidth: no latency, no ring factor."""
        duration_s = size_bytes / self.bandwidth_bytes_per_s[name, level]
        return Collective(name, size_bytes, duration_s, level, what, blocking)


class Collective(NamedTuple):
    """A collective: `what` is the cargo (weights, activations, gradients); the next layer waits if it is blocking."""

    name: str
    size_bytes: float
    duration_s: float
    level: str
    what: str
    blocking: bool


class Layer(NamedTuple):
    """A dense layer of one GPU; backward_s is 0 when it has no backward pass."""

    name: str
    part: str
    weight_bytes: float  # of the whole layer, before sharding
    forward_s: float
    backward_s: float
    gather: Collective | None  # fsdp: before each forward and each backward
    exchange: Collective | None  # experts: before and after each GEMM
    forward: tuple[Collective, ...]  # issued after the forward GEMM
    backward: tuple[Collective, ...]  # issued after the backward GEMM
    after_embedding: bool


class Embedding(NamedTuple):
    """The embedding of one GPU: a lookup of the same length forward and, if trained, backward."""

    weight_bytes: float  # on one GPU
    lookup_s: float
    forward: Collective | None
    backward: Collective
    trained: bool


class Work(NamedTuple):
    """What one GPU does in a step, in forward order."""

    embedding: Embedding
    layers: list[Layer]
    first_gather: Collective | None  # starts the optimised backward pass
    gathers_ahead: bool  # the optimised backward pass
    is_dlrm: bool
    devices: int
    local_batch: float
    weight_bytes: float  # on one GPU


def parse_rules(rules: str | Rules) -> Rules:
    """The rules called "released" or "corrected", or the given ones."""
    if isinstance(rules, Rules):
        return rules
    named = {"released": RELEASED, "corrected": CORRECTED}
    if rules not in named:
        raise ValueError(f"rules={rules!r} is not released, corrected or a Rules")
    return named[rules]


def parse_strategy(text: str, num_devices: int, num_nodes: int) -> tuple[Element, ...]:
    """The elements of a strategy such as "fsdp" or "tp,ddp": one over all devices, or inside a node and across nodes.

    >>> [tuple(element) for element in parse_strategy("TP, DDP", 128, 16)]
    [('tp', 8, 'intra-node'), ('ddp', 16, 'global')]
    """
    kinds = str(text).replace(" ", "").lower()
    if kinds not in STRATEGIES:
        raise ValueError(f"dense_strategy={text!r} is not one of {'; '.join(STRATEGIES)}")
    if num_devices % num_nodes:
        raise ValueError(f"num_devices={num_devices} is not a multiple of num_nodes={num_nodes}: "
                         "the degrees of a strategy must multiply to the device count")  # fmt: skip
    if "," not in kinds:
        return (Element(kinds, num_devices, GLOBAL),)
    inside, across = kinds.split(",")
    return Element(inside, num_devices // num_nodes, INTRA), Element(across, num_nodes, GLOBAL)


def row_of(table: Mapping[str, dict], name: str, what: str) -> dict:
    """The row called `name`; a ValueError names the three nearest."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), [str(known) for known in table], 3, 0.0)
    raise ValueError(f"unknown {what} {name!r}; nearest: {', '.join(near)}")


def rates_of(system: Mapping, param_bytes: float) -> Rates:
    """Effective rates of a system: peak times utilisation; NVLink and NIC bandwidths are given for both ways.

    All2All runs at NVLink rate inside a node and at NIC rate globally; AllReduce mixes both by ar_perc_intra, AllGather
    and ReduceScatter are twice as fast as AllReduce.
    """
    if param_bytes not in _PEAKS:
        raise ValueError(f"bytes_per_nonemb_param={param_bytes} is not one of 8, 4, 2, 1")
    peak, nodes = _PEAKS[param_bytes], system["num_nodes"]
    _check("system", system, (peak, "mem_bw", *_SHARES, "num_nvlinks", "bw_per_nvlink"))
    intra = system["num_nvlinks"] * system["bw_per_nvlink"] / 2 * system["nvlink_util"]
    inter = mixed = intra
    if nodes > 1:
        _check("system", system, ("num_ibroce_ports", "ibroce_bw", "ibroce_util", "ar_perc_intra"))
        per_node = system["num_ibroce_ports"] * system["ibroce_bw"] / 2 * system["ibroce_util"]
        inter = per_node / (system["num_devices"] / nodes)
        mixed = system["ar_perc_intra"] * intra + (1 - system["ar_perc_intra"]) * inter
    bandwidths = {("all_to_all", INTRA): intra, ("all_to_all", GLOBAL): inter}
    for level, reduce in ((INTRA, intra), (GLOBAL, mixed)):
        bandwidths["all_reduce", level] = reduce
        bandwidths["all_gather", level] = bandwidths["reduce_scatter", level] = 2 * reduce
    return Rates(system[peak] * system["flops_util"], system["mem_bw"] * system["mem_bw_util"], bandwidths)


def workload(model: Mapping, system: Mapping, strategy: str, task: str, global_batch: float, rules: Rules) -> Work:
    """All layers of a model on one GPU of a system, with amounts and durations.

    Raises ValueError for fields that are missing or out of range, naming field, value and rule.
    """
    _check_inputs(model, system, task, global_batch)
    devices, is_dlrm = int(system["num_devices"]), model["type"].startswith("DLRM")
    elements = parse_strategy(strategy, devices, int(system["num_nodes"]))
    rates = rates_of(system, model["bytes_per_nonemb_param"])
    local_batch = global_batch * _degree(elements, "tp") / devices
    layers = _layers(model, rates, elements, local_batch, rules)
    embed = _sharded_embedding if is_dlrm else _replicated_embedding
    embedding = embed(model, rates, global_batch / devices, devices)
    sharding = _degree(elements, "tp") * _degree(elements, "fsdp")
    weight_bytes = embedding.weight_bytes + sum(layer.weight_bytes for layer in layers) / sharding
    if task == "finetune":
        layers = _frozen(layers, rules.frozen)
        embedding = embedding._replace(trained="embedding" not in rules.frozen)
    gathers_ahead = rules.schedule == "optimised" or (rules.schedule == "released" and model["type"] == "ViT")
    first = _first_gather(layers[-1], rates, elements, sharding, rules)
    return Work(embedding, layers, first, gathers_ahead, is_dlrm, devices, local_batch, weight_bytes)


def _degree(elements: tuple[Element, ...], kind: str) -> int:
    return math.prod(element.degree for element in elements if element.kind == kind)


class _Shape(NamedTuple):
    """A dense layer before it is split: parameter bytes, forward FLOPs and output bytes of the local batch."""

    weight_bytes: float
    flops: float
    activation_bytes: float
    experts: int = 0


def _shapes(model: Mapping, local_batch: float) -> dict[str, _Shape]:
    """Weights and work of an MLP layer, of attention (4 h x h) and of an FC pair (2 h x g); no scores, no gate."""
    size, shapes = model["bytes_per_nonemb_param"], {}
    experts, active = (model["num_experts"], model["num_active_experts"]) if "MoE" in model["type"] else (0, 1)
    if "DLRM" in model["type"]:
        params, activations = model["mlp_dim"] ** 2, local_batch * model["mlp_dim"] * size
        shapes["bottom"] = _Shape(params * size, 2 * params * local_batch, activations)
        shapes["top"] = _Shape(params * size, 2 * params * local_batch, activations)
        if experts:
            shapes["top"] = _Shape(experts * params * size, active * 2 * params * local_batch, activations, experts)
    if "num_transformer_layers" in TYPES[model["type"]]:
        hidden, tokens = model["attention_dim"], local_batch * _sequence(model)
        attention, fc = 4 * hidden**2, 2 * hidden * model["transformer_fc_dim"]
        activations = tokens * hidden * size
        shapes["attention"] = _Shape(attention * size, 2 * attention * tokens, activations)
        shapes["fc"] = _Shape(max(experts, 1) * fc * size, active * 2 * fc * tokens, activations, experts)
    return shapes


def _sequence(model: Mapping) -> float:
    """Tokens of a sample; a ViT has one per patch and no class token."""
    return (model["image_size"] // model["patch_dim"]) ** 2 if model["type"] == "ViT" else model["transformer_seq_len"]


def _layers(model: Mapping, rates: Rates, elements: tuple[Element, ...], batch: float, rules: Rules) -> list[Layer]:
    """The dense layers in forward order: bottom MLP, transformer blocks, top MLP, as the model type has them.

    With tp, an MLP sums its activations after every second layer (Megatron's column-row pairs), attention and FC
    each after themselves. In the backward pass of DLRM-Transformer the sum after an FC does not block (as released).
    """
    shapes = _shapes(model, batch)
    blank = {name: _layer(name, shape, rates, elements, rules) for name, shape in shapes.items()}
    is_dlrm = "bottom" in shapes
    if is_dlrm and "fc" in shapes and not rules.blocking_fc:
        backward = tuple(c._replace(blocking=False) for c in blank["fc"].backward)
        blank["fc"] = blank["fc"]._replace(backward=backward)
    blocks = int(model["num_transformer_layers"]) if "fc" in shapes else 0
    layers = _mlp(blank["bottom"], model["num_bot_mlp_layers"], "bottom", False) if is_dlrm else []
    for i in range(blocks):
        part = "head" if i == blocks - 1 and not is_dlrm else "transformer"
        layers += [blank[name]._replace(name=f"{name} {i}", part=part) for name in ("attention", "fc")]
    return layers + _mlp(blank["top"], model["num_top_mlp_layers"], "head", True) if is_dlrm else layers


def _mlp(blank: Layer, count: float, part: str, after_embedding: bool) -> list[Layer]:
    """A stack of MLP layers: activations are summed after odd layers forward, after even layers backward."""
    blank = blank._replace(part=part, after_embedding=after_embedding)
    inner = tuple(c for c in blank.backward if c.what != "activations")
    return [
        blank._replace(name=f"{blank.name} {i}", backward=inner)
        if i % 2
        else blank._replace(name=f"{blank.name} {i}", forward=())
        for i in range(int(count))
    ]


def _layer(name: str, shape: _Shape, rates: Rates, elements: tuple[Element, ...], rules: Rules) -> Layer:
    """One layer under a strategy; each element acts on the layer as split by the elements after it.

    An element of degree 1 communicates nothing: ours, no recorded output has two elements in a single node.
    """
    gather, exchange, forward, backward = None, None, (), ()
    for k, (kind, degree, level) in enumerate(elements):
        size_bytes = shape.weight_bytes / _degree(elements[k + 1 :], "tp")
        if degree == 1:
            continue
        if kind == "tp":
            total = rates.collective("all_reduce", shape.activation_bytes, level, "activations", blocking=True)
            forward, backward = (total,), (*backward, total)
            if shape.experts:
                exchange = rates.collective("all_to_all", shape.activation_bytes / shape.experts, level, "tokens")
        elif kind == "fsdp":
            gather = rates.collective("all_gather", size_bytes, level, "weights")
            backward = (*backward, rates.collective("reduce_scatter", size_bytes, level, "gradients"))
        else:
            if rules.sharded_ddp:  # elements before this one are inside the node and have split the gradients too
                size_bytes /= _degree(elements[:k], "tp") * _degree(elements[:k], "fsdp")
            backward = (*backward, rates.collective("all_reduce", size_bytes, level, "gradients"))
    forward_s = shape.flops / _degree(elements, "tp") / rates.flops_per_s
    return Layer(name, "", shape.weight_bytes, forward_s, 2 * forward_s, gather, exchange, forward, backward, True)


def _sharded_embedding(model: Mapping, rates: Rates, samples: float, devices: int) -> Embedding:
    """DLRM: tables are spread over all devices; an All2All hands out what was looked up, another the gradients."""
    row_bytes = model["emb_dim"] * model["bytes_per_emb_param"]
    lookup_bytes = model["num_tables"] * model["pooling_size"] * row_bytes * samples
    moved_bytes = 2 * lookup_bytes / devices if devices > 1 else 0.0
    exchange = rates.collective("all_to_all", moved_bytes, GLOBAL, "activations", blocking=True)
    weight_bytes = model["num_tables"] * model["entries_per_table"] * row_bytes / devices
    backward = exchange._replace(what="gradients")
    return Embedding(weight_bytes, lookup_bytes / rates.memory_bytes_per_s, exchange, backward, True)


def _replicated_embedding(model: Mapping, rates: Rates, samples: float, devices: int) -> Embedding:
    """LLM, ViT: token (patch) and position tables on every device; the AllReduce carries the rows looked up."""
    row_bytes, sequence = model["attention_dim"] * model["bytes_per_emb_param"], _sequence(model)
    lookup_bytes = 2 * samples * sequence * row_bytes
    entries = 3 * model["patch_dim"] ** 2 if model["type"] == "ViT" else model["entries_per_table"]
    backward = rates.collective("all_reduce", lookup_bytes if devices > 1 else 0.0, GLOBAL, "gradients")
    return Embedding((entries + sequence) * row_bytes, lookup_bytes / rates.memory_bytes_per_s, None, backward, True)


def _first_gather(last: Layer, rates: Rates, elements: tuple[Element, ...], sharding: int, rules: Rules):
    """The AllGather before the optimised backward pass; as released also without fsdp, sized by the first element."""
    _, degree, level = elements[0]
    if last.gather or degree == 1 or not rules.stray_gather:
        return last.gather
    return rates.collective("all_gather", last.weight_bytes / sharding * degree, level, "stray")


def _frozen(layers: list[Layer], frozen: tuple[str, ...]) -> list[Layer]:
    """Fine-tuning: a frozen layer only passes gradients on (1x forward), and not even that with nothing to train below.

    A trained layer costs 2x forward as in pre-training, also the lowest one.
    """
    result, trained_below = [], False
    for layer in layers:
        if layer.part not in frozen:
            trained_below = True
        elif trained_below or (layer.after_embedding and "embedding" not in frozen):
            backward = tuple(c for c in layer.backward if c.what == "activations")
            layer = layer._replace(backward_s=layer.forward_s, backward=backward)
        else:
            layer = layer._replace(backward_s=0.0)
        result.append(layer)
    return result


def _check_inputs(model: Mapping, system: Mapping, task: str, global_batch: float) -> None:
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not one of {', '.join(TASKS)}")
    if model["type"] not in TYPES:
        raise ValueError(f"type={model['type']!r} of model {model.get('name', '')} is not one of {', '.join(TYPES)}")
    _check("model", model, ("bytes_per_nonemb_param", "bytes_per_emb_param", *TYPES[model["type"]]))
    _check("system", system, ("num_devices", "num_nodes"))
    _check("case of", {**model, "global_batch": global_batch}, ("global_batch",))


def _check(what: str, row: Mapping, fields: tuple[str, ...]) -> None:
    for field in fields:
        value, where = row.get(field), f"of {what} {row.get('name', '')}"
        may_be_zero = field == "ar_perc_intra" and value == 0
        if not (isinstance(value, Real) and 0 < value < math.inf) and not may_be_zero:
            raise ValueError(f"{field}={value} {where} is not a positive number")
        if value > 1 and (field.endswith("_util") or field == "ar_perc_intra"):
            raise ValueError(f"{field}={value} {where} is a share and cannot exceed 1")
        if field.startswith("num_") and value != int(value):
            raise ValueError(f"{field}={value} {where} is not a whole number")
