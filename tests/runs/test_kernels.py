"""bias + GELU in two ways against double precision."""

import itertools
import shutil

import numpy as np
import pytest
import torch

from madmax_lib.runs.model.kernels import bias_gelu, way


def gelu(u):
    """The closed form in float64 [arXiv 1606.08415]."""
    return 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 7), (1, 1)])
def test_eager_is_the_closed_form(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    bias = torch.randn(shape[-1], dtype=torch.float64)
    expected = gelu((x + bias).numpy())
    assert bias_gelu(x, bias).numpy() == pytest.approx(expected, abs=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own
@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler of C++")
def test_compiled_is_the_eager_one_in_double_precision():
    limits = {torch.float32: 1e-5, torch.bfloat16: 1e-1}
    for shape, (dtype, limit) in itertools.product(
        [(130, 40), (2, 3, 1500)], limits.items()
    ):
        torch.manual_seed(0)
        x, dy = (
            torch.randn(shape, dtype=dtype, requires_grad=True),
            torch.randn(shape, dtype=dtype),
        )
        bias = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
        y = bias_gelu(x, bias, fused=True)
        ours = (y, *torch.autograd.grad(y, (x, bias), dy))
        wide = [t.detach().double().requires_grad_() for t in (x, bias)]
        y = bias_gelu(*wide)
        exact = (y, *torch.autograd.grad(y, wide, dy.double()))
        for one, other in zip(ours, exact, strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            assert (one.double() - other).abs().max() <= limit * (
                1 + other.abs().max()
            ), (shape, dtype)


def test_why_nothing_is_fused_is_said(monkeypatch):
    assert way(False, "cuda") == "eager"
    assert way(True, "cpu") == "eager: a fused kernel is of use on a GPU"
    for found, says in (
        ("triton", "compiled"),
        (None, "eager: triton is not installed"),
    ):
        monkeypatch.setattr(
            "madmax_lib.runs.model.kernels.find_spec", lambda name, found=found: found
        )
        assert way(True, "cuda") == says


X = torch.zeros(2, 3)
WIDE = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        (X[:, 0], r"bias of shape \(2,\) does not fit x of shape \(2, 3\)"),
        (X[:1], "does not fit"),
        (WIDE, "x is torch.float32, bias is torch.float64"),
    ],
)
def test_bad_inputs_are_refused(bias, says):
    with pytest.raises(ValueError, match=says):
        bias_gelu(X, bias)
