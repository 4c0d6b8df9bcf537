"""What moves because parameters, gradients and optimizer states are replicated or
sharded? DDP, ZeRO, HSDP, ZeRO++.

Per device and step, P parameters of `width` bytes: DDP all-reduces P width; ZeRO-1/2
reduce-scatter and gather it [arXiv 1910.02054]; ZeRO-3 gathers it for every forward and
every backward pass. Below ZeRO-2 micro-batches add up their gradients and only the last
one reduces them; so do pipelines under ZeRO-2 [torch.distributed.pipelining], all
others reduce with every micro-batch. HSDP does so inside a shard and all-reduces the
shards of its copies once. ZeRO++ gathers 8-bit weights, gathers inside the node for the
backward pass, and exchanges 4-bit gradients inside the node, then across [arXiv
2306.10209].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from madmax_lib.simulator.costs.prices import Prices
from madmax_lib.simulator.costs.traffic import held, reduced_s
from madmax_lib.simulator.events.engine import Program
from madmax_lib.simulator.events.passes import Pass
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.steady.stages import tied_s

__all__ = ["Sharding"]

# bytes
_INT8 = 1.0
_INT4 = 0.5


class Sharding:
    """Data-parallel traffic of a plan, at `prices`."""

    def __init__(self, prices: Prices):
        self.prices = prices
        self.plan = prices.plan
        self.groups = prices.groups
        self.width = prices.steps.work.width.storage_bytes
        self.gradient_width = float(prices.gradient_bytes)
        self.every_batch = self.plan.zero == 3 or bool(prices.reduces_each)
        self.beside = bool(
            prices.habits.hides_dp
        )  # gradients are reduced beside the backward pass
        self.kept = 1.0  # share of the update that the device does

    def owned(self, blocks: list[Block]) -> float:
        """Parameters that a device updates; looked-up rows of tables are updated in
        their own backward pass.
        """
        return float(held(blocks).owned(self.prices))

    def gathers_ahead(self, phase: str, first: bool, units: int) -> int | None:
        """Units whose parameters a pass gathers ahead, None if it gathers none."""
        if self.plan.zero == 3:
            return 0 if self.prices.gathers_late else self.plan.prefetch
        if not (self.plan.overlap_gather and phase == "forward" and first):
            return None
        return 0 if self.prices.habits.on_host else units

    def gather(
        self,
        pass_: Pass,
        unit: list[Block],
        phase: str,
        after: list[int],
        name: str = "",
    ) -> list[int]:
        """All-gather of the parameters of a unit, or under a name of several units, a
        call for each.
        """
        result = []
        count = held(unit)
        calls = float(len({block.unit for block in unit}))
        slower = 1.0
        if self.plan.zero == 3:
            calls = float(self.prices.gather_calls())
            slower = float(self.prices.gather_slowdown())
        for expert, parameters in ((False, count.dense), (True, count.experts)):
            group = self.prices.shard_name(expert)
            width = self.width
            if not expert and self.plan.hpz and phase == "backward":
                group = "node"
            elif self.plan.qwz:
                width = min(_INT8, width)
            size_bytes = parameters * width * slower
            what = name or f"{unit[0].unit}{' experts' if expert else ''} {phase}"
            if size_bytes and self.groups[group].ranks > 1:
                result += pass_.comm(
                    "all_gather", group, what, size_bytes, after, calls
                )
        return result

    def reducer(self, pass_: Pass, last: bool) -> Callable:
        """Function that takes the blocks of a backward pass in order and issues what
        reduces their gradients.

        Buckets close when a unit ends that fills them, at the end of the pass, and
        under most ZeRO-3 with every unit. The optimizer waits for those of the last
        micro-batch (`pass_.ends`).
        """
        buckets: dict[bool, list[Block]] = {False: [], True: []}
        sharded = self.plan.zero == 3
        most = 0.0 if sharded and not self.prices.buckets else self.plan.bucket_bytes
        active = (last or self.every_batch) and not self.plan.lora_rank

        def reduce(block: Block, op: int, *, end: bool, unit_end: bool) -> None:
            if not active:
                return
            if not block.table:
                buckets[block.expert].append(block)
            for expert, bucket in buckets.items():
                size_bytes = sum(one.parameters for one in bucket) * self.gradient_width
                full = unit_end and (sharded or self.beside) and size_bytes >= most
                if size_bytes and (full or end):
                    done = self._reduce(
                        pass_,
                        expert,
                        f"gradients {bucket[-1].unit}",
                        size_bytes,
                        op,
                        last,
                    )
                    pass_.ends += done if last else []
                    bucket.clear()
                    if not self.beside and (
                        self.plan.zero < 3 or self.prices.habits.on_host
                    ):  # what follows waits
                        pass_.last = pass_.op(
                            Stream.COMPUTE,
                            "idle",
                            "reductions",
                            0.0,
                            [pass_.last, *done],
                        )

        return reduce

    def reduced_s(self, unit: list[Block], last: bool) -> float:
        """Seconds in which gradients of a unit are reduced: below ZeRO-3, and at last
        between HSDP's copies.
        """
        seconds = 0.0
        for expert, parameters in held(unit).parts:
            size_bytes = parameters * self.gradient_width
            if self.plan.zero == 3:
                size_bytes /= self.groups[self.prices.shard_name(expert)].ranks
            calls = size_bytes / self.plan.bucket_bytes  # smaller units share one
            within_s, across_s = reduced_s(
                size_bytes, np.ceil(calls) if calls > 1 else calls, expert, self.prices
            )
            seconds += float((last or self.every_batch) * within_s + last * across_s)
        return seconds

    def sum_tied(self, program: Program, ends: list[list[int]]) -> None:
        """What the optimizers of the first and last stage wait for beside their `ends`:
        gradients of a tied table.
        """
        if seconds := float(tied_s(self.prices)):
            ready = [*ends[0], *ends[-1]]
            about = (Stream.PIPELINE, "comm", "all_reduce tied table", seconds)
            for stage in (0, len(ends) - 1):
                ends[stage].append(program.op(*about, ready, rank=stage, group="pp"))

    def keep(self, pass_: Pass, block: Block, ready: list[int]) -> None:
        """What becomes of a layer's checkpoint once its input is there: it stays."""

    def restore(self, pass_: Pass, block: Block) -> list[int]:
        """What the recomputation of a layer waits for beside its input: nothing."""
        return []

    def update(
        self, program: Program, stage: int, owned: float, tiles: int, after: list[int]
    ) -> list[int]:
        """What updates beside the device: nothing."""
        return []

    def _reduce(
        self,
        pass_: Pass,
        expert: bool,
        what: str,
        size_bytes: float,
        op: int,
        last: bool,
    ) -> list[int]:
        group = self.prices.shard_name(expert)
        done = [op]
        plan = self.plan
        calls = (
            float(np.ceil(size_bytes / plan.bucket_bytes))
            if plan.zero < 3
            else float(self.prices.gather_calls())
        )
        calls = max(calls, 1.0)
        if plan.zero == 0:
            return pass_.comm("all_reduce", group, what, size_bytes, done, calls)
        if plan.qgz and not expert:
            node = self.groups["node"].ranks
            size_bytes *= min(_INT4 / self.gradient_width, 1.0)
            done = pass_.comm("all_to_all", "node", what, size_bytes, done)
            return pass_.comm("all_to_all", "across", what, size_bytes / node, done)
        done = pass_.comm("reduce_scatter", group, what, size_bytes, done, calls)
        if last and plan.shard:
            copies = "expert-replicate" if expert else "replicate"
            part_bytes = size_bytes / self.groups[group].ranks
            if plan.zero == 3:
                calls = max(float(np.ceil(part_bytes / plan.bucket_bytes)), 1.0)
            done = pass_.comm("all_reduce", copies, what, part_bytes, done, calls)
        return done
