"""Waits of ranks that differ: each computes delays the fastest one by a random delay.

With exponential delays of mean j the slowest of n ranks is behind the fastest of N by

    j (1 + 1/2 + ... + 1/n - 1/N)

Groups nest: tp ranks wait in each layer, those of cp, ep and ZeRO-3 too, replicas at the
end of the step, and a pipeline waits for its slowest stage, of those that are alike for
the slowest of all. Stages that only fill and drain it are as slow as they are
themselves. Parts grow on a line up to the delay of the slowest rank.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import digamma

from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.compute import Number, Parts

_WAITING = ("tp_s", "cp_s", "ep_s", "fsdp_s", "dp_s", "bubble_s")
# of a micro-batch in the bottleneck stage
_OF_STAGE = ("gemm_s", "attention_s", "pointwise_s", "head_s", *_WAITING[:4])
_NEVER = 1e-300  # keeps a quotient of two zeros at zero


class _Nested(NamedTuple):
    """A number for each group of ranks that wait for each other, inside the next."""

    rank: Number  # one alone
    tensor: Number  # in each layer
    context: Number
    expert: Number
    sharded: Number  # under ZeRO-3
    stage: Number  # replicas, at the end of the step
    stages: Number  # of the pipeline, as far as they are alike


def longest_delay(steps: Steps) -> Number:
    """Expected delay of the slowest rank over the time that it computes."""
    longest = steps.jitter * _harmonic(steps.plan.world_size)
    # plans of one case have as many ranks
    return longest if np.ndim(steps.shape.layers) else np.max(longest)


def with_waits(
    steps: Steps, times: Parts, slow: Parts, parts: tuple[str, ...]
) -> Parts:
    """Parts of the mean rank with its expected waits for the slowest of each group.

    times: of equal ranks. slow: of ranks that are all as slow as the slowest. parts:
    names of those whose sum is the step.
    """
    longest = np.maximum(longest_delay(steps), _NEVER)
    growth = {
        part: steps.jitter * (slow[part] - times[part]) / longest for part in times
    }
    # expected delay of the slowest rank of each group, in mean delays
    world = steps.plan.world_size
    ranks = _nested_ranks(steps, times)
    delays = _Nested(*(_harmonic(count) - 1 / world for count in ranks))
    delay = delays.stages - delays.rank  # of the step beyond the mean rank's
    # fill and drain pass through each stage once, at its own speed
    once_s = growth["bubble_s"] + growth["launch_s"]
    once_s = np.clip(once_s, 0.0, growth["step_s"])
    once_s = once_s * (delays.stages - delays.sharded)
    waits_s = growth["step_s"] * delay - once_s
    result = {part: times[part] + growth[part] * delays.rank for part in parts}
    # each group's ranks wait as much longer as the group is larger
    for part, (inner, outer) in zip(_WAITING, pairwise(delays), strict=True):
        share = (outer - inner) / np.maximum(delay, 1e-9)
        result[part] = result[part] + waits_s * share
    return result


def _nested_ranks(steps, times):
    """Ranks of each group."""
    plan = steps.plan
    pp = plan.pp
    tp = plan.tp
    # seconds of the bottleneck stage, and of a mean other one, in a micro-batch
    stage_s = sum(times[part] for part in _OF_STAGE) / steps.micro_batches
    other_s = times["bubble_s"] * plan.interleave / (pp - (pp > 1))
    other_s = np.where(plan.defers_weights, stage_s, other_s)
    # probability that another stage is behind by more than it is faster
    lag = np.minimum(other_s / stage_s - 1, 0.0)
    equal_chance = np.exp(lag / np.maximum(steps.jitter, 1e-9))
    exchanging = plan.ep * tp // plan.expert_spread
    in_layer = np.maximum(tp * plan.cp, exchanging)
    sharing = (plan.zero >= 3) * tp * plan.sharing
    of_stage = plan.world_size / pp
    return _Nested(
        rank=1,
        tensor=tp,
        context=tp * plan.cp,
        expert=in_layer,
        sharded=np.maximum(in_layer, sharing),
        stage=of_stage,
        stages=of_stage * (1 + (pp - 1) * equal_chance),
    )


def _harmonic(count):
    """1 + 1/2 + ... + 1/count."""
    return digamma(count + 1.0) + np.euler_gamma
