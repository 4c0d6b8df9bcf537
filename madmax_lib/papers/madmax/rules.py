"""Which strategies, rates and rules does the MAD-Max model know?

As its public release applies them [Hsia et al., ISCA 2024, arXiv 2310.02784] (behaviour recorded). Where the release
differs from what one would expect, `Rules` has a switch. What each layer computes and moves is in
`papers.madmax.layers`, the order in which it is issued in `papers.madmax`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

__all__ = [
    "CORRECTED", "GLOBAL", "INTRA", "RELEASED", "STRATEGIES", "TASKS", "TYPES", "Collective", "Element", "Embedding",
    "Layer", "Rates", "Rules", "Work", "check_fields", "parse_classes", "parse_rules", "parse_strategy", "rates_of",
    "row_of",
]  # fmt: skip

INTRA, GLOBAL = "intra-node", "global"
STRATEGIES = ("ddp", "tp", "fsdp", "tp,ddp", "ddp,tp", "fsdp,tp", "fsdp,ddp", "tp,fsdp")  # the last one is ours
TASKS = ("pretrain", "inference", "finetune")
_TOGETHER = {"mlp": ("bottom", "top"), "transformer": ("attention", "fc")}
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
    local_batch: float  # of the last class of layers
    held_bytes: dict[str, float]  # weights on one GPU by part

    @property
    def weight_bytes(self) -> float:
        """Weights on one GPU."""
        return sum(self.held_bytes.values())


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


def parse_classes(
    text: str, classes: Sequence[str], num_devices: int, num_nodes: int
) -> dict[str, tuple[Element, ...]]:
    """The elements of each class of dense layers: one strategy for all, or one per class as in the paper's sweeps.

    Classes are bottom, top (together mlp), attention, fc (together transformer).

    >>> split = parse_classes("mlp=tp,ddp; transformer=ddp", ["bottom", "top", "attention", "fc"], 128, 16)
    >>> [element.kind for element in split["top"]], [element.kind for element in split["fc"]]
    (['tp', 'ddp'], ['ddp'])
    """
    if "=" not in str(text):
        return dict.fromkeys(classes, parse_strategy(text, num_devices, num_nodes))
    split: dict[str, tuple[Element, ...]] = {}
    for part in filter(str.strip, text.split(";")):
        name, _, strategy = (piece.strip().lower() for piece in part.partition("="))
        meant = [one for one in _TOGETHER.get(name, (name,)) if one in classes]
        if not meant:
            raise ValueError(f"dense_strategy={text!r}: {name!r} is not one of the layer classes {', '.join(classes)}")
        split.update(dict.fromkeys(meant, parse_strategy(strategy, num_devices, num_nodes)))
    if missing := [one for one in classes if one not in split]:
        raise ValueError(f"dense_strategy={text!r} says nothing of the layer class(es) {', '.join(missing)}")
    return split


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
    check_fields("system", system, (peak, "mem_bw", *_SHARES, "num_nvlinks", "bw_per_nvlink"))
    intra = system["num_nvlinks"] * system["bw_per_nvlink"] / 2 * system["nvlink_util"]
    inter = mixed = intra
    if nodes > 1:
        check_fields("system", system, ("num_ibroce_ports", "ibroce_bw", "ibroce_util", "ar_perc_intra"))
        per_node = system["num_ibroce_ports"] * system["ibroce_bw"] / 2 * system["ibroce_util"]
        inter = per_node / (system["num_devices"] / nodes)
        mixed = system["ar_perc_intra"] * intra + (1 - system["ar_perc_intra"]) * inter
    bandwidths = {("all_to_all", INTRA): intra, ("all_to_all", GLOBAL): inter}
    for level, reduce in ((INTRA, intra), (GLOBAL, mixed)):
        bandwidths["all_reduce", level] = reduce
        bandwidths["all_gather", level] = bandwidths["reduce_scatter", level] = 2 * reduce
    return Rates(system[peak] * system["flops_util"], system["mem_bw"] * system["mem_bw_util"], bandwidths)


def check_fields(what: str, row: Mapping, fields: tuple[str, ...]) -> None:
    """Raises ValueError for a field of `row` that is missing, not positive, or out of the range its name tells."""
    for field in fields:
        value, where = row.get(field), f"of {what} {row.get('name', '')}"
        may_be_zero = field == "ar_perc_intra" and value == 0
        if not (isinstance(value, Real) and 0 < value < math.inf) and not may_be_zero:
            raise ValueError(f"{field}={value} {where} is not a positive number")
        if value > 1 and (field.endswith("_util") or field == "ar_perc_intra"):
            raise ValueError(f"{field}={value} {where} is a share and cannot exceed 1")
        if field.startswith("num_") and value != int(value):
            raise ValueError(f"{field}={value} {where} is not a whole number")
