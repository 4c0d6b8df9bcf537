"""What does a layer cost on a GPU type, and which GPUs stand where? The two inputs of heterogeneous planning.

`PriceList` holds times and memory of every layer by (GPU type, tp, recompute, batch): from profiles in Metis' format
here, from the workbench's own simulator in `planner.hetero.model`. A `Fleet` is a cluster in one order of its types:
ranks run through all GPUs of the first type, node by node, then the second. Times and sizes of the files are converted
here: all that follows computes in seconds and bytes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from madmax_lib.planner.hetero.nodes import GB_BYTES, GB_PER_S, Node
from madmax_lib.planner.hetero.profiles import Profiles

__all__ = ["MB_BYTES", "Fleet", "Price", "PriceList", "between", "bits", "fleets", "prices_of"]

MB_BYTES = 2.0**20  # a MB of memory tables


@dataclass(frozen=True, eq=False)
class Price:
    """One (GPU type, tp, recompute, batch); arrays have an entry per layer, memory is that of one GPU."""

    layer_s: np.ndarray  # forward and backward pass of a micro-batch
    memory_bytes: np.ndarray  # held all the time
    live_bytes: np.ndarray  # held for each micro-batch between its forward and backward pass
    sync_s: float = 0.0  # forward and backward time outside of the layers
    generator_s: float = 0.0  # loading of a micro-batch
    base_bytes: float = 0.0  # held whatever the layers


@dataclass(frozen=True, eq=False)
class PriceList:
    """What layers cost on every GPU type."""

    table: Mapping[tuple[str, int, str, int], Price]  # prices by (GPU type, tp, recompute, batch)
    parameters_bytes: np.ndarray  # (layers,), whole, as the gradient all-reduce sends them
    optimizer_s: Mapping[str, float]  # update of the whole model on one GPU, by type
    ways: tuple[tuple[int, str], ...] = field(init=False)  # the (tp, recompute) with a price on some type, in order

    def __post_init__(self):
        object.__setattr__(self, "ways", tuple(sorted({(tp, recompute) for _, tp, recompute, _ in self.table})))

    @property
    def layers(self) -> int:
        """Layers, with embedding and head."""
        return len(self.parameters_bytes)

    def get(self, device: str, tp: int, recompute: str, batch: int) -> Price:
        """The price of a key; ValueError naming what is missing."""
        if price := self.table.get((device, tp, recompute, batch)):
            return price
        more = "" if recompute == "none" else f" with recompute={recompute}"
        raise ValueError(f"no profile for {device} tp {tp} batch {batch}{more}; there are {self.covered(device)}")

    def covered(self, device: str) -> str:
        """Degrees and batches of a GPU type that have a price, as text."""
        keys = [(tp, batch) for name, tp, _, batch in self.table if name == device]
        degrees, batches = (", ".join(map(str, sorted(set(values)))) for values in zip(*keys, strict=True))
        return f"tp {degrees}; batch {batches}"


def prices_of(profiles: Profiles) -> PriceList:
    """Prices of profiles in Metis' format: memory as the table has it, nothing recomputed.

    The optimizer's time is stored as one of two updates and falls with tp; the smallest degree is scaled to one GPU.
    """
    table, optimizer_s = {}, {}
    for (device, tp, batch), profile in sorted(profiles.table.items()):
        memory_bytes = np.array(profile.memory_mb) * MB_BYTES
        table[device, tp, "none", batch] = Price(
            layer_s=np.array(profile.layer_ms) / 1e3,
            memory_bytes=memory_bytes,
            live_bytes=np.zeros_like(memory_bytes),
            sync_s=profile.sync_ms / 1e3,
            generator_s=profile.batch_generator_ms / 1e3,
        )
        optimizer_s.setdefault(device, 2 * profile.optimizer_ms * tp / 1e3)
    return PriceList(table, np.array(profiles.named(None).parameters_bytes, float), optimizer_s)


@dataclass(frozen=True, eq=False)
class Fleet:
    """A cluster in one order of its GPU types."""

    types: tuple[str, ...]  # their names, in order
    ends: np.ndarray  # (types,) rank after the last of each type
    bounds: np.ndarray  # ranks at which a node begins, and the number of GPUs
    capacity_bytes: np.ndarray  # (types,) memory of a GPU
    intra_bytes_per_s: np.ndarray  # (types,) bandwidth inside a node
    inter_bytes_per_s: np.ndarray  # (types,) bandwidth beyond it

    @property
    def size(self) -> int:
        """GPUs."""
        return int(self.ends[-1])

    def type_of(self, rank):
        """Number of the type of a rank."""
        return np.searchsorted(self.ends, rank, side="right")

    def node_of(self, rank):
        """Number of the node of a rank."""
        return np.searchsorted(self.bounds, rank, side="right") - 1

    def in_one_node(self, start, end):
        """Whether ranks start..end-1 lie in one node."""
        return self.node_of(start) == self.node_of(np.asarray(end) - 1)


def fleets(nodes: Iterable[Node]) -> list[Fleet]:
    """The cluster in every order of its types, the alphabetical one first, so that ties do not hang on a file's order.

    Raises ValueError where nodes of one type differ in memory or bandwidth: such a type is two.
    """
    by_type: dict[str, list[Node]] = {}
    for node in nodes:
        alike = by_type.setdefault(node.device, [])
        alike.append(node)
        for name in ("memory_gb", "intra_gb_per_s", "inter_gb_per_s"):
            one, other = getattr(alike[0], name), getattr(node, name)
            if one != other:
                raise ValueError(f"nodes of type {node.device} have {name}={one:g} and {other:g}: that makes two types")
    return [_fleet([by_type[name] for name in order]) for order in permutations(sorted(by_type))]


def _fleet(groups: list[list[Node]]) -> Fleet:
    sizes = [node.gpus for group in groups for node in group]
    first = [group[0] for group in groups]
    return Fleet(
        types=tuple(node.device for node in first),
        ends=np.cumsum([sum(node.gpus for node in group) for group in groups]),
        bounds=np.cumsum([0, *sizes]),
        capacity_bytes=np.array([node.memory_gb for node in first]) * GB_BYTES,
        intra_bytes_per_s=np.array([node.intra_gb_per_s for node in first]) * GB_PER_S,
        inter_bytes_per_s=np.array([node.inter_gb_per_s for node in first]) * GB_PER_S,
    )


def between(values: np.ndarray, extreme: Callable) -> np.ndarray:
    """(types, types, ...) the least or largest of the values of types i to j, in either order; extreme: np.min, np.max.

    >>> between(np.array([3, 1, 2]), np.max).tolist()
    [[3, 3, 3], [3, 1, 2], [3, 2, 2]]
    """
    types = range(len(values))
    return np.array([[extreme(values[min(i, j) : max(i, j) + 1], axis=0) for j in types] for i in types])


def bits(samples: int) -> list[int]:
    """Powers of two that add up to a number of samples, the largest first.

    >>> bits(11)
    [8, 2, 1]
    """
    return [1 << k for k in reversed(range(samples.bit_length())) if samples >> k & 1]
