"""The audit of the GPT-2 Large study: its MFU to the last digit, the short batch, the
split of the data, memory.
"""

import pytest

from madmax_lib import catalog
from madmax_lib.papers.studies import hybrid

GPT2 = catalog.model("gpt2-large")


@pytest.mark.parametrize(
    ("samples", "ranks", "batch", "interval", "window"),
    [
        (5000, 4, 8, 10, (157, 7, 2, 56 / 50)),
        (5000, 4, 32, 10, (40, 10, 2, 320 / 290)),
        (5000, 2, 8, 10, (313, 3, 4, 24 / 20)),
        (1024, 1, 8, 10, (128, 8, 8, 1.0)),  # no short batch
        (40, 1, 8, 10, (5, 5, 8, 1.0)),  # an epoch within one interval
        (3, 1, 8, 10, (1, 1, 3, 8 / 3)),  # one short batch is all
    ],
)
def test_window_of_an_epoch(samples, ranks, batch, interval, window):
    assert hybrid._log_window(samples, ranks, batch, interval) == pytest.approx(window)


def test_the_script_counts_half_of_the_attention():
    flops = hybrid._script_flops(GPT2, 1024)
    assert 3 * GPT2.forward_flops(1, 1024) / flops == pytest.approx(1.0576, abs=1e-4)
    assert hybrid._script_flops(GPT2, 1024, tp=2) / flops == pytest.approx(
        0.54, abs=0.005
    )


def test_reported_mfu_is_reproduced_in_all_rows():
    rows = hybrid.audit()
    assert len(rows) == 6
    assert ((rows["mfu_reproduced"] - rows["mfu_reported"]).abs() <= 0.06e-2).all()
    # without the short last batch none of them is
    assert ((rows["mfu_window"] - rows["mfu_reported"]).abs() > 1.9e-2).all()


@pytest.mark.parametrize(
    ("config", "batch", "mfu_window", "tokens_per_s_wall", "mfu_wall"),
    [
        ("ddp", 8, 29.62, 67569, 26.64),
        ("zero3", 8, 17.72, 46712, 18.42),
        ("zero3+tp2", 8, 16.99, 44095, 17.39),
        ("zero3+tp2+cuda_fused", 8, 16.86, 43384, 17.11),
        ("zero3+tp2", 32, 47.71, 109764, 43.28),
        ("zero3+tp2+cuda_fused", 32, 46.81, 107458, 42.37),
    ],
)
def test_corrected_values(config, batch, mfu_window, tokens_per_s_wall, mfu_wall):
    """Worked out by hand from the reported tokens/s and seconds; useful tokens are half
    of those under TP 2.
    """
    rows = hybrid.audit()
    row = rows[(rows["config"] == config) & (rows["batch_per_gpu"] == batch)].iloc[0]
    assert 100 * row["mfu_window"] == pytest.approx(mfu_window, abs=0.01)
    assert 100 * row["mfu_wall"] == pytest.approx(mfu_wall, abs=0.01)
    share = 2 if "tp2" in config else 1
    assert row["useful_tokens_per_s"] * share == pytest.approx(tokens_per_s_wall, abs=1)
    assert row["mfu_corrected"] * share == pytest.approx(
        row["mfu_wall"] * 1.0576, rel=1e-3
    )


def test_only_a_four_way_split_reads_as_reported():
    table = hybrid.splits()
    four, two = (table[table["data_ranks"] == ranks] for ranks in (4, 2))
    assert len(four) == len(two) == 4
    assert (four["error"].abs() <= 0.06e-2).all()
    assert (two["error"].abs() >= 0.14e-2).all() and two["error"].max() > 1.3e-2


def test_memory_rows():
    """Within 10 %, but for the two rows of batch 32, whose logits the memory model
    counts too large.
    """
    rows = hybrid.memory_rows()
    large = rows["batch_per_gpu"] == 32
    assert (rows.loc[~large, "error"].abs() <= 0.1).all()
    assert (rows.loc[large, "error"].abs() <= 0.14).all()


def test_what_a_tp_peer_held():
    assert hybrid._local_model(2).parameters / 1e9 == pytest.approx(0.4197, abs=5e-4)
    assert hybrid._local_model(1).parameters == GPT2.parameters


def test_kernels_beside_the_memory_bandwidth():
    """GB/s as the study gives them; the ideal is a read and a write at full bandwidth."""
    table = hybrid.gelu()
    for kernel in ("unfused", "fused"):
        ours, theirs = table[f"{kernel}_bytes_per_s"] / 1e9, table[f"{kernel}_gb_per_s"]
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=2e-3)
    ideal_ms = 4 * 8 * 1024 * 5120 / 1555e9 * 1e3
    assert table["ideal_ms"].iloc[-1] == pytest.approx(ideal_ms)
    assert table["fused_share"].tolist() == pytest.approx(
        (table["ideal_ms"] / table["fused_ms"]).tolist()
    )
    assert table["in_cache"].tolist() == [True, True, False]


def test_breakdown_of_the_mlp():
    table = hybrid.mlp().set_index("name")
    assert (table["flops_per_s"].dropna() / 1e12).round(1).tolist() == [179.2, 240.9]
    assert table["share"].drop("full mlp").sum() == pytest.approx(0.99, abs=0.005)
