"""Collectives of weights and gradients, issued pass by pass as `costs.traffic` says.

Below ZeRO-2 micro-batches add up their gradients and only the last one reduces them; so
do pipelines under ZeRO-2 [torch.distributed.pipelining], all others reduce with every
micro-batch.
"""

from collections.abc import Callable

import numpy as np

from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import (
    copies_transfer,
    gather_transfers,
    parameter_count,
    reduce_transfers,
    reduced_time,
    shard_group,
    tied_s,
)
from madmax_lib.simulator.events.engine import Program, Stream
from madmax_lib.simulator.events.passes import Ops, Pass
from madmax_lib.simulator.layers.ops import Block


class Sharding:
    """Data-parallel traffic of a plan, at `prices`."""

    device_share = 1.0  # of the update, that the device does itself

    def __init__(self, prices: Prices):
        self.prices = prices
        self.plan = prices.plan
        self.groups = prices.groups
        self.width = prices.steps.work.width.storage_bytes
        self.gradient_width = float(prices.gradient_bytes)
        self.every_batch = self.plan.zero == 3 or bool(prices.reduces_each)

    def owned(self, blocks: list[Block]) -> float:
        """Parameters that a device updates; looked-up rows of tables are updated in
        their own backward pass.
        """
        return float(parameter_count(blocks).owned(self.prices))

    def gathers_ahead(self, phase: str, first: bool, units: int) -> int | None:
        """Units whose parameters a pass gathers ahead, None if it gathers none."""
        if self.plan.zero == 3:
            return 0 if self.prices.gathers_late else self.plan.prefetch
        # ZeRO-1/2 gather the weights of all units under the first forward pass
        if not (self.plan.overlap_gather and phase == "forward" and first):
            return None
        return 0 if self.prices.traits.on_host else units

    def gather(self, pass_: Pass, blocks: list[Block], phase: str, after: Ops) -> Ops:
        """Issue the all-gather of the parameters of a unit, or without a phase of all, a
        call for each unit, after the update; what its compute waits for.
        """
        units = len({block.unit for block in blocks})
        done = []
        for experts, parameters in parameter_count(blocks).parts:
            transfers = gather_transfers(
                self.prices, experts=experts, backward=phase == "backward"
            )
            name = "parameters"
            if phase:
                name = f"{blocks[0].unit}{' experts' if experts else ''} {phase}"
            for transfer in transfers:
                if transfer.applies and self.groups[transfer.group].ranks > 1:
                    calls = float(transfer.calls if self.plan.zero == 3 else units)
                    size_bytes = float(parameters * transfer.bytes_)
                    done += pass_.comm(
                        transfer.kind, transfer.group, name, size_bytes, after, calls
                    )
        return done

    def reducer(self, pass_: Pass, blocks: list[Block], last: bool) -> Callable:
        """Function that takes each of the blocks of a backward pass, the last first, with
        its unit, and issues what reduces its gradients.

        Buckets close when a unit ends that fills them, at the end of the pass, and
        under most ZeRO-3 with every unit. The optimizer waits for those of the last
        micro-batch (`pass_.ends`).
        """
        buckets = {False: [], True: []}
        prices = self.prices
        by_unit = self.plan.zero == 3 and not prices.sharded_buckets
        full_bytes = 0.0 if by_unit else self.plan.bucket_bytes
        active = (last or self.every_batch) and not self.plan.lora_rank
        hides = bool(prices.hides_reductions)
        # what is not hidden is reduced at the end, unless ZeRO-3 has to free memory
        closes_early = self.plan.zero == 3 or bool(prices.traits.hides_dp)

        def reduce(block, unit):
            if not active:
                return
            op = pass_.last
            if not block.table:
                buckets[block.expert].append(block)
            for experts, bucket in buckets.items():
                parameters = sum(one.parameters for one in bucket)
                size_bytes = parameters * self.gradient_width
                is_full = closes_early and size_bytes >= full_bytes
                closes = block is blocks[0] or (block is unit[0] and is_full)
                if not (size_bytes and closes):
                    continue
                what = f"gradients {bucket[-1].unit}"
                done = self._reduce(pass_, experts, what, parameters, op, last)
                bucket.clear()
                if last:
                    pass_.ends += done
                if not hides:  # what follows waits
                    pass_.last = pass_.op(
                        Stream.COMPUTE, "idle", "reductions", 0.0, [pass_.last, *done]
                    )

        return reduce

    def _reduce(
        self,
        pass_,
        experts,
        what,
        parameters,
        op,
        last,
    ):
        """Issue the reduction of the gradients of a bucket; what follows it waits for."""
        plan = self.plan
        size_bytes = parameters * self.gradient_width
        calls = float(self.prices.gather_calls())
        if plan.zero < 3:
            calls = max(float(np.ceil(size_bytes / plan.bucket_bytes)), 1.0)
        transfers = reduce_transfers(self.prices, experts=experts, calls=calls)
        if last and plan.shard:
            if plan.zero == 3:  # copies have buckets of their own
                ranks = self.groups[shard_group(self.prices, experts=experts)].ranks
                calls = max(float(np.ceil(size_bytes / ranks / plan.bucket_bytes)), 1.0)
            copies = copies_transfer(self.prices, experts=experts, calls=calls)
            transfers = [*transfers, copies]
        done = [op]
        for one in transfers:
            if one.applies:
                moved = float(one.bytes_ * parameters)
                calls = float(one.calls)
                done = pass_.comm(one.kind, one.group, what, moved, done, calls)
        return done

    def reduced_s(self, unit: list[Block], last: bool) -> float:
        """Seconds in which gradients of a unit are reduced: below ZeRO-3, and at last
        between HSDP's copies.
        """
        seconds = 0.0
        for experts, parameters in parameter_count(unit).parts:
            size_bytes = parameters * self.gradient_width
            if self.plan.zero == 3:
                size_bytes /= self.groups[
                    shard_group(self.prices, experts=experts)
                ].ranks
            calls = size_bytes / self.plan.bucket_bytes  # smaller units share one
            calls = np.ceil(calls) if calls > 1 else calls
            one = reduced_time(parameters, calls, self.prices, experts=experts)
            within = last or self.every_batch
            seconds += float(within * one.within_s + last * one.across_s)
        return seconds

    def sum_tied(self, program: Program, ends: list[Ops]) -> None:
        """Issue the sum of the gradients of a tied table, for which the optimizers of
        the first and last stage wait beside their `ends`.
        """
        seconds = float(tied_s(self.prices))
        if not seconds:
            return
        ready = [*ends[0], *ends[-1]]
        name = "all_reduce tied table"
        for stage in (0, len(ends) - 1):
            op = program.op(
                Stream.PIPELINE, "comm", name, seconds, ready, rank=stage, group="pp"
            )
            ends[stage].append(op)

    # what offload adds (`offload.staging`): nothing here

    def keep(self, pass_: Pass, block: Block, ready: Ops) -> None:
        """Do with a layer's checkpoint what is due once its input is there: it stays."""

    def restore(self, pass_: Pass, block: Block) -> Ops:
        """Ops that the recomputation of a layer waits for beside its input: none."""
        return []

    def update(
        self, program: Program, stage: int, owned: float, tiles: int, after: Ops
    ) -> Ops:
        """Ops that update beside the device: none."""
        return []
