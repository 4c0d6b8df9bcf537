"""In which order does a step run? Forward, backward, collectives and optimizer of every pipeline stage, as a Program.

One rank per pipeline stage with four in-order streams: compute, and the collectives of tensor, data and pipeline
parallelism. Tensor-parallel collectives block the next block; gradient collectives block only the optimizer.
ZeRO-3 gathers a block's parameters `prefetch` blocks ahead, forward and backward; DDP and ZeRO-1/2 reduce gradients in
buckets during the backward pass of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from madmax_lib.plan import Plan
from madmax_lib.simulator.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_bandwidth,
    reduce_scatter_s,
    send_s,
)
from madmax_lib.simulator.compute import Parameters, compute_s, optimizer_s
from madmax_lib.simulator.engine import Program
from madmax_lib.simulator.workload import BYTES, Block
from madmax_lib.specs import Cluster

__all__ = ["COMPUTE", "DATA", "PIPELINE", "TENSOR", "Step", "stage_order"]

COMPUTE, TENSOR, DATA, PIPELINE = range(4)


def stage_order(schedule: str, stage: int, pp: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """(forward or backward, micro-batch) of a stage in order.

    gpipe: all forward, then all backward. 1f1b: pp - stage - 1 forward to warm up, then one of each in turn
    [Narayanan et al. 2021].
    """
    warm_up = micro_batches if schedule == "gpipe" else min(pp - stage - 1, micro_batches)
    yield from (("forward", m) for m in range(warm_up))
    for m in range(micro_batches):
        if warm_up + m < micro_batches:
            yield "forward", warm_up + m
        yield "backward", m


class Step:
    """Lays out one training step; `program` holds the result. One instance, one call of `build`."""

    def __init__(self, stages: list[list[Block]], plan: Plan, cluster: Cluster, parameters: Parameters, dtype: str):
        self.stages, self.plan, self.cluster, self.parameters, self.dtype = stages, plan, cluster, parameters, dtype
        self.program = Program()
        self.durations_s: dict[tuple, float] = {}
        self.latest: dict[int, int] = {}  # stage -> its last compute op
        self.sent: dict[tuple[str, int, int], int] = {}  # (direction, stage, micro-batch) -> op that sends
        self.waiting: list[tuple[int, tuple[str, int, int]]] = []  # ops that wait for a send issued later
        self.groups = {
            TENSOR: self._group(plan.tp, 1, "tp"),
            DATA: self._group(plan.dp, plan.tp, "dp"),
        }

    def build(self, micro_batches: int, activation_bytes: float) -> Program:
        """All stages, all micro-batches, gradient collectives, optimizer. activation_bytes: sent between stages."""
        for stage in range(len(self.stages)):
            ends = []
            for direction, m in stage_order(self.plan.schedule, stage, self.plan.pp, micro_batches):
                if direction == "forward":
                    self._forward(stage, m, activation_bytes)
                else:
                    ends = self._backward(stage, m, activation_bytes, last=m == micro_batches - 1)
            self._optimizer(stage, ends)
        for op, key in self.waiting:
            self.program.after[op] += (self.sent[key],)
        return self.program

    def _forward(self, stage: int, m: int, activation_bytes: float) -> None:
        gathered = self._gathers(stage, self.stages[stage], "forward")
        previous: list[int] = []
        exchanged: list[int] = []
        computed: list[int] = []
        for block in self.stages[stage]:
            after = [*previous, *gathered(computed), *([] if block.name.startswith("bottom") else exchanged)]
            op = self._compute(stage, block, "forward", block.flops, block.traffic_bytes, after)
            if not computed and stage > 0:
                self.waiting.append((op, ("forward", stage - 1, m)))
            computed.append(op)
            if block.all_to_all_bytes:
                exchanged = [self._exchange(stage, block, "forward", [op])]
                continue  # the bottom layers do not wait for the lookup
            previous = [self._reduce_activation(stage, block, "forward", op)]
        if stage < self.plan.pp - 1:
            self.sent["forward", stage, m] = self._send(stage, stage + 1, "activation", activation_bytes, previous)

    def _backward(self, stage: int, m: int, activation_bytes: float, *, last: bool) -> list[int]:
        """Returns what the optimizer waits for."""
        blocks = self.stages[stage][::-1]
        tables = next((block for block in blocks if block.all_to_all_bytes), None)
        gathered = self._gathers(stage, blocks, "backward")
        previous: list[int] = []
        exchanged: list[int] = []
        computed: list[int] = []
        ends: list[int] = []
        bucket: list[Block] = []
        for block in blocks:
            if tables and not exchanged and (block is tables or block.name.startswith("bottom")):
                exchanged = [self._exchange(stage, tables, "backward", previous)]
            after = exchanged if block is tables else [*previous, *gathered(computed)]
            if self.plan.recompute == "full" and block is not tables:
                again = self._compute(stage, block, "recompute", block.flops, block.traffic_bytes, after)
                after = [self._reduce_activation(stage, block, "recompute", again)]
            flops = 2 * block.flops + (block.core_flops if self.plan.recompute == "selective" else 0.0)
            op = self._compute(stage, block, "backward", flops, 2 * block.traffic_bytes, after)
            if not computed and stage < self.plan.pp - 1:
                self.waiting.append((op, ("backward", stage + 1, m)))
            computed.append(op)
            previous = [self._reduce_activation(stage, block, "backward", op)]
            if last:
                bucket.append(block)
                ends += self._reduce_gradients(stage, bucket, op, end=block is blocks[-1])
        if stage > 0:
            self.sent["backward", stage, m] = self._send(stage, stage - 1, "gradient", activation_bytes, previous)
        return [*previous, *ends]

    def _optimizer(self, stage: int, after: list[int]) -> None:
        shards = self.plan.dp if self.plan.zero else 1
        owned = sum(block.parameters for block in self._trained_densely(self.stages[stage])) / shards
        duration_s = optimizer_s(owned, self.cluster.device, self.parameters)
        op = self.program.op(COMPUTE, "compute", "adam", float(duration_s), after, rank=stage)
        if self.plan.zero in (1, 2) and self.plan.dp > 1:
            size_bytes = owned * shards * BYTES[self.dtype]
            self._collective(stage, DATA, "all_gather", "parameters", size_bytes, [op])

    def _compute(self, stage: int, block: Block, phase: str, flops: float, traffic: float, after: list[int]) -> int:
        duration_s = self._once(compute_s, flops, traffic, self.cluster.device, self.dtype, self.parameters)
        op = self.program.op(COMPUTE, "compute", f"{block.name} {phase}", duration_s, after, rank=stage)
        self.latest[stage] = op
        return op

    def _reduce_activation(self, stage: int, block: Block, phase: str, op: int) -> int:
        """All-reduce of a tensor-parallel block, as reduce-scatter and all-gather under sequence parallelism."""
        if not block.tp_bytes:
            return op
        name = f"{block.name} {phase}"
        if not self.plan.sequence_parallel:
            return self._collective(stage, TENSOR, "all_reduce", name, block.tp_bytes, [op])
        op = self._collective(stage, TENSOR, "reduce_scatter", name, block.tp_bytes, [op])
        return self._collective(stage, TENSOR, "all_gather", name, block.tp_bytes, [op])

    def _gathers(self, stage: int, blocks: list[Block], phase: str):
        """Function from the blocks computed so far to the parameter gather that the next one waits for (ZeRO-3)."""
        if self.plan.zero < 3 or self.plan.dp == 1:
            return lambda computed: []
        issued: list[int | None] = []
        start = [self.latest[stage]] if stage in self.latest else []  # nothing is gathered before the pass begins

        def gather(computed: list[int]) -> list[int]:
            place = len(computed)
            while len(issued) <= min(place + self.plan.prefetch, len(blocks) - 1):
                block = blocks[len(issued)]
                after = [computed[-1]] if computed else start
                size_bytes = block.parameters * BYTES[self.dtype]
                sharded = not block.all_to_all_bytes  # embedding tables stay where they are
                issued.append(
                    self._collective(stage, DATA, "all_gather", f"{block.name} {phase}", size_bytes, after)
                    if sharded
                    else None
                )
            return [op for op in issued[place : place + 1] if op is not None]

        return gather

    def _reduce_gradients(self, stage: int, bucket: list[Block], op: int, *, end: bool) -> list[int]:
        """Gradient collective once a bucket is full; ZeRO-3 reduces block by block."""
        size_bytes = sum(block.parameters for block in self._trained_densely(bucket)) * BYTES[self.dtype]
        full = self.plan.zero == 3 or size_bytes >= self.plan.bucket_bytes
        if self.plan.dp == 1 or not size_bytes or not (full or end):
            return []
        name = f"gradients {bucket[-1].name}"
        bucket.clear()
        kind = "all_reduce" if self.plan.zero == 0 else "reduce_scatter"
        return [self._collective(stage, DATA, kind, name, size_bytes, [op])]

    def _exchange(self, stage: int, block: Block, phase: str, after: list[int]) -> int:
        """All-to-all of the pooled embeddings over all devices."""
        c, share = self.cluster, self.parameters.network_efficiency
        rates = c.intra.bandwidth_bytes_per_s * share, c.inter.bandwidth_bytes_per_s * share
        duration_s = all_to_all_s(block.all_to_all_bytes, self.plan.dp, c.devices_per_node, *rates, c.inter.latency_s)
        name = f"all_to_all {block.name} {phase}"
        size_bytes = block.all_to_all_bytes
        return self.program.op(
            DATA, "comm", name, float(duration_s), after, rank=stage, group="dp", size_bytes=size_bytes
        )

    def _send(self, stage: int, to: int, what: str, size_bytes: float, after: list[int]) -> int:
        """Message to a neighbour stage; one node holds both when the devices of both lie in it."""
        devices, node = self.plan.tp * self.plan.dp, self.cluster.devices_per_node
        same_node = min(stage, to) * devices // node == ((max(stage, to) + 1) * devices - 1) // node
        bandwidth, latency_s, group = self._group(2, 1 if same_node else node, "pp")
        duration_s = float(send_s(size_bytes, bandwidth, latency_s))
        return self.program.op(
            PIPELINE, "comm", f"send_recv {what}", duration_s, after, rank=stage, group=group, size_bytes=size_bytes
        )

    def _collective(self, stage: int, stream: int, kind: str, what: str, size_bytes: float, after: list[int]) -> int:
        formula = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s}[kind]
        bandwidth, latency_s, group = self.groups[stream]
        ranks = self.plan.tp if stream == TENSOR else self.plan.dp
        duration_s = self._once(formula, size_bytes, ranks, bandwidth, latency_s)
        return self.program.op(
            stream, "comm", f"{kind} {what}", duration_s, after, rank=stage, group=group, size_bytes=size_bytes
        )

    def _once(self, formula, *arguments) -> float:
        """Duration by a formula, worked out once: blocks and micro-batches repeat."""
        key = (formula, *arguments)
        if key not in self.durations_s:
            self.durations_s[key] = float(formula(*arguments))
        return self.durations_s[key]

    def _group(self, ranks: int, stride: int, name: str) -> tuple[float, float, str]:
        bandwidth, latency_s = group_bandwidth(self.cluster, ranks, stride)
        return bandwidth * self.parameters.network_efficiency, latency_s, name

    @staticmethod
    def _trained_densely(blocks: list[Block]) -> list[Block]:
        """Blocks with dense gradients; embedding tables update the looked-up rows in their own backward pass."""
        return [block for block in blocks if not block.all_to_all_bytes]
