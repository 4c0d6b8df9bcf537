"""Inputs of Metis [Um et al., USENIX ATC 2024], checked: model, batch, limits, profiles
and nodes, with sums over layers from left to right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate

from madmax_lib.base.fields import require_int
from madmax_lib.planner.hetero import Node
from madmax_lib.planner.hetero.profiles import LayerProfile, Profiles, plain_sum

_MOST_SLOTS = 9


@dataclass(frozen=True)
class MetisJob:
    """Model, profiles, nodes and limits of a search.

    Raises ValueError for values outside of the rules and GPU types without a profile.
    """

    profiles: Profiles = field(repr=False)  # of all GPU types, batches and degrees
    # the profile that gives parameters, optimizer and batch generator
    model: LayerProfile = field(repr=False)
    nodes: tuple[Node, ...]  # in the order of the host file
    order: tuple[str, ...]  # GPU types in the order enumerated first
    layers: int  # of the model, ends included
    global_batch: int  # samples of a step
    max_tp: int  # the largest degree of a replica
    max_bs: int  # its largest micro-batch
    max_permute_len: int  # groups of stages that are permuted as wholes
    variance: float  # smallest stage over the mean size
    hidden: int  # these three of what a pipeline stage sends
    sequence: int
    vocab: int
    _slices: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        for number in fields(self):
            if number.type is int:
                require_int(number.name, getattr(self, number.name), least=1)
        if not self.variance > 0:
            raise ValueError(f"variance={self.variance!r} must be above 0")
        if self.layers != self.profiles.layers:
            raise ValueError(
                f"layers={self.layers}, but the profiles have {self.profiles.layers} "
                "layers"
            )
        if self.layers < 3:
            raise ValueError(
                f"layers={self.layers}: Metis needs a first, a last and at least one "
                "middle layer"
            )
        types = sorted({node.device for node in self.nodes})
        profiled = self.profiles.devices
        if missing := [device for device in types if device not in profiled]:
            raise ValueError(
                f"no profile for {missing[0]}; there are types {', '.join(profiled)}"
            )
        if sorted(self.order) != types:
            raise ValueError(
                f"node_order={','.join(self.order)} is not an order of the cluster's "
                f"types {', '.join(types)}"
            )
        for node in self.nodes:
            if node.gpus > _MOST_SLOTS:
                raise ValueError(
                    f"{node.address} slots={node.gpus}: Metis reads one digit, at "
                    "most 9 GPUs per node"
                )

    @cached_property
    def demand(self) -> list[float]:
        """Share of each layer (layers,) in the time of the model on one GPU of the
        model profile's type.
        """
        times = self.profiles.get(self.model.device, 1, 1).layer_ms
        total = plain_sum(times)
        return [value / total for value in times]

    @cached_property
    def parameters_bytes(self) -> list[list[float]]:
        """Bytes of layers x to y at [x][y]: the first and the last layer's own, the
        second's for all others.
        """
        first, middle, *_, last = self.model.parameters_bytes
        bounds = range(self.layers + 1)
        # A slice that begins at 0 has the first layer, one that ends at L the last one;
        # (x == 0) and (y == L) count as 0 or 1.
        return [
            [
                (x == 0) * first
                + (y == self.layers) * last
                + middle * (y - x - (x == 0) - (y == self.layers))
                for y in bounds
            ]
            for x in bounds
        ]

    def slices(self, what: str, device: str, tp: int, batch: int) -> list[list[float]]:
        """`layer_sums` of layer_ms or memory_mb."""
        key = (what, device, tp, batch)
        if key not in self._slices:
            profile = self.profiles.get(device, tp, batch)
            self._slices[key] = layer_sums(getattr(profile, what))
        return self._slices[key]

    def full_ms(self, device: str, tp: int, batch: int) -> float:
        """Time of all layers."""
        return self.slices("layer_ms", device, tp, batch)[0][-1]


def layer_sums(values: Sequence[float]) -> list[list[float]]:
    """Sums of the values from x to y, from left to right, at [x][y - x].

    >>> layer_sums([1, 2, 4])
    [[0, 1, 3, 7], [0, 2, 6], [0, 4], [0]]
    """
    # not differences of one prefix sum: those round differently in the last bit
    return [list(accumulate(values[x:], initial=0)) for x in range(len(values) + 1)]
