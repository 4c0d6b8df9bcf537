"""The ViT-Huge study on two T4, and a simulator fitted on a few of its steps that
predicts the rest.

The public project sidd1196/distributed_vision_training trained ViT-Huge/14 on Food-101
with DeepSpeed: DDP ran out of memory, ZeRO-2 logged 2,368 steps, ZeRO-3 and ZeRO++ left
one traced step each. Its numbers are in `data/vit_huge_steps.csv` and
`vit_overlap.csv`; what the runs were is in `plan_of`.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.catalog import Cluster
from madmax_lib.papers.origin import read_table, with_origin
from madmax_lib.plan import Plan
from madmax_lib.simulator import Parameters, memory, peak_bytes, simulate, usable_bytes
from madmax_lib.timeline import Timeline, breakdown

PHASES = ("forward", "backward", "update", "all_gather")
# its DeepSpeed configuration: reduce_bucket_size and allgather_bucket_size
_BUCKET_ELEMENTS = 5e8
_STEPS = "studies/vit_huge_steps"
_OVERLAP = "studies/vit_overlap"
_MODEL = "vit-huge"
_CLUSTER = "kaggle-2xt4"
_DTYPE = "fp16"
_BATCH = 16  # per GPU
_RULES = "ViT-Huge on two T4, sidd1196/distributed_vision_training"
_RESOLUTION = 1e-5  # of a fitted share, relative
_ROUNDS = 50  # of the fixed-point iteration, at most


def steps() -> pd.DataFrame:
    """The 2,368 logged steps of ZeRO-2: step, kind, seconds of PHASES, step_s, and
    reduce_tail_s.

    kind: regular; overflow, whose update the loss scaler skipped; first update, which
    allocates the optimizer's states; short, the last batch of the epoch. update is the
    optimizer's time without the all-gather.
    reduce_tail_s: part of backward that waits for gradients after the last kernel.
    """
    log = read_table(_STEPS)
    # a step without Adam was skipped by the loss scaler
    kind = np.full(len(log), "regular", dtype=object)
    kind[log["adam_ms"].isna()] = "overflow"
    kind[log["adam_ms"].first_valid_index()] = "first update"
    kind[-1] = "short"
    # DeepSpeed's optimizer time includes the all-gather of the updated weights
    update_ms = log["optimizer_ms"] - log["all_gather_ms"].fillna(0)
    milliseconds = log.assign(update_ms=update_ms)[[f"{phase}_ms" for phase in PHASES]]
    seconds = milliseconds.div(1e3).set_axis(PHASES, axis=1)
    table = log[["step"]].assign(kind=kind).join(seconds)
    tail_s = log["reduce_tail_ms"] / 1e3
    table = table.assign(reduce_tail_s=tail_s, step_s=seconds.sum(axis=1))
    return with_origin(table, _STEPS, rules=_RULES)


def _phases_s(log, first, last):
    """Mean seconds of each phase over the regular steps first..last. Raises ValueError
    if there is none.
    """
    part = log[log["step"].between(first, last) & (log["kind"] == "regular")]
    if part.empty:
        raise ValueError(f"steps {first}..{last}: no regular step in the log")
    return part[list(PHASES)].mean()


def plan_of(strategy: str, *, dp: int = 2) -> Plan:
    """The plan of a run: ddp, zero2, zero3 or zeropp, 16 samples per GPU, full
    recompute, unfused attention.

    zero2 reduces once, after backward, and in full: no kernel of its trace overlaps,
    and DeepSpeed all-reduces its fp16 buckets [use_multi_rank_bucket_allreduce], as
    many bytes as a reduce-scatter in fp32. Raises ValueError for others.
    """
    strategies = {
        "ddp": {},
        "zero2": {"zero": 2, "bucket_bytes": np.inf, "reduce_fp32": True},
        "zero3": {"zero": 3},
        "zeropp": {"zero": 3, "qwz": True, "hpz": True, "qgz": True},
    }
    if strategy not in strategies:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(strategies)}")
    run = {"micro_batch": _BATCH, "recompute": "full", "attention": "unfused"}
    return Plan(dp=dp, **run, **strategies[strategy])


def step_of(
    plan: Plan, parameters: Parameters | None, cluster: Cluster | None = None
) -> Timeline:
    """A simulated step of ViT-Huge under a plan, on the two T4 unless another cluster
    is given.
    """
    model = catalog.model(_MODEL)
    cluster = cluster or catalog.cluster(_CLUSTER)
    return simulate(
        model,
        cluster,
        plan,
        global_batch=_BATCH * plan.dp,
        dtype=_DTYPE,
        parameters=parameters,
    )


def _simulated_phases_s(timeline):
    """Seconds of PHASES of a simulated ZeRO-2 step: backward ends with the last
    gradient reduced.
    """
    # all ranks are alike, one stands for them
    spans = timeline.spans[timeline.spans["rank"] == timeline.ranks[0]]
    name = spans["name"].astype(str)
    end_ns = spans["start_ns"] + spans["dur_ns"]
    adam = name == "adam"
    gather = name.str.startswith("all_gather")
    forward_ns = end_ns[name.str.endswith(" forward")].max()
    backward_ns = end_ns[~adam & ~gather].max() - forward_ns
    update_ns = spans.loc[adam, "dur_ns"].sum()
    gather_ns = spans.loc[gather, "dur_ns"].sum()
    phases_ns = np.array([forward_ns, backward_ns, update_ns, gather_ns], dtype=float)
    return pd.Series(phases_ns / 1e9, index=PHASES)


def _calibrate(measured):
    """Shares of the data-sheet rates that make the simulated ZeRO-2 step as long as a
    measured one.

    measured: seconds of PHASES. The all-gather gives the share of the link, the update
    that of the memory (it holds unscaling, clipping and copies beside Adam), forward
    and backward together that of the peak. Raises ValueError if no shares up to 1 do:
    the step is shorter than the data sheet allows.
    """
    target = _by_share(measured)
    shares = dict.fromkeys(target.index, 0.5)
    for _ in range(_ROUNDS):
        # each share is nearly inversely proportional to the seconds that it governs
        step = step_of(plan_of("zero2"), Parameters(**shares))
        ratio = _by_share(_simulated_phases_s(step)) / target
        if np.abs(ratio - 1).max() < _RESOLUTION:
            provenance = {"source": _RULES, **measured.to_dict()}
            return Parameters(**shares, provenance=provenance)
        before = shares
        shares = {name: min(share * ratio[name], 1.0) for name, share in shares.items()}
        if shares == before:
            break
    raise ValueError(
        f"measured phases {measured.round(4).to_dict()} s: no shares of the data "
        "sheet give them"
    )


def _by_share(phases):
    """Seconds that each share governs."""
    return pd.Series(
        {
            "compute_efficiency": phases["forward"] + phases["backward"],
            "memory_efficiency": phases["update"],
            "network_efficiency": phases["all_gather"],
        }
    )


def fit_and_predict(last: int = 300) -> tuple[Parameters, pd.DataFrame]:
    """Constants from steps 2..last, and each phase and the step: simulated, measured on
    the other steps, error.

    The measured columns: fitted_s of the steps of the fit, rest_s of those after.
    error: simulated over rest_s - 1. Raises ValueError if no regular step is left on
    either side.
    """
    log = steps()
    seen = _phases_s(log, 2, last)
    rest = _phases_s(log, last + 1, int(log["step"].max()))
    parameters = _calibrate(seen)
    simulated = _simulated_phases_s(step_of(plan_of("zero2"), parameters))
    table = pd.DataFrame({"fitted_s": seen, "rest_s": rest, "simulated_s": simulated})
    table.loc["step"] = table.sum()
    table = table.eval("error = simulated_s / rest_s - 1").rename_axis("phase")
    table = table.reset_index()
    return parameters, with_origin(table, _STEPS, rules=_RULES)


def measured_overlap() -> pd.DataFrame:
    """Traced steps as HTA drew them: strategy, rank, idle_s, compute_s, non_compute_s,
    overlap (0..1).
    """
    table = read_table(_OVERLAP)
    names = ("idle", "compute", "non_compute")
    seconds = {f"{name}_s": table[f"{name}_ms"] / 1e3 for name in names}
    share = table["overlap_pct"] / 100
    table = table[["strategy", "rank"]].assign(**seconds, overlap=share)
    return with_origin(table, _OVERLAP, rules=_RULES)


def overlap(parameters: Parameters) -> pd.DataFrame:
    """Share of communication under compute by plan, simulated: case, strategy, total_s,
    comm_s, overlap (0..1).

    Beside the runs: ZeRO-2 whose buckets of 5e8 fp16 elements are reduced beside
    backward as soon as they are full, and with buckets of 25 MiB.
    """
    # 2 bytes per fp16 element
    buckets = {"reduce_fp32": False, "bucket_bytes": 2 * _BUCKET_ELEMENTS}
    bucketed = replace(plan_of("zero2"), **buckets)
    cases = [
        ("one reduction at the end", "zero2", plan_of("zero2")),
        ("buckets of 5e8 elements", "zero2", bucketed),
        ("buckets of 25 MiB", "zero2", replace(bucketed, bucket_bytes=25 * 2**20)),
        ("layer by layer", "zero3", plan_of("zero3")),
        ("layer by layer, 8 and 4 bits", "zeropp", plan_of("zeropp")),
    ]
    rows = []
    for case, strategy, plan in cases:
        rank = breakdown(step_of(plan, parameters)).iloc[0]
        parts = rank[["total_s", "compute_s", "comm_s", "overlap"]]
        rows.append({"case": case, "strategy": strategy, **parts})
    return with_origin(pd.DataFrame(rows), _STEPS, _OVERLAP, rules=_RULES)


def memory_parts() -> pd.DataFrame:
    """Bytes on a T4 by strategy, component and phase: the peak, the one before the
    first update, and what is usable.

    Columns strategy, component, phase, size_bytes, peak_bytes, before_update_bytes,
    usable_bytes.
    """
    parts = []
    model = catalog.model(_MODEL)
    usable = usable_bytes(catalog.cluster(_CLUSTER).device)
    buckets = {"reduce_fp32": False, "bucket_bytes": 2 * _BUCKET_ELEMENTS}
    software = {"ddp": "torch", "zero2": "deepspeed", "zero3": "deepspeed"}
    for strategy, name in software.items():
        plan = replace(plan_of(strategy), **buckets)
        table = memory(model, plan, dtype=_DTYPE, software=name)
        # AdamW makes its temporaries in the first update: until then they are missing
        before = peak_bytes(table[table["component"] != "optimizer temporaries"])
        table = table.drop(columns="stage").assign(
            strategy=strategy, peak_bytes=peak_bytes(table)
        )
        parts.append(table.assign(before_update_bytes=before, usable_bytes=usable))
    table = pd.concat(parts, ignore_index=True)
    return with_origin(table, "published_memory", rules=_RULES)


def scaling(parameters: Parameters) -> pd.DataFrame:
    """Predicted throughput on 2, 4 and 8 T4, 16 samples each: on one host, or in nodes
    of two on 10 Gb/s Ethernet.

    Columns place, strategy, gpus, step_s, samples_per_s, efficiency (per GPU, over that
    of the fewest). The fitted share of the link is that of the host's memory path;
    Ethernet counts in full, and every GPU of a host has a path of its own, though real
    ones share PCIe switches: upper bounds.
    """
    rows = []
    pair = catalog.cluster(_CLUSTER)
    # The simulator multiplies all links by the fitted share; divided by it before,
    # Ethernet counts in full.
    rate = pair.inter.bandwidth_bytes_per_s / parameters.network_efficiency
    pair = replace(pair, inter=replace(pair.inter, bandwidth_bytes_per_s=rate))
    strategies = ("zero2", "zero3", "zeropp")
    cases = product(("one host", "nodes of two"), strategies, (2, 4, 8))
    for where, strategy, gpus in cases:
        size = {"nodes": gpus // pair.devices_per_node}
        if where == "one host":
            size = {"devices_per_node": gpus}
        step = step_of(plan_of(strategy, dp=gpus), parameters, replace(pair, **size))
        step_s = float(breakdown(step)["total_s"].max())
        row = {"place": where, "strategy": strategy, "gpus": gpus, "step_s": step_s}
        rows.append(row | {"samples_per_s": _BATCH * gpus / step_s})
    table = pd.DataFrame(rows)
    # rows of a place and strategy begin with the fewest GPUs
    per_gpu = table["samples_per_s"] / table["gpus"]
    groups = per_gpu.groupby([table["place"], table["strategy"]])
    table["efficiency"] = per_gpu / groups.transform("first")
    return with_origin(table, _STEPS, rules=_RULES)


def claims(parameters: Parameters, predicted: pd.DataFrame) -> pd.DataFrame:
    """Measured values of the study beside ours: claim, theirs, ours, error; overlaps are
    shares, their error a difference.

    parameters, predicted: of `fit_and_predict`.
    """
    traced = measured_overlap().groupby("strategy")["overlap"].mean()
    # the first case of a strategy is the one that was run
    cases = overlap(parameters).drop_duplicates("strategy")
    parts = memory_parts()
    published = catalog.table("published_memory")
    allocated = published.query(
        "model == @_MODEL and quantity == 'weights and optimizer'"
    )["value"]
    ddp = parts.query("strategy == 'ddp'").iloc[0]
    states = parts.query(
        "strategy == 'zero2' and component in ['weights', 'optimizer']"
    )["size_bytes"].sum()
    # fp16 weights; the second bucket is what the first one of 5e8 elements leaves
    weight_bytes = 2 * catalog.model(_MODEL).parameters
    # half comes from the other rank
    gather_s = _phases_s(steps(), 2, 300)["all_gather"]
    gathered_bytes_per_s = weight_bytes / 2 / gather_s
    second_bucket_bytes = weight_bytes - 2 * _BUCKET_ELEMENTS
    tail_s = steps().query("kind == 'regular'")["reduce_tail_s"].mean()
    tail = (
        "wait for gradients after backward: second bucket at the all-gather's rate [s]"
    )
    step = predicted.set_index("phase").loc["step"]
    needed_gb = ddp[["usable_bytes", "peak_bytes"]] / 1e9
    states_gb = (float(allocated.iloc[0]), states / 1e9)
    rows = [
        ("step of ZeRO-2 after the fit [s]", step["rest_s"], step["simulated_s"]),
        (tail, tail_s, second_bucket_bytes / gathered_bytes_per_s),
        ("weights and optimizer of ZeRO-2 [GB]", *states_gb),
        ("usable memory of a T4, needed by DDP [GB]", *needed_gb),
    ]
    for case in cases.itertuples():
        claim = f"overlap of {case.strategy}, mean of ranks"
        rows.append((claim, traced[case.strategy], case.overlap))
    table = pd.DataFrame(rows, columns=["claim", "theirs", "ours"])
    relative = ~table["claim"].str.startswith("overlap")
    unit = table["theirs"].where(relative, 1.0)
    table["error"] = table.eval("ours - theirs") / unit
    return with_origin(table, _STEPS, _OVERLAP, rules=_RULES)
