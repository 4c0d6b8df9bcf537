"""How is a model split? One `Plan` for runs and simulations, with a text form.

World = dp x tp x pp x cp; experts (ep) are laid over dp x cp and divide it, as in Megatron and torchtitan.
The text form names what differs from the default: `dp2.tp8.pp4.z1.mb2.full` is Plan(dp=2, tp=8, pp=4, zero=1,
micro_batch=2, recompute="full").
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from madmax_lib.specs import DLRM, Cluster, Model

__all__ = ["Plan"]

_DEGREES = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "z": "zero", "mb": "micro_batch",
            "v": "interleave"}  # fmt: skip
_WORDS = {
    "selective": ("recompute", "selective"),
    "full": ("recompute", "full"),
    "sp": ("sequence_parallel", True),
    "nosp": ("sequence_parallel", False),
    "gpipe": ("schedule", "gpipe"),
    "zb": ("schedule", "zero-bubble"),
    "offload-optimizer": ("offload", "optimizer"),
    "offload-all": ("offload", "all"),
    "offload-chunks": ("offload", "chunks"),
    "offload-nvme": ("offload", "nvme"),
}
_CHOICES = {
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "schedule": ("gpipe", "1f1b", "zero-bubble"),
    "offload": (None, "optimizer", "all", "chunks", "nvme"),
}


@dataclass(frozen=True)
class Plan:
    """Degrees and choices of a parallel training step.

    micro_batch: samples per device and micro-batch. interleave: model chunks per pipeline stage. zero: 0 none (DDP),
    1 optimizer, 2 and gradients, 3 and parameters (FSDP). sequence_parallel: default with tp > 1. prefetch: layers
    that FSDP gathers ahead. bucket_bytes: size of a DDP bucket.
    Raises ValueError naming the field, its value and the rule.
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
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)

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
            elif part in _WORDS:
                name, value = _WORDS[part]
            else:
                known = ", ".join([*(f"{key}N" for key in _DEGREES), *_WORDS])
                raise ValueError(f"{part!r} in plan {text!r} is not one of {known}")
            if name in values:
                raise ValueError(f"{name} is given twice in plan {text!r}")
            values[name] = value
        return cls(**values)

    def __str__(self) -> str:
        default = {f.name: f.default for f in fields(self)} | {"sequence_parallel": self.tp > 1}
        parts = [f"dp{self.dp}"]
        for short, name in _DEGREES.items():
            if name != "dp" and getattr(self, name) != default[name]:
                parts.append(f"{short}{getattr(self, name)}")
        parts += [w for w, (name, v) in _WORDS.items() if getattr(self, name) == v and default[name] != v]
        return ".".join(parts)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches per step and pipeline. Raises ValueError when the batch cannot be split."""
        if global_batch < 1 or global_batch % (self.dp * self.micro_batch):
            raise ValueError(
                f"global_batch={global_batch} is not a multiple of dp x micro_batch = {self.dp} x {self.micro_batch}"
            )
        return global_batch // (self.dp * self.micro_batch)

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
            ("cp", self.cp, model.heads // self.tp, "attention heads of a tp rank"),
            ("ep", self.ep, model.experts or self.ep, "experts"),
        ]
        for name, degree, count, what in rules:
            if count % degree:
                raise ValueError(f"{name}={degree} does not divide {count} {what} of {model.name}")
        if self.ep > 1 and not model.experts:
            raise ValueError(f"ep={self.ep}, but {model.name} has no experts")
        if self.pp * self.interleave > model.layers:
            raise ValueError(
                f"pp x interleave = {self.pp} x {self.interleave} exceeds {model.layers} layers of {model.name}"
            )
