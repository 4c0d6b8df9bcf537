"""How long does a layer compute and wait for its own collectives, forward and backward,
and why?

Blocks of a layer follow each other. Their collectives run beside their products as far
as software can; what is left shows, and so do exchanges of tokens, keys and values.
Traffic of weights and gradients is not in here (`traffic`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from madmax_lib.simulator.costs.prices import CAUSES, Prices, add
from madmax_lib.simulator.layers.ops import Block, Comm
from madmax_lib.simulator.layers.work import has
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.steady.alike import mapped

__all__ = ["LAYER_PARTS", "LayerTime", "beside_exchanges", "layer_time", "mean"]

LAYER_PARTS = (*CAUSES, "launch_s", "tp_s", "cp_s", "ep_s")
_PARTS = {"tp": "tp_s", "etp": "tp_s", "ep": "ep_s", "cp": "cp_s"}  # by group


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer and micro-batch."""

    forward: dict[str, Number]  # by part (`LAYER_PARTS`)
    backward: dict[str, Number]  # with recompute
    weight_s: (
        Number  # of gradients of weights, which zero-bubble schedules compute apart
    )

    @cached_property
    def passes_s(self) -> tuple[Number, Number]:
        """Forward and backward."""
        return sum(self.forward.values()), sum(self.backward.values())


def layer_time(blocks: Sequence[Block], prices: Prices) -> LayerTime:
    """Time of a layer made of these blocks, or of an end of the model."""
    forward, backward = (dict.fromkeys(LAYER_PARTS, 0.0) for _ in range(2))
    waits = [_collectives_s((*block.before, *block.after), prices) for block in blocks]
    priced = [prices.block_s(block) for block in blocks]
    totals = [
        [sum(causes.values()) for causes in seconds.values()] for seconds in priced
    ]
    beside = [
        (ahead_s, again_s, back_s + (1 - prices.split) * late_s)
        for ahead_s, again_s, back_s, late_s in totals
    ]
    weight_s = sum(total[-1] for total in totals)
    if has(prices.habits.hides_ep):
        hidden = [prices.hidden_shares["ep"] * of.get("ep", 0.0) for of in waits]
        beside = [
            *zip(
                *(
                    beside_exchanges(phase, hidden)
                    for phase in zip(*beside, strict=True)
                ),
                strict=True,
            )
        ]
    for block, seconds, waits_s, (ahead_s, again_s, beside_s) in zip(
        blocks, priced, waits, beside, strict=True
    ):
        back_waits_s = (
            _collectives_s(sum(block.reverse, ()), prices) if block.reverse else waits_s
        )
        add(forward, seconds["forward"])
        for phase in ("backward", "weight", "recompute"):
            add(backward, seconds[phase])
        add(forward, _exposed(waits_s, prices, ahead_s))
        add(backward, _exposed(back_waits_s, prices, beside_s))
        if has(prices.repeats):
            add(backward, _exposed(waits_s, prices, again_s), prices.repeats)
        if has(block.ring_bytes):
            repeated_s = np.where(
                again_s > 0, _ring_wait_s(block, prices, again_s), 0.0
            )
            add(forward, {"cp_s": _ring_wait_s(block, prices, ahead_s)})
            add(
                backward,
                {
                    "cp_s": _ring_wait_s(block, prices, beside_s, returns=True)
                    + repeated_s
                },
            )
    _add_host(forward, backward, blocks, prices)
    return LayerTime(forward, backward, weight_s)


def beside_exchanges(
    computed_s: Sequence[Number], hidden_s: Sequence[Number]
) -> list[Number]:
    """Seconds that the blocks of a layer compute, where exchanges of so many seconds
    run beside another micro-batch.

    All its compute serves, attention's too [DeepSeek-V3, arXiv 2412.19437, section
    3.2.1], so a block whose exchanges take longer than it computes is lent what others
    have to spare. The sum stays.
    """
    spare_s = [
        np.maximum(own - other, 0.0)
        for own, other in zip(computed_s, hidden_s, strict=True)
    ]
    lacks_s = [
        np.maximum(other - own, 0.0)
        for own, other in zip(computed_s, hidden_s, strict=True)
    ]
    moved_s = np.minimum(sum(spare_s), sum(lacks_s))
    given, got = (moved_s / np.maximum(sum(part), 1e-30) for part in (spare_s, lacks_s))
    return [
        own + got * lack - given * more
        for own, lack, more in zip(computed_s, lacks_s, spare_s, strict=True)
    ]


def _add_host(
    forward: dict, backward: dict, blocks: Sequence[Block], prices: Prices
) -> None:
    """Launches on a CPU, which computes itself; on a GPU waits for a host that counts
    of tokens have stopped.
    """
    launches_s = prices.launches_s(blocks)
    stop_s = prices.stop_s(blocks)
    on_host = prices.habits.on_host
    ways = (
        (forward, launches_s, stop_s),
        (backward, (2 + prices.repeats) * launches_s, prices.repeats * stop_s),
    )
    for times, host_s, stopped_s in ways:
        behind_s = (
            np.maximum(host_s - sum(times.values()), stopped_s)
            if np.any(stop_s)
            else 0.0
        )
        times["launch_s"] = on_host * prices.slower * host_s + np.where(
            np.asarray(stop_s) > 0, behind_s, 0.0
        )


def mean(first: LayerTime, second: LayerTime, share: Number) -> LayerTime:
    """(1 - share) of one layer and a share of another."""
    return mapped(lambda one, other: (1 - share) * one + share * other, first, second)


def _collectives_s(comms: tuple[Comm, ...], prices: Prices) -> dict[str, Number]:
    """Seconds of collectives by group."""
    result: dict[str, Number] = {}
    for comm in comms:
        if comm.kind != "copy":
            add(
                result,
                {
                    comm.group: prices.comm_s(
                        comm.kind, comm.size_bytes, prices.groups[comm.group]
                    )
                },
            )
    return result


def _exposed(
    waits_s: dict[str, Number], prices: Prices, computed_s: Number
) -> dict[str, Number]:
    """Seconds of a block's collectives that no compute of it hides, by part."""
    result: dict[str, Number] = {}
    for group, whole_s in waits_s.items():
        hidden = prices.hidden_shares.get(group)
        add(
            result,
            {
                _PARTS[group]: whole_s
                if hidden is None
                else whole_s - np.minimum(hidden * whole_s, computed_s)
            },
        )
    return result


def _ring_wait_s(
    block: Block, prices: Prices, computed_s: Number, *, returns: bool = False
) -> Number:
    """Seconds for which attention in cp steps waits for keys and values on their way,
    whose gradients return.
    """
    steps = prices.plan.cp
    hop_s = prices.comm_s("send_recv", block.ring_bytes, prices.groups["cp"])
    step_s = computed_s / steps
    if not returns:
        return np.where(hop_s > 0, np.maximum((steps - 1) * (hop_s - step_s), 0.0), 0.0)
    ends_s = 2 * np.maximum(hop_s - step_s, 0.0)
    between_s = np.maximum(2 * hop_s - step_s, 0.0)
    return np.where(
        hop_s > 0, ends_s + np.maximum(steps - 2, 0) * between_s + hop_s, 0.0
    )
