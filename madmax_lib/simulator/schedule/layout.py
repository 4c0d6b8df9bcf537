"""What does each pass of a pipeline stage issue? Compute, collectives and optimizer of a whole step, as a Program.

One rank per pipeline stage with in-order streams. Collectives of tensor, expert and context parallelism block the pass
they belong to; gradients block only the optimizer; parameters are gathered ahead. Every pass of a chunk issues the same
ops, so each kind of pass is laid out once and then issued for its micro-batches in the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from madmax_lib.case import Case
from madmax_lib.simulator.layers.ops import Block, Comm, mirror, phases, storage_bytes
from madmax_lib.simulator.offload.hosts import Offloaded
from madmax_lib.simulator.rates.collectives import MeasuredCollectives
from madmax_lib.simulator.rates.topology import Group
from madmax_lib.simulator.schedule.engine import Program
from madmax_lib.simulator.schedule.passes import BEFORE, MESSAGE, Pass
from madmax_lib.simulator.schedule.prices import DataSheet
from madmax_lib.simulator.schedule.schedules import Slot, dependency, in_order, order
from madmax_lib.simulator.schedule.sharding import Sharding
from madmax_lib.simulator.schedule.staging import Staging
from madmax_lib.simulator.schedule.streams import Stream

__all__ = ["MicroBatch", "StepBuilder"]


@dataclass(frozen=True)
class MicroBatch:
    """The work of a micro-batch of one size.

    chunks: blocks [stage][chunk].
    prices: of their ops and collectives.
    sent_bytes: by a device to the next pipeline stage.
    """

    chunks: list[list[list[Block]]]
    prices: DataSheet
    sent_bytes: float = 0.0


class StepBuilder:
    """Lays out one training step; `build` returns its Program.

    case: the step, as `normalised` gives it where it offloads.
    batch: the work of each micro-batch; last: of the last one, where it is shorter.
    measured: seconds that replace the prices of collectives.
    offloaded: what lies beside the device.
    """

    def __init__(
        self,
        case: Case,
        batch: MicroBatch,
        last: MicroBatch | None = None,
        measured: MeasuredCollectives | None = None,
        offloaded: Offloaded | None = None,
    ):
        self.case, self.plan, self.measured, self.offloaded = case, case.plan, measured, offloaded
        self.batch, self.last, self.groups = batch, last or batch, batch.prices.groups
        moved = (case.plan, storage_bytes(case.dtype), self.groups)
        self.sharding = Staging(*moved, offloaded) if offloaded else Sharding(*moved)
        self.comm_s, self._pass = cache(self._comm_s), cache(self._lay_out)  # blocks and micro-batches repeat
        self._seconds: dict[tuple, dict[str, float]] = {}

    def build(self, micro_batches: int) -> Program:
        """All stages and micro-batches, gradients, optimizer."""
        plan, program = self.plan, Program()
        orders = [order(plan.schedule, s, plan.pp, micro_batches, plan.interleave) for s in range(plan.pp)]
        sent: dict[tuple[int, Slot], int] = {}
        latest: dict[int, int] = {}
        ends: list[list[int]] = [[] for _ in range(plan.pp)]
        for stage, slot in in_order(orders, plan.interleave):
            direction, chunk, number = slot
            first, last = number == 0 and plan.overlap_gather, number == micro_batches - 1
            pass_ = self._pass(stage, direction, chunk, first, last)
            message = sent.get(dependency(slot, stage, plan.pp, plan.interleave))
            outside = {MESSAGE: message, BEFORE: latest.get(stage)}
            waits = [(op, outside[what]) for op, what in pass_.waits if outside[what] is not None]
            base = program.extend(pass_.program, stage, waits)
            latest[stage] = base + pass_.last
            sent[stage, slot] = base + pass_.sends
            ends[stage] += [base + end for end in pass_.ends] + ([base + pass_.last] if last else [])
        for stage in range(plan.pp):
            self._optimizer(program, stage, ends[stage])
        return program

    def _lay_out(self, stage: int, direction: str, chunk: int, first: bool, last: bool) -> Pass:
        """The ops of a pass. first: it gathers all parameters ahead; last: it is of the last micro-batch."""
        batch, split = self.last if last else self.batch, self.plan.schedule == "zero-bubble"
        blocks, way = batch.chunks[stage][chunk], "forward" if direction == "forward" else "backward"
        pass_ = Pass(self.groups, self.comm_s, partial(self._block_s, batch), batch.prices.traffic_scale[way])
        if direction == "weight":
            self._weights(pass_, blocks, last)
        elif direction == "forward":
            ready = self._forward(pass_, blocks, first)
            self._send(pass_, stage, chunk * self.plan.pp + stage + 1, "activation", batch.sent_bytes, ready)
        else:
            ready = self._backward(pass_, blocks, last, split)
            self._send(pass_, stage, chunk * self.plan.pp + stage - 1, "gradient", batch.sent_bytes, ready)
        return pass_

    def _send(self, pass_: Pass, stage: int, to: int, what: str, size_bytes: float, ready: list[int]) -> None:
        """Message to the next virtual stage, if there is one."""
        if not 0 <= to < self.plan.pp * self.plan.interleave:
            return
        low, high = sorted((stage, to % self.plan.pp))
        devices, node = self.plan.world_size // self.plan.pp, self.case.cluster.devices_per_node
        same_node = low * devices // node == ((high + 1) * devices - 1) // node  # it holds the devices of both stages
        duration_s = self.comm_s("send_recv", size_bytes, self.groups["same node" if same_node else "other node"])
        ready, name = [*ready, pass_.last] if pass_.last >= 0 else ready, f"send_recv {what}"
        pass_.sends = pass_.op(Stream.PIPELINE, "comm", name, duration_s, ready, group="pp", size_bytes=size_bytes)

    def _forward(self, pass_: Pass, blocks: list[Block], first: bool) -> list[int]:
        gathered = self._gathers(pass_, blocks, "forward", first)
        previous, exchanged, unit = [MESSAGE, BEFORE], [], ""
        for block in blocks:
            after = [*previous, *gathered(block), *([] if block.beside else exchanged)]
            if block.recomputed and block.unit != unit:
                self.sharding.keep(pass_, block, previous)
            unit, done = block.unit, self._work(pass_, block, "forward", after)
            if block.table:
                exchanged = done  # the blocks beside do not wait for the lookup
            else:
                previous = done
        return previous

    def _backward(self, pass_: Pass, blocks: list[Block], last: bool, split: bool) -> list[int]:
        """Unit by unit in reverse: recompute, then gradients. Returns what the message to the next stage waits for."""
        gathered = self._gathers(pass_, blocks[::-1], "backward", False)
        table = next((block for block in blocks if block.table), None)
        previous, exchanged = [MESSAGE, BEFORE], []
        reduce = self.sharding.reducer(pass_, last)
        for unit in _units(blocks)[::-1]:
            if unit[0].recomputed:
                previous = [*previous, *self.sharding.restore(pass_, unit[0])]
            for block in unit:
                if "recompute" in pass_.block_s(block):
                    previous = self._work(pass_, block, "recompute", [*previous, *gathered(block)])
            for block in unit[::-1]:
                if table and not exchanged and (block.table or block.beside):
                    exchanged = pass_.comms(mirror(table.after), f"{table.name} backward", previous)
                after = exchanged if block.table else [*previous, *gathered(block)]
                previous = self._work(pass_, block, "backward", after, split)
                if not split:
                    reduce(block, pass_.last, end=block is blocks[0], unit_end=block is unit[0])
        return previous

    def _weights(self, pass_: Pass, blocks: list[Block], last: bool) -> None:
        """Gradients of weights alone, which zero-bubble schedules compute later."""
        reduce = self.sharding.reducer(pass_, last)
        for unit in _units(blocks)[::-1]:
            for block in unit[::-1]:
                pass_.compute(f"{block.name} weight", pass_.block_s(block)["weight"], [BEFORE])
                reduce(block, pass_.last, end=block is blocks[0], unit_end=block is unit[0])

    def _work(self, pass_: Pass, block: Block, phase: str, after: list[int], split: bool = False) -> list[int]:
        """One block: collectives, compute, collectives. Returns what the next block waits for."""
        before, behind = block.before, block.after
        if phase == "backward":
            before, behind = () if block.table else mirror(block.after), mirror(block.before)
        elif phase == "recompute" and self.plan.recompute == "selective":
            before, behind = (), ()  # the scores alone
        name, seconds = f"{block.name} {phase}", pass_.block_s(block)
        after = pass_.comms(before, name, after)
        duration_s = seconds[phase] + (seconds["weight"] if phase == "backward" and not split else 0.0)
        if block.ring_bytes and self.plan.cp > 1:
            return pass_.comms(behind, name, self._ring(pass_, block, phase, duration_s, after))
        beside_s = min(self._hidden_s(behind), duration_s)
        first = pass_.compute(name, duration_s - beside_s, after)
        done = pass_.comms(behind, name, [first])
        if beside_s:
            pass_.compute(name, beside_s, [first])  # whatever computes next comes after it on the stream
        return done

    def _ring(self, pass_: Pass, block: Block, phase: str, duration_s: float, after: list[int]) -> list[int]:
        """Attention in cp steps, the next keys and values on their way meanwhile, in backward their gradients too."""
        steps, name = self.plan.cp, f"{block.name} {phase}"
        ready, returned = after, []
        for step in range(steps):
            coming = pass_.comm("send_recv", "cp", name, block.ring_bytes, ready) if step < steps - 1 else []
            op = pass_.compute(name, duration_s / steps, [*ready, *(after if step == 0 else [])])
            if phase == "backward":
                returned = pass_.comm("send_recv", "cp", f"{name} gradients", block.ring_bytes, [op])
            ready = coming
        return [op, *returned]

    def _gathers(self, pass_: Pass, blocks: list[Block], phase: str, first: bool) -> Callable[[Block], list[int]]:
        """Function from a block to the gathers of parameters that it waits for, issued `prefetch` units ahead."""
        ahead = self.sharding.gathers_ahead(phase, first, len(blocks))
        if ahead is None:
            return lambda block: []
        units = _units(blocks)
        number = {unit[0].unit: i for i, unit in enumerate(units)}
        issued: list[list[int]] = []

        def gather(block: Block) -> list[int]:
            at = number[block.unit]
            while len(issued) <= min(at + ahead, len(units) - 1):
                after = [] if phase == "forward" and first and pass_.last < 0 else pass_.after_compute()
                issued.append(self.sharding.gather(pass_, units[len(issued)], phase, after))
            return issued[at]

        return gather

    def _optimizer(self, program: Program, stage: int, after: list[int]) -> None:
        """Update of the parameters that a device owns; ZeRO-1/2 then gather them unless the next pass does."""
        prices, blocks = self.batch.prices, [block for chunk in self.batch.chunks[stage] for block in chunk]
        owned = self.sharding.owned(blocks)
        if prices.host_s:
            after = [program.op(Stream.COMPUTE, "idle", "host work", prices.host_s, dict.fromkeys(after), rank=stage)]
        update_s = prices.update_s(owned * self.sharding.kept)
        done = [program.op(Stream.COMPUTE, "compute", "adam", update_s, dict.fromkeys(after), rank=stage)]
        done += self.sharding.update(program, stage, owned, len(_units(blocks)), after)
        if self.plan.zero in (1, 2) and not self.plan.overlap_gather:
            pass_ = Pass(self.groups, self.comm_s)
            self.sharding.gather(pass_, blocks, "", [BEFORE], name="parameters")
            program.extend(pass_.program, stage, [(waiting, op) for waiting, _ in pass_.waits for op in done])

    def _block_s(self, batch: MicroBatch, block: Block) -> dict[str, float]:
        """Seconds of a block by phase, without "recompute" where nothing is; blocks of the same ops are priced once."""
        key = (batch is self.last, block.ops, block.recomputed)
        if key not in self._seconds:
            parts = phases(block, self.plan.recompute).items()
            needed = {phase: ops for phase, ops in parts if ops or phase != "recompute"}
            self._seconds[key] = {phase: batch.prices.ops_s(block, phase, ops) for phase, ops in needed.items()}
        return self._seconds[key]

    def _hidden_s(self, behind: tuple[Comm, ...]) -> float:
        """Seconds of a block that run beside the tensor-parallel collectives behind it.

        A reduce-scatter hides with the all-gather of the next block, which is as long.
        """
        hidden, group = self.batch.prices.tp_hidden, self.groups["tp"]
        if not hidden or group.ranks == 1:
            return 0.0
        twice = {"reduce_scatter": 2.0, "all_reduce": 1.0}
        comms = [comm for comm in behind if comm.group == "tp" and comm.kind in twice]
        return hidden * sum(twice[comm.kind] * self.comm_s(comm.kind, comm.size_bytes, group) for comm in comms)

    def _comm_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of a collective: as measured, where it was."""
        if self.measured:
            seconds = self.measured.seconds(kind, group.ranks, -(-group.ranks // group.in_node), size_bytes)
            if seconds is not None:
                return seconds
        return self.batch.prices.comm_s(kind, size_bytes, group)


def _units(blocks: list[Block]) -> list[list[Block]]:
    """Consecutive blocks of one unit."""
    units: list[list[Block]] = []
    for block in blocks:
        if units and units[-1][0].unit == block.unit:
            units[-1].append(block)
        else:
            units.append([block])
    return units
