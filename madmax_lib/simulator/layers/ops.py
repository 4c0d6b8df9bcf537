"""What does one operation compute, move and communicate, forward and backward? The
parts that a layer is made of.

An `Op` is the forward work of one kernel or a few fused ones, per device and
micro-batch; `backward` derives what its backward pass does. Products count 2 FLOPs per
multiply-add and every operand once in memory traffic. Amounts may be
arrays: all formulas broadcast over NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

__all__ = [
    "BYTES",
    "Block",
    "Comm",
    "Op",
    "Precision",
    "attention",
    "backward",
    "gemm",
    "mirror",
    "phases",
]
__all__ += ["pointwise", "precision", "wide"]

BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "mxfp8": 1,
    "nvfp4": 0.5,
    "int8": 1,
}
# five products instead of two: the scores are computed again [arXiv 2205.14135,
# appendix B]
_FLASH_BACKWARD = 2.5
_MIRROR = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "copy",
    "copy": "all_reduce",
}


@dataclass(frozen=True)
class Precision:
    """In what a step computes and keeps."""

    operand_bytes: float | np.ndarray  # of the matrix products
    storage_bytes: (
        float | np.ndarray
    )  # of an activation, weight or gradient in memory and on the network

    @property
    def wide(self) -> Precision:
        """That of attention, heads and memory, which stay in 16 bits where the products
        have fewer.
        """
        return Precision(self.storage_bytes, self.storage_bytes)


@lru_cache(maxsize=32)
def precision(dtype: str) -> Precision:
    """Precision of a dtype. Raises ValueError for an unknown one.

    >>> precision("fp8").storage_bytes, precision("tf32").storage_bytes
    (2, 4)
    """
    return Precision(storage_bytes=BYTES[wide(dtype)], operand_bytes=BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Op:
    """Forward work of one device on one micro-batch."""

    name: str
    kind: str  # gemm, attention, pointwise or lookup
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    shape: tuple = ()  # (count, m, n, k) of products of (m, k) by (k, n)
    weights: bool = (
        False  # the second operand is a parameter: its gradient can be computed later
    )
    input_grad: bool = True  # False where nothing before needs one
    core: bool = False  # attention scores, which selective recompute repeats
    experts: bool = False  # of a mixture: one kernel for all of them
    # operands are those of heads and attention, not those of the other products
    wide: bool = False

    @property
    def traffic_bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True)
class Comm:
    """A collective among tp, cp, ep or dp devices. size_bytes: as in
    `rates.collectives`. copy: nothing moves.
    """

    kind: str
    group: str
    size_bytes: float


@dataclass(frozen=True)
class Block:
    """What is computed between two collectives: an embedding, a part of a layer, a
    head.
    """

    name: str
    ops: tuple[Op, ...]
    parameters: float = 0.0  # held by the device before data-parallel sharding
    # blocks of one unit are sharded and recomputed together; the block's own if empty
    unit: str = ""
    cost_key: tuple = ()  # of blocks that cost the same; empty: no other block does
    before: tuple[
        Comm, ...
        # collectives of the forward pass, whose mirror images the backward pass runs
    ] = ()
    after: tuple[Comm, ...] = ()
    reverse: tuple[tuple[Comm, ...], tuple[Comm, ...]] | None = (
        None  # those of the backward pass, if no mirror images
    )
    # keys and values that cp devices pass on while the block is computed in cp steps
    ring_bytes: float = 0.0
    expert: bool = (
        False  # its parameters are laid over the experts' data-parallel group
    )
    recomputed: bool = False  # by full recompute
    table: bool = False  # looked-up rows whose exchange only later blocks wait for
    beside: bool = False  # unless they are beside it

    def __post_init__(self):
        object.__setattr__(self, "unit", self.unit or self.name)

    @property
    def back(self) -> tuple[tuple[Comm, ...], tuple[Comm, ...]]:
        """Collectives before and after the backward pass."""
        return self.reverse or (mirror(self.after), mirror(self.before))


def wide(dtype: str) -> str:
    """What attention, heads and memory keep when matrix products run in 8 or 4 bit.
    Raises ValueError for others.
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(BYTES)}")
    return dtype if BYTES[dtype] >= 2 else "bf16"


def gemm(
    name: str, m, n, k, width: Precision, *, count=1.0, kind: str = "gemm", **flags
) -> Op:
    """`count` products of (m, k) by (k, n)."""
    flops = 2 * count * m * n * k
    read = count * (m * k + k * n) * width.operand_bytes
    written = count * m * n * width.storage_bytes
    return Op(name, kind, flops, read, written, (count, m, n, k), **flags)


def pointwise(
    name: str, read, written, width: Precision, *, kind: str = "pointwise", **flags
) -> Op:
    """Work that is all memory traffic; read and written in elements."""
    size = width.storage_bytes
    return Op(name, kind, 0.0, read * size, written * size, wide=True, **flags)


def attention(name: str, flops, read, written, width: Precision) -> Op:
    """Scores, softmax and weighted values in one kernel; read and written in elements."""
    size = width.storage_bytes
    return Op(
        name, "attention", flops, read * size, written * size, core=True, wide=True
    )


def backward(op: Op) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """What the backward pass of an op computes: (gradients of inputs, gradients of
    weights).

    A product becomes the products for its two operands: each computes and moves as much
    as it does itself, as every operand is read or written once by each of the three.
    Fused attention takes two and a half times its FLOPs; all else reads what it read
    and the gradient of what it wrote, and writes the gradient of what it read.
    """
    if op.shape:
        inputs = (op,) if op.input_grad else ()
        return (inputs, (op,)) if op.weights else ((op, op), ())
    core = op.kind == "attention"
    read = op.read_bytes + (1 + core) * op.written_bytes  # output and its gradient
    flops = _FLASH_BACKWARD * op.flops if core else op.flops
    return (replace(op, flops=flops, read_bytes=read, written_bytes=op.read_bytes),), ()


def mirror(comms: tuple[Comm, ...]) -> tuple[Comm, ...]:
    """The collectives of the backward pass in place of those of the forward pass, in
    their order.

    >>> mirror((Comm("copy", "tp", 8.0), Comm("all_gather", "cp", 8.0)))[0].kind
    'reduce_scatter'
    """
    return tuple(
        Comm(_MIRROR.get(comm.kind, comm.kind), comm.group, comm.size_bytes)
        for comm in reversed(comms)
    )


def phases(block: Block) -> Iterator[tuple[str, Op]]:
    """Ops of a block with their phase: forward, backward (gradients of inputs) or
    weight (gradients of weights).
    """
    for op in block.ops:
        yield "forward", op
    for op in reversed(block.ops):
        inputs, weights = backward(op)
        yield from (("backward", part) for part in inputs)
        yield from (("weight", part) for part in weights)
