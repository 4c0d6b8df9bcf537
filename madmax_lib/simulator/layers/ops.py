"""Operations, collectives and blocks: what a layer computes, moves and communicates,
forward and backward.

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

from madmax_lib.catalog import data_file, read_object

# of an element
BYTES = read_object(data_file("dtype_bytes.json"))
# five products instead of two: the scores are computed again [arXiv 2205.14135,
# appendix B]
_FLASH_BACKWARD = 2.5
# the gradient of what a collective gives goes the other way
_MIRROR = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "copy",
    "copy": "all_reduce",
}


@dataclass(frozen=True)
class Precision:
    """Bytes per element of what a step computes in and keeps."""

    operand_bytes: float | np.ndarray  # of the matrix products
    # of an activation, weight or gradient in memory and on the network
    storage_bytes: float | np.ndarray

    @property
    def wide(self) -> Precision:
        """Precision of everything but low-precision GEMMs: attention, heads and memory
        stay in 16 bits where products have fewer.
        """
        return Precision(self.storage_bytes, self.storage_bytes)


@lru_cache(maxsize=32)
def precision(dtype: str) -> Precision:
    """Precision of a dtype. Raises ValueError for an unknown one.

    >>> precision("fp8").storage_bytes, precision("tf32").storage_bytes
    (2, 4)
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(BYTES)}")
    # attention, heads and memory stay in 16 bits where products run in 8 or 4
    size = BYTES[dtype]
    return Precision(operand_bytes=size, storage_bytes=max(size, BYTES["bf16"]))


@dataclass(frozen=True, slots=True)
class Op:
    """Forward work of one device on one micro-batch."""

    name: str
    kind: str  # gemm, attention, pointwise, convolution, delta_rule or lookup
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    shape: tuple = ()  # (count, m, n, k) of products of (m, k) by (k, n)
    # the second operand is a parameter: its gradient can be computed later
    weights: bool = False
    input_grad: bool = True  # False where nothing before needs one
    core: bool = False  # attention scores, which selective recompute repeats
    experts: bool = False  # of a mixture: one kernel for all of them
    # 1 where the plan names a module of it to compute again
    again: float | np.ndarray = 0.0
    # operands are those of heads and attention, not those of the other products
    wide: bool = False

    @property
    def traffic_bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True)
class Comm:
    """A collective among tp, cp, ep or dp devices. size_bytes: as in
    `costs.link_prices`. copy: nothing moves.
    """

    kind: str
    group: str
    size_bytes: float


Comms = tuple[Comm, ...]


@dataclass(frozen=True)
class Block:
    """Work between two collectives: an embedding, a part of a layer, a head.

    >>> head = Block("head", (linear("logits", 1, 8, 4, precision("bf16")),))
    >>> [(phase, op.flops) for phase, op in phases(head)]
    [('forward', 64.0), ('backward', 64.0), ('weight', 64.0)]
    """

    name: str
    ops: tuple[Op, ...]
    parameters: float = 0.0  # held by the device before data-parallel sharding
    # blocks of one unit are sharded and recomputed together; the block's own if empty
    unit: str = ""
    cost_key: tuple = ()  # of blocks that cost the same; empty: no other block does
    # collectives of the forward pass, whose mirror images the backward pass runs
    before: Comms = ()
    after: Comms = ()
    # those of the backward pass, if no mirror images
    reverse: tuple[Comms, Comms] | None = None
    # keys and values that cp devices pass on while the block is computed in cp steps
    ring_bytes: float = 0.0
    # its parameters are laid over the experts' data-parallel group
    expert: bool = False
    recomputed: bool = False  # by full recompute
    # 1 where a module that the plan recomputes is all of it, with its collectives
    again: float | np.ndarray = 0.0
    table: bool = False  # looked-up rows whose exchange only later blocks wait for
    overlaps_table: bool = False  # is computed while those rows are exchanged

    def __post_init__(self):
        object.__setattr__(self, "unit", self.unit or self.name)

    @property
    def back(self) -> tuple[Comms, Comms]:
        """Collectives before and after the backward pass."""
        return self.reverse or (mirror(self.after), mirror(self.before))


def gemm(name: str, m, n, k, width: Precision, *, count=1.0, **fields) -> Op:
    """`count` products of (m, k) by (k, n); fields: further ones of `Op`.

    2 m n k FLOPs; every operand is read once, the result written once.
    """
    return Op(
        name,
        flops=2 * count * m * n * k,
        read_bytes=count * (m * k + k * n) * width.operand_bytes,
        written_bytes=count * m * n * width.storage_bytes,
        shape=(count, m, n, k),
        **{"kind": "gemm", **fields},
    )


def linear(name: str, tokens, outputs, inputs, width: Precision, **fields) -> Op:
    """The product of tokens with a weight of (inputs, outputs)."""
    return gemm(name, tokens, outputs, inputs, width, weights=True, **fields)


def pointwise(
    name: str, read, written, width: Precision, *, kind: str = "pointwise", **flags
) -> Op:
    """Work that is all memory traffic; read and written in elements."""
    size = width.storage_bytes
    return Op(name, kind, 0.0, read * size, written * size, wide=True, **flags)


def attention(name: str, flops, read, written, width: Precision) -> Op:
    """Scores, softmax and weighted values in one kernel; read and written in elements."""
    op = pointwise(name, read, written, width, kind="attention", core=True)
    return replace(op, flops=flops)


def scaled(op: Op, times: float | np.ndarray) -> Op:
    """An op in place of so many equal ones."""
    count, *sizes = op.shape or (1.0,)
    return replace(
        op,
        flops=times * op.flops,
        read_bytes=times * op.read_bytes,
        written_bytes=times * op.written_bytes,
        shape=(times * count, *sizes) if sizes else (),
    )


def backward(op: Op) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The ops of an op's backward pass: (gradients of inputs, gradients of weights), dgrad
    and wgrad.

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


def mirror(comms: Comms) -> Comms:
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
