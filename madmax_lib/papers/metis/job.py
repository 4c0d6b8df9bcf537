"""What does Metis plan for: which model, batch and limits, from which profiles, on which nodes?

The inputs of Metis [Um et al., USENIX ATC 2024], checked, with sums over layers from left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from madmax_lib.planner.hetero.nodes import Node, load_cluster
from madmax_lib.planner.hetero.profiles import LayerProfile, Profiles, load_profiles, plain_sum

__all__ = ["MetisJob", "check_whole", "load_job", "order_of"]

_MOST_SLOTS = 9


def load_job(
    profiles: str | Path | Profiles,
    hostfile: str | Path | Sequence[Node],
    clusterfile: str | Path | None,
    *,
    model_profile: str | tuple[str, int, int] | None,
    **limits: int,
) -> tuple[MetisJob, tuple[Node, ...]]:
    """The job and the nodes; paths or what was loaded from them. limits: the other fields of MetisJob.

    Raises FileNotFoundError, or ValueError naming field and rule.
    """
    loaded = profiles if isinstance(profiles, Profiles) else load_profiles(profiles)
    if isinstance(hostfile, (str, Path)):
        if clusterfile is None:
            raise ValueError(f"hostfile={hostfile} needs a clusterfile")
        nodes = load_cluster(hostfile, clusterfile)
    else:
        nodes = tuple(hostfile)
    if missing := sorted({node.device for node in nodes} - set(loaded.devices)):
        raise ValueError(f"no profile for {missing[0]}; there are types {', '.join(loaded.devices)}")
    if large := [node for node in nodes if node.gpus > _MOST_SLOTS]:
        raise ValueError(f"{large[0].address} slots={large[0].gpus}: Metis reads one digit, at most 9 GPUs per node")
    return MetisJob(loaded, loaded.named(model_profile), **limits), nodes


def order_of(node_order: str | Sequence[str], nodes: Sequence[Node]) -> list[str]:
    """GPU types of "A100,V100" or a sequence; ValueError unless they are those of the nodes, each once."""
    order = node_order.split(",") if isinstance(node_order, str) else list(node_order)
    there = sorted({node.device for node in nodes})
    if sorted(order) != there:
        raise ValueError(f"node_order={','.join(order)} is not an order of the cluster's types {', '.join(there)}")
    return order


@dataclass(frozen=True)
class MetisJob:
    """What is trained, from which profiles, within which limits.

    profiles: of all GPU types, batches and degrees.
    model: the profile that gives parameters, optimizer and batch generator.
    layers, global_batch: of the model, ends included, and of a step.
    max_tp, max_bs: the largest degree and micro-batch of a replica.
    hidden, sequence, vocab: sizes of what stages send (4096, 1024, 51200).
    """

    profiles: Profiles = field(repr=False)
    model: LayerProfile = field(repr=False)
    layers: int
    global_batch: int
    max_tp: int
    max_bs: int
    hidden: int = 4096
    sequence: int = 1024
    vocab: int = 51200
    _tables: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in ("layers", "global_batch", "max_tp", "max_bs", "hidden", "sequence", "vocab"):
            check_whole(name, getattr(self, name))
        if self.layers != self.profiles.layers:
            raise ValueError(f"layers={self.layers}, but the profiles have {self.profiles.layers} layers")
        if self.layers < 3:
            raise ValueError(f"layers={self.layers}: Metis needs a first, a last and at least one middle layer")

    @cached_property
    def demand(self) -> list[float]:
        """Share of each layer (layers,) in the time of the model on one GPU of the model profile's type."""
        times = self.profiles.get(self.model.device, 1, 1).layer_ms
        total = plain_sum(times)
        return [value / total for value in times]

    @cached_property
    def parameters_bytes(self) -> list[list[float]]:
        """Bytes of layers x to y at [x][y]: the first and the last layer's own, the second's for all others."""
        first, middle, *_, last = self.model.parameters_bytes
        bounds = range(self.layers + 1)

        def between(x: int, y: int) -> float:
            has_first, has_last = x == 0, y == self.layers
            return has_first * first + has_last * last + middle * (y - x - has_first - has_last)

        return [[between(x, y) for y in bounds] for x in bounds]

    def slices(self, what: str, device: str, tp: int, batch: int) -> list[list[float]]:
        """Sums of layer_ms or memory_mb over layers x to y, at [x][y - x]."""
        key = (what, device, tp, batch)
        if key not in self._tables:
            values = getattr(self.profiles.get(device, tp, batch), what)
            self._tables[key] = [list(accumulate(values[x:], initial=0)) for x in range(self.layers + 1)]
        return self._tables[key]

    def full_ms(self, device: str, tp: int, batch: int) -> float:
        """Time of all layers."""
        return self.slices("layer_ms", device, tp, batch)[0][-1]


def check_whole(name: str, value: float) -> None:
    """ValueError unless the value is a whole number above 0."""
    if not (value > 0 and value == int(value)):
        raise ValueError(f"{name}={value!r} must be a whole number above 0")
