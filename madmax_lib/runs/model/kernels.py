"""Bias + GELU: eager, or as one Triton kernel, forward and backward.

GELU with tanh [arXiv 1606.08415], where u = x + bias:

    y = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))

It is bound by memory: a fused forward pass reads x and writes y, a fused backward pass
reads x and dy and writes dx. Eager PyTorch writes u and reads it again.
"""

from importlib.util import find_spec

import torch


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """GELU of x + bias. x: (..., n), bias: (n,), same dtype and device; the result is
    like x and differentiable.

    fused: by Triton, on a GPU, or on a CPU with TRITON_INTERPRET=1. Raises ValueError
    for shapes that do not fit, ModuleNotFoundError without triton.
    """
    if bias.ndim != 1 or x.shape[-1:] != bias.shape:
        shape = tuple(x.shape)
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not fit x of shape {shape}"
        )
    if x.dtype != bias.dtype:
        raise ValueError(f"x is {x.dtype}, bias is {bias.dtype}: they must be alike")
    if not fused:
        return torch.nn.functional.gelu(x + bias, approximate="tanh")
    # late: the package is optional
    from madmax_lib.runs.model.triton_kernels import BiasGelu

    return BiasGelu.apply(x, bias)


def way(fused: bool, device: str) -> str:
    """Function that computes a model's bias + GELU on a device: triton if asked for,
    else eager and, if it was asked for, why.
    """
    if not fused:
        return "eager"
    if find_spec("triton") is None:
        return "eager: triton is not installed"
    from madmax_lib.runs.model import triton_kernels

    if device == "cpu" and not triton_kernels.INTERPRETED:
        return "eager: Triton needs a GPU, or TRITON_INTERPRET=1"
    return "triton"
