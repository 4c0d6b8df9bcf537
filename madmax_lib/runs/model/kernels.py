"""Bias + GELU: eager, compiled or as one Triton kernel, forward and backward.

GELU with tanh [arXiv 1606.08415], where u = x + bias:

    y = u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))

It is bound by memory: a fused forward pass reads x and writes y, a fused backward pass
reads x and dy and writes dx. Eager PyTorch writes u and reads it again.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch

__all__ = ["bias_gelu", "unavailable", "way"]

_HOWS = ("eager", "compiled", "triton")


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, how: str = "eager") -> torch.Tensor:
    """GELU of x + bias. x: (..., n), bias: (n,), same dtype and device; the result is
    like x and differentiable.

    how: eager; compiled (torch.compile, the first call of a shape takes seconds);
    triton (a GPU, or a CPU with TRITON_INTERPRET=1). Raises ValueError for another
    `how` or shapes that do not fit, ModuleNotFoundError without triton.
    """
    if bias.ndim != 1 or x.shape[-1:] != bias.shape:
        shape = tuple(x.shape)
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not fit x of shape {shape}"
        )
    if x.dtype != bias.dtype:
        raise ValueError(f"x is {x.dtype}, bias is {bias.dtype}: they must be alike")
    # a call of the cached function would end a compiled graph around it
    return _eager(x, bias) if how == "eager" else _function(how)(x, bias)


def unavailable(how: str, device: str) -> str:
    """Reason why this way cannot be taken on a device (cpu or cuda), empty if it can. Raises
    ValueError for another `how`.
    """
    if how not in _HOWS:
        raise ValueError(f"how={how!r} is not one of {', '.join(_HOWS)}")
    if how != "triton":
        return ""
    if find_spec("triton") is None:
        return "triton is not installed"
    from madmax_lib.runs.model import triton_kernels

    runs = device != "cpu" or triton_kernels.INTERPRETED
    return "" if runs else "Triton needs a GPU, or TRITON_INTERPRET=1"


def way(fused: bool, device: str) -> str:
    """Function that computes a model's bias + GELU on a device: triton if asked for,
    else eager and, if it was asked for, why.
    """
    if not fused:
        return "eager"
    reason = unavailable("triton", device)
    return f"eager: {reason}" if reason else "triton"


@lru_cache(maxsize=len(_HOWS))  # a compiled function remembers what it compiled
def _function(how):
    if reason := unavailable(how, "cuda"):
        raise ModuleNotFoundError(
            f"bias_gelu(how={how!r}): {reason}; pip install triton"
        )
    if how != "triton":
        return torch.compile(_eager) if how == "compiled" else _eager
    from madmax_lib.runs.model.triton_kernels import BiasGelu

    return BiasGelu.apply


def _eager(x, bias):
    return torch.nn.functional.gelu(x + bias, approximate="tanh")
