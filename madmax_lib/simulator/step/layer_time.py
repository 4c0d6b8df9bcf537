"""How long does a layer compute and wait for its own collectives, forward and backward, and why?

Blocks of a layer follow each other. Their collectives run beside their products as far as software can; what is left
shows, and so do exchanges of tokens, keys and values. Traffic of weights and gradients is not in here (`traffic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.step.prices import CAUSES, Prices

__all__ = ["LAYER_PARTS", "LayerTime", "layer_time", "mean"]

LAYER_PARTS = (*CAUSES, "tp_s", "cp_s", "ep_s")
_GROUPS = (("tp_s", "tp"), ("tp_s", "etp"), ("ep_s", "ep"), ("cp_s", "cp"))


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer and micro-batch.

    forward, backward: by part (`LAYER_PARTS`); recompute counts with the backward pass.
    weight_s: of gradients of weights, which zero-bubble schedules compute apart.
    """

    forward: dict[str, Number]
    backward: dict[str, Number]
    weight_s: Number

    @property
    def passes_s(self) -> tuple[Number, Number]:
        """Forward and backward."""
        return sum(self.forward.values()), sum(self.backward.values())


def layer_time(blocks: Sequence[Block], prices: Prices) -> LayerTime:
    """Time of a layer made of these blocks, or of an end of the model."""
    forward, backward = (dict.fromkeys(LAYER_PARTS, 0.0) for _ in range(2))
    weight_s: Number = 0.0
    for block in blocks:
        seconds = prices.block_s(block)
        again = seconds["recompute"]
        back = {cause: seconds["backward"][cause] + seconds["weight"][cause] for cause in CAUSES}
        weight_s = weight_s + sum(seconds["weight"].values())
        _add(forward, seconds["forward"])
        _add(backward, back)
        _add(backward, again)
        again_s = sum(again.values())
        _add(forward, _exposed(block, prices, sum(seconds["forward"].values())))
        beside_s = sum(back.values()) - prices.split * sum(seconds["weight"].values())
        _add(backward, _exposed(block, prices, beside_s))
        if np.any(prices.repeats):
            _add(backward, _exposed(block, prices, again_s), prices.repeats)
        if np.any(block.ring_bytes):
            forward["cp_s"] = forward["cp_s"] + _ring_wait_s(block, prices, sum(seconds["forward"].values()))
            backward["cp_s"] = backward["cp_s"] + _ring_wait_s(block, prices, beside_s, returns=True)
            repeated_s = _ring_wait_s(block, prices, again_s)
            backward["cp_s"] = backward["cp_s"] + np.where(again_s > 0, repeated_s, 0.0)
    return LayerTime(forward, backward, weight_s)


def mean(first: LayerTime, second: LayerTime, share: Number) -> LayerTime:
    """(1 - share) of one layer and a share of another."""

    def blend(a: dict[str, Number], b: dict[str, Number]) -> dict[str, Number]:
        return {name: (1 - share) * a[name] + share * b[name] for name in a}

    weight_s = (1 - share) * first.weight_s + share * second.weight_s
    return LayerTime(blend(first.forward, second.forward), blend(first.backward, second.backward), weight_s)


def _exposed(block: Block, prices: Prices, computed_s: Number) -> dict[str, Number]:
    """Seconds of a block's collectives that no compute of it hides, by part."""
    result: dict[str, Number] = {}
    for part, group in _GROUPS:
        comms = [comm for comm in (*block.before, *block.after) if comm.group == group and comm.kind != "copy"]
        if comms:
            whole_s = sum(prices.comm_s(comm.kind, comm.size_bytes, prices.groups[group]) for comm in comms)
            if group in prices.hidden_shares:
                whole_s = whole_s - np.minimum(prices.hidden_shares[group] * whole_s, computed_s)
            result[part] = result.get(part, 0.0) + whole_s
    return result


def _ring_wait_s(block: Block, prices: Prices, computed_s: Number, *, returns: bool = False) -> Number:
    """Seconds for which attention in cp steps waits for keys and values on their way, whose gradients return."""
    steps, hop_s = prices.plan.cp, prices.comm_s("send_recv", block.ring_bytes, prices.groups["cp"])
    step_s = computed_s / steps
    if not returns:
        return np.where(hop_s > 0, np.maximum((steps - 1) * (hop_s - step_s), 0.0), 0.0)
    ends_s, between_s = 2 * np.maximum(hop_s - step_s, 0.0), np.maximum(2 * hop_s - step_s, 0.0)
    return np.where(hop_s > 0, ends_s + np.maximum(steps - 2, 0) * between_s + hop_s, 0.0)


def _add(times: dict[str, Number], parts: dict[str, Number], share: Number = 1.0) -> None:
    for part, seconds in parts.items():
        times[part] = times[part] + share * seconds
