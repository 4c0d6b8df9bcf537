"""Sharding with copies between device and host, CPU Adam and drives, for the event
engine.

Weights come down the chain drive, host, device and are then gathered, each link one
unit further ahead than the next [arXiv 2104.07857, section 6.2]; gradients go up it as
they are reduced; the host updates its states tile by tile, finished tiles are copied
back meanwhile, and the device updates its own share beside it (hybrid Adam).
"""

from collections.abc import Callable
from functools import partial

from madmax_lib.plan import Case
from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import shard_group
from madmax_lib.simulator.events.engine import Program, Stream
from madmax_lib.simulator.events.passes import BEFORE, Ops, Pass
from madmax_lib.simulator.events.sharding import Sharding
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.offload import best_offload
from madmax_lib.simulator.offload.placement import (
    ACCUMULATE_BYTES,
    Offloaded,
    Policy,
    policy_of,
    streams_gradients,
)
from madmax_lib.simulator.rates.parameters import Parameters


def staged(
    case: Case, parameters: Parameters, policy: Policy | None
) -> tuple[Case, Callable[[Prices], Sharding]]:
    """The case as it is laid out, and what makes its traffic from prices: without
    offload `Sharding`, else `Staging` with the share that makes the step shortest.

    Raises ValueError for a policy that is none, and where no share fits.
    """
    policy = policy_of(policy, case)
    if case.plan.offload is None:
        return case, Sharding
    case = normalised(case)
    offloaded, _ = best_offload(case, parameters, policy)
    return case, partial(Staging, offloaded=offloaded)


class Staging(Sharding):
    """Data-parallel traffic of a plan, and what offload adds to it."""

    def __init__(self, prices: Prices, offloaded: Offloaded):
        super().__init__(prices)
        self.offloaded = offloaded
        self.every_batch = streams_gradients(prices.plan)
        self.device_share = 1 - float(offloaded.split.states)

    def gather(self, pass_: Pass, blocks: list[Block], phase: str, after: Ops) -> Ops:
        """Issue copies of a unit's weights from where they lie, then their gather."""
        if not self.offloaded.split.weights:
            return super().gather(pass_, blocks, phase, after)
        size_bytes = self.offloaded.split.weights * self.width * self.owned(blocks)
        gathers = pass_.gathers
        gathers.append(after)
        # drives read two units ahead of what is gathered, the host's link copies one
        one_ahead = gathers[max(len(gathers) - 2, 0)]
        two_ahead = gathers[max(len(gathers) - 3, 0)]
        what = f"weights {blocks[0].unit} {phase}"
        if self.offloaded.drives:
            read = self._drive(pass_, f"read {what}", size_bytes, two_ahead)
            one_ahead = [*one_ahead, read]
        copy = self._copy(pass_, Stream.DOWN, what, size_bytes, one_ahead)
        return super().gather(pass_, blocks, phase, [*after, copy]) or [copy]

    def keep(self, pass_: Pass, block: Block, ready: Ops) -> None:
        """Checkpoint of a layer to the host, once its input is there."""
        if self.offloaded.checkpoint_bytes:
            what = f"checkpoint {block.unit}"
            size_bytes = self.offloaded.checkpoint_bytes
            self._copy(pass_, Stream.UP, what, size_bytes, ready)

    def restore(self, pass_: Pass, block: Block) -> Ops:
        """Checkpoint of a layer back to the device, a layer ahead."""
        if not self.offloaded.checkpoint_bytes:
            return []
        ahead = pass_.restores[-1] if pass_.restores else [BEFORE]
        pass_.restores.append(pass_.after_compute())
        what = f"checkpoint {block.unit}"
        return [
            self._copy(pass_, Stream.DOWN, what, self.offloaded.checkpoint_bytes, ahead)
        ]

    def update(
        self, program: Program, stage: int, owned: float, tiles: int, after: Ops
    ) -> Ops:
        """The host's share of the optimizer; what follows it waits for the result."""
        o = self.offloaded
        count = o.split.states * owned / tiles
        if not count:
            return []
        ready = [] if o.delayed else list(dict.fromkeys(after))
        read_bytes = count * (o.method.optimizer + o.method.gradients)
        written_bytes = count * (o.method.optimizer + o.split.weights * self.width)
        returned_bytes = (
            count * self.width * float(o.returned) / max(o.split.states, 1e-12)
        )
        drive = partial(self._drive, program, rank=stage)
        done = []
        adams = []
        reads = []
        for tile in range(tiles):
            while o.drives and len(reads) < min(tile + 2, tiles):  # a tile ahead
                reads.append(drive("read states", read_bytes, ready))
            waits = [*ready, *reads[tile : tile + 1]]
            seconds = o.rates.adam_s(count)
            adam = program.op(
                Stream.HOST, "cpu", "cpu adam", seconds, waits, rank=stage
            )
            adams.append(adam)
            if o.drives:
                done.append(drive("write states", written_bytes, [adam]))
        for adam in adams if o.returned else ():
            done.append(
                self._copy(
                    program,
                    Stream.DOWN,
                    "updated weights",
                    returned_bytes,
                    [adam, *after],
                    rank=stage,
                )
            )
        return [*done, adams[-1]]

    def _reduce(self, pass_, experts, what, parameters, op, last):
        done = super()._reduce(pass_, experts, what, parameters, op, last)
        o = self.offloaded
        sharing = 1
        if self.plan.zero:
            sharing = self.groups[shard_group(self.prices, experts=experts)].ranks
        count = parameters / sharing * o.split.states
        if not count:
            return done
        copied_bytes = count * self.width
        ends = [self._copy(pass_, Stream.UP, what, copied_bytes, done)]
        if o.micro_batches > 1 and self.every_batch:
            sum_s = count * ACCUMULATE_BYTES / o.rates.adam
            ends.append(pass_.op(Stream.HOST, "cpu", f"add {what}", sum_s, ends[:1]))
        if o.drives:
            # sums of several micro-batches are read before they are written
            passes = 2 if o.micro_batches > 1 else 1
            moved_bytes = copied_bytes * passes
            ends.append(self._drive(pass_, f"write {what}", moved_bytes, ends[-1:]))
        return [*done, *ends]

    def _copy(self, ops, way, what, size_bytes, after, **more):
        """A copy between device and host, `way` down or up."""
        name = f"Memcpy {'HtoD' if way == Stream.DOWN else 'DtoH'} {what}"
        duration_s = size_bytes / self.offloaded.rates.link
        return ops.op(
            way, "memcpy", name, duration_s, after, size_bytes=size_bytes, **more
        )

    def _drive(self, ops, what, size_bytes, after, **more):
        """A read from or a write to the drives, which the first word of `what` says."""
        rates = self.offloaded.rates
        rate = rates.nvme_read if what.startswith("read") else rates.nvme_write
        return ops.op(
            Stream.DRIVES,
            "cpu",
            f"nvme {what}",
            size_bytes / rate,
            after,
            size_bytes=size_bytes,
            **more,
        )
