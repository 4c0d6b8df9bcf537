"""What moves between device, host and drives in an offloaded step? Sharding with copies, CPU Adam and drives.

Weights come down the chain drive, host, device and are then gathered, each link one unit further ahead than the next
[arXiv 2104.07857, section 6.2]; gradients go up it as they are reduced; the host updates its states tile by tile,
finished tiles are copied back meanwhile, and the device updates its own share beside it (hybrid Adam).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from madmax_lib.plan import Plan
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.offload.hosts import ACCUMULATE_BYTES, Offloaded
from madmax_lib.simulator.offload.placement import streams_gradients
from madmax_lib.simulator.rates.topology import Group
from madmax_lib.simulator.schedule.engine import Program
from madmax_lib.simulator.schedule.sharding import Sharding

if TYPE_CHECKING:
    from madmax_lib.simulator.schedule.layout import Pass

__all__ = ["DOWN", "DRIVES", "HOST", "UP", "Staging"]

DOWN, UP = 7, 8  # device streams of copies to and from the device
HOST, DRIVES = -1, -2  # threads of the host: it computes, and reads and writes drives
_BEFORE = -2  # as in `layout`: the last compute of the pass before


class Staging(Sharding):
    """Data-parallel traffic of a plan, and what offload adds to it."""

    def __init__(self, plan: Plan, width: float, groups: dict[str, Group], offloaded: Offloaded):
        super().__init__(plan, width, groups)
        self.offloaded, self.every_batch = offloaded, streams_gradients(plan)
        self.kept = 1 - float(offloaded.split.states)

    def gather(self, made: Pass, unit: list[Block], phase: str, after: list[int], name: str = "") -> list[int]:
        """Weights of a unit from where they lie, then gathered."""
        if name or not self.offloaded.split.weights:
            return super().gather(made, unit, phase, after, name)
        o, size_bytes = self.offloaded, self.offloaded.split.weights * self.width * self.owned(unit)
        made.asked.append(after)
        sooner, soonest = made.asked[max(len(made.asked) - 2, 0)], made.asked[max(len(made.asked) - 3, 0)]
        what = f"weights {unit[0].unit} {phase}"
        if o.drives:
            read = made.op(DRIVES, "cpu", f"nvme read {what}", size_bytes / o.rates.nvme_read, soonest,
                           size_bytes=size_bytes)  # fmt: skip
            sooner = [*sooner, read]
        copy = made.op(DOWN, "memcpy", f"Memcpy HtoD {what}", size_bytes / o.rates.link, sooner, size_bytes=size_bytes)
        return super().gather(made, unit, phase, [*after, copy]) or [copy]

    def keep(self, made: Pass, block: Block, ready: list[int]) -> None:
        """Checkpoint of a layer to the host, once its input is there."""
        o = self.offloaded
        if o.checkpoint_bytes:
            made.op(UP, "memcpy", f"Memcpy DtoH checkpoint {block.unit}", o.checkpoint_bytes / o.rates.link, ready,
                    size_bytes=o.checkpoint_bytes)  # fmt: skip

    def restore(self, made: Pass, block: Block) -> list[int]:
        """Checkpoint of a layer back to the device, a layer ahead."""
        o = self.offloaded
        if not o.checkpoint_bytes:
            return []
        sooner = made.restored[-1] if made.restored else [_BEFORE]
        made.restored.append([made.last] if made.last >= 0 else [_BEFORE])
        return [made.op(DOWN, "memcpy", f"Memcpy HtoD checkpoint {block.unit}", o.checkpoint_bytes / o.rates.link,
                        sooner, size_bytes=o.checkpoint_bytes)]  # fmt: skip

    def update(self, program: Program, stage: int, owned: float, tiles: int, after: list[int]) -> list[int]:
        """The host's share of the optimizer; what follows it waits for the result."""
        o, count = self.offloaded, self.offloaded.split.states * owned / tiles
        if not count:
            return []
        start, done, adams = [] if o.delayed else list(dict.fromkeys(after)), [], []
        read_bytes = count * (o.method.optimizer + o.method.gradients)
        written_bytes = count * (o.method.optimizer + o.split.weights * self.width)
        reads = [self._drive(program, stage, "read", read_bytes, o.rates.nvme_read, start)]
        for tile in range(tiles):
            if tile + 1 < tiles:
                reads.append(self._drive(program, stage, "read", read_bytes, o.rates.nvme_read, start))
            adams.append(program.op(HOST, "cpu", "cpu adam", o.rates.adam_s(count), [*start, *reads[tile]], rank=stage))
            done += self._drive(program, stage, "write", written_bytes, o.rates.nvme_write, [adams[-1]])
        size_bytes = count * self.width * o.returned / max(o.split.states, 1e-12)
        for adam in adams if o.returned else ():
            done.append(program.op(DOWN, "memcpy", "Memcpy HtoD updated weights", size_bytes / o.rates.link,
                                   [adam, *after], rank=stage, size_bytes=size_bytes))  # fmt: skip
        return [*done, adams[-1]]

    def _reduce(self, made: Pass, expert: bool, what: str, size_bytes: float, op: int, last: bool) -> list[int]:
        done = super()._reduce(made, expert, what, size_bytes, op, last)
        o, sharded = self.offloaded, self.groups[self.group(expert)].ranks if self.plan.zero else 1
        count = size_bytes / self.gradient_width / sharded * o.split.states
        if not count:
            return done
        copied = count * self.width
        copy = made.op(UP, "memcpy", f"Memcpy DtoH {what}", copied / o.rates.link, done, size_bytes=copied)
        ends = [copy]
        if o.micro_batches > 1 and self.every_batch:
            ends.append(made.op(HOST, "cpu", f"add {what}", count * ACCUMULATE_BYTES / o.rates.adam, [copy]))
        if o.drives:
            moved = copied * o.gradient_passes
            ends.append(made.op(DRIVES, "cpu", f"nvme write {what}", moved / o.rates.nvme_write, ends[-1:],
                                size_bytes=moved))  # fmt: skip
        return [*done, *ends]

    def _drive(self, program: Program, stage: int, how: str, size_bytes: float, rate: float, after: list[int]
               ) -> list[int]:  # fmt: skip
        if not self.offloaded.drives:
            return []
        return [program.op(DRIVES, "cpu", f"nvme {how} states", size_bytes / rate, after, rank=stage,
                           size_bytes=size_bytes)]  # fmt: skip
