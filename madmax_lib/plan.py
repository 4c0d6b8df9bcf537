"""How is a model split? One `Plan` for runs and simulations, with a text form.

World = dp x tp x pp x cp; experts (ep) are laid over dp x cp and divide it, as in Megatron and torchtitan.
The text form names what differs from the default: `dp2.tp8.pp4.z1.mb2.full` is Plan(dp=2, tp=8, pp=4, zero=1,
micro_batch=2, recompute="full").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from madmax_lib import plan_flags
from madmax_lib.specs import DLRM, Cluster, Model

__all__ = ["DEFAULTS", "Plan"]

_DEGREES = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "z": "zero", "mb": "micro_batch",
            "v": "interleave", "hs": "shard", "pf": "prefetch", "first": "first_layers", "last": "last_layers",
            "cap": "capacity"}  # fmt: skip
_WORDS = {
    "selective": ("recompute", "selective"),
    "full": ("recompute", "full"),
    "sp": ("sequence_parallel", True),
    "nosp": ("sequence_parallel", False),
    "gpipe": ("schedule", "gpipe"),
    "zb": ("schedule", "zero-bubble"),
    "ulysses": ("context", "ulysses"),
    "unfused": ("attention", "unfused"),
    "embedding-layer": ("embedding_as_layer", True),
    "head-layer": ("head_as_layer", True),
    "overlap-gather": ("overlap_gather", True),
    "reduce-fp32": ("reduce_fp32", True),
    "qwz": ("qwz", True),
    "hpz": ("hpz", True),
    "qgz": ("qgz", True),
    "offload-optimizer": ("offload", "optimizer"),
    "offload-all": ("offload", "all"),
    "offload-chunks": ("offload", "chunks"),
    "offload-nvme": ("offload", "nvme"),
}
_ZERO_PLUS = ("qwz", "hpz", "qgz")
_CHOICES = {
    "zero": (0, 1, 2, 3),
    "context": ("ring", "ulysses"),
    "attention": ("flash", "unfused"),
    "recompute": ("none", "selective", "full"),
    "schedule": ("gpipe", "1f1b", "zero-bubble"),
    "offload": (None, "optimizer", "all", "chunks", "nvme"),
}


@dataclass(frozen=True)
class Plan:
    """Degrees and choices of a parallel training step.

    micro_batch: samples per device and micro-batch. interleave: model chunks per pipeline stage. zero: 0 none (DDP),
    1 optimizer, 2 and gradients, 3 and parameters (FSDP). sequence_parallel: default with tp > 1. prefetch: layers
    that FSDP gathers ahead. bucket_bytes: size of a DDP bucket, infinite for one reduction at the end.
    shard: devices that ZeRO shards over, with copies across (HSDP); 0 is all of dp x cp. qwz, hpz, qgz: ZeRO++'s 8-bit
    gather of weights, second shard inside the node, 4-bit exchange of gradients (`zpp` is all three) [arXiv
    2306.10209]. overlap_gather: ZeRO-1/2 gathers parameters beside the next forward pass, not after the optimizer.
    reduce_fp32: gradients are reduced in fp32. context: how cp exchanges keys and values. attention: flash computes the
    causal half of the scores, unfused all of them, through memory. first_layers, last_layers: layers of the first and
    last pipeline stage (0: as the others); embedding_as_layer, head_as_layer: they count as a layer when stages are
    made equal [Megatron-LM]. capacity: tokens an expert takes over its even share (0: all that come).
    Raises ValueError naming the field, its value and the rule.

    >>> plan = Plan(dp=2, tp=8, pp=8, recompute="full")
    >>> str(plan), plan.world_size, plan.sequence_parallel
    ('dp2.tp8.pp8.full', 128, True)
    >>> Plan(dp=4, ep=3)
    Traceback (most recent call last):
    ValueError: ep=3 does not divide dp x cp = 4 x 1
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    sequence_parallel: bool | None = None
    interleave: int = 1
    schedule: str = "1f1b"
    offload: str | None = None
    prefetch: int = 1
    bucket_bytes: float = 25 * 2**20
    shard: int = 0
    qwz: bool = False
    hpz: bool = False
    qgz: bool = False
    overlap_gather: bool = False
    reduce_fp32: bool = False
    context: str = "ring"
    attention: str = "flash"
    first_layers: int = 0
    last_layers: int = 0
    embedding_as_layer: bool = False
    head_as_layer: bool = False
    capacity: float = 0.0

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(str, known))}")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp x cp = {self.dp} x {self.cp}")
        if self.interleave > 1 and self.pp == 1:
            raise ValueError(f"interleave={self.interleave} needs a pipeline, but pp=1")
        if self.prefetch < 0 or not self.bucket_bytes > 0:
            raise ValueError(f"prefetch={self.prefetch} and bucket_bytes={self.bucket_bytes} must not be negative")
        if not self.capacity >= 0:
            raise ValueError(f"capacity={self.capacity} must not be negative")
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)
        self._check_shards()
        self._check_stages()

    def _check_shards(self) -> None:
        if self.shard and (self.shard < 0 or (self.dp * self.cp) % self.shard):
            raise ValueError(f"shard={self.shard} does not divide dp x cp = {self.dp} x {self.cp}")
        if self.shard and not self.zero:
            raise ValueError(f"shard={self.shard} needs zero of at least 1, but zero=0 shards nothing")
        if used := [name for name in _ZERO_PLUS if getattr(self, name)]:
            if self.zero != 3:
                raise ValueError(f"{used[0]} (ZeRO++) needs zero=3, but zero={self.zero}")
            if self.shard:
                raise ValueError(f"{used[0]} (ZeRO++) and shard={self.shard} (HSDP) exclude each other")
        if self.overlap_gather and self.zero not in (1, 2):
            raise ValueError(f"overlap_gather is for zero=1 and zero=2, but zero={self.zero}")

    def _check_stages(self) -> None:
        for name in ("first_layers", "last_layers"):
            value = getattr(self, name)
            if value < 0 or (value and self.pp == 1):
                raise ValueError(f"{name}={value} needs a pipeline and at least one layer, pp={self.pp}")
            if value % self.interleave:
                raise ValueError(f"interleave={self.interleave} does not divide {name}={value}")
        if (self.embedding_as_layer and self.first_layers) or (self.head_as_layer and self.last_layers):
            raise ValueError("embedding_as_layer and first_layers, head_as_layer and last_layers exclude each other")

    @property
    def world_size(self) -> int:
        """Devices the plan needs."""
        return self.dp * self.tp * self.pp * self.cp

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Plan from its text form; degrees may be left out.

        >>> Plan.parse("dp2.tp2.z3").world_size
        4
        """
        values: dict = {}
        for part in filter(None, text.strip().lower().split(".")):
            match = re.fullmatch(r"([a-z]+)(\d+)", part)
            if match and match[1] in _DEGREES:
                name, value = _DEGREES[match[1]], int(match[2])
                value = value / 100 if name == "capacity" else value
            elif part == "zpp":
                values |= dict.fromkeys(_ZERO_PLUS, True)
                continue
            elif part in _WORDS:
                name, value = _WORDS[part]
            else:
                known = ", ".join([*(f"{key}N" for key in _DEGREES), *_WORDS, "zpp"])
                raise ValueError(f"{part!r} in plan {text!r} is not one of {known}")
            if name in values:
                raise ValueError(f"{name} is given twice in plan {text!r}")
            values[name] = value
        return cls(**values)

    @classmethod
    def from_megatron(cls, args: str | Sequence[str] | Mapping[str, object], world_size: int | None = None) -> Plan:
        """Plan from the flags of Megatron-LM, see `plan_flags.megatron`.

        >>> str(Plan.from_megatron("--tensor-model-parallel-size 2 --sequence-parallel", world_size=8))
        'dp4.tp2'
        """
        return cls(**plan_flags.megatron(args, world_size))

    @classmethod
    def from_torchtitan(cls, source: str | Path, world_size: int | None = None, layers: int | None = None) -> Plan:
        """Plan from a configuration of torchtitan, a TOML file or its text, see `plan_flags.torchtitan`."""
        return cls(**plan_flags.torchtitan(source, world_size, layers))

    def __str__(self) -> str:
        default = DEFAULTS | {"sequence_parallel": self.tp > 1}
        parts = [f"dp{self.dp}"]
        for short, name in _DEGREES.items():
            if name != "dp" and getattr(self, name) != default[name]:
                value = getattr(self, name)
                parts.append(f"{short}{round(100 * value) if name == 'capacity' else value}")
        parts += [w for w, (name, v) in _WORDS.items() if getattr(self, name) == v and default[name] != v]
        return ".".join(parts)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches per step and pipeline, the last one perhaps short (`last_micro_batch`).

        Raises ValueError when the batch cannot be split.
        """
        if global_batch < 1 or global_batch % self.dp:
            raise ValueError(
                f"global_batch={global_batch} is not a multiple of dp x micro_batch = {self.dp} x {self.micro_batch}, "
                "nor, with a short last micro-batch, of dp"
            )
        return -(-global_batch // (self.dp * self.micro_batch))

    def last_micro_batch(self, global_batch: int) -> int:
        """Samples per device of the last micro-batch.

        >>> Plan(dp=2, micro_batch=4).micro_batches(12), Plan(dp=2, micro_batch=4).last_micro_batch(12)
        (2, 2)
        """
        return global_batch // self.dp - (self.micro_batches(global_batch) - 1) * self.micro_batch

    def check(self, model: Model, cluster: Cluster) -> None:
        """Raises ValueError, in the field's words, if the plan cannot be laid over this model and cluster."""
        if self.world_size != cluster.world_size:
            degrees = f"dp x tp x pp x cp = {self.dp} x {self.tp} x {self.pp} x {self.cp} = {self.world_size}"
            raise ValueError(f"{degrees}, but {cluster.name} has {cluster.world_size} devices")
        if isinstance(model, DLRM):
            return
        replicated = self.tp > model.kv_heads and self.tp % model.kv_heads == 0  # each tp rank holds one of the heads
        rules = [
            ("tp", self.tp, model.heads, "attention heads"),
            ("tp", 1 if replicated else self.tp, model.kv_heads, "key-value heads"),
            ("cp", self.cp if self.context == "ulysses" else 1, model.heads // self.tp, "attention heads of a tp rank"),
            ("ep", self.ep, model.experts or self.ep, "experts"),
        ]
        for name, degree, count, what in rules:
            if count % degree:
                raise ValueError(f"{name}={degree} does not divide {count} {what} of {model.name}")
        if self.ep > 1 and not model.experts:
            raise ValueError(f"ep={self.ep}, but {model.name} has no experts")
        if self.ep > 1 and self.tp > 1 and not self.sequence_parallel:
            raise ValueError(f"ep={self.ep} with tp={self.tp} needs sequence_parallel")
        if self.pp * self.interleave > model.layers:
            raise ValueError(
                f"pp x interleave = {self.pp} x {self.interleave} exceeds {model.layers} layers of {model.name}"
            )


DEFAULTS = {field.name: field.default for field in fields(Plan)}  # of every choice that a plan does not name
