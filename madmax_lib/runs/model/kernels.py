"""Bias + GELU: eager, or as one kernel forward and one backward, which torch compiles.

GELU with tanh [arXiv 1606.08415], where u = x + bias:

    y = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))

It is bound by memory: a fused forward pass reads x and writes y, a fused backward pass
reads x and dy and writes dx. Eager PyTorch writes u and reads it again.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """GELU of x + bias. x: (..., n), bias: (n,), same dtype and device; the result is
    like x and differentiable.

    fused: by TorchInductor, which makes a Triton kernel of it on a GPU. Raises
    ValueError for shapes that do not fit.
    """
    if bias.ndim != 1 or x.shape[-1:] != bias.shape:
        shape = tuple(x.shape)
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not fit x of shape {shape}"
        )
    if x.dtype != bias.dtype:
        raise ValueError(f"x is {x.dtype}, bias is {bias.dtype}: they must be alike")
    return _compiled()(x, bias) if fused else _bias_gelu(x, bias)


def _bias_gelu(x, bias):
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


@lru_cache
def _compiled():
    # one for all layers: each shape is compiled once
    return torch.compile(_bias_gelu)


def way(fused: bool, device: str) -> str:
    """Function that computes a model's bias + GELU on a device: compiled if asked for,
    else eager and, if it was asked for, why.
    """
    if not fused:
        return "eager"
    if device == "cpu":
        return "eager: a fused kernel is of use on a GPU"
    return "compiled" if find_spec("triton") else "eager: triton is not installed"
