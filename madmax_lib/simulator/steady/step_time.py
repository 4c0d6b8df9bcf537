"""How long does a training step take? The steady state of its layers, the ends of its
pipeline, and what follows.

Layers are timed once per kind. A pipeline takes micro-batches x slowest stage, and the
other stages once while it fills and drains [Narayanan et al. 2021]. Gradient traffic,
optimizer and the host's work at the end come after it. The host issues kernels ahead of
the device: where it takes longer for those of a step, it sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise

import numpy as np
from scipy.special import digamma

from madmax_lib.plan.columns import Plans
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import LAYER_PARTS
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import Gradients, Held, gradients, slowed_s
from madmax_lib.simulator.layers.work import has
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.alike import kinds_of, spread
from madmax_lib.simulator.steady.pieces import Pieces, pieces_of
from madmax_lib.simulator.steady.stages import (
    Stages,
    bubble_s,
    sends_s,
    short_s,
    stages_of,
    tied_s,
)

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "PARTS",
    "Body",
    "bodies_of",
    "step_s",
    "step_time",
]

PARTS = (
    "gemm_s",
    "attention_s",
    "pointwise_s",
    "head_s",
    "launch_s",
    "tp_s",
    "cp_s",
    "ep_s",
    "fsdp_s",
    "bubble_s",
    "pp_s",
    "dp_s",
    "optimizer_s",
    "overhead_s",
)
COMPUTE = (
    "gemm_s",
    "attention_s",
    "pointwise_s",
    "head_s",
    "optimizer_s",
)  # of these, the device at work
COMMUNICATION = ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "pp_s")  # as far as it shows


_LATE = (
    "bucket_bytes",
    "overlap_gather",
    "overlap_dp",
    "offload",
)  # what the body of a step does not depend on
_SHARDED = (
    "zero",
    "shard",
    "qwz",
    "hpz",
    "qgz",
    "prefetch",
    "reduce_fp32",
)  # on which it does under ZeRO-3, or 2
_BODY = tuple(
    field.name for field in fields(Plans) if field.name not in (*_LATE, *_SHARDED)
)


@dataclass(frozen=True)
class Body:
    """What a step does before its gradients are reduced, and what these are reduced
    beside.
    """

    prices: Prices
    passes_s: Number
    parts: dict[str, Number]  # of `PARTS`, of which passes_s consists
    layer: Held  # parameters of the mean layer
    stage: Held  # of the mean stage
    ends: tuple[
        Number, Number
    ]  # of the embedding, and of the head if the first stage has it
    layers: Number  # of the first stage
    first_s: tuple[Number, Number]  # its (forward, backward) pass
    last_s: tuple[
        Number, Number
    ]  # of the last micro-batch, backward the part that ends with gradients
    layer_s: Number  # of that part for a layer
    head_s: Number  # and of the head if it is there
    launched_s: Number  # of the host for a backward pass
    host_s: Number  # and for all, with the way back through the pipeline


def bodies_of(steps: Steps, parameters: Parameters) -> Callable[[slice], Body] | None:
    """Gives the body of some rows of a table, where each is worked out once for rows
    alike; None if hardly any are.
    """
    least = (
        2 if has(steps.habits.on_host) else 3
    )  # FSDP's collectives block a host from ZeRO-2 on
    kinds = kinds_of(
        steps.work.plan, _BODY, _SHARDED, np.asarray(steps.work.plan.zero) >= least
    )
    if kinds is None or np.any(steps.jitter):
        return None
    body = _body(steps[kinds[0]], parameters)
    return lambda rows: replace(
        spread(body, kinds[1][rows]), prices=Prices(steps[rows], parameters)
    )


def step_s(steps: Steps, parameters: Parameters) -> np.ndarray:
    """Seconds of a step. Constants of shape (p, 1) are p machines for the same steps,
    (n,): the result is (p, n).
    """
    if np.any(steps.jitter):
        return step_time(steps, parameters)["step_s"]
    body = _body(steps, parameters, inside=False)
    return np.atleast_1d(sum(_outside(body).values()) + body.passes_s)


def step_time(
    steps: Steps, parameters: Parameters, body: Body | None = None
) -> dict[str, np.ndarray]:
    """Seconds of a step and of its parts (`PARTS`); step_s is their sum. Shapes as in
    `step_s`.

    Parts up to fsdp_s are those of the slowest pipeline stage over all micro-batches;
    fsdp_s, tp_s, cp_s and dp_s count only what is exposed, and with jitter the waits of
    their ranks for each other. body: of these steps, worked out if None.
    """
    if np.any(steps.jitter):
        return _with_waits(steps, parameters)
    body = body or _body(steps, parameters)
    outside = _outside(body)
    parts = (
        body.parts
        | outside
        | {"launch_s": body.parts["launch_s"] + outside["launch_s"]}
    )
    times = {name: parts[name] for name in PARTS} | {
        "step_s": sum(parts[name] for name in PARTS)
    }
    return dict(
        zip(
            times, np.broadcast_arrays(*map(np.atleast_1d, times.values())), strict=True
        )
    )


def _with_waits(steps: Steps, parameters: Parameters) -> dict[str, np.ndarray]:
    """`step_time` where ranks differ: parts of the mean rank, and its expected waits
    for the slowest of each group.

    With exponential delays the slowest of n ranks is behind the fastest of N by jitter
    x (1 + 1/2 + ... + 1/n - 1/N). Groups nest: tp ranks wait in each layer, those of
    cp, ep and ZeRO-3 too, replicas at the end of the step, and a pipeline waits for its
    slowest stage, of those that are alike for the slowest of all. Stages that only fill
    and drain it are as slow as they are themselves. Parts grow on a line up to the
    delay of the slowest rank.
    """
    p = steps.work.plan
    pp = np.asarray(steps.work.plan.pp)
    world = steps.work.plan.world_size
    largest = steps.jitter * _harmonic(world)
    alike = replace(steps, jitter=0.0)
    largest = (
        largest if np.ndim(steps.work.shape.layers) else np.max(largest)
    )  # plans of one case are equally large
    times, slow = (
        step_time(part, parameters)
        for part in (alike, replace(alike, slower=1 + largest))
    )
    growth = {
        part: steps.jitter * (slow[part] - times[part]) / np.maximum(largest, 1e-300)
        for part in times
    }
    stage_s = sum(times[part] for part in PARTS[:4] + PARTS[5:9]) / steps.micro_batches
    other_s = np.where(
        np.equal(p.schedule, "zero-bubble"),
        stage_s,
        times["bubble_s"] * p.interleave / (pp - (pp > 1)),
    )
    near = np.exp(
        np.minimum(other_s / stage_s - 1, 0.0) / np.maximum(steps.jitter, 1e-9)
    )
    inside = np.maximum(p.tp * p.cp, p.ep * p.tp // p.expert_spread)
    of_stage = world / pp
    lockstep = np.maximum(inside, (np.asarray(p.zero) >= 3) * p.tp * p.sharing)
    ranks = (
        1,
        p.tp,
        p.tp * p.cp,
        inside,
        lockstep,
        of_stage,
        of_stage * (1 + (pp - 1) * near),
    )
    behind = [_harmonic(count) - 1 / world for count in ranks]
    bubble_s = np.clip(
        growth["bubble_s"] + growth["launch_s"], 0.0, growth["step_s"]
    ) * (behind[-1] - behind[4])
    waits_s = growth["step_s"] * (behind[-1] - behind[0]) - bubble_s
    parts = {part: times[part] + growth[part] * behind[0] for part in PARTS}
    waiting = ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "bubble_s")
    for part, (before, after) in zip(waiting, pairwise(behind), strict=True):
        parts[part] = parts[part] + waits_s * (after - before) / np.maximum(
            behind[-1] - behind[0], 1e-9
        )
    return parts | {"step_s": sum(parts.values())}


def _harmonic(count: Number) -> Number:
    """1 + 1/2 + ... + 1/count."""
    return digamma(np.asarray(count) + 1.0) + np.euler_gamma


def _batches(steps: Steps, parameters: Parameters) -> tuple[Pieces, Pieces]:
    """Pieces of all micro-batches but the last, and of that one, which may be shorter;
    one alone is the last.
    """
    plan = steps.work.plan
    count = steps.micro_batches
    samples = steps.global_batch / np.asarray(plan.dp) - (count - 1) * plan.micro_batch
    if np.all(samples == plan.micro_batch):
        return (pieces_of(steps, parameters),) * 2
    sizes = np.where(count == 1, samples, plan.micro_batch), samples
    works = (
        replace(steps.work, plan=Plans(**vars(plan) | {"micro_batch": size}))
        for size in sizes
    )
    return tuple(pieces_of(replace(steps, work=work), parameters) for work in works)


def _inside(stages: Stages, pieces: Pieces) -> dict[str, Number]:
    """Parts of a micro-batch in the slowest stage; all else there is traffic of
    weights.
    """
    shape = pieces.prices.steps.work.shape
    layer = pieces.layer
    dense = pieces.dense
    fewer = np.where(stages.in_first, stages.dense, 0)
    mixed = stages.of_slowest(*stages.layers) - fewer
    parts = {
        name: mixed * (layer.forward[name] + layer.backward[name])
        + fewer * (dense.forward[name] + dense.backward[name])
        for name in LAYER_PARTS
    }
    farther_s = stages.of_slowest(*stages.farther_s)
    if shape.model:
        longer = 1 + farther_s / (mixed * sum(layer.passes_s))
        parts = {name: longer * part for name, part in parts.items()}
    else:
        parts["attention_s"] = parts["attention_s"] + farther_s
    parts["pointwise_s"] = parts["pointwise_s"] + stages.in_first * sum(
        pieces.embedding.passes_s
    )
    parts["head_s"] = stages.in_last * sum(pieces.head.passes_s)
    shown_s = np.maximum(stages.slowest_s - sum(parts.values()), 0.0)
    return parts | {
        "fsdp_s": np.where(np.asarray(pieces.prices.plan.zero) >= 3, shown_s, 0.0)
    }


def _body(steps: Steps, parameters: Parameters, *, inside: bool = True) -> Body:
    pieces, last = _batches(steps, parameters)
    prices = pieces.prices
    count = steps.micro_batches
    p = steps.work.plan
    pp = np.asarray(steps.work.plan.pp)
    halves = steps.work.shape.halves
    stages = ends = stages_of(steps, pieces)
    single = pp == 1
    bubble = bubble_s(steps, pieces, stages)
    if last is not pieces:
        ends = stages_of(steps, last)
        bubble = np.maximum(bubble + short_s(steps, stages, ends), 0.0)
    first_layers = stages.layers[0]
    split = prices.split > 0
    weight_s = last.layer.weight_s
    chain_s = ends.first_s[1] / p.interleave
    if np.any(split):
        chain_s = chain_s - split * first_layers * ends.halves_s[1]
    issued_s, before = zip(
        *(
            (n * halves * prices.launch_s + m * prices.routing_s, k)
            for n, m, k, _ in stages.held
        ),
        strict=True,
    )
    issued_s = tuple((1 - prices.habits.on_host) * seconds for seconds in issued_s)
    parts = {
        "bubble_s": bubble,
        "pp_s": sends_s(steps, pieces, stages) + tied_s(prices),
    }
    passes_s = (count - 1) * stages.slowest_s + ends.slowest_s + sum(parts.values())
    if inside:
        full = _inside(stages, pieces)
        short = _inside(ends, last)
        parts |= {name: (count - 1) * full[name] + short[name] for name in full}
    shorter = _company(steps, pieces, count, passes_s)
    passes_s = shorter * (passes_s - parts["pp_s"]) + parts["pp_s"]
    parts = {
        name: part if name == "pp_s" else shorter * part for name, part in parts.items()
    }
    hosts_s = (
        count * (3 + prices.repeats) * one_s + k * chain_s
        for one_s, k in zip(issued_s, before, strict=True)
    )
    return Body(
        prices=prices,
        passes_s=passes_s,
        parts=parts,
        layer=pieces.layers,
        stage=pieces.stage,
        ends=(pieces.first, np.where(single, pieces.last, 0.0)),
        layers=first_layers,
        first_s=stages.first_s,
        last_s=(
            ends.first_s[0],
            np.where(split, first_layers * weight_s, ends.first_s[1]),
        ),
        layer_s=np.where(split, weight_s, last.layer.passes_s[1]),
        head_s=np.where(single, last.head.passes_s[1], 0.0),
        launched_s=(2 + prices.repeats) * issued_s[0],
        host_s=reduce(np.maximum, hosts_s),
    )


def _company(steps: Steps, pieces: Pieces, count: Number, passes_s: Number) -> Number:
    """Share of the time of its passes that a pipeline takes where stages compute faster
    while others are idle.

    While one computes, (work of all / passes - 1) others do on average; beside all of
    them it takes its whole time.
    """
    alone = pieces.prices.alone
    pp = np.asarray(pieces.prices.plan.pp)
    shape = steps.work.shape
    if np.all(np.equal(alone, 1.0)) or np.all(pp == 1):
        return 1.0
    mixed, dense = (sum(layer.passes_s) for layer in (pieces.layer, pieces.dense))
    first = np.where(np.asarray(shape.experts) > 0, shape.dense_layers, 0)
    layers_s = (shape.layers - first) * mixed + first * dense
    whole_s = count * (
        layers_s + sum(pieces.embedding.passes_s) + sum(pieces.head.passes_s)
    )
    others = np.clip((whole_s / passes_s - 1) / np.maximum(pp - 1, 1), 0.0, 1.0)
    return np.where(pp > 1, alone + (1 - alone) * others, 1.0)


def _outside(body: Body) -> dict[str, Number]:
    """Parts beside the body; launch_s is what the host takes longer than the device."""
    during_s, after_s, after_host_s = _data_s(body)
    busy_s = body.passes_s + during_s + after_s
    return {
        "launch_s": np.maximum(body.host_s + after_host_s - busy_s, 0.0),
        "dp_s": during_s + after_s,
        "optimizer_s": body.prices.update_s(body.stage.owned(body.prices)),
        "overhead_s": body.prices.host_s,
    }


def _data_s(body: Body) -> tuple[Number, Number, Number]:
    """Gradient traffic that no compute hides, and what it slows down: while passes
    follow, and after the last.

    Gradients are reduced in buckets beside the last backward pass of a stage, the first
    one's, which ends last; weights of ZeRO-1/2 are gathered beside its first forward
    pass, or after the update. The third time is what comes after the last pass where
    the host sets the pace.
    """
    prices = body.prices
    trained = body.prices.trained
    moved = gradients(body.layer, body.layers, body.ends, prices)
    if not np.any(moved.reduce_s):
        return 0.0, 0.0, 0.0
    slower_s, after_s, after_host_s = _reduced_s(body, moved)
    gather_s = moved.gather_s
    late = np.logical_not(prices.plan.overlap_gather) | (prices.habits.on_host > 0)
    chunks = prices.plan.interleave
    forward_s = body.first_s[0] / prices.plan.interleave
    rounds_s = (
        (chunks - 1) * prices.steps.in_round * forward_s
    )  # before the first pass of the last chunk
    ahead_s = np.maximum(gather_s / chunks - forward_s, gather_s - forward_s - rounds_s)
    ahead_s = np.maximum(ahead_s, gather_s / np.maximum(body.layers, 1))
    during_s = slower_s + np.where(late, 0.0, ahead_s)
    gather_s = np.where(late, gather_s, 0.0)
    return (
        trained * during_s,
        trained * (after_s + gather_s),
        trained * (after_host_s + gather_s),
    )


def _reduced_s(body: Body, moved: Gradients) -> tuple[Number, Number, Number]:
    """Reductions that show: of all micro-batches but the last, after the last pass, and
    after that of the host.
    """
    prices = body.prices
    steps = body.prices.steps
    p = body.prices.plan
    (forward_s, backward_s) = body.first_s
    (last_forward_s, last_s) = body.last_s
    layers = body.layers
    zero = np.asarray(p.zero)
    in_chunk = layers / p.interleave
    beside = moved.ready <= np.maximum(np.ceil(in_chunk), 1)
    slower_s = np.where(beside, slowed_s(last_s, moved.reduce_s, prices), 0.0)
    ready = np.minimum(moved.ready, in_chunk)
    begun_s = ready * body.layer_s + body.head_s
    rest_s = _left_s(moved, last_s, slower_s, begun_s, steps.in_round * backward_s, p)
    rest_s = (
        rest_s + slower_s + np.where(prices.split > 0, 0.0, _drain_s(body, slower_s))
    )
    begun_s = ready * body.launched_s / np.maximum(layers, 1)
    host_s = _left_s(
        moved, body.launched_s, 0.0, begun_s, steps.in_round * body.launched_s, p
    )
    hides = (prices.habits.hides_dp > 0) | (
        (zero >= 3) & np.equal(prices.habits.on_host, 0)
    )
    after_s, after_host_s = (
        np.where(hides, seconds, moved.whole_s) for seconds in (rest_s, host_s)
    )
    each = prices.reduces_each
    if not np.any(each):
        return 0.0, after_s, after_host_s
    beside_s = np.where(beside, slowed_s(backward_s, moved.each_s, prices), 0.0)
    sooner_s = (
        ready / np.maximum(in_chunk, 1) * (backward_s - last_s)
    )  # a short one fills its first bucket
    between = [
        forward_s + backward_s,
        last_forward_s + backward_s - sooner_s,
    ]  # two backward passes, the last two
    over_s = [
        np.where(hides, np.maximum(moved.each_s - gap_s, beside_s), moved.each_s)
        for gap_s in between
    ]
    count = steps.micro_batches
    return (
        each * (np.maximum(count - 2, 0) * over_s[0] + (count > 1) * over_s[1]),
        after_s,
        after_host_s,
    )


def _drain_s(body: Body, slower_s: Number) -> Number:
    """Seconds by which the last passes of the other stages end later where each of a
    stage's is slower by so many.

    They follow the passes of the micro-batch before, which may be longer, or come in
    rounds of more than all stages.
    """
    p = body.prices.plan
    (ahead_s, last_s) = body.last_s
    pp = np.asarray(p.pp)
    chunks = np.asarray(p.interleave)
    between_s = np.where((chunks > 1) | np.equal(p.schedule, "gpipe"), 0.0, ahead_s)
    more = (
        np.floor(body.prices.steps.in_round) - pp
    )  # the last round is not the longest
    longer_s = (
        (pp - 1) * (body.first_s[1] - last_s)
        - between_s
        + (1 - 1 / chunks) * more * last_s
    )
    return np.maximum((pp - 1) * slower_s, longer_s) - np.maximum(longer_s, 0.0)


def _left_s(
    moved: Gradients,
    pass_s: Number,
    slower_s: Number,
    begun_s: Number,
    round_s: Number,
    p: Plans,
) -> Number:
    """Reductions left when the last backward pass ends, whose first bucket is full
    after begun_s.

    round_s: passes of as many micro-batches as go through a chunk in a row.
    """
    chunks = np.asarray(p.interleave)
    room_s = np.maximum((pass_s + slower_s) / chunks - begun_s, 0.0)
    later_s = (chunks - 1) * round_s / chunks  # passes between those of its chunks
    rest_s = np.maximum(
        moved.reduce_s / chunks - room_s, moved.reduce_s - room_s - later_s
    )
    return np.maximum(rest_s, moved.last_s)
