"""Bias + GELU as one Triton kernel forward and one backward: every tensor is read and
written once.

A program handles a tile of rows x columns, so neighbouring threads load neighbouring
elements (vector loads) and the bias is read once per tile. Sums run in fp32. tanh(u) =
2 sigmoid(2u) - 1, because Triton's core has no tanh. Tensors stand before constants:
the interpreter of Triton 3.7 and later cannot multiply a constant by a tensor.
"""

import os

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "BiasGelu"]

INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # triton.jit looks at it below, once
_COLUMNS = 1024  # of a tile: 128 threads x 8 16-bit elements, one vector load each
# a backward program walks over its rows and sums the gradient of the bias on its way
_ROWS = 4
_BACKWARD_ROWS = 64
# sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_SCALE = tl.constexpr(0.7978845608028654)


class BiasGelu(torch.autograd.Function):
    """GELU(x + bias): x (..., n), bias (n,)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """y like x."""
        x = x.contiguous()
        rows = x.numel() // x.shape[-1]
        columns = x.shape[-1]
        y = torch.empty_like(x)
        width = min(_COLUMNS, triton.next_power_of_2(columns))
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, width))
        _forward[grid](
            x, bias.contiguous(), y, rows, columns, ROWS=_ROWS, COLUMNS=width
        )
        ctx.save_for_backward(x, bias)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of x and bias."""
        x, bias = ctx.saved_tensors
        rows = x.numel() // x.shape[-1]
        columns = x.shape[-1]
        dx = torch.empty_like(x)
        width = min(_COLUMNS, triton.next_power_of_2(columns))
        grid = (triton.cdiv(rows, _BACKWARD_ROWS), triton.cdiv(columns, width))
        partial = torch.empty((grid[0], columns), dtype=torch.float32, device=x.device)
        tile = {"STEPS": _BACKWARD_ROWS // _ROWS, "ROWS": _ROWS, "COLUMNS": width}
        _backward[grid](
            x, bias.contiguous(), dy.contiguous(), dx, partial, rows, columns, **tile
        )
        return dx, partial.sum(0).to(bias.dtype)


@triton.jit
def _forward(
    x_ptr, bias_ptr, y_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    gate = tl.sigmoid((u + u * u * u * _CUBIC) * (2 * _SCALE))  # (1 + tanh) / 2
    tl.store(y_ptr + offsets, (u * gate).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr,
    bias_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    columns,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        offsets = row[:, None].to(tl.int64) * columns + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        u = (
            tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            + bias[None, :]
        )
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid((u + u * u * u * _CUBIC) * (2 * _SCALE))
        slope = gate + u * gate * (1 - gate) * (1 + u * u * (3 * _CUBIC)) * (2 * _SCALE)
        dx = dy * slope
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        total += tl.sum(dx, axis=0)
    tl.store(
        partial_ptr + tl.program_id(0).to(tl.int64) * columns + column,
        total,
        mask=column < columns,
    )
