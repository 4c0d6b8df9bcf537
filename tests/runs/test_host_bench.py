"""Timings of the host whose numbers agree with each other, and the same losses with and without offload."""

import pytest

torch = pytest.importorskip("torch")

from madmax_lib.runs.measure import host_bench  # noqa: E402
from madmax_lib.runs.read import COLUMNS  # noqa: E402
from madmax_lib.runs.spec import RunSpec  # noqa: E402

SMALL = {"repeats": 2, "warmup": 1, "flush": False}


def check(table):
    assert tuple(table.columns) == host_bench.COLUMNS and (table["threads"] >= 1).all()
    assert (table["low_s"] <= table["median_s"]).all() and (table["median_s"] <= table["high_s"]).all()
    assert table["bytes_per_s"].to_numpy() == pytest.approx((table["moved_bytes"] / table["median_s"]).to_numpy())


def test_adam_in_all_ways_and_sizes():
    table = host_bench.adam_table((1000, 2**20 + 5), **SMALL)
    check(table)
    assert set(table["how"]) == set(host_bench.ADAMS) and table["size"].tolist() == 3 * [1000, 2**20 + 5]
    assert (table["moved_bytes"] == 28 * table["size"]).all()


@pytest.mark.parametrize("how", host_bench.ADAMS)
def test_adam_updates_every_parameter(how):
    """The first steps of Adam move each weight by the learning rate against its gradient's sign."""
    optimizer = host_bench._adam(2**20 + 5, **host_bench.ADAMS[how])
    tensors = optimizer.param_groups[0]["params"]
    assert sum(tensor.numel() for tensor in tensors) == 2**20 + 5
    before = [tensor.detach().clone() for tensor in tensors]
    optimizer.step()
    for tensor, old in zip(tensors, before, strict=True):
        step = tensor.detach() - old * (1 - 1e-4 * 1e-2)  # without weight decay
        expected = -1e-4 * tensor.grad / (tensor.grad.abs() + 1e-8)
        assert torch.allclose(step, expected, atol=2e-6)


def test_memory_bandwidth():
    table = host_bench.bandwidth_table((2**12, 2**16), **SMALL)
    check(table)
    assert table["moved_bytes"].tolist() == [2 * 2**12, 3 * 2**12, 2 * 2**16, 3 * 2**16]


def test_the_whole_table_is_written(tmp_path):
    table = host_bench.host_table(quick=True, **SMALL)
    check(table)
    assert {"host memory", "cpu adam"} <= set(table["what"])
    assert host_bench.save(table, tmp_path / "host.csv").read_text().count("\n") == len(table) + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_copies_need_a_device():
    with pytest.raises(RuntimeError, match="copies to a device need a GPU"):
        host_bench.link_table()


def test_a_strategy_with_offload_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be without offload"):
        host_bench.offload_check(RunSpec(strategy="dp2.z3.offload-all"), tmp_path)


def test_offload_is_compared_step_by_step(tmp_path, monkeypatch):
    """Two runs of the same spec but for the offload; test_runs_parallel compares FSDP2's losses."""
    strategies = []

    def launched(spec, directory):
        strategies.append(spec.strategy)
        directory.mkdir()
        extra = 0.5 * (len(strategies) - 1)
        rows = [",".join(COLUMNS) + "\n"]
        for step, loss in enumerate((3.0, 2.0)):
            values = {"step": step, "loss": loss, "total_s": 1.0 + extra, "samples": 8, "tokens": 64, "overflow": 0}
            rows.append(",".join(str(values.get(name, "")) for name in COLUMNS) + "\n")
        (directory / "steps.csv").write_text("".join(rows))
        return directory

    monkeypatch.setattr(host_bench, "launch", launched)
    table = host_bench.offload_check(RunSpec(model="gpt_tiny", strategy="dp2.z3", steps=2), tmp_path)
    assert strategies == ["dp2.z3", "dp2.z3.offload-all"]
    assert table["loss"].tolist() == table["offloaded_loss"].tolist() == [3.0, 2.0]
    assert table["offloaded_s"].tolist() == [1.5, 1.5] and table["step_s"].tolist() == [1.0, 1.0]
