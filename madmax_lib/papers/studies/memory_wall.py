"""Models of the heterogeneous-training study on its two machines: which can be trained,
how fast, and what limits them.

dheerj188/HeterogeneousTraining-IISc lists GPT-2 shapes of 3B to 41B parameters and
names two machines, four V100-32GB with 192 GB and a DGX H100 with 2 TB; it stores no
times. All rows here are predictions of `simulator`, beside the largest models that it
and others report (`data/scale_limits.csv`).
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.catalog import Cluster, Transformer
from madmax_lib.papers.origin import read_table, with_origin
from madmax_lib.plan import Case, Plan
from madmax_lib.simulator import (
    METHODS,
    Policy,
    estimate,
    fits,
    largest_model,
    shipped,
    step_energy,
)
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.fits import SIZE_METHODS, gpt_shape
from madmax_lib.simulator.offload.offload import best_offload, offload_times
from madmax_lib.simulator.offload.placement import rates, split_of
from madmax_lib.simulator.steady.step_time import COMMUNICATION, COMPUTE

_SHAPES = "studies/hetero_models"
_MACHINES = ("clusters", "devices", "hosts", "links", "parameters.json")
_RULES = "predicted by the simulator"
_CAUSES = {  # columns of `estimate` by what they are exposed for
    "compute": COMPUTE,
    "communication": COMMUNICATION,
    "offload": ("offload_s",),
    "host": ("launch_s", "overhead_s", "bubble_s"),
}


def shape(name: str) -> Transformer:
    """Shape of the study by name, such as gpt2_10b. Raises ValueError for an unknown
    one.
    """
    rows = read_table(_SHAPES).set_index("name")
    if name not in rows.index:
        raise ValueError(f"model {name!r} is not one of {', '.join(rows.index)}")
    columns = ("hidden", "layers", "sequence", "heads")
    dimensions = [int(rows.at[name, column]) for column in columns]
    return replace(gpt_shape(*dimensions), name=name)


def methods_table(
    cluster: Cluster, models: Iterable[str] | None = None, *, micro_batch: int = 16
) -> pd.DataFrame:
    """Every model by every method on all devices of a cluster, full recompute, one
    micro-batch per device.

    model, parameters, method, plan, fits, bound (place with the least room left), share
    (of what may leave the device, the fastest that fits), step_s, low_s, high_s,
    tokens_per_s, offload_s, bottleneck (compute, communication, offload or host: the
    largest exposed part), tflops (8 x parameters x tokens over time and devices, as the
    study counts) and token_j with token_low_j and token_high_j. What does not fit has
    no times.
    """
    rows = []
    for model in map(shape, models or read_table(_SHAPES)["name"]):
        for way in SIZE_METHODS.dropna().itertuples():
            plan = Plan.parse(f"dp{cluster.world_size}.mb{micro_batch}.full.{way.plan}")
            policy = Policy(share=1.0 if way.static else None)
            row = {
                "model": model.name,
                "parameters": model.parameters,
                "method": way.study,
                "plan": str(plan),
            }
            rows.append(row | _outcome(model, cluster, plan, policy))
    return with_origin(pd.DataFrame(rows), _SHAPES, *_MACHINES, rules=_RULES)


def limits_table() -> pd.DataFrame:
    """The largest model per published method and machine: system, method, machine,
    published and ours (1e9 parameters),
    ratio, bound (place that is full) and confidence. A published size is what was
    tried, so ours should not be less.
    """
    table = read_table("studies/scale_limits")
    rows = []
    for row in table.itertuples():
        cluster = replace(catalog.cluster(row.cluster), devices_per_node=row.devices)
        model, _, result = largest_model(cluster, row.method)
        name = f"{row.devices} x {cluster.device.name}, {row.host_memory_gb:.0f} GB"
        ours = model.parameters / 1e9
        limit = {
            "system": row.system,
            "method": row.method,
            "machine": name,
            "published": row.params_e9,
            "ours": ours,
            "ratio": ours / row.params_e9,
            "bound": result.bound,
        }
        rows.append(limit | {"confidence": row.confidence})
    table = pd.DataFrame(rows)
    return with_origin(table, "studies/scale_limits", *_MACHINES, rules=_RULES)


def _outcome(model, cluster, plan, policy):
    """Row of a plan: whether it fits, and if it does its times, its bottleneck and its
    energy.
    """
    run = {"global_batch": plan.dp * plan.micro_batch, "dtype": "fp16"}
    placed = policy if plan.offload else None  # a policy is for offloading plans only
    placement = fits(model, cluster, plan, policy=placed, **run)
    row = {"fits": placement.fits, "bound": placement.bound}
    if not placement.fits:
        return row
    times = estimate(model, cluster, plan, policy=policy, **run).iloc[0]
    causes = {
        cause: sum(times.get(name, 0.0) for name in names)
        for cause, names in _CAUSES.items()
    }
    tokens = run["global_batch"] * model.sequence
    # NaN where nothing leaves the device
    share = times.get("offload_share", float("nan"))
    # 8 FLOPs per parameter and token: 2 forward, 4 backward, 2 recomputed
    flops = 8 * model.parameters * tokens
    host_s = _host_busy_s(model, cluster, plan, share)
    energy = step_energy(times, cluster, tokens, host_s)
    return row | {
        "share": share,
        **times[["step_s", "low_s", "high_s", "tokens_per_s"]],
        "offload_s": causes["offload"],
        "bottleneck": max(causes, key=causes.get),
        "tflops": flops / times["step_s"] / cluster.world_size / 1e12,
        **{name: energy[name] for name in ("token_j", "token_low_j", "token_high_j")},
    }


def _host_busy_s(model, cluster, plan, share):
    """Seconds of CPU Adam in a step."""
    if plan.offload is None:
        return 0.0
    plan = normalised(Case(model, cluster, plan, dtype="fp16")).plan
    # ZeRO shards the states over dp; the share of them that left is the host's
    sharded = model.parameters / (plan.dp if plan.zero else 1)
    off_device = float(split_of(METHODS[plan.offload], share).states)
    return rates(cluster).adam_s(off_device * sharded)


def share_table(
    model: Transformer, cluster: Cluster, plan: Plan, *, global_batch: int
) -> pd.DataFrame:
    """Exposed seconds by the share that leaves the device, whether it fits or not;
    `.attrs["best"]` is what is found.

    Columns of `OffloadTimes`.
    """
    case = normalised(Case(model, cluster, plan, global_batch, dtype="fp16"))
    # a point per percent
    times = offload_times(case, shipped(), np.linspace(0, 1, 101))
    _, best = best_offload(case, shipped())
    # the share is searched among those that fit, the table shows all
    table = pd.DataFrame(vars(times))
    table.attrs["best"] = float(best.share[0])
    return table


def measured_host() -> pd.DataFrame:
    """Times of copies and Adam on the CPU that the source column names, as measured."""
    name = "studies/host_measured"
    return with_origin(read_table(name), name, rules="as measured")


def adam_published() -> pd.DataFrame:
    """Published seconds of CPU Adam beside ours: parameters, published_s, ours_s,
    ratio.
    """
    ours_s = []
    table = read_table("studies/adam_published")
    for row in table.itertuples():
        # a process alone has the host's memory bandwidth to itself
        host = rates(replace(catalog.cluster(row.machine), devices_per_node=1))
        ours_s.append(host.adam_s(row.parameters))
    table = table.rename(columns={"seconds": "published_s"})
    table = table[["parameters", "published_s"]].assign(ours_s=ours_s)
    return table.eval("ratio = ours_s / published_s")
