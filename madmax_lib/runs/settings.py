"""What does a job need to know beside model and plan? Batch, precision, optimizer and options, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

__all__ = ["DTYPES", "Settings"]

DTYPES = ("fp32", "bf16", "fp16")
_KINDS = {"str": str, "bool": bool, "dict": dict}
_POSITIVE = ("steps", "global_batch", "learning_rate", "timeout_s")  # other numbers may be zero


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is trained, whatever its layout.

    global_batch: samples per step over all ranks. sequence: tokens per sample, 0 for the model's own. dtype: of matrix
    products, fp32, or bf16 and fp16 (with a loss scale) with fp32 weights and states. clip_norm: the longest gradient,
    0 for any. compile: each layer by torch.compile. loss_parallel: logits stay split over tp. lora_rank: of low-rank
    updates, which are trained in place of the layers; 0 for none. weights: directory of published ones to start from.
    Raises ValueError naming field, value and rule.
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
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")


def _check(name: str, kind: str, value: object) -> None:
    """That a field's value is of its annotated kind and not too small."""
    if kind in _KINDS and not isinstance(value, _KINDS[kind]):
        raise ValueError(f"{name}={value!r} must be of type {kind}")
    least = int(name in _POSITIVE)
    if kind == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if kind == "float":
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not number or value < 0 or value == 0 < least:
            raise ValueError(f"{name}={value!r} must be a {'positive' if least else 'non-negative'} number")
