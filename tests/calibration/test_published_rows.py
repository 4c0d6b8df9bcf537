"""Published rows become normalised rows: one out per row in, defaults by rule,
contradictions named.
"""

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip

import madmax_lib as mm
from madmax_lib import catalog
from madmax_lib.calibration.published.rows import model_flops, read_rows, to_steps
from madmax_lib.simulator.rates.parameters import start
from madmax_lib.simulator.steady.step_time import step_time

SHAPE = {
    "layers": 8,
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 4096,
    "vocab": 32000,
    "seq_len": 2048,
}
RUN = {
    "gpu": "A100-80GB",
    "n_gpus": 8,
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "cp": 1,
    "micro_batch": 1,
    "global_batch": 16,
}
ROW = {
    "source": "somewhere",
    "model": "GPT test",
    "precision": "bf16",
    "recompute": "none",
    "iteration_time_s": 1.5,
}
ROW |= SHAPE | RUN


def read(**changes):
    return read_rows(pd.DataFrame([ROW | changes])).iloc[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": np.nan}, "layers is not stated"),
        ({"gpu": "TPUv0"}, "unknown device 'TPUv0'"),
        ({"gpu": np.nan}, "gpu is not stated"),
        ({"n_gpus": np.nan, "dp": np.nan}, "neither n_gpus nor dp is stated"),
        (
            {"global_batch": np.nan, "micro_batch": np.nan},
            "neither global batch nor micro-batch is stated",
        ),
        ({"model": "Strange-8x7B-MoE"}, "experts of 'Strange-8x7B-MoE' are not stated"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8"),
        ({"dp": 2.5}, "dp=2.5 must be a whole number of 1 to"),
        ({"dp": np.nan, "n_gpus": 9}, "n_gpus=9 is not a multiple of tp x pp x cp = 4"),
        ({"hidden": "wide"}, "hidden='wide' is not a number"),
        ({"layers": 0}, "layers=0 must be a whole number of 1 to 10000"),
        ({"layers": 1e30}, "layers=1e+30 must be a whole number"),
        ({"n_gpus": "many"}, "n_gpus='many' is not a number"),
        ({"zero_stage": 7}, "zero=7 is not one of 0, 1, 2, 3"),
        ({"overlap_tp": "yes"}, "overlap_tp='yes' is not a number"),
        ({"overlap_dp": 2}, "overlap_dp=2 must be a whole number of 0 to 1"),
        ({"recompute": "yes"}, "recompute='yes' is not one of none, selective, full"),
        ({"precision": "int7"}, "precision='int7' names no data type"),
        ({"devices_per_node": 0.5}, "devices_per_node=0.5 must be a whole number"),
        ({"network_gbit": np.inf}, "network_gbit=inf must be finite"),
        ({"iteration_time_s": "1.5 s"}, "iteration_time_s='1.5 s' is not a number"),
        ({"tokens_per_s_per_gpu": -1}, "tokens_per_s_per_gpu=-1 must be above 0"),
        ({"plan": "dp2.x"}, "'x' in plan 'dp2.x' is not one of"),
        ({"cluster": "nowhere"}, "nearest"),
        (
            {
                "experts": 8,
                "active_experts": 2,
                "tp": 1,
                "pp": 1,
                "dp": 6,
                "n_gpus": 6,
                "ep": 4,
            },
            "ep=4 does not divide dp x cp = 6",
        ),
        (
            {"model": "swin_base_patch4_window7_224"},
            "swin_base_patch4_window7_224 is not a plain transformer",
        ),
        ({"model": "DLRM-DCNv2"}, "DLRM-DCNv2 is not a plain transformer"),
        ({"model": "vit_base", "seq_len": 197}, "vit_base: the patch is not stated"),
    ],
)
def test_a_row_that_cannot_be_timed_says_why(changes, reason):
    row = read(**changes)
    assert (
        not row["supported"] and reason in row["reason"] and np.isnan(row["measured_s"])
    )


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({"n_gpus": 16}, "dp x tp x pp x cp = 8, but n_gpus = 16"),
        (
            {"global_batch": 1},
            "global_batch=1 is not a multiple of dp x micro_batch = 2 x 1, nor, with "
            "a short last",
        ),
        (
            {"pp": 16, "n_gpus": 64},
            "pp x interleave = 16 x 1 exceeds 8 layers of GPT test",
        ),
        ({"micro_batch": 9}, "micro_batch=9 exceeds 16 samples over dp=2"),
        (
            {"heads": 9, "kv_heads": 9, "hidden": 1152},
            "tp=2 does not divide 9 attention heads of GPT test",
        ),
        (
            {
                "experts": 8,
                "active_experts": 2,
                "tp": 1,
                "pp": 1,
                "dp": 6,
                "n_gpus": 6,
                "ep": 3,
            },
            "ep=3 does not divide 8 experts of GPT test",
        ),
    ],
)
def test_contradictions_are_named_not_dropped(changes, violation):
    row = read(**changes)
    assert (
        row["supported"]
        and not row["consistent"]
        and row["reason"].startswith(violation)
    )


def test_a_table_never_dies_of_missing_columns_or_one_row():
    bare = pd.DataFrame(
        [
            {"gpu": "H100", "model": "llama3-8b", "n_gpus": 8, "global_batch": 16},
            {},
            {"tp": "x"},
        ]
    )
    with pytest.warns(
        UserWarning,
        match=(
            r"^ignored column\(s\) microbatch, mine; nearest to microbatch: "
            r"micro_batch$"
        ),
    ):
        rows = read_rows(bare.assign(microbatch=1, mine=2))
    with pytest.warns(UserWarning, match=r"^ignored column\(s\) zz; help"):
        read_rows(bare.assign(zz=1, predicted_memory_bytes=2))
    assert rows["supported"].tolist() == [True, False, False]
    model = rows.loc[0, "case"].model  # from the catalog, by name
    assert (model.hidden, model.kv_heads * model.head_dim, model.gated) == (
        4096,
        1024,
        True,
    )
    assert (
        len(read_rows(pd.DataFrame())) == 0
        and not read_rows(pd.DataFrame({"# GPUs": [8]}))["supported"].any()
    )
    again = read_rows(pd.DataFrame([ROW, ROW], index=[7, 7]))
    assert again.index.tolist() == [7, 7] and again["supported"].all()


BRIDGE, A100, H100 = "NVIDIA-NeMo/Megatron-Bridge", "A100-80GB", "H100_80GB"
MIXTURE = {
    "model": "Qwen3 30B A3B",
    "experts": 128,
    "active_experts": 8,
    "expert_ffn": 768,
    "gpu": "H100",
    "heads": 8,
}
LARGE = {
    "layers": 80,
    "hidden": 8192,
    "heads": 64,
    "kv_heads": 64,
    "ffn": 28672,
    "tp": 1,
    "pp": 1,
    "dp": 64,
}
LARGE |= {"n_gpus": 64, "gpu": "H100", "global_batch": 128}
ALONE = {"tp": 1, "pp": 1, "dp": 1, "n_gpus": 1}
FSDP = {"tp": 1, "pp": 1, "dp": 64, "n_gpus": 64, "zero_stage": 3, "global_batch": 64}
AMP = {
    "source": "DachengLi1/AMP",
    "gpu": "T4-16GB",
    "precision": "fp16",
    "network_gbit": 12.5,
    "zero_stage": 0,
}
AMP |= {"notes": "pipeline partition [0, 6, 30], fp32 all-reduce"}


def said(row):
    """What tests ask of a case, in one flat table."""
    case = row["case"]
    parts = vars(case.plan) | {
        f"model.{name}": value for name, value in vars(case.model).items()
    }
    device, inter = case.cluster.device, case.cluster.inter.bandwidth_bytes_per_s
    about = {
        "peak": device.peak(case.dtype),
        "nic": inter,
        "node": case.cluster.devices_per_node,
    }
    return (
        row.drop("case").to_dict()
        | parts
        | about
        | {"send_once": case.software.send_once}
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"measured_s": 1.5, "dp": 2, "tp": 2, "micro_batch": 1, "model.gated": False, "kind": "dense"}),
        # DGX A100
        ({}, {"supported": True, "consistent": True, "peak": 312e12, "nic": 25e9, "node": 8}),
        ({"cluster": "p4de"}, {"nic": 6.25e9}),
        ({"network_gbit": 100}, {"nic": 12.5e9}),
        (AMP, {"nic": 12.5e9 / 8, "node": 4, "software": "megatron-deepspeed", "dtype": "fp16", "zero": 0}),
        (AMP, {"recompute": "none", "attention": "unfused", "reduce_fp32": True, "first_layers": 3, "last_layers": 5}),
        # what is computed in
        ({"precision": "amp_fp8", "gpu": H100}, {"dtype": "fp8", "peak": 1978.9e12}),
        ({"precision": "MXFP8", "gpu": "GB200"}, {"dtype": "mxfp8", "peak": 5000e12}),
        ({"precision": "NVFP4", "gpu": "GB300"}, {"dtype": "nvfp4", "peak": 15000e12}),
        ({"precision": "NVFP4", "gpu": H100}, {"dtype": "fp8"}),
        ({"precision": "FP8-CS (FP8-MX)", "gpu": "B200"}, {"dtype": "fp8", "peak": 4500e12}),
        ({"precision": "see notes (release default FP8)", "gpu": "H100"}, {"dtype": "fp8"}),
        ({"precision": "bf16+float8 linear", "gpu": A100}, {"dtype": "bf16"}),
        ({"precision": "bf16 (fp32 grad accumulation)"}, {"dtype": "bf16", "reduce_fp32": True}),
        ({"precision": np.nan, "gpu": A100}, {"dtype": "bf16"}),
        ({"precision": "bf16", "gpu": "T4"}, {"dtype": "fp16"}),
        # software: the row's own, else its source's; compiled layers and graphs have
        # rows of their own
        ({"software": "torchtitan", "notes": "FSDP+compile"}, {"software": "torchtitan-compiled"}),
        ({"software": "mcore", "source": BRIDGE}, {"software": "megatron-core"}),
        ({"source": BRIDGE, "table_row": "26.06 NeMo Container / x"}, {"software": "megatron-bridge-graph"}),
        ({"source": BRIDGE, "table_row": "26.04.01 NeMo Container / x"}, {"software": "megatron-bridge"}),
        ({"software": "no such thing"}, {"software": "no such thing"}),
        ({"software": "megatron-core", "notes": "DeepEP dispatcher"}, {"send_once": True}),
        # one's own rows, without a source or with a plan, are read as `estimate` reads
        # a plan
        ({"source": np.nan, "zero_stage": 3}, {"software": "none", "interleave": 1, "bucket_bytes": 25.0 * 2**20}),
        ({"source": "", "gpu": A100, "precision": "fp16", "recompute": np.nan}, {"recompute": "none", "zero": 0}),
        ({"source": np.nan, "micro_batch": np.nan, "overlap_dp": 0}, {"micro_batch": 1, "overlap_dp": False}),
        ({"plan": "dp4.pp2.zb.z1", "dp": np.nan}, {"dp": 4, "tp": 1, "schedule": "zero-bubble"}),
        # recompute: Megatron of 2021 repeats all where nothing is stated
        ({"source": "SC21", "recompute": np.nan}, {"recompute": "full", "recompute_stated": False}),
        ({"source": BRIDGE, "recompute": np.nan}, {"recompute": "none", "recompute_stated": False}),
        ({"source": "2205.05198", "recompute": "selective+sequence parallel"}, {"recompute": "selective"}),
        ({"source": "2205.05198", "recompute": "full"}, {"recompute": "full", "sequence_parallel": False}),
        ({"source": "torchtitan", "recompute": "selective (every 2nd layer)"}, {"recompute": "full"}),
        ({"source": "torchtitan", "recompute": "selective (op)"}, {"recompute": "selective"}),
        ({"software": "megatron-core", "recompute": "selective: norm, act"}, {"recompute": "layernorm"}),
        (MIXTURE | {"software": "megatron-core", "recompute": "selective: norm, act"}, {"recompute": "layernorm+moe_act"}),
        # it cannot fit
        (LARGE | {"recompute": np.nan, "zero_stage": 3, "seq_len": 8192}, {"recompute": "full"}),
        # sharding: FSDP where the weights do not fit otherwise, else the distributed
        # optimizer of Megatron-Core
        (LARGE, {"zero": 3, "shard": 0}),
        ({"gpu": "H100"}, {"zero": 1}),
        (FSDP | {"notes": "HSDP"}, {"shard": 8}),
        (FSDP | {"table_row": "FSDP=16"}, {"shard": 16}),
        (FSDP | {"notes": "PyTorch FSDP2"}, {"shard": 0}),
        (FSDP | {"precision": "float8 tensorwise", "gpu": "H100"}, {"qwz": True}),
        # FSDP takes the whole batch of a device
        ({"micro_batch": np.nan, "zero_stage": 3, "tp": 1, "pp": 1, "dp": 8}, {"micro_batch": 2}),
        # frozen weights
        ({"source": BRIDGE, "table_row": "LoRA Performance"}, {"lora_rank": 16, "kind": "lora"}),
        ({"lora_rank": 8}, {"lora_rank": 8, "kind": "lora"}),
        # mixtures: the row's numbers win; experts over tp where the software lays them
        # so, or ep fits nowhere else
        (MIXTURE | {"dense_layers": 2, "ep": 2}, {"model.experts": 128, "model.dense_layers": 2, "kind": "mixture"}),
        (MIXTURE | {"ep": 4, "software": "megatron-core"}, {"ep": 4, "etp": 1}),
        (MIXTURE | {"ep": 2, "software": "megatron-core"}, {"ep": 2, "etp": 0}),
        (MIXTURE | {"ep": 2, "software": "megatron-bridge"}, {"etp": 1}),
        (MIXTURE | {"model": "Qwen3 30B A3B (tokendrop)"}, {"capacity": 1.0}),
        # what hides
        ({"notes": "async TP, compile"}, {"overlap_tp": True}),
        ({"overlap_ep": 1, "overlap_dp": 0}, {"overlap_ep": True, "overlap_dp": False, "overlap_tp": None}),
        # the stated parameters tell LLaMA's layers of four times the width from GPT's
        ({"params_b": 0.200}, {"model.gated": True, "model.tied": False}),
        ({"params_b": 0.135}, {"model.gated": False, "model.tied": True}),
        # images
        (ALONE | {"model": "vit_small_patch32_384", "seq_len": 145}, {"model.image": 384, "kind": "vision"}),
        (ALONE | {"model": "ViT-G/14", "seq_len": 257}, {"model.image": 224, "model.patch": 14}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:software .no such thing")
def test_rules(changes, fields):
    row = said(read(**changes))
    assert {name: row[name] for name in fields} == fields


def test_what_a_source_does_not_state_is_chosen_by_one_rule():
    row = read(
        micro_batch=np.nan, gpu="H100", tp=1, pp=4, dp=2, global_batch=64, layers=16
    )
    assert row["micro_batch"] in (1, 2, 4) and 16 / 4 % row["interleave"] == 0


def test_a_layout_that_a_source_does_not_state_is_the_fastest_that_fits():
    open_layout = {
        "tp": np.nan,
        "pp": np.nan,
        "dp": np.nan,
        "cp": np.nan,
        "micro_batch": np.nan,
        "n_gpus": 512,
    }
    gpt = {
        "layers": 96,
        "hidden": 12288,
        "heads": 96,
        "kv_heads": 96,
        "ffn": 49152,
        "global_batch": 2048,
    }
    row = read(**open_layout, **gpt, software="nemo", gpu="H100", precision="fp8")
    assert (
        row[["dp", "tp", "pp", "cp"]].prod() == 512
        and row["tp"] * row["pp"] >= 16
        and row["consistent"]
    )
    lora = read(
        **LARGE | open_layout | {"n_gpus": 8, "global_batch": 8},
        software="nemo",
        lora_rank=16,
    )
    assert (lora["pp"], lora["micro_batch"]) == (1, 1) and lora["tp"] * lora[
        "cp"
    ] > 1  # 70B of frozen weights


@pytest.mark.parametrize(
    ("stated", "ep"),
    [({}, 8), ({"ep": 1}, 1), ({"source": ""}, 1), ({"dp": 6, "n_gpus": 6}, 2)],
)
def test_experts_lie_where_it_is_fastest_unless_stated(stated, ep):
    """Weights that ZeRO-3 would gather for each of many micro-batches stay where they
    are.
    """
    many = {
        "n_gpus": 8,
        "dp": 8,
        "tp": 1,
        "pp": 1,
        "zero_stage": 3,
        "micro_batch": 1,
        "global_batch": 192,
    }
    assert read(**MIXTURE | many | {"software": "automodel"} | stated)["ep"] == ep


def test_a_stack_of_rows_is_timed_as_each_alone():
    rows = read_rows(
        pd.DataFrame(
            [
                ROW | row
                for row in ({}, FSDP, FSDP | {"notes": "HSDP"}, MIXTURE | {"ep": 2})
            ]
        )
    )
    together = step_time(to_steps(rows), start())["step_s"]
    alone = [
        step_time(to_steps(rows.iloc[[i]]), start())["step_s"][0]
        for i in range(len(rows))
    ]
    assert together == pytest.approx(alone)


def test_flops_are_counted_as_the_source_does():
    case, tokens = read()["case"], 16 * 2048
    weights, attention = 8 * 12 * 1024**2 + 32000 * 1024, 12 * 8 * 1024 * 2048
    assert model_flops(case, {}) == tokens * (6 * weights + attention)
    assert model_flops(case, {"flops_kind": "hardware (HFU-type)"}) == pytest.approx(
        4 / 3 * model_flops(case, {})
    )
    assert model_flops(case, {"source": BRIDGE}) == pytest.approx(
        tokens * (6 * weights + attention / 2)
    )
    assert model_flops(case, {"source": "NeMo docs", "notes": "SFT"}) == pytest.approx(
        tokens * 6 * weights
    )
    times = {
        "iteration_time_s": 3,
        "tokens_per_s_per_gpu": 1024.0,
        "tflops_per_gpu": 1.0,
    }
    expected = [3, tokens / (1024 * 8), model_flops(case, {}) / 8e12, np.nan]
    stated = [dict.fromkeys(list(times)[:first], np.nan) for first in range(4)]
    assert [read(**times | gaps)["measured_s"] for gaps in stated] == pytest.approx(
        expected, nan_ok=True
    )


def test_pages_of_one_repository_are_one_source():
    pages = (f"{BRIDGE} docs/performance-summary{end}.md" for end in ("", "-archive"))
    assert {read(source=page)["group"] for page in pages} == {f"{BRIDGE} | GPT test"}
    assert read(source="seed 004 README")["repository"] == "seed 004 README"


def test_all_visible_rows_are_read():
    table = catalog.table("published_train")
    rows = read_rows(table)
    assert len(rows) == len(table) == 368
    assert rows["supported"].sum() == 362 and (rows["measured_s"] > 0).sum() == 352
    assert rows.loc[rows["supported"].astype(bool), "consistent"].all()
    reasons = {"layers is not stated"}
    reasons |= {
        f"neither {what} is stated"
        for what in ("n_gpus nor dp", "global batch nor micro-batch")
    }
    assert set(rows.loc[~rows["supported"].astype(bool), "reason"]) == reasons
    assert len(to_steps(rows[rows["supported"].astype(bool)]).global_batch) == 362


@pytest.mark.parametrize(
    ("file", "kinds"),
    [
        (
            "published_more/published_more.csv",
            {"dense": 91, "vision": 25, "mixture": 21, "lora": 16},
        ),
        ("published_more/layout_sweep.csv", {"dense": 1641}),
        ("published_more/dlrm.csv", {}),
    ],
)
def test_rows_of_other_stacks_are_read(file, kinds):
    rows = read_rows(local_or_skip(file))
    assert rows["kind"].value_counts().to_dict() == kinds
    unread = rows.loc[~rows["supported"].astype(bool), "reason"]
    assert unread.str.contains(
        "is not a plain transformer|is not stated|is stated"
    ).all()


def test_vtrain_rows_are_read_as_they_are():
    rows = read_rows(local_or_skip("vtrain/ground_truth_multi.shared.csv"))
    assert (
        len(rows) == 65
        and rows["supported"].all()
        and rows["consistent"].all()
        and (rows["measured_s"] > 0).all()
    )
    assert (
        rows["source"].str.contains("vTrain").all()
        and rows["group"].nunique() == rows["model"].nunique()
    )


def test_rates_of_mixtures_alone_are_not_those_of_dense_models():
    """Of MI355X only mixtures are published: a dense model has the rate and the width of
    a device nobody measured.
    """
    rows = pd.read_csv(local_or_skip("published_more/published_more.csv"))
    runs = rows[rows["gpu"].astype(str).str.contains("MI355")]["model"]
    assert len(runs) > 5 and runs.str.contains("DeepSeek|MoE|Mixtral|Qwen3").all()
    run = {"global_batch": 64, "plan_or_table": "dp8.z1.mb2"}
    steps = {
        (name, device): mm.estimate(name, f"{device}-8", **run).iloc[0]
        for name in ("llama3-8b", "mixtral-8x7b")
        for device in ("mi350x", "mi355x")
    }
    for name in ("llama3-8b", "mixtral-8x7b"):  # the same chip at more power
        slower, faster = steps[name, "mi350x"], steps[name, "mi355x"]
        assert 1 < slower["step_s"] / faster["step_s"] < 1.12
    widths = {key: row["high_s"] / row["step_s"] for key, row in steps.items()}
    assert widths["llama3-8b", "mi355x"] > 1.3 * widths["mixtral-8x7b", "mi355x"]
