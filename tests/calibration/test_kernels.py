"""Rates of kernels: those that a table was made with, and measured ones on rows left
out.
"""

import numpy as np
import pandas as pd
import pytest
from aiconfigurator import read_tables
from support import local_or_skip

from madmax_lib import catalog
from madmax_lib.base.collectives import bus_factor
from madmax_lib.calibration import fit_rates, held_out, kernel_errors, read_kernels
from madmax_lib.simulator import attention_s, collective_s, product_s

# goals: median relative error on rows left out, and twice that on a device left out
GOALS = {"bf16": 0.10, "fp8": 0.15, "fp8_block": 0.15, "nvfp4": 0.20}
ATTENTION, LARGE, SMALL = 0.15, 0.08, 0.15


def made_up(noise=0.0):
    """A table with shipped rates, of a device by another name."""
    rng = np.random.default_rng(0)
    sizes = 2 ** rng.integers(8, 15, (3, 200))
    m, n, k = sizes
    gemm = pd.DataFrame({"operation": "gemm", "dtype": "bf16", "m": m, "n": n, "k": k})
    gemm["seconds"] = product_s("h100-80", m, n, k)
    shape = {
        "batch": rng.integers(1, 9, 100),
        "sequence": 2 ** rng.integers(8, 14, 100),
        "heads": 2 ** rng.integers(3, 7, 100),
        "kv_heads": 8,
        "head_dim": rng.choice([64, 128, 256], 100),
    }
    core = pd.DataFrame({"operation": "attention", "dtype": "bf16", **shape})
    core["seconds"] = attention_s("h100-80", **shape)
    size_bytes = 2.0 ** np.arange(9, 30)
    link = pd.DataFrame({"operation": "all_gather", "size_bytes": size_bytes})
    link["seconds"] = collective_s("all_gather", size_bytes, "h100-80", 8)
    table = pd.concat([gemm, core, link.assign(ranks=8.0)], ignore_index=True)
    table["seconds"] *= np.exp(noise * rng.standard_normal(len(table)))
    return table.assign(device="h100-80", source="made up")


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.03, 0.06)])
def test_known_rates_are_found(noise, tolerance):
    from madmax_lib.catalog import table

    truth = table("kernel_rates", numbers=True).set_index(["operation", "device"])
    facts = fit_rates(made_up(noise))
    for _, fact in facts.iterrows():
        rows = truth.loc[[(fact["operation"], "h100-80")]]
        rows = rows[rows["ranks"].isna() | (rows["ranks"] == 8)]
        rows = rows[rows["dtype"].isna() | (rows["dtype"] == "bf16")]
        nearest = rows.iloc[(rows["latency_s"] - fact["latency_s"]).abs().argmin()]
        for name in ("flops_per_s", "bytes_per_s"):
            if np.isfinite(fact[name]):
                assert fact[name] == pytest.approx(nearest[name], rel=2 * tolerance)
        assert fact["spread"] <= tolerance
    assert kernel_errors(made_up(), facts).abs().median() <= tolerance


def test_a_bench_is_read(tmp_path):
    blocks = [(8192, 1280, 5120), (8192, 4096, 14336), (2048, 1024, 4096)]
    rows = [
        (f"linear{part} forward", "eager", f"{t}x{h}x{f}", product_s("h200", t, n, k))
        for t, h, f in blocks
        for part, n, k in (("", h, h), (" up", f, h), (" down", h, f))
    ]
    bench = pd.DataFrame(rows, columns=["kernel", "how", "shape", "median_s"])
    bench = bench.assign(machine="NVIDIA H200", dtype="bfloat16", moved_bytes=1.0)
    bench.loc[len(bench)] = ["copy", "device", "1024", 1e-6, "NVIDIA H200", "", 1.0]
    folder = tmp_path / "bench"
    folder.mkdir()
    bench.to_csv(folder / "kernels.csv", index=False)
    links = pd.DataFrame({"size_bytes": 2.0 ** np.arange(10, 30, 2)})
    seconds = collective_s("all_reduce", links["size_bytes"], "h200", 4)
    links = links.assign(collective="all_reduce", ranks=4, nodes=1, seconds=seconds)
    links = links.assign(machine="NVIDIA H200", dtype="bfloat16")
    links.to_csv(folder / "collectives.csv", index=False)
    facts = fit_rates(read_kernels([folder]))
    assert list(facts["device"].unique()) == ["h200"]
    assert set(facts["operation"]) == {"gemm", "all_reduce"}
    assert kernel_errors(read_kernels([folder]), facts).abs().median() < 0.05
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: column"):
        read_kernels([tmp_path / "other.csv"])


@pytest.fixture(scope="module")
def measured():
    folder = local_or_skip("kernels")
    names = ("gemm", "attention", "collectives")
    table = read_tables(folder / f"{name}.parquet" for name in names)
    out = held_out(table)
    return table[~out], table[out]


def goals(errors, rows):
    """Median error of each class of rows that has a goal, and the goal."""
    errors = errors.abs()
    large = (rows[["m", "n", "k"]] >= 1024).all(axis=1)
    for (device, dtype), part in errors[large].groupby([rows["device"], rows["dtype"]]):
        yield device, dtype, part.median(), GOALS[dtype]
    for device, part in errors[rows["operation"] == "attention"].groupby(
        rows["device"]
    ):
        yield device, "attention", part.median(), ATTENTION
    of_links = rows["ranks"].notna()
    size_bytes = rows["size_bytes"]
    for name, chosen, goal in (
        ("large", of_links & (size_bytes >= 4 * 2**20), LARGE),
        ("small", of_links & (size_bytes < 64 * 2**10), SMALL),
    ):
        for device, part in errors[chosen].groupby(rows["device"]):
            yield device, name, part.median(), goal


def test_rows_left_out_are_priced(measured):
    kept, rest = measured
    errors = kernel_errors(rest, fit_rates(kept))
    missed = [row for row in goals(errors, rest) if row[2] > row[3]]
    assert not missed


def test_a_device_left_out_is_priced_by_others(measured):
    """As one without rows. fp8_block is declared: its floor is the host's, which no
    other host tells.
    """
    kept, rest = measured
    facts = fit_rates(kept)
    missed = []
    for device in rest["device"].unique():
        mine = rest[(rest["device"] == device) & (rest["dtype"] != "fp8_block")]
        errors = kernel_errors(mine, facts[facts["device"] != device])
        missed += [row for row in goals(errors, mine) if row[2] > 2 * row[3]]
    assert not missed


@pytest.fixture(scope="module")
def scans():
    folder = local_or_skip("kernels")
    names = ("gated_delta_net", "mamba2")
    table = read_tables(folder / f"{name}.parquet" for name in names)
    out = held_out(table)
    return table[~out], table[out]


def test_scans_left_out_are_priced(scans):
    """To 2 to 5 %; L40S, whose caches hold small ones and whose delta rule is Triton's,
    to 19 %. Roofs of the data sheet are off by a factor of 1.3 to 8.
    """
    kept, rest = scans
    assert set(rest["operation"]) == {"convolution", "delta_rule"}
    assert "a100-80" not in set(rest["device"]), "8 TB/s through a memory of 2"
    facts = fit_rates(kept)
    errors = kernel_errors(rest, facts).abs()
    roofs = facts.assign(latency_s=0.0, issue_s=0.0, lost_depth=0.0, in_waves=0.0)
    for at, fact in facts.iterrows():
        device = catalog.device(fact["device"])
        roofs.loc[at, "flops_per_s"] = device.peak_flops["bf16"]
        roofs.loc[at, "bytes_per_s"] = device.memory_bandwidth_bytes_per_s
    on_paper = kernel_errors(rest, roofs).abs()
    for (_, device), part in errors.groupby([rest["operation"], rest["device"]]):
        assert part.median() < (0.2 if device == "l40s" else 0.06)
        assert on_paper[part.index].median() > (0.25 if device == "l40s" else 0.4)


@pytest.mark.parametrize("device", ["h100-80", "b200"])
def test_scans_of_a_device_left_out_are_priced_by_its_family(scans, device):
    kept, rest = scans
    facts = fit_rates(kept)
    mine = rest[rest["device"] == device]
    errors = kernel_errors(mine, facts[facts["device"] != device]).abs()
    assert errors.groupby(mine["operation"]).median().max() < 0.12


def test_bus_factors():
    assert [float(bus_factor(k, 8)) for k in ("all_reduce", "all_gather")] == [
        1.75,
        0.875,
    ]
