"""The bench of a host, which is a script: every way of Adam is Adam, and the numbers of its table agree."""

import runpy
import sys

import pandas as pd
import pytest
import torch

from madmax_lib.datasets import PROJECT

SCRIPT = PROJECT / "benchmarks" / "host.py"


@pytest.fixture(scope="module")
def host():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("how", ["fused", "foreach", "for-loop"])
def test_adam_updates_every_parameter(host, how):
    """The first steps of Adam move each weight by the learning rate against its gradient's sign."""
    optimizer = host["adam"](2**20 + 5, **host["ADAMS"][how])
    tensors = optimizer.param_groups[0]["params"]
    assert sum(tensor.numel() for tensor in tensors) == 2**20 + 5
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer.step()
    for tensor, old in zip(tensors, before, strict=True):
        step = tensor.detach() - old * (1 - 1e-4 * 1e-2)  # without weight decay
        expected = -1e-4 * tensor.grad / (tensor.grad.abs() + 1e-8)
        assert torch.allclose(step, expected, atol=2e-6)


def test_the_whole_table_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "host.csv"), "--quick"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    table = pd.read_csv(tmp_path / "host.csv")
    moved = {("cpu adam", "fused"): 28, ("host memory", "copy"): 2, ("host memory", "triad"): 3}
    for (what, how), share in moved.items():
        part = table[(table["what"] == what) & (table["how"] == how)]
        assert part["size"].tolist() == [2**16, 2**18] and (part["moved_bytes"] == share * part["size"]).all()
    assert (table["low_s"] <= table["median_s"]).all() and (table["median_s"] <= table["high_s"]).all()
    assert table["bytes_per_s"].to_numpy() == pytest.approx((table["moved_bytes"] / table["median_s"]).to_numpy(), 1e-4)
    assert "cpu adam" in capsys.readouterr().out
