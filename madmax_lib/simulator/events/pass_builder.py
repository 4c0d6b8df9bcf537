"""Ops of one pass of a chunk: blocks with their collectives, gathers, launches.

Collectives of tensor, expert and context parallelism block the pass they belong to,
but for what runs beside compute (`costs.overlap`); gradients block only the optimizer;
parameters are gathered ahead.
"""

from functools import cache, cached_property, partial
from typing import NamedTuple

from madmax_lib.simulator.costs.layer_time import layer_time, with_spare_compute
from madmax_lib.simulator.costs.prices import CAUSES
from madmax_lib.simulator.costs.traffic import Gathers, gathers_of, parameter_count
from madmax_lib.simulator.events.engine import Stream
from madmax_lib.simulator.events.passes import BEFORE, MESSAGE, MicroBatch, Ops, Pass
from madmax_lib.simulator.events.sharding import Sharding
from madmax_lib.simulator.layers.ops import Block, mirror


class _ByDirection(NamedTuple):
    """A number of each pass over a unit."""

    forward: float
    backward: float  # dgrad alone where wgrad is computed apart
    weight: float


class PassBuilder:
    """Builder of the passes of micro-batches of one size."""

    def __init__(self, batch: MicroBatch, sharding: Sharding):
        self.batch = batch
        self.prices = batch.prices
        self.plan = batch.prices.plan
        self.sharding = sharding
        self.on_host = bool(batch.prices.traits.on_host)
        self.comm_s = cache(self._comm_s)  # blocks repeat
        self._seconds: dict[tuple, dict[str, float]] = {}
        self._slowdowns: dict[tuple, _ByDirection] = {}

    def new_pass(self, blocks: list[Block], direction: str, last: bool) -> Pass:
        """An empty pass over blocks, whose compute contends with traffic of weights."""
        factors = {
            unit[0].unit: getattr(self._slowdown(unit, last), direction)
            for unit in units_of(blocks)
        }
        return Pass(self.comm_s, partial(dict.get, factors))

    def forward(self, pass_: Pass, blocks: list[Block], first: bool) -> Ops:
        """Blocks in order. Returns what the message to the next stage waits for.

        first: the first pass of a step, under which ZeRO-1/2 gather.
        """
        gathered = self._gathers(pass_, blocks, "forward", first)
        previous = self._switch(pass_, blocks[:1], gathered)
        exchanged = []  # rows of looked-up tables
        for unit in units_of(blocks):
            for block in unit:
                after = [*previous, *gathered(block, previous)]
                if not block.overlaps_table:
                    after += exchanged
                if block is unit[0]:
                    if block.recomputed:
                        self.sharding.keep(pass_, block, previous)
                    after = self._launch(pass_, unit, after, "forward")
                done = self._layer_block(unit, pass_, block, "forward", after)
                if block.table:
                    exchanged = done  # the blocks beside do not wait for the lookup
                else:
                    previous = done
        return previous

    def backward(self, pass_: Pass, blocks: list[Block], last: bool) -> Ops:
        """Unit by unit in reverse: recompute, then gradients. Returns what the message
        to the next stage waits for.
        """
        gathered = self._gathers(pass_, blocks[::-1], "backward", False)
        reduce = self.sharding.reducer(pass_, blocks, last)
        table = next((block for block in blocks if block.table), None)
        previous = self._switch(pass_, blocks[-1:], gathered)
        exchanged = []
        for unit in units_of(blocks)[::-1]:
            if self.on_host:  # a CPU gathers before it issues
                previous = [*previous, *gathered(unit[0], previous)]
            previous = self._launch(pass_, unit, previous, "backward", "recompute")
            if unit[0].recomputed:
                previous = [*previous, *self.sharding.restore(pass_, unit[0])]
            for block in unit:
                if self._block_s(block)["recompute"]:
                    after = [*previous, *gathered(block, previous)]
                    previous = self._layer_block(unit, pass_, block, "recompute", after)
            for block in unit[::-1]:
                if table and not exchanged and (block.table or block.overlaps_table):
                    exchanged = pass_.comms(
                        mirror(table.after), f"{table.name} backward", previous
                    )
                after = exchanged
                if not block.table:
                    after = [*previous, *gathered(block, previous)]
                previous = self._layer_block(unit, pass_, block, "backward", after)
                if pass_.with_weights:
                    reduce(block, unit)
        return previous

    def _switch(self, pass_, first, gathered):
        """The start of a pass: what its first block waits for, if it has any."""
        before = [MESSAGE, BEFORE]
        switch_s = float(self.prices.switch_s)
        if not switch_s:
            return before
        for block in first:  # weights do not wait for the switch
            gathered(block, before)
        pass_.last = pass_.op(Stream.COMPUTE, "idle", "switch", switch_s, before)
        return [pass_.last]

    def weights(self, pass_: Pass, blocks: list[Block], last: bool) -> None:
        """Wgrad alone, which zero-bubble schedules compute later."""
        reduce = self.sharding.reducer(pass_, blocks, last)
        for unit in units_of(blocks)[::-1]:
            for block in unit[::-1]:
                seconds = self._block_s(block)["weight"]
                pass_.compute(f"{block.name} weight", seconds, [BEFORE], block.unit)
                reduce(block, unit)

    def _layer_block(
        self,
        layer,
        pass_,
        block,
        phase,
        after,
    ):
        """A block of a layer. Where counts of tokens stop the host, it launches each
        block beside the one before.
        """
        prices = self.prices
        seconds = self._computed_s(layer, phase, pass_.with_weights)[layer.index(block)]
        stop_s = float(prices.stop_s(layer))
        if not stop_s:
            return self._work(pass_, block, phase, after, seconds)
        exchanging = [part for part in layer if self._exchanges(part, phase)]
        if block.expert and phase != "backward" and block in exchanging:
            name = f"counts {block.unit} {phase}"
            counts = pass_.op(Stream.LAUNCH, "cpu", name, stop_s, [pass_.computed])
            pass_.launches.append(counts)
        done = self._work(pass_, block, phase, after, seconds)
        launch_s = 0.0
        if block in exchanging:
            launch_s = float(prices.launches_s(layer, phase)) / len(exchanging)
        name = f"launch {block.name} {phase}"
        pass_.launches.append(pass_.op(Stream.LAUNCH, "cpu", name, launch_s, ()))
        return done

    def _computed_s(self, layer, phase, with_weights):
        """Seconds that each block of a layer computes in a phase, some of it beside
        exchanges of other blocks.
        """
        with_weights = phase == "backward" and with_weights
        seconds = [
            times[phase] + with_weights * times["weight"]
            for times in map(self._block_s, layer)
        ]
        if not self.prices.expert_share:
            return seconds
        exchanges_s = []
        for block in layer:
            comms = (*block.before, *block.after) * self._exchanges(block, phase)
            exchanges = [comm for comm in comms if comm.group == "ep"]
            exchanges_s.append(self._hidden_s(exchanges))
        return [float(part) for part in with_spare_compute(seconds, exchanges_s)]

    def _exchanges(self, block, phase):
        """Whether a phase of a block has collectives: recompute of its scores, or other
        ops alone, has none.
        """
        return phase != "recompute" or bool(self.prices.repeats + block.again)

    def _work(self, pass_, block, phase, after, duration_s):
        """One block: collectives, compute, collectives. Returns what the next block
        waits for.

        A share of the compute runs beside the collectives, as far as software hides
        them: it is that of other tiles.
        """
        before = block.before
        after_block = block.after
        if phase == "backward":
            before, after_block = block.back
            before = () if block.table else before
        elif not self._exchanges(block, phase):
            before = after_block = ()
        name = f"{block.name} {phase}"
        after = [*after, *pass_.launches[-1:]]
        if block.ring_bytes and self.plan.cp > 1:
            after = pass_.comms(before, name, after)
            done = self._ring(pass_, block, phase, duration_s, after)
            return pass_.comms(after_block, name, done)
        # compute beside the collectives before and after; all of it, if they are longer
        slower = pass_.slowdown(block.unit)
        lead_s = self._hidden_s(before) / slower
        tail_s = self._hidden_s(after_block) / slower
        beside_s = lead_s + tail_s
        scale = min(1.0, duration_s / beside_s) if beside_s else 0.0
        ready = pass_.comms(before, name, after)
        if lead_s:
            pass_.compute(name, scale * lead_s, after, block.unit)
        alone_s = max(duration_s - scale * beside_s, 0.0)
        first = pass_.compute(name, alone_s, ready, block.unit)
        done = pass_.comms(after_block, name, [first])
        if tail_s:  # what computes next comes after it on the stream
            pass_.compute(name, scale * tail_s, [first], block.unit)
        return done

    def _launch(self, pass_, unit, after, *phases):
        """The host issues a unit's kernels, ahead of the device if it can; on a CPU
        what follows waits for it.
        """
        seconds = float(self.prices.launches_s(unit, *phases))
        if not seconds:
            return after
        name = f"launch {unit[0].unit} {phases[0]}"
        if not self.prices.launches_ahead:
            return [*after, pass_.compute(name, seconds, after, unit[0].unit)]
        if not float(self.prices.stop_s(unit)):  # else block by block
            pass_.launches.append(pass_.op(Stream.LAUNCH, "cpu", name, seconds, ()))
        return after

    def _ring(self, pass_, block, phase, duration_s, after):
        """Attention in cp steps, the next keys and values on their way meanwhile, in
        backward their gradients too.
        """
        steps = self.plan.cp
        name = f"{block.name} {phase}"
        size_bytes = block.ring_bytes
        ready = after
        returned = []
        for step in range(steps):
            coming = []
            if step < steps - 1:
                coming = pass_.comm("send_recv", "cp", name, size_bytes, ready)
            waits = [*ready, *after] if step == 0 else ready
            op = pass_.compute(name, duration_s / steps, waits, block.unit)
            if phase == "backward":
                back = f"{name} gradients"
                returned = pass_.comm("send_recv", "cp", back, size_bytes, [op])
            ready = coming
        return [op, *returned]

    def _gathers(self, pass_, blocks, phase, first):
        """Function from a block, and what it follows, to its gathers of parameters,
        issued `prefetch` units ahead.
        """
        ahead = self.sharding.gathers_ahead(phase, first, len(blocks))
        if ahead is None:
            return lambda block, previous: []
        units = units_of(blocks)
        number = {unit[0].unit: i for i, unit in enumerate(units)}
        issued = []

        def gather(block, previous):
            at = number[block.unit]
            while len(issued) <= min(at + ahead, len(units) - 1):
                after = previous
                if pass_.last < 0:
                    # before the pass has computed: its message is not waited for
                    at_once = phase == "forward" and first
                    after = [] if at_once else pass_.after_compute()
                elif self.on_host:
                    after = [*previous, pass_.last]
                unit = units[len(issued)]
                issued.append(self.sharding.gather(pass_, unit, phase, after))
            return issued[at]

        return gather

    def _block_s(self, block):
        """Seconds of a block by phase; layers of a kind are priced once."""
        key = block.cost_key or (block.name,)
        if key not in self._seconds:
            phases = self.prices.block_s(block).items()
            self._seconds[key] = {
                phase: float(sum(causes.values())) for phase, causes in phases
            }
        return self._seconds[key]

    def _slowdown(self, unit, last):
        """Factors by which overlapping traffic of weights and gradients slows compute
        of a unit.
        """
        if not unit[0].recomputed:  # an end of the model
            return _ByDirection(1.0, 1.0, 1.0)
        key = (last, *(block.cost_key or (block.name,) for block in unit))
        if key in self._slowdowns:
            return self._slowdowns[key]
        prices = self.prices
        time = layer_time(unit, prices)
        traffic = gathers_of(parameter_count(unit), prices)
        if prices.gathers_late and traffic.backward_s:
            traffic = Gathers(0.0, 0.0, 0.0)
        reduce_s = traffic.reduce_s
        if self._reduces_beside:
            reduce_s = reduce_s + self.sharding.reduced_s(unit, last)
        split = prices.splits_backward
        comm = _ByDirection(
            traffic.forward_s,
            traffic.backward_s + (1 - split) * reduce_s,
            split * reduce_s,
        )
        # contention lasts for the whole pass, its seconds are spread over compute
        causes = (*CAUSES, "launch_s") if self.on_host else CAUSES
        forward_s, backward_s = time.passes_s
        weight_s = split * time.weight_s
        passes = _ByDirection(forward_s, backward_s - weight_s, weight_s)
        compute = _ByDirection(
            sum(time.forward[cause] for cause in causes),
            sum(time.backward[cause] for cause in causes) - weight_s,
            weight_s,
        )
        factors = []
        for pass_s, compute_s, comm_s in zip(passes, compute, comm, strict=True):
            added_s = prices.contention_s(pass_s, comm_s)
            factors.append(float(1 + added_s / compute_s) if added_s else 1.0)
        self._slowdowns[key] = _ByDirection(*factors)
        return self._slowdowns[key]

    @cached_property
    def _reduces_beside(self):
        """Whether gradients are reduced beside a backward pass: the layers of a chunk
        fill a bucket.
        """
        if self.plan.zero == 3:
            return self.plan.shard > 0
        sums = [
            sum(block.parameters * block.recomputed for block in chunk)
            for stage in self.batch.chunks
            for chunk in stage
        ]
        fills = max(sums) * self.sharding.gradient_width >= self.plan.bucket_bytes
        return bool(self.prices.hides_reductions and fills)

    def _hidden_s(self, comms):
        """Seconds of collectives beside which a block computes."""
        seconds = (
            self.prices.hidden_share(comm.group)
            * self.comm_s(comm.kind, comm.size_bytes, comm.group)
            for comm in comms
        )
        return float(sum(seconds))

    def _comm_s(self, kind, size_bytes, name, calls=1.0):
        """Seconds of a collective of a group."""
        group = self.prices.groups[name]
        return float(self.prices.comm_s(kind, size_bytes, group, calls))


def units_of(blocks: list[Block]) -> list[list[Block]]:
    """Consecutive blocks of one unit."""
    units = []
    for block in blocks:
        if units and units[-1][0].unit == block.unit:
            units[-1].append(block)
        else:
            units.append([block])
    return units
