"""A pipeline stage in Metis' model: speed, memory, and each term of the cost.

Stage performance, memory demand and costs of Metis [Um et al., USENIX ATC 2024] as its
public release computes them (behaviour recorded), defects included: a mixed replica
runs at the speed of its first GPU, memory is that of the first GPU type and of a batch
split over the whole cluster, traffic between nodes takes the bandwidth inside them,
pipeline bytes are counted as elements. Times in ms, memory in MB, sums from left to
right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from madmax_lib.papers.metis.job import MetisJob
from madmax_lib.planner.hetero.prices import bits
from madmax_lib.planner.hetero.profiles import plain_sum

_MEMORY_FACTOR = 5.0  # of the release, over the table's memory
_LEAST_MB = 0.001  # that even an empty stage demands, so that nothing divides by 0
_PER_GB_PER_MS = 1024 * 1024  # a GB/s is taken as this many units per ms


class NotProfiled(KeyError):
    """A term of the cost needs a batch that is not in the profiles; Metis drops such a
    plan.
    """


class RankOrder:
    """The cluster in one order of its GPU types: the ranks of a type follow one
    another, node by node.

    The release takes the size of the first node in the host file for that of all.
    stage(start, gpus, dp, batches), bandwidth(start, end, stride) and split(...) cache
    their results.
    """

    def __init__(self, job: MetisJob, order: Sequence[str]):
        self.job = job
        self.order = tuple(order)
        nodes = [
            node for device in order for node in job.nodes if node.device == device
        ]
        self._per_node = job.nodes[0].gpus
        self._node_types = [node.device for node in nodes]
        # type of each rank, and as the memory check counts: all nodes like the first
        self.types = tuple(node.device for node in nodes for _ in range(node.gpus))
        self.checked_types = tuple(
            device for device in self._node_types for _ in range(self._per_node)
        )
        # bandwidth inside all nodes of a type, memory of its first one
        self._intra = {device: [] for device in order}
        self._memory_mb = {}
        for node in nodes:
            values = node.in_file()
            self._intra[node.device].append(values["intra_gb_per_s"])
            self._memory_mb.setdefault(node.device, values["memory_gb"] * 1024)
        self.stage = cache(partial(Stage, self))
        self.bandwidth = cache(self._bandwidth)
        self.split = cache(self._split)

    def memory_mb(self, start: int, gpus: int) -> float:
        """Memory of all GPUs of a stage together."""
        types = self.types[start : start + gpus]
        return plain_sum(self._memory_mb[device] for device in types)

    def _bandwidth(self, start, end, stride=1):
        """GB/s of a group of ranks; beyond a node the release takes the least bandwidth
        inside the nodes involved.
        """
        # node of a rank = rank // (GPUs of node 0), whatever the real sizes
        nodes = {rank // self._per_node for rank in range(start, end, stride)}
        if max(nodes) >= len(self._node_types):
            sizes = sorted({node.gpus for node in self.job.nodes})
            raise ValueError(
                f"nodes differ in size ({', '.join(map(str, sizes))} GPUs), the "
                "first is not the largest"
            )
        types = {self._node_types[node] for node in nodes}
        if len(nodes) == 1:
            return self._intra[types.pop()][0]
        return min(min(self._intra[device]) for device in types)

    def _split(self, types, block, dp, tp, samples):
        """Samples of each replica, proportional to the speed of the first GPU of its
        block; largest remainders.
        """
        # weight_j = 1 / full-model time at batch 1; h_j = floor(m x share_j); what is
        # left goes one each to the largest fractions, ties by index
        if (dp - 1) * block >= len(types):
            raise ValueError(
                f"nodes differ in size: {len(types)} GPUs by the size of the first, "
                f"{dp * block} in all"
            )
        speeds = [
            1 / self.job.full_ms(types[replica * block], tp, 1) for replica in range(dp)
        ]
        total = plain_sum(speeds)
        exact = [samples * (speed / total) for speed in speeds]
        counts = [int(value) for value in exact]
        by_rest = sorted(range(dp), key=lambda j: counts[j] - exact[j])
        for replica in by_rest[: samples - sum(counts)]:
            counts[replica] += 1
        return counts


@dataclass(eq=False)
class Stage:
    """`gpus` ranks from `start` on as dp replicas of tp GPUs, in a step of `batches`
    micro-batches.
    """

    ranks: RankOrder
    start: int
    gpus: int
    dp: int
    batches: int

    def __post_init__(self):
        self.tp = self.gpus // self.dp
        self._job = self.ranks.job
        self._samples = self._job.global_batch // self.batches  # of all replicas
        self.micro_batch = self._samples // self.dp
        self.valid = (
            1 <= self.micro_batch <= self._job.max_bs and self.tp <= self._job.max_tp
        )
        self.degrees = [self.dp, self.tp]
        self._types = self.ranks.types[self.start : self.start + self.gpus]

    @cached_property
    def halved(self) -> "Stage | None":
        """The same ranks with half the replicas, twice the tensor parallel degree."""
        if self.dp == 1:
            return None
        return self.ranks.stage(self.start, self.gpus, self.dp // 2, self.batches)

    @cached_property
    def performance(self) -> float:
        """Micro-batches per ms if the stage had all layers."""
        full_ms = self._job.full_ms
        # performance = 1 / max_j time_j, a replica's time the sum over its batches
        return 1 / max(
            plain_sum(full_ms(device, self.tp, part) for part in parts)
            for device, parts in self._replicas
        )

    @cached_property
    def _replicas(self):
        """GPU type and batches (powers of two, descending) of each replica, once for
        all in a stage of one type.
        """
        if len(set(self._types)) == 1:
            return [(self._types[0], [self.micro_batch])]
        split = self.ranks.split(self._types, self.tp, self.dp, self.tp, self._samples)
        # a replica has the type of its first GPU
        return [
            (self._types[number * self.tp], bits(samples))
            for number, samples in enumerate(split)
            if samples
        ]

    @cached_property
    def _memory(self):
        """Memory tables that add up to the demand: one, or of every part of a batch
        split over the whole cluster.
        """
        ranks = self.ranks
        types = ranks.checked_types
        batches = [self.micro_batch]
        if len(set(types[self.start : self.start + self.gpus])) != 1:
            # as released over the types of all ranks, not of the stage's own
            block = len(ranks.types) // self.dp
            split = ranks.split(types, block, self.dp, self.tp, self._samples)
            batches = [part for count in split for part in bits(count)]
        # every table is that of rank 0's type
        return [
            self._job.slices("memory_mb", ranks.order[0], self.tp, batch)
            for batch in batches
        ]

    def demand_mb(self, x: int, y: int) -> float:
        """Memory that Metis expects for layers x to y."""
        parts_mb = (_MEMORY_FACTOR * table[x][y - x] for table in self._memory)
        return plain_sum([_LEAST_MB, *parts_mb])

    def compute_ms(self, x: int, y: int) -> float:
        """Time of a micro-batch in layers x to y. Raises NotProfiled for a part above
        the largest batch.
        """
        if max(parts[0] for _, parts in self._replicas) > self._job.max_bs:
            raise NotProfiled
        slices = self._job.slices
        # the slowest replica of a mixed stage
        return max(
            plain_sum(
                slices("layer_ms", device, self.tp, part)[x][y - x] for part in parts
            )
            for device, parts in self._replicas
        )

    @cached_property
    def all_reduce_ms_per_byte(self) -> float:
        """Time per byte of the ring all-reduce of gradients over the dp replicas."""
        # T = 2 (dp-1) / (dp x bw); group j has the ranks j, j + dp, ... of the stage
        end = self.start + self.gpus
        bandwidth = min(
            self.ranks.bandwidth(first, end, self.dp)
            for first in range(self.start, self.start + self.dp)
        )
        return 2 * (self.dp - 1) / (self.dp * (bandwidth * _PER_GB_PER_MS))

    @cached_property
    def sync_ms(self) -> float:
        """Forward and backward time outside of layers. Raises NotProfiled where a type
        has none.
        """
        table = self._job.profiles.table
        keys = [(device, self.tp, self.micro_batch) for device in set(self._types)]
        times = [table[key].sync_ms if key in table else 0.0 for key in keys]
        if not all(times):
            raise NotProfiled
        return max(times)


def cost_ms(stages: Sequence[Stage], partition: Sequence[int], costed: int) -> float:
    """Metis' cost of a step in ms, of the first `costed` stages. Raises NotProfiled
    where the plan is dropped.

    partition: (stages + 1,) layer boundaries. (batches - 1) x slowest stage + all
    stages + time outside of layers + slowest optimizer + slowest gradient all-reduce +
    pipeline transfers + batch generator.
    """
    ranks = stages[0].ranks
    job = ranks.job
    batches = stages[0].batches
    compute_ms = []
    optimizer_ms = []
    reduce_ms = []
    transfers_ms = 0
    for number, stage in enumerate(stages[:costed]):
        x = partition[number]
        y = partition[number + 1]
        compute_ms.append(stage.compute_ms(x, y))
        share = (y - x) / job.layers
        # stored twice, and over tp though the profile's time has fallen with tp
        optimizer_ms.append(2 * job.model.optimizer_ms / stage.tp * share)
        gradient_bytes = job.parameters_bytes[x][y] / stage.tp
        reduce_ms.append(stage.all_reduce_ms_per_byte * gradient_bytes)
        if number < costed - 1:
            # micro-batch x seq x hidden, or x vocab / tp before the last layer:
            # elements, which the release takes for bytes
            width = job.vocab / stage.tp if y == job.layers - 1 else job.hidden
            end = stage.start + stage.gpus + stages[number + 1].gpus
            rate = ranks.bandwidth(stage.start, end) * _PER_GB_PER_MS
            transfers_ms += stage.micro_batch * job.sequence * width / rate
    # execution = (b - 1) max c + sum c; terms are added in this order, to the last bit
    execution_ms = (batches - 1) * max(compute_ms) + plain_sum(compute_ms)
    cost = execution_ms + stages[costed - 1].sync_ms * batches
    cost += max(optimizer_ms)
    cost += max(reduce_ms)
    cost += transfers_ms
    return cost + job.model.batch_generator_ms * batches
