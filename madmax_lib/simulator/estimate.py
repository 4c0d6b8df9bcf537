"""How long does a step take, in closed form? Model, cluster and one plan or a table of plans in, a row per plan out.

The formulas are those of `step_time`, with the shipped constants unless others are given; no Python loop over plans.
`model_fields` and `machine_fields` translate the specs into the fields of a step, for other callers too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from madmax_lib.case import Case
from madmax_lib.plan import Plan
from madmax_lib.plan_rules import Rule, enforce
from madmax_lib.plans import Plans, legal, rules_of
from madmax_lib.simulator.offload.offload import best_offload
from madmax_lib.simulator.offload.placement import Policy, normalised
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.inputs import Work
from madmax_lib.simulator.step.step_time import PARTS, step_time
from madmax_lib.simulator.step.uncertainty import log_width
from madmax_lib.specs import DLRM, Cluster, Device, Model, Transformer

__all__ = ["case_fields", "estimate", "machine_fields", "matrix_fields", "model_fields", "work_of"]

_CHUNK = 16384  # plans at a time: their arrays stay in the cache
_STEP = ("step_s", "low_s", "high_s")


def _only_default(name: str, default: int) -> Rule:
    return Rule(
        f"the closed form covers {name}={default} only",
        lambda p, c: getattr(p, name) != default,
        lambda p, c: f"{name}={getattr(p, name)}: the closed form covers {name}={default} only",
    )


_COVERED = tuple(_only_default(name, 0) for name in ("first_layers", "last_layers", "capacity", "etp", "lora_rank"))


def estimate(
    model: Model,
    cluster: Cluster,
    plan_or_table: Plan | pd.DataFrame,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: str = "bf16",
    parameters: Parameters | None = None,
    policy: Policy | None = None,
) -> pd.DataFrame:
    """Seconds of a training step and its parts, one row per plan.

    plan_or_table: a Plan, or a table whose columns are fields of Plan (missing ones at their default); its index is
    kept. Columns: step_s, low_s and high_s (90 % interval, NaN for parameters that know none), the parts named in
    `step_time.PARTS` (exposed seconds, their sum is step_s), mfu (dense model FLOPs over the peak of dtype),
    tokens_per_s. parameters: the shipped fit if None; `Parameters()` is the ideal machine. A table's row that the
    cluster or batch cannot hold, or that has no closed form yet (stages of stated length, capacity of experts), is NaN.
    With offload in a plan or table there are two columns more: offload_s, a part too, and offload_share, of what may
    leave the device, found as in `offload.best_offload` if policy names none; such rows are worked out one by one, and
    are NaN where no share fits. Raises ValueError for such a Plan, an unknown column, dtype, or a recommendation model.

    >>> from madmax_lib.catalog import cluster, model
    >>> table = pd.DataFrame({"dp": [8, 4, 3], "tp": [1, 2, 1]})  # three devices of eight are no layout
    >>> steps = estimate(model("gpt2-large"), cluster("dgx-a100", nodes=1), table, global_batch=64)
    >>> (steps["low_s"] < steps["high_s"]).tolist(), steps["step_s"].isna().tolist()
    ([True, True, False], [False, False, True])
    """
    if isinstance(model, DLRM):
        raise ValueError(f"{model.name}: recommendation models have no closed form; use simulate")
    parameters, policy = parameters or shipped(), policy or Policy()
    if isinstance(plan_or_table, Plan):
        case, index = Case(model, cluster, plan_or_table, global_batch, sequence or 0, dtype), pd.RangeIndex(1)
        enforce((*rules_of(case), *_COVERED), case.plan, case)
        times = _times(case, parameters)
    else:
        plans, index = Plans.from_table(plan_or_table), plan_or_table.index
        case = Case(model, cluster, plans, global_batch, sequence or 0, dtype)
        chunks = [plans[start : start + _CHUNK] for start in range(0, max(len(index), 1), _CHUNK)]
        parts = [_times_of_legal(replace(case, plan=chunk), parameters) for chunk in chunks]
        times = parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    table = {name: times[name] for name in (*_STEP, *PARTS)}
    if case.plan.offload is not None:
        table |= _with_offload(table, case, parameters, policy)
    tokens = global_batch * case.sequence
    flops = 3 * model.forward_flops(global_batch, sequence)
    table["mfu"] = flops / (table["step_s"] * cluster.world_size * cluster.device.peak(dtype))
    table["tokens_per_s"] = tokens / table["step_s"]
    return pd.DataFrame(table, index=index)


def _times(case: Case, parameters: Parameters) -> dict[str, np.ndarray]:
    """Seconds of the steps and their parts, with intervals."""
    work = work_of(case)
    times = step_time(work, parameters)
    width = log_width(work, parameters)
    return times | {"low_s": times["step_s"] * np.exp(-width), "high_s": times["step_s"] * np.exp(width)}


def _times_of_legal(case: Case, parameters: Parameters) -> dict[str, np.ndarray]:
    """`_times` of a table, NaN where a plan is not legal or has no closed form."""
    mask = legal(case, _COVERED).mask
    if mask.all():
        return _times(case, parameters)
    times = _times(replace(case, plan=case.plan[mask]), parameters) if mask.any() else {}
    table = {name: np.full(len(mask), np.nan) for name in (*_STEP, *PARTS)}
    for name in times:
        table[name][mask] = times[name]
    return table


def _with_offload(table: dict, case: Case, parameters: Parameters, policy: Policy) -> dict[str, np.ndarray]:
    """Columns of a table with the rows that offload timed one by one; none if there are none."""
    size = len(table["step_s"])
    rows = np.flatnonzero([offload is not None for offload in np.broadcast_to(case.plan.offload, size)])
    if not rows.size:
        return {}
    single = isinstance(case.plan, Plan)
    columns = {name: np.array(table[name]) for name in (*_STEP, *PARTS)}
    columns |= {"offload_s": np.zeros(size), "offload_share": np.full(size, np.nan)}
    for row in rows:
        try:
            plan = case.plan if single else Plan(**vars(case.plan[row]))
            seconds = _offloaded(replace(case, plan=plan), parameters, policy)
        except ValueError:
            if single:
                raise
            seconds = dict.fromkeys(_STEP, np.nan)
        for name, value in seconds.items():
            columns[name][row] = value
    return columns


def _offloaded(case: Case, parameters: Parameters, policy: Policy) -> dict[str, float]:
    """A row of one plan with offload."""
    enforce((*rules_of(case), *_COVERED), case.plan, case)
    case = normalised(case)
    work = work_of(case)
    row = {name: float(part[0]) for name, part in step_time(work, parameters).items()}
    _, times = best_offload(case, work, parameters, policy)
    width = float(log_width(work, parameters)[0])
    row["optimizer_s"] = float(times.update_s[0])
    row["offload_s"] = float(times.total_s[0]) - row["optimizer_s"]
    row["step_s"] = sum(row[name] for name in (*PARTS, "offload_s"))
    row["low_s"], row["high_s"] = row["step_s"] * np.exp(-width), row["step_s"] * np.exp(width)
    return row | {"offload_share": float(times.share[0])}


def work_of(case: Case) -> Work:
    """The steps of a case as the step-time model sees them."""
    return Work(*case_fields(case))


def case_fields(case: Case, *, kernels: str = "fused") -> tuple[dict, dict]:
    """Fields and classes of a case's steps; kernels: as in `machine_fields`."""
    fields, classes = machine_fields(case.cluster, case.dtype, kernels=kernels)
    fields |= model_fields(case.model, case.sequence) | matrix_fields(case.cluster.device, case.dtype)
    fields |= _plan_fields(case.plan, case.global_batch)
    return fields, classes | {"mixture": "graph" if case.model.experts else "none"}


def model_fields(model: Transformer, sequence: int | None = None) -> dict[str, float]:
    """Fields of a step that the model gives. A vision transformer has its head on the class token only."""
    tokens = sequence or model.sequence
    same = ("layers", "hidden", "heads", "ffn", "experts", "active_experts", "shared_experts", "expert_ffn")
    return {name: getattr(model, name) for name in (*same, "dense_layers", "window", "head_dim", "core_width")} | {
        "sequence": tokens,
        "kv_width": model.kv_heads * model.head_dim,
        "gated": float(model.gated),
        "windowed_share": (1 - 1 / model.full_every if model.full_every else 1.0) if model.window else 0.0,
        "attention_weights": sum(inputs * outputs for _, inputs, outputs in model.attention_matrices),
        "vocab": model.classes / tokens if model.image else model.vocab,
        "causal": float(not model.image),
    }


def machine_fields(cluster: Cluster, dtype: str = "bf16", *, kernels: str = "fused") -> tuple[dict, dict]:
    """Fields and classes that the cluster and the software give; kernels: fused, compiled, eager or legacy."""
    device = cluster.device
    fields = {
        "memory": device.memory_bandwidth_bytes_per_s,
        "link": cluster.intra.bandwidth_bytes_per_s,
        "nic": cluster.inter.bandwidth_bytes_per_s,
        "domain": cluster.devices_per_node,
    }
    release = "recent" if kernels == "fused" else "pytorch"
    classes = {
        "family": device.family,
        "network": device.family,
        "kernels": kernels,
        "device": device.rate_class,
        "attention": f"hopper-{release}" if device.family == "hopper" else device.family,
        "gemm": f"{device.family}-{_bits(device, dtype)}",
    }
    return fields, classes


def matrix_fields(device: Device, dtype: str) -> dict[str, float]:
    """Peaks for matrix products of a dtype and for attention, which stays in 16 bits (32 where the products are)."""
    wide = dtype in ("fp32", "tf32", "fp64")
    peak_16 = device.peak(dtype if wide else device.nearest("bf16"))
    return {"peak_gemm": device.peak(dtype), "peak_16": peak_16, "mx": float(dtype == "mxfp8")}


def _plan_fields(plan: Plans, global_batch: float) -> dict[str, float | np.ndarray]:
    """Fields of a step that the plan, or an array of plans, gives."""
    p, fully = plan, np.asarray(plan.recompute == "full", float)
    gradient_bytes = np.where(p.reduce_fp32, 4.0, 2.0)
    gathered_bytes = np.where((p.zero == 1) | (p.zero == 2), 2.0, 0.0)
    same = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave", "bucket_bytes", "prefetch", "sequence_parallel")
    return {name: getattr(p, name) for name in (*same, "hpz", "qgz")} | {
        "micro_batches": np.ceil(global_batch / (p.dp * p.micro_batch)),
        "zero": np.where(p.zero >= 3, 3, np.minimum(p.zero, 1)),
        "shard": np.where(p.zero > 0, p.sharing, 1),
        "recompute_gemm": fully,
        "recompute_attention": np.maximum(fully, p.recompute == "selective"),
        "recompute_tp": fully,
        "gather_bytes": np.where(p.qwz, 1.0, 2.0),
        "reduce_bytes": gradient_bytes,
        "gradient_bytes": gradient_bytes,
        "gradient_wire_bytes": gradient_bytes + np.where(gathered_bytes > 0, gathered_bytes, gradient_bytes),
        "gathered_bytes": gathered_bytes,
        "late_gather": np.logical_not(p.overlap_gather),
        "reduce_each": (p.zero == 2) & (p.pp == 1),
        "overlap_tp": 1,
        "send_once": 1,
        "ends_as_layers": np.logical_and(p.embedding_as_layer, p.head_as_layer),
        "unfused": p.attention == "unfused",
        "gpipe": p.schedule == "gpipe",
        "zero_bubble": p.schedule == "zero-bubble",
        "ulysses": p.context == "ulysses",
    }


def _bits(device: Device, dtype: str) -> int:
    """8 and 4 where the device multiplies such numbers, 16 for all others."""
    if dtype == "nvfp4" and "nvfp4" in device.peak_flops:
        return 4
    return 8 if dtype in ("fp8", "mxfp8", "nvfp4") and "fp8" in device.peak_flops else 16
