"""Tables of timings whose numbers agree with each other, and a ring's bytes on the wire."""

import os
import subprocess
import sys

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from madmax_lib.runs.measure import microbench  # noqa: E402

SMALL = {"repeats": 2, "warmup": 1, "flush": False}


def test_tables_of_the_cpu():
    tables = [
        microbench.gelu_table("cpu", shapes=((256, 512),), compiled=False, **SMALL),
        microbench.mlp_table("cpu", sizes=(256, 128, 512), compiled=False, **SMALL),
        microbench.gemm_table("cpu", shapes=((128, 128, 128),), **SMALL),
    ]
    assert tables[0].dtypes.equals(tables[1].dtypes) and tables[1].dtypes.equals(tables[2].dtypes)
    table = pd.concat(tables, ignore_index=True)
    assert (table["low_s"] <= table["median_s"]).all() and (table["median_s"] <= table["high_s"]).all()
    assert (table["flops_per_s"] * table["median_s"]).tolist() == pytest.approx(table["flops"].tolist())
    assert (table["bytes_per_s"] * table["median_s"]).tolist() == pytest.approx(table["moved_bytes"].tolist())
    assert table["machine"].str.startswith("CPU ").all() and (table["repeats"] == 2).all()
    linears = ["linear up", "linear down"]
    assert set(table["kernel"]) == {"bias_gelu forward", "bias_gelu backward", *linears, "dropout", "mlp", "gemm"}
    product = table[table["kernel"] == "gemm"].iloc[0]
    assert product["flops"] == 2 * 128**3 and product["moved_bytes"] == 3 * 128**2 * 4
    whole = table[table["kernel"] == "mlp"]["flops"].iloc[0]
    assert whole == table[table["kernel"].isin(linears)]["flops"].sum()


def test_the_sweep_is_all_tables(monkeypatch, tmp_path, capsys):
    """As a script, which writes them."""
    for name, column in {"gelu_table": "a", "mlp_table": "b", "gemm_table": "c"}.items():
        monkeypatch.setattr(microbench, name, lambda device, column=column: pd.DataFrame({column: [1.0]}))
    microbench._main(str(tmp_path / "kernels.csv"))
    assert pd.read_csv(tmp_path / "kernels.csv").columns.tolist() == ["a", "b", "c"]
    assert "kernels.csv" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "message"), [({"repeats": 0}, "repeats=0"), ({"device": "tpu"}, "device='tpu'")])
def test_bad_requests_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        microbench.gemm_table(**{"device": "cpu", "shapes": ((4, 4, 4),), **options})


def test_collectives_need_a_process_group():
    with pytest.raises(RuntimeError, match="start with torchrun"):
        microbench.collective_table("cpu")


def test_collectives_of_two_ranks(tmp_path):
    """A process per rank under torchrun; bytes on the wire are those of a ring."""
    script = tmp_path / "two.py"
    script.write_text(
        "import torch.distributed as dist\nfrom madmax_lib.runs.measure import microbench\n"
        "dist.init_process_group('gloo')\n"
        "table = microbench.collective_table('cpu', sizes=(4096, 16384), repeats=2, warmup=1)\n"
        f"if dist.get_rank() == 0: table.to_csv({str(tmp_path / 'two.csv')!r})\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "two.csv").set_index(["kernel", "columns"])
    wire = table["wire_bytes"].unstack()
    assert wire.loc["all_reduce"].tolist() == [4096, 16384]
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert wire.loc[kind].tolist() == [2048, 8192]
    assert (table["ranks"] == 2).all() and (table["how"] == "gloo").all()
