"""What moves because parameters, gradients and optimizer states are replicated or sharded? DDP, ZeRO, HSDP, ZeRO++.

Per device and step, P parameters of `width` bytes: DDP all-reduces P width; ZeRO-1/2 reduce-scatter and gather it
[arXiv 1910.02054]; ZeRO-3 gathers it for every forward and every backward pass. Below ZeRO-2 micro-batches add up their
gradients and only the last one reduces them; so do pipelines under ZeRO-2 [torch.distributed.pipelining], all others
reduce with every micro-batch. HSDP does so inside a shard and all-reduces the shards of its copies once. ZeRO++ gathers
8-bit weights, gathers inside the node for the backward pass, and exchanges 4-bit gradients inside the node, then across
[arXiv 2306.10209].
"""

from __future__ import annotations

from collections.abc import Callable

from madmax_lib.plan import Plan
from madmax_lib.plans import owned
from madmax_lib.simulator.layers.ops import Block
from madmax_lib.simulator.rates.topology import Group
from madmax_lib.simulator.schedule.engine import Program
from madmax_lib.simulator.schedule.passes import Pass

__all__ = ["Sharding"]

_INT8, _INT4, _FP32 = 1.0, 0.5, 4  # bytes


class Sharding:
    """Data-parallel traffic of a plan. width: bytes of a parameter or gradient in the step's dtype."""

    def __init__(self, plan: Plan, width: float, groups: dict[str, Group]):
        self.plan, self.width, self.groups = plan, width, groups
        self.gradient_width = _FP32 if plan.reduce_fp32 else width
        self.every_batch = plan.zero == 3 or (plan.zero == 2 and plan.pp == 1)  # reduces with each of them
        self.kept = 1.0  # share of the update that the device does

    def group(self, expert: bool) -> str:
        """Group that shards the states, of experts or of all else: HSDP's shard, or all replicas."""
        if self.plan.shard:
            return "expert-shard" if expert else "shard"
        return "edp" if expert else "dp"

    def owned(self, blocks: list[Block]) -> float:
        """Parameters that a device updates; looked-up rows of tables are updated in their own backward pass."""
        dense, experts = (_parameters(blocks, expert) for expert in (False, True))
        return float(owned(dense, experts, self.plan.sharing if self.plan.zero else 1, self.plan.ep))

    def gathers_ahead(self, phase: str, first: bool, units: int) -> int | None:
        """Units whose parameters a pass gathers ahead, None if it gathers none."""
        if self.plan.zero == 3:
            return self.plan.prefetch
        return units if self.plan.overlap_gather and phase == "forward" and first else None

    def gather(self, pass_: Pass, unit: list[Block], phase: str, after: list[int], name: str = "") -> list[int]:
        """All-gather of the parameters of a unit."""
        result = []
        for expert in (False, True):
            group, width = self.group(expert), self.width
            if not expert and self.plan.hpz and phase == "backward":
                group = "node"
            elif self.plan.qwz:
                width = min(_INT8, width)
            size_bytes = _parameters(unit, expert) * width
            what = name or f"{unit[0].unit}{' experts' if expert else ''} {phase}"
            if size_bytes and self.groups[group].ranks > 1:
                result += pass_.comm("all_gather", group, what, size_bytes, after)
        return result

    def reducer(self, pass_: Pass, last: bool) -> Callable:
        """Function that takes the blocks of a backward pass in order and issues what reduces their gradients.

        Buckets close when they are full, at the end of the pass, and under ZeRO-3 with every unit. The optimizer waits
        for those of the last micro-batch (`pass_.ends`).
        """
        buckets: dict[bool, list[Block]] = {False: [], True: []}
        active = last or self.every_batch

        def reduce(block: Block, op: int, *, end: bool, unit_end: bool) -> None:
            if not active:
                return
            if not block.table:
                buckets[block.expert].append(block)
            for expert, bucket in buckets.items():
                size_bytes = _parameters(bucket, expert) * self.gradient_width
                full = size_bytes >= self.plan.bucket_bytes or (self.plan.zero == 3 and unit_end)
                if size_bytes and (full or end):
                    what = bucket[-1].unit if self.plan.zero == 3 else bucket[-1].name
                    done = self._reduce(pass_, expert, f"gradients {what}", size_bytes, op, last)
                    pass_.ends += done if last else []
                    bucket.clear()

        return reduce

    def keep(self, pass_: Pass, block: Block, ready: list[int]) -> None:
        """What becomes of a layer's checkpoint once its input is there: it stays."""

    def restore(self, pass_: Pass, block: Block) -> list[int]:
        """What the recomputation of a layer waits for beside its input: nothing."""
        return []

    def update(self, program: Program, stage: int, owned: float, tiles: int, after: list[int]) -> list[int]:
        """What updates beside the device: nothing."""
        return []

    def _reduce(self, pass_: Pass, expert: bool, what: str, size_bytes: float, op: int, last: bool) -> list[int]:
        group, done = self.group(expert), [op]
        if self.plan.zero == 0:
            done = pass_.comm("all_reduce", group, what, size_bytes, done)
        elif self.plan.qgz and not expert:
            node = self.groups["node"].ranks
            size_bytes *= min(_INT4 / self.gradient_width, 1.0)
            done = pass_.comm("all_to_all", "node", what, size_bytes, done)
            done = pass_.comm("all_to_all", "across", what, size_bytes / node, done)
        else:
            done = pass_.comm("reduce_scatter", group, what, size_bytes, done)
            if last and self.plan.shard:
                copies = "expert-replicate" if expert else "replicate"
                done = pass_.comm("all_reduce", copies, what, size_bytes / self.groups[group].ranks, done)
        return done


def _parameters(blocks: list[Block], expert: bool) -> float:
    return sum(block.parameters for block in blocks if block.expert == expert and not block.table)
