"""Program of a whole step: passes of all stages and micro-batches, gradients, optimizer.

One rank per pipeline stage with in-order streams. Every pass of a chunk issues the same
ops, so each kind of pass is laid out once (`pass_builder`) and then issued for its
micro-batches in the order of the schedule.
"""

from functools import cache

from madmax_lib.plan import Case
from madmax_lib.plan.layers import stage_of_chunk
from madmax_lib.simulator.costs.schedules import turns
from madmax_lib.simulator.events.engine import Program, Stream
from madmax_lib.simulator.events.pass_builder import PassBuilder, units_of
from madmax_lib.simulator.events.passes import (
    BEFORE,
    MESSAGE,
    Message,
    MicroBatch,
    Pass,
    crosses,
)
from madmax_lib.simulator.events.sharding import Sharding


class StepBuilder:
    """Builder of one training step; `build` returns its Program.

    case: the step, as `normalised` gives it where it offloads. batch: the work of each
    micro-batch; last: of the last one, where it is shorter. sharding: traffic of data
    parallelism, with that of offload if there is any (`offload.staging`).
    """

    def __init__(
        self,
        case: Case,
        batch: MicroBatch,
        last: MicroBatch | None = None,
        sharding: Sharding | None = None,
    ):
        self.case = case
        self.plan = case.plan
        self.batch = batch
        self.groups = batch.prices.groups
        self.sharding = sharding or Sharding(batch.prices)
        self._usual = PassBuilder(batch, self.sharding)
        is_short = last is not None and last is not batch
        self._last = PassBuilder(last, self.sharding) if is_short else self._usual
        self._pass = cache(self._lay_out)  # micro-batches repeat

    def build(self, micro_batches: int) -> Program:
        """All stages and micro-batches, gradients, optimizer."""
        plan = self.plan
        program = Program()
        sent = {}
        latest = {}  # last op on the compute stream of each stage
        ends = [[] for _ in range(plan.pp)]  # what optimizers await
        steps = turns(plan.schedule, plan.pp, micro_batches, plan.interleave)
        for stage, slot, awaits, with_weights in steps:
            direction, chunk, number = slot
            first = number == 0 and plan.overlap_gather
            last = number == micro_batches - 1
            pass_ = self._pass(stage, direction, chunk, first, last, with_weights)
            message = sent.get(awaits)
            if isinstance(message, Message):
                crossing = crosses(slot, stage, plan, micro_batches)
                message = message.received(program, latest.get(stage), crossing)
            outside = {MESSAGE: message, BEFORE: latest.get(stage)}
            waits = [
                (op, outside[what])
                for op, what in pass_.waits
                if outside[what] is not None
            ]
            base = program.extend(pass_.program, stage, waits)
            latest[stage] = base + pass_.last
            sent[stage, slot] = base + pass_.sends
            if pass_.message:  # it is issued once its receiver is there
                sent[stage, slot] = pass_.message.of(stage, base)
            ends[stage] += [base + end for end in pass_.ends]
            if last:
                ends[stage].append(base + pass_.last)
        self.sharding.sum_tied(program, ends)
        for stage in range(plan.pp):
            self._optimizer(program, stage, ends[stage])
        return program

    def _lay_out(self, stage, direction, chunk, first, last, with_weights):
        """Ops of a pass. first: it gathers all parameters ahead; last: it is of the
        last micro-batch; with_weights: a backward pass computes gradients of weights, too.
        """
        builder = self._last if last else self._usual
        blocks = builder.batch.chunks[stage][chunk]
        pass_ = builder.new_pass(blocks, direction, last)
        pass_.with_weights = with_weights
        plan = self.plan
        virtual = chunk * plan.pp + stage_of_chunk(chunk, stage, plan.pp, plan.folds)
        if direction == "weight":
            builder.weights(pass_, blocks, last)
        elif direction == "forward":
            ready = builder.forward(pass_, blocks, first)
            self._send(pass_, builder, (stage, virtual + 1), "activation", ready)
        else:
            ready = builder.backward(pass_, blocks, last)
            self._send(pass_, builder, (stage, virtual - 1), "gradient", ready)
        return pass_

    def _send(
        self,
        pass_,
        builder,
        way,
        what,
        ready,
    ):
        """Message on its way (from a stage, to a virtual stage), if there is one to
        receive it; where it stops the host, the stage waits for it.
        """
        stage, to = way
        plan = self.plan
        if not 0 <= to < plan.pp * plan.interleave:
            return
        receiver = stage_of_chunk(*divmod(to, plan.pp), plan.pp, plan.folds)
        if receiver == stage:  # the turn of a V
            pass_.sends = max(ready)
            return
        prices = self.batch.prices
        size_bytes = builder.batch.sent_bytes
        # a node holds the devices of both stages, or not
        low, high = sorted((stage, receiver))
        devices = plan.world_size // plan.pp
        node = self.case.cluster.devices_per_node
        is_near = low * devices // node == ((high + 1) * devices - 1) // node
        pair = "same node" if is_near else "other node"
        duration_s = builder.comm_s("send_recv", size_bytes, pair)
        if pass_.computed >= 0:
            ready = [*ready, pass_.computed]
        if prices.traits.rendezvous_sends:
            after = tuple(op for op in ready if op >= 0)
            pass_.message = Message(what, duration_s, size_bytes, after)
            return
        name = f"send_recv {what}"
        pass_.sends = pass_.op(
            Stream.PIPELINE,
            "comm",
            name,
            duration_s,
            ready,
            group="pp",
            size_bytes=size_bytes,
        )
        if not prices.hides_messages:
            stop_s = prices.constants["send_stop_s"] / 2
            handshake = f"{name} handshake"
            pass_.last = pass_.op(
                Stream.COMPUTE, "idle", handshake, stop_s, [pass_.sends]
            )

    def _optimizer(self, program, stage, after):
        """Update of the parameters that a device owns; ZeRO-1/2 then gather them unless
        the next pass does.
        """
        prices = self.batch.prices
        plan = self.plan
        blocks = [block for chunk in self.batch.chunks[stage] for block in chunk]
        owned = self.sharding.owned(blocks)
        after = list(dict.fromkeys(after))
        host_s = float(prices.host_s)
        if host_s:
            end = program.op(
                Stream.LAUNCH, "cpu", "end of step", host_s, after, rank=stage
            )
            after = [end]
        update_s = float(prices.update_s(owned * self.sharding.device_share))
        done = [
            program.op(Stream.COMPUTE, "compute", "adam", update_s, after, rank=stage)
        ]
        units = len(units_of(blocks))
        done += self.sharding.update(program, stage, owned, units, after)
        if plan.zero in (1, 2) and not plan.overlap_gather and not plan.lora_rank:
            pass_ = Pass(self._usual.comm_s)
            self.sharding.gather(pass_, blocks, "", [BEFORE])
            waits = [(waiting, op) for waiting, _ in pass_.waits for op in done]
            program.extend(pass_.program, stage, waits)
