"""What does each pass of a pipeline stage issue? Compute, collectives and optimizer of a whole step, as a Program.

One rank per pipeline stage with in-order streams. Collectives of tensor, expert and context parallelism block the pass
they belong to; gradients block only the optimizer; parameters are gathered ahead. Every pass of a chunk issues the same
ops, so each kind of pass is laid out once and then issued for its micro-batches in the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from madmax_lib.plan import Plan
from madmax_lib.simulator.layers.ops import Block, Comm, Op, mirror, phases, storage_bytes
from madmax_lib.simulator.offload.hosts import Offloaded
from madmax_lib.simulator.rates.measured import MeasuredCollectives
from madmax_lib.simulator.rates.topology import Group
from madmax_lib.simulator.schedule.engine import Program
from madmax_lib.simulator.schedule.prices import DataSheet
from madmax_lib.simulator.schedule.schedules import Slot, dependency, in_order, order
from madmax_lib.simulator.schedule.sharding import Sharding
from madmax_lib.simulator.schedule.staging import Staging
from madmax_lib.specs import Cluster

__all__ = ["COMPUTE", "CONTEXT", "DATA", "EXPERT", "PIPELINE", "REPLICATE", "TENSOR", "Step"]

COMPUTE, TENSOR, DATA, PIPELINE, CONTEXT, EXPERT, REPLICATE = range(7)
_STREAMS = {"tp": TENSOR, "cp": CONTEXT, "ep": EXPERT, "pp": PIPELINE, "replicate": REPLICATE}  # all others: DATA
_MESSAGE, _BEFORE = -1, -2  # a pass waits for its message, and for the last compute of the pass before

Chunks = list[list[list[Block]]]  # [stage][chunk]


class Pass:
    """The ops of one pass of a chunk, numbered from 0.

    waits: (op, what it waits for outside: _MESSAGE or _BEFORE). last: its last compute op. sends: op that sends the
    result on. ends: ops that the optimizer waits for.
    """

    def __init__(self, step: Step, prices: DataSheet, traffic_scale: float = 1.0):
        self.step, self.prices, self.traffic_scale, self.program = step, prices, traffic_scale, Program()
        self.waits: list[tuple[int, int]] = []
        self.last, self.sends, self.ends = -1, -1, []
        self.asked: list[list[int]] = []  # what gathers of parameters, and returns of checkpoints, waited for so far
        self.restored: list[list[int]] = []

    def op(self, stream: int, kind: str, name: str, duration_s: float, after: Iterable[int], **more) -> int:
        """Issue an op; numbers below 0 in `after` are outside of the pass."""
        after = set(after)
        op = self.program.op(stream, kind, name, duration_s, sorted(a for a in after if a >= 0), **more)
        self.waits += [(op, outside) for outside in sorted(after) if outside < 0]
        return op

    def compute(self, name: str, duration_s: float, after: Iterable[int]) -> int:
        """Issue on the compute stream."""
        self.last = self.op(COMPUTE, "compute", name, duration_s, after)
        return self.last

    def comm(self, kind: str, group: str, what: str, size_bytes: float, after: list[int]) -> list[int]:
        """Issue a collective; what the next op waits for. Nothing is issued for a group of one."""
        found = self.step.groups[group]
        if kind == "copy" or found.ranks == 1 or not size_bytes:
            return after
        stream = _STREAMS.get(group, DATA)
        duration_s = self.step.comm_s(kind, size_bytes, found) * (self.traffic_scale if stream == DATA else 1.0)
        return [self.op(stream, "comm", f"{kind} {what}", duration_s, after, group=group, size_bytes=size_bytes)]

    def comms(self, comms: tuple[Comm, ...], what: str, after: list[int]) -> list[int]:
        """Collectives one after another."""
        for comm in comms:
            after = self.comm(comm.kind, comm.group, what, comm.size_bytes, after)
        return after


class Step:
    """Lays out one training step; `build` returns its Program.

    chunks: blocks [stage][chunk]; short: those of a short last micro-batch, with their prices. measured: seconds that
    replace the prices of collectives. offloaded: what lies beside the device. One instance, one call of `build`.
    """

    def __init__(self, chunks: Chunks, plan: Plan, cluster: Cluster, prices: DataSheet, dtype: str,
                 short: tuple[Chunks, DataSheet] | None = None,
                 measured: MeasuredCollectives | None = None, offloaded: Offloaded | None = None):  # fmt: skip
        self.plan, self.cluster, self.prices, self.measured = plan, cluster, prices, measured
        self.shapes = [(chunks, prices), short or (chunks, prices)]
        self.groups = prices.groups
        kind, more = (Staging, (offloaded,)) if offloaded else (Sharding, ())
        self.sharding = kind(plan, storage_bytes(dtype), self.groups, *more)
        self.known: dict[tuple, object] = {}

    def build(self, micro_batches: int, activation_bytes: float, short_bytes: float = 0.0) -> Program:
        """All stages and micro-batches, gradients, optimizer. activation_bytes: sent on, short_bytes: by the last."""
        plan, program = self.plan, Program()
        orders = [order(plan.schedule, s, plan.pp, micro_batches, plan.interleave) for s in range(plan.pp)]
        sent: dict[tuple[int, Slot], int] = {}
        latest: dict[int, int] = {}
        ends: list[list[int]] = [[] for _ in range(plan.pp)]
        for stage, slot in in_order(orders, plan.interleave):
            last = slot[2] == micro_batches - 1
            first, is_short = slot[2] == 0 and plan.overlap_gather, last and self.shapes[1][0] is not self.shapes[0][0]
            size_bytes = short_bytes if is_short else activation_bytes
            made = self._once(self._pass, stage, slot[0], slot[1], first, last, is_short, size_bytes)
            outside = {
                _MESSAGE: sent.get(dependency(slot, stage, plan.pp, plan.interleave)),
                _BEFORE: latest.get(stage),
            }
            waits = [(op, outside[what]) for op, what in made.waits if outside[what] is not None]
            base = program.extend(made.program, stage, waits)
            latest[stage] = base + made.last
            sent[stage, slot] = base + made.sends
            ends[stage] += [base + end for end in made.ends] + ([base + made.last] if last else [])
        for stage in range(plan.pp):
            self._optimizer(program, stage, ends[stage])
        return program

    def _pass(self, stage: int, direction: str, chunk: int, first: bool, last: bool, short: bool, size_bytes: float
              ) -> Pass:  # fmt: skip
        (chunks, prices), way = self.shapes[short], "forward" if direction == "forward" else "backward"
        blocks, made = chunks[stage][chunk], Pass(self, prices, prices.traffic_scale[way])
        split = self.plan.schedule == "zero-bubble"
        if direction == "weight":
            self._weights(made, blocks, last)
            return made
        if direction == "forward":
            done, what, step = self._forward(made, blocks, first), "activation", 1
        else:
            done, what, step = self._backward(made, blocks, last, split), "gradient", -1
        virtual = chunk * self.plan.pp + stage + step
        if 0 <= virtual < self.plan.pp * self.plan.interleave:
            duration_s = self._send_s(stage, virtual % self.plan.pp, size_bytes)
            done = [*done, made.last] if made.last >= 0 else done
            made.sends = made.op(PIPELINE, "comm", f"send_recv {what}", duration_s, done, group="pp",
                                 size_bytes=size_bytes)  # fmt: skip
        return made

    def _forward(self, made: Pass, blocks: list[Block], first: bool) -> list[int]:
        gathered = self._gathers(made, blocks, "forward", first)
        previous, exchanged, unit = [_MESSAGE, _BEFORE], [], ""
        for block in blocks:
            after = [*previous, *gathered(block), *([] if block.beside else exchanged)]
            if block.recomputed and block.unit != unit:
                self.sharding.keep(made, block, previous)
            unit, done = block.unit, self._work(made, block, "forward", after)
            if block.table:
                exchanged = done  # the blocks beside do not wait for the lookup
            else:
                previous = done
        return previous

    def _backward(self, made: Pass, blocks: list[Block], last: bool, split: bool) -> list[int]:
        """Unit by unit in reverse: recompute, then gradients. Returns what the message to the next stage waits for."""
        gathered = self._gathers(made, blocks[::-1], "backward", False)
        table = next((block for block in blocks if block.table), None)
        previous, exchanged = [_MESSAGE, _BEFORE], []
        reduce = self.sharding.reducer(made, last)
        for unit in _units(blocks)[::-1]:
            if unit[0].recomputed:
                previous = [*previous, *self.sharding.restore(made, unit[0])]
            for block in unit:
                if self._phases(block)["recompute"]:
                    previous = self._work(made, block, "recompute", [*previous, *gathered(block)])
            for block in unit[::-1]:
                if table and not exchanged and (block.table or block.beside):
                    exchanged = made.comms(mirror(table.after), f"{table.name} backward", previous)
                after = exchanged if block.table else [*previous, *gathered(block)]
                previous = self._work(made, block, "backward", after, split)
                if not split:
                    reduce(block, made.last, end=block is blocks[0], unit_end=block is unit[0])
        return previous

    def _weights(self, made: Pass, blocks: list[Block], last: bool) -> None:
        """Gradients of weights alone, which zero-bubble schedules compute later."""
        reduce = self.sharding.reducer(made, last)
        for unit in _units(blocks)[::-1]:
            for block in unit[::-1]:
                made.compute(f"{block.name} weight", self._seconds(made, block, "weight"), [_BEFORE])
                reduce(block, made.last, end=block is blocks[0], unit_end=block is unit[0])

    def _work(self, made: Pass, block: Block, phase: str, after: list[int], split: bool = False) -> list[int]:
        """One block: collectives, compute, collectives. Returns what the next block waits for."""
        before, behind = block.before, block.after
        if phase == "backward":
            before, behind = () if block.table else mirror(block.after), mirror(block.before)
        elif phase == "recompute" and self.plan.recompute == "selective":
            before, behind = (), ()  # the scores alone
        name = f"{block.name} {phase}"
        after = made.comms(before, name, after)
        duration_s = self._seconds(made, block, phase)
        if phase == "backward" and not split:
            duration_s += self._seconds(made, block, "weight")
        if block.ring_bytes and self.plan.cp > 1:
            return made.comms(behind, name, self._ring(made, block, phase, duration_s, after))
        beside_s = min(self._hidden_s(behind), duration_s)
        first = made.compute(name, duration_s - beside_s, after)
        done = made.comms(behind, name, [first])
        if beside_s:
            made.compute(name, beside_s, [first])  # whatever computes next comes after it on the stream
        return done

    def _ring(self, made: Pass, block: Block, phase: str, duration_s: float, after: list[int]) -> list[int]:
        """Attention in cp steps, the next keys and values on their way meanwhile, in backward their gradients too."""
        steps, name = self.plan.cp, f"{block.name} {phase}"
        ready, returned = after, []
        for step in range(steps):
            coming = made.comm("send_recv", "cp", name, block.ring_bytes, ready) if step < steps - 1 else []
            op = made.compute(name, duration_s / steps, [*ready, *(after if step == 0 else [])])
            if phase == "backward":
                returned = made.comm("send_recv", "cp", f"{name} gradients", block.ring_bytes, [op])
            ready = coming
        return [op, *returned]

    def _gathers(self, made: Pass, blocks: list[Block], phase: str, first: bool) -> Callable[[Block], list[int]]:
        """Function from a block to the gathers of parameters that it waits for, issued `prefetch` units ahead."""
        ahead = self.sharding.gathers_ahead(phase, first, len(blocks))
        if ahead is None:
            return lambda block: []
        units = _units(blocks)
        place = {block.unit: i for i, unit in enumerate(units) for block in unit}
        issued: list[list[int]] = []

        def gather(block: Block) -> list[int]:
            at = place[block.unit]
            while len(issued) <= min(at + ahead, len(units) - 1):
                after = [made.last] if made.last >= 0 else [_BEFORE] if phase == "backward" or not first else []
                issued.append(self.sharding.gather(made, units[len(issued)], phase, after))
            return issued[at]

        return gather

    def _optimizer(self, program: Program, stage: int, after: list[int]) -> None:
        """Update of the parameters that a device owns; ZeRO-1/2 then gather them unless the next pass does."""
        blocks = [block for chunk in self.shapes[0][0][stage] for block in chunk]
        owned = self.sharding.owned(blocks)
        if self.prices.host_s:
            after = [program.op(COMPUTE, "idle", "host work", self.prices.host_s, dict.fromkeys(after), rank=stage)]
        update_s = self.prices.update_s(owned * self.sharding.kept)
        done = [program.op(COMPUTE, "compute", "adam", update_s, dict.fromkeys(after), rank=stage)]
        done += self.sharding.update(program, stage, owned, len(_units(blocks)), after)
        if self.plan.zero in (1, 2) and not self.plan.overlap_gather:
            made = Pass(self, self.prices)
            self.sharding.gather(made, blocks, "", [_BEFORE], name="parameters")
            program.extend(made.program, stage, [(waiting, op) for waiting, _ in made.waits for op in done])

    def _seconds(self, made: Pass, block: Block, phase: str) -> float:
        key = (id(block.ops), block.recomputed, phase)
        if (known := self.known.get(key)) is None:
            known = self.known[key] = made.prices.ops_s(block, phase, self._phases(block)[phase])
        return known

    def _hidden_s(self, behind: tuple[Comm, ...]) -> float:
        """Seconds of a block that run beside the tensor-parallel collectives behind it.

        A reduce-scatter hides with the all-gather of the next block, which is as long.
        """
        if not self.prices.tp_hidden or self.plan.tp == 1:
            return 0.0
        twice = {"reduce_scatter": 2.0, "all_reduce": 1.0}
        return self.prices.tp_hidden * sum(
            twice[comm.kind] * self.comm_s(comm.kind, comm.size_bytes, self.groups["tp"])
            for comm in behind if comm.group == "tp" and comm.kind in twice)  # fmt: skip

    def _phases(self, block: Block) -> dict[str, tuple[Op, ...]]:
        key = (id(block.ops), block.recomputed)
        if key not in self.known:
            self.known[key] = phases(block, self.plan.recompute)
        return self.known[key]

    def comm_s(self, kind: str, size_bytes: float, group: Group) -> float:
        """Seconds of a collective, worked out once."""
        return self._once(self._comm_s, kind, size_bytes, group)

    def _comm_s(self, kind: str, size_bytes: float, group: Group) -> float:
        if self.measured:
            found = self.measured.seconds(kind, group.ranks, -(-group.ranks // group.in_node), size_bytes)
            if found is not None:
                return found
        return self.prices.comm_s(kind, size_bytes, group)

    def _send_s(self, stage: int, to: int, size_bytes: float) -> float:
        """Message to a neighbour stage; one node holds both when the devices of both lie in it."""
        devices, node = self.plan.world_size // self.plan.pp, self.cluster.devices_per_node
        same_node = min(stage, to) * devices // node == ((max(stage, to) + 1) * devices - 1) // node
        hop = self.groups["same node" if same_node else "other node"]
        return self.comm_s("send_recv", size_bytes, hop)

    def _once(self, formula, *arguments):
        """Result of a formula, worked out once: blocks and micro-batches repeat."""
        key = (formula, *arguments)
        if key not in self.known:
            self.known[key] = formula(*arguments)
        return self.known[key]


def _units(blocks: list[Block]) -> list[list[Block]]:
    """Consecutive blocks of one unit."""
    units: list[list[Block]] = []
    for block in blocks:
        if units and units[-1][0].unit == block.unit:
            units[-1].append(block)
        else:
            units.append([block])
    return units
