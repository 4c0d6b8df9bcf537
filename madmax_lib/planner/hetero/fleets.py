"""A cluster in one order of its nodes: which GPUs stand where, and how fast those of a
plan reach each other.

Ranks run through the GPUs node by node. Nodes of one type that follow each other are a
run: with the nodes of each type together there are as many runs as types, else a type
has several.

Inputs of heterogeneous planning, read and checked once: layers and their prices,
GPUs, rules.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, permutations
from math import factorial, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from madmax_lib import catalog
from madmax_lib.base import require_int, require_type
from madmax_lib.catalog import Cluster, Model
from madmax_lib.plan import Case, Plan
from madmax_lib.planner.hetero.model import nodes_of, simulated_prices
from madmax_lib.planner.hetero.nodes import Node, load_cluster
from madmax_lib.planner.hetero.prices import PriceList, prices_of
from madmax_lib.planner.hetero.profiles import Profiles, load_profiles
from madmax_lib.simulator.memory.states import width_of

_EVERY_ORDER = 24  # orders of nodes up to which all are tried: those of four types
# fields of a Node that are equal in a type
_OF_TYPE = (
    "memory_bytes",
    "intra_bytes_per_s",
    "inter_bytes_per_s",
    "sharing",
    "intra_s",
    "inter_s",
)


class Span(NamedTuple):
    """The runs over which a stage is laid, or arrays of them for many stages."""

    low: int | np.ndarray  # number of its first run
    high: int | np.ndarray  # and of its last
    gpus: int | np.ndarray  # its GPUs


@dataclass(frozen=True, eq=False)
class Fleet:
    """A cluster in one order of its nodes. Arrays have an entry per run of equal nodes."""

    nodes: tuple[Node, ...]

    @cached_property
    def runs(self) -> list[list[Node]]:
        """Nodes of one type that follow each other."""
        return [
            list(run)
            for _, run in groupby(self.nodes, lambda node: (node.device, *_kind(node)))
        ]

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Type of each run."""
        return tuple(run[0].device for run in self.runs)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The order as a plan names it: that of the types where the nodes of each are
        together, else type by node.
        """
        together = len(set(self.types)) == len(self.types)
        return self.types if together else tuple(node.device for node in self.nodes)

    @cached_property
    def ends(self) -> np.ndarray:
        """Rank after the last of each run."""
        return np.cumsum([sum(node.gpus for node in run) for run in self.runs])

    @cached_property
    def bounds(self) -> np.ndarray:
        """Ranks at which a node begins, and the number of GPUs."""
        return np.cumsum([0, *(node.gpus for node in self.nodes)])

    @property
    def size(self) -> int:
        """GPUs."""
        return int(self.ends[-1])

    def type_of(self, rank):
        """Number of the run of a rank."""
        # side="right": a rank that a run ends before belongs to the next one
        return np.searchsorted(self.ends, rank, side="right")

    def node_of(self, rank):
        """Number of the node of a rank."""
        return np.searchsorted(self.bounds, rank, side="right") - 1

    def in_one_node(self, start, end):
        """Whether ranks start..end-1 lie in one node."""
        return self.node_of(start) == self.node_of(np.asarray(end) - 1)

    def of_runs(self, name: str) -> np.ndarray:
        """A field of the nodes of each run, the least where they differ."""
        return np.array([min(getattr(node, name) for node in run) for run in self.runs])

    @cached_property
    def least(self) -> dict[str, np.ndarray]:
        """(runs, runs) the least of some fields of the nodes of runs i to j."""
        return {
            name: between(self.of_runs(name), np.min)
            for name in ("intra_bytes_per_s", "inter_bytes_per_s", "gpus")
        }

    @cached_property
    def _sharing(self):
        return self.of_runs("sharing")

    def send_s(self, size_bytes, span: Span, tp, inside, inter_bytes_per_s=np.inf):
        """Seconds in which a replica of tp ranks passes its activations to the next
        stage.

        span: of its stage; inside: whether both stages lie in one node;
        inter_bytes_per_s: of the other stage. Each rank sends its part. GPUs that share
        a port have it to themselves where the stage has no other in their node.
        """
        low, high, gpus = span
        sharing = self._sharing[low]
        # port of `sharing` GPUs, of which the stage has at most `gpus`: each gets a
        # larger part than the one that `inter_bytes_per_s` counts
        solo_factor = np.maximum(sharing / np.clip(gpus, 1, np.maximum(sharing, 1)), 1)
        far_rate = solo_factor * np.minimum(
            inter_bytes_per_s, self.least["inter_bytes_per_s"][low, high]
        )
        near_rate = self.least["intra_bytes_per_s"][low, low]
        # Metis' bandwidths (sharing 0) are what any group of GPUs gets, not each GPU
        senders = np.where(sharing > 0, tp, 1)
        rate = senders * np.where(inside, near_rate, far_rate)
        latency_s = np.where(
            inside, self.of_runs("intra_s")[low], self.of_runs("inter_s").max()
        )
        return latency_s + size_bytes / rate

    def ring_s(self, span: Span, tp, inside):
        """Seconds per byte of a ring of the replicas of a stage; as many as a node
        holds share what it has.
        """
        low, high, gpus = span
        in_node = np.maximum(np.minimum(gpus, self.least["gpus"][low, high]) // tp, 1)
        in_node = np.where(self._sharing[low] > 0, in_node, 1)
        near = 1 / self.least["intra_bytes_per_s"][low, high]
        far = 1 / self.least["inter_bytes_per_s"][low, high]
        # A ring that leaves the node is as slow as the slower of its links: those
        # inside, if it has any, and the node's ports, one per replica in it.
        return np.where(inside, near, np.maximum((in_node > 1) * near, far / in_node))

    def ends_s(self, size_bytes, gpus, tp):
        """Seconds in which each rank of the last stage, of so many GPUs, reduces a
        table with its mate in the first.
        """
        everything = Span(0, len(self.types) - 1, gpus)
        return self.send_s(size_bytes, everything, tp, self.in_one_node(0, self.size))


def fleets(nodes: Iterable[Node]) -> list[Fleet]:
    """The cluster in every order of its nodes where they are few, else of its types.

    The alphabetical order comes first, so that ties do not hang on a file's order.
    Raises ValueError where nodes of one type differ in memory or links: such a type is
    two.
    """
    first = {}
    for node in nodes:
        earlier = first.setdefault(node.device, node)
        for name, one, other in zip(_OF_TYPE, _kind(earlier), _kind(node), strict=True):
            if one != other:
                raise ValueError(
                    f"nodes of type {node.device} have {name}={one:g} and {other:g}: "
                    "that makes two types"
                )
    counts = Counter(node.device for node in nodes)
    # multinomial: n! / (n_1! n_2! ...), nodes of a type being alike
    number = factorial(counts.total()) // prod(map(factorial, counts.values()))
    every = number <= _EVERY_ORDER
    orders = _orders(counts) if every else permutations(sorted(counts))
    return [fleet_of(nodes, order) for order in orders]


def fleet_of(nodes: Sequence[Node], order: Sequence[str]) -> Fleet:
    """The cluster in an order of its types, or of its nodes by their types. Raises
    ValueError for any other.

    >>> nodes = [Node(str(number), name, 4, 16e9, 1e9, 1e9) for number, name in enumerate("AABC")]
    >>> "".join(node.address for node in fleet_of(nodes, ("B", "C", "A")).nodes)
    '2301'
    >>> fleet_of(nodes, ("A", "C", "A", "B")).types
    ('A', 'C', 'A', 'B')
    """
    by_type = {}
    for node in nodes:
        by_type.setdefault(node.device, []).append(node)
    if sorted(order) == sorted(by_type):
        return Fleet(tuple(node for name in order for node in by_type[name]))
    if sorted(order) != sorted(node.device for node in nodes):
        raise ValueError(
            f"node_sequence {', '.join(order)} is not an order of "
            f"{', '.join(sorted(by_type))}"
        )
    # nodes of a type in the order of the file, one each time their type comes up
    left = {name: iter(group) for name, group in by_type.items()}
    return Fleet(tuple(next(left[name]) for name in order))


def between(values: np.ndarray, extreme: Callable) -> np.ndarray:
    """(types, types, ...) the least or largest of the values of types i to j, in either
    order; extreme: np.min, np.max.

    >>> between(np.array([3, 1, 2]), np.max).tolist()
    [[3, 3, 3], [3, 1, 2], [3, 2, 2]]
    """
    types = range(len(values))

    def of_types(i, j):
        return extreme(values[min(i, j) : max(i, j) + 1], axis=0)

    return np.array([[of_types(i, j) for j in types] for i in types])


def _kind(node):
    return tuple(getattr(node, name) for name in _OF_TYPE)


def _orders(counts):
    """All distinct orders of so many nodes of each type, the alphabetical one first."""
    if not counts.total():
        yield ()
    for name in sorted(+counts):  # unary plus drops types that are used up
        yield from ((name, *rest) for rest in _orders(counts - Counter([name])))


_OF_MODEL = ("dtype", "recompute", "parameters")  # inputs beside a model alone


@dataclass(frozen=True)
class CostRules:
    """Rules of what a plan is charged for.

    global_batch: samples of a step.
    hidden, sequence: elements of an activation per token, and tokens of a sample (4096
    and 1024).
    bytes_per_element: of an activation sent between stages (2).
    memory_factor: bytes needed per byte of the prices (1); 0 is no limit.
    tp_in_node: whether the GPUs of a replica must lie in one node (False).
    """

    global_batch: int
    hidden: int = 4096
    sequence: int = 1024
    bytes_per_element: float = 2.0
    memory_factor: float = 1.0
    tp_in_node: bool = False

    def __post_init__(self):
        for name in ("global_batch", "hidden", "sequence", "bytes_per_element"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.memory_factor >= 0:
            raise ValueError(f"memory_factor={self.memory_factor} must not be negative")

    @property
    def sample_bytes(self) -> float:
        """Activations of one sample between two stages."""
        return self.sequence * self.hidden * self.bytes_per_element


@dataclass(frozen=True, eq=False)
class HeteroProblem:
    """Input of `plan` and `cost`."""

    prices: PriceList
    nodes: tuple[Node, ...]
    fleets: tuple[Fleet, ...]  # the cluster in all orders that are tried
    rules: CostRules

    def fleet(self, order: Sequence[str]) -> Fleet:
        """The cluster in one order of its types, or of its nodes by type. Raises
        ValueError for others.
        """
        for fleet in self.fleets:  # their arrays may be worked out already
            if fleet.order == tuple(order):
                return fleet
        return fleet_of(self.nodes, order)

    def spaces(self) -> list[tuple[int, Fleet]]:
        """Every number of micro-batches that divides the batch, ascending, with every
        order of types or nodes.
        """
        batch = self.rules.global_batch
        counts = [count for count in range(1, batch + 1) if batch % count == 0]
        return [(count, fleet) for count in counts for fleet in self.fleets]


def problem_from(stated: HeteroProblem | None, inputs: dict) -> HeteroProblem:
    """The stated problem, or that of inputs. Raises ValueError for both."""
    if stated is None:
        return problem(**inputs)
    if inputs:
        raise ValueError(
            f"{next(iter(inputs))} is part of the given problem; give only one of them"
        )
    return require_type("problem", stated, HeteroProblem)


def problem(
    *,
    profiles: Profiles | str | Path | None = None,
    model: Model | str | None = None,
    hostfile: str | Path | None = None,
    clusterfile: str | Path | None = None,
    cluster: Cluster | str | Sequence[Cluster | Node | str] | None = None,
    layers: int | None = None,
    global_batch: int,
    **rules,
) -> HeteroProblem:
    """The inputs of `plan` and `cost`; models and clusters may be names of the catalog.

    profiles (a folder or `Profiles`) or model: where prices come from. hostfile and
    clusterfile, or cluster (a Cluster, several, or nodes, these with profiles): the
    GPUs, all of which are used. layers: with embedding and head; all there are if None.
    rules: fields of `CostRules`, for a model tp_in_node by default; and for a model
    recompute (none and full by default, chosen per stage), dtype and parameters. Raises
    ValueError for bad input, OSError for files.
    """
    if (profiles is None) == (model is None):
        raise ValueError("give either profiles or model")
    files = [one is not None for one in (hostfile, clusterfile)]
    if any(files) != all(files) or (cluster is None) != all(files):
        raise ValueError("give either hostfile and clusterfile, or cluster")
    _check_names(rules, with_model=model is not None)
    global_batch = require_int("global_batch", global_batch, 1)
    members = _members(cluster)
    clusters = [member for member in members if isinstance(member, Cluster)]
    if clusters:
        nodes = nodes_of(clusters, rules.get("parameters"))
    elif cluster is None:
        nodes = load_cluster(hostfile, clusterfile)
    else:
        nodes = tuple(members)
    if profiles is not None:
        if not isinstance(profiles, Profiles):
            profiles = load_profiles(profiles)
        prices = prices_of(profiles)
    else:
        if not clusters:
            raise ValueError("model goes with clusters; nodes and files with profiles")
        prices, rules = _simulated(model, clusters, global_batch, rules)
    checked_rules = CostRules(global_batch, **rules)
    if layers is not None and layers != prices.layers:
        raise ValueError(
            f"layers={layers}, but there are prices for {prices.layers} layers, ends "
            "included"
        )
    orders = tuple(fleets(nodes))
    for name in orders[0].types:
        if name not in prices.optimizer_s:
            raise ValueError(
                f"no profile for {name}; there are {', '.join(prices.optimizer_s)}"
            )
    return HeteroProblem(prices, tuple(nodes), orders, checked_rules)


def _simulated(model, clusters, global_batch, rules):
    """Prices of a model on the clusters, and the rules beside those that it decides."""
    model = catalog.model(model)
    hidden = getattr(model, "hidden", None)
    if rules.get("hidden", hidden) != hidden:
        raise ValueError(
            f"hidden={rules['hidden']} is not that of {model.name}, {hidden}"
        )
    options = {name: rules.pop(name) for name in _OF_MODEL if name in rules}
    types = {one.device.name: one for one in clusters}
    dtype = options.pop("dtype", "bf16")
    sequence = rules.pop("sequence", None)
    case = Case(model, None, Plan(), global_batch, sequence, dtype)
    prices = simulated_prices(case, types, **options)
    # simulated groups of tp are those of a node, as their prices
    usual = {
        "hidden": hidden,
        "sequence": case.sequence,
        "bytes_per_element": width_of(case.dtype),
        "tp_in_node": True,
    }
    return prices, usual | rules


def _check_names(rules, with_model):
    """Raises ValueError for an input that does not exist, or only beside a model."""
    names = {*CostRules.__dataclass_fields__}
    if with_model:
        names.update(_OF_MODEL)
    for name in sorted(rules.keys() - names):
        if name in _OF_MODEL:
            raise ValueError(f"{name}: not an input of profiles")
        raise ValueError(f"no input {name}")


def _members(cluster):
    """Clusters and nodes of the argument, those with names read from the catalog."""
    if cluster is None:
        return []
    if isinstance(cluster, (Cluster, str)):
        return [catalog.cluster(cluster)]
    listed = require_type("cluster", cluster, Sequence | None)
    if not listed:
        raise ValueError("cluster=[] names no cluster or node")
    return [one if isinstance(one, Node) else catalog.cluster(one) for one in listed]
