"""Seconds of a training step: the steady state of its layers, the ends of its pipeline,
and what follows.

Layers are timed once per kind. A pipeline takes micro-batches x slowest stage, and the
other stages once while it fills and drains [Narayanan et al. 2021]. Gradient traffic,
optimizer and the host's work at the end come after it. The host issues kernels ahead of
the device: where it takes longer for those of a step, it sets the pace.
"""

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from madmax_lib.plan import Plans
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.costs.layer_time import LAYER_PARTS
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import ParameterCount, tied_s
from madmax_lib.simulator.rates.compute import Number, Parts
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.jitter import longest_delay, with_waits
from madmax_lib.simulator.steady.layer_costs import layer_costs
from madmax_lib.simulator.steady.pipeline import bubble_s, messages_s, short_batch_s
from madmax_lib.simulator.steady.reductions import PassesOfStage, exposed_gradients
from madmax_lib.simulator.steady.stages import stages_of

# exposed seconds whose sum is the step
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
# of these, the device at work, and communication as far as it shows
COMPUTE = ("gemm_s", "attention_s", "pointwise_s", "head_s", "optimizer_s")
COMMUNICATION = ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "pp_s")


@dataclass(frozen=True)
class _PipelineTimes:
    """Passes of all micro-batches of a step, and what follows them needs."""

    prices: Prices
    passes_s: Number
    parts: Parts  # of `PARTS`, of which passes_s consists
    mean_stage: ParameterCount
    first_stage: PassesOfStage
    host_s: Number  # of the host for all, with the way back through the pipeline


def step_s(steps: Steps, parameters: Parameters) -> np.ndarray:
    """Seconds of a step. Constants of shape (p, 1) are p machines for the same steps,
    (n,): the result is (p, n).
    """
    if np.any(steps.jitter):
        return step_time(steps, parameters)["step_s"]
    pipeline = _pipeline(steps, parameters, with_parts=False)
    return np.atleast_1d(sum(_after_passes(pipeline).values()) + pipeline.passes_s)


def step_time(steps: Steps, parameters: Parameters) -> Parts:
    """Seconds of a step and of its parts (`PARTS`); step_s is their sum. Shapes as in
    `step_s`.

    Parts up to fsdp_s are those of the slowest pipeline stage over all micro-batches;
    fsdp_s, tp_s, cp_s and dp_s count only what is exposed, and with jitter the waits of
    their ranks for each other.
    """
    if np.any(steps.jitter):
        # times of equal ranks, and of ranks that are all as slow as the slowest
        equal = replace(steps, jitter=0.0)
        slow = replace(equal, slower=1 + longest_delay(steps))
        times = [step_time(one, parameters) for one in (equal, slow)]
        parts = with_waits(steps, *times, PARTS)
        return parts | {"step_s": sum(parts.values())}
    pipeline = _pipeline(steps, parameters)
    after = _after_passes(pipeline)
    launch_s = pipeline.parts["launch_s"] + after["launch_s"]
    parts = pipeline.parts | after | {"launch_s": launch_s}
    times = {name: parts[name] for name in PARTS}
    times["step_s"] = sum(times.values())
    arrays = np.broadcast_arrays(*map(np.atleast_1d, times.values()))
    return dict(zip(times, arrays, strict=True))


def _pipeline(steps, parameters, *, with_parts=True):
    """Passes of a step, and what follows them needs; parts of the bottleneck stage only
    where they are asked for.
    """
    usual, last = _costs_of_batches(steps, parameters)
    prices = usual.prices
    count = steps.micro_batches
    stages = last_stages = stages_of(steps, usual)
    bubble = bubble_s(steps, usual, stages)
    if last is not usual:
        last_stages = stages_of(steps, last)
        shorter_s = short_batch_s(steps, stages, last_stages)
        bubble = np.maximum(bubble + shorter_s, 0.0)
    message_s = messages_s(steps, usual, stages) + tied_s(prices)
    compute_s = (count - 1) * stages.slowest_s + last_stages.slowest_s
    passes_s = compute_s + (bubble + message_s)
    parts = {}
    if with_parts:
        full = _stage_parts(stages, usual)
        short = _stage_parts(last_stages, last)
        parts = {name: (count - 1) * full[name] + short[name] for name in full}
    # all but messages is shorter where ranks that compute share cores with fewer others
    factor = _core_sharing_factor(steps, usual, passes_s)
    parts = {name: factor * part for name, part in parts.items()}
    parts |= {"bubble_s": factor * bubble, "pp_s": message_s}
    return _PipelineTimes(
        prices=prices,
        passes_s=factor * (passes_s - message_s) + message_s,
        parts=parts,
        mean_stage=usual.stage,
        first_stage=_first_stage(stages, last_stages, usual, last),
        host_s=_host_s(steps, stages, last_stages, prices),
    )


def _costs_of_batches(steps, parameters):
    """Costs of all micro-batches but the last, and of that one, which may be shorter;
    one alone is the last.
    """
    plan = steps.plan
    count = steps.micro_batches
    before = (count - 1) * plan.micro_batch
    samples = steps.global_batch / plan.dp - before
    if np.all(samples == plan.micro_batch):
        costs = layer_costs(steps, parameters)
        return costs, costs

    def of_size(size):
        plans = Plans(**vars(plan) | {"micro_batch": size})
        work = replace(steps.work, plan=plans)
        return layer_costs(replace(steps, work=work), parameters)

    return of_size(np.where(count == 1, samples, plan.micro_batch)), of_size(samples)


def _first_stage(stages, last_stages, usual, last):
    """Passes of the first stage; of the last micro-batch the part that ends with
    gradients, which is wgrad where that is computed apart.
    """
    prices = usual.prices
    layers = stages.three[0].layers
    plan = prices.plan
    single = plan.pp == 1
    split = plan.defers_weights
    wgrad_s = last.layer.time.weight_s
    # copies are reduced beside what compute waits for, too
    last_backward_s = last_stages.first_backward_s + last_stages.stalls_s
    return PassesOfStage(
        layers=layers,
        layer=usual.layer.count,
        # of a V it is a stage without an end
        embedding_parameters=(1 - plan.folds) * usual.embedding.count.dense,
        head_parameters=np.where(single, usual.head.count.dense, 0.0),
        forward_s=stages.first_forward_s,
        backward_s=stages.first_backward_s,
        last_forward_s=last_stages.first_forward_s,
        last_backward_s=np.where(split, layers * wgrad_s, last_backward_s),
        layer_s=np.where(split, wgrad_s, last.layer.passes_s[1]),
        head_s=np.where(single, last.head.passes_s[1], 0.0),
        launched_s=_issued_s(stages.three[0], prices, 2),
    )


def _issued_s(stage, prices, passes):
    """Seconds of a host that is not the device for so many passes of a stage, and what
    is computed again.
    """
    mixtures = stage.moe_layers
    routing_s = mixtures * prices.routing_s
    mlp, moe = prices.repeats_feed_forward
    repeated = mlp * (stage.layers - mixtures) + moe * mixtures
    again_s = repeated * prices.launch_s / 2 + moe * routing_s
    layers = stage.layers * prices.steps.shape.halves
    seconds = layers * prices.launch_s + routing_s
    return prices.launches_ahead * ((passes + prices.repeats) * seconds + again_s)


def _host_s(steps, stages, last_stages, prices):
    """Seconds until the host of the busiest stage has issued all passes, of which the
    last waits for gradients from the stages after it.
    """
    plan = steps.plan
    chain_s = last_stages.first_backward_s / plan.interleave
    split = prices.splits_backward
    if np.any(split > 0):  # dgrad alone travels back
        wgrad_s = stages.three[0].layers * last_stages.passes.wgrad_s
        chain_s = chain_s - split * wgrad_s
    count = steps.micro_batches
    return reduce(
        np.maximum,
        (
            # forward, dgrad, wgrad
            count * _issued_s(stage, prices, 3) + stage.upstream * chain_s
            for stage in stages.three
        ),
    )


def _stage_parts(stages, costs):
    """Parts of a micro-batch in the bottleneck stage; all else there is traffic of
    weights.
    """
    layer = costs.layer.time
    dense = costs.dense.time
    dense_layers = np.where(stages.has_embedding, stages.dense_layers, 0)
    others = stages.at_bottleneck("layers") - dense_layers
    parts = {
        name: others * (layer.forward[name] + layer.backward[name])
        + dense_layers * (dense.forward[name] + dense.backward[name])
        for name in LAYER_PARTS
    }
    excess_s = stages.at_bottleneck("excess_s")
    if costs.prices.steps.shape.model:
        longer = 1 + excess_s / (others * sum(layer.passes_s))
        parts = {name: longer * part for name, part in parts.items()}
    else:  # layers without a window attend to more
        parts["attention_s"] = parts["attention_s"] + excess_s
    parts |= {"launch_s": parts["launch_s"] + stages.switches_s, "head_s": 0.0}
    ends = (
        ("pointwise_s", costs.embedding, stages.has_embedding),
        ("head_s", costs.head, stages.has_head),
    )
    for name, end, is_there in ends:
        # both ends sum over tp, too: rows of the table, and terms of the softmax
        waits_s = end.time.forward["tp_s"] + end.time.backward["tp_s"]
        computed_s = sum(end.passes_s) - waits_s
        parts[name] = parts[name] + is_there * computed_s
        parts["tp_s"] = parts["tp_s"] + is_there * waits_s
    exposed_s = np.maximum(stages.slowest_s - sum(parts.values()), 0.0)
    sharded = costs.prices.plan.zero >= 3
    return parts | {"fsdp_s": np.where(sharded, exposed_s, 0.0)}


def _core_sharing_factor(steps, costs, passes_s):
    """Factor on the passes of a pipeline whose CPU ranks speed up while their peers
    idle.

    While one computes, (work of all / passes - 1) others do on average; beside all of
    them it takes its whole time, alone the `solo_time_ratio` of it.
    """
    solo = costs.prices.solo_time_ratio
    pp = costs.prices.plan.pp
    shape = steps.shape
    if np.all(solo == 1.0) or np.all(pp == 1):
        return 1.0
    dense_layers = shape.dense_layers
    other_layers = shape.layers - dense_layers
    layers_s = other_layers * sum(costs.layer.passes_s)
    layers_s = layers_s + dense_layers * sum(costs.dense.passes_s)
    ends_s = sum(costs.embedding.passes_s) + sum(costs.head.passes_s)
    work_s = steps.micro_batches * (layers_s + ends_s)
    busy = (work_s / passes_s - 1) / np.maximum(pp - 1, 1)  # share of the others
    busy = np.clip(busy, 0.0, 1.0)
    return np.where(pp > 1, solo + (1 - solo) * busy, 1.0)


def _after_passes(pipeline):
    """Parts beside and after the passes; launch_s is what the host takes longer than
    the device.
    """
    prices = pipeline.prices
    exposed = exposed_gradients(pipeline.first_stage, prices)
    busy_s = pipeline.passes_s + exposed.during_s + exposed.after_s
    host_s = pipeline.host_s + exposed.after_host_s
    return {
        "launch_s": np.maximum(host_s - busy_s, 0.0),
        "dp_s": exposed.during_s + exposed.after_s,
        "optimizer_s": prices.update_s(pipeline.mean_stage.owned(prices)),
        "overhead_s": prices.host_s,
    }
