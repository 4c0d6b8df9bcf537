"""Which blocks make a transformer? Embedding, layers and head under tensor, sequence, context and expert parallelism.

Tensor parallelism splits weights by columns, then by rows [Megatron-LM, arXiv 1909.08053]; sequence parallelism splits
what lies between [arXiv 2205.05198]; context parallelism splits the tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import replace

from madmax_lib.case import Case
from madmax_lib.simulator.layers.moe import mixture_blocks, mlp_ops
from madmax_lib.simulator.layers.ops import BYTES, Block, Comm, Op, attention, gemm, pointwise, storage_bytes, wide
from madmax_lib.simulator.rates.compute import attention_flops

__all__ = ["TransformerBlocks"]


class TransformerBlocks:
    """Blocks of a transformer under a plan, built once per kind of layer."""

    def __init__(self, case: Case, imbalance: float):
        self.case, self.imbalance = case, imbalance
        self.model, self.plan, self.dtype = case.model, case.plan, case.dtype
        self.tokens = case.tokens
        self.spread = self.plan.tp if self.plan.sequence_parallel else 1
        self.moved_bytes = self.tokens * self.model.hidden * storage_bytes(self.dtype)
        if self.plan.sequence_parallel:
            self.enter, self.leave = self._tp("all_gather"), self._tp("reduce_scatter")
        else:
            self.enter, self.leave = self._tp("copy"), self._tp("all_reduce")
        self.kinds: dict[tuple, list[Block]] = {}

    def _tp(self, kind: str) -> tuple[Comm, ...]:
        return (Comm(kind, "tp", self.moved_bytes),)

    def layers(self, layers: range) -> list[Block]:
        """Blocks of consecutive layers."""
        return [block for layer in layers for block in self._layer(layer)]

    def _layer(self, layer: int) -> list[Block]:
        mixture = bool(self.model.experts) and layer >= self.model.dense_layers
        kind = (mixture, self.model.layer_window(layer))
        if kind not in self.kinds:
            self.kinds[kind] = [*self._attention(layer), *self._feed_forward(layer, mixture)]
        names = {"unit": f"layer {layer}"}
        return [replace(block, name=f"{block.name.split()[0]} {layer}", **names) for block in self.kinds[kind]]

    def _norm(self) -> Op:
        """Residual addition and normalisation in one kernel: two reads, one write."""
        elements = self.tokens * self.model.hidden / self.spread
        return pointwise("norm", 2 * elements, elements, self.dtype)

    def embedding(self) -> Block:
        """Rows of the token table, or the projection of patches."""
        model, elements = self.model, self.tokens * self.model.hidden
        if model.image:
            patches = (
                self.tokens * self.plan.cp - self.plan.micro_batch
            ) / self.plan.cp  # the class token is a parameter
            width, inputs = model.hidden / self.plan.tp, 3 * model.patch**2
            op = gemm("patches", patches, width, inputs, self.dtype, weights=True, input_grad=False)
        else:
            op = pointwise("lookup", elements, elements, self.dtype, kind="lookup", input_grad=False)
        return Block("embedding", (op,), model.embedding_parameters / self.plan.tp, after=self.leave)

    def head(self) -> Block:
        """Final norm, logits and loss; the products stay in 16 bit [Transformer Engine recipes]."""
        model, rows = self.model, self.plan.micro_batch if self.model.image else self.tokens
        out, dtype = (model.classes if model.image else model.vocab) / self.plan.tp, wide(self.dtype)
        logits = gemm("logits", rows, out, model.hidden, dtype, weights=True)
        loss = Op("loss", "pointwise", dtype, 0.0, rows * out * BYTES[dtype], rows * out * 4)
        tied_copy = model.vocab * model.hidden * (self.plan.pp > 1)  # a tied table is held twice
        held = (model.head_parameters or tied_copy) / self.plan.tp + model.norm_parameters
        return Block("head", (self._norm(), logits, loss), held, before=self.enter)

    def _attention(self, layer: int) -> list[Block]:
        model, plan, unit = self.model, self.plan, f"layer {layer}"
        *first, (_, inputs, outputs) = model.attention_matrices
        extra = 2 * model.head_dim * max(self.plan.tp - model.kv_heads, 0)  # heads that several tp devices hold
        widths = [(name, k, n + (extra if name == "qkv" else 0)) for name, k, n in first]
        products = [gemm(name, self.tokens, n / self.plan.tp, k, self.dtype, weights=True) for name, k, n in widths]
        if model.positions == "rope":
            rotated = (
                self.tokens * (model.heads + model.kv_heads) * (model.rope_head_dim or model.head_dim) / self.plan.tp
            )
            products.append(pointwise("rotary", rotated, rotated, self.dtype))
        projection = gemm("projection", self.tokens, outputs, inputs / self.plan.tp, self.dtype, weights=True)
        last = (inputs * outputs + (model.hidden if model.attention_bias == "all" else 0)) / self.plan.tp
        held = (model.attention_parameters + extra * model.hidden) / self.plan.tp + model.norm_parameters
        common = {"unit": unit, "recomputed": True}
        if plan.cp == 1:
            parts = (self._norm(), *products, *self._core(layer), projection)
            return [Block(f"attention {layer}", parts, held, before=self.enter, after=self.leave, **common)]
        to_heads, to_tokens, ring_bytes = self._exchanges()
        return [
            Block(f"qkv {layer}", (self._norm(), *products), held - last, before=self.enter, after=to_heads, **common),
            Block(f"core {layer}", self._core(layer), after=to_tokens, ring_bytes=ring_bytes, **common),
            Block(f"projection {layer}", (projection,), last, after=self.leave, **common),
        ]

    def _exchanges(self) -> tuple[tuple[Comm, ...], tuple[Comm, ...], float]:
        """Of context parallelism: collectives before and after the core (Ulysses), bytes passed on per step (ring)."""
        widths = (*self._widths(), self.model.heads * self.model.v_head_dim)
        q, k, v, out = (self.tokens * width / self.plan.tp * storage_bytes(self.dtype) for width in widths)
        if self.plan.context == "ring":
            return (), (), k + v
        return (Comm("all_to_all", "cp", q + k + v),), (Comm("all_to_all", "cp", out),), 0.0

    def _widths(self) -> tuple[float, float, float]:
        """Channels of queries, keys and values of a token."""
        model = self.model
        scored = model.head_dim + model.rope_head_dim
        return model.heads * scored, model.kv_heads * scored, model.kv_heads * model.v_head_dim

    def _core(self, layer: int) -> tuple[Op, ...]:
        """Scores, softmax and weighted values: one kernel with the causal half, or the full square through memory."""
        model, s, window = self.model, self.case.sequence, self.model.layer_window(layer)
        heads, scored = model.heads / self.plan.tp, model.head_dim + model.rope_head_dim
        if self.plan.attention == "unfused":
            rows, dtype, scores = self.tokens / self.plan.micro_batch, wide(self.dtype), heads * self.tokens * s
            each = {"count": self.plan.micro_batch * heads, "kind": "attention", "core": True}
            return (
                gemm("scores", rows, s, scored, dtype, **each),
                pointwise("softmax", scores, scores, dtype, core=True),
                gemm("values", rows, model.v_head_dim, s, dtype, **each),
            )
        width = model.core_width / self.plan.tp
        flops = attention_flops(self.tokens, s, width, causal=not model.image, window=window)
        read = self.tokens * sum(self._widths()) / self.plan.tp
        return (attention("flash", flops, read, self.tokens * heads * model.v_head_dim, self.dtype),)

    def _feed_forward(self, layer: int, mixture: bool) -> list[Block]:
        model = self.model
        if mixture:
            return mixture_blocks(self.case, layer, self._norm(), self.imbalance, (self.enter, self.leave))
        ops = (self._norm(), *mlp_ops(self.case, self.tokens, model.ffn))
        held = model.mlp_parameters(model.ffn) / self.plan.tp + model.norm_parameters
        ends = {"before": self.enter, "after": self.leave}
        return [Block(f"feed-forward {layer}", ops, held, unit=f"layer {layer}", recomputed=True, **ends)]
