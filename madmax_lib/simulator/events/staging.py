"""What moves between device, host and drives in an offloaded step? Sharding with
copies, CPU Adam and drives.

Weights come down the chain drive, host, device and are then gathered, each link one
unit further ahead than the next [arXiv 2104.07857, section 6.2]; gradients go up it as
they are reduced; the host updates its states tile by tile, finished tiles are copied
back meanwhile, and the device updates its own share beside it (hybrid Adam).
"""

from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.events.engine import Program
from madmax_lib.simulator.events.passes import BEFORE, Pass
from madmax_lib.simulator.events.sharding import Sharding
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.offload.hosts import ACCUMULATE_BYTES, Offloaded
from madmax_lib.simulator.offload.placement import streams_gradients

__all__ = ["Staging"]


class Staging(Sharding):
    """Data-parallel traffic of a plan, and what offload adds to it."""

    def __init__(self, prices: Prices, offloaded: Offloaded):
        super().__init__(prices)
        self.offloaded = offloaded
        self.every_batch = streams_gradients(prices.plan)
        self.kept = 1 - float(offloaded.split.states)

    def gather(
        self,
        pass_: Pass,
        unit: list[Block],
        phase: str,
        after: list[int],
        name: str = "",
    ) -> list[int]:
        """Weights of a unit from where they lie, then gathered."""
        if name or not self.offloaded.split.weights:
            return super().gather(pass_, unit, phase, after, name)
        size_bytes = self.offloaded.split.weights * self.width * self.owned(unit)
        pass_.gathers.append(after)
        one_ahead, two_ahead = (
            pass_.gathers[max(len(pass_.gathers) - back, 0)] for back in (2, 3)
        )
        what = f"weights {unit[0].unit} {phase}"
        if self.offloaded.drives:
            one_ahead = [
                *one_ahead,
                self._drive(pass_, f"read {what}", size_bytes, two_ahead),
            ]
        copy = self._copy(pass_, Stream.DOWN, what, size_bytes, one_ahead)
        return super().gather(pass_, unit, phase, [*after, copy]) or [copy]

    def keep(self, pass_: Pass, block: Block, ready: list[int]) -> None:
        """Checkpoint of a layer to the host, once its input is there."""
        if self.offloaded.checkpoint_bytes:
            self._copy(
                pass_,
                Stream.UP,
                f"checkpoint {block.unit}",
                self.offloaded.checkpoint_bytes,
                ready,
            )

    def restore(self, pass_: Pass, block: Block) -> list[int]:
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
        self, program: Program, stage: int, owned: float, tiles: int, after: list[int]
    ) -> list[int]:
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
        done: list[int] = []
        adams: list[int] = []
        reads = (
            [self._drive(program, "read states", read_bytes, ready, rank=stage)]
            if o.drives
            else []
        )
        for tile in range(tiles):
            if o.drives and tile + 1 < tiles:
                reads.append(
                    self._drive(program, "read states", read_bytes, ready, rank=stage)
                )
            waits = [*ready, *reads[tile : tile + 1]]
            adams.append(
                program.op(
                    Stream.HOST,
                    "cpu",
                    "cpu adam",
                    o.rates.adam_s(count),
                    waits,
                    rank=stage,
                )
            )
            if o.drives:
                done.append(
                    self._drive(
                        program, "write states", written_bytes, adams[-1:], rank=stage
                    )
                )
        for adam in adams if o.returned else ():
            waits = [adam, *after]
            done.append(
                self._copy(
                    program,
                    Stream.DOWN,
                    "updated weights",
                    returned_bytes,
                    waits,
                    rank=stage,
                )
            )
        return [*done, adams[-1]]

    def _reduce(
        self,
        pass_: Pass,
        expert: bool,
        what: str,
        size_bytes: float,
        op: int,
        last: bool,
    ) -> list[int]:
        done = super()._reduce(pass_, expert, what, size_bytes, op, last)
        o = self.offloaded
        sharded = (
            self.groups[self.prices.shard_name(expert)].ranks if self.plan.zero else 1
        )
        count = size_bytes / self.gradient_width / sharded * o.split.states
        if not count:
            return done
        copied_bytes = count * self.width
        ends = [self._copy(pass_, Stream.UP, what, copied_bytes, done)]
        if o.micro_batches > 1 and self.every_batch:
            ends.append(
                pass_.op(
                    Stream.HOST,
                    "cpu",
                    f"add {what}",
                    count * ACCUMULATE_BYTES / o.rates.adam,
                    ends[:1],
                )
            )
        if o.drives:
            passes = (
                2 if o.micro_batches > 1 else 1
            )  # sums are read before they are written
            ends.append(
                self._drive(pass_, f"write {what}", copied_bytes * passes, ends[-1:])
            )
        return [*done, *ends]

    def _copy(
        self,
        ops: Pass | Program,
        way: Stream,
        what: str,
        size_bytes: float,
        after: list[int],
        **more,
    ) -> int:
        """A copy between device and host, `way` down or up."""
        name = f"Memcpy {'HtoD' if way == Stream.DOWN else 'DtoH'} {what}"
        duration_s = size_bytes / self.offloaded.rates.link
        return ops.op(
            way, "memcpy", name, duration_s, after, size_bytes=size_bytes, **more
        )

    def _drive(
        self,
        ops: Pass | Program,
        what: str,
        size_bytes: float,
        after: list[int],
        **more,
    ) -> int:
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
