"""What exists? Devices, links, clusters and models, with parameter counts and model FLOPs in closed form.

Everything is SI: bytes, FLOP/s, bytes/s, W. A link's bandwidth is per device and one way. FLOPs count matrix products
only (2 per multiply-add, causal attention counted dense), as torch's FlopCounterMode does with MATH attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DLRM", "Cluster", "Device", "Host", "Link", "Model", "Transformer"]

_DTYPE_FALLBACK = {"bf16": "fp16", "fp16": "bf16", "tf32": "fp32", "fp8": "bf16", "mxfp8": "fp8", "nvfp4": "fp8"}


@dataclass(frozen=True)
class Device:
    """One accelerator.

    name: in the catalog.
    memory_bytes: capacity.
    memory_bandwidth_bytes_per_s: of that memory.
    peak_flops: dense peak in FLOP/s by dtype (fp64 fp32 tf32 fp16 bf16 fp8 mxfp8 nvfp4 int8).
    tdp_w: power limit in W (default NaN: unknown).
    usd_per_hour: price of an hour (default NaN: unknown).
    family: architecture whose fitted constants it has (default other: none are fitted).
    rate_class: device whose fitted constant `device_rate` it has (default other: the family's rate is its own).
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float] = field(hash=False)
    tdp_w: float = float("nan")
    usd_per_hour: float = float("nan")
    family: str = "other"
    rate_class: str = "other"

    def __post_init__(self):
        _positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s")

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s; a dtype the device lacks runs at the next wider one it has.

        Raises ValueError for a dtype that is unknown, or where the device has no such wider one.
        """
        wanted, seen = dtype, set()  # fp16 and bf16 stand for each other
        while wanted not in self.peak_flops:
            if wanted in seen or wanted not in _DTYPE_FALLBACK:
                raise ValueError(f"{self.name} has no peak for dtype {dtype!r}; it has {', '.join(self.peak_flops)}")
            seen.add(wanted)
            wanted = _DTYPE_FALLBACK[wanted]
        return self.peak_flops[wanted]


@dataclass(frozen=True)
class Link:
    """A network level. bandwidth_bytes_per_s: per device, one way. latency_s: of one hop."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self):
        _positive(self, "bandwidth_bytes_per_s")


@dataclass(frozen=True)
class Host:
    """What stands beside the devices of a node: memory, the links to it, and drives.

    link_bytes_per_s: achieved one way between host memory and one device; uplinks: so many devices can use that rate at
    once (0: all). nvme_*: of all drives together, 0 without any. tdp_w: of the processors, NaN where unknown.
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    link_bytes_per_s: float
    uplinks: int = 0
    nvme_bytes: float = 0.0
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    tdp_w: float = float("nan")

    def __post_init__(self):
        _positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s", "link_bytes_per_s")
        if self.nvme_bytes and not min(self.nvme_read_bytes_per_s, self.nvme_write_bytes_per_s) > 0:
            raise ValueError(f"{self.name}: nvme_bytes={self.nvme_bytes} needs rates to read and to write")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices: `intra` joins the devices of a node, `inter` the nodes.

    host: of each node, None where it is not known.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    intra: Link
    inter: Link
    host: Host | None = None

    def __post_init__(self):
        _positive(self, "devices_per_node", "nodes")

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.devices_per_node * self.nodes


@dataclass(frozen=True)
class Transformer:
    """A decoder language model, or with `image` a vision transformer; with `experts` a mixture of experts.

    kv_heads and head_dim default to heads and hidden/heads. vocab counts padded rows, classes is the ViT's head.
    attention_bias: all, qkv or none. qk_norm: rms norms of queries and keys per head. norm: layer (weight and bias) or
    rms. positions: learned or rope. experts, active_experts, shared_experts: per MoE layer, each of width expert_ffn;
    the first dense_layers are dense; router_bias: the router has one. With kv_lora_rank attention is multi-head latent
    [DeepSeek-V2, arXiv 2405.04434]: keys and values come from a latent of that rank, queries from one of q_lora_rank
    (0: directly), rope_head_dim more channels per head carry positions, values have v_head_dim channels. window: tokens
    that a layer attends to (0: all); every full_every-th layer attends to all of them (0: none).
    sinks: one learned score per head beside those of the keys.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence: int = 0
    vocab: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    norm: str = "layer"
    positions: str = "learned"
    attention_bias: str = "all"
    qk_norm: bool = False
    mlp_bias: bool = True
    tied: bool = True
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    window: int = 0
    full_every: int = 0
    sinks: bool = False
    image: int = 0
    patch: int = 0
    classes: int = 0

    def __post_init__(self):
        _positive(self, "layers", "hidden", "heads")
        _choice(self, norm=("layer", "rms"), positions=("learned", "rope"), attention_bias=("all", "qkv", "none"))
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"{self.name}: hidden={self.hidden} is not a multiple of heads={self.heads}")
        defaults = {"kv_heads": self.heads, "head_dim": self.hidden // self.heads, "expert_ffn": self.ffn}
        if self.image:
            if self.patch <= 0 or self.image % self.patch:
                raise ValueError(f"{self.name}: patch={self.patch} does not divide image={self.image}")
            defaults["sequence"] = (self.image // self.patch) ** 2 + 1  # patches and the class token
            object.__setattr__(self, "tied", False)  # there is no token table
        for name, value in [*defaults.items(), ("v_head_dim", self.head_dim or defaults["head_dim"])]:
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: kv_heads={self.kv_heads} does not divide heads={self.heads}")
        if self.experts and not 0 < self.active_experts <= self.experts:
            raise ValueError(f"{self.name}: active_experts={self.active_experts} is not in 1..{self.experts}")

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_matrices(self) -> tuple[tuple[str, int, int], ...]:
        """(name, inputs, outputs) of one layer's weights; all but "projection" are split by columns under tp."""
        q, kv, scored = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.head_dim + self.rope_head_dim
        projection = ("projection", self.heads * self.v_head_dim, self.hidden)
        if not self.kv_lora_rank:
            return ("qkv", self.hidden, q + 2 * kv), projection
        rank, out = self.q_lora_rank, self.heads * scored
        query = (("q_down", self.hidden, rank), ("q_up", rank, out)) if rank else (("q", self.hidden, out),)
        down = ("kv_down", self.hidden, self.kv_lora_rank + self.rope_head_dim)
        return *query, down, ("kv_up", self.kv_lora_rank, self.heads * (self.head_dim + self.v_head_dim)), projection

    @property
    def core_width(self) -> float:
        """Channels of all heads, mean of scores and values: attention takes 4 x core_width FLOPs per query and key."""
        return self.heads * (self.head_dim + self.rope_head_dim + self.v_head_dim) / 2

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = {"all": q + 2 * kv + self.hidden, "qkv": q + 2 * kv, "none": 0}[self.attention_bias]
        norms = (2 * self.head_dim if self.qk_norm else 0) + self.q_lora_rank + self.kv_lora_rank
        sinks = self.heads if self.sinks else 0
        return sum(inputs * outputs for _, inputs, outputs in self.attention_matrices) + bias + norms + sinks

    def layer_window(self, layer: int) -> int:
        """Tokens that a layer attends to, 0 for all."""
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    def mlp_parameters(self, width: int) -> int:
        """Of one feed-forward block of that width."""
        matrices = 3 if self.gated else 2
        bias = (matrices - 1) * width + self.hidden if self.mlp_bias else 0
        return matrices * self.hidden * width + bias

    @property
    def norm_parameters(self) -> int:
        """Of one normalisation."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def moe_parameters(self) -> int:
        """Of the router and all experts of one MoE layer."""
        experts = self.experts + self.shared_experts
        router = (self.hidden + self.router_bias) * self.experts
        return router + experts * self.mlp_parameters(self.expert_ffn)

    @property
    def embedding_parameters(self) -> int:
        """Token table or patch projection with class token, and learned positions."""
        positions = self.sequence * self.hidden if self.positions == "learned" else 0
        if self.image:
            return 3 * self.patch**2 * self.hidden + self.hidden + self.hidden + positions
        return self.vocab * self.hidden + positions

    @property
    def head_parameters(self) -> int:
        """Output projection, 0 when it is the token table."""
        if self.image:
            return (self.hidden + 1) * self.classes
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, exactly."""
        mlp = (self.layers - self.moe_layers) * self.mlp_parameters(self.ffn) + self.moe_layers * self.moe_parameters
        layers = self.layers * (self.attention_parameters + 2 * self.norm_parameters) + mlp
        return self.embedding_parameters + layers + self.norm_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: of the experts only the active and shared ones."""
        idle = (self.experts - self.active_experts) * self.mlp_parameters(self.expert_ffn)
        return self.parameters - self.moe_layers * idle

    def forward_flops(self, samples: float = 1, sequence: int | None = None) -> float:
        """FLOPs of the forward pass, attention to all tokens; the backward pass of a step takes twice as many."""
        s = sequence or self.sequence
        products = sum(inputs * outputs for _, inputs, outputs in self.attention_matrices)
        attention = 2 * s * products + 4 * s * s * self.core_width
        matrices = 3 if self.gated else 2
        dense = 2 * s * matrices * self.hidden * self.ffn
        used = self.active_experts + self.shared_experts
        moe = 2 * s * (used * matrices * self.hidden * self.expert_ffn + self.hidden * self.experts)
        if self.image:
            ends = 2 * (s - 1) * 3 * self.patch**2 * self.hidden + 2 * self.hidden * self.classes
        else:
            ends = 2 * s * self.hidden * self.vocab
        layers = self.layers * attention + (self.layers - self.moe_layers) * dense + self.moe_layers * moe
        return samples * (layers + ends)


@dataclass(frozen=True)
class DLRM:
    """A recommendation model: embedding tables, a bottom and a top stack of square layers, as MAD-Max describes it.

    pooling: lookups per table and sample. transformer_layers of width attention_dim and transformer_ffn on
    transformer_sequence tokens may stand between the stacks; with experts every top layer is a mixture.
    """

    name: str
    tables: int
    entries: int
    embedding_dim: int
    pooling: int
    bottom_layers: int
    top_layers: int
    mlp_dim: int
    transformer_layers: int = 0
    attention_dim: int = 0
    transformer_ffn: int = 0
    transformer_sequence: int = 0
    experts: int = 0
    active_experts: int = 0

    def __post_init__(self):
        _positive(self, "tables", "entries", "embedding_dim", "pooling", "mlp_dim")

    @property
    def embedding_parameters(self) -> int:
        """Of all tables."""
        return self.tables * self.entries * self.embedding_dim

    @property
    def parameters(self) -> int:
        """All parameters of the model as the paper counts them (no biases)."""
        top = self.top_layers * max(self.experts, 1)
        block = 4 * self.attention_dim**2 + 2 * self.attention_dim * self.transformer_ffn
        return (
            self.embedding_parameters + (self.bottom_layers + top) * self.mlp_dim**2 + self.transformer_layers * block
        )

    def forward_flops(self, samples: float = 1) -> float:
        """FLOPs of the forward pass, matrix products only (no attention scores, as in the paper)."""
        top = self.top_layers * max(self.active_experts, 1)
        block = 8 * self.attention_dim**2 + 4 * self.attention_dim * self.transformer_ffn
        tokens = self.transformer_layers * self.transformer_sequence
        return samples * (2 * (self.bottom_layers + top) * self.mlp_dim**2 + tokens * block)


Model = Transformer | DLRM


def _positive(item, *names: str) -> None:
    for name in names:
        value = getattr(item, name)
        if not value > 0:
            raise ValueError(f"{item.name}: {name}={value} must be positive")


def _choice(item, **choices: tuple[str, ...]) -> None:
    for name, known in choices.items():
        if getattr(item, name) not in known:
            raise ValueError(f"{item.name}: {name}={getattr(item, name)!r} is not one of {', '.join(known)}")
