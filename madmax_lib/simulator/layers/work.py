"""The work of a step, or of many: sizes, ends of blocks and products that the blocks of a
transformer share.

`Shape` has the dimensions that decide that work: of one transformer, or columns of many.
Amounts are per device and micro-batch: numbers for one step, arrays for many, where
what a step does not have is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from madmax_lib.catalog import Transformer
from madmax_lib.catalog.layer_formulas import LayerFormulas
from madmax_lib.plan import Case, Plans
from madmax_lib.simulator.layers.ops import (
    Block,
    Comm,
    Comms,
    Op,
    Precision,
    linear,
    pointwise,
    precision,
)
from madmax_lib.simulator.rates.compute import Number

# of software: what decides the collectives of a block
_HABITS = ("gathers_logits", "sums_rows")


@dataclass(frozen=True)
class Shape(LayerFormulas):
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
    # (name, inputs, outputs) of attention's weights but the last
    matrices: tuple[tuple[str, Number, Number], ...]
    projection: Number  # inputs of attention's last product
    gated: Number
    mlp_bias: Number
    attention_bias: Number  # 1 where all products of attention have one
    rope: Number  # 1 where positions are rotary
    experts: Number  # 0 for dense models
    active_experts: Number
    shared_experts: Number
    expert_ffn: Number
    expert_latent: Number  # channels that routed experts work in, 0 for all
    router_bias: Number
    dense_layers: Number  # first ones of a mixture that have no experts
    mixture_share: Number  # of the layers: those that are mixtures
    shared_values: Number
    reused_keys: Number
    compression: Number  # tokens that become one
    index_top: Number  # of these, those that are chosen
    streams: Number  # of the residual
    index_heads: Number  # of the indexer that chooses the tokens of the window
    index_dim: Number
    window: Number  # tokens a layer attends to
    windowed_share: Number  # of the layers: those that attend to a window only
    full_every: Number  # every such layer attends to all
    image: Number  # 1 for a vision transformer
    patch_inputs: Number  # of its first product
    outputs: Number  # of the head: vocabulary or classes
    predicted_share: Number  # of the tokens: those that the head sees
    norm_parameters: Number
    attention_parameters: Number
    embedding_parameters: Number
    head_parameters: Number  # 0 where it is the token table
    table_parameters: Number
    routed_nodes: Number  # that a token is sent to at most, 0 for any
    images: Number = 0  # of a sample, that a tower sees
    merged_patches: Number = 1  # that become one token
    projector_parameters: Number = 0
    model: Transformer | None = None  # the model, where it says its layers' blocks
    tower: Transformer | None = None

    @classmethod
    def of(cls, model: Transformer) -> Shape:
        """Dimensions of one model."""
        *matrices, projection = model.attention_matrices
        derived = {
            "matrices": tuple(matrices),
            "projection": projection.inputs,
            "attention_bias": int(model.attention_bias == "all"),
            "rope": int(model.positions == "rope"),
            "image": int(model.image > 0),
            "patch_inputs": 3 * model.patch**2,  # three colours
            "outputs": model.classes if model.image else model.vocab,
            "table_parameters": model.vocab * model.hidden,
            "model": model if model.blocks else None,
            "tower": model.tower,
            "dense_layers": model.dense_layers * (model.experts > 0),
        }
        names = {field.name for field in fields(cls)} - derived.keys()
        return cls(**derived, **{name: getattr(model, name) for name in names})

    @classmethod
    def stack(cls, shapes: Sequence[Shape]) -> Shape:
        """Columns of shape (n,), one entry per model; a matrix that a model lacks has no
        inputs there.

        Raises ValueError for a stack of blocks and for a tower, which no columns say.
        """
        for model in filter(None, (shape.model or shape.tower for shape in shapes)):
            raise ValueError(
                f"{model.name}: layers with blocks={model.blocks!r}, or a tower, are "
                "priced alone, not in a table"
            )
        names = {field.name for field in fields(cls)} - {"matrices", "model", "tower"}
        columns = {
            name: np.array([getattr(shape, name) for shape in shapes], float)
            for name in names
        }
        # (inputs, outputs) by name of each model, then (2, n) of each name
        sizes = [{name: ends for name, *ends in shape.matrices} for shape in shapes]
        order = dict.fromkeys(name for matrices in sizes for name in matrices)
        for name in order:
            ends = [matrices.get(name, (0, 0)) for matrices in sizes]
            order[name] = np.array(ends, float).T
        matrices = tuple((name, *ends) for name, ends in order.items())
        return cls(**columns, matrices=matrices)

    @property
    def key_value_channels(self) -> Number:
        """Channels of a token's keys and values."""
        return self.kv_heads * (self.score_dim + self.v_head_dim)

    @property
    def qkv_channels(self) -> Number:
        """Channels of a token's queries, keys and values."""
        return self.heads * self.score_dim + self.key_value_channels

    @property
    def moe_share_after_dense(self) -> Number:
        """MoE share among layers after the leading dense ones."""
        rest = 1 - self.dense_layers / self.layers
        return self.mixture_share / np.maximum(rest, 1e-9)  # no rest: no mixtures

    @property
    def halves(self) -> float:
        """Blocks of the mean layer over the two of a usual one."""
        if not self.model:
            return 1.0
        return sum(map(len, self.model.layer_kinds)) / (2 * self.layers)


@dataclass(frozen=True)
class Work:
    """The computation of a step, or with arrays of many."""

    shape: Shape  # of the model
    plan: Plans  # how it is split
    sequence: Number  # tokens per sample
    width: Precision  # of the products
    imbalance: Number = 1.0  # tokens of the busiest expert device over the mean
    gathers_logits: Number = 0.0  # 1 where tp ranks gather the logits
    sums_rows: Number = 0.0  # 1 where they sum the rows of experts

    @classmethod
    def of(cls, case: Case) -> Work:
        """The work of a case: one model, and a plan or many."""
        return cls(
            Shape.of(case.model),
            case.plan,
            case.sequence,
            precision(case.dtype),
            case.imbalance,
            **{name: float(getattr(case.software, name)) for name in _HABITS},
        )

    @cached_property
    def tokens(self) -> Number:
        """Tokens of one micro-batch on one device."""
        return self.plan.micro_batch * self.sequence / self.plan.cp

    @cached_property
    def decoder(self) -> Work:
        """The same for the tokens of a decoder behind an encoder."""
        if not (stack := self.shape.model):
            return self
        return replace(self, sequence=stack.decoder_tokens(self.sequence))

    @cached_property
    def spread(self) -> Number:
        """Devices that share what lies between the products."""
        return np.where(self.plan.sequence_parallel, self.plan.tp, 1)

    @cached_property
    def moved_bytes(self) -> Number:
        """Activations of a micro-batch between layers."""
        return self.tokens * self.shape.hidden * self.width.storage_bytes

    @property
    def sent_bytes(self) -> Number:
        """Activations that a device sends to the next stage: its part of all streams,
        gathered on arrival [arXiv 2104.04473].
        """
        return self.moved_bytes * self.shape.streams / self.plan.tp

    @cached_property
    def _moved_by_kind(self):
        """Bytes that sequence parallelism gathers and scatters, and that tensor
        parallelism without it reduces.
        """
        split = 1.0 * self.plan.sequence_parallel
        return self.moved_bytes * split, self.moved_bytes * (1 - split)

    @cached_property
    def enter(self) -> Comms:
        """Collectives at the start of a tensor-parallel block [arXiv 2205.05198]."""
        parts, copies = self._moved_by_kind
        return nonzero(("all_gather", "tp", parts), ("copy", "tp", copies))

    @cached_property
    def leave(self) -> Comms:
        """Collectives at its end."""
        parts, copies = self._moved_by_kind
        return nonzero(("reduce_scatter", "tp", parts), ("all_reduce", "tp", copies))

    @property
    def ends(self) -> dict[str, Comms]:
        """Both, as fields of a block."""
        return {"before": self.enter, "after": self.leave}

    def norm(self) -> Op:
        """Residual addition and normalisation in one kernel: two reads, one write. Of n
        streams one kernel reads all and writes one, another reads these and the result.
        """
        elements = self.tokens * self.shape.hidden / self.spread
        streams = self.shape.streams
        more = streams > 1
        read = (2 * streams + more) * elements
        return pointwise("norm", read, (streams + more) * elements, self.width)

    def mlp(
        self,
        tokens: Number,
        inner: Number,
        prefix: str = "",
        count: Number = 1,
        inputs: Number | None = None,
        **flags,
    ) -> list[Op]:
        """Products and activation of a feed-forward block of `inner` channels; `count`
        equal ones share the tokens. inputs: of the products, the model's if None.
        """
        hidden = self.shape.hidden if inputs is None else inputs
        width = self.width
        first = (
            1 + self.shape.gated
        ) * inner  # the gate is a part of the first product
        share = tokens / np.maximum(count, 1)
        counted = {"count": count, **flags}
        return [
            linear(f"{prefix}up", share, first, hidden, width, **counted),
            pointwise(
                f"{prefix}activation", tokens * first, tokens * inner, width, **flags
            ),
            linear(f"{prefix}down", share, hidden, inner, width, **counted),
        ]


def layer_block(
    kind: str, number: int | str, ops: Iterable[Op], parameters: Number = 0.0, **fields
) -> Block:
    """A block of layer `number`, which full recompute repeats; fields: further ones of
    `Block`.
    """
    return Block(
        f"{kind} {number}",
        tuple(ops),
        parameters,
        unit=f"layer {number}",
        recomputed=True,
        **fields,
    )


def any_nonzero(amount: Number) -> bool:
    """Whether there is any of it, in any of the steps."""
    return bool(amount.any() if isinstance(amount, np.ndarray) else amount)


def nonzero(*comms: tuple[str, str, Number]) -> Comms:
    """Collectives that move anything."""
    return tuple(Comm(*comm) for comm in comms if any_nonzero(comm[2]))
