"""bias + GELU in three ways against double precision, and tables of timings whose numbers agree with each other."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from madmax_lib.runs.measure import microbench  # noqa: E402
from madmax_lib.runs.model.kernels import bias_gelu, moved_bytes, unavailable  # noqa: E402

SMALL = {"repeats": 2, "warmup": 1, "flush": False}
NO_TRITON = importlib.util.find_spec("triton") is None
INTERPRET = """
import itertools, torch
from madmax_lib.runs.model.kernels import bias_gelu, unavailable
assert not unavailable("triton", "cpu")
limits = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
for shape, (dtype, limit) in itertools.product([(3, 5), (130, 40), (2, 3, 1500), (1, 1)], limits.items()):
    torch.manual_seed(0)
    x, dy = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
    bias = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
    y = bias_gelu(x, bias, "triton")
    found = (y, *torch.autograd.grad(y, (x, bias), dy))
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    y = bias_gelu(*wide)
    for ours, exact in zip(found, (y, *torch.autograd.grad(y, wide, dy.double()))):
        assert ours.dtype == dtype and ours.shape == exact.shape
        assert (ours.double() - exact).abs().max() <= limit * (1 + exact.abs().max()), (shape, dtype)
"""


def gelu(u):
    """The closed form in float64 [arXiv 1606.08415]."""
    return 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 7), (1, 1)])
def test_eager_is_the_closed_form(shape):
    torch.manual_seed(0)
    x, bias = torch.randn(shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    assert bias_gelu(x, bias).numpy() == pytest.approx(gelu((x + bias).numpy()), abs=1e-12)


def test_gradients_are_differences():
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bias_gelu, (x, bias))


@pytest.mark.skipif(NO_TRITON, reason="triton is not installed: pip install triton")
def test_triton_under_its_interpreter():
    """In a process of its own: triton decides when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not NO_TRITON, reason="triton is installed")
def test_triton_that_is_missing_is_said():
    with pytest.raises(ModuleNotFoundError, match="needs triton"):
        bias_gelu(torch.zeros(2, 2), torch.zeros(2), "triton")
    assert unavailable("triton", "cpu") == "triton is not installed"


@pytest.mark.parametrize(
    ("x", "bias", "how", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2), "eager", r"bias of shape \(2,\) does not fit x of shape \(2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(1, 3), "eager", "does not fit"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.float64), "eager", "x is torch.float32, bias is torch.float64"),
        (torch.zeros(2, 3), torch.zeros(3), "cuda", "how='cuda' is not one of eager, compiled, triton"),
    ],
)
def test_bad_inputs_are_refused(x, bias, how, message):
    with pytest.raises(ValueError, match=message):
        bias_gelu(x, bias, how)


@pytest.mark.parametrize(("direction", "tensors"), [("forward", 2), ("backward", 3)])
def test_bytes_of_a_fused_pass(direction, tensors):
    assert moved_bytes(torch.zeros(8, 16, dtype=torch.bfloat16), direction) == tensors * 8 * 16 * 2


def check(table):
    """What must hold for any table of timings."""
    assert list(table.columns) == list(microbench.COLUMNS)
    assert (table["low_s"] <= table["median_s"]).all() and (table["median_s"] <= table["high_s"]).all()
    assert (table["flops_per_s"] * table["median_s"]).tolist() == pytest.approx(table["flops"].tolist())
    known = table["moved_bytes"].notna()
    moved = (table["bytes_per_s"] * table["median_s"])[known]
    assert moved.tolist() == pytest.approx(table.loc[known, "moved_bytes"].tolist())
    assert table["machine"].str.len().min() > 3 and (table["repeats"] == 2).all()


def test_tables_of_the_cpu():
    table = microbench.sweep("cpu", quick=True, **SMALL)
    check(table)
    assert set(table["kernel"]) == {"bias_gelu forward", "bias_gelu backward", "linear up", "linear down", "dropout",
                                    "mlp", "gemm"}  # fmt: skip
    product = table[table["kernel"] == "gemm"].iloc[0]
    assert product["flops"] == 2 * 128**3 and product["moved_bytes"] == 3 * 128**2 * 4
    whole = table[table["kernel"] == "mlp"]["flops"].iloc[0]
    assert whole == table[table["kernel"].isin(["linear up", "linear down"])]["flops"].sum()
    assert set(table["machine"].str[:4]) == {"CPU "}


@pytest.mark.parametrize(("options", "message"), [({"repeats": 0}, "repeats=0"), ({"device": "tpu"}, "device='tpu'")])
def test_bad_requests_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        microbench.gemm_table(**{"device": "cpu", "shapes": ((4, 4, 4),), **options})


def test_collectives_need_a_process_group():
    with pytest.raises(RuntimeError, match="start with torchrun"):
        microbench.collective_table("cpu")


def test_saved_tables_are_read_back(tmp_path):
    table = microbench.gemm_table("cpu", shapes=((4, 8, 2),), **SMALL)
    path = microbench.save(table, tmp_path / "kernels.csv")
    again = pd.read_csv(path)
    assert again[["kernel", "rows", "inner", "columns", "flops"]].iloc[0].tolist() == ["gemm", 4, 8, 2, 128]


def test_collectives_of_two_ranks(tmp_path):
    """A process per rank under torchrun; bytes on the wire are those of a ring."""
    script = tmp_path / "two.py"
    script.write_text(
        "import torch.distributed as dist\nfrom madmax_lib.runs import microbench\n"
        "dist.init_process_group('gloo')\n"
        "table = microbench.collective_table('cpu', sizes=(4096, 16384), repeats=2, warmup=1)\n"
        f"if dist.get_rank() == 0: microbench.save(table, {str(tmp_path / 'two.csv')!r})\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "two.csv").set_index(["kernel", "columns"])
    wire = table["wire_bytes"].unstack()
    assert wire.loc["all_reduce"].tolist() == [4096, 16384]
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert wire.loc[kind].tolist() == [2048, 8192]
    assert (table["ranks"] == 2).all() and (table["how"] == "gloo").all()


def test_unknown_ways_are_refused():
    with pytest.raises(ValueError, match="how='jit'"):
        unavailable("jit", "cpu")
