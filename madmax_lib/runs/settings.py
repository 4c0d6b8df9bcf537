"""How is a model trained, whatever its layout? Batch, precision, optimizer and options, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

__all__ = ["Settings"]

_CLASSES = {"str": str, "bool": bool, "dict": dict}
_POSITIVE = ("steps", "global_batch", "learning_rate", "timeout_s")  # other numbers may be zero


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is trained. Raises ValueError naming field, value and rule.

    global_batch: samples per step over all ranks (8).
    sequence: tokens per sample, 0 for the model's own (0).
    dtype: of matrix products; bf16 and fp16 (with a loss scale) keep fp32 weights and states (fp32).
    weights_16bit: with bf16, weights, gradients and AdamW's states are in bf16 too (False).
    seed: of weights, order of the samples and generated data (0).
    learning_rate: of AdamW (1e-3).
    weight_decay: of AdamW (0).
    clip_norm: longest gradient, longer ones are scaled down; 0 for any length (1).
    adam_8bit: AdamW's states in 8 bits, by torchao (False).
    compile: each layer by torch.compile (False).
    fused_gelu: bias and GELU in one Triton kernel, where there is Triton (False).
    loss_parallel: logits stay split over the tp ranks (False).
    lora_rank: rank of the low-rank updates that are trained in place of the layers, 0 for none (0).
    weights: directory of published weights to start from, drawn at random if empty ("").
    """

    _dtypes = ("fp32", "bf16", "fp16")

    global_batch: int = 8
    sequence: int = 0
    dtype: str = "fp32"
    weights_16bit: bool = False
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    adam_8bit: bool = False
    compile: bool = False
    fused_gelu: bool = False
    loss_parallel: bool = False
    lora_rank: int = 0
    weights: str = ""

    def __post_init__(self):
        for item in fields(self):
            _check(item.name, item.type, getattr(self, item.name))
        if self.dtype not in self._dtypes:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(self._dtypes)}")


def _check(name: str, annotation: str, value: object) -> None:
    """That a field's value is of its annotated type and not too small."""
    if annotation in _CLASSES and not isinstance(value, _CLASSES[annotation]):
        raise ValueError(f"{name}={value!r} must be of type {annotation}")
    least = int(name in _POSITIVE)
    if annotation == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if annotation == "float":
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not number or value < 0 or value == 0 < least:
            raise ValueError(f"{name}={value!r} must be a {'positive' if least else 'non-negative'} number")
