"""Plans that agree with what a row states; `published.rows` takes the fastest.

A missing degree follows from the others, else it is 1; where none is stated, every
layout is tried whose memory suffices. The rules about recompute, ZeRO, HSDP and stages
are written here, each once. A row with a column `plan`, or without a source, is one's
own: what it does not state is at the default of a `Plan`, as in `estimate`.
"""

import math
import re
from dataclasses import replace
from itertools import pairwise, product

import pandas as pd

from madmax_lib.catalog.software import OVERLAPS
from madmax_lib.plan import Case, Plan
from madmax_lib.plan.stated import (
    count_of,
    habits_of,
    number_of,
    positive_of,
    recompute_of,
    remarks_of,
    text_of,
)
from madmax_lib.simulator import peak_bytes, usable_bytes
from madmax_lib.simulator.memory.memory import memory_of

_DEGREES = ("tp", "pp", "cp")
# field of a plan: column
_COLUMNS = {"zero": "zero_stage", "interleave": "vpp"}
_COLUMNS |= {name: name for name in (*_DEGREES, "ep", "micro_batch", "lora_rank")}
_COLUMNS |= {name: name for name in OVERLAPS}
_FROM_0 = ("lora_rank", "zero_stage", *OVERLAPS)  # columns of which 0 says something
# what is tried where a row states nothing
_MICRO_BATCHES = (1, 2, 4)
_LAYOUTS = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8, 16), "cp": (1, 2, 4, 8)}
_LORA_RANK = 16  # of MLPerf, and where a row does not state it
# of AMP's partitions before the first layer (two and the embedding's) and behind the last
_PSEUDO_LAYERS = 3


def devices_of(raw: dict) -> int:
    """Devices of a row. Raises ValueError if it does not say, or degrees are no whole
    numbers.
    """
    if text := text_of(raw, "plan"):
        return Plan.parse(text).world_size
    model_parallel = math.prod(count_of(raw, name, 1) for name in _DEGREES)
    dp = count_of(raw, "dp", count_of(raw, "n_gpus", 0) / model_parallel)
    if not dp:
        raise ValueError("neither n_gpus nor dp is stated")
    if dp % 1:
        raise ValueError(
            f"n_gpus={count_of(raw, 'n_gpus')} is not a multiple of tp x pp x cp = "
            f"{model_parallel}"
        )
    return int(model_parallel * dp)


def cases_of(raw: dict, case: Case) -> list[Case]:
    """Steps that agree with a row, of which it ran one.

    case: its model, cluster, dtype and software. Raises ValueError where the batch is
    not stated.
    """
    samples = count_of(raw, "dp", 0) * count_of(raw, "micro_batch", 0)
    batch = count_of(raw, "global_batch", samples)
    if not batch:
        raise ValueError("neither global batch nor micro-batch is stated")
    sequence = case.model.sequence
    if not case.model.image:
        sequence = count_of(raw, "seq_len", sequence)
    case = replace(case, global_batch=batch, sequence=sequence)
    if text_of(raw, "plan") or (_has_layout(raw) and not text_of(raw, "source")):
        return [replace(case, plan=_own_plan(raw, case))]
    layouts = [replace(case, plan=plan) for plan in _layouts(raw, case)]
    cases = [replace(case, plan=plan) for case in layouts for plan in _plans(raw, case)]
    # FSDP of a dense model that does not fit otherwise recomputes, whether it says so
    # or not
    if not text_of(raw, "recompute") and all(
        case.plan.zero == 3 and not case.model.experts and not _fits(case)
        for case in cases
    ):
        cases = [case.with_plan(recompute="full") for case in cases]
    if len(cases) == 1:
        return cases
    return [case for case in cases if _fits(case)] or cases


def _fits(case):
    """Whether the fullest device holds its part; never for a plan that breaks a rule."""
    try:
        # on any GPUs
        peak = peak_bytes(memory_of(replace(case, cluster=None)))
    except ValueError:
        return False
    return peak <= usable_bytes(case.device)


def least_memory(case: Case, recompute_stated: bool) -> pd.DataFrame:
    """Memory on any GPUs, where recompute that is not stated is the least that fits.

    Of none, selective and full; full where nothing does.
    """
    room = usable_bytes(case.device)
    case = replace(case, cluster=None)
    stated = recompute_stated or case.plan.recompute != "none"
    for recompute in [case.plan.recompute] if stated else ["none", "selective", "full"]:
        table = memory_of(case.with_plan(recompute=recompute))
        if peak_bytes(table) <= room:
            break
    return table


def _own_plan(raw, case):
    """The plan of one's own row: the column `plan`, or those of degrees."""
    if text := text_of(raw, "plan"):
        return Plan.parse(text)
    stated = {
        field: count_of(raw, column, least=column not in _FROM_0)
        for field, column in _COLUMNS.items()
    }
    values = {field: value for field, value in stated.items() if value is not None}
    values |= {name: bool(values[name]) for name in OVERLAPS if name in values}
    if recompute := text_of(raw, "recompute").lower():
        values["recompute"] = recompute_of(recompute, case)
    model_parallel = math.prod(values.get(name, 1) for name in _DEGREES)
    return Plan(dp=case.cluster.world_size // model_parallel, **values)


def _layouts(raw, case):
    """Degrees: as stated, else all that are legal."""
    world = case.cluster.world_size
    model = case.model
    stated = _has_layout(raw)
    if stated:
        choices = {name: (count_of(raw, name, 1),) for name in _DEGREES}
    else:
        # LoRA is tried without stages, other training without context parallelism
        choices = _LAYOUTS | {"pp" if _lora_rank(raw) else "cp": (1,)}
    plans = []
    for tp, pp, cp in product(*choices.values()):
        dp, rest = divmod(world, tp * pp * cp)
        # whole samples, heads and layers
        if not stated:
            divides = dp and not (rest or case.global_batch % dp)
            if not divides or model.heads % tp or model.layers % pp:
                continue
        plan = Plan(dp=dp, tp=tp, pp=pp, cp=cp)
        plans += _with_experts(raw, replace(case, plan=plan))
    return plans or [Plan(dp=world)]


def _has_layout(raw):
    """Whether a row says how its model is split; one device leaves no choice."""
    degrees = any(positive_of(raw, name) > 0 for name in (*_DEGREES, "dp"))
    return degrees or number_of(raw, "zero_stage") >= 0 or number_of(raw, "n_gpus") == 1


def _with_experts(raw, case):
    """Plans of a layout that place the experts as stated.

    Not stated by a source: whole on each replica, or over as many as the experts and
    the replicas can be shared by. Over tp too where the software does so, or where they
    cannot lie otherwise.
    """
    plan = case.plan
    # placements: what experts may be laid over, the usual one first
    placements = case.software.expert_placement
    replicas = plan.replicas
    degrees = {count_of(raw, "ep", 1)}
    if not count_of(raw, "ep") and placements and text_of(raw, "source"):
        degrees |= {math.gcd(case.model.experts, replicas) if case.model.experts else 1}
    for ep in sorted(degrees):
        needs_tp = replicas % ep > 0 and "dp-cp-tp" in placements
        over_tp = placements[:1] == ("dp-cp-tp",) or needs_tp
        yield replace(plan, ep=ep, etp=int(over_tp and plan.tp > 1 and ep > 1))


def _plans(raw, case):
    """Plans of a layout that differ in what the row does not state: micro-batch and
    interleaving.
    """
    case = case.with_plan(**_sharding(raw, case))
    plan = replace(case.plan, **habits_of(raw, case), **_stages(raw, case))
    for micro_batch in _micro_batches(raw, case, plan):
        count = case.global_batch / (plan.dp * micro_batch)
        for interleave in _interleaves(raw, case, count):
            yield replace(plan, micro_batch=micro_batch, interleave=interleave)


def _micro_batches(raw, case, plan):
    """Samples of a micro-batch: as stated, else what its software takes.

    FSDP takes the whole batch of a device, LoRA a sample (MLPerf's default), others
    what is fastest.
    """
    local = case.global_batch / plan.dp
    if stated := count_of(raw, "micro_batch"):
        return [stated]
    if plan.pp == 1 and (plan.zero >= 2 or not case.software.schedules):
        return [max(int(local), 1)]
    if plan.lora_rank:
        return [1]
    return [size for size in _MICRO_BATCHES if local % size == 0] or [1]


def _interleaves(raw, case, count):
    """Chunks of a stage: as stated, else all that divide its layers.

    Interleaving needs a number of micro-batches, count, that is a multiple of pp.
    """
    pp = case.plan.pp
    if pp == 1:
        return [1]
    if stated := count_of(raw, "vpp"):
        return [stated]
    each, rest = divmod(case.model.layers, pp)
    if rest or not case.software.interleave or count % pp:
        return [1]
    return [chunks for chunks in range(1, each + 1) if each % chunks == 0]


def _sharding(raw, case):
    """Fields of a plan about ZeRO: its stage, and the devices that share the states.

    These are a node under HSDP, or as FSDP's size is given.
    """
    plan = case.plan
    remarks = remarks_of(raw)
    zero = count_of(raw, "zero_stage", least=0)
    if zero is None:
        zero = _usual_zero(raw, case)
    sizes = [int(size) for size in re.findall(r"\bFSDP(?: size |=| )(\d+)\b", remarks)]
    if "HSDP" in remarks:
        sizes.append(case.cluster.devices_per_node)
    replicas = plan.replicas
    legal = [size for size in sizes if 1 < size < replicas and replicas % size == 0]
    shard = legal[0] if zero and legal else 0
    # torchao gathers float8 weights where it has one scale per tensor
    precision = text_of(raw, "precision").lower()
    scaled_8bit = bool(re.search(r"float8(?!.*rowwise)", precision))
    # Megatron's --overlap-param-gather
    overlaps = zero in (1, 2) and case.software.kernels in ("fused", "graph")
    return {
        "zero": zero,
        "shard": shard,
        "qwz": zero == 3 and not shard and scaled_8bit,
        "overlap_gather": overlaps,
        "lora_rank": _lora_rank(raw),
    }


def _usual_zero(raw, case):
    """The ZeRO stage of a row that does not state it.

    FSDP if 6 bytes per weight exceed the memory (16-bit weights and fp32 gradients), 2
    where weights are frozen; else the distributed optimizer where the software has one,
    FSDP where it has no other ZeRO, 0 for software of 2021.
    """
    model = case.model
    plan = case.plan
    choices = case.software.zero
    experts = model.moe_layers * model.experts * model.expert_parameters
    parameters = model.parameters - experts * (1 - 1 / plan.ep)
    states_bytes = (2 if _lora_rank(raw) else 6) * parameters / plan.tp
    large = states_bytes > case.device.memory_bytes
    if large and plan.pp == 1 and 3 in choices and _has_layout(raw):
        return 3
    if 1 in choices:
        return 1
    return 3 if 2 in choices else 0


def _lora_rank(raw):
    """Rank of the adapters, 0 where all weights are trained."""
    named = re.search(r"\bq?lora\b", remarks_of(raw), re.I)
    return count_of(raw, "lora_rank", _LORA_RANK if named else 0, least=0)


def _stages(raw, case):
    """Ends of the pipeline: as the notes cut it, else DeepSpeed's balance.

    The latter counts embedding and head as layers if it comes out. AMP's partition
    counts 30 pseudo-layers: two before the embedding's and three behind the last
    layer's.
    """
    layers = case.model.layers
    pp = case.plan.pp
    cut = re.search(r"pipeline partition \[([\d, ]+)\]", remarks_of(raw))
    bounds = [int(bound) for bound in cut[1].split(",")] if cut else []
    inner = {high - low for low, high in pairwise(bounds[1:-1])}
    # a plan may have uneven ends, but no uneven stages between them
    if pp > 1 and len(bounds) == pp + 1 and len(inner) <= 1:
        first = bounds[1] - _PSEUDO_LAYERS
        last = layers + _PSEUDO_LAYERS - bounds[-2]
        if first > 0 and last > 0:
            return {"first_layers": first, "last_layers": last}
    # 2: embedding and head
    uneven = layers % pp > 0 and (layers + 2) % pp == 0
    ends = case.software.ends_as_layers and uneven
    return {"embedding_as_layer": ends, "head_as_layer": ends}
