"""How does a row split its model? The plans that agree with what it states;
`published_rows` takes the fastest.

A missing degree follows from the others, else it is 1; where none is stated, every
layout is tried whose memory suffices. The rules about recompute, ZeRO, HSDP and stages
are written here, each once. A row with a column `plan`, or without a source, is one's
own: what it does not state is at the default of a `Plan`, as in `estimate`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pandas as pd

from madmax_lib.catalog.models import Cluster, Transformer
from madmax_lib.catalog.software import OVERLAPS, Software
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import Plan
from madmax_lib.plan.stated import (
    count_of,
    habits_of,
    number_of,
    positive_of,
    recompute_of,
    remarks_of,
    text_of,
)
from madmax_lib.simulator.memory.memory import memory, peak_bytes, usable_bytes

__all__ = ["case_memory", "cases_of", "devices_of"]

_DEGREES = ("tp", "pp", "cp")
_OWN = {
    name: name for name in (*_DEGREES, "ep", "micro_batch", "lora_rank", *OVERLAPS)
}  # field of a plan: column
_OWN |= {"zero": "zero_stage", "interleave": "vpp"}
_FROM_0 = ("lora_rank", "zero_stage", *OVERLAPS)
_MICRO_BATCHES = (1, 2, 4)
_LAYOUTS = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8, 16),
    "cp": (1, 2, 4, 8),
}  # tried where a row states none
_LORA_RANK = 16  # of MLPerf, and where a row does not state it


def devices_of(raw: dict) -> int:
    """Devices of a row. Raises ValueError if it does not say, or degrees are no whole
    numbers.
    """
    if text := text_of(raw, "plan"):
        return Plan.parse(text).world_size
    together = math.prod(count_of(raw, name, 1) for name in _DEGREES)
    if not (dp := count_of(raw, "dp", count_of(raw, "n_gpus", 0) / together)):
        raise ValueError("neither n_gpus nor dp is stated")
    if dp % 1:
        raise ValueError(
            f"n_gpus={count_of(raw, 'n_gpus')} is no multiple of tp x pp x cp = "
            f"{together}"
        )
    return int(together * dp)


def cases_of(
    raw: dict, model: Transformer, cluster: Cluster, dtype: str, software: Software
) -> list[Case]:
    """Steps that agree with a row, of which it ran one. Raises ValueError where the
    batch is not stated.
    """
    batch = count_of(
        raw, "global_batch", count_of(raw, "dp", 0) * count_of(raw, "micro_batch", 0)
    )
    if not batch:
        raise ValueError("neither global batch nor micro-batch is stated")
    sequence = (
        model.sequence if model.image else count_of(raw, "seq_len", model.sequence)
    )
    case = Case(model, cluster, Plan(), batch, sequence, dtype, software)
    if text_of(raw, "plan") or (_has_layout(raw) and not text_of(raw, "source")):
        return [replace(case, plan=_own_plan(raw, case))]
    layouts = [replace(case, plan=plan) for plan in _layouts(raw, case)]
    cases = [replace(case, plan=plan) for case in layouts for plan in _plans(raw, case)]
    if not text_of(raw, "recompute") and all(_recomputes(case) for case in cases):
        cases = [
            replace(case, plan=replace(case.plan, recompute="full")) for case in cases
        ]
    return (
        [case for case in cases if _share(case) <= 1] or cases
        if len(cases) > 1
        else cases
    )


def _recomputes(case: Case) -> bool:
    """FSDP of a dense model that does not fit otherwise recomputes, whether it says so
    or not.
    """
    return case.plan.zero == 3 and not case.model.experts and _share(case) > 1


def _share(case: Case) -> float:
    """Of the memory of a device that the fullest one takes; infinite for a plan that
    breaks a rule.
    """
    try:
        return peak_bytes(case_memory(case)) / usable_bytes(case.cluster.device)
    except ValueError:
        return math.inf


def case_memory(case: Case) -> pd.DataFrame:
    """What each stage of a row's step holds, a table of `memory`."""
    software = case.software
    shape = {
        "sequence": case.sequence,
        "dtype": case.dtype,
        "global_batch": case.global_batch,
    }
    return memory(
        case.model,
        case.plan,
        **shape,
        software=software,
        fused_loss=software.fused_loss,
    )


def _own_plan(raw: dict, case: Case) -> Plan:
    """As stated, in the column `plan` or in those of degrees; the rest is at its
    default.
    """
    if text := text_of(raw, "plan"):
        return Plan.parse(text)
    values = {
        field: count_of(raw, column, least=column not in _FROM_0)
        for field, column in _OWN.items()
    }
    values = {field: value for field, value in values.items() if value is not None}
    values |= {name: bool(values[name]) for name in OVERLAPS if name in values}
    if said := text_of(raw, "recompute").lower():
        values["recompute"] = recompute_of(said, case.software)
    return Plan(
        dp=case.cluster.world_size
        // math.prod(values.get(name, 1) for name in _DEGREES),
        **values,
    )


def _layouts(raw: dict, case: Case) -> list[Plan]:
    """Degrees: as stated, else all that are legal."""
    world = case.cluster.world_size
    model = case.model
    degrees = {name: count_of(raw, name, 1) for name in _DEGREES}
    choices = {name: (degree,) for name, degree in degrees.items()}
    named = _has_layout(raw)
    if not named:
        choices = _LAYOUTS | {"pp" if _lora_rank(raw) else "cp": (1,)}
    plans = []
    for tp, pp, cp in product(*choices.values()):
        dp, rest = divmod(world, tp * pp * cp)
        if named or not (
            rest
            or not dp
            or case.global_batch % dp
            or model.heads % tp
            or model.layers % pp
        ):
            degrees = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
            plans += [
                Plan(**degrees, **experts)
                for experts in _experts(raw, model, dp * cp, tp, case.software)
            ]
    return plans or [Plan(dp=world)]


def _has_layout(raw: dict) -> bool:
    stated = any(positive_of(raw, name) > 0 for name in (*_DEGREES, "dp"))
    return stated or number_of(raw, "zero_stage") >= 0 or number_of(raw, "n_gpus") == 1


def _experts(
    raw: dict, model: Transformer, replicas: int, tp: int, software: Software
) -> list[dict]:
    """Experts over tp too where the software does so, or where they cannot lie
    otherwise.

    Not stated by a source: whole on each replica, or over as many as the experts and
    the replicas can be shared by.
    """
    places = software.expert_placement
    stated = count_of(raw, "ep", 0)
    open_ = model.experts and places and text_of(raw, "source")
    degrees = (
        [stated]
        if stated
        else sorted({1, math.gcd(model.experts, replicas) if open_ else 1})
    )
    whole = (
        places[:1] == ("dp-cp-tp",) or (replicas % ep > 0 and "dp-cp-tp" in places)
        for ep in degrees
    )
    return [
        {"ep": ep, "etp": int(over and tp > 1 and ep > 1)}
        for ep, over in zip(degrees, whole, strict=True)
    ]


def _plans(raw: dict, case: Case) -> Iterator[Plan]:
    """Plans of a layout that differ in what the row does not state: micro-batch and
    interleaving.
    """
    case = replace(case, plan=replace(case.plan, **_states(raw, case)))
    plan = replace(case.plan, **habits_of(raw, case), **_stages(raw, case))
    for micro in _micro_batches(raw, case, plan):
        for interleave in _interleaves(
            raw, case, case.global_batch / (plan.dp * micro)
        ):
            yield replace(plan, micro_batch=micro, interleave=interleave)


def _micro_batches(raw: dict, case: Case, plan: Plan) -> list[int]:
    """As stated; FSDP takes the whole batch of a device, LoRA a sample (MLPerf's
    default), others what is fastest.
    """
    local = case.global_batch / plan.dp
    if stated := count_of(raw, "micro_batch"):
        return [stated]
    if plan.pp == 1 and (plan.zero >= 2 or not case.software.schedules):
        return [max(int(local), 1)]
    return (
        [1]
        if plan.lora_rank
        else [size for size in _MICRO_BATCHES if local % size == 0] or [1]
    )


def _interleaves(raw: dict, case: Case, count: float) -> list[int]:
    """As stated, else all that divide the layers of a stage where the micro-batches are
    a multiple of pp.
    """
    stated = count_of(raw, "vpp")
    pp = case.plan.pp
    if pp == 1 or stated:
        return [1 if pp == 1 else stated]
    each, rest = divmod(case.model.layers, pp)
    if rest or not case.software.interleave or count % pp:
        return [1]
    return [chunks for chunks in range(1, each + 1) if each % chunks == 0]


def _states(raw: dict, case: Case) -> dict:
    """ZeRO stage, and the devices that share the states: a node under HSDP, or as
    FSDP's size is given.

    Not stated: FSDP if 6 bytes per weight exceed the memory, 2 where weights are
    frozen; else the distributed optimizer where the software has one, FSDP where it has
    no other ZeRO, 0 for software of 2021.
    """
    plan = case.plan
    choices = case.software.zero
    remarks = remarks_of(raw)
    zero = count_of(raw, "zero_stage", least=0)
    rank = _lora_rank(raw)
    sharing = plan.dp * plan.cp
    if zero is None:
        experts = (
            case.model.moe_layers
            * case.model.experts
            * case.model.mlp_parameters(case.model.expert_ffn)
        )
        held = (
            (2 if rank else 6)
            * (case.model.parameters - experts * (1 - 1 / plan.ep))
            / plan.tp
        )
        large = (
            plan.pp == 1
            and 3 in choices
            and _has_layout(raw)
            and held > case.cluster.device.memory_bytes
        )
        zero = 3 if large else 1 if 1 in choices else 3 if 2 in choices else 0
    sizes = [int(size) for size in re.findall(r"\bFSDP(?: size |=| )(\d+)\b", remarks)]
    sizes += [case.cluster.devices_per_node] * ("HSDP" in remarks)
    shard = (
        next((size for size in sizes if 1 < size < sharing and sharing % size == 0), 0)
        if zero
        else 0
    )
    scaled_8bit = re.search(
        r"float8(?!.*rowwise)", text_of(raw, "precision").lower()
    )  # torchao: one scale per tensor
    return {
        "zero": zero,
        "shard": shard,
        "qwz": zero == 3 and not shard and bool(scaled_8bit),
        "overlap_gather": zero in (1, 2)
        and case.software.kernels in ("fused", "graph"),  # --overlap-param-gather
        "lora_rank": rank,
    }


def _lora_rank(raw: dict) -> int:
    named = re.search(r"\bq?lora\b", remarks_of(raw), re.I)
    return count_of(raw, "lora_rank", _LORA_RANK if named else 0, least=0)


def _stages(raw: dict, case: Case) -> dict:
    """Ends of the pipeline: as the notes cut it, else DeepSpeed's balance, where they
    count as layers if it comes out.

    AMP's partition counts 30 pseudo-layers: two before the embedding's and three behind
    the last layer's.
    """
    layers = case.model.layers
    pp = case.plan.pp
    cut = re.search(r"pipeline partition \[([\d, ]+)\]", remarks_of(raw))
    bounds = [int(bound) for bound in cut[1].split(",")] if cut and pp > 1 else []
    between = {high - low for low, high in pairwise(bounds[1:-1])}
    if (
        len(bounds) == pp + 1
        and len(between) <= 1
        and bounds[1] > 3
        and bounds[-2] < layers + 3
    ):
        return {"first_layers": bounds[1] - 3, "last_layers": layers + 3 - bounds[-2]}
    ends = case.software.ends_as_layers and layers % pp > 0 and (layers + 2) % pp == 0
    return {"embedding_as_layer": ends, "head_as_layer": ends}
