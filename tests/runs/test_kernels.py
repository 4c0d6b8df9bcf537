"""bias + GELU in two ways against double precision."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from madmax_lib.runs.model.kernels import bias_gelu, way

NO_TRITON = importlib.util.find_spec("triton") is None
INTERPRET = """
import itertools, torch
from madmax_lib.runs.model.kernels import bias_gelu, way
assert way(True, "cpu") == "triton"
limits = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
for shape, (dtype, limit) in itertools.product([(3, 5), (130, 40), (2, 3, 1500), (1, 1)], limits.items()):
    torch.manual_seed(0)
    x, dy = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
    bias = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
    y = bias_gelu(x, bias, fused=True)
    ours = (y, *torch.autograd.grad(y, (x, bias), dy))
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    y = bias_gelu(*wide)
    for one, exact in zip(ours, (y, *torch.autograd.grad(y, wide, dy.double()))):
        assert one.dtype == dtype and one.shape == exact.shape
        assert (one.double() - exact).abs().max() <= limit * (1 + exact.abs().max()), (shape, dtype)

from madmax_lib.runs import RunSpec, parallelize
specs = [RunSpec("gpt2-large", global_batch=2, fused_gelu=fused) for fused in (False, True)]
sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 264, "sequence": 16}
jobs = [parallelize(spec.model, spec.plan, spec, sizes=sizes) for spec in specs]
assert [job.describe()["gelu"] for job in jobs] == ["eager", "triton"]
batch = dict.fromkeys(("tokens", "targets"), torch.arange(32).view(2, 16))
losses = [[job.step(batch)["loss"] for job in jobs] for _ in range(3)]
assert all(abs(alone - fused) < 1e-5 for alone, fused in losses) and len({pair[0] for pair in losses}) == 3
"""


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


@pytest.mark.skipif(NO_TRITON, reason="triton is not installed: pip install triton")
def test_triton_under_its_interpreter():
    """In a process of its own: triton decides when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INTERPRET]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not NO_TRITON, reason="triton is installed")
def test_triton_that_is_missing_is_said():
    with pytest.raises(ModuleNotFoundError, match="No module named 'triton'"):
        bias_gelu(torch.zeros(2, 2), torch.zeros(2), fused=True)
    assert way(True, "cpu") == "eager: triton is not installed"


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
