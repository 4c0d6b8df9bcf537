"""Figures and claims of MAD-Max computed anew, beside what was published.

One function per figure or study of [Hsia et al., ISCA 2024, arXiv 2310.02784]; each
returns a tidy table that a picture of `papers.madmax.plots` shows. Figures 11 to 13 and
17 to 20 have no published number: there the trend is all.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from madmax_lib.catalog import cluster
from madmax_lib.papers.madmax.model import cloud_cost, timeline
from madmax_lib.papers.madmax.rules import STRATEGIES, MadmaxRules
from madmax_lib.papers.madmax.suite import (
    AS_RELEASED,
    COMMUNICATION,
    FILES,
    PIECES,
    best,
    cases,
    catalog_systems,
    published,
    published_values,
    released,
    steps,
    suite,
    systems,
)
from madmax_lib.papers.origin import (
    beside_published,
    provenance,
    read_table,
    with_origin,
)
from madmax_lib.timeline import Timeline

_RELEASED_STRATEGIES = STRATEGIES[:-1]  # the last one is ours
_DLRMS = [
    "DLRM-A",
    "DLRM-A Transformer",
    "DLRM-A MoE",
    "DLRM-B",
    "DLRM-B Transformer",
    "DLRM-B MoE",
]
_LLMS = ["GPT-3", "LLaMA-65B", "LLaMA2-70B 4K", "LLM-MoE 1.8T"]
_LLM_GPUS = 2048  # table III
_LLM_SYSTEM = f"llm-a100-{_LLM_GPUS}"
_SCALED = {"DLRM-A": "zionex-128", "GPT-3": _LLM_SYSTEM}
# columns of a system that grow together in figures 17 to 20
_PARTS = {
    "compute": ["f32_flops", "f16_flops"],
    "memory": ["mem_bw", "mem_cap"],
    "interconnect": ["bw_per_nvlink", "ibroce_bw"],
}
_PARTS["all three"] = [column for columns in _PARTS.values() for column in columns]
_SCHEDULES = ("pre-optimised", "optimised")
_SERIAL = PIECES[:4]  # the pieces of figure 7: DDP gathers and scatters nothing
_RATE = "throughput_samples_per_s"


def _suite_steps(
    models,
    strategies,
    task,
    rules="released",
):
    """Models on the system of their suite: DLRM on 128 A100-40, LLM on 2,048 A100-80."""
    dlrm = [model for model in models if model.startswith("DLRM")]
    llm = [model for model in models if model not in dlrm]
    groups = {"zionex-128": dlrm, _LLM_SYSTEM: llm}
    parts = [
        cases(group, strategies, [name], task)
        for name, group in groups.items()
        if group
    ]
    table = steps(pd.concat(parts, ignore_index=True), rules=rules)
    keys = "gain/" + table["model"] + "/" + table["dense_strategy"] + f"/{task}"
    return table.assign(published_gain=published_values(keys))


def strategies_over_fsdp() -> pd.DataFrame:
    """Figure 10: pre-training throughput of every strategy over FSDP (also figures 11
    to 13 for single models).
    """
    return _suite_steps([*_DLRMS, *_LLMS], _RELEASED_STRATEGIES, "pretrain")


def task_dependence() -> pd.DataFrame:
    """Figure 14: every strategy over FSDP for pre-training, fine-tuning (the head only,
    ours) and inference.
    """
    models = ["DLRM-A", "DLRM-A Transformer", "DLRM-A MoE", "GPT-3"]
    parts = [
        _suite_steps(models, _RELEASED_STRATEGIES, task)
        for task in ("pretrain", "finetune", "inference")
    ]
    return released(pd.concat(parts, ignore_index=True))


def context_scaling() -> pd.DataFrame:
    """Figure 15: LLaMA2-70B with 4K to 32K tokens per sample under every strategy."""
    models = {f"LLaMA2-70B {k}K": 1024 * k for k in (4, 8, 16, 32)}
    table = _suite_steps([*models], _RELEASED_STRATEGIES, "pretrain")
    return table.assign(context=table["model"].map(models))


def validation_bars() -> pd.DataFrame:
    """Figure 7: pieces of a DLRM-A step on 128 and 8 GPUs, one after another and
    overlapped, in ms.

    Columns gpus, who (measured, paper, ours), bar (serialized, overlapped), piece,
    value_ms, published_ms.
    """
    rows = []
    for gpus in (128, 8):
        ours = _figure_7_step(gpus)
        names = [*_SERIAL, "exposed_comm_ms"]
        theirs = {name: published(f"fig7_{gpus}_{name}") for name in names}
        rows += [
            (gpus, "ours", "serialized", name, ours[name], theirs[name])
            for name in _SERIAL
        ]
        # the overlapped bar: compute, and the communication that is left exposed
        sides = (ours, theirs)
        compute = [side["gemm_ms"] + side["emb_ms"] for side in sides]
        exposed = [side["exposed_comm_ms"] for side in sides]
        rows.append((gpus, "ours", "overlapped", "compute", *compute))
        rows.append((gpus, "ours", "overlapped", "exposed", *exposed))
    # of the measured step and of the paper's model only the sum is published
    sums = {"measured": "dlrm_a_serialized", "paper": "dlrm_a_serialized_paper"}
    rows += [
        (128, who, "serialized", "all", published(key), math.nan)
        for who, key in sums.items()
    ]
    columns = ["gpus", "who", "bar", "piece", "value_ms", "published_ms"]
    return released(pd.DataFrame(rows, columns=columns))


def _figure_7_step(gpus):
    """DLRM-A under DDP with 512 samples per GPU, as in the release."""
    case = cases(["DLRM-A"], ["ddp"], [f"zionex-{gpus}"], global_batch=512 * gpus)
    return steps(case).iloc[0]


def cloud_comparison(samples: float = 1e9) -> pd.DataFrame:
    """Figures 1 and 16: DLRM-A pre-training on cloud instances, with hours, GPU-hours,
    cost and energy of `samples`.

    a100_hours are GPU-hours weighted by FP16 peak over that of an A100. published_mqps
    from the artifact's sheet.
    """
    types = read_table("madmax/systems")
    public = types.loc[types["provider"] != "Internal", "name"]
    names = [f"{name}-{gpus}" for name, gpus in product(public, (64, 128, 256, 512))]
    instances = systems(names)
    table = steps(cases(["DLRM-A"], ["fsdp", "ddp", "tp,ddp"], names), instances)
    about = instances.set_index("name").loc[table["system"]].reset_index(drop=True)
    prices = ["num_devices", "usd_per_gpu_hour", "tdp_w_per_gpu"]
    cost = cloud_cost(table[_RATE], samples, *(about[column] for column in prices))
    table = table.assign(
        **about[["instance", "provider", "gpu", "num_devices"]], **cost
    )
    # 312 TFLOP/s: dense FP16 peak of an A100
    table["a100_hours"] = table["gpu_hours"] * about["f16_flops"] / 312e12
    table = table.eval(f"mqps = {_RATE} / 1e6")
    keys = [
        f"cloud/{r.instance}/{r.num_devices}/{r.dense_strategy}"
        for r in table.itertuples()
    ]
    table["published_mqps"] = published_values(keys)
    return released(table)


def vit_mfu() -> pd.DataFrame:
    """Figure 8: MFU of nine ViT runs under FSDP on p4d instances: measured, predicted
    by the paper, and by us.

    Ours are the released rules with the constant utilisation of the release; the
    paper's curve of utilisation over batch and FLOPs is not public. fitted multiplies
    that prediction by c x (local batch)^k, fitted to measured / ours of the other eight
    runs (leave one out). *_error are relative to the measured value.
    """
    runs = read_table("published_vision")
    # MFU of a p4d's A100: TFLOP/s of a GPU over its FP16 peak of 312
    result = runs[["model", "gpus", "global_batch"]].assign(
        measured=runs["measured_tflop_per_s"] / 312,
        paper=runs["paper_tflop_per_s"] / 312,
    )
    ours = []
    for run in runs.itertuples():
        system = f"p4d.24xlarge-{run.gpus}"
        case = cases([run.model], ["fsdp"], [system], global_batch=run.global_batch)
        rate = steps(case).iloc[0][_RATE]
        # backward takes twice the FLOPs of forward: 3 x in all
        flops = 3 * run.forward_tflop * 1e12 * rate / run.gpus
        ours.append(flops / 312e12)
    result["ours"] = ours
    # log(measured / ours) = log c + k log(local batch), a line through the others
    log_batch = np.log(result.eval("global_batch / gpus"))
    log_ratio = np.log(result.eval("measured / ours"))
    fitted = []
    for run, local_batch in result.eval("global_batch / gpus").items():
        power, factor = np.polyfit(log_batch.drop(run), log_ratio.drop(run), 1)
        fitted.append(ours[run] * math.exp(factor) * local_batch**power)
    result["fitted"] = fitted
    for who in ("paper", "ours", "fitted"):
        result = result.eval(f"{who}_error = {who} / measured - 1")
    return with_origin(result, *FILES[:2], "published_vision", rules=AS_RELEASED)


def prefetch_overlap(
    models: Sequence[str] = ("LLaMA-65B", "LLaMA2-70B 4K"),
) -> pd.DataFrame:
    """Figure 9: share of FSDP communication that is hidden, without and with
    prefetching of the backward pass.
    """
    fsdp = cases(models, ["fsdp"], [_LLM_SYSTEM])
    # share of AllGather and ReduceScatter under compute, see `steps`
    parts = [
        steps(fsdp, rules=MadmaxRules(schedule=name)).assign(schedule=name)
        for name in _SCHEDULES
    ]
    return released(pd.concat(parts, ignore_index=True))


def one_step(
    model: str,
    strategy: str,
    system: str,
    task: str = "pretrain",
    *,
    rules: str | MadmaxRules = "released",
) -> Timeline:
    """The step of one case on a system such as "zionex-128" as a Timeline (figures 6
    and 9).
    """
    case = cases([model], [strategy], [system], task).iloc[0]
    step = timeline(case, suite(), systems([system]), rules=rules)
    origin = step.meta.provenance | provenance(*FILES, rules=AS_RELEASED)
    return replace(step, meta=replace(step.meta, provenance=origin))


def scaling_study(factors: Sequence[float] = (1, 2, 4, 8)) -> pd.DataFrame:
    """Figures 17 to 20: compute, memory and interconnect made faster alone and
    together; best strategy that fits.

    speedup: throughput over that of factor 1. Memory means its bandwidth and size.
    """
    tables = []
    for (model, name), (part, columns), factor in product(
        _SCALED.items(), _PARTS.items(), factors
    ):
        text = f"{part} x{factor}"
        scaled = systems([name]).assign(name=text)
        scaled[columns] *= factor
        table = best(steps(cases([model], _RELEASED_STRATEGIES, [text]), scaled))
        tables.append(table.assign(part=part, factor=factor))
    table = pd.concat(tables, ignore_index=True).query("limit == 'memory'")
    table = table.reset_index(drop=True)
    # rows of a model and part begin with the first factor
    first = table.groupby(["model", "part"])[_RATE].transform("first")
    return released(table.assign(speedup=table[_RATE] / first))


def hardware_study(
    names: Sequence[str], *, nvlink_all: Sequence[str] = ()
) -> pd.DataFrame:
    """Figures 17 to 20: clusters of the catalog at equal size, FSDP and the best
    strategy that fits.

    DLRM-A on 128 devices, GPT-3 on 2,048. nvlink_all: those that are added once more
    with all nodes joined by their inner link, up to 256 devices (a SuperPOD with NVLink
    switches). per_gpu: samples/s of one device over the first cluster under FSDP. A
    model whose precision a device lacks is left out.
    """
    tables = []
    for model, devices in (("DLRM-A", 128), ("GPT-3", 2048)):
        # as many nodes as come nearest to the model's number of devices
        sized = [
            replace(c, nodes=max(round(devices / c.devices_per_node), 1))
            for c in map(cluster, names)
        ]
        joined = [_joined(one) for one in sized if one.name in nvlink_all]
        usable = catalog_systems(sized + joined)
        if model.startswith("DLRM"):  # trained in FP32 or TF32
            usable = usable[usable["f32_flops"] > 0]
        table = steps(cases([model], _RELEASED_STRATEGIES, [*usable["name"]]), usable)
        fastest = best(table).query("limit == 'memory'").assign(choice="best that fits")
        fsdp = table[table["dense_strategy"] == "fsdp"]
        fsdp = fsdp.assign(choice="fsdp", limit="memory")
        both = pd.concat([fsdp, fastest], ignore_index=True)
        both["devices"] = both["system"].map(usable.set_index("name")["num_devices"])
        per_gpu = both[_RATE] / both["devices"]
        tables.append(both.assign(per_gpu=per_gpu / per_gpu.iloc[0]))
    files = (*FILES[:2], "devices", "links", "clusters")
    return with_origin(pd.concat(tables, ignore_index=True), *files, rules=AS_RELEASED)


def _joined(one):
    """Cluster whose nodes are joined by their inner link."""
    size = min(256, one.world_size)  # GPUs that one level of NVLink switches joins
    nodes = one.world_size // size
    name = f"{one.name} superpod"
    return replace(one, name=name, devices_per_node=size, nodes=nodes)


def class_strategies(model: str, system: str) -> pd.DataFrame:
    """Every pair of a strategy for the MLPs and one for the transformer blocks of a
    model on a system.

    Columns of `steps`, with mlp and transformer; gain over fsdp for both classes.
    """
    # one strategy for both classes is on the diagonal
    pairs = list(product(("fsdp", "ddp", "tp,ddp", "fsdp,ddp"), repeat=2))
    texts = [f"mlp={mlp}; transformer={blocks}" for mlp, blocks in pairs]
    table = steps(cases([model], texts, [system]))
    table[["mlp", "transformer"]] = pairs
    fsdp = table[_RATE].iloc[pairs.index(("fsdp", "fsdp"))]
    return table.assign(gain=table[_RATE] / fsdp)


def tp_inside_fsdp_across() -> pd.DataFrame:
    """TP inside the node and FSDP across nodes (ours, seed 000's idea) against every
    strategy of the release.

    GPT with 96 and 128 layers on 2,048 A100-80 and DLRM-A on 128 A100-40, by the
    corrected rules, in which a gradient AllReduce carries the shard only.
    """
    table = _suite_steps(
        ["GPT-3", "GPT-1T", "DLRM-A"], STRATEGIES, "pretrain", rules="corrected"
    )
    table = table.drop(columns="published_gain")
    return with_origin(table, *FILES, rules="MAD-Max corrected")


def claims() -> pd.DataFrame:
    """Every published claim of the model beside ours: figure, claim, unit, theirs,
    ours, error, follows.

    error is ours / theirs - 1; follows tells whether the number can follow from public
    material.
    """
    # rows that are measurements have no number of ours
    ours = _table_1() | _gains()
    names = (*_SERIAL, "exposed_comm_ms", "overlapped_comm_ms", "iteration_ms")
    for gpus in (128, 8):
        step = _figure_7_step(gpus)
        ours |= {f"fig7_{gpus}_{name}": step[name] for name in names}
    table = beside_published("madmax", ours)
    table = table.query("follows != 'measured' and key in @ours")
    return released(table.reset_index(drop=True))


def _table_1():
    dlrm = steps(cases(["DLRM-A", "DLRM-B"], ["ddp"], ["zionex-128"]))
    llama = prefetch_overlap(["LLaMA-65B"]).set_index("schedule")
    vit = vit_mfu()
    llama_s = llama.loc["pre-optimised", "iteration_ms"] / 1e3
    a = dlrm.iloc[0]
    mqps = dlrm[_RATE] / 1e6
    tokens_per_step = 2048 * 2048  # global batch x context
    # LLaMA as table I states it: 306k steps, 1.4T tokens
    return {
        "dlrm_a_serialized_paper": a[PIECES].sum(),
        "dlrm_a_exposed_paper": a["exposed_comm_ms"] / a[COMMUNICATION].sum(),
        "dlrm_a_mqps": mqps[0],
        "dlrm_b_mqps": mqps[1],
        "llama_gpu_hours": 306e3 * llama_s * _LLM_GPUS / 3600,
        "llama_days": 1.4e12 / tokens_per_step * llama_s / 86_400,
        "prefetch": llama.loc["optimised", "overlapped_share"],
        "vit_accuracy": 1 - (vit["fitted"] - vit["measured"]).abs().mean(),
    }


def _gains():
    train = strategies_over_fsdp()
    tasks = task_dependence()
    fitting = best(train).set_index("limit")["gain"]
    inference = best(tasks[tasks["task"] == "inference"]).set_index("limit")["gain"]
    rows = pd.concat([train, tasks, context_scaling()])
    gains = {
        f"gain/{row.model}/{row.dense_strategy}/{row.task}": row.gain
        for row in rows.itertuples()
    }
    return gains | {
        "gain_max": fitting["memory"].max(),
        "gain_min": fitting["memory"].min(),
        "gain_mean": fitting["memory"].mean(),
        "gain_max_free": fitting["none"].max(),
        "gain_inference": inference["memory"].max(),
        "gain_inference_free": inference["none"].max(),
    }
