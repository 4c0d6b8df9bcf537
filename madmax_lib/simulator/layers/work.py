"""What do the blocks of a transformer have in common? The work of a step, or of many:
sizes, ends of blocks, products.

What of a model decides that work is its `Shape`: the dimensions of one transformer, or
columns of many.

Amounts are per device and micro-batch: numbers for one step, arrays for many, where
what a step does not have is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from madmax_lib.catalog.models import Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.simulator.layers.ops import (
    Comm,
    Op,
    Precision,
    gemm,
    pointwise,
    precision,
)
from madmax_lib.simulator.rates.compute import Number

__all__ = ["HABITS", "Shape", "Work", "existing", "has"]

HABITS = (
    "gathers_logits",
    "sums_rows",
)  # of software, of which the collectives of a block depend


@dataclass(frozen=True)
class Shape:
    """Dimensions of a transformer as in `Transformer`, each a number, or an array with
    one entry per model.
    """

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    rope_head_dim: Number
    v_head_dim: Number
    ffn: Number
    matrices: tuple[
        tuple[str, Number, Number], ...
    ]  # (name, inputs, outputs) of attention's weights but the last
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
    moe_every: Number  # of the others every such one is a mixture, 0 for all
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
    model: Transformer | None = (
        None  # the model, where it says the blocks of its layers
    )

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
            "model": model if model.blocks else None,
        }
        names = [field.name for field in fields(cls)]
        return cls(
            **{
                name: derived[name] if name in derived else getattr(model, name)
                for name in names
            }
        )

    @classmethod
    def stack(cls, models: Sequence[Transformer]) -> Shape:
        """Of many models: columns of shape (n,); a matrix that a model lacks has no
        inputs there.

        Raises ValueError for a stack of blocks, which no columns say.
        """
        if stacks := [model for model in models if model.blocks]:
            raise ValueError(
                f"{stacks[0].name}: layers with blocks={stacks[0].blocks!r} are "
                "priced alone, not in a table"
            )
        shapes = [cls.of(model) for model in models]
        names = [
            field.name
            for field in fields(cls)
            if field.name not in ("matrices", "model")
        ]
        columns = {
            name: np.array([getattr(shape, name) for shape in shapes], float)
            for name in names
        }
        held = [
            {name: (inputs, outputs) for name, inputs, outputs in shape.matrices}
            for shape in shapes
        ]
        order = dict.fromkeys(name for matrices in held for name in matrices)
        ends = {
            name: np.array([matrices.get(name, (0, 0)) for matrices in held], float).T
            for name in order
        }
        return cls(**columns, matrices=tuple((name, *ends[name]) for name in order))

    @property
    def mixture_share(self) -> Number:
        """Share of layers that are mixtures of experts."""
        if self.model:
            return self.model.moe_layers / self.layers
        every = np.maximum(self.moe_every, 1)
        count = np.floor(np.asarray(self.layers) / every) - np.floor(
            np.asarray(self.dense_layers) / every
        )
        return np.where(np.asarray(self.experts) > 0, count / self.layers, 0.0)

    @property
    def mixture_share_behind(self) -> Number:
        """Of the layers behind the first dense ones."""
        behind = np.maximum(
            1 - np.asarray(self.dense_layers) / self.layers, 1e-9
        )  # nothing behind: no mixtures
        return self.mixture_share / behind

    @property
    def halves(self) -> float:
        """Blocks of the mean layer over the two of a usual one."""
        return (
            sum(map(len, self.model.layer_kinds)) / (2 * self.layers)
            if self.model
            else 1.0
        )

    @property
    def windowed_share(self) -> Number:
        """Share of layers that attend to a window only."""
        every = np.maximum(self.full_every, 1)
        full = np.where(
            np.asarray(self.full_every) > 0,
            np.floor(np.asarray(self.layers) / every) / self.layers,
            0.0,
        )
        return np.where(np.asarray(self.window) > 0, 1 - full, 0.0)

    def mlp_parameters(self, width: Number) -> Number:
        """Of one feed-forward block of that width."""
        matrices = 2 + self.gated
        return matrices * self.hidden * width + self.mlp_bias * (
            (matrices - 1) * width + self.hidden
        )


@dataclass(frozen=True)
class Work:
    """What is computed in a step, or with arrays in many."""

    shape: Shape  # of the model
    plan: Plans  # how it is split
    sequence: Number  # tokens per sample
    width: Precision  # of the products
    imbalance: Number = 1.0  # tokens of the busiest expert device over the mean
    gathers_logits: Number = 0.0  # 1 where tp ranks gather the logits
    sums_rows: Number = 0.0  # 1 where they sum the rows of experts

    @classmethod
    def of(cls, case: Case) -> Work:
        """Of a case: one model, and a plan or many."""
        habits = (float(getattr(case.software, name)) for name in HABITS)
        return cls(
            Shape.of(case.model),
            case.plan,
            case.sequence,
            precision(case.dtype),
            case.imbalance,
            *habits,
        )

    @cached_property
    def tokens(self) -> Number:
        """Of one micro-batch on one device."""
        return self.plan.micro_batch * self.sequence / self.plan.cp

    @cached_property
    def decoder(self) -> Work:
        """The same for the tokens of a decoder behind an encoder."""
        stack = self.shape.model
        return (
            replace(self, sequence=stack.decoder_tokens(self.sequence))
            if stack
            else self
        )

    @cached_property
    def spread(self) -> Number:
        """Devices that share what lies between the products."""
        return np.where(self.plan.sequence_parallel, self.plan.tp, 1)

    @cached_property
    def moved_bytes(self) -> Number:
        """Activations of a micro-batch between layers."""
        return self.tokens * self.shape.hidden * self.width.storage_bytes

    @cached_property
    def enter(self) -> tuple[Comm, ...]:
        """Collectives at the start of a tensor-parallel block."""
        together = np.asarray(self.plan.sequence_parallel, float)
        parts = (
            ("all_gather", "tp", self.moved_bytes * together),
            ("copy", "tp", self.moved_bytes * (1 - together)),
        )
        return existing(*parts)

    @cached_property
    def leave(self) -> tuple[Comm, ...]:
        """Collectives at its end."""
        together = np.asarray(self.plan.sequence_parallel, float)
        moved = self.moved_bytes
        return existing(
            ("reduce_scatter", "tp", moved * together),
            ("all_reduce", "tp", moved * (1 - together)),
        )

    def norm(self) -> Op:
        """Residual addition and normalisation in one kernel: two reads, one write."""
        elements = self.tokens * self.shape.hidden / self.spread
        return pointwise("norm", 2 * elements, elements, self.width)

    def mlp(
        self,
        tokens: Number,
        inner: Number,
        prefix: str = "",
        count: Number = 1,
        **flags,
    ) -> tuple[Op, Op, Op]:
        """Products and activation of a feed-forward block of `inner` channels; `count`
        equal ones share the tokens.
        """
        hidden = self.shape.hidden
        up = 1 + self.shape.gated
        share = tokens / np.maximum(count, 1)
        return (
            gemm(
                f"{prefix}up",
                share,
                up * inner,
                hidden,
                self.width,
                count=count,
                weights=True,
                **flags,
            ),
            pointwise(
                f"{prefix}activation",
                tokens * up * inner,
                tokens * inner,
                self.width,
                **flags,
            ),
            gemm(
                f"{prefix}down",
                share,
                hidden,
                inner,
                self.width,
                count=count,
                weights=True,
                **flags,
            ),
        )


def has(amount: Number) -> bool:
    """Whether there is any of it, in any of the steps."""
    return bool(amount.any() if isinstance(amount, np.ndarray) else amount)


def existing(*comms: tuple[str, str, Number]) -> tuple[Comm, ...]:
    """Collectives that move anything."""
    return tuple(Comm(*comm) for comm in comms if has(comm[2]))
