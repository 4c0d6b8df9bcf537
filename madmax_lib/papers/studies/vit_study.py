"""What did the ViT-Huge study on two T4 measure, and does the simulator, told a few of its steps, foresee the rest?

The public project sidd1196/distributed_vision_training trained ViT-Huge/14 on Food-101 with DeepSpeed: DDP ran out of
memory, ZeRO-2 logged 2,368 steps, ZeRO-3 and ZeRO++ left one traced step each. Its numbers are in
`data/vit_huge_steps.csv` and `vit_overlap.csv`; what the runs were is in `plan_of`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.accounting import breakdown
from madmax_lib.papers.origin import read_table, with_origin
from madmax_lib.plan import Plan
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.simulate import simulate
from madmax_lib.specs import Cluster
from madmax_lib.timeline import Timeline

__all__ = ["BUCKET_ELEMENTS", "PHASES", "calibrate", "claims", "fit_and_predict", "measured_overlap", "memory_parts",
           "overlap", "phases_s", "plan_of", "scaling", "simulated_phases_s", "step_of", "steps"]  # fmt: skip

PHASES = ("forward", "backward", "update", "all_gather")
BUCKET_ELEMENTS = 5e8  # its DeepSpeed configuration: reduce_bucket_size and allgather_bucket_size
_STEPS, _OVERLAP = "studies/vit_huge_steps", "studies/vit_overlap"
_MODEL, _CLUSTER, _DTYPE, _BATCH = "vit-huge", "kaggle-2xt4", "fp16", 16  # batch per GPU
_RULES = "ViT-Huge on two T4, sidd1196/distributed_vision_training"
_RESOLUTION, _ROUNDS = 1e-5, 50  # of a fitted share, relative


def steps() -> pd.DataFrame:
    """The 2,368 logged steps of ZeRO-2: step, kind, seconds of PHASES, step_s, and reduce_tail_s.

    kind: regular; overflow, whose update the loss scaler skipped; first update, which allocates the optimizer's
    states; short, the last batch of the epoch. update is the optimizer's time without the all-gather.
    reduce_tail_s: part of backward that waits for gradients after the last kernel.
    """
    log = read_table(_STEPS)
    kind = np.full(len(log), "regular", dtype=object)
    kind[log["adam_ms"].isna()] = "overflow"
    kind[np.flatnonzero(log["adam_ms"].notna())[0]] = "first update"
    kind[-1] = "short"
    table = pd.DataFrame({"step": log["step"], "kind": kind, "forward": log["forward_ms"] / 1e3,
                          "backward": log["backward_ms"] / 1e3,
                          "update": (log["optimizer_ms"] - log["all_gather_ms"].fillna(0)) / 1e3,
                          "all_gather": log["all_gather_ms"] / 1e3,
                          "reduce_tail_s": log["reduce_tail_ms"] / 1e3})  # fmt: skip
    table["step_s"] = table[["forward", "backward", "update", "all_gather"]].sum(axis=1)
    return with_origin(table, _STEPS, rules=_RULES)


def phases_s(log: pd.DataFrame, first: int, last: int) -> pd.Series:
    """Mean seconds of each phase over the regular steps first..last. Raises ValueError if there is none."""
    part = log[log["step"].between(first, last) & (log["kind"] == "regular")]
    if part.empty:
        raise ValueError(f"steps {first}..{last}: no regular step in the log")
    return part[list(PHASES)].mean()


def plan_of(strategy: str, *, dp: int = 2) -> Plan:
    """The plan of a run: ddp, zero2, zero3 or zeropp, 16 samples per GPU, full recompute, unfused attention.

    zero2 reduces once, after backward, and in full: no kernel of its trace overlaps, and DeepSpeed all-reduces its fp16
    buckets [use_multi_rank_bucket_allreduce], as many bytes as a reduce-scatter in fp32. Raises ValueError for others.
    """
    known = {
        "ddp": {},
        "zero2": {"zero": 2, "bucket_bytes": np.inf, "reduce_fp32": True},
        "zero3": {"zero": 3},
        "zeropp": {"zero": 3, "qwz": True, "hpz": True, "qgz": True},
    }
    if strategy not in known:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(known)}")
    return Plan(dp=dp, micro_batch=_BATCH, recompute="full", attention="unfused", **known[strategy])


def step_of(plan: Plan, parameters: Parameters | None, cluster: Cluster | None = None) -> Timeline:
    """A simulated step of ViT-Huge under a plan, on the two T4 unless another cluster is given."""
    cluster = cluster or catalog.cluster(_CLUSTER)
    return simulate(catalog.model(_MODEL), cluster, plan, global_batch=_BATCH * plan.dp, dtype=_DTYPE,
                    parameters=parameters)  # fmt: skip


def simulated_phases_s(timeline: Timeline) -> pd.Series:
    """Seconds of PHASES of a simulated ZeRO-2 step: backward ends with the last gradient reduced."""
    spans = timeline.spans[timeline.spans["rank"] == timeline.ranks[0]]
    name, end_ns = spans["name"].astype(str), spans["start_ns"] + spans["dur_ns"]
    adam, gather = name == "adam", name.str.startswith("all_gather")
    forward_ns = end_ns[name.str.endswith(" forward")].max()
    backward_ns = end_ns[~adam & ~gather].max() - forward_ns
    values = forward_ns, backward_ns, spans.loc[adam, "dur_ns"].sum(), spans.loc[gather, "dur_ns"].sum()
    return pd.Series(np.array(values, dtype=float) / 1e9, index=PHASES)


def calibrate(measured: pd.Series) -> Parameters:
    """Shares of the data-sheet rates that make the simulated ZeRO-2 step as long as a measured one.

    measured: seconds of PHASES. The all-gather gives the share of the link, the update that of the memory (it holds
    unscaling, clipping and copies beside Adam), forward and backward together that of the peak. Raises ValueError if
    no shares up to 1 do: the step is shorter than the data sheet allows.
    """
    shares = {"compute_efficiency": 0.5, "memory_efficiency": 0.5, "network_efficiency": 0.5}
    target = _by_share(measured)
    for _ in range(_ROUNDS):
        ratio = _by_share(simulated_phases_s(step_of(plan_of("zero2"), Parameters(**shares)))) / target
        if np.abs(ratio - 1).max() < _RESOLUTION:
            return Parameters(**shares, provenance={"source": _RULES, **measured.to_dict()})
        before, shares = shares, {name: min(share * ratio[name], 1.0) for name, share in shares.items()}
        if shares == before:
            break
    raise ValueError(f"measured phases {measured.round(4).to_dict()} s: no shares of the data sheet give them")


def _by_share(phases: pd.Series) -> pd.Series:
    """Seconds that each share governs."""
    return pd.Series({"compute_efficiency": phases["forward"] + phases["backward"],
                      "memory_efficiency": phases["update"], "network_efficiency": phases["all_gather"]})  # fmt: skip


def fit_and_predict(last: int = 300) -> tuple[Parameters, pd.DataFrame]:
    """Constants from steps 2..last, and each phase and the step: simulated, measured on the other steps, error.

    The measured columns: fitted_s of the steps of the fit, rest_s of those after. error: simulated over rest_s - 1.
    Raises ValueError if no regular step is left on either side.
    """
    log = steps()
    seen, rest = phases_s(log, 2, last), phases_s(log, last + 1, int(log["step"].max()))
    parameters = calibrate(seen)
    table = pd.DataFrame({"fitted_s": seen, "rest_s": rest,
                          "simulated_s": simulated_phases_s(step_of(plan_of("zero2"), parameters))})  # fmt: skip
    table.loc["step"] = table.sum()
    table["error"] = table["simulated_s"] / table["rest_s"] - 1
    table = table.rename_axis("phase").reset_index()
    return parameters, with_origin(table, _STEPS, rules=_RULES)


def measured_overlap() -> pd.DataFrame:
    """Traced steps as HTA drew them: strategy, rank, idle_s, compute_s, non_compute_s, overlap (0..1)."""
    table = read_table(_OVERLAP)
    seconds = {f"{name}_s": table[f"{name}_ms"] / 1e3 for name in ("idle", "compute", "non_compute")}
    table = table[["strategy", "rank"]].assign(**seconds, overlap=table["overlap_pct"] / 100)
    return with_origin(table, _OVERLAP, rules=_RULES)


def overlap(parameters: Parameters) -> pd.DataFrame:
    """Share of communication under compute by plan, simulated: case, strategy, total_s, comm_s, overlap (0..1).

    Beside the runs: ZeRO-2 whose buckets of 5e8 fp16 elements are reduced beside backward as soon as they are full, and
    with buckets of 25 MiB.
    """
    bucketed = replace(plan_of("zero2"), reduce_fp32=False, bucket_bytes=2 * BUCKET_ELEMENTS)
    cases = [
        ("one reduction at the end", "zero2", plan_of("zero2")),
        ("buckets of 5e8 elements", "zero2", bucketed),
        ("buckets of 25 MiB", "zero2", replace(bucketed, bucket_bytes=25 * 2**20)),
        ("layer by layer", "zero3", plan_of("zero3")),
        ("layer by layer, 8 and 4 bits", "zeropp", plan_of("zeropp")),
    ]
    rows = []
    for case, strategy, plan in cases:
        found = breakdown(step_of(plan, parameters)).iloc[0]
        rows.append({"case": case, "strategy": strategy, **found[["total_s", "compute_s", "comm_s", "overlap"]]})
    return with_origin(pd.DataFrame(rows), _STEPS, _OVERLAP, rules=_RULES)


def memory_parts() -> pd.DataFrame:
    """Bytes on a T4 by strategy, component and phase: the peak, the one before the first update, and what is usable.

    Columns strategy, component, phase, size_bytes, peak_bytes, before_update_bytes, usable_bytes.
    """
    parts, model, usable = [], catalog.model(_MODEL), usable_bytes(catalog.cluster(_CLUSTER).device)
    for strategy, stack in (("ddp", "torch"), ("zero2", "deepspeed"), ("zero3", "deepspeed")):
        plan = replace(plan_of(strategy), reduce_fp32=False, bucket_bytes=2 * BUCKET_ELEMENTS)
        table = memory(model, plan, dtype=_DTYPE, stack=stack)
        before = peak_bytes(table[table["component"] != "optimizer temporaries"])
        parts.append(table.drop(columns="stage").assign(strategy=strategy, peak_bytes=peak_bytes(table),
                                                        before_update_bytes=before, usable_bytes=usable))  # fmt: skip
    return with_origin(pd.concat(parts, ignore_index=True), "published_memory.csv", rules=_RULES)


def scaling(parameters: Parameters) -> pd.DataFrame:
    """Predicted throughput on 2, 4 and 8 T4, 16 samples each: on one host, or in nodes of two on 10 Gb/s Ethernet.

    Columns place, strategy, gpus, step_s, samples_per_s, efficiency (per GPU, over that of the fewest). The fitted
    share of the link is that of the host's memory path; Ethernet counts in full, and every GPU of a host has a path of
    its own, though real ones share PCIe switches: upper bounds.
    """
    rows, pair = [], catalog.cluster(_CLUSTER)
    port = replace(pair.inter, bandwidth_bytes_per_s=pair.inter.bandwidth_bytes_per_s / parameters.network_efficiency)
    for place in ("one host", "nodes of two"):
        for strategy in ("zero2", "zero3", "zeropp"):
            for count in (2, 4, 8):
                size = {"devices_per_node": count} if place == "one host" else {"nodes": count // pair.devices_per_node}
                step = step_of(plan_of(strategy, dp=count), parameters, replace(pair, inter=port, **size))
                step_s = float(breakdown(step)["total_s"].max())
                rows.append({"place": place, "strategy": strategy, "gpus": count, "step_s": step_s,
                             "samples_per_s": _BATCH * count / step_s})  # fmt: skip
    table = pd.DataFrame(rows)
    per_gpu = table["samples_per_s"] / table["gpus"]
    table["efficiency"] = per_gpu / per_gpu.groupby([table["place"], table["strategy"]]).transform("first")
    return with_origin(table, _STEPS, rules=_RULES)


def claims(parameters: Parameters, predicted: pd.DataFrame) -> pd.DataFrame:
    """What the study measured beside ours: claim, measured, ours, error; overlaps are shares, their error a difference.

    parameters, predicted: of `fit_and_predict`.
    """
    traced, simulated = measured_overlap().groupby("strategy")["overlap"], overlap(parameters).set_index("case")
    parts = memory_parts().groupby("strategy")[["peak_bytes", "usable_bytes"]].first()
    held = memory_parts().query("strategy == 'zero2'").set_index("component")["size_bytes"]
    states = held["weights"] + held["optimizer"]
    allocated = catalog.table("published_memory")
    allocated = allocated[(allocated["model"] == _MODEL) & (allocated["quantity"] == "weights and optimizer")]
    gather = _gathered_bytes() / phases_s(steps(), 2, 300)["all_gather"]
    tail_s = steps().query("kind == 'regular'")["reduce_tail_s"].mean()
    second = 2 * (catalog.model(_MODEL).parameters - BUCKET_ELEMENTS)
    step = predicted.set_index("phase").loc["step"]
    rows = [
        ("step of ZeRO-2 after the fit [s]", step["rest_s"], step["simulated_s"]),
        ("wait for gradients after backward: second bucket at the all-gather's rate [s]", tail_s, second / gather),
        ("weights and optimizer of ZeRO-2 [GB]", float(allocated["value"].iloc[0]), states / 1e9),
        ("usable memory of a T4, needed by DDP [GB]", parts.at["ddp", "usable_bytes"] / 1e9,
         parts.at["ddp", "peak_bytes"] / 1e9),
        *((f"overlap of {strategy}, mean of ranks", traced.mean()[strategy], simulated.at[case, "overlap"])
          for strategy, case in (("zero2", "one reduction at the end"), ("zero3", "layer by layer"),
                                 ("zeropp", "layer by layer, 8 and 4 bits"))),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["claim", "measured", "ours"])
    share = table["claim"].str.startswith("overlap")
    table["error"] = np.where(share, table["ours"] - table["measured"], table["ours"] / table["measured"] - 1)
    return with_origin(table, _STEPS, _OVERLAP, rules=_RULES)


def _gathered_bytes() -> float:
    """What a rank receives when fp16 weights are gathered over two ranks."""
    return 2 * catalog.model(_MODEL).parameters / 2
