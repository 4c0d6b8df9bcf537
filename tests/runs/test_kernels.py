"""bias + GELU in two ways against double precision."""

import numpy as np
import pytest
import torch

from madmax_lib.runs import RunSpec, parallelize
from madmax_lib.runs.model.layers import bias_gelu

# torch warns of its own parts where it compiles
pytestmark = pytest.mark.filterwarnings("ignore")
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LIMITS)
def test_fused_is_as_exact_as_its_numbers(dtype):
    torch.manual_seed(0)
    fused = torch.compile(bias_gelu)
    for shape in ((3, 5), (2, 3, 1500)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        bias = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
        dy = torch.randn(shape, dtype=dtype)
        y = fused(x, bias)
        ours = (y, *torch.autograd.grad(y, (x, bias), dy))
        wide = [t.detach().double().requires_grad_() for t in (x, bias)]
        y = bias_gelu(*wide)
        exact = (y, *torch.autograd.grad(y, wide, dy.double()))
        for one, other in zip(ours, exact, strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            most = LIMITS[dtype] * (1 + other.abs().max())
            assert (one.double() - other).abs().max() <= most


@pytest.mark.slow
def test_a_step_with_fused_gelu_is_the_eager_one():
    specs = [
        RunSpec("gpt2-large", global_batch=2, fused_gelu=fused)
        for fused in (False, True)
    ]
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 264}
    sizes |= {"sequence": 16}
    jobs = [parallelize(spec.model, spec.plan, spec, sizes=sizes) for spec in specs]
    assert [job.describe()["gelu"] for job in jobs] == ["eager", "compiled"]
    batch = dict.fromkeys(("tokens", "targets"), torch.arange(32).view(2, 16))
    losses = [[job.step(batch)["loss"] for job in jobs] for _ in range(3)]
    assert all(abs(alone - fused) < 1e-5 for alone, fused in losses)
    assert len({pair[0] for pair in losses}) == 3
