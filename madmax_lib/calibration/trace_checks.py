"""Checks that a trace can be one of a run: its device, work and groups against model,
machine and plan of a case.

A fit gives constants for any trace and any case; only what both say can tell that they
do not belong together. What a trace does not record is not checked: its device without
a name, its products without shapes, its groups without sizes.
"""

from itertools import combinations
from math import prod

import numpy as np

from madmax_lib import catalog
from madmax_lib.base import NS_PER_S
from madmax_lib.calibration.judge.intervals import constants_of
from madmax_lib.plan import Case
from madmax_lib.simulator import Parameters
from madmax_lib.timeline import Timeline
from madmax_lib.timeline.kinds import POINT_TO_POINT
from madmax_lib.traces import calls
from madmax_lib.traces.operators.ops import operator_calls

# traced FLOPs over those of the model: what is counted differs by norms, heads and
# causal attention
_LEAST_WORK = 0.75
_MOST_WORK = 1.25
_FROZEN = 2 / 3  # LoRA: weights have no gradients, one of three passes
_RECOMPUTED = 4 / 3  # the forward pass again
_STAGE = 2.5  # of one stage of a pipeline: ends are larger
_LEAST_SHARE = 1e-3  # of the peak; no device is kept so slow by its own kernels
_SAME_PEAK = 0.1  # log ratio of rates of one device under two names
# data types that traces name alike; others mix types
_ARITHMETIC = {name: name for name in ("fp64", "fp32", "fp16", "bf16")}
_ARITHMETIC |= {"tf32": "fp32"}
_MISSED = 0.20  # of a part: a constant stands in for something else
_NOTHING = 1e-3  # of a model's parameters: smaller messages are losses and norms


def check_trace(timeline: Timeline, case: Case) -> None:
    """Raise ValueError, with what the trace and what the case says, where they cannot
    belong together.
    """
    if not (timeline.spans["kind"] == "compute").any():
        raise ValueError("timeline: no compute span, nothing to fit")
    _check_device(timeline, case)
    _check_groups(timeline, case)
    if timeline.meta.source == "measured":
        _check_work(timeline, case)


def fit_notes(
    timeline: Timeline, case: Case, errors: dict[str, float], fitted: Parameters
) -> list[str]:
    """Lines about what a fit to a trace leaves: parts that it misses, constants of a
    GPU at a bound, products of another dtype, waiting that one rank cannot tell from transfer.
    """
    notes = [
        f"{part.removesuffix('_s')} is off by {error:+.0%}: no constant can match it"
        for part, error in errors.items()
        if abs(error) > _MISSED
    ]
    # constants of a CPU may be anything: it has no data sheet
    if case.device.family != "cpu":
        states = constants_of(fitted)["state"]
        notes += [
            f"{name} = {fitted.constants[name]:.3g} is at its bound: it stands in for "
            "more"
            for name in states.index[states == "at a bound"]
        ]
    work, _ = operator_calls(timeline)
    shares = work[work["flops"] > 0].groupby("dtype")["flops"].sum()
    other = shares.drop([_ARITHMETIC.get(case.dtype), case.dtype, ""], errors="ignore")
    share = other.sum() / max(shares.sum(), 1)
    if share > _SAME_PEAK:
        notes.append(f"{share:.0%} of the FLOPs are in {', '.join(other.index)}")
    if case.plan.world_size > len(timeline.ranks) == 1:
        notes.append("one rank of many: waiting cannot be told from transfer")
    return notes


def _check_device(timeline, case):
    """Family, peak and bandwidths of the traced device against the case's."""
    device = case.device
    traced_name = timeline.meta.device
    compute = timeline.spans[timeline.spans["kind"] == "compute"]
    # processes on a CPU have no streams
    on_host = bool((compute["stream"] < 0).all())
    if on_host != (device.family == "cpu"):
        traced = "a CPU" if on_host else traced_name or "a GPU"
        raise ValueError(
            f"timeline: a trace of {traced}, but the case's device is {device.name}"
        )
    traced = catalog.device_named(traced_name) if traced_name else None
    if traced is None or traced.name == device.name:
        return
    one, other = (
        np.array(
            [
                of.peak(of.nearest("bf16")),
                of.memory_bandwidth_bytes_per_s,
                of.scale_up_bytes_per_s or np.nan,
            ]
        )
        for of in (traced, device)
    )
    differs = (np.abs(np.log(one / other)) > _SAME_PEAK).any()
    if traced.family != device.family or differs:
        raise ValueError(
            f"timeline: a trace of {traced_name}, but the case's device is {device.name}"
        )


def _check_groups(timeline, case):
    """World and sizes of groups against the plan, then what they send."""
    plan = case.plan
    # DDP of one rank calls collectives too, which move nothing
    table = calls(timeline).query("group_size != 1")
    measured = timeline.meta.source == "measured"
    world = max(timeline.meta.world_size, len(timeline.ranks))
    # one stage or rank of many may have been traced, but then it has collectives
    if measured and world != plan.world_size and (world > 1 or table.empty):
        raise ValueError(
            f"timeline: {world} rank(s) on their own, but {plan} has {plan.world_size}"
        )
    if plan.world_size == 1:
        if len(table):
            raise ValueError(
                f"timeline: {table['collective'].iloc[0]} was traced, but {plan} is "
                "one rank"
            )
        return
    if not measured and table.empty:
        return
    degrees = [plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.shard or 1]
    degrees.append(max(plan.replicas // plan.ep, 1))
    # a group may span any dimensions, at most four of which are its own
    sizes = {prod(some) for count in range(5) for some in combinations(degrees, count)}
    sizes |= {plan.world_size}
    other = set(table["group_size"]) - sizes - {1}
    if other and world > 1:
        raise ValueError(
            f"timeline: collectives of {min(other)} ranks, but groups of {plan} have "
            f"{sorted(sizes - {1})}"
        )
    steps_of_ranks = max(len(timeline.steps), 1) * max(len(timeline.ranks), 1)
    _check_messages(
        table.groupby("collective")["size_bytes"].sum() / steps_of_ranks, case
    )


def _check_messages(sent_bytes, case):
    """Bytes of a rank and step by kind of collective, a Series, against the plan.

    A kind that profilers call generic may be any.
    """
    plan = case.plan
    kinds = set(sent_bytes.index)
    weights_bytes = 2.0 * case.model.parameters / (plan.tp * plan.pp)  # in 16 bits
    # weights are gathered, or after an update sent by those that own its states
    sends = {"all_gather", "generic"} | ({"broadcast"} if plan.zero < 3 else set())
    if plan.zero and plan.replicas > 1 and not kinds & sends:
        raise ValueError(f"timeline: no all-gather, but {plan} gathers parameters")
    gathered_bytes = sent_bytes.get("all_gather", 0.0)
    gathers_nothing = plan.zero == 0 and plan.tp * plan.cp * plan.ep == 1
    if gathered_bytes > weights_bytes * 0.5 and gathers_nothing:
        raise ValueError(
            f"timeline: all-gathers of {gathered_bytes:.2g} bytes a step, but {plan} "
            "gathers nothing"
        )
    if plan.pp > 1 and not kinds & {*POINT_TO_POINT, "generic"}:
        raise ValueError(
            f"timeline: no message between stages, but {plan} is a pipeline"
        )
    if plan.world_size != plan.dp:
        return
    if kinds & {"send", "recv"}:
        raise ValueError(f"timeline: messages from rank to rank, but {plan} sends none")
    reductions = ["all_reduce", "reduce_scatter", "generic"]
    reduced_bytes = sent_bytes.reindex(reductions).fillna(0.0).sum()
    if not sent_bytes.isna().any() and 0 < reduced_bytes < _NOTHING * weights_bytes:
        raise ValueError(
            f"timeline: {reduced_bytes:.2g} bytes are reduced in a step, but the "
            f"gradients of {plan} have {weights_bytes:.2g}"
        )


def _check_work(timeline, case):
    """Traced products against those of the model, and its needed rate against the
    device's.
    """
    plan = case.plan
    device = case.device
    flops = case.flops / plan.world_size
    stage = _STAGE if plan.pp > 1 else 1
    low = _LEAST_WORK * (_FROZEN if plan.lora_rank else 1) / stage
    high = _MOST_WORK * (_RECOMPUTED if plan.recompute != "none" else 1) * stage
    run = (
        f"{case.model.name}, global_batch={case.global_batch}, "
        f"sequence={case.sequence}, {plan}"
    )
    table, _ = operator_calls(timeline)
    in_steps = (table["step"] >= 0) | (len(timeline.steps) == 0)
    table = table[(table["flops"] > 0) & in_steps]
    if len(table):
        by_step = table.groupby(["rank", "step"])["flops"].sum().median()
        if not low <= by_step / flops <= high:
            hint = ": forward passes only?" if by_step < flops / 2 else ""
            raise ValueError(
                f"timeline: {by_step:.3g} FLOPs of a rank and step were traced, but "
                f"{run} has {flops:.3g}{hint}"
            )
        dtype = table.groupby("dtype")["flops"].sum().idxmax()
        named = dtype in _ARITHMETIC and case.dtype in _ARITHMETIC
        if named and _ARITHMETIC[case.dtype] != dtype:
            raise ValueError(
                f"timeline: products in {dtype} were traced, but dtype={case.dtype} "
                "is the case's"
            )
    compute = timeline.spans[timeline.spans["kind"] == "compute"]
    by_step_ns = compute.groupby(["rank", "step"])["dur_ns"].sum()
    seconds = (by_step_ns / NS_PER_S).median()
    share = flops / seconds / device.peak(case.dtype)
    # without shapes a small stage may have been traced
    least = share if len(table) else share / stage
    if not _LEAST_SHARE <= least <= 1:
        raise ValueError(
            f"timeline: {seconds:.3g} s of compute would be {share:.2g} of "
            f"{device.name}'s peak for {run}"
        )
