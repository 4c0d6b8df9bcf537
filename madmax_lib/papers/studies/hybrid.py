"""What did the hybrid-parallelism study of GPT-2 Large on four A100 measure, and what do its numbers become?

The public project makramab/hybrid-parallelism reports tokens per second, MFU, memory and time of DDP, ZeRO-3 and
"ZeRO-3 + TP". Its figures are read again: which steps they average, which batches they count, and how many different
samples the GPUs saw. Reported numbers: `data/gpt2_large.csv`, `gelu.csv`, `mlp.csv`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from madmax_lib import catalog
from madmax_lib.papers.origin import read_table, with_origin
from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import memory, peak_bytes
from madmax_lib.specs import Transformer

__all__ = ["audit", "claims", "gelu", "memory_rows", "mlp", "runs", "splits"]

_MODEL, _RUNS = "gpt2-large", "studies/gpt2_large"
_RULES = "figures of makramab/hybrid-parallelism read again"
_BUCKET_BYTES = 2 * 5e7  # its DeepSpeed configuration: 5e7 fp16 elements
_L2_BYTES = 40e6  # of the A100, NVIDIA A100 white paper


class _Window(NamedTuple):
    """Steps that the reported averages cover: those after the last log line, the last batch being short.

    steps: of the epoch. counted: after the last log line. last_batch: samples per rank in the last step.
    inflation: full batches over the real ones, over the counted steps.
    """

    steps: int
    counted: int
    last_batch: int
    inflation: float


def _log_window(samples: int, ranks: int, batch: int, interval: int) -> _Window:
    """Steps that an average covers whose sums start anew every `interval` steps.

    samples: over all ranks. batch: samples per rank and step.

    >>> _log_window(5000, 4, 8, 10)
    _Window(steps=157, counted=7, last_batch=2, inflation=1.12)
    """
    own = samples // ranks
    steps = -(-own // batch)
    counted = steps % interval or min(interval, steps)
    last = own - (steps - 1) * batch
    return _Window(steps, counted, last, counted * batch / ((counted - 1) * batch + last))


def _script_flops(model: Transformer, sequence: int, tp: int = 1) -> float:
    """FLOPs of a sample in the study's script: 3 [L (24 s h^2 + 2 s^2 h) + 2 s h + 2 s h V], half the attention.

    tp: what one of tp peers executes of it: its part of the layers, and the whole embedding and head.

    >>> f"{_script_flops(catalog.model('gpt2-large'), 1024):.4e}"
    '5.0338e+12'
    """
    s, h = sequence, model.hidden
    return 3 * (model.layers * (24 * s * h**2 + 2 * s**2 * h) / tp + 2 * s * h + 2 * s * h * model.vocab)


def _local_model(tp: int) -> Transformer:
    """What a GPU of the study held under TP: layers of 1/tp of the heads and channels, embedding and head whole."""
    model = catalog.model(_MODEL)
    heads = model.heads // tp
    return replace(model, name=f"{_MODEL} of tp {tp}", heads=heads, kv_heads=heads, ffn=model.ffn // tp)


def runs() -> pd.DataFrame:
    """The six rows of the study's results table, as reported."""
    return with_origin(read_table(_RUNS).copy(), _RUNS, rules="as reported")


def audit() -> pd.DataFrame:
    """Every row computed again: the reported MFU, then that of the real batches, of the wall clock, of usual FLOPs.

    counted_steps, last_batch, inflation: see `log_window`. mfu_reproduced: with full batches and the script's FLOPs, as
    reported; mfu_window: with real batches; mfu_wall: all samples over the reported time. useful_tokens_per_s: wall
    clock, TP peers counted once because they worked on parts of one model (an upper bound under TP). mfu_corrected: of
    these tokens, with attention counted in full. executed: FLOPs that a GPU ran over those claimed for it. Ratios 0..1.
    """
    model = catalog.model(_MODEL)
    rows = []
    for row in runs().to_dict("records"):
        window = _log_window(row["samples"], row["gpus"], row["batch_per_gpu"], row["log_interval"])
        flops, usual = _script_flops(model, row["sequence"]), 3 * model.forward_flops(1, row["sequence"])
        peak = row["gpus"] * catalog.device(row["gpu"]).peak("fp16")
        labels = row["sequence"] - 1  # tokens that the script counts: those with a next one
        in_window, overall = row["tokens_per_s"] / labels, row["samples"] / row["train_time_s"]  # samples/s
        mfu_window, useful = flops * in_window / peak, overall / row["tp"]
        audited = {"config": row["config"], "batch_per_gpu": row["batch_per_gpu"], "steps": window.steps}
        audited |= {"counted_steps": window.counted, "last_batch": window.last_batch, "inflation": window.inflation}
        audited |= {"mfu_reported": row["mfu_pct"] / 100, "mfu_reproduced": mfu_window * window.inflation}
        audited |= {"mfu_window": mfu_window, "mfu_wall": flops * overall / peak, "tokens_per_s": row["tokens_per_s"]}
        audited |= {"useful_tokens_per_s": labels * useful, "mfu_corrected": usual * useful / peak}
        rows.append(audited | {"executed": _script_flops(model, row["sequence"], row["tp"]) / flops})
    return with_origin(pd.DataFrame(rows), _RUNS, rules=_RULES)


def splits() -> pd.DataFrame:
    """Reported MFU of the TP rows beside what it would read if the data were split over all GPUs, or over dp only.

    data_ranks: GPUs with samples of their own. The last batch of an epoch gives the split away.
    """
    rows = []
    for row, audited in zip(runs().to_dict("records"), audit().to_dict("records"), strict=True):
        for data_ranks in (row["gpus"], row["gpus"] // row["tp"]) if row["tp"] > 1 else ():
            window = _log_window(row["samples"], data_ranks, row["batch_per_gpu"], row["log_interval"])
            mfu = audited["mfu_window"] * window.inflation
            split = {"config": row["config"], "batch_per_gpu": row["batch_per_gpu"], "data_ranks": data_ranks}
            split |= window._asdict() | {"mfu_reported": audited["mfu_reported"], "mfu": mfu}
            rows.append(split | {"error": mfu - audited["mfu_reported"]})
    return with_origin(pd.DataFrame(rows), _RUNS, rules=_RULES)


def memory_rows() -> pd.DataFrame:
    """Peak allocated memory of each row, measured and by `simulator.memory.memory`: measured_gib, predicted_gib, error.

    A TP row is the model that one GPU held (`local_model`), its states sharded over all four GPUs, as they were.
    """
    table, predicted_gib = runs(), []
    for row in table.to_dict("records"):
        ddp = row["config"] == "ddp"
        shards = {"zero": 0} if ddp else {"zero": 3, "bucket_bytes": _BUCKET_BYTES}
        plan = Plan(dp=row["gpus"], micro_batch=row["batch_per_gpu"], recompute="full", attention="unfused", **shards)
        software, model = "torch" if ddp else "deepspeed", _local_model(row["tp"])
        parts = memory(model, plan, sequence=row["sequence"], dtype="fp16", software=software)
        predicted_gib.append(peak_bytes(parts, allocated=True) / 2**30)
    table = table.rename(columns={"peak_memory_gib": "measured_gib"}).assign(predicted_gib=predicted_gib)
    table["error"] = table["predicted_gib"] / table["measured_gib"] - 1
    columns = ["config", "batch_per_gpu", "measured_gib", "predicted_gib", "error"]
    return with_origin(table[columns], _RUNS, rules=_RULES)


def gelu() -> pd.DataFrame:
    """The bias + GELU microbenchmark beside what memory allows: ms, bytes/s and shares of the A100's bandwidth.

    PyTorch's two kernels read and write the tensor twice, a fused kernel once; ideal_ms: once at full bandwidth.
    in_cache: input and output lie in the L2 cache, so that the figure is none of device memory.
    """
    table = read_table("studies/gelu").drop(columns="source")
    bandwidth = catalog.device("a100-40").memory_bandwidth_bytes_per_s
    size = 2 * table["batch"] * table["sequence"] * table["width"]
    unfused, fused = 4e3 * size / table["unfused_ms"], 2e3 * size / table["fused_ms"]
    table = table.assign(tensor_bytes=size, ideal_ms=2e3 * size / bandwidth)
    table = table.assign(unfused_bytes_per_s=unfused, fused_bytes_per_s=fused)
    table = table.assign(speedup=table["unfused_ms"] / table["fused_ms"], in_cache=2 * size <= _L2_BYTES)
    table = table.assign(fused_share=fused / bandwidth, unfused_share=unfused / bandwidth)
    return with_origin(table, "studies/gelu", rules=_RULES)


def mlp() -> pd.DataFrame:
    """The breakdown of an MLP: ms, share of the whole, FLOP/s of the products (NaN for others), share of the peak."""
    table, peak = read_table("studies/mlp"), catalog.device("a100-40").peak("fp16")
    flops = 2.0 * table["m"] * table["k"] * table["n"]
    whole = table.loc[table["name"] == "full mlp", "ms"].iloc[0]
    table = table.assign(share=table["ms"] / whole, flops_per_s=flops / table["ms"] * 1e3)
    table["peak_share"] = table["flops_per_s"] / peak
    return with_origin(table.drop(columns="source"), "studies/mlp", rules=_RULES)


def claims() -> pd.DataFrame:
    """What the study claims and what follows from its own numbers: claim, theirs, ours, error (relative)."""
    rows, parts, kernel = audit(), mlp().set_index("name")["ms"], gelu().iloc[-1]
    ddp, best = rows.iloc[0], rows.loc[rows["tokens_per_s"].idxmax()]
    reported, useful = (best[rate] / ddp[rate] for rate in ("tokens_per_s", "useful_tokens_per_s"))
    names = [f"MFU of {row.config}, batch {row.batch_per_gpu}: reproduced" for row in rows.itertuples()]
    table = [
        *zip(names, rows["mfu_reported"], rows["mfu_reproduced"], strict=True),
        ("MFU of DDP from wall clock and usual FLOPs", ddp["mfu_reported"], ddp["mfu_corrected"]),
        ("MFU of the fastest row, at most", best["mfu_reported"], best["mfu_corrected"]),
        ("speed of the fastest row over DDP, at most", reported, useful),
        # a fused kernel that moves its bytes as fast as PyTorch's GELU without the bias does
        (
            "speed of a fused kernel, at the bandwidth of GELU alone",
            kernel["speedup"],
            kernel["unfused_ms"] / parts["gelu"],
        ),
        ("speed of the MLP if GELU took no time", float("nan"), 1 / (1 - parts["gelu"] / parts["full mlp"])),
    ]
    result = pd.DataFrame(table, columns=["claim", "theirs", "ours"])
    result["error"] = result["ours"] / result["theirs"] - 1
    return with_origin(result, _RUNS, "studies/gelu", "studies/mlp", rules=_RULES)
