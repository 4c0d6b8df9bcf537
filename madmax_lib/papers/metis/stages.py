"""What does a pipeline stage take in Metis' model: speed, memory, and each term of the
cost?

Stage performance, memory demand and costs of Metis [Um et al., USENIX ATC 2024] as its
public release computes them (behaviour recorded), defects included: a mixed replica
runs at the speed of its first GPU, memory is that of the first GPU type and of a batch
split over the whole cluster, traffic between nodes takes the bandwidth inside them,
pipeline bytes are counted as elements. Times in ms, memory in MB, sums from left to
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, partial

from madmax_lib.papers.metis.job import MetisJob
from madmax_lib.planner.hetero.prices import bits
from madmax_lib.planner.hetero.profiles import plain_sum

__all__ = ["NotProfiled", "RankOrder", "Stage", "cost_ms"]

# MB that even an empty stage demands
_MEMORY_FACTOR = 5.0
_MEMORY_LEAST = 0.001
# of GPT-3 6.7B, which the release takes for every model
_HIDDEN = 4096
_SEQUENCE = 1024
_VOCAB = 51200
_PER_GB_PER_MS = 1024 * 1024  # a GB/s is taken as this many units per ms


class NotProfiled(KeyError):
    """A term of the cost needs a batch that is not in the profiles; Metis drops such a
    plan.
    """


class RankOrder:
    """The cluster in one order of its GPU types: the ranks of a type follow one
    another, node by node.

    The release takes the size of the first node in the host file for that of all.
    stage(start, gpus, dp, batches), bandwidth(start, end, stride) and split(...) keep
    what they returned.
    """

    def __init__(self, job: MetisJob, order: Sequence[str]):
        self.job = job
        self.order = tuple(order)
        of_type = {
            device: [node for node in job.nodes if node.device == device]
            for device in order
        }
        self._per_node = job.nodes[0].gpus
        self.types = tuple(
            device
            for device in order
            for node in of_type[device]
            for _ in range(node.gpus)
        )
        self._node_types = [device for device in order for _ in of_type[device]]
        self.checked_types = tuple(
            device for device in self._node_types for _ in range(self._per_node)
        )
        in_file = {
            device: [node.in_file() for node in of_type[device]] for device in order
        }
        self._intra = {
            device: [node["intra_gb_per_s"] for node in in_file[device]]
            for device in order
        }
        self._memory_mb = {
            device: in_file[device][0]["memory_gb"] * 1024 for device in order
        }
        self.stage = cache(partial(Stage, self))
        self.bandwidth = cache(self._bandwidth)
        self.split = cache(self._split)

    def memory_mb(self, start: int, gpus: int) -> float:
        """Memory of all GPUs of a stage together."""
        return plain_sum(
            self._memory_mb[device] for device in self.types[start : start + gpus]
        )

    def _bandwidth(self, start: int, end: int, stride: int = 1) -> float:
        """GB/s of a group of ranks; beyond a node the release takes the least bandwidth
        inside the nodes involved.
        """
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

    def _split(
        self, types: tuple[str, ...], block: int, dp: int, tp: int, samples: int
    ) -> list[int]:
        """Samples of each replica, proportional to the speed of the first GPU of its
        block; largest remainders.
        """
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
        whole = [int(value) for value in exact]
        by_rest = sorted(range(dp), key=lambda replica: whole[replica] - exact[replica])
        for replica in by_rest[: samples - sum(whole)]:
            whole[replica] += 1
        return whole


class Stage:
    """`gpus` ranks from `start` on as dp replicas of tp GPUs, in a step of `batches`
    micro-batches.
    """

    def __init__(self, ranks: RankOrder, start: int, gpus: int, dp: int, batches: int):
        self.ranks = ranks
        self.start = start
        self.gpus = gpus
        self.dp = dp
        self.batches = batches
        self.tp = gpus // dp
        self._job = ranks.job
        self._samples = self._job.global_batch // batches  # of all replicas
        self.micro_batch = self._job.global_batch // dp // batches
        self.valid = (
            1 <= self.micro_batch <= self._job.max_bs and self.tp <= self._job.max_tp
        )
        self.degrees = [dp, self.tp]
        self._types = ranks.types[start : start + gpus]
        self._one_type = len(set(self._types)) == 1
        self._demand_mb: dict[tuple[int, int], float] = {}
        self._compute_ms: dict[tuple[int, int], float] = {}

    @cached_property
    def halved(self) -> Stage | None:
        """The same ranks with half the replicas, twice the tensor parallel degree."""
        return (
            self.ranks.stage(self.start, self.gpus, self.dp // 2, self.batches)
            if self.dp > 1
            else None
        )

    @cached_property
    def performance(self) -> float:
        """Micro-batches per ms if the stage had all layers."""
        full_ms = self._job.full_ms
        return 1 / max(
            plain_sum(full_ms(device, self.tp, part) for part in parts)
            for device, parts in self._replicas
        )

    @cached_property
    def _replicas(self) -> list[tuple[str, list[int]]]:
        """GPU type and batches (powers of two, descending) of each replica, once for
        all in a stage of one type.
        """
        if self._one_type:
            return [(self._types[0], [self.micro_batch])]
        samples = self.ranks.split(
            self._types, self.tp, self.dp, self.tp, self._samples
        )
        return [
            (self._types[number * self.tp], bits(count))
            for number, count in enumerate(samples)
            if count
        ]

    @cached_property
    def _memory(self) -> list[list[list[float]]]:
        """Memory tables that add up to the demand: one, or of every part of a batch
        split over the whole cluster.
        """
        types = self.ranks.checked_types
        batches = [self.micro_batch]
        if len(set(types[self.start : self.start + self.gpus])) != 1:
            split = self.ranks.split(
                types, len(self.ranks.types) // self.dp, self.dp, self.tp, self._samples
            )
            batches = [part for count in split for part in bits(count)]
        return [
            self._job.slices("memory_mb", self.ranks.order[0], self.tp, batch)
            for batch in batches
        ]

    def demand_mb(self, x: int, y: int) -> float:
        """Memory that Metis expects for layers x to y."""
        if len(self._memory) == 1:
            return _MEMORY_LEAST + _MEMORY_FACTOR * self._memory[0][x][y - x]
        if (x, y) not in self._demand_mb:
            parts_mb = (_MEMORY_FACTOR * table[x][y - x] for table in self._memory)
            self._demand_mb[x, y] = plain_sum([_MEMORY_LEAST, *parts_mb])
        return self._demand_mb[x, y]

    @cached_property
    def _layer_ms(self) -> list[list[float]]:
        return self._job.slices("layer_ms", self._types[0], self.tp, self.micro_batch)

    def compute_ms(self, x: int, y: int) -> float:
        """Time of a micro-batch in layers x to y. Raises NotProfiled for a part above
        the largest batch.
        """
        if self._one_type:
            return self._layer_ms[x][y - x]
        if (x, y) not in self._compute_ms:
            if max(parts[0] for _, parts in self._replicas) > self._job.max_bs:
                raise NotProfiled
            self._compute_ms[x, y] = max(
                plain_sum(
                    self._job.slices("layer_ms", device, self.tp, part)[x][y - x]
                    for part in parts
                )
                for device, parts in self._replicas
            )
        return self._compute_ms[x, y]

    @cached_property
    def all_reduce_ms_per_byte(self) -> float:
        """Of the ring all-reduce of gradients over the dp replicas."""
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
    job = stages[0].ranks.job
    batches = stages[0].batches
    compute = []
    transfers = 0
    reduces = []
    optimizers = []
    optimizer_ms = 2 * job.model.optimizer_ms
    for number in range(costed):
        stage = stages[number]
        x = partition[number]
        y = partition[number + 1]
        compute.append(stage.compute_ms(x, y))
        reduces.append(
            stage.all_reduce_ms_per_byte * (job.parameters_bytes[x][y] / stage.tp)
        )
        optimizers.append(optimizer_ms / stage.tp * ((y - x) / job.layers))
        if number < costed - 1:
            width = _VOCAB / stage.tp if y == job.layers - 1 else _HIDDEN
            bandwidth = ranks.bandwidth(
                stage.start, stage.start + stage.gpus + stages[number + 1].gpus
            )
            transfers += (
                stage.micro_batch * _SEQUENCE * width / (bandwidth * _PER_GB_PER_MS)
            )
    execution = (batches - 1) * max(compute) + plain_sum(compute)
    sync = stages[costed - 1].sync_ms * batches
    return (
        execution
        + sync
        + max(optimizers)
        + max(reduces)
        + transfers
        + job.model.batch_generator_ms * batches
    )
