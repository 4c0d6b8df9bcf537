"""Published rows become normalised rows: one out per row in, defaults by rule, contradictions named."""

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip

from madmax_lib import catalog
from madmax_lib.calibration.consistency import measured_s, model_flops
from madmax_lib.calibration.published_rows import read_rows, to_work

SHAPE = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 32000, "seq_len": 2048}
RUN = {"gpu": "A100-80GB", "n_gpus": 8, "tp": 2, "pp": 2, "dp": 2, "cp": 1, "micro_batch": 1, "global_batch": 16}
ROW = {"source": "somewhere", "model": "GPT test", "precision": "bf16", "recompute": "none", "iteration_time_s": 1.5}
ROW |= SHAPE | RUN


def read(**changes):
    return read_rows(pd.DataFrame([ROW | changes])).iloc[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": np.nan}, "layers is not stated"),
        ({"gpu": "TPUv0"}, "unknown device 'TPUv0'"),
        ({"gpu": "TPUv4"}, "no default cluster of tpu-v4"),
        ({"gpu": np.nan}, "gpu is not stated"),
        ({"n_gpus": np.nan, "dp": np.nan}, "neither n_gpus nor dp is stated"),
        ({"global_batch": np.nan, "micro_batch": np.nan}, "neither global batch nor micro-batch is stated"),
        ({"model": "Strange-8x7B-MoE"}, "experts of 'Strange-8x7B-MoE' are not stated"),
        ({"heads": 7, "kv_heads": 3}, "kv_heads=3 does not divide heads=7"),
        ({"dp": 2.5}, "degrees of parallelism are not whole"),
        ({"hidden": "wide"}, "hidden is not stated"),
        ({"cluster": "nowhere"}, "nearest"),
    ],
)
def test_a_row_that_cannot_be_timed_says_why(changes, reason):
    row = read(**changes)
    assert not row["supported"] and reason in row["reason"] and np.isnan(row["measured_s"])


EIGHT_EXPERTS = {"model": "mixtral-8x7b", "tp": 1, "pp": 1, "dp": 6, "n_gpus": 6}


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"n_gpus": 16}, "dp x tp x pp x cp = 8, but n_gpus = 16"),
        ({"global_batch": 1}, "dp=2 exceeds the global batch of 1"),
        ({"pp": 16, "n_gpus": 64}, "pp x vpp = 16 exceeds 8 layers"),
        (EIGHT_EXPERTS | {"ep": 4}, "ep=4 does not divide dp x cp = 6"),
        (EIGHT_EXPERTS | {"ep": 3}, "ep=3 does not divide 8 experts"),
    ],
)
def test_contradictions_are_named_not_dropped(changes, violation):
    row = read(**changes)
    assert row["supported"] and not row["consistent"] and row["violation"] == violation


def test_a_table_never_dies_of_missing_columns_or_one_row():
    bare = pd.DataFrame([{"gpu": "H100", "model": "llama3-8b", "n_gpus": 8, "global_batch": 16}, {}, {"tp": "x"}])
    rows = read_rows(bare.assign(unknown_column=1))
    assert rows["supported"].tolist() == [True, False, False]
    assert rows.loc[0, "hidden"] == 4096 and rows.loc[0, "kv_width"] == 1024  # from the catalog, by name
    assert len(read_rows(pd.DataFrame())) == 0
    again = read_rows(pd.DataFrame([ROW, ROW], index=[7, 7]))
    assert again.index.tolist() == [7, 7] and again["supported"].all()


BRIDGE, A100, H100 = "NVIDIA-NeMo/Megatron-Bridge", "A100-80GB", "H100_80GB"
LORA = {"table_row": "26.06 / LoRA Performance / x", "source": BRIDGE}
SELECTIVE = {"recompute_gemm": 0, "recompute_attention": 1}
LARGE = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, "tp": 1, "pp": 1, "dp": 64, "n_gpus": 64}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"measured_s": 1.5, "dp": 2, "tp": 2, "pp": 2, "micro_batches": 8, "gated": 0}),
        ({}, {"supported": True, "consistent": True, "peak_gemm": 312e12, "nic": 25e9, "domain": 8}),  # DGX A100
        ({"cluster": "p4de"}, {"nic": 6.25e9}),
        ({"precision": "amp_fp8", "gpu": H100}, {"gemm": "hopper-8", "mx": 0, "peak_gemm": 1978.9e12}),
        ({"precision": "MXFP8", "gpu": "GB200"}, {"gemm": "blackwell-8", "mx": 1, "peak_gemm": 5000e12}),
        ({"precision": "NVFP4", "gpu": "GB300"}, {"gemm": "blackwell-4", "mx": 0, "peak_gemm": 15000e12}),
        ({"precision": "FP8-CS (FP8-MX)", "gpu": "B200"}, {"gemm": "blackwell-8", "mx": 0, "peak_gemm": 4500e12}),
        ({"precision": "see notes (release default FP8)", "gpu": "H100"}, {"gemm": "hopper-8", "peak_gemm": 1978.9e12}),
        ({"precision": "bf16+float8 linear", "gpu": A100}, {"gemm": "ampere-16", "mx": 0, "peak_gemm": 312e12}),
        ({"precision": np.nan, "gpu": A100}, {"gemm": "ampere-16", "mx": 0, "peak_gemm": 312e12}),
        # recompute: Megatron of 2021 repeats all where nothing is stated
        ({"source": "SC21", "recompute": np.nan}, dict.fromkeys(SELECTIVE, 1)),
        ({"source": BRIDGE, "recompute": np.nan}, dict.fromkeys(SELECTIVE, 0)),
        ({"source": "2205.05198", "recompute": "selective+sequence parallel"}, SELECTIVE),
        ({"source": "torchtitan", "recompute": "selective (every 2nd layer)"}, dict.fromkeys(SELECTIVE, 0.5)),
        ({"source": "torchtitan", "recompute": "selective (op)"}, {"recompute_gemm": 0.35, "recompute_attention": 0}),
        ({"source": "llm-foundry", "recompute": "full"}, dict.fromkeys(SELECTIVE, 1)),
        (LORA, {"trained": 0, "task": "lora"}),
        # sharding: FSDP where the weights do not fit otherwise, else the distributed optimizer of Megatron-Core
        (LARGE | {"gpu": "H100", "global_batch": 128}, {"zero": 3, "shard": 64}),
        ({"gpu": "H100"}, {"zero": 1}),
        # FSDP takes the whole batch of a device
        ({"micro_batch": np.nan, "zero_stage": 3, "tp": 1, "pp": 1, "dp": 8}, {"micro_batch": 2}),
    ],
)
def test_rules(changes, fields):
    assert read(**changes)[list(fields)].to_dict() == fields


def test_what_a_source_does_not_state_is_chosen_by_one_rule():
    row = read(micro_batch=np.nan, gpu="H100", tp=1, pp=4, dp=2, global_batch=64, layers=16)
    assert row["micro_batch"] in (1, 2, 4) and 16 / 4 % row["interleave"] == 0


def test_flops_are_counted_as_the_source_does():
    row = read().to_dict()
    weights, attention = 8 * 12 * 1024**2 + 32000 * 1024, 12 * 8 * 1024 * 2048
    assert model_flops(row) == 16 * 2048 * (6 * weights + attention)
    assert model_flops(row | {"counts_recompute": True}) == pytest.approx(4 / 3 * model_flops(row))
    halved = model_flops(row | {"source": "NVIDIA-NeMo/Megatron-Bridge"})
    assert model_flops(row) - halved == pytest.approx(16 * 2048 * attention / 2)
    assert measured_s(row, np.nan, 1024.0, np.nan) == 16 * 2048 / (1024 * 8)
    assert measured_s(row, np.nan, np.nan, 1e12) == model_flops(row) / 8e12


def test_all_visible_rows_are_read():
    table = catalog.table("published_train")
    rows = read_rows(table)
    assert len(rows) == len(table) == 368
    assert rows["supported"].sum() == 356 and (rows["measured_s"] > 0).sum() == 352
    assert rows.loc[rows["supported"].astype(bool), "consistent"].all()
    reasons = {f"{what} is not stated" for what in ("layers", "seq_len")}
    reasons |= {f"neither {what} is stated" for what in ("n_gpus nor dp", "global batch nor micro-batch")}
    assert set(rows.loc[~rows["supported"].astype(bool), "reason"]) == reasons
    assert len(to_work(rows[rows["supported"].astype(bool)]).layers) == 356


def test_vtrain_rows_are_read_as_they_are():
    rows = read_rows(local_or_skip("vtrain/ground_truth_multi.shared.csv"))
    assert len(rows) == 65 and rows["supported"].all() and rows["consistent"].all() and (rows["measured_s"] > 0).all()
    assert rows["source"].str.contains("vTrain").all() and rows["group"].nunique() == rows["model"].nunique()
