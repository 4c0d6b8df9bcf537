"""Settings of training, whatever the layout: batch, precision, optimizer and options,
without torch.
"""

# types of fields are read as text
from __future__ import annotations

from dataclasses import dataclass, fields

from madmax_lib.base.fields import short_repr

_TYPES = {
    "str": str,
    "bool": bool,
    "dict": dict,
    "tuple": tuple,
    "int": int,
    "float": (int, float),
}
# other numbers may be zero
_POSITIVE = ("steps", "global_batch", "learning_rate", "timeout_s", "ranks", "speed")


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
        for item in fields(self):
            _check_value(item.name, item.type, getattr(self, item.name))
        if self.dtype not in self._dtypes:
            names = ", ".join(self._dtypes)
            raise ValueError(f"dtype={self.dtype!r} is not one of {names}")


def _check_value(name, kind, value):
    """Raises ValueError for a value that is not of the type its field is annotated
    with, or out of range.
    """
    kind, _, optional = kind.partition(" | ")
    if value is None and optional:
        return
    # True is an int to Python, and no number to a user
    is_bool = isinstance(value, bool)
    fits = isinstance(value, _TYPES[kind]) and is_bool == (kind == "bool")
    rule = f"of type {kind}"
    if kind in ("int", "float"):
        positive = name in _POSITIVE
        sign = "positive" if positive else "non-negative"
        rule = f"a {sign} number below 2^40"
        if kind == "int":
            rule = f"a whole number of at least {int(positive)} and below 2^40"
        fits = fits and 0 <= value < 2**40 and (value > 0 or not positive)
    if not fits or (kind == "dict" and any(not isinstance(key, str) for key in value)):
        raise ValueError(f"{name}={short_repr(value)} must be {rule}")
    for item in value if kind == "tuple" else ():
        _check_value(name, "float", item)
