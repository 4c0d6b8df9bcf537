"""What is a training step to the step-time model? Numbers and classes, one step per row of the arrays.

A step is given by the dimensions of its model, its plan, the habits of its software and the rates of its machine; the
classes choose which of the model's constants apply to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from madmax_lib.simulator.rates.parameters import Parameters

__all__ = ["CLASSES", "FIELDS", "Work"]

_NEEDED = float("nan")
# fields of a step and their values if not given; NaN = needed
FIELDS: dict[str, float] = {
    # model. attention_weights: of one layer; core_width: channels of scores and values over two; window: in tokens, of
    # windowed_share of the layers
    "layers": _NEEDED, "hidden": _NEEDED, "heads": _NEEDED, "kv_width": _NEEDED, "head_dim": _NEEDED, "ffn": _NEEDED,
    "gated": 0, "vocab": _NEEDED, "sequence": _NEEDED, "experts": 0, "active_experts": 0, "shared_experts": 0,
    "expert_ffn": 0, "dense_layers": 0, "window": 0, "windowed_share": 0, "attention_weights": _NEEDED,
    "core_width": _NEEDED, "causal": 1,
    # plan. shard: devices that share the weights (FSDP); trained: 1, or 0 where the base is frozen (LoRA);
    # recompute_*: share of the forward pass repeated; prefetch: layers that FSDP gathers ahead; bucket_bytes: of
    # gradients reduced together; late_gather: ZeRO-1 gathers weights after the update, not beside the next pass;
    # reduce_each: gradients are reduced with every micro-batch
    "dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "micro_batch": 1, "micro_batches": 1, "interleave": 1, "zero": 0,
    "shard": 1, "sequence_parallel": 0, "recompute_gemm": 0, "recompute_attention": 0, "recompute_tp": 0, "trained": 1,
    "gpipe": 0, "zero_bubble": 0, "ulysses": 0, "hpz": 0, "qgz": 0, "prefetch": 1, "bucket_bytes": 0, "late_gather": 0,
    "reduce_each": 0,
    # software. bytes per weight: gather and reduce of FSDP, gradient in a bucket, gradient_wire in a ring, of which
    # gathered are ZeRO-1's weights. ends_as_layers: embedding and head count as layers when the model is cut into
    # stages; send_once: a token goes once to a rank with several experts
    "gather_bytes": 2, "reduce_bytes": 2, "gradient_bytes": 2, "gradient_wire_bytes": 4, "gathered_bytes": 2,
    "overlap_tp": 0, "overlap_dp": 1, "tensorwise": 0, "unfused": 0, "legacy": 0, "mx": 0, "rowwise": 0,
    "ends_as_layers": 0, "send_once": 0,
    # machine, data-sheet rates. domain: devices on one fast link
    "peak_gemm": _NEEDED, "peak_16": _NEEDED, "memory": _NEEDED, "link": _NEEDED, "nic": _NEEDED, "domain": 8,
}  # fmt: skip
# class -> the constants it chooses; other constants are one number
CLASSES = {
    "family": ("nvlink_share",),
    "device": ("device_rate",),
    "gemm": ("gemm_efficiency",),
    "attention": ("attention_efficiency",),
    "kernels": ("pointwise_factor", "launch_s", "weight_bytes"),
    "network": ("network_share",),
    "mixture": ("moe_launch_s", "moe_pointwise"),
}
_CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names}


class Work:
    """Steps to be timed: an array per field of `FIELDS` and codes per class of `CLASSES`, which broadcast to `shape`.

    Fields of shape (a, 1) and (1, b) stand for a x b steps: what depends on one of them is worked out once.
    columns: numbers or arrays by field. classes: text or arrays of text. Raises ValueError naming a field that is
    missing or unknown.
    """

    def __init__(self, columns: Mapping[str, object], classes: Mapping[str, object]):
        if unknown := set(columns) - set(FIELDS):
            raise ValueError(f"{sorted(unknown)[0]!r} is not a field of a step")
        missing = [name for name, value in FIELDS.items() if value != value and name not in columns]
        missing += [name for name in CLASSES if name not in classes]
        if missing:
            raise ValueError(f"field {missing[0]!r} of a step is missing")
        given = {name: columns.get(name, default) for name, default in FIELDS.items()}
        values = {name: np.atleast_1d(np.asarray(value, float)) for name, value in given.items()}
        self.codes = {name: _coded(classes[name]) for name in CLASSES}
        shapes = {value.shape for value in values.values()} | {code.shape for _, code in self.codes.values()}
        self.shape = np.broadcast_shapes(*shapes)
        self.__dict__.update(values)

    def constant(self, name: str, parameters: Parameters) -> np.ndarray | float:
        """A constant for each step, by its class."""
        if name not in _CLASS_OF:
            return parameters.constants[name]
        return self.of_class(_CLASS_OF[name], f"{name}:{{}}", parameters)

    def of_class(self, kind: str, name: str, parameters: Parameters) -> np.ndarray:
        """For each step, the constant `name` with its class of that kind put in."""
        known, code = self.codes[kind]
        values = [parameters.constants[name.format(group)] for group in known]
        if not any(isinstance(value, np.ndarray) for value in values):
            return np.array(values)[code]
        return np.concatenate(np.broadcast_arrays(*map(np.atleast_1d, values)), axis=-1)[..., code]

    @cached_property
    def mixture_share(self) -> np.ndarray:
        """Share of layers that are mixtures of experts."""
        return np.where(self.experts > 0, 1 - self.dense_layers / self.layers, 0.0)

    @cached_property
    def dense_weights(self) -> np.ndarray:
        """Weights of the mean layer beside its routed experts."""
        dense = (1 - self.mixture_share) * self.ffn + self.mixture_share * self.shared_experts * self.expert_ffn
        return self.attention_weights + (2 + self.gated) * self.hidden * dense

    @cached_property
    def expert_weights(self) -> np.ndarray:
        """Weights of the routed experts of the mean layer, which are split over ep."""
        return self.mixture_share * self.experts / self.ep * (2 + self.gated) * self.hidden * self.expert_ffn

    @cached_property
    def layer_weights(self) -> np.ndarray:
        """Weights of the mean layer on a device before tensor and data parallelism split them."""
        return self.dense_weights + self.expert_weights

    @cached_property
    def end_weights(self) -> np.ndarray:
        """Weights of embedding and head."""
        return 2 * self.vocab * self.hidden


def _coded(classes) -> tuple[list[str], np.ndarray]:
    """Classes that occur, and the number of each step's class."""
    if isinstance(classes, str):
        return [classes], np.zeros(1, int)
    known, code = np.unique(np.asarray(classes, dtype=str).reshape(-1), return_inverse=True)
    return known.tolist(), code.reshape(-1)
