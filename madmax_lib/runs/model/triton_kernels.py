"""Bias + GELU as one Triton kernel forward and one backward: every tensor is read and
written once.

A program handles a tile of rows x columns, so neighbouring threads load neighbouring
elements (vector loads) and the bias is read once per tile. Sums run in fp32. tanh(u) =
2 sigmoid(2u) - 1, because Triton's core has no tanh. Tensors stand before constants:
the interpreter of Triton 3.7 and later cannot multiply a constant by a tensor.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton.jit looks once, below
_COLUMNS = 1024  # of a tile: 128 threads x 8 16-bit elements, one vector load each
_ROWS = tl.constexpr(4)  # of a tile
# A backward program walks over so many tiles, and sums the gradient of the bias on its
# way.
_TILES = tl.constexpr(16)
_CUBIC = tl.constexpr(0.044715)
_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)


class BiasGelu(torch.autograd.Function):
    """GELU(x + bias): x (..., n), bias (n,)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """y like x."""
        x = x.contiguous()
        bias = bias.contiguous()
        y = torch.empty_like(x)
        tiles = _tiles(x, _ROWS.value)
        _forward[tiles.grid](x, bias, y, tiles.rows, len(bias), COLUMNS=tiles.width)
        ctx.save_for_backward(x, bias)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        """Gradients of x and bias."""
        x, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid, rows, width = _tiles(x, _ROWS.value * _TILES.value)
        # sums over the rows of each program; adding them up afterwards gives the same
        # numbers every time, which atomics would not
        sums = torch.empty((grid[0], len(bias)), dtype=torch.float32, device=x.device)
        inputs = (x, bias, dy.contiguous())
        _backward[grid](inputs, (dx, sums), rows, len(bias), COLUMNS=width)
        return dx, sums.sum(0).to(bias.dtype)


class _Tiles(NamedTuple):
    grid: tuple[int, int]  # programs down the rows and along the columns
    rows: int  # of the tensor
    width: int  # columns of a program, a power of two


def _tiles(x, rows_per_program):
    columns = x.shape[-1]
    rows = x.numel() // columns
    width = min(_COLUMNS, triton.next_power_of_2(columns))
    down = triton.cdiv(rows, rows_per_program)
    across = triton.cdiv(columns, width)
    return _Tiles((down, across), rows, width)


@triton.jit
def _forward(x_ptr, bias_ptr, y_ptr, rows, columns, COLUMNS):
    first_row = tl.program_id(0) * _ROWS
    first_column = tl.program_id(1) * COLUMNS
    row = first_row + tl.arange(0, _ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    # (rows, 1) and (1, columns) make the tile; 64 bits, as a tensor may have 2^31 elements
    offsets = row[:, None].to(tl.int64) * columns + column[None, :]
    in_rows = row[:, None] < rows
    inside = in_rows & (column[None, :] < columns)
    in_row = column < columns
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    u = x.to(tl.float32) + bias.to(tl.float32)[None, :]
    # (1 + tanh(v)) / 2 = sigmoid(2 v)
    twice = (u + u * u * u * _CUBIC) * (2 * _SCALE)
    gate = tl.sigmoid(twice)
    y = (u * gate).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offsets, y, mask=inside)


@triton.jit
def _backward(inputs, outputs, rows, columns, COLUMNS):
    x_ptr, bias_ptr, dy_ptr = inputs
    dx_ptr, sums_ptr = outputs
    first_column = tl.program_id(1) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    in_row = column < columns
    bias = tl.load(bias_ptr + column, mask=in_row, other=0.0)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for tile in range(_TILES):
        first_row = (tl.program_id(0) * _TILES + tile) * _ROWS
        row = first_row + tl.arange(0, _ROWS)
        # the tile as in the forward pass
        offsets = row[:, None].to(tl.int64) * columns + column[None, :]
        in_rows = row[:, None] < rows
        inside = in_rows & (column[None, :] < columns)
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0)
        u = x.to(tl.float32) + bias.to(tl.float32)[None, :]
        twice = (u + u * u * u * _CUBIC) * (2 * _SCALE)
        gate = tl.sigmoid(twice)
        # d/du (u gate) = gate + u gate (1 - gate) d(twice)/du
        #   d(twice)/du = 2 sqrt(2/pi) (1 + 3 x 0.044715 u^2)
        steepness = (1 + u * u * (3 * _CUBIC)) * (2 * _SCALE)
        slope = gate + u * gate * (1 - gate) * steepness
        dx = dy.to(tl.float32) * slope
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        total += tl.sum(dx, axis=0)
    program = tl.program_id(0).to(tl.int64)
    tl.store(sums_ptr + program * columns + column, total, mask=in_row)
