"""Seconds for which a layer computes and waits for its own collectives, forward and
backward, by cause.

Blocks of a layer follow each other. Their collectives run beside their products as far
as software can (`overlap`); what is left shows, and so do exchanges of tokens, keys and
values. Traffic of weights and gradients is not in here (`traffic`).
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from madmax_lib.simulator.costs.prices import CAUSES, Prices, add
from madmax_lib.simulator.costs.rows import map_leaves
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.layers.work import any_nonzero
from madmax_lib.simulator.rates.compute import Number, Parts

LAYER_PARTS = (*CAUSES, "launch_s", "tp_s", "cp_s", "ep_s")
_PARTS = {"tp": "tp_s", "etp": "tp_s", "ep": "ep_s", "cp": "cp_s"}  # by group


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer and micro-batch."""

    forward: Parts  # by part (`LAYER_PARTS`)
    backward: Parts  # with recompute
    weight_s: Number  # wgrad, which zero-bubble schedules compute apart

    @cached_property
    def passes_s(self) -> tuple[Number, Number]:
        """Forward and backward pass."""
        return sum(self.forward.values()), sum(self.backward.values())


class _BlockTime(NamedTuple):
    """Seconds of compute of a block beside which its collectives may run."""

    forward_s: Number
    recompute_s: Number
    backward_s: Number  # dgrad, and wgrad where it is not computed apart


def layer_time(blocks: Sequence[Block], prices: Prices) -> LayerTime:
    """Time of a layer made of these blocks, or of an end of the model."""
    forward = dict.fromkeys(LAYER_PARTS, 0.0)
    backward = dict.fromkeys(LAYER_PARTS, 0.0)
    priced = [prices.block_s(block) for block in blocks]
    waits = [_collectives_s((*block.before, *block.after), prices) for block in blocks]
    # full recompute repeats collectives too, and so do whole modules
    repeats = [prices.repeats + block.again for block in blocks]
    computed, weight_s = _computed(priced, waits, repeats, prices)
    if any(block.name.startswith("core") for block in blocks):
        _rejoin_attention(blocks, waits, computed, prices)
    for block, seconds, waits_s, time, repeated in zip(
        blocks, priced, waits, computed, repeats, strict=True
    ):
        back_waits_s = waits_s
        if block.reverse:
            back_waits_s = _collectives_s(sum(block.reverse, ()), prices)
        add(forward, seconds["forward"])
        for phase in ("backward", "weight", "recompute"):
            add(backward, seconds[phase])
        add(forward, _exposed(waits_s, prices, time.forward_s))
        add(backward, _exposed(back_waits_s, prices, time.backward_s))
        if any_nonzero(repeated):
            add(backward, _exposed(waits_s, prices, time.recompute_s), repeated)
        if any_nonzero(block.ring_bytes):
            again_s = time.recompute_s
            repeated_s = np.where(again_s > 0, _ring_s(block, prices, again_s), 0.0)
            back_s = _ring_s(block, prices, time.backward_s, returns=True)
            add(forward, {"cp_s": _ring_s(block, prices, time.forward_s)})
            add(backward, {"cp_s": back_s + repeated_s})
    _add_host(forward, backward, blocks, prices)
    return LayerTime(forward, backward, weight_s)


def _rejoin_attention(blocks, waits, computed, prices):
    """Count attention's three blocks as the one that it is in steps without cp, beside
    others that have it: all that it computes hides all of its collectives.
    """
    is_one = prices.plan.cp == 1
    core = next(i for i, block in enumerate(blocks) if block.name.startswith("core"))
    into = core - 1
    for part in (core, core + 1):
        for group in {*waits[into], *waits[part]}:
            moved_s = is_one * waits[part].get(group, 0.0)
            waits[into][group] = waits[into].get(group, 0.0) + moved_s
            waits[part][group] = waits[part].get(group, 0.0) - moved_s
        pairs = zip(computed[into], computed[part], strict=True)
        computed[into] = _BlockTime(*(a_s + is_one * b_s for a_s, b_s in pairs))


def _computed(priced, waits, repeats, prices):
    """Compute of each block beside which its collectives run, and wgrad of the layer."""
    times = []
    weight_s = 0.0
    joint = 1 - prices.splits_backward  # wgrad follows dgrad at once
    for seconds in priced:
        total = {phase: sum(causes.values()) for phase, causes in seconds.items()}
        weight_s = weight_s + total["weight"]
        back_s = total["backward"] + joint * total["weight"]
        times.append(_BlockTime(total["forward"], total["recompute"], back_s))
    if not any_nonzero(prices.traits.hides_ep):
        return times, weight_s
    share = prices.expert_share
    exchanges_s = [share * waits_s.get("ep", 0.0) for waits_s in waits]
    repeated_s = [*map(operator.mul, repeats, exchanges_s)]
    beside_s = exchanges_s, repeated_s, exchanges_s
    lent = map(with_spare_compute, zip(*times, strict=True), beside_s)
    return [_BlockTime(*phases_s) for phases_s in zip(*lent, strict=True)], weight_s


def with_spare_compute(
    computed_s: Sequence[Number], exchanges_s: Sequence[Number]
) -> list[Number]:
    """Compute beside which the exchanges of each block of a layer run, of another
    micro-batch.

    All of the layer's compute serves, attention's too [DeepSeek-V3, arXiv 2412.19437,
    section 3.2.1], so a block whose exchanges take longer than it computes borrows what
    others have to spare. The sum stays.
    """
    pairs = [*zip(computed_s, exchanges_s, strict=True)]
    spare_s = [np.maximum(compute - comm, 0.0) for compute, comm in pairs]
    lacks_s = [np.maximum(comm - compute, 0.0) for compute, comm in pairs]
    spare, lack = sum(spare_s), sum(lacks_s)
    moved_s = np.minimum(spare, lack)
    lends = moved_s / np.maximum(spare, 1e-30)  # share of what each can spare
    borrows = moved_s / np.maximum(lack, 1e-30)
    return [
        compute_s + borrows * lack_s - lends * more_s
        for compute_s, lack_s, more_s in zip(computed_s, lacks_s, spare_s, strict=True)
    ]


def _add_host(forward, backward, blocks, prices):
    """Add launches on a CPU, which computes itself; on a GPU waits for a host that
    counts of tokens have stopped.
    """
    launches_s = prices.launches_s(blocks, "forward")
    back_s = prices.launches_s(blocks, "backward", "recompute")
    stop_s = prices.stop_s(blocks)
    counts = sum(block.expert * block.again for block in blocks)
    on_host = prices.traits.on_host
    ways = (
        (forward, launches_s, stop_s),
        (backward, back_s, (prices.repeats + counts) * stop_s),
    )
    for times, host_s, stopped_s in ways:
        behind_s = 0.0
        if np.any(stop_s):  # a host that has stopped is not ahead of its device
            behind_s = np.maximum(host_s - sum(times.values()), stopped_s)
            behind_s = np.where(stop_s > 0, behind_s, 0.0)
        times["launch_s"] = on_host * prices.slower * host_s + behind_s


def mean(first, second, share: Number):
    """(1 - share) of the numbers of one value, and a share of those of another."""
    return map_leaves(
        lambda one, other: (1 - share) * one + share * other, first, second
    )


def _collectives_s(comms, prices):
    """Seconds of collectives by group."""
    result = {}
    for comm in comms:
        if comm.kind != "copy":
            group = prices.groups[comm.group]
            add(result, {comm.group: prices.comm_s(comm.kind, comm.size_bytes, group)})
    return result


def _exposed(waits_s, prices, compute_s):
    """Seconds of a block's collectives that no compute of it hides, by part:

    exposed = T - min(hidden_share T, T_compute)
    """
    result = {}
    for group, whole_s in waits_s.items():
        share = prices.hidden_share(group)
        hidden_s = np.minimum(share * whole_s, compute_s)
        add(result, {_PARTS[group]: whole_s - hidden_s})
    return result


def _ring_s(block, prices, compute_s, *, returns=False):
    """Seconds for which attention in cp steps waits for keys and values on their way
    round the ring; returns: their gradients travel too.
    """
    steps = prices.plan.cp
    hop_s = prices.comm_s("send_recv", block.ring_bytes, prices.groups["cp"])
    step_s = compute_s / steps
    if returns:
        # keys and gradients share the link: two hops a step, one alone at either end
        ends_s = 2 * np.maximum(hop_s - step_s, 0.0)
        between_s = np.maximum(2 * hop_s - step_s, 0.0)
        waits_s = ends_s + np.maximum(steps - 2, 0) * between_s + hop_s
    else:
        waits_s = np.maximum((steps - 1) * (hop_s - step_s), 0.0)
    return np.where(hop_s > 0, waits_s, 0.0)
