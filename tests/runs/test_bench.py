"""Tables of timings whose numbers agree with each other, and collectives that the
simulator takes as they are.
"""

import os
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest
import torch

import madmax_lib as mm
from madmax_lib.runs import bench, measure_links
from madmax_lib.runs.measure import bench as benching, links
from madmax_lib.runs.testbed import command as command_of
from madmax_lib.simulator import MeasuredCollectives

pytestmark = pytest.mark.slow

BLOCK = (64, 128, 256)


@pytest.fixture
def small(monkeypatch):
    """One block, one size and few repeats of each."""
    sizes = {"_SIZES": {"quick": benching._Size(1, 0.0)}, "_BLOCKS": {"cpu": [BLOCK]}}
    sizes |= {"_COPY_BYTES": [2**16], "_PARAMETERS": [2**20 + 5]}
    for name, value in (sizes | {"_FLUSH_BYTES": {"cpu": 4096}}).items():
        monkeypatch.setattr(benching, name, value)
    benching._device_peaks.cache_clear()
    yield
    benching._device_peaks.cache_clear()


def test_rows_of_all_parts_agree_with_themselves(small, tmp_path):
    table = bench(size="quick", device="cpu", path=tmp_path / "kernels.csv")
    written = pd.read_csv(tmp_path / "kernels.csv")
    assert written.columns.tolist() == table.columns.tolist()
    assert len(written) == len(table)
    kernels = table["kernel"].str.replace(r" (forward|backward)", "", regex=True)
    assert set(kernels) == set(benching._PARTS)
    assert (table["low_s"] <= table["median_s"]).all()
    assert (table["median_s"] <= table["high_s"]).all()
    for amount, rate in {"flops": "flops_per_s", "moved_bytes": "bytes_per_s"}.items():
        expected = (table[amount] / table["median_s"]).tolist()
        assert table[rate].tolist() == pytest.approx(expected, nan_ok=True)
    assert (table["repeats"] == 3).all() and (table["peak_share"] >= 0).all()
    assert set(table["dtype"]) == {"fp32"}


def test_flops_and_bytes_are_closed_forms(small):
    parts = ("linear up", "attention", "bias_gelu", "mlp", "copy", "cpu adam")
    table = bench(parts, "quick", device="cpu").set_index(["kernel", "how"])
    tokens, hidden, ffn = BLOCK
    product = 2 * tokens * hidden * ffn
    # causal attention: half of the scores and of their product with the values
    flops = {
        "linear up forward": product,
        "linear up backward": 2 * product,
        "mlp forward": 2 * product,
        "attention forward": 4 * tokens**2 * hidden / 2,
    }
    # x and bias read, y written; backward x and dy read, dx and both biases
    moved = {
        ("bias_gelu forward", "eager"): 4 * (2 * tokens * ffn + ffn),
        ("bias_gelu backward", "eager"): 4 * (3 * tokens * ffn + 2 * ffn),
        ("copy", "host"): 2 * 2**16,
    }
    assert {name: table.loc[(name, "eager"), "flops"] for name in flops} == flops
    assert {name: table.loc[name, "moved_bytes"] for name in moved} == moved
    adam = table.loc["cpu adam"]["moved_bytes"].to_dict()
    assert adam == dict.fromkeys(("fused", "foreach", "for-loop"), 28 * (2**20 + 5))


def test_compiled_kernels_are_timed_in_a_fresh_process():
    """torch loads the module of their setting only when something is compiled."""
    code = "; ".join(
        [
            "import torch",
            "from madmax_lib.runs.measure import bench",
            "variants = bench._variants('bias_gelu', abs, 'normal')",
            "print(list(variants), torch._functorch.config.donated_buffer)",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[0] == "['eager', 'compiled'] False"


def test_every_way_of_adam_updates_every_parameter(small):
    """The first step of Adam moves each weight by the learning rate against its
    gradient's sign.
    """
    for work in benching._adam("cpu adam", "cpu", "quick"):
        tensors = work.run.__self__.param_groups[0]["params"]
        assert sum(tensor.numel() for tensor in tensors) == work.shape
        before = [tensor.detach().clone() for tensor in tensors]
        work.run()
        for tensor, old in zip(tensors, before, strict=True):
            sign = tensor.grad / (tensor.grad.abs() + 1e-8)
            expected = old * (1 - 1e-4 * 1e-2) - 1e-4 * sign
            assert torch.allclose(tensor.detach(), expected, atol=2e-6)


def test_a_part_that_fails_leaves_the_others(small, monkeypatch, tmp_path):
    def fail(*_):
        yield benching._Work("copy", partial(torch.ones, 2), "cpu")
        raise RuntimeError("CUDA out of memory\nmore")

    monkeypatch.setitem(benching._PARTS, "copy", fail)
    with pytest.warns(UserWarning, match="bench: copy fails here: CUDA out of memory$"):
        path = tmp_path / "kernels.csv"
        table = bench(["copy", "dropout"], "quick", device="cpu", path=path)
    assert table["kernel"].tolist() == ["copy", "dropout forward", "dropout backward"]
    assert len(pd.read_csv(tmp_path / "kernels.csv")) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ["gemms"]}, "part='gemms' is not one of"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"size": "x"}, "size="),
    ],
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bench(**{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("world", "on_node", "groups"),
    [
        (1, 1, []),
        (2, 2, [[[0, 1]]]),
        (3, 3, [[[0, 1]], [[0, 1, 2]]]),
        (4, 1, [[[0, 1], [2, 3]], [[0, 1, 2, 3]]]),
    ],
)
def test_groups_of_ranks(world, on_node, groups):
    assert links._groups(world, on_node) == groups


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "collectives.csv"
    assert measure_links(path, "quick", ranks=2) == 2
    return pd.read_csv(path)


def test_collectives_of_two_ranks_feed_the_simulator(collectives):
    kinds = ("all_gather", "all_reduce", "all_to_all", "broadcast", "gather")
    kinds += ("reduce_scatter", "send_recv")
    sizes = collectives.groupby("collective")["size_bytes"].apply(tuple).to_dict()
    assert sizes == dict.fromkeys(kinds, (4096, 16384, 65536, 262144, 1048576))
    assert (collectives[["ranks", "nodes"]] == [2, 1]).all(axis=None)
    assert set(collectives["backend"]) == {"gloo"}
    measured = MeasuredCollectives(collectives)
    row = collectives[collectives["collective"] == "all_reduce"].iloc[2]
    seconds = measured.seconds("all_reduce", 2, 1, row["size_bytes"])
    assert seconds == pytest.approx(row["seconds"])
    run = {"global_batch": 8, "sequence": 64, "dtype": "fp32"}
    cluster = mm.cluster("kaggle-2xt4")

    def total_s(seconds):
        table = collectives.assign(seconds=seconds)
        step = mm.simulate("gpt2-large", cluster, "dp2", **run, collectives=table)
        return mm.breakdown(step)["total_s"].max()

    assert total_s(100.0) > 100 > total_s(1e-6)


def test_ranks_that_do_not_answer_are_told(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match=r"2 ranks failed: .*Error"):
        measure_links(tmp_path / "no" / "such" / "folder.csv", "quick", ranks=2)
    command = command_of(3, "madmax_lib.runs.measure.links")
    assert command[-2:] == ["-m", "madmax_lib.runs.measure.links"]
    assert command[0] == sys.executable
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
