"""What of a model decides the work of a step? The dimensions of one transformer, or columns of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from madmax_lib.simulator.rates.compute import Number
from madmax_lib.specs import Transformer

__all__ = ["Shape"]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a transformer as in `Transformer`, each a number, or an array with one entry per model."""

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    rope_head_dim: Number
    v_head_dim: Number
    ffn: Number
    matrices: tuple[tuple[str, Number, Number], ...]  # (name, inputs, outputs) of attention's weights but the last
    projection: Number  # inputs of attention's last product
    core_width: Number  # channels of all heads, mean of scores and values
    gated: Number
    mlp_bias: Number
    attention_bias: Number
    rope: Number
    experts: Number  # 0 for dense models
    active_experts: Number
    shared_experts: Number
    expert_ffn: Number
    router_bias: Number
    dense_layers: Number  # first ones that are no mixtures
    window: Number  # tokens a layer attends to
    full_every: Number  # every such layer attends to all
    image: Number  # 1 for a vision transformer
    patch_inputs: Number  # of its first product
    outputs: Number  # of the head: vocabulary or classes
    norm_parameters: Number
    attention_parameters: Number
    embedding_parameters: Number
    head_parameters: Number  # 0 where it is the token table
    table_parameters: Number
    routed_nodes: Number  # that a token is sent to at most, 0 for any

    @classmethod
    def of(cls, model: Transformer) -> Shape:
        """Of one model."""
        derived = {
            "matrices": model.attention_matrices[:-1],
            "projection": model.attention_matrices[-1][1],
            "attention_bias": int(model.attention_bias == "all"),
            "rope": int(model.positions == "rope"),
            "image": int(model.image > 0),
            "patch_inputs": 3 * model.patch**2,
            "outputs": model.classes if model.image else model.vocab,
            "table_parameters": model.vocab * model.hidden,
        }
        names = [field.name for field in fields(cls)]
        return cls(**{name: derived[name] if name in derived else getattr(model, name) for name in names})

    @classmethod
    def stack(cls, models: Sequence[Transformer]) -> Shape:
        """Of many models: columns of shape (n,); a matrix that a model lacks has no inputs there."""
        shapes = [cls.of(model) for model in models]
        names = [field.name for field in fields(cls) if field.name != "matrices"]
        columns = {name: np.array([getattr(shape, name) for shape in shapes], float) for name in names}
        held = [{name: (inputs, outputs) for name, inputs, outputs in shape.matrices} for shape in shapes]
        order = dict.fromkeys(name for matrices in held for name in matrices)
        ends = {name: np.array([matrices.get(name, (0, 0)) for matrices in held], float).T for name in order}
        return cls(**columns, matrices=tuple((name, *ends[name]) for name in order))

    @property
    def mixture_share(self) -> Number:
        """Share of layers that are mixtures of experts."""
        return np.where(np.asarray(self.experts) > 0, 1 - np.asarray(self.dense_layers) / self.layers, 0.0)

    @property
    def windowed_share(self) -> Number:
        """Share of layers that attend to a window only."""
        every = np.maximum(self.full_every, 1)
        full = np.where(np.asarray(self.full_every) > 0, np.floor(np.asarray(self.layers) / every) / self.layers, 0.0)
        return np.where(np.asarray(self.window) > 0, 1 - full, 0.0)

    def mlp_parameters(self, width: Number) -> Number:
        """Of one feed-forward block of that width."""
        matrices = 2 + self.gated
        return matrices * self.hidden * width + self.mlp_bias * ((matrices - 1) * width + self.hidden)
