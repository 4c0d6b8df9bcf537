"""The hybrid-parallelism study of GPT-2 Large on four A100, and what its numbers become.

The public project makramab/hybrid-parallelism reports tokens per second, MFU, memory
and time of DDP, ZeRO-3 and "ZeRO-3 + TP". Its figures are read again: which steps they
average, which batches they count, and how many different samples the GPUs saw. Reported
numbers: `data/gpt2_large.csv`, `gelu.csv`, `mlp.csv`.
"""

from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from madmax_lib import catalog
from madmax_lib.papers.origin import read_table, with_origin
from madmax_lib.plan import Plan
from madmax_lib.simulator import estimate, memory, peak_bytes

_MODEL = "gpt2-large"
_RUNS = "studies/gpt2_large"
_RULES = "figures of makramab/hybrid-parallelism read again"
_BUCKET_BYTES = 2 * 5e7  # its DeepSpeed configuration: 5e7 fp16 elements
_L2_BYTES = 40e6  # of the A100, NVIDIA A100 white paper


class _Window(NamedTuple):
    """Steps that the reported averages cover: those after the last log line, the last
    batch being short.
    """

    steps: int  # of the epoch
    counted: int  # after the last log line
    last_batch: int  # samples per rank in the last step
    inflation: float  # full batches over the real ones, over the counted steps


def _log_window(samples, ranks, batch, interval):
    """Steps that an average covers whose sums start anew every `interval` steps.

    samples: over all ranks. batch: samples per rank and step.

    >>> _log_window(5000, 4, 8, 10)
    _Window(steps=157, counted=7, last_batch=2, inflation=1.12)
    """
    per_rank = samples // ranks
    steps = -(-per_rank // batch)  # rounded up: the last batch may be short
    counted = steps % interval or min(interval, steps)
    last = per_rank - (steps - 1) * batch
    # samples that the script counts over those that it saw
    inflation = counted * batch / ((counted - 1) * batch + last)
    return _Window(steps, counted, last, inflation)


def _script_flops(model, sequence, tp=1):
    """FLOPs of a sample in the study's script: 3 [L (24 s h^2 + 2 s^2 h) + 2 s h + 2 s
    h V], half the attention.

    tp: what one of tp peers executes of it: its part of the layers, and the whole
    embedding and head.

    >>> f"{_script_flops(catalog.model('gpt2-large'), 1024):.4e}"
    '5.0338e+12'
    """
    # letters of the study: L layers, s tokens, h hidden, V vocabulary. Attention's two
    # products take 4 s^2 h; the script has 2 s^2 h, and counts a lookup as 2 s h.
    s = sequence
    h = model.hidden
    layers = model.layers * (24 * s * h**2 + 2 * s**2 * h) / tp
    return 3 * (layers + 2 * s * h + 2 * s * h * model.vocab)


def _local_model(tp):
    """Model that a GPU of the study had under TP: layers of 1/tp of the heads and
    channels, embedding and head in full.
    """
    model = catalog.model(_MODEL)
    heads = model.heads // tp
    sizes = {"heads": heads, "kv_heads": heads, "ffn": model.ffn // tp}
    return replace(model, name=f"{_MODEL} of tp {tp}", **sizes)


def runs() -> pd.DataFrame:
    """Six rows of the study's results table, as reported."""
    return with_origin(read_table(_RUNS), _RUNS, rules="as reported")


def audit() -> pd.DataFrame:
    """Every row computed again: the reported MFU, then that of the real batches, of the
    wall clock, of usual FLOPs.

    counted_steps, last_batch, inflation: of the averages, see `_Window`.
    mfu_reproduced: with full batches and the script's FLOPs, as reported (all ratios
    0..1).
    mfu_window, mfu_wall: with real batches; with all samples over the reported time.
    useful_tokens_per_s: by the wall clock; TP peers count once, for they worked on
    parts of one model: an upper bound.
    mfu_corrected: of these tokens, with attention counted in full.
    executed: FLOPs that a GPU ran over those claimed for it.
    """
    table = runs()
    model = catalog.model(_MODEL)
    window_of = ["samples", "gpus", "batch_per_gpu", "log_interval"]
    windows = pd.DataFrame(
        [_log_window(*row) for row in table[window_of].itertuples(index=False)]
    )
    # FLOPs of a sample, as the script counts them and with attention in full
    flops = _script_flops(model, table["sequence"])
    usual = 3 * table["sequence"].map(lambda sequence: model.forward_flops(1, sequence))
    peaks = [catalog.device(gpu).peak("fp16") for gpu in table["gpu"]]
    peak = table["gpus"] * peaks
    # tokens that the script counts: those with a next one
    labels = table["sequence"] - 1
    # samples/s over the counted steps, over the wall clock, and of different samples
    in_window = table["tokens_per_s"] / labels
    overall = table["samples"] / table["train_time_s"]
    useful = overall / table["tp"]
    # MFU = FLOPs of a sample x samples/s / peak
    mfu_window = flops * in_window / peak
    audited = table[["config", "batch_per_gpu"]].join(
        windows.rename(columns={"counted": "counted_steps"})
    )
    audited = audited.assign(
        mfu_reported=table["mfu_pct"] / 100,
        mfu_reproduced=mfu_window * windows["inflation"],
        mfu_window=mfu_window,
        mfu_wall=flops * overall / peak,
        tokens_per_s=table["tokens_per_s"],
        useful_tokens_per_s=labels * useful,
        mfu_corrected=usual * useful / peak,
        executed=_script_flops(model, table["sequence"], table["tp"]) / flops,
    )
    return with_origin(audited, _RUNS, rules=_RULES)


def splits() -> pd.DataFrame:
    """Reported MFU of the TP rows beside what it would read if the data were split over
    all GPUs, or over dp only.

    data_ranks: GPUs with samples of their own. The last batch of an epoch gives the
    split away.
    """
    rows = []
    table = runs().join(audit()[["mfu_reported", "mfu_window"]]).query("tp > 1")
    for run in table.itertuples():
        for data_ranks in (run.gpus, run.gpus // run.tp):
            window = _log_window(
                run.samples, data_ranks, run.batch_per_gpu, run.log_interval
            )
            row = {
                "config": run.config,
                "batch_per_gpu": run.batch_per_gpu,
                "data_ranks": data_ranks,
                **window._asdict(),
                "mfu_reported": run.mfu_reported,
                "mfu": run.mfu_window * window.inflation,
            }
            rows.append(row)
    table = pd.DataFrame(rows).eval("error = mfu - mfu_reported")
    return with_origin(table, _RUNS, rules=_RULES)


def memory_rows() -> pd.DataFrame:
    """Peak allocated memory of each row, measured and by `simulator.memory.memory`:
    measured_gib, predicted_gib, error.

    A TP row is the model that one GPU held (`_local_model`), its states sharded over
    all four GPUs, as they were.
    """
    table = runs()
    predicted_gib = []
    for row in table.to_dict("records"):
        # "ZeRO-3 + TP" shards its states over all four GPUs too
        ddp = row["config"] == "ddp"
        shards = {"zero": 0} if ddp else {"zero": 3, "bucket_bytes": _BUCKET_BYTES}
        plan = Plan(
            dp=row["gpus"],
            micro_batch=row["batch_per_gpu"],
            recompute="full",
            attention="unfused",
            **shards,
        )
        run = {"sequence": row["sequence"], "dtype": "fp16"}
        run["software"] = "torch" if ddp else "deepspeed"
        parts = memory(_local_model(row["tp"]), plan, **run)
        predicted_gib.append(peak_bytes(parts, allocated=True) / 2**30)
    table = table.rename(columns={"peak_memory_gib": "measured_gib"})
    table["predicted_gib"] = predicted_gib
    table = table.eval("error = predicted_gib / measured_gib - 1")
    columns = ["config", "batch_per_gpu", "measured_gib", "predicted_gib", "error"]
    return with_origin(table[columns], _RUNS, rules=_RULES)


def gelu() -> pd.DataFrame:
    """The bias + GELU microbenchmark beside what memory allows: ms, bytes/s and shares
    of the A100's bandwidth.

    PyTorch's two kernels read and write the tensor twice, a fused kernel once;
    ideal_ms: once at full bandwidth.
    in_cache: input and output lie in the L2 cache, so that the figure is none of device
    memory.
    """
    table = read_table("studies/gelu").drop(columns="source")
    bandwidth = catalog.device("a100-40").memory_bandwidth_bytes_per_s
    size = 2 * table["batch"] * table["sequence"] * table["width"]
    # ms to bytes/s: 1e3 x bytes; two reads and two writes unfused, one of each fused
    unfused = 4e3 * size / table["unfused_ms"]
    fused = 2e3 * size / table["fused_ms"]
    table = table.assign(
        tensor_bytes=size,
        ideal_ms=2e3 * size / bandwidth,
        unfused_bytes_per_s=unfused,
        fused_bytes_per_s=fused,
        speedup=table["unfused_ms"] / table["fused_ms"],
        in_cache=2 * size <= _L2_BYTES,
        fused_share=fused / bandwidth,
        unfused_share=unfused / bandwidth,
    )
    return with_origin(table, "studies/gelu", rules=_RULES)


def mlp() -> pd.DataFrame:
    """Breakdown of an MLP: ms, share of the MLP, FLOP/s of the products (NaN for
    others), share of the peak.
    """
    table = read_table("studies/mlp")
    peak = catalog.device("a100-40").peak("fp16")
    # a product (m x k) (k x n) takes 2 m k n FLOPs
    flops = 2.0 * table["m"] * table["k"] * table["n"]
    mlp_ms = table.loc[table["name"] == "full mlp", "ms"].iloc[0]
    rate = flops / table["ms"] * 1e3
    table = table.assign(
        share=table["ms"] / mlp_ms, flops_per_s=rate, peak_share=rate / peak
    )
    return with_origin(table.drop(columns="source"), "studies/mlp", rules=_RULES)


def claims() -> pd.DataFrame:
    """Claims of the study and what follows from its own numbers: claim, theirs, ours,
    error (relative).
    """
    rows = audit()
    parts = mlp().set_index("name")["ms"]
    kernel = gelu().iloc[-1]
    ddp = rows.iloc[0]
    best = rows.loc[rows["tokens_per_s"].idxmax()]
    # a kernel that moves its bytes as fast as PyTorch's GELU without the bias does
    as_gelu = kernel["unfused_ms"] / parts["gelu"]
    without_gelu = 1 / (1 - parts["gelu"] / parts["full mlp"])
    rates = ("tokens_per_s", "useful_tokens_per_s")
    mfu = ["mfu_reported", "mfu_corrected"]
    table = [
        (
            f"MFU of {row.config}, batch {row.batch_per_gpu}: reproduced",
            row.mfu_reported,
            row.mfu_reproduced,
        )
        for row in rows.itertuples()
    ]
    table += [
        ("MFU of DDP from wall clock and usual FLOPs", *ddp[mfu]),
        ("MFU of the fastest row, at most", *best[mfu]),
        (
            "speed of the fastest row over DDP, at most",
            *(best[rate] / ddp[rate] for rate in rates),
        ),
        (
            "speed of a fused kernel, at the bandwidth of GELU alone",
            kernel["speedup"],
            as_gelu,
        ),
        ("speed of the MLP if GELU took no time", float("nan"), without_gelu),
    ]
    result = pd.DataFrame(table, columns=["claim", "theirs", "ours"])
    result = result.eval("error = ours / theirs - 1")
    return with_origin(result, _RUNS, "studies/gelu", "studies/mlp", rules=_RULES)


def predictions() -> pd.DataFrame:
    """Tokens per second of the six rows as they should be on four A100 beside the
    reported ones: predicted, low and high of 90 %, error, inside.

    Tensor parallelism shares samples here, where the study's ranks each had their own.
    """
    rows = []
    for row in runs().itertuples():
        dp = row.gpus // row.tp
        stage = 3 if "zero3" in row.config else 0
        plan = f"dp{dp}.tp{row.tp}.z{stage}.mb{row.batch_per_gpu}.full"
        tokens = row.sequence * dp * row.batch_per_gpu
        step = estimate(
            _MODEL,
            catalog.cluster("dgx-a100-40", devices=row.gpus),
            plan,
            global_batch=dp * row.batch_per_gpu,
            sequence=row.sequence,
            dtype="fp16",
            software="deepspeed" if stage else "fsdp2",
        ).iloc[0]
        about = {
            "config": row.config,
            "batch": row.batch_per_gpu,
            "reported": row.tokens_per_s,
            "predicted": tokens / step["step_s"],
            "low": tokens / step["high_s"],
            "high": tokens / step["low_s"],
        }
        rows.append(about)
    table = pd.DataFrame(rows)
    table["error"] = table["predicted"] / table["reported"] - 1
    table["inside"] = table["reported"].between(table["low"], table["high"])
    return table
