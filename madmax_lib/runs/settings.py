"""Settings of training, whatever the layout: batch, precision, optimizer and options,
without torch.
"""

# types of fields are read as text
from __future__ import annotations

from dataclasses import dataclass

from madmax_lib.base import check_fields

# other numbers may be zero
_POSITIVE = ("steps", "global_batch", "learning_rate", "timeout_s", "ranks")
_MOST = 2.0**40  # of a number: beyond it a slip of the pen


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of training that hold in any layout. Raises ValueError naming field, value
    and rule.

    global_batch: samples per step over all ranks (8).
    sequence: tokens per sample, 0 for the model's own (0).
    dtype: of matrix products; bf16 and fp16 (with a loss scale) keep fp32 weights and
    states (fp32).
    weights_16bit: with bf16, weights, gradients and AdamW's states are in bf16 too
    (False).
    seed: of weights, order of the samples and generated data (0).
    learning_rate: of AdamW (1e-3).
    weight_decay: of AdamW (0).
    clip_norm: longest gradient, longer ones are scaled down; 0 for any length (1).
    adam_8bit: AdamW's states in 8 bits, by torchao (False).
    compile: each layer by torch.compile (False).
    fused_gelu: bias and GELU in one kernel, by torch.compile (False).
    lora_rank: rank of the low-rank updates that are trained in place of the layers, 0
    for none (0).
    weights: directory of published weights to start from, drawn at random if empty
    ("").
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
    lora_rank: int = 0
    weights: str = ""

    def __post_init__(self):
        check_fields(self, *_POSITIVE)
        for name, value in vars(self).items():
            if isinstance(value, float) and value >= _MOST:
                raise ValueError(f"{name}={value} must be below 2^40")
        if self.dtype not in self._dtypes:
            names = ", ".join(self._dtypes)
            raise ValueError(f"dtype={self.dtype!r} is not one of {names}")
