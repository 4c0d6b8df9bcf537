"""What do the blocks of a transformer have in common? The work of a step, or of many: sizes, ends of blocks, products.

Amounts are per device and micro-batch: numbers for one step, arrays for many, where what a step does not have is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from madmax_lib.case import Case
from madmax_lib.plans import Plans
from madmax_lib.simulator.layers.ops import Comm, Op, Precision, gemm, pointwise, precision
from madmax_lib.simulator.layers.shape import Shape
from madmax_lib.simulator.rates.compute import Number

__all__ = ["HABITS", "Work", "existing", "has"]

HABITS = ("gathers_logits", "sums_rows")  # of software, of which the collectives of a block depend


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
        return cls(Shape.of(case.model), case.plan, case.sequence, precision(case.dtype), case.imbalance, *habits)

    @cached_property
    def tokens(self) -> Number:
        """Of one micro-batch on one device."""
        return self.plan.micro_batch * self.sequence / self.plan.cp

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
        parts = ("all_gather", "tp", self.moved_bytes * together), ("copy", "tp", self.moved_bytes * (1 - together))
        return existing(*parts)

    @cached_property
    def leave(self) -> tuple[Comm, ...]:
        """Collectives at its end."""
        together, moved = np.asarray(self.plan.sequence_parallel, float), self.moved_bytes
        return existing(("reduce_scatter", "tp", moved * together), ("all_reduce", "tp", moved * (1 - together)))

    def norm(self) -> Op:
        """Residual addition and normalisation in one kernel: two reads, one write."""
        elements = self.tokens * self.shape.hidden / self.spread
        return pointwise("norm", 2 * elements, elements, self.width)

    def mlp(self, tokens: Number, inner: Number, prefix: str = "", count: Number = 1, **flags) -> tuple[Op, Op, Op]:
        """Products and activation of a feed-forward block of `inner` channels; `count` equal ones share the tokens."""
        hidden, up, share = self.shape.hidden, 1 + self.shape.gated, tokens / np.maximum(count, 1)
        return (
            gemm(f"{prefix}up", share, up * inner, hidden, self.width, count=count, weights=True, **flags),
            pointwise(f"{prefix}activation", tokens * up * inner, tokens * inner, self.width, **flags),
            gemm(f"{prefix}down", share, hidden, inner, self.width, count=count, weights=True, **flags),
        )


def has(amount: Number) -> bool:
    """Whether there is any of it, in any of the steps."""
    return bool(amount.any() if isinstance(amount, np.ndarray) else amount)


def existing(*comms: tuple[str, str, Number]) -> tuple[Comm, ...]:
    """Collectives that move anything."""
    return tuple(Comm(*comm) for comm in comms if has(comm[2]))
