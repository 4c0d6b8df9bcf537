"""How is a model trained, whatever its layout? Batch, precision, optimizer and options, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

__all__ = ["Settings"]

_DTYPES = ("fp32", "bf16", "fp16")
_CLASSES = {"str": str, "bool": bool, "dict": dict}
_POSITIVE = ("steps", "global_batch", "learning_rate", "timeout_s")  # other numbers may be zero


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is trained. Raises ValueError naming field, value and rule.

    global_batch: samples per step over all ranks (8).
    sequence: tokens per sample, 0 for the model's own (0).
    dtype: of matrix products; bf16 and fp16 (with a loss scale) keep fp32 weights and states (fp32).
    seed: of weights, order of the samples and generated data (0).
    learning_rate: of AdamW (1e-3).
    weight_decay: of AdamW (0).
    clip_norm: longest gradient, longer ones are scaled down; 0 for any length (1).
    compile: each layer by torch.compile (False).
    loss_parallel: logits stay split over the tp ranks (False).
    lora_rank: rank of the low-rank updates that are trained in place of the layers, 0 for none (0).
    weights: directory of published weights to start from, drawn at random if empty ("").
    """

    global_batch: int = 8
    sequence: int = 0
    dtype: str = "fp32"
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    compile: bool = False
    loss_parallel: bool = False
    lora_rank: int = 0
    weights: str = ""

    def __post_init__(self):
        for item in fields(self):
            _check(item.name, item.type, getattr(self, item.name))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}")


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
