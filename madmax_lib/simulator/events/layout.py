"""What does each pass of a pipeline stage issue? Compute, collectives and optimizer of
a whole step, as a Program.

One rank per pipeline stage with in-order streams. Collectives of tensor, expert and
context parallelism block the pass they belong to; gradients block only the optimizer;
parameters are gathered ahead. Every pass of a chunk issues the same ops, so each kind
of pass is laid out once and then issued for its micro-batches in the order of the
schedule.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial

from madmax_lib.plan.case import Case
from madmax_lib.simulator.costs.layer_time import beside_exchanges, layer_time
from madmax_lib.simulator.costs.prices import CAUSES
from madmax_lib.simulator.costs.traffic import Sharded, held, sharded, slowed_s
from madmax_lib.simulator.events.engine import Program
from madmax_lib.simulator.events.messages import Message, crosses
from madmax_lib.simulator.events.passes import BEFORE, MESSAGE, MicroBatch, Pass
from madmax_lib.simulator.events.schedules import Slot, dependency, in_order, order
from madmax_lib.simulator.events.sharding import Sharding
from madmax_lib.simulator.events.staging import Staging
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.simulator.layers.ops import Block, Comm, mirror
from madmax_lib.simulator.offload.hosts import Offloaded

__all__ = ["StepBuilder"]


class StepBuilder:
    """Lays out one training step; `build` returns its Program.

    case: the step, as `normalised` gives it where it offloads. batch: the work of each
    micro-batch; last: of the last one, where it is shorter. offloaded: what lies
    beside.
    """

    def __init__(
        self,
        case: Case,
        batch: MicroBatch,
        last: MicroBatch | None = None,
        offloaded: Offloaded | None = None,
    ):
        self.case = case
        self.plan = case.plan
        self.offloaded = offloaded
        self.batch = batch
        self.last = last or batch
        self.groups = batch.prices.groups
        self.sharding = (
            Staging(batch.prices, offloaded) if offloaded else Sharding(batch.prices)
        )
        self.hidden = {
            group: float(share) for group, share in batch.prices.hidden_shares.items()
        }
        self.comm_s, self._pass = (
            cache(self._comm_s),
            cache(self._lay_out),
        )  # blocks and micro-batches repeat
        self._seconds: dict[tuple, dict[str, float]] = {}
        self._stretches: dict[tuple, tuple[float, float]] = {}

    def build(self, micro_batches: int) -> Program:
        """All stages and micro-batches, gradients, optimizer."""
        plan = self.plan
        program = Program()
        orders = [
            order(plan.schedule, s, plan.pp, micro_batches, plan.interleave)
            for s in range(plan.pp)
        ]
        sent: dict[tuple[int, Slot], int | Message] = {}
        latest: dict[int, int] = {}
        ends: list[list[int]] = [[] for _ in range(plan.pp)]
        for stage, slot in in_order(orders, plan.interleave):
            direction, chunk, number = slot
            first = number == 0 and plan.overlap_gather
            last = number == micro_batches - 1
            pass_ = self._pass(stage, direction, chunk, first, last)
            message = sent.get(dependency(slot, stage, plan.pp, plan.interleave))
            if isinstance(message, Message):
                message = message.received(
                    program,
                    latest.get(stage),
                    crosses(slot, stage, plan, micro_batches),
                )
            outside = {MESSAGE: message, BEFORE: latest.get(stage)}
            waits = [
                (op, outside[what])
                for op, what in pass_.waits
                if outside[what] is not None
            ]
            base = program.extend(pass_.program, stage, waits)
            latest[stage] = base + pass_.last
            sent[stage, slot] = (
                pass_.message.of(stage, base) if pass_.message else base + pass_.sends
            )
            ends[stage] += [base + end for end in pass_.ends] + (
                [base + pass_.last] if last else []
            )
        self.sharding.sum_tied(program, ends)
        for stage in range(plan.pp):
            self._optimizer(program, stage, ends[stage])
        return program

    def _lay_out(
        self, stage: int, direction: str, chunk: int, first: bool, last: bool
    ) -> Pass:
        """The ops of a pass. first: it gathers all parameters ahead; last: it is of the
        last micro-batch.
        """
        batch = self.last if last else self.batch
        split = self.plan.schedule == "zero-bubble"
        blocks = batch.chunks[stage][chunk]
        pass_ = Pass(self.comm_s, self._slowdowns(batch, blocks, direction, last))
        self.current = batch
        if direction == "weight":
            self._weights(pass_, blocks, last)
        elif direction == "forward":
            ready = self._forward(pass_, blocks, first)
            self._send(
                pass_,
                stage,
                chunk * self.plan.pp + stage + 1,
                "activation",
                batch.sent_bytes,
                ready,
            )
        else:
            ready = self._backward(pass_, blocks, last, split)
            self._send(
                pass_,
                stage,
                chunk * self.plan.pp + stage - 1,
                "gradient",
                batch.sent_bytes,
                ready,
            )
        return pass_

    def _send(
        self,
        pass_: Pass,
        stage: int,
        to: int,
        what: str,
        size_bytes: float,
        ready: list[int],
    ) -> None:
        """Message to the next virtual stage, if there is one; where it stops the host,
        the stage waits for it.
        """
        if not 0 <= to < self.plan.pp * self.plan.interleave:
            return
        low, high = sorted((stage, to % self.plan.pp))
        devices = self.plan.world_size // self.plan.pp
        node = self.case.cluster.devices_per_node
        same_node = (
            low * devices // node == ((high + 1) * devices - 1) // node
        )  # it holds the devices of both stages
        duration_s = self.comm_s(
            "send_recv", size_bytes, "same node" if same_node else "other node"
        )
        ready = [*ready, pass_.computed] if pass_.computed >= 0 else ready
        name = f"send_recv {what}"
        if self.batch.prices.habits.meets:
            pass_.message = Message(
                what, duration_s, size_bytes, tuple(op for op in ready if op >= 0)
            )
            return
        pass_.sends = pass_.op(
            Stream.PIPELINE,
            "comm",
            name,
            duration_s,
            ready,
            group="pp",
            size_bytes=size_bytes,
        )
        if self.batch.prices.habits.blocking_sends:
            stop_s = self.batch.prices.constants["send_stop_s"] / 2
            pass_.last = pass_.op(
                Stream.COMPUTE, "idle", f"{name} handshake", stop_s, [pass_.sends]
            )

    def _forward(self, pass_: Pass, blocks: list[Block], first: bool) -> list[int]:
        gathered = self._gathers(pass_, blocks, "forward", first)
        previous = [MESSAGE, BEFORE]
        exchanged = []
        unit = ""
        for block in blocks:
            after = [
                *previous,
                *gathered(block, previous),
                *([] if block.beside else exchanged),
            ]
            if block.recomputed and block.unit != unit:
                self.sharding.keep(pass_, block, previous)
            if block.unit != unit:
                layer = [one for one in blocks if one.unit == block.unit]
                after = self._launch(pass_, layer, "forward", 1, after)
            unit = block.unit
            done = self._work_of(layer, pass_, block, "forward", after)
            if block.table:
                exchanged = done  # the blocks beside do not wait for the lookup
            else:
                previous = done
        return previous

    def _backward(
        self, pass_: Pass, blocks: list[Block], last: bool, split: bool
    ) -> list[int]:
        """Unit by unit in reverse: recompute, then gradients. Returns what the message
        to the next stage waits for.
        """
        gathered = self._gathers(pass_, blocks[::-1], "backward", False)
        table = next((block for block in blocks if block.table), None)
        previous = [MESSAGE, BEFORE]
        exchanged = []
        reduce = self.sharding.reducer(pass_, last)
        for unit in _units(blocks)[::-1]:
            ready = (
                [*previous, *gathered(unit[0], previous)]
                if self.batch.prices.habits.on_host
                else previous
            )
            previous = self._launch(
                pass_, unit, "backward", 2 + float(self.batch.prices.repeats), ready
            )
            if unit[0].recomputed:
                previous = [*previous, *self.sharding.restore(pass_, unit[0])]
            for block in unit:
                if self._block_s(block)["recompute"]:
                    previous = self._work_of(
                        unit,
                        pass_,
                        block,
                        "recompute",
                        [*previous, *gathered(block, previous)],
                    )
            for block in unit[::-1]:
                if table and not exchanged and (block.table or block.beside):
                    exchanged = pass_.comms(
                        mirror(table.after), f"{table.name} backward", previous
                    )
                after = (
                    exchanged
                    if block.table
                    else [*previous, *gathered(block, previous)]
                )
                previous = self._work_of(unit, pass_, block, "backward", after, split)
                if not split:
                    reduce(
                        block,
                        pass_.last,
                        end=block is blocks[0],
                        unit_end=block is unit[0],
                    )
        return previous

    def _weights(self, pass_: Pass, blocks: list[Block], last: bool) -> None:
        """Gradients of weights alone, which zero-bubble schedules compute later."""
        reduce = self.sharding.reducer(pass_, last)
        for unit in _units(blocks)[::-1]:
            for block in unit[::-1]:
                pass_.compute(
                    f"{block.name} weight",
                    self._block_s(block)["weight"],
                    [BEFORE],
                    block.unit,
                )
                reduce(
                    block, pass_.last, end=block is blocks[0], unit_end=block is unit[0]
                )

    def _work_of(
        self,
        layer: list[Block],
        pass_: Pass,
        block: Block,
        phase: str,
        after: list[int],
        *split,
    ) -> list[int]:
        """A block of a layer. Where counts of tokens stop the host, it launches each
        block beside the one before.
        """
        prices = self.batch.prices
        seconds = self._computed_s(layer, phase, *split)[layer.index(block)]
        if not (stop_s := float(prices.stop_s(layer))):
            return self._work(pass_, block, phase, after, seconds)
        if block.expert and phase != "backward":
            counts = pass_.op(
                Stream.LAUNCH,
                "cpu",
                f"counts {block.unit} {phase}",
                stop_s,
                [pass_.computed],
            )
            pass_.launches.append(counts)
        done = self._work(pass_, block, phase, after, seconds)
        passes = {"forward": 1.0, "recompute": float(prices.repeats), "backward": 2.0}[
            phase
        ] / len(layer)
        launch_s = float(prices.launches_s(layer)) * passes
        pass_.launches.append(
            pass_.op(Stream.LAUNCH, "cpu", f"launch {block.name} {phase}", launch_s, ())
        )
        return done

    def _computed_s(
        self, layer: list[Block], phase: str, split: bool = False
    ) -> list[float]:
        """Seconds that each block of a layer computes in a phase, some of it beside
        exchanges of other blocks.
        """
        late = phase == "backward" and not split
        seconds = [of[phase] + late * of["weight"] for of in map(self._block_s, layer)]
        if not self.hidden["ep"] or (
            phase == "recompute" and self.plan.recompute != "full"
        ):
            return seconds
        exchanges = (
            [one for one in (*block.before, *block.after) if one.group == "ep"]
            for block in layer
        )
        return [
            float(part)
            for part in beside_exchanges(
                seconds, [self._hidden_s(comms) for comms in exchanges]
            )
        ]

    def _work(
        self, pass_: Pass, block: Block, phase: str, after: list[int], duration_s: float
    ) -> list[int]:
        """One block: collectives, compute, collectives. Returns what the next block
        waits for.

        A share of the compute runs beside the collectives, as far as software hides
        them: it is that of other tiles.
        """
        before = block.before
        behind = block.after
        if phase == "backward":
            before, behind = block.back
            before = () if block.table else before
        elif phase == "recompute" and self.plan.recompute == "selective":
            # the scores alone
            before = ()
            behind = ()
        name = f"{block.name} {phase}"
        launched = pass_.launches[-1:]
        after = [*after, *launched]
        if block.ring_bytes and self.plan.cp > 1:
            after = pass_.comms(before, name, after)
            return pass_.comms(
                behind, name, self._ring(pass_, block, phase, duration_s, after)
            )
        slower = pass_.slowdown(block.unit)
        lead_s = self._hidden_s(before) / slower
        tail_s = self._hidden_s(behind) / slower
        scale = min(1.0, duration_s / (lead_s + tail_s)) if lead_s + tail_s else 0.0
        ready = pass_.comms(before, name, after)
        if lead_s:
            pass_.compute(name, scale * lead_s, after, block.unit)
        first = pass_.compute(
            name, max(duration_s - scale * (lead_s + tail_s), 0.0), ready, block.unit
        )
        done = pass_.comms(behind, name, [first])
        if tail_s:
            pass_.compute(
                name, scale * tail_s, [first], block.unit
            )  # what computes next comes after it on the stream
        return done

    def _launch(
        self,
        pass_: Pass,
        unit: list[Block],
        phase: str,
        passes: float,
        after: list[int],
    ) -> list[int]:
        """The host issues a unit's kernels, ahead of the device if it can; on a CPU
        what follows waits for it.
        """
        prices = self.batch.prices
        name = f"launch {unit[0].unit} {phase}"
        seconds = float(prices.launches_s(unit)) * passes
        if seconds and prices.habits.on_host:
            return [*after, pass_.compute(name, seconds, after, unit[0].unit)]
        if seconds and not float(prices.stop_s(unit)):
            pass_.launches.append(pass_.op(Stream.LAUNCH, "cpu", name, seconds, ()))
        return after

    def _ring(
        self, pass_: Pass, block: Block, phase: str, duration_s: float, after: list[int]
    ) -> list[int]:
        """Attention in cp steps, the next keys and values on their way meanwhile, in
        backward their gradients too.
        """
        steps = self.plan.cp
        name = f"{block.name} {phase}"
        ready = after
        returned = []
        for step in range(steps):
            coming = (
                pass_.comm("send_recv", "cp", name, block.ring_bytes, ready)
                if step < steps - 1
                else []
            )
            waits = [*ready, *(after if step == 0 else [])]
            op = pass_.compute(name, duration_s / steps, waits, block.unit)
            if phase == "backward":
                returned = pass_.comm(
                    "send_recv", "cp", f"{name} gradients", block.ring_bytes, [op]
                )
            ready = coming
        return [op, *returned]

    def _gathers(
        self, pass_: Pass, blocks: list[Block], phase: str, first: bool
    ) -> Callable[..., list[int]]:
        """Function from a block, and what it follows, to its gathers of parameters,
        issued `prefetch` units ahead.
        """
        ahead = self.sharding.gathers_ahead(phase, first, len(blocks))
        if ahead is None:
            return lambda block, previous: []
        units = _units(blocks)
        number = {unit[0].unit: i for i, unit in enumerate(units)}
        issued: list[list[int]] = []

        def gather(block: Block, previous: list[int]) -> list[int]:
            at = number[block.unit]
            while len(issued) <= min(at + ahead, len(units) - 1):
                after = (
                    [*previous, pass_.last]
                    if self.batch.prices.habits.on_host and pass_.last >= 0
                    else previous
                )
                if (
                    pass_.last < 0
                ):  # what comes before the pass: its message is not waited for
                    after = (
                        [] if phase == "forward" and first else pass_.after_compute()
                    )
                issued.append(
                    self.sharding.gather(pass_, units[len(issued)], phase, after)
                )
            return issued[at]

        return gather

    def _optimizer(self, program: Program, stage: int, after: list[int]) -> None:
        """Update of the parameters that a device owns; ZeRO-1/2 then gather them unless
        the next pass does.
        """
        prices = self.batch.prices
        blocks = [block for chunk in self.batch.chunks[stage] for block in chunk]
        owned = self.sharding.owned(blocks)
        host_s = float(prices.host_s)
        after = list(dict.fromkeys(after))
        if host_s:
            after = [
                program.op(
                    Stream.LAUNCH, "cpu", "end of step", host_s, after, rank=stage
                )
            ]
        update_s = float(prices.update_s(owned * self.sharding.kept))
        done = [
            program.op(Stream.COMPUTE, "compute", "adam", update_s, after, rank=stage)
        ]
        done += self.sharding.update(program, stage, owned, len(_units(blocks)), after)
        if (
            self.plan.zero in (1, 2)
            and not self.plan.overlap_gather
            and not self.plan.lora_rank
        ):
            pass_ = Pass(self.comm_s)
            self.sharding.gather(pass_, blocks, "", [BEFORE], name="parameters")
            program.extend(
                pass_.program,
                stage,
                [(waiting, op) for waiting, _ in pass_.waits for op in done],
            )

    def _block_s(self, block: Block) -> dict[str, float]:
        """Seconds of a block by phase; blocks of the same ops are priced once."""
        batch = self.current
        key = (batch is self.last, id(block.ops))
        if key not in self._seconds:
            phases = batch.prices.block_s(block).items()
            self._seconds[key] = {
                phase: float(sum(causes.values())) for phase, causes in phases
            }
        return self._seconds[key]

    def _slowdowns(
        self, batch: MicroBatch, blocks: list[Block], direction: str, last: bool
    ) -> Callable[[str], float]:
        """Of compute by unit, beside the gathers and reductions of weights."""
        way = ("forward", "backward", "weight").index(direction)
        factors = {
            unit[0].unit: self._slowdown(batch, unit, last)[way]
            for unit in _units(blocks)
        }
        return partial(dict.get, factors)

    def _slowdown(
        self, batch: MicroBatch, unit: list[Block], last: bool
    ) -> tuple[float, ...]:
        """Of a unit's passes, of those for gradients of weights too: by gathers of
        weights, reductions of gradients.
        """
        if not unit[0].recomputed:
            return 1.0, 1.0, 1.0
        key = batch is self.last, last, tuple(id(block.ops) for block in unit)
        if key not in self._stretches:
            prices = batch.prices
            time = layer_time(unit, batch.prices)
            traffic = sharded(held(unit), prices)
            weight_s = prices.split * time.weight_s
            if prices.gathers_late and traffic.backward_s:
                traffic = Sharded(0.0, 0.0, 0.0)
            reduce_s = traffic.reduce_s + (
                self.sharding.reduced_s(unit, last) if self._reduces_beside else 0.0
            )
            moved = (
                traffic.forward_s,
                traffic.backward_s + (1 - prices.split) * reduce_s,
                prices.split * reduce_s,
            )
            causes = (*CAUSES, "launch_s") if prices.habits.on_host else CAUSES
            computed = [
                sum(times[cause] for cause in causes)
                for times in (time.forward, time.backward)
            ]
            passes = [
                (ahead_s, back_s - weight_s, weight_s)
                for ahead_s, back_s in (time.passes_s, computed)
            ]
            slowed = (
                slowed_s(busy_s, moved_s, prices)
                for busy_s, moved_s in zip(passes[0], moved, strict=True)
            )
            factors = (
                1 + s / one_s if s else 1.0
                for s, one_s in zip(slowed, passes[1], strict=True)
            )
            self._stretches[key] = tuple(map(float, factors))
        return self._stretches[key]

    @cached_property
    def _reduces_beside(self) -> bool:
        """Whether gradients are reduced beside a backward pass: the layers of a chunk
        fill a bucket.
        """
        if self.plan.zero == 3:
            return self.plan.shard > 0
        chunks = [chunk for stage in self.batch.chunks for chunk in stage]
        held_bytes = max(
            sum(block.parameters * block.recomputed for block in chunk)
            for chunk in chunks
        )
        full = held_bytes * self.sharding.gradient_width >= self.plan.bucket_bytes
        return bool(self.batch.prices.habits.hides_dp > 0 and full)

    def _hidden_s(self, comms: Sequence[Comm]) -> float:
        """Seconds of collectives beside which a block computes."""
        return sum(
            self.hidden[comm.group]
            * self.comm_s(comm.kind, comm.size_bytes, comm.group)
            for comm in comms
            if self.hidden.get(comm.group)
        )

    def _comm_s(
        self, kind: str, size_bytes: float, name: str, calls: float = 1.0
    ) -> float:
        """Seconds of a collective."""
        return float(
            self.batch.prices.comm_s(kind, size_bytes, self.groups[name], calls)
        )


def _units(blocks: list[Block]) -> list[list[Block]]:
    """Consecutive blocks of one unit."""
    units: list[list[Block]] = []
    for block in blocks:
        if units and units[-1][0].unit == block.unit:
            units[-1].append(block)
        else:
            units.append([block])
    return units
