"""How long does a step take, in closed form? Model, cluster and one plan or a table of plans in, a row per plan out.

The formulas are those of `step_time`, with the shipped constants unless others are given; no Python loop over plans.
`model_fields`, `machine_fields` and `plan_fields` translate the specs into the fields of a step, for other callers too.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd

from madmax_lib.case import Case
from madmax_lib.plan import DEFAULTS, Plan
from madmax_lib.simulator.offload.offload import best_offload
from madmax_lib.simulator.offload.placement import Policy, normalised
from madmax_lib.simulator.rates.parameters import Parameters, shipped
from madmax_lib.simulator.step.inputs import Work
from madmax_lib.simulator.step.step_time import PARTS, step_time
from madmax_lib.simulator.step.uncertainty import log_width
from madmax_lib.specs import DLRM, Cluster, Device, Model, Transformer

__all__ = ["estimate", "family", "machine_fields", "matrix_fields", "model_fields", "plan_fields",
           "work_of"]  # fmt: skip

_FAMILIES = {"a100": "ampere", "h100": "hopper", "h200": "hopper", "h800": "hopper", "b200": "blackwell",
             "b300": "blackwell", "gb200": "blackwell", "gb300": "blackwell"}  # fmt: skip
_OWN_RATE = ("b200", "gb200", "gb300", "b300", "h100-96")  # devices with a constant device_rate
_CHUNK = 16384  # plans at a time: their arrays stay in the cache
_STEP = ("step_s", "low_s", "high_s")
_COVERED = {"first_layers": (0,), "last_layers": (0,), "capacity": (0,)}


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
    single = isinstance(plan_or_table, Plan)
    if single:
        plan_or_table.check(model, cluster, global_batch, sequence or 0)
        _check_covered(plan_or_table)
        plan_or_table.micro_batches(global_batch)
        plan, index = plan_or_table, pd.RangeIndex(1)
    else:
        plan, index = _columns(plan_or_table), plan_or_table.index
    parameters, policy = parameters or shipped(), policy or Policy()
    parts = []
    for start in range(0, max(len(index), 1), _CHUNK):
        piece = plan if single else _slice(plan, slice(start, start + _CHUNK))
        work = work_of(model, cluster, piece, global_batch, sequence, dtype)
        times = step_time(work, parameters)
        width = log_width(work, parameters)
        times |= {"low_s": times["step_s"] * np.exp(-width), "high_s": times["step_s"] * np.exp(width)}
        if not single:
            possible = _possible(piece, model, cluster, global_batch)
            times |= {name: np.where(possible, times[name], np.nan) for name in _STEP}
        parts.append(times)
    table = {name: parts[0][name] if len(parts) == 1 else np.concatenate([p[name] for p in parts])
             for name in (*_STEP, *PARTS)}  # fmt: skip
    options = {"global_batch": global_batch, "sequence": sequence, "dtype": dtype, "policy": policy}
    table |= _with_offload(table, plan_or_table, model, cluster, parameters, options)
    tokens = global_batch * (sequence or model.sequence)
    flops = 3 * model.forward_flops(global_batch, sequence)
    table["mfu"] = flops / (table["step_s"] * cluster.world_size * cluster.device.peak(dtype))
    table["tokens_per_s"] = tokens / table["step_s"]
    return pd.DataFrame(table, index=index)


def _with_offload(table: dict, plans: Plan | pd.DataFrame, model: Transformer, cluster: Cluster,
                  parameters: Parameters, options: dict) -> dict[str, np.ndarray]:  # fmt: skip
    """Columns of a table with the rows that offload timed one by one; none if there are none."""
    single, size = isinstance(plans, Plan), len(table["step_s"])
    offload = [plans.offload] if single else plans["offload"].to_numpy() if "offload" in plans else []
    rows = np.flatnonzero(pd.notna(np.array(offload, dtype=object)))
    if not rows.size:
        return {}
    new = {name: np.array(table[name]) for name in (*_STEP, *PARTS)}
    new |= {"offload_s": np.zeros(size), "offload_share": np.full(size, np.nan)}
    for row, plan in zip(rows, [plans] if single else plans.iloc[rows].to_dict("records"), strict=True):
        try:
            found = _offloaded(plan if single else Plan(**plan), model, cluster, parameters, **options)
        except ValueError:
            if single:
                raise
            found = dict.fromkeys(_STEP, np.nan)
        for name, value in found.items():
            new[name][row] = value
    return new


def _offloaded(plan: Plan, model: Transformer, cluster: Cluster, parameters: Parameters, *, global_batch: int,
               sequence: int | None, dtype: str, policy: Policy) -> dict[str, float]:  # fmt: skip
    """A row of one plan with offload."""
    plan.check(model, cluster, global_batch, sequence or 0)
    _check_covered(plan)
    case = normalised(Case(model, cluster, plan, global_batch, sequence or 0, dtype))
    work = work_of(model, cluster, case.plan, global_batch, sequence, dtype)
    parts = {name: float(part[0]) for name, part in step_time(work, parameters).items()}
    _, times = best_offload(case, work, parameters, policy)
    parts["optimizer_s"], width = float(times.update_s[0]), float(log_width(work, parameters)[0])
    parts["offload_s"] = float(times.total_s[0]) - parts["optimizer_s"]
    parts["step_s"] = sum(parts[name] for name in (*PARTS, "offload_s"))
    return parts | {"low_s": parts["step_s"] * np.exp(-width), "high_s": parts["step_s"] * np.exp(width),
                    "offload_share": float(times.share[0])}  # fmt: skip


def work_of(model: Transformer, cluster: Cluster, plan, global_batch: float, sequence: int | None = None,
            dtype: str = "bf16") -> Work:  # fmt: skip
    """The steps of a plan, or of anything with its fields as arrays."""
    fields, classes = machine_fields(cluster, dtype)
    fields |= model_fields(model, sequence) | matrix_fields(cluster.device, dtype) | plan_fields(plan, global_batch)
    return Work(fields, classes | {"mixture": "graph" if model.experts else "none"})


def family(device: Device) -> str:
    """Family whose constants a device has; "other" is not calibrated."""
    return _FAMILIES.get(device.name.split("-")[0], "other")


def model_fields(model: Transformer, sequence: int | None = None) -> dict[str, float]:
    """Fields of a step that the model gives. A vision transformer has its head on the class token only."""
    s = sequence or model.sequence
    windowed = (1 - 1 / model.full_every if model.full_every else 1.0) if model.window else 0.0
    names = ("layers", "hidden", "heads", "ffn", "experts", "active_experts", "shared_experts", "expert_ffn",
             "dense_layers", "window")  # fmt: skip
    return {name: getattr(model, name) for name in names} | {
        "sequence": s, "head_dim": model.head_dim, "kv_width": model.kv_heads * model.head_dim,
        "core_width": model.core_width, "gated": float(model.gated), "windowed_share": windowed,
        "attention_weights": sum(inputs * outputs for _, inputs, outputs in model.attention_matrices),
        "vocab": model.classes / s if model.image else model.vocab, "causal": float(not model.image),
    }  # fmt: skip


def machine_fields(cluster: Cluster, dtype: str = "bf16", *, stack: str = "fused") -> tuple[dict, dict]:
    """Fields and classes that the cluster and the software give; stack: fused, compiled, eager or legacy."""
    device, kind = cluster.device, family(cluster.device)
    kernels = "recent" if stack == "fused" else "pytorch"
    fields = {
        "memory": device.memory_bandwidth_bytes_per_s, "link": cluster.intra.bandwidth_bytes_per_s,
        "nic": cluster.inter.bandwidth_bytes_per_s, "domain": cluster.devices_per_node,
    }  # fmt: skip
    classes = {
        "family": kind, "network": kind, "stack": stack, "device": device.name if device.name in _OWN_RATE else "other",
        "attention": f"hopper-{kernels}" if kind == "hopper" else kind,
        "gemm": f"{kind}-{_bits(device, dtype)}",
    }  # fmt: skip
    return fields, classes


def matrix_fields(device: Device, dtype: str) -> dict[str, float]:
    """Peaks for matrix products of a dtype and for attention, which stays in 16 bits (32 where the products are)."""
    wide = dtype in ("fp32", "tf32", "fp64")
    return {"peak_gemm": device.peak(dtype), "peak_16": device.peak(dtype if wide else "bf16"),
            "mx": float(dtype == "mxfp8")}  # fmt: skip


def plan_fields(plan, global_batch: float) -> dict[str, np.ndarray]:
    """Fields of a step that the plan gives; plan: a Plan, or anything with its fields as arrays."""
    p, recompute = plan, np.asarray(plan.recompute)
    full, data = (recompute == "full").astype(float), np.multiply(p.dp, p.cp)
    sharded = np.asarray(p.zero) >= 3
    shard = np.where(np.asarray(p.shard) > 0, p.shard, data)
    own = np.asarray(p.embedding_as_layer, bool) & np.asarray(p.head_as_layer, bool)
    gradient_bytes = np.where(p.reduce_fp32, 4.0, 2.0)
    gathers = (np.asarray(p.zero) > 0) & ~sharded
    return {
        "dp": p.dp, "tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep, "micro_batch": p.micro_batch,
        "micro_batches": np.ceil(np.asarray(global_batch) / np.multiply(p.dp, p.micro_batch)),
        "interleave": p.interleave, "zero": np.where(sharded, 3, np.minimum(p.zero, 1)),
        "shard": np.where(sharded, shard, 1), "sequence_parallel": np.asarray(p.sequence_parallel, float),
        "recompute_gemm": full, "recompute_attention": np.maximum(full, recompute == "selective"), "recompute_tp": full,
        "gather_bytes": np.where(p.qwz, 1.0, 2.0), "reduce_bytes": gradient_bytes, "gradient_bytes": gradient_bytes,
        "gradient_wire_bytes": gradient_bytes + np.where(gathers, 2.0, gradient_bytes),
        "gathered_bytes": np.where(gathers, 2.0, 0.0), "late_gather": ~np.asarray(p.overlap_gather, bool),
        "reduce_each": (np.asarray(p.zero) == 2) & (np.asarray(p.pp) == 1), "bucket_bytes": p.bucket_bytes,
        "prefetch": p.prefetch, "overlap_tp": 1,
        "unfused": np.asarray(p.attention) == "unfused", "ends_as_layers": own, "send_once": 1,
        "gpipe": np.asarray(p.schedule) == "gpipe", "zero_bubble": np.asarray(p.schedule) == "zero-bubble",
        "ulysses": np.asarray(p.context) == "ulysses", "hpz": p.hpz, "qgz": p.qgz,
    }  # fmt: skip


def _check_covered(plan: Plan) -> None:
    for name, known in _COVERED.items():
        if (value := getattr(plan, name)) not in known:
            raise ValueError(f"{name}={value}: the closed form covers {name}={' and '.join(map(str, known))} only")


def _bits(device: Device, dtype: str) -> int:
    """8 and 4 where the device multiplies such numbers, 16 for all others."""
    if dtype == "nvfp4" and "nvfp4" in device.peak_flops:
        return 4
    return 8 if dtype in ("fp8", "mxfp8", "nvfp4") and "fp8" in device.peak_flops else 16


def _columns(table: pd.DataFrame) -> SimpleNamespace:
    """A table of plans as arrays by field of Plan; what is missing has its default."""
    if unknown := [name for name in table.columns if name not in DEFAULTS]:
        raise ValueError(f"column {unknown[0]!r} is not a field of Plan: {', '.join(DEFAULTS)}")
    values = {name: table[name].to_numpy() if name in table else default for name, default in DEFAULTS.items()}
    values["sequence_parallel"] = values["sequence_parallel"] if "sequence_parallel" in table else values["tp"] > 1
    return SimpleNamespace(**{name: np.broadcast_to(value, len(table)) for name, value in values.items()})


def _slice(plan: SimpleNamespace, rows: slice) -> SimpleNamespace:
    return SimpleNamespace(**{name: value[rows] for name, value in vars(plan).items()})


def _possible(p: SimpleNamespace, model: Transformer, cluster: Cluster, global_batch: int) -> np.ndarray:
    """Plans that can be laid over model, cluster and batch, by the rules of `Plan.check`, and timed."""
    world = p.dp * p.tp * p.pp * p.cp == cluster.world_size
    heads = (model.heads % p.tp == 0) & ((model.kv_heads % p.tp == 0) | (p.tp % model.kv_heads == 0))
    heads &= (p.context != "ulysses") | (model.heads // p.tp % p.cp == 0)
    experts = ((p.dp * p.cp) % p.ep == 0) & ((model.experts or 1) % p.ep == 0)
    experts &= (p.ep == 1) | (p.tp == 1) | p.sequence_parallel.astype(bool)
    covered = np.logical_and.reduce([pd.Series(getattr(p, name)).isin(known) for name, known in _COVERED.items()])
    return covered & world & heads & experts & (p.pp * p.interleave <= model.layers) & (global_batch % p.dp == 0)
