"""Can this trace be one of that run? Device, work and groups of a trace against model,
machine and plan of a case.

A fit gives constants for any trace and any case; only what both say can tell that they
do not belong together. What a trace does not record is not checked: its device without
a name, its products without shapes, its groups without sizes.
"""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np

from madmax_lib import catalog
from madmax_lib.base.units import NS_PER_S
from madmax_lib.plan.case import Case
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces.comm.collectives import calls
from madmax_lib.traces.operators.ops import operator_calls

__all__ = ["check_trace"]

_WORK = (
    0.75,
    1.25,
    # traced FLOPs over those of the model: what is counted differs by norms, heads and
    # causal attention
)
_AGAIN = 4 / 3  # with recomputation
_STAGE = 2.5  # of one stage of a pipeline: ends are larger
_LEAST_SHARE = 1e-3  # of the peak; no device is kept so slow by its own kernels
_SAME_PEAK = 0.1
_ARITHMETIC = {
    "tf32": "fp32",
    "fp64": "fp64",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}  # others mix types
_NOTHING = 1e-3  # of a model's parameters: smaller messages are losses and norms


def check_trace(timeline: Timeline, case: Case) -> None:
    """Raises ValueError, with what the trace and what the case says, where they cannot
    belong together.
    """
    spans = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
    if not (spans["kind"] == "compute").any():
        raise ValueError("timeline: no compute span, nothing to fit")
    _check_device(timeline, case)
    _check_groups(timeline, case)
    if timeline.meta.source == "measured":
        _check_work(timeline, case)


def _check_device(timeline: Timeline, case: Case) -> None:
    device = case.cluster.device
    compute = timeline.spans[timeline.spans["kind"] == "compute"]
    on_host = bool((compute["stream"] < 0).all())
    if on_host != (device.family == "cpu"):
        what = (
            "a trace of a CPU"
            if on_host
            else f"a trace of {timeline.meta.device or 'a GPU'}"
        )
        raise ValueError(f"timeline: {what}, but the case's device is {device.name}")
    traced = (
        catalog.device_named(timeline.meta.device) if timeline.meta.device else None
    )
    if traced is None or traced.name == device.name:
        return
    rates = [of.peak(of.nearest("bf16")) for of in (traced, device)]
    if traced.family != device.family or abs(np.log(rates[0] / rates[1])) > _SAME_PEAK:
        raise ValueError(
            f"timeline: a trace of {timeline.meta.device}, but the case's device is "
            f"{device.name}"
        )


def _check_groups(timeline: Timeline, case: Case) -> None:
    """World, sizes of groups and kinds of collectives against the plan."""
    plan = case.plan
    table = calls(timeline)
    world = max(timeline.meta.world_size, len(timeline.ranks))
    if (
        (world > 1 or table.empty)
        and timeline.meta.source == "measured"
        and world != plan.world_size
    ):
        raise ValueError(
            f"timeline: {world} rank(s) without others, but {plan} has "
            f"{plan.world_size}"
        )
    if plan.world_size == 1:
        if len(table):
            raise ValueError(
                f"timeline: {table['collective'].iloc[0]} was traced, but {plan} is "
                "one rank"
            )
        return
    if timeline.meta.source == "simulated" and table.empty:
        return
    degrees = [
        plan.dp,
        plan.tp,
        plan.pp,
        plan.cp,
        plan.ep,
        max(plan.dp * plan.cp // plan.ep, 1),
        plan.shard or 1,
    ]
    sizes = {
        prod(some) for count in range(5) for some in combinations(degrees, count)
    } | {plan.world_size}
    other = set(table["group_size"]) - sizes - {1}
    if other and world > 1:
        raise ValueError(
            f"timeline: collectives of {min(other)} ranks, but groups of {plan} have "
            f"{sorted(sizes - {1})}"
        )
    sent = (
        table.groupby("collective")["size_bytes"].sum()
        / max(len(timeline.steps), 1)
        / max(len(timeline.ranks), 1)
    )
    whole = 2.0 * case.model.parameters / (plan.tp * plan.pp)  # in 16 bits
    gathers = sent.get("all_gather", 0.0) > whole * 0.5
    if (
        plan.zero >= 3
        and plan.dp * plan.cp > 1
        and "all_gather" not in sent.index
        and "generic" not in sent.index
    ):
        raise ValueError(f"timeline: no all-gather, but {plan} gathers parameters")
    if gathers and plan.zero == 0 and plan.tp * plan.cp * plan.ep == 1:
        raise ValueError(
            f"timeline: all-gathers of {sent['all_gather']:.2g} bytes a step, but "
            f"{plan} gathers nothing"
        )
    sides = {*POINT_TO_POINT, "generic"} & set(sent.index)
    if plan.pp > 1 and not sides:
        raise ValueError(
            f"timeline: no message between stages, but {plan} is a pipeline"
        )
    if plan.world_size == plan.dp and {"send", "recv"} & set(sent.index):
        raise ValueError(f"timeline: messages from rank to rank, but {plan} sends none")
    reduced = (
        sent.reindex(["all_reduce", "reduce_scatter", "generic"]).fillna(0.0).sum()
    )
    if (
        plan.world_size == plan.dp
        and not sent.isna().any()
        and 0 < reduced < _NOTHING * whole
    ):
        raise ValueError(
            f"timeline: {reduced:.2g} bytes are reduced in a step, but the gradients "
            f"of {plan} have {whole:.2g}"
        )


def _check_work(timeline: Timeline, case: Case) -> None:
    """Traced products against those of the model, and its needed rate against the
    device's.
    """
    plan = case.plan
    device = case.cluster.device
    flops = (
        3 * case.model.forward_flops(case.global_batch, case.sequence) / plan.world_size
    )
    low = _WORK[0] * (2 / 3 if plan.lora_rank else 1)
    high = _WORK[1] * (_AGAIN if plan.recompute != "none" else 1)
    if plan.pp > 1:
        low = low / _STAGE
        high = high * _STAGE
    what = (
        f"{case.model.name}, global_batch={case.global_batch}, "
        f"sequence={case.sequence}, {plan}"
    )
    table, _ = operator_calls(timeline)
    table = table[
        (table["flops"] > 0) & ((table["step"] >= 0) | (len(timeline.steps) == 0))
    ]
    if len(table):
        by_step = table.groupby(["rank", "step"])["flops"].sum().median()
        if not low <= by_step / flops <= high:
            raise ValueError(
                f"timeline: {by_step:.3g} FLOPs of a rank and step were traced, but "
                f"{what} has {flops:.3g}"
            )
        main = table.groupby("dtype")["flops"].sum().idxmax()
        if (
            case.dtype in _ARITHMETIC
            and main in _ARITHMETIC
            and _ARITHMETIC[case.dtype] != main
        ):
            raise ValueError(
                f"timeline: products in {main} were traced, but dtype={case.dtype} "
                "is the case's"
            )
    compute = timeline.spans[timeline.spans["kind"] == "compute"]
    seconds = (compute.groupby(["rank", "step"])["dur_ns"].sum() / NS_PER_S).median()
    share = flops / seconds / device.peak(case.dtype)
    if (
        not _LEAST_SHARE
        <= share * (1 if len(table) or plan.pp == 1 else 1 / _STAGE)
        <= 1
    ):
        raise ValueError(
            f"timeline: {seconds:.3g} s of compute would be {share:.2g} of "
            f"{device.name}'s peak for {what}"
        )
